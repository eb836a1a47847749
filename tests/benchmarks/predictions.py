"""Predict with 04-fsdp/memory.py the peaks that were measured in other result files.

python tests/benchmarks/predictions.py    writes the predictions if they changed

Each row of results/predictions.json names the model and the options; rows of fsdp_*.json also the
number of parameters.
"""

import copy
import json
import sys
from pathlib import Path

from machine import RESULTS, write_result
from transformers import AutoConfig

from common.inputs.models import load_config

sys.path.append(str(Path(__file__).parents[2] / "04-fsdp"))
from peak_memory import Options, predict

FILE = RESULTS / "predictions.json"


def predict_all(known: dict[str, dict]) -> dict[str, dict]:
    """Return the rows of the file with the peaks that are predicted now."""
    known, caches = copy.deepcopy(known), {}
    for row in (row for rows in known.values() for row in rows.values()):
        if "model_type" in row["sizes"]:
            config = AutoConfig.for_model(**row["sizes"])
        else:
            config = load_config(row["model"])
            config.update(row["sizes"])
        cache = caches.setdefault(str(config), {})
        found = predict(config, Options(**row["options"]), cache)
        row["peak_gib"] = round(found["peak"] / 2**30, 3)
    return known


def main() -> None:
    known = json.loads(FILE.read_text())["results"]
    if (found := predict_all(known)) != known:
        write_result(FILE, found)


if __name__ == "__main__":
    main()

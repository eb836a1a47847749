"""Predict with 04-fsdp/memory.py the peaks of the rows of measure.py, and those of one scenario.

python tests/benchmarks/predictions.py    writes results/predictions.json if it changed

The scenario is the one that all pages use: Llama 3.1 8B, compiled, with one sequence of 8,192
tokens on each of four GPUs.
"""

import json
import shlex
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

from machine import RESULTS
from measure import FULL, MODELS, ROWS, WEIGHTS, Row

from common.inputs.models import load_config

sys.path.append(str(Path(__file__).parents[2] / "04-fsdp"))
from memory import SETUPS

from peak_memory import Options, predict

FILE = RESULTS / "predictions.json"
SCENARIO = Options(gpus=4, seq_length=8192, batch_size=1, compile=True)


def options_of(row: Row) -> Options | None:
    """Return what memory.py is asked for a row; None if it does not predict such a run."""
    names, words = row.variants.split(), shlex.split(row.flags)
    given = dict(pairwise(words))
    unknown = {"autocast", "data-parallel", "tensor-parallel", "async-checkpoint"}
    unknown |= {"chunked-loss", "lora", "muon"}
    if unknown.intersection(names) or "--ulysses" in words or row.change:
        return None
    sharding = {1: "none", 2: "ddp", 3: "ddp"}.get(row.chapter, "fsdp")
    recomputation = "selective" if "selective-recomputation" in names else "none"
    precision = given.get("--precision", "bf16") if row.chapter == 5 else "tf32"
    shared = int(given.get("--context-parallel", 1))
    share = int(given["--global-batch-size"]) * shared // row.gpus
    micro_batch = min(share, int(given["-b"]))
    return Options(
        sharding="zero1" if "zero1" in names else sharding,
        gpus=row.gpus,
        gpus_per_node=row.gpus // row.nodes,
        batch_size=micro_batch,
        seq_length=int(given["-s"]),
        accumulation=share // micro_batch,
        param_dtype="bfloat16" if "pure-bfloat16" in names else "float32",
        precision="bf16" if precision == "bf16" else "tf32",
        activation_checkpointing="full" if FULL in words else recomputation,
        reshard_after_forward="zero2" not in names,
        reduce_every_backward="reduce-every-backward" in names,
        hsdp="hsdp" in names,
        cpu_offload="cpu-offload" in names,
        compile="--compile" in words,
        context_parallel=shared,
    )


def config_of(row: Row):
    name = dict(pairwise(shlex.split(row.flags)))["-m"].removeprefix("FOLDER/")
    name = WEIGHTS.get(name, name)
    config = load_config("llama-3.1-8b" if name in MODELS else name)
    config.update(MODELS.get(name, {}))
    return config


def predict_all() -> dict[str, dict]:
    """Return the predicted peaks: of rows by label, and of the scenario by setup."""
    found, caches = {"rows": {}, "scenario": {}}, {}
    for label, row in ROWS.items():
        if options := options_of(row):
            config = config_of(row)
            cache = caches.setdefault(str(config), {})
            peak = predict(config, options, cache)["peak"]
            changed = {k: v for k, v in asdict(options).items() if v != getattr(Options(), k)}
            found["rows"][label] = {"options": changed, "peak_gib": round(peak / 2**30, 3)}
    config = load_config("llama-3.1-8b")
    cache = caches.setdefault(str(config), {})
    for name, setup in SETUPS.items():
        predicted = predict(config, replace(SCENARIO, **setup), cache)
        found["scenario"][name] = {
            key: round(predicted[key] / 2**30, 3)
            for key in ("parameters", "gradients", "moments", "peak")
        }
    return found


def main() -> None:
    found = predict_all()
    if not FILE.exists() or json.loads(FILE.read_text()) != found:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {FILE}")


if __name__ == "__main__":
    main()

"""What 04-fsdp/memory.py predicts for every row of the result files fsdp_*.json.

python tests/benchmarks/predictions.py --output tests/benchmarks/results/predictions.json

The options are those of the row's command, read as the chapter reads it, and of its GPUs.
"""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

from fsdp import FSDP, REPOSITORY
from machine import RESULTS, write_result
from runner import load_script
from transformers import PretrainedConfig

from common import models
from common.data import split_batch

memory = load_script(REPOSITORY / FSDP / "memory.py")
scripts = {}


def read_args(row: dict) -> argparse.Namespace:
    """Return the arguments of a row's command, with the defaults of its chapter."""
    # Some rows were measured with --prefetch, a flag that chapter 4 no longer has.
    script, *words = shlex.split(re.sub(r" --prefetch \d+", "", row["command"]))
    if script not in scripts:
        scripts[script] = load_script(REPOSITORY / script)
    with mock.patch.object(sys, "argv", [script, *words]):
        return scripts[script].get_args()


def options_of(row: dict) -> tuple[str, int | None, object]:
    """Return the preset of a row, its number of blocks if it is another one, memory.py's Options.

    A model in a folder is Llama 3.1 8B, or another preset that the row names. The folder shape-29
    has a model with 29 blocks.
    """
    args = read_args(row)
    folder = Path(args.model_name)
    name = "llama-3.1-8b" if folder.is_absolute() else args.model_name
    name = row.get("preset", name)
    blocks = row["blocks"] if folder.name.startswith("shape-") else None
    batch_size, accumulation = split_batch(args, row["gpus"], args.global_batch_size)
    if row["chapter"] == "03-multi-node":
        given = {"sharding": "zero1" if args.zero1 else "ddp"}
    else:
        same = ("reshard_after_forward", "reduce_every_backward", "hsdp", "cpu_offload")
        given = {key: getattr(args, key) for key in (*same, "activation_checkpointing")}
        given["sharding"] = "fsdp"
    if row["chapter"] == "05-mixed-precision":
        # fp16 has as many bytes as bf16, and what fp8 multiplies is kept in bf16.
        given["precision"] = "bf16" if args.precision in (None, "fp16", "fp8") else args.precision
    given |= {"batch_size": batch_size, "accumulation": accumulation}
    given |= {"gpus": row["gpus"], "gpus_per_node": row["gpus"] // (row.get("nodes") or 1)}
    seq_length = models.sequence_length(config_of(row, name), args.seq_length)
    given |= {"param_dtype": args.param_dtype, "compile": args.compile}
    options = memory.Options(seq_length=seq_length, **given)
    return name, blocks, options


def config_of(row: dict, name: str) -> PretrainedConfig:
    """Return the configuration of a preset in the row's shape."""
    config = models.load_config(name)
    for key, value in row.get("shape", {}).items():
        setattr(config, key, value)
    return config


def predict_rows(rows: list[dict], counted: dict) -> dict[str, dict]:
    """Return for each row's label the peak in GiB, when it occurs, and the number of parameters."""
    predicted = {}
    for row in rows:
        if row.get("blocks") == 0:
            continue  # nothing trained
        name, blocks, options = options_of(row)
        config = config_of(row, name)
        config.num_hidden_layers = blocks or config.num_hidden_layers
        known = counted.setdefault((name, blocks, json.dumps(row.get("shape"))), {})
        found = memory.predict(config, options, known)
        groups, _ = next(iter(known.values()))
        predicted[row["label"]] = {
            "peak_gib": round(found["peak"] / memory.GIB, 3),
            "fullest_at": list(found["peak_at"]),
            "parameters": sum(shape.numel() for group in groups for shape in group),
        }
    return predicted


def predict_all() -> dict[str, dict]:
    """Return the predictions for each of the result files."""
    counted = {}
    return {
        path.stem: predict_rows(json.loads(path.read_text())["results"]["rows"], counted)
        for path in sorted(RESULTS.glob("fsdp_*.json"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    write_result(args.output, predict_all())


if __name__ == "__main__":
    main()

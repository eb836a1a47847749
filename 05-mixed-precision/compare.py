"""Compare strategies and precisions: train the same model with the chapters' own scripts.

python 05-mixed-precision/compare.py

A row is a strategy in a precision, for example ddp:bf16. Chapter 1 trains `single`, chapter 2 `ddp`
and, with --zero1, `zero1`, and chapter 5 trains `fsdp`. Chapters 1 and 2 compute in float32, or in
TF32 on a GPU. For other precisions, autocast-01.diff or autocast-02.diff is applied to a temporary
copy of the script. Only chapter 5 has fp8.

All rows have the same model, initial weights, global batch, order of samples, steps, schedule and
threads per device. Each round has its own seed and trains every row once; every other round goes
through the rows backwards, so that no row always runs on a warm machine.

All numbers come from metrics.jsonl, which has a line for every WINDOW steps. Speeds and times are
medians of the lines. The first third of the lines is warm-up and is not counted. The peak memory is
that of rank 0: of its GPU, or of its process on a CPU.
"""

import argparse
import fnmatch
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from common import cli, launch, models
from common.cli import RunError, at_least
from common.data import load_sequences, split_batch

from machine_facts import describe_machine

REPOSITORY = Path(__file__).parents[1]
STRATEGIES = {  # the chapter and its flags
    "single": ("01-single-gpu", ()),
    "ddp": ("02-ddp", ()),
    "zero1": ("02-ddp", ("--zero1",)),
    "fsdp": ("05-mixed-precision", ()),
}
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "pure-bf16", "fp8")
PHASES = ("data", "forward", "backward", "update")
WINDOW = 5  # steps


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("rows").add_argument
    add("--only", nargs="+", default=["*:*"], help="rows, for example ddp:bf16 or 'fsdp:*'")
    add("--seeds", nargs="+", type=at_least(0), default=[0], help="one round per seed")
    add("--devices", type=at_least(1), help="number of ranks (default: all GPUs; on a CPU 2)")
    add("--output", type=Path, default="outputs/comparison.json", help="JSON file to write")
    add = parser.add_argument_group("data and model").add_argument
    add("-d", "--dataset-name", default="python-stdlib", help="preset, file, folder or hub id")
    add("-m", "--model-name", default="gpt2-tiny", help="preset, folder or hub id")
    add("-s", "--seq-length", default=32, type=at_least(2), help="tokens")
    add("--compile", action="store_true", help="use torch.compile")
    add = parser.add_argument_group("optimize").add_argument
    add("-b", "--batch-size", default=4, type=at_least(1), help="limit per device and micro-batch")
    add("--global-batch-size", default=8, type=at_least(1), help="sequences per step, all devices")
    add("--steps", default=30, type=at_least(2 * WINDOW), help="optimizer steps")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    rows = select_rows(args)
    prepare(args, max(row["devices"] for row in rows))
    results = {"settings": vars(args), "rows": rows}
    content = {"machine": describe_machine(), "results": results}
    with tempfile.TemporaryDirectory() as folder:
        for n, seed in enumerate(args.seeds):
            for row in rows[:: -1 if n % 2 else 1]:
                if not row["failed"]:
                    train(row, seed, args, Path(folder))
                    summarize(rows)
                    args.output.write_text(json.dumps(content, indent=1, default=str) + "\n")
    print(table(rows))
    print(f"wrote {args.output}")


def select_rows(args: argparse.Namespace) -> list[dict]:
    """Return the rows that --only names, as far as this machine has what they need."""
    gpus = torch.cuda.device_count()
    devices = args.devices or gpus or 2
    if 0 < gpus < devices:
        raise RunError(f"--devices {devices} is too many: PyTorch sees {gpus} GPUs.")
    rows = []
    for strategy, precision in itertools.product(STRATEGIES, PRECISIONS):
        selected = any(fnmatch.fnmatchcase(f"{strategy}:{precision}", each) for each in args.only)
        on_gpu = precision in ("tf32", "fp8")
        if selected and (gpus or not on_gpu) and (strategy == "fsdp" or precision != "fp8"):
            number = 1 if strategy == "single" else devices
            row = {"strategy": strategy, "precision": precision, "devices": number}
            rows.append(row | {"failed": None, "runs": [], "summary": {}})
    if not rows:
        raise RunError(
            f"--only {' '.join(args.only)} matches no row of this machine: give "
            f"STRATEGY:PRECISION, with a strategy of {', '.join(STRATEGIES)} and a precision of "
            f"{', '.join(PRECISIONS)} (tf32 and fp8 need a GPU; only fsdp has fp8)."
        )
    return rows


def prepare(args: argparse.Namespace, devices: int) -> None:
    """Check the arguments, and tokenize the data, which all trainings then read from a cache."""
    args.threads = max(1, launch.n_cores() // devices)
    args.dataset_subset, args.text_column = None, None
    tokenizer = models.load_tokenizer(args.model_name)
    models.sequence_length(models.load_config(args.model_name, tokenizer), args.seq_length)
    train_data, _ = load_sequences(args, tokenizer, args.seq_length)
    split_batch(args, devices, len(train_data))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    cli.check_output(args.output)


# --- one training ---


def train(row: dict, seed: int, args: argparse.Namespace, folder: Path) -> None:
    """Train once, and add the lines of metrics.jsonl to the row's runs."""
    name = f"{row['strategy']}-{row['precision']}-{seed}"
    print(f"training {name}", file=sys.stderr)
    words = [*command(row, args, folder), "--seed", str(seed), "--save-dir", folder, "-e", name]
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        row["failed"] = f"exit status {done.returncode}"
        return
    metrics = (folder / name / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in metrics.splitlines()]
    row["runs"].append({"seed": seed, "metrics": lines})
    shutil.rmtree(folder / name)


def command(row: dict, args: argparse.Namespace, folder: Path) -> list[str | Path]:
    """Return the command that trains a row; patched copies of scripts are in the folder."""
    chapter, flags = STRATEGIES[row["strategy"]]
    script = REPOSITORY / chapter / "train_llm.py"
    if row["precision"] == "pure-bf16":
        flags += ("--param-dtype", "bfloat16")
    elif row["strategy"] == "fsdp":
        flags += ("--precision", row["precision"])
    elif row["precision"] != ("tf32" if torch.cuda.device_count() else "fp32"):
        flags += ("--precision", row["precision"])
        script = patched(script, folder)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", row["devices"]]
    words = [sys.executable, *(launcher if row["strategy"] != "single" else []), script, *flags]
    words += ["-d", args.dataset_name, "-m", args.model_name, "-s", args.seq_length]
    words += ["-b", args.batch_size, "--global-batch-size", args.global_batch_size]
    words += ["--max-steps", args.steps, "--log-freq", WINDOW]
    words += ["--eval-freq", args.steps, "--eval-sequences", 1, "--ckpt-freq", args.steps]
    words += ["--compile"] if args.compile else []
    return [str(word) for word in words]


def patched(script: Path, folder: Path) -> Path:
    """Return a copy of a chapter's script that has --precision."""
    copy = folder / script.parent.name / script.name
    if not copy.exists():
        copy.parent.mkdir()
        shutil.copy(script, copy)
        diff = Path(__file__).absolute().parent / f"diffs/autocast-{script.parent.name[:2]}.diff"
        subprocess.run(["git", "apply", diff], cwd=folder, check=True)
    return copy


# --- the results ---


def summarize(rows: list[dict]) -> None:
    """Write a summary of its runs into each row."""
    reference = {}  # the last losses of single:fp32, the first row, by seed
    for row in (row for row in rows if row["runs"]):
        runs = [run["metrics"] for run in row["runs"]]
        counted = [lines[math.ceil(len(lines) / 3) :] for lines in runs]
        rounds = [statistics.median(line["tokens_per_s"] for line in lines) for lines in counted]
        lines = list(itertools.chain(*counted))
        losses = {run["seed"]: run["metrics"][-1]["loss"] for run in row["runs"]}
        if (row["strategy"], row["precision"]) == ("single", "fp32"):
            reference = losses
        row["summary"] = {
            "speed": {
                "tokens_per_s": statistics.median(rounds),
                "rounds": rounds,
                "ms": {p: statistics.median(line[f"time/{p}"] for line in lines) for p in PHASES},
                "mfu": lines[-1]["mfu"],
                "peak_mem_gib": max(line["peak_mem_gib"] for line in lines),
            },
            "final_loss": {"mean": statistics.mean(losses.values()), "by_seed": losses},
            "minus_fp32_on_one_device": [
                losses[n] - reference[n] for n in losses if n in reference
            ],
        }


def table(rows: list[dict]) -> str:
    """Return the table of the rows."""
    head = ("tokens/s", "slowest", "fastest", *PHASES, "GiB", "loss")
    lines = [" " * 20 + "".join(f"{title:>10}" for title in head) + "  loss - single fp32"]
    for row in rows:
        label = f"{row['strategy']} {row['precision']} x{row['devices']}"
        if row["summary"]:
            speed, loss = row["summary"]["speed"], row["summary"]["final_loss"]["mean"]
            cells = [speed["tokens_per_s"], min(speed["rounds"]), max(speed["rounds"])]
            cells = [f"{cell:,.0f}" for cell in cells]
            cells += [f"{ms:,.1f}" for ms in speed["ms"].values()]
            cells += [f"{speed['peak_mem_gib']:.1f}", f"{loss:.4f}"]
            differences = [f"{n:+.5f}" for n in row["summary"]["minus_fp32_on_one_device"]]
            cells = "".join(f"{cell:>10}" for cell in cells)
            lines.append(f"{label:20}{cells}  {' '.join(differences)}")
        if row["failed"]:
            lines.append(f"{label} failed with {row['failed']}: the log above says why")
    return "\n".join(lines)


if __name__ == "__main__":
    launch.run(main)

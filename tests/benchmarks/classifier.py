"""Tokens per second and test report of the classifier, for each kind of padding and both heads.

python tests/benchmarks/classifier.py --output tests/benchmarks/results/classifier_cpu.json

On GPUs it is GPT-2 with 124 million parameters on all of them, on a CPU gpt2-tiny in two processes.
tokens_per_s counts the tokens of texts, not those of the padding: more of them is less waste. All
rows train on the same examples, each in turn with the others, once in a round; the log lines of the
first steps are left out.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from machine import write_result

REPOSITORY = Path(__file__).parents[2]
WARM_UP = 10  # steps
ROWS = {
    "grouped": "",
    "dynamic": "--padding dynamic",
    "fixed": "--padding fixed",
    "no head": "--head none",
}
KEYS = ("tokens_per_s", "time/total", "peak_mem_gib")
ON_GPUS = "-m gpt2 -s 512 -b 64 --lr 1e-4 --log-freq 5"
ON_CPU = "--log-freq 5"


def command_of(row: str, devices: int, more: str) -> list[str]:
    """Return the command, without the interpreter and the run's folder."""
    gpus = torch.cuda.is_available()
    batch = f"--global-batch-size {64 * devices}" if gpus else ""
    arguments = f"{ON_GPUS if gpus else ON_CPU} {batch} {ROWS[row]} {more}"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
    return [*launcher, "02-ddp/train_classifier.py", *shlex.split(arguments)]


def train(command: list[str], devices: int) -> dict[str, object]:
    """Run the script once and return what it measured, and its test report."""
    threads = max(1, (os.cpu_count() or 1) // max(devices, torch.cuda.device_count()))
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*command, "--save-dir", folder, "-e", "run"]
        subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, env=environment, check=True)
        run_dir = Path(folder) / "run"
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        report = json.loads((run_dir / "test_report.json").read_text())
    counted = [line for line in lines if line["step"] > WARM_UP]
    epochs = [
        {key: line[key] for key in line if key.endswith(("_loss", "_accuracy"))}
        for line in lines
        if "eval_loss" in line
    ]
    return {
        **{key: statistics.median(line[key] for line in counted) for key in KEYS},
        "steps": lines[-1]["step"],
        "epochs": epochs,
        "report": report,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows")
    parser.add_argument("--devices", type=int, help="ranks (if absent: all GPUs; on a CPU 2)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each row, in turn")
    parser.add_argument("--args", default="", help="more arguments of the script, in quotes")
    args = parser.parse_args()
    devices = args.devices or torch.cuda.device_count() or 2
    rows = []
    for name in args.only:
        command = command_of(name, devices, args.args)
        rows.append({"row": name, "command": shlex.join(["python", *command]), "runs": []})
    results = {"devices": devices, "warm_up_steps": WARM_UP, "rows": rows}
    for _ in range(args.rounds):
        for row in rows:
            row["runs"].append(train(shlex.split(row["command"])[1:], devices))
            row["median"] = {
                key: statistics.median(run[key] for run in row["runs"]) for key in KEYS
            }
            write_result(args.output, results)  # each time: a later run may not end
    for row in rows:
        print(f"{row['row']:10s} {row['median']['tokens_per_s']:12,.0f} tokens/s")


if __name__ == "__main__":
    main()

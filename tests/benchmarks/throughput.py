"""Tokens per second of the chapters' own scripts, in a list of configurations.

python tests/benchmarks/throughput.py ddp-cpu --output tests/benchmarks/results/ddp_cpu.json

Every configuration runs several times, in turn with the others, so that what changes on the machine
meanwhile hits all of them. Of each run the log lines of the first steps are left out: compilation,
first allocations, and DDP's buckets, which are rebuilt after the first backward pass.
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
GPT2 = "-m gpt2 -s 1024 -b 64 --compile --lr 3e-4 --log-freq 5"


def scaling(chapters: dict[str, list[int]], args: str, batch: int) -> list[dict]:
    """Return configurations with the same batch on each device: chapter, numbers of devices."""
    return [
        {
            "label": f"{chapter} on {devices}",
            "chapter": chapter,
            "devices": devices,
            "args": f"{args} --global-batch-size {batch * devices}",
        }
        for chapter, numbers in chapters.items()
        for devices in numbers
    ]


ON_CPU = {"01-single-gpu": [1], "02-ddp": [1, 2]}
ON_GPUS = {"01-single-gpu": [1], "02-ddp": [1, 2, 4, 8]}
# By name: (configurations, steps in all, steps that are left out).
SETS = {
    "ddp-cpu": (scaling(ON_CPU, "--log-freq 10", 24), 90, 30),
    "ddp-gpu": (scaling(ON_GPUS, GPT2, 64), 40, 15),
    "ddp-gpu-accumulation": (scaling({"02-ddp": [1, 2, 4, 8]}, GPT2, 256), 20, 10),
}


def train(configuration: dict, steps: int, folder: Path) -> tuple[str, list[dict]]:
    """Run a chapter and return the command and its metrics."""
    devices = configuration["devices"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
    if configuration["chapter"].startswith("01"):
        launcher = []
    never = str(10**9)
    command = [
        *(*launcher, f"{configuration['chapter']}/train_llm.py"),
        *shlex.split(configuration["args"]),
        *("--max-steps", str(steps), "--eval-freq", never, "--ckpt-freq", never),
    ]
    threads = max(1, os.cpu_count() // devices)
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": str(threads)}
    subprocess.run(
        [sys.executable, *command, "--save-dir", str(folder), "-e", "run"],
        cwd=REPOSITORY,
        env=environment,
        check=True,
    )
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return shlex.join(["python", *command]), [json.loads(line) for line in lines]


def measure(configurations: list[dict], steps: int, warm_up: int, runs: int) -> list[dict]:
    """Return for each configuration the values of each run (a median over its log lines)."""
    rows = [{**configuration, "runs": []} for configuration in configurations]
    for _ in range(runs):
        for row in rows:
            with tempfile.TemporaryDirectory() as folder:
                row["command"], metrics = train(row, steps, Path(folder))
            counted = [line for line in metrics if line["step"] > warm_up and "loss" in line]
            keys = [key for key, value in counted[0].items() if isinstance(value, float)]
            values = {key: statistics.median(line[key] for line in counted) for key in keys}
            row["runs"].append({**values, "loss": counted[-1]["loss"]})
    for row in rows:
        row["median"] = {
            key: round(statistics.median(run[key] for run in row["runs"]), 6)
            for key in row["runs"][0]
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", choices=SETS, help="which configurations")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=3, help="runs of each, in turn")
    args = parser.parse_args()
    configurations, steps, warm_up = SETS[args.set]
    devices = torch.cuda.device_count() or os.cpu_count()
    possible = [each for each in configurations if each["devices"] <= devices]
    rows = measure(possible, steps, warm_up, args.runs)
    for row in rows:
        print(f"{row['label']:24s} {row['median']['tokens_per_s']:12,.0f} tokens/s")
    write_result(args.output, {"steps": steps, "warm_up_steps": warm_up, "rows": rows})


if __name__ == "__main__":
    main()

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
    "nodes-cpu": (scaling({"02-ddp": [2], "03-multi-node": [2]}, "--log-freq 10", 24), 90, 30),
    "fsdp-cpu": (scaling({"03-multi-node": [2], "04-fsdp": [2]}, "--log-freq 10", 24), 90, 30),
    "nodes-gpu": (scaling({"02-ddp": [4], "03-multi-node": [4]}, GPT2, 64), 40, 15),
    "ddp-gpu-accumulation": (scaling({"02-ddp": [1, 2, 4, 8]}, GPT2, 256), 20, 10),
}


def command_of(configuration: dict, steps: int) -> list[str]:
    """Return a chapter's command, without the interpreter and the run's folder."""
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(configuration["devices"])]
    if configuration["chapter"].startswith("01"):
        launcher = []
    never = str(10**9)
    return [
        *(*launcher, f"{configuration['chapter']}/train_llm.py"),
        *shlex.split(configuration["args"]),
        *("--max-steps", str(steps), "--eval-freq", never, "--ckpt-freq", never),
    ]


def train(group: list[dict], steps: int, folder: Path) -> list[list[dict]]:
    """Run configurations side by side, each on devices of its own, and return their metrics."""
    processes, first = [], 0
    names = [row["label"].replace(" ", "-") for row in group]
    in_use = sum(row["devices"] for row in group)
    threads = max(1, os.cpu_count() // in_use)
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": str(threads)}
    for name, row in zip(names, group, strict=True):
        gpus = range(first, first + row["devices"])
        first += row["devices"]
        processes.append(
            subprocess.Popen(
                [sys.executable, *command_of(row, steps), "--save-dir", folder, "-e", name],
                cwd=REPOSITORY,
                env={**environment, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))},
            )
        )
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise SystemExit("a run failed")
    files = [folder / name / "metrics.jsonl" for name in names]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def share(rows: list[dict], devices: int) -> list[list[dict]]:
    """Return the rows in groups that have room on so many devices, the largest first."""
    groups: list[list[dict]] = []
    for row in sorted(rows, key=lambda row: -row["devices"]):
        for group in groups:
            if sum(each["devices"] for each in group) + row["devices"] <= devices:
                group.append(row)
                break
        else:
            groups.append([row])
    return groups


def measure(groups: list[list[dict]], steps: int, warm_up: int) -> None:
    """Run each group once and add to each row the values of its run (medians of log lines)."""
    for group in groups:
        with tempfile.TemporaryDirectory() as folder:
            for row, metrics in zip(group, train(group, steps, Path(folder)), strict=True):
                counted = [line for line in metrics if line["step"] > warm_up and "loss" in line]
                keys = [key for key, value in counted[0].items() if isinstance(value, float)]
                values = {key: statistics.median(line[key] for line in counted) for key in keys}
                row["runs"].append({**values, "loss": counted[-1]["loss"]})
                row["median"] = {
                    key: round(statistics.median(run[key] for run in row["runs"]), 6)
                    for key in row["runs"][0]
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", choices=SETS, help="which configurations")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=3, help="runs of each, in turn")
    parser.add_argument(
        "--side-by-side",
        action="store_true",
        help="what has room on the GPUs at the same time runs at the same time",
    )
    args = parser.parse_args()
    configurations, steps, warm_up = SETS[args.set]
    devices = torch.cuda.device_count() or os.cpu_count()
    rows = [
        {**each, "runs": [], "command": shlex.join(["python", *command_of(each, steps)])}
        for each in configurations
        if each["devices"] <= devices
    ]
    groups = share(rows, devices) if args.side_by_side else [[row] for row in rows]
    results = {
        "steps": steps,
        "warm_up_steps": warm_up,
        "side_by_side": [[row["label"] for row in group] for group in groups],
        "rows": rows,
    }
    for _ in range(args.runs):
        measure(groups, steps, warm_up)
        write_result(args.output, results)  # in every round: a later one may not end
    for row in rows:
        print(f"{row['label']:24s} {row['median']['tokens_per_s']:12,.0f} tokens/s")


if __name__ == "__main__":
    main()

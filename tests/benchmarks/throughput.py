"""Tokens per second of the chapters' own scripts, in a list of configurations.

python tests/benchmarks/throughput.py ddp-cpu --output tests/benchmarks/results/ddp_cpu.json

Every configuration runs several times, in turn with the others, so that a change on the machine
affects all of them. baseline.py can be one of them: the same batch in a hand-written loop.

The log lines of the first steps are left out as warm-up: compilation, first allocations, and DDP's
buckets, which are rebuilt after the first backward pass.

    chapters-gpu  all chapters on one GPU beside the hand-written loop, in TF32 and bfloat16
    ddp-gpu       chapters 1 and 2 on up to 8 GPUs in TF32
    nodes-gpu     chapters 2 and 3 on 4 GPUs in TF32
    ddp-cpu       chapters 1 and 2 on two cores

fsdp.py measures the 8B model, and many_gpus.py measures bfloat16 on several GPUs. overhead.py
compares a chapter's step with a loop that trains the same model in the same process.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import file_name, visible_gpus, write_result

REPOSITORY = Path(__file__).parents[2]
BASELINE = "tests/benchmarks/baseline.py"
GPT2 = "-m gpt2 -s 1024 -b 64 --compile --lr 3e-4"
NEVER = str(10**9)


def rows(chapter: str, devices: list[int], args: str, batch: int, **more: object) -> list[dict]:
    """Return a chapter's configurations: the same batch on each device."""
    name = "baseline" if chapter == BASELINE else chapter
    return [
        {
            "label": f"{name} on {number}",
            "chapter": chapter,
            "devices": number,
            "args": f"{args} --global-batch-size {batch * number}",
            **more,
        }
        for number in devices
    ]


def all_chapters() -> list[dict]:
    """Return the loop and chapters 1 to 4 in TF32, then the loop and chapter 5 in bfloat16."""
    groups = {
        "tf32": ["01-single-gpu", "02-ddp", "03-multi-node", "04-fsdp"],
        "bf16": ["05-mixed-precision"],
    }
    found = []
    for precision, chapters in groups.items():
        label = f"baseline on 1 in {precision}"
        own = "--precision bf16" if precision == "bf16" else ""
        group = rows(BASELINE, [1], f"{GPT2} --log-freq 10 --precision {precision}", 64)
        group[0]["label"] = label
        for chapter in chapters:
            group += rows(chapter, [1], f"{GPT2} --log-freq 10 {own}".strip(), 64)
        found += [{**row, "against": label} for row in group]
    return found


ON_CPU, ON_GPU = "--log-freq 10", f"{GPT2} --log-freq 5"
# By name: (configurations, steps in all, steps that are left out).
SETS = {
    "chapters-gpu": (all_chapters(), 50, 20),
    "ddp-gpu": (
        rows("01-single-gpu", [1], ON_GPU, 64) + rows("02-ddp", [1, 2, 4, 8], ON_GPU, 64),
        40,
        15,
    ),
    "nodes-gpu": (rows("02-ddp", [4], ON_GPU, 64) + rows("03-multi-node", [4], ON_GPU, 64), 40, 15),
    "ddp-cpu": (
        rows("01-single-gpu", [1], ON_CPU, 24) + rows("02-ddp", [1, 2], ON_CPU, 24),
        90,
        30,
    ),
}


def command_of(row: dict, steps: int) -> list[str]:
    """Return a row's command, without the interpreter and the run's folder."""
    chapter, devices = row["chapter"], row["devices"]
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
    if chapter.startswith("01") or chapter == BASELINE:
        words = []
    words.append(chapter if chapter == BASELINE else f"{chapter}/train_llm.py")
    words += [*shlex.split(row["args"]), "--max-steps", str(steps)]
    if chapter != BASELINE:
        words += ["--eval-freq", NEVER, "--ckpt-freq", NEVER]
    return words


def train(group: list[dict], steps: int, folder: Path) -> list[list[dict]]:
    """Run configurations side by side, each on devices of its own; return their metrics."""
    processes, first = [], 0
    threads = max(1, os.cpu_count() // sum(row["devices"] for row in group))
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": str(threads)}
    for row in group:
        gpus = {"CUDA_VISIBLE_DEVICES": visible_gpus(first, row["devices"])}
        first += row["devices"]
        words = [*command_of(row, steps), "--save-dir", folder, "-e", file_name(row["label"])]
        command = [sys.executable, *words]
        processes.append(subprocess.Popen(command, cwd=REPOSITORY, env={**environment, **gpus}))
    found = []
    for process, row in zip(processes, group, strict=True):
        if process.wait():
            raise SystemExit(f"a run failed: {row['label']}")
        lines = (folder / file_name(row["label"]) / "metrics.jsonl").read_text().splitlines()
        found.append([json.loads(line) for line in lines])
    return found


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


def summarize(metrics: list[dict], warm_up: int) -> dict[str, float]:
    """Return the medians of the log lines after the warm-up, and the last loss."""
    counted = [line for line in metrics if line["step"] > warm_up and "loss" in line]
    keys = [key for key, value in counted[0].items() if isinstance(value, float)]
    values = {key: statistics.median(line[key] for line in counted) for key in keys}
    return {**values, "loss": counted[-1]["loss"]}


def compare(rows: list[dict]) -> None:
    """Note the medians and the spread of each row's runs, and the ratio to another row.

    The ratio is computed round by round, so that both numbers are of the same time.
    """
    by_label = {row["label"]: row for row in rows}
    for row in (row for row in rows if row["runs"]):
        keys = set.intersection(*(set(run) for run in row["runs"]))
        row["median"] = {
            key: round(statistics.median(run[key] for run in row["runs"]), 6)
            for key in row["runs"][0]
            if key in keys
        }
        speeds = [run["tokens_per_s"] for run in row["runs"]]
        row["spread"] = [min(speeds), max(speeds)]
        if reference := by_label.get(row.get("against")):
            pairs = zip(row["runs"], reference["runs"], strict=False)
            ratios = [one["tokens_per_s"] / two["tokens_per_s"] for one, two in pairs]
            if ratios:
                row["ratio"] = {"median": statistics.median(ratios), "rounds": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=SETS, help="which configurations")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=3, help="runs of each, in turn")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after these")
    parser.add_argument("--side-by-side", action="store_true", help="use all GPUs at the same time")
    args = parser.parse_args()
    configurations, steps, warm_up = SETS[args.set]
    devices = torch.cuda.device_count() or os.cpu_count()
    rows = [
        {**row, "runs": [], "command": shlex.join(["python", *command_of(row, steps)])}
        for row in configurations
        if row["devices"] <= devices
    ]
    groups = share(rows, devices) if args.side_by_side else [[row] for row in rows]
    results = {"set": args.set, "steps": steps, "warm_up_steps": warm_up}
    results["side_by_side"] = [[row["label"] for row in group] for group in groups]
    begun = time.monotonic()
    for turn in range(args.runs):
        # A round takes as long as the previous one: the last one should end in time.
        if turn and (time.monotonic() - begun) * (turn + 1) / turn > args.seconds:
            break
        for group in groups:
            with tempfile.TemporaryDirectory() as folder:
                for row, found in zip(group, train(group, steps, Path(folder)), strict=True):
                    row["runs"].append(summarize(found, warm_up))
            compare(rows)
            write_result(args.output, {**results, "rows": rows})  # each time: a later run may fail
    for row in rows:
        ratio = f"  x {row['ratio']['median']:.3f}" if "ratio" in row else ""
        print(f"{row['label']:28s} {row['median']['tokens_per_s']:12,.0f} tokens/s{ratio}")


if __name__ == "__main__":
    main()

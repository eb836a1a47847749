"""Tokens per second of the chapters' own scripts, in a list of configurations.

python tests/benchmarks/throughput.py ddp-cpu --output tests/benchmarks/results/ddp_cpu.json

Every configuration runs several times, in turn with the others, so that what changes on the machine
meanwhile hits all of them. baseline.py can be one of them: the same batch in a bare loop.

What is left out as warm-up: the log lines of the first steps, whose number the set fixes for all
its rows before anything is measured. They hold compilation, first allocations, and DDP's buckets,
which are rebuilt after the first backward pass. "drift" shows whether it was enough: tokens/s of
the later half of the counted lines over those of the earlier half.

Sets, and what they answer:

    gpt2-bf16               chapter 5 on one GPU against the bare loop, resharding and not
    gpt2-bf16-scaling       both on 1, 2, 4 and 8 GPUs
    gpt2-bf16-accumulation  the same with 4 micro-batches
    chapters-gpu            all chapters on one GPU against the bare loop, in TF32 and in bfloat16
    ddp-gpu, ddp-gpu-accumulation, nodes-gpu  chapters 1 to 3 in TF32
    cpu, cpu-start          two cores: one process and two ranks on one global batch; the first step
    ddp-cpu, nodes-cpu, fsdp-cpu  neighbouring chapters on two cores

The 8B model, longer sequences and larger models have a file of their own, fsdp.py, and so has each
chapter's step against a bare loop of its own model, overhead.py.
"""

import argparse
import fnmatch
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
OFTEN = f"{GPT2} --log-freq 5"
NEVER = str(10**9)


def scaling(chapters: dict[str, list[int]], args: str, batch: int, **more: object) -> list[dict]:
    """Return configurations with the same batch on each device: chapter, numbers of devices."""
    return [
        {
            "label": f"{name_of(chapter)} on {devices}",
            "chapter": chapter,
            "devices": devices,
            "args": f"{args} --global-batch-size {batch * devices}",
            **more,
        }
        for chapter, numbers in chapters.items()
        for devices in numbers
    ]


def name_of(chapter: str) -> str:
    return "baseline" if chapter == BASELINE else chapter


def against(reference: str, rows: list[dict], key: str = "tokens_per_s_per_device") -> list[dict]:
    """Return them with the label that they are compared with, and in what."""
    return [{**each, "against": reference, "compared": key} for each in rows]


ON_CPU = {"01-single-gpu": [1], "02-ddp": [1, 2]}
ON_GPUS = {"01-single-gpu": [1], "02-ddp": [1, 2, 4, 8]}
NUMBERS = [1, 2, 4, 8]


def beside_the_bare_loop(numbers: list[int], batch: int) -> list[dict]:
    """Return the bare loop and chapter 5, which reads its data in two processes of their own."""
    args = f"{GPT2} --precision bf16 --log-freq 10"
    rows = scaling({BASELINE: numbers}, args, batch)
    rows += scaling({"05-mixed-precision": numbers}, f"{args} --num-workers 2", batch)
    return against("baseline on 1", rows)


def with_whole_weights(rows: list[dict]) -> list[dict]:
    """Return them and chapter 5 once more, with weights gathered once in a step and not twice."""
    chapter = rows[-1]
    words = f"{chapter['args']} --no-reshard-after-forward"
    return [*rows, {**chapter, "label": "05-mixed-precision, not resharded, on 1", "args": words}]


def all_chapters() -> list[dict]:
    """Return the baseline loop and chapters 1 to 4 in TF32, then the loop and chapter 5 in bf16."""
    rows: list[dict] = []
    words = f"{GPT2} --log-freq 10"
    for precision, option, chapters in (
        ("tf32", "", ("01-single-gpu", "02-ddp", "03-multi-node", "04-fsdp")),
        ("bf16", " --precision bf16", ("05-mixed-precision",)),
    ):
        group = scaling({BASELINE: [1]}, f"{words} --precision {precision}", 64)
        group[0]["label"] += f" in {precision}"
        group += scaling({chapter: [1] for chapter in chapters}, words + option, 64)
        rows += against(group[0]["label"], group)
    return rows


CPU_ROWS = scaling({BASELINE: [1]}, "-m gpt2-tiny -s 128 -b 8 --precision tf32 --log-freq 10", 24)
CPU_ROWS += scaling({"01-single-gpu": [1]}, "--log-freq 10", 24)
CPU_ROWS += scaling({"02-ddp": [2]}, "--log-freq 10", 12)
# By name: (configurations, steps in all, steps that are left out).
SETS = {
    "ddp-cpu": (scaling(ON_CPU, "--log-freq 10", 24), 90, 30),
    "chapters-gpu": (all_chapters(), 50, 20),
    "ddp-gpu": (scaling(ON_GPUS, OFTEN, 64), 40, 15),
    "nodes-cpu": (scaling({"02-ddp": [2], "03-multi-node": [2]}, "--log-freq 10", 24), 90, 30),
    "fsdp-cpu": (scaling({"03-multi-node": [2], "04-fsdp": [2]}, "--log-freq 10", 24), 90, 30),
    "nodes-gpu": (scaling({"02-ddp": [4], "03-multi-node": [4]}, OFTEN, 64), 40, 15),
    "ddp-gpu-accumulation": (scaling({"02-ddp": [1, 2, 4, 8]}, OFTEN, 256), 20, 10),
    "gpt2-bf16": (with_whole_weights(beside_the_bare_loop([1], 64)), 80, 20),
    "gpt2-bf16-scaling": (beside_the_bare_loop(NUMBERS, 64), 80, 20),
    "gpt2-bf16-accumulation": (beside_the_bare_loop(NUMBERS, 256), 30, 10),
    "cpu": (against("01-single-gpu on 1", CPU_ROWS, "tokens_per_s"), 90, 30),
    "cpu-start": (scaling({"01-single-gpu": [1]}, "--log-freq 1", 24), 4, 2),
}


def command_of(configuration: dict, steps: int) -> list[str]:
    """Return a chapter's command, without the interpreter and the run's folder."""
    chapter = configuration["chapter"]
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(configuration["devices"])]
    alone = chapter == BASELINE and configuration["devices"] == 1
    if chapter.startswith("01") or alone:
        launcher = []
    words = [
        *(*launcher, chapter if chapter == BASELINE else f"{chapter}/train_llm.py"),
        *shlex.split(configuration["args"]),
        *("--max-steps", str(steps)),
    ]
    if chapter != BASELINE:  # which has neither
        words += ["--eval-freq", NEVER, "--ckpt-freq", NEVER]
    return words


def train(group: list[dict], steps: int, folder: Path) -> list[dict]:
    """Run configurations side by side, each on devices of its own.

    Return of each its metrics and the seconds from its start to the first log line (of the bare
    loop, which writes all of them at its end, to that).
    """
    processes, first = [], 0
    names = [file_name(row["label"]) for row in group]
    in_use = sum(row["devices"] for row in group)
    threads = max(1, os.cpu_count() // in_use)
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": str(threads)}
    begun = time.monotonic()
    for name, row in zip(names, group, strict=True):
        gpus = visible_gpus(first, row["devices"])
        first += row["devices"]
        words = command_of(row, steps)
        processes.append(
            subprocess.Popen(
                [sys.executable, *words, "--save-dir", folder, "-e", name],
                cwd=REPOSITORY,
                env={**environment, "CUDA_VISIBLE_DEVICES": gpus},
            )
        )
    files = [folder / name / "metrics.jsonl" for name in names]
    first_line: dict[Path, float] = {}
    running = True
    while running:
        running = any(process.poll() is None for process in processes)  # then look once more
        for file in files:
            if file not in first_line and file.exists() and file.stat().st_size:
                first_line[file] = time.monotonic() - begun
        time.sleep(0.02)
    found = []
    for process, row, file in zip(processes, group, files, strict=True):
        if process.returncode:
            raise SystemExit(f"a run failed: {row['label']}")
        metrics = [json.loads(line) for line in file.read_text().splitlines()]
        found.append({"metrics": metrics, "first_line_s": first_line.get(file)})
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
    """Return the medians of the log lines after the warm-up, the last loss, and the drift."""
    counted = [line for line in metrics if line["step"] > warm_up and "loss" in line]
    keys = [key for key, value in counted[0].items() if isinstance(value, float)]
    values = {key: statistics.median(line[key] for line in counted) for key in keys}
    speeds = [line["tokens_per_s"] for line in counted]
    half = len(speeds) // 2
    if half:
        later, earlier = speeds[-half:], speeds[:half]
        values["drift"] = statistics.median(later) / statistics.median(earlier)
    return {**values, "loss": counted[-1]["loss"]}


def add(row: dict, found: dict, warm_up: int) -> None:
    """Add a run to its row: its values, the medians and the spread of the runs so far."""
    run = summarize(found["metrics"], warm_up)
    if found["first_line_s"] is not None:
        run["first_line_s"] = found["first_line_s"]
    row["runs"].append(run)
    keys = [key for key in row["runs"][0] if all(key in each for each in row["runs"])]
    row["median"] = {
        key: round(statistics.median(each[key] for each in row["runs"]), 6) for key in keys
    }
    speeds = [each["tokens_per_s"] for each in row["runs"]]
    row["spread"] = [min(speeds), max(speeds)]


def compare(rows: list[dict]) -> None:
    """Note each row's tokens/s, of a device or of all, over those of the row it is compared with.

    Round by round: what changed on the machine between two rounds is in both numbers of a ratio.
    """
    by_label = {row["label"]: row for row in rows}
    for row in rows:
        other = by_label.get(row.get("against"), {"runs": []})
        pairs = zip(row["runs"], other["runs"], strict=False)
        ratios = [one[row["compared"]] / two[row["compared"]] for one, two in pairs]
        if ratios:
            row["ratio"] = {"median": statistics.median(ratios), "rounds": ratios}


def measure(group: list[dict], steps: int, warm_up: int) -> None:
    """Run a group once and add to each row the values of its run (medians of log lines)."""
    with tempfile.TemporaryDirectory() as folder:
        for row, found in zip(group, train(group, steps, Path(folder)), strict=True):
            add(row, found, warm_up)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", choices=SETS, help="which configurations")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=3, help="runs of each, in turn")
    parser.add_argument("--only", default="*", help="labels, as in 'baseline*'")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after these")
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
        if each["devices"] <= devices and fnmatch.fnmatchcase(each["label"], args.only)
    ]
    groups = share(rows, devices) if args.side_by_side else [[row] for row in rows]
    results = {
        "set": args.set,
        "steps": steps,
        "warm_up_steps": warm_up,
        "nccl_environment": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")},
        "side_by_side": [[row["label"] for row in group] for group in groups],
        "rows": rows,
    }
    begun = time.monotonic()
    for turn in range(args.runs):
        # A round takes as long as the one before: the last one shall end in time.
        if turn and (time.monotonic() - begun) * (turn + 1) / turn > args.seconds:
            break
        for group in groups:
            measure(group, steps, warm_up)
            compare(rows)
            write_result(args.output, results)  # each time: what comes later may not end
    for row in rows:
        speed = row["median"]["tokens_per_s"] if row["runs"] else float("nan")
        ratio = f"  x {row['ratio']['median']:.3f}" if "ratio" in row else ""
        print(f"{row['label']:28s} {speed:12,.0f} tokens/s{ratio}")


if __name__ == "__main__":
    main()

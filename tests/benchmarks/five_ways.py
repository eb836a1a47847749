"""Train the same model data-parallel in several ways: speed, and the memory of each device.

python tests/benchmarks/five_ways.py --output tests/benchmarks/results/five_ways_cpu.json

    single          chapter 1
    data-parallel   chapter 1 with data-parallel.diff; needs GPUs
    ddp             chapter 2
    zero1           chapter 2 with --zero1
    fsdp            chapter 5, which is chapter 4 with --precision
    horovod         chapter 2 with horovod.diff; needs Horovod, and trains on CPUs

Each way trains in float32 (TF32 on a GPU) and in bf16, which autocast-01.diff or autocast-02.diff
adds to chapters 1 and 2. Nothing is compiled, because DataParallel cannot be. All rows have the
same model, weights, global batch and order of samples. Each round trains every row once, every
other round backwards, so that no row always runs on a warm machine.

A speed is the median of the lines of metrics.jsonl, without the first third.
"""

import argparse
import fnmatch
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from machine import write_result

REPOSITORY = Path(__file__).resolve().parents[2]
SINGLE, DDP, FSDP = "01-single-gpu", "02-ddp", "05-mixed-precision"
WAYS = {  # chapter, diff, flags
    "single": (SINGLE, None, ()),
    "data-parallel": (SINGLE, "data-parallel.diff", ()),
    "ddp": (DDP, None, ()),
    "zero1": (DDP, None, ("--zero1",)),
    "fsdp": (FSDP, None, ()),
    "horovod": (DDP, "horovod.diff", ()),
}
# DataParallel's copies of a model share its attributes, and its class.
AUTOCAST = "model.forward = autocast(model.forward)"
AUTOCAST_OF_COPIES = "type(model).forward = autocast(type(model).forward)"
LINES = 8  # of metrics.jsonl


def patched(way: str, precision: str, folder: Path) -> Path:
    """Return the script of a row: the chapter's own, or a copy with one or two diffs."""
    chapter, diff, _ = WAYS[way]
    diffs = [REPOSITORY / DDP / "diffs" / diff] if diff else []
    if precision == "bf16" and chapter != FSDP:
        diffs.insert(0, REPOSITORY / FSDP / f"diffs/autocast-{chapter[:2]}.diff")
    if not diffs:
        return REPOSITORY / chapter / "train_llm.py"
    copy = folder / f"{way}-{precision}" / chapter
    if not copy.exists():
        shutil.copytree(REPOSITORY / chapter, copy)
        for each in diffs:  # -C0: two diffs change neighbouring lines
            subprocess.run(["git", "apply", "-C0", each], cwd=copy.parent, check=True)
        if way == "data-parallel":
            script = (copy / "train_llm.py").read_text()
            (copy / "train_llm.py").write_text(script.replace(AUTOCAST, AUTOCAST_OF_COPIES))
    return copy / "train_llm.py"


def launcher(way: str, processes: int) -> list[str]:
    if way == "horovod":
        return ["horovodrun", "-np", str(processes), "--gloo", sys.executable]
    words = [sys.executable]
    if processes > 1:
        words += ["-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node", str(processes)]
    return words


def train(row: dict, seed: int, args: argparse.Namespace, folder: Path) -> None:
    """Train once, and add the speed, the peaks and the losses to the row's runs."""
    way, precision = row["label"].split(":")
    # A chapter's own script needs no precision for float32, and chapter 5 always names it.
    flags = ["--precision", precision] if precision == "bf16" or way == "fsdp" else []
    peaks = Path(tempfile.mkdtemp(dir=folder))
    words = [*launcher(way, row["processes"]), str(Path(__file__).with_name("with_peaks.py"))]
    words += [str(peaks), str(patched(way, precision, folder)), *WAYS[way][2], *flags]
    words += ["--seed", str(seed), "--save-dir", str(folder), "-e", "run"]
    words += ["--max-steps", str(args.steps), "--log-freq", str(args.steps // LINES)]
    words += ["--eval-sequences", "1", "--ckpt-freq", str(args.steps), *args.training.split()]
    threads = max(1, os.cpu_count() // row["processes"])
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": str(threads)}
    if way == "single":  # one device
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        environment["CUDA_VISIBLE_DEVICES"] = visible
    print(f"training {row['label']}, seed {seed}", file=sys.stderr)
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        shutil.rmtree(folder / "run", ignore_errors=True)
        row["runs"].append({"failed": done.returncode})
        return
    text = (folder / "run/metrics.jsonl").read_text()
    metrics = [json.loads(line) for line in text.splitlines()]
    used = {}
    for file in sorted(peaks.iterdir()):
        used |= {device: gib for device, gib in json.loads(file.read_text()).items() if gib}
    row["runs"].append(
        {
            "seed": seed,
            "tokens_per_s": statistics.median(m["tokens_per_s"] for m in metrics[-5:]),
            "peak_gib": [used[device] for device in sorted(used, key=int)],
            "losses": [m["loss"] for m in metrics],
        }
    )
    shutil.rmtree(folder / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    gpus = torch.cuda.device_count()
    add("--output", type=Path, required=True, help="JSON file to write")
    add("--only", default="*", help="rows, for example 'ddp:*'")
    add("--devices", type=int, default=gpus or 2, help="of all ways but single")
    add("--rounds", type=int, default=3, help="times that each row trains")
    add("--steps", type=int, default=40, help=f"of each training; a multiple of {LINES}")
    size = "-m gpt2 -s 1024 -b 32 --lr 3e-4" if gpus else "-b 12"
    batch = 32 * (gpus or 2) if gpus else 24
    add("--training", default=f"{size} --global-batch-size {batch}", help="the scripts' arguments")
    args = parser.parse_args()
    rows = []
    for way in WAYS:
        if way == "data-parallel" and not gpus:
            continue
        if way == "horovod" and (gpus or not importlib.util.find_spec("horovod")):
            continue
        for precision in ("tf32" if gpus else "fp32", "bf16"):
            label = f"{way}:{precision}"
            if fnmatch.fnmatchcase(label, args.only):
                processes = 1 if way in ("single", "data-parallel") else args.devices
                devices = 1 if way == "single" else args.devices
                row = {"label": label, "processes": processes, "devices": devices, "runs": []}
                rows.append(row)
    results = {"training": args.training, "steps": args.steps, "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        for n in range(args.rounds):
            for row in rows[:: -1 if n % 2 else 1]:
                train(row, n, args, Path(folder))
                write_result(args.output, results)


if __name__ == "__main__":
    main()

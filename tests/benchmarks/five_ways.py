"""Train the same model data-parallel in several ways: speed, and the memory of each device.

python tests/benchmarks/five_ways.py --output tests/benchmarks/results/five_ways_cpu.json

    single          chapter 1
    data-parallel   chapter 1 with the variant data-parallel; needs GPUs
    ddp             chapter 2
    zero1           chapter 2 with the variant zero1
    fsdp            chapter 5, which is chapter 4 with --precision
    horovod         chapter 2 with the variant horovod; needs Horovod, and trains on CPUs

Each way trains in float32 (TF32 on a GPU) and in bf16, which the variant autocast adds to chapters
1 and 2. Nothing is compiled, because DataParallel cannot be. All rows have the same model, weights,
global batch and order of samples. Each round trains every row once, every other round backwards, so
that no row always runs on a warm machine.

A speed is the median of the lines of metrics.jsonl, without the first third.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from machine import (
    TORCHRUN,
    copy_chapter,
    environment,
    output_parser,
    read_metrics,
    replace_in,
    write_result,
)

SINGLE, DDP, FSDP = "01-single-gpu", "02-ddp", "05-mixed-precision"
WAYS = {  # chapter and variants
    "single": (SINGLE, ()),
    "data-parallel": (SINGLE, ("data-parallel",)),
    "ddp": (DDP, ()),
    "zero1": (DDP, ("zero1",)),
    "fsdp": (FSDP, ()),
    "horovod": (DDP, ("horovod",)),
}
# The variant autocast changes the model's attributes, which DataParallel's copies share. They also
# share its class.
COPIES = "    parallel_model = torch.nn.DataParallel(model)\n"
AUTOCAST = "torch.autocast(device.type, torch.bfloat16)(type(model).forward)"
AUTOCAST_OF_COPIES = f"    type(model).forward = {AUTOCAST}\n{COPIES}"
LINES = 8  # of metrics.jsonl


def script_of(way: str, precision: str, folder: Path) -> Path:
    """Return the script of a row, in a copy of the chapter with the row's variants."""
    chapter, names = WAYS[way]
    with_autocast = precision == "bf16" and chapter != FSDP
    if with_autocast and way != "data-parallel":
        names = (*names, "autocast")
    script = copy_chapter(chapter, folder, *names) / "train_llm.py"
    if with_autocast and way == "data-parallel":
        replace_in(script, COPIES, AUTOCAST_OF_COPIES)
    return script


def launcher(way: str, processes: int) -> list[str]:
    if way == "horovod":
        return ["horovodrun", "-np", str(processes), "--gloo", sys.executable]
    return [*TORCHRUN, str(processes)] if processes > 1 else [sys.executable]


def train(row: dict, seed: int, args: argparse.Namespace, folder: Path) -> None:
    """Train once in a new folder; add the speed, the peaks and the losses to the row's runs."""
    way, precision = row["label"].split(":")
    flags = ["--precision", precision] if way == "fsdp" else []
    peaks = folder / "peaks"
    peaks.mkdir()
    words = [*launcher(way, row["processes"]), Path(__file__).with_name("with_peaks.py")]
    words += [peaks, script_of(way, precision, folder), *flags]
    words += ["--seed", seed, "--save-dir", folder, "-e", "run"]
    words += ["--max-steps", args.steps, "--log-freq", args.steps // LINES]
    words += ["--eval-sequences", 1, "--ckpt-freq", args.steps, *args.training.split()]
    variables = environment(OMP_NUM_THREADS=max(1, os.cpu_count() // row["processes"]))
    if way == "single":  # one device
        variables["CUDA_VISIBLE_DEVICES"] = variables.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    print(f"training {row['label']}, seed {seed}", file=sys.stderr)
    done = subprocess.run([*map(str, words)], env=variables, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        row["runs"].append({"failed": done.returncode})
        return
    metrics = read_metrics(folder / "run")
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


def main() -> None:
    parser = output_parser(__doc__)
    add = parser.add_argument
    gpus = torch.cuda.device_count()
    devices = gpus or 2
    add("--rounds", type=int, default=3, help="times that each row trains")
    add("--steps", type=int, default=40, help=f"of each training; a multiple of {LINES}")
    size = "-m gpt2 -s 1024 -b 32 --lr 3e-4" if gpus else "-b 12"
    batch = 32 * devices if gpus else 24
    add("--training", default=f"{size} --global-batch-size {batch}", help="the scripts' arguments")
    args = parser.parse_args()
    ways = list(WAYS)
    if not gpus:
        ways.remove("data-parallel")
    if gpus or not importlib.util.find_spec("horovod"):
        ways.remove("horovod")
    rows = [
        {
            "label": f"{way}:{precision}",
            "processes": 1 if way in ("single", "data-parallel") else devices,
            "devices": 1 if way == "single" else devices,
            "runs": [],
        }
        for way in ways
        for precision in ("tf32" if gpus else "fp32", "bf16")
    ]
    results = {"training": args.training, "steps": args.steps, "rows": rows}
    for n in range(args.rounds):
        for row in rows[:: -1 if n % 2 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                train(row, n, args, Path(folder))
            write_result(args.output, results)


if __name__ == "__main__":
    main()

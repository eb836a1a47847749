"""Compare strategies and precisions: train the same model in each, and measure speed and losses.

python 05-mixed-precision/compare.py

A row is a strategy in a precision. All rows have the same model, initial weights, samples, order of
samples, schedule, seed and threads per device. Each round has its own seed and trains every row
once; every other round goes through the rows backwards, so that no row always runs on a warm
machine. Three parts can be measured:

loss     --global-batch-size sequences per step, however many devices there are. All rows see the
         same tokens, so losses can be compared step by step. Never compiled.
speed    --batch-size sequences per device and step: twice the devices train on twice the tokens.
largest  like speed, with the largest batch per device that fits on the GPU, found by search.

The first third of the steps is warm-up and is not counted. If a row fails, the result says why.

comparison/training.py has the training itself, comparison/ranks.py the processes that run it, and
comparison/results.py the result file, the table and the figures.
"""

import argparse
import fnmatch
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common import cli, launch, models
from common.cli import RunError, at_least
from common.data import load_sequences, split_batch

from comparison import results
from comparison.ranks import Ranks
from comparison.training import PRECISIONS, STRATEGIES, WINDOW, number_of_ranks


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("rows").add_argument
    add("--only", nargs="+", default=["*:*"], help="rows, for example ddp:bf16 or 'fsdp:*'")
    parts = {"nargs": "+", "choices": results.PARTS, "default": ["loss", "speed"]}
    add("--parts", **parts, help="what to measure")
    add("--seeds", nargs="+", type=at_least(0), default=[0, 1, 2], help="one round per seed")
    add("--devices", type=at_least(1), help="number of ranks (default: all GPUs; on a CPU 2)")
    add("--seconds", type=at_least(0.0), help="start no training after this many seconds")
    add("--timeout", type=at_least(1), default=300, help="limit in seconds for one training")
    add("--output", type=Path, default="outputs/comparison.json", help="JSON file to write")
    add("--append", action="store_true", help="add to the results in --output")
    add("--draw", type=Path, metavar="RESULT", help="only draw the figures of this result file")
    add("--figures", type=Path, help="folder for the figures (default: RESULT's folder)")
    add = parser.add_argument_group("data and model").add_argument
    add("-d", "--dataset-name", default="python-stdlib", help="preset, file, folder or hub id")
    add("-m", "--model-name", default="gpt2-tiny", help="preset, folder or hub id")
    add("-s", "--seq-length", default=32, type=at_least(2), help="tokens")
    add("--compile", action="store_true", help="use torch.compile where speed is measured")
    add = parser.add_argument_group("optimize").add_argument
    add("-b", "--batch-size", default=4, type=at_least(1), help="limit per device and micro-batch")
    add("--global-batch-size", default=8, type=at_least(1), help="sequences per step, for losses")
    add("--steps", default=20, type=at_least(2 * WINDOW), help="steps in which losses are compared")
    add("--speed-steps", default=15, type=at_least(2 * WINDOW), help="steps that measure speed")
    add("--lr", type=at_least(0.0), help="peak learning rate (default: 1 / model width)")
    return parser.parse_args()


def main() -> None:
    start = time.monotonic()
    args = get_args()
    if args.draw:
        results.draw(args.draw, args.figures or args.draw.parent)
        return
    rows = select_rows(args)
    prepare(args, max(row["devices"] for row in rows))
    content = results.open_results(args)
    rows = [results.add_row(content, row) for row in rows]
    results.write(args.output, content)
    ranks = Ranks(max(number_of_ranks(row["strategy"], row["devices"]) for row in rows))

    def measure(row: dict, part: str, seed: int, **changes: object) -> dict | None:
        """Train a row once. Return what was measured, or None if that failed: row says why."""
        options = {key: row[key] for key in ("strategy", "precision", "devices")} | changes
        run = argparse.Namespace(**{**vars(args), **options, "part": part, "seed": seed})
        if part != "loss":
            run.global_batch_size = run.batch_size * run.devices
            run.steps = run.speed_steps
        status, answer = ranks.train(run)
        if status == "done":
            return {"part": part, "seed": seed, **answer}
        row[status][part] = answer
        return None

    try:
        for n, seed in enumerate(args.seeds):
            for row, part in itertools.product(rows[:: -1 if n % 2 else 1], args.parts):
                late = args.seconds is not None and time.monotonic() - start > args.seconds
                if late or row["left_out"] or part in row["failed"]:
                    continue
                if part != "largest":
                    found = measure(row, part, seed)
                else:
                    found = find_largest(measure, row, args.batch_size) if n == 0 else None
                    if found:  # the failure that ended the search
                        found["stopped_by"] = row["failed"].pop("largest", None)
                if found:
                    others = [r for r in row["runs"] if (r["part"], r["seed"]) != (part, seed)]
                    row["runs"] = [*others, found]
                results.write(args.output, content)
    except KeyboardInterrupt:
        print("Interrupted. The table shows the results so far.")
    finally:
        ranks.stop()
    content["results"]["seconds"] = round(time.monotonic() - start)
    results.write(args.output, content)
    print(results.table(content["results"]["rows"]))
    print(f"wrote {args.output}")


def select_rows(args: argparse.Namespace) -> list[dict]:
    """Return the rows that --only names, each with its strategy, precision and devices."""
    gpus = torch.cuda.device_count()
    devices = args.devices or gpus or 2
    if 0 < gpus < devices:
        raise RunError(f"--devices {devices} is too many: PyTorch sees {gpus} GPUs.")
    if "largest" in args.parts and not gpus:
        raise RunError("--parts largest needs a GPU: leave it out on a CPU.")
    rows = [
        {"strategy": s, "precision": p, "devices": 1 if s == "single" else devices}
        for s, p in itertools.product(STRATEGIES, PRECISIONS)
        if any(fnmatch.fnmatchcase(f"{s}:{p}", pattern) for pattern in args.only)
    ]
    if not rows:
        raise RunError(
            f"--only {' '.join(args.only)} matches no row: give STRATEGY:PRECISION, with a "
            f"strategy of {', '.join(STRATEGIES)} and a precision of "
            f"{', '.join(PRECISIONS)}."
        )
    return rows


def prepare(args: argparse.Namespace, devices: int) -> None:
    """Tokenize the data, which the ranks then read from the cache, and check the arguments."""
    args.dataset_subset, args.text_column = None, None
    # With GPUs, threads matter little, so machines with up to 8 GPUs use the same number.
    gpus = torch.cuda.device_count()
    args.threads = max(1, (os.cpu_count() or 1) // (max(8, gpus) if gpus else args.devices or 2))
    tokenizer = models.load_tokenizer(args.model_name)
    models.sequence_length(models.load_config(args.model_name, tokenizer), args.seq_length)
    train_data, _ = load_sequences(args, tokenizer, args.seq_length)
    split_batch(args, devices, len(train_data))
    if devices * args.batch_size > len(train_data):
        raise RunError(
            f"--batch-size {args.batch_size} is too large: the data has {len(train_data)} "
            f"sequences for {devices} devices."
        )


def find_largest(measure: Callable, row: dict, batch_size: int) -> dict[str, object] | None:
    """Return the run with the largest batch per device that fits, or None if none fits.

    Doubles the batch until it does not fit, then bisects to within an eighth of batch_size.
    """
    low, high, largest = 0, None, None
    batch = batch_size
    while not row["left_out"] and (high is None or high - low > max(1, batch_size // 8)):
        found = measure(row, "largest", 0, batch_size=batch)
        if found:
            low, largest = batch, found
        else:
            high = batch
        batch = 2 * low if high is None else (low + high) // 2
    return largest


if __name__ == "__main__":
    launch.run(main)

"""How many steps AdamW and Muon need for the same loss, each at its best learning rate.

python tests/benchmarks/optimizers.py --output optimizers.json

Chapter 1 trains on the built-in corpus, plain and with the variant muon, once for each learning
rate. The best one has the lowest evaluation loss at the end. The loss to reach is that of AdamW's
best run. Then Muon trains with its best learning rate and with schedules that are shorter, each
planned to its own end: the shortest one that reaches this loss is the result.

Several runs share a GPU, so no time is measured here: the rows of muon in measure.py do that. The
result file is written after each batch of runs, and a run that it has is not done again.
"""

import argparse
import json
import math
import shlex
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch
from machine import copy_chapter, environment, output_parser, read_metrics, write_result

CHAPTER = "01-single-gpu"
VARIANTS = {"adamw": (), "muon": ("muon",)}
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the steps, for shorter schedules


def train(run: dict, args: argparse.Namespace) -> dict:
    """Do a run; return it with its evaluation losses by step, or with how it failed."""
    folder = args.folder / "-".join(str(value) for value in run.values())
    shutil.rmtree(folder, ignore_errors=True)
    script = args.folder / run["optimizer"] / CHAPTER / "train_llm.py"
    words = [sys.executable, script, "--lr", run["lr"], "--seed", run["seed"]]
    words += ["--max-steps", run["steps"], "--eval-freq", args.eval_freq, "--save-dir", folder]
    words += ["--ckpt-freq", run["steps"], "-e", "run", *shlex.split(args.training)]
    threads = max(1, torch.get_num_threads() // args.at_once)
    variables = environment(OMP_NUM_THREADS=threads)
    done = subprocess.run([*map(str, words)], env=variables, capture_output=True, text=True)
    print(run, "failed" if done.returncode else "done", file=sys.stderr, flush=True)
    if done.returncode:  # a learning rate may be too large
        return {**run, "failed": done.stderr[-1000:]}
    metrics = read_metrics(folder / "run")
    shutil.rmtree(folder)  # the checkpoint
    losses = {line["step"]: line["eval_loss"] for line in metrics if "eval_loss" in line}
    return {**run, "eval_losses": losses}


def last_loss(run: dict) -> float:
    """Return the evaluation loss at the end of a run, infinite if it failed."""
    return [*run["eval_losses"].values()][-1] if "eval_losses" in run else math.inf


def mean_loss(rows: list[dict], **wanted: object) -> float:
    """Return the mean last loss of the runs with these settings, one for each seed."""
    found = [row for row in rows if wanted.items() <= row.items()]
    return statistics.fmean(map(last_loss, found)) if found else math.inf


def summary(rows: list[dict], args: argparse.Namespace) -> dict:
    """Return what the runs show so far."""
    best = {}
    for optimizer in VARIANTS:
        losses = {
            lr: mean_loss(rows, optimizer=optimizer, lr=lr, steps=args.steps) for lr in args.lrs
        }
        lr = min(losses, key=losses.get)
        at_edge = lr in (min(args.lrs), max(args.lrs))
        best[optimizer] = {"lr": lr, "loss": losses[lr], "at_edge": at_edge, "losses": losses}
    target = best["adamw"]["loss"]
    planned = {
        steps: mean_loss(rows, optimizer="muon", lr=best["muon"]["lr"], steps=steps)
        for steps in [*shorter(args), args.steps]
    }
    enough = [steps for steps, loss in planned.items() if loss <= target]
    return {
        "best": best,
        "target": target,
        "muon_by_steps": planned,
        "muon_steps": min(enough, default=None),
        "adamw_steps": args.steps,
    }


def read_rows(args: argparse.Namespace) -> list[dict]:
    """Return the runs that the result file has, which must be of the same training."""
    if not args.output.exists():
        return []
    known = json.loads(args.output.read_text())["results"]
    if known["training"] != args.training:
        sys.exit(f"{args.output} has runs with --training {known['training']!r}: give another file")
    return known["rows"]


def shorter(args: argparse.Namespace) -> list[int]:
    return sorted({round(share * args.steps) for share in SHARES})


def main() -> None:
    parser = output_parser(__doc__)
    add = parser.add_argument
    add("--lrs", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3, 16e-3, 32e-3])
    add("--seeds", type=int, default=1, help="runs of each kind")
    add("--steps", type=int, default=464, help="of a run, as in make train")
    add("--eval-freq", type=int, default=20, help="steps between evaluations")
    add("--training", default="", help="more arguments of the script, such as '-m llama-tiny'")
    add("--at-once", type=int, default=5 if torch.cuda.is_available() else 1, help="runs at once")
    add("--folder", type=Path, default="/tmp/optimizers", help="for copies and runs")
    add("--tiny", action="store_true", help="8 steps, to try this file")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    if args.tiny:
        args.steps, args.eval_freq, args.lrs = 8, 4, args.lrs[1:3]
        args.training += " -s 32 --global-batch-size 4 -b 4 --eval-sequences 16"
    for name, variants in VARIANTS.items():
        copy_chapter(CHAPTER, args.folder / name, *variants)
    rows = read_rows(args)

    def do(wanted: list[dict]) -> None:
        left = [run for run in wanted if not any(run.items() <= row.items() for row in rows)]
        with ThreadPoolExecutor(args.at_once) as pool:
            for row in pool.map(lambda run: train(run, args), left):
                rows.append(row)
                found = {"training": args.training, **summary(rows, args), "rows": rows}
                write_result(args.output, found)

    seeds = range(args.seeds)
    full = [
        {"optimizer": name, "lr": lr, "seed": seed, "steps": args.steps}
        for name, lr, seed in product(VARIANTS, args.lrs, seeds)
    ]
    do(full)
    lr = summary(rows, args)["best"]["muon"]["lr"]
    do(
        [
            {"optimizer": "muon", "lr": lr, "seed": seed, "steps": steps}
            for steps, seed in product(shorter(args), seeds)
        ]
    )
    print(json.dumps(summary(rows, args), indent=1))


if __name__ == "__main__":
    main()

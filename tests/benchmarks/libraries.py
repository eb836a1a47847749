"""Chapter 1 beside a hand-written loop, a loop with accelerate, and transformers' Trainer.

pip install --target /tmp/accelerate --no-deps accelerate
PYTHONPATH=/tmp/accelerate python tests/benchmarks/libraries.py \
    --output tests/benchmarks/results/libraries_cpu.json

All of them start from the same weights and train on the same batches, in the same order, with the
same optimizer: the first losses must be equal. None evaluates, saves or generates. Each run is a
process of its own, and the four take turns. tokens/s is measured over the steps after the first
ten, and the first step's time begins with the command, on a cached corpus. Memory is the largest
resident set of the process.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import write_result
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Subset
from transformers import AutoModelForCausalLM

from common import models
from common.data import ResumableSampler, load_sequences

CHAPTER = Path(__file__).parents[2] / "01-single-gpu/train_llm.py"
WARM_UP = 10  # steps: first allocations and caches
BATCH, ACCUMULATION, LENGTH, LR, BETAS, DECAY = 8, 3, 128, 1e-3, (0.8, 0.95), 0.1


def make_model() -> nn.Module:
    """Return the chapter's model with its first weights."""
    config = models.load_config("gpt2-tiny")
    torch.manual_seed(0)
    attention = models.causal_attention(config)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    return model.train()


def make_data(steps: int) -> Subset:
    """Return the sequences that the chapter trains on, in its order."""
    args = argparse.Namespace(dataset_name="python-stdlib", dataset_subset=None)
    args.text_column, args.num_workers = None, 0
    train_data, _ = load_sequences(args, models.load_tokenizer("gpt2-tiny"), LENGTH)
    sampler = ResumableSampler(train_data, num_replicas=1, rank=0, seed=0)
    sampler.set_epoch(0, start=0)
    order = list(itertools.islice(sampler, steps * BATCH * ACCUMULATION))
    assert len(order) == steps * BATCH * ACCUMULATION, "more steps than one epoch has"
    return Subset(train_data, order)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)


def chapter(steps: int, folder: str) -> None:
    """Run the chapter's script up to its last step, without what comes after it."""
    never = str(10**9)
    sys.argv = [str(CHAPTER), "--max-steps", str(steps + 1), "--eval-freq", never]
    sys.argv += ["--ckpt-freq", never, "--save-dir", folder, "--lr", str(LR), "--warmup-steps", "0"]
    runpy.run_path(str(CHAPTER), run_name="__main__")


def by_hand(steps: int, folder: str) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    batches = iter(DataLoader(make_data(steps), batch_size=BATCH))
    for _ in range(steps):
        for _ in range(ACCUMULATION):
            (model(**next(batches)).loss / ACCUMULATION).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def accelerate(steps: int, folder: str) -> None:
    """The loop of accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    model = make_model()
    model, optimizer, dataloader = accelerator.prepare(
        model, make_optimizer(model), DataLoader(make_data(steps), batch_size=BATCH)
    )
    for batch in dataloader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def trainer(steps: int, folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        train_sampling_strategy="sequential",  # the data are in the chapter's order already
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=DECAY,
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    Trainer(model=make_model(), args=arguments, train_dataset=make_data(steps)).train()


WAYS = {
    "hand-written loop": by_hand,
    "chapter 1": chapter,
    "loop with accelerate": accelerate,
    "Trainer": trainer,
}
# Trainer divides the sum of the losses by the number of labels in the global batch. It counts the
# first label of each sequence, which no token predicts.
LOSS_SCALE = {"Trainer": ACCUMULATION * LENGTH / (LENGTH - 1)}


def measure(way: str, steps: int, started: float) -> dict[str, float]:
    """Train in this process; `started` is the time.time() of the command."""
    losses, ends = [], []

    def note_loss(module: nn.Module, _: object, output: object) -> None:
        if len(losses) < ACCUMULATION and hasattr(output, "loss"):
            losses.append(output.loss.item() * LOSS_SCALE.get(way, 1))

    def note_end(*_: object) -> None:
        ends.append(time.time())
        if len(ends) == steps:
            report()

    def report() -> None:
        seconds = ends[-1] - ends[WARM_UP - 1]
        tokens = (steps - WARM_UP) * BATCH * ACCUMULATION * LENGTH
        found = {
            "first_loss": sum(losses) / len(losses),
            "tokens_per_s": tokens / seconds,
            "first_step_s": ends[0] - started,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print("\n" + json.dumps(found), flush=True)
        os._exit(0)

    nn.modules.module.register_module_forward_hook(note_loss)
    register_optimizer_step_post_hook(note_end)
    with tempfile.TemporaryDirectory() as folder:
        WAYS[way](steps, folder)
    raise AssertionError(f"{way} took {len(ends)} of {steps} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of a run")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(args.child[0], args.steps, float(args.child[1]))
    runs = {way: [] for way in WAYS}
    for way in [*WAYS] * args.rounds:
        command = [sys.executable, __file__, "--steps", str(args.steps), "--child", way]
        done = subprocess.run(
            [*command, str(time.time())],
            env={**os.environ, "WANDB_MODE": "disabled"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{way} failed:\n{done.stderr}")
        runs[way].append(json.loads(done.stdout.splitlines()[-1]))
        print(way, runs[way][-1], flush=True)
    first_losses = [run["first_loss"] for found in runs.values() for run in found]
    assert max(first_losses) - min(first_losses) < 1e-5, "not the same model and batches"
    rows = {
        way: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for way, found in runs.items()
    }
    if args.output:
        version = importlib.metadata.version("accelerate")
        found = {"accelerate": version, "steps": args.steps, "rows": rows, "runs": runs}
        write_result(args.output, found)


if __name__ == "__main__":
    main()

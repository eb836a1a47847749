"""A hand-written loop that does nothing except train GPT-2: chapters are compared with it.

python tests/benchmarks/baseline.py -m gpt2 -s 1024 -b 64 --global-batch-size 64 --compile \
    --save-dir /tmp/baseline

The model is handwritten.py's, in plain PyTorch modules: matmuls in bfloat16 by autocast, fused
AdamW, clipped gradients, random tokens in pinned memory, on one device. The step has no timers, no
schedule, no evaluation and no checkpoint. The clock is read where a chapter logs, after the device
is done. The same lines go to the same metrics.jsonl, so two_gpus.py can treat it as a chapter.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from handwritten import HandwrittenGPT2
from torch import nn

from common import cli
from common.cli import at_least
from common.models import load_config
from common.timers import flops_per_token, peak_flops, peak_memory_gib

BATCHES = 8  # different ones, in turn


def get_args() -> argparse.Namespace:
    """Return the arguments: those of a chapter that this loop can use."""
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-e", "--experiment-name", default="baseline", help="name of the run")
    add("--save-dir", type=Path, required=True, help="folder that gets <name>/metrics.jsonl")
    add("-s", "--seq-length", default=1024, type=at_least(2), help="tokens")
    add("-m", "--model-name", default="gpt2", help="preset or folder, of GPT-2's kind")
    add("--compile", action="store_true", help="fuse kernels with torch.compile")
    add("-b", "--batch-size", default=64, type=at_least(1), help="sequences per device at once")
    add("--global-batch-size", default=64, type=at_least(1), help="sequences per step")
    add("--max-steps", default=40, type=at_least(2), help="steps in all")
    add("--log-freq", default=5, type=at_least(1), help="steps between log lines")
    return parser.parse_args()


class Loop:
    """Model, optimizer and batches; `step` is all of the training."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        config = load_config(args.model_name)
        assert config.model_type == "gpt2", "the hand-written loop has no other model"
        self.accumulation = args.global_batch_size // args.batch_size
        torch.manual_seed(0)
        self.model = HandwrittenGPT2(config).to(device)
        self.flops = flops_per_token(self.model, config, args.seq_length)
        if args.compile:
            self.model.compile()
        betas = {"betas": (0.8, 0.95), "weight_decay": 0.1}  # the chapters'
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True, **betas)
        self.autocast = torch.autocast(device.type, dtype=torch.bfloat16)
        shape = (BATCHES, args.batch_size, args.seq_length)
        self.batches = torch.randint(config.vocab_size, shape)
        if device.type == "cuda":
            self.batches = self.batches.pin_memory()
        self.device, self.next = device, 0

    def step(self) -> torch.Tensor:
        """Train on one global batch; return its mean loss."""
        total = torch.zeros((), device=self.device)
        for _ in range(self.accumulation):
            batch = self.batches[self.next % BATCHES].to(self.device, non_blocking=True)
            self.next += 1
            with self.autocast:
                loss = self.model(batch, batch) / self.accumulation
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def train(args: argparse.Namespace, device: torch.device) -> list[dict]:
    """Return what a chapter would log, as far as this loop knows it; time/total in ms."""
    loop = Loop(args, device)
    peak, lines, losses = peak_flops(device), [], []
    start = now(device)
    for step in range(1, args.max_steps + 1):
        losses.append(loop.step())
        if step % args.log_freq and step < args.max_steps:
            continue
        loss = torch.stack(losses).mean()
        seconds = (now(device) - start) / len(losses)
        rate = args.global_batch_size * args.seq_length / seconds
        lines.append(
            {
                "step": step,
                "loss": loss.item(),
                "tokens_per_s": rate,
                "tokens_per_s_per_device": rate,
                "mfu": rate * loop.flops / peak if peak else None,
                "peak_mem_gib": peak_memory_gib(device),
                "time/total": 1000 * seconds,
            }
        )
        losses, start = [], now(device)
    return lines


def main() -> None:
    args = get_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    lines = train(args, device)
    folder = args.save_dir / args.experiment_name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{lines[-1]['tokens_per_s']:,.0f} tokens/s in the last {args.log_freq} steps")


if __name__ == "__main__":
    main()

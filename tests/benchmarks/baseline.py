"""A bare loop that trains GPT-2 with nothing in it but the training: the yardstick of the chapters.

python tests/benchmarks/baseline.py -m gpt2 -s 1024 -b 64 --global-batch-size 64 --compile \
    --output baseline.json

The model is handwritten.py's, in plain PyTorch modules: products in bfloat16 by autocast, fused
AdamW, clipped gradients, random tokens in pinned memory. No timers in the step, no schedule, no
evaluation, no checkpoint. Under torchrun it is DDP, with no_sync while it accumulates. The clock is
read where a chapter logs, after the device is done; the same lines go to the same metrics.jsonl, so
throughput.py takes it for one more chapter.
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from handwritten import HandwrittenGPT2
from machine import write_result
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import cli, distributed
from common.cli import InputError, at_least
from common.models import load_config
from common.timers import flops_per_token, peak_flops, peak_memory_gib

BATCHES = 8  # different ones, in turn


def get_args() -> argparse.Namespace:
    """Return the arguments: those of a chapter that a bare loop has a use for."""
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-e", "--experiment-name", default="baseline", help="name of the run")
    add("--save-dir", type=Path, help="folder that gets <name>/metrics.jsonl")
    add("--output", type=Path, help="result file to write, with the machine")
    add("-s", "--seq-length", default=1024, type=at_least(2), help="tokens")
    add("-m", "--model-name", default="gpt2", help="preset or folder, of GPT-2's kind")
    add("--compile", action="store_true", help="fuse kernels with torch.compile")
    add("--precision", choices=["bf16", "tf32"], default="bf16", help="of the products")
    add("-b", "--batch-size", default=64, type=at_least(1), help="sequences per device at once")
    add("--global-batch-size", default=64, type=at_least(1), help="sequences per step")
    add("--lr", default=3e-4, type=at_least(0.0), help="rate")
    add("--max-grad-norm", default=1.0, type=cli.above_zero, help="clip above")
    add("--max-steps", default=40, type=at_least(2), help="steps in all")
    add("--log-freq", default=5, type=at_least(1), help="steps between log lines")
    return parser.parse_args()


class Loop:
    """Model, optimizer and batches; `step` is all of the training."""

    def __init__(self, args: argparse.Namespace, device: torch.device, world_size: int) -> None:
        config = load_config(args.model_name)
        if config.model_type != "gpt2":
            raise InputError(f"{args.model_name} is no GPT-2: the bare loop has no other model.")
        if args.global_batch_size % (args.batch_size * world_size):
            raise InputError("Give a --global-batch-size that devices and micro-batches divide.")
        self.accumulation = args.global_batch_size // (args.batch_size * world_size)
        torch.manual_seed(0)
        self.model = HandwrittenGPT2(config).to(device)
        self.flops = flops_per_token(self.model, config, args.seq_length)
        if args.compile:
            self.model.compile()
        if world_size > 1:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        betas = {"betas": (0.8, 0.95), "weight_decay": 0.1}  # the chapters'
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, fused=True, **betas)
        self.autocast = torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=args.precision == "bf16"
        )
        rank = dist.get_rank() if world_size > 1 else 0
        shape = (BATCHES, args.batch_size, args.seq_length)
        generator = torch.Generator().manual_seed(rank)
        self.batches = torch.randint(config.vocab_size, shape, generator=generator)
        if device.type == "cuda":
            self.batches = self.batches.pin_memory()
        self.device, self.next, self.max_grad_norm = device, 0, args.max_grad_norm

    def step(self) -> torch.Tensor:
        """Train on one global batch; return the mean loss of this device's part of it."""
        total = torch.zeros((), device=self.device)
        for micro_batch in range(self.accumulation):
            batch = self.batches[self.next % BATCHES].to(self.device, non_blocking=True)
            self.next += 1
            wait = self.accumulation - 1 > micro_batch and hasattr(self.model, "no_sync")
            with self.model.no_sync() if wait else nullcontext():
                with self.autocast:
                    loss = self.model(batch, batch) / self.accumulation
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def train(args: argparse.Namespace, device: torch.device, world_size: int) -> list[dict]:
    """Return what a chapter would log, as far as a bare loop knows it; time/total in ms."""
    loop = Loop(args, device, world_size)
    peak, lines, losses = peak_flops(device), [], []
    start = now(device)
    for step in range(1, args.max_steps + 1):
        losses.append(loop.step())
        if step % args.log_freq and step < args.max_steps:
            continue
        loss = torch.stack(losses).mean()
        if world_size > 1:
            dist.all_reduce(loss)
        seconds = (now(device) - start) / len(losses)
        rate = args.global_batch_size * args.seq_length / seconds
        lines.append(
            {
                "step": step,
                "loss": loss.item() / world_size,
                "tokens_per_s": rate,
                "tokens_per_s_per_device": rate / world_size,
                "mfu": rate / world_size * loop.flops / peak if peak else None,
                "peak_mem_gib": peak_memory_gib(device),
                "time/total": 1000 * seconds,
            }
        )
        losses, start = [], now(device)
    return lines


def main() -> None:
    args = get_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{local_rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")
    if world_size > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    lines = train(args, device, world_size)
    if rank == 0 and args.save_dir:
        folder = args.save_dir / args.experiment_name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if rank == 0 and args.output:
        write_result(args.output, {"world_size": world_size, "lines": lines})
    if rank == 0:
        print(f"{lines[-1]['tokens_per_s']:,.0f} tokens/s in the last {args.log_freq} steps")
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    distributed.run(main)

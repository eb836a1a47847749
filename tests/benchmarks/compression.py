"""Compress the gradients that DDP sends, and measure bytes, error and loss.

torchrun --standalone --nproc-per-node 2 tests/benchmarks/compression.py

The hooks are PyTorch's own: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
PowerSGD sends two thin matrices whose product approximates the gradient:
https://arxiv.org/abs/1905.13727
"""

import argparse
import inspect
import os
from pathlib import Path

# Hides all GPUs: the counters do not see what NCCL sends, and on a machine with GPUs PowerSGD
# expects the gradients on a GPU. This comes first, because some imports look for GPUs.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from common import cli, launch, models

STEPS = 40
UNCOMPRESSED = 10  # steps before PowerSGD starts to compress: early gradients change the most
SEQUENCES, LENGTH = 4, 128  # per rank and step
COUNTERS = Path("/proc/self/io")  # Linux: bytes read and written, sockets included


def bfloat16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # Without NCCL, DDP refuses the hook named bf16_compress_hook, although gloo can run it.
    return default_hooks.bf16_compress_hook(state, bucket)


def hooks() -> dict[str, tuple]:
    """Return the arguments of register_comm_hook by name. Each model needs its own state."""
    found = {
        "none": (None, default_hooks.allreduce_hook),
        "float16": (None, default_hooks.fp16_compress_hook),
        "bfloat16": (None, bfloat16),
    }
    for rank in (1, 4, 16):
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=UNCOMPRESSED)
        found[f"PowerSGD, rank {rank}"] = (state, powerSGD_hook.powerSGD_hook)
    return found


def tokens() -> torch.Tensor:
    """Return the tokens of argparse's source code."""
    text = inspect.getsource(argparse)
    return torch.tensor(models.load_tokenizer("gpt2-tiny")(text)["input_ids"])


def true_gradient(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean of the gradients over the ranks, flat and uncompressed, in float64."""
    loss = model(input_ids=batch, labels=batch).loss
    grads = torch.autograd.grad(loss, list(model.parameters()))
    total = torch.cat([grad.flatten() for grad in grads]).double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def bytes_sent() -> int:
    return int(COUNTERS.read_text().split()[3]) if COUNTERS.exists() else 0


def train(state: object, hook: object, text: torch.Tensor, steps: int) -> dict[str, float]:
    """Train; return bytes and error of the last step, and the mean loss of the last ten steps."""
    torch.manual_seed(0)  # the same weights for all hooks and on all ranks
    model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    # A single bucket: with gloo, PowerSGD's collectives for two buckets could run in a different
    # order on each rank.
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=100)
    ddp_model.register_comm_hook(state, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1 / 128, betas=(0.8, 0.95))
    draw = torch.Generator().manual_seed(dist.get_rank())  # different sequences on each rank
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (SEQUENCES, 1), generator=draw)
        batch = text[starts + torch.arange(LENGTH)]
        last = step == steps - 1
        exact = true_gradient(model, batch) if last else None
        before = bytes_sent()
        loss = ddp_model(input_ids=batch, labels=batch).loss
        loss.backward()
        sent = bytes_sent() - before
        if last:
            averaged = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            error = ((averaged - exact).norm() / exact.norm()).item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses[-10:]).mean()
    dist.all_reduce(mean)
    return {"bytes": sent, "error": error, "loss": mean.item() / dist.get_world_size()}


def measure(steps: int) -> dict[str, dict]:
    text = tokens()
    return {name: train(*hook, text, steps) for name, hook in hooks().items()}


def main() -> None:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", default=STEPS, type=cli.at_least(UNCOMPRESSED + 2), help="per hook"
    )
    args = parser.parse_args()
    launch.prepare_environment()
    dist.init_process_group("gloo")
    results = measure(args.steps)
    if dist.get_rank() == 0:
        print(
            f"hook               bytes per step   error of gradient   loss after {args.steps} steps"
        )
        for name, row in results.items():
            print(f"{name:17}{row['bytes']:16,}{row['error']:20.1e}{row['loss']:15.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)

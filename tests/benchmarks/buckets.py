"""What DDP's all-reduce costs a step: by size of the buckets, and with and without no_sync.

torchrun --standalone --nproc-per-node 2 tests/benchmarks/buckets.py \
    --output tests/benchmarks/results/buckets_cpu.json

Forward and backward passes of a preset on random tokens, no optimizer. A pass under no_sync sends
nothing, and with a barrier behind it takes as long as the slowest rank: what a pass takes longer
than that is what the backward pass does not hide of the all-reduce. The two are measured in turn,
several rounds for each size of the buckets, on rank 0's clock. Not compiled: instances of one model
share the graph, which TorchDynamo splits at the buckets of the first.
"""

import argparse
import os
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from machine import write_result
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from common.models import causal_attention, load_config

# MiB. None: what DDP does by itself, a first bucket of 1 and then buckets of 25.
CAPS = {"1 MiB": 1, "5 MiB": 5, "default": None, "100 MiB": 100, "all in one": 10_000}
WARM_UP = 2  # rounds that are not counted


class Bench:
    """One process of the benchmark: its device, its model, its random tokens."""

    def __init__(self, args: argparse.Namespace) -> None:
        on_gpu = torch.cuda.is_available()
        self.device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if on_gpu else "gloo")
        torch.set_float32_matmul_precision("high" if on_gpu else "highest")
        self.config = load_config(args.model_name)
        shape = (args.batch_size, args.seq_length)
        self.tokens = torch.randint(self.config.vocab_size, shape, device=self.device)

    def build(self, cap_mb: int | None) -> DistributedDataParallel:
        torch.manual_seed(0)
        attention = causal_attention(self.config)
        model = AutoModelForCausalLM.from_config(self.config, attn_implementation=attention)
        model.to(self.device)
        return DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)

    def passes(self, model: DistributedDataParallel, sent: list[bool]) -> float:
        """Time a forward and a backward pass for each entry, in ms. True: its gradients are sent.

        With a barrier where nothing is sent, since an all-reduce waits for all ranks too.
        """
        dist.barrier()
        start = self.now()
        for send in sent:
            with nullcontext() if send else model.no_sync():
                model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        if not any(sent):
            dist.barrier()
        ms = 1000 * (self.now() - start)
        model.zero_grad(set_to_none=True)
        return ms

    def all_reduce(self, n_bytes: int) -> float:
        """Time an all-reduce of so many bytes with nothing beside it, in ms."""
        gradients = torch.ones(n_bytes // 4, device=self.device)
        dist.barrier()
        start = self.now()
        dist.all_reduce(gradients)
        return 1000 * (self.now() - start)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--model-name", default="gpt2-tiny", help="a preset")
    parser.add_argument("--batch-size", type=int, default=12, help="sequences per pass")
    parser.add_argument("--seq-length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=30, help="of all variants, in turn")
    args = parser.parse_args()
    bench = Bench(args)
    times = {}
    for name, cap_mb in CAPS.items():
        model = bench.build(cap_mb)
        variants = {name: [True], f"{name}, nothing sent": [False]}
        if cap_mb is None:
            variants["4 micro-batches, all sent"] = [True] * 4
            variants["4 micro-batches, no_sync for 3"] = [False, False, False, True]
            variants["4 micro-batches, nothing sent"] = [False] * 4
        times |= {variant: [] for variant in variants}
        for _ in range(WARM_UP + args.rounds):
            for variant, sent in variants.items():
                times[variant].append(bench.passes(model, sent))
        n_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
        del model  # it holds on to the group
    rounds = range(WARM_UP + args.rounds)
    times["all-reduce alone"] = [bench.all_reduce(n_bytes) for _ in rounds]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        counted = {name: each[WARM_UP:] for name, each in times.items()}
        results = {
            "world_size": world_size,
            "model": args.model_name,
            "tokens_per_pass": bench.tokens.numel(),
            "gradient_bytes": n_bytes,
            "rounds": args.rounds,
            "ms": {
                name: {
                    "median": round(statistics.median(each), 3),
                    "quartiles": [round(q, 3) for q in statistics.quantiles(each, n=4)],
                }
                for name, each in counted.items()
            },
        }
        write_result(args.output, results)
        for name, row in results["ms"].items():
            print(f"{name:34s} {row['median']:9.2f} ms")


if __name__ == "__main__":
    main()

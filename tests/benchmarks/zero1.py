"""Bytes that each rank holds, with AdamW on every rank and with its moments sharded (ZeRO-1).

torchrun --standalone --nproc-per-node 2 tests/benchmarks/zero1.py \
    --output tests/benchmarks/results/zero1_2.json

Counts the tensors themselves after a training step of GPT-2 124M, as chapter 2 sets it up, and
times the optimizer's step.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from machine import write_result
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from common.models import causal_attention, load_config


def n_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--model-name", default="gpt2", help="a preset")
    parser.add_argument("--steps", type=int, default=8, help="the first is not counted")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    config = load_config(args.model_name)
    tokens = torch.randint(config.vocab_size, (1, 64), device=device)
    results = {"world_size": dist.get_world_size(), "model": args.model_name}
    for name in ("AdamW", "AdamW with ZeRO-1"):
        attention = causal_attention(config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(device)
        ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if name == "AdamW":
            optimizer = own = torch.optim.AdamW(model.parameters(), fused=True)
        else:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.AdamW, fused=True
            )
            own = optimizer.optim
        times = []
        for _ in range(args.steps):
            ddp_model(input_ids=tokens, labels=tokens).loss.backward()
            dist.barrier()
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.step()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - start))
        moments = [value for state in own.state.values() for value in state.values()]
        held = [
            n_bytes(model.parameters()),
            n_bytes(parameter.grad for parameter in model.parameters()),
            n_bytes(moments),
        ]
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, held)
        results[name] = {
            "bytes_by_rank": [
                dict(zip(("weights", "gradients", "moments"), each, strict=True)) for each in ranks
            ],
            "step_ms": [round(ms, 2) for ms in times[1:]],
            "step_ms_median": round(statistics.median(times[1:]), 2),
        }
        del model, ddp_model, optimizer, own, moments
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        write_result(args.output, results)


if __name__ == "__main__":
    main()

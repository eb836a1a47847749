"""Bytes that each rank stores and sends, with DDP, with ZeRO-1 and with FSDP.

torchrun --standalone --nproc-per-node 2 tests/benchmarks/sharding.py \
    --output tests/benchmarks/results/sharding_2.json

Counts the tensors themselves after a training step of GPT-2 124M on CPUs, as the chapters set it
up, beside what 04-fsdp/memory.py says; and what the collectives of one step are given. With n
ranks in a ring and S bytes in all, each rank sends

    all-reduce      2 (n - 1) / n S    of DDP: the gradients
    broadcast         (n - 1) / n S    of ZeRO-1: what a rank has updated; the mean over the ranks
    all-gather        (n - 1) / n S    of FSDP: weights, before the forward and the backward pass
    reduce-scatter    (n - 1) / n S    of FSDP: the gradients

These are formulas for S that was counted; another algorithm than a ring may send more.
"""

import argparse
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from machine import write_result
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from common.models import causal_attention, load_config
from common.sharding import find_layers

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))
from runner import load_script  # noqa: E402

STRATEGIES = {"DDP": "ddp", "DDP with ZeRO-1": "zero1", "FSDP": "fsdp"}
TOKENS = 64
# What a collective is called by all that call one, in Python or not; sends of a ring in units of
# (n - 1) / n S, and where the S bytes stand among its arguments.
COLLECTIVES = {
    "c10d::allreduce_": ("all-reduce", 2, 0),
    "c10d::broadcast_": ("broadcast", 1, 0),
    "c10d::_allgather_base_": ("all-gather", 1, 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1, 1),
}
NOT_COUNTED = {"c10d::barrier"}


def n_bytes(tensors) -> int:
    """Return the bytes of tensors; of a DTensor, those of this rank's piece."""
    pieces = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(piece.nbytes for piece in pieces)


class Collectives(TorchDispatchMode):
    """Adds up what collectives are given, by kind: {"calls": ..., "bytes": S}."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, dict[str, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith("c10d::") and name not in NOT_COUNTED:
            kind, _, position = COLLECTIVES[name]
            each = self.seen.setdefault(kind, {"calls": 0, "bytes": 0})
            each["calls"] += 1
            each["bytes"] += n_bytes(tree_leaves(args[position]))
        return func(*args, **(kwargs or {}))

    def sent(self, ranks: int) -> int:
        """Return the bytes that a rank sends in a ring."""
        factors = {kind: factor for kind, factor, _ in COLLECTIVES.values()}
        whole = sum(factors[kind] * each["bytes"] for kind, each in self.seen.items())
        return whole * (ranks - 1) // ranks


def measure(config, sharding: str) -> tuple[dict[str, int], Collectives]:
    """Train three steps; return the bytes stored after the last, and what it gave collectives."""
    attention = causal_attention(config)
    forward = model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    adamw, options = torch.optim.AdamW, {"fused": True}
    if sharding == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        for block in find_layers(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if sharding == "zero1":
        adamw, options = ZeroRedundancyOptimizer, {"optimizer_class": adamw, **options}
    optimizer = adamw(model.parameters(), **options)
    tokens = torch.randint(config.vocab_size, (1, TOKENS))
    for _ in range(3):  # DDP arranges its buckets before the second
        optimizer.zero_grad(set_to_none=True)
        with Collectives() as collectives:
            forward(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    states = (optimizer.optim if sharding == "zero1" else optimizer).state.values()
    held = {
        "weights": n_bytes(model.parameters()),
        "gradients": n_bytes(parameter.grad for parameter in model.parameters()),
        "moments": n_bytes(s[key] for s in states for key in ("exp_avg", "exp_avg_sq")),
    }
    return held, collectives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--model-name", default="gpt2", help="a preset")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = load_config(args.model_name)
    memory = load_script(REPOSITORY / "04-fsdp/memory.py")
    results = {"world_size": ranks, "model": args.model_name}
    for name, sharding in STRATEGIES.items():
        held, collectives = measure(config, sharding)
        gc.collect()
        by_rank = [None] * ranks
        dist.all_gather_object(by_rank, held)
        options = memory.Options(sharding=sharding, gpus=ranks, seq_length=TOKENS)
        predicted = memory.predict(config, options)
        results[name] = {
            "bytes_by_rank": by_rank,
            "predicted": {
                "weights": predicted["parameters"],
                "gradients": predicted["gradients"],
                "moments": predicted["moments"],
            },
            "collectives": collectives.seen,
            "sent_bytes": collectives.sent(ranks),
        }
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        write_result(args.output, results)


if __name__ == "__main__":
    main()

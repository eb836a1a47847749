"""Gradient clipping, with a norm that does not depend on how the gradients are sharded."""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients down to `max_norm`; return their norm before that, a float32 scalar.

    All ranks must call this. torch.nn.utils.clip_grad_norm_ does the same, but on a CPU its float32
    norm of 40M elements is wrong by 0.3%, and by another amount for each shard of them.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    shards = defaultdict(list)  # by the number of ranks that hold the same shard
    for gradient in gradients:
        shard = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        shards[_copies(gradient)].append(shard)
    # With shards, the sum over all ranks counts each as often as it is held, so each holder gives a
    # share. Without, each rank has the complete gradients, and there is nothing to sum.
    square = sum(_norm(group).double().square() / copies for copies, group in shards.items())
    if isinstance(gradients[0], DTensor):
        dist.all_reduce(square)
    norm = square.sqrt().float()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all elements, accurate to 1e-7 for any sharding that keeps rows whole."""
    # float32 on CUDA: the kernels add in a tree, which is accurate, and one call does it all.
    # Otherwise, first each row in float32, then the rows in float64: a CPU adds many float32
    # numbers inaccurately, and a sum of bfloat16 numbers would be rounded to bfloat16.
    if tensors[0].is_cuda and tensors[0].dtype == torch.float32:
        return nn.utils.get_total_norm(tensors)
    rows = [torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32).reshape(-1) for t in tensors]
    return torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64)


def _copies(gradient: torch.Tensor) -> int:
    """Return how many ranks hold the same shard (HSDP, tensor parallelism); 1 without shards."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())

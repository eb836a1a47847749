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
    norm of 40M elements is wrong by 0.1%, and by another amount for each shard of them. Here each
    row has a float32 norm, and the norm of these norms is a float64. FSDP shards between rows, so
    this gives the same result on any number of ranks, and it is not slower.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    rows = defaultdict(list)  # by the number of ranks that hold the same shard
    for gradient in gradients:
        shard = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        norms = torch.linalg.vector_norm(shard, dim=-1, dtype=torch.float32)
        rows[_copies(gradient)].append(norms.reshape(-1))
    square = sum(
        torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64).square() / copies
        for copies, norms in rows.items()
    )
    if isinstance(gradients[0], DTensor):
        dist.all_reduce(square)
    norm = square.sqrt().float()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def _copies(gradient: torch.Tensor) -> int:
    """Return how many ranks hold the same shard of a gradient.

    HSDP has a copy on every node. Tensor parallelism has a copy of the norms' weights on every rank
    that shares the work of a layer.
    """
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())

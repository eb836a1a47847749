"""Measure the error of reducing gradients in low precision, for different orders of addition.

torchrun --standalone --nproc-per-node 2 05-mixed-precision/experiments/reduction.py

The first lines are measured on the ranks of this run, with gloo. The other lines are simulated in
one process, in the order in which a ring or a tree of ranks adds. Each partial sum is rounded to
the format, because that is what the next rank receives.
"""

import os

import torch
import torch.distributed as dist

from common import launch
from common.cli import RunError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WORLD_SIZES = tuple(2**power for power in range(1, 11))
SIZE = 2**14  # numbers per gradient, a multiple of every world size


def gradients(world_size: int, alike: bool) -> torch.Tensor:
    """Return a gradient for each rank, of the shape (world_size, SIZE), with numbers around 1.

    They are independent, as with small batches late in training, or alike except for 10% of noise,
    as with large batches.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(world_size, SIZE, generator=generator)
    return torch.randn(SIZE, generator=generator) + 0.1 * noise if alike else noise


def ring_sum(grads: torch.Tensor) -> torch.Tensor:
    """Add up gradients, (world_size, size), over the ranks in their dtype, in the order of a ring.

    Each rank owns a chunk. With gloo, the sum of chunk c starts at rank c - 1, goes to rank c - 2
    and on around the ring, and ends at rank c. NCCL's ring starts at c + 1 and goes the other way.
    """
    world_size, size = grads.shape
    chunks = grads.view(world_size, world_size, size // world_size)  # [rank, chunk]
    chunk = torch.arange(world_size)
    total = chunks[(chunk - 1) % world_size, chunk]
    for hop in range(2, world_size + 1):
        total = total + chunks[(chunk - hop) % world_size, chunk]  # rounds once per hop
    return total.flatten()


def tree_sum(grads: torch.Tensor) -> torch.Tensor:
    """Add up pairs, then pairs of pairs: each number takes part in log2(world_size) additions."""
    while len(grads) > 1:
        grads = grads[0::2] + grads[1::2]
    return grads[0]


def error(total: torch.Tensor, grads: torch.Tensor) -> float:
    """Return |total - sum| / |sum|, where sum is the float64 sum over ranks, in Euclidean norms."""
    exact = grads.double().sum(dim=0)
    return ((total.double() - exact).norm() / exact.norm()).item()


def measure_ranks() -> dict[str, dict]:
    """Return for each collective and dtype the error, and whether the result equals ring_sum."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {}
    # The collective of FSDP, which was renamed in torch 2.13. dist.reduce_scatter adds differently.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    grads = gradients(world_size, alike=False)
    for dtype in DTYPES:
        reduced = grads[rank].to(dtype, copy=True)
        dist.all_reduce(reduced)
        scattered = torch.empty(SIZE // world_size, dtype=dtype)
        reduce_scatter(scattered, grads[rank].to(dtype))
        gathered = torch.empty(SIZE, dtype=dtype)
        dist.all_gather(list(gathered.tensor_split(world_size)), scattered)
        expected = ring_sum(grads.to(dtype))
        for name, total in (("all_reduce", reduced), ("reduce_scatter", gathered)):
            same = torch.equal(total, expected)
            found[f"{name}, {str(dtype)[6:]}"] = {"error": error(total, grads), "as_ring": same}
    return found


def simulate() -> list[dict]:
    """Return the errors for each number of ranks, kind of gradients, order and dtype."""
    rows = []
    for world_size in WORLD_SIZES:
        for kind in ("independent", "alike"):
            grads = gradients(world_size, alike=kind == "alike")
            row = {"ranks": world_size, "gradients": kind}
            for order in (ring_sum, tree_sum):
                for dtype in DTYPES:
                    # Rounding the gradients themselves is part of the error.
                    key = f"{order.__name__[:4]}, {str(dtype)[6:]}"
                    row[key] = error(order(grads.to(dtype)), grads)
            rows.append(row)
    return rows


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # use gloo, whose order of addition is known
    launch.prepare_environment()
    if SIZE % int(os.environ["WORLD_SIZE"]):
        raise RunError("The number of ranks must be a power of two: change --nproc-per-node.")
    dist.init_process_group("gloo")
    measured = measure_ranks()
    if dist.get_rank() == 0:
        for name, row in measured.items():
            same = "bit-identical to ring_sum" if row["as_ring"] else "NOT identical to ring_sum"
            print(f"{dist.get_world_size()} ranks, {name:24} error {row['error']:.1e}, {same}")
        rows = simulate()
        print("\nranks  gradients  " + "".join(f"{key:>15}" for key in list(rows[0])[2:]))
        for ranks, kind, *errors in map(dict.values, rows):
            print(f"{ranks:5}  {kind:11}" + "".join(f"{each:15.1e}" for each in errors))
        for dtype in DTYPES:
            ones = torch.ones(1024, SIZE, dtype=dtype)
            print(f"1024 times 1 in {str(dtype)[6:]}, ring: {ring_sum(ones)[0]:g}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)

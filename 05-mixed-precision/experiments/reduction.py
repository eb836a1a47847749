"""Simulate sums of gradients in low precision, in the order in which a ring or a tree adds.

python 05-mixed-precision/experiments/reduction.py

Each partial sum is rounded to the format, because that is what the next rank receives.
"""

import torch

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


def main() -> None:
    cases = [(order, dtype) for order in (ring_sum, tree_sum) for dtype in DTYPES]
    keys = [f"{order.__name__[:4]}, {str(dtype)[6:]}" for order, dtype in cases]
    print("ranks  gradients  " + "".join(f"{key:>15}" for key in keys))
    for world_size in WORLD_SIZES:
        for kind in ("independent", "alike"):
            grads = gradients(world_size, alike=kind == "alike")
            # Rounding the gradients themselves is part of the error.
            errors = [error(order(grads.to(dtype)), grads) for order, dtype in cases]
            print(f"{world_size:5}  {kind:11}" + "".join(f"{each:15.1e}" for each in errors))
    for dtype in DTYPES:
        ones = torch.ones(1024, SIZE, dtype=dtype)
        print(f"1024 times 1 in {str(dtype)[6:]}, ring: {ring_sum(ones)[0]:g}")


if __name__ == "__main__":
    main()

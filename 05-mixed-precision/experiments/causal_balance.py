"""Time each rank's causal attention: positions in the order of ranks, and in zigzag order.

python 05-mixed-precision/experiments/causal_balance.py

The work is the number of pairs of a query and a key that it may attend to.
"""

import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from common import cli, launch

HEADS, HEAD_SIZE, REPEATS = 8, 64, 5
ORDERS = {
    "order of ranks": lambda rank, n: (2 * rank, 2 * rank + 1),
    "zigzag order": lambda rank, n: (rank, 2 * n - 1 - rank),
}


def attend(chunk: int, length: int, tensor: torch.Tensor) -> None:
    """Do the work of a chunk's attention in two calls: to all earlier chunks, and within the chunk.

    Only the time matters here: the two results are not merged. One call with causal_lower_right, as
    in the diff, would also make a mask on a CPU.
    """
    query = tensor[:, :, chunk * length : (chunk + 1) * length]
    if chunk:
        before = tensor[:, :, : chunk * length]
        scaled_dot_product_attention(query, before, before)
    scaled_dot_product_attention(query, query, query, is_causal=True)


def pairs(chunk: int, length: int) -> int:
    return chunk * length**2 + length * (length + 1) // 2


def main() -> None:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default=4, type=cli.at_least(1), help="that share a sequence")
    parser.add_argument("--length", default=4096, type=cli.at_least(8), help="positions")
    args = parser.parse_args()
    length = args.length // (2 * args.ranks)  # of a chunk
    tensor = torch.randn(1, HEADS, 2 * args.ranks * length, HEAD_SIZE)
    for name, chunks_of in ORDERS.items():
        work, seconds = [], []
        for rank in range(args.ranks):
            chunks, times = chunks_of(rank, args.ranks), []
            for _ in range(REPEATS):
                start = time.perf_counter()
                for chunk in chunks:
                    attend(chunk, length, tensor)
                times.append(time.perf_counter() - start)
            work.append(sum(pairs(chunk, length) for chunk in chunks))
            seconds.append(min(times))
        print(f"{name}:")
        for rank, (each, took) in enumerate(zip(work, seconds, strict=True)):
            share = each * args.ranks / sum(work)
            print(f"  rank {rank}: {share:.2f} of the mean work, {1000 * took:.1f} ms")


if __name__ == "__main__":
    launch.run(main)

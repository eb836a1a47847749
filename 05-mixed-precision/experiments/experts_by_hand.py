"""Compute a mixture of experts whose experts are on several ranks, and compare with one rank.

torchrun --standalone --nproc-per-node 4 05-mixed-precision/experiments/experts_by_hand.py

Each rank has its own tokens and two of the experts. Tokens travel to their experts and back, so all
ranks exchange rows twice in the forward pass and twice in the backward pass. No token is dropped.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear, silu, softmax

from common import launch

TOKENS, WIDTH, HIDDEN = 256, 64, 128  # tokens of each rank
EXPERTS_PER_RANK, TOP = 2, 2


class Exchange(torch.autograd.Function):
    """An all-to-all: send sizes[0][r] rows to rank r, receive sizes[1][r] rows from it."""

    sent = 0  # bytes that left this rank

    @staticmethod
    def forward(ctx, rows: torch.Tensor, sizes: tuple[list[int], list[int]]) -> torch.Tensor:
        ctx.sizes = sizes
        outgoing, incoming = sizes
        received = rows.new_empty(sum(incoming), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), incoming, outgoing)
        stays = outgoing[dist.get_rank()]
        Exchange.sent += (len(rows) - stays) * rows[:1].nbytes
        return received

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Exchange.apply(gradient, ctx.sizes[::-1]), None  # gradients go the other way


def route(x: torch.Tensor, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of each token's TOP experts, and their numbers: [tokens, TOP] each."""
    weights, experts = softmax(linear(x, router), dim=-1).topk(TOP)
    return weights / weights.sum(-1, keepdim=True), experts


def expert(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return linear(silu(linear(x, up)), down)


def on_one_rank(x: torch.Tensor, router: torch.Tensor, ups, downs) -> torch.Tensor:
    """Return the layer's output, [tokens, WIDTH]: each expert computes its tokens."""
    weights, experts = route(x, router)
    output = torch.zeros_like(x)
    for number, (up, down) in enumerate(zip(ups, downs, strict=True)):
        tokens, place = (experts == number).nonzero(as_tuple=True)
        result = expert(x[tokens], up, down) * weights[tokens, place, None]
        output = output.index_add(0, tokens, result)
    return output


def on_all_ranks(x: torch.Tensor, router: torch.Tensor, ups, downs) -> tuple[torch.Tensor, int]:
    """Return the output of this rank's tokens, and how many rows its own experts computed."""
    weights, experts = route(x, router)
    # A token has TOP rows, one for each of its experts. Sorted, all rows for a rank are neighbours.
    order = experts.flatten().argsort(stable=True)
    counts = experts.flatten().bincount(minlength=EXPERTS_PER_RANK * dist.get_world_size())
    # Each rank tells the others how many rows will come, for each expert: [ranks, its experts].
    expected = torch.empty_like(counts)
    dist.all_to_all_single(expected, counts)
    by_rank = [c.view(-1, EXPERTS_PER_RANK).sum(1).tolist() for c in (counts, expected)]
    rows = Exchange.apply(x[order // TOP], tuple(by_rank))
    # Rows arrive by rank, and from each rank by expert.
    numbers = torch.arange(EXPERTS_PER_RANK).repeat(dist.get_world_size())
    numbers = numbers.repeat_interleave(expected)
    results = torch.zeros_like(rows)
    for number, (up, down) in enumerate(zip(ups, downs, strict=True)):
        mine = (numbers == number).nonzero()[:, 0]
        results = results.index_add(0, mine, expert(rows[mine], up, down))
    back = Exchange.apply(results, tuple(by_rank[::-1]))
    scaled = back * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // TOP, scaled), len(rows)


def compare(bias: float) -> str:
    """Compare outputs and gradients; return what this rank did. bias: in favour of expert 0."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    n_experts = EXPERTS_PER_RANK * world_size
    torch.manual_seed(0)  # all ranks have the same weights, and know all tokens
    x = torch.randn(world_size * TOKENS, WIDTH)
    x[:, 0] = 1  # a constant, so that the router can have a bias
    router = torch.randn(n_experts, WIDTH) / WIDTH**0.5
    router[0, 0] += bias
    ups = torch.randn(n_experts, HIDDEN, WIDTH) / WIDTH**0.5
    downs = torch.randn(n_experts, WIDTH, HIDDEN) / HIDDEN**0.5
    target = torch.randint(WIDTH, (world_size * TOKENS,))
    whole = [tensor.clone().requires_grad_() for tensor in (x, router, ups, downs)]
    output = on_one_rank(*whole)
    cross_entropy(output, target, reduction="sum").backward()

    tokens = slice(rank * TOKENS, (rank + 1) * TOKENS)
    own = slice(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
    parts = [nn.Parameter(part.clone()) for part in (x[tokens], router, ups[own], downs[own])]
    Exchange.sent = 0
    own_output, n_rows = on_all_ranks(*parts)
    cross_entropy(own_output, target[tokens], reduction="sum").backward()
    # The gradients of experts are complete: the rows brought them. The router's are not.
    dist.all_reduce(parts[1].grad)
    torch.testing.assert_close(own_output, output[tokens], rtol=1e-4, atol=1e-5)
    for part, full, piece in zip(parts, whole, (tokens, ..., own, own), strict=True):
        torch.testing.assert_close(part.grad, full.grad[piece], rtol=1e-3, atol=1e-4)
    return f"rank {rank} computes {n_rows} rows, sends {Exchange.sent:,} B"


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # use the CPU: there may be more ranks than GPUs
    launch.prepare_environment()  # also runs as a single process, without torchrun
    dist.init_process_group("gloo")
    for name, bias in (("balanced", 0.0), ("unbalanced", 3.0)):
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, compare(bias))
        if dist.get_rank() == 0:
            print(f"{name}: outputs and gradients as on one rank", *everything, sep="\n  ")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)

"""Compute one MLP block on several ranks, column- and row-wise, and compare with one rank.

torchrun --standalone --nproc-per-node 2 05-mixed-precision/experiments/tensor_parallel_by_hand.py
"""

import torch
import torch.distributed as dist
from torch.nn.functional import linear, silu

from common import launch

TOKENS, WIDTH, HIDDEN = 64, 128, 352  # the sizes of the preset llama-tiny-8-heads
sent = 0  # bytes that a ring all-reduce has sent from this rank


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks, and count the bytes."""
    global sent
    total = tensor.clone()
    dist.all_reduce(total)
    sent += 2 * (dist.get_world_size() - 1) * total.nbytes // dist.get_world_size()
    return total


class CopyToRanks(torch.autograd.Function):
    """Copy in the forward pass, all-reduce in the backward pass."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return all_reduce(gradient)  # each rank knows only what its own columns did with the input


class SumOverRanks(torch.autograd.Function):
    """All-reduce in the forward pass, copy in the backward pass."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        return all_reduce(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient  # d(a + b) = da + db: each rank's term gets the whole gradient


def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return the output of Llama's MLP. A weight has the shape [outputs, inputs]."""
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def main() -> None:
    launch.prepare_environment()  # also runs as a single process, without torchrun
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all ranks have the same input and the same weights
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    shapes = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    weights = {name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    expected = [x, *(weight.requires_grad_() for weight in weights.values())]
    output = mlp(*expected)
    output.square().mean().backward()

    # gate and up: some outputs, of all inputs. down: the inputs that these outputs are.
    dims = {"gate": 0, "up": 0, "down": 1}
    parts = {name: w.detach().chunk(world_size, dims[name])[rank] for name, w in weights.items()}
    shards = [part.clone().requires_grad_() for part in parts.values()]
    own_x = x.detach().clone().requires_grad_()
    own_output = SumOverRanks.apply(mlp(CopyToRanks.apply(own_x), *shards))
    own_output.square().mean().backward()

    pairs = {"output": (own_output, output), "gradient of x": (own_x.grad, x.grad)}
    for (name, weight), shard in zip(weights.items(), shards, strict=True):
        right = weight.grad.chunk(world_size, dims[name])[rank]
        pairs[f"gradient of {name}"] = (shard.grad, right)
    lines = [f"rank {rank} holds {[list(shard.shape) for shard in shards]}, sends {sent:,} B"]
    for name, (found, right) in pairs.items():
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5 * right.abs().max().item())
        lines.append(f"  {name:16} {list(found.shape)!s:11} as on one rank")
    everything = [None] * world_size
    dist.all_gather_object(everything, "\n".join(lines if rank == 0 else lines[:1]))
    if rank == 0:
        print("\n".join(everything))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)

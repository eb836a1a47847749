"""Split a model into stages, one per rank, and train it with two schedules: GPipe and 1F1B.

torchrun --standalone --nproc-per-node 4 05-mixed-precision/experiments/pipeline_by_hand.py

On up to 8 ranks, it prints when each rank computed, and compares the gradients with those of one
process. A stage sleeps for its computing time, because four processes may have to share two cores:
a process that sleeps needs no core, so the schedule looks as it does on four GPUs.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

from common import launch

MICRO_BATCHES, ROWS, WIDTH = 8, 4, 16
FORWARD_S, BACKWARD_S = 0.05, 0.1  # the backward pass of a stage takes about twice as long
COLUMN_S = 0.025  # what a character of the drawing stands for


class Stage(nn.Sequential):
    """A part of the model, which takes its time in both directions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        output = super().forward(x)
        if output.requires_grad:  # not while torch 2.11 finds out the shape of the output
            output.register_hook(lambda _: time.sleep(BACKWARD_S))
        return output


def gpipe(rank: int, n_ranks: int) -> list[tuple[str, int]]:
    """Return what a rank does, in order: all forward passes, then all backward passes."""
    return [(kind, number) for kind in "FB" for number in range(MICRO_BATCHES)]


def one_forward_one_backward(rank: int, n_ranks: int) -> list[tuple[str, int]]:
    """Return what a rank does: each backward pass as soon as it can be done.

    Early ranks begin with more forward passes, because their micro-batches come back later.
    """
    warm_up = min(MICRO_BATCHES, n_ranks - 1 - rank)
    forward = [("F", number) for number in range(MICRO_BATCHES)]
    backward = [("B", number) for number in range(MICRO_BATCHES)]
    steady = [each for pair in zip(forward[warm_up:], backward, strict=False) for each in pair]
    return forward[:warm_up] + steady + backward[MICRO_BATCHES - warm_up :]


def train_step(
    stage: Stage, schedule: list[tuple[str, int]], inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[list[tuple[str, int, float, float]], int]:
    """Run one step; the gradients are in the parameters.

    Return (pass, micro-batch, start, end) of all that this rank computed, in seconds, and the most
    micro-batches whose activations it kept at a time.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept, sending, spans, most = {}, [], [], 0
    for kind, number in schedule:
        source = rank - 1 if kind == "F" else rank + 1
        received = torch.empty(ROWS, WIDTH)
        if 0 <= source <= last:
            dist.recv(received, src=source)
        start = time.time()
        if kind == "F":
            x = received.requires_grad_() if rank > 0 else inputs[number]
            output = stage(x)
            if rank == last:  # the mean over the micro-batches
                output = mse_loss(output, targets[number]) / MICRO_BATCHES
            kept[number] = x, output
            most = max(most, len(kept))
            result, target = output.detach(), rank + 1
        else:
            x, output = kept.pop(number)
            output.backward(received if rank < last else None)
            result, target = x.grad, rank - 1
        spans.append((kind, number, start, time.time()))
        # Neighbours may send to each other at the same time. If each waited until the other
        # receives, they would wait for ever. isend does not wait.
        if 0 <= target <= last:
            sending.append((dist.isend(result, dst=target), result))
    for work, _ in sending:  # the list has kept the tensors until they are sent
        work.wait()
    return spans, most


def draw(spans: list[tuple[str, int, float, float]], begin: float) -> str:
    """Return a line: 0 is the forward pass of micro-batch 0, a its backward pass, . is idle."""
    line = ["."] * round((max(end for *_, end in spans) - begin) / COLUMN_S)
    for kind, number, start, end in spans:
        for column in range(round((start - begin) / COLUMN_S), round((end - begin) / COLUMN_S)):
            line[column] = str(number) if kind == "F" else "abcdefgh"[number]
    return "".join(line)


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # use the CPU: there may be more ranks than GPUs
    launch.prepare_environment()
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all ranks know the whole model, and compare their stage with it
    stages = [Stage(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n_ranks)]
    inputs, targets = torch.randn(2, MICRO_BATCHES, ROWS, WIDTH)
    whole = nn.Sequential(*[nn.Sequential(*stage) for stage in stages])  # without sleep
    mse_loss(whole(inputs), targets).backward()
    stage = stages[rank]
    expected = [parameter.grad.clone() for parameter in stage.parameters()]
    for schedule in (gpipe, one_forward_one_backward):
        stage.zero_grad()
        dist.barrier()
        spans, most = train_step(stage, schedule(rank, n_ranks), inputs, targets)
        torch.testing.assert_close([weight.grad for weight in stage.parameters()], expected)
        everything = [None] * n_ranks
        dist.all_gather_object(everything, (spans, most))
        if rank == 0:
            report(schedule.__name__, everything)
    # PyTorch's own pipeline: the same schedule, for any module.
    stage.zero_grad()
    pipeline = Schedule1F1B(
        PipelineStage(stage, rank, n_ranks, torch.device("cpu")), MICRO_BATCHES, loss_fn=mse_loss
    )
    arguments = [inputs.flatten(0, 1)] if rank == 0 else []  # only the first stage has inputs
    pipeline.step(*arguments, target=targets.flatten(0, 1))
    torch.testing.assert_close([weight.grad for weight in stage.parameters()], expected)
    if rank == 0:
        print("torch.distributed.pipelining: the gradients of one process")
    dist.barrier()
    dist.destroy_process_group()


def report(name: str, everything: list[tuple[list, int]]) -> None:
    """Print the timeline of all ranks, and the share of the time in which they were idle."""
    begin = min(spans[0][2] for spans, _ in everything)
    duration = max(spans[-1][3] for spans, _ in everything) - begin
    busy = sum(end - start for spans, _ in everything for *_, start, end in spans)
    n_ranks = len(everything)
    print(f"{name}: the gradients of one process")
    for rank, (spans, most) in enumerate(everything):
        print(f"  rank {rank} {draw(spans, begin)}  keeps {most} micro-batches")
    idle = 1 - busy / (duration * n_ranks)
    bubble = (n_ranks - 1) / (MICRO_BATCHES + n_ranks - 1)
    print(f"  idle: {idle:.0%} of {duration:.2f} s, (n - 1) / (m + n - 1) = {bubble:.0%}")


if __name__ == "__main__":
    launch.run(main)

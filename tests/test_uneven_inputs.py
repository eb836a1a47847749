"""Ranks with unequal numbers of batches: what goes wrong, and what Join does about it."""

import datetime
import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from runner import ask_ranks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def rank_main(rank: int, folder: str, joined: bool, queue) -> None:
    """Train on 2 batches on rank 0 and 3 on rank 1; put the weight, or the error, on the queue."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=3),
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    ddp_model = DistributedDataParallel(model)
    try:
        with Join([ddp_model]) if joined else nullcontext():
            for _ in range(2 + rank):
                ddp_model(torch.ones(1, 1)).sum().backward()
                with torch.no_grad():
                    model.weight -= model.weight.grad
                model.weight.grad = None
        if not joined:
            dist.barrier()
        queue.put((rank, model.weight.item()))
    except RuntimeError as error:
        queue.put((rank, str(error)))
    queue.close()
    queue.join_thread()
    os._exit(0)


def run(folder, joined: bool) -> list:
    return ask_ranks(2, rank_main, str(folder), joined)


def test_a_rank_with_one_batch_more_waits_for_the_others(tmp_path):
    """In vain: its third all-reduce meets the barrier of the other, or nothing at all."""
    answers = run(tmp_path, joined=False)
    assert any(isinstance(answer, str) for answer in answers), answers


def test_join_answers_for_the_rank_that_has_finished(tmp_path):
    """The third gradient of 1 is divided by both ranks, though only one has it."""
    torch.manual_seed(0)
    start = torch.nn.Linear(1, 1, bias=False).weight.item()
    assert run(tmp_path, joined=True)[1] == pytest.approx(start - 2.5, abs=1e-3)

"""Checkpoints that every chapter can save and any other can load, on any number of ranks."""

import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.cli import InputError
from common.record import commit_checkpoint, measure_file

# Chapter 1 has no process group, and says so to each call.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def save_checkpoint(
    run_dir: Path,
    model: nn.Module,
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    state: dict,
    training: dict[str, object],
    keep: int,
) -> None:
    """Save everything that the next step depends on; all ranks must call this.

    state: the position ("step" at least) and other tensors and numbers, equal on all ranks.
    training: from describe_training. keep: how many of the newest checkpoints stay.

    The checkpoint is written beside the others and renamed when it is complete, and only then is
    state.json replaced: whenever the process is killed, the last complete checkpoint still loads.
    Raises InputError if it cannot be written (a full disk); what was there before is kept.
    """
    rank, world_size = _rank_and_world_size()
    path = Path("checkpoints") / f"step-{state['step']:08d}"
    unfinished = run_dir / "checkpoints" / f".unfinished-{path.name}"
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    _barrier()
    content = _content(model, optimizer, lr_scheduler, state, rank)
    try:
        dcp.save(content, checkpoint_id=unfinished, no_dist=world_size == 1)
        files = sorted(entry for entry in unfinished.iterdir())
        sums = _gather({file.name: measure_file(file) for file in files[rank::world_size]})
        if rank == 0:
            commit_checkpoint(run_dir, path, unfinished, state["step"], training, sums, keep)
    except (CheckpointException, OSError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise InputError(
            f"The checkpoint of step {state['step']} could not be written to {run_dir} "
            f"({_cause(error)}): make room and start the same command again, it goes on from the "
            "last complete checkpoint."
        ) from error
    _barrier()


def load_checkpoint(
    checkpoint: Path,
    model: nn.Module,
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    state: dict,
) -> None:
    """Load the checkpoint that find_checkpoint found, in place; all ranks must call this.

    A rank that the saving run did not have keeps the random state that it has.
    """
    rank, world_size = _rank_and_world_size()
    content = _content(model, optimizer, lr_scheduler, state, rank)
    try:
        dcp.load(
            content,
            checkpoint_id=checkpoint,
            planner=DefaultLoadPlanner(allow_partial_load=True),
            no_dist=world_size == 1,
        )
    except (CheckpointException, OSError) as error:
        raise InputError(f"The checkpoint {checkpoint} cannot be read: {_cause(error)}.") from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    lr_scheduler.load_state_dict(content["lr_scheduler"])
    state.update(content["state"])
    _set_rng_state(content[f"rng-{rank}"])


def _content(
    model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler, state: dict, rank: int
) -> dict:
    # Without any wrapper's prefix, and sharded where the model is: the same for all chapters.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "lr_scheduler": lr_scheduler.state_dict(),
        "state": state,
        f"rng-{rank}": _get_rng_state(),
    }


def _rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _gather(part: dict) -> dict:
    """Return the union of all ranks' dictionaries."""
    if not dist.is_initialized():
        return part
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return {key: value for each in parts for key, value in sorted(each.items())}


def _cause(error: BaseException) -> str:
    """Return the reason in one line.

    CheckpointException holds an error for each rank, and a full disk ends in a RuntimeError of the
    writer of PyTorch's files, with the operating system's error somewhere in its context.
    """
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
        link = link.__cause__ or link.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _get_rng_state() -> dict[str, object]:
    rng = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return rng


def _set_rng_state(rng: dict[str, object]) -> None:
    torch.set_rng_state(rng["torch"])
    np.random.set_state(rng["numpy"])
    random.setstate(rng["python"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])

"""Checkpoints that every chapter can save and any other can load, on any number of ranks."""

import argparse
import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.cli import InputError
from common.data import Blocks

FORMAT = 1
# With another value of one of these the rest of a run would not be the same training.
FIXED_ARGUMENTS = (
    "seed",
    "param_dtype",
    "global_batch_size",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
)


def describe_training(
    args: argparse.Namespace,
    model: nn.Module,
    train_data: Blocks,
    seq_length: int,
    lr: float,
    total_steps: int,
) -> dict[str, object]:
    """Return all that must stay as it is while a run goes on, by the names of the arguments.

    Values are JSON. The model counts by the names and shapes of its parameters, which no wrapper of
    a later chapter changes; the data set by its tokens.
    """
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    digest = xxhash.xxh3_64_hexdigest(json.dumps(shapes, sort_keys=True).encode())
    return {
        "model": f"{model.config.model_type}-{digest}",
        "dataset": train_data.digest,
        "seq_length": seq_length,
        "lr": lr,
        "total_steps": total_steps,
        **{name: getattr(args, name) for name in FIXED_ARGUMENTS},
    }


def find_checkpoint(run_dir: Path, training: dict[str, object]) -> Path | None:
    """Return the folder of the newest complete checkpoint of a run, or None for a new run.

    Raises InputError if the run was started with another `training`, or its checkpoint is
    damaged. Nothing is loaded yet.
    """
    record_file = run_dir / "state.json"
    if not record_file.exists():
        return None
    try:
        state = json.loads(record_file.read_text(encoding="utf-8"))
        saved, records = state["training"], state["checkpoints"]
        present = [r for r in records if (run_dir / r["path"]).is_dir()]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{record_file} is damaged ({error!r}): restore it, or start anew with another -e."
        ) from error
    for name, value in training.items():
        if name in saved and saved[name] != value:
            raise InputError(
                f"The run {run_dir} was started with {name} {saved[name]}, not {value}: go on with "
                "the old value, or start anew with another -e."
            )
    if not present:
        raise InputError(f"The checkpoints of {run_dir} are gone: start anew with another -e.")
    record = present[-1]
    for name, facts in record["files"].items():
        if _measure(run_dir / record["path"] / name) != facts:
            older = (
                f"delete {run_dir / record['path']} to go on from step {present[-2]['step']}, or "
            )
            raise InputError(
                f"The checkpoint file {run_dir / record['path'] / name} is damaged: "
                f"{older if len(present) > 1 else ''}start anew with another -e."
            )
    return run_dir / record["path"]


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
    model_state, optimizer_state = get_state_dict(model, optimizer)
    content = {
        "model": model_state,
        "optimizer": optimizer_state,
        "lr_scheduler": lr_scheduler.state_dict(),
        "state": state,
        f"rng-{rank}": _get_rng_state(),
    }
    try:
        dcp.save(content, checkpoint_id=unfinished, no_dist=world_size == 1)
        files = sorted(entry for entry in unfinished.iterdir())
        sums = _gather({file.name: _measure(file) for file in files[rank::world_size]})
        if rank == 0:
            _commit(run_dir, path, unfinished, state["step"], training, sums, keep)
    except (CheckpointException, OSError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise InputError(
            f"The checkpoint of step {state['step']} could not be written to {run_dir} "
            f"({_cause(error)}): make room and start the same command again, it goes on from the "
            "last complete checkpoint."
        ) from error
    _barrier()


def _commit(
    run_dir: Path,
    path: Path,
    unfinished: Path,
    step: int,
    training: dict[str, object],
    files: dict[str, dict],
    keep: int,
) -> None:
    record_file = run_dir / "state.json"
    records = []
    if record_file.exists():
        records = json.loads(record_file.read_text(encoding="utf-8"))["checkpoints"]
    # A checkpoint of this step or a later one is left from before a kill or a return to an older
    # one. It is trained again, so it is in the way.
    records = [r for r in records if r["step"] < step and (run_dir / r["path"]).is_dir()]
    shutil.rmtree(run_dir / path, ignore_errors=True)
    unfinished.replace(run_dir / path)
    records = [*records, {"step": step, "path": path.as_posix(), "files": files}][-keep:]
    temporary = run_dir / "state.json.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "training": training, "checkpoints": records}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(record_file)
    kept = {Path(record["path"]).name for record in records}
    for folder in (run_dir / "checkpoints").iterdir():
        if re.fullmatch(r"(\.unfinished-)?step-\d+", folder.name) and folder.name not in kept:
            shutil.rmtree(folder)


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
    model_state, optimizer_state = get_state_dict(model, optimizer)
    content = {
        "model": model_state,
        "optimizer": optimizer_state,
        "lr_scheduler": lr_scheduler.state_dict(),
        "state": state,
        f"rng-{rank}": _get_rng_state(),
    }
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


def _measure(file: Path) -> dict[str, object] | None:
    """Return size in bytes and checksum of a file, None where there is none."""
    try:
        with file.open("rb") as content:
            digest = xxhash.xxh3_64()
            while chunk := content.read(2**24):
                digest.update(chunk)
            return {"bytes": content.tell(), "xxh3_64": digest.hexdigest()}
    except FileNotFoundError:
        return None


def _cause(error: BaseException) -> str:
    """Return the first line of the innermost reason: CheckpointException wraps one per rank."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


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

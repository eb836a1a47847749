"""Checkpoints that every chapter can save and any other can load, on any number of ranks."""

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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

from common.checkpoint.files import Reader, Writer, cause_of
from common.checkpoint.manifest import commit_checkpoint, make_room
from common.cli import InputError
from common.distributed import gather, rank_and_world_size
from common.storage import explain_store_errors, is_remote, upload


def save_checkpoint(
    run_dir: Path,
    model: nn.Module,
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    state: dict,
    settings: dict[str, object],
    keep: int,
) -> None:
    """Save everything that the next step depends on; all ranks must call this.

    state: "step", and other numbers and tensors that are equal on all ranks.
    settings: from fixed_settings. keep: how many checkpoints to keep, the newest ones.

    If the process is killed at any moment, the last complete checkpoint can still be loaded. Raises
    InputError if the checkpoint cannot be written, for example on a full disk; older checkpoints
    are kept.
    """
    content = collect_content(model, optimizer, lr_scheduler, state)
    write_content(run_dir, content, settings, keep)


@explain_store_errors
def load_checkpoint(
    checkpoint: Path,
    model: nn.Module,
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    state: dict,
) -> None:
    """Load the checkpoint that find_checkpoint found, in place; all ranks must call this.

    If there are more ranks than when it was saved, the new ranks keep their RNG state.
    """
    rank, world_size = rank_and_world_size()
    content = collect_content(model, optimizer, lr_scheduler, state)
    try:
        reader = Reader(checkpoint)
        saved = reader.read_metadata().state_dict_metadata
        needed = {f"model.{name}" for name in content["model"]}
        for name, moments in content["optimizer"]["state"].items():
            needed |= {f"optimizer.state.{name}.{key}" for key in moments}
        if missing := sorted(needed - saved.keys()):
            raise InputError(
                f"The checkpoint {checkpoint} does not contain {missing[0]}: start a new run with "
                "another -e."
            )
        if f"rng-{rank}.torch" not in saved:
            del content[f"rng-{rank}"]
        # allow_partial_load: another release of PyTorch may use other names for some small values.
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(content, storage_reader=reader, planner=planner, no_dist=world_size == 1)
    except (CheckpointException, OSError) as error:
        raise InputError(
            f"The checkpoint {checkpoint} cannot be read: {cause_of(error)}; start again, or "
            "delete this folder to resume from an older checkpoint."
        ) from error
    local_optimizer = _local_optimizer(optimizer)
    set_state_dict(
        model,
        local_optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    groups = zip(optimizer.param_groups, local_optimizer.param_groups, strict=True)
    for group, loaded in groups:
        group |= {key: value for key, value in loaded.items() if key != "params"}
    lr_scheduler.load_state_dict(content["lr_scheduler"])
    state.update(content["state"])
    if f"rng-{rank}" in content:
        set_rng_state(content[f"rng-{rank}"])


# --- what a checkpoint contains ---


def collect_content(
    model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler, state: dict
) -> dict:
    """Return what a checkpoint contains, by name; all ranks must call this."""
    rank, _ = rank_and_world_size()
    # The names are those of the bare model, whatever wraps it, and sharded tensors stay sharded.
    model_state, optimizer_state = get_state_dict(model, _local_optimizer(optimizer))
    # With ZeRO-1, only the outer optimizer has all parameters and the learning rate of this step.
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer_state["param_groups"] = [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "lr_scheduler": lr_scheduler.state_dict(),
        "state": state,
        f"rng-{rank}": get_rng_state(),
    }


def _local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has this rank's moments; ZeroRedundancyOptimizer wraps it."""
    return getattr(optimizer, "optim", optimizer)


def get_rng_state() -> dict[str, object]:
    """Return the state of all random number generators that training may use."""
    rng = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return rng


def set_rng_state(rng: dict[str, object]) -> None:
    """Restore what get_rng_state returned."""
    torch.set_rng_state(rng["torch"])
    np.random.set_state(rng["numpy"])
    random.setstate(rng["python"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])


# --- writing ---


def write_content(
    run_dir: Path,
    content: dict,
    settings: dict[str, object],
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write what collect_content returned, as save_checkpoint does; all ranks must call this.

    group: another process group of all ranks, instead of the default group.
    """
    rank, _ = rank_and_world_size()
    step = content["state"]["step"]
    path = Path("checkpoints") / f"step-{step:08d}"
    remote = is_remote(run_dir)
    unfinished = run_dir / (path if remote else path.with_name(f".unfinished-{path.name}"))
    # Each gather is a collective, so every rank must get here, even if it has failed before.
    files, failures = {}, {}
    if rank == 0:
        with _noting_failure(failures, rank):
            make_room(run_dir, unfinished, step, settings)
    failures = gather(failures, group)
    if not failures:
        with _noting_failure(failures, rank):
            writer = Writer(unfinished)
            dcp.save(
                content,
                checkpoint_id=unfinished,
                storage_writer=writer,
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
            files = writer.measure()
    files, failures = gather(files, group), gather(failures, group)
    if rank == 0 and not failures:
        with _noting_failure(failures, rank):
            metadata = Reader(unfinished).read_metadata()
            written = {info.relative_path for info in metadata.storage_data.values()}
            missing = written - files.keys()
            assert not missing, f"written but not seen, is the file system shared? {missing}"
            upload(run_dir, "metrics.jsonl")
            commit_checkpoint(run_dir, path, unfinished, step, settings, files, keep)
    failures = gather(failures, group)
    if failures:
        if not remote:  # the next save removes it from a store, which may not answer now
            shutil.rmtree(unfinished, ignore_errors=True)
        remedy = "make sure that it can be reached" if remote else "make room"
        raise InputError(
            f"The checkpoint of step {step} could not be written to {run_dir} "
            f"({next(iter(failures.values()))}): {remedy}, then start the same command again to "
            "resume from the last complete checkpoint."
        )


@contextmanager
def _noting_failure(failures: dict[int, str], rank: int) -> Iterator[None]:
    """If the disk or the store fails, note the reason for this rank. Raises all other errors."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        failures[rank] = cause_of(error)

"""Checkpoints that every chapter can save and any other can load, on any number of ranks."""

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.cli import InputError
from common.commit import commit_checkpoint, make_room
from common.record import gather, rank_and_world_size
from common.remote import explained, is_remote, plain_errors
from common.rng import get_rng_state, set_rng_state
from common.writer import cause_of, open_reader, open_writer


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

    The checkpoint is written beside the others and renamed when it is complete (at an address,
    which cannot rename, it is written under its name), and only then is state.json replaced:
    whenever the process is killed, the last complete checkpoint still loads. Raises InputError if
    it cannot be written (a full disk); what was there before is kept.
    """
    content = collect_content(model, optimizer, lr_scheduler, state)
    write_content(run_dir, content, training, keep)


def write_content(
    run_dir: Path,
    content: dict,
    training: dict[str, object],
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write what collect_content returned, as save_checkpoint says; all ranks must call this.

    group: the ranks, by another way than the default one.
    """
    rank, _ = rank_and_world_size()
    step = content["state"]["step"]
    path = Path("checkpoints") / f"step-{step:08d}"
    remote = is_remote(run_dir)
    unfinished = run_dir / (path if remote else path.with_name(f".unfinished-{path.name}"))
    sums, failures = {}, {}
    try:
        if rank == 0:
            with plain_errors():
                make_room(run_dir, unfinished, step, training)
    except OSError as error:
        failures = {rank: cause_of(error)}
    failures = gather(failures, group)  # not before there is room
    try:
        # Not in chapter 4, whose thread must not touch the warnings of all threads.
        with nullcontext() if dist.is_initialized() else _quiet():
            if not failures:
                writer = open_writer(unfinished)
                dcp.save(
                    content,
                    checkpoint_id=None if remote else unfinished,  # the writer knows it
                    storage_writer=writer,
                    process_group=group,
                    no_dist=not dist.is_initialized(),
                )
                sums = writer.measure()
    except (CheckpointException, OSError) as error:
        failures = {rank: cause_of(error)}
    # All ranks must come to both collectives and to the same end, whichever of them failed.
    sums, failures = gather(sums, group), gather(failures, group)
    if rank == 0 and not failures:
        try:
            with plain_errors():
                metadata = open_reader(unfinished).read_metadata()
                written = {part.relative_path for part in metadata.storage_data.values()}
                missing = written - sums.keys()
                assert not missing, f"written but not seen, is the file system shared? {missing}"
                commit_checkpoint(run_dir, path, unfinished, step, training, sums, keep)
        except OSError as error:
            failures = {rank: cause_of(error)}
    failures = gather(failures, group)
    if failures:
        if not remote:  # there the next save removes it: now the store may be out of reach
            shutil.rmtree(unfinished, ignore_errors=True)
        remedy = "see that it can be reached" if remote else "make room"
        raise InputError(
            f"The checkpoint of step {step} could not be written to {run_dir} "
            f"({next(iter(failures.values()))}): {remedy} and start the same command again, it "
            "goes on from the last complete checkpoint."
        )


@explained
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
    rank, world_size = rank_and_world_size()
    content = collect_content(model, optimizer, lr_scheduler, state)
    try:
        # Partial, for states that another release of PyTorch names otherwise. No tensor of the
        # model or the optimizer may be missing, and a new rank has no random state in it.
        reader = open_reader(checkpoint)
        saved = reader.read_metadata().state_dict_metadata
        wanted = {f"model.{name}" for name in content["model"]}
        for name, moments in content["optimizer"]["state"].items():
            wanted |= {f"optimizer.state.{name}.{key}" for key in moments}
        if missing := sorted(wanted - saved.keys()):
            raise InputError(f"The checkpoint {checkpoint} does not hold {missing[0]}.")
        if f"rng-{rank}.torch" not in saved:
            del content[f"rng-{rank}"]
        with _quiet():
            dcp.load(
                content,
                storage_reader=reader,
                planner=DefaultLoadPlanner(allow_partial_load=True),
                no_dist=world_size == 1,
            )
    except (CheckpointException, OSError) as error:
        raise InputError(
            f"The checkpoint {checkpoint} cannot be read: {cause_of(error)}."
        ) from error
    set_state_dict(
        model,
        _own_part(optimizer),
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    for group, loaded in zip(
        optimizer.param_groups, _own_part(optimizer).param_groups, strict=True
    ):
        group |= {key: value for key, value in loaded.items() if key != "params"}
    lr_scheduler.load_state_dict(content["lr_scheduler"])
    state.update(content["state"])
    if f"rng-{rank}" in content:
        set_rng_state(content[f"rng-{rank}"])


def _own_part(optimizer: Optimizer) -> Optimizer:
    """Return what holds this rank's moments: of ZeroRedundancyOptimizer, the one inside it."""
    return getattr(optimizer, "optim", optimizer)


def collect_content(
    model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler, state: dict
) -> dict:
    """Return what a checkpoint holds, by its names in it; all ranks must call this."""
    rank, _ = rank_and_world_size()
    # Without any wrapper's prefix, and sharded where the model is: the same for all chapters.
    model_state, optimizer_state = get_state_dict(model, _own_part(optimizer))
    # The outer optimizer has all parameters, and the rate of the next step, not of the last one.
    (group,) = optimizer.param_groups
    names = [name for name, _ in model.named_parameters()]
    optimizer_state["param_groups"] = [{**group, "params": names}]
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "lr_scheduler": lr_scheduler.state_dict(),
        "state": state,
        f"rng-{rank}": get_rng_state(),
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the warning that there is no process group: chapter 1 has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield

"""Checkpoints that resume a run exactly, in any chapter and on any number of ranks.

PyTorch's distributed checkpoint (DCP) writes a folder. Each rank writes its part. When all parts
are complete, rank 0 writes the file .metadata and renames it into place. So a folder with .metadata
is complete, on a disk and in a store, and a kill at any moment leaves the last complete folder as
it was.

    <run>/state.json                   the settings that must not change, and the newest step
    <run>/checkpoints/step-00000100/   what the next step depends on
"""

import argparse
import atexit
import concurrent.futures
import contextlib
import datetime
import json
import logging
import os
import pickle
import random
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common import launch, storage
from common.cli import ArgumentParser, RunError
from common.data import Sequences
from common.documents import BUILT_IN
from common.models import PRESET_NAMES

logger = logging.getLogger(__name__)

# Chapter 1 has no process group.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

# The settings of a model that the shapes of its parameters do not show.
MODEL_SETTINGS = (
    *("num_attention_heads", "num_key_value_heads", "activation_function", "hidden_act"),
    *("layer_norm_epsilon", "rms_norm_eps", "rope_parameters", "sliding_window"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "tie_word_embeddings"),
)
# A run that is resumed with another value of one of these arguments would be another training.
FIXED_ARGUMENTS = ("seed", "param_dtype", "warmup_steps", "beta1", "weight_decay", "max_grad_norm")
# Settings that are not arguments, and what they depend on.
ORIGINS = {
    "model": " (see --model-name and --tokenizer-name)",
    "dataset_checksum": " (see --dataset-name)",
    "total_steps": " (see --max-steps and --num-epochs)",
}
# What evaluate.py and other scripts use if they are given only the run's folder.
SOURCES = ("dataset_name", "dataset_subset", "text_column", "model_name", "tokenizer_name")
LAST_WRITE_S = 60  # that an exit waits for an asynchronous checkpoint; other ranks may be gone


def parse_args(parser: ArgumentParser) -> argparse.Namespace:
    """Parse the command line; what is not given is as in the run that it names, if that exists.

    "as_before" lists what is taken from the run. Raises RunError if its name cannot be a folder's,
    or if state.json is damaged.
    """
    first = parser.parse_args()
    if first.experiment_name is None:
        return first
    run_dir = storage.as_path(first.save_dir) / launch.check_name(first.experiment_name)
    saved = storage.explain_store_errors(read_state)(run_dir).get("training", {})
    saved |= saved.get("sources", {})
    names = ("seq_length", "global_batch_size", "lr", *FIXED_ARGUMENTS, *SOURCES)
    known = {name: saved[name] for name in names if name in saved}
    parser.set_defaults(**known, num_epochs=None)  # None shows that it is not given
    args = parser.parse_args()
    if args.num_epochs is None:
        args.num_epochs = first.num_epochs
        args.max_steps = args.max_steps or saved.get("total_steps")
    differing = [name for name, value in vars(args).items() if value != getattr(first, name)]
    args.as_before = ", ".join(differing) or None
    return args


def fixed_settings(
    args: argparse.Namespace,
    model: nn.Module,
    train_data: Sequences,
    seq_length: int,
    lr: float,
    total_steps: int,
) -> dict[str, object]:
    """Return, as JSON values, everything that must not change when a run is resumed.

    model: without a wrapper such as DDP. A data set is identified by a checksum of its tokens.
    "sources" has the names of data set, model and tokenizer. They may change if the content is the
    same; local paths are absolute.
    """
    sources = {name: getattr(args, name) for name in SOURCES}
    for name, value in sources.items():
        if value and value not in (*PRESET_NAMES, BUILT_IN) and Path(value).exists():
            sources[name] = str(Path(value).absolute())
    return {
        "model": describe_model(model),
        "dataset_checksum": train_data.digest,
        "seq_length": seq_length,
        "global_batch_size": args.global_batch_size,  # before what depends on it
        "lr": lr,
        "total_steps": total_steps,
        **{name: getattr(args, name) for name in FIXED_ARGUMENTS},
        "sources": sources,
    }


# --- save and load ---


def save_checkpoint(
    run_dir: Path,
    model: nn.Module,
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    state: dict,
    keep: int,
) -> None:
    """Save everything that the next step depends on; all ranks must call this.

    state: "step", and other values that are equal on all ranks. keep: how many checkpoints to
    keep, the newest ones. Raises RunError if the checkpoint cannot be written, for example on
    a full disk; the previous checkpoint is kept.
    """
    content = collect_content(model, optimizer, lr_scheduler, state)
    folder = _make_room(run_dir, state["step"])
    _try(folder, lambda: dcp.save(content, storage_writer=writer_of(folder)))
    _commit(folder, state["step"], keep)


class AsyncCheckpoints:
    """`save` returns when all tensors are copied to host memory; a thread then writes the copy.

    The thread talks to the other ranks in its own gloo group: in the default group, its messages
    could not be told from those of the training. All ranks must make and call this.

    timeout_s: how long a rank waits for the other ranks to write their files, in seconds.
    """

    def __init__(self, timeout_s: int) -> None:
        timeout = datetime.timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        # A GPU copies several times as fast to pinned memory. Pinning is slow, so the memory is
        # used again. In PyTorch 2.11, DefaultStager can copy only once:
        # https://github.com/pytorch/pytorch/issues/183413.
        self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self._writing: tuple | None = None
        atexit.register(self._wait)  # an error outside of it should not cut the writing off

    def save(
        self,
        run_dir: Path,
        model: nn.Module,
        optimizer: Optimizer,
        lr_scheduler: LRScheduler,
        state: dict,
        keep: int,
    ) -> None:
        """Copy what save_checkpoint saves, and start to write it, once the last one is complete."""
        self.finish()
        content = collect_content(model, optimizer, lr_scheduler, state)
        folder = _make_room(run_dir, state["step"])
        future = dcp.async_save(
            content,
            storage_writer=writer_of(folder),
            process_group=self._group,
            async_stager=self._stager,
        )
        self._writing = (future, folder, state["step"], keep)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete; raises what save_checkpoint would raise."""
        if self._writing is not None:
            (future, folder, step, keep), self._writing = self._writing, None
            _try(folder, future.result)
            _commit(folder, step, keep)

    def _wait(self) -> None:
        if self._writing is not None and not self._writing[0].done():
            logger.info("waiting until the checkpoint is written")
            concurrent.futures.wait([self._writing[0]], LAST_WRITE_S)


def collect_content(
    model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler, state: dict
) -> dict:
    """Return what a checkpoint contains, by name; all ranks must call this."""
    rank, _ = launch.rank_and_world_size()
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


@storage.explain_store_errors
def load_checkpoint(
    run_dir: Path,
    model: nn.Module,
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    state: dict,
    settings: dict[str, object],
) -> bool:
    """Load the newest complete checkpoint in place and return True, or return False for a new run.

    settings: from fixed_settings. All ranks must call this. If there are more ranks than when it
    was saved, the new ones keep their RNG state. Raises RunError if the ranks have different
    settings, if the run was started with other ones, or if the checkpoint is damaged or of another
    model.
    """
    rank, _ = launch.rank_and_world_size()
    fixed = {name: value for name, value in settings.items() if name != "sources"}
    launch.check_agreement(fixed, "give all nodes the same arguments, data and Python")
    found = {}
    if rank == 0:  # a network file system shows a new folder to other nodes after some seconds
        path = next(reversed(complete_checkpoints(run_dir).values()), None)
        found = {0: (path, path and damaged_file(path))}
    path, damaged = launch.gather(found)[0]
    recorded = read_state(run_dir)
    saved = recorded.get("training")
    if saved is None and (path is not None or (run_dir / "best").exists()):
        raise RunError(
            f"{run_dir} has no state.json that describes a run like this: give another -e."
        )
    for name, value in fixed.items():
        if saved and saved.get(name, value) != value:
            setting = name if name in ORIGINS else f"--{name.replace('_', '-')}"
            raise RunError(
                f"The run {run_dir} was started with {setting} {saved[name]}, not {value}"
                f"{ORIGINS.get(name, '')}: give the old value again, or start a new run with "
                "another -e."
            )
    if damaged:
        raise RunError(
            f"The checkpoint file {damaged} is damaged: delete {path} to resume from an older "
            "checkpoint, or start a new run with another -e."
        )
    if rank == 0:  # before the first checkpoint, which is never without its settings
        _write_state(run_dir, {**recorded, "training": settings})
    if path is None:
        if saved:
            logger.info(f"{run_dir} has no complete checkpoint yet: the run starts from step 0")
        return False
    content = collect_content(model, optimizer, lr_scheduler, state)
    known = reader_of(path).read_metadata().state_dict_metadata
    needed = {f"model.{name}" for name in content["model"]}
    for name, moments in content["optimizer"]["state"].items():
        needed |= {f"optimizer.state.{name}.{key}" for key in moments}
    if missing := sorted(needed - known.keys()):
        raise RunError(f"{path} does not contain {missing[0]}: give another -e.")
    if f"rng-{rank}.torch" not in known:
        del content[f"rng-{rank}"]
    # allow_partial_load: another release of PyTorch may use other names for some small values.
    planner = DefaultLoadPlanner(allow_partial_load=True)
    remedy = "try again, or delete it to resume from an older checkpoint"
    read_files(path, content, remedy, planner=planner)
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
    return True


def _local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has this rank's moments; ZeroRedundancyOptimizer wraps it."""
    return getattr(optimizer, "optim", optimizer)


def get_rng_state() -> dict[str, object]:
    """Return the state of all random number generators that training may use."""
    name, keys, *rest = np.random.get_state()
    rng = {
        "torch": torch.get_rng_state(),
        # A list: PyTorch's copy for an asynchronous checkpoint knows no arrays.
        "numpy": (name, keys.tolist(), *rest),
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


@storage.explain_store_errors
def check_finite(
    run_dir: Path, step: int, loss: torch.Tensor, grad_norm: torch.Tensor | None
) -> None:
    """Raise RunError if the loss or the norm of the gradients is not finite.

    All ranks must call this with equal values in each step that may be saved, so that all of them
    stop before a checkpoint is replaced. The norm is needed because a bad gradient changes the
    weights at once, but the loss only in the next step. None: a loss scaler (float16) skips steps
    with such gradients.
    """
    values = {"loss": loss, "gradient norm": loss if grad_norm is None else grad_norm}
    if bad := [f"the {name} is {v.item()}" for name, v in values.items() if not v.isfinite()]:
        saved = max(complete_checkpoints(run_dir), default=None)
        kept = f"the checkpoint of step {saved} is kept" if saved else "no checkpoint is complete"
        raise RunError(
            f"The training has diverged: at step {step} {' and '.join(bad)}; {kept}. Start a new "
            "run with a smaller --lr or more --warmup-steps. This run would diverge again, unless "
            f"the hardware was at fault; to resume it: {launch.resume_command(run_dir.name)}"
        )


# --- a run's folder ---


def _make_room(run_dir: Path, step: int) -> Path:
    """Delete what a kill has left and what a checkpoint replaces; return its folder."""
    folder = run_dir / f"checkpoints/step-{step:08d}"

    def delete() -> None:
        for other, old in _folders(run_dir).items():
            if other >= step or not is_complete(old):
                _delete(old)

    _try(folder, delete, ranks=(0,))
    return folder


def _commit(folder: Path, step: int, keep: int) -> None:
    """Note the newest step in state.json, then delete all but the newest checkpoints."""
    run_dir = folder.parents[1]

    def commit() -> None:
        storage.upload(run_dir, "metrics.jsonl")
        _write_state(run_dir, {**read_state(run_dir), "step": step})
        for old in list(_folders(run_dir).values())[:-keep]:
            try:
                _delete(old)
            except OSError as error:  # another node may still read it; the next save tries again
                logger.warning(f"{old} could not be deleted: {failure_of(error)}")

    _try(folder, commit, ranks=(0,))


def _try(folder: Path, action: Callable[[], object], ranks: tuple[int, ...] | None = None) -> None:
    """Do this on some ranks, or on all; if it fails on any, raise RunError on all."""
    rank, _ = launch.rank_and_world_size()
    failures = {}
    if ranks is None or rank in ranks:
        try:
            action()
        except (Exception, CheckpointException) as error:
            failures[rank] = failure_of(error)
    if failures := launch.gather(failures):
        with contextlib.suppress(Exception):  # the next save tries again
            if rank == 0 and not is_complete(folder):
                storage.remove_folder(folder)
        raise RunError(
            f"The checkpoint {folder} could not be written ({next(iter(failures.values()))}): is "
            "the disk full? The previous checkpoint is kept; start the same command again to "
            "resume from it."
        )


def complete_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Return the folders of a run's complete checkpoints by step, in order."""
    return {step: path for step, path in _folders(run_dir).items() if is_complete(path)}


def is_complete(folder: Path) -> bool:
    """Return whether DCP has finished this checkpoint."""
    return storage.exists(folder / ".metadata")


def damaged_file(path: Path) -> Path | None:
    """Return a file of a checkpoint that is missing or too short, or None if there is none."""
    try:
        parts = reader_of(path).read_metadata().storage_data.values()
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, ImportError, IndexError):
        return path / ".metadata"
    sizes: dict[str, int] = defaultdict(int)
    for part in parts:
        sizes[part.relative_path] = max(sizes[part.relative_path], part.offset + part.length)
    for name, size in sizes.items():
        file = path / name
        if not file.exists() or file.stat().st_size < size:
            return file
    return None


def read_state(run_dir: Path) -> dict:
    """Return the content of state.json, {} without one. Raises RunError if it is damaged."""
    file = run_dir / "state.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise RunError(f"{file} is damaged ({error}): give another -e.") from error


def _write_state(run_dir: Path, content: dict) -> None:
    """Replace state.json. Job scripts read the local file, to see whether the run advances."""
    local = storage.local_run_dir(run_dir) / "state.json"
    temporary = local.with_suffix(".json.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(local)
    storage.upload(run_dir, "state.json")


def _folders(run_dir: Path) -> dict[int, Path]:
    """Return all folders of checkpoints by step, in order, complete or not."""
    parent = run_dir / "checkpoints"
    folders = parent.iterdir() if storage.exists(parent) else ()
    steps = {int(f.name[5:]): f for f in folders if re.fullmatch(r"step-\d+", f.name)}
    return dict(sorted(steps.items()))


def _delete(folder: Path) -> None:
    """Delete a checkpoint. It is incomplete from the first moment on."""
    (folder / ".metadata").unlink(missing_ok=True)
    storage.remove_folder(folder)


def reader_of(path: Path) -> dcp.StorageReader:
    """Return what reads a checkpoint's files, from a disk or a store."""
    if storage.is_remote(path):
        return FsspecReader(str(path), **path.storage_options)
    return dcp.FileSystemReader(path)


def read_files(path: Path, content: dict, remedy: str, **options: object) -> None:
    """Load the tensors of a checkpoint in place; options are dcp.load's. May raise RunError."""
    try:
        dcp.load(content, storage_reader=reader_of(path), **options)
    except CheckpointException as error:
        reason = failure_of(error)
        raise RunError(f"The checkpoint {path} cannot be read ({reason}): {remedy}.") from error


def writer_of(path: Path) -> dcp.StorageWriter:
    """Return what writes a checkpoint's files. A store confirms that it has stored an object."""
    if storage.is_remote(path):
        return FsspecWriter(str(path), sync_files=False, **path.storage_options)
    return dcp.FileSystemWriter(path)


def failure_of(error: BaseException) -> str:
    """Return why a checkpoint's files failed. Ctrl-C on any rank is raised again."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if not isinstance(error, Exception):
        raise error
    text = " ".join(str(error).split())
    return text[:200].rstrip(".") or type(error).__name__


def describe_model(model: nn.Module) -> str:
    """Return a checksum of a model's MODEL_SETTINGS and of its parameters' names and shapes.

    It starts with the model type. The parameters may be on the meta device.
    """
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    settings = {name: getattr(model.config, name, None) for name in MODEL_SETTINGS}
    facts = json.dumps([shapes, settings], sort_keys=True, default=str)
    return f"{model.config.model_type}-{xxhash.xxh3_64_hexdigest(facts.encode())}"

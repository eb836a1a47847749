"""Checkpoints that resume a run exactly, in any chapter and on any number of ranks.

PyTorch's distributed checkpoint (DCP) writes a folder. Each rank writes its part. When all parts
are complete, rank 0 writes the file .metadata and renames it into place. So a folder with .metadata
is complete, on a disk and in a store, and a kill at any moment leaves the last complete folder as
it was.

    <run>/checkpoints/step-00000100/                what the next step depends on
    <run>/checkpoints/step-00000100/settings.json   what must not change when the run is resumed
    <run>/newest                                    the path of the newest complete checkpoint
"""

import argparse
import json
import logging
import os
import re
import socket
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PretrainedConfig

from common import old_flags, ranks, storage, variants
from common.data import Sequences
from common.errors import RunError

try:
    from torch.distributed.checkpoint import FsspecReader, FsspecWriter
except ImportError:  # up to PyTorch 2.14, the module is private
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

logger = logging.getLogger(__name__)

# Chapter 1 has no process group.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

# The names of data set, model and tokenizer, which may change if their content is the same.
SOURCES = ("dataset_name", "dataset_subset", "text_column", "model_name", "tokenizer_name")
# The arguments that may change when a run is resumed. A new argument is fixed, unless it is added
# here: with another value, the run would be another training. (What --num-epochs and --max-steps
# ask for, the number of steps, is fixed.)
MAY_CHANGE = (
    *SOURCES,
    *("experiment_name", "save_dir", "checkpoint_dir", "keep_checkpoints"),
    *("log_freq", "eval_freq", "eval_sequences", "ckpt_freq", "num_epochs", "max_steps"),
    *("batch_size", "dist_timeout", "compile", "activation_checkpointing"),
)
# Names may change. "of_variant" lists the settings that only a script with the same variant has;
# `difference` compares those first.
NOT_COMPARED = ("sources", "of_variant")
# Settings that are not arguments, and where their values come from.
HINTS = {
    "param_dtype": "the variants bfloat16-weights and pure-bfloat16",
    "dataset_checksum": "--dataset-name",
    "total_steps": "--max-steps and --num-epochs",
}
OF_MODEL = "model "  # begins the names of settings from the model's configuration
HINT_OF_MODEL = "--model-name and --tokenizer-name"
# Entries of a model's configuration that say nothing about what it computes.
NOT_ABOUT_COMPUTATION = (
    *("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache"),
)
SEEN_WITHIN_S = 10.0  # a network file system shows a new file to other nodes after some seconds


def fixed_settings(
    args: argparse.Namespace,
    model: nn.Module,
    train_data: Sequences,
    total_steps: int,
    **of_variant: object,
) -> dict[str, object]:
    """Return, as JSON values, everything that must not change when a run is resumed.

    args: as they are when the training starts. So a script calls this after it has replaced what
    the command line left open, such as --lr, --warmup-steps and --seq-length.
    model: without a wrapper such as DDP; it is described by its configuration. A data set is
    identified by a checksum of its tokens. "sources" has the names of data set, model and
    tokenizer, which may change; local paths are absolute. It also has a checksum of the tokenizer,
    for scripts that use a checkpoint without its tokens; a resumed run compares the tokens.
    of_variant: what a variant of a script computes in another way, by name; a script without such
    an entry refuses to resume the run. None stands for an argument of a variant that may change.
    """
    sources = {name: getattr(args, name) for name in SOURCES}
    for name, value in sources.items():
        if value and Path(value).exists():
            sources[name] = str(Path(value).absolute())
    sources["tokenizer_checksum"] = train_data.tokenizer_checksum
    entries = {name: value for name, value in of_variant.items() if value is not None}
    settings = {
        "dataset_checksum": train_data.digest,
        "param_dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "seq_length": args.seq_length,
        "global_batch_size": args.global_batch_size,
        "total_steps": total_steps,  # after those that it depends on: the first one is reported
        **{
            name: value
            for name, value in vars(args).items()
            if name not in MAY_CHANGE and name not in of_variant
        },
        **entries,
        **describe(model.config),
        "sources": sources,
        "of_variant": sorted(entries),
    }
    return json.loads(json.dumps(settings))


def describe(config: PretrainedConfig) -> dict[str, object]:
    """Return, as JSON values, what a model's configuration says about what it computes."""
    facts = {
        OF_MODEL + key: value
        for key, value in config.to_dict().items()
        if key not in NOT_ABOUT_COMPUTATION
    }
    return json.loads(json.dumps(facts, default=str))


def difference(saved: dict, given: dict) -> str | None:
    """Return in words the first setting with another value, or None.

    What only one of the two has is not compared, so another chapter can resume the run, except
    what a variant computes in another way than its chapter.
    """
    saved = old_flags.translate_settings(saved)
    if "of_variant" in given:  # settings of a script, not of a model alone
        for name in saved["of_variant"] + given["of_variant"]:
            if saved.get(name) != given.get(name):
                before, now = (each.get(name, "the chapter's") for each in (saved, given))
                found = [*variants.that_set(name, before), *variants.that_set(name, now)]
                see = f"the variant {' or '.join(found)}" if found else "make variant"
                return f"{name} {before}, not {now} (see {see})"
    for name, value in given.items():
        if name not in NOT_COMPARED and saved.get(name, value) != value:
            hint = HINT_OF_MODEL if name.startswith(OF_MODEL) else HINTS.get(name)
            if hint:
                return f"{name} {saved[name]}, not {value} (see {hint})"
            return f"--{name.replace('_', '-')} {saved[name]}, not {value}"
    return None


class Checkpoints:
    """The checkpoints of a run: in its folder or, with --checkpoint-dir, in a folder or a store.

    All ranks must make one, and call each method. settings: from fixed_settings. `step` is that of
    the newest checkpoint that all ranks know to be complete, or 0. Raises RunError if not all ranks
    see the same folder.
    """

    def __init__(self, args: argparse.Namespace, run_dir: Path, settings: dict) -> None:
        self.run_dir, self.settings, self.keep = run_dir, settings, args.keep_checkpoints
        self.folder = run_dir / "checkpoints"
        if args.checkpoint_dir:
            self.folder = storage.as_path(args.checkpoint_dir) / run_dir.name
        self.step = 0
        check_that_all_see(self.folder)

    def save(
        self, model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler, state: dict
    ) -> None:
        """Save everything that the next step depends on.

        state: "step", and other values that are equal on all ranks. Raises RunError if the
        checkpoint cannot be written, for example on a full disk; the previous one is kept.
        """
        content = collect_content(model, optimizer, lr_scheduler, state)
        folder = self.folder / f"step-{state['step']:08d}"
        use_on_rank_0(self._prepare, folder)
        self._write(content, folder)

    def _write(self, content: dict, folder: Path) -> None:
        """Write a checkpoint's files and complete it; in a subclass, later."""
        self._complete(folder, lambda: dcp.save(content, storage_writer=writer_of(folder)))

    def load(
        self, model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler, state: dict
    ) -> bool:
        """Load the newest complete checkpoint in place and return True; return False for a new run.

        If there are more ranks than when it was saved, the new ones keep their RNG state. Raises
        RunError if the ranks have different settings, if the run was started with other ones, or if
        the checkpoint cannot be read, is of another model, or is not where the run has saved it.
        """
        fixed = {name: value for name, value in self.settings.items() if name != "sources"}
        ranks.check_agreement(fixed, "give all nodes the same arguments, data and Python")
        # Only rank 0 looks: other nodes see a new folder after some seconds.
        newest = use_on_rank_0(self._find_newest, self.folder)
        if newest is None:
            logger.info(f"to resume this run, give -e {self.run_dir.name}")
            return False
        path, saved = newest
        if (other := difference(saved, self.settings)) is not None:
            raise RunError(
                f"The run {self.run_dir} was started with {other}: resume it as it was started, "
                "or start a new run with another -e."
            )
        # For a new optimizer, DCP makes the moments that are loaded into, by a step of size 0.
        content = collect_content(model, optimizer, lr_scheduler, state)
        read_files(path, content, "try again, or delete it to resume from an older checkpoint")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
            # read_files has checked this rank's names; it may hold a part of the moments only.
            options=StateDictOptions(strict=False),
        )
        lr_scheduler.load_state_dict(content["lr_scheduler"])
        state.update(content["state"])
        rank, _ = ranks.rank_and_world_size()
        rng = content.get(f"rng-{rank}", {})
        if "torch" in rng:
            torch.set_rng_state(rng["torch"])
        if "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"])
        self.step = state["step"]
        return True

    def _find_newest(self, folder: Path) -> tuple[Path, dict] | None:
        """Return the newest complete checkpoint and its settings, or None for a new run."""
        complete = complete_checkpoints(folder)
        if complete:
            path = complete[max(complete)]
            return path, read_settings(path)
        noted = self.run_dir / "newest"
        incomplete = list(_folders(folder).values())
        # A kill in the first save leaves one folder and no note. Others were complete once, and
        # what they hold must not be deleted.
        if len(incomplete) > 1 or (incomplete and noted.exists()):
            raise RunError(
                f"{incomplete[-1]} has no file .metadata, without which it is no complete "
                "checkpoint: copy it again with its hidden files (cp -a), or give another -e."
            )
        if noted.exists():
            raise RunError(
                f"{folder} has no complete checkpoint, but the run has saved "
                f"{noted.read_text().strip()}: give the same --checkpoint-dir, or another -e."
            )
        if (self.run_dir / "best").exists():
            raise RunError(f"{self.run_dir} is the folder of a classifier: give another -e.")
        return None

    def _prepare(self, folder: Path) -> None:
        """Delete what a kill has left, and write the settings of a new checkpoint."""
        found, complete = _folders(self.folder), complete_checkpoints(self.folder)
        if later := [old for old in complete.values() if old.name >= folder.name]:
            raise RunError(f"{later[0]} exists: another process saves in {self.folder}; stop it.")
        for step in found.keys() - complete.keys():
            storage.remove_folder(found[step])
        if not storage.is_remote(folder):
            folder.mkdir(parents=True)
        with (folder / "settings.json").open("w", encoding="utf-8") as file:
            json.dump(self.settings, file, indent=1)
            if not storage.is_remote(folder):
                file.flush()
                os.fsync(file.fileno())

    def _complete(self, folder: Path, write: Callable[[], object]) -> None:
        """Call what writes a checkpoint's files, or waits for them; then make it the newest one."""
        try:
            write()
        except (Exception, CheckpointException) as error:  # the second is a BaseException
            raise cannot_use(folder, error) from error
        self.step = int(folder.name[5:])
        use_on_rank_0(self._commit, folder)

    def _commit(self, folder: Path) -> None:
        """Note the newest checkpoint, which job scripts read, then delete the oldest ones."""
        temporary = self.run_dir / "newest.tmp"
        path = folder if storage.is_remote(folder) else folder.absolute()
        temporary.write_text(f"{path}\n", encoding="utf-8")
        temporary.replace(self.run_dir / "newest")
        for old in self._surplus():
            try:
                (old / ".metadata").unlink()  # incomplete from the first moment on
                storage.remove_folder(old)
            except OSError as error:  # another node may still read it; the next save tries again
                logger.warning(f"{old} could not be deleted: {reason_of(error)}")

    def _surplus(self) -> list[Path]:
        """Return the complete checkpoints that are no longer kept; in a subclass, fewer."""
        return list(complete_checkpoints(self.folder).values())[: -self.keep]


# --- what a checkpoint contains ---


def collect_content(
    model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler, state: dict
) -> dict:
    """Return what a checkpoint contains, by name; all ranks must call this."""
    rank, _ = ranks.rank_and_world_size()
    # The names are those of the bare model, whatever wraps it, and sharded tensors stay sharded.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    rng = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "lr_scheduler": lr_scheduler.state_dict(),
        "state": state,
        f"rng-{rank}": rng,
    }


def read_files(path: Path, content: dict, remedy: str, **options: object) -> None:
    """Load a checkpoint in place. remedy: what a refusal advises; options are dcp.load's.

    Removes what is allowed to be missing: the RNG state of a new rank. Raises RunError if a
    parameter or a moment is missing, and for a file that is missing, cut short or not readable.
    """
    try:
        reader = reader_of(path)
        known = reader.read_metadata().state_dict_metadata
        needed = {f"model.{name}" for name in content["model"]}
        for name, moments in content.get("optimizer", {}).get("state", {}).items():
            needed |= {f"optimizer.state.{name}.{key}" for key in moments}
        if missing := sorted(needed - known.keys()):
            raise RunError(f"{path} does not contain {missing[0]}: give another -e.")
        for name in [name for name in content if name.startswith("rng-")]:
            if f"{name}.torch" not in known:
                del content[name]
        # Another release of PyTorch may use other names for some small values.
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(content, storage_reader=reader, planner=planner, **options)
    except RunError:
        raise
    except (Exception, CheckpointException) as error:
        reason = reason_of(error)
        raise RunError(f"The checkpoint {path} cannot be read ({reason}): {remedy}.") from error


# --- folders ---


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a folder by step, in order."""
    found = _folders(folder).items()
    return {step: path for step, path in found if storage.exists(path / ".metadata")}


def _folders(folder: Path) -> dict[int, Path]:
    """Return all checkpoints in a folder by step, in order, complete or not."""
    folders = folder.iterdir() if storage.exists(folder) else ()
    steps = {int(f.name[5:]): f for f in folders if re.fullmatch(r"step-\d+", f.name)}
    return dict(sorted(steps.items()))


def read_settings(path: Path) -> dict:
    """Return the settings of a checkpoint. Raises RunError if they are missing or damaged."""
    file = path / "settings.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise RunError(
            f"{file} is missing or damaged ({reason_of(error)}), or an earlier version of this "
            "guide has saved the checkpoint: give another -e."
        ) from error


def check_that_all_see(folder: Path) -> None:
    """Make a folder and write a file there. Raise RunError if a rank does not see it.

    A rank with another folder would save its part of each checkpoint there.
    """

    def write_mark(folder: Path) -> Path:
        if not storage.is_remote(folder):
            folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f".seen-{uuid.uuid4().hex}"
        mark.write_bytes(b"")
        return mark

    mark = use_on_rank_0(write_mark, folder)
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (seen := storage.exists(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    rank, _ = ranks.rank_and_world_size()
    hosts_by_rank = ranks.gather({} if seen else {rank: socket.gethostname()})  # who do not see it
    if rank == 0:
        mark.unlink()
    if hosts_by_rank:
        first = min(hosts_by_rank)
        raise RunError(
            f"Rank {first} on {hosts_by_rank[first]} does not see {folder.absolute()} of rank 0: "
            "give a --save-dir or a --checkpoint-dir that all nodes share."
        )


def use_on_rank_0(action: Callable, folder: Path) -> object:
    """Return action(folder) of rank 0. If it fails there, raise RunError on all ranks."""

    def use() -> object:
        try:
            return action(folder)
        except RunError:
            raise
        except Exception as error:
            raise cannot_use(folder, error) from error

    return ranks.on_rank_0(use)


def cannot_use(folder: Path, error: BaseException) -> RunError:
    """Return an error that says which folder could not be read or written, and why."""
    return RunError(
        f"{folder} could not be used ({reason_of(error)}): is the disk full, or the store out of "
        "reach? Complete checkpoints are kept; start the same command again to resume."
    )


def reason_of(error: BaseException) -> str:
    """Return why a checkpoint's files failed. Ctrl-C on any rank is raised again."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if not isinstance(error, Exception):
        raise error
    text = " ".join(str(error).split())
    return text[:200].rstrip(".") or type(error).__name__


def reader_of(path: Path) -> dcp.StorageReader:
    """Return what reads a checkpoint's files, from a disk or a store."""
    if storage.is_remote(path):
        return FsspecReader(str(path), **path.storage_options)
    return dcp.FileSystemReader(path)


def writer_of(path: Path) -> dcp.StorageWriter:
    """Return what writes a checkpoint's files. A store confirms that it has stored an object."""
    if storage.is_remote(path):
        return FsspecWriter(str(path), sync_files=False, **path.storage_options)
    return dcp.FileSystemWriter(path)

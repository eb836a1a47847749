"""state.json: the complete checkpoints of a run, and the settings that a run must keep.

It is replaced only after all files of a new checkpoint are on the disk, so a run can be resumed
after a kill at any moment.
"""

import argparse
import json
import logging
import os
import re
import shutil
from pathlib import Path

import torch
import xxhash
from torch import nn

from common.cli import InputError
from common.data import Sequences
from common.data.sources import BUILT_IN
from common.distributed import check_agreement, gather, rank_and_world_size, resume_command
from common.models import PRESET_NAMES
from common.storage import (
    as_os_errors,
    exists,
    explain_store_errors,
    is_folder,
    is_remote,
    local_run_dir,
    remove_folder,
    size_and_stamp,
    upload,
)

logger = logging.getLogger(__name__)

FORMAT = 1
# The settings of a model that the shapes of its parameters do not show.
MODEL_SETTINGS = (
    *("num_attention_heads", "num_key_value_heads", "activation_function", "hidden_act"),
    *("layer_norm_epsilon", "rms_norm_eps", "rope_parameters", "sliding_window"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "tie_word_embeddings"),
)
# A run that is resumed with another value of one of these arguments would be another training.
FIXED_ARGUMENTS = ("seed", "param_dtype", "warmup_steps", "weight_decay", "max_grad_norm")
# Settings that are not arguments, and what they depend on.
ORIGINS = {
    "model": " (see --model-name and --tokenizer-name)",
    "dataset_checksum": " (see --dataset-name)",
    "total_steps": " (see --max-steps and --num-epochs)",
}
# What evaluate.py and other scripts use if they are given only the run's folder.
SOURCES = ("dataset_name", "dataset_subset", "text_column", "model_name", "tokenizer_name")


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


def describe_model(model: nn.Module) -> str:
    """Return a checksum of a model's MODEL_SETTINGS and of its parameters' names and shapes.

    It starts with the model type. The parameters may be on the meta device.
    """
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    settings = {name: getattr(model.config, name, None) for name in MODEL_SETTINGS}
    facts = json.dumps([shapes, settings], sort_keys=True, default=str)
    return f"{model.config.model_type}-{xxhash.xxh3_64_hexdigest(facts.encode())}"


# --- reading ---


@explain_store_errors
def find_checkpoint(run_dir: Path, settings: dict[str, object]) -> Path | None:
    """Return the folder of a run's newest complete checkpoint, or None for a new run.

    All ranks must call this. Raises InputError if the ranks have different settings, if the run
    was started with other settings, or if the checkpoint is damaged. Does not load it.
    """
    rank, world_size = rank_and_world_size()
    settings = {name: value for name, value in settings.items() if name != "sources"}
    check_agreement(settings, "give all nodes the same arguments, data and Python")
    remedy = "its view of the folder is out of date, so start again"
    found = exists(run_dir / "state.json")
    check_agreement({"a state.json": found}, remedy)
    if not found:
        if exists(run_dir / "best"):
            raise InputError(f"{run_dir} is the folder of a classifier: give another -e.")
        # A kill during the first save can leave one folder. Several folders had a state.json.
        if len(list((run_dir / "checkpoints").glob("step-*"))) > 1:
            raise InputError(
                f"{run_dir} has checkpoints and no state.json: restore it, or start a new run with "
                "another -e."
            )
        return None
    saved_settings, by_step = read_record(run_dir)
    for name, value in settings.items():
        if name in saved_settings and saved_settings[name] != value:
            setting = name if name in ORIGINS else f"--{name.replace('_', '-')}"
            raise InputError(
                f"The run {run_dir} was started with {setting} {saved_settings[name]}, not {value}"
                f"{ORIGINS.get(name, '')}: give the old value again, or start a new run with "
                "another -e."
            )
    check_agreement({"checkpoints": list(by_step)}, remedy)
    if not by_step:
        raise InputError(f"The checkpoints of {run_dir} are gone: start a new run with another -e.")
    *older, record = by_step.values()
    path, files = run_dir / record["path"], record["files"]
    own_share = sorted(files)[rank::world_size]  # each rank reads some of the files
    damaged = gather({n: 1 for n in own_share if measure_file(path / n, files[n]) != files[n]})
    if damaged:
        remedy = "start a new run with another -e"
        if older:
            remedy = f"delete {path} to resume from step {older[-1]['step']}, or {remedy}"
        raise InputError(f"The checkpoint file {path / next(iter(damaged))} is damaged: {remedy}.")
    return path


@explain_store_errors
def check_finite(run_dir: Path, state: dict, grad_norm: torch.Tensor) -> None:
    """Raise InputError if the loss or the norm of the gradients is not finite; waits for the GPU.

    All ranks must call this with equal values, so that all of them stop. state: as for
    save_checkpoint. The norm is needed because a bad gradient changes the weights at once, but the
    loss only in the next step. With a loss scaler (float16), only the loss counts, because the
    scaler skips a step with such gradients.
    """
    values = {"loss": state["running_loss"]}
    if not state.get("scaler"):
        values["gradient norm"] = grad_norm
    if bad := [f"the {name} is {v.item()}" for name, v in values.items() if not v.isfinite()]:
        good = _read_records(run_dir)
        kept = f"the checkpoint of step {good[-1]['step']} is kept" if good else "nothing was saved"
        raise InputError(
            f"The training has diverged: at step {state['step']} {' and '.join(bad)}; {kept}. "
            "Start a new run with a smaller --lr or more --warmup-steps. This run would diverge "
            f"again, unless the hardware was at fault; {resume_command(run_dir.name)}"
        )


def read_record(run_dir: Path) -> tuple[dict[str, object], dict[int, dict]]:
    """Return from state.json the settings and, by step, the records of checkpoints that exist.

    Raises FileNotFoundError, or InputError if state.json is damaged.
    """
    file = run_dir / "state.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        settings, records = state["training"], state["checkpoints"]
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']}, not {FORMAT}")
        return settings, {r["step"]: r for r in records if is_folder(run_dir / r["path"])}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file} is damaged ({error!r}): restore it, or start a new run with another -e."
        ) from error


@explain_store_errors
def measure_file(file: Path, expected: dict | None = None) -> dict[str, object] | None:
    """Return `expected` with the file's real size in bytes and checksum; None if there is no file.

    A file in a store is not read if its size and its stamp are the expected ones.
    """
    expected = expected or {}
    try:
        if "stamp" in expected and size_and_stamp(file) == (expected["bytes"], expected["stamp"]):
            return expected
        with file.open("rb") as content:
            digest = xxhash.xxh3_64()
            while chunk := content.read(2**24):
                digest.update(chunk)
            return {**expected, "bytes": content.tell(), "xxh3_64": digest.hexdigest()}
    except FileNotFoundError:
        return None


# --- writing, on rank 0 ---


def make_room(run_dir: Path, unfinished: Path, step: int, settings: dict[str, object]) -> None:
    """Before a checkpoint is written, delete all checkpoints that state.json does not list.

    These are what a kill has left and what could not be deleted before. So there is never more
    than one checkpoint in addition to those that are kept. Raises OSError if one cannot be deleted.

    If state.json lists checkpoints that are not older than `step`, because the run was reset to an
    older one, their entries are removed first. Their files will be replaced, so after a kill
    state.json would describe the wrong files.
    """
    records = _read_records(run_dir)
    valid = [r for r in records if r["step"] < step and is_folder(run_dir / r["path"])]
    if valid != records:
        _write_records(run_dir, settings, valid)
    if not is_remote(run_dir):
        shutil.rmtree(unfinished, ignore_errors=True)
    if valid:  # without records, it is unknown what may be deleted
        _remove_all_but(valid, run_dir)


def commit_checkpoint(
    run_dir: Path,
    path: Path,
    unfinished: Path,
    step: int,
    settings: dict[str, object],
    files: dict[str, dict],
    keep: int,
) -> None:
    """Make the checkpoint in `unfinished` the newest one of the run, at run_dir / path.

    First the folder is renamed, then state.json is replaced, then all but the newest `keep`
    checkpoints are deleted. So state.json always lists complete checkpoints only.

    files: what Writer.measure returned on all ranks.
    """
    if unfinished != run_dir / path:
        shutil.rmtree(run_dir / path, ignore_errors=True)
        unfinished.replace(run_dir / path)
    record = {"step": step, "path": path.as_posix(), "files": files}
    records = [*_read_records(run_dir), record][-keep:]
    _write_records(run_dir, settings, records)
    try:
        with as_os_errors():
            _remove_all_but(records, run_dir)
    except OSError as error:  # the next make_room tries again
        name = error.filename or run_dir / "checkpoints"
        logger.warning("an older checkpoint cannot be deleted: %s (%s)", name, error.strerror)


def _remove_all_but(records: list[dict], run_dir: Path) -> None:
    kept = {Path(record["path"]).name for record in records}
    for folder in (run_dir / "checkpoints").glob("*"):
        if re.fullmatch(r"(\.unfinished-)?step-\d+", folder.name) and folder.name not in kept:
            remove_folder(folder)


def _read_records(run_dir: Path) -> list[dict]:
    file = run_dir / "state.json"
    return json.loads(file.read_text(encoding="utf-8"))["checkpoints"] if exists(file) else []


def _write_records(run_dir: Path, settings: dict[str, object], records: list[dict]) -> None:
    """Replace state.json. Job scripts read the local file, to see whether the run advances."""
    local = local_run_dir(run_dir) / "state.json"
    temporary = local.with_suffix(".json.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        content = {"format": FORMAT, "training": settings, "checkpoints": records}
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(local)
    upload(run_dir, "state.json")

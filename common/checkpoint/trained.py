"""Load a trained model: from a run's checkpoint, a folder of weights, or the hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from common import models
from common.checkpoint import manifest
from common.checkpoint.files import Reader, cause_of
from common.cli import InputError
from common.storage import as_path, exists, explain_store_errors


class TrainedModel(NamedTuple):
    """A model on the CPU. Its attention ignores padding (see causal_attention).

    origin: what it was loaded from, in words. seq_length: the one of its training, if it is known.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    origin: str
    seq_length: int | None


def load_trained(
    name: str, model_name: str, tokenizer_name: str | None, step: int | None
) -> TrainedModel:
    """Load a checkpoint of a run of any chapter, or else a model from its folder or hub id.

    model_name and step belong to a run; step as for find_saved. tokenizer_name: None for the
    model's own. Raises InputError if there is no such model, or if the arguments do not match it.
    """
    disable_progress_bar()
    folder = as_path(name)
    if explain_store_errors(exists)(folder / "state.json"):
        while True:
            saved = find_saved(folder, step)
            try:
                return _load_run(saved, model_name, tokenizer_name)
            except InputError:
                # If the run is still training, it may have deleted this checkpoint. Then it has a
                # newer one.
                if step is not None or find_saved(folder, None).step == saved.step:
                    raise
    if step is not None:
        raise InputError(f"{name} is no run's folder with a complete checkpoint: leave out --step.")
    if name in models.PRESET_NAMES and not folder.exists():
        raise InputError(
            f"The preset {name} has no weights: give a run's folder, and {name} as -m."
        )
    if folder.exists() and not (folder / "config.json").exists():
        raise InputError(
            f"{name} is neither a run's folder with a complete checkpoint (it has no state.json) "
            "nor a model's folder (it has no config.json)."
        )
    if not folder.exists() and len(folder.parts) > 1 and folder.parent.exists():
        raise InputError(f"There is no {folder.name} in {folder.parent}: give another folder.")
    config = models.load_config(name)
    tokenizer = models.load_tokenizer(tokenizer_name or name)
    models.check_sizes(config, tokenizer, None)
    return TrainedModel(models.load_pretrained(name, config).eval(), tokenizer, name, None)


def _load_run(saved: "SavedCheckpoint", model_name: str, tokenizer_name: str | None):
    config = models.load_config(model_name)
    tokenizer = models.load_tokenizer(tokenizer_name or model_name)
    models.check_sizes(config, tokenizer, None)  # adapts a preset to the tokenizer
    on_meta = build_on_meta(saved, config, model_name)
    models.check_sizes(config, tokenizer, saved.settings["seq_length"])
    check_files(saved)
    dtype = getattr(torch, saved.settings["param_dtype"])
    weights = empty_weights(on_meta, dtype)
    with reading(saved.path):
        dcp.load({"model": weights}, storage_reader=Reader(saved.path), no_dist=True)
    # from_pretrained takes these tensors, ties them, and computes buffers that are not saved.
    model = type(on_meta).from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        attn_implementation=models.causal_attention(config),
    )
    origin = f"step {saved.step} of {saved.run}"
    return TrainedModel(model.eval(), tokenizer, origin, saved.settings["seq_length"])


# --- the steps of loading a checkpoint ---


class SavedCheckpoint(NamedTuple):
    """A complete checkpoint, as state.json describes it.

    files: size and checksum of each file, by name. others: steps of the other kept checkpoints.
    settings: from fixed_settings.
    """

    run: Path
    path: Path
    step: int
    files: dict[str, dict]
    others: list[int]
    settings: dict[str, object]


@explain_store_errors
def find_saved(run: Path, step: int | None) -> SavedCheckpoint:
    """Return a run's checkpoint of this step or, if it is None, the newest one; do not load it.

    Raises InputError if there is no such checkpoint, or if state.json is damaged.
    """
    try:
        settings, kept = manifest.read_record(run, "restore it")
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = "there is no such folder" if not run.exists() else "it has no state.json"
        raise InputError(
            f"{run} is no run's folder with a complete checkpoint: {reason}."
        ) from error
    if not kept:
        raise InputError(f"The run {run} has no complete checkpoint: its folders are gone.")
    step = step or max(kept)
    if step not in kept:
        steps = ", ".join(map(str, sorted(kept)))
        raise InputError(f"The run {run} keeps no checkpoint of step {step}, only of {steps}.")
    path, files = run / kept[step]["path"], kept[step]["files"]
    return SavedCheckpoint(run, path, step, files, sorted(kept.keys() - {step}), settings)


def build_on_meta(saved: SavedCheckpoint, config: PretrainedConfig, name: str) -> PreTrainedModel:
    """Return the model of a checkpoint on the meta device: with names and shapes, without memory.

    Raises InputError if the configuration, which is that of the model `name`, does not match.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if manifest.describe_model(model) != saved.settings["model"]:
        raise InputError(
            f"{saved.run} has another model than {name}: give -m and --tokenizer-name."
        )
    return model


def check_files(saved: SavedCheckpoint) -> None:
    """Raise InputError if a file's size or checksum is not the one in state.json."""
    for name, expected in saved.files.items():
        if manifest.measure_file(saved.path / name, expected) != expected:
            others = ", ".join(map(str, saved.others))
            remedy = f"give another --step ({others})" if others else "no other step is kept"
            raise InputError(f"The checkpoint file {saved.path / name} is damaged: {remedy}.")


def empty_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return uninitialized tensors with the names and shapes of a model's weights, for dcp.load.

    Tied weights occur once. Buffers that no checkpoint contains are left out.
    """
    persistent = model.state_dict().keys()
    return {
        name: torch.empty(
            tensor.shape,
            dtype=dtype if isinstance(tensor, nn.Parameter) else tensor.dtype,
            device="cpu",
        )
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if name in persistent
    }


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Raise InputError if the disk or the store fails while one process loads a checkpoint."""
    try:
        yield
    except CheckpointException as error:
        # If the metadata file is gone, PyTorch reports an AssertionError instead of an OSError.
        there = explain_store_errors(exists)(checkpoint / ".metadata")
        reason = cause_of(error) if there else "it is gone"
        raise InputError(
            f"The checkpoint {checkpoint} cannot be read ({reason}): if the run has deleted it "
            "meanwhile, start the same command again."
        ) from error

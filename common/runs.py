"""Models that were trained here: a run's newest complete checkpoint, or a folder of weights."""

import warnings
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

from common import models, record
from common.attention import causal_attention
from common.cli import InputError
from common.remote import as_path, exists, explained
from common.writer import cause_of, open_reader


class Kept(NamedTuple):
    """A complete checkpoint, by the run's commit record.

    files: what the writer measured of each, by name. others: steps of the other kept checkpoints.
    training: from describe_training.
    """

    run: Path
    path: Path
    step: int
    files: dict[str, dict]
    others: list[int]
    training: dict[str, object]


class Trained(NamedTuple):
    """A model to use, on the CPU, with causal_attention, which knows no padding.

    origin: what it was loaded from, in words. seq_length: of its training, None if nobody knows.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    origin: str
    seq_length: int | None


@explained
def find_kept(run: Path, step: int | None) -> Kept:
    """Return a run's checkpoint of this step, or its newest one; nothing is loaded yet.

    Raises InputError where there is none, or state.json is damaged.
    """
    try:
        training, kept = record.read_record(run, "restore it")
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
    others = sorted(kept.keys() - {step})
    return Kept(run, run / kept[step]["path"], step, kept[step]["files"], others, training)


def build_on_meta(kept: Kept, config: PretrainedConfig, name: str) -> PreTrainedModel:
    """Return the model of a checkpoint: names and shapes, no memory.

    Raises InputError if the configuration, which the model of this name has, is another one's.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if record.describe_model(model) != kept.training["model"]:
        raise InputError(f"{kept.run} has another model than {name}: give -m and --tokenizer-name.")
    return model


def check_files(kept: Kept) -> None:
    """Raise InputError if a file of the checkpoint is not the one that was committed."""
    for name, expected in kept.files.items():
        if record.measure_file(kept.path / name, expected) != expected:
            others = ", ".join(map(str, kept.others))
            way_out = f"give another --step ({others})" if others else "no other step is kept"
            raise InputError(f"The checkpoint file {kept.path / name} is damaged: {way_out}.")


def empty_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of the shapes of a model's weights, by name, for dcp.load to fill.

    A tied weight once. Not the tables that a model computes itself: no checkpoint has them.
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
    """Within it a checkpoint is loaded by this process alone: say in one sentence why it cannot be.

    Raises InputError for what the operating system says, and any other exception as it is.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:  # holds what was raised, Ctrl-C as well
        # Of a file of metadata that is gone PyTorch reports an AssertionError, not the OSError.
        reason = cause_of(error) if explained(exists)(checkpoint / ".metadata") else "it is gone"
        raise InputError(
            f"The checkpoint {checkpoint} cannot be read ({reason}): if the run went on and "
            "deleted it, start this once more."
        ) from error


def load_trained(
    name: str, model_name: str, tokenizer_name: str | None, step: int | None
) -> Trained:
    """Load a run's checkpoint, of any chapter, or else a model's folder or hub id.

    model_name, step: of a run, as for find_kept. tokenizer_name: None for that of the model.
    Raises InputError where there is no such thing, or it does not fit together.
    """
    disable_progress_bar()
    folder = as_path(name)
    if explained(exists)(folder / "state.json"):
        while True:
            kept = find_kept(folder, step)
            try:
                return _load_run(kept, model_name, tokenizer_name)
            except InputError:
                # A run that goes on deletes its old checkpoints; it then has a newer one.
                if step is not None or find_kept(folder, None).step == kept.step:
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
    return Trained(models.load_pretrained(name, config).eval(), tokenizer, name, None)


def _load_run(kept: Kept, model_name: str, tokenizer_name: str | None) -> Trained:
    config = models.load_config(model_name)
    tokenizer = models.load_tokenizer(tokenizer_name or model_name)
    models.check_sizes(config, tokenizer, None)  # a preset takes the tokenizer's size
    on_meta = build_on_meta(kept, config, model_name)
    models.check_sizes(config, tokenizer, kept.training["seq_length"])
    check_files(kept)
    dtype = getattr(torch, kept.training["param_dtype"])
    weights = empty_weights(on_meta, dtype)
    with reading(kept.path):
        dcp.load({"model": weights}, storage_reader=open_reader(kept.path), no_dist=True)
    # Without a name: it takes these tensors, ties them, and computes what no checkpoint holds.
    model = type(on_meta).from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        attn_implementation=causal_attention(config),
    )
    origin = f"step {kept.step} of {kept.run}"
    return Trained(model.eval(), tokenizer, origin, kept.training["seq_length"])

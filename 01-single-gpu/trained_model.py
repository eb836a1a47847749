"""A trained model: from a run's checkpoint, a folder of weights, or the hub."""

import os
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from common import checkpoint
from common.errors import RunError
from common.inputs import models
from common.storage import as_path, exists


class TrainedModel(NamedTuple):
    """A model on the CPU. Its attention ignores padding (see causal_attention).

    origin: what it was loaded from, in words. Of a run, seq_length is the one of its training,
    checksum is that of its training tokens, and sources has the names of its data set, model and
    tokenizer (see fixed_settings). sources is empty if it is unknown what the model was trained on.
    begin is the token to put before each document, or None: a run is trained without one.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    origin: str
    seq_length: int | None
    checksum: str | None
    sources: dict[str, str | None]
    begin: int | None = None


class SavedCheckpoint(NamedTuple):
    """A complete checkpoint of a run, as it was named. settings: from fixed_settings."""

    run: Path
    path: Path
    step: int
    settings: dict[str, object]


def load_trained(
    name: str, model_name: str | None, tokenizer_name: str | None, step: int | None
) -> TrainedModel:
    """Load a checkpoint of a run of any chapter, or else a model from its folder or hub id.

    model_name, tokenizer_name: None for those of the run or of the folder; a folder ignores
    model_name. step: as for find_saved. Raises RunError if there is no such model, or if the
    arguments do not match it.
    """
    disable_progress_bar()
    folder = as_path(name)
    if find_checkpoints(folder):
        return _load_run(find_saved(folder, step), model_name, tokenizer_name)
    if step is not None:
        raise RunError(f"{name} is no run's folder with a complete checkpoint: leave out --step.")
    if name in models.PRESET_NAMES and not folder.exists():
        raise RunError(f"The preset {name} has no weights: give a run's folder.")
    if folder.exists() and not (folder / "config.json").exists():
        raise RunError(
            f"{name} is neither a run's folder with a complete checkpoint nor a model's folder (it "
            "has no config.json): give one of these."
        )
    if not folder.exists() and len(folder.parts) > 1 and folder.parent.exists():
        raise RunError(f"There is no {folder.name} in {folder.parent}: give another folder.")
    architectures = models.load_config(name).architectures or ()
    if any(each.endswith("ForSequenceClassification") for each in architectures):
        raise RunError(f"{name} is a classifier, not a language model: give another folder.")
    tokenizer = models.load_tokenizer(tokenizer_name or name)
    model = models.load_pretrained(name, models.load_config(name, tokenizer)).eval()
    return TrainedModel(model, tokenizer, name, None, None, {}, begin_token(tokenizer))


def begin_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token that a tokenizer itself puts before each text, such as <bos>."""
    first = tokenizer.encode("a")[0]
    return first if first == tokenizer.bos_token_id else None


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that end a text, first the end-of-text token of the tokenizer.

    A chat model may end its answers with another token, which its config.json or its
    generation_config.json names. Only tokens that were added to the vocabulary count: in the
    vocabulary of another tokenizer, the same id can be a piece of text.
    """
    stops = [tokenizer.eos_token_id]
    for settings in (model.config, model.generation_config):
        named = getattr(settings, "eos_token_id", None)
        for token in named if isinstance(named, list) else [named]:
            if token in tokenizer.added_tokens_decoder and token not in stops:
                stops.append(token)
    return stops


def _load_run(
    saved: SavedCheckpoint, model_name: str | None, tokenizer_name: str | None
) -> TrainedModel:
    dtype = getattr(torch, saved.settings["param_dtype"])
    on_meta, weights, tokenizer, origin = load_weights(saved, model_name, tokenizer_name, dtype)
    # from_pretrained takes these tensors, ties them, and computes buffers that are not saved.
    model = type(on_meta).from_pretrained(
        None,
        config=on_meta.config,
        state_dict=weights,
        dtype=dtype,
    )
    model.generation_config = on_meta.generation_config
    settings = saved.settings
    seq_length, checksum = settings["seq_length"], settings["dataset_checksum"]
    return TrainedModel(model.eval(), tokenizer, origin, seq_length, checksum, settings["sources"])


# --- a run's checkpoint ---


def find_checkpoints(run: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run by step, in order.

    run: its folder, or the folder or the address that holds its checkpoints.
    """
    folder = run
    if exists(run / "checkpoints"):
        folder = run / "checkpoints"
    elif exists(run / "newest"):  # the run was started with --checkpoint-dir
        folder = as_path((run / "newest").read_text(encoding="utf-8").strip()).parent
    return checkpoint.complete_checkpoints(folder)


def find_saved(run: Path, step: int | None) -> SavedCheckpoint:
    """Return a run's checkpoint of this step or, if it is None, the newest one; do not load it.

    Raises RunError if there is no such checkpoint, or if its settings are damaged.
    """
    kept = find_checkpoints(run)
    if not kept:
        raise RunError(f"{run} is no run's folder with a complete checkpoint: check the path.")
    step = max(kept) if step is None else step
    if step not in kept:
        steps = ", ".join(map(str, sorted(kept)))
        raise RunError(f"The run {run} keeps no checkpoint of step {step}: give one of {steps}.")
    return SavedCheckpoint(run, kept[step], step, checkpoint.read_settings(kept[step]))


def load_weights(
    saved: SavedCheckpoint, model_name: str | None, tokenizer_name: str | None, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, torch.Tensor], PreTrainedTokenizerBase, str]:
    """Return a checkpoint's model on the meta device, its weights by name on the CPU, its
    tokenizer, and in words where it is from.

    model_name, tokenizer_name: None for those of the run. dtype: of the parameters. Tied weights
    occur once; buffers that no checkpoint contains are left out. The optimizer state is not read.
    Adapters of the variant lora are merged into the weights.
    The model has the generation settings of the model that the run started from, if it has any.
    Raises RunError if a file is missing or damaged, or if the names do not match the checkpoint.
    """
    sources = saved.settings["sources"]
    model_name = model_name or sources["model_name"]
    tokenizer_name = tokenizer_name or sources["tokenizer_name"] or model_name
    tokenizer = models.load_tokenizer(tokenizer_name)
    config = models.load_config(model_name, tokenizer)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with suppress(OSError, ValueError):
        model.generation_config = GenerationConfig.from_pretrained(config.name_or_path)
    facts = checkpoint.describe(config)
    facts.pop(f"{checkpoint.OF_MODEL}pad_token_id", None)  # which only training depends on
    if other := checkpoint.difference(saved.settings, facts):
        raise RunError(f"{saved.path} has {other}: give the run's own -m and --tokenizer-name.")
    expected = sources.get("tokenizer_checksum")  # older checkpoints have none
    if expected and models.tokenizer_checksum(tokenizer) != expected:
        raise RunError(
            f"{saved.path} was trained with another tokenizer than {tokenizer_name} is now: give "
            "--tokenizer-name a copy of the run's own."
        )
    persistent = model.state_dict().keys()
    weights = {
        name: torch.empty(
            tensor.shape,
            dtype=dtype if isinstance(tensor, nn.Parameter) else tensor.dtype,
            device="cpu",
        )
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if name in persistent
    }
    if "adapter" in saved.settings:
        lora = import_lora()
        adapted = lora.load_adapted(saved.path, saved.settings, model_name, config)
        lora.merge(adapted)
        for name, tensor in adapted.state_dict().items():
            if name in weights:  # tied weights have several names
                weights[name].copy_(tensor)
    else:
        checkpoint.read_files(saved.path, {"model": weights}, "give another --step", no_dist=True)
    named = f"(model {model_name}, tokenizer {tokenizer_name})"
    return model, weights, tokenizer, f"step {saved.step} of {saved.run} {named}"


def import_lora() -> ModuleType:
    """Return the module of the variant lora. Raises RunError if PEFT is not installed."""
    folder = str(Path(__file__).parent / "diffs")
    if folder not in sys.path:
        sys.path.append(folder)
    import lora

    return lora


def check_output(file: Path | None) -> None:
    """Raise RunError if a new file already exists or if its folder is not writable."""
    if file and file.exists():
        raise RunError(f"{file} already exists: give another file, or delete it.")
    if file and not os.access(file.parent, os.W_OK):
        raise RunError(f"{file} cannot be written: give a file in another folder.")

"""A trained model: from a run's checkpoint, a folder of weights, or the hub."""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from common import models
from common.checkpoint.trained import SavedCheckpoint, build_on_meta, find_saved, load_weights
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


def _load_run(saved: SavedCheckpoint, model_name: str, tokenizer_name: str | None):
    config = models.load_config(model_name)
    tokenizer = models.load_tokenizer(tokenizer_name or model_name)
    models.check_sizes(config, tokenizer, None)  # adapts a preset to the tokenizer
    on_meta = build_on_meta(saved, config, model_name)
    models.check_sizes(config, tokenizer, saved.settings["seq_length"])
    dtype = getattr(torch, saved.settings["param_dtype"])
    weights = load_weights(saved, on_meta, dtype)
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

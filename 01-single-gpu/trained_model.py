"""A trained model: from a run's checkpoint, a folder of weights, or the hub."""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from common import models
from common.cli import RunError
from common.storage import as_path, exists, explain_store_errors
from common.trained import SavedCheckpoint, find_saved, load_model


class TrainedModel(NamedTuple):
    """A model on the CPU. Its attention ignores padding (see causal_attention).

    origin: what it was loaded from, in words. Of a run, seq_length is the one of its training,
    checksum is that of its training tokens, and sources are the names of its data set, model and
    tokenizer (see fixed_settings). sources is empty if it is unknown what the model was trained on.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    origin: str
    seq_length: int | None
    checksum: str | None
    sources: dict[str, str | None]


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
    if explain_store_errors(exists)(folder / "state.json"):
        while True:
            saved = find_saved(folder, step)
            try:
                return _load_run(saved, model_name, tokenizer_name)
            except RunError:
                # If the run is still training, it may have deleted this checkpoint. Then it has a
                # newer one.
                if step is not None or find_saved(folder, None).step == saved.step:
                    raise
    if step is not None:
        raise RunError(f"{name} is no run's folder with a complete checkpoint: leave out --step.")
    if name in models.PRESET_NAMES and not folder.exists():
        raise RunError(f"The preset {name} has no weights: give a run's folder.")
    if folder.exists() and not (folder / "config.json").exists():
        raise RunError(
            f"{name} is neither a run's folder with a complete checkpoint (it has no state.json) "
            "nor a model's folder (it has no config.json): give one of these."
        )
    if not folder.exists() and len(folder.parts) > 1 and folder.parent.exists():
        raise RunError(f"There is no {folder.name} in {folder.parent}: give another folder.")
    architectures = models.load_config(name).architectures or ()
    if any(each.endswith("ForSequenceClassification") for each in architectures):
        raise RunError(f"{name} is a classifier, not a language model: give another folder.")
    tokenizer = models.load_tokenizer(tokenizer_name or name)
    model = models.load_pretrained(name, models.load_config(name, tokenizer)).eval()
    return TrainedModel(model, tokenizer, name, None, None, {})


def _load_run(
    saved: SavedCheckpoint, model_name: str | None, tokenizer_name: str | None
) -> TrainedModel:
    dtype = getattr(torch, saved.settings["param_dtype"])
    on_meta, weights, tokenizer, origin = load_model(saved, model_name, tokenizer_name, dtype)
    # from_pretrained takes these tensors, ties them, and computes buffers that are not saved.
    model = type(on_meta).from_pretrained(
        None,
        config=on_meta.config,
        state_dict=weights,
        dtype=dtype,
    )
    seq_length, checksum = (saved.settings.get(key) for key in ("seq_length", "dataset_checksum"))
    sources = saved.settings.get("sources", {})
    return TrainedModel(model.eval(), tokenizer, origin, seq_length, checksum, sources)

"""Find and check a run's checkpoint, and load its weights in one process."""

from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from common import checkpoint, models
from common.cli import RunError
from common.storage import explain_store_errors


class SavedCheckpoint(NamedTuple):
    """A complete checkpoint. settings: from fixed_settings."""

    run: Path
    path: Path
    step: int
    settings: dict[str, object]


@explain_store_errors
def find_saved(run: Path, step: int | None) -> SavedCheckpoint:
    """Return a run's checkpoint of this step or, if it is None, the newest one; do not load it.

    Raises RunError if there is no such checkpoint, or if state.json is damaged.
    """
    settings = checkpoint.read_state(run).get("training")
    kept = checkpoint.complete_checkpoints(run)
    if settings is None or not kept:
        raise RunError(f"{run} is no run's folder with a complete checkpoint: check the path.")
    step = max(kept) if step is None else step
    if step not in kept:
        steps = ", ".join(map(str, sorted(kept)))
        raise RunError(f"The run {run} keeps no checkpoint of step {step}: give one of {steps}.")
    return SavedCheckpoint(run, kept[step], step, settings)


def load_model(
    saved: SavedCheckpoint, model_name: str | None, tokenizer_name: str | None, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, torch.Tensor], PreTrainedTokenizerBase, str]:
    """Return a checkpoint's model on the meta device, its weights by name on the CPU, its
    tokenizer, and in words where it is from.

    model_name, tokenizer_name: None for those of the run. dtype: of the parameters. Tied weights
    occur once; buffers that no checkpoint contains are left out. The optimizer state is not read.
    Raises RunError if a file is missing or damaged, or if the names do not match the checkpoint.
    """
    sources = saved.settings["sources"]
    model_name = model_name or sources["model_name"]
    tokenizer_name = tokenizer_name or sources["tokenizer_name"] or model_name
    tokenizer = models.load_tokenizer(tokenizer_name)
    config = models.load_config(model_name, tokenizer)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if checkpoint.describe_model(model) != saved.settings["model"]:
        raise RunError(
            f"{saved.run} has another model than {model_name}: give -m and --tokenizer-name."
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
    if damaged := explain_store_errors(checkpoint.damaged_file)(saved.path):
        raise RunError(f"The checkpoint file {damaged} is damaged: give another --step.")
    checkpoint.read_files(saved.path, {"model": weights}, "give another --step", no_dist=True)
    named = f"(model {model_name}, tokenizer {tokenizer_name})"
    return model, weights, tokenizer, f"step {saved.step} of {saved.run} {named}"

"""Find and check a run's checkpoint, and load its weights in one process."""

from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from common import models
from common.checkpoint import manifest
from common.checkpoint.files import Reader, cause_of
from common.cli import InputError
from common.storage import exists, explain_store_errors


class SavedCheckpoint(NamedTuple):
    """A complete checkpoint, as state.json describes it.

    files: size and checksum of each file, by name. settings: from fixed_settings.
    """

    run: Path
    path: Path
    step: int
    files: dict[str, dict]
    settings: dict[str, object]


@explain_store_errors
def find_saved(run: Path, step: int | None) -> SavedCheckpoint:
    """Return a run's checkpoint of this step or, if it is None, the newest one; do not load it.

    Raises InputError if there is no such checkpoint, or if state.json is damaged.
    """
    try:
        settings, kept = manifest.read_record(run)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            f"{run} is no run's folder with a complete checkpoint: it has no state.json; check the "
            "path."
        ) from error
    if not kept:
        raise InputError(f"The run {run} has no complete checkpoint: give another one.")
    step = step or max(kept)
    if step not in kept:
        steps = ", ".join(map(str, sorted(kept)))
        raise InputError(f"The run {run} keeps no checkpoint of step {step}: give one of {steps}.")
    path, files = run / kept[step]["path"], kept[step]["files"]
    return SavedCheckpoint(run, path, step, files, settings)


def load_model(
    saved: SavedCheckpoint, model_name: str | None, tokenizer_name: str | None, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, torch.Tensor], PreTrainedTokenizerBase, str]:
    """Return a checkpoint's model on the meta device, its weights by name on the CPU, its
    tokenizer, and in words where it is from.

    model_name, tokenizer_name: None for those of the run. dtype: of the parameters. Tied weights
    occur once; buffers that no checkpoint contains are left out. The optimizer state is not read.
    Raises InputError if a file is missing or damaged, or if the names do not match the checkpoint.
    """
    sources = saved.settings.get("sources", {})  # older runs did not save them
    note = "" if sources or model_name else ", assumed because the run does not name its own"
    model_name = model_name or sources.get("model_name", "gpt2-tiny")
    tokenizer_name = tokenizer_name or sources.get("tokenizer_name") or model_name
    config = models.load_config(model_name)
    tokenizer = models.load_tokenizer(tokenizer_name)
    models.check_sizes(config, tokenizer, None)  # adapts a preset's vocabulary to the tokenizer
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if manifest.describe_model(model) != saved.settings["model"]:
        raise InputError(
            f"{saved.run} has another model than {model_name}: give -m and --tokenizer-name."
        )
    models.check_sizes(config, tokenizer, saved.settings["seq_length"])
    for name, expected in saved.files.items():
        if manifest.measure_file(saved.path / name, expected) != expected:
            raise InputError(
                f"The checkpoint file {saved.path / name} is damaged: give another --step."
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
    try:
        dcp.load({"model": weights}, storage_reader=Reader(saved.path), no_dist=True)
    except CheckpointException as error:
        # If the metadata file is gone, PyTorch reports an AssertionError instead of an OSError.
        there = explain_store_errors(exists)(saved.path / ".metadata")
        reason = cause_of(error) if there else "it is gone"
        raise InputError(
            f"The checkpoint {saved.path} cannot be read ({reason}): if the run has deleted it "
            "meanwhile, start the same command again."
        ) from error
    named = f"(model {model_name}, tokenizer {tokenizer_name}{note})"
    return model, weights, tokenizer, f"step {saved.step} of {saved.run} {named}"

"""Weights of a model in files, of which each rank reads its own part."""

import json
from pathlib import Path

import huggingface_hub
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from transformers import PreTrainedModel

from common.cli import InputError
from common.models import PRESET_NAMES, not_found, resolve_model

INDEX = "model.safetensors.index.json"


def load_shards(model: PreTrainedModel, name: str) -> None:
    """Fill a sharded model from safetensors files; each rank reads its own part of each tensor.

    name: a local folder, or a hub id. Values are converted to the model's dtype. All ranks must
    call this. Raises InputError where a file or a tensor is missing, damaged or of another shape.
    """
    folder = Path(_folder(name))
    _check_files(folder)
    reader = HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata
    tensors = _by_saved_names(model, saved, folder)
    try:
        dcp.load(tensors, storage_reader=reader)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]  # the first rank's that failed
        raise InputError(f"The weights in {folder} cannot be read: {cause}.") from error


def _check_files(folder: Path) -> None:
    index = folder / INDEX
    if index.exists():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"The file {index} is damaged ({error!r}): get it anew.") from error
        if missing := sorted(file for file in named if not (folder / file).exists()):
            raise InputError(f"The folder {folder} has no {missing[0]}, which its index names.")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(
            f"The folder {folder} has no safetensors files: load it with transformers and save it "
            "with save_pretrained."
        )
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(f"The file {file} is damaged ({error}): get it anew.") from error


def _folder(name: str) -> str:
    found = resolve_model(name)
    if Path(found).is_dir():
        return found
    try:
        return huggingface_hub.snapshot_download(
            found, allow_patterns=["model*.safetensors", INDEX]
        )
    except (OSError, ValueError) as error:
        raise not_found("model", name, PRESET_NAMES, error) from error


def _by_saved_names(model: PreTrainedModel, saved: dict, folder: Path) -> dict:
    """Return the model's tensors by their names in the files.

    These may lack the prefix of the part below the output layer; older models were saved so.
    """
    prefix = f"{model.base_model_prefix}."
    tensors = {}
    for name, parameter in model.named_parameters():  # a tied one once
        for known in (name, name.removeprefix(prefix), prefix + name):
            if known in saved:
                break
        else:
            raise InputError(f"The files in {folder} have no {name}.")
        if len(saved[known].chunks) > 1:
            raise InputError(f"Several files in {folder} have {known}: leave those of one model.")
        if saved[known].size != parameter.shape:
            raise InputError(
                f"{name} has shape {[*parameter.shape]}, and {[*saved[known].size]} in {folder}."
            )
        tensors[known] = parameter.detach()
    return tensors

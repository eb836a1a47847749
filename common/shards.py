"""Weights of a model in files, of which each rank reads its own part."""

import json
from pathlib import Path

import huggingface_hub
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from transformers import PreTrainedModel

from common.cli import InputError
from common.models import not_found, resolve_model

INDEX = "model.safetensors.index.json"


def load_shards(model: PreTrainedModel, name: str) -> None:
    """Fill a sharded model from safetensors files; each rank reads its own part of each tensor.

    name: a local folder, or a hub id. Values are converted to the model's dtype. All ranks must
    call this. Raises InputError where a file or a tensor is missing, or has another shape.
    """
    folder = Path(_folder(name))
    if (folder / INDEX).exists():
        named = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        if missing := sorted(file for file in set(named) if not (folder / file).exists()):
            raise InputError(f"The folder {folder} has no {missing[0]}, which its index names.")
    if not any(folder.glob("*.safetensors")):
        raise InputError(
            f"The folder {folder} has no safetensors files: load it with transformers and save it "
            "with save_pretrained."
        )
    reader = HuggingFaceStorageReader(str(folder))
    try:
        saved = reader.read_metadata().state_dict_metadata
        dcp.load(_by_saved_names(model, saved, folder), storage_reader=reader)
    except (CheckpointException, OSError, ValueError, RuntimeError) as error:
        raise InputError(f"The weights in {folder} cannot be read: {error}") from error


def _folder(name: str) -> str:
    found = resolve_model(name)
    if Path(found).is_dir():
        return found
    try:
        return huggingface_hub.snapshot_download(
            found, allow_patterns=["*.safetensors", "*.safetensors.index.json"]
        )
    except (OSError, ValueError) as error:
        raise not_found("model", name, (), error) from error


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
        if saved[known].size != parameter.shape:
            raise InputError(
                f"{name} has shape {[*parameter.shape]}, and {[*saved[known].size]} in {folder}."
            )
        tensors[known] = parameter.detach()
    return tensors

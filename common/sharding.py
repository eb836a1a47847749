"""What only chapters 4 and 5 need: a model's layers, and the mesh of HSDP."""

import os
from itertools import chain, pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from common.cli import RunError
from common.launch import gather, rank_and_world_size

# What selective activation checkpointing saves: the outputs of attention and of matmuls. All other
# operations are cheap to compute again.
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
SAVED_OPS = [
    *(getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default for kind in ATTENTION),
    *(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "_scaled_mm")),
]


def find_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return a model's transformer layers in order: the modules that transformers never splits.

    Some models list their embeddings or parts of their layers, too, but only layers are in a list
    of modules. Raises RunError if transformers does not list the classes of the layers, or if two
    layers share weights.
    """
    names, kind = model._no_split_modules or (), model.config.model_type
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = [layer for layer in chain(*lists) if type(layer).__name__ in names]
    if not layers:
        raise RunError(f"transformers does not say what the layers of {kind} are: use another.")
    parameters = [id(parameter) for layer in layers for parameter in layer.parameters()]
    if len(set(parameters)) < len(parameters):
        raise RunError(f"Layers of {kind} share weights, so it cannot be sharded: use another.")
    return layers


def mesh_of_nodes(device: torch.device) -> DeviceMesh:
    """Return HSDP's mesh, with the dimensions "replicate" (nodes) and "shard" (ranks of a node).

    All ranks must call this. As for torchrun, each launcher is a node, even if two of them run on
    one machine. Raises RunError if there is one node only, or if nodes have different numbers of
    ranks or ranks that are not consecutive.
    """
    rank, _ = rank_and_world_size()
    local_ranks = list(gather({rank: int(os.environ["LOCAL_RANK"])}).values())
    firsts = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0]
    sizes = [end - first for first, end in pairwise([*firsts, len(local_ranks)])]
    if len(sizes) == 1:
        raise RunError("--hsdp replicates over nodes and there is one: leave it out.")
    if local_ranks != [*range(sizes[0])] * len(sizes):
        raise RunError(
            "--hsdp needs equally many ranks on all nodes, and those of a node in a row, not the "
            f"local ranks {local_ranks}: srun --distribution=block and mpirun --map-by slot start "
            "them so."
        )
    names = ("replicate", "shard")
    # PyTorch 2.11 gives the groups of a mesh only the backend of the GPU. With --cpu-offload they
    # reduce tensors in host memory, too, so they get the backends of the default group.
    backends = dict.fromkeys(names, dist.get_backend_config())
    return init_device_mesh(
        device.type, (len(sizes), sizes[0]), mesh_dim_names=names, backend_override=backends
    )

"""What only chapters 4 and 5 need: a model's layers, and the mesh of HSDP."""

import os
from itertools import pairwise

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

    Raises RunError if transformers does not list the classes of these modules.
    """
    names = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        kind = model.config.model_type
        raise RunError(f"transformers does not say what the layers of {kind} are: use another.")
    return layers


def mesh_of_nodes(device: torch.device) -> DeviceMesh:
    """Return HSDP's mesh, with the dimensions "replicate" (nodes) and "shard" (ranks of a node).

    All ranks must call this. As for torchrun, each launcher is a node, even if two of them run on
    one machine. Raises RunError if there is one node only, if nodes have different numbers of
    ranks, or if the ranks of a node are not consecutive.
    """
    rank, _ = rank_and_world_size()
    local_ranks = list(gather({rank: int(os.environ["LOCAL_RANK"])}).values())
    firsts = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0]
    sizes = [end - first for first, end in pairwise([*firsts, len(local_ranks)])]
    if local_ranks != [local_rank for size in sizes for local_rank in range(size)]:
        raise RunError(
            "--hsdp needs the ranks of a node to follow each other: start them with srun "
            "--distribution=block or mpirun --map-by slot, or leave it out."
        )
    if len(sizes) == 1:
        raise RunError("--hsdp replicates over nodes and there is one: leave it out.")
    if len(set(sizes)) > 1:
        raise RunError(
            f"--hsdp needs equally many ranks on all nodes, not {min(sizes)} here and {max(sizes)} "
            "there: start as many on each, or leave it out."
        )
    names = ("replicate", "shard")
    # PyTorch 2.11 gives the groups of a mesh only the backend of the GPU. With --cpu-offload they
    # reduce tensors in host memory, too, so they get the backends of the default group.
    backends = dict.fromkeys(names, dist.get_backend_config())
    return init_device_mesh(
        device.type, (len(sizes), sizes[0]), mesh_dim_names=names, backend_override=backends
    )

"""Which positions of a sequence a rank has, if ranks share it; context-parallel.diff uses it."""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from torch.utils.data import default_collate
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from common.errors import RunError
from common.inputs.models import MODELS_WITHOUT_MASK
from context_attention import attend_to_gathered_keys, attend_with_some_heads


def check_context_parallel(
    args: argparse.Namespace, config: PretrainedConfig, world_size: int
) -> None:
    """Raise RunError if the ranks of a row cannot share the sequences of this model."""
    n_ranks, flag = args.context_parallel, f"--context-parallel {args.context_parallel}"
    if world_size % n_ranks or (n_ranks > 1 and args.seq_length % (2 * n_ranks)):
        raise RunError(f"{flag} must divide the {world_size} ranks and half of {args.seq_length}.")
    if n_ranks > 1 and config.model_type not in MODELS_WITHOUT_MASK:
        raise RunError(f"{flag} needs GPT-2 or Llama, not {config.model_type}: give another -m.")
    n_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    if args.ulysses and n_heads % n_ranks:
        raise RunError(f"{flag} must divide the {n_heads} heads of keys, or leave out --ulysses.")


def chunks_of(mesh: DeviceMesh, ulysses: bool) -> tuple[int, int]:
    """Return the numbers of this rank's chunks, of the 2n that n ranks cut a sequence into.

    A rank that computes the attention of its own positions gets an early and a late chunk: late
    positions attend to more positions. With ulysses, a rank computes the attention of all
    positions, for some heads.
    """
    rank = mesh.get_local_rank()
    return (2 * rank, 2 * rank + 1) if ulysses else (rank, 2 * mesh.size() - 1 - rank)


def share_attention(model: PreTrainedModel, mesh: DeviceMesh, chunks: tuple, ulysses: bool) -> None:
    """Let the attention of a model see all positions of the sequence that the ranks share."""
    attend = partial(attend_to_gathered_keys, mesh, chunks)
    if ulysses:
        attend = partial(attend_with_some_heads, mesh)
    AttentionInterface.register("context_parallel", attend)
    model.config._attn_implementation = "context_parallel"


def compile_layer(forward: Callable) -> Callable:
    """Return the forward pass of a layer compiled; it may be `partial(recompute, forward, ...)`.

    The compiler leaves out attention to gathered keys, and with it the whole checkpoint that it is
    in. So it compiles what the checkpoint repeats. Selective recomputation has to see each matmul,
    which compiled code hides, so its layers are not compiled.
    """
    if not isinstance(forward, partial):
        return torch.compile(forward)
    if "context_fn" in forward.keywords:
        return forward
    return partial(forward.func, torch.compile(*forward.args), **forward.keywords)


def take_chunks(chunks: tuple, n_chunks: int, samples: list[dict]) -> dict[str, torch.Tensor]:
    """Return a rank's chunks of the sequences of a micro-batch: tensors [sequences, positions]."""
    batch = default_collate(samples)
    # A rank does not have the token after its last one, so labels are shifted before the cut.
    batch["shift_labels"] = pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    batch["position_ids"] = torch.arange(batch["labels"].shape[1]).expand_as(batch["labels"])
    parts = {key: tensor.chunk(n_chunks, dim=1) for key, tensor in batch.items()}
    return {key: torch.cat([part[n] for n in chunks], dim=1) for key, part in parts.items()}

"""The attention of blocks without padding: causal, without a mask, and in kernels that are fast."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PLAIN_CAUSAL_MODELS = ("gpt2", "llama")


def causal_attention(config: PretrainedConfig) -> str:
    """Return the attention for blocks without padding: causal and no mask, where the model allows.

    transformers builds a mask for padding, for packed documents, for sliding windows. To learn that
    none is needed it waits for the GPU in every step, and a compiled model of transformers 5.17
    keeps the mask: 13% slower. It builds none for an attention that it has no mask for, and
    without one the kernel is causal by itself.

    Models other than GPT-2 and Llama may need a mask (a sliding window), so they keep theirs.
    """
    AttentionInterface.register("causal_sdpa", causal_sdpa)
    return "causal_sdpa" if config.model_type in PLAIN_CAUSAL_MODELS else "sdpa"


def causal_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Return transformers' attention of [batch, heads, positions, size] tensors, and no weights.

    key, value: may have fewer heads, each for a group of the query's. In float32 they are repeated.
    No GPU kernel takes groups in float32, and PyTorch would hold the whole matrix of positions x
    positions of each head: 8 GiB in a layer of Llama 8B at 8192 positions.
    """
    groups = query.shape[1] // key.shape[1]
    if groups == 1 or query.dtype != torch.float32:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
    output = scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None and query.shape[2] > 1,  # one new token sees all before it
        scale=scaling,
    )
    return output.transpose(1, 2).contiguous(), None

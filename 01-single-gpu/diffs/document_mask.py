"""Attention within documents; document-mask.diff uses it.

A sequence of the training data has several documents, each with an end-of-text token at its end.
In the chapters, a token attends to all earlier tokens of its sequence. Here, it attends to earlier
tokens of its own document, and the positions of each document begin at 0. So the loss of each token
is the same as if its document were alone. The end-of-text token still predicts the first token of
the next document, so all sequences have equally many labels, as in the chapters.

On a CPU, transformers makes a mask of all pairs of positions: the positions tell it where documents
begin. On a GPU, FlexAttention (https://arxiv.org/abs/2412.05496) needs no such mask, and skips
blocks of 128 x 128 pairs in which no two tokens have the same document.
"""

import inspect
from functools import partial

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

from common.errors import RunError
from common.inputs.models import MODELS_WITHOUT_MASK, NO_MASK, WITH_MASK


def keep_documents_apart(model: PreTrainedModel, end_of_text: int, device: torch.device) -> None:
    """Let each token of a model attend to its own document only; all ranks must call this.

    end_of_text: the token after each document. Raises RunError if a document still changes what the
    model computes for the next one. Some models make their mask without the positions, and some
    have layers without attention.
    """
    uses_flex = has_flex_attention(model.config, device)
    # transformers' GPT-2 accepts no block mask. It makes one from the positions.
    uses_blocks = uses_flex and model.config.model_type != "gpt2"
    if uses_flex:
        model.config._attn_implementation = "flex_attention"
    elif model.config._attn_implementation == NO_MASK:
        model.config._attn_implementation = WITH_MASK
    add_arguments = partial(add_positions_and_mask, end_of_text, uses_blocks)
    model.register_forward_pre_hook(add_arguments, with_kwargs=True)
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    if not takes_positions or mixes_documents(model, end_of_text, device):
        raise RunError(
            f"Models of the type {model.config.model_type} mix the documents in a sequence: leave "
            "out the variant document-mask, or choose another -m, such as GPT-2, Llama or Qwen3."
        )


def has_flex_attention(config: PretrainedConfig, device: torch.device) -> bool:
    """Return whether FlexAttention computes what the chapters' attention computes.

    Its backward pass needs a GPU, and it has no dropout. Attention of other models than GPT-2 and
    Llama may differ between transformers' implementations: only some cap the scores of Gemma 2.
    """
    dropout = getattr(config, "attn_pdrop", 0.0) or getattr(config, "attention_dropout", 0.0)
    return device.type == "cuda" and config.model_type in MODELS_WITHOUT_MASK and not dropout


@torch.compiler.disable  # the mask's own function is compiled
def add_positions_and_mask(
    end_of_text: int, uses_blocks: bool, model: PreTrainedModel, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Return the arguments of a model's forward pass, with the positions of the tokens.

    uses_blocks: also with the mask for FlexAttention. transformers would wait for the GPU in each
    step, to find out whether a sequence has several documents.
    """
    positions = positions_of(kwargs["input_ids"], end_of_text)
    kwargs = {**kwargs, "position_ids": positions}
    if uses_blocks:
        kwargs["attention_mask"] = blocks_of(positions)
    return args, kwargs


def positions_of(input_ids: torch.Tensor, end_of_text: int) -> torch.Tensor:
    """Return the position of each token in its document, int64 [sequences, positions]."""
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    is_first = pad(input_ids[:, :-1] == end_of_text, (1, 0), value=True)
    starts = torch.where(is_first, positions, 0).cummax(dim=1).values
    return positions - starts


def blocks_of(positions: torch.Tensor) -> BlockMask:
    """Return the mask for FlexAttention; positions: int64 [sequences, positions]."""
    documents = (positions == 0).cumsum(dim=1)  # their numbers, from 1 on in each sequence

    def attends(sequence, head, query, key):
        same_document = documents[sequence, query] == documents[sequence, key]
        return same_document & (query >= key)

    n_sequences, length = positions.shape
    return make_blocks(attends, n_sequences, None, length, length, device=positions.device)


# Not compiled, it would store the mask of all pairs of positions.
make_blocks = torch.compile(create_block_mask, dynamic=False)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # or it would compile for the shape of this trial
def mixes_documents(model: PreTrainedModel, end_of_text: int, device: torch.device) -> bool:
    """Return whether the logits of a document depend on the document before it."""
    was_training = model.training
    model.eval()  # without dropout
    # Two tokens are enough, and a vocabulary of characters may have few.
    one, two = [token for token in range(3) if token != end_of_text][:2]
    tokens = [[one] * 8, [two] * 8, [one, two] * 4]
    first, other, second = torch.tensor(tokens, device=device)
    end = torch.tensor([end_of_text], device=device)
    logits = [
        model(input_ids=torch.cat([before, end, second])[None]).logits[0, -8:]
        for before in (first, other)
    ]
    model.train(was_training)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # it keeps gathered weights for a backward pass
            module.reshard()
    # Other tokens can change the order of sums in a mixture of experts, and so the rounding.
    rounding = max(1e-5, torch.finfo(logits[0].dtype).eps)
    change = (logits[0] - logits[1]).abs().mean()
    return (change > rounding * logits[0].abs().mean()).item()

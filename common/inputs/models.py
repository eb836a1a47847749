"""Models: configuration, tokenizer, weights and attention."""

import hashlib
import json
import logging
import math
import pickle
from pathlib import Path

import huggingface_hub
import torch
import transformers
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.errors import RunError
from common.inputs.names import PRESET_NAMES, PRESETS, cannot_load, resolve_model

logger = logging.getLogger(__name__)

# These models are causal although is_decoder is False in their configurations.
CAUSAL_ALTHOUGH_NOT_DECODER = ("gpt_neox", "gpt_neox_japanese")
# These do not shift their labels, or see later tokens.
NOT_CAUSAL = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"),
    *("pegasus", "plbart", "prophetnet", "trocr", "whisper", "cpmant", "xlm", "xlnet"),
    *("big_bird", "doge", "megatron-bert", "rembert", "roformer"),  # with transformers 5.17
)
# Masks and positions, which earlier releases of transformers saved with the weights.
BUFFERS_OF_OLD_FILES = ("masked_bias", "causal_mask", "inv_freq", "position_ids")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


def load_config(name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> PretrainedConfig:
    """Load the configuration of a model, and adapt it to this training.

    What differs from the configuration in the files: the attention is the one of causal_attention.
    A preset, which has no weights yet, gets the vocabulary and the end-of-text token of another
    tokenizer. A padding token is forgotten if a text can contain it, because it would not be
    trained, or if it is not in the vocabulary. The auxiliary loss of a router is left out, and the
    cache of generation is off.

    Raises RunError if there is no such model, if it is no causal language model, if its weights are
    quantized, if it has code of its own, or if the tokenizer has more tokens than the model has
    embeddings.
    """
    transformers.logging.set_verbosity_error()  # it warns about deliberate choices of this guide
    folder = resolve_model(name)
    try:
        config = AutoConfig.from_pretrained(folder, use_cache=False, trust_remote_code=False)
        config._attn_implementation = causal_attention(config)
    except Exception as error:  # its fields are checked by code that raises many kinds of errors
        raise cannot_load("model", name, error) from error
    if getattr(config, "is_heterogeneous", False):  # Gemma 4, whose layers differ in size
        config.allow_global_per_layer_attribute_access = True
    _check_that_it_is_causal(config, name)
    if getattr(config, "quantization_config", None):
        raise RunError(f"The weights of {name} are quantized: choose a model in float or bfloat16.")
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # this loss would depend on the number of devices
        logger.warning(f"The auxiliary loss of {name}'s router is left out.")
    if tokenizer is not None:
        _adapt_to_tokenizer(config, name, tokenizer)
    padding = getattr(config, "pad_token_id", None)
    if padding is not None:
        ids_of_texts = set() if tokenizer is None else _ids_of_texts(tokenizer)
        if padding in ids_of_texts or not 0 <= padding < config.vocab_size:
            config.pad_token_id = None
    return config


def _check_that_it_is_causal(config: PretrainedConfig, name: str) -> None:
    """Raise RunError if a model does not predict each token from the tokens before it alone."""
    is_encoder = getattr(config, "is_decoder", None) is False
    if (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        or config.model_type in NOT_CAUSAL
        or (is_encoder and config.model_type not in CAUSAL_ALTHOUGH_NOT_DECODER)
        or getattr(config, "use_bidirectional_attention", False)
        or not all(hasattr(config, key) for key in ("vocab_size", "num_attention_heads"))
    ):
        raise RunError(
            f"The model {name} ({config.model_type}) is not a causal language model: choose one "
            "that predicts the next token, such as GPT-2 or Llama."
        )


def _adapt_to_tokenizer(
    config: PretrainedConfig, name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Give a preset the vocabulary and the end-of-text token of another tokenizer than its own.

    The vocabulary is rounded up to a multiple of 64. Raises RunError if a model has fewer
    embeddings than the tokenizer has tokens.
    """
    n_tokens = vocabulary_size(tokenizer)
    if name in PRESET_NAMES and tokenizer.name_or_path != str(PRESETS / "tokenizer"):
        config.vocab_size = -(-n_tokens // 64) * 64
        config.eos_token_id = tokenizer.eos_token_id
    if n_tokens > config.vocab_size:
        raise RunError(
            f"The tokenizer has {n_tokens} tokens and the model only {config.vocab_size} "
            "embeddings: give the model's own with --tokenizer-name."
        )


def _ids_of_texts(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that are no special tokens, and the end-of-text token.

    transformers does not train the embedding of a padding token. A model's padding token can be
    a letter in the tokenizer of another model.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {number for number, token in added if token.special}.union(tokenizer.all_special_ids)
    return set(tokenizer.get_vocab().values()) - special | {tokenizer.eos_token_id}


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; all presets have the same one (byte-level BPE, 4096 tokens).

    It splits text as its tokenizer.json says. Raises RunError if it has no such file, or no
    end-of-text token, which separates documents.
    """
    what = "tokenizer" if Path(name).exists() else "model or tokenizer"
    is_preset = name in PRESET_NAMES
    folder = str(PRESETS / "tokenizer") if is_preset else resolve_model(name, what)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        file = _tokenizer_file(folder)
        # transformers makes a tokenizer without a vocabulary if it finds no files.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise RunError(f"{name} has no usable tokenizer: give --tokenizer-name.")
        if not tokenizer.is_fast or file is None:
            raise RunError(
                f"{name} has no tokenizer.json: write one with transformers, by "
                f"AutoTokenizer.from_pretrained({name!r}).save_pretrained('converted'), and give "
                "--tokenizer-name converted."
            )
        if not _has_rules_of(file, tokenizer):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except RunError:
        raise
    except Exception as error:  # the package tokenizers raises plain Exceptions
        raise cannot_load(what, name, error) from error
    if tokenizer.eos_token_id is None:
        raise RunError(f"The tokenizer of {name} has no end-of-text token: choose another one.")
    return tokenizer


def _tokenizer_file(folder: str) -> Path | None:
    """Return the tokenizer.json of a local folder or of a hub id that was loaded, or None."""
    if Path(folder).is_dir():
        file = Path(folder) / "tokenizer.json"
        return file if file.exists() else None
    cached = huggingface_hub.try_to_load_from_cache(folder, "tokenizer.json")
    return Path(cached) if isinstance(cached, str) else None


def _has_rules_of(file: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer splits text as its tokenizer.json says.

    Classes such as LlamaTokenizer and Qwen2Tokenizer may replace these rules by their own, see
    https://github.com/huggingface/transformers/issues/45488.
    """
    found = json.loads(tokenizer.backend_tokenizer.to_str())
    expected = json.loads(Tokenizer.from_file(str(file)).to_str())
    return all(found[key] == expected[key] for key in ("normalizer", "pre_tokenizer", "model"))


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many embeddings the tokens need; numbers may be left out, so len() can be less."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_checksum(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a checksum of the tokens with their ids, and of the rules that split a text.

    The rules that add special tokens are left out: no script that trains uses them.
    """
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    facts = [rules["normalizer"], rules["pre_tokenizer"], rules["model"], sorted(added.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def n_positions(config: PretrainedConfig) -> float:
    """Return how many tokens a model can see at once; infinity if there is no limit."""
    limit = max(getattr(config, name, None) or 0 for name in POSITIONS)
    return limit if limit > 0 else math.inf


def sequence_length(config: PretrainedConfig, seq_length: int | None) -> int:
    """Return `seq_length` or, if it is None, the number of the model's positions, but at most 1024.

    Raises RunError if the sequence is longer than the positions.
    """
    limit = n_positions(config)
    if seq_length is not None and seq_length > limit:
        raise RunError(f"The model has {limit} positions: --seq-length {seq_length} is too long.")
    return seq_length or min(limit, 1024)


def load_pretrained(
    name: str, config: PretrainedConfig | None, model_class: type = AutoModelForCausalLM
) -> PreTrainedModel:
    """Load a model with its pretrained weights, in float32, on the CPU.

    model_class: another class; its head need not be in the files, and the files may have another
    head. Raises RunError for a preset, which has no weights, if the weights cannot be loaded or are
    not finite, and if they are not those of the configuration: transformers would draw or drop what
    differs.
    """
    if name in PRESET_NAMES:
        remedy = "leave out --pretrained, or give a hub id such as -m openai-community/gpt2"
        raise RunError(f"The preset {name} has no weights: {remedy}.")
    if (Path(name) / "adapter_config.json").exists():
        raise RunError(f"{name} holds an adapter of PEFT: merge it into its model first.")
    # Without the first, missing tensors are drawn silently; without the second, those of another
    # shape are an error that does not name them.
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, report = model_class.from_pretrained(
            resolve_model(name), config=config, dtype=torch.float32, **options
        )
    except pickle.UnpicklingError as error:  # PyTorch's text advises to run code in the file
        reason = ValueError("a .bin file holds something else than tensors")
        raise cannot_load("weights", name, reason) from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise cannot_load("weights", name, error) from error
    drawn = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    prefix = "" if model_class is AutoModelForCausalLM else f"{model.base_model_prefix}."
    if lost := sorted(key for key in drawn if key.startswith(prefix)):
        raise RunError(
            f"The weights of {name} have no {lost[0]} of the right shape: get all files that match "
            "config.json, or leave out --pretrained."
        )
    unused = {
        key
        for key in report["unexpected_keys"] - dict(model.named_buffers()).keys()
        if key.rpartition(".")[2] not in BUFFERS_OF_OLD_FILES
    }
    if model_class is AutoModelForCausalLM and unused:
        raise RunError(
            f"The weights of {name} have {min(unused)}, which the model of config.json does not "
            "have: get the config.json that matches them, or leave out --pretrained."
        )
    for key, parameter in model.named_parameters():
        # Both are NaN if one weight is. isfinite() would need memory for a copy.
        if not all(map(math.isfinite, parameter.detach().aminmax())):
            raise RunError(
                f"The weights of {name} have NaN or infinity in {key}: get another copy of them, "
                "or leave out --pretrained."
            )
    with torch.device("meta"):
        untrained = type(model)(model.config)
    # transformers does not tie a head that is in the files and differs from the embeddings. But it
    # ties the head of the model without weights, into which a script reads a run's checkpoint.
    tied = dict(model.named_parameters()).keys() - dict(untrained.named_parameters()).keys()
    if tied:
        raise RunError(
            f"The weights of {name} have their own {min(tied)}, but config.json ties it to the "
            "embeddings: set tie_word_embeddings to false there, or leave out --pretrained."
        )
    for key, parameter in untrained.named_parameters():  # from_pretrained would train them all
        model.get_parameter(key).requires_grad_(parameter.requires_grad)
    return model


# --- attention ---

MODELS_WITHOUT_MASK = ("gpt2", "llama")
# Two names for the function `attention`: transformers makes a mask for the second one only.
NO_MASK, WITH_MASK = "causal_sdpa", "masked_sdpa"


def causal_attention(config: PretrainedConfig) -> str:
    """Return the attention implementation for sequences without padding: if possible, no mask.

    transformers makes a mask for padding, packed documents and sliding windows. To find out that
    no mask is needed, it waits for the GPU in every step. With transformers 5.17, a compiled model
    uses a mask anyway, which is 13% slower. But transformers makes no mask for attention that it
    does not know, and without a mask the kernel itself is causal. Models other than GPT-2 and
    Llama may need a mask, for example for a sliding window, so they get one.
    """
    if config.model_type in MODELS_WITHOUT_MASK:
        return NO_MASK
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), PreTrainedModel)
    if not model_class._supports_sdpa:
        return "eager"
    # Older models, such as Falcon, have code of their own for each kind of attention.
    return WITH_MASK if model_class._supports_attention_backend else "sdpa"


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention of [batch, heads, positions, head size] tensors, and no weights.

    key and value may have fewer heads, each for a group of query heads (grouped-query attention).
    Up to torch 2.13, no GPU kernel supports groups in float32, and PyTorch would store the
    positions x positions matrix of every head: 8 GiB in a layer of Llama 8B at 8192 positions. So
    in float32, the heads of key and value are repeated.
    """
    groups = query.shape[1] // key.shape[1]
    if groups <= 1 or query.dtype != torch.float32:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
    output = scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None and query.shape[2] > 1,  # one new token sees all others
        scale=scaling,
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NO_MASK, attention)
AttentionInterface.register(WITH_MASK, attention)
AttentionMaskInterface.register(WITH_MASK, sdpa_mask)

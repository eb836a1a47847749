"""Where a model and its tokenizer come from: a preset, a local folder, or the hub."""

import functools
import os
from pathlib import Path

import huggingface_hub
import torch
import transformers
from huggingface_hub import constants
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.attention import causal_attention
from common.cli import InputError

# Causal although their configurations, which can also be those of encoders, do not say so.
CAUSAL_WITHOUT_SAYING = ("gpt_neox", "gpt_neox_japanese")

PRESETS = Path(__file__).parent / "presets"
PRESET_NAMES = tuple(sorted(path.parent.name for path in PRESETS.glob("*/config.json")))
WORKS_OFFLINE = "what works offline: -d python-stdlib -m gpt2-tiny (the defaults), or local paths"


@functools.cache
def hub_is_reachable() -> bool:
    """Return whether the hub answers within 5 s. If not, its libraries only use their cache:
    left alone, they try again for almost half a minute before they give up."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # no route, no name, no certificate, a proxy that refuses: all the same here
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        constants.HF_HUB_OFFLINE = True
        return False
    return True


def prepare_for_hub(kind: str, name: str) -> None:
    """Make sure that asking the hub for this name does not wait for a hub out of reach.

    Raises InputError for a name that is no id of the hub, but a path that is not there.
    """
    if not name or name[0] in "/.~" or name.count("/") > 1:
        raise InputError(f"There is no {kind} at {name!r}: no such file or folder.")
    hub_is_reachable()


def not_found(kind: str, name: str, presets: tuple[str, ...], cause: Exception) -> InputError:
    """Return the one sentence that says why a model or a data set cannot be had."""
    text = f"The {kind} {name!r} is neither a preset ({', '.join(presets)}) nor a local path"
    if not hub_is_reachable():
        return InputError(
            f"{text}, it is not in the cache, and the hub ({constants.ENDPOINT}) cannot be "
            f"reached; {WORKS_OFFLINE}."
        )
    return InputError(f"{text}, and the hub does not give it: {_first_line(cause)}")


def resolve_model(name: str, kind: str = "model") -> str:
    """Return what transformers loads a model from: a preset's folder, a local folder, a hub id.

    Nothing asks the hub for a preset or a local folder. Raises InputError for a path that is not
    there.
    """
    if name in PRESET_NAMES:
        return str(PRESETS / name)
    if not name or not Path(name).is_dir():
        prepare_for_hub(kind, name)
    return name


def _cannot_load(kind: str, name: str, lacks: str, cause: Exception) -> InputError:
    """Return why nothing could be loaded: what a local folder lacks, or what the hub has not."""
    if Path(name).is_dir():
        return InputError(f"The folder {name} has no {lacks}")
    return not_found(kind, name, PRESET_NAMES, cause)


def load_config(name: str) -> PretrainedConfig:
    """Load the configuration of a preset, a local folder or a hub model.

    Raises InputError where there is none, or it is not that of a causal language model: with one
    that sees the tokens after a position, or predicts without shifting, the losses mean nothing.
    """
    transformers.logging.set_verbosity_error()  # its warnings are about what this guide chose
    try:
        config = AutoConfig.from_pretrained(resolve_model(name), use_cache=False)
    except (OSError, ValueError) as error:
        lacks = f"usable config.json: {_first_line(error)}"
        raise _cannot_load("model", name, lacks, error) from error
    encoder = getattr(config, "is_decoder", None) is False
    if (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        or getattr(config, "is_encoder_decoder", False)
        or (encoder and config.model_type not in CAUSAL_WITHOUT_SAYING)
    ):
        raise InputError(
            f"The model {name} ({config.model_type}) is no causal language model: choose one "
            "that predicts the next token, such as GPT-2 or Llama."
        )
    return config


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; presets share the built-in one (byte-level BPE, 4096 tokens).

    Raises InputError where there is none, or it has no end-of-text token to part documents with.
    """
    in_presets = name in PRESET_NAMES
    folder = str(PRESETS / "tokenizer") if in_presets else resolve_model(name, "tokenizer")
    lacks = "tokenizer: give --tokenizer-name."
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise _cannot_load("tokenizer", name, lacks, error) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of no files
        raise InputError(f"The folder {name} has no {lacks}")
    if tokenizer.eos_token_id is None:
        raise InputError(f"The tokenizer of {name} has no end-of-text token: choose another one.")
    return tokenizer


def load_pretrained(name: str, config: PretrainedConfig) -> PreTrainedModel:
    """Load a model with its own weights, in float32, on the CPU.

    Where the default device is "meta", it has shapes and no weights: load_shards reads them.
    Raises InputError for a preset (it has none) and where the weights cannot be had.
    """
    options = {"attn_implementation": causal_attention(config), "dtype": torch.float32}
    if name not in PRESET_NAMES and torch.get_default_device().type == "meta":
        return AutoModelForCausalLM.from_config(config, **options)
    return load_weights(AutoModelForCausalLM, name, config, options)


def load_weights(
    model_class: type, name: str, config: PretrainedConfig | None, options: dict[str, object]
) -> PreTrainedModel:
    """Load a folder's or a hub model's own weights on the CPU; options: of from_pretrained.

    Raises InputError for a preset (it has no weights) and where the weights cannot be had.
    """
    if name in PRESET_NAMES:
        raise InputError(f"The preset {name} has no weights: leave out --pretrained.")
    try:
        return model_class.from_pretrained(resolve_model(name), config=config, **options)
    except (OSError, ValueError) as error:
        raise _cannot_load("model", name, f"usable weights: {_first_line(error)}", error) from error


def find_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks of a model in their order: those that transformers says not to split.

    Raises InputError where it does not say.
    """
    names = model._no_split_modules or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        kind = model.config.model_type
        raise InputError(f"transformers does not say what the blocks of {kind} are.")
    return blocks


def check_sizes(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, seq_length: int | None
) -> int:
    """Return the sequence length in tokens: the one asked for, or the model's positions up to 1024.

    A preset has no weights yet: where the tokenizer is not its own, it takes the tokenizer's size,
    up to a multiple of 64, and its end-of-text token. Raises InputError if the model has fewer
    positions than the sequence, or fewer embeddings than the tokenizer has tokens.
    """
    preset = Path(config.name_or_path).parent == PRESETS
    if preset and tokenizer and tokenizer.name_or_path != str(PRESETS / "tokenizer"):
        config.vocab_size = -(-len(tokenizer) // 64) * 64
        config.eos_token_id = tokenizer.eos_token_id
    positions = getattr(config, "max_position_embeddings", None) or seq_length or 1024
    if seq_length is not None and seq_length > positions:
        raise InputError(
            f"The model has {positions} positions: --seq-length {seq_length} is more than that."
        )
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"The tokenizer has {len(tokenizer)} tokens and the model only {config.vocab_size} "
            "embeddings: give the model's own with --tokenizer-name."
        )
    return seq_length or min(positions, 1024)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

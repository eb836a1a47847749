"""Where a model and its tokenizer come from: a preset, a local folder, or the hub."""

import functools
import os
from pathlib import Path

import huggingface_hub
import torch
import transformers
from huggingface_hub import constants
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.cli import InputError

transformers.logging.set_verbosity_error()  # its warnings are about settings this guide chose

# transformers draws a mask for padding, for packed documents and for sliding windows. To learn that
# none is needed it waits for the GPU in every step, and a compiled model of transformers 5.17 keeps
# the mask: 13% slower. An attention that it knows no mask for gets none, and is causal by itself.
AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
PLAIN_CAUSAL_MODELS = ("gpt2", "llama")

PROMPTS = {"python-stdlib": "    def"}

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


def not_found(kind: str, name: str, presets: tuple[str, ...], cause: Exception) -> InputError:
    """Return the one sentence that says why a model or a data set cannot be had."""
    text = f"The {kind} {name!r} is neither a preset ({', '.join(presets)}) nor a local path"
    if not hub_is_reachable():
        return InputError(
            f"{text}, it is not in the cache, and the hub ({constants.ENDPOINT}) cannot be "
            f"reached; {WORKS_OFFLINE}."
        )
    return InputError(f"{text}, and the hub does not give it: {_first_line(cause)}")


def resolve_model(name: str) -> str:
    """Return what transformers loads a model from: a preset's folder, a local folder, a hub id.

    Nothing asks the hub for a preset or a local folder.
    """
    if name in PRESET_NAMES:
        return str(PRESETS / name)
    if not Path(name).is_dir():
        hub_is_reachable()
    return name


def load_config(name: str) -> PretrainedConfig:
    """Load the configuration of a preset, a local folder or a hub model.

    Raises InputError where there is none.
    """
    try:
        return AutoConfig.from_pretrained(resolve_model(name), use_cache=False)
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            raise InputError(
                f"The folder {name} has no usable config.json: {_first_line(error)}"
            ) from error
        raise not_found("model", name, PRESET_NAMES, error) from error


def causal_attention(config: PretrainedConfig) -> str:
    """Return the attention for blocks without padding: causal and no mask, where the model allows.

    Models other than GPT-2 and Llama may need a mask (a sliding window), so they keep theirs.
    """
    return "causal_sdpa" if config.model_type in PLAIN_CAUSAL_MODELS else "sdpa"


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; presets share the built-in one (byte-level BPE, 4096 tokens).

    Raises InputError where there is none, or it has no end-of-text token to part documents with.
    """
    folder = str(PRESETS / "tokenizer") if name in PRESET_NAMES else resolve_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            raise InputError(
                f"The folder {name} has no tokenizer: give --tokenizer-name."
            ) from error
        raise not_found("tokenizer", name, PRESET_NAMES, error) from error
    if tokenizer.eos_token_id is None:
        raise InputError(f"The tokenizer of {name} has no end-of-text token: choose another one.")
    return tokenizer


def load_pretrained(name: str, config: PretrainedConfig) -> PreTrainedModel:
    """Load a model with its own weights, in float32, on the CPU.

    Raises InputError for a preset (it has none) and where the weights cannot be had.
    """
    if name in PRESET_NAMES:
        raise InputError(f"The preset {name} has no weights: leave out --pretrained.")
    try:
        return AutoModelForCausalLM.from_pretrained(
            resolve_model(name),
            config=config,
            attn_implementation=causal_attention(config),
            dtype=torch.float32,
        )
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            raise InputError(
                f"The folder {name} has no usable weights: {_first_line(error)}"
            ) from error
        raise not_found("model", name, PRESET_NAMES, error) from error


def check_sizes(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, seq_length: int | None
) -> int:
    """Return the sequence length in tokens: the one asked for, or the model's positions up to 1024.

    Raises InputError if the model has fewer positions than that, or fewer embeddings than the
    tokenizer has tokens.
    """
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


@torch.no_grad()
def sample_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset_name: str,
    length: int,
    seed: int,
) -> tuple[str, str]:
    """Return a prompt, and it with what the model goes on with, up to `length` or 256 tokens.

    The prompt is the end-of-text token, after which a document begins; for the built-in corpus,
    most of whose documents begin with many lines of comment, it is the start of a method.
    """
    torch.manual_seed(seed)
    prompt = PROMPTS.get(dataset_name, tokenizer.eos_token)
    encoded = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(model.device)
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # every length would be compiled anew
        tokens = model.generate(
            encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_length=min(length, 256),
            do_sample=True,
            temperature=0.7,
            top_k=40,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
    return prompt, tokenizer.decode(tokens[0], skip_special_tokens=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""Models: configuration, tokenizer, weights, attention, and a sample of a model's text.

The name of a model is a preset, a local folder, or a hub id.
"""

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import torch
import torch.distributed.checkpoint as dcp
import transformers
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
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

PRESETS = Path(__file__).parent / "presets"
PRESET_NAMES = tuple(sorted(path.parent.name for path in PRESETS.glob("*/config.json")))
# These models are causal although is_decoder is False in their configurations.
CAUSAL_ALTHOUGH_NOT_DECODER = ("gpt_neox", "gpt_neox_japanese")


def load_config(name: str) -> PretrainedConfig:
    """Load the configuration of a model.

    Raises InputError if there is none, or if it is not that of a causal language model: the losses
    of a model that sees later tokens, or that does not shift its labels, would mean nothing.
    """
    transformers.logging.set_verbosity_error()  # it warns about deliberate choices of this guide
    try:
        config = AutoConfig.from_pretrained(resolve_model(name), use_cache=False)
    except (OSError, ValueError) as error:
        lacks = f"usable config.json: {_first_line(error)}"
        raise _cannot_load("model", name, lacks, error) from error
    encoder = getattr(config, "is_decoder", None) is False
    if (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        or getattr(config, "is_encoder_decoder", False)
        or (encoder and config.model_type not in CAUSAL_ALTHOUGH_NOT_DECODER)
    ):
        raise InputError(
            f"The model {name} ({config.model_type}) is not a causal language model: choose one "
            "that predicts the next token, such as GPT-2 or Llama."
        )
    return config


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; all presets have the same one (byte-level BPE, 4096 tokens).

    Raises InputError if there is none, or if it has no end-of-text token to separate documents.
    """
    is_preset = name in PRESET_NAMES
    folder = str(PRESETS / "tokenizer") if is_preset else resolve_model(name, "tokenizer")
    lacks = "tokenizer: give --tokenizer-name."
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise _cannot_load("tokenizer", name, lacks, error) from error
    # transformers makes a tokenizer without a vocabulary if it finds no files.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(f"The folder {name} has no {lacks}")
    if tokenizer.eos_token_id is None:
        raise InputError(f"The tokenizer of {name} has no end-of-text token: choose another one.")
    return tokenizer


def check_sizes(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, seq_length: int | None
) -> int:
    """Return the sequence length in tokens: `seq_length` or, if that is None, the number of the
    model's positions, but at most 1024.

    A preset has no weights yet, so it adapts to another tokenizer: it takes the end-of-text token
    and the vocabulary size, rounded up to a multiple of 64. Raises InputError if the sequence is
    longer than the positions, or if the tokenizer has more tokens than the model has embeddings.
    """
    is_preset = Path(config.name_or_path).parent == PRESETS
    if is_preset and tokenizer and tokenizer.name_or_path != str(PRESETS / "tokenizer"):
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


def load_pretrained(name: str, config: PretrainedConfig) -> PreTrainedModel:
    """Load a model with its pretrained weights, in float32, on the CPU.

    If the default device is "meta", the model gets no weights; load_shards reads them later.
    Raises InputError for a preset, which has no weights, and if the weights cannot be loaded.
    """
    options = {"attn_implementation": causal_attention(config), "dtype": torch.float32}
    if name not in PRESET_NAMES and torch.get_default_device().type == "meta":
        return AutoModelForCausalLM.from_config(config, **options)
    return load_weights(AutoModelForCausalLM, name, config, options)


def load_weights(
    model_class: type, name: str, config: PretrainedConfig | None, options: dict[str, object]
) -> PreTrainedModel:
    """Call from_pretrained of a model class with these options. Raises InputError as above."""
    if name in PRESET_NAMES:
        raise InputError(f"The preset {name} has no weights: leave out --pretrained.")
    try:
        return model_class.from_pretrained(resolve_model(name), config=config, **options)
    except (OSError, ValueError) as error:
        raise _cannot_load("model", name, f"usable weights: {_first_line(error)}", error) from error


def find_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return a model's transformer layers in order: the modules that transformers never splits.

    Raises InputError if transformers does not list the classes of these modules.
    """
    names = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        kind = model.config.model_type
        raise InputError(f"transformers does not say what the layers of {kind} are: use another.")
    return layers


# --- attention ---

MODELS_WITHOUT_MASK = ("gpt2", "llama")
# What selective activation checkpointing saves: the outputs of attention and of matmuls. All other
# operations are cheap to compute again.
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
SAVED_OPS = [
    *(getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default for kind in ATTENTION),
    *(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "_scaled_mm")),
]


def causal_attention(config: PretrainedConfig) -> str:
    """Return the attention implementation for sequences without padding: if possible, no mask.

    transformers makes a mask for padding, packed documents and sliding windows. To find out that
    no mask is needed, it waits for the GPU in every step, and a model that transformers 5.17 has
    compiled uses a mask anyway, which is 13% slower. But it makes no mask for attention that it
    does not know, and without a mask the kernel itself is causal. Models other than GPT-2 and
    Llama may need a mask, for example for a sliding window, so they get the usual attention.
    """
    AttentionInterface.register("causal_sdpa", causal_sdpa)
    return "causal_sdpa" if config.model_type in MODELS_WITHOUT_MASK else "sdpa"


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
    """Return the attention of [batch, heads, positions, head size] tensors, and no weights.

    key and value may have fewer heads, each for a group of query heads (grouped-query attention).
    No GPU kernel supports groups in float32, and PyTorch would store the positions x positions
    matrix of every head: 8 GiB in a layer of Llama 8B at 8192 positions. So in float32, the heads
    of key and value are repeated.
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
        is_causal=attention_mask is None and query.shape[2] > 1,  # one new token sees all others
        scale=scaling,
    )
    return output.transpose(1, 2).contiguous(), None


# --- weights for a sharded model ---

INDEX = "model.safetensors.index.json"


def load_shards(model: PreTrainedModel, name: str) -> None:
    """Fill a sharded model from safetensors files; each rank reads only its part of each tensor.

    name: a local folder or a hub id. The values are converted to the model's dtype. All ranks must
    call this. Raises InputError if a file or tensor is missing, damaged or has another shape.
    """
    folder = _folder_of_weights(name)
    _check_files(folder)
    reader = HuggingFaceStorageReader(str(folder))
    tensors = _tensors_by_saved_name(model, reader.read_metadata().state_dict_metadata, folder)
    try:
        dcp.load(tensors, storage_reader=reader)
    except CheckpointException as error:
        cause = str(next(iter(error.failures.values()))[0]).rstrip(".")  # of the first rank
        raise InputError(f"The weights in {folder} cannot be read: {cause}.") from error


def _folder_of_weights(name: str) -> Path:
    found = resolve_model(name)
    if Path(found).is_dir():
        return Path(found)
    try:
        patterns = ["model*.safetensors", INDEX]
        return Path(huggingface_hub.snapshot_download(found, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise not_found("model", name, PRESET_NAMES, error) from error


def _check_files(folder: Path) -> None:
    index = folder / INDEX
    if index.exists():
        try:
            listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"The file {index} is damaged ({error!r}): get it again.") from error
        if missing := sorted(file for file in listed if not (folder / file).exists()):
            raise InputError(f"The folder {folder} has no {missing[0]}, which its index lists.")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(
            f"The folder {folder} has no safetensors files: load the model with transformers and "
            "save it with save_pretrained."
        )
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(f"The file {file} is damaged ({error}): get it again.") from error


def _tensors_by_saved_name(model: PreTrainedModel, saved: dict, folder: Path) -> dict:
    """Return the model's tensors by their names in the files, without copies of tied tensors.

    The names in the files may lack the prefix of the base model, or have one that is not needed.
    """
    prefix = f"{model.base_model_prefix}."
    tensors = {}
    for name, parameter in model.named_parameters():
        names = (name, name.removeprefix(prefix), prefix + name)
        saved_name = next((each for each in names if each in saved), name)
        if saved_name in saved and len(saved[saved_name].chunks) > 1:
            raise InputError(
                f"Several files in {folder} have {saved_name}: keep the files of one model only."
            )
        tensors[saved_name] = parameter.detach()
    return tensors


# --- new folders of models and tokenizers ---


def check_new_folder(target: Path) -> None:
    """Raise InputError if this is a file, a folder that is not empty, or the name of a preset."""
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise InputError(f"{target} already exists: give another folder, or delete it.")
    if str(target) in PRESET_NAMES:
        raise InputError(f"{target} is the name of a preset: give the folder another name.")


@contextmanager
def complete_folder(target: Path, errors: tuple[type[Exception], ...]) -> Iterator[Path]:
    """Yield a temporary folder to write to, and rename it to `target` at the end.

    So `target` is complete if it exists, even if the process is killed. errors: what the libraries
    that write may raise, for example on a full disk. Raises InputError instead of these.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            unfinished = Path(folder) / target.name
            yield unfinished
            unfinished.replace(target)
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{target} could not be written ({reason}): make room, or give another folder."
        ) from error


def let_others_read(folder: Path) -> None:
    """Give weights the mode of the other files: safetensors lets only the owner read them."""
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode)


# --- a sample of a model's text ---

PROMPTS = {"python-stdlib": "    def"}


@torch.no_grad()
def sample_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    dataset_name: str,
    length: int,
    seed: int,
) -> tuple[str, str]:
    """Return a prompt, and the prompt with its continuation, up to `length` or 256 tokens.

    The prompt is the end-of-text token, after which a new document begins. For the built-in corpus
    it is the start of a method, because most of its documents begin with many lines of comment.
    """
    torch.manual_seed(seed)
    prompt = PROMPTS.get(dataset_name, tokenizer.eos_token)
    encoded = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(device)
    if encoded["input_ids"].shape[1] >= length:
        return prompt, prompt
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # it would compile once for every length
        tokens = model.generate(
            encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_length=min(length, 256),
            do_sample=True,
            temperature=0.7,
            top_k=40,
            remove_invalid_values=True,  # so that it also works after a run that diverged
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
    return prompt, tokenizer.decode(tokens[0], skip_special_tokens=True)


# --- names: presets, local folders and hub ids ---

WORKS_OFFLINE = "what works offline: -d python-stdlib -m gpt2-tiny (the defaults), or local paths"


def resolve_model(name: str, kind: str = "model") -> str:
    """Return what transformers loads a model from: a preset's folder, a local folder or a hub id.

    Only for a hub id is the hub asked. Raises InputError for a path that does not exist.
    """
    if name in PRESET_NAMES:
        return str(PRESETS / name)
    if not name or not Path(name).is_dir():
        prepare_for_hub(kind, name)
    return name


def prepare_for_hub(kind: str, name: str) -> None:
    """Before a name is looked up on the hub: make its libraries offline if it cannot be reached.

    Raises InputError if the name cannot be a hub id, so it is a path that does not exist.
    """
    if not name or name[0] in "/.~" or name.count("/") > 1:
        raise InputError(f"There is no {kind} at {name!r}: no such file or folder.")
    hub_is_reachable()


@functools.cache
def hub_is_reachable() -> bool:
    """Return whether the hub answers within 5 s. If not, make its libraries use only their cache.

    Otherwise they would retry for almost half a minute.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # no route, no name server, a bad certificate, a proxy that refuses
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        constants.HF_HUB_OFFLINE = True
        return False
    return True


def not_found(kind: str, name: str, presets: tuple[str, ...], cause: Exception) -> InputError:
    """Return an error that says why a model or a data set cannot be loaded."""
    text = f"The {kind} {name!r} is neither a preset ({', '.join(presets)}) nor a local path"
    if not hub_is_reachable():
        return InputError(
            f"{text}, it is not in the cache, and the hub ({constants.ENDPOINT}) cannot be "
            f"reached; {WORKS_OFFLINE}."
        )
    return InputError(f"{text}, and the hub does not provide it: {_first_line(cause)}")


def _cannot_load(kind: str, name: str, lacks: str, cause: Exception) -> InputError:
    if Path(name).is_dir():
        return InputError(f"The folder {name} has no {lacks}")
    return not_found(kind, name, PRESET_NAMES, cause)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

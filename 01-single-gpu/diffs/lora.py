"""LoRA: a frozen model, and small trainable matrices beside its linear layers; lora.diff uses it.

A linear layer computes W x. With an adapter it computes W x + 2 B A x, where A has `rank` rows and
B has `rank` columns. W stays as it is, so it has no gradient and no moments. B begins with zeros,
so the first loss is that of the model without adapters. PEFT adds the adapters to the layers.

Source: https://arxiv.org/abs/2106.09685
"""

import logging
import warnings
from pathlib import Path

import xxhash
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from common import checkpoint, ranks
from common.errors import RunError
from common.inputs import models

try:
    from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer
except ImportError:
    raise RunError("The variant lora needs PEFT: pip install peft.") from None

logger = logging.getLogger(__name__)


def checksum_of(model: PreTrainedModel | None) -> str:
    """Return a checksum of the weights of a model on the CPU: an adapter fits no other weights.

    All ranks must call this; only rank 0 needs the model.
    """
    return ranks.on_rank_0(_checksum, model)


def _checksum(model: PreTrainedModel) -> str:
    checksum = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        checksum.update(name.encode())
        checksum.update(tensor.detach().contiguous().numpy())
    return checksum.hexdigest()


def add_adapters(model: PreTrainedModel, rank: int) -> None:
    """Freeze a model and add an adapter to each linear layer, except the output layer.

    A is drawn from torch's RNG. The adapters have the weights' dtype, and lie beside the weights.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPT-2's layers store transposed weights, which PEFT notes
        inject_adapter_in_model(config_of(rank), model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = trained / sum(p.numel() for p in model.parameters())
    if model.device.type != "meta":  # with FSDP, rank 0 adds them to a copy without weights, too
        logger.info(f"the adapters have {trained:,} parameters, {share:.2%} of all")


def config_of(rank: int) -> LoraConfig:
    """Return the configuration of adapters. PEFT multiplies B A x by lora_alpha / rank."""
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def save_adapters_only(model: nn.Module) -> None:
    """Leave frozen weights and buffers out of a model's state dict, and so of checkpoints."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def drop_others(_, state_dict: dict, prefix: str, *__: object) -> None:
        for name in [name for name in state_dict if name.removeprefix(prefix) not in trained]:
            del state_dict[name]

    model.register_state_dict_post_hook(drop_others)


# --- for the scripts that use a trained model ---


def load_adapted(
    path: Path, settings: dict, model_name: str, config: PretrainedConfig
) -> PreTrainedModel:
    """Return the model that a checkpoint's adapters were trained on, with these, on the CPU.

    path, settings: of a checkpoint of the variant lora. Raises RunError if the model has other
    weights than then, or if the checkpoint cannot be read.
    """
    model = models.load_pretrained(model_name, config)
    if checksum_of(model) != settings["base_weights"]:
        raise RunError(
            f"{path} was trained on other weights than those of {model_name} now: give -m a copy "
            "of the run's own."
        )
    add_adapters(model, settings["lora_rank"])
    adapters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    checkpoint.read_files(path, {"model": adapters}, "give another --step", no_dist=True)
    return model


def merge(model: PreTrainedModel) -> None:
    """Add each adapter to the weight of its layer, and replace both by the plain layer."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())


def save_adapters(model: PreTrainedModel, base: str, folder: Path) -> None:
    """Write the adapters as PEFT's files, which PeftModel.from_pretrained and servers load.

    base: the name of the model that they were trained on, which is noted in the files.
    """
    config = model.peft_config["default"]
    config.base_model_name_or_path = base
    config.task_type = "CAUSAL_LM"
    config.inference_mode = True
    config.save_pretrained(folder)
    adapters = {
        f"base_model.model.{name}": tensor.contiguous()
        for name, tensor in get_peft_model_state_dict(model).items()
    }
    save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})

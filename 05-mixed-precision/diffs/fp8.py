"""Linear layers that run their matmuls in fp8; fp8.diff uses them."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from common.errors import RunError

FP8_CAPABILITY = (8, 9)  # Ada, Hopper and later: https://developer.nvidia.com/cuda-gpus
FP8_MULTIPLE = 16  # cuBLAS needs fp8 matrices whose sides are multiples of 16


def check_fp8(device: torch.device) -> None:
    """Raise RunError if the device has no fp8, or if torchao is not installed."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise RunError(
            "fp8 needs a GPU of compute capability 8.9 or higher and this device is "
            f"{_name_of(device)}: use chapter 5 without this variant, in bfloat16."
        )
    try:
        import torchao.float8  # noqa: F401  imported here because the import takes seconds
    except ImportError as error:
        raise RunError(
            "fp8 needs torchao: install it with pip install torchao, or use chapter 5 without this "
            "variant, in bfloat16."
        ) from error


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type}"


def convert_to_fp8(layers: Iterable[nn.Module], seq_length: int, device: torch.device) -> int:
    """Replace the linear modules in transformer layers by fp8 ones; return how many there are.

    Before each matmul, torchao scales weights, activations and gradients to the range of fp8 by
    their largest absolute value. Sums are float32, except that the forward pass uses the GPU's
    faster sums of lower precision. These are torchao's defaults ("tensorwise"):
    https://github.com/pytorch/ao/tree/main/torchao/float8
    Parameters keep their names and dtypes. Modules with a side that is not a multiple of 16 stay
    as they are. On a machine without a GPU, fp8 is emulated.

    seq_length: tokens per sequence. The gradient of a weight is a sum over tokens; if their number
    is not a multiple of 16, torchao pads them.
    Raises RunError if no module can be replaced, or if the device cannot run them.
    """
    check_fp8(device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(
        emulate=not torch.cuda.is_available(),
        pad_inner_dim=seq_length % FP8_MULTIPLE != 0,
    )
    convert = partial(convert_to_float8_training, config=config)
    converted = 0
    for layer in layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if not isinstance(child, nn.Linear | Conv1D):
                    continue
                if any(side % FP8_MULTIPLE for side in child.weight.shape):
                    continue
                new = (
                    convert(child) if isinstance(child, nn.Linear) else Float8Conv1D(child, convert)
                )
                setattr(parent, name, new)
                converted += 1
    if not converted:
        raise RunError(
            "No layer of this model supports fp8: use chapter 5 without this variant, in bfloat16."
        )
    return converted


class Float8Conv1D(nn.Module):
    """GPT-2's linear layer (transformers calls it Conv1D) in fp8.

    Its weight has the shape [in, out], but torchao only converts nn.Linear, whose weight is
    [out, in]. So this module owns the weight, and an fp8 nn.Linear computes with its transpose.
    """

    def __init__(self, layer: Conv1D, convert: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        linear = nn.Linear(*layer.weight.shape, bias=False, device="meta")
        # Inside a tuple, nn.Module does not register it: the checkpoint has no second weight.
        self.linear = (convert(linear),)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = functional_call(self.linear[0], {"weight": self.weight.t()}, (input,))
        return output + self.bias.to(output.dtype)

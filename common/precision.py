"""What a device can compute in, and layers that multiply in 8 bits."""

import argparse
from collections.abc import Iterable

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from common.cli import InputError

DEFAULT = "bf16"
FP8_CAPABILITY = (8, 9)  # Ada, Hopper and later: https://developer.nvidia.com/cuda-gpus
FP8_MULTIPLE = 16  # cuBLAS multiplies fp8 matrices whose sides are multiples of it


def check_precision(args: argparse.Namespace, device: torch.device) -> str:
    """Return the precision to compute in: args.precision, or where that is None the default.

    With weights in bfloat16 it is "tf32": nothing is cast, as in the chapters before.
    Raises InputError where both are given, or where the device cannot compute in it.
    """
    precision = args.precision
    if args.param_dtype != "float32":
        if precision is not None:
            raise InputError(
                f"--precision {precision} keeps float32 weights and --param-dtype "
                f"{args.param_dtype} has none: give one of the two."
            )
        return "tf32"
    precision = precision or DEFAULT
    if precision in ("bf16", "fp16"):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        try:
            ones = torch.ones(8, 8, dtype=dtype, device=device)
            ones @ ones
        except RuntimeError as error:
            raise InputError(
                f"This device ({_name(device)}) cannot multiply in {precision}: give another "
                "--precision; fp32 runs everywhere."
            ) from error
    if precision == "fp8":
        check_fp8(device)
    return precision


def check_fp8(device: torch.device) -> None:
    """Raise InputError where the device has no fp8, or where torchao is not installed."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise InputError(
            f"--precision fp8 needs a GPU of compute capability 8.9 or higher and this device is "
            f"{_name(device)}: give --precision bf16."
        )
    try:
        import torchao.float8  # noqa: F401  seconds, so only who needs it
    except ImportError as error:
        raise InputError(
            "--precision fp8 needs torchao: install it with pip install torchao, or give "
            "--precision bf16."
        ) from error


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type}"


def convert_to_fp8(blocks: Iterable[nn.Module], seq_length: int) -> int:
    """Let the linear layers of the blocks multiply in fp8, in place; return how many they are.

    Weights, activations and gradients are scaled to the range of fp8 by their largest value, each
    time anew, and multiplied, with sums in float32 or, in the forward pass, in fewer bits: the
    defaults of torchao, https://github.com/pytorch/ao/tree/main/torchao/float8. Parameters keep
    their names and types.
    seq_length: tokens of a sequence. The gradient of a weight is a sum over tokens, which are
    padded where that is no multiple of 16.
    Layers with a side that is no multiple of 16 stay as they are. On a CPU fp8 is emulated.
    Raises InputError where no layer is left.
    """
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    class Float8Conv1D(Float8Linear):
        """GPT-2's linear layer: its weight lies the other way round."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output = matmul_with_hp_or_float8_args.apply(
                input, self.weight, self.linear_mm_config, self.config
            )
            return output + self.bias.to(output.dtype)

    config = Float8LinearConfig(
        emulate=not torch.cuda.is_available(),
        pad_inner_dim=seq_length % FP8_MULTIPLE != 0,
    )
    converted = 0
    for block in blocks:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if not isinstance(layer, nn.Linear | Conv1D):
                    continue
                if any(side % FP8_MULTIPLE for side in layer.weight.shape):
                    continue
                if isinstance(layer, nn.Linear):
                    new = Float8Linear.from_float(layer, config)
                else:
                    with torch.device("meta"):
                        new = Float8Conv1D(*layer.weight.shape, bias=False, config=config)
                    new.weight, new.bias = layer.weight, layer.bias
                setattr(parent, name, new)
                converted += 1
    if not converted:
        raise InputError("The model has no layers that --precision fp8 can multiply in fp8.")
    return converted

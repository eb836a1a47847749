"""Print the range and the precision of number formats.

python 05-mixed-precision/experiments/formats.py
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A binary number format. Python's floats represent all of its numbers exactly."""

    name: str
    exponent: int  # bits
    mantissa: int  # bits, without the leading 1, which is not stored
    largest: float
    normal: float  # the smallest normal number, with full precision

    @property
    def spacing(self) -> float:  # the distance from 1 to the next number
        return 2.0**-self.mantissa

    @property
    def subnormal(self) -> float:  # the smallest number; the spacing of all numbers below `normal`
        return self.normal * self.spacing

    @property
    def digits(self) -> float:  # decimal digits, including the leading 1
        return (self.mantissa + 1) * math.log10(2)


def formats() -> list[Format]:
    """Return the formats of GPU matmuls, widest first, as torch.finfo describes them."""
    found = []
    for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        info = torch.finfo(getattr(torch, name))
        mantissa = round(-math.log2(info.eps))
        exponent = info.bits - 1 - mantissa  # one bit is the sign
        found.append(Format(name, exponent, mantissa, info.max, info.smallest_normal))
    # TF32 is not a dtype, but the precision to which tensor cores round float32 inputs. It has the
    # exponent of float32 and the mantissa of float16.
    # https://developer.nvidia.com/blog/accelerating-ai-training-with-tf32-tensor-cores/
    wide, half = found[:2]
    largest = (2 - half.spacing) * 2.0 ** (2 ** (wide.exponent - 1) - 1)
    tf32 = Format("TF32", wide.exponent, half.mantissa, largest, wide.normal)
    return [wide, tf32, *found[1:]]


def table() -> str:
    """Return the formats, one per line."""
    columns = ("largest", "normal from", "smallest", "spacing at 1", "digits")
    lines = [f"{'format':15}{'exponent':>9}{'mantissa':>9}" + "".join(f"{c:>13}" for c in columns)]
    for each in formats():
        sizes = (each.largest, each.normal, each.subnormal, each.spacing)
        numbers = "".join(f"{size:13.3g}" for size in sizes) + f"{each.digits:13.1f}"
        lines.append(f"{each.name:15}{each.exponent:9}{each.mantissa:9}{numbers}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

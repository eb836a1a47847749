"""Print the range and the precision of number formats, and draw two figures of this chapter.

python 05-mixed-precision/experiments/formats.py
python 05-mixed-precision/experiments/formats.py --figures 05-mixed-precision/experiments
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common import cli, launch
from common.cli import RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECORDED = Path(__file__).parents[1] / "recorded"


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
        numbers = "".join(f"{size:13.3g}" for size in sizes)
        lines.append(
            f"{each.name:15}{each.exponent:9}{each.mantissa:9}{numbers}{each.digits:13.1f}"
        )
    return "\n".join(lines)


def draw_formats(axes: "Axes") -> None:
    """Draw each format as a line: its range, and the relative spacing of its numbers."""
    for number, each in enumerate(formats()):
        # The distance to the next number at each power of two, relative to that power.
        powers = range(round(math.log2(each.subnormal)), math.floor(math.log2(each.largest)) + 1)
        relative = [max(each.spacing, each.subnormal / 2.0**power) for power in powers]
        # The thin line of float16 is drawn over the wide line of TF32.
        width = 5 if each.name == "TF32" else 2
        axes.plot([2.0**p for p in powers], relative, lw=width, color=f"C{number}", label=each.name)
    axes.set(xscale="log", yscale="log", xlabel="size of a number")
    axes.set(ylabel="step to the next number, relative", title="Range and spacing")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_stall(axes: "Axes") -> None:
    """Draw the recorded losses of three runs with 16-bit matmuls."""
    styles = {  # the last line is drawn over the second
        "pure": {"label": "bfloat16 weights, rounded to nearest"},
        "masters": {"label": "float32 weights, copied to bfloat16", "lw": 5, "alpha": 0.4},
        "rounded": {"label": "bfloat16 weights, rounded at random", "ls": "--"},
    }
    for name, style in styles.items():
        text = (RECORDED / f"bf16_stall_{name}.metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], **style)
    axes.set(xlabel="step", ylabel="loss", title="gpt2-tiny at a peak learning rate of 3e-5")
    axes.legend()


def main() -> None:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", type=Path, help="folder for formats.svg and bf16_stall.svg")
    figures = parser.parse_args().figures
    print(table())
    if figures and not figures.is_dir():
        raise RunError(f"--figures {figures} is not a folder: create it first.")
    if figures:
        write_figures(figures)


def write_figures(folder: Path) -> None:
    """Draw formats.svg and bf16_stall.svg into a folder. Raises RunError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("--figures needs matplotlib: pip install matplotlib.") from None
    for name, draw in (("formats", draw_formats), ("bf16_stall", draw_stall)):
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        draw(figure.add_subplot())
        with matplotlib.rc_context({"svg.hashsalt": name}):  # the same file each time
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    launch.run(main)

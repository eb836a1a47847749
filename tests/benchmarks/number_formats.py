"""Draw the two figures of chapter 5 on number formats, with matplotlib.

python tests/benchmarks/number_formats.py
"""

import json
import math
import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[2] / "05-mixed-precision/experiments"
RECORDED = FOLDER.parent / "recorded"
sys.path.append(str(FOLDER))
from formats import formats  # noqa: E402


def draw_formats(axes: Axes) -> None:
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


def draw_stall(axes: Axes) -> None:
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
    for name, draw in (("formats", draw_formats), ("bf16_stall", draw_stall)):
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        draw(figure.add_subplot())
        with matplotlib.rc_context({"svg.hashsalt": name}):  # the same file each time
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

"""The picture of the front page: five chapters, what each adds, and what each GPU holds.

python tests/benchmarks/picture.py --output 01-single-gpu/chapters.svg

Bars are the peak memory of a step that 04-fsdp/memory.py predicts; nothing is measured. The SVG is
written here and not by a library, so that its text stays text and the same input gives the same
file.
"""

import argparse
import functools
import sys
from pathlib import Path

import report

sys.path.append(str(Path(__file__).parents[1]))
from runner import load_script

from common import models

REPOSITORY = Path(__file__).parents[2]
MODEL, SEQ_LENGTH, GPUS, MEMORY_GIB = "llama-3.1-8b", 8192, 4, 80
memory = load_script(REPOSITORY / "04-fsdp/memory.py")
FULL = f"with {memory.CHECKPOINTING} full"
# Chapter, what it adds in a few words, its setup in memory.py, its nodes.
ROWS = [
    ("01-single-gpu", ["one GPU: the whole loop"], "Chapter 1", 1),
    ("02-ddp", ["all GPUs of a node,", "each with all of the state"], "Chapter 2 or 3", 1),
    ("03-multi-node", ["many nodes; nodes may", "go away and come back"], "Chapter 2 or 3", 2),
    ("04-fsdp", ["state sharded over GPUs,", "activations recomputed"], f"Chapter 4 {FULL}", 1),
    ("05-mixed-precision", ["products in 16 bits,", "sums in 32"], f"Chapter 5 {FULL}", 1),
]
PARTS = {  # colours of Okabe and Ito, https://jfly.uni-koeln.de/color/
    "parameters": ("weights", "#0072b2"),
    "gradients": ("gradients", "#56b4e9"),
    "moments": ("moments", "#009e73"),
    "rest": ("activations, weights gathered for a while", "#e69f00"),
}
WIDTH, ROW, BAR, GAP, LEFT = 720, 122, 34, 7, 330
SCALE = 84 / 240  # points per GiB
DASHES = 'stroke="#c00" stroke-width="2" stroke-dasharray="5 3"'


def attributes(more: dict[str, str]) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())


def text(x: float, y: float, content: str, size: int = 17, **more: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{attributes(more)}>{content}</text>'


def rect(x: float, y: float, width: float, height: float, **more: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:.2f}"{attributes(more)}/>'


def parts_of(predicted: dict) -> dict[str, float]:
    """Return GiB by part at the peak; DDP's buckets are gradients."""
    parts = {name: size / memory.GIB for name, size in predicted["parts"].items()}
    states = {name: parts[name] for name in ("parameters", "gradients", "moments")}
    states["gradients"] += parts["buckets"]
    return {**states, "rest": parts["activations"] + parts["gathered"]}


def draw_row(top: float, row: tuple, predicted: dict, before: Path | None) -> list[str]:
    chapter, says, _, nodes = row
    path = REPOSITORY / chapter / "train_llm.py"
    lines = f"{len(path.read_text().splitlines())} lines"
    if before:
        lines = "+{} &#8722;{} lines".format(*report.diffstat(before, path))
    out = [text(24, top + 26, chapter, 21, font_weight="bold")]
    out += [text(24, top + 98, lines, fill="#555")]
    out += [text(24, top + 50 + 22 * number, line) for number, line in enumerate(says)]
    parts, bottom = parts_of(predicted), top + 100
    count = GPUS if chapter > "02" else 1
    for node in range(nodes):
        left = LEFT + node * (GPUS * (BAR + GAP) + 3 * GAP) * (nodes > 1)
        width = count * (BAR + GAP) + GAP
        frame = {"fill": "#f4f4f4", "stroke": "#999", "rx": "4"}
        out.append(rect(left, top + 8, width, 96, **frame))
        for gpu in range(count):
            x, y = left + GAP + gpu * (BAR + GAP), bottom
            for name, gib in parts.items():
                y -= gib * SCALE
                out.append(rect(x, y, BAR, gib * SCALE, fill=PARTS[name][1]))
        limit = bottom - MEMORY_GIB * SCALE
        out.append(f'<line x1="{left}" x2="{left + width}" y1="{limit}" y2="{limit}" {DASHES}/>')
    total = f"{sum(parts.values()):.0f} GiB each"
    if nodes == 1:
        out.append(text(LEFT + count * (BAR + GAP) + 3 * GAP, top + 62, total))
    else:  # no room beside them
        out.append(text(LEFT - 132, top + 98, total))
    return out


@functools.cache
def predict() -> dict[str, dict]:
    """Return what memory.py predicts, by setup."""
    config = models.load_config(MODEL)
    options = memory.Options(gpus=GPUS, batch_size=1, seq_length=SEQ_LENGTH)
    return memory.predict_all(config, options, {})


def picture() -> str:
    """Return the picture as SVG."""
    rungs = predict()
    head = f"What each GPU holds: {MODEL}, {SEQ_LENGTH:,} tokens per GPU, float32 state"
    out = [text(24, 32, head, 17)]
    x, y = 24.0, 60.0
    for label, colour in PARTS.values():
        out += [rect(x, y - 13, 14, 14, fill=colour), text(x + 20, y, label, 16)]
        x += 44 + 8.8 * len(label)
    out += [f'<line x1="24" x2="50" y1="81" y2="81" {DASHES}/>']
    out += [text(58, 86, f"{MEMORY_GIB} GiB, as many a GPU has; a grey box is a node", 16)]
    top, before = 100.0, None
    for row in ROWS:
        out += draw_row(top, row, rungs[row[2]], before)
        before = REPOSITORY / row[0] / "train_llm.py"
        top += ROW
    open_tag = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:g}"'
    font = 'font-family="Helvetica, Arial, sans-serif" fill="#222" role="img"'
    title = "<title>Five chapters, and what each GPU holds in each</title>"
    back = rect(0, 0, WIDTH, top, fill="#fff")
    return "\n".join([f"{open_tag} {font}>", title, back, *out, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="svg file to draw into")
    parser.parse_args().output.write_text(picture())


if __name__ == "__main__":
    main()

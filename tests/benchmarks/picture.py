"""The picture of the front page: five chapters, what each adds, its memory and its speed.

figures.py writes it. Bars are the peak memory of a training step that 04-fsdp/memory.py predicts.
Speeds are measured.
"""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import report
from drawings.charts import rows_of
from drawings.svg import LARGE, LEFT, RIGHT, SMALL, document, heading, legend, line, rect, text

sys.path.append(str(Path(__file__).parents[1]))
from runner import load_script

from common import models

REPOSITORY = Path(__file__).parents[2]
MODEL, SEQ_LENGTH, GPUS = "llama-3.1-8b", 8192, 4
memory = load_script(REPOSITORY / "04-fsdp/memory.py")
SELECTIVE = f"with {memory.CHECKPOINTING} selective"
PARTS = {  # label and fill
    "parameters": ("weights", "blue"),
    "gradients": ("gradients", "sky"),
    "moments": ("Adam's moments", "green"),
    "rest": ("activations, gathered weights", "orange"),
}
ROW, BAR, GAP, BARS = 158, 30, 6, 388  # BARS: the left end of the bars
SCALE = 104 / 240  # height per GiB


def rows() -> list[tuple]:
    """Return of each chapter: folder, what it adds, its measured speed, setup, number of nodes."""
    gpt2, nodes = rows_of("ddp_gpu"), rows_of("nodes_gpu")
    sharded = rows_of("fsdp_options")["selective"]["tokens_per_s"]
    mixed = rows_of("fsdp_precision_4")["bf16, compiled"]["tokens_per_s"]
    one, eight = (gpt2[label]["tokens_per_s"] for label in ("01-single-gpu on 1", "02-ddp on 8"))
    chapter_2, chapter_3 = (
        nodes[f"{chapter} on 4"]["tokens_per_s"] for chapter in ("02-ddp", "03-multi-node")
    )
    return [
        (
            "01-single-gpu",
            ["the complete training", "loop on one GPU"],
            f"{one:,.0f} tokens/s (GPT-2)",
            "Chapter 1",
            1,
        ),
        (
            "02-ddp",
            ["all GPUs of one node,", "each with a full copy"],
            f"x {eight / one:.1f} tokens/s on 8 GPUs (GPT-2)",
            "Chapter 2 or 3",
            1,
        ),
        (
            "03-multi-node",
            ["many nodes, preemption", "and requeue"],
            f"{chapter_3 / chapter_2:.1%} of chapter 2's tokens/s",
            "Chapter 2 or 3",
            2,
        ),
        (
            "04-fsdp",
            ["model state sharded", "over the GPUs"],
            f"{sharded:,.0f} tokens/s (8B, 4 GPUs)",
            f"Chapter 4 {SELECTIVE}",
            1,
        ),
        (
            "05-mixed-precision",
            ["bfloat16 matmuls,", "float32 weights"],
            f"{mixed:,.0f} tokens/s, x {mixed / sharded:.1f} (8B)",
            f"Chapter 5 {SELECTIVE}",
            1,
        ),
    ]


@functools.cache
def gpu_memory() -> float:
    """Return the GiB of the GPUs that the speeds were measured on."""
    return report.content(REPOSITORY / report.result("fsdp_largest"))["memory_gib"]


@functools.cache
def predict() -> dict[str, dict]:
    """Return what memory.py predicts, by setup."""
    config = models.load_config(MODEL)
    options = memory.Options(gpus=GPUS, batch_size=1, seq_length=SEQ_LENGTH, compile=True)
    cache = {}
    setups = {row[3]: memory.SETUPS[row[3]] for row in rows()}
    return {
        name: memory.predict(config, replace(options, **changes), cache)
        for name, changes in setups.items()
    }


def parts_of(predicted: dict) -> dict[str, float]:
    """Return GiB by part at the peak; DDP's buckets are gradients."""
    parts = {name: size / memory.GIB for name, size in predicted["parts"].items()}
    states = {name: parts[name] for name in ("parameters", "gradients", "moments")}
    states["gradients"] += parts["buckets"]
    return {**states, "rest": parts["activations"] + parts["gathered"]}


def draw_row(top: float, row: tuple, predicted: dict, before: Path | None) -> list[str]:
    chapter, says, speed, _, nodes = row
    path = REPOSITORY / chapter / "train_llm.py"
    lines = f"{len(path.read_text().splitlines())} lines"
    if before:
        lines = "+{} -{} lines".format(*report.diffstat(before, path))
    out = [line(LEFT, top, RIGHT, top, "softline thin")]
    out += [text(LEFT, top + 30, chapter, LARGE, "bold"), text(LEFT + 226, top + 30, lines, SMALL)]
    out += [text(LEFT, top + 58 + 24 * number, each) for number, each in enumerate(says)]
    out.append(text(LEFT, top + 118, speed, style="bold"))
    parts, bottom = parts_of(predicted), top + 124
    count = GPUS if chapter > "02" else 1
    for node in range(nodes):
        width = count * (BAR + GAP) + GAP
        left = BARS + node * (width + 2 * GAP)
        out.append(rect(left, top + 14, width, bottom - top - 8, "panel", 4))
        for gpu in range(count):
            x, y = left + GAP + gpu * (BAR + GAP), bottom
            for name, gib in parts.items():
                y -= gib * SCALE
                if gib:
                    out.append(rect(x, y, BAR, gib * SCALE, f"{PARTS[name][1]} edge"))
        limit = bottom - gpu_memory() * SCALE
        out.append(line(left - 3, limit, left + width + 3, limit, "line dashed"))
    total = sum(parts.values())
    fits = "" if total <= gpu_memory() else ": does not fit"
    out.append(text(BARS, top + 148, f"{total:.0f} GiB per GPU{fits}"))
    return out


def picture() -> str:
    """Return the picture as SVG."""
    predicted = predict()
    out = heading("Five chapters: what each adds and what it costs")
    head = f"Bars: peak memory of each GPU for Llama 3.1 8B, {SEQ_LENGTH:,} tokens per GPU."
    out += [text(LEFT, 64, head)]
    out += legend(LEFT, 96, dict(PARTS.values()))
    limit = f"{gpu_memory():.0f} GiB, the memory of an H200; a grey box is a node"
    out += [line(LEFT, 148, LEFT + 36, 148, "line dashed"), text(LEFT + 46, 154, limit)]
    top, before = 176.0, None
    for row in rows():
        out += draw_row(top, row, predicted[row[3]], before)
        before = REPOSITORY / row[0] / "train_llm.py"
        top += ROW
    for number, says in enumerate(
        [
            "Memory is predicted: compiled, chapters 4 and 5 with selective activation",
            "checkpointing. At the peak, gradients exist only in DDP, which keeps its buckets.",
            "Speed is measured on NVIDIA H200 with GPT-2 124M or Llama 3.1 8B; chapter 3",
            "against chapter 2 on 4 GPUs of one node.",
        ]
    ):
        out.append(text(LEFT, top + 24 + 22 * number, says, SMALL, "soft"))
    return document("Five chapters: what each adds, its memory and its speed", top + 106, out)

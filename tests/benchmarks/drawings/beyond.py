"""The figures of the page about tensor parallelism."""

import report

from drawings.svg import (
    LARGE,
    LEFT,
    RANK_FILLS,
    RIGHT,
    SMALL,
    arrow,
    box,
    document,
    heading,
    legend,
    lines_of_text,
    rect,
    text,
)

FITS, BATCH, LENGTH, MORE = "green", "sky", "orange", "grey"


def mlp() -> str:
    """Return one MLP block on two ranks: the part of each weight that a rank has."""
    width, gap = 330, 20
    out = heading("Each rank computes half of the hidden units,", "and one sum makes the output")
    for rank in range(2):
        fill, x = RANK_FILLS[rank], LEFT + rank * (width + gap)
        middle, part = x + width / 2, "first" if rank == 0 else "last"
        out.append(rect(x, 84, width, 460, "panel", 6))
        out.append(text(x + 16, 114, f"rank {rank}", LARGE, "bold"))
        out += box(x + 16, 128, width - 32, 38, "grey", "x, 64 x 128, on both ranks")
        out.append(arrow(middle, 166, middle, 190))
        for number in range(2):  # gate and up: 352 rows of 128
            left = x + 20 + 56 * number
            out.append(rect(left, 196, 44, 110, "empty"))
            out.append(rect(left, 196 + 55 * rank, 44, 55, f"{fill} edge"))
        says = ["gate and up:", f"the {part} 176", "of 352 rows"]
        out += lines_of_text(x + 146, 232, says, SMALL)
        out.append(arrow(middle, 312, middle, 336))
        out += box(x + 16, 340, width - 32, 38, fill, f"{part} 176 hidden units")
        out.append(arrow(middle, 378, middle, 402))
        out.append(rect(x + 20, 408, 110, 44, "empty"))  # down: 128 rows of 352
        out.append(rect(x + 20 + 55 * rank, 408, 55, 44, f"{fill} edge"))
        says = ["down: the " + part + " 176", "of 352 columns"]
        out += lines_of_text(x + 148, 426, says, SMALL)
        out.append(arrow(middle, 462, middle, 486))
        out += box(x + 16, 490, width - 32, 38, f"{fill} pale", "one term, 64 x 128")
        out.append(arrow(middle, 528, middle, 574))
    out += box(
        LEFT,
        578,
        RIGHT - LEFT,
        44,
        "yellow",
        "all-reduce: output = term of rank 0 + term of rank 1",
    )
    says = [
        "No rank needs anything from another rank between the two weights. In the backward",
        "pass, a second all-reduce adds up the gradients of x.",
    ]
    out += lines_of_text(LEFT, 652, says, SMALL, "soft")
    return document("One MLP block on two ranks, by rows and by columns", 688, out)


def fate(found: dict[str, int], n: str, length: int, batch: int) -> str:
    """Return the fill of a cell: what happens with this many GPUs and tokens per sequence."""
    if length <= found[n]:
        return FITS if int(n) * length <= batch else BATCH
    return MORE if length <= max(found.values()) else LENGTH


def limits() -> str:
    """Return, for three model sizes, where data parallelism ends."""
    content = report.content(report.REPOSITORY / report.result("limits"))
    batch, lengths = content["batch"], content["lengths"]
    out = heading("Where FSDP alone is enough, with 80 GiB per GPU")
    entries = {
        "FSDP is enough": FITS,
        "needs more GPUs": MORE,
        "does not fit on any number of GPUs: tensor or context parallelism": LENGTH,
        "batch above 4M tokens: tensor or context parallelism": BATCH,
    }
    for number, (label, fill) in enumerate(entries.items()):
        out += legend(LEFT, 66 + 28 * number, {label: fill})
    left, cell, height, y = LEFT + 66, 40.9, 17, 178
    for name, model in content["models"].items():
        out.append(text(LEFT, y + 16, f"Llama {name}", LARGE, "bold"))
        y += 28
        for row, length in enumerate(reversed(lengths)):
            top = y + row * height
            if row % 3 == 0:
                label = f"{length // 1024}k" if length < 2**20 else "1M"
                out.append(text(left - 8, top + 14, label, SMALL, "end"))
            for column, n in enumerate(model["longest"]):
                fill = fate(model["longest"], n, length, batch)
                out.append(rect(left + column * cell, top, cell - 2, height - 2, fill))
        y += len(lengths) * height
        for column, n in enumerate(model["longest"]):
            if column % 2 == 0:
                out.append(
                    text(left + (column + 0.5) * cell, y + 18, f"{int(n):,}", SMALL, "middle")
                )
        y += 40
    says = [
        "Down: tokens per sequence. Across: GPUs. One sequence per GPU, bfloat16, full",
        "activation checkpointing and a compiled loss. Memory predicted by memory.py.",
    ]
    out += lines_of_text(LEFT, y + 6, says, SMALL, "soft")
    return document("Where data parallelism ends, by model, GPUs and sequence length", y + 44, out)


FIGURES = {"mlp_on_two_ranks": mlp, "limits": limits}

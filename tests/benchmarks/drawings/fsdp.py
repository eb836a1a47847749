"""The figures of chapter 4."""

from itertools import pairwise

import report

from drawings import step_memory as memory
from drawings.svg import (
    LARGE,
    LEFT,
    NORMAL,
    RANK_FILLS,
    RIGHT,
    SMALL,
    arrow,
    box,
    document,
    heading,
    legend,
    line,
    lines_of_text,
    rect,
    text,
)

RANKS, ROWS = 4, 1000


def fsdp_layer() -> str:
    """Return one layer on four ranks: sharded, gathered, computed, reduced."""
    width, gap, height = 155, 20, 24
    columns = [LEFT + rank * (width + gap) for rank in range(RANKS)]
    middles = [x + width / 2 for x in columns]
    share = ROWS // RANKS
    names = [f"{first}-{first + share - 1}" for first in range(0, ROWS, share)]
    out = heading("FSDP: a layer is complete only while it computes")
    out += [text(x, 72, f"rank {rank}", LARGE, "bold middle") for rank, x in enumerate(middles)]
    y = 108

    def panel(title: str, says: str) -> None:
        nonlocal y
        out.extend([text(LEFT, y, title, LARGE, "bold"), text(LEFT, y + 25, says)])
        y += 38

    def matrices(held: str, pale: bool = False) -> None:
        """Draw the four shards of a matrix on each rank; held: "own" or "all"."""
        nonlocal y
        for rank, x in enumerate(columns):
            for part, fill in enumerate(RANK_FILLS):
                top = y + part * height
                if held == "all" or part == rank:
                    style = f"{fill} edge"
                    out.append(rect(x, top, width, height, style))
                    out.append(text(x + width / 2, top + 18, names[part], SMALL, "middle dark"))
                else:
                    out.append(rect(x, top, width, height, "empty"))
        y += RANKS * height

    def exchange(says: str) -> None:
        nonlocal y
        out.extend(arrow(x, y + 6, x, y + 30) for x in middles)
        out.extend(box(LEFT, y + 32, RIGHT - LEFT, 36, "yellow", says, NORMAL))
        out.extend(arrow(x, y + 72, x, y + 94) for x in middles)
        y += 122

    panel("1. Sharded", f"Each rank stores {share} of the {ROWS:,} rows of the weight matrix.")
    matrices("own")
    exchange("all-gather: every rank receives the other three shards")
    panel("2. Compute", "Forward or backward pass, each rank with its own sequences.")
    matrices("all")
    y += 26
    says = [
        "After the forward pass, each rank frees the other three shards. The",
        "backward pass gathers them again.",
    ]
    out += lines_of_text(LEFT, y, says)
    y += 68
    panel(
        "3. Gradients (backward pass only)",
        f"All {ROWS:,} rows on each rank, from its own sequences.",
    )
    for x in columns:
        out.append(rect(x, y, width, 40, "panel"))
        out.append(text(x + width / 2, y + 26, f"0-{ROWS - 1}", SMALL, "middle"))
    y += 40
    exchange("reduce-scatter: the mean of each row goes to the rank that owns it")
    panel("4. Update", f"Each rank has the mean gradients of its {share} rows and updates them.")
    matrices("own")
    return document("One layer with FSDP on four ranks", y + 20, out)


def step_memory() -> str:
    """Return the memory through a step of an 8B model, with DDP and with FSDP."""
    options = memory.Options(gpus=4, batch_size=1, seq_length=2048)
    most, height, ticks = 165, 300, [0, 40, 80, 120, 160]
    out = heading("FSDP divides the model state by the number of GPUs")
    out += legend(LEFT, 68, memory.FILLS)
    y = 152.0
    for title, found in (
        ("DDP: every GPU holds the complete model state", memory.ddp("llama-3.1-8b", options)),
        ("FSDP on 4 GPUs: every GPU holds a quarter", memory.fsdp("llama-3.1-8b", options)),
    ):
        out.append(text(LEFT, y, title, LARGE, "bold"))
        out += memory.chart(y + 10, height, found, most, ticks, limit=80)
        out += memory.under(y + 10 + height, 1, len(found))
        y += height + 92
    out += [line(LEFT, y - 20, LEFT + 46, y - 20, "line dashed")]
    out.append(text(LEFT + 58, y - 14, "80 GiB, about the memory of an H100"))
    says = [
        "Llama 3.1 8B, 1 x 2,048 tokens per GPU, float32, predicted by peak_memory.py.",
        "“Gathered weights” includes the communication buffers.",
    ]
    out += lines_of_text(LEFT, y + 16, says, SMALL, "soft")
    return document("Memory of one GPU during a training step, with DDP and with FSDP", y + 54, out)


def measured_memory() -> str:
    """Return the memory over a step of GPT-2 124M on two GPUs, with DDP and with FSDP."""
    results = report.content(report.REPOSITORY / report.result("memory_timeline_gpu"))
    fills = {"allocated between steps": "blue", "allocated within the step": "orange"}
    height, left = 230, LEFT + memory.AXIS
    out = heading("Measured: FSDP saves model state, not activations")
    out += legend(LEFT, 68, fills)
    y = 118.0
    for name, found in results.items():
        peaks = found["peak_bytes_by_bin"]
        gib = [max(pair) / memory.GIB for pair in zip(peaks[::2], peaks[1::2], strict=True)]
        between = gib[0]  # the step has not allocated anything yet
        sizes = [(min(size, between), max(0.0, size - between)) for size in gib]
        parts = [dict(zip(fills, size, strict=True)) for size in sizes]
        out.append(text(LEFT, y, name, LARGE, "bold"))
        out += memory.chart(y + 10, height, parts, 3.5, [0, 1, 2, 3], fills=fills)
        y += height + 20
        phases = [(phase, at) for phase, at in found["phases"] if phase not in ("data", "wait")]
        for (phase, start), (_, end) in pairwise([*phases, ("end", 1.0)]):
            x, x_end = (left + (RIGHT - left) * share for share in (start, end))
            out.append(line(x + 3, y, x_end - 3, y))
            out.append(text((x + x_end) / 2, y + 22, phase, SMALL, "middle"))
        y += 70
    says = [
        "GPT-2 124M, 1 x 1,024 tokens per GPU, TF32, rank 0 of two H100. Time is when",
        "the host allocates memory.",
    ]
    out += lines_of_text(LEFT, y - 18, says, SMALL, "soft")
    return document("Measured memory of a GPU over a step of GPT-2 124M, DDP and FSDP", y + 20, out)


def hsdp() -> str:
    """Return the mesh of HSDP on two nodes of four GPUs."""
    nodes, gpus, width, gap = 2, 4, 140, 24
    columns = [LEFT + 30 + gpu * (width + gap) for gpu in range(gpus)]
    out = heading("HSDP: shard within a node, replicate across nodes")
    y, tops = 70, []
    for node in range(nodes):
        out.append(rect(LEFT, y, RIGHT - LEFT, 190, "panel", 8))
        out.append(text(LEFT + 16, y + 30, f"node{node + 1}", LARGE, "bold"))
        top = y + 44
        tops.append(top)
        for gpu, x in enumerate(columns):
            rank = node * gpus + gpu
            out += box(x, top, width, 62, RANK_FILLS[gpu], "")[:1]
            out.append(text(x + width / 2, top + 27, f"rank {rank}", NORMAL, "bold middle dark"))
            out.append(text(x + width / 2, top + 50, f"shard {gpu}", NORMAL, "middle dark"))
        for x in columns[:-1]:
            out += [arrow(x + width + 12, top + 31, x + width + 1, top + 31, size=8)]
            out += [arrow(x + width + 12, top + 31, x + width + gap - 1, top + 31, size=8)]
        says = "shard: all-gather weights, reduce-scatter gradients"
        out += box(columns[0], top + 76, columns[-1] + width - columns[0], 40, "yellow", says)
        y += 190 + 124
    # The replicate dimension: a band between the nodes.
    first, second = tops[0] + 146, tops[1] - 44
    band = (first + second) / 2 - 22
    says = "replicate: all-reduce the gradients of each shard"
    out += box(columns[0], band, columns[-1] + width - columns[0], 44, "yellow", says)
    for x in columns:
        middle = x + width / 2
        out.append(arrow(middle, band - 2, middle, first + 3))
        out.append(arrow(middle, band + 46, middle, second - 3))
    says = [
        "The mesh has two dimensions: “replicate” (2 nodes) and “shard” (4 ranks).",
        "Each node holds a complete copy of the model, one shard per rank. Only",
        "the gradients of its own shard leave a GPU for the other node.",
    ]
    y = tops[1] + 176
    out += lines_of_text(LEFT, y, says)
    return document("The device mesh of HSDP on two nodes of four GPUs", y + 68, out)


FIGURES = {
    "fsdp_layer": fsdp_layer,
    "step_memory": step_memory,
    "measured_memory": measured_memory,
    "hsdp": hsdp,
}

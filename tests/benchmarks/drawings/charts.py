"""The figures that show results of measurements."""

from itertools import pairwise

import report

from drawings.svg import (
    LARGE,
    LEFT,
    NORMAL,
    RIGHT,
    SMALL,
    area,
    document,
    heading,
    legend,
    line,
    lines_of_text,
    rect,
    text,
)

FITS, BATCH, LENGTH, MORE = "green", "sky", "orange", "grey"  # fills of `limits`
GIB = 2**30
AXIS = 72  # width of the labels of the axis of `stacked`


def rows_of(name: str) -> dict[str, dict[str, float]]:
    """Return the medians of a result file's rows that finished, by label."""
    rows = report.content(report.REPOSITORY / report.result(name))["rows"]
    return {row["label"]: medians(row) for row in rows if report.measured_runs(row)}


def medians(row: dict) -> dict[str, float]:
    """Return the median over the runs of each number of a row."""
    runs = report.measured_runs(row)
    numbers = [key for key, value in runs[0].items() if isinstance(value, int | float)]
    return {key: report.median(run[key] for run in runs if key in run) for key in numbers}


def scaling() -> str:
    """Return tokens/s and efficiency on one to eight GPUs."""
    rows = rows_of("ddp_gpu")
    alone = rows["01-single-gpu on 1"]["tokens_per_s"]
    counts = (1, 2, 4, 8)
    speeds = {gpus: rows[f"02-ddp on {gpus}"]["tokens_per_s"] for gpus in counts}
    scale = (RIGHT - LEFT) / (max(counts) * alone)
    ratio = speeds[8] / alone
    out = heading(f"8 GPUs process {ratio:.1f} times the tokens of one")
    y = 62.0
    for gpus, speed in speeds.items():
        name = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        out.append(text(LEFT, y + 20, name, LARGE, "bold"))
        out.append(text(LEFT + 90, y + 20, f"{speed:,.0f} tokens/s"))
        efficiency = f"efficiency {speed / gpus / alone:.1%}"
        out.append(text(RIGHT, y + 20, efficiency, NORMAL, "end"))
        out.append(rect(LEFT, y + 32, speed * scale, 34, "green edge"))
        out.append(rect(LEFT, y + 32, gpus * alone * scale, 34, "line dashed"))
        y += 92
    out.append(rect(LEFT, y - 6, 34, 18, "line dashed"))
    says = ["100%: chapter 1's speed on one GPU, times the number of GPUs"]
    out += lines_of_text(LEFT + 46, y + 9, says)
    says = ["GPT-2 124M, 64 x 1,024 tokens per GPU, TF32, compiled, NVIDIA H200"]
    out += lines_of_text(LEFT, y + 40, says, SMALL, "soft")
    return document("Tokens per second with DDP on 1, 2, 4 and 8 GPUs", y + 58, out)


def stacked(
    top: float,
    height: float,
    phases: list[dict[str, float]],
    most: float,
    ticks: list[int],
    fills: dict[str, str],
) -> list[str]:
    """Return the parts of each phase, stacked, on an axis from 0 to `most` GiB."""
    left, bottom = LEFT + AXIS, top + height
    scale = height / most
    out = []
    for tick in ticks:
        y = bottom - tick * scale
        out.append(line(left, y, RIGHT, y, "softline thin"))
        out.append(
            text(left - 8, y + 6, f"{tick} GiB" if tick == ticks[-1] else str(tick), SMALL, "end")
        )
    widths = (RIGHT - left) / len(phases)
    xs = [left + widths * number for number in range(len(phases) + 1)]
    lower = [bottom] * len(phases)
    for name, fill in fills.items():
        sizes = [parts.get(name, 0) for parts in phases]
        upper = [y - size * scale for y, size in zip(lower, sizes, strict=True)]
        if any(sizes):
            out.append(area(xs, lower, upper, f"{fill} edge"))
        lower = upper
    peak = min(range(len(phases)), key=lambda number: lower[number])
    says = f"peak {sum(phases[peak].values()):.1f} GiB"
    x = (xs[peak] + xs[peak + 1]) / 2
    out.append(text(x, lower[peak] - 10, says, style="bold middle"))
    return out


def measured_memory() -> str:
    """Return the memory over a step of GPT-2 124M on two GPUs, with DDP and with FSDP."""
    results = report.content(report.REPOSITORY / report.result("memory_timeline_gpu"))
    fills = {"allocated between steps": "blue", "allocated within the step": "orange"}
    height, left = 230, LEFT + AXIS
    out = heading("Measured: FSDP saves model state, not activations")
    out += legend(LEFT, 68, fills)
    y = 118.0
    for name, found in results.items():
        peaks = found["peak_bytes_by_bin"]
        gib = [max(pair) / GIB for pair in zip(peaks[::2], peaks[1::2], strict=True)]
        between = gib[0]  # the step has not allocated anything yet
        sizes = [(min(size, between), max(0.0, size - between)) for size in gib]
        parts = [dict(zip(fills, size, strict=True)) for size in sizes]
        out.append(text(LEFT, y, name, LARGE, "bold"))
        out += stacked(y + 10, height, parts, 3.5, [0, 1, 2, 3], fills)
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


def ladder() -> str:
    """Return tokens/s and peak memory from strict float32 to fp8."""
    rows = rows_of("fsdp_precision")
    rungs = {
        "fp32": "strict float32",
        "tf32": "TF32 matmuls",
        "bf16": "bfloat16",
        "bf16, compiled": "bfloat16, compiled",
        "fp8, compiled": "fp8, compiled",
    }
    speeds = {label: rows[label]["tokens_per_s_per_device"] for label in rungs}
    peaks = {label: rows[label]["peak_mem_gib"] for label in rungs}
    longest = 440
    fastest, largest = max(speeds.values()), max(peaks.values())
    out = heading(f"From strict float32 to fp8: {fastest / speeds['fp32']:.0f} times the speed")
    out += legend(LEFT, 68, {"tokens/s per GPU": "green", "peak memory per GPU": "orange"})
    y, before = 90.0, None
    for label, title in rungs.items():
        speed, peak = speeds[label], peaks[label]
        out.append(text(LEFT, y + 22, title, LARGE, "bold"))
        if before:
            out.append(text(RIGHT, y + 22, f"x {speed / before:.1f} tokens/s", NORMAL, "end bold"))
        y += 32
        for value, most, fill, says in (
            (speed, fastest, "green", f"{speed:,.0f} tokens/s"),
            (peak, largest, "orange", f"{peak:.1f} GiB"),
        ):
            length = longest * value / most
            out.append(rect(LEFT, y, length, 26, f"{fill} edge"))
            out.append(text(LEFT + length + 10, y + 20, says))
            y += 30
        y += 22
        before = speed
    says = [
        "x compares with the row above. Llama 3.1 8B, 1 x 8,192 tokens per GPU, 2 NVIDIA",
        "H200, FSDP, selective activation checkpointing, one run each.",
    ]
    out += lines_of_text(LEFT, y + 6, says, SMALL, "soft")
    return document("Speed and peak memory from strict float32 to fp8", y + 44, out)


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

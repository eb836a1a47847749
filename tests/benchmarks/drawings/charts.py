"""The figures that show data: results of measurements, and memory that peak_memory.py predicts."""

from itertools import pairwise

import report

from drawings import step_memory as memory
from drawings.svg import (
    LARGE,
    LEFT,
    NORMAL,
    RIGHT,
    SMALL,
    document,
    heading,
    legend,
    line,
    lines_of_text,
    rect,
    text,
)

FITS, BATCH, LENGTH, MORE = "green", "sky", "orange", "grey"  # fills of `limits`


def rows_of(name: str) -> dict[str, dict[str, float]]:
    """Return the medians of a result file's rows that finished, by label."""
    rows = report.content(report.REPOSITORY / report.result(name))["rows"]
    return {row["label"]: medians(row) for row in rows if report.measured_runs(row)}


def medians(row: dict) -> dict[str, float]:
    """Return the median over the runs of each number of a row."""
    runs = report.measured_runs(row)
    numbers = [key for key, value in runs[0].items() if isinstance(value, int | float)]
    return {key: report.median(run[key] for run in runs if key in run) for key in numbers}


def accumulation_memory() -> str:
    """Return the memory of a step with one large and with three small micro-batches."""
    sequences, seq_length, micro_batches = 24, 1024, 3
    most, height, ticks = 32, 280, [0, 10, 20]
    out = heading("Smaller micro-batches: less memory for activations")
    fills = {name: fill for name, fill in memory.FILLS.items() if name != "gathered weights"}
    out += legend(LEFT, 68, fills)
    y = 124.0
    for count in (1, micro_batches):
        options = memory.Options(
            batch_size=sequences // count, seq_length=seq_length, accumulation=count
        )
        phases = memory.single_gpu("gpt2", options)
        if count == 1:  # the same work in the same width
            update = phases[-memory.UPDATE_PHASES :]
            passes = phases[: -memory.UPDATE_PHASES]
            phases = [parts for parts in passes for _ in range(micro_batches)] + update
        title = f"{count} micro-batch of {sequences} sequences"
        if count > 1:
            title = f"{count} micro-batches of {sequences // count} sequences (accumulation)"
        out.append(text(LEFT, y, title, LARGE, "bold"))
        out += memory.chart(y + 10, height, phases, most, ticks)
        out += memory.under(y + 10 + height, count, len(phases))
        y += height + 92
    says = [
        "The forward pass saves activations and the backward pass frees them. The",
        "spike between them is the output layer with the loss. The memory for",
        "weights, gradients and optimizer state (Adam's moments) stays the same.",
    ]
    out += lines_of_text(LEFT, y - 14, says)
    says = ["GPT-2 124M, 24 x 1,024 tokens per step, float32, predicted by peak_memory.py"]
    out += lines_of_text(LEFT, y + 68, says, SMALL, "soft")
    return document("Memory during one step, with and without gradient accumulation", y + 84, out)


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


def nodes_cost() -> str:
    """Return the step time on two nodes of 8 GPUs, calculated for several networks."""
    step = rows_of("ddp_gpu")["02-ddp on 8"]
    total, hidden = step["time/total"], step["time/backward"]
    sizes = report.content(report.REPOSITORY / report.result("step_memory"))
    gradients = sizes["gradients_bytes"]
    ranks = 16
    sent = {"ring": 2 * (ranks - 1) / ranks * gradients, "tree": gradients}
    networks = {"10 Gbit/s": 10, "25 Gbit/s": 25, "100 Gbit/s": 100, "8 x 400 Gbit/s": 3200}
    times = {
        (network, algorithm): max(0.0, size / (rate * 1e9 / 8) * 1000 - hidden)
        for network, rate in networks.items()
        for algorithm, size in sent.items()
    }
    scale = 430 / (total + max(times.values()))
    out = heading("A slow network cancels the gain of a second node")
    out += legend(
        LEFT, 68, {"step on one node, measured": "green", "exposed all-reduce, calculated": "red"}
    )
    y = 96.0
    out.append(text(RIGHT, y + 22, "speed, one node = 1", NORMAL, "end"))
    for network in networks:
        out.append(text(LEFT, y + 22, f"{network} per node", LARGE, "bold"))
        y += 34
        for algorithm in sent:
            exposed = times[network, algorithm]
            left = LEFT + 50
            out.append(text(LEFT, y + 20, algorithm))
            out.append(rect(left, y, total * scale, 26, "green edge"))
            if exposed:
                out.append(rect(left + total * scale, y, exposed * scale, 26, "red edge"))
            end = left + (total + exposed) * scale
            out.append(text(end + 10, y + 20, f"{total + exposed:.0f} ms"))
            gain = 2 * total / (total + exposed)
            out.append(text(RIGHT, y + 20, f"x {gain:.1f}", NORMAL, "end bold"))
            y += 31
        y += 16
    says = [
        "Calculated for GPT-2 124M on 2 x 8 H200 and a network at its full bandwidth.",
        "Two nodes train on twice as many tokens per step as one node.",
        f"Each node sends {sent['ring'] / 1e9:.2f} GB of gradients per step in a ring of 16, or",
        f"{sent['tree'] / 1e9:.2f} GB in a tree of 2 nodes. The backward pass hides the first",
        f"{hidden:.0f} ms of the all-reduce.",
    ]
    out += lines_of_text(LEFT, y + 14, says, SMALL, "soft")
    return document("Step time on two nodes for several networks", y + 118, out)


def sharded_memory() -> str:
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

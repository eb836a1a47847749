"""The figures that show results of measurements."""

from itertools import pairwise

import report

from drawings.svg import (
    HEADING,
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
    path,
    rect,
    text,
)

GIB = 2**30
ALONE_GIB = 194  # what memory.py predicts for the 8B model on one GPU; it does not fit
H200_GIB = 140
AXIS = 72  # width of the labels of the axis of `stacked`


def rows_of(name: str) -> dict[str, dict[str, float]]:
    """Return the medians of a result file's rows that finished, by label."""
    rows = report.read(name)["rows"]
    return {row["label"]: medians(row) for row in rows if report.measured_runs(row)}


def medians(row: dict) -> dict[str, float]:
    """Return the median over the runs of each number of a row."""
    runs = report.measured_runs(row)
    numbers = [key for key, value in runs[0].items() if isinstance(value, int | float)]
    return {key: report.median(run[key] for run in runs if key in run) for key in numbers}


def gains() -> str:
    """Return what the chapters bring: speed on eight GPUs, and a model that fits on four."""
    speeds = rows_of("ddp_gpu")
    one, eight = (speeds[label]["tokens_per_s"] for label in ("01-single-gpu on 1", "02-ddp on 8"))
    sharded = rows_of("fsdp_precision_4")["bf16, compiled"]["peak_mem_gib"]
    panels = {
        f"GPT-2 trains {eight / one:.1f} times as fast": (
            ("chapter 1, 1 GPU", one, f"{one:,.0f} tokens/s", "green"),
            ("chapter 2, 8 GPUs", eight, f"{eight:,.0f} tokens/s", "green"),
        ),
        "An 8B model fits into the memory of a GPU": (
            ("chapter 1, 1 GPU", ALONE_GIB, f"{ALONE_GIB} GiB: does not fit", "red"),
            ("chapter 5, 4 GPUs", sharded, f"{sharded:.0f} GiB", "orange"),
        ),
    }
    left, longest, y = LEFT + 170, 290, 32.0
    out = []
    for title, bars in panels.items():
        out.append(text(LEFT, y, title, HEADING, "bold"))
        scale = longest / max(value for _, value, _, _ in bars)
        top, y = y + 14, y + 22
        for name, value, says, fill in bars:
            out.append(text(LEFT, y + 21, name))
            out.append(rect(left, y, value * scale, 30, f"{fill} edge"))
            out.append(text(left + value * scale + 10, y + 21, says, NORMAL, "bold"))
            y += 40
        if title.startswith("An 8B"):
            x = left + H200_GIB * scale
            out.append(line(x, top, x, y, "line dashed"))
            out.append(text(x, y + 18, f"H200: {H200_GIB} GiB", SMALL, "middle"))
        y += 44
    says = [
        "NVIDIA H200. GPT-2 124M in TF32. Llama 3.1 8B, 8,192 tokens per GPU; on 4 GPUs in",
        "bfloat16 with activation checkpointing. 194 GiB is predicted, the rest measured.",
    ]
    out += lines_of_text(LEFT, y, says, SMALL, "soft")
    title = f"8 GPUs are {eight / one:.1f} times as fast as one; an 8B model fits on 4 GPUs"
    return document(title, y + 38, out)


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


def trace() -> str:
    """Return the phases and all-reduces of a step on two ranks, of which rank 1 is late."""
    ranks = report.read("trace_cpu")["ranks"]
    fills = {"forward": "blue", "backward": "green", "update": "orange", "gloo:all_reduce": "red"}
    end = max(span["end"] for spans in ranks for span in spans)
    left = LEFT + 92
    scale = (RIGHT - left) / end
    out = heading("Rank 0 waits, because rank 1 is late")
    names = ("forward", "backward", "update", "all-reduce")
    out += legend(LEFT, 68, dict(zip(names, fills.values(), strict=True)))
    y = 100.0
    for number, spans in enumerate(ranks):
        out.append(text(LEFT, y + 16, f"rank {number}", LARGE, "bold"))
        out += lines_of_text(left - 8, y + 46, ["script", "gloo"], SMALL, "soft end")
        sums = [span for span in spans if span["name"] == "gloo:all_reduce"]
        for span in spans:
            if span["name"] in fills:
                x, width = left + span["start"] * scale, (span["end"] - span["start"]) * scale
                row = y + 52 if span in sums else y + 26
                row += 12 * sums.index(span) if span in sums else 0
                height = 10 if span in sums else 22
                out.append(rect(x, row, width, height, f"{fills[span['name']]} edge"))
        mark = left + sums[0]["start"] * scale
        out.append(text(mark - 8, y + 70, "AB"[number], LARGE, "bold end"))
        y += 98
    passes = [span for span in ranks[1] if span["name"] == "forward"]
    out.append(text(left + passes[1]["start"] * scale - 8, y - 54, "C", LARGE, "bold end"))
    starts = [next(span["start"] for span in spans if "gloo" in span["name"]) for spans in ranks]
    says = [
        f"A: the first bucket is ready after {starts[0]:.0f} ms, and its all-reduce waits.",
        f"B: rank 1 has this bucket ready after {starts[1]:.0f} ms. It does not wait.",
        "C: the cause: rank 1 begins its second micro-batch late.",
    ]
    out += lines_of_text(LEFT, y + 14, says, NORMAL)
    says = [f"{end:.0f} ms of gpt2-tiny with two micro-batches, on two CPU cores with other work."]
    out += lines_of_text(LEFT, y + 88, says, SMALL, "soft")
    return document("One training step of two ranks, as in a trace", y + 106, out)


def strong_scaling() -> str:
    """Return the time of a step of 512 sequences on one to four GPUs."""
    rows, counts = rows_of("gpus"), (1, 2, 4)
    steps = {n: rows[f"DDP, 512 sequences on {n}"]["time/total"] for n in counts}
    scale = (RIGHT - LEFT) / steps[1]
    out = heading(f"The same batch: {steps[1] / steps[4]:.1f} times as fast on four GPUs")
    y = 62.0
    for gpus, step in steps.items():
        out.append(text(LEFT, y + 20, "1 GPU" if gpus == 1 else f"{gpus} GPUs", LARGE, "bold"))
        out.append(text(LEFT + 90, y + 20, f"{step:,.0f} ms per step"))
        out.append(text(RIGHT, y + 20, f"x {steps[1] / step:.2f}", NORMAL, "end bold"))
        out.append(rect(LEFT, y + 32, step * scale, 34, "green edge"))
        out.append(rect(LEFT, y + 32, steps[1] / gpus * scale, 34, "line dashed"))
        y += 92
    out.append(rect(LEFT, y - 6, 34, 18, "line dashed"))
    out += lines_of_text(LEFT + 46, y + 9, ["ideal: the time on one GPU, divided by the GPUs"])
    says = ["GPT-2 124M, 512 x 1,024 tokens per step, bfloat16, compiled, NVIDIA H200"]
    out += lines_of_text(LEFT, y + 40, says, SMALL, "soft")
    return document("Time of a step of 512 sequences on 1, 2 and 4 GPUs", y + 58, out)


def nodes_cost() -> str:
    """Return the predicted step on two nodes, by network and precision."""
    networks, precisions, left = (10, 25, 100, 400), ("TF32", "bf16"), LEFT + 62
    found = {
        (gigabits, precision): report.two_nodes(report.read, precision, gigabits, "tree")
        for gigabits in networks
        for precision in precisions
    }
    scale = 430 / max(each["step"] for each in found.values())
    out = heading("A slow network cancels the gain of a second node")
    out += legend(LEFT, 68, {"step on one node": "green", "exposed all-reduce": "red"})
    out.append(text(RIGHT, 118, "speed, one node = 1", NORMAL, "end"))
    y = 118.0
    for gigabits in networks:
        out.append(text(LEFT, y, f"{gigabits} Gbit/s per node", LARGE, "bold"))
        for precision in precisions:
            each = found[gigabits, precision]
            y += 32
            alone, end = each["alone"] * scale, left + each["step"] * scale
            out.append(text(LEFT, y, precision))
            out.append(rect(left, y - 20, alone, 26, "green edge"))
            out.append(rect(left + alone, y - 20, end - left - alone, 26, "red edge"))
            out.append(text(end + 10, y, f"{each['step']:.0f} ms"))
            out.append(text(RIGHT, y, f"x {each['speed']:.1f}", NORMAL, "end bold"))
        y += 46
    says = [
        "Predicted for GPT-2 124M on 2 x 4 H200 and a network at its full bandwidth.",
        "The step on one node is measured. Two nodes train on twice as many tokens",
        f"per step. Each node sends {each['sent_mb']:.0f} MB of gradients per step (tree).",
    ]
    out += lines_of_text(LEFT, y - 4, says, SMALL, "soft")
    return document("Predicted step time on two nodes for several networks", y + 58, out)


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
    results = report.read("memory_timeline_gpu")
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


def model() -> str:
    """Return the losses of the trained model, and its bits per byte, by minutes of training."""
    lines = list(report.with_minutes(report.read(report.read("model")["metrics"])))
    evaluated = [line for line in lines if "eval_loss" in line]
    left, top, bottom, most, least, minutes = LEFT + 36, 92.0, 372.0, 5, 1, 12

    def place(line: dict, key: str) -> tuple[float, float]:
        y = bottom - (line[key] - least) / (most - least) * (bottom - top)
        return left + line["minutes"] / minutes * (RIGHT - left), y

    last = evaluated[-1]
    says = f"{last['bits_per_byte']:.2f} bits per byte after {last['minutes']:.0f} minutes"
    out = heading(f"Held-out text: {says}")
    out += lines_of_text(LEFT, 66, ["loss, in nats per token"], SMALL, "soft")
    for tick in range(least, most + 1):
        x, y = place({"minutes": 0, "loss": tick}, "loss")
        out.append(line(x, y, RIGHT, y, "softline thin"))
        out.append(text(x - 8, y + 6, str(tick), SMALL, "end"))
    for minute in range(0, minutes + 1, 2):
        x, y = place({"minutes": minute, "loss": least}, "loss")
        out.append(text(x, y + 24, str(minute), SMALL, "middle"))
    shown = [line for line in lines if line["loss"] < most]
    for rows, key, style in ((shown, "loss", "softline"), (evaluated, "eval_loss", "line")):
        places = [place(row, key) for row in rows]
        out.append(path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places), style))
    x, y = place(evaluated[7], "eval_loss")
    out.append(text(x, y + 28, "held-out text", SMALL, "middle"))
    out.append(text(x, place(evaluated[7], "loss")[1] + 28, "training text", SMALL, "middle"))
    for number, line_of_log in enumerate(evaluated):
        x, y = place(line_of_log, "eval_loss")
        out.append(rect(x - 4, y - 4, 8, 8, "green edge"))
        if number in (0, 3, len(evaluated) - 1):
            says = f"{line_of_log['bits_per_byte']:.3f} bits per byte"
            style = "end bold" if x > RIGHT - 100 else "bold"
            out.append(text(min(x + 8, RIGHT), y - 14, says, SMALL, style))
    says = ["Minutes of training steps. GPT-2 with 111 million parameters on one NVIDIA H200."]
    out += lines_of_text(LEFT, bottom + 54, says, SMALL, "soft")
    return document("Loss and bits per byte by minutes of training steps", bottom + 72, out)

"""The figures that show results of measurements."""

import report

from drawings.svg import HEADING, LARGE, LEFT, NORMAL, RIGHT, SMALL, Drawing

H200_GIB = 140


def medians(*labels: str) -> dict[str, dict[str, float]]:
    """Return the medians over the runs of rows of measure.py that can be compared, by label."""
    found = {}
    for label, row in report.measured(*labels).items():
        runs = report.measured_runs(row)
        numbers = [key for key, value in runs[0].items() if isinstance(value, int | float)]
        found[label] = {key: report.median(run[key] for run in runs) for key in numbers}
    return found


def same_batch() -> dict[int, dict[str, float]]:
    """Return the medians of DDP with 512 sequences per step, by number of GPUs."""
    labels = {f"DDP, 512 in all on {gpus}": gpus for gpus in (1, 2, 4)}
    return {labels[label]: row for label, row in medians(*labels).items()}


def gains() -> str:
    """Return what the chapters bring: a faster step, and a model that fits."""
    steps = same_batch()
    most = max(steps)
    one, several = (steps[gpus]["tokens_per_s"] for gpus in (1, most))
    predicted = report.read("predictions")["scenario"]
    ddp, fsdp = (predicted[name]["peak"] for name in ("Chapter 2 or 3", "Chapter 4"))
    panels = {
        f"The same batch: {several / one:.1f} times as fast": (
            ("1 GPU", one, f"{one:,.0f} tokens/s", "green"),
            (f"{most} GPUs", several, f"{several:,.0f} tokens/s", "green"),
        ),
        "An 8B model fits into the memory of each of 4 GPUs": (
            ("DDP (chapter 2)", ddp, f"{ddp:.0f} GiB: does not fit", "red"),
            ("FSDP (chapter 4)", fsdp, f"{fsdp:.0f} GiB", "orange"),
        ),
    }
    left, longest, y = LEFT + 170, 290, 32.0
    drawing = Drawing()
    for title, bars in panels.items():
        drawing.text(LEFT, y, title, HEADING, "bold")
        scale = longest / max(value for _, value, _, _ in bars)
        top, y = y + 14, y + 22
        for name, value, says, fill in bars:
            drawing.text(LEFT, y + 21, name)
            drawing.rect(left, y, value * scale, 30, f"{fill} edge")
            drawing.text(left + value * scale + 10, y + 21, says, NORMAL, "bold")
            y += 40
        if title.startswith("An 8B"):
            x = left + H200_GIB * scale
            drawing.line(x, top, x, y, "line dashed")
            drawing.text(x, y + 18, f"H200: {H200_GIB} GiB", SMALL, "middle")
        y += 44
    drawing.note(
        y,
        "Measured: GPT-2 124M with DDP on NVIDIA H200, bfloat16, 512 x 1,024 tokens per step.",
        "Predicted: Llama 3.1 8B in float32, compiled, one sequence of 8,192 tokens per GPU.",
    )
    title = f"{most} GPUs are {several / one:.1f} times as fast as one; an 8B model fits on 4 GPUs"
    return drawing.document(title, y + 38)


def memory_8b() -> str:
    """Return what an 8B model needs on each of four GPUs, by setup and by what is stored."""
    setups = {
        "DDP": "Chapter 2 or 3",
        "ZeRO-1": "Chapter 2 or 3 with zero1",
        "FSDP": "Chapter 4",
        "FSDP, selective": "Chapter 4 with selective-recomputation",
        "FSDP, full": "Chapter 4 with --activation-checkpointing",
    }
    parts = {"parameters": "blue", "gradients": "green", "moments": "orange"}
    predicted = report.read("predictions")["scenario"]
    found = {name: predicted[setup] for name, setup in setups.items()}
    left = LEFT + 170
    scale = (RIGHT - 90 - left) / max(each["peak"] for each in found.values())
    drawing = Drawing("With FSDP, an 8B model fits on four GPUs")
    drawing.legend({"weights": "blue", "gradients": "green", "moments": "orange", "rest": "red"})
    y = 100.0
    for name, sizes in found.items():
        drawing.text(LEFT, y + 24, name)
        x, rest = left, sizes["peak"]
        for part, fill in parts.items():
            drawing.rect(x, y, sizes[part] * scale, 34, f"{fill} edge")
            x += sizes[part] * scale
            rest -= sizes[part]
        drawing.rect(x, y, rest * scale, 34, "red edge")
        drawing.text(RIGHT, y + 24, f"{sizes['peak']:.0f} GiB", NORMAL, "end bold")
        y += 50
    x = left + H200_GIB * scale
    drawing.line(x, 90, x, y, "line dashed")
    drawing.text(x, y + 20, f"H200: {H200_GIB} GiB", SMALL, "middle")
    drawing.note(
        y + 52,
        "Predicted: Llama 3.1 8B in float32, compiled, one sequence of 8,192 tokens per GPU.",
        "Rest: activations and gathered weights. Recomputation of activations: selective, full.",
    )
    return drawing.document("Memory of an 8B model with DDP, ZeRO-1 and FSDP", y + 92)


def draw_beside_ideal(drawing: Drawing, bars: dict[int, tuple], ideal: str, note: str) -> float:
    """Draw a bar for each number of GPUs, in a frame of ideal length; return where it ends.

    bars: value, ideal value, and two texts, the second with its style.
    """
    scale = (RIGHT - LEFT) / max(best for _, best, *_ in bars.values())
    y = 62.0
    for gpus, (value, best, says, compared, style) in bars.items():
        drawing.text(LEFT, y + 20, "1 GPU" if gpus == 1 else f"{gpus} GPUs", LARGE, "bold")
        drawing.text(LEFT + 90, y + 20, says)
        drawing.text(RIGHT, y + 20, compared, NORMAL, style)
        drawing.rect(LEFT, y + 32, value * scale, 34, "green edge")
        drawing.rect(LEFT, y + 32, best * scale, 34, "line dashed")
        y += 92
    drawing.rect(LEFT, y - 6, 34, 18, "line dashed")
    drawing.text(LEFT + 46, y + 9, ideal)
    drawing.note(y + 40, note)
    return y + 58


def scaling() -> str:
    """Return tokens/s and efficiency on one to eight GPUs."""
    labels = {"chapter 2, TF32, compiled": 1}
    labels |= {f"DDP, TF32, 64 per GPU on {gpus}": gpus for gpus in (2, 4, 8)}
    rows = {labels[label]: row for label, row in medians(*labels).items()}
    alone = rows[1]["tokens_per_s"]
    bars = {}
    for gpus in sorted(rows):
        speed = rows[gpus]["tokens_per_s"]
        efficiency = f"efficiency {speed / gpus / alone:.1%}"
        bars[gpus] = speed, gpus * alone, f"{speed:,.0f} tokens/s", efficiency, "end"
    drawing = Drawing(f"{gpus} GPUs process {speed / alone:.1f} times the tokens of one")
    end = draw_beside_ideal(
        drawing,
        bars,
        "100%: the speed on one GPU, times the number of GPUs",
        "GPT-2 124M, 64 x 1,024 tokens per GPU, TF32, compiled, NVIDIA H200",
    )
    return drawing.document("Tokens per second with DDP on 1, 2, 4 and 8 GPUs", end)


def strong_scaling() -> str:
    """Return the time of a step of 512 sequences on one to four GPUs."""
    rows, bars = same_batch(), {}
    alone = rows[1]["time/total"]
    for gpus in rows:
        step = rows[gpus]["time/total"]
        times = f"x {alone / step:.2f}"
        bars[gpus] = step, alone / gpus, f"{step:,.0f} ms per step", times, "end bold"
    drawing = Drawing(f"The same batch: {alone / step:.1f} times as fast on {gpus} GPUs")
    end = draw_beside_ideal(
        drawing,
        bars,
        "ideal: the time on one GPU, divided by the GPUs",
        "GPT-2 124M, 512 x 1,024 tokens per step, bfloat16, compiled, NVIDIA H200",
    )
    return drawing.document("Time of a step of 512 sequences on 1, 2 and 4 GPUs", end)


def trace() -> str:
    """Return the phases and all-reduces of a step on two ranks, of which rank 1 is late."""
    ranks = report.read("trace_cpu")["ranks"]
    fills = {"forward": "blue", "backward": "green", "update": "orange"}
    end = max(span["end"] for spans in ranks for span in spans)
    left = LEFT + 92
    scale = (RIGHT - left) / end
    drawing = Drawing("Rank 0 waits, because rank 1 is late")
    drawing.legend({**fills, "all-reduce": "red"})
    y, starts = 100.0, []
    for number, spans in enumerate(ranks):
        drawing.text(LEFT, y + 16, f"rank {number}", LARGE, "bold")
        drawing.text(left - 8, y + 46, "script", SMALL, "soft end")
        drawing.text(left - 8, y + 68, "gloo", SMALL, "soft end")
        row = y + 52  # of the next all-reduce
        for span in spans:
            x, width = left + span["start"] * scale, (span["end"] - span["start"]) * scale
            if span["name"] in fills:
                drawing.rect(x, y + 26, width, 22, f"{fills[span['name']]} edge")
            elif span["name"] == "gloo:all_reduce":
                drawing.rect(x, row, width, 10, "red edge")
                row += 12
        starts += [next(s["start"] for s in spans if s["name"] == "gloo:all_reduce")]
        drawing.text(left + starts[-1] * scale - 8, y + 70, "AB"[number], LARGE, "bold end")
        y += 98
    _, second, *_ = (span["start"] for span in ranks[1] if span["name"] == "forward")
    drawing.text(left + second * scale - 8, y - 54, "C", LARGE, "bold end")
    for number, says in enumerate(
        (
            f"A: the first bucket is ready after {starts[0]:.0f} ms, and its all-reduce waits.",
            f"B: rank 1 has this bucket ready after {starts[1]:.0f} ms. It does not wait.",
            "C: the cause: rank 1 begins its second micro-batch late.",
        )
    ):
        drawing.text(LEFT, y + 14 + 24 * number, says)
    says = f"{end:.0f} ms of gpt2-tiny with two micro-batches, on two CPU cores with other work."
    drawing.note(y + 88, says)
    return drawing.document("One training step of two ranks, as in a trace", y + 106)


def nodes_cost() -> str:
    """Return the predicted step on two nodes, by network and precision."""
    networks, precisions, left = (10, 25, 100, 400), ("TF32", "bf16"), LEFT + 62
    found = {
        (gigabits, precision): report.two_nodes(precision, gigabits)
        for gigabits in networks
        for precision in precisions
    }
    scale = 430 / max(each["step"] for each in found.values())
    drawing = Drawing("A slow network cancels the gain of a second node")
    drawing.legend({"step on one node": "green", "exposed all-reduce": "red"})
    drawing.text(RIGHT, 118, "speed, one node = 1", NORMAL, "end")
    y = 118.0
    for gigabits in networks:
        drawing.text(LEFT, y, f"{gigabits} Gbit/s per node", LARGE, "bold")
        for precision in precisions:
            each = found[gigabits, precision]
            y += 32
            alone, end = each["alone"] * scale, left + each["step"] * scale
            drawing.text(LEFT, y, precision)
            drawing.rect(left, y - 20, alone, 26, "green edge")
            drawing.rect(left + alone, y - 20, end - left - alone, 26, "red edge")
            drawing.text(end + 10, y, f"{each['step']:.0f} ms")
            drawing.text(RIGHT, y, f"x {each['speed']:.1f}", NORMAL, "end bold")
        y += 46
    drawing.note(
        y - 4,
        "Predicted for GPT-2 124M on 2 x 4 H200 and a network at its full bandwidth.",
        "The step on one node is measured. Two nodes train on twice as many tokens",
        f"per step. Each node sends {each['sent_mb']:.0f} MB of gradients per step (tree).",
    )
    return drawing.document("Predicted step time on two nodes for several networks", y + 58)


def ladder() -> str:
    """Return tokens/s and peak memory from strict float32 to fp8."""
    names = {
        "strict float32": "strict float32",
        "TF32": "TF32 matmuls",
        "bfloat16": "bfloat16",
        "bfloat16, compiled": "bfloat16, compiled",
        "fp8, compiled": "fp8, compiled",
    }
    labels = {f"8B on 2, {name}": title for name, title in names.items()}
    rows = medians(*labels)
    rungs = {label: title for label, title in labels.items() if label in rows}
    speeds = {label: rows[label]["tokens_per_s_per_device"] for label in rungs}
    peaks = {label: rows[label]["peak_mem_gib"] for label in rungs}
    longest = 440
    fastest, largest = max(speeds.values()), max(peaks.values())
    drawing = Drawing(
        f"From strict float32 to fp8: {fastest / min(speeds.values()):.0f} times the speed"
    )
    drawing.legend({"tokens/s per GPU": "green", "peak memory per GPU": "orange"})
    y, before = 90.0, None
    for label, title in rungs.items():
        speed, peak = speeds[label], peaks[label]
        drawing.text(LEFT, y + 22, title, LARGE, "bold")
        if before:
            drawing.text(RIGHT, y + 22, f"x {speed / before:.1f} tokens/s", NORMAL, "end bold")
        y += 32
        for value, most, fill, says in (
            (speed, fastest, "green", f"{speed:,.0f} tokens/s"),
            (peak, largest, "orange", f"{peak:.1f} GiB"),
        ):
            length = longest * value / most
            drawing.rect(LEFT, y, length, 26, f"{fill} edge")
            drawing.text(LEFT + length + 10, y + 20, says)
            y += 30
        y += 22
        before = speed
    drawing.note(
        y + 6,
        "x compares with the row above. Llama 3.1 8B, 1 x 8,192 tokens per GPU, 2 NVIDIA",
        "H200, FSDP, selective recomputation.",
    )
    return drawing.document("Speed and peak memory from strict float32 to fp8", y + 44)


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
    drawing = Drawing(f"Held-out text: {says}")
    drawing.note(66, "loss, in nats per token")
    for tick in range(least, most + 1):
        x, y = place({"minutes": 0, "loss": tick}, "loss")
        drawing.line(x, y, RIGHT, y, "softline thin")
        drawing.text(x - 8, y + 6, str(tick), SMALL, "end")
    for minute in range(0, minutes + 1, 2):
        x, y = place({"minutes": minute, "loss": least}, "loss")
        drawing.text(x, y + 24, str(minute), SMALL, "middle")
    shown = [line for line in lines if line["loss"] < most]
    for rows, key, style in ((shown, "loss", "softline"), (evaluated, "eval_loss", "line")):
        places = [place(row, key) for row in rows]
        drawing.path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places), style)
    x, y = place(evaluated[7], "eval_loss")
    drawing.text(x, y + 28, "held-out text", SMALL, "middle")
    drawing.text(x, place(evaluated[7], "loss")[1] + 28, "training text", SMALL, "middle")
    for number, line in enumerate(evaluated):
        x, y = place(line, "eval_loss")
        drawing.rect(x - 4, y - 4, 8, 8, "green edge")
        if number in (0, 3, len(evaluated) - 1):
            says = f"{line['bits_per_byte']:.3f} bits per byte"
            style = "end bold" if x > RIGHT - 100 else "bold"
            drawing.text(min(x + 8, RIGHT), y - 14, says, SMALL, style)
    says = "Minutes of training steps. GPT-2 with 111 million parameters on one NVIDIA H200."
    drawing.note(bottom + 54, says)
    return drawing.document("Loss and bits per byte by minutes of training steps", bottom + 72)

"""The figures of chapter 5."""

from drawings.results import rows_of
from drawings.svg import (
    LARGE,
    LEFT,
    NORMAL,
    RIGHT,
    SMALL,
    arrow,
    document,
    heading,
    legend,
    lines_of_text,
    on,
    path,
    rect,
    text,
)

FLOAT32, BFLOAT16 = "blue", "orange"


def dtypes() -> str:
    """Return the dtype of everything between two updates with mixed precision."""
    width, height, left = 600, 74, LEFT + 60
    stages = [
        (FLOAT32, "Shard of the weights", "stored by each rank"),
        (BFLOAT16, "All-gather", "the complete layer, on every rank"),
        (BFLOAT16, "Matmuls, forward and backward", "activations and gradients are bfloat16, too"),
        (FLOAT32, "Reduce-scatter", "mean of the gradients over the ranks"),
        (FLOAT32, "AdamW", "updates the shard and both moments"),
    ]
    casts = {1: "cast to bfloat16", 3: "cast to float32"}
    out = heading("bfloat16 for compute, float32 for sums and updates")
    out += legend(LEFT, 68, {"float32 (4 bytes)": FLOAT32, "bfloat16 (2 bytes)": BFLOAT16})
    y, tops = 96, []
    for number, (fill, title, says) in enumerate(stages):
        if number:
            out.append(arrow(left + width / 2, y - 46, left + width / 2, y - 3))
        if number in casts:
            out.append(text(left + width / 2 + 16, y - 18, casts[number], NORMAL, "bold"))
        tops.append(y)
        out.append(rect(left, y, width, height, f"{fill} edge", 6))
        out.append(text(left + 20, y + 31, title, LARGE, f"bold {on(fill)}"))
        out.append(text(left + 20, y + 57, says, NORMAL, on(fill)))
        y += height + 50
    first, last = (top + height / 2 for top in (tops[0], tops[-1]))
    out.append(path(f"M{left} {last}H{LEFT + 22}V{first}H{left - 14}", "line"))
    out.append(arrow(left - 24, first, left - 2, first))
    y += 2
    says = [
        "The loss is computed in float32, too. Nothing that lasts longer than a step",
        "is stored in bfloat16, so small updates of the weights are not lost.",
    ]
    out += lines_of_text(LEFT, y - 12, says)
    return document("The dtypes of one training step with mixed precision", y + 30, out)


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


FIGURES = {"dtypes": dtypes, "ladder": ladder}

"""The figures of chapter 1."""

from drawings import step_memory as memory
from drawings.svg import (
    LARGE,
    LEFT,
    NORMAL,
    SMALL,
    document,
    heading,
    legend,
    lines_of_text,
    rect,
    text,
)


def packing() -> str:
    """Return how documents become sequences of equal length."""
    lengths, seq_length, cell = {"A": 5, "B": 8, "C": 10}, 8, 26
    fills = {"A": "orange", "B": "sky", "C": "purple", "end": "grey"}
    stream = []
    out = heading("Packing: documents become sequences of one length")
    y = 80
    out.append(text(LEFT, y, "1. Tokenize; add the end-of-text token E", LARGE, "bold"))
    y += 18
    for name, length in lengths.items():
        out.append(text(LEFT, y + 24, f"document {name}"))
        document_tokens = [name] * length + ["end"]
        out += cells(LEFT + 125, y, document_tokens, cell, fills)
        stream += document_tokens
        y += 46
    y += 30
    out.append(text(LEFT, y, "2. Concatenate", LARGE, "bold"))
    out += cells(LEFT, y + 16, stream, cell, fills)
    y += 100
    whole = len(stream) // seq_length
    out.append(text(LEFT, y, f"3. Cut into sequences of {seq_length} tokens", LARGE, "bold"))
    y += 18
    for number in range(whole):
        start = number * seq_length
        out.append(text(LEFT, y + 24, f"sequence {number}"))
        out += cells(LEFT + 125, y, stream[start : start + seq_length], cell, fills)
        y += 46
    rest = stream[whole * seq_length :]
    out.append(text(LEFT, y + 24, "rest"))
    out += cells(LEFT + 125, y, rest, cell, fills)
    says = "shorter than a sequence: left out"
    out.append(text(LEFT + 140 + len(rest) * cell, y + 24, says))
    y += 74
    says = [
        "Every position holds a real token: no padding, and all batches have the",
        "same shape.",
    ]
    out += lines_of_text(LEFT, y, says)
    return document("Documents packed into sequences of equal length", y + 44, out)


def cells(x: float, y: float, tokens: list[str], cell: int, fills: dict[str, str]) -> list[str]:
    """Return a row of tokens, one letter each."""
    out = []
    for number, name in enumerate(tokens):
        left = x + number * cell
        out.append(rect(left, y, cell, 36, f"{fills[name]} edge"))
        letter = "E" if name == "end" else name
        out.append(text(left + cell / 2, y + 24, letter, NORMAL, "middle dark"))
    return out


def step_memory() -> str:
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


FIGURES = {"packing": packing, "step_memory": step_memory}

"""The figures of chapter 2."""

from common.data import ResumableSampler
from drawings.results import rows_of
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

RANKS = 4


# --- one step ---


def ddp_step() -> str:
    """Return one training step on four ranks, from the same weights to the same weights."""
    gradients, weight, lr = (1, 2, 3, 6), 0.5, 0.1
    mean = sum(gradients) / RANKS
    sequences = [list(range(rank, 24, RANKS)) for rank in range(RANKS)]
    updated = weight - lr * mean
    width, gap = 155, 20
    columns = [LEFT + rank * (width + gap) for rank in range(RANKS)]
    middles = [x + width / 2 for x in columns]
    out = heading("One DDP step: different data, same update")
    out += [text(x, 72, f"rank {rank}", LARGE, "bold middle") for rank, x in enumerate(middles)]
    y = 108

    def panel(number: int, title: str, says: str, fills: list[str], contents: list[str]) -> None:
        nonlocal y
        out.extend([text(LEFT, y, f"{number}. {title}", LARGE, "bold"), text(LEFT, y + 25, says)])
        for x, fill, content in zip(columns, fills, contents, strict=True):
            out.extend(box(x, y + 38, width, 42, fill, content))
        y += 80

    def arrows(count: int = 1, height: int = 28) -> None:
        nonlocal y
        out.extend(arrow(x, y + 4, x, y + height) for x in middles)
        y += height + 28

    same = ["blue"] * RANKS
    panel(
        1,
        "Same weights",
        "All ranks start the step with equal copies.",
        same,
        [f"w = {weight}"] * 4,
    )
    arrows()
    data = [f"{each[0]}, {each[1]}, … {each[-1]}" for each in sequences]
    says = "Each rank takes 6 of the 24 sequences of the batch."
    panel(2, "Different data", says, list(RANK_FILLS), data)
    arrows()
    says = "Each rank runs the forward and backward pass on its own sequences."
    contents = [f"gradient {gradient}" for gradient in gradients]
    panel(3, "Different gradients", says, list(RANK_FILLS), contents)
    # The all-reduce: a bar that all ranks go into and come out of.
    out += [arrow(x, y + 4, x, y + 32) for x in middles]
    mean_text = f"all-reduce: sum {sum(gradients)}; DDP divides by {RANKS}: {mean:g}"
    out += box(LEFT, y + 34, RIGHT - LEFT, 46, "yellow", mean_text, LARGE)
    y += 80
    arrows()
    says = "Every rank now has the mean of all four gradients."
    panel(4, "Same gradient", says, ["yellow"] * RANKS, [f"gradient {mean:g}"] * RANKS)
    arrows()
    says = f"Every optimizer computes {weight} - {lr} x {mean:g}. The copies stay identical."
    panel(5, "Same update", says, same, [f"w = {updated:.1f}"] * RANKS)
    out.append(
        text(LEFT, y + 28, f"The update shown is plain SGD with learning rate {lr}.", SMALL, "soft")
    )
    return document("One training step with DDP on four ranks", y + 46, out)


# --- ring all-reduce ---


def ring_states(ranks: int) -> list[tuple[list[list[int]], list[tuple[int, int]]]]:
    """Return the states of the ring of allreduce_by_hand.py, one before and one after each step.

    A state is (how many ranks' gradients are summed in each rank's chunks, which chunk each rank
    received last).
    """
    summed = [[1] * ranks for _ in range(ranks)]
    states = [([row[:] for row in summed], [])]
    for step in range(2 * (ranks - 1)):
        sent = [summed[rank][(rank - step) % ranks] for rank in range(ranks)]
        received = []
        for rank in range(ranks):
            chunk, incoming = (rank - step - 1) % ranks, sent[(rank - 1) % ranks]
            adds = step < ranks - 1  # the reduce-scatter adds, the all-gather copies
            summed[rank][chunk] = summed[rank][chunk] + incoming if adds else incoming
            received.append((rank, chunk))
        states.append(([row[:] for row in summed], received))
    return states


def ring() -> str:
    """Return a ring all-reduce on four ranks: how the chunks move and where sums are complete."""
    states = ring_states(RANKS)
    cell, gap, row, left = 36, 16, 92, 82
    starts = [left + rank * (RANKS * cell + gap) for rank in range(RANKS)]
    out = heading("Ring all-reduce: each rank sends only to the next")
    says = [
        "Each rank cuts its gradients into 4 chunks, one per color. The number in a",
        "chunk says how many ranks' gradients it sums up. 4 means complete.",
        "The dashed arrow from rank 3 goes to rank 0.",
    ]
    out += lines_of_text(LEFT, 64, says)

    def draw_state(top: float, number: int, received: list[tuple[int, int]]) -> None:
        summed, _ = states[number]
        for rank, chunk in received:  # arrows from the row above, from the rank before
            x2 = starts[rank] + (chunk + 0.5) * cell
            y1, y2 = top - row + cell + 2, top - 4
            if rank:
                out.append(arrow(starts[rank - 1] + (chunk + 0.5) * cell, y1, x2, y2))
            else:  # closes the ring: leaves at the right edge, comes in at the left edge
                x1 = starts[RANKS - 1] + (chunk + 0.5) * cell
                out.append(line(x1, y1, 718, y1 + (718 - x1) * 0.3, "line dashed"))
                out.append(arrow(2, y2 - (x2 - 2) * 0.3, x2, y2, "line dashed"))
        if number:
            out.append(text(LEFT, top + cell / 2 + 6, f"step {number}", SMALL))
        else:
            out.append(text(LEFT, top + cell / 2 + 6, "start", SMALL))
        for rank, start in enumerate(starts):
            for chunk, fill in enumerate(RANK_FILLS):
                x, count = start + chunk * cell, summed[rank][chunk]
                complete = count == RANKS
                if complete:
                    out.append(rect(x, top, cell, cell, fill))
                else:  # a strip as long as the part of the sum
                    out.append(rect(x, top + cell - 12, cell * count / RANKS, 12, fill))
                border = "line thick" if (rank, chunk) in received else "line"
                out.append(rect(x, top, cell, cell, border))
                style = "bold middle dark" if complete else "middle"
                baseline = top + (25 if complete else 20)
                out.append(text(x + cell / 2, baseline, str(count), LARGE, style))

    y = 156.0
    halves = [
        ("1. Reduce-scatter: the receiver adds", "Each rank ends with one complete chunk."),
        ("2. All-gather: the receiver copies", "Each rank ends with all chunks complete."),
    ]
    for half, (title, result) in enumerate(halves):
        out.append(text(LEFT, y, title, LARGE, "bold"))
        for rank, start in enumerate(starts):
            out.append(text(start + RANKS * cell / 2, y + 34, f"rank {rank}", NORMAL, "middle"))
        y += 46
        first = half * (RANKS - 1)  # the all-gather begins with the last row of the reduce-scatter
        for number in range(first, first + RANKS):
            draw_state(y, number, states[number][1] if number > first else [])
            y += row
        out.append(text(LEFT, y - row + cell + 30, result))
        y += 16
    sent = 2 * (RANKS - 1)
    says = f"Each rank sends {sent} chunks: {sent / RANKS:g} times the size of the gradients."
    out.append(text(LEFT, y - 4, says, NORMAL, "bold"))
    return document("Ring all-reduce on four ranks in six steps", y + 16, out)


# --- samples ---


def samples_of(rank: int, ranks: int, count: int) -> list[int]:
    """Return the first sequences that a rank gets from the sampler of the chapters."""
    sampler = ResumableSampler(range(24), num_replicas=ranks, rank=rank, seed=0)
    return list(sampler)[:count]


def samples() -> str:
    """Return which rank trains on which sequence of two steps, on one, two and three ranks."""
    per_step, steps = 6, 2
    cell, left, gap = 46, 104, 22
    order = samples_of(0, 1, steps * per_step)
    x_of = [left + i * cell + gap * (i // per_step) for i in range(len(order))]
    out = heading("Each step trains on the same sequences,", "on any number of ranks")
    y = 104
    for step in range(steps):
        x = x_of[step * per_step]
        out.append(text(x + per_step * cell / 2, y, f"step {step + 1}", LARGE, "bold middle"))
    y += 16
    for ranks in (1, 2, 3):
        title = "1 rank" if ranks == 1 else f"{ranks} ranks"
        share = per_step // ranks
        says = f"{share} sequences per rank and step"
        out += [text(LEFT, y + 24, title, LARGE, "bold"), text(left + 20, y + 24, says)]
        y += 38
        top = y
        for rank in range(ranks):
            out.append(text(LEFT, y + 28, f"rank {rank}"))
            taken = samples_of(rank, ranks, steps * share)
            for number, sample in enumerate(taken):
                position = order.index(sample)
                assert position // per_step == number // share  # in the same step as on one rank
                out += box(x_of[position], y, cell, 42, RANK_FILLS[rank], str(sample))
            y += 42
        for step in range(steps):
            x = x_of[step * per_step]
            out.append(rect(x - 3, top - 3, per_step * cell + 6, y - top + 6, "line", 4))
        y += 16
    says = [
        "Numbers are sequences, in the shuffled order of the epoch. With N ranks, rank r",
        "takes every N-th sequence, starting at position r. A step has 6 sequences here.",
    ]
    out += lines_of_text(LEFT, y + 16, says, SMALL, "soft")
    return document("Which rank trains on which sequences, on 1, 2 and 3 ranks", y + 52, out)


# --- overlap ---


def overlap() -> str:
    """Return a backward pass with its all-reduces, with and without overlap, on one time axis."""
    layers = ["12-10", "9-7", "6-4", "3-1"]
    part, reduce, update, height = 88, 58, 84, 52
    out = heading("Overlap hides every all-reduce except the last")
    says = [
        "The backward pass goes from the last layer to the first. When the gradients",
        "of a few layers are ready, DDP all-reduces them as one bucket.",
    ]
    out += lines_of_text(LEFT, 64, says)
    ends = []

    def draw(y: float, title: str, overlaps: bool) -> None:
        out.append(text(LEFT, y, title, LARGE, "bold"))
        out.append(text(LEFT, y + 32, "backward pass: layers"))
        top, below = y + 42, y + 42 + height + 36
        for number, names in enumerate(layers):
            out.extend(box(LEFT + number * part, top, part, height, "sky", names))
        backward_end = LEFT + len(layers) * part
        end = backward_end if not overlaps else 0
        for number in range(len(layers)):
            ready = LEFT + (number + 1) * part
            start = max(end, ready)
            end = start + reduce
            fill = "red" if end > backward_end else "green"
            if overlaps:
                # To the middle: at its left end, the last one would cover the dashed line.
                out.append(arrow(ready, top + height + 2, start + reduce / 2, below - 3))
            out.extend(box(start, below, reduce, height, fill, str(number + 1), LARGE))
        out.append(text(LEFT, below + height / 2 + 6, "all-reduce", SMALL))
        out.extend(box(end, top, update, height, "yellow", "update"))
        out.append(line(backward_end, top - 6, backward_end, below + height + 6, "softline dashed"))
        ends.append(end + update)

    draw(140, "With overlap (DDP)", True)
    draw(382, "Without overlap", False)
    out.append(line(ends[0], 182, ends[0], 234, "softline dashed"))
    out.append(line(ends[1], 182, ends[1], 234, "softline dashed"))
    out.append(arrow(ends[1], 208, ends[0] + 4, 208))
    out.append(text(sum(ends) / 2, 200, "time saved", NORMAL, "middle"))
    y = 590
    out.append(arrow(LEFT, y, RIGHT, y))
    out.append(text(RIGHT, y + 24, "time", NORMAL, "end soft"))
    out += legend(
        LEFT,
        y + 58,
        {"hidden: the GPU computes meanwhile": "green", "exposed: the GPU waits": "red"},
    )
    return document("A backward pass with and without overlap", y + 104, out)


# --- scaling ---


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


FIGURES = {
    "ddp_step": ddp_step,
    "ring": ring,
    "samples": samples,
    "overlap": overlap,
    "scaling": scaling,
}

"""The figures of chapter 3."""

import re
from datetime import datetime

import report

from drawings.results import rows_of
from drawings.svg import (
    LARGE,
    LEFT,
    NORMAL,
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

# GB/s for each GPU and direction. NVLink of an H200: 900 GB/s in both directions together,
# https://www.nvidia.com/en-us/data-center/h200/. The network is an example: 400 Gbit/s per GPU.
NVLINK, NETWORK = 450, 50


def links() -> str:
    """Return two nodes, the links within and between them, and what each link carries."""
    gpus, width, gap, thin = 4, 120, 46, 3
    thick = thin * NVLINK / NETWORK
    columns = [LEFT + 30 + gpu * (width + gap) for gpu in range(gpus)]
    middles = [x + width / 2 for x in columns]
    out = heading("The links between nodes are the slow ones")

    span = columns[-1] + width - columns[0]

    def node(number: int, top: float, bar: float, gpu_top: float, name_y: float) -> None:
        """Draw a node: a panel, a bar for NVLink, its GPUs, and thick lines between them.

        number: counts from 1, as in the names of the pages' nodes, node1 and node2.
        """
        out.append(rect(LEFT, top, RIGHT - LEFT, node_height, "panel", 8))
        out.append(text(LEFT + 16, name_y, f"node{number}", LARGE, "bold"))
        ends = sorted((bar + 20, gpu_top + 28))
        for gpu, x in enumerate(columns):
            out.append(rect(middles[gpu] - thick / 2, ends[0], thick, ends[1] - ends[0], "green"))
            out.extend(box(x, gpu_top, width, 56, "sky", f"rank {(number - 1) * gpus + gpu}"))
        says = f"NVLink: {NVLINK} GB/s per GPU and direction"
        out.extend(box(columns[0], bar, span, 40, "green", says))

    # The nodes mirror each other, so that the GPUs of both are next to the network.
    node_height, between, first = 216, 150, 60
    second = first + node_height + between
    network = first + node_height + between / 2 - 20
    node(1, first, bar=first + 56, gpu_top=first + 142, name_y=first + 32)
    node(2, second, bar=second + 138, gpu_top=second + 48, name_y=second + 204)
    for x in middles:
        out.append(rect(x - thin / 2, first + 198, thin, second + 48 - first - 198, "red"))
    says = f"network: {NETWORK} GB/s per GPU (example: 400 Gbit/s)"
    out += box(columns[0], network, span, 40, "red", says)
    y = second + node_height + 36
    rows = [
        ("green", "gradients between the GPUs of a node, in every step"),
        ("red", "gradients between the nodes, in every step"),
    ]
    for fill, says in rows:
        out += [rect(LEFT, y - 15, 18, 18, f"{fill} edge"), text(LEFT + 30, y, says)]
        y += 28
    says = [
        "Not drawn: the ordinary TCP network, which usually carries start-up,",
        f"heartbeats, data and checkpoints. Line widths are to scale, {NVLINK} to {NETWORK}.",
    ]
    out += lines_of_text(LEFT, y + 6, says, SMALL, "soft")
    return document("Two nodes, their links, and what the links carry", y + 44, out)


# --- requeue ---


def recorded_requeue() -> dict[str, int]:
    """Return steps and seconds of the requeued run in recorded/job.txt.

    Seconds count from the moment when training begins.
    """
    log = (report.REPOSITORY / "03-multi-node/recorded/job.txt").read_text()
    saved, total = re.search(r"resumed after step (\d+) of (\d+)", log).groups()
    moment = r"^\[(\S+ \S+),\d+\] \[node1\] \[rank 0\] "
    patterns = {
        "start": rf"{moment}6 sequences",
        "stop": rf"{moment}step {saved}/",
        "resume": rf"{moment}resumed after",
        "end": rf"{moment}step {total}/",
    }
    times = {
        name: datetime.fromisoformat(re.search(pattern, log, re.MULTILINE)[1])
        for name, pattern in patterns.items()
    }
    seconds = {name: round((at - times["start"]).total_seconds()) for name, at in times.items()}
    return {"saved": int(saved), "total": int(total), **seconds}


def requeue() -> str:
    """Return the life of a run that is told to stop, requeued and resumed, on a time axis."""
    found = recorded_requeue()
    saved, total = found["saved"], found["total"]
    bar, band = LEFT + 92, 34
    # fill of the band, height, seconds at its top, title, explanations
    events = [
        ("green", 120, found["start"], "Training", [f"steps 1 to {saved}", "on two nodes"]),
        (
            "yellow",
            92,
            None,
            "Signal from Slurm",
            [
                "SIGTERM: another job preempts this one, or",
                "USR1: two minutes before the time limit",
            ],
        ),
        (
            "orange",
            136,
            found["stop"],
            f"Stop together after step {saved}",
            [
                "When metrics are next logged, an all-reduce",
                "tells all ranks. They save a checkpoint,",
                "rank 0 writes the file requeue, and all exit.",
            ],
        ),
        (
            "grey",
            136,
            None,
            "Requeue",
            [
                "job.sbatch sees the file and calls",
                "scontrol requeue. The job waits in the",
                "queue and keeps its job id.",
            ],
        ),
        (
            "sky",
            110,
            None,
            "Start again",
            [
                "Slurm runs job.sbatch from its first line.",
                "The script finds state.json and loads it.",
            ],
        ),
        (
            "green",
            96,
            found["resume"],
            "Training",
            [f"steps {saved + 1} to {total}: no step is lost,", "and none is trained twice"],
        ),
    ]
    out = heading("A preempted run resumes where it stopped")
    y = 64
    for fill, height, seconds, title, says in events:
        out.append(rect(bar, y, band, height, f"{fill} edge"))
        if seconds is not None:
            out.append(text(bar - 12, y + 20, f"{seconds} s", NORMAL, "end"))
            out.append(line(bar - 8, y, bar, y))
        x = bar + band + 22
        out.append(text(x, y + 24, title, LARGE, "bold"))
        out += lines_of_text(x, y + 50, says)
        y += height
    out.append(line(bar - 8, y, bar, y))
    out.append(text(bar - 12, y + 6, f"{found['end']} s", NORMAL, "end"))
    out.append(arrow(LEFT + 12, 64, LEFT + 12, y))
    says = [
        "Seconds: a recorded run on the local cluster, where the queue is empty.",
        "Heights are not to scale.",
    ]
    out += lines_of_text(LEFT, y + 40, says, SMALL, "soft")
    return document("A run that is preempted, requeued and resumed", y + 80, out)


# --- cost of the network ---


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


FIGURES = {"links": links, "requeue": requeue, "nodes_cost": nodes_cost}

"""Tokens per second and memory against GPUs, sequence length and model size, with their limits.

python tests/benchmarks/growth_chart.py --output 05-mixed-precision/growth_measured.svg

Everything is read from result files; nothing is timed here. The limits:

compute    the GPU's rate in bfloat16 over the operations for a token: what MFU is a share of
bandwidth  what GPUs could train on if they did nothing but send, over the bus as it was measured
memory     what the GPU has
"""

import argparse
import json
from pathlib import Path

from growth_check import EIGHT, FIGURE, GPT2, growth, measured_bus, median_run, read, save
from matplotlib.figure import Figure
from report import causal_mfu, measured_peak, measured_runs

GPU_GIB = 140.4
TOKENS, GIB = "tokens_per_s_per_device", "peak_mem_gib"


def runs_of(*files: str) -> list[tuple[dict, dict]]:
    """Return each row of the files that has runs, with their medians."""
    rows = [row for file in files for row in read(file)["rows"]]
    return [(row, median_run(row)) for row in rows if "median" in row or measured_runs(row)]


def by_gpus() -> dict[str, list[tuple[int, dict]]]:
    """Return by title (number of GPUs, medians)."""
    found = {"GPT-2 124M, DDP, TF32": [], "Llama 3.1 8B, FSDP, bf16": []}
    ddp, sharded = found.values()
    ddp += [(row["devices"], run) for row, run in runs_of("ddp_gpu") if row["chapter"] == "02-ddp"]
    for row, run in runs_of("fsdp_precision", "fsdp_precision_4"):
        if row["label"] == "bf16, compiled":
            sharded.append((row["gpus"], run))
    return found


def by_length() -> dict[str, list[tuple[int, dict]]]:
    files = {"GPT-2 124M": "fsdp_length", "4 blocks of Llama 3.1 8B": "fsdp_length_llama"}
    found = {title: [] for title in files}
    for title, file in files.items():
        known = read("predictions")[file]
        for row, run in runs_of(file):
            run["mfu"] = causal_mfu(row, known[row["label"]]["parameters"])
            found[title].append((int(row["label"].split()[-2]), run))
    return found


def by_size() -> dict[str, list[tuple[int, dict]]]:
    points = [(known_sizes()[row["label"]]["parameters"], run) for row, run in runs_of("fsdp_size")]
    return {"GPT-2, recomputing": points}


def known_sizes() -> dict[str, dict]:
    return read("predictions")["fsdp_size"]


def largest() -> tuple[int, float]:
    """Return parameters and GiB of the most blocks of Llama that one GPU trained, not offloaded."""
    known = read("predictions")["fsdp_largest_full"]
    ((row, peak),) = [(row, measured_peak(row)) for row in read("fsdp_largest_full")["rows"]]
    return known[row["label"]]["parameters"], peak


def sending() -> dict[str, list[tuple[int, float]]]:
    """Return by title (number of GPUs, tokens/s of a GPU that could be sent for) from 2 GPUs on."""
    works = json.loads(growth.INPUTS.read_text())["works"]
    cluster = growth.Cluster(measured_bus())
    found = {GPT2: [], EIGHT: []}
    for title, each in works.items():
        work = growth.Work(**each["work"])
        # 8 bytes a parameter: float32 gradients there and back, or weights twice in 16 bits and
        # gradients once in 32.
        size = 8 * (work.layers * work.layer + work.root)
        for n in (2, 4, 8):
            found[title].append((n, work.tokens / growth.one_way(size, n, cluster)))
    return found


def draw(path: Path) -> None:
    """Draw a column for each of the three, tokens/s above and GiB below, on one GPU's scale."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 3, sharex="col", sharey="row")
    columns = {"GPUs": by_gpus(), "tokens in a sequence": by_length(), "parameters": by_size()}
    for (above, below), (what, lines) in zip(axes.T, columns.items(), strict=True):
        for number, (title, points) in enumerate(lines.items()):
            x, color = [n for n, _ in points], f"C{number}"
            speeds = [run[TOKENS] for _, run in points]
            peak = [run[TOKENS] / run["mfu"] for _, run in points]
            above.plot(x, speeds, marker=".", color=color, label=title)
            above.plot(x, peak, linestyle="--", color=color)
            below.plot(x, [run[GIB] for _, run in points], marker=".", color=color, label=title)
        below.axhline(GPU_GIB, color="black", linestyle="--")
        above.set(xscale="log", yscale="log")
        below.set(xlabel=what, ylim=(0, 1.05 * GPU_GIB))
        below.legend(loc="center left", bbox_to_anchor=(0, 0.75), fontsize="small")
    for number, points in enumerate(sending().values()):
        axes[0, 0].plot(*zip(*points, strict=True), linestyle=":", color=f"C{number}")
    axes[0, 0].set(ylabel="tokens/s of a GPU")
    axes[1, 0].set(ylabel="GiB of a GPU")
    parameters, peak = largest()
    axes[1, 2].plot(
        parameters, peak, "x", color="C1", label="blocks of Llama: the most that fit, TF32"
    )
    axes[1, 2].legend(loc="center left", bbox_to_anchor=(0, 0.75), fontsize="small")
    sizes = {each["parameters"]: name.split(", ")[1] for name, each in known_sizes().items()}
    sizes[parameters] = f"{parameters / 1e9:.1f}B"
    lengths = {1024 * n: f"{n}k" for n in (1, 2, 4, 8, 16, 32)}
    for above, ticks in zip(axes[0], ({n: n for n in (1, 2, 4, 8)}, lengths, sizes), strict=True):
        above.set_xticks(list(ticks), ticks.values())
        above.minorticks_off()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    chart = FIGURE.with_name("growth_measured.svg")
    parser.add_argument("--output", type=Path, default=chart, help="svg file to draw into")
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()

"""05-mixed-precision/growth.py: what it starts from, and what it predicts.

python tests/benchmarks/growth_check.py --output tests/benchmarks/results/growth.json

Writes what growth.py starts from into growth.json beside it, and the predictions into --output.
Everything is read from result files; nothing is timed here. How far the predictions are from what
was measured on several GPUs is in growth_checks.json, made at the commit that it names.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib
from machine import RESULTS, write_result
from matplotlib.figure import Figure

sys.path.insert(0, str(RESULTS.parents[1]))
from report import REPOSITORY, content, measured_runs
from runner import load_script

growth = load_script(REPOSITORY / "05-mixed-precision/growth.py")
FIGURE = REPOSITORY / "05-mixed-precision/growth.svg"
PORTS = {"400 Gbit/s per GPU": 50e9, "100 Gbit/s per GPU": 12.5e9, "10 Gbit/s per GPU": 1.25e9}
# Tokens of a step: GPT-2's 512 sequences, and with what Llama 3 began, arxiv.org/abs/2407.21783.
GPT2, EIGHT = "GPT-2 124M, DDP", "Llama 3.1 8B, FSDP"
BATCHES = {GPT2: (512 * 1024, 1024), EIGHT: (4 * 2**20, 8192)}
PHASES = ("forward", "backward", "update")


def read(name: str) -> dict:
    return content(RESULTS / f"{name}.json")


def median_run(row: dict) -> dict:
    """Return the medians of a row's runs."""
    runs = measured_runs(row)
    keys = [key for key, value in runs[0].items() if isinstance(value, float)]
    return {key: statistics.median(run[key] for run in runs) for key in keys}


def measured_bus() -> float:
    """Return the bytes/s that a GPU sends in an all-reduce of all gradients within a node."""
    found = read("buckets_gpu")
    n = found["world_size"]
    seconds = found["ms"]["all-reduce alone"]["median"] / 1000
    seconds -= growth.all_reduce(0, n, growth.Cluster(1.0))
    return 2 * (n - 1) / n * found["gradient_bytes"] / seconds


def seconds_of(values: dict) -> list[float]:
    return [values[f"time/{phase}"] / 1000 for phase in PHASES]


def works() -> dict:
    """Return the two models in bfloat16, and the result file that each comes from.

    The 8B model does not fit on one GPU. Its passes are those of a step on two GPUs, less the
    exposed communication, and its update is that of one GPU, as often as there are shards.
    """
    rows = read("comparison_gpu")["rows"]
    (row,) = (r for r in rows if (r["strategy"], r["precision"]) == ("single", "bf16"))
    small = [row["summary"]["speed"]["ms"][phase] / 1000 for phase in PHASES]
    gpt2 = growth.work_of("ddp", "gpt2", 1024, 64 * 1024, *small)
    row = row_of("fsdp_precision", "bf16, compiled")
    eight = growth.work_of("fsdp", "llama-3.1-8b", 8192, 8192, *seconds_of(median_run(row)))
    sent = growth.exposed(eight, row["gpus"], growth.Cluster(measured_bus()))
    eight = replace(eight, backward=eight.backward - sent, update=row["gpus"] * eight.update)
    return {
        GPT2: {"work": asdict(gpt2), "from": "comparison_gpu"},
        EIGHT: {"work": asdict(eight), "from": "fsdp_precision"},
    }


def row_of(file: str, label: str) -> dict:
    (row,) = (row for row in read(file)["rows"] if row["label"] == label)
    return row


def paper(bus: float, inputs: dict) -> list[dict]:
    """Return a row for each model, port and number of GPUs."""
    found = []
    for title, given in inputs.items():
        work = growth.Work(**given["work"])
        for port, rate in PORTS.items():
            cluster = growth.Cluster(bus, rate)
            for n in growth.GPUS:
                if n <= cluster.node and port != next(iter(PORTS)):
                    continue  # no network there
                per_gpu = work.tokens / growth.step(work, n, cluster)
                weights = work.layers * work.layer + work.root
                found.append(
                    {
                        "model": title,
                        "network": port if n > cluster.node else "within a node",
                        "gpus": n,
                        "tokens_per_s": n * per_gpu,
                        "efficiency": growth.efficiency(work, n, cluster),
                        "mfu": per_gpu * work.flops / growth.PEAK,
                        "exposed_ms": 1000 * growth.exposed(work, n, cluster),
                        "states_gib": 16 * weights / (n if work.strategy == "fsdp" else 1) / 2**30,
                        "smallest_batch": growth.smallest_batch(work, n, cluster, 0.9),
                    }
                )
    return found


def limits(bus: float, inputs: dict) -> list[dict]:
    """Return how many GPUs a global batch keeps busy, for each model and port."""
    found = []
    for title, each in inputs.items():
        work = growth.Work(**each["work"])
        batch, length = BATCHES[title]
        for port, rate in PORTS.items():
            most = {
                share: growth.most_gpus(work, batch, length, growth.Cluster(bus, rate), share)
                for share in (0.9, 0.5)
            }
            row = {"model": title, "network": port, "global_batch": batch, "seq_length": length}
            found.append(row | {"gpus_at_90": most[0.9], "gpus_at_50": most[0.5]})
    return found


def draw(bus: float, inputs: dict, path: Path) -> None:
    """Draw the share of time that GPUs compute, against their number, one line for each port."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    counts = [2**i for i in range(11)]
    for axes, (title, each) in zip(figure.subplots(1, 2, sharey=True), inputs.items(), strict=True):
        work = growth.Work(**each["work"])
        for port, rate in PORTS.items():
            cluster = growth.Cluster(bus, rate)
            shares = [growth.efficiency(work, n, cluster) for n in counts]
            axes.plot(counts, shares, marker=".", label=port)
        axes.axhline(0.9, color="black", linestyle=":")
        axes.axvline(8, color="grey", linestyle="--", label="the end of a node")
        axes.set_xscale("log", base=2)
        axes.set(title=f"{title}, {work.tokens:,} tokens per GPU", xlabel="GPUs", ylim=(0, 1.05))
    axes.figure.axes[0].set_ylabel("share of a step that is forward and backward")
    axes.figure.axes[0].legend(loc="lower left")  # where no line is
    # The salt and the missing date make the same file each time.
    with matplotlib.rc_context({"svg.hashsalt": "growth"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    bus, inputs = measured_bus(), works()
    for title, each in inputs.items():
        each["global_batch"], each["seq_length"] = BATCHES[title]
    growth.INPUTS.write_text(json.dumps({"bus": bus, "works": inputs}, indent=1) + "\n")
    print(f"wrote {growth.INPUTS}")
    results = {"paper": paper(bus, inputs), "limits": limits(bus, inputs)}
    write_result(args.output, results)
    draw(bus, inputs, FIGURE)


if __name__ == "__main__":
    main()

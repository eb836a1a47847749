"""What 05-mixed-precision/growth.py predicts, as a result file and as a figure.

python tests/benchmarks/growth_check.py --output tests/benchmarks/results/growth.json

Nothing is timed here. How far the predictions are from what was measured on several GPUs is in
growth_checks.json, made at the commit that it names.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib
from machine import RESULTS, write_result
from matplotlib.figure import Figure

sys.path.insert(0, str(RESULTS.parents[1]))
from report import REPOSITORY
from runner import load_script

growth = load_script(REPOSITORY / "05-mixed-precision/growth.py")
FIGURE = REPOSITORY / "05-mixed-precision/growth.svg"
PORTS = {"400 Gbit/s per GPU": 50e9, "100 Gbit/s per GPU": 12.5e9, "10 Gbit/s per GPU": 1.25e9}


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
        batch, length = each["global_batch"], each["seq_length"]
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
    measured = json.loads(growth.INPUTS.read_text())
    bus, inputs = measured["bus"], measured["works"]
    write_result(args.output, {"paper": paper(bus, inputs), "limits": limits(bus, inputs)})
    draw(bus, inputs, FIGURE)


if __name__ == "__main__":
    main()

"""05-mixed-precision/growth.py: what it starts from, what it predicts, and how far off it is.

python tests/benchmarks/growth_check.py --output tests/benchmarks/results/growth.json

Writes what growth.py starts from into growth.json beside it, and the predictions into --output.
Everything is read from result files; nothing is timed here. A prediction is made of the row on the
fewest GPUs and compared with those on more. What it leaves out, the wait for the slowest GPU, is
fitted once for each file, on two GPUs, and checked on those that are left; nodes_gpu, which has no
such rows, takes ddp_gpu's.
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
    """Return the values of a row: throughput.py has their medians, fsdp.py the runs."""
    if "median" in row:
        return row["median"]
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


def step_ms(row: dict) -> float:
    """Return the milliseconds of a step, less those in which it waited for data."""
    values = median_run(row)
    return values["time/total"] - values.get("time/data", 0.0)


def seconds_of(values: dict) -> list[float]:
    return [values[f"time/{phase}"] / 1000 for phase in PHASES]


def works() -> dict:
    """Return the two models in bfloat16, from the result file that each names.

    The 8B model does not fit on one GPU. Its passes are those of a step on two, less what two send
    that nothing hides, and its update that of the part of one, as often as there are parts.
    """
    rows = read("comparison_gpu")["rows"]
    (row,) = (r for r in rows if (r["strategy"], r["precision"]) == ("single", "bf16"))
    small = [row["summary"]["speed"]["ms"][phase] / 1000 for phase in PHASES]
    gpt2 = growth.work_of("ddp", "gpt2", 1024, 64 * 1024, *small)
    eight, _ = on_two(growth.Cluster(measured_bus()), "bf16, compiled")
    return {
        GPT2: {"work": asdict(gpt2), "from": "comparison_gpu"},
        EIGHT: {"work": asdict(eight), "from": "fsdp_precision"},
    }


def on_two(cluster, label: str):
    """Return the Work of a step of the 8B model, from a row on two GPUs, and the row."""
    row = row_of("fsdp_precision", label)
    tokens = 8192 * (2 if "2 sequences" in label else 1)
    eight = growth.work_of("fsdp", "llama-3.1-8b", 8192, tokens, *seconds_of(median_run(row)))
    sent = growth.exposed(eight, row["gpus"], cluster)
    return replace(eight, backward=eight.backward - sent, update=row["gpus"] * eight.update), row


def row_of(file: str, label: str) -> dict:
    (row,) = (row for row in read(file)["rows"] if row["label"] == label)
    return row


def series(cluster, source: str, label: str, work, rows: dict[int, dict]) -> list[dict]:
    """Predict a file's rows by number of GPUs from the one on one GPU; fit the wait on two."""
    base = step_ms(rows[1]) / 1000
    passes = base - work.update
    scale = passes / (work.forward + work.backward)  # with what no phase holds
    work = replace(work, forward=scale * work.forward, backward=scale * work.backward)
    two = step_ms(rows[2]) / 1000
    wait = two - growth.step(work, 2, cluster)
    found = []
    for n in sorted(set(rows) - {1}):
        measured = step_ms(rows[n])
        entry = {
            "source": source,
            "label": label,
            "gpus": n,
            "measured_ms": measured,
            "ideal_ms": 1000 * growth.step(work, n, cluster),
        }
        if n != 2:
            entry["with_wait_ms"] = 1000 * growth.step(work, n, cluster, wait)
        found.append(entry)
    return found


def checks(cluster) -> list[dict]:
    """Return measured and predicted times of what there is on several GPUs."""
    ddp = {row["label"]: row for row in read("ddp_gpu")["rows"]}
    rows = {n: ddp[f"02-ddp on {n}"] for n in (1, 2, 4, 8)}
    work = growth.work_of("ddp", "gpt2", 1024, 65536, *seconds_of(median_run(rows[1])))
    found = series(cluster, "ddp_gpu", "chapter 2, TF32", work, rows)
    nodes = {row["label"]: row for row in read("nodes_gpu")["rows"]}
    mixed = {1: rows[1], 2: rows[2], 4: nodes["03-multi-node on 4"]}
    label = "chapter 3, TF32, from ddp_gpu's one GPU"
    found += series(cluster, "nodes_gpu", label, work, mixed)[1:]
    fsdp = {row["label"]: row for row in read("fsdp_gpt2")["rows"]}
    for chapter, strategy in (("03-multi-node", "ddp"), ("04-fsdp", "fsdp")):
        rows = {
            n: row for n in (1, 2, 4, 8) if measured_runs(row := fsdp.get(f"{chapter} on {n}", {}))
        }
        work = growth.work_of(strategy, "gpt2", 1024, 65536, *seconds_of(median_run(rows[1])))
        label = f"chapter {chapter[1]}, TF32"
        found += series(cluster, "fsdp_gpt2", label, replace(work, gathered=4), rows)
    mixed = {row["label"]: row for row in read("gpt2_bf16_scaling")["rows"]}
    for name, strategy in (("baseline", "ddp"), ("05-mixed-precision", "fsdp")):
        rows = {n: mixed[f"{name} on {n}"] for n in (1, 2)}
        phases = seconds_of(median_run(mixed["05-mixed-precision on 1"]))  # a bare loop has none
        work = growth.work_of(strategy, "gpt2", 1024, 65536, *phases)
        label = f"{'bare loop' if strategy == 'ddp' else 'chapter 5'}, bf16"
        found += series(cluster, "gpt2_bf16_scaling", label, work, rows)
    return found + from_two_to_four(cluster) + differences(cluster)


def from_two_to_four(cluster) -> list[dict]:
    """Predict the 8B model on four GPUs from two: what no phase holds takes as long as there."""
    found = []
    for precision in ("bf16, compiled", "fp8, compiled"):
        for label in (precision, f"{precision}, 2 sequences"):
            work, two = on_two(cluster, label)
            four = row_of("fsdp_precision_4", label)
            faster = growth.step(work, two["gpus"], cluster) - growth.step(
                work, four["gpus"], cluster
            )
            found.append(
                {
                    "source": "fsdp_precision_4",
                    "label": f"8B: {label}, from two GPUs",
                    "gpus": four["gpus"],
                    "measured_ms": step_ms(four),
                    "ideal_ms": step_ms(two) - 1000 * faster,
                }
            )
    return found


def differences(cluster) -> list[dict]:
    """Return what sending adds to a pass or a step, where a file has both with and without."""
    buckets = read("buckets_gpu")
    n, ms = buckets["world_size"], {name: each["median"] for name, each in buckets["ms"].items()}
    nothing = ms["default, nothing sent"] / 1000
    # A third of a pass is forward, two thirds are backward: appendix B of arxiv.org/abs/2204.02311.
    work = growth.work_of("ddp", "gpt2", 1024, 16384, nothing / 3, 2 * nothing / 3, 0.0)
    label = "chapter 2's buckets, a pass of 16 x 1024, TF32"
    found = [
        {
            "source": "buckets_gpu",
            "label": f"{label}, default",
            "gpus": n,
            "measured_ms": ms["default"],
            "ideal_ms": 1000 * growth.step(work, n, cluster),
        },
        {
            "source": "buckets_gpu",
            "label": f"{label}, all in one",
            "gpus": n,
            "measured_ms": ms["all in one"],
            "ideal_ms": ms["all in one, nothing sent"]
            + 1000 * growth.all_reduce(buckets["gradient_bytes"], n, cluster),
        },
    ]
    rows = {row["label"]: row for row in read("fsdp_options")["rows"]}
    for one, other in (
        ("full", "full, no reshard"),
        ("full, 2 micro-batches, all reduced", "full, 2 micro-batches"),
    ):
        with_more, without = (median_run(rows[name])["time/total"] for name in (one, other))
        micro = 2 if "2 micro" in one else 1
        work = growth.work_of(
            "fsdp", "llama-3.1-8b", 8192, 8192, *seconds_of(median_run(rows[one]))
        )
        work = replace(
            work, gathered=4, forward=work.forward / micro, backward=work.backward / micro
        )
        found.append(
            {
                "source": "fsdp_options",
                "label": f"8B, TF32: {one}, from {other.removeprefix('full, ')}",
                "gpus": rows[one]["gpus"],
                "measured_ms": with_more,
                "ideal_ms": without + 1000 * hidden_behind(work, rows[one]["gpus"], cluster, micro),
            }
        )
    return found


def hidden_behind(work, n: int, cluster, micro: int) -> float:
    """Return the seconds that gathering again, or one more sum of gradients, adds to a step."""
    gather = scatter = growth.one_way(4 * work.layer, n, cluster)
    block = (1 - 6 * work.embedding / work.flops) / work.layers * work.backward
    if micro == 1:  # the sum is there in both
        return work.layers * (max(0.0, gather + scatter - block) - max(0.0, scatter - block))
    root = growth.one_way(4 * work.root, n, cluster)
    return root + work.layers * max(0.0, gather + scatter - block)


def waited(work, cluster) -> float:
    """Return the seconds that two GPUs with DDP wait for each other in a step in bfloat16.

    It is what the second GPU costs the bare loop, less what nothing hides of the sending.
    """
    steps = {row["label"]: step_ms(row) for row in read("gpt2_bf16_scaling")["rows"]}
    cost = (steps["baseline on 2"] - steps["baseline on 1"]) / 1000
    return cost - growth.exposed(work, 2, cluster)


def paper(bus: float, inputs: dict) -> list[dict]:
    """Return a row for each model, port and number of GPUs.

    with_wait: tokens/s against as many times one GPU's, if GPUs with DDP wait for each other as two
    were seen to; None where that is not known.
    """
    found = []
    for title, given in inputs.items():
        work = growth.Work(**given["work"])
        for port, rate in PORTS.items():
            cluster = growth.Cluster(bus, rate)
            wait = waited(work, cluster) if work.strategy == "ddp" else None
            for n in growth.GPUS:
                if n <= cluster.node and port != next(iter(PORTS)):
                    continue  # no network there
                per_gpu = work.tokens / growth.step(work, n, cluster)
                one, several = (growth.step(work, k, cluster) for k in (1, n))
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
                        "with_wait": one / (several + wait) if wait and n > 1 else None,
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
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure, the same file each time."""
    with matplotlib.rc_context({"svg.hashsalt": "growth"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--chart", type=Path, default=FIGURE, help="svg file to draw into")
    args = parser.parse_args()
    bus, inputs = measured_bus(), works()
    for title, each in inputs.items():
        each["global_batch"], each["seq_length"] = BATCHES[title]
    compared = checks(growth.Cluster(bus))
    for row in compared:
        best = row.get("with_wait_ms", row["ideal_ms"])
        print(f"{row['label'][:52]:52} {row['gpus']:2} {row['measured_ms']:9.1f} {best:9.1f}")
    growth.INPUTS.write_text(json.dumps({"bus": bus, "works": inputs}, indent=1) + "\n")
    print(f"wrote {growth.INPUTS}")
    results = {
        "checks": compared,
        "paper": paper(bus, inputs),
        "limits": limits(bus, inputs),
    }
    write_result(args.output, results)
    draw(bus, inputs, args.chart)


if __name__ == "__main__":
    main()

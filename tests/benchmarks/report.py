"""The tables of the pages, made from result files.

python tests/benchmarks/report.py          writes the tables into the pages
python tests/benchmarks/report.py --check  ends with status 1 if a page has others

A page holds a table between the lines `<!-- table: NAME -->` and `<!-- end -->`. NAME is a function
below, and what it reads is all that the table's numbers come from.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RESULTS = "tests/benchmarks/results"
GIB = 2**30
DTYPES = ("float32", "float16", "bfloat16")
TABLES: dict[str, Callable[[], list[str]]] = {}


def table(*sources: str, name: str | None = None) -> Callable:
    """Register a table; it gets the content of its sources, which its page must link to.

    name: in the pages, if it is not the function's.
    """

    def register(rows: Callable) -> Callable:
        def read() -> list[str]:
            return rows(*(content(REPOSITORY / source) for source in sources))

        read.sources = sources
        TABLES[name or rows.__name__] = read
        return rows

    return register


def content(path: Path) -> object:
    """Return the results of a result file, the lines of a metrics file, the text of another."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)["results"] if path.suffix == ".json" else text


def result(name: str) -> str:
    return f"{RESULTS}/{name}.json"


def spread(values: list[float], digits: int = 1) -> str:
    """Return the median and, in brackets, the smallest and the largest value."""
    median = statistics.median(values)
    return f"{median:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def number(values: list[float], digits: int = 1) -> str:
    """Return the only value, or what spread says of several."""
    return spread(values, digits) if len(values) > 1 else f"{values[0]:,.{digits}f}"


def fill(text: str) -> str:
    """Return a page's text with all of its tables made anew."""

    def write(match: re.Match) -> str:
        rows = "\n".join(TABLES[match[1]]())
        return f"<!-- table: {match[1]} -->\n{rows}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", write, text, flags=re.DOTALL)


def pages() -> list[Path]:
    chapters = (REPOSITORY.glob(f"[0-9][0-9]-*/{name}") for name in ("*.md", "solutions/*.md"))
    return [REPOSITORY / "README.md", *sorted(path for found in chapters for path in found)]


# --- front page ---

MAKE_TRAIN = "01-single-gpu/recorded/make-train.metrics.jsonl"
LAUNCH = "02-ddp/recorded/launch.metrics.jsonl"
JOB = "03-multi-node/recorded/job.metrics.jsonl"
SHARDED = "04-fsdp/recorded/launch.metrics.jsonl"
MIXED = "05-mixed-precision/recorded/launch.metrics.jsonl"
MEASURED = ("overhead_cpu", "overhead_gpu", "profile_gpt2", "startup_cpu")
MEASURED += ("fsdp_options", "predictions")
EAGER = "full, not compiled"  # the row of fsdp_options that the front page shows


@table(MAKE_TRAIN, LAUNCH, JOB, SHARDED, MIXED, *map(result, MEASURED))
def measured(
    make_train,
    launch,
    job,
    sharded,
    mixed,
    overhead_cpu,
    overhead_gpu,
    profile_gpt2,
    startup_cpu,
    options,
    predictions,
) -> list[str]:
    def link(name: str) -> str:
        return f"[{name}.json]({result(name)})"

    last = f"[make-train.metrics.jsonl]({MAKE_TRAIN})"
    runs = (make_train, launch, job, sharded, mixed)
    alone, *others = [[line["loss"] for line in run if "loss" in line] for run in runs]
    ranks, nodes, shards, half = (
        max(abs(two / one - 1) for one, two in zip(alone, other, strict=True)) for other in others
    )
    ours = profile_gpt2["transformers, no mask"]["tokens_per_s"]
    first, second = (startup_cpu[key]["median"] for key in ("first", "second"))
    peaks = {row["label"]: measured_peak(row) for row in options["rows"]}
    both = predictions["fsdp_options"].get(EAGER, {}).get("peak_gib"), peaks.get(EAGER)
    rows = [
        "| what | result | from |",
        "|---|---:|---|",
        "| evaluation of the default run, two CPU cores | "
        f"{make_train[-1]['bits_per_byte']:.3f} bits per byte | {last} |",
        f"| the {len(alone)} logged losses of chapter 2 on two processes against chapter 1's, "
        f"relative difference | at most {ranks:.1e} | [launch.metrics.jsonl]({LAUNCH}) |",
        "| the same of chapter 3 on two nodes of two processes, stopped on the way, started again "
        f"by Slurm | at most {nodes:.1e} | [job.metrics.jsonl]({JOB}) |",
        f"| the same of chapter 4, sharded over two processes | at most {shards:.1e} | "
        f"[launch.metrics.jsonl]({SHARDED}) |",
        f"| the same of chapter 5, in bfloat16 | at most {half:.1e} | "
        f"[launch.metrics.jsonl]({MIXED}) |",
        "| chapter 1's step against a bare loop, two CPU cores | "
        f"x {overhead_cpu['ratio_median']:.3f} | {link('overhead_cpu')} |",
        "| the same on an H200, GPT-2 124M, bfloat16 weights, compiled, 64 x 1024 tokens | "
        f"x {overhead_gpu['ratio_median']:.3f} | {link('overhead_gpu')} |",
        "| GPT-2 124M of transformers against a hand-written one on an H200 | "
        f"{ours:,} against {profile_gpt2['handwritten']['tokens_per_s']:,} tokens/s | "
        f"{link('profile_gpt2')} |",
        "| preparing the built-in corpus, first and second start | "
        f"{first:.1f} s, {second:.2f} s | {link('startup_cpu')} |",
    ]
    if all(both):
        rows.append(
            "| most memory of a step of an 8B model in float32 on 4 H200, 8192 tokens each, full "
            "activation checkpointing, predicted and measured | "
            f"{both[0]:.1f} and {both[1]:.1f} GiB | {link('predictions')}, {link('fsdp_options')} |"
        )
    return rows


@table()
def chapters() -> list[str]:
    what = {
        "01-single-gpu": "the whole training loop on one device: data, schedule, accumulation, "
        "evaluation, a run that resumes exactly",
        "02-ddp": "all GPUs of a machine, with the same losses: process group, "
        "DistributedDataParallel, gradients averaged while they are computed",
        "03-multi-node": "several nodes, from Slurm, ssh, mpirun or torchrun: a stop on a signal, "
        "requeue, nodes that go and come, who waits for whom",
        "04-fsdp": "a model too large for one GPU: weights, gradients, moments sharded with FSDP2, "
        "activations recomputed, checkpoints written while it trains on",
        "05-mixed-precision": "products in 16 or 8 bits, weights and sums in 32: bfloat16, float16 "
        "with a loss scale, fp8, and a comparison of all strategies and precisions",
    }
    rows = ["| chapter | what it adds | lines | diff |", "|---|---|---:|---:|"]
    before = None
    for path in sorted(REPOSITORY.glob("[0-9][0-9]-*/train_llm.py")):
        chapter = path.parent.name
        lines = len(path.read_text().splitlines())
        diff = "+{} -{}".format(*diffstat(before, path)) if before else ""
        rows.append(f"| [{chapter}]({chapter}/README.md) | {what[chapter]} | {lines} | {diff} |")
        before = path
    return rows


BARE_LOOP = "tests/benchmarks/baseline.py"


@table(*map(result, ("ddp_gpu", "nodes_gpu", "fsdp_gpt2", "gpt2_bf16_scaling")))
def reached(ddp_gpu, nodes_gpu, fsdp_gpt2, bf16) -> list[str]:
    """Return each chapter on one GPU and on the most that it was measured on."""
    found = {}  # by chapter and GPUs: tokens/s, GiB
    for row in fsdp_gpt2["rows"]:
        medians = [
            statistics.median(run[key] for run in measured_runs(row))
            for key in ("tokens_per_s", "peak_mem_gib")
        ]
        found[row["chapter"], row["gpus"]] = medians
    for row in (*nodes_gpu["rows"], *ddp_gpu["rows"], *bf16["rows"]):
        medians = [row["median"][key] for key in ("tokens_per_s", "peak_mem_gib")]
        found[row["chapter"], row["devices"]] = medians
    rows = [
        "| chapter | command | one GPU, tokens/s | GiB | several GPUs, tokens/s | GiB each |",
        "|---|---|---:|---:|---:|---:|",
    ]
    commands = {
        "01-single-gpu": "python 01-single-gpu/train_llm.py",
        "03-multi-node": "bash 03-multi-node/launch_torchrun.sh",
    }
    for chapter in sorted({name for name, _ in found} - {BARE_LOOP}):
        alone = found.get((chapter, 1))
        most = max(gpus for name, gpus in found if name == chapter)
        cells = [f"{alone[0]:,.0f}", f"{alone[1]:.1f}"]
        several = found[chapter, most]
        on = f"{several[0]:,.0f} on {most}"
        cells += [on, f"{several[1]:.1f}"] if most > 1 else ["", ""]
        command = commands.get(chapter, f"bash {chapter}/launch.sh")
        rows.append(f"| {chapter} | `{command}` | {' | '.join(cells)} |")
    return rows


def diffstat(before: Path, after: Path) -> tuple[int, int]:
    """Return how many lines git counts as added and as removed."""
    command = ["git", "diff", "--no-index", "--numstat", str(before), str(after)]
    done = subprocess.run(command, capture_output=True, text=True)
    added, removed = done.stdout.split()[:2]
    return int(added), int(removed)


# --- chapter 1 ---


@table(MAKE_TRAIN)
def phases(make_train) -> list[str]:
    what = {
        "data": "the next micro-batches are fetched and copied to the device",
        "forward": "the loss is computed",
        "backward": "gradients are computed and added up",
        "update": "clipping, AdamW, schedule",
        "total": "",
    }
    rows = ["| phase | what happens | median, ms |", "|---|---|---:|"]
    for phase, text in what.items():
        times = [line[f"time/{phase}"] for line in make_train if "loss" in line]
        rows.append(f"| {phase} | {text} | {statistics.median(times):.1f} |")
    return rows


@table(result("step_memory"))
def memory(step_memory) -> list[str]:
    n, per_token = step_memory["parameters"], step_memory["activations_bytes_per_token"]
    assert step_memory["weights_bytes"] == step_memory["gradients_bytes"] == 4 * n
    assert step_memory["moments_bytes"] == 8 * n
    rows = ["| part | arithmetic | GiB |", "|---|---|---:|"]
    for part, factor in (("weights", 4), ("gradients", 4), ("two moments", 8)):
        rows.append(f"| {part} | {factor} x {n:,} | {factor * n / GIB:.2f} |")
    for batch in (1, 16, 64):
        tokens = 1024 * batch
        rows.append(
            f"| activations, {batch} x 1024 tokens | {per_token:,} x {tokens:,} | "
            f"{per_token * tokens / GIB:.2f} |"
        )
    return rows


@table(result("overhead_cpu"), result("overhead_gpu"))
def overhead(cpu, gpu) -> list[str]:
    rows = [
        "| device | model, tokens per step | chapter, ms | bare loop, ms | ratio of pairs, median "
        "| waiting for data |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for device, found, what in (
        ("2 CPU cores", cpu, "gpt2-tiny, 3,072"),
        ("H200", gpu, "GPT-2 124M, 65,536"),
    ):
        rows.append(
            f"| {device} | {what} | {found['chapter_ms_per_step']:.1f} | "
            f"{found['bare_ms_per_step']:.1f} | {found['ratio_median']:.3f} "
            f"({found['ratio_quartiles'][0]:.3f} to {found['ratio_quartiles'][2]:.3f}) | "
            f"{found['data_share']:.1%} |"
        )
    return rows


@table(result("profile_gpt2"), result("profile_gpt2_523"))
def attention_masks(profile_gpt2, with_523) -> list[str]:
    names = {
        "handwritten": "written by hand (plain PyTorch modules)",
        "handwritten, Linear1D": "the same with weights stored as `Conv1D` does",
        "transformers": "transformers, default attention",
        "transformers, no mask": "transformers, no mask (what this chapter uses)",
        "transformers, no mask, own loss": "the same, loss written by hand",
        "transformers, per block": "transformers, default, compiled block by block",
    }
    rows = [
        "| model | ms per step | tokens/s | with transformers 5.23: ms per step | tokens/s |",
        "|---|---:|---:|---:|---:|",
    ]
    for variant, name in names.items():
        cells = [name]
        for found in (profile_gpt2[variant], with_523[variant]):
            cells += [spread(found["ms_per_step"]), f"{found['tokens_per_s']:,}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


# --- chapter 2 ---


@table(MAKE_TRAIN, LAUNCH)
def same_losses(alone, ranks) -> list[str]:
    by_step = [{line["step"]: line for line in run if "loss" in line} for run in (alone, ranks)]
    rows = [
        "| step | chapter 1 | chapter 2, 2 ranks | relative difference |",
        "|---:|---:|---:|---:|",
    ]
    for step in (10, 20, 50, 100, 200, max(by_step[0])):
        one, two = (run[step]["loss"] for run in by_step)
        rows.append(f"| {step} | {one:.7f} | {two:.7f} | {abs(two / one - 1):.1e} |")
    return rows


@table(result("ddp_cpu"))
def ddp_cpu(found) -> list[str]:
    rows = [
        "| chapter | processes | tokens/s | ms per step | of it backward |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        speeds = [run["tokens_per_s"] for run in row["runs"]]
        times = row["median"]
        rows.append(
            f"| {row['chapter']} | {row['devices']} | {spread(speeds, 0)} | "
            f"{times['time/total']:.1f} | {times['time/backward']:.1f} |"
        )
    return rows


@table(result("ddp_gpu"))
def ddp_gpu(found) -> list[str]:
    """Return a row for each configuration; efficiency against the first one, on one device."""
    rows = [
        "| chapter | GPUs | tokens/s | efficiency | ms per step | of it backward | MFU | GiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    reference = found["rows"][0]["median"]["tokens_per_s"]
    for row in found["rows"]:
        speeds = [run["tokens_per_s"] for run in row["runs"]]
        median = row["median"]
        rows.append(
            f"| {row['chapter']} | {row['devices']} | {spread(speeds, 0)} | "
            f"{median['tokens_per_s'] / row['devices'] / reference:.1%} | "
            f"{median['time/total']:.1f} | {median['time/backward']:.1f} | "
            f"{median['mfu']:.1%} | {median['peak_mem_gib']:.1f} |"
        )
    return rows


@table(result("overhead_cpu"), result("overhead_ddp_cpu"))
def overhead_ddp(alone, ddp) -> list[str]:
    rows = ["| one process, against a bare loop | ratio of pairs, median |", "|---|---:|"]
    for chapter, found in (("01-single-gpu", alone), ("02-ddp", ddp)):
        low, _, high = found["ratio_quartiles"]
        rows.append(f"| {chapter} | {found['ratio_median']:.3f} ({low:.3f} to {high:.3f}) |")
    return rows


BUCKETS = ("1 MiB", "5 MiB", "default", "100 MiB", "all in one")


def passes(found: dict, name: str, digits: int = 0) -> str:
    each = found["ms"][name]
    low, _, high = each["quartiles"]
    return f"{each['median']:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def exposed(found: dict, digits: int) -> list[str]:
    rows = ["| buckets | ms | nothing sent, ms | exposed, ms |", "|---|---:|---:|---:|"]
    for name in BUCKETS:
        nothing = f"{name}, nothing sent"
        difference = found["ms"][name]["median"] - found["ms"][nothing]["median"]
        rows.append(
            f"| {name} | {passes(found, name, digits)} | {passes(found, nothing, digits)} | "
            f"{difference:,.{digits}f} |"
        )
    rows.append(f"| the all-reduce alone | {passes(found, 'all-reduce alone', digits)} | | |")
    return rows


def micro_batches(found: dict, digits: int) -> list[str]:
    rows = ["| gradients of 4 micro-batches | ms |", "|---|---:|"]
    for name in ("all sent", "no_sync for 3", "nothing sent"):
        rows.append(f"| {name} | {passes(found, f'4 micro-batches, {name}', digits)} |")
    return rows


@table(result("buckets_cpu"))
def buckets_cpu(found) -> list[str]:
    return exposed(found, digits=0)


@table(result("buckets_gpu"))
def buckets_gpu(found) -> list[str]:
    return exposed(found, digits=1)


@table(result("buckets_cpu"))
def no_sync_cpu(found) -> list[str]:
    return micro_batches(found, digits=0)


@table(result("buckets_gpu"))
def no_sync_gpu(found) -> list[str]:
    return micro_batches(found, digits=1)


@table(result("classifier_gpu"))
def classifier_gpu(found) -> list[str]:
    rows = [
        "| row | tokens/s | ms per step | GiB | test accuracy | bag of words | largest class |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        runs = row["runs"]
        reports = [run["report"] for run in runs]
        models = ("this model", "bag of words", "largest class")
        accuracies = (number([each[model]["accuracy"] for each in reports], 3) for model in models)
        cells = [
            number([run["tokens_per_s"] for run in runs], 0),
            number([run["time/total"] for run in runs], 1),
            number([run["peak_mem_gib"] for run in runs], 1),
            *accuracies,
        ]
        rows.append(f"| {row['row']} | {' | '.join(cells)} |")
    return rows


@table(result("zero1_2"), result("zero1_4"))
def zero1(two, four) -> list[str]:
    rows = [
        "| optimizer | ranks | weights | gradients | moments | sum | step, ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in ("AdamW", "AdamW with ZeRO-1"):
        for found in (two, four):
            most = max(found[name]["bytes_by_rank"], key=lambda held: sum(held.values()))
            cells = [f"{n / GIB:.2f}" for n in (*most.values(), sum(most.values()))]
            ms = spread(found[name]["step_ms"], 0)
            rows.append(f"| {name} | {found['world_size']} | {' | '.join(cells)} | {ms} |")
    return rows


@table(result("zero1_gpu"))
def zero1_gpu(found) -> list[str]:
    """Return the rank that holds most and the one that holds least; equal ones in one row."""
    rows = [
        "| optimizer | rank that holds | weights | gradients | moments | sum | step, ms |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name in ("AdamW", "AdamW with ZeRO-1"):
        ranks = sorted(found[name]["bytes_by_rank"], key=lambda held: sum(held.values()))
        ends = {"least": ranks[0], "most": ranks[-1]}
        if ranks[0] == ranks[-1]:
            ends = {"each": ranks[0]}
        for which, held in ends.items():
            cells = [f"{n / GIB:.2f}" for n in (*held.values(), sum(held.values()))]
            ms = "" if which == "least" else spread(found[name]["step_ms"])
            rows.append(f"| {name} | {which} | {' | '.join(cells)} | {ms} |")
    return rows


# --- chapter 3 ---


@table(result("nodes_gpu"))
def nodes_gpu(found) -> list[str]:
    rows = [
        "| chapter | GPUs | tokens/s | ms per step | of it wait | of it backward |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        times = row["median"]
        wait = f"{times['time/wait']:.1f}" if "time/wait" in times else ""
        rows.append(
            f"| {row['chapter']} | {row['devices']} | "
            f"{spread([run['tokens_per_s'] for run in row['runs']], 0)} | "
            f"{times['time/total']:.1f} | {wait} | {times['time/backward']:.1f} |"
        )
    return rows


@table(result("recovery_cpu"))
def recovery(found) -> list[str]:
    what = {
        "signal": ("the signal before the end of the time", "the script; the queue"),
        "preemption": ("a job that goes first", "the script; the queue"),
        "worker": ("`kill -9` of a rank", "the other rank; torchrun"),
        "torchrun": ("`kill -9` of a torchrun", "srun; the queue"),
        "cable_second": ("a cable out for a second", "nobody; nobody"),
        "cable": ("a cable out for good, `--nodes=1-2`", "Slurm; the queue"),
    }
    rows = [
        "| what happens | who notices; who starts it again | seconds without a step | steps lost |",
        "|---|---|---:|---:|",
    ]
    for event, (name, who) in what.items():
        runs = found["runs"][event]
        lost = sorted({run["steps_lost"] for run in runs})
        shown = f"{lost[0]}" if len(lost) == 1 else f"{lost[0]} to {lost[-1]}"
        seconds = spread([run["seconds"] for run in runs])
        rows.append(f"| {name} | {who} | {seconds} | {shown} |")
    return rows


@table(result("soak"))
def soak(found) -> list[str]:
    what = {
        "worker": "`kill -9` of a rank",
        "worker twice": "the same, and of one that starts in its place",
        "launcher": "`kill -9` of a torchrun",
        "save, worker": "a rank, during a save or just after",
        "save, launcher": "a torchrun, likewise",
        "cable, short": "a cable out for 0.3 to 3 seconds",
        "cable, long": "a cable out until Slurm misses the node",
    }
    rows = [
        "| what is hit | hits | who starts it again | seconds without a step | steps lost |",
        "|---|---:|---|---:|---:|",
    ]
    for kind, name in what.items():
        each = found["kinds"][kind]
        again = sorted(each["started_again_by"].items(), key=lambda item: -item[1])
        by = ", ".join(who if len(again) == 1 else f"{who} {n}" for who, n in again)
        if each["stages"]:
            name += f" ({', '.join(f'{stage} {n}' for stage, n in each['stages'].items())})"
        cells = [str(each["hits"]), by, spread(each["standstill_s"]), spread(each["steps_lost"], 0)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows.append(
        f"| all, in {len(found['runs'])} runs: {found['steps_compared']:,} steps compared, "
        f"{found['steps_trained']:,} trained, {found['complaints']} missing, doubled or different "
        f"| {found['hits']} | | | |"
    )
    return rows


# --- chapter 3, determinism ---

ALGORITHMS = {
    "default": "as they come",
    "deterministic": "deterministic",
    "workspace": "deterministic, `CUBLAS_WORKSPACE_CONFIG`",
}
CHANGES = {
    "nothing": "nothing",
    "one thread": "one thread instead of two",
    "no TF32": "strict float32 instead of TF32",
    "two micro-batches": "two micro-batches of 4",
    "order within the batch": "the sequences of each batch in reversed order",
    "seed": "another seed for the weights",
}


def determinism_changes(found) -> list[str]:
    rows = [
        "| what changes | first step with another loss | largest relative difference |",
        "|---|---:|---:|",
    ]
    for key, name in CHANGES.items():
        if key in found["changes"]:
            each = found["changes"][key]
            rows.append(f"| {name} | {each['first_step'] or 'none'} | {each['largest']:.1e} |")
    return rows


def determinism_steps(found) -> list[str]:
    rows = [
        "| model | tokens per step | algorithms | ms per step | two processes agree "
        "| losses against the first row |",
        "|---|---:|---|---:|---|---:|",
    ]
    for model, modes in found["models"].items():
        sequences, length = found["batches"][model]
        for mode, each in modes.items():
            largest = each["as_default"]["largest"]
            cells = [
                f"{model} | {sequences * length:,} | {ALGORITHMS[mode]} | {number(each['ms'])}",
                ("to the last bit" if each["runs_agree"] else "no") if each["ms"][1:] else "",
                f"{largest:.1e}" if largest else "equal",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def determinism_operations(found) -> list[str]:
    modes = [mode for mode in ALGORITHMS if mode in next(iter(found["models"].values()))][:2]
    head = "".join(f" | {ALGORITHMS[mode]}, ms | equal calls" for mode in modes)
    rows = [f"| operation{head} |", "|---|" + "---:|---|" * len(modes)]
    for name, by_mode in found["operations"].items():
        cells = []
        for mode in modes:
            each = by_mode[mode]
            if "error" in each:
                cells += ["", "refused: it has none"]
            else:
                cells += [number(each["ms"], 3), "yes" if each["same"] else "no"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


# --- chapter 3, data loading ---


def data_loading(found) -> list[str]:
    rows = [
        "| data | workers | batches ahead | waits for data, ms | ms per step | tokens/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        ahead = row["workers"] * (row["prefetch"] or 0)
        cells = [
            number([run[key] for run in row["runs"]], digits)
            for key, digits in (("time/data", 1), ("time/total", 1), ("tokens_per_s", 0))
        ]
        rows.append(f"| {row['data']} | {row['workers']} | {ahead} | {' | '.join(cells)} |")
    return rows


def data_starts(found) -> list[str]:
    rows = [
        "| workers | persistent | first epoch, ms | later ones, ms |",
        "|---:|---|---:|---:|",
    ]
    for row in found["starts"]:
        first, *later = row["ms"]
        kept = ("yes" if row["persistent"] else "no") if row["workers"] else ""
        rows.append(f"| {row['workers']} | {kept} | {first:.1f} | {spread(later)} |")
    return rows


def data_disk(found) -> list[str]:
    rows = [
        "| file | a block, median, ms | the slowest, ms | all 500, ms |",
        "|---|---:|---:|---:|",
    ]
    for state, (median, total, most) in found["disk_ms"].items():
        rows.append(f"| {state} | {median:.3f} | {most:.1f} | {total:,.0f} |")
    return rows


def data_copies(found) -> list[str]:
    rows = [
        "| copied to the GPU, MiB | memory | the host is held up for, ms | the copy takes, ms "
        "| GiB/s |",
        "|---:|---|---:|---:|---:|",
    ]
    for row in found["copies"]:
        memory = "pinned" if row["pinned"] else "not pinned"
        rate = row["mib"] / 1024 / (row["ms"] / 1000)
        cells = f"{row['host_ms']:.3f} | {row['ms']:.3f} | {rate:.1f}"
        rows.append(f"| {row['mib']} | {memory} | {cells} |")
    return rows


def table_of(rows: Callable, measured: str, device: str) -> None:
    """Register rows under its own name and the device's, if the device has been measured."""
    source = result(f"{measured}_{device}")
    if (REPOSITORY / source).exists():
        table(source, name=f"{rows.__name__}_{device}")(rows)


for device in ("cpu", "gpu"):
    for rows in (determinism_changes, determinism_steps, determinism_operations):
        table_of(rows, "determinism", device)
    for rows in (data_loading, data_starts, data_disk):
        table_of(rows, "data_loading", device)
table_of(data_copies, "data_loading", "gpu")


# --- chapter 4 ---


def measured_runs(row: dict) -> list[dict]:
    """Return the runs of a row of fsdp.py that came to an end."""
    return [run for run in row.get("runs", []) if run and "failed" not in run]


def measured_peak(row: dict) -> float | None:
    """Return the most GiB that a row of fsdp.py held, of a search the largest that trained."""
    if "tries" in row:
        tries = {each["blocks"]: each.get("peak_mem_gib") for each in row["tries"]}
        return tries.get(row.get("blocks"))
    peaks = [run["peak_mem_gib"] for run in measured_runs(row)]
    return statistics.median(peaks) if peaks else None


@table(result("fsdp_options"), result("predictions"))
def fsdp_options(found, predictions) -> list[str]:
    rows = [
        "| option | tokens/s per GPU | ms per step | peak, GiB | predicted, GiB "
        "| measured against it |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        runs = measured_runs(row)
        expected = predictions["fsdp_options"].get(row["label"], {}).get("peak_gib")
        predicted = f"{expected:.1f}" if expected else ""
        if runs:
            peak = measured_peak(row)
            cells = [
                number([run["tokens_per_s_per_device"] for run in runs], 0),
                number([run["time/total"] for run in runs], 0),
                f"{peak:.1f}",
                predicted,
                f"{peak / expected - 1:+.1%}" if expected else "",
            ]
        elif None in row["runs"]:
            cells = ["out of memory", "", "", predicted, ""]
        else:
            continue
        rows.append(f"| {row['label']} | {' | '.join(cells)} |")
    return rows


@table(result("fsdp_gpt2"))
def fsdp_gpt2(found) -> list[str]:
    rows = [
        "| GPUs | tokens/s per GPU, chapter 3 | chapter 4 | ratio | peak, GiB, chapter 3 "
        "| chapter 4 |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    both = {(row["gpus"], row["chapter"]): measured_runs(row) for row in found["rows"]}
    for gpus in sorted({gpus for gpus, _ in both}):
        pair = [both.get((gpus, chapter), []) for chapter in ("03-multi-node", "04-fsdp")]
        if not all(pair):
            continue
        speeds = [[run["tokens_per_s_per_device"] for run in runs] for runs in pair]
        ddp, fsdp = map(statistics.median, speeds)
        peaks = [statistics.median(run["peak_mem_gib"] for run in runs) for runs in pair]
        cells = [*(number(each, 0) for each in speeds), f"{fsdp / ddp:.3f}"]
        cells += [f"{peak:.1f}" for peak in peaks]
        rows.append(f"| {gpus} | {' | '.join(cells)} |")
    return rows


LARGEST = tuple(f"fsdp_largest{name}" for name in ("", "_8", "_ddp", "_full", "_offload"))


@table(*map(result, LARGEST), result("predictions"))
def fsdp_largest(*found: dict) -> list[str]:
    *searches, predictions = found
    rows = [
        "| strategy | GPUs | most blocks that trained | predicted | parameters, billions "
        "| peak, GiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    tried = [
        (row, predictions[name].get(row["label"]))
        for name, search in zip(LARGEST, searches, strict=True)
        for row in search["rows"]
    ]
    for row, expected in sorted(tried, key=lambda each: (each[0]["strategy"], each[0]["gpus"])):
        failed = [t["blocks"] for t in row["tries"] if t.get("peak_mem_gib", 0) is None]
        if not row["blocks"]:
            cells = [row["gpus"], f"fewer than {min(failed)}", row["predicted"], "", ""]
            rows.append(f"| {row['strategy']} | {' | '.join(map(str, cells))} |")
            continue
        billions = f"{expected['parameters'] / 1e9:.1f}" if expected else ""
        blocks = f"{row['blocks']}" if failed else f"{row['blocks']} or more"
        rows.append(
            f"| {row['strategy']} | {row['gpus']} | {blocks} | {row['predicted']} | "
            f"{billions} | {measured_peak(row):.1f} |"
        )
    return rows


def fsdp_checkpoint(found) -> list[str]:
    """Return a row for each way to save; "during" are steps that begin while it is written."""
    rows = [
        "| checkpoint | training stands still, s | complete after, s | ms per step before "
        "| during the write | after it |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        if not measured_runs(row):
            continue
        run = measured_runs(row)[0]
        words = row["command"].split()
        every = int(words[words.index("--ckpt-freq") + 1])
        saves = [call for call in run["saves"] if call["what"] == "save"]
        writes = [call for call in run["saves"] if call["what"] == "write"]
        before, during, after = run["total_ms"][row["warm_up"] : every], [], []
        complete = []
        for number_of_save, save in enumerate(saves):
            now = save["at"] + save["seconds"]
            ends = [w["at"] + w["seconds"] for w in writes if w["at"] >= save["at"]]
            end = min(ends, default=now)
            complete.append(end - save["at"])
            first = every * (number_of_save + 1)
            for ms in run["total_ms"][first : first + every]:
                (during if now < end else after).append(ms)
                now += ms / 1000
        cells = [number([save["seconds"] for save in saves], 2), number(complete, 2)]
        cells += [spread(times, 0) if times else "" for times in (before, during, after)]
        rows.append(f"| {row['label']} | {' | '.join(cells)} |")
    return rows


for name in ("fsdp_checkpoint", "gpt2_checkpoint"):
    table(result(name), name=name)(fsdp_checkpoint)


PARTS = {
    "sums and file cache": "sums, and into the file cache",
    "disk": "waiting for the disk",
    "removal": "removing the one before",
    "garbage": "looking for garbage",
}


def seconds_within(save: dict, calls: list[dict]) -> list[float]:
    """Return how long each of the PARTS takes while the save does: a thread's goes on after it."""
    begin, end = save["at"], save["at"] + save["seconds"]
    seconds = dict.fromkeys(PARTS, 0.0)
    for call in calls:
        if call["what"] in PARTS:
            within = min(call["at"] + call["seconds"], end) - max(call["at"], begin)
            seconds[call["what"]] += max(0.0, within)
    return list(seconds.values())


@table(result("gpt2_checkpoint_parts"), result("gpt2_checkpoint"))
def gpt2_checkpoint_parts(before, now) -> list[str]:
    """Return a row for each synchronous save, with the seconds of its parts."""
    rows = [f"| the disk is asked | save | takes, s | {' | '.join(PARTS.values())} | the rest |"]
    rows.append("|---|" + "---:|" * (len(PARTS) + 3))
    for asked, found in (("at the end", before), ("while it is written", now)):
        (row,) = (row for row in found["rows"] if row["label"] == "sync")
        calls = measured_runs(row)[0]["saves"]
        for n, save in enumerate((call for call in calls if call["what"] == "save"), start=1):
            parts = seconds_within(save, calls)
            times = [save["seconds"], *parts, save["seconds"] - sum(parts)]
            rows.append(f"| {asked} | {n} | {' | '.join(f'{time:.2f}' for time in times)} |")
    return rows


@table(result("sharding_2"), result("sharding_4"))
def fsdp_sharded_cpu(two, four) -> list[str]:
    rows = [
        "| strategy | ranks | weights | gradients | moments | sum, GiB | predicted, GiB "
        "| sent per step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    whole = two["DDP"]["bytes_by_rank"][0]["weights"]
    for name in ("DDP", "DDP with ZeRO-1", "FSDP"):
        for found in (two, four):
            each = found[name]
            most = max(each["bytes_by_rank"], key=lambda held: sum(held.values()))
            sizes = (*most.values(), sum(most.values()), sum(each["predicted"].values()))
            cells = [f"{size / GIB:.2f}" for size in sizes]
            cells.append(f"{each['sent_bytes'] / whole:.2f} x weights")
            rows.append(f"| {name} | {found['world_size']} | {' | '.join(cells)} |")
    return rows


# --- chapter 5 ---


@table(result("reduction"))
def reduction(found) -> list[str]:
    keys = [f"{way}, {dtype}" for way in ("ring", "tree") for dtype in DTYPES]
    rows = [f"| ranks | gradients | {' | '.join(keys)} |", "|---:|---|" + "---:|" * len(keys)]
    for row in found["rows"]:
        if row["ranks"] in (2, 8, 64, 1024):
            cells = " | ".join(f"{row[key]:.1e}" for key in keys)
            rows.append(f"| {row['ranks']} | {row['gradients']} | {cells} |")
    return rows


@table(result("compression"))
def compression(found) -> list[str]:
    rows = [
        "| hook | bytes sent per step | error of the averaged gradient | loss at the end |",
        "|---|---:|---:|---:|",
    ]
    for name, hook in found["hooks"].items():
        cells = f"{hook['bytes']:,} | {hook['error']:.1e} | {hook['loss']:.3f}"
        rows.append(f"| {name} | {cells} |")
    return rows


def precision_rows(found, predictions, first: str = "precision") -> list[str]:
    rows = [
        f"| {first} | tokens/s per GPU | MFU | ms per step | peak, GiB "
        "| predicted, GiB | measured against it |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        runs = measured_runs(row)
        expected = predictions.get(row["label"], {}).get("peak_gib")
        if not runs:
            if None in row["runs"]:
                said = f"{expected:.1f}" if expected else ""
                rows.append(f"| {row['label']} | out of memory | | | | {said} | |")
            continue
        peak = measured_peak(row)
        cells = [
            number([run["tokens_per_s_per_device"] for run in runs], 0),
            f"{statistics.median(run['mfu'] for run in runs):.1%}",
            number([run["time/total"] for run in runs], 0),
            f"{peak:.1f}",
            *([f"{expected:.1f}", f"{peak / expected - 1:+.1%}"] if expected else ["", ""]),
        ]
        rows.append(f"| {row['label']} | {' | '.join(cells)} |")
    return rows


def comparison(found) -> list[str]:
    """Return a row for each strategy and precision; where measured, with memory and losses.

    Speeds are against float32 on one device, or without it against the row's own precision.
    """
    speeds = [
        (row, row["summary"]["speed"]) for row in found["rows"] if row["summary"].get("speed")
    ]
    memory = any(each["peak_mem_gib"] for _, each in speeds)
    losses = any(row["summary"].get("minus_fp32_on_one_device") for row, _ in speeds)
    alone = {row["precision"]: each for row, each in speeds if row["strategy"] == "single"}
    against = "fp32" if "fp32" in alone else "same precision"
    rows = [
        f"| strategy and precision | devices | tokens/s | against one device, {against} "
        "| forward, ms | backward, ms | update, ms |"
        + (" GiB |" if memory else "")
        + (" last loss minus fp32's |" if losses else ""),
        "|---|---:|---:|---:|---:|---:|---:|" + "---:|" * (memory + losses),
    ]
    for row, each in speeds:
        differences = row["summary"].get("minus_fp32_on_one_device", [])
        most = round(max(differences, key=abs, default=0.0), 4) + 0  # no -0
        first = alone.get("fp32") or alone.get(row["precision"])
        cells = [
            str(row["devices"]),
            number(each["rounds"], 0),
            f"x {each['tokens_per_s'] / first['tokens_per_s']:.2f}" if first else "",
            *(f"{each['ms'][phase]:,.1f}" for phase in ("forward", "backward", "update")),
            *([f"{each['peak_mem_gib']:.1f}"] if memory else []),
            *([f"{most:.4f}" if differences else ""] if losses else []),
        ]
        rows.append(f"| {row_name(row)} | {' | '.join(cells)} |")
    return rows


def row_name(row: dict) -> str:
    return f"{row['strategy']} {row['precision']}"


@table(result("comparison_cpu"))
def comparison_cpu(found) -> list[str]:
    return comparison(found)


@table(result("comparison_gpu"))
def comparison_gpu(found) -> list[str]:
    return comparison(found)


@table(result("comparison_gpu_2"))
def comparison_gpu_2(found) -> list[str]:
    return comparison(found)


@table(result("comparison_gpu_2_loss"))
def comparison_gpu_2_loss(found) -> list[str]:
    """Return how far a row's losses are from those in float32 on one device, seed by seed."""
    seeds = [run["seed"] for run in found["rows"][0]["runs"]]
    rows = [
        "| strategy and precision | devices | farthest in the first nine steps "
        f"| {' | '.join(f'last step, seed {seed}' for seed in seeds)} |",
        "|---|---:|---:|" + "---:|" * len(seeds),
    ]
    losses = {
        row_name(row): {run["seed"]: run["losses"] for run in row["runs"]} for row in found["rows"]
    }
    alone = losses["single fp32"]
    for row in found["rows"]:
        own = losses[row_name(row)]
        first = max(
            abs(ours - theirs)
            for seed in seeds
            for ours, theirs in zip(own[seed][:9], alone[seed][:9], strict=True)
        )
        last = (f"{own[seed][-1] - alone[seed][-1] + 0:+.4f}" for seed in seeds)
        if row["strategy"] != "single":
            rows.append(
                f"| {row_name(row)} | {row['devices']} | {first:.1e} | {' | '.join(last)} |"
            )
    return rows


@table(result("comparison_gpu"), result("comparison_gpu_largest"))
def comparison_gpu_largest(found, larger) -> list[str]:
    """Return a row for each batch: that of all rows, and the largest that fits."""
    rows = [
        "| strategy and precision | sequences on a device | tokens/s | peak, GiB |",
        "|---|---:|---:|---:|",
    ]
    fixed = {row_name(row): row["summary"].get("speed") for row in found["rows"]}
    for row in larger["rows"]:
        for each in (fixed[row_name(row)], row["summary"]["largest"]):
            cells = [str(each["batch_size"]), number(each["rounds"], 0)]
            rows.append(f"| {row_name(row)} | {' | '.join(cells)} | {each['peak_mem_gib']:.1f} |")
    return rows


# --- chapter 5, speed ---


@table(result("profile_gpt2"), result("profile_gpt2_523"))
def twelve_percent(found, with_523) -> list[str]:
    """Return a row for each change of one variant into another, with both versions' tokens/s."""
    rows = [
        "| step | why it might help | before, tokens/s | after | change | with transformers 5.23 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, why, before, after in (
        (
            "no attention mask",
            "compiled, transformers builds a mask of zeros and -inf, and attention reads it",
            "transformers",
            "transformers, no mask",
        ),
        (
            "a loss written by hand",
            "transformers casts the logits to float32 first",
            "transformers, no mask",
            "transformers, no mask, own loss",
        ),
        (
            "weights of `Linear` in place of `Conv1D`",
            "products of matrices with another layout",
            "handwritten, Linear1D",
            "handwritten",
        ),
        (
            "all of it by hand",
            "no code of transformers is left",
            "transformers, no mask",
            "handwritten",
        ),
        (
            "blocks compiled one by one, the loss not at all",
            "it does not help: chapters 4 and 5 need it, to gather a block at a time",
            "transformers, no mask",
            "transformers, per block",
        ),
    ):
        one, two = (found[variant]["tokens_per_s"] for variant in (before, after))
        changes = [
            f"{file[after]['tokens_per_s'] / file[before]['tokens_per_s'] - 1:+.1%}"
            for file in (found, with_523)
        ]
        rows.append(f"| {name} | {why} | {one:,} | {two:,} | {' | '.join(changes)} |")
    return rows


@table(result("profile_gpt2"))
def where_time_goes(found) -> list[str]:
    """Return ms of a step by kind of kernel, of the 25 kernels that take most."""
    kinds = {
        "attention": r"sdpa|fmha|flash",
        "matrix products": r"nvjet|gemm|cutlass",
        "loss over the vocabulary": r"softmax|SoftMax|nll",
        "all others of the 25 largest": r"",
    }
    names = ("handwritten", "transformers, no mask", "transformers", "transformers, per block")
    rows = [f"| kernels, ms | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    sums = {kind: dict.fromkeys(names, 0.0) for kind in kinds}
    for name in names:
        for kernel in found[name]["kernels"]:
            kind = next(k for k, pattern in kinds.items() if re.search(pattern, kernel["kernel"]))
            sums[kind][name] += kernel["ms"]
    for kind, by_name in sums.items():
        rows.append(f"| {kind} | {' | '.join(f'{ms:.1f}' for ms in by_name.values())} |")
    steps = (statistics.median(found[name]["ms_per_step"]) for name in names)
    rows.append(f"| the whole step | {' | '.join(f'{ms:.1f}' for ms in steps)} |")
    return rows


SPEED = {
    "profile_gpt2": "GPT-2, one model against another",
    "overhead_gpu": "chapter 1's step against a bare loop",
    "overhead_fsdp_gpu": "chapter 4's step against a bare loop of its own",
    "overhead_mixed_gpu": "chapter 5's step against a bare loop of its own",
    "overhead_by_hand": "chapter 5's step against the loop by hand",
    "overhead_not_resharded": "chapter 5, not resharded, against the loop by hand",
    "comparison_gpu": "GPT-2 in each precision",
    "ddp_gpu": "GPT-2 with DDP on 1 to 8 GPUs, TF32",
    "buckets_gpu": "the all-reduce, alone and beside the backward pass",
    "nodes_gpu": "chapter 3 against chapter 2, TF32",
    "fsdp_gpt2": "GPT-2 with FSDP against DDP, TF32",
    "fsdp_options": "an 8B model with FSDP, TF32",
    "gpt2_bf16": "chapter 5 on one GPU against a bare loop",
    "profile_blocks": "GPT-2, compiled whole and block by block",
    "fsdp_precision": "an 8B model in each precision of chapter 5",
    "fsdp_precision_4": "the same on four GPUs",
    "gpt2_bf16_scaling": "chapter 5 and a bare loop on 1 and 2 GPUs",
    "gpt2_bf16_accumulation": "the same on one GPU, with 4 micro-batches",
    "gpt2_checkpoint": "what a checkpoint of GPT-2 takes from the training",
    "gpt2_checkpoint_parts": "the same before the disk was asked early",
    "comparison_gpu_2": "GPT-2, strategies and precisions on 2 GPUs",
    "comparison_gpu_2_loss": "GPT-2, losses of strategies and precisions on 2 GPUs",
    "fsdp_length": "chapter 5, GPT-2 with sequences of 1k to 32k tokens",
    "fsdp_length_llama": "chapter 5, four blocks of Llama 3.1 8B with such sequences",
    "fsdp_size": "chapter 5, GPT-2's four sizes",
}


@table(result("profile_blocks"))
def blocks_compiled(found) -> list[str]:
    """Return a row for each way to compile, with the share of the model that is compiled whole."""
    rows = ["| compiled | ms per step | tokens/s | of it compiled whole |", "|---|---:|---:|---:|"]
    names = {
        "transformers, no mask": "the whole model",
        "transformers, per block": "each block",
        "transformers, no mask, per block and the loss": "each block, and the loss",
        "handwritten": "the model by hand, whole",
    }
    whole = found["transformers, no mask"]["tokens_per_s"]
    for variant, name in names.items():
        speed = found[variant]["tokens_per_s"]
        times = number(found[variant]["ms_per_step"], 1)
        rows.append(f"| {name} | {times} | {speed:,} | {speed / whole:.1%} |")
    return rows


PAIRS = {
    "overhead_fsdp_gpu": "chapter 4, TF32, and the same model in a bare loop",
    "overhead_mixed_gpu": "chapter 5, bf16, and the same model in a bare loop",
    "overhead_by_hand": "chapter 5, bf16, and the model by hand",
    "overhead_not_resharded": "the same with `--no-reshard-after-forward`",
}


@table(*map(result, PAIRS))
def overhead_gpus(*found: dict) -> list[str]:
    rows = [
        "| chapter and bare loop | chapter, ms | bare loop, ms | ratio of pairs, median "
        "| ratio of sums | pairs | waiting for data |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for what, each in zip(PAIRS.values(), found, strict=True):
        low, median, high = each["ratio_quartiles"]
        cells = [f"{each[f'{loop}_ms_per_step']:.1f}" for loop in ("chapter", "bare")]
        cells += [f"{median:.3f} ({low:.3f} to {high:.3f})", f"{each['ratio_of_sums']:.3f}"]
        cells += [str(each["pairs"]), f"{each['data_share']:.2%}"]
        rows.append(f"| {what} | {' | '.join(cells)} |")
    return rows


@table(*map(result, SPEED))
def speed_files(*_: object) -> list[str]:
    rows = ["| file | what | GPUs | torch | date | commit |", "|---|---|---|---|---|---|"]
    for name, what in SPEED.items():
        machine = json.loads((REPOSITORY / result(name)).read_text())["machine"]
        cells = [f"[{name}.json](../{result(name)})", what]
        cells += [f"{machine['gpus']} x {machine['gpu']}", machine["torch"], machine["date"]]
        rows.append(f"| {' | '.join(cells)} | {machine['commit'] or ''} |")
    return rows


@table(result("growth"))
def growth_checks(found) -> list[str]:
    rows = [
        "| what | GPUs | measured, ms | predicted, ms | off by | with the wait of two GPUs, ms "
        "| off by |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["checks"]:
        measured = row["measured_ms"]
        cells = [str(row["gpus"]), f"{measured:,.1f}"]
        for key in ("ideal_ms", "with_wait_ms"):
            ms = row.get(key)
            cells += [f"{ms:,.1f}", f"{ms / measured - 1:+.1%}"] if ms else ["", ""]
        rows.append(f"| {row['label']} ({row['source']}) | {' | '.join(cells)} |")
    return rows


@table(result("growth"))
def growth_paper(found) -> list[str]:
    rows = [
        "| model | GPUs | network | tokens/s at most | forward and backward | MFU at most "
        "| sends alone, ms | with the wait, against one GPU | states, GiB per GPU |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["paper"]:
        cells = [
            f"{row['tokens_per_s']:,.0f}",
            f"{row['efficiency']:.1%}",
            f"{row['mfu']:.1%}",
            f"{row['exposed_ms']:,.1f}",
            f"{row['with_wait']:.1%}" if row["with_wait"] else "",
            f"{row['states_gib']:,.2f}",
        ]
        name = f"{row['model']} | {row['gpus']:,} | {row['network']}"
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


@table(result("growth"))
def growth_batches(found) -> list[str]:
    """Return the smallest batch of a GPU, and the most GPUs for a global batch."""
    rows = [
        "| model | network | tokens per GPU for 90%, on 8 | on 64 | on 1,024 "
        "| GPUs that a global batch keeps at 90% | at 50% |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    least = {
        (row["model"], row["network"], row["gpus"]): row["smallest_batch"] for row in found["paper"]
    }
    for row in found["limits"]:
        model, network = row["model"], row["network"]
        numbers = [least[model, "within a node", 8]]
        numbers += [least[model, network, n] for n in (64, 1024)]
        numbers += [row["gpus_at_90"], row["gpus_at_50"]]
        what = f"{model}, {row['global_batch']:,} tokens in a step"
        rows.append(f"| {what} | {network} | {' | '.join(f'{n:,}' for n in numbers)} |")
    return rows


def speed_rows(found) -> list[str]:
    """Return a row for each configuration of throughput.py; a ratio where it has one."""
    rows = [
        "| configuration | devices | tokens/s | against | ms per step | of it backward | data "
        "| MFU | GiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        if not row["runs"]:
            continue
        median = row["median"]
        times = (f"time/{phase}" for phase in ("total", "backward", "data"))
        cells = [
            number([run["tokens_per_s"] for run in row["runs"]], 0),
            number(row["ratio"]["rounds"], 3) if "ratio" in row else "",
            *(f"{median[key]:.1f}" if key in median else "" for key in times),
            f"{median['mfu']:.1%}" if median.get("mfu") else "",
            f"{median['peak_mem_gib']:.1f}",
        ]
        rows.append(f"| {row['label']} | {row['devices']} | {' | '.join(cells)} |")
    return rows


@table(result("start_cpu"))
def start_cpu(found) -> list[str]:
    (row,) = found["rows"]
    seconds = [run["first_line_s"] for run in row["runs"]]
    return ["| from the command to | seconds |", "|---|---:|", f"| step 1 | {spread(seconds)} |"]


# What throughput.py has measured of these sets: tables named gpt2_bf16 and so on.
SPEED_SETS = ("gpt2_bf16", "gpt2_bf16_scaling", "gpt2_bf16_accumulation", "ddp_gpu_accumulation")
SPEED_SETS += ("speed_cpu",)


for name in SPEED_SETS:
    if (REPOSITORY / result(name)).exists():
        table(result(name), name=name)(speed_rows)


def causal_mfu(row: dict, parameters: int) -> float:
    """Return the median MFU of a row, less what is counted and not computed.

    MFU counts 6 N + 12 L H Q T for a token, as flops_per_token in common/timers.py says. Of the
    second term attention leaves out half, the pairs with a later position, and a table of
    positions, one of the N, is only looked up.
    """
    preset = json.loads((REPOSITORY / f"common/presets/{row['preset']}/config.json").read_text())
    config = {**preset, **row["shape"]}
    names = (("n_layer", "num_hidden_layers"), ("n_embd", "hidden_size"))
    layers, width = (config.get(one) or config[other] for one, other in names)
    if not config["tie_word_embeddings"]:
        parameters -= config["vocab_size"] * width
    attention = 12 * layers * width * int(row["command"].split(" -s ")[1].split()[0])
    table = config.get("n_positions", 0) * width
    left_out = (6 * table + attention / 2) / (6 * parameters + attention)
    return statistics.median(run["mfu"] for run in measured_runs(row)) * (1 - left_out)


def length_rows(found, predictions) -> list[str]:
    """Return the rows of precision_rows with one more column."""
    measured = [row for row in found["rows"] if measured_runs(row)]
    head, line, *rows = precision_rows({"rows": measured}, predictions, "model")
    counted = (causal_mfu(row, predictions[row["label"]]["parameters"]) for row in measured)
    added = [f"{row} {mfu:.1%} |" for row, mfu in zip(rows, counted, strict=True)]
    return [f"{head} MFU of what is computed |", f"{line}---:|", *added]


def predicted_table(name: str, first: str) -> None:
    """Register what fsdp.py has measured, beside its predictions; first: of the first column."""

    def rows(found, predictions) -> list[str]:
        if name.startswith("fsdp_length"):
            return length_rows(found, predictions[name])
        return precision_rows(found, predictions[name], first)

    table(result(name), result("predictions"), name=name)(rows)


# Tables named after their files, too.
for name in ("fsdp_precision", "fsdp_precision_4"):
    predicted_table(name, "precision")
for name in ("fsdp_length", "fsdp_length_llama", "fsdp_size"):
    if (REPOSITORY / result(name)).exists():
        predicted_table(name, "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    stale = [page for page in pages() if fill(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{'stale' if args.check else 'wrote'}: {page.relative_to(REPOSITORY)}")
        if not args.check:
            page.write_text(fill(page.read_text()))
    sys.exit(1 if stale and args.check else 0)


if __name__ == "__main__":
    main()

"""Measure the chapters' own scripts: speed, memory and losses on synthetic tokens.

python tests/benchmarks/measure.py --list                          the rows, and which are measured
python tests/benchmarks/measure.py --only 'chapter 1*' 'fp8*'      measures rows, into results/
python tests/benchmarks/measure.py --output FILE --commit COMMIT   on a machine without .git
python tests/benchmarks/measure.py --merge FILE                    takes its rows into results/

ROWS is the table of all rows. A row trains one chapter, if need be with variants, on one or several
GPUs, and is killed when it has logged enough steps: it neither evaluates nor saves at its end. If
the machine has more GPUs than a row needs, several rows run side by side. Without GPUs, --tiny runs
them with small models on processes. If a row is measured again, its new runs replace the old ones.
"""

import argparse
import contextlib
import fnmatch
import functools
import hashlib
import itertools
import json
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import psutil
import torch
from machine import (
    REPOSITORY,
    RESULTS,
    TORCHRUN,
    describe_machine,
    environment,
    read_metrics,
    replace_in,
)
from transformers import AutoConfig, AutoModelForCausalLM

from common import variants

NEVER = 10**6
# On all machines alike: not every one lets NCCL add up in the NVLink switches.
NVLS_OFF = {"NCCL_NVLS_ENABLE": "0"}
# Arguments. FOLDER is where the synthetic tokens and the configurations of the models are.
GPT2 = "-m gpt2 -s 1024 --lr 3e-4 --log-freq 5"
LLAMA_1B = "-m FOLDER/llama-1b --tokenizer-name gpt2-tiny --lr 1e-5 -b 1 --log-freq 2"
LLAMA_8B = "-m llama-3.1-8b --tokenizer-name gpt2-tiny --lr 1e-5 -s 8192 -b 1 --log-freq 1"
FULL = "--activation-checkpointing"
TEXT = "-d python-stdlib"  # real text, on which differences of losses grow as in a real run
MODELS = {  # of Llama 3.2 1B, as changes of the configuration of Llama 3.1 8B
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
# Folders of random weights, with the model whose configuration they have: 19 GB together.
WEIGHTS = {"weights-1b": "llama-1b", "weights-8b": "llama-3.1-8b"}
SETUP = "    # --- setup ---\n"
DETERMINISTIC = ((SETUP, f"{SETUP}    torch.use_deterministic_algorithms(True)\n"),)
# Muon of PyTorch on sharded tensors: each rank gathers each matrix.
PLAIN_MUON = ((SETUP, f"{SETUP}    import muon\n\n    muon.ShardedMuon = torch.optim.Muon\n"),)
BUCKET_VIEW = "        gradient_as_bucket_view=True,"


@dataclass(frozen=True)
class Row:
    """What is measured under a label.

    flags: arguments of the chapter's script. gpus: also the number of its processes. nodes: on how
    many simulated nodes they are, each with a launcher of its own. steps: after how many the run is
    killed. warm_up: of these, how many are not counted. reads: "speed", or
    "saves" for the pauses of saved checkpoints and the time to resume. change: texts of the
    script, each with its replacement. times: how many runs.
    """

    label: str
    chapter: int
    flags: str
    gpus: int = 1
    variants: str = ""
    steps: int = 40
    warm_up: int = 15
    reads: str = "speed"
    change: tuple[tuple[str, str], ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    nodes: int = 1
    times: int = 1

    def definition(self) -> dict:
        """Return the fields that differ from their defaults, as a result file has them."""
        rest = {each.name: getattr(self, each.name) for each in fields(self)[3:]}
        usual = vars(Row(self.label, self.chapter, self.flags))
        rest = {name: value for name, value in rest.items() if value != usual[name]}
        found = {"label": self.label, "chapter": self.chapter, "flags": self.flags, **rest}
        return json.loads(json.dumps(found))


# --- the rows, in the order in which they are measured ---


def chapters() -> Iterable[Row]:
    """The chapters on one GPU, and GPT-2 in each precision."""
    batch = f"{GPT2} -b 64 --global-batch-size 64"
    for name, compile in ((", compiled", " --compile"), ("", "")):
        for chapter in (1, 2, 3, 4):
            yield Row(f"chapter {chapter}, TF32{name}", chapter, batch + compile)
        for chapter in (1, 2, 3):
            label = f"chapter {chapter}, bfloat16{name}"
            yield Row(label, chapter, batch + compile, variants="autocast")
        yield Row(f"chapter 5, TF32{name}", 5, f"{batch}{compile} --precision tf32")
        yield Row(f"chapter 5, bfloat16{name}", 5, batch + compile)
    compiled = f"{batch} --compile"
    yield Row("GPT-2, strict float32", 5, f"{compiled} --precision fp32", steps=15, warm_up=5)
    yield Row("GPT-2, float16", 5, compiled, variants="loss-scaling float16")
    yield Row("GPT-2, bfloat16 weights", 5, compiled, variants="pure-bfloat16")
    yield Row("GPT-2, fp8", 5, compiled, variants="fp8")


def scaling() -> Iterable[Row]:
    """DDP and FSDP in bfloat16: a batch that grows with the GPUs, and batches that do not."""
    ways = {"DDP": (2, "autocast"), "FSDP": (5, "")}
    for gpus, (way, (chapter, names)) in itertools.product((1, 2, 4), ways.items()):
        for per_gpu in (64, 8):
            if (way, per_gpu, gpus) == ("FSDP", 64, 1):
                continue  # this is "chapter 5, bfloat16, compiled"
            flags = f"{GPT2} --compile -b {per_gpu} --global-batch-size {per_gpu * gpus}"
            yield Row(f"{way}, {per_gpu} per GPU on {gpus}", chapter, flags, gpus, names)
        for sequences in (512, 64, 16):
            if (sequences, gpus) == (64, 1):
                continue  # as "64 per GPU on 1"
            flags = f"{GPT2} --compile -b {min(64, sequences // gpus)}"
            flags += f" --global-batch-size {sequences}"
            steps = {"steps": 20, "warm_up": 10} if sequences == 512 else {}
            label = f"{way}, {sequences} in all on {gpus}"
            yield Row(label, chapter, flags, gpus, names, **steps)


def options_of_ddp() -> Iterable[Row]:
    """ZeRO-1, DataParallel, sizes of buckets and accumulation with DDP, on two GPUs."""
    batch = f"{GPT2} -b 64 --global-batch-size 128"
    for name, names in (("TF32", ""), ("bfloat16", "autocast")):
        yield Row(f"DDP, {name}", 2, batch, 2, names)
        yield Row(f"ZeRO-1, {name}", 2, batch, 2, f"{names} zero1".strip())
    yield Row("DataParallel, TF32", 1, batch.replace("-b 64", "-b 128"), 2, "data-parallel")
    for mib in (1, 500):
        bucket = ((BUCKET_VIEW, f"{BUCKET_VIEW}\n        bucket_cap_mb={mib},"),)
        label = f"DDP, 8 per GPU, buckets of {mib} MiB"
        flags = f"{GPT2} --compile -b 8 --global-batch-size 16"
        yield Row(label, 2, flags, 2, "autocast", change=bucket)
    flags = f"{GPT2} --compile -b 8 --global-batch-size 64"
    yield Row("DDP, 4 micro-batches of 8", 2, flags, 2, "autocast")


def options_of_fsdp() -> Iterable[Row]:
    """FSDP with each variant: Llama 1B on two GPUs, and Llama 8B on four."""
    short = {"steps": 20, "warm_up": 10}
    options = {  # chapter, variants, more flags
        "FSDP": (5, "", ""),
        "recomputation": (5, "", FULL),
        "selective-recomputation": (5, "selective-recomputation", ""),
        "zero2": (5, "zero2", ""),
        "hsdp": (5, "hsdp", ""),
        "reduce-bfloat16": (5, "reduce-bfloat16", ""),
        "fp8": (5, "fp8", ""),
        "TF32": (4, "", ""),
        "TF32, recomputation": (4, "", FULL),
        "cpu-offload": (5, "cpu-offload", ""),
        "pure-bfloat16": (5, "pure-bfloat16", ""),
    }
    for name, (chapter, names, flags) in options.items():
        base = f"{LLAMA_1B} -s 8192 --global-batch-size 2 --compile {flags}".strip()
        steps = {"steps": 8, "warm_up": 4} if name == "cpu-offload" else short
        nodes = {"nodes": 2} if name == "hsdp" else {}
        yield Row(f"1B, {name}", chapter, base, 2, names, **steps, **nodes)
    for name, names in {
        "4 micro-batches": "",
        "4 micro-batches, reduce-every-backward": "reduce-every-backward",
    }.items():
        base = f"{LLAMA_1B} -s 8192 --global-batch-size 8 --compile"
        yield Row(f"1B, {name}", 5, base, 2, names, steps=12, warm_up=6)
    base = f"{LLAMA_1B} -s 8192 --global-batch-size 2"
    yield Row("1B, FSDP, not compiled", 5, base, 2, **short)
    yield Row("1B, muon", 5, f"{base} --compile", 2, "muon", **short)
    yield Row("1B, torch.optim.Muon", 5, f"{base} --compile", 2, "muon", change=PLAIN_MUON, **short)
    for name, (chapter, names, flags) in options.items():
        if chapter == 5 and name != "FSDP":
            flags = f"{FULL} {flags}" if FULL not in flags and "recomp" not in name else flags
        base = f"{LLAMA_8B} --global-batch-size 4 --compile {flags}".strip()
        nodes = {"nodes": 2} if name == "hsdp" else {}
        yield Row(f"8B, {name}", chapter, base, 4, names, steps=6, warm_up=2, **nodes)


def parallelism() -> Iterable[Row]:
    """Tensor, context and 3-D parallelism, with a Llama of 1B on two GPUs."""
    context, tensor = "mesh context-parallel", "mesh tensor-parallel"
    short, long = {"steps": 20, "warm_up": 10}, {"steps": 6, "warm_up": 2}
    for name, compile in ((", compiled", " --compile"), ("", "")):
        flags = f"{LLAMA_1B} -s 65536{compile} {FULL}".replace("--log-freq 2", "--log-freq 1")
        yield Row(f"FSDP, 65536{name}", 5, f"{flags} --global-batch-size 2", 2, **long)
        flags += " --global-batch-size 1 --context-parallel 2"
        yield Row(f"context, 65536{name}", 5, flags, 2, context, **long)
        yield Row(f"Ulysses, 65536{name}", 5, f"{flags} --ulysses", 2, context, **long)
    for name, compile in ((", compiled", " --compile"), ("", "")):
        flags = f"{LLAMA_1B} -s 8192{compile} --global-batch-size 1"
        label, shared = f"8192{name}", f"{flags} --context-parallel 2"
        yield Row(f"tensor, {label}", 5, f"{flags} --tensor-parallel 2", 2, tensor, **short)
        yield Row(f"context, {label}", 5, shared, 2, context, **short)
        yield Row(f"Ulysses, {label}", 5, f"{shared} --ulysses", 2, context, **short)
    four = f"{LLAMA_1B} -s 8192 --compile".replace("-b 1", "-b 4")
    flags = f"{four} --global-batch-size 4 --tensor-parallel 2"
    yield Row("tensor, 8192, compiled, 4 sequences", 5, flags, 2, tensor, **short)
    flags = f"{four} --global-batch-size 8"
    yield Row("FSDP, 8192, compiled, 4 sequences per GPU", 5, flags, 2, **short)
    flags = f"{LLAMA_1B} -s 131072 {FULL} --global-batch-size 1 --context-parallel 2"
    yield Row("context, 131072", 5, flags, 2, context, **long)
    yield Row("Ulysses, 131072", 5, f"{flags} --ulysses", 2, context, **long)
    flags = f"{LLAMA_1B} -s 8192 --compile --tensor-parallel 2 --context-parallel 2"
    both = "mesh context-parallel tensor-parallel"
    yield Row("3-D, 4 GPUs", 5, f"{flags} --global-batch-size 1", 4, both, **short)
    yield Row("3-D, 8 GPUs", 5, f"{flags} --global-batch-size 2", 8, both, **short)
    flags = f"{LLAMA_8B} --compile --global-batch-size"
    yield Row("8B, tensor parallelism", 5, f"{flags} 2 --tensor-parallel 2", 4, tensor, **long)


def variants_of_chapter_5() -> Iterable[Row]:
    """Other variants of chapter 5. One line adds a row: label, chapter, flags, GPUs, variants."""
    for sequences in (1, 4):
        flags = f"{LLAMA_1B} -s 8192 --compile --global-batch-size {sequences}"
        flags = flags.replace("-b 1", f"-b {sequences}")
        yield Row(f"1B on 1, {sequences} x 8192", 5, flags, steps=20, warm_up=10)
        label = f"chunked-loss, {sequences} x 8192"
        yield Row(label, 5, flags, 1, "chunked-loss", steps=20, warm_up=10)
    yield Row("workers", 5, f"{GPT2} -b 64 --global-batch-size 64 --compile", 1, "workers")


def adapters() -> Iterable[Row]:
    """Fine-tunes of random weights on one GPU: of adapters, and of all weights of the 1B model."""
    flags = f"--tokenizer-name gpt2-tiny --pretrained --lr 1e-5 -s 8192 -b 1 {FULL} --log-freq 2"
    flags = f"{flags} --global-batch-size 1"
    for name, compile in ((", compiled", " --compile"), ("", "")):
        small, large = (f"-m FOLDER/{each} {flags}{compile}" for each in WEIGHTS)
        yield Row(f"1B on 1, all weights{name}", 5, small, steps=12, warm_up=6)
        yield Row(f"1B on 1, lora{name}", 5, small, 1, "lora", steps=12, warm_up=6)
        yield Row(f"8B on 1, lora{name}", 5, large, 1, "lora", steps=12, warm_up=6)


def checkpoints() -> Iterable[Row]:
    """Pauses of saves, and the time to resume: Llama 1B on two GPUs, 8B on four."""
    save = {"steps": 30, "warm_up": 5, "reads": "saves"}
    flags = f"{LLAMA_1B} -s 2048 --ckpt-freq 10 --keep-checkpoints 1 {FULL}"
    flags = flags.replace("--log-freq 2", "--log-freq 1")
    yield Row("1B, saves", 5, f"{flags} --global-batch-size 2", 2, **save)
    yield Row(
        "1B, async-checkpoint", 5, f"{flags} --global-batch-size 2", 2, "async-checkpoint", **save
    )
    flags = flags.replace("FOLDER/llama-1b", "llama-3.1-8b") + " --global-batch-size 4"
    yield Row("8B, saves", 5, flags, 4, **save)
    yield Row("8B, async-checkpoint", 5, flags, 4, "async-checkpoint", **save)


def losses() -> Iterable[Row]:
    """The same losses on any number of GPUs, and two runs of one command."""
    flags = f"{GPT2} {TEXT} -b 8 --global-batch-size 8"
    every = flags.replace("--log-freq 5", "--log-freq 1")
    each = {"steps": 50, "warm_up": 20}
    yield Row("losses, chapter 1", 1, every, **each)
    for gpus in (1, 2, 4):
        yield Row(f"losses, DDP on {gpus}", 2, every, gpus, **each)
        yield Row(f"losses, FSDP on {gpus}", 4, every, gpus, **each)
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    long = {"steps": 300, "warm_up": 100, "times": 2}
    for name, more in ((", compiled", " --compile"), ("", "")):
        yield Row(f"two runs{name}", 5, flags + more, **long)
        label = f"two runs, deterministic{name}"
        yield Row(label, 5, flags + more, change=DETERMINISTIC, environment=fixed, **long)


def eight_gpus() -> Iterable[Row]:
    """DDP in TF32, with a batch that grows with the GPUs."""
    for gpus in (2, 4, 8):
        flags = f"{GPT2} --compile -b 64 --global-batch-size {64 * gpus}"
        yield Row(f"DDP, TF32, 64 per GPU on {gpus}", 2, flags, gpus)


def llama_8b() -> Iterable[Row]:
    """Llama 3.1 8B: precisions on two GPUs, and options of chapter 4 in TF32 on four."""
    selective, short = "selective-recomputation", {"steps": 8, "warm_up": 3}
    for name, flags, names in (
        ("bfloat16, compiled", "--compile", ""),
        ("fp8, compiled", "--compile", "fp8"),
        ("float16, compiled", "--compile", "float16 loss-scaling"),
        ("bfloat16", "", ""),
        ("TF32", "--precision tf32", ""),
        ("strict float32", "--precision fp32", ""),
    ):
        flags = f"{LLAMA_8B} --global-batch-size 2 {flags}".strip()
        yield Row(f"8B on 2, {name}", 5, flags, 2, f"{names} {selective}".strip(), **short)
    two = LLAMA_8B.replace("-b 1", "-b 2") + " --global-batch-size 4 --compile"
    yield Row("8B on 2, bfloat16, 2 sequences", 5, two, 2, selective, **short)
    yield Row("8B on 2, fp8, 2 sequences", 5, two, 2, f"fp8 {selective}", **short)
    four = f"{LLAMA_8B} --global-batch-size 4"
    short = {"steps": 4, "warm_up": 1}
    for name, flags, names in (
        ("selective", "--compile", selective),
        ("full, not compiled", FULL, ""),
        ("full, zero2", f"--compile {FULL}", "zero2"),
        ("full, cpu-offload", f"--compile {FULL}", "cpu-offload"),
    ):
        yield Row(f"8B, TF32, {name}", 4, f"{four} {flags}", 4, names, **short)
    eight = f"{LLAMA_8B} --global-batch-size 8 --compile {FULL}"
    for name, names in (("", ""), (", reduce-every-backward", "reduce-every-backward")):
        yield Row(f"8B, TF32, full, 2 micro-batches{name}", 4, eight, 4, names, **short)
    both = f"reduce-bfloat16 {selective}"
    yield Row("8B, selective, reduce-bfloat16", 5, f"{four} --compile", 4, both, **short)


PARTS = (chapters, scaling, options_of_ddp, options_of_fsdp, parallelism, variants_of_chapter_5)
PARTS += (adapters, checkpoints, losses, eight_gpus, llama_8b)
ROWS = {row.label: row for part in PARTS for row in part()}
assert len(ROWS) == sum(1 for part in PARTS for _ in part()), "two rows have the same label"


# --- what was measured: the commit, and a checksum of the code ---


def git(*words: str) -> str | None:
    """Return what git prints in the repository, or None if it fails or there is none."""
    done = subprocess.run(["git", "-C", REPOSITORY, *words], capture_output=True, text=True)
    return None if done.returncode else done.stdout


def checksum(row: Row, paths: Iterable[str], read: Callable[[str], bytes]) -> str:
    """Return a checksum of the code that a row runs: script, diffs and `common`.

    paths: of the repository's files. read: returns the content of one.
    """
    chapter, names = variants.CHAPTERS[row.chapter], row.variants.split()
    found = []
    for path in sorted(paths):
        folder, _, name = path.rpartition("/")
        if (
            (folder.split("/")[0] == "common" and name.endswith((".py", "config.json")))
            or path == f"{chapter}/train_llm.py"
            or (folder.endswith("/diffs") and name in [f"{each}.diff" for each in names])
            or (folder.endswith("/diffs") and names and name.endswith(".py"))
        ):
            found.append(f"{hashlib.sha256(read(path)).hexdigest()}  {path}\n")
    return hashlib.sha256("".join(found).encode()).hexdigest()[:16]


def checksum_here(row: Row) -> str:
    files = (path for path in REPOSITORY.glob("[0-9c]*/**/*.*") if path.is_file())
    paths = [path.relative_to(REPOSITORY).as_posix() for path in files]
    return checksum(row, paths, lambda path: (REPOSITORY / path).read_bytes())


def checksum_at(row: Row, commit: str) -> str | None:
    """Return the checksum at a commit, or None if this clone does not have the commit."""
    paths = files_at(commit)
    return checksum(row, paths, lambda path: content_at(commit, path)) if paths else None


@functools.cache
def files_at(commit: str) -> tuple[str, ...]:
    return tuple((git("ls-tree", "-r", "--name-only", commit) or "").splitlines())


@functools.cache
def content_at(commit: str, path: str) -> bytes:
    command = ["git", "-C", REPOSITORY, "show", f"{commit}:{path}"]
    return subprocess.run(command, capture_output=True, check=True).stdout


def this_commit() -> str:
    """Return the commit of this checkout, with -dirty if a file was changed."""
    commit = git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        sys.exit("There is no .git here: give --commit.")
    changed = git("status", "--porcelain", "-uno", "--", ".", ":!tests/benchmarks/results")
    return commit.strip() + ("-dirty" if changed else "")


# --- result files ---


def measured_runs(row: dict) -> list[dict]:
    """Return the runs of a row that did not fail."""
    return [run for run in row.get("runs", []) if "failed" not in run]


def read_rows(file: Path) -> dict[str, dict]:
    """Return the rows of a result file by their labels."""
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return {row["label"]: row for row in rows}


def write_rows(file: Path, rows: dict[str, dict]) -> None:
    """Write a result file, its rows in the order of the table."""
    file.parent.mkdir(parents=True, exist_ok=True)
    order = [label for label in ROWS if label in rows]
    order += [label for label in rows if label not in ROWS]
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"rows": [rows[label] for label in order]}, indent=1) + "\n")
    new.rename(file)


def file_of(machine: dict) -> Path:
    """Return the result file of a kind of machine: h200.json, or cpu.json."""
    name = machine.get("gpu", "cpu").replace("NVIDIA ", "")
    return RESULTS / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.json"


def merge(file: Path) -> bool:
    """Take the rows of a file into results/; return whether all were right."""
    wrong = {}
    for label, found in read_rows(file).items():
        row = ROWS.get(label)
        if row is None:
            wrong[label] = "is no row of measure.py"
        elif found.get("tiny"):
            wrong[label] = "was only tried, with --tiny"
        elif any("failed" in run for run in found["runs"]):
            wrong[label] = "failed"
        elif found["row"] != row.definition():
            wrong[label] = "was defined differently when it was measured"
        elif found["commit"].endswith("-dirty"):
            wrong[label] = "was measured with uncommitted changes"
        elif (there := checksum_at(row, found["commit"])) != found["checksum"]:
            wrong[label] = f"{found['commit']} has {'other code' if there else 'no files here'}"
        else:
            target = file_of(found["machine"])
            write_rows(target, {**read_rows(target), label: found})
            print(f"{label}: taken into {target.name}")
    for label, why in wrong.items():
        print(f"{label}: {why}", file=sys.stderr)
    drop_unused()
    return not wrong


def drop_unused() -> None:
    """Drop the rows of older.json that no page and no figure shows, now that newer ones exist."""
    import figures
    import report

    rows = read_rows(file := RESULTS / "older.json")
    report.measured_rows.cache_clear()
    for page in report.pages():
        report.fill(page.read_text(), page)
    figures.draw_all()
    kept = {label: row for label, row in rows.items() if ("older", label) in report.USED}
    if kept != rows:
        write_rows(file, kept)
        print("dropped from older.json:", *sorted(rows.keys() - kept.keys()), sep="\n  ")


# --- tokens, models and runs ---


def write_tokens(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, size in (("val", 2**21), ("train", 2**26)):
        # Each token has 16 possible successors, so that there is something to learn.
        steps = np.random.default_rng(size).integers(1, 17, size)
        np.save(folder / f"{part}_0.npy", (np.cumsum(steps) % 4096).astype(np.uint16))


def write_models(folder: Path) -> None:
    known = REPOSITORY / "common/inputs/presets/llama-3.1-8b/config.json"
    for name, changes in MODELS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        config = json.loads(known.read_text()) | changes
        (folder / name / "config.json").write_text(json.dumps(config))


def write_weights(folder: Path, rows: Iterable[Row], tiny: bool) -> None:
    """Write random weights, in bfloat16, for the rows that load some; keep those that exist."""
    presets = REPOSITORY / "common/inputs/presets"
    for name, model in WEIGHTS.items():
        used = any(f"FOLDER/{name}" in row.flags for row in rows)
        target = folder / (f"{name}-tiny" if tiny else name)
        if not used or (target / "config.json").exists():
            continue
        known = folder / model if model in MODELS else presets / model
        config = AutoConfig.from_pretrained(presets / "llama-tiny" if tiny else known)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        shutil.rmtree(new := target.with_suffix(".new"), ignore_errors=True)
        made.save_pretrained(new)
        new.rename(target)
        del made
        torch.cuda.empty_cache()


def small(flags: str, gpus: int) -> str:
    """Return flags for a small model that runs on processes without GPUs."""
    flags = re.sub(r"-m \S*llama\S*", "-m llama-tiny-8-heads", flags)
    flags = re.sub(r"-m (FOLDER/weights-\w+)", r"-m \1-tiny", flags)
    flags = flags.replace("-m gpt2 ", "-m gpt2-tiny ").replace("--compile", "")
    flags = re.sub(r"--log-freq \d+", "--log-freq 1", flags)
    flags = re.sub(r"-b \d+", "-b 2", flags)
    batch = int(re.search(r"--global-batch-size (\d+)", flags)[1])
    batch = min(batch, 2 * gpus)
    return re.sub(r"--global-batch-size \d+", f"--global-batch-size {batch}", flags) + " -s 64"


def prepare(row: Row, folder: Path, args: argparse.Namespace) -> list[str]:
    """Write the row's script into a folder; return the command of its run, with FOLDER in it."""
    shutil.rmtree(folder, ignore_errors=True)
    chapter = variants.CHAPTERS[row.chapter]
    script = folder / "+".join([chapter, *sorted(row.variants.split())])
    script.mkdir(parents=True)
    chosen = variants.choose(row.chapter, row.variants.split())
    variants.fill(script, script, chapter, chosen)
    for text, replacement in row.change:
        replace_in(script / "train_llm.py", text, replacement)
    words = ["--save-dir", str(folder), "-e", "run", "-d", "FOLDER/tokens"]
    words += ["--max-steps", str(NEVER), "--eval-freq", str(NEVER)]
    if "--ckpt-freq" not in row.flags:
        words += ["--ckpt-freq", str(NEVER)]
    words += shlex.split(small(row.flags, row.gpus) if args.tiny else row.flags)
    launcher = TORCHRUN[:1] if row.chapter == 1 else [*TORCHRUN, str(row.gpus // row.nodes)]
    if row.nodes > 1:
        one_of_several = shlex.split(f"--nnodes {row.nodes} --node-rank NODE --master-port PORT")
        launcher[3:4] = one_of_several  # instead of --standalone
    return [*launcher, str(script / "train_llm.py"), *words]


def measure(row: Row, devices: list[int], args: argparse.Namespace) -> tuple[str, list[dict]]:
    """Run a row; return its command, and what was read in each run or how it failed."""
    folder = args.folder / "runs" / re.sub(r"\W+", "-", row.label)
    command = prepare(row, folder, args)
    variables = [f"{name}={value}" for name, value in {**NVLS_OFF, **row.environment}.items()]
    shown = shlex.join([*variables, "python", *command[1:]]).replace(str(args.folder), "FOLDER")
    command = [word.replace("FOLDER", str(args.folder)) for word in command]
    runs = []
    for _ in range(1 if args.tiny else args.times or row.times):
        shutil.rmtree(folder / "run", ignore_errors=True)
        try:
            runs.append(run(row, command, folder, devices, args))
            if row.reads == "saves":
                begun = time.monotonic()
                with started(row, command, folder, devices) as process:
                    wait_for(process, folder, "resumed after step", begun + args.limit)
                    runs[-1]["resume_s"] = time.monotonic() - begun
        except RuntimeError as error:
            runs.append({"failed": str(error)[-4000:]})
    if not args.keep:
        shutil.rmtree(folder)
    return shown, runs


@contextlib.contextmanager
def started(row: Row, command: list[str], folder: Path, devices: list[int]):
    """Start a command on some GPUs, once for each node. At the end, kill what was started."""
    threads = max(1, os.cpu_count() // max(1, torch.cuda.device_count()))
    more = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": 1, **NVLS_OFF, **row.environment}
    share, launchers = len(devices) // row.nodes, []
    with socket.socket() as free:
        free.bind(("", 0))
        places = {"PORT": str(free.getsockname()[1])}
    try:
        with (folder / "log").open("w") as log:
            for node in range(row.nodes):
                mine = devices[node * share : (node + 1) * share]
                visible = ",".join(map(str, mine)) if torch.cuda.device_count() else ""
                words = [places.get(word, word) for word in command]
                words = [str(node) if word == "NODE" else word for word in words]
                variables = environment(CUDA_VISIBLE_DEVICES=visible, **more)
                launchers.append(subprocess.Popen(words, env=variables, stdout=log, stderr=log))
        yield launchers[0]
    finally:
        for launcher in launchers:
            stop(launcher)


def stop(launcher: subprocess.Popen) -> None:
    """Kill a launcher and the processes that it has started."""
    if launcher.poll() is None:
        process = psutil.Process(launcher.pid)
        processes = [*process.children(recursive=True), process]
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(processes, 30)
    launcher.wait()


def log_of(folder: Path) -> str:
    """Return what a run has printed so far; a character at the end may be incomplete."""
    return (folder / "log").read_text(encoding="utf-8", errors="replace")


def wait_for(process: subprocess.Popen, folder: Path, text: str, deadline: float) -> None:
    while text not in (log := log_of(folder)):
        check(process, log, deadline)
        time.sleep(0.01)


def check(process: subprocess.Popen, log: str, deadline: float) -> None:
    """Raise RuntimeError if a process has ended or takes too long."""
    if process.poll() is not None:
        raise RuntimeError(f"{log}\nstatus {process.returncode}")
    if time.monotonic() > deadline:
        raise RuntimeError(f"{log}\nthe time limit (--limit) was reached")


def run(
    row: Row, command: list[str], folder: Path, devices: list[int], args: argparse.Namespace
) -> dict:
    """Run a command until it has logged all steps; return medians, losses and pauses."""
    steps, warm_up = (2, 1) if args.tiny else (row.steps, row.warm_up)
    if args.tiny and row.reads == "saves":
        steps = int(re.search(r"--ckpt-freq (\d+)", row.flags)[1]) + 1
    begun, lines, seen = time.monotonic(), [], {}
    with started(row, command, folder, devices) as process:
        while not lines or lines[-1]["step"] < steps:
            check(process, log_of(folder), begun + args.limit)
            time.sleep(0.01)
            lines = read_metrics(folder / "run")
            for line in lines:
                seen.setdefault(line["step"], time.monotonic() - begun)
    counted = [line for line in lines if warm_up < line["step"] <= steps]
    keys = [key for key, value in counted[0].items() if isinstance(value, float)]
    found = {key: statistics.median(line[key] for line in counted) for key in keys}
    found["peak_mem_gib"] = counted[-1]["peak_mem_gib"]
    found["start_s"] = seen[lines[0]["step"]]
    if row.reads == "saves":  # how much later the next step was logged than usual
        freq = int(re.search(r"--ckpt-freq (\d+)", row.flags)[1])
        gaps = {step: seen[step] - seen[step - 1] for step in seen if step - 1 in seen}
        usual = statistics.median(gaps.values())
        found["saves_s"] = [gap - usual for step, gap in gaps.items() if step % freq == 1]
    return {**found, "losses": {line["step"]: line["loss"] for line in lines}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--list", action="store_true", help="print the rows and when they were measured")
    add("--merge", type=Path, metavar="FILE", help="take rows of a file into results/")
    add("--only", nargs="+", default=["*"], help="labels, for example 'FSDP*'")
    add("--skip", nargs="+", default=[], help="labels that are left out")
    add("--missing", action="store_true", help="only rows that the output does not have")
    add("--output", type=Path, help="JSON file to write (default: the machine's in results)")
    add("--commit", help="of this code, on a machine without .git")
    add("--folder", type=Path, default="/tmp/measure", help="for tokens, copies and runs")
    add("--limit", type=float, default=150, help="seconds that one run may take")
    add("--seconds", type=float, default=10**9, help="after which no row is started")
    add("--times", type=int, help="number of runs of each row (default: the row's)")
    add("--keep", action="store_true", help="keep the runs' folders")
    add("--tiny", action="store_true", help="small models, to try this file without GPUs")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    if args.merge:
        sys.exit(0 if merge(args.merge) else 2)
    rows = [
        row
        for row in ROWS.values()
        if any(fnmatch.fnmatchcase(row.label, pattern) for pattern in args.only)
        and not any(fnmatch.fnmatchcase(row.label, pattern) for pattern in args.skip)
    ]
    if args.list:
        show(rows)
        return
    if not rows:
        sys.exit("--only names no row: --list shows them.")
    measure_all(rows, args)


def show(rows: list[Row]) -> None:
    files = sorted(RESULTS.glob("*.json"))
    has_rows = (isinstance(json.loads(file.read_text()).get("rows"), list) for file in files)
    found = {file.stem: read_rows(file) for file in itertools.compress(files, has_rows)}
    for row in rows:
        where = [
            f"{name}, {each[row.label]['date']}, {each[row.label]['commit']}"
            for name, each in found.items()
            if row.label in each
        ]
        print(f"{row.label:44}{row.gpus} GPU  {'; '.join(where) or 'not measured'}")


def measure_all(rows: list[Row], args: argparse.Namespace) -> None:
    """Measure rows, those with equally many GPUs side by side; write the file after each row."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what runs is killed
    available = torch.cuda.device_count()
    if not available and not args.tiny:
        sys.exit("There is no GPU here: --tiny tries the rows without.")
    machine = describe_machine()
    commit = args.commit or this_commit()
    output = args.output or (args.folder / "tiny.json" if args.tiny else file_of(machine))
    known = read_rows(output)
    write_tokens(args.folder / "tokens")
    write_models(args.folder)
    write_weights(args.folder, rows, args.tiny)
    begun, lock = time.monotonic(), threading.Lock()
    fit = [row for row in rows if row.gpus <= (available or 8)]
    if args.missing:
        fit = [
            row
            for row in fit
            if not any("failed" not in run for run in known.get(row.label, {}).get("runs", []))
        ]

    def one(row: Row) -> None:
        if time.monotonic() - begun > args.seconds:
            return
        devices = free.get()
        start = time.monotonic()
        try:
            command, runs = measure(row, devices, args)
        except variants.VariantError as error:
            command, runs = "", [{"failed": str(error)}]
        finally:
            free.put(devices)
        with lock:
            known[row.label] = {
                "label": row.label,
                "row": row.definition(),
                "command": command,
                "commit": commit,
                "checksum": checksum_here(row),
                "date": machine["date"],
                "machine": machine,
                "took_s": time.monotonic() - start,
                "runs": runs,
                **({"tiny": True} if args.tiny else {}),
            }
            write_rows(output, known)
            shown = runs[-1].get("failed", "")[-1500:] or ", ".join(
                f"{key} {runs[-1][key]:,.1f}"
                for key in ("tokens_per_s", "peak_mem_gib", "time/total", "start_s")
            )
            failed = "failed: " if "failed" in runs[-1] else ""
            print(f"{row.label} ({time.monotonic() - start:.0f} s): {failed}{shown}", flush=True)

    for gpus, group in itertools.groupby(fit, key=lambda row: row.gpus):
        free: queue.Queue[list[int]] = queue.Queue()
        for first in range(0, (available or gpus) - gpus + 1, gpus):
            free.put(list(range(first, first + gpus)))
        with ThreadPoolExecutor(free.qsize()) as pool:
            list(pool.map(one, group))
    print(f"wrote {output}")


if __name__ == "__main__":
    main()

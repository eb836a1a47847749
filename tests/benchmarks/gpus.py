"""What training on GPUs costs: speed and memory of the chapters' own scripts, on synthetic tokens.

python tests/benchmarks/gpus.py parallel scaling --output gpus.json

    parallel     one long sequence on two GPUs: FSDP, context parallelism, Ulysses and tensor
                 parallelism, a Llama of 1B
    scaling      the same global batch on 1, 2 and 4 GPUs: DDP and FSDP, GPT-2
    determinism  the same command twice, also with PyTorch's deterministic algorithms, GPT-2
    chunked      the variant chunked-loss and chapter 5 on one GPU, a Llama of 1B and GPT-2
    documents    the variant document-mask and chapter 5 on one GPU, a Llama of 1B; the end-of-text
                 token of the preset's tokenizer occurs about every 4,000 tokens

A run is killed when it has logged enough steps: it neither evaluates nor saves at its end. The
result file is written after each run. If it exists, the runs that it has are not done again.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import torch
from machine import (
    REPOSITORY,
    TORCHRUN,
    copy_chapter,
    environment,
    output_parser,
    read_metrics,
    replace_in,
    write_result,
)

GPUS = torch.cuda.device_count() or 2  # without GPUs, processes
DDP, MIXED = "02-ddp", "05-mixed-precision"
NEVER = 10**6
LIMIT_S = 150  # that one run may take
GPT2 = "-m gpt2 -s 1024 --lr 3e-4"
LLAMA_1B = {  # of Llama 3.2 1B, in the configuration of Llama 3.1 8B
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
SETUP = "    # --- setup ---\n"
DETERMINISTIC = f"{SETUP}    torch.use_deterministic_algorithms(True)\n"
# Async tensor parallelism: the compiler cuts a matmul into pieces, and sends a piece while it
# computes the next one.
ASYNC = """    if args.compile:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group
        enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
        torch._inductor.config._micro_pipeline_tp = True
"""
COMPILE = "    if args.compile:\n"
CHUNKS = "chunk_tokens=4096"
# What attention was before its two parts were merged.
NOT_MERGED = ("return fits and bool(torch.version.cuda)", "return False and bool(fits)")


@dataclass
class Row:
    label: str
    gpus: int
    chapter: str | Path  # a folder of the repository, or a changed copy
    args: str
    steps: int
    warm_up: int  # steps that are not counted
    environment: dict = field(default_factory=dict)
    times: int = 1  # that it runs


# --- tokens, a model and runs ---


def write_tokens(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, size in (("val", 2**21), ("train", 2**26)):
        # Each token has 16 possible successors, so that there is something to learn.
        steps = np.random.default_rng(size).integers(1, 17, size)
        np.save(folder / f"{part}_0.npy", (np.cumsum(steps) % 4096).astype(np.uint16))


def write_llama_1b(folder: Path) -> str:
    """Write the configuration of a Llama of 1B; return arguments for it."""
    config = json.loads((REPOSITORY / "common/inputs/presets/llama-3.1-8b/config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | LLAMA_1B))
    return f"-m {folder} --tokenizer-name gpt2-tiny --lr 1e-5"


def command_of(row: Row, folder: Path, args: argparse.Namespace) -> list[str]:
    """Return the command of a row, whose run is in `folder`/run."""
    words = f"--save-dir {folder} -e run --max-steps {NEVER} --eval-freq {NEVER}"
    words += f" --ckpt-freq {NEVER} -d {args.folder / 'tokens'} {row.args}"
    if args.tiny:
        words = f"{words} -s 64".replace("-m gpt2 ", "-m gpt2-tiny ").replace(" --compile", "")
    script = REPOSITORY / row.chapter / "train_llm.py"
    return [*TORCHRUN, str(row.gpus), str(script), *shlex.split(words)]


def measure(row: Row, command: list[str], folder: Path) -> dict:
    """Run a row until it has logged all steps; return its medians and losses, or how it failed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    threads = max(1, os.cpu_count() // GPUS // 2)
    variables = environment(OMP_NUM_THREADS=threads, **row.environment)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
    begun, lines = time.monotonic(), []
    try:
        while not lines or lines[-1]["step"] < row.steps:
            if process.poll() is not None or time.monotonic() - begun > LIMIT_S:
                return {"failed": (folder / "log").read_text()[-4000:]}
            time.sleep(0.05)
            lines = read_metrics(folder / "run")
    finally:
        kill(process)
    counted = [line for line in lines if row.warm_up < line["step"] <= row.steps]
    keys = [key for key, value in counted[0].items() if isinstance(value, float)]
    medians = {key: statistics.median(line[key] for line in counted) for key in keys}
    return {**medians, "losses": {line["step"]: line["loss"] for line in lines}}


def kill(process: subprocess.Popen) -> None:
    """Kill the launcher and the processes that it has started."""
    if process.poll() is None:
        launcher = psutil.Process(process.pid)
        processes = [*launcher.children(recursive=True), launcher]
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(processes, 30)


# --- parts ---


def parallel(args: argparse.Namespace) -> list[Row]:
    folder = args.folder
    model = "-m llama-tiny-8-heads" if args.tiny else write_llama_1b(folder / "llama-1b")
    context = copy_chapter(MIXED, folder / "context", "context-parallel", "mesh")
    not_merged = copy_chapter(context, folder / "not-merged")
    replace_in(not_merged / "context_attention.py", *NOT_MERGED)
    tensor = copy_chapter(MIXED, folder / "tensor", "mesh", "tensor-parallel")
    pipelined = copy_chapter(tensor, folder / "async")
    replace_in(pipelined / "train_llm.py", COMPILE, ASYNC + COMPILE)
    with_context, with_tensor = "--context-parallel 2", "--tensor-parallel 2"
    ulysses = f"{with_context} --ulysses"
    rows = []

    def add(label: str, chapter: str | Path, length: int, sequences: int, flags: str = "") -> None:
        long = length > 16384
        per_gpu = sequences // 2 if chapter == MIXED else sequences
        words = f"{model} -s {length} -b {per_gpu} --global-batch-size {sequences} {flags}"
        words += " --activation-checkpointing --log-freq 1" if long else " --log-freq 4"
        steps, warm_up = (6, 2) if long else (20, 8)
        rows.append(Row(label, 2, chapter, words, steps, warm_up))

    for length, compile in product((65536, 8192), ("", " --compile")):
        name = f"{length}{', compiled' if compile else ''}"
        add(f"FSDP, {name}", MIXED, length, 2, compile)
        add(f"context, {name}", context, length, 1, with_context + compile)
        add(f"Ulysses, {name}", context, length, 1, ulysses + compile)
        if length == 8192:
            add(f"tensor, {name}", tensor, length, 1, with_tensor + compile)
    four = "8192, compiled, 4 sequences"
    add("context, not merged, 65536", not_merged, 65536, 1, with_context)
    add(f"FSDP, {four} per GPU", MIXED, 8192, 8, "--compile")
    add(f"tensor, {four}", tensor, 8192, 4, f"{with_tensor} --compile")
    add("async tensor, 8192, compiled", pipelined, 8192, 1, f"{with_tensor} --compile")
    add(f"async tensor, {four}", pipelined, 8192, 4, f"{with_tensor} --compile")
    add("context, 131072", context, 131072, 1, with_context)
    add("Ulysses, 131072", context, 131072, 1, ulysses)
    return rows


def scaling(args: argparse.Namespace) -> list[Row]:
    ddp = copy_chapter(DDP, args.folder / "ddp", "autocast", "workers")
    fsdp = copy_chapter(MIXED, args.folder / "fsdp", "workers")
    rows = []
    for sequences, gpus in product((512, 64, 32, 16), (1, 2, 4)):
        freq = 2 if sequences == 512 else 10
        words = f"{GPT2} --compile -b {min(64, sequences // gpus)}"
        words += f" --global-batch-size {sequences} --num-workers 2 --log-freq {freq}"
        chapters = {"DDP": ddp, "FSDP": fsdp} if sequences == 512 else {"DDP": ddp}
        for name, chapter in chapters.items():
            label = f"{name}, {sequences} sequences on {gpus}"
            rows.append(Row(label, gpus, chapter, words, 10 * freq, 4 * freq))
    return rows


def determinism(args: argparse.Namespace) -> list[Row]:
    copy = copy_chapter(MIXED, args.folder / "deterministic")
    replace_in(copy / "train_llm.py", SETUP, DETERMINISTIC)
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    rows = []
    for compile in ("", " --compile"):
        # The built-in corpus: on real text, differences grow as in a real run.
        words = f"{GPT2} -d python-stdlib -b 8 --global-batch-size 8 --log-freq 10{compile}"
        name = ", compiled" if compile else ""
        rows += [
            Row(f"plain{name}", 1, MIXED, words, 500, 100, times=2),
            Row(f"deterministic{name}", 1, copy, words, 500, 100, fixed, times=2),
        ]
    return rows


def chunked(args: argparse.Namespace) -> list[Row]:
    model = "-m llama-tiny" if args.tiny else write_llama_1b(args.folder / "llama-1b")
    chapters = {"all logits": MIXED}
    for chunk in (4096, 2048, 8192):
        copy = copy_chapter(MIXED, args.folder / f"chunks-{chunk}", "chunked-loss")
        replace_in(copy / "train_llm.py", CHUNKS, CHUNKS.replace("4096", str(chunk)))
        chapters[f"chunks of {chunk}"] = copy
    rows = []
    for sequences, (name, chapter) in product((1, 4), chapters.items()):
        words = f"{model} -s 8192 -b {sequences} --global-batch-size {sequences} --compile"
        label = f"{name}, {sequences} sequence{'s' * (sequences > 1)}"
        rows.append(Row(label, 1, chapter, f"{words} --log-freq 4", 28, 12))
    for name in ("all logits", "chunks of 4096"):
        words = f"{GPT2} -b 64 --global-batch-size 64 --compile --log-freq 10"
        rows.append(Row(f"GPT-2, {name}", 1, chapters[name], words, 70, 30))
    return rows


def documents(args: argparse.Namespace) -> list[Row]:
    model = "-m llama-tiny" if args.tiny else write_llama_1b(args.folder / "llama-1b")
    apart = copy_chapter(MIXED, args.folder / "apart", "document-mask")
    rows = []
    for sequences, (name, chapter) in product((1, 4), {"one": MIXED, "apart": apart}.items()):
        words = f"{model} -s 8192 -b {sequences} --global-batch-size {sequences} --compile"
        label = f"documents {name}, {sequences} sequence{'s' * (sequences > 1)}"
        rows.append(Row(label, 1, chapter, f"{words} --log-freq 4", 28, 12))
    return rows


PARTS = {part.__name__: part for part in (parallel, scaling, determinism, chunked, documents)}


def main() -> None:
    parser = output_parser(__doc__)
    add = parser.add_argument
    add("parts", nargs="+", choices=PARTS, help="what to measure, in this order")
    add("--folder", type=Path, default="/tmp/gpus", help="for tokens, copies and runs")
    add("--only", nargs="+", default=["*"], help="labels, for example 'FSDP*'")
    add("--tiny", action="store_true", help="small models, to try this file without GPUs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what runs is killed
    known = json.loads(args.output.read_text())["results"]["rows"] if args.output.exists() else []
    results = {row["label"]: row for row in known}
    write_tokens(args.folder / "tokens")
    for row in (row for part in args.parts for row in PARTS[part](args)):
        wanted = any(fnmatch.fnmatchcase(row.label, pattern) for pattern in args.only)
        if row.gpus > GPUS or not wanted:
            continue
        folder = args.folder / "runs" / row.label.replace(",", "").replace(" ", "-")
        command = command_of(row, folder, args)
        known = results[row.label]["runs"] if row.label in results else []
        runs = [each for each in known if "failed" not in each]
        shown = {"chapter": Path(row.chapter).name, "command": shlex.join(["python", *command[1:]])}
        for _ in range(len(runs), row.times):
            runs.append(measure(row, command, folder))
            results[row.label] = {**vars(row), **shown, "runs": runs}
            write_result(args.output, {"gpus": GPUS, "rows": [*results.values()]})
            print(row.label, {key: runs[-1][key] for key in runs[-1] if key != "losses"})


if __name__ == "__main__":
    main()

"""What training on GPUs costs: speed and memory of the chapters' own scripts, on synthetic tokens.

python tests/benchmarks/gpus.py parallel scaling --output gpus.json

    parallel     one long sequence on two GPUs: FSDP, context parallelism, Ulysses and tensor
                 parallelism, a Llama of 1B
    scaling      the same global batch on 1, 2 and 4 GPUs: DDP and FSDP, GPT-2
    determinism  the same command twice, also with PyTorch's deterministic algorithms, GPT-2

Runs start as soon as enough GPUs are free, so several can run side by side. A run is killed when it
has logged enough steps: it neither evaluates nor saves at its end. The result file is written after
each run. If it exists, the runs that it has are not done again.
"""

import argparse
import atexit
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
from pathlib import Path

import numpy as np
import psutil
import torch
from machine import file_name, write_result
from transformers import AutoConfig, AutoModelForCausalLM

REPOSITORY = Path(__file__).resolve().parents[2]
PRESETS = REPOSITORY / "common/presets"
SINGLE, DDP, MIXED = "01-single-gpu", "02-ddp", "05-mixed-precision"
NEVER = 10**6
GPT2 = "-m gpt2 -s 1024 --lr 3e-4"
LLAMA_1B = {  # of Llama 3.2 1B, in the configuration of Llama 3.1 8B
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
FULL = "--activation-checkpointing full"
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
# What attention was before its two parts were merged.
NOT_MERGED = ("return fits and bool(torch.version.cuda)", "return False and bool(fits)")


@dataclass(eq=False)
class Row:
    label: str
    gpus: int
    chapter: str | Path  # a folder of the repository, or a changed copy
    args: str
    steps: int
    warm_up: int  # steps that are not counted
    environment: dict = field(default_factory=dict)
    runs: list = field(default_factory=list)
    command: str = ""


class Benchmark:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.results, self.started = args, {}, 0
        if args.output.exists():
            rows = json.loads(args.output.read_text())["results"]["rows"]
            self.results = {row["label"]: row for row in rows}
        self.folder = Path(args.folder).resolve()
        self.begun = time.monotonic()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # names of the GPUs that may be used
        self.visible = [str(n) for n in range(64)] if visible is None else visible.split(",")
        self.tokens = self.folder / "tokens"
        self.tokens.mkdir(parents=True, exist_ok=True)
        for part, size in (("val", 2**21), ("train", 2**26)):
            # Each token has 16 possible successors, so that there is something to learn.
            steps = np.random.default_rng(size).integers(1, 17, size)
            np.save(self.tokens / f"{part}_0.npy", (np.cumsum(steps) % 4096).astype(np.uint16))

    # --- changed copies of chapters, and models ---

    def changed(
        self,
        name: str,
        chapter: str | Path,
        diff: str | None = None,
        replaced: tuple[str, str] | None = None,
        file: str = "train_llm.py",
    ) -> Path:
        """Return a copy of a chapter, with a diff of chapter 5 applied or a text replaced."""
        source = REPOSITORY / chapter
        copy = self.folder / name / source.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        if diff:
            path = REPOSITORY / MIXED / "diffs" / diff
            subprocess.run(["git", "apply", path], cwd=copy.parent, check=True)
        if replaced:
            text = (copy / file).read_text()
            assert replaced[0] in text, replaced[0]
            (copy / file).write_text(text.replace(*replaced))
        return copy

    def llama_1b(self) -> str:
        """Return arguments for a Llama of 1B, whose weights the first call draws."""
        if self.args.tiny:
            return "-m llama-tiny-8-heads --lr 1e-4"
        folder = self.folder / "llama-1b"
        if not list(folder.glob("*.safetensors")):
            config = AutoConfig.from_pretrained(PRESETS / "llama-3.1-8b", **LLAMA_1B)
            torch.manual_seed(0)
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(folder)
            del model
            torch.cuda.empty_cache()
        return f"-m {folder} --pretrained --tokenizer-name gpt2-tiny --lr 1e-5"

    # --- runs ---

    def run(self, rows: list[Row]) -> None:
        """Run the rows, as many side by side as there are GPUs for, and report each."""
        waiting = [
            row
            for row in rows
            if row.gpus <= self.args.gpus
            and any(fnmatch.fnmatchcase(row.label, pattern) for pattern in self.args.only)
        ]
        for label, known in self.results.items():
            for run in (run for run in known["runs"] if "failed" not in run):
                if same := [row for row in waiting if row.label == label]:
                    same[0].runs.append(run)
                    waiting.remove(same[0])
        free, running = list(range(self.args.gpus)), []
        while waiting or running:
            fits = [row for row in waiting if row.gpus <= len(free)]
            if time.monotonic() - self.begun > self.args.seconds:
                fits = waiting = []
            if fits:
                waiting.remove(fits[0])
                gpus, free = free[: fits[0].gpus], free[fits[0].gpus :]
                running.append(Run(self, fits[0], gpus))
                continue
            time.sleep(0.05)
            for run in running:
                if run.has_ended():
                    running.remove(run)
                    free = sorted(free + run.gpus)
                    self.report(run)
                    break

    def report(self, run: "Run") -> None:
        """Write the result file with this run and all earlier ones, and print the run."""
        run.row.runs.append(run.found)
        shown = {**vars(run.row), "chapter": Path(run.row.chapter).name}
        self.results[run.row.label] = {key: shown[key] for key in shown if key != "args"}
        rows = [*self.results.values()]
        write_result(self.args.output, {"gpus": self.args.gpus, "rows": rows})
        seconds = time.monotonic() - self.begun
        shown = {key: value for key, value in run.found.items() if key != "losses"}
        print(f"{seconds:4.0f} s  {run.row.label}: {shown}", flush=True)


class Run:
    """A row that runs on some GPUs. `found` has its medians when it has ended."""

    def __init__(self, benchmark: Benchmark, row: Row, gpus: list[int]) -> None:
        self.row, self.gpus, self.limit = row, gpus, benchmark.args.limit
        self.begun = time.monotonic()
        benchmark.started += 1
        self.folder = benchmark.folder / "runs" / f"{benchmark.started}-{file_name(row.label)}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        args = f"--save-dir {self.folder} -e run --max-steps {NEVER} --eval-freq {NEVER}"
        args += f" --ckpt-freq {NEVER} {row.args}"
        if " -d " not in args:
            args += f" -d {benchmark.tokens}"
        if benchmark.args.tiny:
            args = f"{args} ".replace("-m gpt2 ", "-m gpt2-tiny ").replace(" --compile ", " ")
        words = [str(REPOSITORY / row.chapter / "train_llm.py"), *shlex.split(args)]
        if Path(row.chapter).name != SINGLE:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            words = [*launch, str(row.gpus), *words]
        row.command = shlex.join(["python", *words])
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": str(max(1, os.cpu_count() // benchmark.args.gpus // 2)),
            "TORCHINDUCTOR_CACHE_DIR": str(benchmark.folder / "inductor"),
            "WANDB_MODE": "disabled",
            **row.environment,
        }
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(benchmark.visible[n] for n in gpus)
        self.log = self.folder / "log"
        with self.log.open("w") as log:
            options = {"env": environment, "stdout": log, "stderr": log}
            self.process = subprocess.Popen([sys.executable, *words], **options)
        atexit.register(self.stop)

    def lines(self) -> list[dict]:
        """Return what the run has logged so far, one dictionary for each logged step."""
        file = self.folder / "run/metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]  # the last one is cut off

    def has_ended(self) -> bool:
        """Return whether it has logged all steps, has failed or takes too long; then stop it."""
        lines, seconds = self.lines(), time.monotonic() - self.begun
        finished = bool(lines) and lines[-1]["step"] >= self.row.steps
        if not finished and self.process.poll() is None and seconds < self.limit:
            return False
        self.stop()
        if not finished:
            self.found = {"failed": self.log.read_text()[-4000:]}
            return True
        counted = [line for line in lines if self.row.warm_up < line["step"] <= self.row.steps]
        keys = [key for key, value in counted[0].items() if isinstance(value, float)]
        self.found = {key: statistics.median(line[key] for line in counted) for key in keys}
        self.found["losses"] = {line["step"]: line["loss"] for line in lines}
        return True

    def stop(self) -> None:
        """Kill the launcher and the processes that it has started."""
        if self.process.poll() is not None:
            return
        parent = psutil.Process(self.process.pid)
        processes = [*parent.children(recursive=True), parent]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, 30)
        self.process.wait(30)


# --- parts ---


def parallel(benchmark: Benchmark) -> list[Row]:
    model = benchmark.llama_1b()
    context = benchmark.changed("context", MIXED, "context-parallel.diff")
    tensor = benchmark.changed("tensor", MIXED, "tensor-parallel.diff")
    not_merged = benchmark.changed(
        "not-merged", context, replaced=NOT_MERGED, file="context_attention.py"
    )
    pipelined = benchmark.changed("async", tensor, replaced=(COMPILE, ASYNC + COMPILE))
    ulysses = "--context-parallel 2 --ulysses"

    def row(label: str, chapter: str | Path, length: int, sequences: int, more: str) -> Row:
        length = 64 if benchmark.args.tiny else length
        long = length > 16384
        per_gpu = sequences // 2 if chapter == MIXED else sequences
        args = f"{model} -s {length} -b {per_gpu} --global-batch-size {sequences} {more}"
        args += f" {FULL} --log-freq 1" if long else " --log-freq 4"
        return Row(label, 2, chapter, args, *((6, 2) if long else (20, 8)))

    rows = []
    for length, compile in ((65536, ""), (65536, "--compile"), (8192, "--compile"), (8192, "")):
        name = f"{length}{', compiled' if compile else ''}"
        rows += [
            row(f"FSDP, {name}", MIXED, length, 2, compile),
            row(f"context, {name}", context, length, 1, f"--context-parallel 2 {compile}"),
            row(f"Ulysses, {name}", context, length, 1, f"{ulysses} {compile}"),
        ]
        if length == 8192:
            rows.append(row(f"tensor, {name}", tensor, length, 1, f"--tensor-parallel 2 {compile}"))
    rows[1:1] = [row("context, not merged, 65536", not_merged, 65536, 1, "--context-parallel 2")]
    four = "8192, compiled, 4 sequences"
    tensor_2 = "--tensor-parallel 2 --compile"
    rows += [
        row(f"FSDP, {four} per GPU", MIXED, 8192, 8, "--compile"),
        row(f"tensor, {four}", tensor, 8192, 4, tensor_2),
        row("async tensor, 8192, compiled", pipelined, 8192, 1, tensor_2),
        row(f"async tensor, {four}", pipelined, 8192, 4, tensor_2),
        row("context, 131072", context, 131072, 1, "--context-parallel 2"),
        row("Ulysses, 131072", context, 131072, 1, ulysses),
    ]
    return sorted(rows, key=lambda row: row.label.endswith(", 8192"))


def scaling(benchmark: Benchmark) -> list[Row]:
    ddp = benchmark.changed("autocast-02", DDP, "autocast-02.diff")
    rows = []
    for sequences in (512, 64, 32, 16):
        for gpus in (1, 2, 4):
            per_gpu = 2 if benchmark.args.tiny else min(64, sequences // gpus)
            args = f"{GPT2} --compile -b {per_gpu} --global-batch-size {sequences}"
            freq = 2 if sequences == 512 else 10
            args += f" --num-workers 2 --log-freq {freq}"
            for name, chapter in (("DDP", ddp), ("FSDP", MIXED))[: 2 if sequences == 512 else 1]:
                label = f"{name}, {sequences} sequences on {gpus}"
                rows.append(Row(label, gpus, chapter, args, 10 * freq, 4 * freq))
    # The most important first, and the longest.
    return sorted(rows, key=lambda row: ("512" not in row.label, "FSDP" in row.label))


def determinism(benchmark: Benchmark) -> list[Row]:
    copy = benchmark.changed("deterministic", MIXED, replaced=(SETUP, DETERMINISTIC))
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    steps = 20 if benchmark.args.tiny else 500
    rows = []
    for compile in ("", " --compile"):
        # The built-in corpus: on real text, differences grow as in a real run.
        args = f"{GPT2} -d python-stdlib -b 8 --global-batch-size 8 --log-freq 10{compile}"
        name = ", compiled" if compile else ""
        rows += [
            Row(f"plain{name}", 1, MIXED, args, steps, steps // 5),
            Row(f"deterministic{name}", 1, copy, args, steps, steps // 5, fixed),
        ] * 2
    return rows


PARTS = {part.__name__: part for part in (parallel, scaling, determinism)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("parts", nargs="+", choices=PARTS, help="what to measure, in this order")
    add("--output", type=Path, required=True, help="JSON file to write")
    add("--gpus", type=int, default=torch.cuda.device_count() or 2, help="how many to use")
    add("--folder", default="/tmp/gpus", help="for tokens, weights and runs")
    add("--only", nargs="+", default=["*"], help="labels, for example 'FSDP*'")
    add("--seconds", type=float, default=3600, help="start no run after this many seconds")
    add("--limit", type=float, default=150, help="seconds that one run may take")
    add("--tiny", action="store_true", help="small models, to try this file without GPUs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # sys.exit calls what atexit knows
    benchmark = Benchmark(args)
    benchmark.run([row for part in args.parts for row in PARTS[part](benchmark)])


if __name__ == "__main__":
    main()

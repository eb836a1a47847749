"""What several GPUs of one host do, in seven parts that take at most ten minutes each.

python tests/benchmarks/many_gpus.py gpt2 --output many_gpus_gpt2.json

    gpt2    tokens/s of GPT-2 124M on 1, 2, 4, ... GPUs, compiled: chapter 2 with autocast-02.diff,
            and chapter 5, which is chapter 4's FSDP in bfloat16
    llama   tokens/s of Llama 3.1 8B with FSDP: bf16 and fp8, selective and full checkpointing
    meshes  FSDP, HSDP and tensor parallelism: losses beside chapter 1, tokens/s
    context context parallelism: losses beside chapter 1; tokens/s of the 8B model for longer and
            longer sequences, beside FSDP alone, until neither fits
    nodes   chapter 3 on two "nodes" that have half of the GPUs each, beside one node
    kills   ranks are killed at random moments: how long training stands still
    saves   the 8B model is saved, synchronously and asynchronously: how long training stands still

A run is a chapter's own script on synthetic tokens. It is killed when it has logged enough steps,
so no run evaluates or saves at its end. The result file is written after each measurement.

With --nanogpt, train_gpt2.py of https://github.com/karpathy/build-nanogpt is measured, too, and
with --torchtitan the package torchtitan 0.2.2, if Python finds it.
"""

import argparse
import atexit
import contextlib
import fnmatch
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
from machine import describe_machine, file_name, visible_gpus
from transformers import AutoConfig, AutoModelForCausalLM

REPOSITORY = Path(__file__).resolve().parents[2]
PRESETS = REPOSITORY / "common/presets"
DDP, NODES, FSDP, MIXED = "02-ddp", "03-multi-node", "04-fsdp", "05-mixed-precision"
NEVER = 10**6
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node"
# Replacements in train_gpt2.py. Nothing else in it needs a download, and no step evaluates.
NANOGPT = {
    r"^from hellaswag import .*|^import tiktoken$|^enc = .*": "",
    r"^use_compile = False": "use_compile = True",
    r"^B = 64": "B = {batch}",
    r"^total_batch_size = 524288": "total_batch_size = {total}",
    r"step % 250 == 0 or last_step": "False",
    r"{tokens_per_sec:.2f}": (
        "{tokens_per_sec / ddp_world_size} {torch.cuda.max_memory_allocated() / 2**30}"
    ),
}
NANOGPT_LINE = (
    r"step\s+(?P<step>\d+) .*loss: (?P<loss>\S+) .*sec: (?P<tokens_per_s_per_device>\S+) "
    r"(?P<peak_mem_gib>[\d.]+)"
)
# The memory in torchtitan's log is the memory that the allocator has reserved.
TITAN = """-m torchtitan.train --model.name llama3 --model.flavor 8B
    --training.dataset c4_test --training.dataset_path none --training.steps 12
    --training.seq_len {seq_length} --training.local_batch_size {sequences}
    --training.dataloader.num_workers 1 --metrics.log_freq 2 --metrics.disable_color_printing
    --activation_checkpoint.mode {recompute} --activation_checkpoint.selective_ac_option op
    --compile.enable
    --quantize.linear.float8.enable_fsdp_float8_all_gather
    --quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
    --quantize.linear.float8.filter_fqns output"""
TITAN_LINE = (
    r"step:\s*(?P<step>\d+) .*loss:\s*(?P<loss>\S+) .*memory:\s*(?P<reserved_gib>[\d.]+)GiB"
    r".* tps:\s*(?P<tokens_per_s_per_device>[\d,]+)"
)
TITAN_DATASETS = """
class Dataset(list):
    def skip(self, count):
        return self[count:]
def load_dataset(*args, **kwargs):
    numbers = [str(n * n) for n in range(10000)]
    return Dataset({"text": " ".join(numbers[n : n + 2000])} for n in range(8000))
"""


class Benchmark:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.gpus, self.rows = args, args.gpus, []
        self.folder = Path(args.folder).resolve()
        self.start_time = time.monotonic()
        self.machine = describe_machine()
        self.machine["nccl_environment"] = {k: v for k, v in os.environ.items() if "NCCL" in k}
        self.sequences = args.sequences
        self.tokens = self.folder / "tokens/edu_fineweb10B"  # train_gpt2.py expects this name
        self.tokens.mkdir(parents=True, exist_ok=True)
        for part, size in (("val", 2**21), ("train", 2**26)):
            # Each token has 16 possible successors, so that there is something to learn.
            steps = np.random.default_rng(size).integers(1, 17, size)
            np.save(self.tokens / f"{part}_0.npy", (np.cumsum(steps) % 4096).astype(np.uint16))

    # --- rows ---

    def row(self, label: str, chapter: str | Path, gpus: int, args: str, **more: object) -> dict:
        """Return a row for a chapter's script; chapter may also be the path of a changed copy."""
        script = REPOSITORY / chapter / "train_llm.py"
        more_args = f"-d {self.tokens} -e {file_name(label)} --save-dir {self.folder}/runs"
        more_args += f" --max-steps {NEVER} --eval-freq {NEVER} --ckpt-freq {NEVER}"
        words = [str(script), *shlex.split(f"{more_args} {args}")]
        return {"label": label, "gpus": gpus, "words": words, "environment": {}, **more}

    def copied(self, name: str, chapter: str | Path) -> Path:
        """Return the path of a new copy of a chapter, or of a changed copy."""
        source = REPOSITORY / chapter
        copy = self.folder / name / source.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        return copy

    def changed(self, chapter: str, diff: str) -> Path:
        """Return the path of a copy of a chapter with a diff of chapter 5 applied."""
        copy = self.copied(diff, chapter)
        command = ["git", "apply", REPOSITORY / MIXED / "diffs" / diff]
        subprocess.run(command, cwd=self.folder / diff, check=True)
        return copy

    def llama_model(self) -> str:
        """Return arguments for the 8B model; the first call draws its weights."""
        folder = self.folder / self.args.llama
        if not list(folder.glob("*.safetensors")):
            # On a GPU, this takes seconds.
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                config = AutoConfig.from_pretrained(PRESETS / self.args.llama)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(folder, max_shard_size="4GB")
            del model
            torch.cuda.empty_cache()
        return f"-m {folder} --pretrained --tokenizer-name gpt2-tiny --lr 1e-5"

    def nanogpt(self, label: str, gpus: int, micro_batches: int = 1) -> list[dict]:
        if not self.args.nanogpt:
            return []
        text, batch = self.args.nanogpt.read_text(), self.args.batch_size
        total = batch * 1024 * gpus * micro_batches
        for old, new in NANOGPT.items():
            new = new.replace("{batch}", str(batch)).replace("{total}", str(total))
            text, count = re.subn(old, new, text, flags=re.MULTILINE)
            assert count, f"{self.args.nanogpt} does not contain {old}"
        script = self.folder / "tokens" / f"{file_name(label)}.py"
        script.write_text(text)
        row = {"label": label, "gpus": gpus, "words": [str(script)], "environment": {}}
        return [row | {"line": NANOGPT_LINE}]

    def titan(self, label: str, precision: str, recompute: str) -> list[dict]:
        if not self.args.torchtitan:
            return []
        library = self.folder / "titan/datasets"  # stands for the library that torchtitan imports
        library.mkdir(parents=True, exist_ok=True)
        (library / "__init__.py").write_text(TITAN_DATASETS)
        (library / "distributed.py").write_text("def split_dataset_by_node(data, *_): return data")
        options = {"seq_length": self.args.seq_length, "sequences": self.sequences}
        words = shlex.split(TITAN.format(**options, recompute=recompute))
        words += ["--model.hf_assets_path", str(PRESETS / "tokenizer")]
        words += ["--model.converters", "quantize.linear.float8"] * (precision == "fp8")
        row = {"label": label, "gpus": self.gpus, "words": words, "line": TITAN_LINE}
        return [row | {"environment": {"PYTHONPATH": str(library.parent)}}]

    # --- runs ---

    def start(self, row: dict, first_gpu: int = 0) -> None:
        """Start the launchers of a row on its GPUs; each prints to a log file of its own."""
        nodes, words = row.get("nodes", 1), row["words"]
        gpus_per_node = row["gpus"] // nodes
        row["run_folder"] = folder = self.folder / "runs" / file_name(row["label"])
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        paths = [row["environment"].get("PYTHONPATH"), REPOSITORY, os.environ.get("PYTHONPATH")]
        environment = {
            **os.environ,
            **row["environment"],
            "PYTHONPATH": ":".join(str(path) for path in paths if path),
            "OMP_NUM_THREADS": str(max(1, os.cpu_count() // self.gpus // 2)),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "PYTHONUNBUFFERED": "1",
            "WANDB_MODE": "disabled",
        }
        command = ["python", *TORCHRUN.split(), str(row["gpus"]), *words]
        if "01-single-gpu" in words[0]:
            command = ["python", *words]
        if nodes > 1 or "MAX_RESTARTS" in environment:  # then with the launch file of chapter 3
            launch = {"NPROC_PER_NODE": str(gpus_per_node), "LAUNCH_FILE": words[0]}
            if nodes > 1:
                launch |= {"NNODES": str(nodes), "HEAD": "localhost:29400"}
            row["environment"] = {**row["environment"], **launch}
            environment |= launch | {"PYTHON": sys.executable}
            command = ["bash", f"{REPOSITORY}/{NODES}/launch_torchrun.sh", *words[1:]]
        row["command"] = shlex.join(command)
        command[0] = sys.executable if command[0] == "python" else command[0]
        row["processes"] = []
        atexit.register(stop, [row])
        for node in range(nodes):
            visible = visible_gpus(first_gpu + node * gpus_per_node, gpus_per_node)
            environment["CUDA_VISIBLE_DEVICES"] = visible
            with (folder / f"log-{node}").open("w") as log:
                # train_gpt2.py looks for its tokens in the folder in which it is started.
                options = {"stdout": log, "stderr": log, "cwd": self.folder / "tokens"}
                row["processes"].append(subprocess.Popen(command, env=environment, **options))

    def lines(self, row: dict) -> list[dict]:
        """Return what a run has logged so far, one dictionary for each logged step."""
        if "line" not in row:
            file = row["run_folder"] / "metrics.jsonl"
            text = file.read_text() if file.exists() else ""
            return [json.loads(line) for line in text.split("\n")[:-1]]  # the last one is cut off
        lines = []
        for match in re.finditer(row["line"], (row["run_folder"] / "log-0").read_text()):
            line = {key: float(text.replace(",", "")) for key, text in match.groupdict().items()}
            line["tokens_per_s"] = line["tokens_per_s_per_device"] * row["gpus"]
            lines.append(line)
        return lines

    def watch(self, rows: list[dict], is_done: Callable[[dict], bool]) -> None:
        """Wait for rows, and note in row["seen"] when their newest logged step has changed.

        A row whose launcher ends before it is done, or that takes too long, gets "failed".
        """
        waiting, begun = list(rows), time.monotonic()
        while waiting:
            time.sleep(0.02)
            for row in list(waiting):
                lines, now = self.lines(row), time.monotonic()
                step = lines[-1]["step"] if lines else 0
                seen = row.setdefault("seen", [(begun, 0)])
                if step != seen[-1][1]:
                    seen.append((now, step))
                if is_done(row):
                    waiting.remove(row)
                elif now - begun > self.args.limit or any(
                    p.poll() is not None for p in row["processes"]
                ):
                    logs = sorted(row["run_folder"].glob("log-*"))
                    row["failed"] = [log.read_text()[-3000:] for log in logs]
                    waiting.remove(row)

    def wanted(self, row: dict) -> bool:
        return fnmatch.fnmatchcase(row["label"], self.args.only)

    def measure(self, rows: list[dict], steps: int, warm_up: int, share_gpus: bool = False) -> None:
        """Run rows, side by side if there are GPUs for it; report the medians after the warm-up."""
        rows = [row for row in rows if self.wanted(row)]
        while rows and self.seconds() < self.args.seconds:
            group: list[dict] = []
            for row in rows:
                first = sum(each["gpus"] for each in group)
                if share_gpus or first + row["gpus"] <= self.gpus:
                    row.pop("seen", None)
                    row.pop("failed", None)
                    self.start(row, 0 if share_gpus else first)
                    group.append(row)
            self.watch(group, lambda row: row["seen"][-1][1] >= steps)
            stop(group)
            rows = [row for row in rows if row not in group]
            for row in group:
                row |= {"steps": steps, "warm_up": warm_up, "side_by_side": len(group)}
                if "failed" not in row:
                    row["losses"] = [line["loss"] for line in self.lines(row) if "loss" in line]
                    row.setdefault("runs", []).append(medians(self.lines(row), warm_up, steps))
                    row["runs"][-1]["first_line_s"] = row["seen"][1][0] - row["seen"][0][0]
                self.report(row)

    def report(self, row: dict) -> None:
        """Write the result file with this row and all earlier ones, and print the row."""
        self.rows = [*(other for other in self.rows if other is not row), row]
        internal = ("words", "processes", "seen", "run_folder", "line")
        rows = [{k: v for k, v in each.items() if k not in internal} for each in self.rows]
        results = {"part": self.args.part, "gpus": self.gpus, "seconds": self.seconds()}
        content = {"machine": self.machine, "results": {**results, "rows": rows}}
        self.args.output.write_text(json.dumps(content, indent=1) + "\n")
        shown = {key: row[key] for key in ("runs", "found", "failed") if key in row}
        print(f"{self.seconds():4d} s  {row['label']}: {shown}", flush=True)

    def seconds(self) -> int:
        return round(time.monotonic() - self.start_time)

    # --- parts ---

    def gpt2(self) -> None:
        ddp = self.changed(DDP, "autocast-02.diff")

        def rows(gpus: int, micro_batches: int = 1) -> list[dict]:
            batch = self.args.batch_size
            args = f"{self.args.gpt2} -b {batch} --global-batch-size {batch * gpus * micro_batches}"
            args += f" --num-workers 2 --log-freq {5 if micro_batches == 1 else 2}"
            count = "" if micro_batches == 1 else f", {micro_batches} micro-batches,"
            return [
                self.row(f"chapter 5{count} on {gpus}", MIXED, gpus, args),
                self.row(f"chapter 2 in bf16{count} on {gpus}", ddp, gpus, args),
                *self.nanogpt(f"build-nanogpt{count} on {gpus}", gpus, micro_batches),
            ]

        on_all = rows(self.gpus)
        self.measure(on_all, 60, 20)
        fewer = [2**k for k in reversed(range(4)) if 2**k < self.gpus]
        self.measure([row for gpus in fewer for row in rows(gpus)], 60, 20)
        self.measure(rows(self.gpus, micro_batches=4), 20, 10)
        for _ in range(self.args.runs - 1):
            self.measure(on_all, 60, 20)

    def llama(self) -> None:
        args = f"{self.llama_model()} -s {self.args.seq_length} -b {self.sequences} --compile"
        args += f" --log-freq 2 --global-batch-size {self.sequences * self.gpus}"
        for recompute, precision in itertools.product(("selective", "full"), ("bf16", "fp8")):
            label = f"{precision}, {recompute} checkpointing, on {self.gpus}"
            words = f"{args} --precision {precision} --activation-checkpointing {recompute}"
            rows = [self.row(f"chapter 5, {label}", MIXED, self.gpus, words)]
            rows += self.titan(f"torchtitan, {label}", precision, recompute)
            self.measure(rows, 12, 4)

    def meshes(self) -> None:
        n, parallel = self.gpus, self.changed(MIXED, "tensor-parallel.diff")
        tensor_sizes = [size for size in (2, 4) if size <= n]
        small = "-m llama-tiny-8-heads --log-freq 1"
        exact = {"environment": {"NVIDIA_TF32_OVERRIDE": "0"}}  # float32 for all matmuls
        rows = [
            self.row("losses, chapter 1 on 1", "01-single-gpu", 1, small, **exact),
            self.row(f"losses, FSDP on {n}", FSDP, n, small, **exact),
            self.row(f"losses, HSDP 2 x {n // 2}", FSDP, n, f"{small} --hsdp", nodes=2, **exact),
        ]
        for size in tensor_sizes:
            label = f"losses, tensor parallelism {n // size} x {size}"
            words = f"{small} --precision fp32 --tensor-parallel {size}"
            rows.append(self.row(label, parallel, n, words, **exact))
        self.measure(rows, 20, 0, share_gpus=True)
        args = f"{self.llama_model()} -s {self.args.seq_length} -b 1 --compile --log-freq 1"
        every = f"{args} --global-batch-size {n} --activation-checkpointing full"
        rows = [
            self.row(f"FSDP on {n}", MIXED, n, every),
            self.row(f"HSDP 2 x {n // 2}", MIXED, n, f"{every} --hsdp", nodes=2),
        ]
        for size in tensor_sizes:
            words = f"{args} --global-batch-size {n // size} --tensor-parallel {size}"
            label = f"tensor parallelism {n // size} x {size}, no checkpointing"
            rows.append(self.row(label, parallel, n, words))
        self.measure(rows, 12, 4)

    def context(self) -> None:
        n, parallel = self.gpus, self.changed(MIXED, "context-parallel.diff")
        small = "-m llama-tiny --log-freq 1"
        exact = {"environment": {"NVIDIA_TF32_OVERRIDE": "0"}}
        rows = [self.row("losses, chapter 1 on 1", "01-single-gpu", 1, small, **exact)]
        for size in (size for size in (2, 4, 8) if size <= n):
            words = f"{small} --precision fp32 --context-parallel {size}"
            rows.append(self.row(f"losses, {n // size} x {size}", parallel, n, words, **exact))
        self.measure(rows, 20, 0, share_gpus=True)
        args = f"{self.llama_model()} -b 1 --compile --activation-checkpointing full --log-freq 1"
        for length in (2**k for k in range(13, 18)):  # the model has 131,072 positions
            alone = f"{args} -s {length} --global-batch-size {n}"
            shared = f"{args} -s {length} --global-batch-size 1 --context-parallel {n}"
            rows = [
                self.row(f"FSDP on {n}, {length} tokens", MIXED, n, alone),
                self.row(f"1 x {n}, {length} tokens", parallel, n, shared),
            ]
            self.measure(rows, 6, 2)
            if all("failed" in row for row in rows):
                break

    def nodes(self) -> None:
        n, batch = self.gpus, self.args.batch_size
        args = f"{self.args.gpt2} -b {batch} --global-batch-size {batch * n} --log-freq 5"
        chapter = self.changed(NODES, "autocast-03.diff")
        rows = [
            self.row(f"chapter 3 in bf16, one node of {n}", chapter, n, args),
            self.row(f"chapter 3 in bf16, two nodes of {n // 2}", chapter, n, args, nodes=2),
        ]
        self.measure(rows, 40, 13)

    def kills(self) -> None:
        """Kill random ranks of chapter 5 and let torchrun restart the run."""
        n, batch, count = self.gpus, self.args.batch_size, self.args.kills
        args = f"{self.args.gpt2} -b {batch} --global-batch-size {batch * n} --log-freq 1"
        args += " --ckpt-freq 10 --keep-checkpoints 1"
        environment = {"MAX_RESTARTS": str(count)}
        row = self.row(f"kills on {n}", MIXED, n, args, environment=environment, found=[])
        self.start(row)
        self.watch([row], lambda row: row["seen"][-1][1] >= 15)
        while len(row["found"]) < count and "failed" not in row:
            time.sleep(random.uniform(1, 8))
            rank = random.randrange(n)
            row["found"].append({"rank": rank, **self.hit(row, rank, signal.SIGKILL)})
            self.report(row)
        stop([row])

    def hit(self, row: dict, rank: int, number: int) -> dict[str, float]:
        """Send a rank a signal that ends a run's steps; return how long it stands still."""
        others = [psutil.Process(worker(row, n)) for n in range(row["gpus"]) if n != rank]
        hit = time.monotonic()
        os.kill(worker(row, rank), number)
        time.sleep(0.5)  # a step that was almost done may still be logged
        step = self.lines(row)[-1]["step"]
        row["seen"], ends = [(hit, step)], []

        def is_back(row: dict) -> bool:
            if not ends and not any(other.is_running() for other in others):
                ends.append(time.monotonic() - hit)
            return row["seen"][-1][1] > step

        self.watch([row], is_back)
        # The run has first shortened its metrics to the step of its checkpoint.
        restored = min(step for _, step in row["seen"])
        first = next((t for t, step in row["seen"][1:] if step > restored), float("nan"))
        return {
            "others_end_s": ends[0] if ends else float("nan"),
            "steps_lost": step - restored,
            "stands_still_s": first - hit,
            "caught_up_s": row["seen"][-1][0] - hit,
        }

    def saves(self) -> None:
        """Save the model and its optimizer state twice."""
        every = self.args.save_every
        args = f"{self.llama_model()} -s {self.args.seq_length} -b 1 --log-freq 1"
        args += f" --global-batch-size {self.gpus} --ckpt-freq {every} --keep-checkpoints 1"
        args += " --activation-checkpointing full"
        for label, more in (("asynchronous", " --async-checkpoint"), ("synchronous", "")):
            row = self.row(f"{label} saves on {self.gpus}", MIXED, self.gpus, args + more)
            written: dict[int, float] = {}  # when a checkpoint was complete, by its step

            def is_done(row: dict, written: dict[int, float] = written) -> bool:
                for file in row["run_folder"].glob("checkpoints/step-*/.metadata"):
                    written.setdefault(int(file.parent.name.split("-")[1]), time.monotonic())
                return 2 * every in written and row["seen"][-1][1] > 2 * every

            self.start(row)
            self.watch([row], is_done)
            stop([row])
            times = {step: seconds for seconds, step in row["seen"]}
            step_s = {step: times[step] - times[step - 1] for step in times if step - 1 in times}
            usual = statistics.median(step_s[step] for step in range(3, every))
            row["found"] = [
                {
                    "usual_step_s": usual,
                    "stands_still_s": step_s[step + 1] - usual,
                    "written_s": seconds - times[step],
                }
                for step, seconds in written.items()
                if step + 1 in step_s
            ]
            self.report(row)
            shutil.rmtree(row["run_folder"])  # a checkpoint of 8B parameters has 96 GB


def medians(lines: list[dict], warm_up: int, steps: int) -> dict[str, float]:
    """Return the median of each number over the log lines after the warm-up."""
    lines = [line for line in lines if warm_up < line["step"] <= steps and "loss" in line]
    keys = [key for key, value in lines[0].items() if isinstance(value, float)]
    speeds = [line["tokens_per_s"] for line in lines]
    found = {key: statistics.median(line[key] for line in lines) for key in keys}
    return found | {"slowest": min(speeds), "fastest": max(speeds)}


def worker(row: dict, rank: int) -> int:
    """Return the process id of a rank."""
    children = psutil.Process(row["processes"][0].pid).children(recursive=True)
    return min(child.pid for child in children if child.environ().get("RANK") == str(rank))


def stop(rows: list[dict]) -> None:
    """Kill the launchers of rows, and the processes that they have started."""
    launchers = [each for row in rows for each in row["processes"]]
    processes = [psutil.Process(each.pid) for each in launchers if each.poll() is None]
    processes += [child for each in processes for child in each.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("part", choices=["gpt2", "llama", "meshes", "context", "nodes", "kills", "saves"])
    add("--output", type=Path, required=True, help="JSON file to write")
    add("--gpus", type=int, default=torch.cuda.device_count() or 2, help="2, 4 or 8")
    add("--folder", default="/tmp/many_gpus", help="for tokens, weights and runs")
    add("--only", default="*", help="labels, for example '*on 4'")
    add("--seconds", type=float, default=480, help="start no run after this many seconds")
    add("--limit", type=float, default=240, help="seconds that one run may take")
    add("--runs", type=int, default=2, help="of GPT-2 on all GPUs")
    add("--kills", type=int, default=10)
    add("--gpt2", default="-m gpt2 -s 1024 --compile --lr 3e-4", help="arguments for GPT-2")
    add("--batch-size", type=int, default=64, help="sequences per GPU for GPT-2")
    add("--llama", default="llama-3.1-8b", help="preset of the large model")
    add("--seq-length", type=int, default=8192, help="tokens for the large model")
    add("--sequences", type=int, default=2, help="per GPU for llama; 80 GiB have room for 1")
    add("--nanogpt", type=Path, help="path of build-nanogpt's train_gpt2.py")
    add("--torchtitan", action="store_true", help="measure torchtitan, too")
    add("--save-every", type=int, default=40, help="steps between two saves of the large model")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # sys.exit calls what atexit knows
    getattr(Benchmark(args), args.part)()


if __name__ == "__main__":
    main()

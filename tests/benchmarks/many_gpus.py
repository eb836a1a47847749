"""What several GPUs of one host do, in six parts that take at most ten minutes each.

python tests/benchmarks/many_gpus.py gpt2 --output many_gpus_gpt2.json

    gpt2    tokens/s of GPT-2 124M on 1, 2, 4, ... GPUs, compiled: chapter 2 with autocast-02.diff,
            and chapter 5, which is chapter 4's FSDP in bfloat16
    llama   tokens/s of Llama 3.1 8B with FSDP: bf16 and fp8, selective and full checkpointing
    meshes  FSDP, HSDP and tensor parallelism: losses beside chapter 1, tokens/s, traffic
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
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
from machine import file_name, visible_gpus

REPOSITORY = Path(__file__).resolve().parents[2]
PRESETS = REPOSITORY / "common/presets"
DDP, NODES, FSDP, MIXED = "02-ddp", "03-multi-node", "04-fsdp", "05-mixed-precision"
NEVER = 10**6
SELECTIVE, FULL = (f"--activation-checkpointing {kind}" for kind in ("selective", "full"))
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node"
MACHINE = """
import json, torch
from machine import describe_machine
memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
print(json.dumps(describe_machine() | {"gpu_memory_gib": memory / 2**30}))
"""
# Random weights, drawn on a GPU because their values do not matter.
DRAW = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    config = AutoConfig.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(sys.argv[2], max_shard_size="4GB")
"""
# Replacements in train_gpt2.py. Nothing else in it needs a download, and no step evaluates.
NANOGPT = {
    r"^from hellaswag import .*|^import tiktoken$|^enc = .*": "",
    r"^use_compile = False": "use_compile = True",
    r"^B = 64": "B = {batch}",
    r"^total_batch_size = 524288": "total_batch_size = {total}",
    r"step % 250 == 0 or last_step": "False",
    r"{tokens_per_sec:.2f}": "{tokens_per_sec:.2f} {torch.cuda.max_memory_allocated() / 2**30}",
}
NANOGPT_LINE = (
    r"step\s+(?P<step>\d+) .*loss: (?P<loss>\S+) .*sec: (?P<tokens_per_s>\S+) "
    r"(?P<peak_mem_gib>[\d.]+)"
)
# The memory in torchtitan's log is the memory that the allocator has reserved.
TITAN = """-m torchtitan.train --model.name llama3 --model.flavor 8B
    --training.dataset c4_test --training.dataset_path none --training.steps {steps}
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
ITEM_BYTES = {"Byte": 1, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8}
# PyTorch's Flight Recorder notes the collectives of a rank, and writes them when it is asked to.
RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "4000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "{folder}/pipe-",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "{folder}/record-",
    "TORCH_FR_DUMP_TEMP_FILE": "{folder}/record-",
}


class Benchmark:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.gpus, self.rows = args, args.gpus, []
        self.folder = Path(args.folder).resolve()
        self.start_time = time.monotonic()
        described = subprocess.check_output(
            [sys.executable, "-c", MACHINE], cwd=Path(__file__).parent
        )
        self.machine = json.loads(described) | {"command": shlex.join(["python", *sys.argv])}
        self.machine["nccl_environment"] = {k: v for k, v in os.environ.items() if "NCCL" in k}
        self.sequences = args.sequences or (2 if self.machine["gpu_memory_gib"] > 100 else 1)
        self.tokens = self.folder / "tokens/edu_fineweb10B"  # train_gpt2.py expects this name
        self.tokens.mkdir(parents=True, exist_ok=True)
        for part, size in (("val", 2**21), ("train", 2**26)):
            # Each token has 16 possible successors, so that there is something to learn.
            steps = np.random.default_rng(size).integers(1, 17, size)
            np.save(self.tokens / f"{part}_0.npy", (np.cumsum(steps) % 4096).astype(np.uint16))

    # --- rows ---

    def row(self, label: str, chapter: str | Path, gpus: int, args: str, **more: object) -> dict:
        """Return a row for a chapter's script; chapter may also be the path of a changed copy.

        nodes: how many launchers start the ranks. environment: variables for the run.
        """
        script = REPOSITORY / chapter / "train_llm.py"
        args = f"{args} -d {self.tokens} -e {file_name(label)} --save-dir {self.folder}/runs"
        args += f" --max-steps {NEVER} --eval-freq {NEVER}"
        args += "" if "--ckpt-freq" in args else f" --ckpt-freq {NEVER}"
        words = [str(script), *shlex.split(args)]
        row = {"label": label, "gpus": gpus, "words": words, "environment": {}, **more}
        return row | {"environment": dict(row["environment"])}

    def changed(self, chapter: str, diff: str) -> Path:
        """Return the path of a copy of a chapter with a diff of chapter 5 applied."""
        copy = self.folder / diff / chapter
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(REPOSITORY / chapter, copy)
        content = (REPOSITORY / MIXED / diff).read_bytes()
        subprocess.run(["git", "apply"], input=content, cwd=self.folder / diff, check=True)
        return copy

    def llama_model(self) -> str:
        """Return arguments for the 8B model; the first call draws its weights."""
        folder = self.folder / self.args.llama
        if not (folder / "config.json").exists():
            source = PRESETS / self.args.llama
            subprocess.run([sys.executable, "-c", DRAW, source, folder], check=True)
        return f"-m {folder} --pretrained --tokenizer-name gpt2-tiny --lr 1e-5"

    def nanogpt(self, label: str, gpus: int, micro_batches: int = 1) -> list[dict]:
        if not self.args.nanogpt or not self.args.nanogpt.exists():
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
        return [row | {"line": NANOGPT_LINE, "where": self.folder / "tokens"}]

    def titan(self, label: str, precision: str, recompute: str, steps: int) -> list[dict]:
        if not self.args.torchtitan:
            return []
        library = self.folder / "titan/datasets"  # stands for the library that torchtitan imports
        library.mkdir(parents=True, exist_ok=True)
        (library / "__init__.py").write_text(TITAN_DATASETS)
        (library / "distributed.py").write_text("def split_dataset_by_node(data, *_): return data")
        options = {"seq_length": self.args.seq_length, "sequences": self.sequences}
        words = shlex.split(TITAN.format(**options, recompute=recompute, steps=steps))
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
            **{k: v.format(folder=folder) for k, v in row["environment"].items()},
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
                launch |= {"NNODES": str(nodes), "HEAD": f"localhost:{free_port()}"}
            row["environment"] |= launch
            environment |= launch | {"PYTHON": sys.executable}
            command = ["bash", f"{NODES}/launch_torchrun.sh", *words[1:]]
        row["command"] = shlex.join(command)
        command[0] = sys.executable if command[0] == "python" else command[0]
        row["processes"] = []
        for node in range(nodes):
            if torch.cuda.is_available():
                visible = visible_gpus(first_gpu + node * gpus_per_node, gpus_per_node)
                environment["CUDA_VISIBLE_DEVICES"] = visible
            if not node:
                atexit.register(stop, [row])
            with (folder / f"log-{node}").open("w") as log:
                options = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment}
                where = row.get("where", REPOSITORY)
                row["processes"].append(subprocess.Popen(command, cwd=where, **options))

    def lines(self, row: dict) -> list[dict]:
        """Return what a run has logged so far, one dictionary for each logged step."""
        if "line" not in row:
            file = row["run_folder"] / "metrics.jsonl"
            text = file.read_text() if file.exists() else ""
            return [json.loads(line) for line in text.split("\n")[:-1]]  # the last one is cut off
        lines = []
        for match in re.finditer(row["line"], (row["run_folder"] / "log-0").read_text()):
            line = {key: float(text.replace(",", "")) for key, text in match.groupdict().items()}
            if "tokens_per_s" in line:
                line["tokens_per_s_per_device"] = line["tokens_per_s"] / row["gpus"]
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

    def measure(self, rows: list[dict], steps: int, warm_up: int, share_gpus: bool = False) -> None:
        """Run rows, side by side if there are GPUs for it; report the medians after the warm-up."""
        rows = [row for row in rows if fnmatch.fnmatchcase(row["label"], self.args.only)]

        def is_done(row: dict) -> bool:
            done = row["seen"][-1][1] >= steps
            return done and ("TORCH_FR_BUFFER_SIZE" not in row["environment"] or recorded(row))

        while rows and self.seconds() < self.args.seconds:
            group: list[dict] = []
            for row in rows:
                first = sum(each["gpus"] for each in group)
                if share_gpus or first + row["gpus"] <= self.gpus:
                    row.pop("seen", None)
                    row.pop("failed", None)
                    self.start(row, 0 if share_gpus else first)
                    group.append(row)
            self.watch(group, is_done)
            stop(group)
            rows = [row for row in rows if row not in group]
            for row in group:
                row |= {"steps": steps, "warm_up": warm_up, "side_by_side": len(group)}
                if "failed" not in row:
                    row["losses"] = [line["loss"] for line in self.lines(row) if "loss" in line]
                    row.setdefault("runs", []).append(medians(self.lines(row), warm_up, steps))
                    row["runs"][-1]["first_line_s"] = row["seen"][1][0] - row["seen"][0][0]
                    if (record := row["run_folder"] / "record-0").exists():
                        row["one_step_of_rank_0"] = traffic(record)
                self.report(row)

    def report(self, row: dict) -> None:
        """Write the result file with this row and all earlier ones, and print the row."""
        self.rows = [*(other for other in self.rows if other is not row), row]
        on_one = {each["label"]: each["runs"] for each in self.rows if "runs" in each}
        for each in self.rows:
            base = on_one.get(re.sub(r" on \d+$", " on 1", each["label"]))
            if base and "runs" in each and each["gpus"] > 1:
                speed = max(run["tokens_per_s_per_device"] for run in each["runs"])
                each["efficiency"] = speed / max(run["tokens_per_s_per_device"] for run in base)
        internal = ("words", "processes", "seen", "run_folder", "line", "where", "asked")
        rows = [{k: v for k, v in each.items() if k not in internal} for each in self.rows]
        results = {"part": self.args.part, "gpus": self.gpus, "seconds": self.seconds()}
        content = {"machine": self.machine, "results": {**results, "rows": rows}}
        self.args.output.write_text(json.dumps(content, indent=1) + "\n")
        run = row.get("runs", [{}])[-1]
        keys = ("tokens_per_s", "tokens_per_s_per_device", "peak_mem_gib", "reserved_gib", "loss")
        shown = {key: round(run[key], 2) for key in keys if key in run}
        shown |= {key: row[key] for key in ("loss_difference", "found") if key in row}
        print(f"{self.seconds():4d} s  {row['label']}: {shown}", flush=True)
        for text in row.get("failed", ()):
            print("FAILED", text[-1500:], flush=True)

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

        steps = self.args.steps or 60
        on_all = rows(self.gpus)
        self.measure(on_all, steps, steps // 3)
        fewer = [2**k for k in reversed(range(4)) if 2**k < self.gpus]
        self.measure([row for gpus in fewer for row in rows(gpus)], steps, steps // 3)
        self.measure(rows(self.gpus, micro_batches=4), steps // 3, steps // 6)
        for _ in range(self.args.runs - 1):
            self.measure(on_all, steps, steps // 3)

    def llama(self) -> None:
        args = f"{self.llama_model()} -s {self.args.seq_length} -b {self.sequences} --compile"
        args += " --log-freq 2"
        steps = self.args.steps or 12
        for gpus in [self.gpus, self.gpus // 2] if self.gpus > 4 else [self.gpus]:
            batch = f"--global-batch-size {self.sequences * gpus}"
            for recompute, precision in itertools.product(("selective", "full"), ("bf16", "fp8")):
                label = f"{precision}, {recompute} checkpointing, on {gpus}"
                words = (
                    f"{args} {batch} --precision {precision} --activation-checkpointing {recompute}"
                )
                rows = [self.row(f"chapter 5, {label}", MIXED, gpus, words)]
                if gpus == self.gpus:
                    rows += self.titan(f"torchtitan, {label}", precision, recompute, steps)
                self.measure(rows, steps, steps // 3)

    def meshes(self) -> None:
        n, parallel = self.gpus, self.changed(MIXED, "tensor-parallel.diff")
        tensor = [size for size in (2, 4) if size <= n]
        small = "-m llama-tiny-8-heads --log-freq 1"
        exact = {"environment": {"NVIDIA_TF32_OVERRIDE": "0"}}  # float32 for all matmuls
        rows = [
            self.row("losses, chapter 1 on 1", "01-single-gpu", 1, small, **exact),
            self.row(f"losses, FSDP on {n}", FSDP, n, small, **exact),
            self.row(f"losses, HSDP 2 x {n // 2}", FSDP, n, f"{small} --hsdp", nodes=2, **exact),
        ]
        words = f"{small} --precision fp32 --tensor-parallel"
        for size in tensor:
            label = f"losses, tensor parallelism {n // size} x {size}"
            rows.append(self.row(label, parallel, n, f"{words} {size}", **exact))
        self.measure(rows, 20, 0, share_gpus=True)
        self.compare(rows)
        args = f"{self.llama_model()} -s {self.args.seq_length} -b 1 --compile --log-freq 1"
        every = f"{args} --global-batch-size {n}"
        folder = {"environment": RECORDER}
        rows = [
            self.row(f"FSDP on {n}", MIXED, n, f"{every} {FULL}", **folder),
            self.row(f"HSDP 2 x {n // 2}", MIXED, n, f"{every} {FULL} --hsdp", nodes=2, **folder),
        ]
        for size in tensor:
            words = f"{args} --global-batch-size {n // size} --tensor-parallel {size}"
            label = f"tensor parallelism {n // size} x {size}, no checkpointing"
            rows.append(self.row(label, parallel, n, words, **folder))
        rows.append(self.row(f"FSDP, no checkpointing, on {n}", MIXED, n, every, **folder))
        self.measure(rows, self.args.steps or 12, (self.args.steps or 12) // 3)

    def nodes(self) -> None:
        n, batch = self.gpus, self.args.batch_size
        args = f"{self.args.gpt2} -b {batch} --global-batch-size {batch * n} --log-freq 5"
        steps = self.args.steps or 40
        for name, chapter in (
            ("chapter 3 in bf16", self.changed(NODES, "autocast-03.diff")),
            ("chapter 3", NODES),
        ):
            rows = [
                self.row(f"{name}, one node of {n}", chapter, n, args),
                self.row(f"{name}, two nodes of {n // 2}", chapter, n, args, nodes=2),
            ]
            self.measure(rows, steps, steps // 3)
            self.compare(rows)

    def compare(self, rows: list[dict]) -> None:
        """Note the largest relative difference between the losses of a row and of the first one."""
        base = rows[0].get("losses", [])
        for row in rows[1:]:
            pairs = list(zip(row.get("losses", []), base, strict=False))
            if pairs:
                row["loss_difference"] = max(abs(one - two) / two for one, two in pairs)
                self.report(row)

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
            killed = time.monotonic()
            os.kill(worker(row, rank), signal.SIGKILL)
            time.sleep(0.5)  # a step that was almost done may still be logged
            step = self.lines(row)[-1]["step"]
            row["seen"] = [(killed, step)]
            self.watch([row], lambda row, step=step: row["seen"][-1][1] > step)
            # The run has first shortened its metrics to the step of its checkpoint.
            restored = min(step for _, step in row["seen"])
            first = next((t for t, step in row["seen"][1:] if step > restored), math.nan)
            found = {"rank": rank, "steps_lost": step - restored, "stands_still_s": first - killed}
            row["found"].append(found | {"caught_up_s": row["seen"][-1][0] - killed})
            self.report(row)
        stop([row])

    def saves(self) -> None:
        """Save the model and its optimizer state twice."""
        every = self.args.save_every
        args = f"{self.llama_model()} -s {self.args.seq_length} -b 1 {FULL} --log-freq 1"
        args += f" --global-batch-size {self.gpus} --ckpt-freq {every} --keep-checkpoints 1"
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


def recorded(row: dict) -> bool:
    """Ask rank 0 for its record of collectives; return whether it has had the time to write it."""
    if "asked" not in row:
        row["asked"] = time.monotonic()
        (row["run_folder"] / "pipe-0.pipe").write_text("1\n")
    return time.monotonic() > row["asked"] + 8


def traffic(record: Path) -> list[dict]:
    """Return what rank 0 gave to collectives in its last step: calls and bytes of each kind."""
    content = pickle.loads(record.read_bytes())
    steps: list[dict] = [{}]
    for entry in content["entries"]:
        number, group = entry["process_group"]
        ranks = len(json.loads(content["pg_config"][number]["ranks"]))
        sizes = {
            way: sum(map(math.prod, entry[f"{way}_sizes"])) * ITEM_BYTES[entry[f"{way}_dtypes"][0]]
            for way in ("input", "output")
        }
        name = entry["profiling_name"].removeprefix("nccl:")
        total = steps[-1].setdefault((name, group, ranks), {"calls": 0, "bytes": 0})
        total["calls"] += 1
        total["bytes"] += max(sizes.values())
        # At the end of a step, the ranks add up how many stop signals they have received.
        if (name, entry["input_dtypes"], sizes["input"]) == ("all_reduce", ["Long"], 8):
            steps.append({})
    found = []
    for (name, group, ranks), total in steps[-2].items():
        factor = 2 if name == "all_reduce" else 1  # all-gather and reduce-scatter
        sent = factor * (ranks - 1) * total["bytes"] // ranks
        found.append({"collective": name, "group": group, **total, "sent_in_a_ring": sent})
    return found


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


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("part", choices=["gpt2", "llama", "meshes", "nodes", "kills", "saves"])
    add("--output", type=Path, required=True, help="JSON file to write")
    add("--gpus", type=int, default=torch.cuda.device_count() or 2, help="2, 4 or 8")
    add("--folder", default="/tmp/many_gpus", help="for tokens, weights and runs")
    add("--only", default="*", help="labels, for example '*on 4'")
    add("--seconds", type=float, default=480, help="start no run after this many seconds")
    add("--limit", type=float, default=240, help="seconds that one run may take")
    add("--runs", type=int, default=2, help="of GPT-2 on all GPUs")
    add("--steps", type=int, help="of one run that measures speed")
    add("--kills", type=int, default=10)
    add("--gpt2", default="-m gpt2 -s 1024 --compile --lr 3e-4", help="arguments for GPT-2")
    add("--batch-size", type=int, default=64, help="sequences per GPU for GPT-2")
    add("--llama", default="llama-3.1-8b", help="preset of the large model")
    add("--seq-length", type=int, default=8192, help="tokens for the large model")
    add("--sequences", type=int, help="per GPU for llama (default: 2 above 100 GiB, otherwise 1)")
    add("--nanogpt", type=Path, help="path of build-nanogpt's train_gpt2.py")
    add("--torchtitan", action="store_true", help="measure torchtitan, too")
    add("--save-every", type=int, default=40, help="steps between two saves of the large model")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # sys.exit calls what atexit knows
    getattr(Benchmark(args), args.part)()


if __name__ == "__main__":
    main()

"""What options and failures cost on one and two GPUs, in parts of at most ten minutes.

python tests/benchmarks/two_gpus.py options --output options.json

    single    one GPU: chapter 5 beside the hand-written loop, build-nanogpt (with --nanogpt), and
              variants of chapter 5 that were tried
    options   two GPUs: DDP's buckets and no_sync; FSDP's resharding and prefetching; activation
              checkpointing; offload; accumulation
    length    one and two GPUs: tokens/s of a Llama of 1B for longer and longer sequences, with full
              and with selective checkpointing, context parallelism beside FSDP alone
    memory    one and two GPUs: peak memory of configurations that memory.py predicts
    load      two GPUs: how long chapter 4 takes to load 8B parameters, and in how much host memory
    failures  two GPUs: a late rank, a killed rank, a rank that hangs, a signal during a step and
              during a save

Runs and result files are those of many_gpus.py.
"""

import argparse
import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import many_gpus
import psutil
import torch
from machine import memory_kib
from many_gpus import DDP, FSDP, MIXED, NODES, PRESETS, REPOSITORY, stop, worker
from transformers import AutoConfig

LLAMA_1B = {  # of Llama 3.2 1B, in the configuration of Llama 3.1 8B
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
MIXTURE = {  # OLMoE's kind, but smaller
    "model_type": "olmoe",
    "architectures": ["OlmoeForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
LATE = "if rank == 0: __import__('time').sleep(0.1)"
FORWARD = '            with timers("forward"):\n'
LOSS = "        model.loss_function = torch.compile(model.loss_function)\n"
# The logits of all tokens are never in memory at once: the backward pass computes each chunk again.
CHUNKED = """
        from torch.nn.functional import cross_entropy
        from types import SimpleNamespace

        def loss_of(hidden, targets):
            logits = model.lm_head(hidden).float()
            return cross_entropy(logits, targets, reduction="sum", ignore_index=-100)

        loss_of = torch.compile(loss_of)

        def forward(input_ids, labels, **_):
            hidden = model.transformer(input_ids).last_hidden_state[:, :-1].flatten(0, 1)
            targets = labels[:, 1:].flatten()
            parts = zip(hidden.chunk(8), targets.chunk(8))
            loss = sum(recompute(loss_of, *part, use_reentrant=False) for part in parts)
            return SimpleNamespace(loss=loss / (targets != -100).sum())

        model.forward = forward
"""
BUCKETS = "gradient_as_bucket_view=True,"
PREFETCH = """    for before, after in zip(layers, layers[1:]):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
"""
SHARDED = "    fully_shard(model, **sharding)\n"
LOADED = {  # lines of chapter 4's log
    "started": "arguments:",
    "rank 0 has read the weights": "rank 0 holds",
    "all ranks have their shards": "each step:",
}


class Benchmark(many_gpus.Benchmark):
    def row(self, label: str, chapter: str | Path, gpus: int, args: str, **more: object) -> dict:
        if self.args.tiny:
            args = re.sub(r"-s \d+", "-s 64", args.replace("-m gpt2 ", "-m gpt2-tiny "))
            args = re.sub(r"-b \d+", "-b 2", args.replace("--compile", ""))
            args = re.sub(r"--global-batch-size \d+", f"--global-batch-size {4 * gpus}", args)
        return super().row(label, chapter, gpus, args, **more)

    def replaced(self, name: str, chapter: str | Path, old: str, new: str) -> Path:
        """Return the path of a copy of a chapter with another text in its script."""
        copy = self.copied(name, chapter)
        text = (copy / "train_llm.py").read_text()
        assert old in text, old
        (copy / "train_llm.py").write_text(text.replace(old, new))
        return copy

    def model_of(self, name: str, shape: dict) -> str:
        """Return arguments for a model of a preset's kind in another shape, randomly drawn."""
        if self.args.tiny:
            return "-m llama-tiny --lr 1e-4"
        folder = self.folder / name
        if "model_type" in shape:
            config = AutoConfig.for_model(**shape)
        else:
            config = AutoConfig.from_pretrained(PRESETS / "llama-3.1-8b", **shape)
        config.save_pretrained(folder)
        return f"-m {folder} --tokenizer-name gpt2-tiny --lr 1e-4"

    def single(self) -> None:
        batch = self.args.batch_size
        args = f"{self.args.gpt2} -b {batch} --global-batch-size {batch} --num-workers 2"
        chunked = self.replaced("chunked", MIXED, LOSS, LOSS + CHUNKED)
        tuned = {"environment": {"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "1"}}
        twice = args.replace(f"-b {batch}", f"-b {2 * batch}")
        twice = twice.replace(f"size {batch}", f"size {2 * batch}")
        loop = self.row("hand-written loop", MIXED, 1, args)
        words = f"{REPOSITORY}/tests/benchmarks/baseline.py -e hand-written-loop --max-steps 60"
        words += f" --save-dir {self.folder}/runs -b {batch} --global-batch-size {batch}"
        words += " -m gpt2-tiny -s 64" if self.args.tiny else " -m gpt2 -s 1024 --compile"
        loop["words"] = words.split()
        rows = [
            self.row("chapter 5", MIXED, 1, args),
            loop,
            *self.nanogpt("build-nanogpt", 1),
            self.row("chapter 5, max-autotune", MIXED, 1, args, **tuned),
            self.row("chapter 5, chunked loss", chunked, 1, args),
            self.row("chapter 5, chunked loss, twice the batch", chunked, 1, twice),
        ]
        self.measure(rows, 60, 20)
        self.measure(rows[:3], 60, 20)

    def options(self) -> None:
        n = self.gpus
        ddp = self.changed(DDP, "autocast-02.diff")
        buckets = {
            size: self.replaced(f"{size}-mb", ddp, BUCKETS, f"{BUCKETS} bucket_cap_mb={size},")
            for size in (1, 500)
        }
        sync = "ddp_model.require_backward_grad_sync = "
        always = self.replaced("always", ddp, f"{sync}last_backward", f"{sync}True")
        prefetch = self.replaced("prefetch", MIXED, SHARDED, SHARDED + PREFETCH)
        models = {"GPT-2": (self.args.gpt2, self.args.batch_size)}
        models["Llama 1B"] = (f"{self.model_of('llama-1b', LLAMA_1B)} -s 2048 --compile", 4)
        full, selective = (f"--activation-checkpointing {k}" for k in ("full", "selective"))
        for model, (args, batch) in models.items():
            four = f"--global-batch-size {4 * batch * n}"
            options = [
                ("DDP, 25 MB buckets", ddp, ""),
                ("DDP, 1 MB buckets", buckets[1], ""),
                ("DDP, 500 MB buckets", buckets[500], ""),
                ("DDP, 4 micro-batches", ddp, four),
                ("DDP, 4 micro-batches, all reduced", always, four),
                ("FSDP", MIXED, ""),
                ("FSDP, selective", MIXED, selective),
                ("FSDP, full", MIXED, full),
                ("FSDP, no reshard", MIXED, "--no-reshard-after-forward"),
                ("FSDP, prefetch", prefetch, ""),
                ("FSDP, offload", MIXED, "--cpu-offload"),
                ("FSDP, 4 micro-batches", MIXED, four),
                ("FSDP, 4 micro-batches, all reduced", MIXED, f"{four} --reduce-every-backward"),
            ]
            for label, chapter, more in options:
                words = f"{args} -b {batch} --num-workers 1 --global-batch-size {batch * n} {more}"
                slow = "offload" in more or four in more
                words += " --log-freq 2" if slow else " --log-freq 5"
                row = self.row(f"{model}, {label}", chapter, n, words)
                self.measure([row], 12 if slow else 25, 4 if slow else 10)

    def length(self) -> None:
        # Not compiled: PyTorch 2.11 cannot compile context-parallel.diff on GPUs.
        parallel = self.changed(MIXED, "context-parallel.diff")
        model = self.model_of("llama-1b", LLAMA_1B)
        tensor = self.changed(MIXED, "tensor-parallel.diff")
        words = f"{model} -b 1 -s 8192 --log-freq 1 --global-batch-size"
        for row in (
            self.row("none, FSDP, 8192", MIXED, 2, f"{words} 2"),
            self.row("none, context, 8192", parallel, 2, f"{words} 1 --context-parallel 2"),
            self.row("none, tensor, 8192", tensor, 2, f"{words} 1 --tensor-parallel 2"),
        ):
            if row["gpus"] <= self.gpus:
                self.measure([row], 12, 4)
        for kind in ("full", "selective"):
            args = f"{model} -b 1 --activation-checkpointing {kind} --log-freq 1"
            fits = {1: True, 2: True, "shared": True}
            for length in (2**k for k in range(14, 18)):
                sequence = f"{args} -s {length}"
                one = f"{sequence} --global-batch-size 1"
                rows = {
                    1: self.row(f"{kind}, one GPU, {length}", MIXED, 1, one),
                    2: self.row(
                        f"{kind}, FSDP, {length}", MIXED, 2, f"{sequence} --global-batch-size 2"
                    ),
                    "shared": self.row(
                        f"{kind}, context, {length}", parallel, 2, f"{one} --context-parallel 2"
                    ),
                }
                for key, row in rows.items():
                    if fits[key] and row["gpus"] <= self.gpus:
                        self.measure([row], 6, 2)
                        fits[key] = "failed" not in row

    def memory(self) -> None:
        llama = f"{self.model_of('llama-1b', LLAMA_1B)} -s 4096 -b 2"
        mixture = f"{self.model_of('mixture', MIXTURE)} -s 2048 -b 4"
        gpt2 = "-m gpt2 -s 1024 -b 16 --lr 3e-4"
        parallel = self.changed(MIXED, "context-parallel.diff")
        two = [
            self.row("Llama 1B", MIXED, 2, f"{llama} --global-batch-size 4"),
            self.row("mixture", MIXED, 2, f"{mixture} --global-batch-size 8"),
            self.row(
                "Llama 1B, context parallelism",
                parallel,
                2,
                f"{llama} --global-batch-size 2 --context-parallel 2",
            ),
        ]
        full = "--activation-checkpointing full"
        one = [
            self.row("GPT-2, chapter 1", "01-single-gpu", 1, f"{gpt2} --global-batch-size 16"),
            self.row("GPT-2", MIXED, 1, f"{gpt2} --global-batch-size 16"),
            self.row("Llama 1B on one", MIXED, 1, f"{llama} --global-batch-size 2"),
            self.row("Llama 1B, full", MIXED, 1, f"{llama} --global-batch-size 2 {full}"),
            self.row("mixture, full", MIXED, 1, f"{mixture} --global-batch-size 4 {full}"),
        ]
        for row in (*two, *one):
            row["words"] += ["--log-freq", "1"]
            if row["gpus"] <= self.gpus:
                self.measure([row], 5, 2)

    def load(self) -> None:
        """Time from the launch to the lines that the log has before and after the weights."""
        args = f"{self.llama_model()} -s 64 -b 1 --global-batch-size {self.gpus} --log-freq 1"
        row = self.row("load", FSDP, self.gpus, args, found=[])
        for _ in range(3):
            row.pop("seen", None)
            begun = time.monotonic()
            self.start(row)
            log, peak, after = row["run_folder"] / "log-0", 0.0, {}
            while len(after) < len(LOADED) and row["processes"][0].poll() is None:
                text = log.read_text()
                for name, line in LOADED.items():
                    if name not in after and line in text:
                        after[name] = time.monotonic() - begun
                peak = max(peak, host_memory(row))
                time.sleep(0.05)
            self.watch([row], lambda row: row["seen"][-1][1] >= 2)
            stop([row])
            row["found"].append({"after_s": after, "peak_host_gib": peak})
            self.report(row)

    def failures(self) -> None:
        """Hit chapter 3 on two GPUs, and note how long it stands still."""
        n, batch = self.gpus, 16
        gpt2 = f"-m gpt2 -s 1024 --lr 3e-4 -b {batch} --global-batch-size {batch * n} --log-freq 1"
        llama = f"{self.model_of('llama-1b', LLAMA_1B)} -s 1024 -b 2 --global-batch-size {4 * n}"
        diff = self.changed(NODES, "autocast-03.diff")
        late = self.replaced("late", diff, FORWARD, f"            {LATE}\n{FORWARD}")
        sends = "ddp_model.broadcast_buffers = "
        default = self.replaced("default", late, f"{sends}False", f"{sends}True")
        rows = [
            self.row("no late rank", diff, n, f"{llama} --log-freq 1"),
            self.row("rank 0 late, no broadcast (the chapter)", late, n, f"{llama} --log-freq 1"),
            self.row("rank 0 late, DDP broadcasts buffers", default, n, f"{llama} --log-freq 1"),
        ]
        for row in rows:
            self.measure([row], 15, 5)
        restarts = {"environment": {"MAX_RESTARTS": "3"}}
        saves = f"{gpt2} --ckpt-freq 10 --keep-checkpoints 1 --dist-timeout 20"
        for label, number in (
            ("kill -9 of rank 1", signal.SIGKILL),
            ("rank 1 hangs", signal.SIGSTOP),
        ):
            row = self.row(label, diff, n, saves, found=[], **restarts)
            if not self.wanted(row):
                continue
            self.start(row)
            self.watch([row], lambda row: row["seen"][-1][1] >= 25)
            for _ in range(3 if number == signal.SIGKILL else 1):
                if "failed" in row:
                    break
                row["found"].append(self.hit(row, 1, number))
                self.report(row)
            stop([row])
        for label in ("a signal during a step", "a signal during a save"):
            row = self.row(label, diff, n, f"{gpt2} --ckpt-freq 10", found=[])
            if not self.wanted(row):
                continue
            for _ in range(3):
                row.pop("seen", None)
                self.start(row)
                self.watch([row], lambda row: row["seen"][-1][1] >= 15)
                saved = row["run_folder"] / "checkpoints"
                if "save" in label:  # begin when the next checkpoint's files appear
                    known = set(saved.glob("*"))
                    while not set(saved.glob("*")) - known and row["processes"][0].poll() is None:
                        time.sleep(0.002)
                hit, step = time.monotonic(), self.lines(row)[-1]["step"]
                for rank in range(n):
                    os.kill(worker(row, rank), signal.SIGUSR1)
                status = row["processes"][0].wait(120)
                log = (row["run_folder"] / "log-0").read_text()
                found = {"status": status, "ended_s": time.monotonic() - hit, "logged_step": step}
                found["said"] = re.findall(r".*Told to stop.*", log)[:1]
                row["found"].append(found)
                self.report(row)


def host_memory(row: dict) -> float:
    """Return the GiB of all processes of a row, without files; shared pages count once."""
    total = 0
    for process in psutil.Process(row["processes"][0].pid).children(recursive=True):
        with contextlib.suppress(OSError):
            sizes = memory_kib(process.pid)
            total += sizes["Pss_Anon"] + sizes["Pss_Shmem"]
    return total / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    parts = ["single", "options", "length", "memory", "load", "failures"]
    add("part", choices=parts)
    add("--output", type=Path, required=True, help="JSON file to write")
    add("--gpus", type=int, default=min(2, torch.cuda.device_count() or 2), help="1 or 2")
    add("--folder", default="/tmp/two_gpus", help="for tokens, weights and runs")
    add("--only", default="*", help="labels, for example 'GPT-2*'")
    add("--seconds", type=float, default=540, help="start no run after this many seconds")
    add("--limit", type=float, default=150, help="seconds that one run may take")
    add("--gpt2", default="-m gpt2 -s 1024 --compile --lr 3e-4", help="arguments for GPT-2")
    add("--batch-size", type=int, default=64, help="sequences per GPU for GPT-2")
    add("--llama", default="llama-3.1-8b", help="preset of the large model, for part load")
    add("--nanogpt", type=Path, help="path of build-nanogpt's train_gpt2.py")
    add("--tiny", action="store_true", help="small models, to try this file without GPUs")
    args = parser.parse_args()
    args.sequences, args.seq_length = 1, 8192  # of other parts of many_gpus.py
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    getattr(Benchmark(args), args.part)()


if __name__ == "__main__":
    main()

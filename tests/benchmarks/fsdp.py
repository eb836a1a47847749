"""What chapters 4 and 5 and their options need and how fast they are, on GPUs.

python tests/benchmarks/fsdp.py options --output tests/benchmarks/results/fsdp_options.json

    options    Llama-3.1-8B's shape at 8192 positions with chapter 4, each option, and pairs
    precision  the same model, in every precision of chapter 5
    length, length-llama  1k to 32k tokens in a sequence, as many tokens in a step, on one GPU
    size       124M to 1.5B parameters, on one GPU

Each run is a chapter's own script, started by torchrun. Evaluations, the sample and checkpoints are
left out: they are not what is measured. With --tiny all is small, to try the file without GPUs.
"""

import argparse
import fnmatch
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import file_name, visible_gpus, write_result

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

DDP, FSDP, MIXED = "03-multi-node", "04-fsdp", "05-mixed-precision"
PRESETS = REPOSITORY / "common/presets"
SHAPE, TINY = (PRESETS / name / "config.json" for name in ("llama-3.1-8b", "llama-tiny"))
NEVER = str(10**9)
NOTHING, SELECTIVE, FULL = (
    f"--activation-checkpointing {what}" for what in ("none", "selective", "full")
)
# Each: label, arguments, number of runs. Nx: N sequences for each GPU.
OPTIONS = [
    ("selective", f"--compile {SELECTIVE}", 3),
    ("full", f"--compile {FULL}", 3),
    ("no checkpointing", "--compile", 1),
    ("full, not compiled", FULL, 1),
    ("full, no reshard", f"--compile {FULL} --no-reshard-after-forward", 1),
    ("full, HSDP on 2 halves", f"--compile {FULL} --hsdp", 1),
    ("full, 2 micro-batches", f"--compile {FULL} --global-batch-size 2x", 1),
    (
        "full, 2 micro-batches, all reduced",
        f"--compile {FULL} --global-batch-size 2x --reduce-every-backward",
        1,
    ),
    ("full, offload", f"--compile {FULL} --cpu-offload", 1),
    ("full, bfloat16 weights", f"--compile {FULL} --param-dtype bfloat16", 1),
]
# Each: label, arguments, steps, steps that are left out, number of runs.
PRECISION = [
    ("bf16, compiled", "--precision bf16 --compile", 10, 4, 3),
    ("fp8, compiled", "--precision fp8 --compile", 10, 4, 3),
    ("bf16, compiled, 2 sequences", "--precision bf16 --compile -b 2x", 10, 4, 3),
    ("fp8, compiled, 2 sequences", "--precision fp8 --compile -b 2x", 10, 4, 3),
    ("bf16, compiled, no checkpointing", f"--precision bf16 --compile {NOTHING}", 10, 4, 3),
    ("fp8, compiled, no checkpointing", f"--precision fp8 --compile {NOTHING}", 10, 4, 3),
    ("bf16", "--precision bf16", 8, 3, 3),
    ("tf32", "--precision tf32", 5, 2, 3),
    ("fp32", "--precision fp32", 3, 1, 1),
    ("fp16, compiled", "--precision fp16 --compile", 10, 4, 1),
    ("tf32, compiled", "--precision tf32 --compile", 5, 2, 1),
    ("bf16, compiled, bf16 sums", "--precision bf16 --compile --reduce-dtype bfloat16", 10, 4, 1),
]
# Layers, width, heads of GPT-2's four sizes.
SIZES = {
    "124M": (12, 768, 12),
    "355M": (24, 1024, 16),
    "774M": (36, 1280, 20),
    "1.5B": (48, 1600, 25),
}


def train(chapter: str, words: list[str]) -> None:
    """Run a chapter's script as one rank, without what is not measured."""
    from runner import load_script

    sys.argv = [f"{chapter}/train_llm.py", *words]
    script = load_script(REPOSITORY / chapter / "train_llm.py")
    script.evaluate = lambda *_: dict.fromkeys(("eval_loss", "perplexity", "bits_per_byte"), 0.0)
    script.models.sample_text = lambda *_: ("", "")
    script.save_checkpoint = lambda *_: None
    script.distributed.memory_bytes = lambda: 2**60  # of some machines it grows as it is used
    script.main()


def run(row: dict, folder: Path, timeout: float) -> dict | None:
    """Return the medians of a run's log lines; None if a GPU's memory was too small."""
    name = file_name(row["label"])
    nodes, gpus = row.get("nodes", 1), row["gpus"]
    local = gpus // nodes
    launcher = ["--standalone"]
    if nodes > 1:  # HSDP replicates between nodes: each agent on this machine stands for one
        launcher = ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", "localhost:29400"]
    words = ["-m", "torch.distributed.run", *launcher, "--nproc-per-node", str(local), __file__]
    words += ["--child", row["chapter"], *row["words"], "--save-dir", str(folder), "-e", name]
    environment = {**os.environ, "WANDB_MODE": "disabled"}
    environment["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // gpus))
    agents = []
    for node in range(nodes):
        environment["CUDA_VISIBLE_DEVICES"] = visible_gpus(node * local, local)
        with (folder / f"{name}-{node}.log").open("w") as log:
            out = {"cwd": REPOSITORY, "env": environment, "stdout": log, "stderr": log}
            agents.append(subprocess.Popen([sys.executable, *words], **out))
    deadline = time.monotonic() + timeout
    try:
        statuses = [agent.wait(max(1, deadline - time.monotonic())) for agent in agents]
    except subprocess.TimeoutExpired:
        statuses = ["too long"]
        for agent in agents:
            agent.kill()
    logs = "".join((folder / f"{name}-{node}.log").read_text() for node in range(nodes))
    if any(statuses):
        print(f"--- {name}: {statuses}", logs[-1500:], sep="\n", flush=True)
        return None if "OutOfMemoryError" in logs else {"failed": statuses}
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    counted = [m for m in map(json.loads, lines) if m["step"] > row["warm_up"] and "loss" in m]
    keys = [key for key, value in counted[0].items() if isinstance(value, float)]
    return {key: statistics.median(line[key] for line in counted) for key in keys}


def shaped_folder(source: Path, shape: dict[str, int], folder: Path) -> Path:
    """Write a folder with the configuration of a preset's file in another shape."""
    content = json.loads(source.read_text())
    unknown = set(shape) - set(content)
    assert not unknown, f"{source.parent.name} has no {unknown}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**content, **shape}))
    return folder


class Sets:
    """The rows of a set, from its method, and the runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.gpus = torch.cuda.device_count() or 2
        self.tiny, self.args = args.tiny, args
        self.folder = Path(args.folder)
        self.rows: list[dict] = []

    def add(self, label: str, chapter: str, gpus: int, args: str, steps: int, warm_up: int, **more):
        words = [*shlex.split(args), "--max-steps", str(steps), "--eval-freq", NEVER]
        words += ["--ckpt-freq", NEVER]
        row = {"label": label, "chapter": chapter, "gpus": gpus, "words": words, "runs": []}
        row |= {"warm_up": warm_up, "wanted": 1, **more}
        row["command"] = shlex.join([f"{chapter}/train_llm.py", *words])
        self.rows.append(row)

    def saved_model(self) -> Path:
        """Return a folder with random weights of the 8B model's shape, which all ranks read."""
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = shaped_folder(TINY if self.tiny else SHAPE, {}, self.folder / "model")
        if not list(folder.glob("*.safetensors")):
            # Drawn on a GPU: the values do not matter, and it takes seconds.
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="4GB")
            del model
            torch.cuda.empty_cache()
        return folder

    def common(self) -> str:
        length = 64 if self.tiny else 8192
        words = f"-m {self.saved_model()} --pretrained --tokenizer-name gpt2-tiny --lr 1e-5"
        return f"{words} --log-freq 1 -s {length}"

    def options(self) -> None:
        common = self.common()
        for label, args, runs in OPTIONS:
            args = args.replace("2x", str(2 * self.gpus))
            if "--global-batch-size" not in args:
                args += f" --global-batch-size {self.gpus}"
            steps, warm_up = (3, 1) if "2 micro" in label or "offload" in label else (4, 2)
            more = {"nodes": 2} if "--hsdp" in args else {}
            words = f"{common} -b 1 {args}"
            self.add(label, FSDP, self.gpus, words, steps, warm_up, wanted=runs, **more)

    def precision(self) -> None:
        common = f"{self.common()} {SELECTIVE}"
        for label, args, steps, warm_up, runs in PRECISION:
            sequences = 2 if "-b 2x" in args else 1
            batch = f"-b {sequences} --global-batch-size {sequences * self.gpus}"
            words = f"{common} {batch} {args.replace('-b 2x', '')}"
            self.add(label, MIXED, self.gpus, words, steps, warm_up, wanted=runs)

    def length(self) -> None:
        for length, words in self.lengths():
            self.grow("gpt2", f"{length} tokens", {"n_positions": length}, words)

    def length_llama(self) -> None:
        for length, words in self.lengths():
            shape = {"num_hidden_layers": 4, "max_position_embeddings": length}
            label = f"4 blocks, {length} tokens"
            self.grow("llama-3.1-8b", label, shape, f"{words} {SELECTIVE}")

    def size(self) -> None:
        words = "-s 1024 -b 16 --global-batch-size 16 --precision bf16"
        for size, shape in SIZES.items():
            shape = dict(zip(("n_layer", "n_embd", "n_head"), shape, strict=True))
            self.grow("gpt2", size, shape, f"{words} {SELECTIVE}")

    def lengths(self) -> list[tuple[int, str]]:
        """Return sequence lengths and arguments, with as many tokens in a step for each."""
        found = []
        for length in (2**power for power in range(10, 16)):
            batch = 2**15 // length
            sizes = f"-s {length} -b {batch} --global-batch-size {batch}"
            found.append((length, f"{sizes} --precision bf16"))
        return found

    def grow(self, preset: str, label: str, shape: dict, args: str) -> None:
        """Add a run of chapter 5 on one GPU. shape: what differs from the preset.

        Its tokenizer is a small one: with the real vocabulary in the shape, logits are real.
        """
        name = f"{preset}, {label}"
        folder = self.folder / "shapes" / file_name(name)
        shaped_folder(PRESETS / preset / "config.json", shape, folder)
        words = f"-m {folder} --tokenizer-name gpt2-tiny --lr 1e-4 --log-freq 2 {args} --compile"
        self.add(name, MIXED, 1, words, 12, 4, preset=preset, shape=shape)

    def in_turns(self) -> None:
        """Run all rows once, and then those that want more runs again; write after each run."""
        keep = ("label", "chapter", "gpus", "nodes", "command", "warm_up", "runs", "preset")
        start = time.monotonic()
        for turn in range(3):
            for row in self.rows:
                left = self.args.seconds - (time.monotonic() - start)
                chosen = fnmatch.fnmatchcase(row["label"], self.args.only)
                if not chosen or turn >= row["wanted"] or left < 45:
                    continue
                with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                    found = run(row, Path(folder), left)
                row["runs"].append(found)
                shown = ("tokens_per_s_per_device", "peak_mem_gib")
                seen = found and {key: found.get(key) for key in shown}
                print(f"{time.monotonic() - start:5.0f} s  {row['label']}: {seen}", flush=True)
                rows = [{k: row[k] for k in (*keep, "shape") if k in row} for row in self.rows]
                write_result(self.args.output, {"rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sets = ["options", "precision", "length", "length-llama", "size"]
    parser.add_argument("set", choices=sets)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/fsdp", help="for models")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no run after these")
    parser.add_argument("--only", default="*", help="labels, as in 'tf32*'")
    parser.add_argument("--tiny", action="store_true", help="a small 8B model, to try this file")
    sets = Sets(args := parser.parse_args())
    getattr(sets, args.set.replace("-", "_"))()
    sets.in_turns()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        train(sys.argv[2], sys.argv[3:])
    else:
        main()

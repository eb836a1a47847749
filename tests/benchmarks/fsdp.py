"""How much memory the options of chapter 4 need and how fast they are, on GPUs.

python tests/benchmarks/fsdp.py options --output tests/benchmarks/results/fsdp_options.json

The model has the shape of Llama 3.1 8B and sequences of 8,192 tokens. Each run is the chapter's own
script, started by torchrun. Evaluations, the sample and checkpoints are left out, because they are
not what is measured. With --tiny everything is small, to try this file without GPUs.
"""

import argparse
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

FSDP = "04-fsdp"
NEVER = str(10**9)
SELECTIVE, FULL = (f"--activation-checkpointing {kind}" for kind in ("selective", "full"))
# Each: label, arguments, number of runs. 2x: two sequences for each GPU.
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


def train(words: list[str]) -> None:
    """Run the chapter's script as one rank, without what is not measured."""
    from runner import load_script

    sys.argv = [f"{FSDP}/train_llm.py", *words]
    script = load_script(REPOSITORY / FSDP / "train_llm.py")
    script.evaluate = lambda *_: dict.fromkeys(("eval_loss", "perplexity", "bits_per_byte"), 0.0)
    script.models.sample_text = lambda *_: ("", "")
    script.save_checkpoint = lambda *_: None
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
    words += ["--child", *shlex.split(row["command"])[1:], "--save-dir", str(folder), "-e", name]
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


def saved_model(preset: Path, folder: Path) -> Path:
    """Return a folder with random weights in a preset's shape, which all ranks read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not list(folder.glob("*.safetensors")):
        # Drawn on a GPU: the values do not matter, and it takes seconds.
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            config = AutoConfig.from_pretrained(preset)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="4GB")
        del model
        torch.cuda.empty_cache()
    return folder


def make_rows(args: argparse.Namespace) -> list[dict]:
    """Return a row for each option: label, command, and how many runs are wanted."""
    gpus = torch.cuda.device_count() or 2
    preset, length = ("llama-tiny", 64) if args.tiny else ("llama-3.1-8b", 8192)
    model = saved_model(REPOSITORY / "common/presets" / preset, Path(args.folder) / "model")
    rows = []
    for label, option, runs in OPTIONS:
        words = f"-m {model} --pretrained --tokenizer-name gpt2-tiny --lr 1e-5 --log-freq 1"
        words += f" -s {length} -b 1 {option.replace('2x', str(2 * gpus))}"
        if "--global-batch-size" not in option:
            words += f" --global-batch-size {gpus}"
        steps, warm_up = (3, 1) if "2 micro" in label or "offload" in label else (4, 2)
        words += f" --max-steps {steps} --eval-freq {NEVER} --ckpt-freq {NEVER}"
        row = {"label": label, "chapter": FSDP, "gpus": gpus, "warm_up": warm_up, "runs": []}
        row["command"] = f"{FSDP}/train_llm.py {words}"
        row |= {"nodes": 2} if "--hsdp" in option else {}
        rows.append(row | {"wanted": runs})
    return rows


def run_in_turns(rows: list[dict], args: argparse.Namespace) -> None:
    """Run all rows once, and then those that want more runs again; write after each run."""
    start = time.monotonic()
    for turn in range(3):
        for row in rows:
            left = args.seconds - (time.monotonic() - start)
            if turn >= row["wanted"] or left < 45:
                continue
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                found = run(row, Path(folder), left)
            row["runs"].append(found)
            print(f"{time.monotonic() - start:5.0f} s  {row['label']}: {found}", flush=True)
            written = [{key: row[key] for key in row if key != "wanted"} for row in rows]
            write_result(args.output, {"rows": written})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=["options"])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/fsdp", help="for models")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no run after these")
    parser.add_argument("--tiny", action="store_true", help="a small 8B model, to try this file")
    args = parser.parse_args()
    run_in_turns(make_rows(args), args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        train(sys.argv[2:])
    else:
        main()

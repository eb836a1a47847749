"""What determinism costs, what repeats without it, and what changes the last digits of a training.

python tests/benchmarks/determinism.py --output tests/benchmarks/results/determinism_cpu.json

Every mode runs in processes of its own, in turn, as often as --rounds says: the variable of cuBLAS
is read once. On the GPU if there is one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import write_result
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from common.models import causal_attention, load_config

STEPS, WARM_UP = 20, 5
REPEATS = 5  # calls of an operation that must agree bit by bit
WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# Sequences and tokens of a step, by model.
BATCHES = {"gpt2-tiny": (8, 128), "gpt2": (8, 1024)}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(device: torch.device, name: str, seed: int = 0, parts: int = 1, flip: bool = False):
    """Return the losses of STEPS steps of random tokens, and the ms of each step after WARM_UP.

    seed: of the weights. parts: micro-batches of a step. flip: the sequences in reversed order.
    """
    torch.manual_seed(seed)
    config = load_config(name)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=causal_attention(config), dtype=torch.float32
    )
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    sequences, length = BATCHES[name]
    tokens = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (4, sequences, length), generator=tokens).to(device)
    ids = ids.flip(1) if flip else ids
    losses, times = [], []
    for step in range(STEPS):
        synchronize()
        start = time.perf_counter()
        loss_sum = 0.0
        for part in ids[step % len(ids)].chunk(parts):
            loss = model(input_ids=part, labels=part).loss / parts
            loss.backward()
            loss_sum = loss_sum + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        times.append(1000 * (time.perf_counter() - start))
        losses.append(loss_sum.item())
    return losses, times[WARM_UP:]


def operations(device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """Return operations that add up in an order of their own, or that PyTorch lists as such."""
    rows, width, slots = (2**16, 512, 4096) if device.type == "cuda" else (2**13, 256, 512)
    torch.manual_seed(0)
    source = torch.randn(rows, width, device=device)
    index = torch.randint(slots, (rows,), device=device)
    wide = index[:, None].expand(rows, width)
    weight = torch.randn(slots, width, device=device, requires_grad=True)
    heads, length = (96, 1024) if device.type == "cuda" else (8, 256)
    query, key, value = (
        torch.randn(1, heads, length, 64, device=device, requires_grad=True) for _ in range(3)
    )
    upstream = torch.randn(1, heads, length, 64, device=device)

    def zeros() -> torch.Tensor:
        return torch.zeros(slots, width, device=device)

    def embedding() -> torch.Tensor:
        return torch.autograd.grad(functional.embedding(index, weight), weight, source)[0]

    def attention() -> torch.Tensor:
        output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.cat(torch.autograd.grad(output, (query, key, value), upstream))

    return {
        "index_add": lambda: zeros().index_add_(0, index, source),
        "scatter_add": lambda: zeros().scatter_add_(0, wide, source),
        "index_put, accumulate": lambda: zeros().index_put_((index,), source, accumulate=True),
        "embedding, backward": embedding,
        "attention, both ways": attention,
        "cumsum": lambda: source.cumsum(0),
        "histc": lambda: source.histc(100),
        "empty": lambda: torch.empty_like(source),
    }


def measure(call: Callable[[], torch.Tensor]) -> dict[str, object]:
    """Return the ms of a call and whether calls agree bit by bit, or the error that it raises."""
    try:
        first = call()
    except RuntimeError as error:
        return {"error": str(error).split(".")[0]}
    # As integers: what fills empty memory is no number, and equals nothing.
    bits = first.view(torch.int32)
    same = all(torch.equal(call().view(torch.int32), bits) for _ in range(REPEATS - 1))
    times = []
    end = time.perf_counter() + 0.1
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return {"ms": statistics.median(times), "same": same}


def compare(expected: list[float], found: list[float]) -> dict[str, object]:
    """Return the first step (from 1) whose loss is another number, and the largest difference."""
    parted = [n for n, (a, b) in enumerate(zip(expected, found, strict=True), 1) if a != b]
    largest = max(abs(b / a - 1) for a, b in zip(expected, found, strict=True))
    return {"first_step": parted[0] if parted else None, "largest": largest}


def change_things(device: torch.device) -> dict[str, dict]:
    """Return what each small change does to the losses of the same training."""
    expected, _ = train(device, "gpt2-tiny")
    found = {"nothing": train(device, "gpt2-tiny")[0]}
    found["two micro-batches"] = train(device, "gpt2-tiny", parts=2)[0]
    found["order within the batch"] = train(device, "gpt2-tiny", flip=True)[0]
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")
        found["no TF32"] = train(device, "gpt2-tiny")[0]
        torch.set_float32_matmul_precision("high")
    elif (threads := torch.get_num_threads()) > 1:
        torch.set_num_threads(1)
        found["one thread"] = train(device, "gpt2-tiny")[0]
        torch.set_num_threads(threads)
    found["seed"] = train(device, "gpt2-tiny", seed=1)[0]
    return {name: compare(expected, losses) for name, losses in found.items()}


def run_mode(mode: str, with_changes: bool) -> dict[str, object]:
    """Return what a process of this mode measures."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    torch.use_deterministic_algorithms(mode != "default")
    results: dict[str, object] = {"losses": {}, "ms": {}}
    for name in BATCHES if device.type == "cuda" else ["gpt2-tiny"]:
        losses, times = train(device, name)
        results["losses"][name], results["ms"][name] = losses, statistics.median(times)
    results["operations"] = {name: measure(call) for name, call in operations(device).items()}
    if with_changes:
        results["changes"] = change_things(device)
    return results


def start_process(mode: str, with_changes: bool) -> dict[str, object]:
    environment = {k: v for k, v in os.environ.items() if k not in WORKSPACE}
    if mode == "workspace":
        environment |= WORKSPACE
    command = [sys.executable, __file__, "--mode", mode, *["--changes"] * with_changes]
    return json.loads(subprocess.check_output(command, env=environment).splitlines()[-1])


def summarize(runs: dict[str, list[dict]]) -> dict[str, object]:
    """Return times and agreement by mode; runs of a mode differ in nothing but the process."""
    first = next(iter(runs.values()))[0]
    models = {
        name: {
            mode: {
                "ms": [run["ms"][name] for run in each],
                "runs_agree": all(run["losses"][name] == each[0]["losses"][name] for run in each),
                "as_default": compare(first["losses"][name], each[0]["losses"][name]),
            }
            for mode, each in runs.items()
        }
        for name in first["ms"]
    }
    found: dict[str, dict] = {}
    for name in first["operations"]:
        found[name] = {}
        for mode, each in runs.items():
            calls = [run["operations"][name] for run in each]
            if "error" in calls[0]:
                found[name][mode] = calls[0]
                continue
            same = all(call["same"] for call in calls)
            found[name][mode] = {"ms": [call["ms"] for call in calls], "same": same}
    return {"models": models, "operations": found, "changes": first["changes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each mode")
    parser.add_argument("--mode", help="what a process that this one starts measures")
    parser.add_argument("--changes", action="store_true", help="the same")
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(run_mode(args.mode, args.changes)))
        return
    modes = ["default", "deterministic"]
    if torch.cuda.is_available():
        modes.append("workspace")
    runs: dict[str, list[dict]] = {mode: [] for mode in modes}
    for number in range(args.rounds):
        for mode in modes:
            runs[mode].append(start_process(mode, number == 0 and mode == "default"))
    results = {"steps": STEPS, "batches": BATCHES, **summarize(runs)}
    print(json.dumps(results, indent=1))
    if args.output:
        write_result(args.output, results)


if __name__ == "__main__":
    main()

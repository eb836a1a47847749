"""The gradient norm of common/gradients.py beside PyTorch's: accuracy and time.

python tests/benchmarks/norm.py --output tests/benchmarks/results/norm_cpu.json

For each model, the gradients are random numbers. Both functions clip them, in turn. The error of a
norm is relative to the norm in float64, for whole gradients and for one shard of 4.
The time of a step includes forward pass, backward pass, clipping and AdamW. It runs on the GPU if
there is one, with larger batches of GPT-2.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import write_result
from torch import nn
from transformers import AutoModelForCausalLM

from common.gradients import clip_grad_norm
from common.models import causal_attention, load_config

MODELS = ("gpt2-tiny", "llama-tiny", "gpt2")
ROUNDS, STEPS, SHARDS = 15, 15, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def torch_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


NORMS: dict[str, Callable] = {"rows": clip_grad_norm, "torch": torch_norm}


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def errors(norm: Callable, model: nn.Module) -> dict[str, float]:
    """Return the relative errors for the whole gradients and for the first rows of each."""
    found = {}
    whole = [parameter.grad for parameter in model.parameters()]
    for name, parts in (("whole", 1), (f"shard of {SHARDS}", SHARDS)):
        for parameter, gradient in zip(model.parameters(), whole, strict=True):
            parameter.data = parameter.data[: -(-len(gradient) // parts)]
            parameter.grad = gradient[: len(parameter)].clone()
        exact = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item()
        found[name] = abs(norm(model, float("inf")).item() - exact) / exact
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, norm: Callable):
    model(input_ids=ids, labels=ids).loss.backward()
    norm(model, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(name: str) -> dict:
    config = load_config(name)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=causal_attention(config), dtype=torch.float32
        ).to(DEVICE)

    model, found = build(), {"model": name}
    found["parameters"] = sum(p.numel() for p in model.parameters())
    shape = (16, 1024) if DEVICE == "cuda" and name == "gpt2" else (4, 128)
    ids = torch.randint(config.vocab_size, shape, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(2):
        milliseconds(lambda: step(model, optimizer, ids, torch_norm))
    times = {norm: [] for norm in NORMS}
    for _ in range(STEPS):
        for key, norm in NORMS.items():
            times[key].append(milliseconds(lambda norm=norm: step(model, optimizer, ids, norm)))
    found["step_ms"] = {key: statistics.median(values) for key, values in times.items()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    times = {norm: [] for norm in NORMS}
    for _ in range(ROUNDS):
        for key, norm in NORMS.items():
            times[key].append(milliseconds(lambda norm=norm: norm(model, float("inf"))))
    found["clip_ms"] = {key: statistics.median(values) for key, values in times.items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    found["error"] = {}
    for key, norm in NORMS.items():
        fresh = build()
        for parameter, gradient in zip(fresh.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        found["error"][key] = errors(norm, fresh)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="result file to write")
    args = parser.parse_args()
    result = {"threads": torch.get_num_threads(), "models": [measure(name) for name in MODELS]}
    print(json.dumps(result, indent=1))
    if args.output:
        write_result(args.output, result)


if __name__ == "__main__":
    main()

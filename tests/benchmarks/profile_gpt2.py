"""Where GPT-2 124M of transformers loses time to a hand-written one, on one GPU.

python tests/benchmarks/profile_gpt2.py --output tests/benchmarks/results/profile_gpt2.json

Trains each variant on the same random tokens (64 x 1024 per step, bf16 autocast, fused AdamW,
gradients clipped), several times in turn, and lists the kernels that the time goes to.
"""

import argparse
import statistics
from pathlib import Path

import torch
from handwritten import HandwrittenGPT2, Linear1D
from machine import write_result
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PRESET = Path(__file__).parents[2] / "common/presets/gpt2"
# A name that transformers has no mask for: the kernel's own causal mask is all there is.
AttentionInterface.register("sdpa_causal", sdpa_attention_forward)


class LossOf(nn.Module):
    """A transformers model as a function of the batch that returns the loss alone."""

    def __init__(self, model: nn.Module, loss: str) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.loss == "model":
            return self.model(input_ids=input_ids, labels=labels).loss
        logits = self.model(input_ids=input_ids).logits
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def build(variant: str) -> nn.Module:
    config = AutoConfig.from_pretrained(PRESET)
    if variant.startswith("handwritten"):
        model = HandwrittenGPT2(config, Linear1D if "1D" in variant else nn.Linear).cuda()
    else:
        attention = "sdpa_causal" if "no mask" in variant else "sdpa"
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        model = LossOf(model, "own" if "own loss" in variant else "model").cuda()
    if "per block" in variant:
        for block in model.model.transformer.h:
            block.compile()
        if "and the loss" in variant:
            model.model.loss_function = torch.compile(model.model.loss_function)
    elif "eager" not in variant:
        model.compile()
    return model


class Trainer:
    """One variant with its optimizer; `step` trains on a batch of tokens [batch, length]."""

    def __init__(self, variant: str) -> None:
        torch.manual_seed(0)
        self.model = build(variant)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=6e-4, fused=True)

    def step(self, tokens: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(tokens, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def milliseconds(trainer: Trainer, tokens: torch.Tensor, steps: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        trainer.step(tokens)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


def kernels(trainer: Trainer, tokens: torch.Tensor, steps: int = 3) -> list[dict]:
    """Return the 25 kernels that take most of a step, in ms per step."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            trainer.step(tokens)
        torch.cuda.synchronize()
    rows = [row for row in profiler.key_averages() if row.self_device_time_total > 0]
    rows.sort(key=lambda row: -row.self_device_time_total)
    return [
        {
            "kernel": row.key[:120],
            "ms": round(row.self_device_time_total / 1000 / steps, 3),
            "calls": row.count // steps,
        }
        for row in rows[:25]
    ]


VARIANTS = (
    "handwritten",
    "handwritten, Linear1D",
    "transformers",
    "transformers, no mask",
    "transformers, no mask, own loss",
    "transformers, per block",
    "transformers, no mask, per block and the loss",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help="which to measure")
    parser.add_argument("--batch-size", type=int, default=64, help="sequences per step")
    parser.add_argument("--seq-length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=20, help="steps per run")
    parser.add_argument("--runs", type=int, default=3, help="runs of each variant, in turn")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    tokens = torch.randint(50257, (args.batch_size, args.seq_length), device="cuda")
    trainers, times = {}, {variant: [] for variant in args.variants}
    for variant in args.variants:
        trainers[variant] = Trainer(variant)
        milliseconds(trainers[variant], tokens, steps=10)  # compiles, warms up
        print("ready:", variant, flush=True)
    for _ in range(args.runs):
        for variant in args.variants:
            times[variant].append(milliseconds(trainers[variant], tokens, args.steps))
    results = {}
    for variant in args.variants:
        median = statistics.median(times[variant])
        results[variant] = {
            "ms_per_step": [round(ms, 2) for ms in times[variant]],
            "tokens_per_s": round(tokens.numel() / median * 1000),
            "kernels": kernels(trainers[variant], tokens),
        }
        print(f"{variant:40s} {median:8.2f} ms {results[variant]['tokens_per_s']:10,d} tokens/s")
    write_result(args.output, results)


if __name__ == "__main__":
    main()

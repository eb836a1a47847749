"""Where GPT-2 124M of transformers loses time to a hand-written one, on one GPU.

python tests/benchmarks/profile_gpt2.py --output tests/benchmarks/results/profile_gpt2.json

Trains each variant on the same random tokens (64 x 1024 per step, bf16 autocast, fused AdamW,
gradients clipped), several times in turn.
"""

import argparse
import statistics
from pathlib import Path

import torch
from handwritten import HandwrittenGPT2
from machine import write_result
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PRESET = Path(__file__).parents[2] / "common/presets/gpt2"
# A name that transformers has no mask for: the kernel's own causal mask is all there is.
AttentionInterface.register("sdpa_causal", sdpa_attention_forward)


def build(variant: str) -> nn.Module:
    config = AutoConfig.from_pretrained(PRESET)
    if variant == "handwritten":
        model = HandwrittenGPT2(config).cuda()
    else:
        attention = "sdpa_causal" if "no mask" in variant else "sdpa"
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        model.cuda()
    if "per block" in variant:
        for block in model.transformer.h:
            block.compile()
        if "and the loss" in variant:
            model.loss_function = torch.compile(model.loss_function)
    else:
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
            loss = self.model(input_ids=tokens, labels=tokens)
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
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


VARIANTS = (
    "handwritten",
    "transformers",
    "transformers, no mask",
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
        }
        print(f"{variant:40s} {median:8.2f} ms {results[variant]['tokens_per_s']:10,d} tokens/s")
    write_result(args.output, results)


if __name__ == "__main__":
    main()

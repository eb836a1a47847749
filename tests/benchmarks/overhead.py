"""What a chapter's training step costs beside a bare loop.

python tests/benchmarks/overhead.py --output tests/benchmarks/results/overhead_cpu.json

The chapter's own script runs. After every few of its steps a hook on the optimizer does as many
steps of the bare loop, in the same process, so that both see the same machine. It trains the same
model on the same batches. The chapter is chapter 1, 2 or 3. All arguments after -- go to the
chapter.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import write_result
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM

from common.data import load_sequences, split_batch
from common.models import causal_attention, load_config, load_tokenizer

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))
from runner import load_script  # noqa: E402

WARM_UP = 2  # pairs of segments that are not counted: compilation, first allocations, caches


class BareLoop:
    """Model, optimizer and batches of a chapter, without anything else in its step."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        config, tokenizer = load_config(args.model_name), load_tokenizer(args.model_name)
        length = args.seq_length or config.max_position_embeddings
        blocks, _ = load_sequences(args, tokenizer, length)
        size, self.accumulation = split_batch(args, 1, len(blocks))
        ids = [
            torch.stack([blocks[i * size + j]["input_ids"] for j in range(size)]) for i in range(24)
        ]
        self.batches = [batch.pin_memory() if device.type == "cuda" else batch for batch in ids]
        self.model = AutoModelForCausalLM.from_config(
            config, attn_implementation=causal_attention(config), dtype=torch.float32
        )
        self.model.to(device=device, dtype=getattr(torch, args.param_dtype)).train()
        if args.compile:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.device, self.next = device, 0

    def step(self) -> None:
        for _ in range(self.accumulation):
            batch = self.batches[self.next % len(self.batches)].to(self.device, non_blocking=True)
            self.next += 1
            (self.model(input_ids=batch, labels=batch).loss / self.accumulation).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Alternate:
    """The hook: after `stride` steps of the chapter, `stride` steps of the bare loop."""

    def __init__(self, args: argparse.Namespace, device: torch.device, stride: int) -> None:
        self.device, self.stride = device, stride
        self.bare = BareLoop(args, device)
        self.steps, self.inside, self.start = 0, False, None
        self.chapter_ms: list[float] = []
        self.bare_ms: list[float] = []

    def __call__(self, *_: object) -> None:
        if self.inside:
            return
        self.steps += 1
        if self.steps % self.stride:
            return
        self.inside = True
        now = self.now()
        if self.start is not None:
            self.chapter_ms.append(1000 * (now - self.start) / self.stride)
            for _ in range(self.stride):
                self.bare.step()
            self.bare_ms.append(1000 * (self.now() - now) / self.stride)
        self.start = self.now()
        self.inside = False

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chapter", default="01-single-gpu", help="folder of the chapter")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--stride", type=int, default=2, help="steps in a row of each loop")
    parser.add_argument("--pairs", type=int, default=60, help="pairs that are counted")
    parser.add_argument("chapter_args", nargs="*", help="for the chapter, after --")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chapter = load_script(REPOSITORY / args.chapter / "train_llm.py")
    steps = args.stride * (args.pairs + WARM_UP + 1)
    command, os.environ["WANDB_MODE"] = sys.argv, "disabled"
    with tempfile.TemporaryDirectory() as folder:
        never = str(10**9)
        sys.argv = ["train_llm.py", *args.chapter_args, "--save-dir", folder, "-e", "run"]
        sys.argv += ["--max-steps", str(steps), "--eval-freq", never, "--ckpt-freq", never]
        alternate = Alternate(chapter.get_args(), device, args.stride)
        handle = register_optimizer_step_post_hook(alternate)
        chapter.main()
        handle.remove()
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    sys.argv = command
    chapter_ms, bare_ms = alternate.chapter_ms[WARM_UP:], alternate.bare_ms[WARM_UP:]
    ratios = [ours / theirs for ours, theirs in zip(chapter_ms, bare_ms, strict=True)]
    data_ms = [json.loads(line)["time/data"] for line in lines[1:]]
    results = {
        "pairs": len(ratios),
        "chapter_ms_per_step": round(statistics.median(chapter_ms), 3),
        "bare_ms_per_step": round(statistics.median(bare_ms), 3),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)],
        "ratio_of_sums": round(sum(chapter_ms) / sum(bare_ms), 4),
        "data_ms_per_step": round(statistics.median(data_ms), 3),
        "data_share": round(statistics.median(data_ms) / statistics.median(chapter_ms), 5),
    }
    print(json.dumps(results, indent=1))
    write_result(args.output, results)


if __name__ == "__main__":
    main()

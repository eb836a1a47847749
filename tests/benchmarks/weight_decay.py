"""Evaluation loss of chapter 1's training, with weight decay on different sets of parameters.

python tests/benchmarks/weight_decay.py --output tests/benchmarks/results/weight_decay.json

"all": every parameter, as in the chapters. "no norms and biases": every matrix. "no embeddings":
every matrix except the token embedding and the output layer.
"""

import argparse
import contextlib
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch
from machine import write_result

SCRIPT = Path(__file__).parents[2] / "01-single-gpu/train_llm.py"
CHOICES = ("all", "no norms and biases", "no embeddings")
ADAMW = torch.optim.AdamW


def adamw_for(choice: str):
    """Return a function like AdamW that sets the weight decay of some parameters to 0."""

    def adamw(parameters, weight_decay: float, **options):
        parameters = list(parameters)
        # The token embedding and the output layer have one row per token of the vocabulary.
        width = max(parameters, key=torch.Tensor.numel).shape[1]
        embeddings = {id(p) for p in parameters if p.ndim == 2 and p.shape[0] > 6 * width}
        plain = [
            p
            for p in parameters
            if choice != "all" and (p.ndim < 2 or (choice == CHOICES[2] and id(p) in embeddings))
        ]
        ids = {id(p) for p in plain}
        groups = [
            {"params": [p for p in parameters if id(p) not in ids], "weight_decay": weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        return ADAMW([group for group in groups if group["params"]], **options)

    return adamw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--models", nargs="+", default=["gpt2-tiny", "llama-tiny"])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    args, others = parser.parse_known_args()
    command = sys.argv
    os.environ["WANDB_MODE"] = "disabled"
    rows = []
    for model in args.models:
        for seed in range(args.seeds):
            for choice in CHOICES:
                torch.optim.AdamW = adamw_for(choice)
                with tempfile.TemporaryDirectory() as folder:
                    words = ["-m", model, "--seed", seed, "--save-dir", folder, "-e", "run"]
                    words += ["--weight-decay", args.weight_decay, "--ckpt-freq", 10**6, *others]
                    sys.argv = [str(SCRIPT), *map(str, words)]
                    with contextlib.suppress(SystemExit):
                        runpy.run_path(str(SCRIPT), run_name="__main__")
                    lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
                last = json.loads(lines[-1])
                rows.append({"model": model, "seed": seed, "decayed": choice} | last)
                print(model, seed, choice, last["eval_loss"], flush=True)
    sys.argv = command
    write_result(args.output, rows)


if __name__ == "__main__":
    main()

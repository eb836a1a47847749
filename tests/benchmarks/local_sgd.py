"""Compare the loss of chapter 3 with that of its variant local-sgd after as many tokens, on a CPU.

python tests/benchmarks/local_sgd.py --output tests/benchmarks/results/local_sgd_cpu.json

DDP's losses do not depend on the number of ranks, so one run stands for all.
"""

import itertools
import subprocess
import tempfile
from pathlib import Path

from machine import TORCHRUN, copy_chapter, environment, output_parser, read_metrics, write_result

CHAPTER = "03-multi-node"
# Sequences per step are the same for all numbers of ranks.
TRAINING = "-m gpt2-tiny -s 64 --global-batch-size 16 --max-steps 400 --log-freq 100"
TRAINING += " --eval-freq 400 --ckpt-freq 400 --eval-sequences 1024"
RANKS, LOCAL_STEPS = (2, 4), (1, 10, 100)
# By name: --outer-lr and --outer-momentum. DiLoCo's are those of arXiv 2311.08105.
OUTER = {"DiLoCo": (0.7, 0.9), "average": (1.0, 0.0)}


def train(script: Path, ranks: int, *args: object) -> dict[str, float]:
    """Train on some ranks; return the losses of the last 100 steps and of the evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*TORCHRUN, ranks, script / "train_llm.py", *TRAINING.split(), *args]
        words += ["--save-dir", folder, "-e", "run"]
        variables = environment(OMP_NUM_THREADS=1, HF_HUB_OFFLINE=1)
        subprocess.run(
            [str(word) for word in words], env=variables, check=True, stderr=subprocess.DEVNULL
        )
        last = read_metrics(Path(folder, "run"))[-1]
    return {key: last[key] for key in ("loss", "eval_loss")}


def main() -> None:
    args = output_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain = copy_chapter(CHAPTER, Path(folder, "plain"))
        variant = copy_chapter(CHAPTER, Path(folder, "variant"), "local-sgd")
        rows = [{"outer": "DDP", "ranks": 2, "local_steps": 1, **train(plain, 2)}]
        for outer, ranks, steps in itertools.product(OUTER, RANKS, LOCAL_STEPS):
            rate, momentum = OUTER[outer]
            flags = ("--local-steps", steps, "--outer-lr", rate, "--outer-momentum", momentum)
            found = train(variant, ranks, *flags)
            rows.append({"outer": outer, "ranks": ranks, "local_steps": steps, **found})
            print(rows[-1], flush=True)
    write_result(args.output, {"training": TRAINING, "rows": rows})


if __name__ == "__main__":
    main()

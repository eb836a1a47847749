"""What evaluation costs in a run on a large corpus.

python tests/benchmarks/evaluation.py --output tests/benchmarks/results/evaluation_cpu.json

Chapter 1 trains with its default flags on a corpus of 120 MB, which tokenizing.py writes. The clock
starts before the first step. It is read before and after the evaluation of step 200, so the 200
steps are measured with their log lines and saves. metrics.jsonl leaves evaluations out. CPU seconds
hardly depend on what else runs, unlike wall-clock time. PyTorch has one thread, because threads
that wait for each other use CPU time as well.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import write_result
from tokenizing import write_corpus

SCRIPT = Path(__file__).parents[2] / "01-single-gpu/train_llm.py"
STEPS = 200  # until the first evaluation, which is the default of --eval-freq


def train(folder: Path) -> None:
    """Run the chapter in this process; write what the clocks show, in seconds."""
    spec = importlib.util.spec_from_file_location("train_llm", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    evaluate, timers, clocks = script.evaluate, script.PhaseTimers, []

    def read_clocks() -> None:
        clocks.append((time.perf_counter(), time.process_time()))

    def start(*args: object) -> object:  # right before the first step
        read_clocks()
        return timers(*args)

    def timed(*args: object) -> dict:
        read_clocks()
        metrics = evaluate(*args)
        read_clocks()
        return metrics

    script.PhaseTimers, script.evaluate = start, timed
    flags = ["-d", folder / "corpus.jsonl", "--save-dir", folder, "-e", "run"]
    sys.argv = [str(SCRIPT), *map(str, flags), "--max-steps", str(STEPS + 1)]
    script.main()
    (folder / "clocks.json").write_text(json.dumps(clocks[:3]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--megabytes", type=int, default=120, help="size of the corpus")
    parser.add_argument("--run", type=Path, help="folder of a run (internal)")
    args = parser.parse_args()
    if args.run:
        train(args.run)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl", args.megabytes)
        env = {**os.environ, "HF_HOME": f"{folder}/cache", "WANDB_MODE": "disabled"}
        env["OMP_NUM_THREADS"] = "1"
        subprocess.run([sys.executable, __file__, "--run", folder], check=True, env=env)
        clocks = json.loads((folder / "clocks.json").read_text())
    results = {"megabytes": args.megabytes, "steps": STEPS}
    for clock, name in enumerate(("wall", "cpu")):
        begin, trained, evaluated = (times[clock] for times in clocks)
        results[name] = {
            "training_s": round(trained - begin, 2),
            "evaluation_s": round(evaluated - trained, 2),
            "share": round((evaluated - trained) / (evaluated - begin), 4),
        }
    print(json.dumps(results, indent=1))
    if args.output:
        write_result(args.output, results)


if __name__ == "__main__":
    main()

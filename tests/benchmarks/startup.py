"""How long the built-in corpus takes to prepare: the first start, and the next ones.

python tests/benchmarks/startup.py --output tests/benchmarks/results/startup_cpu.json

Each start is a process of its own; the first has an empty cache.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import write_result

# Imports are not counted: they are the same for any data set.
START = """
import argparse, time
from common.data import load_sequences
from common.models import load_tokenizer
args = argparse.Namespace(
    dataset_name="python-stdlib", dataset_subset=None, text_column=None, num_workers=0
)
tokenizer = load_tokenizer("gpt2-tiny")
start = time.perf_counter()
load_sequences(args, tokenizer, 128)
print(time.perf_counter() - start)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=5, help="pairs of starts")
    args = parser.parse_args()
    seconds = {"first": [], "second": []}
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as cache:
            for start in seconds:
                done = subprocess.run(
                    [sys.executable, "-c", START],
                    env={**os.environ, "HF_HOME": cache},
                    capture_output=True,
                    text=True,
                    check=True,
                )
                seconds[start].append(round(float(done.stdout), 3))
    results = {
        start: {"seconds": values, "median": statistics.median(values)}
        for start, values in seconds.items()
    }
    print(results)
    write_result(args.output, results)


if __name__ == "__main__":
    main()

"""Trace a step of chapter 2 on two processes of a CPU, in which rank 1 is late.

python tests/benchmarks/trace_step.py --output tests/benchmarks/results/trace_cpu.json

Each rank trains two micro-batches. Rank 1 sleeps before its last one. The result has the spans of
one step, in ms from its start: the phases of the script, and the all-reduces in gloo's thread.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import write_result

REPOSITORY = Path(__file__).parents[2]
FORWARD = '            with timers("forward"):\n'
SLEEP = '            __import__("time").sleep({} if rank == 1 and last_backward else 0)\n'
PHASES = ("data", "forward", "backward", "update")


def run(folder: Path, late_s: float, arguments: list[str]) -> None:
    """Train with a copy of the script whose rank 1 is late; the traces are in folder/trace."""
    script = folder / "02-ddp/train_llm.py"
    shutil.copytree(REPOSITORY / "02-ddp", script.parent)
    text = script.read_text()
    assert text.count(FORWARD) == 1
    script.write_text(text.replace(FORWARD, SLEEP.format(late_s) + FORWARD))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "02-ddp/trace_ranks.py", "--output", folder / "trace"]
    command += [script, "--save-dir", folder, *arguments]
    env = {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=REPOSITORY, env=os.environ | env, check=True)


def spans_of(trace: dict, step: int) -> list[dict]:
    """Return the phases and all-reduces of a step; starts and ends are in microseconds."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    (whole,) = [each for each in events if each["name"] == f"ProfilerStep#{step}"]
    base, end = trace["baseTimeNanoseconds"] / 1000, whole["ts"] + whole["dur"]
    return [
        {
            "name": event["name"],
            "start": base + event["ts"],
            "end": base + event["ts"] + event["dur"],
        }
        for event in sorted(events, key=lambda event: event["ts"])
        if whole["ts"] <= event["ts"] < end
        and (event["name"] in PHASES or event["name"] == "gloo:all_reduce")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--late-ms", default=60, type=float, help="how late rank 1 is")
    parser.add_argument("--step", default=13, type=int, help="traced step to keep")
    args = parser.parse_args()
    few = ["--max-steps", "16", "--log-freq", "100", "--eval-sequences", "24"]
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), args.late_ms / 1000, few)
        traces = [json.loads(Path(folder, f"trace/rank{n}.json").read_text()) for n in (0, 1)]
    ranks = [spans_of(trace, args.step) for trace in traces]
    start = min(span["start"] for spans in ranks for span in spans)
    for span in (span for spans in ranks for span in spans):
        span |= {key: round((span[key] - start) / 1000, 2) for key in ("start", "end")}
    write_result(args.output, {"late_ms": args.late_ms, "ranks": ranks})


if __name__ == "__main__":
    main()

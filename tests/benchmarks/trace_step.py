"""Trace a step of chapter 2 on two processes of a CPU, in which rank 1 is late.

python tests/benchmarks/trace_step.py --output tests/benchmarks/results/trace_cpu.json

Each rank trains two micro-batches. Rank 1 sleeps before its last one. The result has the spans of
one step, in ms from its start: the phases of the script, and the all-reduces in gloo's thread.
"""

import json
import subprocess
import tempfile
from pathlib import Path

from machine import (
    REPOSITORY,
    TORCHRUN,
    copy_chapter,
    environment,
    output_parser,
    replace_in,
    write_result,
)

FORWARD = '            with timers("forward"):\n'
SLEEP = '            __import__("time").sleep({} if rank == 1 and last_backward else 0)\n'
NAMES = ("data", "forward", "backward", "update", "gloo:all_reduce")
STEP = 13  # which is shown
TRAINING = ("--max-steps", "16", "--log-freq", "100", "--eval-sequences", "24")


def run(folder: Path, late_s: float) -> None:
    """Train with a copy of the script whose rank 1 is late; the traces are in folder/trace."""
    script = copy_chapter("02-ddp", folder) / "train_llm.py"
    replace_in(script, FORWARD, SLEEP.format(late_s) + FORWARD)
    command = [*TORCHRUN, "2", "02-ddp/trace_ranks.py", "--output", folder / "trace"]
    command += [script, "--save-dir", folder, *TRAINING]
    variables = environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS=1)
    subprocess.run(command, cwd=REPOSITORY, env=variables, check=True)


def spans_of(trace: dict) -> list[dict]:
    """Return the phases and all-reduces of the step; starts and ends are in microseconds."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    (whole,) = [each for each in events if each["name"] == f"ProfilerStep#{STEP}"]
    base, end = trace["baseTimeNanoseconds"] / 1000, whole["ts"] + whole["dur"]
    return [
        {
            "name": event["name"],
            "start": base + event["ts"],
            "end": base + event["ts"] + event["dur"],
        }
        for event in sorted(events, key=lambda event: event["ts"])
        if whole["ts"] <= event["ts"] < end and event["name"] in NAMES
    ]


def main() -> None:
    parser = output_parser(__doc__)
    parser.add_argument("--late-ms", default=60, type=float, help="how late rank 1 is")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), args.late_ms / 1000)
        traces = [json.loads(Path(folder, f"trace/rank{n}.json").read_text()) for n in (0, 1)]
    ranks = [spans_of(trace) for trace in traces]
    start = min(span["start"] for spans in ranks for span in spans)
    for span in (span for spans in ranks for span in spans):
        span |= {key: round((span[key] - start) / 1000, 2) for key in ("start", "end")}
    write_result(args.output, {"late_ms": args.late_ms, "ranks": ranks})


if __name__ == "__main__":
    main()

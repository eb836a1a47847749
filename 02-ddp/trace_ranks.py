"""Run a chapter's script, trace a few of its training steps, and compare the ranks.

torchrun --standalone --nproc-per-node 2 02-ddp/trace_ranks.py 02-ddp/train_llm.py --max-steps 20

Each rank writes a trace, rank<N>.json, for https://ui.perfetto.dev. Rank 0 prints a table:

computation    the time during which the GPU runs kernels or copies, except NCCL's
communication  the time during which NCCL's kernels run, which includes waiting for other ranks
exposed        the part of communication during which there is no computation

On a CPU, computation is the time inside PyTorch's operators, and communication is the time from the
call of a gloo collective until its end. Both share the cores, so communication slows computation
down. The table then shows what overlaps, but not how much time the overlap saves.
"""

import argparse
import contextlib
import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from common import cli, launch, ranks
from common.cli import at_least
from common.errors import RunError
from common.timers import PhaseTimers

Spans = list[tuple[float, float]]  # start and end, in microseconds
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events in a trace
NOTICEABLE = 0.05  # of a step: if the ranks' communication differs by less, nobody is late


def covered(spans: Spans) -> float:
    """Return the time that is covered by at least one span."""
    total, end = 0.0, float("-inf")
    for span_start, span_end in sorted(spans):
        total += max(0.0, span_end - max(span_start, end))
        end = max(end, span_end)
    return total


def measure(events: list[dict], on_gpu: bool) -> dict[str, float]:
    """Return the table's columns for one rank, in ms per step, from the events of its trace."""
    steps, communication, computation = [], [], []
    spans = [event for event in events if event.get("ph") == "X"]  # the others have no duration
    gloo_threads = {event["tid"] for event in spans if event["name"].startswith("gloo:")}
    for event in spans:
        name, category = event["name"], event.get("cat")
        if on_gpu:
            communicates = category == "kernel" and name.startswith("nccl")
            computes = category in GPU_WORK
        else:
            communicates = name.startswith("gloo:")
            computes = name.startswith("aten::") and event["tid"] not in gloo_threads
        span = (event["ts"], event["ts"] + event["dur"])
        if name.startswith("ProfilerStep#") and category == "user_annotation":
            steps.append(span)
        elif communicates:
            communication.append(span)
        elif computes:
            computation.append(span)
    times = {
        "step": covered(steps),
        "computation": covered(computation),
        "communication": covered(communication),
        "exposed": covered(communication + computation) - covered(computation),
    }
    return {name: time / 1000 / len(steps) for name, time in times.items()}


def name_straggler(by_rank: dict[int, dict[str, float]]) -> str:
    """Return a sentence about the rank that arrives last, for which collectives are shortest."""
    waits = {rank: times["communication"] for rank, times in by_rank.items()}
    last, first = min(waits, key=waits.get), max(waits, key=waits.get)
    if waits[first] - waits[last] < NOTICEABLE * by_rank[first]["step"]:
        return "No rank is late: all ranks spend about the same time in collectives."
    return (
        f"Rank {last} arrives last: it spends {waits[last]:.1f} ms per step in collectives, "
        f"and rank {first} spends {waits[first]:.1f} ms, because it waits."
    )


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--skip-steps", default=12, type=at_least(1), help="steps before the traced ones")
    add("--trace-steps", default=3, type=at_least(1), help="steps to trace")
    add("--output", type=Path, help="folder of the traces (default: outputs/trace-<chapter>)")
    add("script", type=Path, help="a chapter's train_llm.py")
    add("arguments", nargs=argparse.REMAINDER, help="the arguments of that script")
    return parser.parse_args()


def main() -> None:
    launch.prepare_environment()
    args = get_args()
    rank, on_gpu = int(os.environ["RANK"]), torch.cuda.is_available()
    folder = args.output or Path("outputs", f"trace-{args.script.resolve().parent.name}")
    folder.mkdir(parents=True, exist_ok=True)
    trace_file, last_step = folder / f"rank{rank}.json", args.skip_steps + args.trace_steps
    profiler = torch.profiler.profile(
        # In its step of warm-up, the profiler runs but records nothing.
        schedule=torch.profiler.schedule(
            wait=args.skip_steps - 1, warmup=1, active=args.trace_steps, repeat=1
        ),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace_file)),
        acc_events=True,  # without this, torch 2.11 prints a warning
    )
    step, by_rank = 0, {}

    def end_step() -> None:
        nonlocal step, by_rank
        step += 1
        if step in (args.skip_steps, last_step) and on_gpu:
            torch.cuda.synchronize()  # so that the trace contains whole steps
        if step == args.skip_steps and dist.is_initialized():
            dist.barrier()  # the ranks start together
        profiler.step()
        if step == last_step:
            events = json.loads(trace_file.read_text())["traceEvents"]
            by_rank = ranks.gather({rank: measure(events, on_gpu)})

    time_phase = PhaseTimers.__call__

    @contextlib.contextmanager
    def trace_phase(timers: PhaseTimers, phase: str) -> Iterator[None]:
        with torch.profiler.record_function(phase), time_phase(timers, phase):
            yield
        if phase == "update":  # the last phase of a training step
            end_step()

    PhaseTimers.__call__ = trace_phase
    sys.argv = [str(args.script), *args.arguments]
    sys.path.insert(0, str(args.script.resolve().parent))
    train = runpy.run_path(str(args.script), run_name="train_llm")["main"]
    profiler.start()
    try:
        train()
    except SystemExit as ended:  # chapters 3 to 5 exit with a status
        if ended.code:
            raise
    if not by_rank:
        raise RunError(
            f"The run took {step} steps, but the last traced step is {last_step}: give the script "
            "a larger --max-steps, or write --skip-steps before the script."
        )
    if rank == 0:
        print(f"\nms per step, mean of the steps {args.skip_steps + 1} to {last_step}")
        print("rank", *(f"{name:>13}" for name in by_rank[0]))
        for number, times in by_rank.items():
            print(f"{number:4}", *(f"{ms:13.1f}" for ms in times.values()))
        print(name_straggler(by_rank))
        print(f"the traces, for https://ui.perfetto.dev: {folder}/rank*.json")


if __name__ == "__main__":
    launch.run(main)

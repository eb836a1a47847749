"""Memory of one GPU over one training step, from the traces of 02-ddp/trace_ranks.py.

python tests/benchmarks/memory_timeline.py DDP=outputs/trace-02-ddp/rank0.json \
    FSDP=outputs/trace-04-fsdp/rank0.json --output tests/benchmarks/results/memory_timeline_gpu.json

The traces must have been recorded with --memory-snapshot. Uses the first traced step of each. Time
is the host's, which runs ahead of the GPU: it says when memory is allocated, not when it is used.
"""

import argparse
import json
import math
from pathlib import Path

from machine import write_result

BINS = 400  # equal parts of the step's time
PHASES = ("data", "wait", "forward", "backward", "update")
DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # https://github.com/pytorch/pytorch: c10/core/DeviceType.h


def first_step(events: list[dict], device: str) -> dict:
    """Return the phases of a trace's first step, and the peak of allocated bytes in each bin."""
    events = sorted(events, key=lambda event: event.get("ts", 0))
    phases = [
        event
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in PHASES
    ]
    update = next(event for event in phases if event["name"] == "update")
    phases = phases[: phases.index(update) + 1]
    start, end = phases[0]["ts"], update["ts"] + update["dur"]
    changes = [
        (event["ts"], event["args"]["Total Allocated"], event["args"]["Bytes"])
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == DEVICE_TYPES[device]
    ]
    _, total, size = changes[0]
    allocated = total - size  # before the first change
    peaks = [0] * BINS
    filled = 0  # bins that are complete
    for at, total, _ in changes:
        number = min(BINS, math.floor(BINS * (at - start) / (end - start)))
        while filled < number:  # what was allocated before this change, in the bins up to it
            peaks[filled] = max(peaks[filled], allocated)
            filled += 1
        if 0 <= number < BINS:
            peaks[number] = max(peaks[number], allocated, total)
        allocated = total
    peaks[filled:] = [max(peak, allocated) for peak in peaks[filled:]]
    return {
        "phases": [[e["name"], round((e["ts"] - start) / (end - start), 4)] for e in phases],
        "milliseconds": round((end - start) / 1000, 2),
        "peak_bytes_by_bin": peaks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="LABEL=FILE", help="name and trace of a run")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="cuda", choices=DEVICE_TYPES, help="whose memory")
    args = parser.parse_args()
    results = {}
    for trace in args.traces:
        label, file = trace.split("=", 1)
        events = json.loads(Path(file).read_text())["traceEvents"]
        results[label] = first_step(events, args.device)
        print(label, f"peak {max(results[label]['peak_bytes_by_bin']) / 2**30:.2f} GiB")
    write_result(args.output, results)


if __name__ == "__main__":
    main()

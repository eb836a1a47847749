"""Where result files are, what they are named, and how they are written."""

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "05-mixed-precision"))
from machine_facts import describe_machine

RESULTS = Path(__file__).parent / "results"


def visible_gpus(first: int, number: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for so many of the GPUs that this process may see itself.

    Where it sees none, or fewer, there is nothing to share out: they run on the CPU.
    """
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = [str(n) for n in range(64)] if said is None else said.split(",")
    chosen = seen[first : first + number]
    return ",".join(chosen) if len(chosen) == number else said


def memory_kib(pid: int) -> dict[str, int]:
    """Return the KiB of a process by kind, such as Pss; shared pages count in parts."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def file_name(label: str) -> str:
    """Return the name of a row's file or folder."""
    return label.replace(" ", "-").replace(",", "")


def write_result(path: Path, results: object) -> None:
    """Write {"machine": ..., "results": ...} as JSON; prints where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n"
    )
    print(f"wrote {path}")

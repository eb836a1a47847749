"""What a result file says of the machine, the versions and the command that it comes from."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def describe_machine() -> dict[str, object]:
    """Return hardware, versions, commit, date and command, as JSON values."""
    facts = {
        "command": shlex.join([*_launcher(), *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _first_line("git", "describe", "--always", "--dirty"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts |= {
            "gpu": torch.cuda.get_device_name(0),
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _first_line(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ),
        }
    return facts


def visible_gpus(first: int, number: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for so many of the GPUs that this process may see itself.

    Where it sees none, or fewer, there is nothing to share out: they run on the CPU.
    """
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = [str(n) for n in range(64)] if said is None else said.split(",")
    chosen = seen[first : first + number]
    return ",".join(chosen) if len(chosen) == number else said


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


def _launcher() -> list[str]:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["python"]
    return ["torchrun", "--standalone", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]


def _first_line(*command: str) -> str | None:
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.splitlines()[0].strip() if output.strip() else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

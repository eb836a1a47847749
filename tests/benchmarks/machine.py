"""Where result files are, what they are named, and how they are written."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def describe_machine() -> dict[str, object]:
    """Return hardware, versions, commit, date and command, which result files start with."""
    launcher = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = ["torchrun", "--standalone", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
    cpu_info = Path("/proc/cpuinfo")
    cpus = re.findall(r"model name\s*: (.*)", cpu_info.read_text() if cpu_info.exists() else "")
    facts = {
        "command": shlex.join([*launcher, *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _first_line("git", "describe", "--always", "--dirty"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "cpu": cpus[0] if cpus else platform.processor() or platform.machine(),
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


def _first_line(*command: str) -> str | None:
    """Return the first line that a command prints, or None if it fails."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.splitlines()[0].strip() if output.strip() else None


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

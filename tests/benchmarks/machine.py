"""What the programs share: changed copies of chapters, how these start, and result files."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from common import variants

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def output_parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser with the option of all programs that write a result file."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    return parser


def copy_chapter(chapter: str | Path, folder: Path, *names: str) -> Path:
    """Copy a chapter into a folder; return the copy.

    chapter: a folder of the repository, or a changed copy of one. names: variants of the chapter,
    all that they need included.
    """
    source = REPOSITORY / chapter
    copy = folder.resolve() / source.name
    shutil.rmtree(copy, ignore_errors=True)
    if names:
        copy.mkdir(parents=True)
        variants.fill(copy, copy, source.name, variants.choose(int(source.name[:2]), names))
    else:
        shutil.copytree(source, copy)
    return copy


def replace_in(file: Path, right: str, wrong: str) -> None:
    """Replace a text that stands in a file once."""
    text = file.read_text()
    assert text.count(right) == 1, (file, right)
    file.write_text(text.replace(right, wrong))


def environment(**more: object) -> dict[str, str]:
    """Return the variables for a chapter's script, or for a copy of it elsewhere."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": path, "WANDB_MODE": "disabled", **more}
    return {**os.environ, **{key: str(value) for key, value in ours.items()}}


def read_metrics(run_dir: Path) -> list[dict]:
    """Return what a run has logged so far, without a line that is being written."""
    file = run_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _without_folder(argument: str) -> str:
    return Path(argument).name if argument.startswith("/") else argument


def describe_machine() -> dict[str, object]:
    """Return hardware, versions, commit, date and command, which result files start with."""
    launcher = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = ["torchrun", "--standalone", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
    cpu_info = Path("/proc/cpuinfo")
    cpus = re.findall(r"model name\s*: (.*)", cpu_info.read_text() if cpu_info.exists() else "")
    facts = {
        # Only the names of files: their folders are those of this machine.
        "command": shlex.join([*launcher, sys.argv[0], *map(_without_folder, sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _first_line("git", "describe", "--always", "--dirty"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "cpu": cpus[0] if cpus else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        # PyTorch would initialize the GPU in this process, and so use some of its memory.
        query = "--query-gpu=name,driver_version"
        asked = _first_line("nvidia-smi", query, "--format=csv,noheader")
        name, _, driver = (asked or torch.cuda.get_device_name(0)).partition(", ")
        facts |= {
            "gpu": name,
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": driver or None,
        }
    return facts


def _first_line(*command: str) -> str | None:
    """Return the first line that a command prints, or None if it fails."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.splitlines()[0].strip() if output.strip() else None


def write_result(path: Path, results: object) -> None:
    """Write {"machine": ..., "results": ...} as JSON; prints where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n"
    )
    print(f"wrote {path}")

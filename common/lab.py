"""What the notebooks share: ranks and chapters as real processes, and their output in the cell.

`%load_ext common.lab` in a notebook gives it the magic `%%ranks N`, which runs a cell on N ranks.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
_folder = tempfile.TemporaryDirectory(prefix="lab-")  # on import: each notebook has one, alone
FOLDER = Path(_folder.name)  # of the runs; gone when the notebook's kernel ends
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def load_ipython_extension(shell) -> None:
    """Give a notebook the magic, the same figures everywhere, and no GPU.

    Without one its numbers are the same on each machine that has the same processor and versions.
    """
    import matplotlib.pyplot as plt

    warnings.filterwarnings("ignore", message="IProgress")  # its bars would not come out again
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    plt.rcParams |= {
        "figure.figsize": (8, 3),
        "figure.dpi": 80,
        "savefig.bbox": "tight",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "legend.frameon": False,
    }
    shell.register_magic_function(
        lambda line, cell: shell.push({"kept": ranks(int(line), cell)}), "cell", "ranks"
    )


def ranks(world_size: int, source: str) -> list[dict]:
    """Run source code on so many ranks, print what each prints, and return what each kept.

    Raises RuntimeError with the end of the first error's traceback where a rank fails.
    """
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    script = folder / "cell.py"
    script.write_text(source)
    logs = ("--log-dir", folder / "logs", "--redirects", "3", "--max-restarts", "0")
    command = [sys.executable, *TORCHRUN, world_size, *logs, script]
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, "LAB_FOLDER": str(folder), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = {int(path.parent.name): path for path in (folder / "logs").rglob("stdout.log")}
    for rank in range(world_size):
        for line in said[rank].read_text().splitlines() if rank in said else ():
            print(f"[rank {rank}] {line}")
    if done.returncode:
        # Who fails first writes first; the others then miss it, and say that.
        ends = sorted((folder / "logs").rglob("stderr.log"), key=lambda path: path.stat().st_mtime)
        errors = (path.read_text() for path in ends)
        raise RuntimeError(next((text for text in errors if "Error" in text), done.stdout)[-2000:])
    files = [folder / f"rank-{rank}.pt" for rank in range(world_size)]
    return [torch.load(file) if file.exists() else {} for file in files]


def keep(**values: object) -> None:
    """Hand tensors, numbers, lists and dictionaries to the notebook; a rank may call it once."""
    torch.save(values, Path(os.environ["LAB_FOLDER"]) / f"rank-{os.environ['RANK']}.pt")


def train(script: str, *args: object, world_size: int = 1, name: str) -> list[dict]:
    """Train with a chapter's script and return the lines of its metrics.jsonl.

    script: relative to the repository, as in "02-ddp/train_llm.py". name: of the run; where it has
    begun already, it goes on. Chapter 1 has no process group: there it is one process.
    Raises RuntimeError with what the script says where it fails.
    """
    shown = shlex.join([script, *map(str, args), "-e", name])
    launcher = [] if script.startswith("01") else [*TORCHRUN, str(world_size)]
    torchrun = f"torchrun --standalone --nproc-per-node {world_size}"
    print(f"{torchrun if launcher else 'python'} {shown}")
    command = [sys.executable, *launcher, *shlex.split(shown), "--save-dir", str(FOLDER)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    lines = (FOLDER / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

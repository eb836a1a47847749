"""Helpers for the notebooks: start scripts and cells with torchrun, and give all plots one style.

`%load_ext common.lab` gives a notebook the magic `%%ranks N`, which runs a cell on N ranks.
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
_folder = tempfile.TemporaryDirectory(prefix="lab-")
# Holds the runs. It is deleted when the notebook's kernel ends. The ranks use the same folder.
FOLDER = Path(os.environ.get("LAB_FOLDER", _folder.name))


def load_ipython_extension(shell) -> None:
    """Set up a notebook: the magic `%%ranks`, the style of the figures, one thread and no GPU.

    One thread and no GPU make the numbers nearly the same on all machines with the same versions.
    """
    import matplotlib.pyplot as plt

    warnings.filterwarnings("ignore", message="IProgress")  # progress bars differ from run to run
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
    """Run source code on world_size ranks, print their output, and return what each rank kept.

    Raises RuntimeError with the error output of the ranks if one of them fails.
    """
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    (folder / "cell.py").write_text(source)
    stdout_to_files = ("--redirects", "1", "--log-dir", str(folder))
    launcher = [*_torchrun(world_size), *stdout_to_files]
    _run(*launcher, str(folder / "cell.py"), LAB_KEEP=str(folder))
    for rank in range(world_size):
        (log,) = folder.glob(f"*/attempt_0/{rank}/stdout.log")
        for line in log.read_text().splitlines():
            print(f"[rank {rank}] {line}")
    files = [folder / f"rank-{rank}.pt" for rank in range(world_size)]
    return [torch.load(file) if file.exists() else {} for file in files]


def keep(**values: object) -> None:
    """Pass tensors, numbers, lists and dictionaries to the notebook. Each rank may call it once."""
    torch.save(values, Path(os.environ["LAB_KEEP"]) / f"rank-{os.environ['RANK']}.pt")


def train(script: str, *args: object, world_size: int = 1, name: str) -> list[dict]:
    """Train with a chapter's script and return the lines of its metrics.jsonl.

    script: path below the repository, for example "02-ddp/train_llm.py". name: of the run, which is
    resumed if it exists. Chapter 1 has no process group, so its script runs without torchrun.
    Raises RuntimeError with the script's error output.
    """
    words = [script, *map(str, args), "-e", name]
    launcher = [] if script.startswith("01") else _torchrun(world_size)
    shown = ["torchrun", *launcher[2:]] if launcher else ["python"]
    print(shlex.join(shown), shlex.join(words))
    _run(*launcher, *words, "--save-dir", str(FOLDER))
    lines = (FOLDER / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _torchrun(world_size: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]


def _run(*words: str, **env: str) -> None:
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "LAB_FOLDER": str(FOLDER), **env}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)

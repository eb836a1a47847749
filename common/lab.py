"""What the notebooks share: ranks and chapters as real processes, and their output in the cell.

`%load_ext common.lab` in a notebook gives it the magic `%%ranks N`, which runs a cell on N ranks.
"""

import contextlib
import json
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[1]
if "LAB_FOLDER" in os.environ:  # this process is a rank
    FOLDER = Path(os.environ["LAB_FOLDER"])
else:  # of the runs; each notebook has its own, and it is deleted when the notebook's kernel ends
    _folder = tempfile.TemporaryDirectory(prefix="lab-")
    FOLDER = Path(_folder.name)
# A process of its own: a notebook's kernel has threads, so it must not fork.
START = """from common import lab
if __name__ == "__main__":
    lab.start()
"""


def load_ipython_extension(shell) -> None:
    """Give a notebook the magic `%%ranks`, figures of one size, one thread and no GPU.

    With these its numbers are nearly the same on all machines that have the same versions.
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
    """Run source code on so many ranks, print what each prints, and return what each kept.

    Raises RuntimeError with the traceback of the rank that failed first.
    """
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    (folder / "cell.py").write_text(source)
    (folder / "start.py").write_text(START)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # at a free port
    env = {
        "LAB_FOLDER": folder,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # rank 0 connects to the store, as the others do
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [os.environ.get("PYTHON_EXEC", sys.executable), folder / "start.py"],
        cwd=ROOT,
        env={**os.environ, **{key: str(value) for key, value in env.items()}},
        capture_output=True,
        text=True,
    )
    for rank in range(world_size):
        printed = folder / f"rank-{rank}.txt"
        for line in printed.read_text().splitlines() if printed.exists() else ():
            print(f"[rank {rank}] {line}")
    if done.returncode:
        error = folder / "error.txt"
        raise RuntimeError((error.read_text() if error.exists() else done.stderr)[-2000:])
    files = [folder / f"rank-{rank}.pt" for rank in range(world_size)]
    return [torch.load(file) if file.exists() else {} for file in files]


def start() -> None:
    """Import once what all ranks need, then fork them: an import takes longer than most cells."""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import common.data  # noqa: F401

    method = "fork" if sys.platform == "linux" else "spawn"
    world_size = int(os.environ["WORLD_SIZE"])
    torch.multiprocessing.start_processes(run_cell, nprocs=world_size, start_method=method)


def run_cell(rank: int) -> None:
    """Be a rank: run the cell; what it prints and why it failed goes to files."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    try:
        with (FOLDER / f"rank-{rank}.txt").open("w") as out, contextlib.redirect_stdout(out):
            runpy.run_path(str(FOLDER / "cell.py"), run_name="__main__")
    except Exception:
        # The first rank that fails creates the file. The others then fail because it is gone.
        with contextlib.suppress(FileExistsError), (FOLDER / "error.txt").open("x") as file:
            traceback.print_exc(file=file)
        sys.exit(1)


def keep(**values: object) -> None:
    """Hand tensors, numbers, lists and dictionaries to the notebook; a rank may call it once."""
    torch.save(values, FOLDER / f"rank-{os.environ['RANK']}.pt")


def train(script: str, *args: object, world_size: int = 1, name: str) -> list[dict]:
    """Train with a chapter's script and return the lines of its metrics.jsonl.

    script: relative to the repository, as in "02-ddp/train_llm.py". name: of the run; where it has
    begun already, it goes on. Chapter 1 has no process group: there it is one process.
    Raises RuntimeError with what the script says where it fails.
    """
    shown = shlex.join([script, *map(str, args), "-e", name])
    torchrun = ["--standalone", "--nproc-per-node", str(world_size)]
    launcher = ["-m", "torch.distributed.run", *torchrun, "--log-dir", str(FOLDER / "torchrun")]
    if script.startswith("01"):
        launcher = []
    print(shlex.join(["torchrun", *torchrun] if launcher else ["python"]), shown)
    command = [sys.executable, *launcher, *shlex.split(shown), "--save-dir", str(FOLDER)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    lines = (FOLDER / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

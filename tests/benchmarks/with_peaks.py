"""Run a chapter's script, and write down the peak memory of every device that its process used.

python tests/benchmarks/with_peaks.py FOLDER SCRIPT ARGUMENTS

A process writes FOLDER/<rank>.json when it ends: GiB of tensors by number of the GPU, or, on a CPU,
GiB of the process.
"""

import atexit
import json
import os
import runpy
import sys
from pathlib import Path

import torch

from common.timers import peak_memory_gib


def write_peaks(folder: Path, pid: int) -> None:
    if os.getpid() != pid:  # a child of this process, for example one that tokenizes
        return
    rank = os.environ.get("RANK", "0")
    gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    peaks = {str(gpu.index): peak_memory_gib(gpu) for gpu in gpus}
    (folder / f"{rank}.json").write_text(
        json.dumps(peaks or {rank: peak_memory_gib(torch.device("cpu"))})
    )


def main() -> None:
    _, folder, *sys.argv = sys.argv
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # a chapter's modules
    atexit.register(write_peaks, Path(folder), os.getpid())
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

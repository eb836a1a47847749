"""Record how two faults of chapter 3 and its shapes.py look with NCCL, for diagnosing.md.

python tests/benchmarks/nccl_faults.py --output /tmp/nccl

It needs two GPUs, and checks nothing, because NCCL promises no symptom.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from helpers import TORCHRUN, patch  # noqa: E402

CHAPTER = "03-multi-node"
FAULTS = ROOT / CHAPTER / "faults"
SHOWN = r"step \d+/|the sum|Error|ssert|atchdog|light recorder|exitcode|Signal|sequence number|rank"
NOISE = r"frame #|^Search for|warnings\.warn"  # frames of C++, and advice


def run(folder: Path, *words: object) -> None:
    """Run a command and print the important lines of what it says, each one once."""
    print(f"\n--- {' '.join(map(str, words))}", flush=True)
    dumps = {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/rank_"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **dumps, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = [line[:300] for line in done.stdout.splitlines()]
    lines = [line for line in lines if re.search(SHOWN, line) and not re.search(NOISE, line)]
    print("\n".join(dict.fromkeys(lines)), f"\nexit status {done.returncode}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="new folder for the runs")
    folder = parser.parse_args().output
    folder.mkdir(parents=True)
    for name in ("crash", "skipped-collective"):
        script = patch(CHAPTER, folder / name, diff=FAULTS / f"{name}.diff") / "train_llm.py"
        flags = (f"@{FAULTS}/short.args", "--dist-timeout", 15, "--save-dir", folder, "-e", name)
        run(folder, *TORCHRUN, 2, script, *flags)
    run(folder, "-m", "torch.distributed.flight_recorder.fr_trace", folder, "--prefix", "rank_")
    for sizes in ((4, 3), (2**22, 2**20)):
        run(folder, *TORCHRUN, 2, FAULTS / "shapes.py", *sizes)


if __name__ == "__main__":
    main()

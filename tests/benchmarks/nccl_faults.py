"""Failures of the fault lab as they look with NCCL: a recording for diagnosing.md, on two GPUs.

python tests/benchmarks/nccl_faults.py > 03-multi-node/recorded/fault_nccl.txt

The lab plants them on the CPU, where the ranks talk by gloo. These are the same patches on GPUs. It
checks nothing: NCCL promises no symptom.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from runner import load_script  # noqa: E402

lab_script = load_script(ROOT / "03-multi-node/fault_lab.py")
GPUS = {"CUDA_VISIBLE_DEVICES": "0,1"}
TIMEOUT_S = 15
TOLD = r"step \d+/|Error|ssert|atchdog|light recorder|exitcode|Signal"
# The lab's few lines, with their tensors on the GPU of the rank.
SHAPES = lab_script.SHAPES
for old, new in (
    ('"gloo"', '"nccl"'),
    ("torch.ones(sizes[rank])", 'torch.ones(sizes[rank], device=f"cuda:{rank}")'),
    ("numbers.tolist()", "numbers[:4].tolist()"),
):
    assert old in SHAPES
    SHAPES = SHAPES.replace(old, new)


def show(lab, run) -> None:
    """Show what a reader of the log would look at, each line once and cut to 300 characters."""
    run.wait(300)
    lines = dict.fromkeys(line[:300] for line in [*run.lines(TOLD), *run.report()])
    lab.ended(run, list(lines))


def show_flight_recorder(lab, folder: Path) -> None:
    """Show the files that the watchdog has written, and what torchfrtrace finds in them."""
    lab.say("the files of the Flight Recorder", [path.name for path in folder.glob("rank_*")])
    lab.say("the last collectives in them", lab_script.read_flight_recorder(folder))
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    done = subprocess.run([*command, "--prefix", "rank_"], capture_output=True, text=True)
    lab.say("torchfrtrace FOLDER --prefix rank_", (done.stdout + done.stderr).splitlines()[-40:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for what the runs write")
    args = parser.parse_args()
    output = args.output or Path(tempfile.mkdtemp())
    lab = lab_script.Lab(argparse.Namespace(dist_timeout=TIMEOUT_S, output=output))
    dumps = output / "dumps"
    dumps.mkdir()
    recorder = {"TORCH_FR_BUFFER_SIZE": 100, "TORCH_NCCL_DUMP_ON_TIMEOUT": 1}
    recorder["TORCH_FR_DUMP_TEMP_FILE"] = dumps / "rank_"
    recorder["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = dumps / "rank_"  # its name in older releases
    runs = [
        lab.train("crash", lab_script.CRASH, **GPUS),
        lab.train("skipped-collective", lab_script.SKIPPED, **GPUS, **recorder),
        lab.plain("shapes", SHAPES, "", 4, 3, **GPUS),
        lab.plain("shapes", SHAPES, "", 2**22, 2**20, **GPUS),
    ]
    for run in runs:
        show(lab, run)
    show_flight_recorder(lab, dumps)


if __name__ == "__main__":
    main()

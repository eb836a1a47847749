"""Record how three faults of the fault lab look with NCCL, on two GPUs, for diagnosing.md.

python tests/benchmarks/nccl_faults.py --output /tmp/nccl

The lab itself uses CPUs and gloo. This script applies the same patches on GPUs. It checks nothing,
because NCCL promises no symptom.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from runner import load_script  # noqa: E402

fault_lab = load_script(ROOT / "03-multi-node/tools/fault_lab.py")
GPUS = {"CUDA_VISIBLE_DEVICES": "0,1"}
TIMEOUT_S = 15
SHOWN = r"step \d+/|the sum|Error|ssert|atchdog|light recorder|exitcode|Signal"
# Frames of C++, torchrun's exception about its own report, a list of loaded modules.
NOISE = r"^(\d\| )?frame #|raise ChildFailedError|errors\.ChildFailedError:|pandas\."
STEP, ASSERTION = r"\] step \d+/", r"Assertion `"
# The lab's script with its tensors on the GPU of the rank.
SHAPES = fault_lab.shapes.SHAPES
for old, new in (
    ('"gloo"', '"nccl"'),
    ("torch.ones(sizes[rank])", 'torch.ones(sizes[rank], device=f"cuda:{rank}")'),
    ("numbers.tolist()", "numbers[:4].tolist()"),
):
    assert old in SHAPES
    SHAPES = SHAPES.replace(old, new)


def cut(lines: list[str]) -> list[str]:
    """Return the lines without NOISE.

    Of consecutive steps the last one remains, of consecutive assertions the first.
    """
    kept: list[str] = []
    for line in lines:
        if re.search(NOISE, line) or (
            kept and re.search(ASSERTION, line) and re.search(ASSERTION, kept[-1])
        ):
            continue
        if kept and re.search(STEP, line) and re.search(STEP, kept[-1]):
            kept.pop()
        kept.append(line)
    return kept


def show(lab, run) -> None:
    """Print the important lines of the log, cut to 300 characters, and torchrun's report."""
    run.wait(300)
    report = [line[:300] for line in run.report()]
    shown = dict.fromkeys(line[:300] for line in run.lines(SHOWN))
    lines = cut([*(line for line in shown if line not in report), *report])
    lab.show(f"what you see (full output: {run.log})", lines)
    print(f"torchrun exited with status {run.status} after {run.seconds:.0f} s", flush=True)


def show_flight_recorder(lab, folder: Path) -> None:
    """Print the names and the last entries of the watchdog's files, and what torchfrtrace finds."""
    lab.show("the files of Flight Recorder", [path.name for path in folder.glob("rank_*")])
    recorded = fault_lab.skipped_collective.read_flight_recorder(folder)
    lab.show("Flight Recorder: the last collectives of each rank", recorded)
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    done = subprocess.run([*command, "--prefix", "rank_"], capture_output=True, text=True)
    found = re.sub(rf"{ROOT}/|\S*(?=site-packages/)", "", done.stdout + done.stderr)
    lab.show("torchfrtrace FOLDER --prefix rank_", found.splitlines()[-40:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for what the runs write")
    args = parser.parse_args()
    output = args.output or Path(tempfile.mkdtemp())
    lab = fault_lab.Lab(TIMEOUT_S, output)
    dumps = lab.new_folder("dumps")
    recorder = {"TORCH_FR_BUFFER_SIZE": 100, "TORCH_NCCL_DUMP_ON_TIMEOUT": 1}
    recorder["TORCH_FR_DUMP_TEMP_FILE"] = dumps / "rank_"
    recorder["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = dumps / "rank_"  # its name in older releases
    try:
        lab.train("crash", fault_lab.crash.CRASH, **GPUS)
        skipped = fault_lab.skipped_collective.SKIPPED
        lab.train("skipped-collective", skipped, **GPUS, **recorder)
        script = lab.write_script("shapes", "shapes.py", SHAPES)
        for sizes in ((4, 3), (2**22, 2**20)):
            lab.torchrun(lab.new_folder("shapes"), script, TIMEOUT_S, *sizes, **GPUS)
        for run in lab.runs:
            show(lab, run)
        show_flight_recorder(lab, dumps)
    finally:
        for run in lab.runs:
            run.kill()


if __name__ == "__main__":
    main()

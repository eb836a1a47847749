"""Failures of the fault lab as they look with NCCL: a recording for diagnosing.md, on two GPUs.

python tests/benchmarks/nccl_faults.py --output /tmp/nccl

The lab plants them on the CPU, where the ranks talk by gloo. These are the same patches on GPUs. It
checks nothing: NCCL promises no symptom.
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

lab_script = load_script(ROOT / "03-multi-node/fault_lab.py")
GPUS = {"CUDA_VISIBLE_DEVICES": "0,1"}
TIMEOUT_S = 15
TOLD = r"step \d+/|the sum|Error|ssert|atchdog|light recorder|exitcode|Signal"
# Frames of C++, what torchrun raises about its own report, a list of modules loaded.
NOISE = r"^(\d\| )?frame #|raise ChildFailedError|errors\.ChildFailedError:|pandas\."
ALIKE = (r"\] step \d+/", r"Assertion `")  # of such lines in a row: the last, the first
# The lab's few lines, with their tensors on the GPU of the rank.
SHAPES = lab_script.SHAPES
for old, new in (
    ('"gloo"', '"nccl"'),
    ("torch.ones(sizes[rank])", 'torch.ones(sizes[rank], device=f"cuda:{rank}")'),
    ("numbers.tolist()", "numbers[:4].tolist()"),
):
    assert old in SHAPES
    SHAPES = SHAPES.replace(old, new)


def cut(lines: list[str]) -> list[str]:
    """Return the lines less NOISE, of steps in a row the last, of assertions in a row the first."""
    steps, assertions = ALIKE
    kept: list[str] = []
    for line in lines:
        if re.search(NOISE, line) or (
            kept and re.search(assertions, line) and re.search(assertions, kept[-1])
        ):
            continue
        if kept and re.search(steps, line) and re.search(steps, kept[-1]):
            kept.pop()
        kept.append(line)
    return kept


def show(lab, run) -> None:
    """Show what a reader of the log would look at, cut to 300 characters, then the report whole."""
    run.wait(300)
    report = [line[:300] for line in run.report()]
    told = dict.fromkeys(line[:300] for line in run.lines(TOLD))
    lab.ended(run, cut([*(line for line in told if line not in report), *report]))


def show_flight_recorder(lab, folder: Path) -> None:
    """Show the files that the watchdog has written, and what torchfrtrace finds in them."""
    lab.say("the files of the Flight Recorder", [path.name for path in folder.glob("rank_*")])
    lab.say("the last collectives in them", lab_script.read_flight_recorder(folder))
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    done = subprocess.run([*command, "--prefix", "rank_"], capture_output=True, text=True)
    said = re.sub(rf"{ROOT}/|\S*(?=site-packages/)", "", done.stdout + done.stderr)
    lab.say("torchfrtrace FOLDER --prefix rank_", said.splitlines()[-40:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for what the runs write")
    args = parser.parse_args()
    output = args.output or Path(tempfile.mkdtemp())
    lab = lab_script.Lab(argparse.Namespace(dist_timeout=TIMEOUT_S, output=output))
    dumps = lab.folder("dumps")
    recorder = {"TORCH_FR_BUFFER_SIZE": 100, "TORCH_NCCL_DUMP_ON_TIMEOUT": 1}
    recorder["TORCH_FR_DUMP_TEMP_FILE"] = dumps / "rank_"
    recorder["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = dumps / "rank_"  # its name in older releases
    try:
        lab.train("crash", lab_script.CRASH, **GPUS)
        lab.train("skipped-collective", lab_script.SKIPPED, **GPUS, **recorder)
        lab.plain("shapes", SHAPES, "", 4, 3, **GPUS)
        lab.plain("shapes", SHAPES, "", 2**22, 2**20, **GPUS)
        for run in lab.runs:
            show(lab, run)
        show_flight_recorder(lab, dumps)
    finally:
        for run in lab.runs:
            if run.process.poll() is None:
                run.kill()


if __name__ == "__main__":
    main()

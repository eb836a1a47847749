"""Reproduce ten common failures of a distributed run, on this machine and without a GPU.

python 03-multi-node/tools/fault_lab.py list
python 03-multi-node/tools/fault_lab.py crash
python 03-multi-node/tools/fault_lab.py crash --fixed

Each file in faults/ is one fault. The lab plants it in a copy of this chapter's train_llm.py, or in
a script of a few lines, prints the change, and starts two processes with torchrun. It then shows
what you would see in the log, and what a diagnostic tool says about the cause. With --fixed it runs
the corrected version. It exits with status 0 if everything was as expected, otherwise with 1.
diagnosing.md has a section on each fault.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from common import cli, launch
from common.cli import RunError, at_least

from faults import (
    crash,
    lost_node,
    no_route,
    out_of_memory,
    seed,
    set_epoch,
    shapes,
    skipped_collective,
    slow_rank,
    uneven,
)
from faults.lab import Lab

FAULTS = {
    "crash": crash,
    "skipped-collective": skipped_collective,
    "shapes": shapes,
    "slow-rank": slow_rank,
    "uneven": uneven,
    "seed": seed,
    "set-epoch": set_epoch,
    "lost-node": lost_node,
    "no-route": no_route,
    "out-of-memory": out_of_memory,
}


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    names = ["list", *FAULTS]
    add("faults", nargs="+", metavar="FAULT", choices=names, help=f"one of: {', '.join(names)}")
    add("--fixed", action="store_true", help="run the corrected version instead")
    add("--dist-timeout", default=8, type=at_least(2), help="seconds to wait for other ranks")
    add("--output", type=Path, default="outputs/fault-lab", help="folder for all files of the runs")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    if "list" in args.faults:
        for name, fault in FAULTS.items():
            print(f"{name:20}{fault.__doc__}")
        return
    try:
        lab = Lab(args.dist_timeout, args.output)
    except OSError as error:
        message = f"Cannot write to --output {args.output} ({error.strerror}): give another folder."
        raise RunError(message) from error
    try:
        for name in args.faults:
            fault = FAULTS[name]
            print(f"=== {name}{', fixed' if args.fixed else ''}: {fault.__doc__}")
            show = fault.show_fix if args.fixed else fault.show_fault
            try:
                show(lab)
            except (subprocess.TimeoutExpired, TimeoutError) as error:
                lab.expect(False, f"{name} should end ({error})")
    finally:
        for run in lab.runs:
            run.kill()
    sys.exit(1 if lab.surprises else 0)


if __name__ == "__main__":
    launch.run(main)

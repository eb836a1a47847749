"""What a launch file must know before it starts the processes of a run.

python -m common.plan ARGS prints, a line each: the run's name, the folder of the runs, the number
of processes on this node, the threads of each. ARGS are those of the script.
"""

import os
import re
import sys

import torch

from common.cli import ArgumentParser, InputError
from common.launch import experiment_name, run
from common.remote import as_path, is_remote, local_folder


def plan(words: list[str]) -> tuple[str, str, int, int]:
    """Return (name, local folder of the runs, processes, threads of each) for a launch file.

    words: the arguments of the script, which knows all of them. The number of processes is
    NPROC_PER_NODE, or the number of GPUs, or 2. NNODES is the number of nodes, or MIN:MAX.
    Raises InputError where one of these is no number, or a run of several nodes has no name.
    """
    parser = ArgumentParser(description="", add_help=False)
    parser.add_argument("-e", "--experiment-name")
    parser.add_argument("--save-dir", default="outputs")
    parser.add_argument("-m", "--model-name", default="gpt2-tiny")
    parser.add_argument("-d", "--dataset-name", default="python-stdlib")
    args, _ = parser.parse_known_args(words)
    processes = os.environ.get("NPROC_PER_NODE") or str(torch.cuda.device_count() or 2)
    if not processes.isdecimal() or int(processes) == 0:
        raise InputError(f"NPROC_PER_NODE is {processes!r}, which is no number of processes.")
    nodes = os.environ.get("NNODES") or "1"
    least, _, most = nodes.partition(":")
    known = re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes)
    if not known or int(most or least) < int(least):
        raise InputError(f"NNODES is {nodes!r}, which is no number of nodes, and not MIN:MAX.")
    if nodes != "1" and args.experiment_name is None:
        raise InputError("A run on several nodes needs one name for all of them: give one with -e.")
    threads = max(1, (os.cpu_count() or 1) // int(processes))
    save_dir = args.save_dir  # or where logs and marks for the job script can be
    if is_remote(save_dir):
        save_dir = str(local_folder(as_path(save_dir)))
    return experiment_name(args), save_dir, int(processes), threads


if __name__ == "__main__":
    run(lambda: print(*plan(sys.argv[1:]), sep="\n"))

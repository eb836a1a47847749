"""Check nodes and network before a run, with one process per device, started like train_llm.py.

MASTER_ADDR=node1 MASTER_PORT=29501 srun --ntasks-per-node 2 python 03-multi-node/tools/preflight.py

The last line says whether the check passed, or lists the faults. The exit status is 0 if the check
passed, 1 if it found a fault, and 2 for bad input. preflight.md explains the checks in checks/.
"""

import argparse
import os

import torch

from common import cli, launch
from common.cli import at_least

from checks.network import check_network
from checks.nodes import check_folder, check_nodes
from checks.rendezvous import Rendezvous


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("run").add_argument
    add("--save-dir", default="outputs", help="folder that holds the runs' folders")
    add("--timeout", default=60, type=at_least(1), help="seconds for the start and each check")
    add = parser.add_argument_group("data").add_argument
    add("-d", "--dataset-name", default="python-stdlib", help="preset, file, folder or hub id")
    add("--dataset-subset", help="configuration of a hub data set")
    add("--text-column", help="column to train on (default: text)")
    add("--data-timeout", default=600, type=at_least(1), help="seconds to read code and data")
    add = parser.add_argument_group("network").add_argument
    add("--max-bytes", default=2**28, type=at_least(1024), help="size of the largest all-reduce")
    add("--min-bandwidth", type=at_least(1e-3), help="bus bandwidth that a link needs, in GB/s")
    return parser.parse_args()


def main() -> None:
    launch.prepare_environment()
    args = get_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    rdzv = Rendezvous(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), args.timeout)
    bandwidth = None
    try:
        rdzv.meet()
        faults = check_nodes(rdzv, args)
        faults += check_folder(rdzv, args)
        for fault in faults:
            rdzv.say(f"FAULT  {fault}")
        if rdzv.world_size > 1:
            slow, bandwidth = check_network(rdzv, device, args)
            faults += slow
    except RuntimeError as error:  # torch raises it if a rank is gone or cannot be reached
        rdzv.fail(str(error).splitlines()[0])
    rdzv.say(summary(faults, rdzv.nodes, bandwidth))
    rdzv.exit(1 if faults else 0)


def summary(faults: list[str], nodes: dict[str, list[int]], bandwidth: str | None) -> str:
    """Return the last line of the check."""
    if faults:
        return f"Failed, {len(faults)} fault{'s' * (len(faults) > 1)}: {'; '.join(faults)}."
    ranks = sum(map(len, nodes.values()))
    text = f"Passed: {ranks} rank{'s' * (ranks > 1)} on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    return f"{text}, {bandwidth}." if bandwidth else f"{text}."


if __name__ == "__main__":
    launch.run(main)

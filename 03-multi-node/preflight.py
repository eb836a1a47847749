"""Check nodes and network before a run, with one process per device, started like train_llm.py.

MASTER_ADDR=node1 MASTER_PORT=29501 srun --ntasks-per-node 2 python 03-multi-node/preflight.py

The last line says whether the check passed, or lists the faults. The exit status is 0 if the check
passed, 1 if it found a fault, and 2 for bad input. preflight.md explains the checks in checks/.
"""

import argparse
import json
import os
from pathlib import Path

import torch

from common import cli, launch
from common.cli import RunError, at_least

from checks.network import check_network
from checks.nodes import check_clocks, check_folder, check_nodes
from checks.rendezvous import Rendezvous


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("run").add_argument
    add("--save-dir", default="outputs", help="folder that holds the runs' folders")
    add("--timeout", default=60, type=at_least(1), help="seconds for the start and each check")
    add("--output", type=Path, help="write the results to this new JSON file")
    add = parser.add_argument_group("data").add_argument
    add("-d", "--dataset-name", default="python-stdlib", help="preset, file, folder or hub id")
    add("--dataset-subset", help="configuration of a hub data set")
    add("--text-column", help="column to train on (default: text)")
    add("--data-timeout", default=600, type=at_least(1), help="seconds to read code and data")
    add("--tokenize", action="store_true", help="compare tokens; fills the cache of each node")
    add("-s", "--seq-length", type=at_least(2), help="tokens (default: the model's limit, <= 1024)")
    add("-m", "--model-name", default="gpt2-tiny", help="preset, folder or hub id")
    add("--tokenizer-name", help="folder or hub id (default: the model's)")
    add = parser.add_argument_group("network").add_argument
    add("--max-bytes", default=2**28, type=at_least(1024), help="size of the largest all-reduce")
    add("--min-bandwidth", type=at_least(1e-3), help="bus bandwidth that a link needs, in GB/s")
    add("--slow-factor", default=2.0, type=at_least(1.0), help="how many times slower is a fault")
    return parser.parse_args()


def main() -> None:
    launch.prepare_environment()
    args = get_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    rdzv = Rendezvous(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), args.timeout)
    figures = {}
    try:
        rdzv.meet()
        check_output(rdzv, args.output)
        faults, facts = check_nodes(rdzv, args)
        faults += check_folder(rdzv, args)
        more, clocks = check_clocks(rdzv, args)
        faults += more
        for fault in faults:
            rdzv.say(f"FAULT  {fault}")
        if rdzv.world_size > 1:
            more, figures = check_network(rdzv, device, args)
            faults += more
    except RuntimeError as error:  # torch raises it if a rank is gone or cannot be reached
        rdzv.fail(str(error).splitlines()[0])
    if rdzv.rank == 0 and args.output:
        results = {"nodes": rdzv.nodes, "facts": facts, "clocks": clocks, "all_reduce": figures}
        args.output.write_text(json.dumps({**results, "faults": faults}, indent=1) + "\n")
    rdzv.say(summary(faults, rdzv.nodes, figures))
    rdzv.exit(1 if faults else 0)


def check_output(rdzv: Rendezvous, output: Path | None) -> None:
    """Raise RunError on all ranks if rank 0 cannot create the file."""
    error = None
    try:
        cli.check_output(output if rdzv.rank == 0 else None)
    except RunError as found:
        error = str(found)
    if error := rdzv.gather(error)[0]:
        rdzv.leave()
        raise RunError(error)


def summary(faults: list[str], nodes: dict[str, list[int]], figures: dict) -> str:
    """Return the last line of the check."""
    if faults:
        return f"Failed, {len(faults)} fault{'s' * (len(faults) > 1)}: {'; '.join(faults)}."
    ranks = sum(map(len, nodes.values()))
    text = f"Passed: {ranks} rank{'s' * (ranks > 1)} on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    if series := figures.get("all") or figures.get(next(iter(nodes))):
        size = max(series)
        text += f", all-reduce of {size:,} bytes correct and {series[size]['GB/s']:.3g} GB/s"
    return f"{text}."


if __name__ == "__main__":
    launch.run(main)

"""Predict the time of a training step on nodes that a network connects, and check the formula.

sudo python tests/benchmarks/fabrics.py --output tests/benchmarks/results/fabrics_cpu.json

measures two processes with chapter 3's script, each in its own network namespace, joined by a link
of limited speed. Linux only; needs iproute2. report.py uses the formula for the pages' tables.
"""

import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from machine import REPOSITORY, environment, output_parser, read_metrics, write_result


@dataclass
class Step:
    """A step on one node: its time and its two passes in ms; the model's parameters.

    outer: parameters outside of the layers. Their weights are needed first, and their gradients
    come last, so no computation hides their communication.
    """

    total: float
    forward: float
    backward: float
    parameters: int
    outer: int


def predict(
    strategy: str, step: Step, nodes: int, gpus: int, gigabits: float, local_steps: int = 0
) -> dict[str, float]:
    """Return the MB that leave each node in a step, the ms of exposed communication and of a step.

    strategy: DDP, FSDP or HSDP. gpus: per node. gigabits: Gbit/s per node, of all its network cards
    together, fully used. Weights have 16 bits, gradients 32. Rings over all ranks: in an all-gather
    or a reduce-scatter of S bytes over n ranks, S (n - 1) / n leave each node, in an all-reduce
    twice as much. HSDP's all-reduce has one rank of each node. Communication that is larger than
    what it overlaps with is exposed.

    local_steps: DDP's variant local-sgd. The all-reduce, of the weights in 32 bits, comes once in
    so many steps and overlaps with nothing. The result is the mean over all steps.
    """
    ranks = nodes if strategy == "HSDP" else nodes * gpus
    share = (ranks - 1) / ranks
    gathered, reduced = 0, 2 * 4  # bytes per parameter: DDP and HSDP all-reduce gradients
    if strategy == "FSDP":
        gathered, reduced = 2, 4  # an all-gather in each pass, a reduce-scatter in the backward
    ms = share / (gigabits / 8 * 1e6)  # of a byte
    forward, backward = gathered * step.parameters * ms, (gathered + reduced) * step.parameters * ms
    exposed = max(forward - step.forward, gathered * step.outer * ms)
    exposed += max(backward - step.backward, reduced * step.outer * ms)
    sent = (2 * gathered + reduced) * step.parameters * share
    if local_steps:
        sent /= local_steps
        exposed = reduced * step.parameters * ms / local_steps
    return {"sent_mb": sent / 1e6, "exposed": exposed, "step": step.total + exposed}


# --- the check: two network namespaces ---

NAMES, ADDRESSES = ("fabric-0", "fabric-1"), ("10.77.0.1", "10.77.0.2")
TRAINING = "-m gpt2-tiny -s 64 -b 8 --global-batch-size 16 --log-freq 5 --max-steps 40"


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True)


def connect() -> None:
    """Make two namespaces, and join them by a pair of virtual network cards."""
    for name in NAMES:
        ip("netns", "add", name)
    ip("-n", NAMES[0], "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", NAMES[1])
    for name, address in zip(NAMES, ADDRESSES, strict=True):
        ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", name, "link", "set", device, "up")


def limit(megabits: int | None) -> None:
    """Let each node send at most so many Mbit/s; None: no limit."""
    for name in NAMES:
        command = ["ip", "netns", "exec", name, "tc", "qdisc"]
        subprocess.run([*command, "del", "dev", "eth0", "root"], capture_output=True)
        if megabits:
            rate = ["rate", f"{megabits}mbit", "burst", "64kb", "limit", "50mb"]  # drops nothing
            subprocess.run([*command, "add", "dev", "eth0", "root", "tbf", *rate], check=True)


def train(folder: Path) -> dict[str, float]:
    """Train on both nodes; return the medians of the timers, without the first lines."""
    processes = []
    for rank, name in enumerate(NAMES):
        place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
        place |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": 29511, "OMP_NUM_THREADS": 1}
        place |= {"GLOO_SOCKET_IFNAME": "eth0", "HF_HUB_OFFLINE": 1}
        words = [sys.executable, REPOSITORY / "03-multi-node/train_llm.py", *TRAINING.split()]
        words += ["--save-dir", folder, "-e", "run"]
        command = ["ip", "netns", "exec", name, *map(str, words)]
        variables = environment(**place)
        processes.append(subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL))
    assert [process.wait(1200) for process in processes] == [0, 0]
    lines = read_metrics(folder / "run")[2:]
    keys = ("time/total", "time/forward", "time/backward")
    return {key: statistics.median(line[key] for line in lines) for key in keys}


def main() -> None:
    args, rows = output_parser(__doc__).parse_args(), []
    try:
        connect()
        for megabits in (None, 50, 20, 10):
            limit(megabits)
            with tempfile.TemporaryDirectory() as folder:
                rows.append({"megabits": megabits, **train(Path(folder))})
            print(rows[-1], flush=True)
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name])
    write_result(args.output, {"training": TRAINING, "rows": rows})


if __name__ == "__main__":
    main()

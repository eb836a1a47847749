"""How long a run stands still after each kind of failure, on the cluster of local_cluster.sh.

bash 03-multi-node/tools/local_cluster.sh up
python tests/benchmarks/recovery.py --output tests/benchmarks/results/recovery_cpu.json

Each run of chapter 3, on two nodes of one rank, is hit once in the middle. The time is that between
the last step logged before the run stood still and the first one after it; a step that is trained
again counts as lost. As root, on a machine that does nothing else.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from machine import write_result

REPOSITORY = Path(__file__).parents[2]
CLUSTER = Path(os.environ.get("LOCAL_CLUSTER_DIR", "/run/local-cluster"))
NAME = os.environ.get("LOCAL_CLUSTER_NAME", "lab")
JOB = REPOSITORY / "03-multi-node/job.sbatch"
STEPS, HIT_AT = 100, 32  # CKPT_FREQ 20: twelve steps after a checkpoint
FLAGS = f"--max-steps {STEPS} --log-freq 1 --ckpt-freq 20 --eval-freq 1000"
ENVIRONMENT = {
    **os.environ,
    "SLURM_CONF": str(CLUSTER / "slurm.conf"),
    "WANDB_MODE": "disabled",
    "NPROC_PER_NODE": "1",
    "OMP_NUM_THREADS": "1",
}


def command(*words: object) -> str:
    return subprocess.check_output([str(word) for word in words], env=ENVIRONMENT, text=True)


def torchrun_of(node: str) -> tuple[int, int]:
    """Return the numbers of torchrun on a node and of the process that it started."""
    found = {}
    for pid in command("ip", "netns", "pids", f"{NAME}-{node}").split():
        line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        if "train_llm.py" in line and "python" in line.split()[0]:
            found["-m torch.distributed.run" in line] = int(pid)
    return found[True], found[False]


def cable(node: str, state: str) -> None:
    command("ip", "-n", f"{NAME}-switch", "link", "set", node, state)


def cable_out_for_a_second() -> None:
    cable("node2", "down")
    time.sleep(1)
    cable("node2", "up")


def preempt() -> None:
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    command("sbatch", *urgent, "--wrap=true")


class Run:
    """A run that is going: its job, and when each step was logged."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.metrics = folder / "run/metrics.jsonl"
        self.seen: list[tuple[float, int]] = []
        words = ("sbatch", "--parsable", *options, f"--output={folder}/log", JOB, "-e", "run")
        self.job = command(*words, "--save-dir", folder, *FLAGS.split()).strip()

    def watch(self, until: Callable[[], bool], timeout: float = 240) -> None:
        """Note the time of every newly logged step until something is so."""
        deadline = time.monotonic() + timeout
        while not until():
            if time.monotonic() > deadline:
                raise SystemExit("the run did not go on in time")
            text = self.metrics.read_text() if self.metrics.exists() else ""
            lines = text.split("\n")[:-1]  # what comes after the last \n is being written
            step = json.loads(lines[-1])["step"] if lines else 0
            if step and step != self.step:
                self.seen.append((time.monotonic(), step))
            time.sleep(0.02)

    @property
    def step(self) -> int:
        return self.seen[-1][1] if self.seen else 0

    def standstill(self, hit: float) -> dict[str, float]:
        """Return the longest time between two logged steps after the hit, and the steps lost."""
        after = [each for each in self.seen if each[0] > hit - 1]
        gaps = [
            (later[0] - earlier[0], earlier[1] + 1 - later[1]) for earlier, later in pairwise(after)
        ]
        seconds, lost = max(gaps)
        return {"seconds": round(seconds, 1), "steps_lost": max(0, lost)}


# What happens to the run, and options of its job.
EVENTS: dict[str, tuple[Callable[[Run], object], tuple[str, ...]]] = {
    "signal": (lambda run: command("scancel", "--signal=USR1", run.job), ()),
    "preemption": (lambda run: preempt(), ()),
    "worker": (lambda run: os.kill(torchrun_of("node2")[1], signal.SIGKILL), ()),
    "torchrun": (lambda run: os.kill(torchrun_of("node2")[0], signal.SIGKILL), ()),
    "cable_second": (lambda run: cable_out_for_a_second(), ()),
    "cable": (lambda run: cable("node2", "down"), ("--nodes=1-2",)),
}


def measure(event: str) -> dict[str, float]:
    hit, options = EVENTS[event]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), *options)
        run.watch(lambda: run.step >= HIT_AT)
        start = time.monotonic()
        hit(run)
        run.watch(lambda: run.step == STEPS)
        for _ in range(600):
            if not command("squeue", "--noheader"):
                break
            time.sleep(0.1)
        if event == "cable":
            cable("node2", "up")
            while command("sinfo", "-h", "-p", "main", "-o", "%T").strip() != "idle":
                time.sleep(0.2)
        found = run.standstill(start)
        found["restarts"] = int(
            re.search(r"Restarts=(\d+)", command("scontrol", "show", "job", run.job))[1]
        )
    print(event, found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=3, help="of each event, in turn")
    args = parser.parse_args()
    runs: dict[str, list] = {event: [] for event in EVENTS}
    for _ in range(args.runs):
        for event in runs:
            runs[event].append(measure(event))
    medians = {
        event: statistics.median(run["seconds"] for run in each) for event, each in runs.items()
    }
    results = {"steps": STEPS, "hit_at": HIT_AT, "ckpt_freq": 20, "seconds": medians, "runs": runs}
    write_result(args.output, results)


if __name__ == "__main__":
    main()

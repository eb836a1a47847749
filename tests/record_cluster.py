"""Make the recordings of the local cluster again: sinfo, a Slurm job, an elastic run.

sudo python tests/record_cluster.py              takes about eight minutes on two cores
sudo python tests/record_cluster.py sinfo job    some of them

Needs what 03-multi-node/tools/local_cluster.sh needs. The job gets the signal that precedes the
time limit, and is preempted once. The elastic run loses a node, which joins it again.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from helpers import ROOT
from record import machine_line

CLUSTER = ["bash", "03-multi-node/tools/local_cluster.sh"]
RECORDED = ROOT / "03-multi-node/recorded"
SLURM = {"SLURM_CONF": "/run/local-cluster/slurm.conf", "WANDB_MODE": "disabled"}
# The nodes' shells read no profile, so they get the path of the environment here.
VARIABLES = {**os.environ, **SLURM, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}
JOB = "sbatch 03-multi-node/job.sbatch -e my-run"
URGENT = shlex.split("sbatch --partition urgent -N 2 --exclusive -o /dev/null --wrap 'sleep 10'")
# A run that was told to stop also says how to generate text.
FINISHED = r"step 464/464(.*\n)+.*to generate text"
ELASTIC = (
    "NPROC_PER_NODE=1 NNODES=1:2 MAX_RESTARTS=3 LAST_CALL=5 HEAD=node1:29400 "
    "bash 03-multi-node/launch_torchrun.sh -e elastic"
)


def run(*words: str) -> str:
    done = subprocess.run(words, cwd=ROOT, env=VARIABLES, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode()


def wait_for(pattern: str, read: Callable[[], str], seconds: float = 300) -> None:
    """Wait until a pattern is in a log; TimeoutError after some seconds."""
    deadline = time.monotonic() + seconds
    while not re.search(pattern, read()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{pattern!r} did not appear within {seconds:.0f} s:\n{read()}")
        time.sleep(0.1)


def write(name: str, command: str, output: str) -> None:
    """Write a recording: its command, the machine as in the old recording, and the output."""
    path = RECORDED / f"{name}.txt"
    here, _, rest = machine_line(path.read_text().splitlines()[1]).partition("; ")
    for folder in {ROOT, (ROOT / ".venv").resolve().parent}:
        output = output.replace(f"{folder}/", "")
    path.write_text(f"{command}\n{here}, two nodes of local_cluster.sh; {rest}\n{output}")
    print(f"wrote {path}")


def record_sinfo() -> None:
    write("sinfo", "sinfo", run("sinfo"))


def record_job() -> None:
    shutil.rmtree(ROOT / "outputs/my-run", ignore_errors=True)
    number = run(*JOB.split()).split()[-1]
    log = ROOT / f"train-llm-{number}.log"
    wait_for("True", lambda: str(log.exists()))
    wait_for(r"step 210/", log.read_text)
    run("scancel", "--signal", "USR1", number)
    wait_for(r"resumed after(.*\n)+.*step 280/", log.read_text)
    run(*URGENT)
    wait_for(FINISHED, log.read_text)
    write("job", JOB, log.read_text())
    shutil.copyfile(ROOT / "outputs/my-run/metrics.jsonl", RECORDED / "job.metrics.jsonl")
    log.unlink()


def start_agent(node: str, log: Path) -> subprocess.Popen:
    """Start the elastic run on a node, as in a shell on it."""
    path = VARIABLES["PATH"]
    command = f"cd {ROOT} && export PATH={path} PYTHONPATH={ROOT} WANDB_MODE=disabled && {ELASTIC}"
    words = ["ssh", "-F", "/run/local-cluster/ssh_config", node, command]
    with log.open("a") as file:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def record_elastic() -> None:
    shutil.rmtree(ROOT / "outputs/elastic", ignore_errors=True)
    logs = {node: Path(f"/run/local-cluster/elastic-{node}.log") for node in ("node1", "node2")}
    agents = [start_agent(node, log) for node, log in logs.items()]
    log = logs["node1"]
    wait_for(r"step 120/", log.read_text)
    kill = 'pkill -KILL --ns $$ --nslist net -f "rdzv-id elastic "'
    subprocess.run(["ssh", "-F", "/run/local-cluster/ssh_config", "node2", kill], check=False)
    wait_for(r"resumed after(.*\n)+.*step 160/", log.read_text)
    agents.append(start_agent("node2", logs["node2"]))
    wait_for(FINISHED, log.read_text, 600)
    for agent in agents:
        agent.wait(60)
    write("elastic", ELASTIC, log.read_text())
    shutil.copyfile(ROOT / "outputs/elastic/metrics.jsonl", RECORDED / "elastic.metrics.jsonl")


RECORDINGS = {"sinfo": record_sinfo, "job": record_job, "elastic": record_elastic}


def main() -> None:
    run(*CLUSTER, "up")
    try:
        for name in sys.argv[1:] or RECORDINGS:
            RECORDINGS[name]()
    finally:
        run(*CLUSTER, "down")


if __name__ == "__main__":
    main()

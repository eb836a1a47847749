"""Make the recordings of the local cluster again: sinfo, a Slurm job, an elastic run.

sudo python tests/record_cluster.py              takes about eight minutes on two cores
sudo python tests/record_cluster.py sinfo job    some of them

Needs what 03-multi-node/tools/local_cluster.sh needs, and works in a copy of the repository. The
job gets the signal that precedes the time limit, and is preempted once. The elastic run loses a
node, which joins it again.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster import Cluster
from helpers import ROOT, copy_repository
from record import machine_line, without_folders

RECORDED = ROOT / "03-multi-node/recorded"
JOB = "sbatch 03-multi-node/job.sbatch -e my-run"
URGENT = ("--partition", "urgent", "-N", 2, "--exclusive", "-o", "/dev/null", "--wrap", "sleep 10")
# A run that was told to stop also says how to generate text.
FINISHED = r"step 464/464(.*\n)+.*to generate text"
ELASTIC = (
    "NPROC_PER_NODE=1 NNODES=1:2 MAX_RESTARTS=3 LAST_CALL=5 HEAD=node1:29400 "
    "bash 03-multi-node/launch_torchrun.sh -e elastic"
)


def wait_for(pattern: str, log: Path) -> None:
    """Wait until a pattern is in a log."""
    Cluster.until(
        lambda: log.exists() and re.search(pattern, log.read_text()), f"{pattern} in {log}"
    )


def write(name: str, command: str, output: str, copy: Path) -> None:
    """Write a recording: its command, the machine as in the old recording, and the output."""
    path = RECORDED / f"{name}.txt"
    here, _, rest = machine_line(path.read_text().splitlines()[1]).partition("; ")
    output = without_folders(output, copy)
    path.write_text(f"{command}\n{here}, two nodes of local_cluster.sh; {rest}\n{output}")
    print(f"wrote {path}")


def keep_metrics(name: str, run: str, copy: Path) -> None:
    shutil.copyfile(copy / "outputs" / run / "metrics.jsonl", RECORDED / f"{name}.metrics.jsonl")


def record_sinfo(cluster: Cluster, copy: Path) -> None:
    write("sinfo", "sinfo", f"{cluster.shell('sinfo')}\n", copy)


def record_job(cluster: Cluster, copy: Path) -> None:
    number = cluster.sbatch(*JOB.split()[1:])
    log = copy / f"train-llm-{number}.log"
    wait_for(r"step 210/", log)
    cluster.shell("scancel", "--signal", "USR1", number)
    wait_for(r"resumed after(.*\n)+.*step 280/", log)
    cluster.sbatch(*URGENT)
    wait_for(FINISHED, log)
    write("job", JOB, log.read_text(), copy)
    keep_metrics("job", "my-run", copy)


def record_elastic(cluster: Cluster, copy: Path) -> None:
    logs = {node: copy / f"elastic-{node}.log" for node in ("node1", "node2")}

    def start_agent(node: str) -> subprocess.Popen:
        """Start the elastic run on a node, as in a shell on it."""
        names = ("PATH", "PYTHONPATH", "WANDB_MODE")
        variables = " ".join(f"{name}={cluster.env[name]}" for name in names)
        command = f"cd {copy} && export {variables} && {ELASTIC}"
        words = ["ssh", "-F", cluster.ssh_config, node, command]
        with logs[node].open("a") as file:
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    agents = [start_agent(node) for node in logs]
    wait_for(r"step 120/", logs["node1"])
    kill = 'pkill -KILL --ns $$ --nslist net -f "rdzv-id elastic "'
    subprocess.run(["ssh", "-F", cluster.ssh_config, "node2", kill], check=False)
    wait_for(r"resumed after(.*\n)+.*step 160/", logs["node1"])
    agents.append(start_agent("node2"))
    wait_for(FINISHED, logs["node1"])
    for agent in agents:
        agent.wait(60)
    write("elastic", ELASTIC, logs["node1"].read_text(), copy)
    keep_metrics("elastic", "elastic", copy)


RECORDINGS = {"sinfo": record_sinfo, "job": record_job, "elastic": record_elastic}


def main() -> None:
    cluster = Cluster("local", "10.77.0")  # as on the pages
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        copy_repository(copy)
        os.chdir(copy)
        path = f"{copy}/.venv/bin:{cluster.env['PATH']}"
        cluster.env |= {"PATH": path, "PYTHONPATH": str(copy), "WANDB_MODE": "disabled"}
        up = cluster.script("up")
        if up.returncode:
            sys.exit(up.stderr)
        try:
            for name in sys.argv[1:] or RECORDINGS:
                RECORDINGS[name](cluster, copy)
        finally:
            cluster.script("down")


if __name__ == "__main__":
    main()

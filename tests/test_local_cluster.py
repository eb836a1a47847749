"""The local Slurm cluster leaves nothing behind and takes nothing that something else uses.

The jobs of test_multi_node.py show that it requeues, preempts and loses nodes.
"""

import contextlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, need_cluster
from helpers import ROOT, commands, environment, read_metrics, replace_in

# --- what is left, on a machine of its own: its /run, its network and its processes start empty ---


class Machine(Cluster):
    """Where a cluster goes up and down alone, with the names that it has by default."""

    def __init__(self) -> None:
        # The shell is process 1 and reaps the dead. All processes end with it, and it ends when its
        # input is closed: in the end, or when this process is killed.
        # The first namespace makes /run/netns, which stays.
        command = "mount -n -t tmpfs tmpfs /run; ip netns add a; ip netns delete a"
        command += "; echo ready; read -r"
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.holder = subprocess.Popen([*unshare, "bash", "-c", command], **pipes)
        assert self.holder.stdout.readline() == b"ready\n"
        pids = Path(f"/proc/{self.holder.pid}/ns/pid_for_children")
        self.namespace = pids.readlink()
        enter = ("nsenter", "--target", self.holder.pid, "--mount", "--net", f"--pid={pids}")
        super().__init__("local", "10.77.0", enter)
        self.env = {k: v for k, v in self.env.items() if not k.startswith("LOCAL_CLUSTER_")}

    def processes(self) -> dict[int, tuple[int, str]]:
        """Return parent and command of each process but this machine's own."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):  # it ends, or has ended
                here = Path(f"/proc/{process.pid}/ns/pid").readlink() == self.namespace
                if here and process.ppid() != self.holder.pid:
                    found[process.pid] = process.ppid(), " ".join(process.cmdline())
        return found

    def footprint(self) -> dict[str, list]:
        """Return all that a cluster could leave behind."""
        found = self.processes()
        return {
            "files": sorted(self.shell("find", "/run", "/etc/slurm", "/etc/munge").split("\n")),
            "links": self.shell("ip", "-br", "link").split("\n"),
            # Those of other clusters come and go meanwhile.
            "mounts": self.shell("grep", "-v", "^nsfs /run/netns/[^l]", "/proc/mounts").split("\n"),
            # By number: sshd gives itself another name. A daemon's children come and go.
            "processes": sorted(pid for pid, (parent, _) in found.items() if parent not in found),
        }


@pytest.fixture
def machine():
    need_cluster()
    machine = Machine()
    with machine.holder:
        yield machine


@pytest.mark.ci
def test_down_leaves_nothing_behind_of_running_jobs_either(machine):
    before = machine.footprint()
    assert machine.script("up", 3).returncode == 0
    # One process of the job has left its session, as a daemon does.
    wrap = "srun bash -c 'setsid sleep 500 & sleep 500'"
    machine.sbatch("-N3", "-o", "/dev/null", "--wrap", wrap)
    sleeping = lambda: [c for _, c in machine.processes().values()].count("sleep 500")  # noqa: E731
    Cluster.until(lambda: sleeping() == 6, "the job runs")
    during = machine.footprint()
    assert all(len(during[key]) > len(before[key]) for key in before), "the test sees nothing"

    result = machine.script("down")
    assert machine.footprint() == before
    assert (result.returncode, result.stdout) == (0, "The cluster is down.\n")
    result = machine.script("down")
    assert (result.returncode, result.stdout) == (0, "No cluster was up.\n")


@pytest.mark.nightly
def test_commands_of_the_slurm_page(machine, tmp_path):
    """All that a reader types on a cluster of their own, in that order, in one shell.

    Jobs are short and slow here, and before each command the run comes a step further; what would
    not end by itself is ended.
    """
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "03-multi-node", copy / "03-multi-node")
    # The commands are the page's, so that no flag can shorten the evaluation.
    all_batches = 'for batch in cli.progress("evaluation", dataloader):'
    two_batches = "for _, batch in zip(range(2), dataloader):"
    replace_in(copy / "03-multi-node/train_llm.py", all_batches, two_batches)
    for name in ("common", ".venv"):
        if (ROOT / name).exists():
            (copy / name).symlink_to(ROOT / name)
    run = copy / "outputs/my-run"
    wait_until_idle = 'until [[ -z "$(squeue -h)" ]]; do sleep 0.2; done'
    lines = ["set -euo pipefail", f"cd {copy}"]
    for needs, command in commands((ROOT / "03-multi-node/topics/slurm.md").read_text()):
        if "local_cluster" not in needs or command.startswith("apt-get"):
            continue  # of what it installs, the fixture has looked
        if command.startswith("tail"):
            # The log comes with the job's first step.
            lines += [f"until [[ -s {run}/metrics.jsonl ]]; do sleep 0.2; done"]
            command = f"timeout 1 {command} || [[ $? == 124 ]]"
        elif "job.sbatch" in command:
            lines += [wait_until_idle]
            # Nothing happens to the second run.
            n_steps = 10 if "one-or-two" in command else 60
            command += f" --max-steps {n_steps} --log-freq 1"
        elif re.match("scancel|sbatch|ip .* down", command):
            lines += [f"STEP=$(wc -l <{run}/metrics.jsonl)"]
            lines += [f"until (($(wc -l <{run}/metrics.jsonl) > STEP + 2)); do sleep 0.1; done"]
            command = command.replace("sleep 10", "sleep 1")
        elif command.endswith(" down"):
            lines += [wait_until_idle, "scontrol show job 1 | grep -o Restarts=.*"]
        lines += [f"echo {shlex.quote('$ ' + command)}", command]
    reader = {key: environment()[key] for key in ("PATH", "VIRTUAL_ENV")}
    hook = {"PYTHONPATH": f"{ROOT / 'tests/hooks'}:{ROOT}", "NOTES": str(tmp_path), "PAUSE": "0.4"}
    env = {**reader, **hook, "NPROC_PER_NODE": "1"}
    done = machine.execute(["bash", "-c", "\n".join(lines)], env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not machine.processes(), "the cluster is down"
    assert "node2" in done.stdout and "Restarts=2 " in done.stdout
    steps = [
        [line["step"] for line in read_metrics(run.with_name(name))]
        for name in (run.name, "one-or-two")
    ]
    assert steps == [list(range(1, 61)), list(range(1, 11))]


# --- bad input: one sentence, status 2, nothing done ---


def refusal(result: subprocess.CompletedProcess) -> str:
    assert (result.returncode, result.stdout) == (2, "") and result.stderr.count("\n") == 1
    return result.stderr


def test_bad_arguments():
    script = Cluster("tests", "10.99.0").script
    assert "Say what to do" in refusal(script())
    assert "NODES must be a number from 1 to 9" in refusal(script("up", "10"))


@pytest.mark.ci
def test_up_takes_nothing_that_something_else_uses(machine):
    """Its name, its network, and a cluster that is up."""
    machine.shell("ip", "netns", "add", "local-switch")
    assert "choose another LOCAL_CLUSTER_NAME" in refusal(machine.script("up"))
    machine.shell("ip", "netns", "delete", "local-switch")
    machine.shell("ip", "link", "add", "cable", "type", "veth", "peer", "name", "other")
    machine.shell("ip", "address", "add", "10.1.1.1/8", "dev", "cable")
    machine.shell("ip", "link", "set", "cable", "up")
    assert "choose another LOCAL_CLUSTER_NETWORK" in refusal(machine.script("up"))
    assert machine.script("up", LOCAL_CLUSTER_NETWORK="172.30.9").returncode == 0
    before = machine.footprint()
    assert "A cluster is up already." in refusal(machine.script("up"))
    assert machine.footprint() == before

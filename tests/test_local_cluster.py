"""The local Slurm cluster: jobs, lost nodes and preemption on it, and that it leaves nothing."""

import subprocess
from pathlib import Path

import pytest
from cluster import Cluster, need_cluster


@pytest.mark.ci
def test_nodes_have_names_addresses_and_ssh(cluster):
    """The jobs of test_multi_node.py show that the cluster requeues, preempts and loses nodes."""
    seen = cluster.shell("srun", "-N2", "bash", "-c", "echo $(hostname) $(hostname -I)").split("\n")
    assert sorted(seen) == [f"node{k} {cluster.network}.{k}" for k in (1, 2)]
    ssh = ("ssh", "-F", str(cluster.ssh_config))
    onward = cluster.run("node1", *ssh, "node2", "hostname; sinfo -h")
    assert onward.split("\n")[0] == "node2"
    assert "node[1-2]" in onward, "SLURM_CONF is not set in an ssh session"


# --- what is left, on a machine of its own: its /run, its network and its processes start empty ---


class Machine(Cluster):
    """Where a cluster goes up and down alone, with the names that it has by default."""

    def __init__(self) -> None:
        # The shell is process 1 and reaps the dead. All processes end with it, and it ends when its
        # input is closed: in the end, or when this process is killed.
        command = "mount -n -t tmpfs tmpfs /run; echo ready; read -r"
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.holder = subprocess.Popen([*unshare, "bash", "-c", command], **pipes)
        assert self.holder.stdout.readline() == b"ready\n"
        proc = f"/proc/{self.holder.pid}"
        self.root = Path(proc, "root")
        pids = f"--pid={proc}/ns/pid_for_children"
        enter = ("nsenter", "--target", self.holder.pid, "--mount", "--net", pids)
        super().__init__("lab", "10.77.0", enter)
        self.folder = Path("/run/local-cluster")
        self.env = {k: v for k, v in self.env.items() if not k.startswith("LOCAL_CLUSTER_")}
        self.env["SLURM_CONF"] = str(self.folder / "slurm.conf")

    def processes(self) -> dict[int, tuple[int, str]]:
        """Return parent and command of each process but this machine's own and those that ask."""
        ask = (
            """for p in /proc/[0-9]*; do echo "${p#/proc/} $(sed 's/.*) . //; s/ .*//' $p/stat)"""
            """ $(tr '\\0' ' ' <$p/cmdline)"; done"""
        )
        found = {}
        for line in self.shell("bash", "-c", f"({ask}) 2>/dev/null").splitlines():
            pid, parent, command = f"{line}  ".split(" ", 2)  # some end meanwhile
            if int(pid) > 1 and ask not in command and command.strip():  # not zombies
                found[int(pid)] = int(parent), command.strip()
        return found

    def footprint(self) -> dict[str, list]:
        """Return all that a cluster could leave behind."""
        found = self.processes()
        return {
            "files": sorted(self.shell("find", "/run", "/etc/slurm", "/etc/munge").split("\n")),
            "links": self.shell("ip", "-br", "link").split("\n"),
            # Those of other clusters come and go meanwhile.
            "mounts": self.shell("grep", "-v", "^nsfs /run/netns/[^l]", "/proc/self/mounts").split(
                "\n"
            ),
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
    machine.up(3)
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


# --- bad input: one sentence, status 2, nothing done ---


def refusal(result: subprocess.CompletedProcess) -> str:
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()


def test_bad_arguments():
    script = Cluster("tests", "10.99.0").script
    say = "Say what to do: local_cluster.sh up [NODES] or down."
    assert refusal(script()) == refusal(script("down", "2", "3")) == say
    assert refusal(script("up", "10")) == "NODES must be a number from 1 to 9, not '10'."


@pytest.mark.ci
def test_up_takes_nothing_that_something_else_uses(machine, tmp_path):
    """Its folder, its name, its network, and a cluster that is up."""
    (tmp_path / "precious").touch()
    result = machine.script("up", LOCAL_CLUSTER_DIR=str(tmp_path))
    assert "belongs to no cluster" in refusal(result)
    assert machine.script("down", LOCAL_CLUSTER_DIR=str(tmp_path)).returncode == 0
    assert (tmp_path / "precious").exists()
    machine.shell("ip", "netns", "add", "lab-switch")
    sentence = "The name lab is in use on this machine: choose another LOCAL_CLUSTER_NAME."
    assert refusal(machine.script("up")) == sentence
    machine.shell("ip", "netns", "delete", "lab-switch")
    machine.shell("ip", "link", "add", "cable", "type", "veth", "peer", "name", "other")
    machine.shell("ip", "address", "add", "10.1.1.1/8", "dev", "cable")
    machine.shell("ip", "link", "set", "cable", "up")
    sentence = "10.77.0.0/24 is in use on this machine: choose another LOCAL_CLUSTER_NETWORK."
    assert refusal(machine.script("up")) == sentence
    assert machine.script("up", LOCAL_CLUSTER_NETWORK="172.30.9").returncode == 0
    before = machine.footprint()
    sentence = "A cluster is up already. To end it: bash 03-multi-node/tools/local_cluster.sh down"
    assert refusal(machine.script("up")) == sentence
    assert machine.footprint() == before

"""A Slurm cluster for the tests: the chapter's own local_cluster.sh, up once for all of them."""

import fcntl
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "03-multi-node" / "local_cluster.sh"
ENVIRONMENT = dict(os.environ)  # before a test, or a library that it imports, has changed it
# For what takes seconds alone, and minutes where other tests run beside it.
PATIENCE_S = 300


class Cluster:
    """name: what its folder and its namespaces are called; others can be up beside it.
    network: the first three numbers of its addresses.
    within: a command that runs commands where the cluster's script shall run, if not right here.
    """

    def __init__(self, name: str, network: str, within: tuple[object, ...] = ()) -> None:
        self.name, self.network = name, network
        self.within = [str(part) for part in within]
        self.folder = Path(f"/run/{name}-cluster")
        outer = {key: value for key, value in ENVIRONMENT.items() if not key.startswith("SLURM_")}
        self.env = {
            **outer,
            "LOCAL_CLUSTER_DIR": str(self.folder),
            "LOCAL_CLUSTER_NAME": name,
            "LOCAL_CLUSTER_NETWORK": network,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }

    @property
    def ssh_config(self) -> Path:
        """What `ssh -F` needs to reach the nodes."""
        return self.folder / "ssh_config"

    def script(self, *args: object, **env: str) -> subprocess.CompletedProcess:
        """Run `local_cluster.sh ARGS`, with these variables too."""
        return self._execute(["bash", SCRIPT, *args], PATIENCE_S, env)

    def _execute(self, command, timeout: float, env=()) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*self.within, *map(str, command)],
            env={**self.env, **dict(env)},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def up(self, nodes: int = 2) -> None:
        result = self.script("up", nodes)
        assert result.returncode == 0, result.stderr

    def down(self) -> None:
        result = self.script("down")
        assert result.returncode == 0, result.stderr

    def shell(self, *command: object, timeout: float = PATIENCE_S) -> str:
        """Run a command on this machine, as one who uses the cluster; return what it prints."""
        result = self._execute(command, timeout)
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout.strip()

    def run(self, node: str, *command: str, timeout: float = PATIENCE_S) -> str:
        """Run a command on a node, through ssh; return what it prints."""
        return self.shell("ssh", "-F", self.ssh_config, node, shlex.join(command), timeout=timeout)

    def sbatch(self, *args: object) -> str:
        """Submit a job and return its id."""
        return self.shell("sbatch", "--parsable", *args)

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job: JobState, Restarts, NodeList, ..."""
        shown = self.shell("scontrol", "show", "--oneliner", "job", job)
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def wait(self, job: str, *states: str, timeout: float = PATIENCE_S) -> dict[str, str]:
        """Wait until a job is in one of these states; return what Slurm knows of it then."""
        self.until(lambda: self.job(job)["JobState"] in states, f"job {job} {states}", timeout)
        return self.job(job)

    def node_state(self, node: str) -> str:
        """Return idle, mixed, allocated, down+not_responding, ...

        sinfo can show a lost node as mixed for as long as nothing else happens on it.
        """
        shown = self.shell("scontrol", "show", "--oneliner", "node", node)
        return re.search(r" State=(\S+)", shown)[1].lower()

    def cut(self, node: str) -> None:
        """Pull a node's cable: its processes live on, but nothing reaches them."""
        self.shell("ip", "-n", f"{self.name}-switch", "link", "set", node, "down")

    def mend(self, node: str) -> None:
        """Plug it in again. Slurm asks a node that it took for lost within about 20 seconds."""
        self.shell("ip", "-n", f"{self.name}-switch", "link", "set", node, "up")

    @staticmethod
    def until(happened: Callable[[], bool], what: str, timeout: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline, f"not in {timeout} seconds: {what}"
            time.sleep(0.1)


def give_up(reason: str) -> None:
    """Skip a test for what this machine lacks; on CI that is a failure."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def need_cluster() -> None:
    """Give up where no cluster can be, with the script's own sentence."""
    result = Cluster("tests", "10.99.0").script("status")
    if result.returncode == 2:
        give_up(result.stderr.strip())


@pytest.fixture(scope="session")
def cluster():
    """Yield a cluster of node1 and node2, which is up until the last test has ended.

    Each process of pytest-xdist has one of its own.
    """
    need_cluster()
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    cluster = Cluster("tests" + "abcdefgh"[worker], f"10.99.{worker}")
    with Path(tempfile.gettempdir(), f"{cluster.name}-cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one test session at a time
        cluster.down()  # what a killed session has left
        cluster.up()
        yield cluster
        cluster.down()

"""A Slurm cluster for the tests: the chapter's own local_cluster.sh, up once for all of them."""

import contextlib
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "03-multi-node/tools/local_cluster.sh"
ENVIRONMENT = dict(os.environ)  # before a test, or a library that it imports, has changed it
# For what takes seconds alone, and minutes where other tests run beside it.
PATIENCE_S = 600


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
    result = Cluster("tests", "10.99.0").script("down")  # which does nothing: there is none
    if result.returncode == 2:
        give_up(result.stderr.strip())


@contextlib.contextmanager
def running_cluster(nodes: int = 2) -> Iterator[Cluster]:
    """Yield a cluster whose name and network nothing else uses; take it down in the end.

    A shell does both. It takes the cluster down when its input is closed, which the system also
    does when this process is killed. It has no TMPDIR, since processes that have the one of a test
    session are killed when the session ends.
    """
    need_cluster()
    shell = 'bash "$0" up "$1" || exit; read -r; exec bash "$0" down &>/dev/null'
    said = ""
    for number in range(256):
        name = f"tests{chr(97 + number // 26)}{chr(97 + number % 26)}"
        cluster = Cluster(name, f"10.99.{number}")
        with subprocess.Popen(
            ["bash", "-c", shell, SCRIPT, str(nodes)],
            env={key: value for key, value in cluster.env.items() if key != "TMPDIR"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C does not reach it
        ) as process:
            if process.stdout.readline():
                yield cluster
            else:
                said = process.stderr.read()
        if process.returncode != 2:  # 2: another test session uses the name or the network
            break
    assert process.returncode == 0, said


@pytest.fixture(scope="session")
def cluster():
    """Yield a cluster of node1 and node2, which all tests of a process share."""
    with running_cluster() as cluster:
        yield cluster

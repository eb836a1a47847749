"""A Slurm cluster for the tests: the chapter's own local_cluster.sh, up once for all of them."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "03-multi-node/tools/local_cluster.sh"
# Before a test, or a library that it imports, has changed it; and as if make had not started them.
MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in MAKE}
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
        return self.execute(["bash", SCRIPT, *args], env)

    def execute(self, command: Iterable[object], env: dict) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*self.within, *map(str, command)],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )

    def shell(self, *command: object) -> str:
        """Run a command on this machine, as one who uses the cluster; return what it prints."""
        result = self.execute(command, {})
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout.strip()

    def sbatch(self, *args: object) -> str:
        """Submit a job and return its id."""
        return self.shell("sbatch", "--parsable", *args)

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job: JobState, Restarts, NodeList, ..."""
        shown = self.shell("scontrol", "show", "--oneliner", "job", job)
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

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
    def until(happened: Callable[[], bool], what: str = "what the test waits for") -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline, f"not in {PATIENCE_S} seconds: {what}"
            time.sleep(0.1)


def give_up(reason: str) -> None:
    """Skip a test for what this machine lacks; on CI that is a failure."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def need_cluster() -> None:
    """Give up where no cluster can be, with the script's own sentence."""
    result = Cluster("tests", "10.99.0").script("down")  # which does nothing: there is none
    if result.returncode == 2:
        give_up(result.stderr.strip())


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Yield a cluster of node1 and node2 whose name and network nothing else uses.

    All tests of a process share it. A shell takes it up, and down when its input is closed, which
    the system also does when this process is killed. It has no TMPDIR, since processes that have
    the one of a test session are killed when the session ends.
    """
    need_cluster()
    shell = 'bash "$0" up || exit; read -r; exec bash "$0" down &>/dev/null'
    said = ""
    for number in range(256):
        name = f"tests{chr(97 + number // 26)}{chr(97 + number % 26)}"
        cluster = Cluster(name, f"10.99.{number}")
        with subprocess.Popen(
            ["bash", "-c", shell, SCRIPT],
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

"""Chapter 3's check before a run: healthy nodes pass, and the check names each planted fault."""

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cluster import PATIENCE_S, running_cluster
from helpers import (
    ROOT,
    TORCHRUN,
    first_then_nightly,
    free_port,
    replace_in,
    run_script,
)
from jobs import NODES, Lab
from runner import Ranks, finish, load_script, place_of, start
from torch.distributed import TCPStore

from common.checkpoint import save_load
from common.cli import InputError

SCRIPT = ROOT / "03-multi-node/preflight.py"
QUICK = ("--max-bytes", 4096)
CORPUS = ("-d", "/run/corpus.json")  # each node of the cluster has a /run
HOST = socket.gethostname()
preflight = load_script(SCRIPT)
network, node_checks, rendezvous = (
    sys.modules[f"checks.{name}"] for name in ("network", "nodes", "rendezvous")
)
CHANGED = "common/checkpoint/save_load.py"


# --- what is computed ---


@pytest.mark.check
def test_bus_bandwidth_is_that_of_nccl_tests():
    """2 (n - 1) / n: as good as once for 2 ranks, 1.75 times for 8, and next to 2 for very many."""
    assert network.bus_bandwidth(10**9, 1.0, 2) == 1.0
    assert network.bus_bandwidth(10**9, 0.1, 8) == pytest.approx(17.5)
    assert network.bus_bandwidth(10**9, 1.0, 1000) == pytest.approx(1.998)
    assert network.bus_bandwidth(268435456, 0.155025, 2) == pytest.approx(1.7316, rel=1e-4)


@pytest.mark.check
def test_the_odd_node_out():
    three = {"node1": "2.13.0", "node2": "2.12.0", "node3": "2.13.0"}
    said = ["torch: node2 has 2.12.0, the others have 2.13.0"]
    assert node_checks.compare("torch", three) == said
    assert node_checks.compare("torch", dict.fromkeys(three, "2.13.0")) == []
    # Rank 0's own node can be the odd one.
    first = {"node1": "2.12.0", "node2": "2.13.0", "node3": "2.13.0"}
    said = ["torch: node1 has 2.12.0, the others have 2.13.0"]
    assert node_checks.compare("torch", first) == said


@pytest.mark.check
def test_of_two_nodes_none_is_right():
    """Nor with two against two: then the sentence says which nodes differ from rank 0's."""
    said = ["torch: node2 has 2.12.0, node1 (rank 0) has 2.13.0"]
    assert node_checks.compare("torch", {"node1": "2.13.0", "node2": "2.12.0"}) == said
    four = {"node1": "b", "node2": "a", "node3": "a", "node4": "b"}
    assert [fault.split(" has ")[0] for fault in node_checks.compare("torch", four)] == [
        "torch: node2",
        "torch: node3",
    ]


@pytest.mark.check
def test_of_code_the_files_that_differ_are_named():
    right = {"common/data/dataset.py": "aa", CHANGED: "bb", "common/cli.py": "cc"}
    one = {**right, CHANGED: "b0"}
    (fault,) = node_checks.compare("code", {"node1": right, "node2": right, "node3": one})
    assert fault == "code: node3 has b0 for common/checkpoint/save_load.py, the others have bb"
    none = {name: right[name] for name in right if name != "common/cli.py"}
    (fault,) = node_checks.compare("code", {"node1": right, "node2": right, "node3": none})
    assert fault == "code: node3 has None for common/cli.py, the others have cc"


def at(gb_per_s: float) -> dict:
    return {1024: {"GB/s": 0.001}, 2**20: {"GB/s": gb_per_s}}


# As measured on three nodes of the local cluster, node2 slowed down to 20 Mbit/s.
SLOWED = {
    "node1 - node2": at(0.0024),
    "node1 - node3": at(0.3941),
    "node2 - node3": at(0.0024),
}


@pytest.mark.check
def test_a_slow_node_is_the_one_whose_links_are_all_slow():
    node, *links = network.find_slow("link", SLOWED, 2.0, None)
    assert node == "bandwidth: every link of node2 is slow"
    assert [
        re.match(r"bandwidth: link (node\d - node\d) has 0.0024 ", link)[1] for link in links
    ] == [
        "node1 - node2",
        "node2 - node3",
    ]
    assert all("164.2 times less than the others" in link for link in links)


@pytest.mark.check
def test_a_slow_link_between_healthy_nodes():
    one = {**SLOWED, "node2 - node3": at(0.4)}
    (fault,) = network.find_slow("link", one, 2.0, None)
    assert fault.startswith("bandwidth: link node1 - node2 has 0.0024 GB/s")
    even = {name: at(rate) for name, rate in zip(SLOWED, (0.3, 0.4, 0.5), strict=True)}
    assert network.find_slow("link", even, 2.0, None) == []


@pytest.mark.check
def test_small_all_reduces_are_not_compared():
    """A busy core makes them ten times slower, as measured on healthy nodes."""
    small = {name: {1024: link[2**20]} for name, link in SLOWED.items()}
    assert network.find_slow("link", small, 2.0, None) == []


@pytest.mark.check
def test_a_link_too_slow_for_large_sizes_is_compared_all_the_same():
    """It stops below 1 MiB, where the others went on."""
    crawls = {name: {**link, 1024: {"GB/s": 0.001}} for name, link in SLOWED.items()}
    crawls["node1 - node2"] = {1024: {"GB/s": 0.0001}}
    (fault,) = network.find_slow("link", crawls, 2.0, None)
    assert fault.startswith("bandwidth: link node1 - node2 has 0.0001 GB/s, 10.0 times less")


@pytest.mark.check
def test_a_wrong_clock_is_the_one_that_is_not_the_majoritys():
    right = {"node1": (0.0, 0.0), "node2": (0.0001, 0.0001), "node3": (-0.0002, 0.0001)}
    assert node_checks.find_wrong_clocks(right) == []
    (fault,) = node_checks.find_wrong_clocks({**right, "node2": (90.0, 0.0001)})
    assert fault == "clock: node2 is +90.0000 s (+/- 0.0001 s) off the other clocks"
    # Rank 0's own: all others are off from it.
    first = {"node1": (0.0, 0.0)} | dict.fromkeys(("node2", "node3", "node4"), (90.0, 0.01))
    (fault,) = node_checks.find_wrong_clocks(first)
    assert fault == "clock: node1 is -90.0000 s (+/- 0.0000 s) off the other clocks"
    # One against one, two against two: from rank 0's.
    (fault,) = node_checks.find_wrong_clocks({"node1": (0.0, 0.0), "node2": (90.0, 0.01)})
    assert fault == "clock: node2 is +90.0000 s (+/- 0.0100 s) off rank 0's clock"
    four = {**right, "node2": (90.0, 0.01), "node4": (90.0, 0.01)}
    assert [fault.split()[1] for fault in node_checks.find_wrong_clocks(four)] == ["node2", "node4"]
    assert (
        node_checks.find_wrong_clocks({"node1": (0.0, 0.0), "node2": (1.5, 0.6)}) == []
    )  # in doubt


@pytest.mark.check
def test_a_folder_of_its_own_is_that_of_the_node_that_has_it():
    seen = {"node1": ["node1", "node2"], "node2": ["node1", "node2"], "node3": ["node3"]}
    assert node_checks.find_other_folders("/tmp/out", seen) == [
        "save folder: node3 has files of node3, the others have files of node1, node2 in /tmp/out, "
        "which all nodes must share"
    ]
    whole = {node: list(seen) for node in seen}
    assert node_checks.find_other_folders("/tmp/out", whole) == []
    late = {node: ["node1", "node2"] for node in seen}
    (fault,) = node_checks.find_other_folders("/tmp/out", late)
    assert fault.startswith("save folder: the nodes see one another's files too late in /tmp/out")


@pytest.mark.check
def test_one_link_alone_is_only_slow_against_a_number_that_is_given():
    alone = {"node1 - node2": at(0.0024)}
    assert network.find_slow("link", alone, 2.0, None) == []
    (fault,) = network.find_slow("link", alone, 2.0, 0.1)
    assert fault == "bandwidth: link node1 - node2 has 0.0024 GB/s, --min-bandwidth is 0.1"
    assert network.find_slow("link", alone, 2.0, 0.002) == []
    assert network.find_slow("link", {}, 2.0, 0.1) == []


@pytest.mark.check
def test_who_is_to_blame_for_a_stage_that_does_not_end(monkeypatch):
    monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
    hosts = {0: "node1", 1: "node1", 2: "node2", 3: "node2"}
    waits = {rank: (host, "comparing clocks", True) for rank, host in hosts.items()}
    blame = functools.partial(rendezvous.who_failed, world_size=4, address="node1:29400")
    came = {0: waits[0], 1: waits[1]}
    assert blame(came, {}) == "ranks 0, 1 on node1 came to node1:29400, ranks 2, 3 did not"
    assert blame(came, hosts) == "no answer from ranks 2, 3 on node2"
    late = {**waits, 3: ("node2", "comparing clocks", False)}
    assert blame(late, hosts) == "the other ranks wait for rank 3 on node2"
    busy = {rank: (host, "all-reduce", False) for rank, host in hosts.items()}
    assert blame(busy, hosts) == (
        "all ranks answer, ranks 0, 1 on node1 at 'all-reduce' and ranks 2, 3 on node2 at "
        "'all-reduce'"
    )


class Three:
    """In place of a Rendezvous: three nodes of two ranks, and what they gather."""

    rank, first_ranks, hosts = 0, [0, 2, 4], {rank: f"node{rank // 2 + 1}" for rank in range(6)}

    def __init__(self, parts: list, *facts: dict) -> None:
        self.parts, self.facts, self.left = parts, facts, False

    def gather_nodes(self, part: object) -> dict:
        return {f"node{number}": facts for number, facts in enumerate(self.facts, start=1)}

    def gather(self, part: object) -> list:
        return self.parts

    def leave(self) -> None:
        self.left = True

    def begin(self, *_: object) -> None:
        pass

    say = begin


def facts(memory: float = 100.0, error: str | None = None) -> dict:
    data = {"error": error} if error else {"bytes": 9, "checksum": "aa"}
    return {"same": {"data": data}, "free": {"memory": memory, "disk": 50.0}}


def check_nodes(monkeypatch, rdzv: Three) -> list[str]:
    monkeypatch.setattr(node_checks, "describe_node", lambda args: None)
    return node_checks.check_nodes(rdzv, argparse.Namespace(data_timeout=1))[0]


@pytest.mark.check
def test_what_somebody_else_holds(monkeypatch):
    even = [70.0, 71.0, 70.0, 76.0, 70.0, 70.0]
    assert check_nodes(monkeypatch, Three(even, facts(), facts(90), facts(60))) == []
    held = [*even[:3], 11.2, *even[4:]]
    assert check_nodes(monkeypatch, Three(held, facts(), facts(20), facts())) == [
        "free GPU memory: rank 3 on node2 has 11.2 GiB, 6.2 times less than the others",
        "free memory: node2 has 20.0 GiB, 5.0 times less than the others",
    ]


@pytest.mark.check
def test_data_that_one_node_lacks_is_a_fault_and_that_all_lack_bad_input(monkeypatch):
    lacks = facts(error="There is no data set at 'x'.")
    (fault,) = check_nodes(monkeypatch, Three([None] * 6, facts(), lacks, facts()))
    assert fault.startswith("data: node2 has ") and "There is no data set at 'x'." in fault
    nobody = Three([None] * 6, lacks, lacks, lacks)
    with pytest.raises(InputError, match="no data set at 'x'"):
        check_nodes(monkeypatch, nobody)
    assert nobody.left, "rank 0 may serve the store, so it exits last"


# --- on this machine ---


def test_under_torchrun(tmp_path, corpus):
    figures = tmp_path / "figures.json"
    save_dir = tmp_path / "outputs"
    flags = (*QUICK, "--save-dir", save_dir, "-d", corpus, "--output", figures, "--tokenize")
    done = run_script(*TORCHRUN, 2, SCRIPT, *flags, "-s", 32)
    assert done.returncode == 0, done.stderr
    *_, end = done.stdout.splitlines()
    assert re.fullmatch(
        r"Passed: 2 ranks on 1 node, all-reduce of 4,096 bytes correct and .* GB/s\.", end
    )
    assert "FAULT" not in done.stdout
    assert list(save_dir.iterdir()) == [], "it leaves nothing in the folder of the runs"
    found = json.loads(figures.read_text())
    assert found["nodes"] == {HOST: [0, 1]} and found["faults"] == []
    same = found["facts"][HOST]["same"]
    assert same["torch"] == torch.__version__
    assert {
        "03-multi-node/train_llm.py",
        "03-multi-node/checks/nodes.py",
        "common/data/dataset.py",
        "common/presets/gpt2/config.json",
    } <= {*same["code"]}
    series = found["all_reduce"][HOST]
    assert list(series) == ["1024", "4096"]
    for size, figure in series.items():
        expected = network.bus_bandwidth(int(size), figure["ms"] / 1000, 2)
        assert figure["GB/s"] == pytest.approx(expected)


@pytest.mark.ci
def test_a_process_alone(tmp_path, corpus):
    done = run_script(SCRIPT, *QUICK, "--save-dir", tmp_path / "outputs", "-d", corpus)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Passed: 1 rank on 1 node."


# --- on this machine, with a planted fault; ranks are children of a server, and start at once ---


def check(
    folder: Path, corpus: Path, *args: object, plant=None, **options
) -> tuple[list[int], str]:
    """Run the check on two ranks; return their exit statuses and all that they printed."""
    copy_script(folder / "chapter")
    flags = [*QUICK, "--save-dir", folder / "outputs", "-d", corpus, *args]
    ranks = Ranks(
        2,
        flags,
        chapter=str(folder / "chapter"),
        plant=functools.partial(_prepare, folder / "stdout", plant),
        **options,
    )
    return ranks.finish(), (folder / "stdout").read_text()


def copy_script(folder: Path) -> None:
    """Copy the script to the name that Ranks looks for, and the modules that it imports."""
    shutil.copytree(SCRIPT.parent / "checks", folder / "checks")
    shutil.copy(SCRIPT, folder / "train_llm.py")


def _prepare(stdout: Path, plant) -> None:
    """Write what a child prints to a file, and plant a fault on rank 1."""
    file = stdout.open("a", buffering=1)
    os.dup2(file.fileno(), 1)
    if plant and os.environ["RANK"] == "1":
        plant()


@pytest.mark.ci
def test_bad_input_ends_with_status_2_and_overwrites_nothing(tmp_path, corpus):
    """On all ranks, since all of them have it: what one node alone lacks is a fault of its own."""
    kept = tmp_path / "kept.json"
    kept.write_text("precious")
    for number, (wrong, sentence) in enumerate(
        (
            (("-d", tmp_path / "none.json"), "There is no data set at"),
            (("--output", kept), f"{kept} already exists"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        errors = [str(folder / f"stderr-{rank}") for rank in range(2)]
        statuses, said = check(folder, corpus, *wrong, stderr_file=errors)
        assert statuses == [2, 2]
        assert sentence in Path(errors[0]).read_text()
        assert "Passed" not in said and "Failed" not in said
    assert kept.read_text() == "precious"


def add_one() -> None:
    def all_reduce(tensor, *args, original=dist.all_reduce, **kwargs):
        original(tensor, *args, **kwargs)
        if tensor.numel() == 1024:
            tensor[-1] += 1

    dist.all_reduce = all_reduce


def test_a_wrong_sum_is_found_and_its_rank_named(tmp_path, corpus):
    statuses, said = check(tmp_path, corpus, plant=add_one)
    assert statuses == [1, 1]
    assert said.splitlines()[-1] == (
        f"Failed, 1 fault: all-reduce: rank 1 on {HOST} has a wrong sum of 4,096 bytes."
    )


def slow_down(attempts: int, node: str) -> None:
    """Slow down this rank's all-reduces with the other one alone, in the first attempts."""
    os.environ["GROUP_RANK"] = node  # the other one's is "0"
    calls = itertools.count()

    def all_reduce(tensor, *args, original=dist.all_reduce, **kwargs):
        # For each of two sizes one that connects, twenty that are timed, one for the slowest rank.
        if kwargs["group"] is not dist.group.WORLD and next(calls) < attempts * 2 * 22:
            time.sleep(0.05)
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce


@pytest.mark.parametrize("node", first_then_nightly(["1", "0"]), ids=["link", "within"])
@pytest.mark.parametrize("attempts", [network.ATTEMPTS - 1, network.ATTEMPTS])
def test_a_fault_is_what_is_slow_each_time(tmp_path, corpus, attempts, node):
    slow = functools.partial(slow_down, attempts, node)
    # 4,096 bytes: 0.00008 GB/s with the sleep, and enough in 25 ms without.
    statuses, said = check(tmp_path, corpus, "--min-bandwidth", 0.00016, plant=slow)
    who = HOST if node == "0" else f"link {HOST}/0 - {HOST}/1"
    assert (f"{who} has" in last_sentence(said)) == (attempts == network.ATTEMPTS), said
    assert statuses == ([1, 1] if attempts == network.ATTEMPTS else [0, 0])


@pytest.mark.check
def test_the_best_time_counts_and_a_wrong_sum_each_time():
    first = [{"link": {"seconds": {"1024": 2.0, "4096": 8.0}, "wrong": []}}, {}]
    second = [{"link": {"seconds": {"1024": 3.0, "4096": 4.0}, "wrong": [1024]}}, {}]
    best, ranks = {}, {"link": [0, 1]}
    assert network.collect(Three(first), {}, best, ranks) == []
    (fault,) = network.collect(Three(second), {}, best, ranks)
    assert fault == "all-reduce: rank 0 on node1 has a wrong sum of 1,024 bytes"
    assert {size: cell["ms"] for size, cell in best["link"].items()} == {1024: 2000, 4096: 4000}
    assert best["link"][4096]["GB/s"] == network.bus_bandwidth(4096, 4.0, 2)


def die() -> None:
    def all_reduce(*args, original=dist.all_reduce, **kwargs):
        if args[0].numel() == 1024:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*args, **kwargs)

    dist.all_reduce = all_reduce


def test_a_rank_that_dies_in_an_all_reduce_ends_all(tmp_path, corpus):
    started = time.monotonic()
    statuses, said = check(tmp_path, corpus, "--timeout", 600, plant=die)
    assert statuses == [1, -signal.SIGKILL]
    end = said.splitlines()[-1]
    assert end.startswith("Failed: all-reduce of 4,096 bytes over 2 ranks: ")
    assert end.endswith(f"; no answer from rank 1 on {HOST}.")
    assert time.monotonic() - started < 300, "somebody waited for the timeout"


def fall_asleep() -> None:
    uuid.uuid4 = functools.partial(time.sleep, 100)


def test_a_rank_that_hangs_ends_all(tmp_path, corpus):
    """As on a file system that does not answer."""
    statuses, said = check(tmp_path, corpus, "--timeout", 3, plant=fall_asleep)
    assert statuses == [1, 1]
    assert said.splitlines()[-1] == (
        "Failed: looking for the other nodes' files in --save-dir: not finished within 3 s; "
        f"the other ranks wait for rank 1 on {HOST}."
    ), said


def test_a_rank_that_does_not_come_is_named(tmp_path, corpus):
    copy_script(tmp_path / "chapter")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    rank_0 = start(
        ["--timeout", 2, "--save-dir", tmp_path, "-d", corpus],
        chapter=str(tmp_path / "chapter"),
        env={**place_of(0, 2), "MASTER_PORT": store.port},
        plant=functools.partial(_prepare, tmp_path / "stdout", None),
    )
    assert finish(rank_0) == 1
    assert (tmp_path / "stdout").read_text().splitlines()[-1] == (
        f"Failed: rendezvous: not finished within 2 s; rank 0 on {HOST} came to "
        f"localhost:{store.port}, rank 1 did not."
    )


def do_not_wait() -> None:
    sys.modules["common.cli"].HEAD_START_S = -rendezvous.ANSWER_WITHIN_S


def test_a_port_where_nobody_listens(tmp_path, corpus):
    copy_script(tmp_path / "chapter")
    port = free_port()
    rank_1 = start(
        ["--timeout", 1, "--save-dir", tmp_path, "-d", corpus],
        chapter=str(tmp_path / "chapter"),
        env={**place_of(1, 2), "MASTER_PORT": port},
        plant=functools.partial(_prepare, tmp_path / "stdout", do_not_wait),
    )
    assert finish(rank_1) == 1
    assert (tmp_path / "stdout").read_text() == (
        f"[rank 1] Failed: {HOST} cannot reach localhost:{port} within 1 s "
        "(no process listens there).\n"
    )


# --- on the nodes of the local cluster ---

# Python imports this by itself, on each node. What it plants, it plants on node2.
HOOK = """
import os, socket
words = os.environ.get("PLANT", "").split()
if socket.gethostname() == "node2" and words:
    import time
    if "clock" in words:
        now = time.time
        time.time = lambda: now() + 90
    if "torch" in words:
        import torch
        torch.__version__ = "2.12.0+planted"
if "pause" in words:
    import pathlib, time
    import torch.distributed as dist
    init = dist.init_process_group
    def pause(*args, **kwargs):
        init(*args, **kwargs)
        (pathlib.Path(os.environ["MARKS"]) / os.environ["RANK"]).touch()
        time.sleep(4)
    dist.init_process_group = pause
"""


class Nodes:
    """Runs the check with srun on all nodes of the cluster."""

    def __init__(self, cluster, folder: Path, count: int = 2) -> None:
        self.cluster, self.folder, self.count, self.port = cluster, folder, count, 21000
        (folder / "hook").mkdir()
        (folder / "hook/sitecustomize.py").write_text(HOOK)
        texts = json.dumps([f"Text number {n}, of many words. " * 20 for n in range(50)])
        (folder / "corpus.json").write_text(texts)
        (folder / "other.json").write_text(texts.replace("number 7,", "number 8,"))
        self.shell("srun", f"-N{count}", "cp", folder / "corpus.json", "/run/corpus.json")

    def shell(self, *command: object) -> str:
        return self.cluster.shell(*command)

    def start(self, *args, tasks=2, kill=1, shell="exec", plant="", **env) -> subprocess.Popen:
        """Start the check on all nodes; `shell`: what each task does first."""
        self.port += 1
        places = {
            "MASTER_ADDR": "node1",
            "MASTER_PORT": str(self.port),
            "PYTHONPATH": f"{self.folder / 'hook'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "PLANT": plant,
            "SCRIPT": str(SCRIPT),
            **env,
        }
        script = f'{shell} {sys.executable} "$SCRIPT" "$@"'
        words = [
            "srun",
            f"-N{self.count}",
            f"--ntasks-per-node={tasks}",
            f"--kill-on-bad-exit={kill}",
        ]
        flags = ["--save-dir", self.folder / "outputs", *QUICK, *CORPUS, *args]
        return subprocess.Popen(
            [*words, "bash", "-c", script, "task", *map(str, flags)],
            env={**self.cluster.env, **places},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def check(self, *args, **options) -> tuple[int, str]:
        """Return the exit status and what was printed."""
        process = self.start(*args, **options)
        said, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said

    @contextlib.contextmanager
    def dropped(self, node: str, *selector: object):
        """Let a node drop the packets that come in and fit, without an answer, as firewalls do."""
        rule = ("ip", "-n", f"{self.cluster.name}-{node}", "rule")
        self.shell(*rule, "add", "pref", 100, "lookup", "local")
        self.shell(*rule, "add", "pref", 10, "dev", "eth0", *selector, "blackhole")
        self.shell(*rule, "del", "pref", 0)  # what is for this node itself comes first otherwise
        try:
            yield
        finally:
            self.shell(*rule, "add", "pref", 0, "lookup", "local")
            self.shell(*rule, "del", "pref", 10)
            self.shell(*rule, "del", "pref", 100)


@pytest.fixture(scope="module")
def nodes(cluster, make_folder) -> Nodes:
    return Nodes(cluster, make_folder("preflight"))


def last_sentence(said: str) -> str:
    """Return the sentence that ends the check, from between what srun says."""
    (sentence,) = re.findall(r"^(?:Passed|Failed).*\.$", said, re.MULTILINE)
    return sentence


@pytest.mark.ci
def test_two_healthy_nodes(nodes):
    figures = nodes.folder / "healthy.json"
    status, said = nodes.check("--output", figures)
    assert status == 0, said
    assert last_sentence(said).startswith("Passed: 4 ranks on 2 nodes, all-reduce of 4,096 bytes")
    assert "FAULT" not in said
    assert re.search(
        r"^met    at node1:\d+: ranks 0, 1 on node1 and ranks 2, 3 on node2$", said, re.M
    )
    assert "there is no other link to compare this one with" in said
    found = json.loads(figures.read_text())
    assert list(found["all_reduce"]) == ["node1", "node2", "all", "node1 - node2"]
    offset, doubt = found["clocks"]["node2"]
    assert abs(offset) <= doubt + 0.001 < 0.5  # it is the same clock
    assert list((nodes.folder / "outputs").iterdir()) == []


@pytest.mark.ci
def test_all_that_is_different_on_node2(nodes, tmp_path):
    """Another torch, clock, code (one byte), data and save folder, all at once."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "common", copy / "common")
    for file in ROOT.glob("[0-9]*/**/*.py"):
        (copy / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy / file.relative_to(ROOT))
    changed = copy / CHANGED
    content = changed.read_bytes()
    changed.write_bytes(content[:3] + bytes([content[3] ^ 32]) + content[4:])  # in the docstring
    other = f"cp {nodes.folder}/other.json /run/corpus.json"
    there = f"SCRIPT={copy}/03-multi-node/preflight.py PYTHONPATH={copy}:{nodes.folder}/hook"
    status, said = nodes.check(
        *("--save-dir", "/run/outputs", "--timeout", 6),
        tasks=1,
        plant="torch clock",
        shell=f"if [[ $(hostname) == node2 ]]; then {other}; export {there}; fi; exec",
    )
    nodes.shell("srun", "-N2", "cp", nodes.folder / "corpus.json", "/run/corpus.json")
    assert status == 1, said
    checksums = r"[0-9a-f]{16}"
    patterns = [
        rf"code: node2 has {checksums} for {CHANGED}, node1 \(rank 0\) has {checksums}",
        rf"torch: node2 has 2.12.0\+planted, node1 \(rank 0\) has {re.escape(torch.__version__)}",
        rf"data: node2 has {checksums} for checksum, node1 \(rank 0\) has {checksums}",
        r"save folder: node2 has files of node2, node1 \(rank 0\) has files of node1 in "
        "/run/outputs, which all nodes must share",
        r"clock: node2 is \+(?:89|90)\.\d+ s \(\+/- 0\.\d+ s\) off rank 0's clock",
    ]
    faults = re.findall(r"^FAULT  (.*)$", said, re.MULTILINE)
    assert len(faults) == len(patterns), faults
    for fault, pattern in zip(faults, patterns, strict=True):
        assert re.fullmatch(pattern, fault), fault
    assert last_sentence(said) == f"Failed, 5 faults: {'; '.join(faults)}."


@pytest.mark.ci
def test_a_port_that_a_firewall_closes(nodes):
    with nodes.dropped("node1", "ipproto", "tcp", "dport", nodes.port + 1):
        status, said = nodes.check("--timeout", 8)
    assert status != 0
    where = f"node1:{nodes.port}"
    (end,) = re.findall(r"^Failed.*$", said, re.MULTILINE)
    assert end == (
        f"Failed: rendezvous: not finished within 8 s; ranks 0, 1 on node1 came to {where}, "
        "ranks 2, 3 did not (the nodes are node[1-2])."
    )
    for rank in (2, 3):
        assert (
            f"[rank {rank}] Failed: node2 cannot reach {where} within 8 s "
            "(no answer, perhaps a firewall)."
        ) in said


@pytest.mark.ci
def test_a_link_slowed_down_with_tc(nodes):
    """20 Mbit/s are 0.0025 GB/s. The same check of the link as it is finds nothing."""
    flags = ("--max-bytes", 2**20, "--min-bandwidth", 0.01)
    eth0 = ("ip", "netns", "exec", f"{nodes.cluster.name}-node2", "tc", "qdisc")
    slow = ("tbf", "rate", "20mbit", "burst", "64kb", "latency", "400ms")
    nodes.shell(*eth0, "add", "dev", "eth0", "root", *slow)
    try:
        status, said = nodes.check(*flags, tasks=1)
    finally:
        nodes.shell(*eth0, "del", "dev", "eth0", "root")
    assert status == 1, said
    sentence = last_sentence(said)
    rate = re.fullmatch(
        r"Failed, 1 fault: bandwidth: link node1 - node2 has (\S+) GB/s, "
        r"--min-bandwidth is 0.01\.",
        sentence,
    )
    assert rate and 0.001 < float(rate[1]) < 0.0027, sentence
    status, said = nodes.check(*flags, tasks=1)
    assert status == 0, said


@pytest.mark.ci
def test_one_slow_node_of_three_with_the_default_thresholds(tmp_path):
    """No link of healthy nodes is slow. At 4 Mbit/s all ranks together do not reach 1 MiB."""
    with running_cluster(3) as trio:

        def set_rate(node: str, verb: str, rate: str) -> None:
            qdisc = ("ip", "netns", "exec", f"{trio.name}-{node}", "tc", "qdisc", verb)
            tbf = ("tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
            trio.shell(*qdisc, "dev", "eth0", "root", *tbf)

        nodes = Nodes(trio, tmp_path, count=3)
        # Where the cables limit the speed, and not who else computes here.
        for node in ("node1", "node2", "node3"):
            set_rate(node, "add", "200mbit")
        status, said = nodes.check("--max-bytes", 2**20, tasks=1)
        assert status == 0, said
        assert last_sentence(said).startswith("Passed: 3 ranks on 3 nodes, all-reduce of 1,048,576")
        set_rate("node2", "change", "4mbit")
        status, said = nodes.check("--max-bytes", 2**20, tasks=1)
        assert status == 1, said
        assert "bandwidth: every link of node2 is slow; " in last_sentence(said)
        assert "link node1 - node3 has" not in said


def block_of_the_page(word: str) -> str:
    """Return the block of preflight.md that has this word in it."""
    page = (ROOT / "03-multi-node/preflight.md").read_text()
    (block,) = (b for b in re.findall(r"```bash cluster\n(.*?)```", page, re.S) if word in b)
    return block


@pytest.mark.ci
def test_as_a_line_of_the_job_file(cluster, tmp_path):
    """The page's line where the page puts it, in a copy of job.sbatch; then the training."""
    lab = Lab(cluster, tmp_path)
    (tmp_path / "copy").mkdir()
    for path in ROOT.glob("*"):
        if path.name in ("03-multi-node", "common"):
            shutil.copytree(path, tmp_path / "copy" / path.name)
    job = tmp_path / "copy/03-multi-node/job.sbatch"
    place = "# After a signal this shell keeps running"
    line = block_of_the_page("${HEAD%:*}").replace("|| exit", "--max-bytes 4096 || exit")
    replace_in(job, place, line + place)
    env = {"PYTHONPATH": tmp_path / "copy", "DATA": tmp_path / "corpus.json", "NPROC_PER_NODE": 2}
    number = lab.submit(job, "checked", "--max-steps", 4, **env)
    assert lab.ends(number) == "COMPLETED", lab.log("checked")
    said = lab.log("checked")
    assert said.index("Passed: 4 ranks on 2 nodes") < said.index("step 4/4")
    # A node with other code: the job ends before it trains.
    shutil.copytree(tmp_path / "copy/common", tmp_path / "old/common")
    (tmp_path / "old/common/checkpoint/save_load.py").write_text(
        "# yesterday's\n" + Path(save_load.__file__).read_text()
    )
    old = f"export PYTHONPATH={tmp_path}/old:{tmp_path}/copy;"
    there = f"if [[ $(hostname) == node2 ]]; then {old} fi; exec {sys.executable}"
    words = f"=2 bash -c '{there} \"$@\"' task 03"
    replace_in(job, '=2 "$PYTHON" 03', words)
    number = lab.submit(job, "refused", "--max-steps", 4, **env)
    assert lab.ends(number) == "FAILED", lab.log("refused")
    assert "Failed, 1 fault: code: node2 has " in lab.log("refused")
    assert "step 4/4" not in lab.log("refused")


@pytest.mark.ci
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_with_other_launchers_as_the_page_has_them(cluster, tmp_path, launcher):
    lab = Lab(cluster, tmp_path)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    env = lab.environment("check", MASTER_ADDR="node1", MASTER_PORT=21999, **root)
    env["PYTHONPATH"] = str(ROOT)
    word = {"mpirun": "mpirun -np", "torchrun": "--rdzv-id preflight"}[launcher]
    line = block_of_the_page(word).strip()
    line += f" --max-bytes 4096 --save-dir {tmp_path}/outputs -d {tmp_path}/corpus.json"
    if launcher == "mpirun":
        env["OMPI_MCA_plm_rsh_agent"] = f"ssh -F {cluster.ssh_config}"
        # mpirun's helpers hand on only what they are told to.
        line = line.replace("-x MASTER_PORT", "-x MASTER_PORT -x PYTHONPATH -x PATH")
        enter = [()]
    else:
        enter = [lab.enter(node) for node in NODES]
    # What mpirun and torchrun call python is the environment's.
    words = [[*node, "bash", "-c", f"cd {ROOT} && {line}"] for node in enter]
    processes = [
        subprocess.Popen(each, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for each in words
    ]
    said = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(enter), said
    assert "Passed: 4 ranks on 2 nodes" in "".join(said)


@pytest.mark.ci
def test_ports_other_than_the_first_that_a_firewall_closes(nodes):
    """The ranks meet, and cannot connect to one another: node2's packets to them are dropped."""
    rule = ("ip", "-n", f"{nodes.cluster.name}-node1", "rule")
    port = nodes.port + 1
    with nodes.dropped("node1", "ipproto", "tcp", "from", f"{nodes.cluster.network}.2"):
        nodes.shell(*rule, "add", "pref", 9, "ipproto", "tcp", "dport", port, "lookup", "local")
        try:
            status, said = nodes.check("--timeout", 6)
        finally:
            nodes.shell(*rule, "del", "pref", 9)
    assert status != 0
    assert "Failed: connecting the ranks: " in said, said


@pytest.mark.ci
def test_a_node_whose_network_goes_ends_all_and_on_both_sides(nodes, tmp_path):
    """srun does not end the others here: they find out for themselves."""
    process = nodes.start("--timeout", 4, kill=0, plant="pause", MARKS=str(tmp_path))
    nodes.cluster.until(lambda: len(list(tmp_path.iterdir())) == 4, "all ranks are connected")
    with nodes.dropped("node2", "from", f"{nodes.cluster.network}.1"):
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, said
    assert "; no answer from ranks 2, 3 on node2.\n" in said


# --- on GPUs ---


@pytest.mark.multi_gpu
def test_all_gpus_of_this_machine_with_nccl(tmp_path, corpus):
    figures = tmp_path / "figures.json"
    flags = ("--save-dir", tmp_path / "outputs", "-d", corpus, "--output", figures)
    done = run_script(*TORCHRUN, torch.cuda.device_count(), SCRIPT, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    (series,) = json.loads(figures.read_text())["all_reduce"].values()
    assert len(series) == 10 and str(2**28) in series
    assert all(size["GB/s"] > 0 for size in series.values())

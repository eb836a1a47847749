"""Chapter 3's check before a run: healthy nodes pass, and the check names each planted fault."""

import functools
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
from cluster import PATIENCE_S
from helpers import (
    ROOT,
    TORCHRUN,
    run_script,
)
from runner import Ranks, finish, load_script, place_of, start
from torch.distributed import TCPStore

SCRIPT = ROOT / "03-multi-node/preflight.py"
QUICK = ("--max-bytes", 4096)
CORPUS = ("-d", "/run/corpus.json")  # each node of the cluster has a /run
HOST = socket.gethostname()
preflight = load_script(SCRIPT)
network = sys.modules["checks.network"]
CHANGED = "common/checkpoint.py"


# --- what is computed ---


@pytest.mark.check
def test_bus_bandwidth_is_that_of_nccl_tests():
    """2 (n - 1) / n: as good as once for 2 ranks, 1.75 times for 8, and next to 2 for very many."""
    assert network.bus_bandwidth(10**9, 1.0, 2) == 1.0
    assert network.bus_bandwidth(10**9, 0.1, 8) == pytest.approx(17.5)
    assert network.bus_bandwidth(10**9, 1.0, 1000) == pytest.approx(1.998)
    assert network.bus_bandwidth(268435456, 0.155025, 2) == pytest.approx(1.7316, rel=1e-4)


@pytest.mark.check
@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        ("/", {".": "5000"}, 5000),  # in a container, its own group looks like the top one
        ("/slurm/job_1/step_0/task_0", {"slurm/job_1": "4000", "slurm": "max"}, 4000),
        ("/slurm/job_1", {"slurm/job_1": "max", "slurm/job_2": "10"}, None),
        (None, {}, None),
    ],
)
def test_memory_is_limited_by_each_control_group(tmp_path, group, limits, expected):
    if group:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(f"12:cpu:/elsewhere\n0::{group}\n")
    for folder, limit in limits.items():
        path = tmp_path / "sys/fs/cgroup" / folder / "memory.max"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert sys.modules["checks.nodes"].memory_bytes(tmp_path) == (expected or physical)


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
def test_slow_links_are_compared_with_the_others_or_with_a_number():
    def find(links: dict, needed: float | None = None) -> list[str]:
        return network.find_slow("link", links, 2.0, needed)

    (fault,) = find({**SLOWED, "node2 - node3": at(0.4)})
    assert fault.startswith("bandwidth: link node1 - node2 has 0.0024 GB/s")
    assert find({name: at(rate) for name, rate in zip(SLOWED, (0.3, 0.4, 0.5), strict=True)}) == []
    # A busy core makes small all-reduces ten times slower, as measured on healthy nodes.
    assert find({name: {1024: link[2**20]} for name, link in SLOWED.items()}) == []
    # A link too slow for large sizes stops below 1 MiB, where the others went on.
    crawls = {name: {**link, 1024: {"GB/s": 0.001}} for name, link in SLOWED.items()}
    crawls["node1 - node2"] = {1024: {"GB/s": 0.0001}}
    (fault,) = find(crawls)
    assert fault.startswith("bandwidth: link node1 - node2 has 0.0001 GB/s, 10.0 times less")
    # One link alone has nothing to be compared with but a number that is given.
    alone = {"node1 - node2": at(0.0024)}
    assert find(alone) == find(alone, 0.002) == find({}, 0.1) == []
    (fault,) = find(alone, 0.1)
    assert fault == "bandwidth: link node1 - node2 has 0.0024 GB/s, --min-bandwidth is 0.1"


# --- on this machine; ranks are children of a server, and start at once ---


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


def test_two_healthy_ranks(tmp_path, corpus):
    figures = tmp_path / "figures.json"
    statuses, said = check(tmp_path, corpus, "--output", figures, "--tokenize", "-s", 32)
    assert statuses == [0, 0] and "FAULT" not in said
    assert re.fullmatch(
        r"Passed: 2 ranks on 1 node, all-reduce of 4,096 bytes correct and .* GB/s\.",
        last_sentence(said),
    )
    assert list((tmp_path / "outputs").iterdir()) == [], "it leaves nothing in the runs' folder"
    found = json.loads(figures.read_text())
    assert found["nodes"] == {HOST: [0, 1]} and found["faults"] == []
    same = found["facts"][HOST]["same"]
    assert same["torch"] == torch.__version__
    assert {"common/data.py", "common/presets/gpt2/config.json"} <= {*same["code"]}
    series = found["all_reduce"][HOST]
    assert list(series) == ["1024", "4096"]
    for size, figure in series.items():
        expected = network.bus_bandwidth(int(size), figure["ms"] / 1000, 2)
        assert figure["GB/s"] == pytest.approx(expected)
    alone = run_script(SCRIPT, *QUICK, "--save-dir", tmp_path / "outputs", "-d", corpus)
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.splitlines()[-1] == "Passed: 1 rank on 1 node."


def test_bad_input_ends_with_status_2_and_overwrites_nothing(tmp_path, corpus):
    kept = tmp_path / "kept.json"
    kept.write_text("precious")
    errors = [str(tmp_path / f"stderr-{rank}") for rank in range(2)]
    statuses, said = check(tmp_path, corpus, "--output", kept, stderr_file=errors)
    assert statuses == [2, 2]
    assert f"{kept} already exists" in Path(errors[0]).read_text()
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


def die() -> None:
    def all_reduce(*args, original=dist.all_reduce, **kwargs):
        if args[0].numel() == 1024:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*args, **kwargs)

    dist.all_reduce = all_reduce


def test_a_rank_that_dies_in_an_all_reduce_ends_all(tmp_path, corpus):
    """Nobody waits for the timeout."""
    statuses, said = check(tmp_path, corpus, "--timeout", 10**5, plant=die)
    assert statuses == [1, -signal.SIGKILL]
    end = said.splitlines()[-1]
    assert end.startswith("Failed: all-reduce of 4,096 bytes over 2 ranks: ")
    assert end.endswith(f"; no answer from rank 1 on {HOST}.")


def fall_asleep() -> None:
    uuid.uuid4 = functools.partial(time.sleep, 900)


@pytest.mark.ci
def test_a_rank_that_hangs_ends_all(tmp_path, corpus):
    """As on a file system that does not answer."""
    statuses, said = check(tmp_path, corpus, "--timeout", 30, plant=fall_asleep)
    assert statuses == [1, 1]
    assert said.splitlines()[-1] == (
        "Failed: looking for the other nodes' files in --save-dir: not finished within 30 s; "
        f"the other ranks wait for rank 1 on {HOST}."
    ), said


def check_one_rank(folder: Path, corpus: Path, rank: int, port: int, plant=None) -> str:
    """Return what a rank prints that waits for the other one, always in vain and so not for long.

    port: of the store.
    """
    copy_script(folder / "chapter")
    process = start(
        ["--timeout", 2, "--save-dir", folder, "-d", corpus],
        chapter=str(folder / "chapter"),
        env={**place_of(rank, 2), "MASTER_PORT": port},
        plant=functools.partial(_prepare, folder / "stdout", plant),
    )
    assert finish(process) == 1
    return (folder / "stdout").read_text()


def test_a_rank_that_does_not_come_is_named(tmp_path, corpus):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert check_one_rank(tmp_path, corpus, 0, store.port).splitlines()[-1] == (
        f"Failed: rendezvous: not finished within 2 s; rank 0 on {HOST} came to "
        f"localhost:{store.port}, rank 1 did not."
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
"""


class Nodes:
    """Runs the check with srun on all nodes of the cluster."""

    def __init__(self, cluster, folder: Path) -> None:
        self.cluster, self.folder, self.port = cluster, folder, 21000
        (folder / "hook").mkdir()
        (folder / "hook/sitecustomize.py").write_text(HOOK)
        texts = json.dumps([f"Text number {n}, of many words. " * 20 for n in range(50)])
        (folder / "corpus.json").write_text(texts)
        (folder / "other.json").write_text(texts.replace("number 7,", "number 8,"))
        self.shell("srun", "-N2", "cp", folder / "corpus.json", "/run/corpus.json")

    def shell(self, *command: object) -> str:
        return self.cluster.shell(*command)

    def check(self, *args, tasks=2, shell="exec", plant="") -> tuple[int, str]:
        """Return the exit status and what was printed; `shell`: what each task does first."""
        self.port += 1  # each node has all of its ports to itself
        places = {
            "MASTER_ADDR": "node1",
            "MASTER_PORT": str(self.port),
            "PYTHONPATH": f"{self.folder / 'hook'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "PLANT": plant,
            "SCRIPT": str(SCRIPT),
        }
        words = ["srun", "-N2", f"--ntasks-per-node={tasks}", "--kill-on-bad-exit"]
        script = f'{shell} {sys.executable} "$SCRIPT" "$@"'
        flags = ["--save-dir", self.folder / "outputs", *QUICK, *CORPUS, *args]
        done = subprocess.run(
            [*words, "bash", "-c", script, "task", *map(str, flags)],
            env={**self.cluster.env, **places},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        return done.returncode, done.stdout


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
        *("--save-dir", "/run/outputs", "--timeout", 30),
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

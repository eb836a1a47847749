"""Chapter 3's check before a run: healthy nodes pass, and the check names each planted fault."""

import functools
import os
import re
import shutil
import signal
import socket
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from helpers import ROOT, TORCHRUN, run_script, write_corpus
from runner import Ranks, finish, load_script, place_of, start
from torch.distributed import TCPStore

SCRIPT = ROOT / "03-multi-node/tools/preflight.py"
QUICK = ("--max-bytes", 4096)
HOST = socket.gethostname()
preflight = load_script(SCRIPT)
network = sys.modules["checks.network"]
CHANGED = "common/checkpoint.py"


# --- what is computed ---


@pytest.mark.check
def test_bus_bandwidth_is_that_of_nccl_tests():
    """2 (n - 1) / n times the bytes per second."""
    assert network.bus_bandwidth(10**9, 1.0, 2) == 1.0
    assert network.bus_bandwidth(10**9, 0.1, 8) == pytest.approx(17.5)


def at(gb_per_s: float) -> dict:
    return {1024: {"GB/s": 0.001}, 2**20: {"GB/s": gb_per_s}}


@pytest.mark.check
def test_slow_links_are_compared_with_the_others_or_with_a_number():
    def find(links: dict, needed: float | None = None) -> list[str]:
        return network.find_slow("link", links, needed)

    # As measured on three nodes of the local cluster, node2 slowed down to 20 Mbit/s.
    slow, fast = at(0.0024), at(0.3941)
    slowed = {"node1 - node2": slow, "node1 - node3": fast, "node2 - node3": slow}
    node, *links = find(slowed)
    assert node == "bandwidth: every link of node2 is slow"
    for link, name in zip(links, ("node1 - node2", "node2 - node3"), strict=True):
        assert link.startswith(f"bandwidth: link {name} has 0.0024 GB/s, 164.2 times less than")
    (fault,) = find({**slowed, "node2 - node3": at(0.4)})
    assert fault.startswith("bandwidth: link node1 - node2 has 0.0024 GB/s")
    assert find({name: at(rate) for name, rate in zip(slowed, (0.3, 0.4, 0.5), strict=True)}) == []
    # A busy core makes small all-reduces ten times slower, as measured on healthy nodes.
    assert find({name: {1024: link[2**20]} for name, link in slowed.items()}) == []
    # One link alone has nothing to be compared with but a number that is given.
    alone = {"node1 - node2": slow}
    assert find(alone) == find(alone, 0.002) == find({}, 0.1) == []
    (fault,) = find(alone, 0.1)
    assert fault == "bandwidth: link node1 - node2 has 0.0024 GB/s, --min-bandwidth is 0.1"


# --- on this machine; ranks are children of a server, and start at once ---


def check(folder: Path, *args: object, plant=None, **options) -> tuple[list[int], str]:
    """Run the check on two ranks; return their exit statuses and what rank 0 printed.

    plant: plants a fault on rank 1.
    """
    out = [str(folder / f"stdout-{rank}") for rank in range(2)]
    flags = [*QUICK, "--save-dir", folder / "outputs", "-d", folder / "corpus.json", *args]
    options = {"script": str(SCRIPT), "stdout_file": out, "plant": [None, plant], **options}
    return Ranks(2, flags, **options).finish(), Path(out[0]).read_text()


def test_two_healthy_ranks(tmp_path, corpus):
    statuses, said = check(tmp_path)
    assert statuses == [0, 0] and "FAULT" not in said
    assert re.fullmatch(
        r"Passed: 2 ranks on 1 node, all-reduce of 4,096 bytes correct and .* GB/s\.",
        last_sentence(said),
    )
    assert list((tmp_path / "outputs").iterdir()) == [], "it leaves nothing in the runs' folder"
    assert f"same   torch: {torch.__version__}\n" in said
    # The table shows bytes, ms and GB/s.
    for size in (1024, 4096):
        row = re.search(rf"^ *{size:,} +([\d.]+) +([\d.]+)$", said, re.MULTILINE)
        expected = network.bus_bandwidth(size, float(row[1]) / 1000, 2)
        assert float(row[2]) == pytest.approx(expected, rel=0.05, abs=1e-4)
    alone = run_script(SCRIPT, *QUICK, "--save-dir", tmp_path / "outputs", "-d", corpus)
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.splitlines()[-1] == "Passed: 1 rank on 1 node."


def test_bad_input_ends_with_status_2(tmp_path):
    errors = [str(tmp_path / f"stderr-{rank}") for rank in range(2)]
    statuses, said = check(tmp_path, "-d", tmp_path / "nowhere.json", stderr_file=errors)
    assert statuses == [2, 2]
    assert "nowhere.json" in Path(errors[0]).read_text()
    assert "Passed" not in said and "Failed" not in said


def add_one() -> None:
    def all_reduce(tensor, *args, original=dist.all_reduce, **kwargs):
        original(tensor, *args, **kwargs)
        if tensor.numel() == 1024:
            tensor[-1] += 1

    dist.all_reduce = all_reduce


def die() -> None:
    def all_reduce(*args, original=dist.all_reduce, **kwargs):
        if args[0].numel() == 1024:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*args, **kwargs)

    dist.all_reduce = all_reduce


def fall_asleep() -> None:
    """As on a file system that does not answer."""
    uuid.uuid4 = functools.partial(time.sleep, 900)


# What rank 1 does, --timeout, the exit statuses, and the last line ("...": any words).
FAULTS = [
    (
        *(add_one, 60, [1, 1]),
        f"Failed, 1 fault: all-reduce: rank 1 on {HOST} has a wrong sum of 4,096 bytes.",
    ),
    (
        *(die, 10**5, [1, -signal.SIGKILL]),  # nobody waits for the timeout
        f"Failed: all-reduce of 4,096 bytes over 2 ranks: ...; no answer from rank 1 on {HOST}.",
    ),
    pytest.param(
        *(fall_asleep, 30, [1, 1]),
        "Failed: looking for the other nodes' files in --save-dir: not finished within 30 s; "
        f"the other ranks wait for rank 1 on {HOST}.",
        marks=pytest.mark.ci,
    ),
]


@pytest.mark.parametrize(
    ("plant", "timeout", "expected", "sentence"), FAULTS, ids=["wrong sum", "dies", "hangs"]
)
def test_the_rank_at_fault_is_named(tmp_path, corpus, plant, timeout, expected, sentence):
    statuses, said = check(tmp_path, "--timeout", timeout, plant=plant)
    assert statuses == expected
    pattern = ".*".join(map(re.escape, sentence.split("...")))
    assert re.fullmatch(pattern, said.splitlines()[-1]), said


def test_a_rank_that_does_not_come_is_named(tmp_path, corpus):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    process = start(
        ["--timeout", 2, "--save-dir", tmp_path, "-d", corpus],
        script=str(SCRIPT),
        env={**place_of(0, 2), "MASTER_PORT": store.port},
        stdout_file=str(tmp_path / "stdout"),
    )
    assert finish(process) == 1
    assert (tmp_path / "stdout").read_text().splitlines()[-1] == (
        f"Failed: rendezvous: not finished within 2 s; rank 0 on {HOST} came to "
        f"localhost:{store.port}, rank 1 did not."
    )


# --- on the nodes of the local cluster ---


def check_nodes(
    cluster: Cluster, folder: Path, port: int, *args: object, tasks: int = 2, first: str = ":"
) -> tuple[int, str]:
    """Run the check on all nodes; return the exit status and what was printed.

    port: of each node, another one each time. first: what each task does before.
    """
    corpus = write_corpus(folder)
    cluster.shell("srun", "-N2", "cp", corpus, "/run/corpus.json")  # each node has a /run
    places = {
        "MASTER_ADDR": "node1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SCRIPT": str(SCRIPT),
    }
    words = ["srun", "-N2", f"--ntasks-per-node={tasks}", "--kill-on-bad-exit", "bash", "-c"]
    script = f'{first}; exec {sys.executable} "$SCRIPT" "$@"'
    flags = ["--save-dir", folder / "outputs", *QUICK, "-d", "/run/corpus.json", *args]
    done = cluster.execute([*words, script, "task", *flags], places)
    return done.returncode, done.stdout + done.stderr


def last_sentence(said: str) -> str:
    """Return the sentence that ends the check, from between what srun says."""
    (sentence,) = re.findall(r"^(?:Passed|Failed).*\.$", said, re.MULTILINE)
    return sentence


@pytest.mark.ci
def test_two_healthy_nodes(cluster, tmp_path):
    status, said = check_nodes(cluster, tmp_path, 21001)
    assert status == 0, said
    assert last_sentence(said).startswith("Passed: 4 ranks on 2 nodes, all-reduce of 4,096 bytes")
    assert "FAULT" not in said
    assert re.search(
        r"^met    at node1:\d+: ranks 0, 1 on node1 and ranks 2, 3 on node2$", said, re.M
    )
    assert "there is no other link to compare this one with" in said
    assert re.search(r"^link   node1 - node2: ", said, re.MULTILINE)
    assert list((tmp_path / "outputs").iterdir()) == []


@pytest.mark.ci
def test_all_that_is_different_on_node2(cluster, tmp_path):
    """Another torch, code (one byte), data and save folder, all at once."""
    copy, other = tmp_path / "copy", tmp_path / "other.json"
    for folder in (ROOT / "common", *ROOT.glob("[0-9]*")):
        shutil.copytree(folder, copy / folder.name)
    # Python imports this by itself.
    (copy / "sitecustomize.py").write_text("import torch\ntorch.__version__ = '2.12.0+planted'\n")
    changed = copy / CHANGED
    content = changed.read_bytes()
    changed.write_bytes(content[:3] + bytes([content[3] ^ 32]) + content[4:])  # in the docstring
    other.write_text(write_corpus(tmp_path).read_text().replace("number 7,", "number 8,"))
    there = f"export SCRIPT={copy}/03-multi-node/tools/preflight.py PYTHONPATH={copy}"
    there += f"; cp {other} /run/corpus.json"
    status, said = check_nodes(
        *(cluster, tmp_path, 21002, "--save-dir", "/run/outputs", "--timeout", 30),
        tasks=1,
        first=f"if [[ $(hostname) == node2 ]]; then {there}; fi",
    )
    assert status == 1, said
    checksums = r"[0-9a-f]{16}"
    patterns = [
        rf"code: node2 has {checksums} for {CHANGED}, node1 \(rank 0\) has {checksums}",
        rf"torch: node2 has 2.12.0\+planted, node1 \(rank 0\) has {re.escape(torch.__version__)}",
        rf"data: node2 has {checksums} for checksum, node1 \(rank 0\) has {checksums}",
        r"save folder: node2 has files of node2, node1 \(rank 0\) has files of node1 in "
        "/run/outputs, which all nodes must share",
    ]
    faults = re.findall(r"^FAULT  (.*)$", said, re.MULTILINE)
    assert len(faults) == len(patterns), faults
    for fault, pattern in zip(faults, patterns, strict=True):
        assert re.fullmatch(pattern, fault), fault
    assert last_sentence(said) == f"Failed, 4 faults: {'; '.join(faults)}."


# --- on GPUs ---


@pytest.mark.multi_gpu
def test_all_gpus_of_this_machine_with_nccl(tmp_path, corpus):
    flags = ("--save-dir", tmp_path / "outputs", "-d", corpus)
    done = run_script(*TORCHRUN, torch.cuda.device_count(), SCRIPT, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ *([\d,]+) +[\d.]+ +([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(rows) == 10 and rows[-1][0] == f"{2**28:,}"
    assert all(float(rate) > 0 for _, rate in rows)

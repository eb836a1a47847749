"""Chapter 3's check before a run: healthy nodes pass, and the check names each planted fault."""

import re
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TORCHRUN, run_script
from runner import Ranks, finish, place_of, start
from torch.distributed import TCPStore

SCRIPT = ROOT / "03-multi-node/tools/preflight.py"
QUICK = ("--max-bytes", 4096)
HOST = socket.gethostname()
CHANGED = "common/checkpoint.py"


# --- on this machine; ranks are children of a server, and start at once ---


def check(folder: Path, *args: object) -> tuple[list[int], str]:
    """Run the check on two ranks; return their exit statuses and what rank 0 printed."""
    out = [str(folder / f"stdout-{rank}") for rank in range(2)]
    flags = [*QUICK, "--save-dir", folder / "outputs", *args]
    ranks = Ranks(2, flags, script=str(SCRIPT), stdout_file=out)
    return ranks.finish(), Path(out[0]).read_text()


def test_two_healthy_ranks(tmp_path):
    statuses, said = check(tmp_path)
    assert statuses == [0, 0] and said.endswith("\nPassed.\n")
    assert list((tmp_path / "outputs").iterdir()) == [], "it leaves nothing in the runs' folder"
    assert f"came: ranks 0, 1 on {HOST}\n" in said and f", torch {torch.__version__}, " in said
    # The bus bandwidth of two ranks is the size over the time.
    (row,) = re.findall(r"^ *4,096 +([\d.]+) +([\d.]+)$", said, re.MULTILINE)
    milliseconds, rate = map(float, row)
    assert rate == pytest.approx(4096 / milliseconds / 1e6, abs=1e-3)


def fall_asleep() -> None:
    """As on a file system that does not answer."""
    exists = Path.exists
    Path.exists = lambda path: time.sleep(900) if "preflight-" in path.name else exists(path)


def test_a_slow_network_is_named(tmp_path):
    statuses, said = check(tmp_path, "--bandwidth", 10**6)
    sentence = r"Failed: the all-reduce has .* is 1e\+06."
    assert statuses == [1, 1] and re.fullmatch(sentence, said.splitlines()[-1]), said


@pytest.mark.ci
@pytest.mark.parametrize(
    ("n_started", "stage"), [(1, "start: after 5"), (2, "shared folder: after 15.0")]
)
def test_a_rank_that_does_not_start_or_hangs_is_named(tmp_path, n_started, stage):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = [
        start(
            ["--timeout", 5, "--save-dir", tmp_path, *QUICK],
            script=str(SCRIPT),
            env={**place_of(rank, 2), "MASTER_PORT": store.port},
            plant=fall_asleep if rank else None,
            stdout_file=str(tmp_path / f"stdout-{rank}"),
        )
        for rank in range(n_started)
    ]
    assert finish(ranks.pop(0)) == 1
    for rank in ranks:
        rank.kill()
    said = (tmp_path / "stdout-0").read_text().splitlines()[-1]
    assert said == f"Failed: {stage} s, ranks 0 on {HOST} came, ranks 1 did not."


# --- on the nodes of the local cluster ---


@pytest.mark.ci
def test_all_that_is_different_on_node2(cluster, tmp_path):
    """Another torch, code (one byte) and save folder, all at once; all ranks have come."""
    copy = tmp_path / "copy"
    for folder in (ROOT / "common", *ROOT.glob("[0-9]*")):
        shutil.copytree(folder, copy / folder.name)
    # Python imports this by itself.
    (copy / "sitecustomize.py").write_text("import torch\ntorch.__version__ = '2.12'\n")
    with (copy / CHANGED).open("a") as file:
        file.write("\n")
    places = {"MASTER_ADDR": "node1", "MASTER_PORT": "21001", "OMP_NUM_THREADS": "1"}
    places |= {"PYTHONPATH": str(ROOT), "SCRIPT": str(SCRIPT)}
    there = f"export SCRIPT={copy}/03-multi-node/tools/preflight.py PYTHONPATH={copy}"
    task = f'[[ $(hostname) == node1 ]] || {there}; exec {sys.executable} "$SCRIPT" "$@"'
    words = ["srun", "-N2", "--ntasks-per-node=2", "bash", "-c", task, "task", *QUICK]
    done = cluster.execute([*words, "--save-dir", "/run/outputs", "--timeout", 30], places)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "came: ranks 0, 1 on node1 and ranks 2, 3 on node2\n" in done.stdout
    (sentence,) = re.findall(r"^Failed: (.*)\.$", done.stdout, re.MULTILINE)
    faults, checksum = sentence.split("; "), r"[0-9a-f]{16}"
    patterns = [
        rf"node2 has torch 2.12, but rank 0's node has {re.escape(torch.__version__)}",
        rf"node2 has {CHANGED} {checksum}, but rank 0's node has {checksum}",
        "node2 does not see the file that rank 0 wrote to /run/outputs",
    ]
    assert len(faults) == len(patterns), faults
    for fault, pattern in zip(faults, patterns, strict=True):
        assert re.fullmatch(pattern, fault), fault


# --- on GPUs ---


@pytest.mark.multi_gpu
def test_all_gpus_of_this_machine_with_nccl(tmp_path):
    count = torch.cuda.device_count()
    done = run_script(*TORCHRUN, count, SCRIPT, "--save-dir", tmp_path / "outputs")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ *([\d,]+) +[\d.]+ +([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(rows) == 4 and rows[-1][0] == f"{2**28:,}" and float(rows[-1][1]) > 1

"""The table of a cluster: readings as the vendor's tools give them, nodes that do not answer."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from cluster import Cluster
from helpers import ROOT, run_script
from runner import finish, load_script, start

SCRIPT = "03-multi-node/watch_gpus.py"
watch_gpus = load_script(ROOT / SCRIPT)

# What `nvidia-smi --format=csv,noheader,nounits` prints for a node of 8 H100: uuid, name, % busy,
# W, limit in W, MiB used, MiB in all.
TRAINING = [
    f"GPU-{n}a{n}, NVIDIA H100 80GB HBM3, {97 + n % 3}, {640 + n}.25, 700.00, {71000 + n}, 81559"
    for n in range(8)
]
IDLE = [re.sub(r", \d+, [\d.]+, 700", ", 0, 71.40, 700", line) for line in TRAINING]
# In a collective that waits for GPU 3: all others at 100% and 118 W.
WAITING = [re.sub(r", \d+, [\d.]+, 700", ", 100, 118.09, 700", line) for line in TRAINING]
WAITING[3] = IDLE[3]
APPS = [f"GPU-{n}a{n}, {4000 + n}" for n in range(8)]

NVIDIA_SMI = """#!/bin/bash
case "$1" in
--query-gpu=*) printf '%s\\n' "${{GPUS[@]}}" ;;
--query-compute-apps=*) printf '%s\\n' "${{APPS[@]}}" ;;
esac
exit {status}
"""


def fake_nvidia_smi(folder: Path, gpus: list[str], apps: list[str] = APPS, status: int = 0) -> Path:
    """Put an nvidia-smi into a folder that prints this; return the folder."""
    folder.mkdir(exist_ok=True)
    arrays = "".join(
        f"{name}=({' '.join(repr(line) for line in lines)})\n"
        for name, lines in (("GPUS", gpus), ("APPS", apps))
    )
    program = folder / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(status=status).replace("\n", f"\n{arrays}", 1))
    program.chmod(0o755)
    return folder


NO_PYNVML = "raise ImportError"


def read_node(folder: Path, path: Path | None = None) -> dict:
    """Run what is sent to a node that has no library, with these programs before the others."""
    (folder / "pynvml.py").write_text(NO_PYNVML)
    program = f"import sys; sys.path.insert(0, {str(folder)!r})\n{watch_gpus.SENT}"
    path = f"{path}:{os.environ['PATH']}" if path else str(folder)
    command = [sys.executable, "-"]
    output = subprocess.check_output(command, input=program.encode(), env={"PATH": path})
    return json.loads(output)


H100 = {"name": "NVIDIA H100 80GB HBM3", "limit": 700.0, "total": 81559 / 1024}


@pytest.mark.check
def test_readings_of_nvidia_smi(tmp_path):
    folder = fake_nvidia_smi(tmp_path / "bin", TRAINING, [*APPS, APPS[7]])
    gpus = read_node(tmp_path, path=folder)["gpus"]
    assert len(gpus) == 8
    expected = {**H100, "busy": 97, "power": 640.25, "used": 71000 / 1024, "processes": 1}
    assert gpus[0] == expected
    assert gpus[7]["processes"] == 2


# --- the table and its rules ---


def gpus(lines: list[str]) -> dict:
    """Return the reading of a node whose nvidia-smi prints these lines."""
    found = []
    for line in lines:
        _, name, *numbers = line.split(", ")
        busy, power, limit, used, total = map(float, numbers)
        reading = {"name": name, "busy": busy, "power": power, "limit": limit}
        found.append({**reading, "used": used / 1024, "total": total / 1024, "processes": 1})
    return {"gpus": found}


def cpu(busy: float, processes: int = 2) -> dict:
    reading = {"cores": 2, "load": 1.5, "used": 3.0, "total": 23.5}
    return {"cpu": {**reading, "busy": busy, "processes": processes}, "why": "no GPU"}


def nodes(*readings: dict) -> list:
    """Return nodes after some readings, each a dictionary of the nodes' readings."""
    options = argparse.Namespace(timeout=5.0, ssh_config=None, python="python3")
    found = {name: watch_gpus.Node(name, options) for name in readings[0]}
    for reading in readings:
        for name, each in reading.items():
            if isinstance(each, str):
                found[name].take(None, each)
            else:
                found[name].take(each)
    return list(found.values())


def table(*readings: dict, every_gpu: bool = False) -> str:
    return watch_gpus.table(nodes(*readings), every_gpu)


@pytest.mark.check
def test_a_row_for_each_node():
    refused = "ssh: connect to host node3 port 22: Connection refused"
    shown = table({"node1": gpus(TRAINING), "node2": cpu(97), "node3": refused}).splitlines()
    assert [re.split(" {2,}", line) for line in shown] == [
        ["node", "devices", "utilization, %", "power, W", "memory, GiB", "processes"],
        [
            *("node1", "8 x NVIDIA H100 80GB HBM3", "98 (min 97)", "644 (min 640) of 700"),
            *("69.3 (max 69.3) of 79.6", "8"),
        ],
        ["node2", "2 CPU cores", "97", "load 1.50", "3.0 of 23.5", "2", "no GPU"],
        ["node3", f"not reached: {refused}"],
    ]
    shown = table({"node1": gpus(TRAINING)}, every_gpu=True).splitlines()
    assert len(shown) == 9
    cells = ["node1", "7: NVIDIA H100 80GB HBM3", "98", "647 of 700", "69.3 of 79.6", "1"]
    assert re.split(" {2,}", shown[8]) == cells


@pytest.mark.check
def test_gpus_that_spin_are_marked_and_the_other_one_is_named():
    shown = table({"node1": gpus(WAITING), "node2": gpus(TRAINING)}).splitlines()
    assert shown[1].endswith(" 8          7 busy near idle power")
    assert not shown[2].endswith("power")
    assert shown[3:] == [
        "Busy near idle power for 0 s: 7 of 8 on node1. A collective that waits for a rank looks "
        "like this; not waiting: GPU 3 of node1."
    ]
    for usual in (TRAINING, IDLE):
        assert len(table({"node1": gpus(usual)}).splitlines()) == 2
    # A GPU that still computes is named too: only rank 0 evaluates, and the others wait for it.
    works = gpus(WAITING)
    works["gpus"][3] |= {"busy": 100, "power": 650.0}
    assert table({"node1": works}).splitlines()[-1].endswith("; not waiting: GPU 3 of node1.")
    shown = table({"node1": gpus(WAITING)}, every_gpu=True).splitlines()[1:9]
    assert [line.endswith("busy near idle power") for line in shown] == [n != 3 for n in range(8)]


# --- the script ---


def fake_ssh(folder: Path) -> Path:
    """An ssh to nodes whose nvidia-smi is in a folder of their name; `silent` does not answer."""
    folder.mkdir(exist_ok=True)
    (folder / "pynvml.py").write_text(NO_PYNVML)
    ssh = folder / "ssh"
    ssh.write_text(
        '#!/bin/bash\nHOST=${@: -2:1}; [[ "$HOST" != silent ]] || exec sleep 1000\n'
        '[[ "$HOST" != refused ]] || exit 255\n'
        f'echo "Welcome to $HOST"; export PATH={folder}/$HOST:$PATH PYTHONPATH={folder}\n'
        f"exec {sys.executable} -\n"
    )
    ssh.chmod(0o755)
    return folder


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []


def test_a_silent_node_delays_no_other(tmp_path):
    fake_nvidia_smi(fake_ssh(tmp_path / "bin") / "node1", TRAINING)
    (tmp_path / "bin/node2").symlink_to(tmp_path / "bin/node1")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    words = [SCRIPT, "silent", "node[1-2]", "--timeout", 900, "--interval", 0.5]
    out = tmp_path / "out"
    process = start(words[1:], script=SCRIPT, env={"PATH": path}, stdout_file=str(out))
    Cluster.until(lambda: out.exists() and re.search(r"node2 +8 x", out.read_text()), "all answer")
    assert re.search(r"^silent +asking$", out.read_text(), re.MULTILINE)
    # Ctrl-C: a clean end, with nothing left behind.
    below = psutil.Process(process.pid).children(recursive=True)
    (silent,) = (each for each in below if command_of(each) == ["sleep", "1000"])
    os.kill(process.pid, signal.SIGINT)
    assert finish(process) == 0
    silent.wait(timeout=300)


def test_once_ends_with_1_if_a_node_is_missing(tmp_path):
    fake_nvidia_smi(fake_ssh(tmp_path / "bin") / "node1", WAITING)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = run_script(SCRIPT, "refused", "node1", "--once", "--gpus", PATH=path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[1].startswith("refused  not reached: ") and len(lines) == 11
    assert "7 of 8 on node1" in lines[-1]


# --- on a GPU ---


@pytest.mark.gpu
def test_readings_agree_with_torch_and_nvidia_smi():
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    reading = watch_gpus.read_node()
    name, device_bytes = torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)
    mine = [gpu for gpu in reading["gpus"] if gpu["name"] == name]
    assert len(mine) >= torch.cuda.device_count()
    used = [gpu["used"] for gpu in mine]
    free, total = (each / 2**30 for each in device_bytes)
    # torch's total leaves out what the driver reserves, some hundreds of MB.
    assert min(abs(each - (total - free)) for each in used) < 1.0
    assert mine[0]["total"] == pytest.approx(total, abs=2.0)
    assert held.numel() / 2**30 <= max(used)
    for gpu in mine:
        assert 0 <= gpu["busy"] <= 100 and 5 < gpu["power"] < 1.2 * gpu["limit"]

"""The table of a cluster: readings as nvidia-smi gives them, nodes that do not answer."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from helpers import ROOT, run_script
from runner import finish, load_script, start

SCRIPT = "03-multi-node/tools/watch_gpus.py"
watch_gpus = load_script(ROOT / SCRIPT)


def readings(busy: object, watts: float) -> list[str]:
    """Return what nvidia-smi prints for 8 H100: name, % busy, W, limit in W, MiB used, in all."""
    gpu = f"NVIDIA H100 80GB HBM3, {busy}, {watts}, 700.00"
    return [f"{gpu}, {71000 + n}, 81559" for n in range(8)]


TRAINING, IDLE, MIG = readings(99, 640.25), readings(0, 71.4), readings("[N/A]", 118.09)
# In a collective that waits for GPU 3: all others at 100% and 118 W.
WAITING = [*readings(100, 118.09)[:3], IDLE[3], *readings(100, 118.09)[4:]]


def fake_ssh(folder: Path, **nodes: list[str]) -> dict[str, str]:
    """Return a PATH with an ssh to nodes whose nvidia-smi prints this; `silent` does not answer."""
    folder.mkdir()
    for node, lines in nodes.items():
        (folder / node).write_text("\n".join(["Welcome!", *lines]) + "\n")
    ssh = folder / "ssh"
    ssh.write_text(
        '#!/bin/bash\nHOST=$3; [[ "$HOST" != silent ]] || exec sleep 1000\n'
        '[[ "$HOST" != refused ]] || { echo "Permission denied (publickey)." >&2; exit 255; }\n'
        f'[[ "$4" == nvidia-smi ]] && cat "{folder}/$HOST"\n'
    )
    ssh.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_row_for_each_node(tmp_path):
    env = fake_ssh(tmp_path / "bin", node1=TRAINING, node2=WAITING, node3=IDLE, node4=MIG)
    nodes = ("node1", "node2", "node3", "node4", "refused", "silent")
    done = run_script(SCRIPT, *nodes, "--once", "--timeout", 2, **env)
    assert done.returncode == 1
    name, memory = "8 x NVIDIA H100 80GB HBM3", "71000-71007 of 81559"
    waits = "busy near idle power for 0 s: GPU 0 1 2 4 5 6 7"
    assert [re.split(" {2,}", line) for line in done.stdout.splitlines()] == [
        ["node", "GPUs", "utilization, %", "power, W", "memory, MiB"],
        ["node1", name, "99", "640 of 700", memory],
        ["node2", name, "0-100", "71-118 of 700", memory, waits],
        ["node3", name, "0", "71 of 700", memory],
        ["node4", name, "?", "118 of 700", memory],
        ["refused", "none", "Permission denied (publickey)."],
        ["silent", "none", "no answer within 2 s"],
    ]
    assert run_script(SCRIPT, "node1", "--once", **env).returncode == 0


def test_tables_go_on_until_ctrl_c(tmp_path):
    env = fake_ssh(tmp_path / "bin", node1=WAITING)
    out = tmp_path / "out"
    process = start(["node1", "--interval", 0.5], script=SCRIPT, env=env, stdout_file=str(out))
    Cluster.until(lambda: out.exists() and "power for 1 s: GPU 0 1 2 4" in out.read_text(), "1 s")
    os.kill(process.pid, signal.SIGINT)
    assert finish(process) == 0


@pytest.mark.gpu
def test_readings_agree_with_torch():
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    gpus, error = watch_gpus.read_gpus(None, 60)
    assert not error
    free, total = (each / 2**20 for each in torch.cuda.mem_get_info(0))
    same = [gpu for gpu in gpus if gpu.name == torch.cuda.get_device_name(0)]
    assert len(same) >= torch.cuda.device_count()
    # torch's total leaves out what the driver reserves, some hundreds of MiB.
    assert min(abs(gpu.used - (total - free)) for gpu in same) < 1024
    assert same[0].total == pytest.approx(total, abs=2048)
    assert held.numel() / 2**20 <= max(gpu.used for gpu in same)
    for gpu in same:
        assert 0 <= gpu.utilization <= 100 and 5 < gpu.power < 1.2 * gpu.power_limit

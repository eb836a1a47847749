"""With the network cut off, the defaults work, and nothing even tries to reach a hub."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import give_up
from helpers import (
    CHAPTERS,
    ROOT,
    environment,
    first_then_nightly,
    launch_file,
    read_metrics,
)

# Python runs this file at its start: it notes every address that is looked up or connected to.
NOTE_CONNECTIONS = """
import os, sys
def note(event, args):
    if event == "socket.getaddrinfo":
        address = str(args[0])
    elif event == "socket.connect" and isinstance(args[1], tuple):
        address = str(args[1][0])
    else:
        return
    with open(os.environ["CONNECTIONS_FILE"], "a") as file:
        file.write(address + "\\n")
sys.addaudithook(note)
"""


@pytest.fixture
def cut_off(tmp_path):
    """Return a function that runs a command without a network and returns who it tried to reach."""
    enter = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    loopback = [*enter, "ip", "link", "set", "lo", "up"]
    if not shutil.which("ip") or subprocess.run(loopback, capture_output=True).returncode != 0:
        give_up("needs Linux network namespaces: unshare (util-linux) and ip (iproute2)")
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks/sitecustomize.py").write_text(NOTE_CONNECTIONS)
    connections = tmp_path / "connections"
    unset = ("WANDB_MODE", "HF_HOME", "HF_HUB_OFFLINE", "NPROC_PER_NODE", "OMP_NUM_THREADS")
    variables = {key: value for key, value in environment().items() if key not in unset}
    variables |= {
        "PYTHONPATH": str(tmp_path / "hooks"),
        "CONNECTIONS_FILE": str(connections),
        "HOME": str(tmp_path),
    }

    def run(*command: object, cwd: Path = ROOT) -> tuple[subprocess.CompletedProcess, set[str]]:
        connections.write_text("")
        script = 'ip link set lo up && exec "$@"'
        done = subprocess.run(
            [*enter, "sh", "-c", script, "sh", *map(str, command)],
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done, set(connections.read_text().split())

    return run


LOCAL = {"127.0.0.1", "localhost", "::1", "0.0.0.0", "None", ""}


# Chapter 2 stands for those that start several processes.
@pytest.mark.parametrize("chapter", first_then_nightly([CHAPTERS[1], CHAPTERS[0], *CHAPTERS[2:]]))
def test_launch_file_works_from_anywhere_and_reaches_for_nothing(cut_off, tmp_path, chapter):
    """Two processes find each other without a network; they may ask for their own name.

    Each launch file is started as a reader does: with the real interpreter, whose exit is seen, and
    with the launch file's own number of threads. Only the evaluation is shorter.
    """
    save_dir = tmp_path / "outputs"
    words = ("--save-dir", save_dir, "-e", "run", "--max-steps", 4, "--eval-sequences", 16)
    done, tried = cut_off("bash", launch_file(chapter), *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tried <= LOCAL | {socket.gethostname(), socket.getfqdn()}, tried
    assert read_metrics(save_dir / "run")[-1]["step"] == 4
    (tracked,) = (save_dir / "run/wandb").glob("offline-run-*")  # of rank 0
    assert list(tracked.glob("*.wandb")) and list(tracked.glob("files/code/**/train_llm.py"))
    assert "terminate called without an active exception" not in done.stderr
    if chapter != CHAPTERS[0]:
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        assert f"'OMP_NUM_THREADS': '{threads}'" in done.stderr
        logs = sorted(save_dir.glob("run/logs/**/attempt_0/*/stderr.log"))
        assert [path.parent.name for path in logs] == ["0", "1"]
        assert "step 4/4" in logs[0].read_text()


@pytest.mark.nightly
def test_a_hub_that_is_out_of_reach_ends_in_one_sentence(cut_off, tmp_path):
    """The libraries try several times, and HF_HUB_OFFLINE=1 makes them stop at once."""
    for setting, tries in (("HF_HUB_OFFLINE=1", set()), ("HF_HUB_OFFLINE=0", {"huggingface.co"})):
        done, tried = cut_off(
            *("env", setting, sys.executable, "01-single-gpu/train_llm.py", "-e", "gpt2"),
            *("-m", "openai-community/gpt2", "--save-dir", tmp_path / "outputs"),
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "-d python-stdlib and -m gpt2-tiny" in done.stderr.splitlines()[-1]
        assert tried == tries
        assert not (tmp_path / "outputs").exists()

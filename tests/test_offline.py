"""With the network cut off, the defaults work, and nothing even tries to reach a hub."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHAPTERS, ROOT, launch_file, read_metrics

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
        if os.environ.get("CI"):
            pytest.fail("cannot cut off the network: unshare (util-linux) and ip (iproute2)")
        pytest.skip("needs Linux network namespaces: unshare (util-linux) and ip (iproute2)")
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks/sitecustomize.py").write_text(NOTE_CONNECTIONS)
    connections = tmp_path / "connections"
    # HF_HUB_OFFLINE is what a test before this one may have found out in this process.
    unset = ("WANDB_MODE", "HF_HOME", "HF_HUB_OFFLINE")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= {
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
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done, set(connections.read_text().split())

    return run


LOCAL = {"127.0.0.1", "localhost", "::1", "0.0.0.0", "None", ""}


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_launch_file_works_from_anywhere_and_reaches_for_nothing(cut_off, tmp_path, chapter):
    """Two processes find each other without a network; they may ask for their own name."""
    done, tried = cut_off(
        *("bash", launch_file(chapter), "--save-dir", tmp_path / "outputs"),
        *("-e", "run", "--max-steps", 4),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert tried <= LOCAL | {socket.gethostname(), socket.getfqdn()}, tried
    assert read_metrics(tmp_path / "outputs/run")[-1]["step"] == 4
    assert len(list((tmp_path / "outputs/run/wandb").glob("offline-run-*"))) == 1, "of rank 0"


def test_make_train_reaches_for_nothing(cut_off, tmp_path):
    if not (ROOT / ".venv/.train").exists():
        pytest.skip("needs the environment that `make train` sets up")
    done, tried = cut_off(
        "make", "train", f"ARGS=--save-dir {tmp_path}/outputs -e run --max-steps 2"
    )
    assert done.returncode == 0, done.stderr
    assert tried <= LOCAL, tried
    assert read_metrics(tmp_path / "outputs/run")[-1]["step"] == 2


def test_the_hub_out_of_reach_is_said_at_once(cut_off, tmp_path):
    """The one try, and nothing after it: the libraries alone would try again for 20 s."""
    done, tried = cut_off(
        *(sys.executable, "01-single-gpu/train_llm.py", "--save-dir", tmp_path / "outputs"),
        *("-d", "tatsu-lab/alpaca", "-m", "openai-community/gpt2", "-e", "gpt2-alpaca"),
    )
    assert done.returncode == 2
    sentence = done.stderr.splitlines()[-1]
    assert "https://huggingface.co) cannot be reached" in sentence
    assert "-d python-stdlib -m gpt2-tiny" in sentence
    assert "Retrying" not in done.stderr and "Traceback" not in done.stderr
    assert "huggingface.co" in tried, "the check itself works"
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_a_local_model_and_a_hub_data_set(cut_off, tmp_path):
    done, _ = cut_off(
        *(sys.executable, "01-single-gpu/train_llm.py", "--save-dir", tmp_path / "outputs"),
        *("-d", "tatsu-lab/alpaca"),
    )
    assert done.returncode == 2
    assert "data set 'tatsu-lab/alpaca' is neither" in done.stderr.splitlines()[-1]
    assert "Retrying" not in done.stderr

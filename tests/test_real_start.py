"""Each chapter's launch file, started as a reader does: real interpreter, its own thread count.

The other tests start most processes from one that has imported PyTorch already. That would hide a
missing import, and a crash while the interpreter exits.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ENVIRONMENT
from conftest import CHAPTERS, launch_file, read_metrics

from common.plan import plan

pytestmark = pytest.mark.slow
FLAGS = ("-s", "32", "--max-steps", "3", "--log-freq", "1", "-e", "run")


def start(launch_file: Path, corpus: Path, outputs: Path) -> subprocess.CompletedProcess:
    """Run a launch file to its end with the environment of a reader's shell."""
    env = {name: value for name, value in ENVIRONMENT.items() if name != "OMP_NUM_THREADS"}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "VIRTUAL_ENV": sys.prefix}
    command = ["bash", launch_file, *FLAGS, "-d", corpus, "--save-dir", outputs]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_launch_file_runs_to_its_end(chapter, corpus, tmp_path, monkeypatch):
    done = start(launch_file(chapter), corpus, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "terminate called without an active exception" not in done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]
    assert (tmp_path / "run/state.json").exists()
    if chapter != CHAPTERS[0]:
        monkeypatch.delenv("NPROC_PER_NODE", raising=False)
        *_, threads = plan(["-e", "run"])
        assert f"'OMP_NUM_THREADS': '{threads}'" in done.stderr


def test_planted_crash_at_exit_is_noticed(corpus, tmp_path):
    """A crash after the script's last line, as of a thread that outlives the interpreter."""
    (tmp_path / "sitecustomize.py").write_text(
        "import ctypes, os\nctypes.CDLL(None).on_exit(ctypes.CDLL(None).abort, None)\n"
        if sys.platform == "linux"
        else "import atexit, os\natexit.register(os.abort)\n"
    )
    script = tmp_path / "launch.sh"
    script.write_text(f"PYTHONPATH={tmp_path} exec {sys.executable} -c pass\n")
    assert start(script, corpus, tmp_path).returncode == -6

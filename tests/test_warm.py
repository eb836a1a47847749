"""The interpreter of warm.py: as the real one, but for the time it takes to start."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from conftest import quick, quick_commands, wait_for_file

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
    pytest.mark.skipif("REAL_PYTHON" in os.environ, reason="REAL_PYTHON is set"),
]
SCRIPT = """\
import json, os, signal, sys
folder, environment = os.getcwd(), {k: os.environ.get(k) for k in ("RANK", "NNODES")}
print(json.dumps([sys.argv, sys.path[0], folder, environment, sys.executable, __name__]))
print("transformers" in sys.modules, file=sys.stderr)
if "where" in sys.argv:
    import socket, glob
    print(os.uname().nodename, socket.if_nameindex(), glob.glob("mounted/*"), sep="\\n")
if "threads" in sys.argv:
    import torch
    print(torch.get_num_threads())
if "crash" in sys.argv:
    import ctypes
    ctypes.CDLL(None).on_exit(ctypes.CDLL(None).abort, None)  # of glibc
if "ignored" in sys.argv:
    print(signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)
if "wrong" in sys.argv:
    raise ValueError("wrong")
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "handled" in sys.argv:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
if "wait" in sys.argv:
    open("pid", "w").write(str(os.getpid()))
    signal.pause()
sys.exit({"none": None, "word": "a word", "true": True}.get(sys.argv[-1], 7))
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the script with these arguments, in a shell."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(*args: str, command="exec python script.py", **env: object) -> subprocess.Popen:
        words = ["bash", "-c", f'{command} "$@"', "bash", *args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(words, cwd=tmp_path, env=quick(**env), **pipes)

    return start


def end(process: subprocess.Popen) -> tuple[int, str, list[str]]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err.splitlines()


@pytest.mark.parametrize("args", [("a b", ""), ("none",), ("word",), ("true",), ("wrong",)])
def test_a_process_is_as_with_the_real_interpreter(start, args):
    status, out, err = end(start(*args, RANK=3))
    assert err[0] == "True", "it is not quick"
    real = end(start(*args, command=f"exec {sys.executable} script.py", RANK=3))
    assert real[2][0] == "False"
    # Of a traceback, the last line: it has more frames.
    assert (status, out, err[1:][-1:]) == (*real[:2], real[2][1:][-1:])
    assert json.loads(out)[0] == ["script.py", *args]


def test_other_variables_and_other_commands_get_the_real_one(start):
    assert end(start(HF_HUB_OFFLINE=1))[2] == ["False"]
    assert end(start(NNODES=2))[2] == ["True"]
    program = "import sys; print('torch' in sys.modules)"
    assert end(start(program, command="exec python -c"))[1] == "False\n"


def test_what_a_library_sets_in_the_tests_does_not_make_them_slow(start, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    assert end(start())[2] == ["True"]


def test_a_crash_while_the_interpreter_exits_is_seen(start):
    """Even after the script has set its exit status."""
    status, _, err = end(start("crash"))
    assert (status, err) == (-signal.SIGABRT, ["True"])


def test_it_has_as_many_threads_as_it_was_told(start):
    assert end(start("threads", OMP_NUM_THREADS=3))[1].splitlines()[-1] == "3"


def test_signals_reach_it_and_its_own_end_is_seen(start, tmp_path):
    assert end(start("killed"))[0] == -signal.SIGKILL
    process = start("wait")
    wait_for_file(tmp_path / "pid", lambda: process.poll() is None)
    process.terminate()
    assert end(process)[0] == -signal.SIGTERM
    ignoring = "trap '' USR1; exec python script.py"
    assert "\nTrue\n" in end(start("ignored", command=ignoring))[1]
    assert "\nTrue\n" in end(start("ignored", command=ignoring, HF_HUB_OFFLINE=1))[1]
    assert "\nFalse\n" in end(start("ignored"))[1]


def test_a_signal_that_it_was_started_to_ignore_can_be_handled(start, tmp_path):
    """As a job's shell ignores USR1, and the training below it does not."""
    process = start("wait", "handled", command="trap '' USR1; exec python script.py")
    wait_for_file(tmp_path / "pid", lambda: process.poll() is None)
    process.send_signal(signal.SIGUSR1)
    assert end(process)[0] == 75


def test_it_is_where_its_command_is(start, tmp_path):
    """As on a node of the local cluster, with a name, a network and mounts of its own."""
    unshare = ["unshare", "--uts", "--net", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs root and namespaces")
    (tmp_path / "mounted").mkdir()
    inside = "hostname elsewhere; mount -n -t tmpfs none mounted; touch mounted/file; exec python"
    command = f"exec {' '.join(unshare)} bash -c '{inside} script.py \"$@\"' bash"
    _, out, err = end(start("where", command=command))
    assert err == ["True"]
    _, real, err = end(start("where", command=command, HF_HUB_OFFLINE=1))
    assert err == ["False"] and out == real
    assert out.splitlines()[1] == "elsewhere" and "mounted/file" in out
    # Its number is another one where it starts a process than where it is known.
    assert end(start(command="exec unshare --pid --fork python script.py"))[2] == ["False"]


def test_it_imports_what_python_imports_by_itself(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.stderr.write(sys.orig_argv[-1])")
    for variables in ({}, {"HF_HUB_OFFLINE": 1}):
        _, _, err = end(start("hook", PYTHONPATH=tmp_path, **variables))
        assert err == [f"hook{not variables}"]


def test_it_dies_with_the_command(start, tmp_path):
    process = start("wait")
    wait_for_file(tmp_path / "pid", lambda: process.poll() is None)
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    end(process)
    Cluster.until(lambda: not Path(f"/proc/{pid}").exists(), "it is dead")


def test_torchrun_and_its_ranks_are_quick(start):
    command = "exec torchrun --standalone --nproc-per-node 2 script.py"
    status, out, err = end(start("none", command=command))
    assert status == 0  # else torchrun ends one because of the other
    ranks = [json.loads(line)[3]["RANK"] for line in out.splitlines()]
    assert sorted(ranks) == ["0", "1"] and err.count("True") == 2
    assert (quick_commands() / "torchrun").exists()


def test_where_there_are_gpus_the_interpreter_is_the_real_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert quick_commands() == Path(sys.executable).parent


def test_the_real_interpreter_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("REAL_PYTHON", "1")
    assert quick_commands() == Path(sys.executable).parent

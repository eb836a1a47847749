"""An interpreter that is there at once, for tests that start the guide's commands as a reader does.

A start of Python takes four seconds of processor time before a script's first line, nearly all to
import PyTorch and transformers. `commands` makes a `python` and a `torchrun` that have a server do
it: it has imported them once, and forks. Arguments, folder, environment, streams, signals, exit
status and network are those of the command. Where the environment differs in a variable that a
library may have read already, where something but a script or torchrun is to be run, torchrun in a
job of Slurm, or a command in yet other namespaces, the real interpreter is started. The parent of a
process, its group, limits and further files are the server's: tests that are about those, or that
kill processes, ask for the real one themselves.
"""

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import random
import re
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

# Variables that Python or a library reads once, when it starts or is imported.
READ_ONCE = re.compile(
    "(TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|ATEN|MKL|ONEDNN|DNNL|KMP|GOMP|OMP|OPENBLAS|CUDA|HF"
    "|HUGGINGFACE|TRANSFORMERS|DATASETS|TOKENIZERS|USE|LD)_.*|PYTHON[A-Z]+|HOME"
)
READ_LATER = re.compile(
    "TORCH_NCCL_ASYNC_ERROR_HANDLING|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|CUDA_VISIBLE_DEVICES"
    "|OMP_(NUM_THREADS|WAIT_POLICY)|PYTHON(PATH|WARNINGS|UNBUFFERED|DONTWRITEBYTECODE)"
)
TORCHRUN = ["-m", "torch.distributed.run"]
MODULES = [TORCHRUN, ["-m", "common.distributed"]]
FORWARDED = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]

# What a command starts in place of the interpreter; -I and -S: nothing of the environment's.
CLIENT = """#!{python} -IS
import os, signal, socket, sys
args = {before} + sys.argv[1:]
real = [{python!r}, *args]
script = args[1:] if args[:1] == ["-u"] else args
if not (script[:1] and script[0].endswith(".py") or script[:2] in {modules}):
    os.execv(real[0], real)
mask = signal.pthread_sigmask(signal.SIG_BLOCK, {forwarded})  # until it is clear who gets them
import json
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
ignored = [n for n in {forwarded} if signal.getsignal(n) == signal.SIG_IGN]
request = dict(args=args, folder=os.getcwd(), environment=dict(os.environ), ignored=ignored)
socket.send_fds(server, [b"\\n"], [0, 1, 2])
server.sendall(json.dumps(request).encode() + b"\\n")
answers = server.makefile()
if answers.readline() == "not here\\n":
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.execv(real[0], real)
def forward(number, _):
    try:
        server.send(bytes([number]))
    except OSError:
        pass  # it has ended
for number in {forwarded}:
    signal.signal(number, forward)
signal.pthread_sigmask(signal.SIG_SETMASK, mask)
status = int(answers.readline() or 1)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextlib.contextmanager
def commands(environment: dict[str, str]) -> Iterator[Path]:
    """Give a folder with a `python` and a `torchrun`, for processes with about this environment.

    torchrun starts its ranks with the first, where PYTHON_EXEC says so.
    """
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        address = f"{folder}/server"
        for name, before in {"python": [], "torchrun": TORCHRUN}.items():
            client = Path(folder, name)
            client.write_text(
                CLIENT.format(
                    python=sys.executable,
                    before=before,
                    modules=MODULES,
                    address=address,
                    forwarded=[int(number) for number in FORWARDED],
                )
            )
            client.chmod(0o755)
        # It ends with this process, whichever way that ends: its input is closed then.
        command = [sys.executable, __file__, address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        server = subprocess.Popen(command, env=environment, text=True, **pipes)
        try:
            assert server.stdout.readline() == "ready\n"
            yield Path(folder)
        finally:
            server.stdin.close()
            server.wait()


def serve(address: str) -> None:
    """Fork for whoever asks, until the standard input is closed."""
    before = dict(os.environ)
    import datasets  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.launcher.api  # noqa: F401  what torchrun imports, not torchrun
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    assert "common" not in sys.modules  # a test may run another copy of it
    gc.freeze()  # what is here to stay: no child looks through it, or copies its pages, for garbage
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        print("ready", flush=True)
        while True:
            ready, *_ = select.select([listening, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                keep(connection, before)
            connection.close()


def keep(connection: socket.socket, before: dict[str, str]) -> NoReturn:
    """Fork the process that the client stands for; pass on signals to it, and its end.

    before: the environment in which the libraries were imported.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, fds, *_ = socket.recv_fds(connection, 1, 3)
    text = b""
    while b"\n" not in text:
        text += connection.recv(2**16) or os._exit(1)
    text, _, signals = text.partition(b"\n")
    request = json.loads(text)
    asked = request["environment"]
    different = {key for key in {*before, *asked} if before.get(key) != asked.get(key)}
    # Slurm finds by their parents whom to send a signal, and torchrun's ranks below torchrun.
    followed = request["args"][:2] == TORCHRUN and "SLURM_JOB_ID" in asked
    read = any(READ_ONCE.fullmatch(k) and not READ_LATER.fullmatch(k) for k in different)
    if followed or read or not enter_namespaces(connection):
        connection.sendall(b"not here\n")
        os._exit(0)
    for number in request.pop("ignored"):
        signal.signal(number, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        connection.close()
        become(fds, **request)
    for fd in fds:
        os.close(fd)
    ended = os.pidfd_open(child)
    connection.sendall(b"here\n")
    while True:
        for number in signals:
            signal.pidfd_send_signal(ended, number)
        if ended in select.select([connection, ended], [], [])[0]:
            break
        # Nothing: the client is dead, and so is what it stands for.
        signals = connection.recv(64) or [signal.SIGKILL]
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def enter_namespaces(connection: socket.socket) -> bool:
    """Be where the client is, as on a node of the local cluster; return whether that can be."""
    numbers = struct.Struct("3i")  # its process, user and group
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, numbers.size)
    theirs, ours = Path(f"/proc/{numbers.unpack(peer)[0]}/ns"), Path("/proc/self/ns")
    different = {
        path.name for path in ours.iterdir() if path.readlink() != (theirs / path.name).readlink()
    }
    if not different <= {"net", "uts", "mnt"}:
        return False
    entered = [(theirs / name).open() for name in different]  # all, before /proc is another one
    return all(ctypes.CDLL(None).setns(file.fileno(), 0) == 0 for file in entered)


def become(fds: list[int], args: list[str], folder: str, environment: dict) -> NoReturn:
    """Be the interpreter that was called with these arguments."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(folder)
    given = environment.get("PYTHONPATH", "").split(":")
    sys.path[1:1] = [path for path in given if path and path not in sys.path]
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    tempfile.tempdir = None  # TMPDIR may be another one
    threads = environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    sys.modules["torch"].set_num_threads(int(threads))
    if filters := environment.get("PYTHONWARNINGS"):
        warnings._processoptions(filters.split(","))
    sys.orig_argv = [sys.executable, *args]
    sys.modules.pop("sitecustomize", None)
    if importlib.util.find_spec("sitecustomize"):
        importlib.import_module("sitecustomize")
    if args[0] == "-u":
        args = args[1:]
        sys.stdout.reconfigure(write_through=True)
    # From here on the process ends as the real one does: an exception reaches the interpreter,
    # which prints it, calls atexit functions and finalizes.
    if args[0] == "-m":
        sys.argv, sys.path[0] = args[1:], folder
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = args, str(Path(args[0]).resolve().parent)
        runpy.run_path(args[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    serve(sys.argv[1])

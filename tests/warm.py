"""An interpreter that is there at once, for tests that start the guide's commands as a reader does.

A start of Python takes four seconds of processor time before a script's first line, nearly all to
import PyTorch and transformers. `commands` makes a `python` and a `torchrun` that have a server do
it: it has imported them once, and forks. All else of a process is as ever: arguments, folder,
environment, streams, signals, exit status. Where the environment differs in a variable that a
library may have read already, or something but a script or torchrun is to be run, the real
interpreter is started. So it is for tests of processes and networks: they do not use this.
"""

import atexit
import contextlib
import json
import os
import random
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

# Read when they are needed, and so free to differ from those of the server.
FREE = re.compile(
    "RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_.*|MASTER_.*|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING"
    "|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|CUDA_VISIBLE_DEVICES|NPROC_PER_NODE|NNODES|HEAD"
    "|MAX_RESTARTS|LAST_CALL|LAUNCH_.*|PYTHON|PYTHON_EXEC|VIRTUAL_ENV|PATH|PWD|OLDPWD|SHLVL|_"
    "|MAKE.*|MFLAGS|PYTEST_CURRENT_TEST"
)
TORCHRUN = ["-m", "torch.distributed.run"]
MODULES = [TORCHRUN, ["-m", "common.plan"]]
FORWARDED = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]

# What a command starts in place of the interpreter; -I and -S: nothing of the environment's.
CLIENT = """#!{python} -IS
import os, signal, socket, sys
args = {before} + sys.argv[1:]
real = [{python!r}, *args]
script = args[1:] if args[:1] == ["-u"] else args
if not (script[:1] and script[0].endswith(".py") or script[:2] in {modules}):
    os.execv(real[0], real)
import json
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
ignored = [n for n in {forwarded} if signal.getsignal(n) == signal.SIG_IGN]
request = dict(args=args, folder=os.getcwd(), environment=dict(os.environ), ignored=ignored)
socket.send_fds(server, [b"\\n"], [0, 1, 2])
server.sendall(json.dumps(request).encode() + b"\\n")
for number in set({forwarded}) - set(ignored):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
answer = server.makefile().readline()
if answer == "not here\\n":
    os.execv(real[0], real)
status = int(answer or 1)
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
    if not any(Path(path, "sitecustomize.py").exists() for path in python_path(asked)):
        different.discard("PYTHONPATH")
    if not all(map(FREE.fullmatch, different)):
        connection.sendall(b"not here\n")
        os._exit(0)
    child = os.fork()
    if child == 0:
        connection.close()
        become(fds, **request)
    for fd in fds:
        os.close(fd)
    ended = os.pidfd_open(child)
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


def python_path(environment: dict[str, str]) -> list[str]:
    return [path for path in environment.get("PYTHONPATH", "").split(":") if path]


def become(
    fds: list[int], args: list[str], folder: str, environment: dict, ignored: list[int]
) -> NoReturn:
    """Be the interpreter that was called with these arguments."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(folder)
    sys.path[1:1] = [path for path in python_path(environment) if path not in sys.path]
    os.environ.clear()
    os.environ.update(environment)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    random.seed()
    if args[0] == "-u":
        args = args[1:]
        sys.stdout.reconfigure(write_through=True)
    status = 0
    try:
        if args[0] == "-m":
            sys.argv, sys.path[0] = args[1:], folder
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = args, str(Path(args[0]).resolve().parent)
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])

"""Run a chapter in processes of its own, note what it trains on, and kill it where a test says.

Children come from a server that has imported PyTorch already: half a second each, not six. They run
a chapter, or any script as `python` would. Those of a Series run many configurations, one after the
other.
"""

import atexit
import contextlib
import gc
import importlib.util
import json
import logging
import multiprocessing
import os
import random
import resource
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import datasets  # noqa: F401  what a run imports is imported once, by the server
import torch
import torch.distributed.fsdp
import torch.distributed.optim
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401
from torch.distributed import TCPStore
from torch.distributed.checkpoint import filesystem
from torch.optim.optimizer import register_optimizer_step_post_hook

from common import checkpoint, data, launch, ranks, storage

ROOT = Path(__file__).parents[1]
StoreFileSystem = type(checkpoint.FsspecReader("memory://").fs)
# Of a save: before and after settings.json, in the middle of the files, before .metadata gets its
# name, before `newest` names the new checkpoint, and when an older one has lost its .metadata.
# Each is just before the n-th call of these functions in that save.
SAVE_STAGES = {
    "begun": [(checkpoint, "complete_checkpoints", 1)],
    "settings": [(checkpoint, "writer_of", 1)],
    "writing": [(filesystem, "_write_item", 5)],
    # Of a folder, and of a store.
    "written": [(kind, "rename", 1) for kind in (filesystem.FileSystem, StoreFileSystem)],
    "complete": [(checkpoint.Checkpoints, "_commit", 1)],
    "deleting": [(storage, "remove_folder", 1)],
}


def start(args: list[object], **options: object) -> multiprocessing.Process:
    """Start a chapter with these arguments in one process; see _child for the options."""
    arguments = [str(arg) for arg in args]
    process = server_context().Process(target=_child, args=(arguments,), kwargs=options)
    process.start()
    return process


def server_context() -> multiprocessing.context.ForkServerContext:
    """Return the context whose children come from a server that has imported this module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["runner"])
    # The server looks for the module here and, before Python 3.13, not in this process's sys.path.
    own = {"PYTHONPATH": str(Path(__file__).parent), "CUDA_VISIBLE_DEVICES": ""}
    with mock.patch.dict(os.environ, own):
        forkserver.ensure_running()
    return context


def ask_ranks(world_size: int, target: Callable[..., None], *arguments: object) -> list:
    """Call target(rank, *arguments, queue) in a process for each rank; return the answers by rank.

    Each puts (rank, answer) on the queue. What it puts must be copied: the process may be gone when
    it is read.
    """
    context = server_context()
    queue = context.Queue()
    for rank in range(world_size):
        context.Process(target=target, args=(rank, *arguments, queue)).start()
    found = dict(queue.get(timeout=900) for _ in range(world_size))
    return [found[rank] for rank in range(world_size)]


def load_script(path: Path):
    """Import a script by its path, anew each time; it finds the modules of its own folder.

    Modules with the same names may have been imported from a copy of that folder.
    """
    sys.path[:] = [str(path.parent), *(each for each in sys.path if each != str(path.parent))]
    for module in path.parent.glob("*.py"):
        if getattr(sys.modules.get(module.stem), "__file__", None) != str(module):
            sys.modules.pop(module.stem, None)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def place_of(rank: int, world_size: int) -> dict[str, object]:
    """Return what torchrun tells a rank, less the port; another process serves the store."""
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": 0,
    }


class Ranks:
    """One process for each rank of a run, as torchrun starts them: from chapter 2 on.

    args and options as for `start`; an option that is a list has a value for each rank.
    """

    def __init__(self, world_size: int, args: list[object], **options: object) -> None:
        # As torchrun does: this process serves the store, so that no port is taken before its use.
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.processes = []
        for rank in range(world_size):
            own = _of_rank(options, rank)
            place = {**place_of(rank, world_size), "MASTER_PORT": self.store.port}
            place |= own.pop("env", {})
            self.processes.append(start(args, env=place, **own))

    def finish(self, timeout: float = 900) -> list[int]:
        """Wait for all ranks and return their exit statuses."""
        return [finish(process, timeout) for process in self.processes]


class Series:
    """Runs of several configurations, one after the other by the same ranks: one start for all.

    runs: by name, what _run_in_series takes. The processes are new ones after a run that failed.
    env: to set before the start, of each rank a dictionary. in_shell: start an interpreter for each
    rank instead of a child of the server, as GPUs need it.
    """

    def __init__(
        self,
        world_size: int,
        runs: dict[str, dict[str, object]],
        folder: Path,
        env: list[dict[str, object]] | None = None,
        in_shell: bool = False,
    ) -> None:
        context = multiprocessing.get_context("spawn") if in_shell else server_context()
        folder.mkdir(parents=True, exist_ok=True)
        self.ended: list[str] = []  # the runs that came to their end
        left = list(runs)
        while left:
            stores = [
                TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in left
            ]
            files = [folder / f"ended-{len(left)}-{rank}" for rank in range(world_size)]
            processes = []
            for rank, file in enumerate(files):
                file.touch()
                place = place_of(rank, world_size) | (env[rank] if env else {})
                place = {key: str(value) for key, value in place.items()}
                own = [
                    {"name": name, "port": store.port, **_of_rank(runs[name], rank)}
                    for name, store in zip(left, stores, strict=True)
                ]
                processes.append(context.Process(target=_series_main, args=(own, place, file)))
                with mock.patch.dict(os.environ, place):  # what an interpreter reads at its start
                    processes[-1].start()
            _wait_for_all(processes, 900 * len(left))
            done = min(len(file.read_text().splitlines()) for file in files)
            self.ended += left[:done]
            left = left[done + 1 :]  # the next one failed

    def assert_ended(self, name: str) -> None:
        assert name in self.ended, "the run failed: see stderr"


def _of_rank(options: dict[str, object], rank: int) -> dict[str, object]:
    """Return the options of a rank: one that is a list, but the arguments, has a value for each."""
    return {k: v[rank] if isinstance(v, list) and k != "args" else v for k, v in options.items()}


def _wait_for_all(processes: list[multiprocessing.Process], timeout: float) -> None:
    """Wait until all have ended; from the first failure on, for some seconds only."""
    deadline = time.monotonic() + timeout
    while any(process.exitcode is None for process in processes):
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + 10)
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
                process.join()
        time.sleep(0.05)


def _series_main(runs: list[dict], env: dict[str, str], ended: Path) -> None:
    """Do all runs; after each, add its name to the file `ended`."""
    os.chdir(ROOT)
    os.environ |= env
    for run in runs:
        try:
            _run_in_series(**run)
        except BaseException:  # SystemExit too: no run here may end in a status but 0
            print(f"In {run['name']}, rank {env['RANK']}:", file=sys.stderr)
            traceback.print_exc()
            os._exit(1)
        with ended.open("a") as file:
            file.write(f"{run['name']}\n")
    os._exit(0)


def _run_in_series(
    name: str,
    port: int,
    args: list[object],
    chapter: str = "01-single-gpu",
    samples_file: str | None = None,
    within: Callable[[], contextlib.AbstractContextManager] | None = None,
    expect: int = 0,
    stderr_file: str | None = None,
) -> None:
    """Run one configuration and leave the process as it was.

    port: of the store. args, chapter, samples_file: as for _child. within: returns a context in
    which to run: what it plants or notes, it takes away again. expect: the status with which the
    script must end on this rank. With another status than 0, all ranks must end by themselves,
    without waiting for each other. stderr_file: gets what is printed, an error's traceback too.
    """
    sys.argv = [f"{chapter}/train_llm.py", *map(str, args)]
    random.seed(12345)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, MASTER_PORT=str(port)))
        stack.enter_context(stop_handlers_kept())
        stack.enter_context(mock.patch.object(launch, "_exit", sys.exit))  # this process goes on
        stack.enter_context(mock.patch.object(ranks, "HEAD_START_S", 0.0))
        if samples_file:
            stack.enter_context(_note_samples(Path(samples_file)))
        if within:
            stack.enter_context(within())
        if stderr_file:
            file = stack.enter_context(Path(stderr_file).open("w"))
            stack.enter_context(contextlib.redirect_stderr(file))
        try:
            launch.run(load_script(ROOT / chapter / "train_llm.py").main)
        except SystemExit as error:
            assert error.code == expect, f"the status is {error.code}"
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    logging.getLogger().handlers.clear()
    torch.set_default_device(None)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.enable()
    gc.collect()


@contextlib.contextmanager
def stop_handlers_kept() -> Iterator[None]:
    """Afterwards, the signals that a script handles have the handlers that they had before."""
    handlers = {number: signal.getsignal(number) for number in launch.signals_to_handle()}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def finish(process: multiprocessing.Process, timeout: float = 900) -> int:
    """Wait for a child and return its exit status, negative for a signal."""
    process.join(timeout)
    assert process.exitcode is not None, "the run did not end in time"
    return process.exitcode


def _child(
    args: list[str],
    chapter: str = "01-single-gpu",
    script: str | None = None,
    env: dict[str, object] | None = None,
    plant: Callable[[], None] | None = None,
    samples_file: str | None = None,
    stdout_file: str | None = None,
    stderr_file: str | None = None,
    kill_after_steps: int | None = None,
    signals_after_steps: tuple[int, list[int]] | None = None,
    kill_in_save: tuple | None = None,
    file_size_limit: int | None = None,
) -> None:
    """Run a script as `python` would.

    chapter: the folder of the script train_llm.py, in the repository or absolute.
    script: instead of a chapter, the path of any script.
    env: variables to set.
    plant: called before the script runs, to plant a bug or a delay.
    samples_file: gets the indices of every optimizer step's samples, a JSON list a line.
    stdout_file, stderr_file: get what this process and its children print.
    kill_after_steps: SIGKILL after so many optimizer steps of this process.
    signals_after_steps: (n, signals): after n optimizer steps this process sends itself these.
    kill_in_save: (n, stage, action): at this stage of the n-th save of this process, SIGKILL or the
        action.
    file_size_limit: bytes that a file may have, as if the disk were full beyond.
    """
    os.chdir(ROOT)
    os.environ |= {key: str(value) for key, value in (env or {}).items()}
    # A shell starts what it puts in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in ((1, stdout_file), (2, stderr_file)):
        if file:
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    random.seed(12345)  # the state a run must not depend on
    if samples_file:
        _note_samples(Path(samples_file)).__enter__()
    if kill_after_steps:
        after_steps(kill_after_steps, _kill)
    if signals_after_steps:
        steps, signals = signals_after_steps
        after_steps(steps, lambda: [os.kill(os.getpid(), number) for number in signals])
    if kill_in_save:
        _kill_in_save(*kill_in_save)
    if plant:
        plant()
    if file_size_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path = ROOT / (script or f"{chapter}/train_llm.py")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count()))
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception:
        # As the interpreter ends; multiprocessing would wait for a script's processes instead.
        traceback.print_exc()
        atexit._run_exitfuncs()
        os._exit(1)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def _nth_time(nth: int, action: Callable[[], object]) -> Callable[..., None]:
    """Return a function that calls the action when it is called for the n-th time."""
    calls = count(1)

    def function(*_: object) -> None:
        if next(calls) == nth:
            action()

    return function


def after_steps(steps: int, action: Callable[[], object]) -> None:
    """Call the action after so many optimizer steps; to load a checkpoint is a step as well."""
    register_optimizer_step_post_hook(_nth_time(steps, action))


@contextlib.contextmanager
def _note_samples(path: Path) -> Iterator[None]:
    seen: list[int] = []
    original = data.Sequences.__getitems__

    def getitems(self: data.Sequences, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        if torch.is_grad_enabled():  # not in the evaluation
            seen.extend(indices)
        return original(self, indices)

    def write(*_: object) -> None:
        if not seen:  # loading a checkpoint primes the optimizer with a step of no samples
            return
        with path.open("a") as file:
            file.write(json.dumps(seen) + "\n")
        seen.clear()

    data.Sequences.__getitems__ = getitems
    handle = register_optimizer_step_post_hook(write)
    yield
    handle.remove()
    data.Sequences.__getitems__ = original


def _kill_in_save(nth: int, stage: str, action: Callable[[], object] = _kill) -> None:
    def begin() -> None:
        for place in SAVE_STAGES[stage]:
            _at_call(*place, action)

    _at_call(checkpoint.Checkpoints, "_prepare", nth, begin)


def _at_call(owner: object, name: str, call: int, action: Callable[[], object]) -> None:
    """Do the action before this call of a function or a method."""
    original, before = getattr(owner, name), _nth_time(call, action)

    def function(*args: object, **kwargs: object) -> object:
        before()
        return original(*args, **kwargs)

    setattr(owner, name, function)


if "pytest" not in sys.modules:
    gc.freeze()  # in the server: no child looks through what it imported, or copies it, for garbage

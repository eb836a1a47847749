"""Run a chapter in a process of its own, note what it trains on, and kill it where a test says.

Children come from a server that has imported PyTorch already: half a second each, not six.
"""

import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import torch
import torch.distributed.optim  # imported once, by the server
import transformers  # noqa: F401
from torch.distributed import TCPStore
from torch.distributed.checkpoint import filesystem
from torch.optim.optimizer import register_optimizer_step_post_hook

from common import checkpoint, data, launch, record

ROOT = Path(__file__).parents[1]
SAVE_STAGES = ("writing", "written", "renamed", "committed")


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
    before = dict(os.environ)
    # The server looks for the module here and, before Python 3.13, not in this process's sys.path.
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # children are CPU processes
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(before)
    return context


def load_script(path: Path):
    """Import a script by its path, anew each time."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ranks:
    """One process for each rank of a run, as torchrun starts them: from chapter 2 on.

    args and options as for `start`; an option that is a list has a value for each rank.
    """

    def __init__(self, world_size: int, args: list[object], env=(), **options: object) -> None:
        # As torchrun does: this process serves the store, so that no port is taken before its use.
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.processes = []
        for rank in range(world_size):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": self.store.port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": 0,
            }
            own = {key: v[rank] if isinstance(v, list) else v for key, v in options.items()}
            self.processes.append(start(args, env={**place, **dict(env)}, **own))

    def finish(self, timeout: float = 120) -> list[int]:
        """Wait for all ranks and return their exit statuses."""
        return [finish(process, timeout) for process in self.processes]


def finish(process: multiprocessing.Process, timeout: float = 120) -> int:
    """Wait for a child and return its exit status, negative for a signal."""
    process.join(timeout)
    assert process.exitcode is not None, "the run did not end in time"
    return process.exitcode


def _child(
    args: list[str],
    chapter: str = "01-single-gpu",
    env: dict[str, object] | None = None,
    plant: Callable[[], None] | None = None,
    samples_file: str | None = None,
    stderr_file: str | None = None,
    pause: float = 0.0,
    kill_after_steps: int | None = None,
    signals_after_steps: tuple[int, list[int]] | None = None,
    kill_in_save: tuple[int, str] | None = None,
    interrupt_in_save: int | None = None,
    file_size_limit: int | None = None,
) -> None:
    """chapter: the folder of the script, in the repository or absolute.
    env: variables to set.
    plant: called before the script runs, to plant a bug or a delay.
    samples_file: gets the indices of every optimizer step's samples, a JSON list a line.
    pause: seconds to sleep after every optimizer step, for a test that must hit the run.
    kill_after_steps: SIGKILL after so many optimizer steps of this process.
    signals_after_steps: (n, signals): after n optimizer steps this process sends itself these.
    kill_in_save: (n, stage): SIGKILL at this stage of the n-th save of this process.
    interrupt_in_save: n: Ctrl-C while the n-th save of this process writes.
    file_size_limit: bytes that a file may have, as if the disk were full beyond.
    """
    os.chdir(ROOT)
    os.environ |= {key: str(value) for key, value in (env or {}).items()}
    # A shell starts what it puts in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if stderr_file:
        sys.stderr = open(stderr_file, "w", buffering=1)  # noqa: PTH123, SIM115
    random.seed(12345)  # the state a run must not depend on
    if samples_file:
        _note_samples(Path(samples_file))
    if pause:
        register_optimizer_step_post_hook(lambda *_: time.sleep(pause))
    if kill_after_steps:
        after_steps(kill_after_steps, _kill)
    if signals_after_steps:
        steps, signals = signals_after_steps
        after_steps(steps, lambda: [os.kill(os.getpid(), number) for number in signals])
    if kill_in_save:
        _kill_in_save(*kill_in_save)
    if interrupt_in_save:
        _kill_in_save(interrupt_in_save, "writing", action=_interrupt)
    if plant:
        plant()
    if file_size_limit:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.argv = [f"{chapter}/train_llm.py", *args]
    launch.run(load_script(ROOT / chapter / "train_llm.py").main)


def _kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def after_steps(count: int, action: Callable[[], object]) -> None:
    """Call the action after so many optimizer steps; to load a checkpoint is a step as well."""
    done = 0

    def hook(*_: object) -> None:
        nonlocal done
        done += 1
        if done == count:
            action()

    register_optimizer_step_post_hook(hook)


def _note_samples(path: Path) -> None:
    seen: list[int] = []
    original = data.Blocks.__getitem__

    def getitem(self: data.Blocks, index: int) -> dict[str, torch.Tensor]:
        if not torch.is_inference_mode_enabled() and torch.is_grad_enabled():
            seen.append(index)
        return original(self, index)

    def write(*_: object) -> None:
        if not seen:  # loading a checkpoint primes the optimizer with a step of no samples
            return
        with path.open("a") as file:
            file.write(json.dumps(seen) + "\n")
        seen.clear()

    data.Blocks.__getitem__ = getitem
    register_optimizer_step_post_hook(write)


def _kill_in_save(nth: int, stage: str, action=_kill) -> None:
    saves = 0
    save = checkpoint.dcp.save

    def counting_save(*args: object, **kwargs: object) -> object:
        nonlocal saves
        saves += 1
        if saves == nth:
            if stage == "writing":
                _at_call(filesystem, "_write_item", 5, action)
            if stage == "written":
                _at_call(checkpoint, "commit_checkpoint", 1, action)
            if stage == "renamed":
                # state.json is written before the renaming too where that replaces a folder.
                stale = kwargs["checkpoint_id"].name[len(".unfinished-") :]
                named = stale in (kwargs["checkpoint_id"].parents[1] / "state.json").read_text()
                _at_call(record.json, "dump", 2 if named else 1, action)
            if stage == "committed":
                # Calls: a stale folder that may be in the way, then the one that is too many.
                _at_call(shutil, "rmtree", 2, action)
        return save(*args, **kwargs)

    checkpoint.dcp.save = counting_save


def _at_call(module, name: str, call: int, action) -> None:
    calls = 0
    original = getattr(module, name)

    def function(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            action()
        return original(*args, **kwargs)

    setattr(module, name, function)

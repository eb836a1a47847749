"""Every test is offline and leaves nothing behind: caches and runs go to temporary folders."""

import multiprocessing
import os
import tempfile

# Before any library that reads it is imported. A child of a test has its parent's.
if multiprocessing.current_process().name == "MainProcess":
    _cache = tempfile.TemporaryDirectory(prefix="test-cache-")
    os.environ["HF_HOME"] = _cache.name
os.environ["WANDB_MODE"] = "disabled"
# Threads cost more than they bring to models this small, most of all beside other processes.
os.environ["OMP_NUM_THREADS"] = "1"

import atexit
import contextlib
import functools
import itertools
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import warm
from cluster import ENVIRONMENT, cluster  # noqa: F401
from runner import load_script

from common.commit import finish_removal

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted(path.parent.name for path in ROOT.glob("[0-9][0-9]-*/train_llm.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
HIDES_GPUS = "CUDA_VISIBLE_DEVICES"


@pytest.hookimpl(tryfirst=True)  # pytest-xdist then sees the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine lacks, and say what it is.

    With pytest-xdist a process gets whole files, whose tests share what fixtures have started, and
    those with a cluster in two groups. What takes longest begins first.
    """
    longest = ("test_labs", "test_pages", "test_precision", "test_parity", "test_fsdp")
    longest += ("test_offline", "test_fault_lab", "test_compare", "test_training", "test_wandb")
    multi_node = ("test_local_cluster", "test_multi_node")
    on_cluster = {item.path for item in items if item.get_closest_marker("slurm")}
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: (item.path not in on_cluster, item.path.stem not in longest))
        for item in items:
            name = item.path.name
            if item.path in on_cluster:
                name = "multi-node" if item.path.stem in multi_node else "other on a cluster"
            item.add_marker(pytest.mark.xdist_group(name))
    gpus = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("multi_gpu") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


def launch_file(chapter: str) -> Path:
    """Return the launch file with which a chapter trains on this machine."""
    files = [ROOT / chapter / name for name in ("launch.sh", "launch_torchrun.sh")]
    (found,) = [file for file in files if file.exists()]
    return found


def first_then_slow(values: Iterable[object]) -> list:
    """Return chapters, or other values, to parametrize a test with.

    All but the first are left to `make test-all`. A tuple has a value for each parameter.
    """
    first, *others = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*first), *(pytest.param(*each, marks=pytest.mark.slow) for each in others)]


def float32(chapter: str) -> tuple[str, ...]:
    """Return the arguments with which a chapter computes in float32, as all before chapter 5 do."""
    return ("--precision", "fp32") if chapter >= "05" else ()


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# To replace in a chapter's script: all batches that it evaluates, at the end of a run too, by two.
EVALUATED_LITTLE = "for batch in dataloader:", "for _, batch in zip(range(2), dataloader):"


def replace_in(path: Path, right: str, wrong: str) -> None:
    """Replace a text that stands in a file once."""
    source = path.read_text()
    assert source.count(right) == 1, (path, right)
    path.write_text(source.replace(right, wrong))


def random_texts(count: int) -> list[str]:
    """Return documents of a few letters, the same ones each time."""
    letters = random.Random(0)
    return ["".join(letters.choice("abcdefgh \n") for _ in range(600)) for _ in range(count)]


def read_metrics(run_dir: Path, going_on: bool = False) -> list[dict]:
    """Return what a run has logged; while it goes on, without a line that is being written."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") or not going_on]


@functools.cache
def quick_commands() -> Path:
    """Return the folder of the `python` and `torchrun` that need not import PyTorch, of warm.py.

    Of the real ones where there are GPUs: what has asked CUDA for them, as torchao does when
    transformers imports it, can fork nothing that uses them.
    """
    if sys.platform != "linux" or torch.cuda.is_available():
        return Path(sys.executable).parent
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(warm.commands(ENVIRONMENT))


def quick(**env: object) -> dict[str, str]:
    """Return an environment in which a reader's commands find them first, with these variables.

    It has none of those that a library, imported by a test, has set in this process.
    """
    folder = quick_commands()
    hidden = {HIDES_GPUS: os.environ[HIDES_GPUS]} if HIDES_GPUS in os.environ else {}
    return {
        **ENVIRONMENT,
        **hidden,
        "PATH": f"{folder}:{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}",
        "PYTHON_EXEC": f"{folder}/python",
        "VIRTUAL_ENV": sys.prefix,  # launch files take `python` then
        **{key: str(value) for key, value in env.items()},
    }


def run_script(*args: object, timeout: float = 600, **env: object) -> subprocess.CompletedProcess:
    """Run `python ARGS` from the repository's root, as a reader does."""
    return subprocess.run(
        [f"{quick_commands()}/python", *map(str, args)],
        cwd=ROOT,
        env=quick(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def wait_for_file(path: Path, running: Callable[[], bool], timeout: float = 300) -> None:
    """Wait until a run that is `running` has written this file."""
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert running(), f"the run ended without {path}"
        assert time.monotonic() < deadline, f"no {path} in time"
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def hide_gpus(request, monkeypatch):
    """Tests without the marker see no GPU: they compare what a CPU computes, to the last digit."""
    if not any(map(request.node.get_closest_marker, ("gpu", "multi_gpu"))):
        monkeypatch.setenv(HIDES_GPUS, "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def write_corpus(folder: Path) -> Path:
    """Return a file of text for some tens of steps of 6 sequences of 32 tokens."""
    path = folder / "corpus.json"
    path.write_text(json.dumps([f"Text number {n}, of many words. " * 20 for n in range(50)]))
    return path


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_corpus(tmp_path)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that runs chapter 1 in this process and returns the metrics it wrote.

    Of the built-in corpus it evaluates two batches, if not told to evaluate as much as a reader's
    run does: that would take longer than a test's few steps.
    """

    def run(
        *args: object, name: str = "run", chapter: str = "01-single-gpu", whole: bool = False
    ) -> list[dict]:
        argv = ["train_llm.py", *args, "--save-dir", tmp_path, "-e", name]
        monkeypatch.setattr(sys, "argv", [str(arg) for arg in argv])
        script = load_script(ROOT / chapter / "train_llm.py")
        if not whole and "-d" not in args:
            evaluate = script.evaluate

            def evaluate_little(model: torch.nn.Module, batches: Iterable, *others: object) -> dict:
                return evaluate(model, list(itertools.islice(batches, 2)), *others)

            monkeypatch.setattr(script, "evaluate", evaluate_little)
        script.main()
        finish_removal()
        return read_metrics(tmp_path / name)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)

"""What all tests share. Every test is offline, and the test session leaves nothing behind.

All temporary files of a session, of its workers and of every process that a test starts are in one
folder, which is removed when the session ends.
"""

import multiprocessing
import os
import tempfile

# Libraries read these variables when they are imported. Workers and children inherit them.
if (
    "PYTEST_XDIST_WORKER" not in os.environ
    and multiprocessing.current_process().name == "MainProcess"
):
    _session_folder = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
    os.environ["TMPDIR"] = tempfile.tempdir = _session_folder.name
    os.environ["HF_HOME"] = f"{_session_folder.name}/huggingface"
os.environ["WANDB_MODE"] = "disabled"
# More threads slow down models this small. `OMP_NUM_THREADS=4 make test` tests another number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads sleep while they wait for others. By default they spin, and ranks that share a core then
# take many times longer.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import atexit
import collections
import contextlib
import functools
import itertools
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import warm
from cluster import ENVIRONMENT, cluster  # noqa: F401
from runner import load_script

from common import distributed

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted(path.parent.name for path in ROOT.glob("[0-9][0-9]-*/train_llm.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
HIDES_GPUS = "CUDA_VISIBLE_DEVICES"
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # of pytest-xdist


def pytest_configure() -> None:
    """Let SIGTERM end a session as Ctrl-C does, so that nothing is left behind."""
    if not IS_WORKER:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for `-n auto`: one more than cores, since tests also wait."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else os.cpu_count()


def pytest_unconfigure() -> None:
    """End what an interrupted session has left running; its folder is removed at exit."""
    if IS_WORKER:
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            started_here = process.environ().get("TMPDIR") == _session_folder.name
            if started_here and process.pid != os.getpid():
                process.kill()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many of the commands on pages were run; test_pages.py records it."""
    counts = collections.Counter(
        what
        for report in terminalreporter.stats.get("passed", [])
        for name, done in report.user_properties
        if name == "commands on pages"
        for what in done
    )
    if counts:
        parts = (f"{number} {what}" for what, number in counts.most_common())
        terminalreporter.write_line(f"commands on pages: {', '.join(parts)}")


# The modules that take longest start first, so that no worker is left alone with one at the end.
LONGEST = (
    "test_labs",
    "test_pages",
    "test_precision",
    "test_fsdp",
    "test_parity",
    "test_fault_lab",
    "test_tensor_parallel",
)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m, and before xdist forms groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests into their tiers and groups, and skip those that need what this machine lacks."""
    gpus = torch.cuda.device_count()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if item.name.startswith("test_planted") and "check" not in marks:
            item.add_marker("planted")
        if "gpu" in marks and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if "multi_gpu" in marks and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
        # The tests of a module run in one worker: they share what its fixtures have started.
        item.add_marker(pytest.mark.xdist_group(item.path.stem))
    on_cluster = {item.path for item in items if item.get_closest_marker("slurm")}
    items.sort(key=lambda item: (item.path not in on_cluster, item.path.stem not in LONGEST))


def launch_file(chapter: str) -> Path:
    """Return the launch file with which a chapter trains on this machine."""
    files = [ROOT / chapter / name for name in ("launch.sh", "launch_torchrun.sh")]
    (found,) = [file for file in files if file.exists()]
    return found


def first_then_slow(values: Iterable[object]) -> list:
    """Return values to parametrize a test with; all but the first are slow.

    A tuple has a value for each parameter.
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
EVALUATED_LITTLE = (
    'for batch in cli.progress(dataloader, "evaluation"):',
    "for _, batch in zip(range(2), dataloader):",
)


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


@pytest.fixture
def tmp_path(tmp_path: Path, request) -> Iterator[Path]:
    """Empty a test's folder after it. The folder stays, so that no other test gets its name."""
    yield tmp_path
    if request.config.getini("tmp_path_retention_policy") == "none":
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir(parents=True, exist_ok=True)


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory) -> Iterator[Callable[[str], Path]]:
    """Yield a function that makes a folder for a module's tests; it is removed after the last."""
    folders = []

    def make(name: str) -> Path:
        folders.append(tmp_path_factory.mktemp(name))
        return folders[-1]

    yield make
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def quick_commands() -> Path:
    """Return the folder of warm.py's `python` and `torchrun`, which have PyTorch imported already.

    It is the folder of the real ones if REAL_PYTHON is set, and for tests that use GPUs: a process
    in which a library has initialized CUDA cannot fork others that use it.
    """
    if sys.platform != "linux" or torch.cuda.is_available() or os.environ.get("REAL_PYTHON"):
        return Path(sys.executable).parent
    return _warm_commands()


@functools.cache
def _warm_commands() -> Path:
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(warm.commands({**ENVIRONMENT, HIDES_GPUS: ""}))


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


@pytest.fixture(autouse=True)
def forget_the_process_group(monkeypatch):
    """A test may have had one in this process; distributed.run() would then end the worker."""
    monkeypatch.setattr(distributed, "_kept_group", None)


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
        return read_metrics(tmp_path / name)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)

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
os.environ["HF_HUB_OFFLINE"] = "1"  # otherwise the libraries try several times
# More threads slow down models this small. `OMP_NUM_THREADS=4 make test` tests another number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads sleep while they wait for others. By default they spin, and ranks that share a core then
# take many times longer.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import contextlib
import functools
import io
import logging
import shutil
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch
from cluster import cluster  # noqa: F401
from helpers import HIDES_GPUS, ROOT, listing, read_metrics, write_corpus
from runner import load_script, stop_handlers_kept

from common import launch, ranks

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


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m, and before xdist forms groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests into their tiers and groups, and skip those that need what this machine lacks."""
    gpus = torch.cuda.device_count()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if item.name.startswith("test_planted") and "check" not in marks:
            item.add_marker("nightly")
        if "gpu" in marks and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if "multi_gpu" in marks and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
        # The tests of a module run in one worker: they share what its fixtures have started.
        item.add_marker(pytest.mark.xdist_group(item.path.stem))
    on_cluster = {item.path for item in items if "cluster" in item.fixturenames}
    # They take longest: no worker must be left alone with them at the end.
    items.sort(key=lambda item: item.path not in on_cluster)


@pytest.fixture
def tmp_path(tmp_path: Path, request) -> Iterator[Path]:
    """Empty a test's folder after it. The folder stays, so that no other test gets its name."""
    yield tmp_path
    if request.config.getini("tmp_path_retention_policy") == "none":
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir(parents=True, exist_ok=True)


@pytest.fixture(scope="module")
def make_folder() -> Iterator[Callable[[str], Path]]:
    """Yield a function that makes a folder for a module's tests; it is removed after the last."""
    with contextlib.ExitStack() as folders:

        def make(name: str) -> Path:
            folder = tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True)
            return Path(folders.enter_context(folder))

        yield make


@pytest.fixture(autouse=True)
def hide_gpus(request, monkeypatch):
    """Tests without the marker see no GPU: they compare what a CPU computes, to the last digit."""
    if not any(map(request.node.get_closest_marker, ("gpu", "multi_gpu"))):
        monkeypatch.setenv(HIDES_GPUS, "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture(autouse=True)
def forget_the_process_group(monkeypatch):
    """A test may have had one in this process; launch.run() would then end the worker."""
    monkeypatch.setattr(ranks, "kept_groups", [])


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """Start an S3 server on this machine that has s3://bucket; yield the variables that find it.

    They have fake credentials and are set in this process, too.
    """
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs, of the extra s3")
    moto = pytest.importorskip("moto.server", reason="needs moto, of the extra test")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    settings = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.get_host_and_port()[1]}",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",  # what is cut off stays so: no test waits for more
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in settings.items():
            patch.setenv(name, value)
        # A worker may have had another server before. Its address is still known to fsspec, and
        # its buckets to moto.
        s3fs.S3FileSystem.clear_instance_cache()
        reset = f"{settings['AWS_ENDPOINT_URL']}/moto-api/reset"
        urllib.request.urlopen(urllib.request.Request(reset, method="POST")).close()
        s3fs.S3FileSystem().mkdir("bucket")
        yield settings
    server.stop()


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_corpus(tmp_path)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that runs chapter 1 in this process and returns the metrics it wrote.

    Of the built-in corpus it evaluates little: more would take longer than a test's few steps.
    """

    def run(*args: object, name: str = "run", chapter: str = "01-single-gpu") -> list[dict]:
        little = () if "-d" in args else ("--eval-sequences", 16)
        argv = ["train_llm.py", *little, *args, "--save-dir", tmp_path, "-e", name]
        monkeypatch.setattr(sys, "argv", [str(arg) for arg in argv])
        try:
            load_script(ROOT / chapter / "train_llm.py").main()
        except SystemExit as ended:  # chapters 3 to 5 exit with a status
            if ended.code:
                raise
        return read_metrics(tmp_path / name)

    with stop_handlers_kept():
        yield run


@pytest.fixture
def run_main(monkeypatch, capfd):
    """Return a function that runs a script in this process and returns (stdout, stderr).

    Before that, `plant` changes the module of the script.
    """

    def run(
        script: Path,
        *args: object,
        stdin: str = "",
        plant: Callable[[ModuleType], object] = lambda module: None,
    ) -> tuple[str, str]:
        module = load_script(script)
        plant(module)
        monkeypatch.setattr(sys, "argv", [script.name, *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capfd.readouterr()
        module.main()
        return capfd.readouterr()

    return run


@pytest.fixture
def refuse(run_main, capfd, tmp_path):
    """Return a function that runs a script, expects a refusal and returns its one sentence."""

    def end_as_a_program(module: ModuleType) -> None:
        module.main = functools.partial(launch.run, module.main)

    def run(script: Path, *args: object, stdin: str = "") -> str:
        before = listing(tmp_path)
        with pytest.raises(SystemExit) as exit_:
            run_main(script, *args, stdin=stdin, plant=end_as_a_program)
        out, err = capfd.readouterr()
        assert exit_.value.code == 2
        assert not out and "Traceback" not in err and err.endswith(".\n"), err
        assert listing(tmp_path) == before, "nothing was written, nothing lost"
        return err.splitlines()[-1]

    return run

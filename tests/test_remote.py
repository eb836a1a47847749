"""Runs and data at an address, against an S3 server that the tests start on this machine.

What a lost connection leaves is a checkpoint or is none: requests fail one after the other.
"""

import argparse
import contextlib
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import ROOT, read_metrics, write_corpus
from runner import finish, load_script, start
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from common import checkpoint, launch, storage, tracker
from common.cli import RunError
from common.documents import fetch

pytest.importorskip("s3fs", reason="needs s3fs, of the extra s3")
moto_server = pytest.importorskip("moto.server", reason="needs moto, of the extra test")
import fsspec  # noqa: E402
import s3fs  # noqa: E402

SMALL = ["-s", 32, "--global-batch-size", 6, "--max-steps", 8, "--ckpt-freq", 2, "--log-freq", 1]
TRAINING = {"model": "tiny"}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """Start the S3 server, set credentials that are fake, and return its host and port."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    threaded = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    threaded.start()
    place = threaded.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        settings = {
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{place[1]}",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",  # what is cut off stays so: no test waits for more
        }
        for name, value in settings.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield place
    threaded.stop()


@pytest.fixture
def bucket(server) -> str:
    """Return an address of this test's own."""
    return f"s3://bucket/{uuid.uuid4().hex}"


def store() -> s3fs.S3FileSystem:
    return fsspec.filesystem("s3", use_listings_cache=False)


def names_below(address: str) -> set[str]:
    root = address.removeprefix("s3://")
    return {name.removeprefix(f"{root}/") for name in store().find(root)}


def steps_below(address: str) -> set[str]:
    return {path.split("/")[1] for path in names_below(address) if "step-" in path}


def losses(run_dir: Path) -> list[float]:
    metrics = read_metrics(run_dir)
    assert [line["step"] for line in metrics] == list(range(1, 9))
    return [line["loss"] for line in metrics]


@pytest.fixture
def run(monkeypatch, capfd, caplog):
    """Return a function that runs chapter 1 in this process: status, lines of log and stderr."""
    for name in ("train_llm", "common.tracker"):
        caplog.set_level(logging.INFO, logger=name)

    def run(*args: object) -> tuple[int, list[str]]:
        caplog.clear()
        monkeypatch.setattr(sys, "argv", ["train_llm.py", *map(str, args), "-e", "run"])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            launch.run(load_script(ROOT / "01-single-gpu/train_llm.py").main)
        lines = capfd.readouterr().err.splitlines()
        assert not any("Traceback" in line for line in lines), lines
        return exit_.value.code or 0, [f"[20: {text}" for text in caplog.messages] + lines

    return run


@pytest.fixture(scope="module")
def texts(make_folder) -> Path:
    return write_corpus(make_folder("texts"))


@pytest.fixture(scope="module")
def straight(texts) -> Path:
    """Return a run of chapter 1 on this machine's disk that nobody disturbed."""
    arguments = ["-d", texts, *SMALL, "--save-dir", texts.parent, "-e", "straight"]
    assert finish(start(arguments)) == 0
    return texts.parent / "straight"


# --- whole runs ---


@pytest.mark.ci
def test_all_of_a_run_at_an_address(bucket, run, straight, texts, monkeypatch, tmp_path):
    data = f"{bucket}/data/corpus.json"
    store().put(str(texts), data)
    args = ("-d", data, *SMALL, "--save-dir", f"{bucket}/runs")
    status, lines = run(*args)
    assert status == 0, lines
    run_dir = storage.as_path(f"{bucket}/runs/run")
    said = f"the run's folder is {run_dir}, which is locked for this machine only; "
    assert any(said in line for line in lines)
    assert losses(run_dir) == losses(straight)
    files = {
        f"checkpoints/step-0000000{n}/{f}" for n in (6, 8) for f in (".metadata", "__0_0.distcp")
    }
    assert names_below(str(run_dir)) == {"state.json", "metrics.jsonl"} | files
    here = {path.name for path in storage.local_run_dir(run_dir).iterdir()}
    assert here == {".lock", "state.json", "metrics.jsonl"}, "nothing else stays on this machine"
    # To the checkpoint before, as with a folder.
    run_dir.fs.rm((run_dir / "checkpoints/step-00000008").path, recursive=True)
    status, lines = run(*args)
    assert status == 0 and any("resumed after step 6 of 8" in line for line in lines), lines
    assert losses(run_dir) == losses(straight)
    status, lines = run(*args)
    assert status == 0 and any("all steps of this run are done" in line for line in lines)
    script = load_script(ROOT / "04-fsdp/export.py")
    for source, target in ((run_dir, "remote"), (straight, "local")):
        monkeypatch.setattr(sys, "argv", ["export.py", str(source), str(tmp_path / target)])
        script.main()
    files = [tmp_path / target / "model.safetensors" for target in ("remote", "local")]
    assert files[0].read_bytes() == files[1].read_bytes()


class Requests:
    """Counts the requests of s3fs, or only those that change something.

    From the one numbered `fail_at` on, all that it counts fail.
    """

    def __init__(self, patch: pytest.MonkeyPatch, changes: bool, fail_at: int) -> None:
        self.count = 0
        original = s3fs.core._error_wrapper

        async def call(function: Callable, **options: object) -> object:
            name = function.__name__
            if not changes or name.startswith(("put", "copy", "delete", "create", "upload")):
                self.count += 1
                if self.count >= fail_at:
                    raise ConnectionResetError("planted")
            return await original(function, **options)

        patch.setattr(s3fs.core, "_error_wrapper", call)


# --- bad input ---


@pytest.fixture
def refuse(run, texts):
    """Return a function that expects a refusal, of a --save-dir and of a -d, in one sentence."""

    def refuse(address: str) -> Iterator[str]:
        for args in (("-d", texts, "--save-dir", address), ("-d", f"{address}/corpus.json")):
            status, lines = run(*SMALL, *args)
            header = ("[20", "versions: ", "environment: ")
            said = [line for line in lines if not line.startswith(header)]
            assert status == 2 and len(said) == 1 and said[0].endswith("."), lines
            yield said[0]

    return refuse


@pytest.mark.nightly
def test_stores_that_cannot_be_used(server, refuse, monkeypatch):
    """There is no bucket, no server, no package, no such kind of store."""
    saving, reading = refuse("s3://nowhere/runs")
    assert "s3://nowhere/runs/run cannot be used (The specified bucket does not exist)" in saving
    assert "There is no data set at 's3://nowhere/runs/corpus.json'" in reading
    assert not store().exists("nowhere"), "s3fs would have made it"
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
        s3fs.S3FileSystem.clear_instance_cache()
        for sentence in refuse("s3://bucket/runs"):
            assert 'Could not connect to the endpoint URL: "http://127.0.0.1:9/' in sentence
            assert "check the address and the credentials" in sentence
    s3fs.S3FileSystem.clear_instance_cache()
    for address, module in (("s3://bucket", "s3fs"), ("gs://bucket", "gcsfs"), ("s3://b", "upath")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            patch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
            for sentence in refuse(address):
                assert f"{address}" in sentence and "needs more packages (" in sentence
                assert "requirements.txt --editable '.[s3]'" in sentence
    for sentence in refuse("nosuch://bucket"):
        assert "cannot be opened (" in sentence


# --- requests that fail, one after the other ---


def save(run_dir: Path, step: int, value: float) -> None:
    """Save a checkpoint of a model whose numbers are all this one; two are kept."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    checkpoint.save_checkpoint(run_dir, model, optimizer, schedule, {"step": step}, keep=2)


def load(run_dir: Path) -> tuple[int, float]:
    """Return step and value of the checkpoint that a run at this address goes on from, or zeros."""
    model, state = nn.Linear(3, 2), {"step": 0}
    optimizer = torch.optim.AdamW(model.parameters())
    run = (model, optimizer, LambdaLR(optimizer, lambda step: 1.0), state)
    if not checkpoint.load_checkpoint(run_dir, *run, TRAINING):
        return 0, 0.0
    (value,) = {number for each in model.parameters() for number in each.flatten().tolist()}
    return state["step"], value


Saved = tuple[int, float]


def fail_at_each_request(
    run_dir: Path, monkeypatch, before: list[Saved], then: Saved, changes: bool = True
) -> int:
    """Save what is `before`; then let each request of one more save fail, all others after it too.

    Asserts that always what was there before loads, or what was saved then. Returns how many
    requests the save takes.
    """
    fs, root, number = run_dir.fs, run_dir.path, 0
    assert load(run_dir) == (0, 0.0), "and writes state.json"
    for step, value in before:
        save(run_dir, step, value)
    objects = fs.cat(fs.find(root))
    possible = [then, before[-1]]
    if then[0] <= before[-1][0]:
        possible += before  # the old one goes first
    while True:
        number += 1 if changes else 3
        fs.rm(root, recursive=True)
        fs.pipe(objects)
        with monkeypatch.context() as patch:
            requests = Requests(patch, changes, number)
            try:
                save(run_dir, *then)
            except RunError as error:
                assert "(planted): is the disk full?" in str(error)
        if requests.count < number:
            assert load(run_dir) == then
            return number - 1
        assert load(run_dir) in possible, f"request {number}"
        if number % 2:
            continue
        save(run_dir, then[0] + 1, 9.0)  # the run goes on
        assert load(run_dir) == (then[0] + 1, 9.0)
        assert checkpoint.read_state(run_dir)["step"] == then[0] + 1
        kept = {path.name for path in checkpoint.complete_checkpoints(run_dir).values()}
        assert steps_below(str(run_dir)) == kept and len(kept) <= 2, "nothing half-written stays"


@pytest.fixture
def run_dir(bucket) -> Path:
    run_dir = storage.as_path(bucket) / "run"
    storage.local_run_dir(run_dir).mkdir(parents=True, exist_ok=True)
    return run_dir


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("step", "changes", "least"),
    [(3, True, 6), (3, False, 30), (2, True, 7)],
    ids=["changes", "questions too", "a step that is recorded"],
)
def test_a_save_cut_at_each_request(run_dir, monkeypatch, step, changes, least):
    """The third save deletes the first one. A store that does not answer has not said that there is
    nothing. A step is recorded after a return to an older one, if nobody deletes all newer ones."""
    before = [(1, 1.0), (2, 2.0)]
    assert fail_at_each_request(run_dir, monkeypatch, before, (step, 3.0), changes) >= least


def test_planted_metadata_before_the_files_is_noticed(run_dir, monkeypatch):
    make_room = checkpoint._make_room

    def plant(run_dir: Path, step: int) -> Path:
        folder = make_room(run_dir, step)
        if step == 3:
            metadata = (run_dir / "checkpoints/step-00000002/.metadata").read_bytes()
            with contextlib.suppress(OSError):
                folder.fs.pipe_file((folder / ".metadata").path, metadata)
        return folder

    monkeypatch.setattr(checkpoint, "_make_room", plant)
    with pytest.raises(RunError, match=r"step-00000003/__0_0\.distcp is damaged"):
        fail_at_each_request(run_dir, monkeypatch, [(1, 1.0), (2, 2.0)], (3, 3.0))


# --- data ---


@pytest.mark.nightly
def test_a_folder_is_fetched_once_and_again_when_it_changes(bucket):
    fs = store()
    for name, text in (("a.txt", "one"), ("deep/b.txt", "two"), (".hidden.txt", "x")):
        fs.pipe_file(f"{bucket}/{name}", text.encode())
    folder = fetch(bucket)
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.*")}
    assert found == {"a.txt": "one", "deep/b.txt": "two", ".hidden.txt": "x"}
    (folder / "a.txt").write_text("not fetched again")
    assert fetch(bucket) == folder and (folder / "a.txt").read_text() != "one"
    fs.pipe_file(f"{bucket}/a.txt", b"new")  # of the same size
    other = fetch(bucket)
    assert other != folder and (other / "a.txt").read_text() == "new"


# --- what stays on this machine ---


@pytest.mark.nightly
def test_launch_files_and_job_scripts_find_their_folder(run_dir, monkeypatch):
    """They read $RUN/requeue and $RUN/state.json, and write the logs of the ranks there."""
    here = storage.local_run_dir(run_dir)
    assert launch.plan(["-e", "run", "--save-dir", str(run_dir.parent)])[2] == here
    args = argparse.Namespace(experiment_name="run", save_dir=str(run_dir.parent))
    assert tracker.make_run_dir(args) == run_dir
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "")  # no number
    launch.ask_for_requeue(run_dir, 4)
    assert (here / "requeue").read_text() == "0 0\n"
    save(run_dir, 4, 1.0)
    assert (here / "state.json").read_bytes() == (run_dir / "state.json").read_bytes()
    tracker.make_run_dir(args)
    assert not (here / "requeue").exists(), "it is from the start before"
    assert launch.plan(["--save-dir", "outputs", "-e", "run"])[2] == Path("outputs/run")

"""Runs and data at an address, against an S3 server that the tests start on this machine.

What a lost connection leaves is a checkpoint or is none: requests fail one after the other.
"""

import argparse
import contextlib
import json
import logging
import os
import socket
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import ROOT, first_then_nightly
from runner import Ranks, finish, load_script, start
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from common import checkpoint, cli, launch, storage, tracker
from common.cli import RunError
from common.documents import fetch, find_documents

import trained_model

pytest.importorskip("s3fs", reason="needs s3fs, of the extra s3")
moto_server = pytest.importorskip("moto.server", reason="needs moto, of the extra test")
import fsspec  # noqa: E402
import s3fs  # noqa: E402

SMALL = ["-s", 32, "--global-batch-size", 6, "--max-steps", 8, "--ckpt-freq", 2, "--log-freq", 1]
SENTENCE = "The previous checkpoint is kept; start the same command again to resume from it."
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
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))
    return [json.loads(line)["loss"] for line in lines]


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
    path = make_folder("texts") / "corpus.json"
    path.write_text(json.dumps([f"Text number {n}, of many words. " * 20 for n in range(50)]))
    return path


@pytest.fixture(scope="module")
def straight(texts) -> Path:
    """Return a run of chapter 1 on this machine's disk that nobody disturbed."""
    arguments = ["-d", texts, *SMALL, "--save-dir", texts.parent, "-e", "straight"]
    assert finish(start(arguments)) == 0
    return texts.parent / "straight"


# --- whole runs ---


@pytest.mark.ci
@pytest.mark.parametrize("place", first_then_nightly(["s3", "memory", "file"]))
def test_all_of_a_run_at_an_address(place, server, run, straight, texts, tmp_path):
    address = {"s3": "s3://bucket/all", "memory": "memory://all", "file": f"file://{tmp_path}"}
    data = f"{address[place]}/data/corpus.json"
    storage.as_path(data).fs.pipe_file(storage.as_path(data).path, texts.read_bytes())
    args = ("-d", data, *SMALL, "--save-dir", f"{address[place]}/runs")
    status, lines = run(*args)
    assert status == 0, lines
    run_dir = storage.as_path(f"{address[place]}/runs/run")
    assert any(f"the run's folder is {run_dir}; " in line for line in lines)
    assert losses(run_dir) == losses(straight)
    found = {path.removeprefix(run_dir.path + "/") for path in run_dir.fs.find(run_dir.path)}
    files = {
        f"checkpoints/step-0000000{n}/{f}" for n in (6, 8) for f in (".metadata", "__0_0.distcp")
    }
    assert found == {"state.json", "metrics.jsonl"} | files
    here = {path.name for path in storage.local_run_dir(run_dir).iterdir()}
    assert here == {".lock", "state.json", "metrics.jsonl"}, "nothing else stays on this machine"
    # To the checkpoint before, as with a folder.
    run_dir.fs.rm((run_dir / "checkpoints/step-00000008").path, recursive=True)
    status, lines = run(*args)
    assert status == 0 and any("resumed after step 6 of 8" in line for line in lines), lines
    assert losses(run_dir) == losses(straight)
    status, lines = run(*args)
    assert status == 0 and any("all steps of this run are done" in line for line in lines)


class Requests:
    """Counts the requests of s3fs, or only those that change something.

    From the one numbered `fail_at` on, all that it counts fail.
    """

    def __init__(self, patch: pytest.MonkeyPatch, changes: bool) -> None:
        self.count, self.fail_at = 0, None
        original = s3fs.core._error_wrapper

        async def call(function: Callable, **options: object) -> object:
            name = function.__name__
            if not changes or name.startswith(("put", "copy", "delete", "create", "upload")):
                self.count += 1
                if self.fail_at is not None and self.count >= self.fail_at:
                    raise ConnectionResetError("planted")
            return await original(function, **options)

        patch.setattr(s3fs.core, "_error_wrapper", call)


def lose_the_store() -> None:
    """On rank 0, no request succeeds any more when the second save begins to write."""
    tracker.SEEN_WITHIN_S, cli.HEAD_START_S = 0.3, 0.0
    writer_of = checkpoint.writer_of

    def lose(folder: Path) -> object:
        if folder.name == "step-00000004" and os.environ["RANK"] == "0":
            Requests(pytest.MonkeyPatch(), changes=False).fail_at = 1
        return writer_of(folder)

    checkpoint.writer_of = lose


@pytest.mark.nightly
def test_a_store_that_goes_away_in_a_save(server, bucket, straight, texts, tmp_path):
    """Chapter 2 on two ranks ends in one sentence, and resumes from the save before."""
    args = ["-d", texts, *SMALL, "--save-dir", bucket, "-e", "run"]
    # What starts processes may itself have been started before the credentials were set.
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    files = [str(tmp_path / f"stderr-{rank}") for rank in range(2)]
    options = {"env": aws, "chapter": "02-ddp", "stderr_file": files}
    assert Ranks(2, args, **options, plant=lose_the_store).finish() == [2, 2]
    said = Path(files[0]).read_text()
    assert "Traceback" not in said and SENTENCE in said.splitlines()[-1]
    assert said.splitlines()[-1].startswith(
        f"The checkpoint {bucket}/run/checkpoints/step-00000004 "
    )
    assert json.loads(store().cat_file(f"{bucket}/run/state.json"))["step"] == 2
    assert Ranks(2, args, **options).finish() == [0, 0]
    assert "resumed after step 2 of 8" in Path(files[0]).read_text()
    assert losses(storage.as_path(f"{bucket}/run")) == pytest.approx(losses(straight), rel=1e-5)
    found = steps_below(f"{bucket}/run")
    assert found == {"step-00000006", "step-00000008"}, "nothing half-written stays"


@pytest.mark.nightly
def test_export(server, bucket, straight, monkeypatch, tmp_path, capsys):
    store().put(str(straight), f"{bucket}/run", recursive=True)
    script = load_script(ROOT / "04-fsdp/export.py")
    folders = [tmp_path / "remote", tmp_path / "local"]
    for source, target in zip((f"{bucket}/run", straight), folders, strict=True):
        monkeypatch.setattr(sys, "argv", ["export.py", str(source), str(target)])
        script.main()
    one, other = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert one == other
    logits = [
        trained_model.load_trained(str(place), None, None, None)
        .model(torch.tensor([[1, 2]]))
        .logits
        for place in (f"{bucket}/run", straight)
    ]
    assert torch.equal(*logits)
    for source in ("s3://nowhere/run", bucket):
        monkeypatch.setattr(sys, "argv", ["export.py", source, str(tmp_path / "model")])
        with pytest.raises(RunError, match="is no run's folder with a complete checkpoint"):
            script.main()


# --- bad input ---


def answer_to(server: tuple[str, int], actions: float) -> None:
    """Let the server look at the credentials after so many requests; there are no valid ones."""
    url = f"http://127.0.0.1:{server[1]}/moto-api/reset-auth"
    kind = {"Content-Type": "text/plain"}
    request = urllib.request.Request(url, str(actions).encode(), kind, method="POST")
    urllib.request.urlopen(request).close()


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
def test_no_such_bucket(server, refuse):
    saving, reading = refuse("s3://nowhere/runs")
    assert "s3://nowhere/runs/run cannot be used (The specified bucket does not exist)" in saving
    assert "There is no data set at 's3://nowhere/runs/corpus.json'" in reading
    assert not store().exists("nowhere"), "s3fs would have made it"


@pytest.mark.nightly
def test_wrong_credentials(server, refuse):
    answer_to(server, 0)
    try:
        saving, reading = refuse("s3://bucket/runs")
    finally:
        answer_to(server, float("inf"))
    for sentence in (saving, reading):
        assert "(The AWS Access Key Id you provided does not exist in our records)" in sentence
        assert "check the address and the credentials" in sentence


@pytest.mark.nightly
def test_no_server(server, refuse, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        for sentence in refuse("s3://bucket/runs"):
            assert f'Could not connect to the endpoint URL: "{url}/' in sentence
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.nightly
def test_packages_that_are_missing(refuse, monkeypatch):
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
            requests = Requests(patch, changes)
            requests.fail_at = number
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
def test_third_save_cut_at_each_change(run_dir, monkeypatch):
    """It deletes the first one."""
    assert fail_at_each_request(run_dir, monkeypatch, [(1, 1.0), (2, 2.0)], (3, 3.0)) >= 6


@pytest.mark.nightly
def test_third_save_cut_at_questions_too(run_dir, monkeypatch):
    """A store that does not answer has not said that there is nothing."""
    before = [(1, 1.0), (2, 2.0)]
    assert fail_at_each_request(run_dir, monkeypatch, before, (3, 3.0), changes=False) >= 30


@pytest.mark.nightly
def test_save_of_a_step_that_is_recorded_cut_at_each_change(run_dir, monkeypatch):
    """As after a return to an older checkpoint, by somebody who has not deleted all newer ones."""
    assert fail_at_each_request(run_dir, monkeypatch, [(1, 1.0), (2, 2.0)], (2, 3.0)) >= 7


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


# --- what is in a checkpoint ---


@pytest.mark.nightly
def test_a_file_cut_short_and_the_way_back(run_dir):
    load(run_dir)
    for step in (1, 2):
        save(run_dir, step, step)
    file = run_dir / "checkpoints/step-00000002/__0_0.distcp"
    file.fs.pipe_file(file.path, file.read_bytes()[:-1])
    with pytest.raises(RunError) as refused:
        load(run_dir)
    assert f"{file} is damaged: delete {file.parent} to resume from an" in str(refused.value)
    file.fs.rm(file.path)
    with pytest.raises(RunError, match="is damaged"):
        load(run_dir)
    file.fs.rm(file.parent.path, recursive=True)
    assert load(run_dir) == (1, 1.0)


@pytest.mark.nightly
def test_a_run_moves_from_a_store_to_a_disk_and_back(run_dir, tmp_path, monkeypatch):
    load(run_dir)
    save(run_dir, 1, 1.0)
    store().get(run_dir.path, str(tmp_path / "run"), recursive=True)
    assert load(tmp_path / "run") == (1, 1.0)
    save(tmp_path / "run", 2, 2.0)
    back = run_dir.parent / "back"
    store().put(str(tmp_path / "run"), back.path, recursive=True)
    storage.local_run_dir(back).mkdir(parents=True, exist_ok=True)
    assert load(back) == (2, 2.0)
    store().pipe_file((back / "checkpoints/step-00000002/.metadata").path, b"damaged")
    with pytest.raises(RunError, match=r"\.metadata is damaged"):
        load(back)


# --- data ---


@pytest.mark.nightly
def test_a_folder_is_fetched_once_and_again_when_it_changes(bucket):
    fs = store()
    for name, text in {
        "a.txt": "one",
        "deep/b.txt": "two",
        ".hidden.txt": "x",
        "c.bin": "x",
    }.items():
        fs.pipe_file(f"{bucket}/{name}", text.encode())
    folder = fetch(bucket)
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.*")}
    assert found == {"a.txt": "one", "deep/b.txt": "two", "c.bin": "x"}
    (folder / "a.txt").write_text("not fetched again")
    assert fetch(bucket) == folder and (folder / "a.txt").read_text() != "one"
    fingerprint = find_documents(bucket, None, None).fingerprint
    fs.pipe_file(f"{bucket}/a.txt", b"new")  # of the same size
    other = fetch(bucket)
    assert other != folder and (other / "a.txt").read_text() == "new"
    assert find_documents(bucket, None, None).fingerprint != fingerprint
    with pytest.raises(RunError, match="There is no data set at"):
        fetch(f"{bucket}/nowhere")


# --- what stays on this machine ---


@pytest.mark.nightly
def test_launch_files_and_job_scripts_find_their_folder(run_dir, monkeypatch):
    """They read $RUN/requeue and $RUN/state.json, and write the logs of the ranks there."""
    here = storage.local_run_dir(run_dir)
    assert launch.plan(["-e", "run", "--save-dir", str(run_dir.parent)])[2] == here
    args = argparse.Namespace(experiment_name="run", save_dir=str(run_dir.parent))
    assert tracker.make_run_dir(args) == run_dir
    monkeypatch.setenv("RANK", "0")
    launch.ask_for_requeue(run_dir, 4)
    assert (here / "requeue").read_text() == "0 0\n"
    save(run_dir, 4, 1.0)
    assert (here / "state.json").read_bytes() == (run_dir / "state.json").read_bytes()
    tracker.make_run_dir(args)
    assert not (here / "requeue").exists(), "it is from the start before"
    assert launch.plan(["--save-dir", "outputs", "-e", "run"])[2] == Path("outputs/run")


@pytest.mark.nightly
def test_a_second_process_in_the_same_run(run_dir, monkeypatch):
    here = storage.local_run_dir(run_dir)
    with tracker.FileLock(here / ".lock"), pytest.raises(RunError) as refused:
        tracker.make_run_dir(
            argparse.Namespace(experiment_name="run", save_dir=str(run_dir.parent))
        )
    assert f"Another process is training in {run_dir}" in str(refused.value)

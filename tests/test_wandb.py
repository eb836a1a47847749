"""wandb really runs, offline, and what it leaves can be read back."""

import json
import os
import shutil
import socket
from pathlib import Path
from unittest import mock

import pytest
import wandb
from helpers import CHAPTERS, ROOT, first_then_nightly, read_metrics, write_corpus
from runner import Ranks, finish, start
from wandb.proto import wandb_internal_pb2

from common import tracker
from common.tracker import Tracker

CONFIG = {"total_steps": 10}

SCRIPT = ROOT / "01-single-gpu/train_llm.py"
FLAGS = ("-s", 32, "--max-steps", 8, "--log-freq", 2, "--ckpt-freq", 4, "--eval-freq", 4)


def read_run_file(path: Path) -> list:
    """Return the records of a .wandb file.

    It is a LevelDB log (https://github.com/google/leveldb/blob/main/doc/log_format.md) of protocol
    buffers after 7 bytes of header: blocks of 32 KiB, in which a record may be cut in parts.
    """
    content, records, position, record = path.read_bytes(), [], 7, b""
    while position + 7 <= len(content):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]  # 1 full, 2 first, 3 middle, 4 last
        part = content[position + 7 : position + 7 + length]
        record = part if kind in (1, 2) else record + part
        position += 7 + length
        if kind in (1, 4):
            records.append(wandb_internal_pb2.Record.FromString(record))
    return records


def read_run(folder: Path) -> tuple[object, dict, list[dict]]:
    """Return (run, config, history) of the one run in a wandb folder."""
    (path,) = folder.glob("*.wandb")
    records = read_run_file(path)
    run = next(record.run for record in records if record.HasField("run"))
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    history = [
        {
            (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.HasField("history")
    ]
    return run, config, history


def kept_id(run_dir: Path, name: str = "a-run") -> str:
    return (run_dir / f"{name}.wandb-id").read_text()


def train_with_wandb(save_dir: Path, corpus: Path, *args: object, **env: object) -> str:
    """Train a run in this folder, whose files wandb must not take for another user's login."""
    words = [*FLAGS, "-d", corpus, "--save-dir", save_dir, "-e", "a-run", *args]
    variables = {"HOME": save_dir, "WANDB_MODE": "offline", **env}
    stderr = save_dir / "stderr"
    process = start(words, script=str(SCRIPT), env=variables, stderr_file=str(stderr))
    assert finish(process) == 0, stderr.read_text()
    return stderr.read_text()


@pytest.fixture(scope="module")
def runs(make_folder) -> tuple[Path, list[Path]]:
    """A run, and its continuation after its newest checkpoint was deleted."""
    save_dir = make_folder("wandb")
    corpus = write_corpus(make_folder("text"))
    train_with_wandb(save_dir, corpus)
    first = list((save_dir / "a-run/wandb").glob("offline-run-*"))
    (save_dir / "a-run/checkpoints/step-00000008").rename(save_dir / "newest")
    assert "resumed after step 4" in train_with_wandb(save_dir, corpus)
    second = [f for f in (save_dir / "a-run/wandb").glob("offline-run-*") if f not in first]
    return save_dir / "a-run", first + second


def test_config_history_and_code_can_be_read(runs):
    run_dir, folders = runs
    run, config, history = read_run(folders[0])
    assert run.run_id == kept_id(run_dir)
    assert (run.display_name, run.project) == ("a-run", "one-diff-at-a-time")
    assert config["seq_length"] == 32 and config["model_name"] == "gpt2-tiny"
    assert config["lr"] == 1 / 128, "the value that the argument led to"
    assert [line["_step"] for line in history] == [2, 4, 6, 8]
    assert {"loss", "eval_loss", "perplexity", "time/forward", "tokens_per_s"} <= set(history[1])
    assert "mfu" not in history[0], "unknown on a CPU"
    code = list(folders[0].glob("files/code/**/train_llm.py"))
    assert len(code) == 1 and "# --- train ---" in code[0].read_text()


def test_resumed_run_has_the_same_id(runs):
    run_dir, folders = runs
    assert len(folders) == 2
    run, _, history = read_run(folders[1])
    _, _, before = read_run(folders[0])
    assert run.run_id == kept_id(run_dir)
    assert [line["_step"] for line in history] == [6, 8]
    assert [line["loss"] for line in history] == [line["loss"] for line in before[2:]]
    assert [line["step"] for line in read_metrics(run_dir)] == [2, 4, 6, 8]


@pytest.mark.check
@pytest.mark.parametrize(
    ("variable", "logged_in", "mode"),
    [
        (None, True, None),  # wandb's own default: online
        (None, False, "offline"),
        ("offline", True, "offline"),
    ],
)
def test_a_login_goes_online(asked, monkeypatch, tmp_path, variable, logged_in, mode):
    """What wandb is asked for: there is no account here with which it could be shown."""
    monkeypatch.setattr(wandb, "login", lambda **_: logged_in)
    monkeypatch.delenv("WANDB_MODE")
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    Tracker(new_folder(tmp_path), CONFIG, 0).finish()
    assert asked[0]["mode"] == mode


@pytest.fixture
def asked(monkeypatch) -> list[dict]:
    """The options of each call of wandb.init, which starts nothing."""
    calls = []
    monkeypatch.setattr(wandb, "init", lambda **options: calls.append(options))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return calls


def new_folder(save_dir: Path) -> Path:
    (save_dir / "a-run").mkdir()
    return save_dir / "a-run"


@pytest.mark.check
def test_a_folder_keeps_its_wandb_runs_and_a_new_one_with_its_name_has_others(asked, tmp_path):
    for run_dir in (new_folder(tmp_path), tmp_path / "a-run"):
        Tracker(run_dir, CONFIG, 0).finish()
        with mock.patch.object(tracker, "rank_and_world_size", lambda: (8, 16)):
            Tracker(run_dir, CONFIG, 0, node="host2").finish()
    shutil.rmtree(tmp_path / "a-run")
    Tracker(new_folder(tmp_path), CONFIG, 0).finish()
    first, other_node, resumed, other_resumed, renewed = (options["id"] for options in asked)
    assert (first, other_node) == (resumed, other_resumed)
    assert len({first, other_node, renewed}) == 3
    assert {options["resume"] for options in asked} == {"allow"}


@pytest.mark.check
def test_a_malformed_key_goes_on_offline(asked, caplog, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "too-short")
    Tracker(new_folder(tmp_path), CONFIG, 0).finish()
    assert [options["mode"] for options in asked] == ["offline"]
    assert "wandb runs offline, because: " in caplog.text and "API key" in caplog.text


def test_no_code_if_it_is_switched_off(corpus, tmp_path):
    """Neither the script nor the changes that are not committed, as the page says."""
    train_with_wandb(tmp_path, corpus, "--max-steps", 1, WANDB_DISABLE_CODE="true")
    files = (tmp_path / "a-run/wandb").glob("offline-run-*/files/**/*")
    names = {path.name for path in files if path.is_file()}
    assert "requirements.txt" in names
    assert not names & {"train_llm.py", "diff.patch"}


@pytest.mark.ci  # wandb tries for half a minute
def test_a_login_without_a_network_goes_on_offline(corpus, tmp_path):
    """As on a cluster's nodes: nothing listens on port 9 of this machine."""
    variables = {"WANDB_MODE": "online", "WANDB_API_KEY": "a" * 40}
    said = train_with_wandb(tmp_path, corpus, **variables, WANDB_BASE_URL="http://127.0.0.1:9")
    assert "wandb runs offline, because: " in said
    (folder,) = (tmp_path / "a-run/wandb").glob("offline-run-*")
    assert [line["_step"] for line in read_run(folder)[2]] == [2, 4, 6, 8]


def be_on_a_node_of_its_own() -> None:
    """Each rank is the first, and only, process of another machine."""
    host = f"host{int(os.environ['RANK']) + 1}"
    socket.gethostname = lambda: host


@pytest.mark.parametrize("flags", first_then_nightly([["--track-nodes"], []]))
def test_a_run_for_each_node(flags, corpus, tmp_path):
    """In one group; rank 0's is the run that there is without the flag."""
    options = {"chapter": CHAPTERS[2], "plant": be_on_a_node_of_its_own}
    options["env"] = {"WANDB_MODE": "offline", "HOME": tmp_path, "LOCAL_RANK": 0}
    arguments = ["-d", corpus, *FLAGS, "--global-batch-size", 6, "--save-dir", tmp_path]
    assert Ranks(2, [*arguments, "-e", "a-run", *flags], **options).finish() == [0, 0]
    found = [read_run(path) for path in (tmp_path / "a-run/wandb").glob("offline-run-*")]
    names = sorted(run.display_name for run, _, _ in found)
    assert names == (["a-run", "a-run-host2"] if flags else ["a-run"])
    assert len({run.run_id for run, _, _ in found}) == len(found)
    expected = [(line["step"], line["loss"]) for line in read_metrics(tmp_path / "a-run")]
    for run, _, history in found:
        assert run.run_group == ("a-run" if flags else "")
        assert kept_id(tmp_path / "a-run", run.display_name) == run.run_id
        logged = [(line["_step"], line["loss"]) for line in history]
        assert logged == expected, "the mean over all ranks"

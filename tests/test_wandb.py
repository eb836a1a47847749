"""What wandb is given: settings, metrics and names. In test_offline.py it really runs."""

import json
import os
import shutil
import socket

import pytest
import wandb
from helpers import CHAPTERS, ROOT, go_back_to, make_variant, read_metrics
from runner import Ranks, finish, start

from common.tracker import Tracker

CONFIG = {"total_steps": 10}
FLAGS = ("-s", 32, "--max-steps", 8, "--log-freq", 2, "--ckpt-freq", 4, "--eval-freq", 4)


class Recorded:
    """Stands for a run of wandb: notes the options that it was started with, and what it logs."""

    def __init__(self, **options: object) -> None:
        self.options, self.logged = options, []

    def log(self, metrics: dict[str, object], step: int) -> None:
        self.logged.append({**metrics, "wandb_step": step})

    def finish(self) -> None:
        """Leave a file, which another process can read."""
        facts = {key: self.options[key] for key in ("name", "id")}
        facts["group"] = os.environ.get("WANDB_RUN_GROUP")  # wandb reads it
        file = self.options["dir"] / f"{facts['name']}.recorded"
        file.write_text(json.dumps({**facts, "logged": self.logged}))


@pytest.fixture
def started(monkeypatch) -> list[Recorded]:
    """The runs of wandb that a test starts."""
    runs = []

    def init(**options: object) -> Recorded:
        runs.append(Recorded(**options))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_MODE", "offline")
    return runs


def test_a_run_and_its_continuation(started, train, corpus, tmp_path):
    """The newest checkpoint is deleted in between. The metrics are those of metrics.jsonl."""
    train(*FLAGS, "-d", corpus)
    go_back_to(4, tmp_path / "run")
    train(*FLAGS, "-d", corpus)
    metrics = read_metrics(tmp_path / "run")
    for run, expected in zip(started, (metrics, metrics[2:]), strict=True):
        assert [line["wandb_step"] for line in run.logged] == [line["step"] for line in expected]
        assert [line["loss"] for line in run.logged] == [line["loss"] for line in expected]
    options, resumed = (run.options for run in started)
    assert options["id"] == resumed["id"] and resumed["resume"] == "allow"
    assert (options["name"], options["project"]) == ("run", "one-diff-at-a-time")
    assert options["config"]["seq_length"] == 32 and options["config"]["model_name"] == "gpt2-tiny"
    assert options["config"]["lr"] == 1 / 128, "the value that the argument led to"
    names = {"loss", "eval_loss", "perplexity", "time/forward", "tokens_per_s"}
    assert names <= set(started[0].logged[1])
    assert "mfu" not in started[0].logged[0], "unknown on a CPU"


@pytest.mark.check
@pytest.mark.parametrize(
    ("variable", "logged_in", "mode"),
    [("", True, None), ("", False, "offline"), ("offline", True, "offline")],
)
def test_a_login_goes_online(started, monkeypatch, tmp_path, variable, logged_in, mode):
    """wandb is asked for its own default, online: there is no account to show more with."""
    monkeypatch.setattr(wandb, "login", lambda **_: logged_in)
    if not variable:
        monkeypatch.delenv("WANDB_MODE")
    Tracker(tmp_path, CONFIG, 0).finish()
    assert started[0].options["mode"] == mode


@pytest.mark.check
def test_a_new_folder_with_the_name_of_a_deleted_one_has_another_run(started, tmp_path):
    for _ in range(2):
        (tmp_path / "a-run").mkdir()
        Tracker(tmp_path / "a-run", CONFIG, 0).finish()
        shutil.rmtree(tmp_path / "a-run")
    first, renewed = (run.options["id"] for run in started)
    assert first != renewed


@pytest.mark.ci  # wandb tries for half a minute
def test_a_login_without_a_network_goes_on_offline(corpus, tmp_path):
    """As on a cluster's nodes: nothing listens on port 9 of this machine.

    As the page says, neither the script nor changes that are not committed are kept if code is
    switched off. HOME: wandb must not take files there for another user's login.
    """
    env = {"HOME": tmp_path, "WANDB_MODE": "online", "WANDB_API_KEY": "a" * 40}
    env |= {"WANDB_DISABLE_CODE": "true", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    words = [*FLAGS, "-d", corpus, "--save-dir", tmp_path, "-e", "a-run"]
    script, stderr = str(ROOT / "01-single-gpu/train_llm.py"), tmp_path / "stderr"
    assert finish(start(words, script=script, env=env, stderr_file=str(stderr))) == 0
    assert "wandb runs offline, because: " in stderr.read_text()
    (folder,) = (tmp_path / "a-run/wandb").glob("offline-run-*")
    names = {path.name for path in folder.glob("files/**/*") if path.is_file()}
    assert "requirements.txt" in names and list(folder.glob("*.wandb"))
    assert not names & {"train_llm.py", "diff.patch"}


def be_on_a_node_of_its_own() -> None:
    """Each rank is the first, and only, process of another machine."""
    socket.gethostname = lambda: f"host{int(os.environ['RANK']) + 1}"
    wandb.init = Recorded


@pytest.mark.parametrize(
    "chapter",
    [
        pytest.param(CHAPTERS[2], marks=pytest.mark.ci),
        pytest.param(CHAPTERS[4], marks=pytest.mark.nightly),
    ],
)
def test_a_run_for_each_node(corpus, tmp_path, chapter):
    """In one group; rank 0's is the run that the chapter has, too. The variant starts the others.

    A run of the variant goes on in the chapter.
    """
    variant = make_variant(tmp_path / "variants", chapter, "track-nodes")
    options = {"chapter": str(variant), "plant": be_on_a_node_of_its_own}
    options["env"] = {"WANDB_MODE": "offline", "LOCAL_RANK": 0}
    arguments = ["-d", corpus, *FLAGS, "--global-batch-size", 6, "--save-dir", tmp_path]
    arguments += ["-e", "a-run"]
    assert Ranks(2, arguments, **options).finish() == [0, 0]
    files = list((tmp_path / "a-run").glob("*.recorded"))
    assert sorted(file.stem for file in files) == ["a-run", "a-run-host2"]
    metrics = [(line["step"], line["loss"]) for line in read_metrics(tmp_path / "a-run")]
    runs = [json.loads(file.read_text()) for file in files]
    assert runs[0]["id"] != runs[1]["id"]
    for run in runs:
        assert run["group"] == "a-run"
        logged = [(line["wandb_step"], line["loss"]) for line in run["logged"]]
        assert logged == metrics, "the mean over all ranks"
    for file in files:
        file.unlink()
    go_back_to(4, tmp_path / "a-run")
    assert Ranks(2, arguments, **{**options, "chapter": chapter}).finish() == [0, 0]
    (file,) = (tmp_path / "a-run").glob("*.recorded")
    again = json.loads(file.read_text())
    rank_0 = next(run for run in runs if run["name"] == "a-run")
    assert (again["name"], again["id"], again["group"]) == ("a-run", rank_0["id"], None)
    assert [line["wandb_step"] for line in again["logged"]] == [step for step, _ in metrics[2:]]

"""A run of chapter 1 that was stopped, however it was stopped, goes on as if it had not been."""

import contextlib
import copy
import errno
import json
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import (
    RESUMED_STEPS,
    ROOT,
    Runs,
    assert_exact,
    assert_same_tensors,
    go_back_to,
    newest_step,
    read_metrics,
)
from runner import SAVE_STAGES
from torch.distributed.checkpoint import filesystem
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM

from common import checkpoint, storage
from common.cli import RunError
from common.data import ResumableSampler


@pytest.fixture(scope="module")
def runs(make_folder) -> Runs:
    """With a run that nobody stops."""
    runs = Runs(make_folder("runs"))
    assert runs.finish("straight", "--keep-checkpoints", 9) == [0]
    last = read_metrics(runs.folder / "straight")[-1]
    assert last["step"] == RESUMED_STEPS and last["epoch"] >= 2
    return runs


# None: between two saves, in the second epoch.
STAGES = [None, SAVE_STAGES[0], *(pytest.param(s, marks=pytest.mark.ci) for s in SAVE_STAGES[1:])]


@pytest.mark.parametrize("stage", STAGES)
def test_goes_on_after_kill_9(runs, stage):
    name = f"killed-{stage}"
    killed = {"kill_in_save": (4, stage)} if stage else {"kill_after_steps": 23}
    assert runs.finish(name, **killed) == [-signal.SIGKILL]
    trained, resumed_after = runs.stopped_after(name)
    if stage is None:
        assert (trained, resumed_after) == (23, 20), "the checkpoint before the kill"
    else:
        number = SAVE_STAGES.index(stage)
        assert (trained, resumed_after) == (20, 20 if number >= 2 else 15)
        assert newest_step(runs.folder / name) == (20 if number == 3 else 15)
    assert runs.finish(name) == [0]
    runs.assert_same("straight", name, trained, resumed_after)
    kept = {path.name for path in (runs.folder / name / "checkpoints").iterdir()}
    assert kept == {"step-00000035", "step-00000040"}, "nothing half-written stays"


@pytest.mark.ci
def test_goes_on_after_ctrl_c_in_a_save(runs):
    """It is not taken for a full disk."""
    assert runs.finish("interrupted", interrupt_in_save=4) == [130]
    said = runs.said("interrupted").splitlines()[-1]
    assert said.startswith("Interrupted. The start of a run's log")
    assert runs.stopped_after("interrupted") == (20, 15)
    assert runs.finish("interrupted") == [0]
    runs.assert_same("straight", "interrupted", 20, 15)


def without_moments(original: Callable) -> Callable:
    def load(*args: object, optim_state_dict: dict, **options: object) -> None:
        for moments in optim_state_dict["state"].values():
            moments["exp_avg"].zero_()
            moments["exp_avg_sq"].zero_()
        original(*args, optim_state_dict=optim_state_dict, **options)

    return load


def from_the_first(original: Callable) -> Callable:
    return lambda self, epoch, start: original(self, epoch)


def a_step_back(original: Callable) -> Callable:
    return lambda self, state: original(self, {**state, "last_epoch": state["last_epoch"] - 1})


# What is replaced, and a function that returns by what, given the original.
BUGS = {
    "no bug": None,
    "no moments": (checkpoint, "set_state_dict", without_moments),
    "the seed's RNG state": (checkpoint, "set_rng_state", lambda original: lambda rng: None),
    "the epoch's start": (ResumableSampler, "set_epoch", from_the_first),
    "the schedule a step back": (LambdaLR, "load_state_dict", a_step_back),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_noticed(runs, train, monkeypatch, tmp_path, name):
    """With each of these bugs a resumed run differs; without one it does not."""
    shutil.copytree(runs.folder / "straight", tmp_path / "run")
    if bug := BUGS[name]:
        target, function, make = bug
        monkeypatch.setattr(target, function, make(getattr(target, function)))
    for step in (30, 35):  # the second start resumes from what the first one has saved
        go_back_to(step, tmp_path / "run")
        train(*runs.flags)
    with pytest.raises(AssertionError) if bug else contextlib.nullcontext():
        assert_exact(runs.folder / "straight", tmp_path / "run")


# --- a checkpoint of an older commit ---

STORED = Path(__file__).parent / "checkpoint_2026_11.tar.xz"
STORED_AFTER, STORED_STEPS = 4, 8  # steps


@pytest.mark.ci
@pytest.mark.parametrize(
    ("chapter", "ranks"), [("01-single-gpu", 1), ("04-fsdp", 2)], ids=["chapter 1", "FSDP"]
)
def test_a_stored_checkpoint_is_resumed(tmp_path, chapter, ranks):
    """A reader's checkpoint outlives an update of this guide: the commit of 2026-11-26 saved this.

    Later commits must resume it, or refuse it in one sentence. When the format changes, replace
    this test by one of the refusal, and store a new checkpoint beside it, for the next change: this
    file in commit 746350d has the function that does so.
    """
    shutil.unpack_archive(STORED, tmp_path, filter="data")
    flags = ["-m", tmp_path / "model", "-d", tmp_path / "corpus.json", "-s", 16, "-b", 2]
    flags += ["--global-batch-size", 4, "--max-steps", STORED_STEPS, "--log-freq", 1]
    flags += ["--ckpt-freq", STORED_AFTER, "--keep-checkpoints", 1, "--lr", 1e-2]
    runs = Runs(tmp_path, flags=flags)
    assert runs.finish("run", chapter=chapter, ranks=ranks) == [0] * ranks
    assert len(runs.samples("run")) == STORED_STEPS - STORED_AFTER, "the others are not repeated"
    expected = json.loads((tmp_path / "losses.json").read_text())
    losses = [line["loss"] for line in read_metrics(runs.folder / "run")]
    assert losses == pytest.approx(expected, rel=1e-5) and len(losses) == STORED_STEPS


# --- what a checkpoint holds, and when it counts ---


def make_run(decay: float = 0.1) -> tuple:
    """Return a small model, its optimizer with two groups of parameters, and a schedule.

    Many readers have two groups: norms and biases are not decayed.
    """
    sizes = {"n_embd": 16, "n_layer": 1, "vocab_size": 64}
    config = AutoConfig.from_pretrained(ROOT / "common/presets/gpt2-tiny", **sizes)
    model = AutoModelForCausalLM.from_config(config)
    groups: dict[bool, list] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.ndim > 1].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": decay},
            {"params": groups[False], "weight_decay": decay / 10, "lr": 3e-2},
        ],
        lr=1e-2,
    )
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def check_the_order_of_saves(folder: Path, monkeypatch) -> None:
    """state.json comes first; what is deleted counts no longer, and state.json names a newer one.

    A folder that has lost its .metadata is left out, and the next save removes it. A run with other
    settings of its groups of parameters gets those that were saved.
    """
    model, optimizer, lr_scheduler = run = make_run()
    ids, state = torch.arange(64).view(2, 32), {"step": 0}
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    lr_scheduler.step()

    def check_removal(path: Path) -> None:
        assert not checkpoint.is_complete(path), f"{path.name} is complete and being deleted"
        newest = max(checkpoint.complete_checkpoints(folder))
        assert newest_step(folder) == newest, f"{path.name} is deleted before state.json is written"
        shutil.rmtree(path)

    def steps() -> list[int]:
        return sorted(int(path.name[5:]) for path in (folder / "checkpoints").iterdir())

    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove_folder", check_removal)
        assert not checkpoint.load_checkpoint(folder, *run, state, {"lr": 1})
        assert json.loads((folder / "state.json").read_text())["training"] == {"lr": 1}
        for step in (1, 2, 3):
            checkpoint.save_checkpoint(folder, *run, {"step": step}, keep=2)
    assert steps() == [2, 3] and newest_step(folder) == 3
    (folder / "checkpoints/step-00000003/.metadata").unlink()
    loaded = make_run(decay=0.5)
    assert checkpoint.load_checkpoint(folder, *loaded, state, {"lr": 1}) and state == {"step": 2}
    for one, other in zip(run, loaded, strict=True):
        assert_same_tensors(one.state_dict(), other.state_dict())
    assert [group["weight_decay"] for group in loaded[1].param_groups] == [0.1, 0.01]
    checkpoint.save_checkpoint(folder, *run, {"step": 4}, keep=9)
    assert steps() == [2, 4] and newest_step(folder) == 4


@pytest.mark.check
def test_an_old_checkpoint_that_cannot_be_deleted_stops_nothing(tmp_path, monkeypatch, caplog):
    """On NFS, another node may still have a file of it open."""
    run = make_run()
    checkpoint.load_checkpoint(tmp_path, *run, {"step": 0}, {})
    checkpoint.save_checkpoint(tmp_path, *run, {"step": 1}, keep=1)
    with monkeypatch.context() as patch:
        refused = OSError(errno.ENOTEMPTY, "Directory not empty")
        patch.setattr(storage, "remove_folder", mock.Mock(side_effect=refused))
        checkpoint.save_checkpoint(tmp_path, *run, {"step": 2}, keep=1)
    assert "step-00000001 could not be deleted: [Errno 39] Directory not empty" in caplog.text
    assert list(checkpoint.complete_checkpoints(tmp_path)) == [newest_step(tmp_path)] == [2]
    checkpoint.save_checkpoint(tmp_path, *run, {"step": 3}, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.mark.check
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path):
    """Its files have the right sizes: a disk returns other bytes, or an error."""
    run, folder = make_run(), tmp_path / "checkpoints/step-00000001"
    checkpoint.load_checkpoint(tmp_path, *run, {"step": 0}, {})
    checkpoint.save_checkpoint(tmp_path, *run, {"step": 1}, keep=1)
    for file in folder.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(RunError) as refused:
        checkpoint.load_checkpoint(tmp_path, *run, {"step": 0}, {})
    assert str(refused.value).startswith(f"The checkpoint {folder} cannot be read (")


def delete_at_once(monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "_delete", lambda folder: storage.remove_folder(folder))


def write_too_late(monkeypatch) -> None:
    write = checkpoint._write_state

    def write_older(run_dir: Path, content: dict) -> None:
        write(run_dir, {**content, "step": content.get("step", 1) - 1})

    monkeypatch.setattr(checkpoint, "_write_state", write_older)


@pytest.mark.check
def test_the_order_of_saves(tmp_path, monkeypatch):
    check_the_order_of_saves(tmp_path, monkeypatch)


@pytest.mark.check
@pytest.mark.parametrize(
    ("bug", "seen"),
    [(delete_at_once, "complete and being"), (write_too_late, "before state.json")],
)
def test_planted_order_is_noticed(tmp_path, monkeypatch, bug, seen):
    bug(monkeypatch)
    with pytest.raises(RunError, match=f"step-00000001 is (deleted )?{seen}"):
        check_the_order_of_saves(tmp_path, monkeypatch)


# --- a checkpoint that is written while the training goes on ---


def check_that_the_training_goes_on(folder: Path, monkeypatch) -> None:
    """`save` returns before anything is written, and what is written is of its step."""
    may_write, write_item = threading.Event(), filesystem._write_item

    def write(*args: object) -> object:
        assert may_write.wait(60), "the training waits"
        return write_item(*args)

    monkeypatch.setattr(filesystem, "_write_item", write)
    saved, loaded, state = make_run(), make_run(), {"step": 0}
    saved_tensors = copy.deepcopy(saved[0].state_dict())
    assert not checkpoint.load_checkpoint(folder, *loaded, state, {})
    checkpoints = checkpoint.AsyncCheckpoints(timeout_s=60)
    checkpoints.save(folder, *saved, {"step": 1}, keep=1)
    for parameter in saved[0].parameters():
        torch.nn.init.zeros_(parameter)
    assert not checkpoint.complete_checkpoints(folder) and newest_step(folder) == 0
    may_write.set()
    checkpoints.finish()
    assert newest_step(folder) == 1
    assert checkpoint.load_checkpoint(folder, *loaded, state, {}) and state == {"step": 1}
    assert_same_tensors(saved_tensors, loaded[0].state_dict())


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.check
def test_async_training_goes_on(process_group, tmp_path, monkeypatch):
    check_that_the_training_goes_on(tmp_path, monkeypatch)


@pytest.mark.check
def test_planted_tensors_that_train_on_are_noticed(process_group, tmp_path, monkeypatch):
    """They are not copied."""
    stager = checkpoint.BlockingAsyncStager
    monkeypatch.setattr(stager, "stage", lambda self, content: content)
    with pytest.raises(AssertionError, match="weight"):
        check_that_the_training_goes_on(tmp_path, monkeypatch)

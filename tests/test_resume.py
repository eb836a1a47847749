"""A resumed run of chapter 1 is the run that nobody stopped; what a checkpoint must contain.

test_failures.py has all the ways in which a run can be stopped.
"""

import argparse
import contextlib
import copy
import errno
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import (
    CHAPTERS,
    ROOT,
    Runs,
    assert_exact,
    assert_same_tensors,
    checkpoints_of,
    go_back_to,
    make_flags,
    newest_step,
    plant,
    read_metrics,
    register,
    write_corpus,
    write_narrow,
)
from torch.distributed.checkpoint import filesystem
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM

import async_checkpoint
from common import checkpoint, storage
from common.checkpoint import complete_checkpoints
from common.data import ResumableSampler
from common.errors import RunError


@pytest.fixture(scope="module")
def runs(make_folder) -> Runs:
    """With a run that nobody stops."""
    runs = Runs(make_folder("runs"))
    assert runs.finish("straight", "--keep-checkpoints", 9) == [0]
    assert read_metrics(runs.folder / "straight")[-1]["epoch"] >= 2
    return runs


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
    "the seed's RNG state": (torch, "set_rng_state", lambda original: lambda rng: None),
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


# --- what must not change ---

SEED = '    add("--seed", default=0,'
NEW_FLAG = [(SEED, f'    add("--new-flag", default=0, type=at_least(0), help="new")\n{SEED}')]
register(CHAPTERS[0], NEW_FLAG)


@pytest.mark.parametrize("left_out", [(".metadata",), (".metadata", "newest")])
def test_a_copy_without_hidden_files_is_refused_and_kept(train, tmp_path, left_out):
    """Not trained from step 1, with a clean-up that deletes the only data of the run."""
    words = ("-d", write_corpus(tmp_path), "-m", write_narrow(tmp_path / "model", "gpt2-tiny"))
    words += ("--tokenizer-name", "gpt2-tiny", "-s", 16, "-b", 2, "--global-batch-size", 2)
    words += ("--max-steps", 4, "--log-freq", 2, "--ckpt-freq", 2)
    train(*words)
    run_dir = tmp_path / "run"
    for name in left_out:
        for path in list(run_dir.rglob(name)):
            path.unlink()
    before = sorted(run_dir.rglob("*.distcp"))
    assert {path.parent.name for path in before} == {"step-00000002", "step-00000004"}
    with pytest.raises(RunError, match=r"step-00000004 has no file \.metadata, without which"):
        train(*words)
    assert sorted(run_dir.rglob("*.distcp")) == before


def test_a_flag_that_nobody_has_listed_is_fixed(train, tmp_path):
    """The refusal names a forgotten flag, with the value of the run."""
    flags = [*make_flags(tmp_path), "--max-steps", 5]
    chapter = plant(CHAPTERS[0], tmp_path / "planted", NEW_FLAG)
    train(*flags, "--new-flag", 7, chapter=chapter)
    with pytest.raises(RunError, match=r"/run was started with --new-flag 7, not 0: resume it"):
        train(*flags, chapter=chapter)


# --- a checkpoint of an older commit ---

STORED = Path(__file__).parent / "checkpoint_2026_11_27.tar.xz"
STORED_AFTER, STORED_STEPS = 4, 8  # steps
# What a job of that time may have given: flags that change nothing, and are ignored now.
OLD_FLAGS = ("--num-workers", 2, "--param-dtype", "float32")
OF_FSDP = ("--zero1", "--reshard-after-forward", "--activation-checkpointing=none")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("chapter", "ranks", "old_flags"),
    [("01-single-gpu", 1, OLD_FLAGS), ("04-fsdp", 2, (*OLD_FLAGS, *OF_FSDP))],
    ids=["chapter 1", "FSDP"],
)
def test_a_stored_checkpoint_is_resumed(tmp_path, chapter, ranks, old_flags):
    """A reader's checkpoint outlives an update of this guide: the commit of 2026-11-27 saved this.

    So does the command: rank 0 warns of each flag that is gone.

    Later commits must resume it, or refuse it in one sentence. When the format changes, let
    test_failures.py refuse this checkpoint, and store a new one here: this file in commit 746350d
    has the function that does so.
    """
    shutil.unpack_archive(STORED, tmp_path, filter="data")
    flags = ["-m", tmp_path / "model", "-d", tmp_path / "corpus.json", "-s", 16, "-b", 2]
    flags += ["--global-batch-size", 4, "--max-steps", STORED_STEPS, "--log-freq", 1]
    flags += ["--ckpt-freq", STORED_AFTER, "--keep-checkpoints", 1, "--lr", 1e-2]
    runs = Runs(tmp_path, flags=flags)
    assert runs.finish("run", *old_flags, chapter=chapter, ranks=ranks) == [0] * ranks
    said = "".join(runs.said("run", rank) for rank in range(ranks))
    assert said.count("is no longer a flag and is ignored") == sum(
        str(word).startswith("--") for word in old_flags
    )
    assert len(runs.samples("run")) == STORED_STEPS - STORED_AFTER, "the others are not repeated"
    expected = json.loads((tmp_path / "losses.json").read_text())
    losses = [line["loss"] for line in read_metrics(runs.folder / "run")]
    assert losses == pytest.approx(expected, rel=1e-5) and len(losses) == STORED_STEPS


# --- what a checkpoint holds, and when it counts ---


def make_run(decay: float = 0.1, bias: bool = False) -> tuple:
    """Return a small model, its optimizer with two groups of parameters, and a schedule.

    Many readers have two groups: norms and biases are not decayed. bias: add a parameter.
    """
    sizes = {"n_embd": 16, "n_layer": 1, "vocab_size": 64}
    config = AutoConfig.from_pretrained(ROOT / "common/inputs/presets/gpt2-tiny", **sizes)
    model = AutoModelForCausalLM.from_config(config)
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(64))
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
    """What is deleted counts no longer, and `newest` names a newer one.

    A folder that has lost its .metadata is left out, and the next save removes it. A run with other
    settings of its groups of parameters gets those that were saved.
    """
    model, optimizer, lr_scheduler = run = make_run()
    ids, state = torch.arange(64).view(2, 32), {"step": 0}
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    lr_scheduler.step()
    checkpoints = checkpoints_of(folder, {"lr": 1})

    def check_removal(path: Path) -> None:
        complete = complete_checkpoints(path.parent)
        assert path not in complete.values(), f"{path.name} is complete and being deleted"
        assert newest_step(folder) == max(complete), f"{path.name} is deleted before newest is new"
        shutil.rmtree(path)

    def steps() -> list[int]:
        return sorted(int(path.name[5:]) for path in checkpoints.folder.iterdir())

    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove_folder", check_removal)
        assert not checkpoints.load(*run, state)
        for step in (1, 2, 3):
            checkpoints.save(*run, {"step": step})
    assert steps() == [2, 3] and newest_step(folder) == checkpoints.step == 3
    (checkpoints.folder / "step-00000003/.metadata").unlink()
    loaded, checkpoints = make_run(decay=0.5), checkpoints_of(folder, {"lr": 1}, keep=9)
    assert checkpoints.load(*loaded, state) and state == {"step": 2} and checkpoints.step == 2
    for one, other in zip(run, loaded, strict=True):
        assert_same_tensors(one.state_dict(), other.state_dict())
    assert [group["weight_decay"] for group in loaded[1].param_groups] == [0.1, 0.01]
    checkpoints.save(*run, {"step": 4})
    assert steps() == [2, 4] and newest_step(folder) == 4


@pytest.mark.check
def test_the_order_of_saves(tmp_path, monkeypatch):
    check_the_order_of_saves(tmp_path, monkeypatch)


@pytest.mark.check
@pytest.mark.parametrize(
    ("left_out", "seen"),
    [("unlink", "is complete and being"), ("replace", "is deleted before newest")],
)
def test_planted_order_is_noticed(tmp_path, monkeypatch, left_out, seen):
    """Without the first step of a removal, or the last step of what names the newest."""
    monkeypatch.setattr(Path, left_out, lambda *_, **__: None)
    with pytest.raises(RunError, match=f"step-00000001 {seen}"):
        check_the_order_of_saves(tmp_path, monkeypatch)


@pytest.mark.check
def test_an_old_checkpoint_that_cannot_be_deleted_stops_nothing(tmp_path, monkeypatch, caplog):
    """On NFS, another node may still have a file of it open."""
    run, checkpoints = make_run(), checkpoints_of(tmp_path, {}, keep=1)
    checkpoints.save(*run, {"step": 1})
    with monkeypatch.context() as patch:
        refused = OSError(errno.ENOTEMPTY, "Directory not empty")
        patch.setattr(storage, "remove_folder", mock.Mock(side_effect=refused))
        checkpoints.save(*run, {"step": 2})
    assert "step-00000001 could not be deleted: [Errno 39] Directory not empty" in caplog.text
    assert list(complete_checkpoints(checkpoints.folder)) == [newest_step(tmp_path)] == [2]
    checkpoints.save(*run, {"step": 3})
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000003"]


@pytest.mark.check
def test_a_checkpoint_that_lacks_something_is_refused(tmp_path, monkeypatch):
    """allow_partial_load alone would keep the initial values of a parameter or of a moment."""
    run, checkpoints = make_run(), checkpoints_of(tmp_path, {})
    checkpoints.save(*run, {"step": 1})
    path = f"{checkpoints.folder}/step-00000001"
    with pytest.raises(RunError, match=rf"^{path} does not contain model\.lm_head\.bias: give"):
        checkpoints.load(*make_run(bias=True), {"step": 0})
    more = make_run()
    for group in more[1].param_groups:
        group["amsgrad"] = True
    missing = r"optimizer\.state\.\S+\.max_exp_avg_sq"
    with pytest.raises(RunError, match=rf"^{path} does not contain {missing}: give"):
        checkpoints.load(*more, {"step": 0})


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
    args = argparse.Namespace(checkpoint_dir=None, keep_checkpoints=1, dist_timeout=60)
    checkpoints = async_checkpoint.Checkpoints(args, folder, {})
    checkpoints.save(*saved, {"step": 1})
    for parameter in saved[0].parameters():
        torch.nn.init.zeros_(parameter)
    assert not complete_checkpoints(checkpoints.folder) and newest_step(folder) == 0
    may_write.set()
    checkpoints.finish()
    assert newest_step(folder) == 1
    assert checkpoints.load(*loaded, state) and state == {"step": 1}
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
    stager = async_checkpoint.BlockingAsyncStager
    monkeypatch.setattr(stager, "stage", lambda self, content: content)
    with pytest.raises(AssertionError, match="weight"):
        check_that_the_training_goes_on(tmp_path, monkeypatch)

"""A run that was stopped, however it was stopped, goes on as if it had not been."""

import errno
import json
import os
import random
import re
import shutil
import signal
import time
import types
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import (
    EXACT,
    RESUMED_STEPS,
    assert_same_tensors,
    first_then_nightly,
    make_flags,
    read_metrics,
)
from runner import SAVE_STAGES, finish, start
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.lr_scheduler import LambdaLR

from common import checkpoint
from common.checkpoint import files, manifest, save_load
from common.checkpoint.files import Writer
from common.checkpoint.manifest import measure_file
from common.cli import InputError
from common.data import ResumableSampler

STEPS = RESUMED_STEPS


@pytest.fixture(scope="module")
def flags(make_folder) -> list[object]:
    return make_flags(make_folder("inputs"))


class Runs:
    """Runs of chapter 1 in one folder: their metrics, samples and final parameters."""

    def __init__(self, folder: Path, flags: list[object]) -> None:
        self.folder, self.flags = folder, flags

    def start(self, name: str, **options: object):
        options = {"samples_file": str(self.folder / f"{name}.samples"), **options}
        return start([*self.flags, "--save-dir", self.folder, "-e", name], **options)

    def finish(self, name: str, **options: object) -> int:
        return finish(self.start(name, **options))

    def metrics(self, name: str) -> list[dict]:
        return read_metrics(self.folder / name)

    def samples(self, name: str) -> list[list[int]]:
        lines = (self.folder / f"{name}.samples").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def state(self, name: str) -> dict:
        return json.loads((self.folder / name / "state.json").read_text())

    def tensors(self, name: str) -> dict:
        """Return all that the newest checkpoint holds."""
        path = self.folder / name / self.state(name)["checkpoints"][-1]["path"]
        dcp_to_torch_save(path, self.folder / f"{name}.pt")
        return torch.load(self.folder / f"{name}.pt", weights_only=False)

    def stopped_after(self, name: str) -> tuple[int, int]:
        """Return (steps trained so far, step that the run will resume after)."""
        return len(self.samples(name)), self.state(name)["checkpoints"][-1]["step"]


@pytest.fixture(scope="module")
def straight(make_folder, flags) -> Runs:
    runs = Runs(make_folder("straight"), flags)
    assert runs.finish("straight") == 0
    metrics = runs.metrics("straight")
    assert metrics[-1]["step"] == STEPS and metrics[-1]["epoch"] >= 2
    return runs


@pytest.fixture
def runs(tmp_path, flags) -> Runs:
    return Runs(tmp_path, flags)


def assert_same_training(straight: Runs, runs: Runs, trained: int, resumed_after: int) -> None:
    """The run "stopped" and what it did after its stop, against the straight one: bit by bit."""
    expected, found = straight.metrics("straight"), runs.metrics("stopped")
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for key in EXACT:
        assert [line.get(key) for line in found] == [line.get(key) for line in expected], key
    samples = straight.samples("straight")
    assert runs.samples("stopped") == samples[:trained] + samples[resumed_after:]
    assert_same_tensors(straight.tensors("straight"), runs.tensors("stopped"))


def test_after_ctrl_c(straight, runs, tmp_path):
    process = runs.start("stopped", stderr_file=str(tmp_path / "stderr"), pause=0.05)
    deadline = time.monotonic() + 120
    metrics = tmp_path / "stopped/metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 6):
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    assert finish(process) == 130
    message = (tmp_path / "stderr").read_text().splitlines()[-1]
    assert message.startswith("Interrupted; to resume it") and message.endswith(" -e stopped")
    stop = runs.stopped_after("stopped")
    assert 0 < stop[1] < STEPS
    assert runs.finish("stopped") == 0
    assert_same_training(straight, runs, *stop)


def test_after_kill_9_in_a_later_epoch(straight, runs):
    step = random.randrange(16, STEPS)
    assert runs.finish("stopped", kill_after_steps=step) == -signal.SIGKILL
    stop = runs.stopped_after("stopped")
    assert stop == (step, (step - 1) // 5 * 5), "the checkpoint before the kill"
    assert runs.finish("stopped") == 0
    assert_same_training(straight, runs, *stop)


@pytest.mark.parametrize("stage", first_then_nightly(SAVE_STAGES))
def test_after_kill_9_in_a_save(straight, runs, stage):
    assert runs.finish("stopped", kill_in_save=(4, stage)) == -signal.SIGKILL
    trained, resumed_after = runs.stopped_after("stopped")
    # What is no longer kept is deleted while the training goes on, until the next save.
    assert 20 <= trained <= (25 if stage == "committed" else 20)
    assert resumed_after == (20 if stage == "committed" else 15)
    assert runs.finish("stopped") == 0
    assert_same_training(straight, runs, trained, resumed_after)
    kept = {path.name for path in (runs.folder / "stopped/checkpoints").iterdir()}
    assert kept == {"step-00000035", "step-00000040"}, "nothing half-written stays"


@pytest.mark.ci
def test_after_kill_9_in_a_save_that_replaces_a_newer_checkpoint(straight, runs):
    """Back to step 35 and on to 40, killed when the new folder is there and not its record."""
    assert runs.finish("stopped") == 0
    shutil.rmtree(runs.folder / "stopped/checkpoints/step-00000040")
    assert runs.finish("stopped", kill_in_save=(1, "renamed")) == -signal.SIGKILL
    trained, resumed_after = runs.stopped_after("stopped")
    assert resumed_after == 35
    assert runs.finish("stopped") == 0
    assert runs.samples("stopped")[trained:] == straight.samples("straight")[35:]
    assert runs.metrics("stopped")[-1]["loss"] == straight.metrics("straight")[-1]["loss"]
    assert_same_tensors(straight.tensors("straight"), runs.tensors("stopped"))


@pytest.mark.ci
def test_ctrl_c_in_a_save_is_no_full_disk(straight, runs, tmp_path):
    options = {"interrupt_in_save": 4, "stderr_file": str(tmp_path / "stderr")}
    assert runs.finish("stopped", **options) == 130
    said = (tmp_path / "stderr").read_text().splitlines()
    assert said[-1].startswith("Interrupted; to resume it")
    stop = runs.stopped_after("stopped")
    assert stop == (20, 15)
    assert runs.finish("stopped") == 0
    assert_same_training(straight, runs, *stop)


def keep_seeded_rng(monkeypatch):
    monkeypatch.setattr(save_load, "set_rng_state", lambda rng: None)


def take_epoch_0s_order(monkeypatch):
    original = ResumableSampler.set_epoch
    monkeypatch.setattr(
        ResumableSampler, "set_epoch", lambda self, _, start: original(self, 0, start)
    )


def begin_the_epoch_anew(monkeypatch):
    original = ResumableSampler.set_epoch
    monkeypatch.setattr(
        ResumableSampler, "set_epoch", lambda self, epoch, start: original(self, epoch)
    )


def set_the_schedule_back_a_step(monkeypatch):
    original = LambdaLR.load_state_dict

    def load(self, state: dict) -> None:
        original(self, {**state, "last_epoch": state["last_epoch"] - 1})

    monkeypatch.setattr(LambdaLR, "load_state_dict", load)


def drop_the_moments(monkeypatch):
    original = save_load.set_state_dict

    def load(model, optimizer, *, model_state_dict: dict, optim_state_dict: dict) -> None:
        for moments in optim_state_dict["state"].values():
            moments["exp_avg"].zero_()
            moments["exp_avg_sq"].zero_()
        original(
            model, optimizer, model_state_dict=model_state_dict, optim_state_dict=optim_state_dict
        )

    monkeypatch.setattr(save_load, "set_state_dict", load)


def forget_the_loss_since_the_last_log(monkeypatch):
    original = save_load.save_checkpoint

    def save(run_dir, model, optimizer, lr_scheduler, state: dict, *args: object) -> None:
        state = {**state, "running_loss": torch.zeros(())}
        original(run_dir, model, optimizer, lr_scheduler, state, *args)

    monkeypatch.setattr(checkpoint, "save_checkpoint", save)


BUGS = (
    None,
    *first_then_nightly(
        [
            drop_the_moments,
            keep_seeded_rng,
            take_epoch_0s_order,
            begin_the_epoch_anew,
            set_the_schedule_back_a_step,
            forget_the_loss_since_the_last_log,
        ]
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: getattr(bug, "__name__", "no bug"))
def test_planted_bug_is_noticed(straight, train, flags, monkeypatch, tmp_path, bug):
    """With each of these bugs a resumed run differs; without one it does not."""
    # A mistake in saving must be there before the stop, one in resuming only after it.
    if bug is forget_the_loss_since_the_last_log:
        bug(monkeypatch)
    # TrainedModel to the end, then set back to step 35 by deleting the newest checkpoint.
    assert [line["loss"] for line in train(*flags) if "loss" in line] == [
        line["loss"] for line in straight.metrics("straight") if "loss" in line
    ]
    if bug not in (None, forget_the_loss_since_the_last_log):
        bug(monkeypatch)
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000040")
    resumed = train(*flags)
    expected = straight.metrics("straight")
    assert [line["step"] for line in resumed] == [line["step"] for line in expected]
    differs = [
        key
        for key in EXACT
        if [line.get(key) for line in resumed] != [line.get(key) for line in expected]
    ]
    assert bool(differs) == (bug is not None), differs


# --- sums of what is written ---


@pytest.fixture
def written(tmp_path, monkeypatch) -> tuple[Path, Writer, list[bool]]:
    """Return a folder with a tensor, its writer, and for each tensor whether it got a CRC-32."""
    with_crc32, save = [], torch.save

    def note(*args: object, **options: object) -> None:
        with_crc32.append(torch.serialization.get_crc32_options())
        save(*args, **options)

    monkeypatch.setattr(torch, "save", note)
    writer = Writer(tmp_path)
    content = {"one": torch.arange(1000.0), "two": torch.zeros(3)}
    dcp.save(content, checkpoint_id=tmp_path, storage_writer=writer, no_dist=True)
    return tmp_path, writer, with_crc32


def test_sums_on_the_way_are_those_of_the_disk(written):
    folder, writer, with_crc32 = written
    sums = writer.measure()
    assert {file.name for file in folder.iterdir()} == set(sums) == {".metadata", "__0_0.distcp"}
    assert all(measure_file(folder / name) == known for name, known in sums.items())
    assert with_crc32 == [False, False]
    assert torch.serialization.get_crc32_options(), "of others it is still taken"


def test_a_file_of_another_size_is_noticed(written):
    folder, writer, _ = written
    with (folder / "__0_0.distcp").open("ab") as file:
        file.write(b"0")
    with pytest.raises(OSError, match=r"__0_0\.distcp has"):
        writer.measure()


def check_that_a_disk_begins_early(folder: Path, monkeypatch) -> None:
    """Save 20 tensors of 1 MB, in stretches of 2.5 MB: what is the disk asked, and when?"""
    asked = []

    def advise(file: int, offset: int, count: int, advice: int) -> None:
        assert (count, advice) == (0, os.POSIX_FADV_DONTNEED), "all from there on"
        asked.append((offset, os.fstat(file).st_size))

    monkeypatch.setattr(files, "FLUSH_BYTES", 2_500_000)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(os, "fsync", lambda file: asked.append("sync"))
    content = {f"number {n}": torch.full((250_000,), float(n)) for n in range(20)}
    dcp.save(content, checkpoint_id=folder, storage_writer=Writer(folder), no_dist=True)
    stretches = asked[: asked.index("sync")]
    offsets = [offset for offset, _ in stretches]
    assert offsets[:1] == [0] and len(offsets) >= 6, "nothing is left for the end"
    assert all(2_500_000 <= b - a < 5_000_000 for a, b in pairwise(offsets))
    assert all(size > offset for offset, size in stretches), "asked for what is not there"


needs_advice = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="Linux")


@needs_advice
def test_a_disk_begins_before_the_file_is_complete(tmp_path, monkeypatch):
    check_that_a_disk_begins_early(tmp_path, monkeypatch)


@needs_advice
def test_planted_file_that_is_left_for_the_end_is_noticed(tmp_path, monkeypatch):
    init = files.SummingStream.__init__
    planted = lambda self, stream, early: init(self, stream, False)  # noqa: E731
    monkeypatch.setattr(files.SummingStream, "__init__", planted)
    with pytest.raises(AssertionError, match="left for the end"):
        check_that_a_disk_begins_early(tmp_path, monkeypatch)


# --- what a kill or a power failure cannot harm ---


def check_the_order_of_a_commit(folder: Path, monkeypatch) -> None:
    """What is renamed is on the disk, and what is deleted is no longer in state.json."""
    on_disk, rename, sync = set(), Path.replace, os.fsync

    def note_sync(file: int) -> None:
        on_disk.add(os.fstat(file).st_ino)
        sync(file)

    def check_rename(path: Path, target: Path) -> Path:
        files = list(path.iterdir()) if path.is_dir() else [path]
        missing = {file.name for file in files if file.stat().st_ino not in on_disk}
        assert not missing, f"renamed before it is on the disk: {missing}"
        return rename(path, target)

    def check_removal(path: Path) -> None:
        recorded = (folder / "state.json").read_text()
        assert f'/{path.name}"' not in recorded, f"deleted while state.json names it: {path.name}"
        shutil.rmtree(path)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", check_rename)
    monkeypatch.setattr(manifest, "remove_folder", check_removal)
    for step in (1, 2):
        save_load.write_content(folder, {"state": {"step": step}}, {}, keep=1)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.check
def test_the_order_of_a_commit(tmp_path, monkeypatch):
    check_the_order_of_a_commit(tmp_path, monkeypatch)


def delete_first(monkeypatch) -> None:
    write = manifest._write_records

    def delete_and_write(run_dir: Path, training: dict, records: list[dict]) -> None:
        if (run_dir / "state.json").exists():
            manifest._remove_all_but(records, run_dir)
        write(run_dir, training, records)

    monkeypatch.setattr(manifest, "_write_records", delete_and_write)


def do_not_sync_the_record(monkeypatch) -> None:
    monkeypatch.setattr(manifest, "os", types.SimpleNamespace(fsync=lambda file: None))


@pytest.mark.check
@pytest.mark.parametrize(
    ("bug", "seen"),
    [
        (delete_first, "deleted while state.json names it: step-00000001"),
        (do_not_sync_the_record, "renamed before it is on the disk: {'state.json.tmp'}"),
    ],
)
def test_planted_order_is_noticed(tmp_path, monkeypatch, bug, seen):
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=f"^{re.escape(seen)}"):
        check_the_order_of_a_commit(tmp_path, monkeypatch)


@pytest.mark.check
def test_all_generators_go_on_where_they_were():
    """Also those that no model of this guide draws from: a reader's may."""

    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), np.random.rand(), random.random()

    state = save_load.get_rng_state()
    first = draw()
    assert all(one != other for one, other in zip(first, draw(), strict=True))
    save_load.set_rng_state(state)
    assert draw() == first


# --- what is no longer kept ---


def test_what_cannot_be_deleted_is_said_and_tried_again(tmp_path, monkeypatch, caplog):
    """By the next save, which fails if that does: else a disk would fill with checkpoints."""
    refused = []

    def refuse(path: Path) -> None:
        refused.append(path.name)
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def save(step: int) -> None:
        save_load.write_content(tmp_path, {"state": {"step": step}}, {}, keep=1)

    save(1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "remove_folder", refuse)
        save(2)
        old = tmp_path / "checkpoints/step-00000001"
        said = f"an older checkpoint cannot be deleted: {old} (Permission denied)"
        assert said in caplog.messages
        with pytest.raises(InputError, match=r"step 3 could not be .*\(Permission denied\)"):
            save(3)
    assert refused == ["step-00000001"] * 2
    (record,) = json.loads((tmp_path / "state.json").read_text())["checkpoints"]
    assert record["step"] == 2, "the one before stays in force"
    save(4)
    assert [path.name for path in old.parent.iterdir()] == ["step-00000004"]

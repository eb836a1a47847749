"""The failure matrix: whatever happens to a run, it resumes exactly or one sentence refuses it.

Each row is a failure. It happens to checkpoints in a folder and in a store (S3). Nothing that is
complete is lost.
"""

import errno
import functools
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import fsspec
import pytest
from filelock import FileLock
from helpers import Runs, make_variant, newest_step, speak_at_once
from runner import SAVE_STAGES, after_steps, interrupt
from torch.distributed.checkpoint import filesystem

from common import checkpoint

FSDP = "04-fsdp"
OF_AN_EARLIER_VERSION = Path(__file__).parent / "checkpoint_2026_11.tar.xz"


class Cell:
    """A run that saves every 5 steps in this place: a folder or an address."""

    def __init__(self, runs: Runs, name: str, place: str, env: dict[str, str]) -> None:
        self.runs, self.name, self.env = runs, name, env
        self.args: tuple[object, ...] = ("--checkpoint-dir", place)
        self.chapter = self.straight = "01-single-gpu"  # what runs, and what nobody stops
        self.fs, self.root = fsspec.url_to_fs(f"{place}/{name}")

    def start(self, **options: object) -> int:
        """Start the run, wait until it ends, and return the exit status of rank 0."""
        options = {"chapter": self.chapter, "env": self.env, "plant": speak_at_once, **options}
        return self.runs.finish(self.name, *self.args, **options)[0]

    def files(self) -> dict[str, bytes]:
        self.fs.invalidate_cache()
        return {file: self.fs.cat_file(file) for file in self.fs.find(self.root)}

    def complete(self) -> list[int]:
        found = [re.search(r"step-(\d+)/\.metadata$", file) for file in self.files()]
        return [int(match[1]) for match in found if match]

    def of(self, step: int) -> str:
        return f"{self.root}/step-{step:08d}"

    def delete(self, step: int) -> None:
        self.fs.rm(self.of(step), recursive=True)

    def refused(self, sentence: str, **options: object) -> None:
        """A start ends with status 2 and this sentence, and leaves all files that there are."""
        before = self.files()
        assert self.start(**options) == 2
        said = self.runs.said(self.name)
        assert re.search(f"^{sentence}", said, re.M) and "Traceback" not in said, said
        assert before.items() <= self.files().items()

    def resumes(self, step: int) -> None:
        """The next start goes on after this step, bit for bit as if nothing had happened."""
        straight = f"straight-{self.straight}"
        if not (self.runs.folder / straight).exists():
            assert self.runs.finish(straight, chapter=self.straight) == [0]
        trained = len(self.runs.samples(self.name))
        assert max(self.complete(), default=0) == step
        assert self.start() == 0, self.runs.said(self.name)
        kept = {file.split("/")[-2] for file in self.files()}
        assert kept == {"step-00000035", "step-00000040"}, "nothing half-written stays"
        self.fs.get(f"{self.root}/", f"{self.runs.folder / self.name}/checkpoints/", recursive=True)
        self.runs.assert_same(straight, self.name, trained, step)


# --- the rows: what happens; each returns the step after which the run goes on ---


def killed(stage: str, cell: Cell) -> int:
    assert cell.start(kill_in_save=(4, stage)) == -signal.SIGKILL
    return 20 if stage in ("complete", "deleting") else 15


def killed_between_saves(cell: Cell) -> int:
    """One run is killed, and all rows get a copy of it."""
    killed, run_dir = cell.runs.folder / "killed", cell.runs.folder / cell.name
    if not killed.exists():
        assert cell.runs.finish("killed", kill_after_steps=23) == [-signal.SIGKILL]
    shutil.copytree(killed, run_dir)
    shutil.copy(f"{killed}-0.samples", f"{run_dir}-0.samples")
    (run_dir / "newest").write_text(f"{cell.fs.unstrip_protocol(cell.of(20))}\n")
    cell.fs.put(f"{run_dir}/checkpoints/", f"{cell.root}/", recursive=True)
    shutil.rmtree(run_dir / "checkpoints")
    return 20


def interrupted(cell: Cell) -> int:
    """Ctrl-C is not taken for a full disk."""
    assert cell.start(kill_in_save=(4, "writing", interrupt)) == 130
    assert cell.runs.said(cell.name).splitlines()[-1].startswith("Interrupted. To resume the run, ")
    return 15


def no_checkpoint_dir(cell: Cell) -> int:
    step, args = killed_between_saves(cell), cell.args
    cell.args = ()
    cell.refused(
        r"\S+ has no complete checkpoint, but the run has saved \S+step-00000020: give the same"
    )
    cell.args = args
    return step


def go_to_a_node_of_its_own(folder: Path) -> None:
    """A relative path, and an address of memory, are other ones for each rank."""
    os.chdir(folder / os.environ["RANK"])
    checkpoint.SEEN_WITHIN_S = 0.3
    speak_at_once()


def seen_by_one_rank(cell: Cell) -> None:
    for rank in "01":
        (cell.runs.folder / cell.name / rank).mkdir(parents=True)
    cell.args = ("--checkpoint-dir", "memory://here" if cell.env else "here")
    plant = functools.partial(go_to_a_node_of_its_own, cell.runs.folder / cell.name)
    sentence = r"Rank 1 on \S+ does not see \S+ of rank 0: give a --save-dir or a --checkpoint-dir"
    cell.refused(sentence, chapter="02-ddp", ranks=2, plant=plant)
    assert re.match(rf"\[rank 1\] {sentence}", cell.runs.said(cell.name, 1))


def a_locked_run(cell: Cell) -> int:
    step = killed_between_saves(cell)
    with FileLock(cell.runs.folder / cell.name / ".lock"):
        cell.refused("Another process is training in ")
    return step


def copy_checkpoint(root: str) -> None:
    def copy() -> None:
        fs, path = fsspec.url_to_fs(root)
        fs.copy(f"{path}/step-00000010/", f"{path}/step-00000015/", recursive=True)

    after_steps(12, copy)


def another_writer(cell: Cell) -> int:
    """A checkpoint of the next save's step appears."""
    plant = functools.partial(copy_checkpoint, cell.fs.unstrip_protocol(cell.root))
    cell.refused(r"\S+step-00000015 exists: another process saves in ", plant=plant)
    cell.delete(15)
    return 10


def damaged(name: str, sentence: str, cell: Cell) -> int:
    """A file is cut short. Without its folder, an older checkpoint is resumed."""
    killed_between_saves(cell)
    file = f"{cell.of(20)}/{name}"
    cell.fs.pipe_file(file, cell.fs.cat_file(file)[:99])
    cell.refused(sentence)
    cell.delete(20)
    return 15


def of_an_earlier_version(cell: Cell) -> None:
    folder = cell.runs.folder / f"{cell.name}-unpacked"
    shutil.unpack_archive(OF_AN_EARLIER_VERSION, folder, filter="data")
    cell.fs.put(f"{folder}/run/checkpoints/", f"{cell.root}/", recursive=True)
    cell.refused(r"\S+settings\.json is missing or damaged .* an earlier version of this guide")


def fill_up() -> None:
    """From this step on, a disk or a store takes no tensor; test_resume_ranks.py limits files."""
    refuse = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    after_steps(17, lambda: setattr(filesystem, "_write_item", refuse))
    speak_at_once()


def a_full_disk(cell: Cell) -> int:
    """In the background, the save of step 15 may still be written when the disk is full."""
    cell.refused(r"\S+step-000000(15|20) could not be used \(.*\): is the disk", plant=fill_up)
    return max(cell.complete())


def send(number: int) -> None:
    """Send this process a signal; the thread that writes a checkpoint takes a second longer."""
    os.kill(os.getpid(), number)
    time.sleep(1)


def in_background(chapter: str, row: Callable[[Cell], int], cell: Cell) -> int:
    """The same while the training goes on: a thread writes, in the variant of this chapter."""
    folder = cell.runs.folder / "variants"
    made = folder / f"{chapter}+async-checkpoint"
    if not made.exists():
        make_variant(folder, chapter, "async-checkpoint")
    cell.chapter, cell.straight = str(made), chapter
    return row(cell)


def interrupted_while_it_trains_on(cell: Cell) -> int:
    """The exit waits for the checkpoint, and notes it, as after any error."""
    action = functools.partial(send, signal.SIGINT)
    assert cell.start(kill_in_save=(4, "writing", action)) == 130
    assert newest_step(cell.runs.folder / cell.name) == 20
    return 20


SETTINGS = r"\S+step-00000020/settings\.json is missing or damaged"
UNREADABLE = r"The checkpoint \S+/step-00000020 cannot be read \(.*\): try again, or delete it"
ROWS: dict[str, Callable[[Cell], int | None]] = {
    "killed between two saves": killed_between_saves,
    **{f"killed: {stage}": functools.partial(killed, stage) for stage in SAVE_STAGES},
    "Ctrl-C in a save": interrupted,
    "a forgotten --checkpoint-dir": no_checkpoint_dir,
    "a folder that one rank sees": seen_by_one_rank,
    "two writers: a locked run": a_locked_run,
    "two writers: another save": another_writer,
    "settings cut short": functools.partial(damaged, "settings.json", SETTINGS),
    "tensors cut short": functools.partial(damaged, "__0_0.distcp", UNREADABLE),
    "metadata cut short": functools.partial(damaged, ".metadata", UNREADABLE),
    "an earlier version": of_an_earlier_version,
    "a full disk": a_full_disk,
}
IN_BACKGROUND: dict[str, Callable[[Cell], int]] = {
    **{f"killed: {stage}": functools.partial(killed, stage) for stage in SAVE_STAGES},
    "Ctrl-C": interrupted_while_it_trains_on,
    "a full disk": a_full_disk,
}
ASYNC = {f"async: {n}": functools.partial(in_background, FSDP, r) for n, r in IN_BACKGROUND.items()}
ASYNC["async in chapter 2: killed"] = functools.partial(
    in_background, "02-ddp", functools.partial(killed, "writing")
)
ROWS |= ASYNC
QUICK = [
    ("killed: writing", "folder"),
    ("settings cut short", "folder"),
    ("killed: written", "store"),
]
# Of the variant, these are done before every change, and all others each night.
ASYNC_IN_CI = ("async: killed: writing", "async: Ctrl-C", "async: a full disk")


def tier_of(row: str, column: str) -> pytest.MarkDecorator | tuple:
    if (row, column) in QUICK:
        return ()
    is_nightly = column == "store" or (row in ASYNC and row not in ASYNC_IN_CI)
    return pytest.mark.nightly if is_nightly else pytest.mark.ci


CELLS = [
    pytest.param(row, column, marks=tier_of(row, column), id=f"{row} - {column}")
    for column in ("folder", "store")
    for row in ROWS
]


@pytest.fixture(scope="module")
def runs(make_folder) -> Runs:
    return Runs(make_folder("runs"))


@pytest.mark.parametrize(("row", "column"), CELLS)
def test_resumes_exactly_or_is_refused(runs, request, row, column):
    name = re.sub(r"\W+", "-", f"{row} {column}")
    place, env = str(runs.folder / "elsewhere"), {}
    if column == "store":
        place, env = "s3://bucket/elsewhere", request.getfixturevalue("s3")
    cell = Cell(runs, name, place, env)
    step = ROWS[row](cell)
    if step is not None:
        cell.resumes(step)

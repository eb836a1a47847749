"""Checkpoints that are written while chapter 4 trains on: they are those of a run that waits."""

import functools
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import assert_exact, assert_same_tensors, newest_step, speak_at_once, tensors
from runner import SAVE_STAGES, Ranks, finish
from test_stop import LOG_EVERY, USR1, Runs
from torch.distributed.checkpoint import filesystem
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree

from common.checkpoint import asynchronous, save_load

CHAPTER = "04-fsdp"
ASYNC = "--async-checkpoint"
LAST_STEP = 30
# Seconds that it takes to write a checkpoint that nobody waits for, once the training has ended.
WRITING_S = 2.0
# Steps that are done while a checkpoint is written; for so many seconds at most, the run may wait.
STEPS_MEANWHILE, PATIENCE_S = 3, 120


@pytest.fixture(scope="module")
def runs(make_folder) -> Runs:
    return Runs(make_folder("runs"))


@pytest.fixture(scope="module")
def straight(runs) -> Path:
    """A run that waits for each of its checkpoints, and that nobody stops."""
    assert runs.start(CHAPTER, "straight") == [0, 0]
    return runs.folder / "straight"


def start_ranks(runs: Runs, name: str, *args: object, **options: object) -> Ranks:
    files = [str(runs.folder / f"{name}-{rank}.samples") for rank in range(2)]
    errors = [str(runs.folder / f"{name}-{rank}.stderr") for rank in range(2)]
    options = {"samples_file": files, "stderr_file": errors, **options}
    arguments = [*runs.flags, "--save-dir", runs.folder, "-e", name, *args]
    return Ranks(2, arguments, chapter=CHAPTER, **options)


@pytest.mark.ci
@pytest.mark.parametrize("stage", SAVE_STAGES)
def test_after_kill_9_while_it_is_written(runs, straight, stage):
    """The rank that commits is killed in its fourth checkpoint, and the training is past it."""
    name = f"killed-{stage}"
    killed = {"kill_in_save": [(4, stage), None], "plant": speak_at_once}
    ranks = start_ranks(runs, name, ASYNC, **killed)
    assert finish(ranks.processes[0]) == -signal.SIGKILL and finish(ranks.processes[1]) == 1
    trained, resumed_after = len(runs.samples(name, 0)), newest_step(runs.folder / name)
    assert resumed_after == (20 if stage == "committed" else 15)
    # The checkpoint of step 25 waits for that of step 20, and for what that has deleted, in which
    # case only the checkpoint of step 30 waits for it.
    assert 20 <= trained <= (30 if stage == "committed" else 25)
    assert start_ranks(runs, name, ASYNC).finish() == [0, 0]
    assert_exact(straight, runs.folder / name)
    samples = runs.samples("straight", 0)
    assert runs.samples(name, 0) == samples[:trained] + samples[resumed_after:]
    kept = {path.name for path in (runs.folder / name / "checkpoints").iterdir()}
    assert kept == {"step-00000035", "step-00000040"}, "nothing half-written stays"


def write_slowly(path: str | None = None) -> None:
    """Note when checkpoints are written and steps are done.

    The first file of each checkpoint takes until the training has come further: a thread that
    writes it waits for that, and the training's own thread for no step, since none can be done.
    """
    save, write_item = save_load.dcp.save, filesystem._write_item
    noted: dict[str, list] = {"saves": [], "steps": []}
    waited = False

    def slow_save(*args: object, **kwargs: object) -> object:
        nonlocal waited
        waited = False
        begin = time.monotonic()
        try:
            return save(*args, **kwargs)
        finally:
            noted["saves"].append((begin, time.monotonic()))

    def slow_write_item(*args: object, **kwargs: object) -> object:
        nonlocal waited
        if not waited:
            waited = True
            if threading.current_thread() is not threading.main_thread():
                wait_for_steps(len(noted["steps"]) + STEPS_MEANWHILE)
        return write_item(*args, **kwargs)

    def wait_for_steps(step: int) -> None:
        if step > LAST_STEP:
            time.sleep(WRITING_S)
            return
        deadline = time.monotonic() + PATIENCE_S
        while len(noted["steps"]) < step and time.monotonic() < deadline:
            time.sleep(0.01)

    def note(*_: object) -> None:
        noted["steps"].append(time.monotonic())
        if path:
            Path(path).write_text(json.dumps(noted))

    save_load.dcp.save, filesystem._write_item = slow_save, slow_write_item
    register_optimizer_step_post_hook(note)


def steps_during_saves(run_dir: Path) -> list[int]:
    """Return for each checkpoint but the last how many steps were done while it was written."""
    noted = json.loads((run_dir.parent / f"{run_dir.name}.times").read_text())
    return [sum(begin < step < end for step in noted["steps"]) for begin, end in noted["saves"]]


def run_slowly(runs: Runs, name: str, *args: object, also=None) -> Path:
    """Train to LAST_STEP with 3 slow checkpoints. also: another plant of both ranks."""
    paths = [str(runs.folder / f"{name}.times"), None]
    plants = [functools.partial(plant_both, path, also) for path in paths]
    few = ("--max-steps", LAST_STEP, "--ckpt-freq", 10, "--keep-checkpoints", 9)
    assert start_ranks(runs, name, *few, *args, plant=plants).finish() == [0, 0]
    return runs.folder / name


def plant_both(path: str | None, also: Callable[[], None] | None) -> None:
    write_slowly(path)
    if also:
        also()


def assert_same_checkpoints(expected: Path, found: Path) -> None:
    for step in (10, 20, 30):
        values = [tensors(run_dir, step) for run_dir in (expected, found)]
        assert values[1]["state"]["step"] == step
        assert_same_tensors(*values)


@pytest.fixture(scope="module")
def waited(runs) -> Path:
    """A run that waits for its slow checkpoints."""
    return run_slowly(runs, "waited")


def test_training_goes_on_while_it_is_written(runs, waited):
    """Without the option no step is done meanwhile. What is written is of its step, not later."""
    trained = run_slowly(runs, "trained", ASYNC)
    assert steps_during_saves(waited) == [0, 0]
    assert min(steps_during_saves(trained)) >= STEPS_MEANWHILE
    assert_same_checkpoints(waited, trained)
    assert_exact(waited, trained)
    assert newest_step(trained) == LAST_STEP, "the run has not waited for the last one"


def not_copied(_: asynchronous.AsyncCheckpoints, content: dict) -> dict:
    return _pytree.tree_map(lambda value: value, content)


def copy_nothing() -> None:
    asynchronous.AsyncCheckpoints._copy = not_copied


def test_planted_tensors_that_train_on_are_noticed(runs, waited):
    found = run_slowly(runs, "not-copied", ASYNC, also=copy_nothing)
    with pytest.raises(AssertionError, match=r"\.model\."):
        assert_same_checkpoints(waited, found)


@pytest.mark.ci
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("args", [(), (ASYNC,)], ids=["waiting", "async"])
def test_a_full_disk_of_one_rank(runs, straight, args, rank):
    """A limit for each file stands for it; both ranks end, at the next checkpoint at the latest."""
    name = f"full-{rank}{''.join(args)}"
    limits = [100_000 if rank == limited else None for limited in range(2)]
    options = {"file_size_limit": limits, "plant": speak_at_once}
    assert start_ranks(runs, name, *args, **options).finish() == [2, 2]
    sentence = runs.said(name, 0).splitlines()[-1]
    assert "The checkpoint of step 5 could not be written" in sentence
    assert "File too large" in sentence and "last complete checkpoint" in sentence
    assert not (runs.folder / name / "state.json").exists()
    assert start_ranks(runs, name, *args).finish() == [0, 0]
    assert_exact(straight, runs.folder / name)


def notice_at_once() -> None:
    """The step after the checkpoint waits until its thread has failed, or written it."""
    speak_at_once()
    saves = []
    init = asynchronous.AsyncCheckpoints.__init__

    def noting_init(self: asynchronous.AsyncCheckpoints, *args: object) -> None:
        saves.append(self)
        init(self, *args)

    def wait(*_: object) -> None:
        if saves and saves[0]._writing is not None:
            saves[0]._writing.exception(timeout=PATIENCE_S)

    asynchronous.AsyncCheckpoints.__init__ = noting_init
    register_optimizer_step_post_hook(wait)


def tell_nobody() -> None:
    notice_at_once()
    asynchronous.signal.raise_signal = lambda number: None


@pytest.mark.parametrize("plant", [notice_at_once, tell_nobody])
def test_a_failure_stops_the_run_at_the_next_logged_step(runs, plant):
    """Without the signal, only the next checkpoint would."""
    name = f"full-{plant.__name__}"
    options = {"file_size_limit": [None, 100_000], "plant": plant}
    seldom = ("--log-freq", 2, "--ckpt-freq", 6)
    assert start_ranks(runs, name, *seldom, ASYNC, **options).finish() == [2, 2]
    trained = {len(runs.samples(name, rank)) for rank in range(2)}
    assert trained == {8 if plant is notice_at_once else 12}
    sentence = "The checkpoint of step 6 could not be written"
    lines = [line for line in runs.said(name, 0).splitlines() if sentence in line]
    assert len(lines) == 2
    assert "This run stops the next time it logs metrics." in lines[0]
    assert lines[1].startswith(sentence)


@pytest.mark.ci
def test_stopped_by_a_signal(runs, straight):
    """The checkpoint of the stop is complete before the run says so."""
    statuses = runs.start(CHAPTER, "stopped", ASYNC, signals=([], [USR1]))
    runs.assert_stopped("stopped", statuses, LOG_EVERY)
    assert runs.start(CHAPTER, "stopped", ASYNC) == [0, 0]
    runs.assert_undisturbed("stopped", "straight")


def do_not_wait() -> None:
    asynchronous.AsyncCheckpoints.finish = lambda self: None


@pytest.mark.ci
def test_planted_end_that_does_not_wait_is_noticed(runs):
    """The process group ends before the checkpoint is complete."""
    run_dir = run_slowly(runs, "not-waited", ASYNC, also=do_not_wait)
    assert newest_step(run_dir) == 20

"""Runs that are stopped and go on: on as many ranks, on others, in other chapters."""

import functools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from helpers import (
    ROOT,
    assert_exact,
    assert_same_tensors,
    children,
    first_then_nightly,
    go_back_to,
    make_flags,
    newest_step,
    plant,
    read_metrics,
    save_what_is_loaded,
    speak_at_once,
    tensors,
    wait_for_file,
)
from runner import Ranks, finish, start

from common.checkpoint import save_load

MIDDLE = 15


@pytest.fixture(scope="module")
def folder(make_folder) -> Path:
    return make_folder("runs")


@pytest.fixture(scope="module")
def flags(folder) -> list[object]:
    """With dropout: each rank's random state counts."""
    (folder / "inputs").mkdir()
    return [*make_flags(folder / "inputs"), "--save-dir", folder]


@pytest.fixture(scope="module")
def no_dropout(flags, folder) -> list[object]:
    """For other numbers of ranks: each rank draws a dropout of its own. A batch for 1, 2, 3, 4."""
    return [*flags, "-m", "gpt2-tiny", "--global-batch-size", 12, "--max-steps", 20]


def run(world_size: int, flags: list[object], name: str, *args: object, **options) -> list[int]:
    """Run chapter 2 on some ranks, or on 0 of them chapter 1; return the exit statuses."""
    arguments = [*flags, "-e", name, *args]
    if world_size == 0:
        return [finish(start(arguments, **options))]
    return Ranks(world_size, arguments, chapter="02-ddp", **options).finish()


def assert_close(expected: Path, found: Path) -> None:
    """The losses of another number of ranks: sums are taken in another order."""
    values = [[line.get("loss") for line in read_metrics(path)] for path in (expected, found)]
    assert len(values[0]) == len(values[1])
    for one, other in zip(*values, strict=True):
        assert one == other or one == pytest.approx(other, rel=1e-5)


@pytest.fixture(scope="module")
def straight(folder, flags) -> Path:
    assert run(2, flags, "straight") == [0, 0]
    assert read_metrics(folder / "straight")[-1]["epoch"] >= 2
    return folder / "straight"


def test_each_rank_draws_its_own_dropout(folder, flags, straight, tmp_path):
    """The planted bug seeds all ranks alike: they would drop the same elements."""
    states = [tensors(straight)[f"rng-{rank}"]["torch"] for rank in range(2)]
    assert not torch.equal(*states)
    chapter = plant("02-ddp", tmp_path / "chapter", [("set_seed(args.seed + rank)", "set_seed(0)")])
    ranks = Ranks(2, [*flags, "-e", "alike", "--max-steps", 2], chapter=chapter)
    assert ranks.finish() == [0, 0]
    states = [tensors(folder / "alike")[f"rng-{rank}"]["torch"] for rank in range(2)]
    assert torch.equal(*states)


@pytest.mark.parametrize("victim", first_then_nightly([0, 1]))
def test_after_kill_9_of_one_rank(folder, flags, straight, victim):
    """The others end, and say why and how to go on; the run that goes on is the same bit by bit.

    `finish` waits for less time than the process group's timeout.
    """
    name, steps = f"killed-{victim}", 23
    options = {
        "kill_after_steps": [steps if rank == victim else None for rank in range(2)],
        "stderr_file": [str(folder / f"{name}-{rank}.stderr") for rank in range(2)],
    }
    arguments = [*flags, "-e", name]
    ranks = Ranks(2, arguments, chapter="02-ddp", **options)
    assert finish(ranks.processes[victim]) == -signal.SIGKILL
    assert finish(ranks.processes[1 - victim]) == 1
    said = (folder / f"{name}-{1 - victim}.stderr").read_text().splitlines()[-1]
    assert re.search(r"other ranks are gone or out of reach \(.*Connection (closed|reset)", said)
    assert f"-e {name}" in said.split("to resume it after a stop: ")[1]
    assert newest_step(folder / name) == 20
    assert run(2, flags, name) == [0, 0]
    assert_exact(straight, folder / name)


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param(False, marks=pytest.mark.ci),
        pytest.param(True, marks=pytest.mark.nightly),
    ],
)
def test_torchrun_ends_all_ranks_when_one_is_killed(tmp_path, flags, stops):
    """As a reader sees it: torchrun names the rank and the signal, and no process stays.

    The planted bug: the other rank ends only when torchrun kills it, which it does after 30 s.
    """
    launch = ROOT / "02-ddp/launch.sh"
    arguments = [*flags, "--save-dir", tmp_path, "-e", "run", "--max-steps", 10**5]
    command = ["bash", launch, *arguments, "--log-freq", 1, "--ckpt-freq", 5]
    agent = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)
    try:
        wait_for_file(tmp_path / "run/state.json", lambda: agent.poll() is None)
        workers = children(agent.pid)
        if stops:
            os.kill(workers[0], signal.SIGSTOP)
        os.kill(workers[1], signal.SIGKILL)
        _, said = agent.communicate(timeout=300)
    finally:
        agent.kill()
    assert agent.returncode == 1
    assert "Signal 9 (SIGKILL) received by PID" in said and "rank      : 1" in said
    assert ("forcefully exiting" in said) == stops
    assert not any(map(psutil.pid_exists, workers))


@pytest.fixture(scope="module")
def alone(folder, no_dropout) -> Path:
    """Chapter 1's run, never stopped."""
    assert run(0, no_dropout, "alone") == [0]
    return folder / "alone"


@pytest.mark.parametrize(
    ("before", "after"),
    first_then_nightly([(2, 1), (2, 4), (0, 2), (2, 0)]),
    ids=["2 to 1", "2 to 4 ranks", "chapter 1 to 2", "chapter 2 to 1"],
)
def test_goes_on_elsewhere(folder, no_dropout, alone, before, after):
    """Begun on some ranks, set back to the middle, and ended on others: chapter 1's losses."""
    name = f"from-{before}-to-{after}"
    assert set(run(before, no_dropout, name)) == {0}
    go_back_to(MIDDLE, folder / name)
    assert set(run(after, no_dropout, name)) == {0}
    assert_close(alone, folder / name)


@pytest.mark.parametrize("after", first_then_nightly(["2 --zero1", "3 --zero1", "2", "0"]))
def test_sharded_moments_go_on(folder, no_dropout, alone, after):
    """ZeRO-1 on 2 ranks, then on as many, on 3, without it, and in chapter 1."""
    name = f"zero1-{after.replace(' ', '')}"
    assert run(2, no_dropout, name, "--zero1") == [0, 0]
    first = read_metrics(folder / name)
    go_back_to(MIDDLE, folder / name)
    world_size, *flag = after.split()
    assert set(run(int(world_size), no_dropout, name, *flag)) == {0}
    assert_close(alone, folder / name)
    if after == "2 --zero1":
        assert [line.get("loss") for line in read_metrics(folder / name)] == [
            line.get("loss") for line in first
        ], "bit by bit"


def save_the_rate_of_the_last_step() -> None:
    """ZeRO's inner optimizer, which holds the moments, learns of a new rate in the next step."""
    original = save_load.collect_content

    def content(model, optimizer, *args: object) -> dict:
        found = original(model, optimizer, *args)
        found["optimizer"]["param_groups"][0]["lr"] = optimizer.optim.param_groups[0]["lr"]
        return found

    save_load.collect_content = content


def save_the_moments_of_rank_0_only() -> None:
    original = save_load.dcp.save

    def save(content: dict, **options: object) -> object:
        for moments in content["optimizer"]["state"].values():
            moments["exp_avg"] = moments["exp_avg"] * (save_load.dist.get_rank() == 0)
        return original(content, **options)

    save_load.dcp.save = save


@pytest.mark.ci
@pytest.mark.parametrize("bug", [save_the_rate_of_the_last_step, save_the_moments_of_rank_0_only])
def test_planted_bug_in_sharded_moments_is_noticed(folder, no_dropout, alone, bug):
    assert run(2, no_dropout, bug.__name__, "--zero1", plant=bug) == [0, 0]
    go_back_to(MIDDLE, folder / bug.__name__)
    assert run(2, no_dropout, bug.__name__, "--zero1", plant=bug) == [0, 0]
    with pytest.raises(AssertionError):
        assert_close(alone, folder / bug.__name__)


# Chapter and ranks of each part of a run, which goes on where the one before it was set back to.
JOURNEY = [
    ("01-single-gpu", 1),
    ("04-fsdp", 4),
    ("04-fsdp", 2),
    ("02-ddp", 2),
    ("01-single-gpu", 1),
]
EVERY = 4


def load_no_moments() -> None:
    load = save_load.dcp.load

    def load_all_but_moments(content: dict, **options: object) -> None:
        load(content, **options)
        for moments in content["optimizer"]["state"].values():
            moments["exp_avg"].zero_()

    save_load.dcp.load = load_all_but_moments


def assert_loaded(saved: Path, step: int, loaded: Path) -> None:
    """Weights, moments, schedule and position, bit by bit, on whatever number of ranks."""
    expected, found = tensors(saved, step), tensors(loaded)
    for content in (expected, found):
        (content["optimizer"]["param_groups"],) = content["optimizer"]["param_groups"]
    for key in ("model", "optimizer", "lr_scheduler", "state"):
        assert_same_tensors(expected[key], found[key], key)


@pytest.fixture(scope="module")
def every_loss(no_dropout) -> list[object]:
    """Without clipping: the norm of 10^6 float32 numbers is good to 1e-4, of a part to less.

    Adam hides a constant factor of all gradients, but not one that changes at a hand-over.
    """
    flags = [*no_dropout, "--log-freq", 1, "--max-grad-norm", "inf"]
    return [*flags, "--ckpt-freq", EVERY, "--keep-checkpoints", 5]


@pytest.fixture(scope="module")
def chapter_1(folder, every_loss) -> Path:
    assert run(0, every_loss, "every-loss") == [0]
    return folder / "every-loss"


def go_on_with(chapter: str, world_size: int, arguments: list[object], **options) -> list[int]:
    if chapter == "01-single-gpu":
        return [finish(start(arguments, **options))]
    return Ranks(world_size, arguments, chapter=chapter, **options).finish()


def test_journey_through_the_chapters(folder, every_loss, chapter_1):
    """After every hand-over the tensors of the checkpoint, and the losses of chapter 1."""
    run_dir = folder / "journey"
    for number, (chapter, world_size) in enumerate(JOURNEY):
        loaded = folder / f"loaded-{number}"
        options = {"plant": functools.partial(save_what_is_loaded, loaded)}
        statuses = go_on_with(chapter, world_size, [*every_loss, "-e", "journey"], **options)
        assert set(statuses) == {0}
        if number:
            assert_loaded(run_dir, EVERY * number, loaded)
            shutil.rmtree(loaded)
        assert_close(chapter_1, run_dir)
        assert len(read_metrics(run_dir)) == 20
        go_back_to(EVERY * (number + 1), run_dir)


def test_planted_loss_of_moments_is_noticed(folder, every_loss, chapter_1):
    run_dir = folder / "no-moments"
    shutil.copytree(chapter_1, run_dir)
    go_back_to(EVERY, run_dir)
    bug = functools.partial(save_what_is_loaded, folder / "loaded-none", load_no_moments)
    arguments = [*every_loss, "-e", "no-moments"]
    assert go_on_with("04-fsdp", 2, arguments, plant=bug) == [0, 0]
    with pytest.raises(AssertionError):
        assert_close(chapter_1, run_dir)
    with pytest.raises(AssertionError, match="exp_avg"):
        assert_loaded(run_dir, EVERY, folder / "loaded-none")


SHARDED = [(2, ()), (3, ()), (2, ("--cpu-offload",)), (2, ("--async-checkpoint",))]


@pytest.fixture(scope="module")
def sharded(folder, flags) -> Callable[[int], Path]:
    """A function: the folder of chapter 4's run on so many ranks, never stopped."""

    @functools.cache
    def train(world_size: int) -> Path:
        name = f"sharded-{world_size}"
        assert set(go_on_with("04-fsdp", world_size, [*flags, "-e", name])) == {0}
        return folder / name

    return train


@pytest.mark.parametrize(("world_size", "args"), first_then_nightly(SHARDED), ids=str)
def test_sharded_run_goes_on_after_kill_9(folder, flags, sharded, world_size, args):
    """In the middle of the second epoch, bit by bit on any number of ranks and with any option."""
    straight = sharded(world_size)
    arguments = [*flags, "-e", f"killed-{world_size}{''.join(args)}", *args]
    options = {"kill_after_steps": [None] * (world_size - 1) + [23], "plant": speak_at_once}
    ranks = Ranks(world_size, arguments, chapter="04-fsdp", **options)
    assert finish(ranks.processes[-1]) == -signal.SIGKILL
    assert ranks.finish() == [1] * (world_size - 1) + [-signal.SIGKILL]
    killed = folder / arguments[arguments.index("-e") + 1]
    # An asynchronous save after step 20 may not have ended: then the one before it is the last.
    assert newest_step(killed) in ((15, 20) if "--async-checkpoint" in args else (20,))
    assert set(go_on_with("04-fsdp", world_size, arguments)) == {0}
    assert_exact(straight, killed)

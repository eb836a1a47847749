"""A run that is told to stop saves on all ranks and goes on as if nobody had disturbed it."""

import ctypes
import functools
import multiprocessing
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from helpers import (
    CHAPTERS,
    RESUMED_STEPS,
    Runs,
    assert_exact,
    make_variant,
    newest_step,
    plant,
    read_metrics,
    register,
    speak_at_once,
)
from runner import after_steps

from common import launch

FIRST, _, LAST = CHAPTERS[2:]
TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)
# Ranks agree on a stop at steps that are logged. At these, no other checkpoint is due.
LOG_EVERY, SAVE_EVERY = 7, 28
SIGNAL_AFTER = 3  # steps of each process: in the middle between two log lines


class StoppedRuns(Runs):
    """Runs on 2 ranks, which get their signals after some steps."""

    def stop(self, name: str, chapter: str | Path, *args: object, signals=(), **options) -> list:
        """Start a run until it ends or stops; return the exit statuses.

        signals: for each rank, those that it sends to itself.
        """
        sent = [(SIGNAL_AFTER, list(each)) for each in signals] or None
        options = {"ranks": 2, "signals_after_steps": sent, **options}
        return self.finish(name, *args, chapter=str(chapter), **options)

    def assert_stopped(self, name: str, statuses: list[int], step: int) -> None:
        """All ranks have saved after this step, rank 0 has said so, and all ask for a requeue."""
        assert set(statuses) == {75}, f"the statuses are {statuses}"  # EX_TEMPFAIL
        saved = newest_step(self.folder / name)
        assert saved == step, f"the checkpoint is of step {saved}"
        assert (self.folder / name / "requeue").exists(), "the file is missing"
        said = f"Told to stop; saved after step {step}. {launch.RESUMES}"
        assert self.said(name).splitlines()[-1] == said, "the last line is another"
        for rank in range(1, len(statuses)):
            assert self.said(name, rank) == "", f"rank {rank} speaks"
        assert read_metrics(self.folder / name)[-1]["step"] == step, "another step is logged"


@pytest.fixture(scope="module")
def runs(make_folder) -> StoppedRuns:
    return StoppedRuns(make_folder("runs"), "--log-freq", LOG_EVERY, "--ckpt-freq", SAVE_EVERY)


@pytest.fixture(scope="module")
def straight(runs):
    """A function: the name of a chapter's run that nobody stops."""

    @functools.cache
    def train(chapter: str) -> str:
        assert runs.stop(chapter, chapter) == [0, 0], runs.said(chapter)
        assert read_metrics(runs.folder / chapter)[-1]["epoch"] >= 2
        return chapter

    return train


# The chapter, the signals of rank 0 and of rank 1 in each start but the last, variants.
TWICE = (([TERM, TERM], []), ([], [USR1]))
STOPPED = [
    (FIRST, TWICE, ()),
    pytest.param(LAST, TWICE[1:], (), marks=pytest.mark.ci),
    pytest.param(
        *(CHAPTERS[3], (*TWICE, ([TERM], [TERM])), ("async-checkpoint",)),
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize(("chapter", "stops", "variants"), STOPPED)
def test_stopped_and_stopped_again(runs, straight, tmp_path, chapter, stops, variants):
    """Either signal, to either rank or to both, once or twice: all ranks save at the same step."""
    expected = straight(chapter)
    name = "-".join([chapter, "stopped", *variants])
    if variants:
        chapter = make_variant(tmp_path, chapter, *variants)
    for number, signals in enumerate(stops):
        statuses = runs.stop(name, chapter, signals=signals)
        runs.assert_stopped(name, statuses, LOG_EVERY * (number + 1))
        assert (f"resumed after step {LOG_EVERY * number} of" in runs.said(name)) == (number > 0)
    # Told in its last steps, after which nothing is logged but the last step: it ends.
    late = RESUMED_STEPS - LOG_EVERY * len(stops) - 2
    signals = [(late, [USR1]), (late, [TERM])]
    assert runs.stop(name, chapter, signals_after_steps=signals) == [0, 0]
    said = runs.said(name)
    assert "Told to stop" not in said and f"step {RESUMED_STEPS}/{RESUMED_STEPS} |" in said
    runs.assert_same(expected, name)
    assert len(runs.samples(name)) == RESUMED_STEPS, "a stop repeats no step"
    assert not (runs.folder / name / "requeue").exists()


def replace_the_handler() -> None:
    """Do what Triton's compiler (LLVM) does in a run's first step: SIGUSR1 has no effect then."""
    after_steps(1, lambda: ctypes.CDLL(None).signal(USR1, ctypes.c_void_p(int(signal.SIG_IGN))))


# Two ways to stop a run: rank 0 after its compiler, or rank 1 alone.
AFTER_THE_COMPILER = {
    "signals_after_steps": [(LOG_EVERY + 1, [USR1]), None],
    "plant": replace_the_handler,
}
RANK_1_ALONE = {"signals": ([], [TERM]), "plant": speak_at_once}


def test_a_handler_that_a_compiler_has_replaced_is_set_again(runs):
    statuses = runs.stop("restored", FIRST, **AFTER_THE_COMPILER)
    runs.assert_stopped("restored", statuses, 2 * LOG_EVERY)


# What is replaced in the script, and the check that must be red.
BUGS = {
    "no agreement": ("            dist.all_reduce(stop_requests)\n", "", "the statuses are"),
    "no save": (" or last or stop:", " or last:", "the checkpoint is of step 0"),
    "each rank leaves by itself": ("stop_signals.append(received)", "sys.exit(75)", "the statuses"),
    "no file": ("= launch.ask_for_requeue(", "= (lambda *_: 75)(", "the file is missing"),
    "handler lost": ("launch.restore_stop_handlers()", "pass", "the statuses are"),
}
for right, wrong, _ in BUGS.values():
    register(FIRST, [(right, wrong)])


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_noticed(runs, tmp_path, bug):
    right, wrong, red = BUGS[bug]
    chapter = plant(FIRST, tmp_path / "chapter", [(right, wrong)])
    name = bug.replace(" ", "-")
    options = AFTER_THE_COMPILER if bug == "handler lost" else RANK_1_ALONE
    statuses = runs.stop(name, chapter, "--dist-timeout", 3, **options)
    with pytest.raises(AssertionError, match=f"^{red}"):
        runs.assert_stopped(name, statuses, LOG_EVERY)


# --- the other processes of a rank ---


def signal_the_family() -> None:
    """SIGTERM to a rank and to all processes that it has started, as Slurm and torchrun do."""
    # What Ranks starts would start others from a server, as Python does from 3.14 on.
    multiprocessing.set_start_method("fork", force=True)
    after_steps(SIGNAL_AFTER, send_to_family)


def send_to_family() -> None:
    children = psutil.Process().children()
    for process in children:
        process.terminate()
    psutil.wait_procs(children, timeout=0.5)  # those that prepare data go on
    os.kill(os.getpid(), signal.SIGTERM)


WORKERS = ("--num-workers", 1)


def check_the_family(runs: StoppedRuns, folder: Path, chapter: Path, name: str) -> None:
    """wandb's process ends at once, and those that prepare data go on until the rank ends them."""
    options = {"ranks": 1, "env": {"WANDB_MODE": "offline", "HOME": folder}}
    statuses = runs.stop(name, chapter, *WORKERS, plant=signal_the_family, **options)
    runs.assert_stopped(name, statuses, LOG_EVERY)
    assert runs.said(name).count("wandb's own process has ended") == 1
    assert runs.stop(name, chapter, *WORKERS, **options) == [0]
    assert "wandb's own process has ended" not in runs.said(name)
    assert read_metrics(runs.folder / name)[-1]["step"] == RESUMED_STEPS


@pytest.mark.ci
def test_the_other_processes_of_a_single_rank_are_told_too(runs, tmp_path):
    check_the_family(runs, tmp_path, make_variant(tmp_path, LAST, "workers"), "family")


WORKERS_THAT_STOP = [("dataloader.worker_init_fn = ignore_stop_signals", "pass")]
register(FIRST, WORKERS_THAT_STOP, ["workers"])


def test_planted_workers_that_end_with_the_signal_are_noticed(runs, tmp_path):
    variant = str(make_variant(tmp_path, FIRST, "workers"))
    chapter = plant(variant, tmp_path / "chapter", WORKERS_THAT_STOP)
    with pytest.raises(AssertionError, match=r"^the statuses are"):
        check_the_family(runs, tmp_path, chapter, "childless")


def kill_a_worker() -> None:
    """As the kernel does when a machine has no memory left; note the process ids of all."""

    def kill() -> None:
        workers = multiprocessing.active_children()
        Path(os.environ["NOTES"]).write_text("\n".join(str(worker.pid) for worker in workers))
        workers[0].kill()

    multiprocessing.set_start_method("fork", force=True)
    after_steps(SIGNAL_AFTER, kill)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.ci
@pytest.mark.parametrize("chapter", [CHAPTERS[0], FIRST])
def test_a_data_worker_that_is_killed_ends_the_run(runs, tmp_path, chapter):
    """The error says what was lost, and no process is left. The run can be resumed.

    PyTorch may notice the lost connection to the worker before it notices the lost worker.
    """
    variant = make_variant(tmp_path, chapter, "workers")
    name, notes = f"{chapter}-dead-worker", tmp_path / "notes"
    options = {"ranks": 1, "plant": kill_a_worker, "env": {"NOTES": notes}}
    assert runs.stop(name, variant, "--num-workers", 2, **options) == [1]
    said = runs.said(name)
    assert re.search("DataLoader worker .* (killed|exited)|^(Connection.*|EOF)Error", said, re.M)
    pids = [int(line) for line in notes.read_text().splitlines()]
    assert len(pids) == 2 and not any(map(is_running, pids))
    assert runs.stop(name, variant, *WORKERS, ranks=1) == [0]
    assert read_metrics(runs.folder / name)[-1]["step"] == RESUMED_STEPS


@pytest.mark.ci
def test_the_number_of_workers_may_change(runs, tmp_path):
    """And a run goes on without the variant, bit for bit as if nothing had happened."""
    variant = make_variant(tmp_path, FIRST, "workers")
    assert runs.stop("plain", FIRST, ranks=1) == [0]
    stop = {"ranks": 1, "signals_after_steps": (SIGNAL_AFTER, [TERM])}
    for number, (chapter, *args) in enumerate(
        [(variant, "--num-workers", 2), (FIRST,), (variant, *WORKERS)]
    ):
        statuses = runs.stop("changed", chapter, *args, **stop)
        runs.assert_stopped("changed", statuses, LOG_EVERY * (number + 1))
    assert runs.stop("changed", variant, "--num-workers", 3, ranks=1) == [0]
    assert_exact(runs.folder / "plain", runs.folder / "changed")

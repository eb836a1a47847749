"""A run that is told to stop saves on all ranks and goes on as if nobody had disturbed it."""

import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import (
    CHAPTERS,
    RESUMED_STEPS,
    ROOT,
    TORCHRUN,
    assert_exact,
    children,
    first_then_nightly,
    make_flags,
    newest_step,
    plant,
    read_metrics,
    wait_for_file,
)
from runner import Ranks, after_steps, finish, start

from common import cli, tracker
from common.distributed import REQUEUE_STATUS

STOPPING = CHAPTERS[2:]
TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)
# Ranks agree on a stop at steps that are logged. These are other ones than those with a checkpoint,
# so that a part of the loss that is logged next is in a checkpoint.
LOG_EVERY, SAVE_EVERY = 7, 5
SIGNAL_AFTER = 3  # steps of each process: in the middle between two log lines
# The signals of rank 0 and of rank 1, in each start of a run but the last.
STOPS = [
    ([USR1], []),
    ([], [USR1]),
    ([TERM, TERM], []),
    ([], [TERM]),
    ([TERM], [TERM]),
]


class Runs:
    """Runs of a chapter on 2 ranks in one folder; a run that stops is started again by its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags = [*make_flags(folder), "--log-freq", LOG_EVERY, "--ckpt-freq", SAVE_EVERY]

    def start(self, chapter: str | Path, name: str, *args: object, signals=(), **options) -> list:
        """Start a run until it ends or stops; return the exit statuses."""
        own = {
            "samples_file": [str(self.folder / f"{name}-{rank}.samples") for rank in range(2)],
            "stderr_file": [str(self.folder / f"{name}-{rank}.stderr") for rank in range(2)],
            "signals_after_steps": [(SIGNAL_AFTER, list(each)) for each in signals] or None,
        }
        arguments = [*self.flags, "--save-dir", self.folder, "-e", name, *args]
        return Ranks(2, arguments, chapter=chapter, **{**own, **options}).finish()

    def said(self, name: str, rank: int) -> str:
        return (self.folder / f"{name}-{rank}.stderr").read_text()

    def samples(self, name: str, rank: int) -> list[str]:
        return (self.folder / f"{name}-{rank}.samples").read_text().splitlines()

    def assert_stopped(self, name: str, statuses: list[int], step: int) -> None:
        """All ranks have saved after this step, rank 0 has said so, and both ask for a requeue."""
        same = statuses == [REQUEUE_STATUS] * 2
        assert same, f"the statuses are {statuses}"
        saved = newest_step(self.folder / name)
        assert saved == step, f"the checkpoint is of step {saved}"
        assert (self.folder / name / "requeue").exists(), "the file is missing"
        last = self.said(name, 0).splitlines()[-1]
        opening = f"Told to stop; saved after step {step}; to resume it after a stop: "
        assert last.startswith(opening) and f"-e {name}" in last, "the last line is another"
        assert self.said(name, 1) == "", "rank 1 speaks"
        assert read_metrics(self.folder / name)[-1]["step"] == step, "another step is logged"

    def assert_undisturbed(self, name: str, straight: str) -> None:
        """Bit by bit the same numbers, tensors and samples as in a run that nobody stopped."""
        assert_exact(self.folder / straight, self.folder / name)
        steps = [[line["step"] for line in read_metrics(self.folder / n)] for n in (straight, name)]
        assert steps[0] == steps[1]
        for rank in range(2):
            samples = self.samples(name, rank)
            assert samples == self.samples(straight, rank) and len(samples) == RESUMED_STEPS
        assert not (self.folder / name / "requeue").exists()


@pytest.fixture(scope="module")
def runs(make_folder) -> Runs:
    return Runs(make_folder("runs"))


@pytest.fixture(scope="module", params=first_then_nightly(STOPPING))
def chapter(request, runs) -> str:
    """The chapter, which has trained without a stop in the run of its name."""
    assert runs.start(request.param, request.param) == [0, 0]
    assert read_metrics(runs.folder / request.param)[-1]["epoch"] >= 2
    return request.param


def test_stopped_and_stopped_again(runs, chapter):
    """Either signal, to either rank or to both, once or twice: all ranks save at the same step."""
    name = f"{chapter}-stopped"
    for number, signals in enumerate(STOPS):
        statuses = runs.start(chapter, name, signals=signals)
        runs.assert_stopped(name, statuses, LOG_EVERY * (number + 1))
        assert (f"resumed after step {LOG_EVERY * number} of" in runs.said(name, 0)) == (number > 0)
    # No later step is logged but the last one, which ends the run.
    assert runs.start(chapter, name, signals=([USR1], [TERM])) == [0, 0]
    said = runs.said(name, 0)
    assert "Told to stop" not in said and f"step {RESUMED_STEPS}/{RESUMED_STEPS} |" in said
    runs.assert_undisturbed(name, chapter)


LOOP = '    for batch in cli.progress(dataloader, "evaluation"):\n'


def stop_in_evaluation(runs: Runs, folder: Path, replaced: list[tuple[str, str]]) -> None:
    """Rank 1 gets the signal in the first of two evaluations, between two logged steps."""
    noted = folder / "noted"
    note = (
        f"        with open({str(noted)!r}, 'a') as file:\n            file.write('x')\n"
        "        if dist.get_rank() == 1:\n            os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    chapter = plant(STOPPING[0], folder / "chapter", [(LOOP, LOOP + note), *replaced])
    limit = ("-b", 1, "--eval-freq", 3, "--eval-sequences", 2)
    statuses = runs.start(chapter, "evaluating", *limit, "--save-dir", folder)
    assert statuses == [REQUEUE_STATUS] * 2 and newest_step(folder / "evaluating") == LOG_EVERY
    batches = len(noted.read_text())
    assert batches == 2 * 2, f"{batches} batches were evaluated"  # of 2 ranks, in steps 3 and 6


def test_a_signal_in_an_evaluation_waits_for_few_sequences(runs, tmp_path):
    stop_in_evaluation(runs, tmp_path, [])


def test_planted_evaluation_of_all_sequences(runs, tmp_path):
    with pytest.raises(AssertionError, match="batches were evaluated"):
        stop_in_evaluation(runs, tmp_path, [(".sample(args.eval_sequences)", "")])


# What is replaced in the script, and the check that must be red.
BUGS = {
    "no agreement": ("            dist.all_reduce(stop_requests)\n", "", "the statuses are"),
    "no save": (" or last or stop:", " or last:", "the checkpoint is of step 5"),
    "each rank leaves by itself": ("stop_signals.append(received)", "sys.exit(75)", "the statuses"),
    "no file": ("= distributed.ask_for_requeue(", "= (lambda *_: 75)(", "the file is missing"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_noticed(runs, tmp_path, bug):
    right, wrong, red = BUGS[bug]
    chapter = plant(STOPPING[0], tmp_path / "chapter", [(right, wrong)])
    name = bug.replace(" ", "-")
    options = {"signals": ([], [TERM]), "plant": speak_at_once}
    statuses = runs.start(chapter, name, "--dist-timeout", 3, **options)
    with pytest.raises(AssertionError, match=f"^{red}"):
        runs.assert_stopped(name, statuses, LOG_EVERY)


def speak_at_once() -> None:
    """A rank that fails waits for rank 0 to speak first; here nothing would end it meanwhile."""
    cli.HEAD_START_S = 0.0


@pytest.mark.parametrize("chapter", first_then_nightly(STOPPING))
def test_alone(runs, chapter, tmp_path):
    arguments = [*runs.flags, "--save-dir", tmp_path, "-e", "run"]
    options = {"chapter": chapter, "stderr_file": str(tmp_path / "stderr")}
    stopped = start(arguments, signals_after_steps=(SIGNAL_AFTER, [USR1]), **options)
    assert finish(stopped) == REQUEUE_STATUS
    assert newest_step(tmp_path / "run") == LOG_EVERY
    assert f"saved after step {LOG_EVERY}; " in (tmp_path / "stderr").read_text().splitlines()[-1]
    assert finish(start(arguments, **options)) == 0
    assert read_metrics(tmp_path / "run")[-1]["step"] == RESUMED_STEPS


def signal_the_family(rank: int, catch: bool = True) -> None:
    """SIGTERM to this rank and to all processes that it has started, as Slurm and torchrun do.

    wandb's own is one, and those that prepare data are others. catch: whether a run goes on without
    wandb's, or as a planted bug does not.
    """
    # What Ranks starts would start others from a server, as Python does from 3.14 on.
    multiprocessing.set_start_method("fork", force=True)
    if int(os.environ["RANK"]) == rank:
        after_steps(SIGNAL_AFTER, send_to_family)
    if not catch:
        tracker.ConnectionError = ZeroDivisionError


def send_to_family() -> None:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid():
            os.kill(int(process.name), signal.SIGTERM)
    time.sleep(0.5)  # they are gone
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_process_of_wandb_is_stopped_too(runs, chapter, tmp_path):
    name = f"{chapter}-wandb"
    offline = {"WANDB_MODE": "offline", "HOME": tmp_path}
    options = {"plant": functools.partial(signal_the_family, 0), "env": offline}
    statuses = runs.start(chapter, name, **options)
    runs.assert_stopped(name, statuses, LOG_EVERY)
    assert runs.said(name, 0).count("wandb's own process has ended") == 1
    assert runs.start(chapter, name, env=offline) == [0, 0]
    assert "wandb's own process has ended" not in runs.said(name, 0)
    runs.assert_undisturbed(name, chapter)


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_run_that_ends_with_wandb_is_noticed(runs, tmp_path):
    offline = {"WANDB_MODE": "offline", "HOME": tmp_path}
    options = {"plant": functools.partial(signal_the_family, 0, catch=False), "env": offline}
    statuses = runs.start(STOPPING[0], "ends-with-wandb", "--dist-timeout", 3, **options)
    with pytest.raises(AssertionError, match=r"^the statuses"):
        runs.assert_stopped("ends-with-wandb", statuses, LOG_EVERY)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_processes_that_prepare_data_are_told_too(runs, chapter):
    name = f"{chapter}-workers"
    family = functools.partial(signal_the_family, 1)
    statuses = runs.start(chapter, name, "--num-workers", 1, plant=family)
    runs.assert_stopped(name, statuses, LOG_EVERY)
    assert runs.start(chapter, name) == [0, 0]
    assert_exact(runs.folder / chapter, runs.folder / name)


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_planted_workers_that_end_are_noticed(runs, tmp_path):
    where = "        worker_init_fn=distributed.ignore_stop_signals,"
    chapter = plant(STOPPING[0], tmp_path / "chapter", [(where, "        #")])
    options = {"signals": (), "plant": functools.partial(signal_the_family, 1)}
    name = "workers-that-end"
    statuses = runs.start(chapter, name, "--num-workers", 1, "--dist-timeout", 3, **options)
    with pytest.raises(AssertionError, match=r"^the statuses"):
        runs.assert_stopped(name, statuses, LOG_EVERY)


@pytest.mark.ci
@pytest.mark.parametrize("chapter", STOPPING)
def test_torchrun_does_not_start_it_again(runs, chapter, tmp_path):
    """To torchrun, any status but 0 is a failure, and it has a restart left."""
    run_dir = tmp_path / "run"
    arguments = [*runs.flags, "--save-dir", tmp_path, "-e", "run", "--max-steps", 10**5]
    command = [*TORCHRUN, 2, "--max-restarts", 1, f"{chapter}/train_llm.py", *arguments]
    agent = subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for_file(run_dir / "state.json", lambda: agent.poll() is None)
        os.kill(children(agent.pid)[1], signal.SIGTERM)
        _, said = agent.communicate(timeout=300)
    finally:
        agent.kill()
    assert agent.returncode == 0, said
    (step,) = re.findall(r"^Told to stop; saved after step (\d+); ", said, re.MULTILINE)
    assert int(step) == newest_step(run_dir) and int(step) % LOG_EVERY == 0
    assert "resumed after step" not in said and (run_dir / "requeue").exists()


# In place of Slurm and of what a job file starts. Two processes end with tracebacks after a stop.
SLURM = """#!/bin/bash
case "$0 $*" in
    *"-m common.distributed"*) printf '%s\\n' run "$OUTPUTS" 2 1 ;;
    *"show job"*) echo "   Command=$JOB_FILE" ;;
    *"show hostnames"*) echo node1 ;;
    */squeue*) echo "$JOB_STATE" ;;
    */srun*)
        echo "1 0" >"$OUTPUTS/run/requeue"
        echo "Told to stop; saved after step 7; to resume it: sbatch" >&2
        echo "Traceback (most recent call last):" >&2
        exit 1
        ;;
esac
"""


def last_line_of_job(job_file: Path, folder: Path, job_state: str) -> str:
    """Run a job file whose processes are stopped; return the last line of its log."""
    (folder / "run").mkdir(parents=True)
    for name in ("python", "scontrol", "srun", "squeue"):
        (folder / name).write_text(SLURM)
        (folder / name).chmod(0o755)
    env = {
        **{"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1"},
        **{"SLURM_NTASKS_PER_NODE": "2", "VIRTUAL_ENV": "active", "JOB_FILE": str(job_file)},
        **{"OUTPUTS": str(folder), "JOB_STATE": job_state, "PYTHON": "python"},
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    log = folder / "job.log"
    with log.open("w") as output:
        done = subprocess.run(["bash", job_file], env=env, stdout=output, stderr=output)
    assert done.returncode == 1, log.read_text()
    return log.read_text().splitlines()[-1]


JOB_FILES = [ROOT / "03-multi-node" / name for name in ("job.sbatch", "job_srun.sbatch")]


@pytest.mark.skipif(sys.platform != "linux", reason="Slurm needs Linux")
@pytest.mark.parametrize("job_file", JOB_FILES, ids=lambda path: path.stem)
def test_a_cancelled_job_ends_with_where_it_was_saved(job_file, tmp_path):
    said = last_line_of_job(job_file, tmp_path / "cancelled", "COMPLETING")
    assert said.startswith("Told to stop; saved after step 7; ")
    said = last_line_of_job(job_file, tmp_path / "requeued", "RUNNING")
    assert said == "The run resumes when the job starts again."


@pytest.mark.skipif(sys.platform != "linux", reason="Slurm needs Linux")
def test_planted_job_that_does_not_repeat_where_it_was_saved(tmp_path):
    job_file = tmp_path / "03-multi-node/job.sbatch"
    job_file.parent.mkdir()
    job_file.write_text(re.sub(r"grep -s .*", ":", JOB_FILES[0].read_text()))
    said = last_line_of_job(job_file, tmp_path / "cancelled", "COMPLETING")
    assert said.startswith("Traceback")

"""How the processes of a run are started, what they say, and how all of them end."""

import argparse
import errno
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from helpers import (
    CHAPTERS,
    ROOT,
    TORCHRUN,
    children,
    copy_repository,
    environment,
    first_then_nightly,
    free_port,
    launch_file,
    newest_step,
    read_metrics,
    run_script,
    wait_for_file,
    write_corpus,
)
from runner import Ranks, load_script

from common import data, launch, tracker
from common.errors import RunError
from common.launch import LAUNCHERS, OPEN_MPI, SRUN
from common.launch import TORCHRUN as BY_TORCHRUN

SMALL = ("-s", 32, "--global-batch-size", 6, "--max-steps", 2, "--log-freq", 1)


@pytest.fixture
def flags(corpus, tmp_path) -> list[object]:
    return ["-d", corpus, "--save-dir", tmp_path, *SMALL]


# --- rank and world size, whichever launcher started the process ---


@pytest.mark.check
def test_an_address_that_is_missing(monkeypatch):
    """As with srun or mpirun that were not told it."""
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    with pytest.raises(RunError, match="RANK is set but MASTER_ADDR is not: use torchrun"):
        launch.prepare_environment()


@pytest.mark.check
@pytest.mark.parametrize(
    ("inner", "outer"),
    [*((names, ()) for names in LAUNCHERS), (OPEN_MPI, (SRUN,)), (BY_TORCHRUN, (SRUN, OPEN_MPI))],
    ids=["torchrun", "Open MPI", "srun", "mpirun in srun", "torchrun in both"],
)
def test_the_innermost_launcher_is_believed(monkeypatch, inner, outer):
    """The launchers around it have started one process each, and say so."""
    for rank in "01":
        alone = {name: value for names in outer for name, value in zip(names, "010", strict=True)}
        own = dict(zip(inner, (rank, "2", rank), strict=True))
        address = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
        monkeypatch.setattr(os, "environ", {**address, **alone, **own})
        launch.prepare_environment()
        assert [os.environ[name] for name in BY_TORCHRUN] == [rank, "2", rank]


@pytest.mark.ci
@pytest.mark.parametrize("chapter", first_then_nightly(["02-ddp", *CHAPTERS[:1], *CHAPTERS[2:]]))
def test_paths_with_spaces(tmp_path, chapter):
    """Of the repository, its environment, the text, the run, and a file of arguments."""
    copy, texts, runs = (tmp_path / f"my {name}" for name in ("repository", "texts", "runs"))
    for folder in (copy, texts, runs):
        folder.mkdir()
    copy_repository(copy)
    write_corpus(texts).rename(texts / "my corpus.json")
    arguments = ["-d", texts / "my corpus.json", "--save-dir", runs, *SMALL]
    (texts / "my arguments.args").write_text(shlex.join(map(str, arguments)))
    env = environment(NPROC_PER_NODE=2, WANDB_MODE="disabled", PYTHONPATH=copy)
    if (copy / ".venv").exists():
        del env["VIRTUAL_ENV"]
    words = ["bash", copy / launch_file(chapter).relative_to(ROOT)]
    words += [f"@{texts}/my arguments.args", "-e", "run"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_metrics(runs / "run")] == [1, 2]
    assert (runs / "run/logs").exists() == (chapter > "02")


def test_chapter_2_needs_a_launcher(flags, tmp_path):
    """Chapters 3 to 5 also train as a single process that nothing has launched."""
    done = run_script("02-ddp/train_llm.py", *flags, "-e", "run")
    sentence = "Start this script with torchrun, or with bash 02-ddp/launch.sh."
    assert (done.returncode, done.stderr.splitlines()) == (2, [sentence])
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
def test_the_launcher_that_came_before_torchrun(flags, tmp_path):
    """It also gives --local-rank to each process."""
    launcher = ("-m", "torch.distributed.launch", "--nproc-per-node", 2)
    words = (*launcher, "--master-port", free_port(), "02-ddp/train_llm.py", *flags, "-e", "run")
    done = run_script(*words)
    assert done.returncode == 0, done.stderr
    assert "x world size 2 x" in done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2]


# --- what a run says, and who says it ---


def set_the_clock_by_rank() -> None:
    seconds = 3600 * int(os.environ["RANK"])
    strftime = time.strftime
    tracker.time.strftime = lambda text, when=None: strftime(text, when or time.gmtime(seconds))


def test_rank_0_names_the_run_and_alone_speaks(flags, tmp_path):
    """The ranks' clocks differ by an hour, and no name is given. Started again, the run is over."""
    files = [str(tmp_path / f"stderr-{rank}") for rank in range(2)]
    (tmp_path / "outputs").mkdir()
    arguments = [*flags, "--save-dir", tmp_path / "outputs"]
    options = {"chapter": "02-ddp", "stderr_file": files, "plant": set_the_clock_by_rank}
    assert Ranks(2, arguments, **options).finish() == [0, 0]
    (run_dir,) = (tmp_path / "outputs").iterdir()
    assert re.match("gpt2-tiny-corpus-19700101-000000-", run_dir.name), "by the clock of rank 0"
    said = [Path(file).read_text() for file in files]
    assert "[rank 0] step 2/2 | loss " in said[0] and f"-e {run_dir.name}" in said[0]
    assert said[1] == ""
    before = (run_dir / "newest").read_bytes()
    assert Ranks(2, [*arguments, "-e", run_dir.name], **options).finish() == [0, 0]
    said = Path(files[0]).read_text()
    assert "all steps of this run are done" in said and "| loss " not in said
    assert (run_dir / "newest").read_bytes() == before


@pytest.mark.check
def test_a_full_disk_outside_a_checkpoint(monkeypatch, capsys):
    """The exit handlers of libraries, which would fail to write too, are not called."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(launch, "_exit", lambda status: None)
    launch._end_with(OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"))
    assert ended == [2]
    assert capsys.readouterr().err.startswith("Cannot write to metrics.jsonl: No space left on")


ENDS = """
import atexit, sys, threading, time
import torch.distributed as dist
from common import launch, ranks

def write_late():
    time.sleep(0.5)
    print("the thread has ended")

def main():
    launch.prepare_environment()
    dist.init_process_group("gloo")
    ranks.keep_process_group()
    dist.destroy_process_group()
    atexit.register(print, "atexit was called")
    threading.Thread(target=write_late).start()

{}
launch.run(main)
"""
# What the end of a process still takes from the interpreter's shutdown, and how it is left out.
SHUTDOWN = {
    "the thread has ended": "threading._shutdown = lambda: None",
    "atexit was called": "atexit._run_exitfuncs = lambda: None",
}


@pytest.mark.parametrize("left_out", [None, *SHUTDOWN])
def test_the_end_waits_for_threads_and_calls_what_is_registered(tmp_path, left_out):
    """Without Python's two functions that have no public name, each of them would be lost."""
    script = tmp_path / "script.py"
    script.write_text(ENDS.format(SHUTDOWN.get(left_out, "")))
    done = run_script(script, real=True, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == SHUTDOWN.keys() - {left_out}


# --- launch files ---


def source(*words: object, **env: object) -> list[str]:
    """Return what launch.sh has counted: processes, threads; and the run's folder."""
    script = 'source common/launch.sh; printf "%s\\n" "$PROCESSES" "$THREADS" "$RUN"'
    command = ["bash", "-euc", script, "launch.sh", *map(str, words)]
    env = environment(SCRIPT="02-ddp/train_llm.py", **env)
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else [done.stderr]


@pytest.mark.check
@pytest.mark.parametrize(
    ("words", "run_dir"),
    [
        ((), "outputs/unnamed"),
        (("-ea", "--eval-freq", 9, "--save-dir=~/d"), f"{Path.home()}/d/a"),
        (("--experiment-name=a b",), "outputs/a b"),
        (("--experiment-name", "a", "-e", "b", "--save-dir", "b c"), "b c/b"),
        (("@{}", "--compile"), "from file/of-the-file"),
        (("@{}", "-e", "a"), "from file/a"),
    ],
)
def test_launch_files_find_the_runs_folder(tmp_path, words, run_dir):
    """Wherever argparse finds its name."""
    file = tmp_path / "my.args"
    file.write_text("--experiment-name of-the-file  # comment\n\n--save-dir 'from file'\n--seed 3")
    words = [str(word).format(file) for word in words]
    assert source(*words, NPROC_PER_NODE=1)[2] == run_dir


@pytest.mark.check
def test_launch_files_and_scripts_read_a_file_by_the_same_rules(tmp_path, monkeypatch):
    """Variables, quotes, a file in a file and ~; the shell did not know the first of them."""
    monkeypatch.setenv("PLACE", "a place")
    (tmp_path / "inner.args").write_text("-e 'a name'  # \"quoted\"\n")
    (tmp_path / "my.args").write_text(f'--save-dir "~/$PLACE/runs"\n@{tmp_path}/inner.args\n')
    words = [f"@{tmp_path}/my.args"]
    monkeypatch.setattr(sys, "argv", ["train_llm.py", *words])
    args = load_script(ROOT / "01-single-gpu/train_llm.py").get_args()
    found = source(*words, NPROC_PER_NODE=1, PLACE="a place")[2]
    assert found == f"{Path.home()}/a place/runs/a name"
    assert found == str(Path(args.save_dir).expanduser() / args.experiment_name)


@pytest.mark.check
def test_launch_files_count_processes_and_cores(tmp_path):
    (tmp_path / "nproc").write_text("#!/bin/sh\necho 8\n")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "python").write_text("#!/bin/sh\necho 4  # GPUs, says PyTorch\n")
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    path = f"{tmp_path}:{environment()['PATH']}"
    assert source(PATH=path)[:2] == ["4", "2"]
    assert source(PATH=path, NPROC_PER_NODE=3)[:2] == ["3", "2"]
    assert source(PATH=path, NPROC_PER_NODE=16)[:2] == ["16", "1"]
    (tmp_path / "nvidia-smi").unlink()
    assert shutil.which("nvidia-smi") or source(PATH=path)[:2] == ["2", "4"]
    for wrong in ("gpu", "0"):
        assert "which is not a number of processes" in source(NPROC_PER_NODE=wrong)[0]


@pytest.mark.check
def test_runs_with_restarts_need_a_name(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    args = argparse.Namespace(experiment_name=None, save_dir="outputs")
    with pytest.raises(RunError, match="With --max-restarts a run needs a name that stays: give"):
        tracker.make_run_dir(args)


@pytest.mark.ci
def test_an_error_under_a_launch_file_is_said_once_and_kept(flags, tmp_path):
    words = [ROOT / "02-ddp/launch.sh", *flags, "-e", "run", "--global-batch-size", 7]
    env = environment(NPROC_PER_NODE=2)
    done = subprocess.run(["bash", *map(str, words)], env=env, capture_output=True, text=True)
    assert done.returncode == 1, "torchrun's own status"
    sentence = "--global-batch-size 7 must be a multiple of 2 (the devices)"
    assert [line.startswith(sentence) for line in done.stderr.splitlines()].count(True) == 1
    assert f"[rank 1] {sentence}" not in done.stderr
    assert re.search(r"rank +: 0 \(local_rank: 0\)\n +exitcode +: 2", done.stderr)
    (error_file,) = (tmp_path / "run/logs").glob("**/attempt_0/0/error.json")
    assert sentence in error_file.read_text()


@pytest.mark.check
def test_slurm_warns_in_time():
    """Ranks stop at the next logged step, and then save: that takes more than seconds."""
    for job_file in ROOT.glob("*/*.sbatch"):
        text = job_file.read_text()
        options = dict(re.findall(r"^#SBATCH (--[\w-]+)(?:=(\S+))?", text, re.MULTILINE))
        signal_name, _, seconds = options["--signal"].partition("@")
        assert signal_name == "USR1", f"the ranks listen to another signal: {job_file}"
        assert int(seconds) >= 60 and "--requeue" in options, job_file


# --- rank 0 prepares the data, and the others wait ---

TIMEOUT, PREPARATION = 30, 40  # seconds: of the process group, and what tokenizing takes longer


def prepare_slowly() -> None:
    """Tokenizing takes longer than a rank may wait in a collective; each time is noted."""
    original = data.write_tokens

    def write_tokens(*args: object) -> None:
        with open(os.environ["NOTES"], "a") as notes:  # noqa: PTH123
            notes.write(f"rank {os.environ['RANK']}\n")
        time.sleep(PREPARATION)
        original(*args)

    data.write_tokens = write_tokens


@pytest.mark.ci
def test_preparation_may_last_longer_than_the_timeout(flags, tmp_path, corpus):
    corpus.write_text(corpus.read_text().replace("words", "words that are not cached"))
    arguments = [*flags, "-e", "run", "--dist-timeout", TIMEOUT]
    env = {"NOTES": tmp_path / "notes"}
    assert Ranks(2, arguments, env=env, chapter="02-ddp", plant=prepare_slowly).finish() == [0, 0]
    assert len((tmp_path / "notes").read_text().splitlines()) == 1, "one process prepares"
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2


# --- how processes end ---


@pytest.fixture
def hit(flags, tmp_path):
    """Return a function that starts two ranks, and hits them while they train.

    words: the command, less the run's arguments. action: gets the process id of torchrun and those
    of the ranks. Returns torchrun's status and what all have said; each process has ended by
    itself, long before torchrun kills it.
    """

    def run(
        words: list[object], action: Callable[[int, list[int]], None], steps: int = 10**5
    ) -> tuple[int, str]:
        words = [*words, *flags, "-e", "run", "--max-steps", steps, "--ckpt-freq", 5]
        with (tmp_path / "said").open("w") as said:
            agent = subprocess.Popen(
                [str(word) for word in words],
                cwd=ROOT,
                env=environment(NPROC_PER_NODE=2),
                stdout=said,
                stderr=said,
                start_new_session=True,
                # The tests may have been started with nohup themselves.
                preexec_fn=functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
            )
        try:
            wait_for_file(tmp_path / "run/metrics.jsonl", lambda: agent.poll() is None)
            workers = children(agent.pid)
            action(agent.pid, workers)
            status = agent.wait(300)
        finally:
            agent.kill()
        assert not any(map(psutil.pid_exists, workers))
        said = (tmp_path / "said").read_text()
        assert "forcefully exiting" not in said, "torchrun has waited for 30 s"
        return status, said

    return run


@pytest.mark.ci
def test_ctrl_c_reaches_all_ranks(hit):
    """As from a terminal: torchrun gets the signal, and hands it on to its workers."""
    command = [sys.executable, *TORCHRUN, 2, "02-ddp/train_llm.py"]
    _, said = hit(command, lambda agent, _: os.killpg(agent, signal.SIGINT))
    found = [line for line in said.splitlines() if "Interrupted" in line]
    assert found == [f"Interrupted. {launch.RESUMES}"]


@pytest.mark.ci
@pytest.mark.parametrize(("words", "steps"), [(["nohup"], 100), ([], 10**5)])
def test_a_terminal_that_closes(hit, tmp_path, words, steps):
    """It hangs up on all processes. With nohup the run goes on, without it the run saves first."""

    def hang_up(agent: int, workers: list[int]) -> None:
        os.killpg(agent, signal.SIGHUP)
        if words:  # the ranks have process groups of their own
            for worker in workers:
                os.kill(worker, signal.SIGHUP)

    status, said = hit([*words, "bash", "03-multi-node/launch_torchrun.sh"], hang_up, steps)
    last = read_metrics(tmp_path / "run")[-1]["step"]
    if words:
        assert (status, last) == (0, steps), said
    else:
        assert f"Told to stop; saved after step {last}. {launch.RESUMES}" in said
        assert newest_step(tmp_path / "run") == last < steps


@pytest.mark.ci
def test_torchrun_does_not_start_a_run_again_that_was_told_to_stop(hit, tmp_path):
    """To torchrun, any status but 0 is a failure, and it has a restart left."""
    command = [sys.executable, *TORCHRUN, 2, "--max-restarts", 1, "05-mixed-precision/train_llm.py"]
    status, said = hit(command, lambda _, workers: os.kill(workers[1], signal.SIGTERM))
    assert status == 0, said
    (step,) = re.findall(r"^Told to stop; saved after step (\d+)\. ", said, re.MULTILINE)
    assert int(step) == newest_step(tmp_path / "run")
    assert "resumed after step" not in said and (tmp_path / "run/requeue").exists()

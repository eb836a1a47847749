"""How the processes of a run are started, what they say, and how all of them end."""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import (
    CHAPTERS,
    ROOT,
    TORCHRUN,
    environment,
    first_then_nightly,
    read_metrics,
    say_it_soon,
    speak_at_once,
    wait_for_file,
)
from runner import Ranks, finish, start
from torch.distributed import TCPStore

from common import data, launch, tracker
from common.cli import RunError
from common.launch import MPIRUN, SRUN, plan
from common.launch import TORCHRUN as BY_TORCHRUN

SMALL = ("-s", 32, "--global-batch-size", 6, "--max-steps", 2, "--log-freq", 1)
FIRST_AND_LAST = first_then_nightly([CHAPTERS[1], CHAPTERS[-1]])


@pytest.fixture
def flags(corpus, tmp_path) -> list[object]:
    return ["-d", corpus, "--save-dir", tmp_path, *SMALL]


def said_by_ranks(stderr: str) -> list[str]:
    """Return the lines that the ranks wrote, without the log and without torchrun's report."""
    report = re.compile(r"^[WE]\d{4} |^Traceback", re.MULTILINE)
    header = ("[20", "[W", "versions: ", "environment: ", "  ")
    lines = report.split(stderr)[0].splitlines()
    return [line for line in lines if line and not line.startswith(header)]


def stderr_files(folder: Path, world_size: int = 2) -> list[str]:
    return [str(folder / f"stderr-{rank}") for rank in range(world_size)]


# --- rank and world size, whichever launcher started the process ---


PLACE = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.mark.check
@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ({"MASTER_PORT": "29500"}, "MASTER_PORT is set but RANK, WORLD_SIZE, LOCAL_RANK"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            "RANK, WORLD_SIZE, LOCAL_RANK is set but MASTER_ADDR, MASTER_PORT is not: start this "
            "with torchrun, or set what is missing, or unset RANK WORLD_SIZE LOCAL_RANK to train",
        ),
        ({"WORLD_SIZE": "1", "RANK": "1"}, "RANK must be below WORLD_SIZE, counted from 0"),
        ({**PLACE, "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        (
            {**PLACE, "LOCAL_RANK": "1", "RANK": "1"},
            "2 processes on this machine need 2 GPUs and PyTorch sees 1: .* --nproc-per-node gpu",
        ),
    ],
)
def test_variables_that_are_missing_or_wrong(monkeypatch, place, sentence):
    monkeypatch.setattr(os, "environ", dict(place))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RunError, match=sentence):
        launch.prepare_environment()


@pytest.mark.check
@pytest.mark.parametrize(
    ("inner", "outer"),
    [(SRUN, ()), (MPIRUN, ()), (MPIRUN, (SRUN,)), (BY_TORCHRUN, (SRUN, MPIRUN))],
    ids=["srun", "mpirun", "mpirun under srun", "torchrun under both"],
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


def start_with(
    names: tuple[str, ...], args: list[object], chapter: object, **options: object
) -> list[int]:
    """Start two ranks that find their place in variables of these names; return their statuses."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port}
    address["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    processes = []
    for rank in range(2):
        place = {**address, **dict(zip(names, (rank, 2, rank), strict=True))}
        own = {key: v[rank] if isinstance(v, list) else v for key, v in options.items()}
        processes.append(start(args, env=place, chapter=chapter, **own))
    return [finish(process) for process in processes]


def test_ranks_of_srun_train_together_and_a_batch_script_alone(flags, tmp_path):
    """Slurm gives a batch script a rank, and the number of tasks that it might start."""
    files = stderr_files(tmp_path)
    chapter = "03-multi-node"
    assert start_with(SRUN, [*flags, "-e", "two"], chapter, stderr_file=files) == [0, 0]
    assert "3 sequences x world size 2 x accumulation 1 = 6" in Path(files[0]).read_text()
    place = {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NTASKS": 2}
    arguments = [*flags, "-e", "one"]
    assert finish(start(arguments, env=place, chapter=chapter, stderr_file=files[0])) == 0
    assert "6 sequences x world size 1 x accumulation 1 = 6" in Path(files[0]).read_text()
    one, two = ([m["loss"] for m in read_metrics(tmp_path / name)] for name in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-5) and len(one) == 2


# --- what a run says, and who says it ---


def set_the_clock_by_rank() -> None:
    seconds = 3600 * int(os.environ["RANK"])
    strftime = time.strftime
    tracker.time.strftime = lambda text, when=None: strftime(text, when or time.gmtime(seconds))


@pytest.mark.parametrize("chapter", FIRST_AND_LAST)
def test_rank_0_names_the_run_and_alone_speaks(chapter, flags, tmp_path):
    """The ranks' clocks differ by an hour, and no name is given. Started again, the run is over."""
    files = stderr_files(tmp_path)
    (tmp_path / "outputs").mkdir()
    arguments = [*flags, "--save-dir", tmp_path / "outputs"]
    options = {"chapter": chapter, "stderr_file": files, "plant": set_the_clock_by_rank}
    assert Ranks(2, arguments, **options).finish() == [0, 0]
    (run_dir,) = (tmp_path / "outputs").iterdir()
    assert re.match("gpt2-tiny-corpus-19700101-000000-", run_dir.name), "by the clock of rank 0"
    said = [Path(file).read_text() for file in files]
    assert "[rank 0] step 2/2 | loss " in said[0] and f"-e {run_dir.name}" in said[0]
    assert said[1] == ""
    before = (run_dir / "state.json").read_bytes()
    assert Ranks(2, [*arguments, "-e", run_dir.name], **options).finish() == [0, 0]
    said = Path(files[0]).read_text()
    assert "all steps of this run are done" in said and "each step: " not in said
    assert (run_dir / "state.json").read_bytes() == before


def test_a_wrong_argument_under_srun_is_said_once(flags, tmp_path):
    """Each rank reads the arguments, and they have not met yet."""
    files = stderr_files(tmp_path)
    options = {"stderr_file": files, "plant": speak_at_once}
    assert start_with(SRUN, [*flags, "--seed", "x"], "03-multi-node", **options) == [2, 2]
    said = [Path(file).read_text() for file in files]
    assert "argument --seed: 'x' is not a whole number" in said[0].splitlines()[-1]
    assert said[1] == ""


def fail_on_rank_1() -> None:
    say_it_soon()
    original = data.find_documents

    def find_documents(*args: object):
        if os.environ["RANK"] == "1":
            raise RunError("The disk of this node is full.")
        return original(*args)

    data.find_documents = find_documents


def test_an_error_of_another_rank_alone_is_said_by_it(flags, tmp_path):
    files = stderr_files(tmp_path)
    options = {"chapter": "02-ddp", "stderr_file": files, "plant": fail_on_rank_1}
    assert Ranks(2, [*flags, "-e", "run"], **options).finish() == [1, 2]
    said = [said_by_ranks(Path(file).read_text()) for file in files]
    assert said[1] == ["[rank 1] The disk of this node is full."]
    assert said[0][1].startswith("The other ranks are gone or out of reach")


def test_a_port_in_use(flags, tmp_path):
    """Another training has it: rank 0 says so, and rank 1 does not wait for that one for ever."""
    other = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes, files = [], stderr_files(tmp_path)
    for rank, file in enumerate(files):
        place = {**PLACE, "MASTER_PORT": other.port, "RANK": rank, "LOCAL_RANK": rank}
        arguments = [*flags, "-e", "run", "--dist-timeout", 2]  # rank 1 always waits so long
        processes.append(start(arguments, env=place, chapter="02-ddp", stderr_file=file))
    assert [finish(process) for process in processes] == [2, 1]
    (sentence,) = said_by_ranks(Path(files[0]).read_text())
    assert sentence.startswith(f"Port {other.port} is in use: give another MASTER_PORT")
    where, sentence = said_by_ranks(Path(files[1]).read_text())
    begin = r"\[rank 1\] .*/02-ddp/train_llm.py, line \d+: "
    assert re.match(begin + r"dist.init_process_group\(", where)
    assert sentence.startswith("[rank 1] The other ranks are gone or out of reach (")


AS_YOU_DID = "start it again in the same way, with -e run"


@pytest.mark.check
@pytest.mark.parametrize(
    ("place", "command"),
    [
        ({}, "dir/train_llm.py -e run --max-steps 9"),
        ({"WORLD_SIZE": "2"}, AS_YOU_DID),
        (
            {"LAUNCH_COMMAND": "NNODES=2 bash x.sh", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"},
            "NNODES=2 bash x.sh -e run --max-steps 9",
        ),
    ],
    ids=["alone", "torchrun, srun or mpirun", "two nodes with a launch file"],
)
def test_how_to_resume(monkeypatch, place, command):
    """A process does not see how the others were started: the whole command is the launch file's.
    A name that was not given, but chosen, is in it as well."""
    monkeypatch.setattr(sys, "argv", ["dir/train_llm.py", "-e", "run", "--max-steps", "9"])
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "LAUNCH_COMMAND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    python = f"{sys.executable} ".replace(f"{Path.cwd()}/", "")
    assert launch.resume_command("run").removeprefix(python) == command
    monkeypatch.setattr(sys, "argv", ["dir/train_llm.py", "--max-steps", "9"])
    moved = command.replace("-e run --max-steps 9", "--max-steps 9 -e run")
    assert launch.resume_command("run").removeprefix(python) == moved


# --- launch files ---


@pytest.mark.check
def test_plan_of_a_launch_file(monkeypatch, tmp_path):
    """It finds the name wherever argparse finds it, and shares out the cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("NPROC_PER_NODE", raising=False)
    (tmp_path / "my.args").write_text("--experiment-name 'from-a-file'  # comment\n--seed 3\n")
    assert plan(["-e", "a", "--save-dir", "b c"]) == (2, 4, Path("b c/a"))
    assert plan(["-ea", "-s", "32"]) == (2, 4, Path("outputs/a"))
    assert plan([f"@{tmp_path}/my.args", "--zero1"])[2] == Path("outputs/from-a-file")
    assert plan([])[2] == Path("outputs/unnamed")
    monkeypatch.setenv("NPROC_PER_NODE", "3")
    assert plan([])[:2] == (3, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("NPROC_PER_NODE")
    assert plan([])[:2] == (4, 2)
    monkeypatch.setenv("NPROC_PER_NODE", "gpu")
    with pytest.raises(RunError, match="which is not a number of processes"):
        plan([])


@pytest.mark.check
def test_runs_on_several_nodes_or_with_restarts_need_a_name(monkeypatch):
    for nodes in ("2", "16", "1:2"):
        monkeypatch.setenv("NNODES", nodes)
        with pytest.raises(RunError, match="A run on several nodes, or with MAX_RES"):
            plan([])
        assert plan(["-e", "run"])[2].name == "run"
    monkeypatch.setenv("NNODES", "1")
    monkeypatch.setenv("MAX_RESTARTS", "1")
    with pytest.raises(RunError, match="needs a name that stays: give one with -e"):
        plan([])
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    args = argparse.Namespace(experiment_name=None, save_dir="outputs")
    with pytest.raises(RunError, match="With --max-restarts a run needs a name that stays: give"):
        tracker.make_run_dir(args)


def call(*words: object, **env: object) -> subprocess.CompletedProcess:
    command = ["bash", *map(str, words)]
    return subprocess.run(command, env=environment(**env), capture_output=True, text=True)


def test_a_launch_file_refuses_a_name_that_is_no_folder(tmp_path):
    """Otherwise torchrun would make the folder of its logs outside of --save-dir."""
    save_dir = tmp_path / "a/b"
    save_dir.mkdir(parents=True)
    done = call(ROOT / "02-ddp/launch.sh", "--save-dir", save_dir, "-e", "../x", NPROC_PER_NODE=2)
    sentence = "'../x' cannot be an experiment's name: it names a folder, so use letters, digits, "
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == sentence + "'-', '_' and '.'.\n"
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["a", "a/b"]


@pytest.mark.ci
def test_an_error_under_a_launch_file_is_said_once_and_kept(flags, tmp_path):
    arguments = (*flags, "-e", "run", "--global-batch-size", 7)
    done = call(ROOT / "02-ddp/launch.sh", *arguments, NPROC_PER_NODE=2)
    assert done.returncode == 1, "torchrun's own status"
    sentence = "2 devices cannot share --global-batch-size 7 evenly: "
    sentence += "give another number of devices, or a --global-batch-size that 2 divides."
    assert said_by_ranks(done.stderr) == [sentence]
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
        assert int(seconds) >= 60, f"{seconds} s are too few: {job_file}"
        assert "--requeue" in options, f"the job does not return to the queue: {job_file}"


@pytest.mark.check
def test_both_job_files_decide_alike_what_comes_after():
    """A fix of one of them is a fix of the other."""
    files = [ROOT / "03-multi-node" / name for name in ("job.sbatch", "job_srun.sbatch")]
    ends = [file.read_text().partition("# Requeue the job if")[2] for file in files]
    assert ends[0] == ends[1] and "scontrol requeue" in ends[0]


# --- rank 0 prepares the data, and the others wait ---

TIMEOUT, PREPARATION = 30, 40  # seconds: of the process group, and what tokenizing takes longer


def prepare_slowly() -> None:
    """Tokenizing takes longer than a rank may wait in a collective; each time is noted."""
    original = data.encode_documents

    def encode_documents(*args: object) -> object:
        with open(os.environ["NOTES"], "a") as notes:  # noqa: PTH123
            notes.write(f"rank {os.environ['RANK']}\n")
        time.sleep(PREPARATION)
        return original(*args)

    data.encode_documents = encode_documents


def run_with_slow_preparation(chapter: object, flags: list[object], tmp_path: Path) -> list[int]:
    arguments = [*flags, "-e", "run", "--dist-timeout", TIMEOUT]
    options = {"stderr_file": stderr_files(tmp_path), "plant": prepare_slowly}
    env = {"NOTES": tmp_path / "notes"}
    return Ranks(2, arguments, env=env, chapter=str(chapter), **options).finish()


@pytest.mark.ci
@pytest.mark.parametrize("chapter", FIRST_AND_LAST)
def test_preparation_may_last_longer_than_the_timeout(chapter, flags, tmp_path, corpus):
    corpus.write_text(corpus.read_text().replace("words", f"words in {chapter}"))  # not cached
    assert run_with_slow_preparation(chapter, flags, tmp_path) == [0, 0]
    assert len((tmp_path / "notes").read_text().splitlines()) == 1, "one process prepares"
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2


# --- how processes end ---


@pytest.mark.ci
def test_ctrl_c_reaches_all_ranks(flags, tmp_path):
    """As from a terminal: torchrun gets the signal, and hands it on to its workers."""
    command = [sys.executable, *TORCHRUN, 2, "02-ddp/train_llm.py", *flags, "-e", "run"]
    command += ["--max-steps", 10**5, "--ckpt-freq", 5]
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_file(tmp_path / "run/metrics.jsonl", lambda: process.poll() is None)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()
    assert [line for line in said.splitlines() if "Interrupted" in line] == [
        "Interrupted. The start of a run's log says how to resume it."
    ]
    # torchrun waits half a minute for ranks that do not end by themselves, and then says this.
    assert "forcefully exiting" not in said

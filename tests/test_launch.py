"""How the processes of a run are started, what they say, and how all of them end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import CHAPTERS, ROOT, read_metrics, run_script
from runner import Ranks, finish, start
from test_parity import plant
from torch.distributed import TCPStore

from common import data, launch
from common.cli import InputError

DISTRIBUTED = CHAPTERS[1:]
SMALL = ("-s", 32, "--global-batch-size", 6, "--max-steps", 2, "--log-freq", 1)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps([f"Text number {n}, of many words. " * 20 for n in range(50)]))
    return path


@pytest.fixture
def flags(corpus, tmp_path) -> list[object]:
    return ["-d", corpus, "--save-dir", tmp_path, *SMALL]


def said_by_ranks(stderr: str) -> list[str]:
    """Return the lines that the ranks wrote, without the log and without torchrun's report."""
    report = re.compile(r"^[WE]\d{4} |^Traceback", re.MULTILINE)
    header = ("[20", "versions: ", "environment: ", "  ")
    lines = report.split(stderr)[0].splitlines()
    return [line for line in lines if line and not line.startswith(header)]


@pytest.mark.parametrize("chapter", DISTRIBUTED)
def test_without_torchrun_it_is_a_world_of_one(chapter, flags, tmp_path):
    done = run_script(f"{chapter}/train_llm.py", *flags, "-e", "run")
    assert done.returncode == 0, done.stderr
    assert "6 sequences x 1 device x 1 micro-batch = 6 sequences" in done.stderr
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2


@pytest.mark.parametrize("chapter", DISTRIBUTED)
def test_only_rank_0_speaks_and_all_agree_on_its_name(chapter, flags, tmp_path):
    """Three ranks whose clocks differ by hours, and no name given."""
    files = [str(tmp_path / f"stderr-{rank}") for rank in range(3)]
    (tmp_path / "outputs").mkdir()
    arguments = [*flags, "--save-dir", tmp_path / "outputs"]
    ranks = Ranks(3, arguments, chapter=chapter, stderr_file=files, plant=set_the_clock_by_rank)
    assert ranks.finish() == [0, 0, 0]
    (run_dir,) = (tmp_path / "outputs").iterdir()
    assert run_dir.name == "gpt2-tiny-corpus-19700101-000000", "by the clock of rank 0"
    said = [Path(file).read_text() for file in files]
    assert "[rank 0] step 2/2 | loss " in said[0] and f"-e {run_dir.name}" in said[0]
    assert said[1:] == ["", ""]


def set_the_clock_by_rank() -> None:
    seconds = 3600 * int(os.environ["RANK"])
    strftime = time.strftime
    launch.time.strftime = lambda text, when=None: strftime(text, when or time.gmtime(seconds))


@pytest.mark.parametrize("chapter", DISTRIBUTED)
def test_a_complete_run_says_so_on_all_ranks(chapter, flags, tmp_path):
    arguments = [*flags, "-e", "run"]
    assert Ranks(2, arguments, chapter=chapter).finish() == [0, 0]
    before = (tmp_path / "run/state.json").read_bytes()
    file = str(tmp_path / "stderr")
    options = {"chapter": chapter, "stderr_file": [file, os.devnull]}
    assert Ranks(2, arguments, **options).finish() == [0, 0]
    assert "this run is complete: all of its 2 steps are done" in Path(file).read_text()
    assert (tmp_path / "run/state.json").read_bytes() == before


@pytest.mark.parametrize("chapter", DISTRIBUTED)
def test_a_global_batch_that_the_ranks_cannot_share(chapter, flags):
    arguments = (*flags, "-e", "run", "--global-batch-size", 7)
    done = run_script(*TORCHRUN, 2, f"{chapter}/train_llm.py", *arguments)
    assert done.returncode == 1, "torchrun's own status"
    sentence = "2 devices cannot share --global-batch-size 7 evenly: "
    sentence += "give another number of devices, or a multiple of 2."
    assert said_by_ranks(done.stderr) == [sentence]
    assert re.search(r"rank +: 0 \(local_rank: 0\)\n +exitcode +: 2", done.stderr)


def test_a_wrong_argument_is_said_once(flags):
    done = run_script(*TORCHRUN, 2, "02-ddp/train_llm.py", *flags, "--seed", "x")
    assert done.returncode == 1
    assert done.stderr.count("argument --seed: 'x' is not a whole number") == 1


def test_more_processes_than_gpus(flags, tmp_path):
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text("import torch\ntorch.cuda.device_count = lambda: 1\n")
    arguments = (*TORCHRUN, 2, "02-ddp/train_llm.py", *flags)
    done = run_script(*arguments, PYTHONPATH=str(hook))
    assert done.returncode == 1
    (sentence,) = said_by_ranks(done.stderr)
    assert sentence.startswith("2 processes on this machine need 2 GPUs and PyTorch sees 1: ")
    assert sentence.endswith("give torchrun --nproc-per-node gpu.")


PLACE = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not"),
        ({"MASTER_PORT": "29500"}, "MASTER_PORT is set but RANK, WORLD_SIZE, LOCAL_RANK"),
        ({**PLACE, "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is no number"),
        ({**PLACE, "RANK": "2"}, "RANK must be below WORLD_SIZE"),
    ],
)
def test_variables_of_torchrun_that_are_half_set(monkeypatch, place, sentence):
    for name in (*PLACE, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=sentence):
        launch.complete_environment()


def test_half_set_variables_end_the_script(flags):
    done = run_script("02-ddp/train_llm.py", *flags, WORLD_SIZE="2", RANK="0")
    assert done.returncode == 2
    (sentence,) = said_by_ranks(done.stderr)
    assert sentence.startswith("RANK, WORLD_SIZE is set but LOCAL_RANK, MASTER_ADDR, MASTER_PORT")


def test_a_port_in_use(flags, tmp_path):
    """Another training has it: rank 0 says so, and rank 1 does not wait for that one for ever."""
    other = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes, files = [], [str(tmp_path / f"stderr-{rank}") for rank in range(2)]
    for rank, file in enumerate(files):
        place = {**PLACE, "MASTER_PORT": other.port, "RANK": rank, "LOCAL_RANK": rank}
        arguments = [*flags, "-e", "run", "--dist-timeout", 3]
        processes.append(start(arguments, env=place, chapter="02-ddp", stderr_file=file))
    assert [finish(process, timeout=30) for process in processes] == [2, 1]
    (sentence,) = said_by_ranks(Path(files[0]).read_text())
    assert sentence.startswith(f"Port {other.port} is in use: give another MASTER_PORT")
    (sentence,) = said_by_ranks(Path(files[1]).read_text())
    assert sentence.startswith("[rank 1] The other ranks are gone or out of reach (")


def test_ranks_that_never_come(flags, tmp_path):
    file = str(tmp_path / "stderr")
    arguments = [*flags, "-e", "run", "--dist-timeout", 2]
    place = {**PLACE, "MASTER_PORT": free_port()}
    assert finish(start(arguments, env=place, chapter="02-ddp", stderr_file=file)) == 1
    (sentence,) = said_by_ranks(Path(file).read_text())
    assert sentence.startswith("The other ranks are gone or out of reach (Timed out")


def test_a_port_in_use_under_torchrun(flags):
    """torchrun itself opens the port, and ends before it starts a rank."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        command = ["-m", "torch.distributed.run", "--nproc-per-node", 2]
        command += ["--master-port", other.getsockname()[1], "02-ddp/train_llm.py", *flags]
        done = run_script(*command)
    assert done.returncode == 1
    assert "EADDRINUSE, message: address already in use" in done.stderr
    assert "[rank 0]" not in done.stderr


def test_restarts_need_a_name(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(InputError, match="With --max-restarts a run needs a name that stays: give"):
        launch.plan([])
    assert launch.plan(["-e", "run"])[0] == "run"


def test_plan_of_a_launch_file(monkeypatch, tmp_path):
    """It finds the name wherever argparse finds it, and shares out the cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("NPROC_PER_NODE", raising=False)
    (tmp_path / "my.args").write_text("--experiment-name 'from a file'  # comment\n--seed 3\n")
    assert launch.plan(["-e", "a", "--save-dir", "b c"]) == ("a", "b c", 2, 4)
    assert launch.plan(["-ea", "-s", "32"]) == ("a", "outputs", 2, 4)
    assert launch.plan(["--experiment-name=a"])[0] == "a"
    assert launch.plan([f"@{tmp_path}/my.args", "--zero1"])[0] == "from a file"
    assert launch.plan([])[0].startswith("gpt2-tiny-python-stdlib-20")
    monkeypatch.setenv("NPROC_PER_NODE", "3")
    assert launch.plan([])[2:] == (3, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("NPROC_PER_NODE")
    assert launch.plan([])[2:] == (4, 2)
    for wrong in ("gpu", "0"):
        monkeypatch.setenv("NPROC_PER_NODE", wrong)
        with pytest.raises(InputError, match="which is no number of processes"):
            launch.plan([])


def free_port() -> int:
    with socket.socket() as socket_:
        socket_.bind(("127.0.0.1", 0))
        return socket_.getsockname()[1]


def test_an_error_of_another_rank_alone_is_said_by_it(flags, tmp_path):
    files = [str(tmp_path / f"stderr-{rank}") for rank in range(2)]
    options = {"chapter": "02-ddp", "stderr_file": files, "plant": fail_on_rank_1}
    arguments = [*flags, "-e", "run", "--dist-timeout", 30]
    assert Ranks(2, arguments, **options).finish() == [1, 2]
    said = [said_by_ranks(Path(file).read_text()) for file in files]
    assert said[1] == ["[rank 1] The disk of this node is full."]
    assert said[0][0].startswith("The other ranks are gone or out of reach")


def fail_on_rank_1() -> None:
    original = data.find_source

    def find_source(*args: object):
        if os.environ["RANK"] == "1":
            raise InputError("The disk of this node is full.")
        return original(*args)

    data.find_source = find_source


TIMEOUT = 5  # seconds, of the process group
PREPARATION = 9  # seconds


def prepare_slowly() -> None:
    """Tokenizing takes longer than a rank may wait in a collective; each time is noted."""
    original = data.pack_documents

    def pack_documents(path: Path, *args: object) -> None:
        if path.name == "train":
            with open(os.environ["NOTES"], "a") as notes:  # noqa: PTH123
                notes.write(f"rank {os.environ['RANK']}\n")
            time.sleep(PREPARATION)
        original(path, *args)

    data.pack_documents = pack_documents


def run_with_slow_preparation(chapter: str | Path, flags: list[object], tmp_path: Path) -> list:
    files = [str(tmp_path / f"stderr-{rank}") for rank in range(3)]
    arguments = [*flags, "-e", "run", "--dist-timeout", TIMEOUT]
    options = {"chapter": chapter, "stderr_file": files, "plant": prepare_slowly}
    return Ranks(3, arguments, env={"NOTES": tmp_path / "notes"}, **options).finish()


@pytest.mark.parametrize("chapter", DISTRIBUTED)
def test_preparation_may_last_longer_than_the_timeout(chapter, flags, tmp_path, corpus):
    corpus.write_text(corpus.read_text().replace("words", f"words in {chapter}"))  # not cached
    assert run_with_slow_preparation(chapter, flags, tmp_path) == [0, 0, 0]
    assert len((tmp_path / "notes").read_text().splitlines()) == 1, "one process prepares"
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2


def test_waiting_in_a_barrier_is_noticed(flags, tmp_path, corpus):
    """The planted bug: rank 0 prepares, and the others wait for it in a collective."""
    corpus.write_text(corpus.read_text().replace("words", "barriers"))
    line = "    train_data, eval_data = load_blocks(args, tokenizer, seq_length)\n"
    wrong = (
        f"    if rank:\n        dist.barrier()\n{line}    if not rank:\n        dist.barrier()\n"
    )
    chapter = plant("02-ddp", tmp_path / "chapter", [(line, wrong)])
    assert set(run_with_slow_preparation(chapter, flags, tmp_path)) == {1}
    said = "".join((tmp_path / f"stderr-{rank}").read_text() for rank in range(3))
    assert "The other ranks are gone or out of reach (Timed out waiting" in said


@pytest.mark.parametrize("chapter", DISTRIBUTED)
def test_launch_file_keeps_logs_and_errors_of_each_rank(chapter, flags, tmp_path):
    launch_file = ROOT / chapter / "launch.sh"

    def run(*args: object) -> subprocess.CompletedProcess:
        command = ["bash", launch_file, *flags, *args]
        environment = {**os.environ, "NPROC_PER_NODE": "2"}
        return subprocess.run(
            [str(word) for word in command], env=environment, capture_output=True, text=True
        )

    done = run("-e", "run")
    assert done.returncode == 0, done.stderr
    assert "3 sequences x 2 devices x 1 micro-batch" in done.stdout + done.stderr
    logs = tmp_path / "run/logs"
    (rank_0,) = logs.glob("*/attempt_0/0/stderr.log")
    assert "[rank 0] step 2/2" in rank_0.read_text()
    assert [path.parent.name for path in sorted(logs.glob("*/attempt_0/*/stderr.log"))] == [
        "0",
        "1",
    ]
    goes_on = f"NPROC_PER_NODE=2 bash {chapter}/launch.sh -d "
    assert goes_on in done.stdout + done.stderr
    done = run("--experiment-name=other", "--global-batch-size", 7)
    assert done.returncode == 1
    (error_file,) = (tmp_path / "other/logs").glob("*/attempt_0/0/error.json")
    assert "cannot share --global-batch-size 7" in error_file.read_text()


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
        deadline = time.monotonic() + 60
        while not (tmp_path / "run/state.json").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        stop = time.monotonic()
        _, said = process.communicate(timeout=60)
        assert time.monotonic() - stop < 10
    finally:
        process.kill()
    (interrupted,) = [line for line in said.splitlines() if "Interrupted" in line]
    assert interrupted.startswith("Interrupted; to go on")
    assert "torch.distributed.run --standalone" in interrupted

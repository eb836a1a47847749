"""How the processes of a run are started, what they say, and how all of them end."""

import errno
import functools
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
import torch.distributed as dist
from helpers import (
    CHAPTERS,
    ROOT,
    TORCHRUN,
    children,
    environment,
    first_then_nightly,
    free_port,
    plant,
    read_metrics,
    run_script,
    wait_for_file,
)
from runner import Ranks, finish, start
from torch.distributed import TCPStore

from common import cli, distributed
from common.cli import InputError
from common.data import token_cache
from common.distributed import plan

DISTRIBUTED = CHAPTERS[1:]
MULTI_NODE = CHAPTERS[2:]
ONE_MACHINE = [chapter for chapter in DISTRIBUTED if (ROOT / chapter / "launch.sh").exists()]
SMALL = ("-s", 32, "--global-batch-size", 6, "--max-steps", 2, "--log-freq", 1)


@pytest.fixture
def flags(corpus, tmp_path) -> list[object]:
    return ["-d", corpus, "--save-dir", tmp_path, *SMALL]


def said_by_ranks(stderr: str) -> list[str]:
    """Return the lines that the ranks wrote, without the log and without torchrun's report."""
    report = re.compile(r"^[WE]\d{4} |^Traceback", re.MULTILINE)
    header = ("[20", "versions: ", "environment: ", "  ")
    lines = report.split(stderr)[0].splitlines()
    return [line for line in lines if line and not line.startswith(header)]


@pytest.mark.ci
@pytest.mark.parametrize("chapter", DISTRIBUTED)
def test_without_torchrun_it_is_a_world_of_one(chapter, flags, tmp_path):
    done = run_script(f"{chapter}/train_llm.py", *flags, "-e", "run")
    assert done.returncode == 0, done.stderr
    assert "6 sequences x 1 device x 1 micro-batch = 6 sequences" in done.stderr
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2


@pytest.mark.parametrize("chapter", first_then_nightly(DISTRIBUTED))
def test_only_rank_0_speaks_and_all_agree_on_its_name(chapter, flags, tmp_path):
    """Three ranks whose clocks differ by hours, and no name given."""
    files = [str(tmp_path / f"stderr-{rank}") for rank in range(3)]
    (tmp_path / "outputs").mkdir()
    arguments = [*flags, "--save-dir", tmp_path / "outputs"]
    ranks = Ranks(3, arguments, chapter=chapter, stderr_file=files, plant=set_the_clock_by_rank)
    assert ranks.finish() == [0, 0, 0]
    (run_dir,) = (tmp_path / "outputs").iterdir()
    assert re.match("gpt2-tiny-corpus-19700101-000000-", run_dir.name), "by the clock of rank 0"
    said = [Path(file).read_text() for file in files]
    assert "[rank 0] step 2/2 | loss " in said[0] and f"-e {run_dir.name}" in said[0]
    assert said[1:] == ["", ""]


def set_the_clock_by_rank() -> None:
    seconds = 3600 * int(os.environ["RANK"])
    strftime = time.strftime
    distributed.time.strftime = lambda text, when=None: strftime(text, when or time.gmtime(seconds))


@pytest.mark.parametrize("chapter", first_then_nightly(DISTRIBUTED))
def test_a_complete_run_says_so_on_all_ranks(chapter, flags, tmp_path):
    arguments = [*flags, "-e", "run"]
    assert Ranks(2, arguments, chapter=chapter).finish() == [0, 0]
    before = (tmp_path / "run/state.json").read_bytes()
    file = str(tmp_path / "stderr")
    options = {"chapter": chapter, "stderr_file": [file, os.devnull]}
    assert Ranks(2, arguments, **options).finish() == [0, 0]
    said = Path(file).read_text()
    assert "this run is complete: all of its 2 steps are done" in said and "to resume" not in said
    assert (tmp_path / "run/state.json").read_bytes() == before


@pytest.mark.ci
@pytest.mark.parametrize("chapter", DISTRIBUTED)
def test_a_global_batch_that_the_ranks_cannot_share(chapter, flags):
    arguments = (*flags, "-e", "run", "--global-batch-size", 7)
    done = run_script(*TORCHRUN, 2, f"{chapter}/train_llm.py", *arguments)
    assert done.returncode == 1, "torchrun's own status"
    sentence = "2 devices cannot share --global-batch-size 7 evenly: "
    sentence += "give another number of devices, or a --global-batch-size that 2 divides."
    assert said_by_ranks(done.stderr) == [sentence]
    assert re.search(r"rank +: 0 \(local_rank: 0\)\n +exitcode +: 2", done.stderr)


@pytest.mark.ci
def test_a_wrong_argument_is_said_once(flags):
    done = run_script(*TORCHRUN, 2, "02-ddp/train_llm.py", *flags, "--seed", "x")
    assert done.returncode == 1
    assert done.stderr.count("argument --seed: 'x' is not a whole number") == 1


@pytest.mark.ci
def test_more_processes_than_gpus(flags, tmp_path):
    hook = tmp_path / "hook"
    hook.mkdir()
    # On a busy machine rank 0 may come more than the usual seconds after the other.
    (hook / "sitecustomize.py").write_text(
        "import torch\ntorch.cuda.device_count = lambda: 1\n"
        "from common import cli\ncli.HEAD_START_S = 60.0\n"
    )
    arguments = (*TORCHRUN, 2, "02-ddp/train_llm.py", *flags)
    done = run_script(*arguments, PYTHONPATH=f"{hook}:{ROOT}")
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
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            "RANK, WORLD_SIZE, LOCAL_RANK is set but MASTER_ADDR, MASTER_PORT is not: start this "
            "with torchrun, or set what is missing, or unset RANK WORLD_SIZE LOCAL_RANK to train",
        ),
        ({"WORLD_SIZE": "1", "RANK": "1"}, "RANK must be below WORLD_SIZE, counted from 0"),
        ({**PLACE, "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        ({**PLACE, "RANK": "2"}, "RANK must be below WORLD_SIZE"),
    ],
)
def test_variables_of_torchrun_that_are_half_set(monkeypatch, place, sentence):
    monkeypatch.setattr(os, "environ", dict(place))
    with pytest.raises(InputError, match=sentence):
        distributed.prepare_environment()


@pytest.mark.parametrize(
    "place",
    [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}],
    ids=["nothing", "a size", "as from srun"],
)
def test_a_world_of_one_needs_no_address(monkeypatch, place):
    monkeypatch.setattr(os, "environ", {**place, "HOME": "/"})
    distributed.prepare_environment()
    assert os.environ == {**distributed.SINGLE_PROCESS, "HOME": "/"}


def test_a_world_of_one_keeps_its_address(monkeypatch):
    place = {**PLACE, "WORLD_SIZE": "1", "MASTER_ADDR": "node1"}
    monkeypatch.setattr(os, "environ", dict(place))
    distributed.prepare_environment()
    assert os.environ == place


@pytest.mark.ci
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
    assert [finish(process) for process in processes] == [2, 1]
    (sentence,) = said_by_ranks(Path(files[0]).read_text())
    assert sentence.startswith(f"Port {other.port} is in use: give another MASTER_PORT")
    where, sentence = said_by_ranks(Path(files[1]).read_text())
    begin = r"\[rank 1\] .*/02-ddp/train_llm.py, line \d+: "
    assert re.match(begin + r"dist.init_process_group\(", where)
    assert sentence.startswith("[rank 1] The other ranks are gone or out of reach (")


def test_ranks_that_never_come(flags, tmp_path):
    file = str(tmp_path / "stderr")
    arguments = [*flags, "-e", "run", "--dist-timeout", 2]
    place = {**PLACE, "MASTER_PORT": free_port()}
    assert finish(start(arguments, env=place, chapter="02-ddp", stderr_file=file)) == 1
    where, sentence = said_by_ranks(Path(file).read_text())
    assert re.match(r".*/02-ddp/train_llm.py, line \d+: dist.init_process_group\(", where)
    assert sentence.startswith("The other ranks are gone or out of reach (Timed out")


@pytest.mark.ci
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
        plan([])
    assert plan(["-e", "run"])[0] == "run"


def test_plan_of_a_launch_file(monkeypatch, tmp_path):
    """It finds the name wherever argparse finds it, and shares out the cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("NPROC_PER_NODE", raising=False)
    (tmp_path / "my.args").write_text("--experiment-name 'from-a-file'  # comment\n--seed 3\n")
    assert plan(["-e", "a", "--save-dir", "b c"]) == ("a", "b c", 2, 4)
    assert plan(["-ea", "-s", "32"]) == ("a", "outputs", 2, 4)
    assert plan(["--experiment-name=a"])[0] == "a"
    assert plan([f"@{tmp_path}/my.args", "--zero1"])[0] == "from-a-file"
    assert plan([])[0].startswith("gpt2-tiny-python-stdlib-20")
    monkeypatch.setenv("NPROC_PER_NODE", "3")
    assert plan([])[2:] == (3, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("NPROC_PER_NODE")
    assert plan([])[2:] == (4, 2)
    for wrong in ("gpu", "0"):
        monkeypatch.setenv("NPROC_PER_NODE", wrong)
        with pytest.raises(InputError, match="which is not a number of processes"):
            plan([])


@pytest.mark.parametrize("nodes", ["2", "16", "1:2", "2:2"])
def test_a_run_on_several_nodes_needs_one_name(monkeypatch, nodes):
    monkeypatch.setenv("NNODES", nodes)
    with pytest.raises(InputError, match=r"^A run on several nodes needs one name for all of them"):
        plan([])
    assert plan(["-e", "run"])[0] == "run"


def test_a_run_on_one_node_needs_no_name(monkeypatch):
    for nodes in ("", "1"):
        monkeypatch.setenv("NNODES", nodes)
        assert plan([])[0].startswith("gpt2-tiny-python-stdlib-20")


@pytest.mark.parametrize(
    "nodes", ["two", "0", "-1", "1.5", "2:", ":2", "0:2", "1:2:3", "4:2", "1 "]
)
def test_what_is_no_number_of_nodes(monkeypatch, nodes):
    monkeypatch.setenv("NNODES", nodes)
    with pytest.raises(InputError, match=f"^NNODES is '{nodes}', which is neither a number"):
        plan(["-e", "run"])


@pytest.mark.parametrize("name", ["../../x", "a b", ".."])
def test_a_launch_file_refuses_a_name_that_is_no_folder(tmp_path, name):
    """Otherwise torchrun would make the folder of its logs outside of --save-dir."""
    save_dir = tmp_path / "a/b/c"
    save_dir.mkdir(parents=True)
    done = subprocess.run(
        ["bash", ROOT / "02-ddp/launch.sh", "--save-dir", save_dir, "-e", name],
        env=environment(NPROC_PER_NODE=2),
        capture_output=True,
        text=True,
    )
    sentence = f"{name!r} cannot be an experiment's name: it names a folder, so use letters, "
    assert done.returncode == 2 and done.stdout == "", done
    assert done.stderr == sentence + "digits, '-', '_' and '.'.\n"
    folders = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))]
    assert folders == ["a", "a/b", "a/b/c"]


def write_limits(root: Path, group: str, limits: dict[str, str]) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"12:cpu:/elsewhere\n0::{group}\n")
    for folder, limit in limits.items():
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / folder / "memory.max").write_text(f"{limit}\n")


@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        ("/", {".": "5000"}, 5000),  # in a container, its own group looks like the top one
        ("/slurm/job_1/step_0/task_0", {"slurm/job_1": "4000", "slurm": "max"}, 4000),
        ("/slurm/job_1/step_0", {"slurm/job_1/step_0": "3000", "slurm": "4000"}, 3000),
        ("/slurm/job_1", {"slurm/job_1": "max", "slurm/job_2": "10"}, None),
        ("/slurm/job_1", {}, None),
    ],
)
def test_memory_is_limited_by_each_control_group(tmp_path, group, limits, expected):
    write_limits(tmp_path, group, limits)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert distributed.memory_bytes(tmp_path) == (expected or physical)


def test_memory_without_control_groups(tmp_path):
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert distributed.memory_bytes(tmp_path) == physical
    assert 0 < distributed.memory_bytes() <= physical


def test_a_world_size_that_is_no_number_is_one_sentence(flags):
    done = run_script("02-ddp/train_llm.py", *flags, **{**PLACE, "WORLD_SIZE": "two"})
    sentence = "WORLD_SIZE is 'two', not a number: start this with torchrun.\n"
    assert (done.returncode, done.stderr) == (2, sentence)


def test_a_lost_peer_is_reported_with_the_last_line_of_the_repository(monkeypatch, tmp_path):
    """Debian's folder of packages is dist-packages; a virtual environment is often inside."""
    for folder in ("lib/dist-packages", ".venv/lib/site-packages"):
        package = tmp_path / folder / "package.py"
        package.parent.mkdir(parents=True)
        package.write_text("def fail():\n    raise RuntimeError('[x] /gloo/pair.cc: closed')\n")
        script = tmp_path / "script.py"
        script.write_text("def main():\n    fail()  # the line to show\n")
        outside: dict = {}
        exec(compile(package.read_text(), str(package), "exec"), outside)
        exec(compile(script.read_text(), str(script), "exec"), outside)
        pattern = distributed.OWN_FILES.pattern.replace(
            re.escape(str(ROOT)), re.escape(str(tmp_path))
        )
        monkeypatch.setattr(distributed, "OWN_FILES", re.compile(pattern))
        with pytest.raises(RuntimeError) as failed:
            outside["main"]()
        sentence, status = distributed._explain(failed.value)
        assert status == 1
        assert sentence.startswith(f"{script}, line 2: fail()  # the line to show\nThe other ranks")


def test_a_folder_that_cannot_be_written_is_one_sentence():
    error = OSError(errno.EROFS, "Read-only file system", "/data/x")
    sentence = "Cannot write /data/x: Read-only file system. Free space or choose a writable "
    assert distributed._explain(error) == (sentence + "folder, then start again.", 2)


def test_a_plan_that_fails_is_one_sentence():
    done = run_script("-m", "common.distributed", "-e", "run", NNODES="two")
    sentence = "NNODES is 'two', which is neither a number of nodes nor MIN:MAX.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)


ARGV = ["dir/train_llm.py", "-e", "run", "--max-steps", "9"]
AS_YOU_DID = "start it again in the same way, with -e run"


@pytest.mark.parametrize(
    ("place", "command"),
    [
        ({}, "dir/train_llm.py -e run --max-steps 9"),
        (
            {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"},
            "-m torch.distributed.run --standalone --nproc-per-node 2 dir/train_llm.py -e run "
            "--max-steps 9",
        ),
        (
            {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"},
            AS_YOU_DID,
        ),
        ({"WORLD_SIZE": "2"}, AS_YOU_DID),  # from srun or mpirun
        (
            {
                "LAUNCH_COMMAND": "NNODES=2 bash start.sh",
                "LOCAL_WORLD_SIZE": "2",
                "WORLD_SIZE": "4",
            },
            "NNODES=2 bash start.sh --max-steps 9 -e run",
        ),
    ],
    ids=["alone", "one node", "two nodes", "srun", "two nodes with a launch file"],
)
def test_how_to_go_on(monkeypatch, place, command):
    """Of several nodes a process sees its own alone: the whole command is its launch file's."""
    monkeypatch.setattr(distributed, "_resume_command", "")
    monkeypatch.setattr(sys, "argv", ARGV)
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "LAUNCH_COMMAND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    opening, _, found = distributed.resume_command("run").partition(": ")
    assert opening == "to resume it after a stop"
    python = f"{sys.executable} ".replace(f"{Path.cwd()}/", "")
    assert found.removeprefix(python) == command


# What starts a process tells it its place in variables with these names.
BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
BY_MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
BY_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
# By name: those that start the two ranks, and those around them, which started one process.
STARTED_BY = {
    "srun": (BY_SRUN,),
    "mpirun": (BY_MPIRUN,),
    "mpirun under srun": (BY_MPIRUN, BY_SRUN),
    "torchrun under both": (BY_TORCHRUN, BY_SRUN, BY_MPIRUN),
}


def environments(world_size: int, inner: tuple[str, ...], *outer: tuple[str, ...]) -> list[dict]:
    """Return the variables of each rank; the outer ones tell every process that it is alone."""
    alone = {name: value for names in outer for name, value in zip(names, (0, 1, 0), strict=True)}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    return [
        {**alone, **address, **dict(zip(inner, (rank, world_size, rank), strict=True))}
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("chapter", first_then_nightly(MULTI_NODE))
def test_each_way_to_start_the_ranks(chapter, flags, tmp_path):
    """Whoever tells a process its place: the same training. The innermost launcher is right."""
    assert Ranks(2, [*flags, "-e", "torchrun"], chapter=chapter).finish() == [0, 0]
    expected = [line["loss"] for line in read_metrics(tmp_path / "torchrun")]
    assert len(expected) == 2
    for name, launchers in STARTED_BY.items():
        run = name.replace(" ", "-")
        assert start_each([*flags, "-e", run], environments(2, *launchers), chapter) == [0, 0], name
        assert [line["loss"] for line in read_metrics(tmp_path / run)] == expected, name


def ask_srun_first() -> None:
    distributed.LAUNCHERS = distributed.LAUNCHERS[::-1]


def start_each(args: list[object], places: list[dict], chapter: object, **options) -> list[int]:
    processes = []
    for rank, place in enumerate(places):
        own = {key: v[rank] if isinstance(v, list) else v for key, v in options.items()}
        processes.append(start(args, env=place, chapter=chapter, **own))
    return [finish(process) for process in processes]


def test_the_outer_launcher_is_not_believed(flags, tmp_path):
    """The planted bug asks srun first: both processes think that they are alone, in one folder."""
    places = environments(2, *STARTED_BY["mpirun under srun"])
    files = [str(tmp_path / f"stderr-{rank}") for rank in range(2)]
    options = {"stderr_file": files, "plant": ask_srun_first}
    assert 0 in start_each([*flags, "-e", "run"], places, MULTI_NODE[0], **options)
    said = "".join(Path(file).read_text() for file in files)
    assert "6 sequences x 1 device x 1 micro-batch" in said


@pytest.mark.parametrize("chapter", first_then_nightly(MULTI_NODE))
def test_a_batch_script_without_srun_is_a_world_of_one(chapter, flags, tmp_path):
    """Slurm gives it a rank, and the number of tasks that it might start."""
    place = {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NTASKS": 2}
    file = str(tmp_path / "stderr")
    assert start_each([*flags, "-e", "run"], [place], chapter, stderr_file=file) == [0]
    assert "6 sequences x 1 device x 1 micro-batch = 6 sequences" in Path(file).read_text()
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2


def argument_error_of_each_rank(chapter: object, flags: list[object], tmp_path: Path) -> list[str]:
    files = [str(tmp_path / f"stderr-{rank}") for rank in range(2)]
    options = {"stderr_file": files, "plant": functools.partial(head_start, 0.0)}
    statuses = start_each([*flags, "--seed", "x"], environments(2, BY_SRUN), chapter, **options)
    assert statuses == [2, 2]
    return [Path(file).read_text() for file in files]


def head_start(seconds: float) -> None:
    """Set how long the other ranks wait for rank 0 to speak: nothing ends them here meanwhile."""
    cli.HEAD_START_S = seconds


@pytest.mark.parametrize("chapter", first_then_nightly(MULTI_NODE))
def test_a_wrong_argument_under_srun_is_said_once(chapter, flags, tmp_path):
    said = argument_error_of_each_rank(chapter, flags, tmp_path)
    assert "argument --seed: 'x' is not a whole number" in said[0].splitlines()[-1]
    assert said[1] == ""
    # The planted bug reads the arguments before it knows the rank.
    first = "    # Sets RANK and the like"
    early = plant(chapter, tmp_path / "chapter", [(first, f"    get_args()\n{first}")])
    said = argument_error_of_each_rank(early, flags, tmp_path)
    assert said[0] == said[1] != ""


def test_an_error_of_another_rank_alone_is_said_by_it(flags, tmp_path):
    files = [str(tmp_path / f"stderr-{rank}") for rank in range(2)]
    options = {"chapter": "02-ddp", "stderr_file": files, "plant": fail_on_rank_1}
    arguments = [*flags, "-e", "run", "--dist-timeout", 30]
    assert Ranks(2, arguments, **options).finish() == [1, 2]
    said = [said_by_ranks(Path(file).read_text()) for file in files]
    assert said[1] == ["[rank 1] The disk of this node is full."]
    assert said[0][1].startswith("The other ranks are gone or out of reach")


def fail_on_rank_1() -> None:
    original = token_cache.find_source

    def find_source(*args: object):
        if os.environ["RANK"] == "1":
            raise InputError("The disk of this node is full.")
        return original(*args)

    token_cache.find_source = find_source


TIMEOUT = 5  # seconds, of the process group
PREPARATION = 9  # seconds


def prepare_slowly() -> None:
    """Tokenizing takes longer than a rank may wait in a collective; each time is noted."""
    original = token_cache.pack_documents

    def pack_documents(path: Path, *args: object) -> None:
        if path.name == "train":
            with open(os.environ["NOTES"], "a") as notes:  # noqa: PTH123
                notes.write(f"rank {os.environ['RANK']}\n")
            time.sleep(PREPARATION)
        original(path, *args)

    token_cache.pack_documents = pack_documents


def run_with_slow_preparation(chapter: str | Path, flags: list[object], tmp_path: Path) -> list:
    files = [str(tmp_path / f"stderr-{rank}") for rank in range(3)]
    arguments = [*flags, "-e", "run", "--dist-timeout", TIMEOUT]
    options = {"chapter": chapter, "stderr_file": files, "plant": prepare_slowly}
    return Ranks(3, arguments, env={"NOTES": tmp_path / "notes"}, **options).finish()


@pytest.mark.parametrize("chapter", first_then_nightly(DISTRIBUTED))
def test_preparation_may_last_longer_than_the_timeout(chapter, flags, tmp_path, corpus):
    corpus.write_text(corpus.read_text().replace("words", f"words in {chapter}"))  # not cached
    assert run_with_slow_preparation(chapter, flags, tmp_path) == [0, 0, 0]
    assert len((tmp_path / "notes").read_text().splitlines()) == 1, "one process prepares"
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2


@pytest.mark.ci
def test_waiting_in_a_barrier_is_noticed(flags, tmp_path, corpus):
    """The planted bug: rank 0 prepares, and the others wait for it in a collective."""
    corpus.write_text(corpus.read_text().replace("words", "barriers"))
    line = "    train_data, eval_data = load_sequences(args, tokenizer, seq_length)\n"
    wrong = (
        f"    if rank:\n        dist.barrier()\n{line}    if not rank:\n        dist.barrier()\n"
    )
    chapter = plant("02-ddp", tmp_path / "chapter", [(line, wrong)])
    assert set(run_with_slow_preparation(chapter, flags, tmp_path)) == {1}
    said = "".join((tmp_path / f"stderr-{rank}").read_text() for rank in range(3))
    assert "The other ranks are gone or out of reach (Timed out waiting" in said


@pytest.mark.ci
@pytest.mark.parametrize("chapter", ONE_MACHINE)
def test_launch_file_keeps_logs_and_errors_of_each_rank(chapter, flags, tmp_path):
    launch_file = ROOT / chapter / "launch.sh"

    def run(*args: object) -> subprocess.CompletedProcess:
        command = ["bash", launch_file, *flags, *args]
        return subprocess.run(
            [str(word) for word in command],
            env=environment(NPROC_PER_NODE=2),
            capture_output=True,
            text=True,
        )

    done = run("-e", "run")
    assert done.returncode == 0, done.stderr
    assert "3 sequences x 2 devices x 1 micro-batch" in done.stdout + done.stderr
    logs = tmp_path / "run/logs"
    (rank_0,) = logs.glob("**/attempt_0/0/stderr.log")
    assert "[rank 0] step 2/2" in rank_0.read_text()
    assert [path.parent.name for path in sorted(logs.glob("**/attempt_0/*/stderr.log"))] == [
        "0",
        "1",
    ]
    goes_on = f"NPROC_PER_NODE=2 bash {chapter}/launch.sh -d "
    assert goes_on in done.stdout + done.stderr
    done = run("--experiment-name=other", "--global-batch-size", 7)
    assert done.returncode == 1
    (error_file,) = (tmp_path / "other/logs").glob("**/attempt_0/0/error.json")
    assert "cannot share --global-batch-size 7" in error_file.read_text()


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
        wait_for_file(tmp_path / "run/state.json", lambda: process.poll() is None)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()
    (interrupted,) = [line for line in said.splitlines() if "Interrupted" in line]
    assert interrupted.startswith("Interrupted; to resume it")
    assert "torch.distributed.run --standalone" in interrupted
    # torchrun waits half a minute for ranks that do not end by themselves, and then says this.
    assert "forcefully exiting" not in said


ENDS = """
import atexit, sys, threading, time
from common import distributed

class Last:
    def __del__(self):
        print("interpreter")

last = Last()
atexit.register(print, "atexit")

def main():
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    sys.exit(75)

distributed.run(main)
"""


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_among_others_skips_the_end_of_the_interpreter(tmp_path, world_size):
    """It waits for threads, calls atexit functions, and flushes what was printed all the same."""
    (tmp_path / "script.py").write_text(ENDS)
    done = run_script(tmp_path / "script.py", WORLD_SIZE=world_size)
    assert (done.returncode, done.stderr) == (75, "")
    ends = ["thread", "atexit", "interpreter"]
    assert done.stdout.split() == (ends if world_size == 1 else ends[:2])


@pytest.mark.parametrize("chapter", first_then_nightly(DISTRIBUTED))
def test_a_rank_ends_though_a_thread_of_gloo_is_late(chapter, flags, tmp_path):
    assert end_late(chapter, flags, tmp_path) == [0, 0]


@pytest.mark.nightly
@pytest.mark.parametrize("chapter", ["02-ddp", "03-multi-node"])
def test_planted_process_group_freed_by_main_is_noticed(chapter, flags, tmp_path):
    """Without DDP, nothing in main() holds the group: chapters 4 and 5 end either way."""
    assert end_late(chapter, flags, tmp_path, plant=free_the_group)[0] is None


def end_late(chapter: str, flags: list[object], tmp_path: Path, plant=None) -> list[int | None]:
    """Run on two ranks; return their exit statuses, None if a rank that left has not ended.

    With the planted bug, the ranks have 20 s to end.
    """
    options = {"chapter": chapter, "plant": plant or delay_gloo}
    ranks = Ranks(2, [*flags, "-e", "run"], env={"LEFT": tmp_path / "left"}, **options)
    for rank in range(2):
        wait_for_file(tmp_path / f"left{rank}", ranks.processes[rank].is_alive)
    for process in ranks.processes:
        process.join(20 if plant else 300)
    statuses = [process.exitcode for process in ranks.processes]
    for process in ranks.processes:
        process.kill()
    return statuses


def delay_gloo() -> None:
    """Rank 0 leaves the group while a thread of gloo still holds a tensor of Python's."""
    leave = dist.destroy_process_group

    def leave_early() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(1)  # rank 0 waits for this rank when it registers what its thread does then
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        if os.environ["RANK"] == "0":
            future.then(lambda _: time.sleep(1))
        future.wait()  # not for what its thread does then
        leave()
        Path(os.environ["LEFT"] + os.environ["RANK"]).touch()

    dist.destroy_process_group = leave_early


def free_the_group() -> None:
    delay_gloo()
    leave = dist.destroy_process_group

    def let_go() -> None:
        leave()
        distributed._kept_group = None

    dist.destroy_process_group = let_go


def kill_torchrun(
    command: list[object], file: Path, tmp_path: Path, patience_s: float = 60
) -> list[int]:
    """Start this, kill torchrun once there is the file, and return the workers that live on.

    patience_s: seconds that the workers have to end.
    """
    with (tmp_path / "stderr").open("w") as stderr:
        words = [str(word) for word in command]
        agent = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr)
    workers = []
    try:
        wait_for_file(file, lambda: agent.poll() is None)
        workers = children(agent.pid)
    finally:
        agent.kill()
        agent.wait()
    assert workers, "no worker was found"
    deadline = time.monotonic() + patience_s
    while (alive := [pid for pid in workers if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return alive


def is_alive(pid: int) -> bool:
    """A process that has ended stays as a zombie where nobody asks for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, and its prctl")
def test_workers_end_with_their_torchrun(flags, tmp_path):
    """The planted bug, in a script that only waits: nothing ties it to the torchrun above it."""
    launch_file = ["bash", ROOT / "02-ddp/launch.sh", *flags, "-e", "run"]
    long = ["--max-steps", 10**5, "--ckpt-freq", 5]
    assert kill_torchrun([*launch_file, *long], tmp_path / "run/state.json", tmp_path) == []
    (tmp_path / "train_llm.py").write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from common import distributed\n"
        "distributed.PR_SET_PDEATHSIG = 0  # which prctl does not know\n"
        "distributed.prepare_environment()\n"
        "Path(sys.argv[1]).touch()\n"
        "time.sleep(600)\n"
    )
    waiting = [sys.executable, *TORCHRUN, 1, tmp_path / "train_llm.py", tmp_path / "waits"]
    assert len(kill_torchrun(waiting, tmp_path / "waits", tmp_path, patience_s=2)) == 1


@pytest.mark.parametrize("nodes", first_then_nightly(["2", "1:2"]))
def test_several_nodes_need_a_place_to_meet(nodes):
    command = ["bash", ROOT / "03-multi-node/launch_torchrun.sh", "-e", "run"]
    env = {**os.environ, "NNODES": nodes}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr == (
        "A run on several nodes needs a rendezvous address: set HEAD=host:port.\n"
    )


# In place of what a launch file starts: a plan of 2 processes with 7 threads each; what Slurm says.
STAND_IN = """#!/bin/bash
case "$*" in
    "-m common.distributed"*) printf '%s\\n' run "$OUTPUTS" 2 7 ;;
    "show job"*) echo "   Command=$JOB_FILE" ;;
    "show hostnames"*) echo node1 ;;
    *) echo "$OMP_NUM_THREADS: ${0##*/} $1 $2" >>"$NOTES" ;;
esac
"""
# launch_ssh.sh starts another launch file on each host.
LAUNCH_FILES = [path for path in sorted(ROOT.glob("*/launch*.sh")) if path.stem != "launch_ssh"]
LAUNCH_FILES.append(ROOT / "03-multi-node/job_srun.sbatch")


def threads_of_ranks(launch_file: Path, tmp_path: Path, **variables: str) -> str:
    """Return OMP_NUM_THREADS as a launch file sets it for the ranks that it starts."""
    for name in ("python", "mpirun", "scontrol", "srun"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS_PER_NODE": "2"}
    env = {
        **slurm,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "VIRTUAL_ENV": "active",  # launch files take `python` then
        "JOB_FILE": str(launch_file),
        "OUTPUTS": str(tmp_path),
        "NOTES": str(tmp_path / "notes"),
        **variables,
    }
    done = subprocess.run(["bash", launch_file], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (noted,) = (tmp_path / "notes").read_text().splitlines()
    threads, _, command = noted.partition(": ")
    assert re.match(r"(python (-m torch\.distributed\.run )?|mpirun |srun )", command), command
    return threads


@pytest.mark.parametrize("launch_file", LAUNCH_FILES, ids=lambda path: "-".join(path.parts[-2:]))
def test_processes_of_a_machine_share_its_cores(launch_file, tmp_path):
    """Each has the threads of the plan, or what the reader has set; one process has all cores."""
    alone = launch_file.parent.name == CHAPTERS[0]
    assert threads_of_ranks(launch_file, tmp_path) == ("" if alone else "7")
    (tmp_path / "notes").unlink()
    assert threads_of_ranks(launch_file, tmp_path, OMP_NUM_THREADS="3") == "3"


def test_planted_number_of_threads_is_noticed(tmp_path):
    right = ROOT / CHAPTERS[1] / "launch.sh"
    wrong = tmp_path / "02-ddp/launch.sh"
    wrong.parent.mkdir()
    wrong.write_text(right.read_text().replace("OMP_NUM_THREADS:-$THREADS", "OMP_NUM_THREADS:-1"))
    assert threads_of_ranks(wrong, tmp_path) == "1"


@pytest.mark.check
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_run_that_was_stopped_does_not_look_complete(monkeypatch, tmp_path, capsys, launcher):
    """Its status says: try again later. torchrun would do so at once, and is told that all is well.

    The job file reads the file, which names the start of the job that was stopped.
    """
    place = {"RANK": "0", "SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "3"}
    if launcher == "torchrun":
        place["TORCHELASTIC_RUN_ID"] = "run"
    monkeypatch.setattr(os, "environ", place)
    status = distributed.ask_for_requeue(tmp_path, step=7)
    assert status == (0 if launcher == "torchrun" else os.EX_TEMPFAIL) and os.EX_TEMPFAIL
    assert (tmp_path / "requeue").read_text() == "12 3\n"
    assert "saved after step 7" in capsys.readouterr().err


JOB_FILES = sorted(ROOT.glob("*/*.sbatch"))


def check_that_slurm_warns_in_time(job_file: Path) -> None:
    """Ranks stop at the next logged step, and then save: that takes more than seconds."""
    options = re.findall(r"^#SBATCH (--[\w-]+)(?:=(\S+))?", job_file.read_text(), re.MULTILINE)
    options = dict(options)
    signal_name, _, seconds = options["--signal"].partition("@")
    assert signal_name == "USR1", "the ranks listen to another signal"
    assert int(seconds) >= 60, f"{seconds} s are too few"
    assert "--requeue" in options, "the job does not return to the queue"


@pytest.mark.check
@pytest.mark.parametrize("job_file", JOB_FILES, ids=lambda path: "-".join(path.parts[-2:]))
def test_slurm_warns_in_time(job_file):
    check_that_slurm_warns_in_time(job_file)


@pytest.mark.check
@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("USR1@120", "USR1@2", "2 s are too few"),
        ("USR1@", "USR2@", "the ranks listen to another"),
        ("#SBATCH --requeue", "#SBATCH --no-requeue", "the job does not return"),
    ],
)
def test_planted_warning_that_is_no_use(tmp_path, right, wrong, complaint):
    path = tmp_path / "job.sbatch"
    path.write_text(JOB_FILES[0].read_text().replace(right, wrong))
    with pytest.raises(AssertionError, match=f"^{complaint}"):
        check_that_slurm_warns_in_time(path)


def test_both_job_files_decide_alike_what_comes_after():
    """A mend of one of them is a mend of the other."""
    files = [ROOT / "03-multi-node" / name for name in ("job.sbatch", "job_srun.sbatch")]
    ends = [file.read_text().partition("# Requeue the job if")[2] for file in files]
    assert ends[0] == ends[1] and "scontrol requeue" in ends[0]

"""Ranks and nodes, and how a process of a run starts, stops and asks for a requeue.

`python -m common.distributed ARGS` prints what a launch file needs before it starts the ranks.
"""

import argparse
import atexit
import ctypes
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.cli import ArgumentParser, InputError, wait_for_rank_0
from common.storage import DISK_ERRORS, as_path, local_run_dir, local_save_dir

# --- the start and the end of a process ---

# The variables that tell a process its rank, by launcher. The innermost launcher wins: srun or
# mpirun may have started torchrun.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
LAUNCHERS = (TORCHRUN, MPIRUN, SRUN)
# All variables that init_process_group() needs, and their values for a single process.
RANK_VARIABLES = (*TORCHRUN, "MASTER_ADDR", "MASTER_PORT")
SINGLE_PROCESS = dict(zip(RANK_VARIABLES, ("0", "1", "0", "localhost", "0"), strict=True))
# Files of this repository, but not of a virtual environment in it; Debian has dist-packages.
OWN_FILES = re.compile(rf"{re.escape(str(Path(__file__).parents[1]))}/(?!.*-packages/)")
REQUEUE_STATUS = 75  # EX_TEMPFAIL in sysexits.h: try again later
PR_SET_PDEATHSIG = 1  # https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html


def prepare_environment() -> None:
    """Set torchrun's variables from those of srun or mpirun, or for a single process.

    On Linux, a process under torchrun also asks to be killed when torchrun dies. Raises InputError
    if some variables are missing or wrong, or if this machine has more processes than GPUs (a
    machine without GPUs may have any number of processes).
    """
    for names in LAUNCHERS:
        if all(name in os.environ for name in names):
            values = [os.environ[name] for name in names]
            os.environ |= dict(zip(TORCHRUN, values, strict=True))
            break
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # A torchrun that is killed leaves its workers behind, which would keep the GPUs busy.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    present = [name for name in RANK_VARIABLES if name in os.environ]
    # srun and mpirun set no address, and a single process needs none.
    if not present or os.environ.get("WORLD_SIZE") == "1":
        for name, value in SINGLE_PROCESS.items():
            os.environ.setdefault(name, value)
    if missing := [name for name in RANK_VARIABLES if name not in os.environ]:
        raise InputError(
            f"{', '.join(present)} is set but {', '.join(missing)} is not: start this with "
            f"torchrun, or set what is missing, or unset {' '.join(present)} to train in one "
            "process."
        )
    numbers = {name: os.environ[name] for name in RANK_VARIABLES if name != "MASTER_ADDR"}
    for name, text in numbers.items():
        if not text.isdecimal():
            raise InputError(f"{name} is {text!r}, not a number: start this with torchrun.")
    if int(numbers["RANK"]) >= int(numbers["WORLD_SIZE"]):
        raise InputError("RANK must be below WORLD_SIZE, counted from 0: start this with torchrun.")
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", int(numbers["LOCAL_RANK"]) + 1))
    if 0 < torch.cuda.device_count() < local_size:
        raise InputError(
            f"{local_size} processes on this machine need {local_size} GPUs and PyTorch sees "
            f"{torch.cuda.device_count()}: give torchrun --nproc-per-node gpu."
        )


def run(main: Callable[[], None]) -> NoReturn:
    """Call `main` and exit.

    The exit status is 0 or the status that `main` exits with, or it is 2 for bad input, 1 if other
    ranks cannot be reached (both with a one-line error message), and 130 after Ctrl-C. Every
    other exception shows its traceback, and the status is 1.
    """
    try:
        main()
    except SystemExit as error:
        _exit(error.code or 0)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # Ctrl-C reaches all ranks
            print(f"Interrupted; {_resume_command}", file=sys.stderr, flush=True)
        _exit(130)
    except Exception as error:
        sentence, status = _explain(error)
        if sentence is None:
            traceback.print_exc()
        else:
            _print_error(sentence, status)
            if isinstance(error, OSError):
                os._exit(status)  # the exit handlers of libraries would fail to write, too
        _exit(status)
    _exit(0)


def _explain(error: Exception) -> tuple[str | None, int]:
    """Return an error message and an exit status, or None and 1 if a traceback is better."""
    text = str(error)
    if isinstance(error, InputError):
        return text, 2
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        path = f" {error.filename}" if error.filename else ""
        remedy = "Free space or choose a writable folder, then start again."
        return f"Cannot write{path}: {error.strerror}. {remedy}", 2
    if isinstance(error, RuntimeError) and "EADDRINUSE" in text:
        port = os.environ["MASTER_PORT"]
        return f"Port {port} is in use: give another MASTER_PORT, or torchrun --standalone.", 2
    # gloo raises plain RuntimeErrors that begin with a path of its source code. NCCL's errors have
    # many causes and several lines, so they keep their traceback.
    unreachable = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    if unreachable or (isinstance(error, RuntimeError) and "/gloo/" in text):
        reason = re.sub(r"^\[.*?\] |\. This is typically .*", "", text.splitlines()[0])
        frames = traceback.extract_tb(error.__traceback__)
        own = [frames[0], *(frame for frame in frames if OWN_FILES.match(frame.filename))][-1]
        return (
            f"{own.filename}, line {own.lineno}: {own.line}\n"
            f"The other ranks are gone or out of reach ({reason}); {_resume_command}"
        ), 1
    return None, 1


def _print_error(sentence: str, status: int) -> None:
    """Print an error message; ranks other than 0 only do so if rank 0 does not exit meanwhile."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # When rank 0 has exited, the launcher sends SIGTERM. Then this rank has nothing to add.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        wait_for_rank_0(status)
        sentence = "\n".join(f"[rank {rank}] {line}" for line in sentence.splitlines())
    print(sentence, file=sys.stderr, flush=True)


def _exit(status: int) -> NoReturn:
    """Exit. If there was a process group, skip the shutdown of the Python interpreter.

    gloo's threads can outlive destroy_process_group(), because DTensor's caches still hold the
    group. If such a thread releases a tensor while the interpreter shuts down, it aborts the
    process ("terminate called without an active exception"), see
    https://github.com/pytorch/pytorch/issues/190489. Without destroy_process_group(), the shutdown
    can also hang.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" and _kept_group is None:  # it may be no number
        sys.exit(status)
    if not dist.is_initialized():
        threading._shutdown()  # waits for Python's threads, as sys.exit() does
    atexit._run_exitfuncs()  # includes the one of wandb
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def ignore_stop_signals(worker: int) -> None:
    """Make a data worker ignore the signals that tell its rank to stop; the rank ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def ask_for_requeue(run_dir: Path, step: int) -> int:
    """Write the file `requeue` to the run's folder, and return the exit status for a requeue.

    step: the step after which the run was saved. The file contains Slurm's job id and restart
    count. The status is 75, but 0 under torchrun, which would restart all ranks after any other.
    """
    if os.environ["RANK"] == "0":
        job = [os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")]
        (local_run_dir(run_dir) / "requeue").write_text(" ".join(job) + "\n")
        sentence = f"Told to stop; saved after step {step}; {_resume_command}"
        print(sentence, file=sys.stderr, flush=True)
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else REQUEUE_STATUS


# --- the name of a run, and the command that resumes it ---

_resume_command = "there is no run to resume."  # until resume_command() is called


def experiment_name(args: argparse.Namespace) -> str:
    """Return args.experiment_name or, if it is None, a new name: model, data set, time and process.

    Clocks differ, so all ranks use the name of rank 0; all ranks must call this. Raises InputError
    if the name cannot be a folder's name, or if there is no name and torchrun may restart the
    ranks: each restart would begin a new run. Later error messages say how to resume this run.
    """
    if (name := args.experiment_name) is not None:
        if not re.fullmatch(r"[\w.-]+", name) or not name.strip("."):
            raise InputError(
                f"{name!r} cannot be an experiment's name: it names a folder, so use letters, "
                "digits, '-', '_' and '.'."
            )
        resume_command(name)
        return name
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        raise InputError("With --max-restarts a run needs a name that stays: give one with -e.")
    model, dataset = Path(args.model_name).name, Path(args.dataset_name).stem
    # With the process id, runs that start in the same second have different folders.
    name = f"{model}-{dataset}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    names = [re.sub(r"[^\w.-]+", "-", name)]
    if dist.is_initialized():
        dist.broadcast_object_list(names, src=0)
    resume_command(names[0])
    return names[0]


def resume_command(experiment_name: str) -> str:
    """Return a sentence with the command that resumes the run, ready to be copied.

    A launch file sets LAUNCH_COMMAND to the words that started it, and runs the script with
    `-e NAME` and its own arguments. Without LAUNCH_COMMAND, a rank cannot know how the other nodes
    were started.
    """
    global _resume_command
    launch_words = shlex.split(os.environ.get("LAUNCH_COMMAND", ""))
    arguments = sys.argv[3:] if launch_words else sys.argv[1:]
    if not {"-e", "--experiment-name"} & {word.split("=")[0] for word in arguments}:
        arguments += ["-e", experiment_name]
    command = [sys.executable.removeprefix(f"{Path.cwd()}/")]
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "1")  # how many processes torchrun started here
    if "TORCHELASTIC_RUN_ID" in os.environ:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", local_size]
    command.append(sys.argv[0])
    instruction = shlex.join((launch_words or command) + arguments)
    if not launch_words and os.environ.get("WORLD_SIZE", local_size) != local_size:
        instruction = f"start it again in the same way, with -e {experiment_name}"
    _resume_command = f"to resume it after a stop: {instruction}"
    return _resume_command


def describe_complete_run(run_dir: Path, total_steps: int) -> str:
    """Return what to say if a run is started again that has done all of its steps."""
    return (
        f"this run is complete: all of its {total_steps} steps are done; {_generate(run_dir)}; to "
        "train longer, start a new run with another -e"
    )


def _generate(run_dir: Path) -> str:
    python = sys.executable.removeprefix(f"{Path.cwd()}/")
    command = shlex.join([python, "01-single-gpu/generate.py", str(run_dir)])
    return f"to generate text with it: {command}"


def final_report(run_dir: Path, metrics: dict[str, float], prompt: str, text: str) -> str:
    """Return the last lines of a run's log: sample, evaluation, folder and what to do next."""
    return (
        f"a sample of the model, after the prompt {prompt!r}:\n\n{text}\n\n"
        f"evaluation: loss {metrics['eval_loss']:.4f}, perplexity {metrics['perplexity']:.2f}, "
        f"{metrics['bits_per_byte']:.3f} bits per byte\n"
        f"the run's folder: {run_dir}\n{_generate(run_dir)}"
    )


# --- ranks and nodes ---


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: 0 and 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# DDP must not free the process group when main() returns. It would wait for gloo's threads with
# Python's global lock held, and they may wait for the lock: the process would not end.
_kept_group: dist.ProcessGroup | None = None


def gather(part: dict, group: dist.ProcessGroup | None = None) -> dict:
    """Return the union of all ranks' dictionaries, in the order of ranks; all ranks must call this.

    group: another process group of all ranks, instead of the default group.
    """
    global _kept_group
    if not dist.is_initialized():
        return part
    _kept_group = dist.group.WORLD
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part, group=group)
    return {key: value for each in parts for key, value in sorted(each.items())}


def check_agreement(facts: dict[str, object], remedy: str) -> None:
    """Raise InputError if a value differs from the one of rank 0; all ranks must call this."""
    rank, _ = rank_and_world_size()
    by_rank = gather({rank: (facts, socket.gethostname())})
    expected, host_0 = by_rank[0]
    for other, (found, host) in by_rank.items():
        for name, value in expected.items():
            if found[name] != value:
                raise InputError(
                    f"Rank {other} on {host} has {name} {found[name]}, rank 0 on {host_0} has "
                    f"{value}: {remedy}."
                )


def mesh_of_nodes(device: torch.device) -> DeviceMesh:
    """Return HSDP's mesh, with the dimensions "replicate" (nodes) and "shard" (ranks of a node).

    All ranks must call this. As for torchrun, each launcher is a node, even if two of them run on
    one machine. Raises InputError if there is one node only, if nodes have different numbers of
    ranks, or if the ranks of a node are not consecutive.
    """
    rank, _ = rank_and_world_size()
    local_ranks = list(gather({rank: int(os.environ["LOCAL_RANK"])}).values())
    firsts = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0]
    sizes = [end - first for first, end in pairwise([*firsts, len(local_ranks)])]
    if local_ranks != [local_rank for size in sizes for local_rank in range(size)]:
        raise InputError(
            "--hsdp needs the ranks of a node to follow each other: start them with srun "
            "--distribution=block or mpirun --map-by slot, or leave it out."
        )
    if len(sizes) == 1:
        raise InputError("--hsdp replicates over nodes and there is one: leave it out.")
    if len(set(sizes)) > 1:
        raise InputError(
            f"--hsdp needs equally many ranks on all nodes, not {min(sizes)} here and {max(sizes)} "
            "there: start as many on each, or leave it out."
        )
    names = ("replicate", "shard")
    # PyTorch 2.11 gives the groups of a mesh only the backend of the GPU. With --cpu-offload they
    # reduce tensors in host memory, too, so they get the backends of the default group.
    backends = dict.fromkeys(names, dist.get_backend_config())
    return init_device_mesh(
        device.type, (len(sizes), sizes[0]), mesh_dim_names=names, backend_override=backends
    )


def check_memory(n_bytes: int, flag: str) -> None:
    """Raise InputError if the ranks of a machine together need more host memory than it has.

    n_bytes: what this rank needs. flag: the one that needs it. All ranks must call this.
    """
    rank, _ = rank_and_world_size()
    needs: dict[str, int] = {}
    by_rank = gather({rank: (socket.gethostname(), n_bytes, memory_bytes())})
    for host, needed, memory in by_rank.values():
        needs[host] = needs.get(host, 0) + needed
        if needs[host] > memory:
            raise InputError(
                f"{flag} needs more than the {memory / 2**30:.0f} GiB of memory that {host} has: "
                "take more nodes or a smaller model, or leave it out."
            )


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the host memory in bytes of this machine or, if smaller, of a cgroup (version 2)."""
    own = root / "proc/self/cgroup"
    match = re.search("^0::/(.*)$", own.read_text() if own.exists() else "", re.MULTILINE)
    group = root / "sys/fs/cgroup" / (match[1] if match else "")
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in (group, *group.parents):  # Slurm's --mem limits a group deep below the top one
        text = (folder / "memory.max").read_text() if (folder / "memory.max").exists() else "max"
        sizes += [int(text)] if text.strip().isdecimal() else []  # "max": no limit
    return min(sizes)


# --- launch files ---


def plan(words: list[str]) -> tuple[str, str, int, int]:
    """Return what a launch file needs: (name of the run, local folder of the runs, number of
    processes per node, threads per process).

    words: the arguments of the script. The number of processes is NPROC_PER_NODE, or the number of
    GPUs, or 2. Raises InputError if NPROC_PER_NODE is not a number, if NNODES is neither a number
    nor MIN:MAX, if a run on several nodes has no name, or if experiment_name refuses the name.
    """
    parser = ArgumentParser(description="", add_help=False)
    parser.add_argument("-e", "--experiment-name")
    parser.add_argument("--save-dir", default="outputs")
    parser.add_argument("-m", "--model-name", default="gpt2-tiny")
    parser.add_argument("-d", "--dataset-name", default="python-stdlib")
    args, _ = parser.parse_known_args(words)
    processes = os.environ.get("NPROC_PER_NODE") or str(torch.cuda.device_count() or 2)
    if not processes.isdecimal() or int(processes) == 0:
        raise InputError(f"NPROC_PER_NODE is {processes!r}, which is not a number of processes.")
    nodes = os.environ.get("NNODES") or "1"
    least, _, most = nodes.partition(":")
    valid = re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes)
    if not valid or int(most or least) < int(least):
        raise InputError(f"NNODES is {nodes!r}, which is neither a number of nodes nor MIN:MAX.")
    if nodes != "1" and args.experiment_name is None:
        raise InputError("A run on several nodes needs one name for all of them: give one with -e.")
    threads = max(1, (os.cpu_count() or 1) // int(processes))
    save_dir = str(local_save_dir(as_path(args.save_dir)))
    return experiment_name(args), save_dir, int(processes), threads


if __name__ == "__main__":
    run(lambda: print(*plan(sys.argv[1:]), sep="\n"))

"""How a process of a run starts, finds its rank, agrees with the other ranks, and ends.

`python -m common.launch ARGS` prints what a launch file needs to know (see plan).
"""

import argparse
import atexit
import ctypes
import multiprocessing
import os
import re
import shlex
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from common.cli import ArgumentParser, RunError, is_rank_0, wait_for_rank_0
from common.storage import DISK_ERRORS, as_path, local_run_dir

# The variables that tell a process its rank, by launcher. The innermost launcher wins: srun or
# mpirun may have started torchrun.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")  # Intel MPI, too
CRAY_MPICH = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
LAUNCHERS = (TORCHRUN, OPEN_MPI, MPICH, CRAY_MPICH, SRUN)
# A process with one of these has a rank. PALS, for example, does not tell it how many there are.
OTHER_RANKS = ("PMI_RANK", "PMIX_RANK", "PALS_RANKID", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK")
# All variables that init_process_group() needs, and their values for a single process.
RANK_VARIABLES = (*TORCHRUN, "MASTER_ADDR", "MASTER_PORT")
SINGLE_PROCESS = dict(zip(RANK_VARIABLES, ("0", "1", "0", "localhost", "0"), strict=True))
# Files of this repository, but not of a virtual environment in it; Debian has dist-packages.
OWN_FILES = re.compile(rf"{re.escape(str(Path(__file__).parents[1]))}/(?!.*-packages/)")
RESUMES = "The start of a run's log says how to resume it."
# Arguments that may be another path on each node; as_before can show them.
PATHS = ("save_dir", "dataset_name", "model_name", "tokenizer_name", "as_before")
REQUEUE_STATUS = 75  # EX_TEMPFAIL in sysexits.h: try again later
PR_SET_PDEATHSIG = 1  # https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html

# --- the start of a process ---


def prepare_environment() -> None:
    """Set torchrun's variables from those of srun or mpirun, or for a single process.

    On Linux, a process under torchrun also asks to be killed when torchrun dies. Raises RunError
    if some variables are missing, or if this machine has more processes than GPUs (a machine
    without GPUs may have any number of processes).
    """
    for names in LAUNCHERS:
        if all(name in os.environ for name in names):
            values = [os.environ[name] for name in names]
            os.environ |= dict(zip(TORCHRUN, values, strict=True))
            break
    else:
        signs = [name for name in OTHER_RANKS if name in os.environ]
        if int(os.environ.get("SLURM_NTASKS") or 1) > 1:
            signs.append("SLURM_NTASKS")
        if signs and os.environ.get("WORLD_SIZE") != "1":
            raise RunError(
                f"{signs[0]} is {os.environ[signs[0]]}, so there are several processes, but this "
                "one cannot know its rank: start it with srun, mpirun or torchrun, or set RANK, "
                "WORLD_SIZE and LOCAL_RANK; WORLD_SIZE=1 trains in one process."
            )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A torchrun that is killed leaves its workers behind, which would keep the GPUs busy.
        end_with_parent()
    present = [name for name in RANK_VARIABLES if name in os.environ]
    # srun and mpirun set no address, and a single process needs none.
    if not present or os.environ.get("WORLD_SIZE") == "1":
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
        for name, value in SINGLE_PROCESS.items():
            os.environ.setdefault(name, value)
    if missing := [name for name in RANK_VARIABLES if name not in os.environ]:
        raise RunError(
            f"{', '.join(present)} is set but {', '.join(missing)} is not: start this with "
            f"torchrun, or set what is missing, or unset {' '.join(present)} to train in one "
            "process."
        )
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", int(os.environ["LOCAL_RANK"]) + 1))
    n_gpus = torch.cuda.device_count()
    # srun --gpus-per-task=1 shows each process only its own GPU. NCCL refuses to share a GPU.
    may_differ = n_gpus == 1 and "LOCAL_WORLD_SIZE" not in os.environ
    if 0 < n_gpus < local_size and not may_differ:
        raise RunError(
            f"{local_size} processes on this machine need {local_size} GPUs and PyTorch sees "
            f"{n_gpus}: start as many processes as GPUs (torchrun --nproc-per-node gpu)."
        )


def end_with_parent() -> None:
    """On Linux: let this process be killed when the process that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def n_cores() -> int:
    """Return how many cores this process may use: Slurm and containers may allow only some."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resume_command(experiment_name: str) -> str:
    """Return the command that resumes a run, ready to be copied.

    A launch file sets LAUNCH_COMMAND to its own name. Without it, a rank cannot know how the other
    ranks were started.
    """
    words = [sys.executable.removeprefix(f"{Path.cwd()}/"), sys.argv[0]]
    command = os.environ.get("LAUNCH_COMMAND") or shlex.join(words)
    if "LAUNCH_COMMAND" not in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        return f"start it again in the same way, with -e {experiment_name}"
    arguments = sys.argv[1:]
    if not {"-e", "--experiment-name"} & {word.split("=")[0] for word in arguments}:
        arguments += ["-e", experiment_name]
    return f"{command} {shlex.join(arguments)}"


# --- ranks ---


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: 0 and 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# DDP must not free the process group when main() returns. It would wait for gloo's threads with
# Python's global lock held, and they may wait for the lock: the process would not end.
_kept_group: dist.ProcessGroup | None = None


def gather(part: dict) -> dict:
    """Return the union of all ranks' dictionaries, in the order of ranks; all must call this."""
    global _kept_group
    if not dist.is_initialized():
        return part
    _kept_group = dist.group.WORLD
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return {key: value for each in parts for key, value in sorted(each.items())}


def check_agreement(facts: dict[str, object], remedy: str) -> None:
    """Raise RunError if a value differs from the one of rank 0; all ranks must call this."""
    rank, _ = rank_and_world_size()
    by_rank = gather({rank: (facts, socket.gethostname())})
    expected, host_0 = by_rank[0]
    for other, (found, host) in by_rank.items():
        for name, value in expected.items():
            if found.get(name) != value:
                raise RunError(
                    f"Rank {other} on {host} has {name} {found.get(name)}, rank 0 on {host_0} has "
                    f"{value}: {remedy}."
                )


def check_arguments(args: argparse.Namespace) -> None:
    """Raise RunError on all ranks if they have different arguments; all ranks must call this.

    With other arguments, a rank could call other collectives. Paths may differ between nodes.
    """
    given = {name: value for name, value in vars(args).items() if name not in PATHS}
    check_agreement(given, "give all nodes the same arguments")


# --- the end of a process ---


def run(main: Callable[[], None]) -> NoReturn:
    """Call `main` and exit.

    The exit status is 0 or the status that `main` exits with, or it is 2 for a RunError, 1
    if other ranks cannot be reached (both with a one-line message), and 130 after Ctrl-C. Every
    other exception shows its traceback, and the status is 1.
    """
    try:
        main()
    except SystemExit as error:
        _exit(error.code or 0)
    except (KeyboardInterrupt, Exception) as error:
        # The datasets library raises another error when it ends its processes.
        interrupted = isinstance(error.__context__, KeyboardInterrupt)
        if not interrupted and not isinstance(error, KeyboardInterrupt):
            _end_with(error)
        if is_rank_0():  # Ctrl-C reaches all ranks
            print(f"Interrupted. {RESUMES}", file=sys.stderr)
        _exit(130)
    _exit(0)


def _end_with(error: Exception) -> NoReturn:
    """Print an error and exit; ranks other than 0 only do so if rank 0 does not exit meanwhile."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler raises for a dead data worker
    sentence, status = _explain(error)
    if sentence is None:
        traceback.print_exception(error)
        _exit(status)
    if not is_rank_0():
        # When rank 0 has exited, the launcher sends SIGTERM. Then this rank has nothing to add.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        wait_for_rank_0(status)
        place = f"[rank {os.environ['RANK']}]"
        sentence = "\n".join(f"{place} {line}" for line in sentence.splitlines())
    print(sentence, file=sys.stderr, flush=True)
    if isinstance(error, OSError):
        os._exit(status)  # the exit handlers of libraries would fail to write, too
    _exit(status)


def _explain(error: Exception) -> tuple[str | None, int]:
    """Return an error message and an exit status, or None and 1 if a traceback is better."""
    text = str(error)
    if isinstance(error, RunError):
        return text, 2
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        path = f" {error.filename}" if error.filename else ""
        remedy = "Free space or choose a writable folder, then start again."
        return f"Cannot write{path}: {error.strerror}. {remedy}", 2
    if isinstance(error, UnicodeError):
        return f"Text is not UTF-8 ({text}): convert the file, or set PYTHONUTF8=1.", 2
    if isinstance(error, RuntimeError) and "EADDRINUSE" in text:
        port = os.environ["MASTER_PORT"]
        return f"Port {port} is in use: give another MASTER_PORT, or torchrun --standalone.", 2
    frames = traceback.extract_tb(error.__traceback__)
    # A data worker that died is noticed by a signal, or by the connection to it.
    in_loader = any(frame.filename.endswith("torch/utils/data/dataloader.py") for frame in frames)
    cut_off = in_loader and isinstance(error, ConnectionError | EOFError)
    if cut_off or (isinstance(error, RuntimeError) and text.startswith("DataLoader ")):
        text = text or "its connection was closed"
        return (
            f"A data worker cannot deliver batches ({text.splitlines()[0].rstrip('.')}): "
            "--num-workers 0 needs none; others need room in /dev/shm and a short TMPDIR."
        ), 2
    if isinstance(error, RuntimeError) and (kind := re.search(r"C(\+\+)? compiler", text)):
        return f"--compile needs a {kind[0]}: install one, such as g++, or leave it out.", 2
    if isinstance(error, RuntimeError) and "Duplicate GPU" in text:
        return "Several processes have the same GPU: start as many processes as GPUs.", 2
    if isinstance(error, RuntimeError) and "Expected to have finished reduction" in text:
        return (
            "Some parameters of this model get no gradient, for which DDP would wait: train it "
            "with chapter 4, or give DistributedDataParallel find_unused_parameters=True."
        ), 2
    # gloo raises plain RuntimeErrors that begin with a path of its source code. NCCL's errors have
    # many causes and several lines, so they keep their traceback.
    unreachable = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    if unreachable or (isinstance(error, RuntimeError) and "/gloo/" in text):
        reason = re.sub(r"^\[.*?\] |\. This is typically .*", "", text.splitlines()[0])
        own = [frames[0], *(frame for frame in frames if OWN_FILES.match(frame.filename))][-1]
        return (
            f"{own.filename}, line {own.lineno}: {own.line}\n"
            f"The other ranks are gone or out of reach ({reason}). {RESUMES}"
        ), 1
    return None, 1


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
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()  # data workers ignore SIGTERM, and an exit handler waits for them
    atexit._run_exitfuncs()  # includes the one of wandb
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def ignore_stop_signals(worker: int) -> None:
    """Make a data worker ignore the signals that tell its rank to stop; the rank ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def restore_stop_handlers() -> None:
    """Set this script's handlers of the stop signals again.

    Triton compiles kernels with LLVM, whose handlers replace Python's and ignore SIGUSR1.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.getsignal(number))


def ask_for_requeue(run_dir: Path, step: int) -> int:
    """Write the file `requeue` to the run's folder, and return the exit status for a requeue.

    step: the step after which the run was saved. The file contains Slurm's job id and restart
    count. The status is 75, but 0 under torchrun, which would restart all ranks after any other.
    """
    if is_rank_0():
        job = [os.environ.get(name) or "0" for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")]
        (local_run_dir(run_dir) / "requeue").write_text(" ".join(job) + "\n")
        command = resume_command(run_dir.name)
        print(f"Told to stop; saved after step {step}; to resume: {command}", file=sys.stderr)
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else REQUEUE_STATUS


# --- launch files ---


def check_name(name: str) -> str:
    """Return the name of a run. Raises RunError if it cannot be the name of a folder."""
    if not re.fullmatch(r"[\w.-]{1,200}", name) or not name.strip("."):
        raise RunError(
            f"{name!r} cannot be an experiment's name: it names a folder, so use up to 200 "
            "letters, digits, '-', '_' and '.'."
        )
    return name


def plan(words: list[str]) -> tuple[int, int, Path]:
    """Return (processes per node, threads per process, local folder of the run) for a launch file.

    words: the arguments of the script. The number of processes is NPROC_PER_NODE, or the number of
    GPUs, or 2. Runs without a name share the folder "unnamed". Raises RunError if NPROC_PER_NODE is
    no such number, or as check_name does.
    """
    parser = ArgumentParser(description="", add_help=False)
    parser.add_argument("-e", "--experiment-name")
    parser.add_argument("--save-dir", default="outputs")
    args, _ = parser.parse_known_args(words)
    processes = os.environ.get("NPROC_PER_NODE") or str(torch.cuda.device_count() or 2)
    if not processes.isdecimal() or int(processes) == 0:
        raise RunError(f"NPROC_PER_NODE is {processes!r}, which is not a number of processes.")
    threads = max(1, n_cores() // int(processes))
    run_dir = as_path(args.save_dir) / check_name(args.experiment_name or "unnamed")
    return int(processes), threads, local_run_dir(run_dir)


if __name__ == "__main__":
    run(lambda: print(*plan(sys.argv[1:]), sep="\n"))

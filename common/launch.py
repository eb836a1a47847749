"""How a process of a run starts under torchrun, srun or Open MPI, and how it ends."""

import atexit
import ctypes
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from common import ranks
from common.errors import DISK_ERRORS, RunError
from common.ranks import is_rank_0

# The variables that tell a process its rank, by launcher. The innermost launcher wins: srun or
# mpirun may have started torchrun.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
LAUNCHERS = (TORCHRUN, OPEN_MPI, SRUN)
# A process with one of these has a rank, which other kinds of MPI tell it in other ways.
OTHER_RANKS = ("PMI_RANK", "PMIX_RANK", "PALS_RANKID", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK")
# All variables that init_process_group() needs, and their values for a single process.
RANK_VARIABLES = (*TORCHRUN, "MASTER_ADDR", "MASTER_PORT")
SINGLE_PROCESS = dict(zip(RANK_VARIABLES, ("0", "1", "0", "localhost", "0"), strict=True))
# Files of this repository, but not of a virtual environment in it; Debian has dist-packages.
OWN_FILES = re.compile(rf"{re.escape(str(Path(__file__).parents[1]))}/(?!.*-packages/)")
RESUMES = "To resume the run, give the same command again, with the run's name after -e."
REQUEUE_STATUS = 75  # EX_TEMPFAIL in sysexits.h: try again later
PR_SET_PDEATHSIG = 1  # https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html

# --- the start of a process ---


def prepare_environment() -> None:
    """Set torchrun's variables from those of srun or mpirun, or for a single process.

    Raises RunError if some variables are missing, or if this machine has more processes than GPUs
    (a machine without GPUs may have any number of processes).
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
                "one cannot know its rank: start it with torchrun, srun or Open MPI's mpirun, or "
                "set RANK, WORLD_SIZE and LOCAL_RANK; WORLD_SIZE=1 trains in one process."
            )
    present = [name for name in RANK_VARIABLES if name in os.environ]
    if not present or os.environ.get("WORLD_SIZE") == "1":
        for name, value in SINGLE_PROCESS.items():
            os.environ.setdefault(name, value)
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0"  # others may be left over in a shell
    # srun and mpirun set no address of rank 0, so a job file has to.
    if missing := [name for name in RANK_VARIABLES if name not in os.environ]:
        raise RunError(f"{present[0]} is set but {missing[0]} is not: use torchrun, or set both.")
    if torch.cuda.device_count():
        gpu_of(int(os.environ["LOCAL_RANK"]))


def gpu_of(local_rank: int) -> int:
    """Return the number of this process's GPU, among those that the process sees.

    Raises RunError if this machine has more processes than GPUs: NCCL refuses to share a GPU.
    Without LOCAL_WORLD_SIZE, a process that sees a single GPU takes that one.
    """
    n_gpus = torch.cuda.device_count()
    if n_gpus == 1 and "LOCAL_WORLD_SIZE" not in os.environ:
        return 0  # srun --gpus-per-task=1 shows each process only its own GPU
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if local_size > n_gpus:
        raise RunError(
            f"{local_size} processes on this machine need {local_size} GPUs and PyTorch sees "
            f"{n_gpus}: start as many processes as GPUs (torchrun --nproc-per-node gpu)."
        )
    return local_rank


# --- the end of a process ---


def run(main: Callable[[], None]) -> NoReturn:
    """Call `main` and exit.

    The exit status is 0 or the one that `main` exits with. It is 2, after one sentence, for a
    RunError, a full disk and a missing permission; 1, after two lines, if other ranks cannot be
    reached; and 130 after Ctrl-C. Every other exception shows its traceback, and the status is 1.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with_parent()  # a torchrun that is killed would leave its workers behind
    # Without a UTF-8 locale, characters of a text can be unknown; Python does the same with stderr.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
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


def _end_with_parent() -> None:
    """On Linux: let this process be killed when the process that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(error: Exception) -> NoReturn:
    """Print an error and exit. Other ranks give rank 0 the time to say it in a sentence first."""
    sentence, status = _explain(error)
    if sentence is None:
        traceback.print_exception(error)
        _exit(status)
    if not is_rank_0():
        # When rank 0 has exited, the launcher sends SIGTERM. Then this rank has nothing to add.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ranks.wait_for_rank_0(status)
        place = f"[rank {os.environ['RANK']}]"
        sentence = "\n".join(f"{place} {line}" for line in sentence.splitlines())
    print(sentence, file=sys.stderr, flush=True)
    if isinstance(error, OSError):  # a full disk, or no permission
        os._exit(status)  # the exit handlers of libraries would fail to write, too
    _exit(status)


def _explain(error: Exception) -> tuple[str | None, int]:
    """Return an error message and an exit status, or None and 1 if a traceback is better."""
    text = str(error)
    if isinstance(error, RunError):
        return text, 2
    path = getattr(error, "filename", None) or "the disk"
    if isinstance(error, PermissionError):
        return f"No permission for {path}: ask its owner, or give another path.", 2
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        remedy = "Free space or choose a writable folder, then start again."
        return f"Cannot write to {path}: {error.strerror}. {remedy}", 2
    # gloo raises plain RuntimeErrors that begin with a path of its source code. NCCL's errors have
    # many causes and several lines, so they keep their traceback.
    unreachable = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    if unreachable or (isinstance(error, RuntimeError) and "/gloo/" in text):
        frames = traceback.extract_tb(error.__traceback__)
        last_own_frame = frames[0]
        for frame in frames:
            if OWN_FILES.match(frame.filename):
                last_own_frame = frame
        place = f"{last_own_frame.filename}, line {last_own_frame.lineno}: {last_own_frame.line}"
        reason = re.sub(r"^\[.*?\] |\. This is typically .*", "", text.splitlines()[0])
        return f"{place}\nThe other ranks are gone or out of reach ({reason}). {RESUMES}", 1
    return None, 1


def _exit(status: int) -> NoReturn:
    """Exit. One of several ranks, or of a group of one, skips the interpreter's shutdown.

    gloo's threads can outlive destroy_process_group(), because DTensor's caches still hold the
    group. If such a thread releases a tensor while the interpreter shuts down, it aborts the
    process ("terminate called without an active exception"), see
    https://github.com/pytorch/pytorch/issues/190489. Without destroy_process_group(), the shutdown
    can also hang.

    Two things of the shutdown are still needed, and Python has no public names for them. It waits
    for threads: without that, a save that is not awaited would be cut off. And it calls the
    functions registered with atexit: without that, wandb would not send the last metrics, and data
    workers would be left behind.
    """
    is_single = os.environ.get("WORLD_SIZE", "1") == "1"  # a text, which may be no number
    if is_single and not ranks.had_process_group():
        sys.exit(status)
    if not dist.is_initialized():  # else a thread may wait for a rank that is gone
        threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def signals_to_handle() -> list[signal.Signals]:
    """Return the signals that tell a rank to stop; nohup makes it ignore one, the hang-up."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGUSR1, *hang_up]


def restore_stop_handlers() -> None:
    """Set this script's handlers of the stop signals again.

    Triton compiles kernels with LLVM, whose handlers replace Python's and ignore SIGUSR1.
    """
    for number in signals_to_handle():
        signal.signal(number, signal.getsignal(number))


def ask_for_requeue(run_dir: Path, step: int) -> int:
    """Write the file `requeue` to the run's folder, and return the exit status for a requeue.

    step: the step after which the run was saved. The file contains Slurm's job id and restart
    count. The status is 75, but 0 under torchrun, which would restart all ranks after any other.
    """
    if is_rank_0():
        job = [os.environ.get(name) or "0" for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")]
        (run_dir / "requeue").write_text(" ".join(job) + "\n")
        print(f"Told to stop; saved after step {step}. {RESUMES}", file=sys.stderr)
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else REQUEUE_STATUS

"""How a process of a run starts and ends: its place among the others, its name, its last words."""

import argparse
import atexit
import ctypes
import errno
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from common.cli import InputError, wait_for_rank_0
from common.remote import local_side

# What torchrun tells each process that it starts.
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ALONE = {**dict.fromkeys(PLACE, "0"), "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
REQUEUE_STATUS = 75  # EX_TEMPFAIL of sysexits.h: try again later
PR_SET_PDEATHSIG = 1  # https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html

_how_to_go_on = "there is no run to go on with."  # until one has a name


def complete_environment() -> None:
    """Set torchrun's variables for a process that was started without it: a world of one.

    Under torchrun, on Linux, the process from now on ends with the torchrun that started it.
    Raises InputError where only some of them are set, where they make no sense, or where there are
    more processes on this machine than GPUs (but a machine without any has room for all).
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # Killed itself, torchrun leaves its workers behind: they would hold GPUs and the run.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    present = [name for name in PLACE if name in os.environ]
    # Nobody to meet: srun and mpirun give no address.
    if not present or os.environ.get("WORLD_SIZE") == "1":
        os.environ |= {name: os.environ.get(name, ALONE[name]) for name in PLACE}
    if missing := [name for name in PLACE if name not in os.environ]:
        raise InputError(
            f"{', '.join(present)} is set but {', '.join(missing)} is not: start this with "
            f"torchrun, or set what is missing, or unset {' '.join(present)} to train in one "
            "process."
        )
    numbers = {name: os.environ[name] for name in PLACE if name != "MASTER_ADDR"}
    for name, text in numbers.items():
        if not text.isdecimal():
            raise InputError(f"{name} is {text!r}, which is no number: start this with torchrun.")
    if int(numbers["RANK"]) >= int(numbers["WORLD_SIZE"]):
        raise InputError("RANK must be below WORLD_SIZE, counted from 0: start this with torchrun.")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", int(numbers["LOCAL_RANK"]) + 1))
    if 0 < torch.cuda.device_count() < here:
        raise InputError(
            f"{here} processes on this machine need {here} GPUs and PyTorch sees "
            f"{torch.cuda.device_count()}: give torchrun --nproc-per-node gpu."
        )


def run(main: Callable[[], None]) -> NoReturn:
    """Call `main` and exit: with 0 or the status that it exits with; with one sentence and 2 for
    bad input, 130 after Ctrl-C, 1 where the other ranks are gone or out of reach; any other
    exception shows its traceback, status 1.
    """
    status = 0
    try:
        main()
    except SystemExit as end:  # with a status of its own, after a stop
        status = end.code or 0
    except InputError as error:
        _leave(str(error), 2)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # Ctrl-C reaches all ranks
            print(f"Interrupted; {_how_to_go_on}", file=sys.stderr, flush=True)
        _end(130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            _fail()
        where = f" {error.filename}" if error.filename else ""
        sentence = f"Cannot write{where}: {error.strerror}. Make room, then start this once more."
        print(sentence, file=sys.stderr, flush=True)
        os._exit(2)  # at once: what libraries do at the end of a process would fail the same way
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            port = os.environ["MASTER_PORT"]
            _leave(f"Port {port} is in use: give another MASTER_PORT, or torchrun --standalone.", 2)
        # gloo has no exceptions of its own, only a path of its sources before the text. NCCL's
        # can mean anything, in several lines.
        out_of_reach = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
        if not out_of_reach and "/gloo/" not in str(error):
            _fail()
        reason = re.sub(r"^\[.*?\] |\. This is typically .*", "", str(error).splitlines()[0])
        _leave(f"The other ranks are gone or out of reach ({reason}); {_how_to_go_on}", 1)
    except Exception:
        _fail()
    _end(status)


def _leave(sentence: str, status: int) -> NoReturn:
    """Say one sentence and exit; a rank other than 0 speaks only if rank 0 has not ended all."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's: rank 0 has spoken then
        wait_for_rank_0(status)
        sentence = f"[rank {rank}] {sentence}"
    print(sentence, file=sys.stderr, flush=True)
    _end(status)


def _fail() -> NoReturn:
    """Show the traceback of the exception that is being handled, and exit with status 1."""
    traceback.print_exc()
    _end(1)


def _end(status: int) -> NoReturn:
    """Exit; a rank among others skips the end of the Python interpreter.

    gloo's threads can outlive destroy_process_group(), because DTensor's caches still hold the
    group. If such a thread releases a tensor while the interpreter ends, it aborts the process
    ("terminate called without an active exception"), see
    https://github.com/pytorch/pytorch/issues/190489. A rank can also hang where the group exists.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        sys.exit(status)
    if not dist.is_initialized():
        threading._shutdown()  # waits for Python's threads, as sys.exit() does
    atexit._run_exitfuncs()  # wandb's among them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def outlive_stop(worker: int) -> None:
    """Let a process that prepares data ignore what tells its rank to stop: the rank ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def ask_for_requeue(run_dir: Path, step: int) -> int:
    """Leave the file `requeue` in the run's folder and return the exit status that says the same.

    step: after which the run was saved. The file holds Slurm's numbers of the job and of its start.
    The status is 75, and under torchrun 0: at any other torchrun would start all ranks again.
    """
    if os.environ["RANK"] == "0":
        start = [os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")]
        (local_side(run_dir) / "requeue").write_text(" ".join(start) + "\n")
        sentence = f"Told to stop; saved after step {step}; {_how_to_go_on}"
        print(sentence, file=sys.stderr, flush=True)
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else REQUEUE_STATUS


def experiment_name(args: argparse.Namespace) -> str:
    """Return args.experiment_name, or where there is none a new one: model, data set, time.

    Clocks differ, so rank 0's is the name; all ranks must call this. Raises InputError where
    torchrun shall start the ranks again after a failure: they would begin anew under a new name.
    """
    if args.experiment_name is not None:
        return args.experiment_name
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        raise InputError("With --max-restarts a run needs a name that stays: give one with -e.")
    parts = (
        Path(args.model_name).name,
        Path(args.dataset_name).stem,
        time.strftime("%Y%m%d-%H%M%S"),
    )
    names = [re.sub(r"[^\w.-]+", "-", "-".join(parts))]
    if dist.is_initialized():
        dist.broadcast_object_list(names, src=0)
    return names[0]


def how_to_go_on(experiment_name: str) -> str:
    """Return the sentence that says with which command the run goes on, as one can type it.

    LAUNCH_COMMAND: set by a launch file, the words that started it; the script's arguments are then
    `-e NAME` and those that the launch file was given. Without one, nobody knows how several nodes
    were started.
    """
    global _how_to_go_on
    launch_file = shlex.split(os.environ.get("LAUNCH_COMMAND", ""))
    arguments = sys.argv[3:] if launch_file else sys.argv[1:]
    if not {"-e", "--experiment-name"} & {word.split("=")[0] for word in arguments}:
        arguments += ["-e", experiment_name]
    command = [sys.executable.removeprefix(f"{Path.cwd()}/")]
    here = os.environ.get("LOCAL_WORLD_SIZE", "1")  # torchrun's number of processes on this node
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is this module
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", here]
    command.append(sys.argv[0])
    how = shlex.join((launch_file or command) + arguments)
    if not launch_file and os.environ.get("WORLD_SIZE", here) != here:
        how = f"start it once more as you did, with -e {experiment_name}"
    _how_to_go_on = f"to go on with it after a stop: {how}"
    return _how_to_go_on


def describe_end(run_dir: Path, metrics: dict[str, float], prompt: str, text: str) -> str:
    """Return the lines that end a run: evaluation, sample, folder, and the command to go on."""
    return (
        f"a sample of the model, after the prompt {prompt!r}:\n\n{text}\n\n"
        f"evaluation: loss {metrics['eval_loss']:.4f}, perplexity {metrics['perplexity']:.2f}, "
        f"{metrics['bits_per_byte']:.3f} bits per byte\n"
        f"the run's folder: {run_dir}\n{_how_to_go_on}"
    )

"""The command line: arguments, one-sentence errors, log lines, and what a run says of itself."""

import argparse
import errno
import logging
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import tqdm
import transformers

# Only these are ever logged: an environment also holds tokens and passwords.
LOGGED_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES HF_HOME HF_HUB_OFFLINE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR "
    "MASTER_PORT NCCL_DEBUG NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_SOCKET_IFNAME OMP_NUM_THREADS "
    "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF RANK SLURM_JOB_ID SLURM_NNODES SLURM_PROCID "
    "SLURM_RESTART_COUNT TORCH_DISTRIBUTED_DEBUG WANDB_MODE WORLD_SIZE"
).split()


class InputError(Exception):
    """What the user gave cannot be used; the message is one sentence that says what to do."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse with `@file` arguments: `--name value` lines, quoted as in a shell, # for comments.

    Help shows defaults. A file that cannot be read ends in argparse's own error, status 2.
    """

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description,
            fromfile_prefix_chars="@",
            formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, width=100),
            allow_abbrev=False,
        )

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            return shlex.split(arg_line, comments=True)
        except ValueError as error:
            self.error(f"cannot read the line {arg_line!r} of the @file: {error}")


def at_least(low: int | float) -> Callable[[str], int | float]:
    """Return an argparse type: a number of the type of `low`, finite or `inf`, not below it."""

    def convert(text: str) -> int | float:
        try:
            value = type(low)(text)
        except ValueError:
            value = float("nan")
        if not value >= low:
            kind = "whole number" if isinstance(low, int) else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {kind} of at least {low}")
        return value

    return convert


def run(main: Callable[[], None]) -> NoReturn:
    """Call `main` and exit: 0, or 2 with one sentence for bad input, or 130 after Ctrl-C."""
    try:
        main()
    except InputError as error:
        _leave(str(error), status=2)
    except KeyboardInterrupt:
        _leave("Interrupted: the command shown at the start goes on from the last checkpoint.", 130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            raise
        where = f" {error.filename}" if error.filename else ""
        _leave(f"Cannot write{where}: {error.strerror}. The last checkpoint still resumes.", 2)
    sys.exit(0)


def _leave(sentence: str, status: int) -> NoReturn:
    print(sentence, file=sys.stderr, flush=True)
    sys.exit(status)


class ProgressHandler(logging.Handler):
    """Write log lines to stderr above a tqdm bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.tqdm.write(self.format(record), file=sys.stderr)


def new_experiment_name(args: argparse.Namespace) -> str:
    """Return a name no run has yet: model, data set, time. Ranks must agree on rank 0's."""
    parts = (
        Path(args.model_name).name,
        Path(args.dataset_name).name,
        time.strftime("%Y%m%d-%H%M%S"),
    )
    return "-".join(parts)


def resume_command(experiment_name: str) -> str:
    """Return the command line of this process, with the experiment's name, as one can type it."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    command = [str(python), *sys.argv]
    if not {"-e", "--experiment-name"} & {word.split("=")[0] for word in sys.argv}:
        command += ["-e", experiment_name]
    return shlex.join(command)


def describe_run(args: argparse.Namespace, device: torch.device) -> str:
    """Return the lines that start a log: arguments, versions, device, allow-listed environment."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = (
        f"python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {device.type} ({name}), "
        f"{torch.get_num_threads()} threads"
    )
    environment = {key: os.environ[key] for key in LOGGED_ENVIRONMENT if key in os.environ}
    return f"arguments: {vars(args)}\nversions: {versions}\nenvironment: {environment}"


def format_metrics(step: int, total_steps: int, metrics: dict[str, float | None]) -> str:
    """Return a log line: the step, and what a reader wants to see of its metrics."""
    formats = {
        "loss": "loss {:.4f}",
        "lr": "lr {:.2e}",
        "grad_norm": "grad norm {:.2f}",
        "tokens_per_s": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
        "time/total": "{:.0f} ms",
        "eval_loss": "eval loss {:.4f}",
        "perplexity": "perplexity {:.2f}",
        "bits_per_byte": "{:.3f} bits/byte",
    }
    parts = [f.format(metrics[key]) for key, f in formats.items() if metrics.get(key) is not None]
    return " | ".join([f"step {step}/{total_steps}", *parts])

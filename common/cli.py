"""The command line: arguments, one-sentence errors, log lines, and what a run says of itself."""

import argparse
import importlib.metadata
import logging
import os
import platform
import re
import runpy
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

import torch
import tqdm

# What all ranks have to say, rank 0 says; the others give it this much time.
HEAD_START_S = 5.0

# Only these are ever logged: an environment also holds tokens and passwords.
LOGGED_ENVIRONMENT = re.compile(
    r"(CUDA_VISIBLE_DEVICES|HF_HOME|HF_HUB_OFFLINE|OMP_NUM_THREADS|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|SLURM_(JOB_ID|NNODES|PROCID)"
    r"|SLURM_RESTART_COUNT|SLURMD_NODENAME|GROUP_WORLD_SIZE|TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    r"|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS)|(GLOO|NCCL)_SOCKET_IFNAME"
    r"|NCCL_(DEBUG|IB_DISABLE|IB_HCA|P2P_DISABLE)|TORCH_DISTRIBUTED_DEBUG|WANDB_MODE)"
)


def wait_for_rank_0(status: int) -> None:
    """On another rank that is about to end: give rank 0 time to speak, and to end all of them.

    A rank that ended first would be the one that the launcher reports, and rank 0 might be ended
    before it could speak.
    """
    if status and os.environ.get("RANK", "0") != "0":
        time.sleep(HEAD_START_S)


class InputError(Exception):
    """What the user gave cannot be used; the message is one sentence that says what to do."""


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there are some."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class ArgumentParser(argparse.ArgumentParser):
    """argparse with `@file` arguments: `--name value` lines, quoted as in a shell, # for comments.

    Help shows defaults. A file that cannot be read ends in argparse's own error, status 2.
    """

    def __init__(self, description: str, add_help: bool = True) -> None:
        super().__init__(
            description=description,
            add_help=add_help,
            fromfile_prefix_chars="@",
            formatter_class=lambda prog: _HelpFormatter(prog, width=100),
            allow_abbrev=False,
        )

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            return shlex.split(arg_line, comments=True)
        except ValueError as error:
            self.error(f"cannot read the line {arg_line!r} of the @file: {error}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        wait_for_rank_0(status)
        super().exit(status, message)

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if os.environ.get("RANK", "0") == "0":  # all ranks have the same to say
            super()._print_message(message, file)


def at_least(low: int | float) -> Callable[[str], int | float]:
    """Return an argparse type: a finite number of the type of `low`, from it up to 2^31."""

    def convert(text: str) -> int | float:
        try:
            value = type(low)(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= 2**31:
            kind = "whole number" if isinstance(low, int) else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {kind} from {low} to {2**31}")
        return value

    return convert


def above_zero(text: str) -> float:
    """An argparse type: a number above zero; `inf` is one."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def share(text: str) -> float:
    """An argparse type: a number above 0 and at most 1."""
    if (value := above_zero(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 1")
    return value


def check_output(file: Path | None) -> None:
    """Raise InputError if a file that shall be written is there already, or cannot be made."""
    if file and file.exists():
        raise InputError(f"{file} exists already: give another file, or delete it.")
    if file and not os.access(file.parent, os.W_OK):
        raise InputError(f"{file} cannot be written: give a file in another folder.")


def run_given_script(prepare: Callable[[], None]) -> None:
    """Run the script whose path is the first argument, with the others, after calling `prepare`.

    Raises InputError where there is no such script, and whatever `prepare` does.
    """
    if not Path(sys.argv[1]).is_file():
        raise InputError(f"There is no script {sys.argv[1]}: give the path of one, or nothing.")
    prepare()
    # With this the script says how it can go on; it adds what comes after these words.
    os.environ.setdefault("LAUNCH_COMMAND", shlex.join(["python", *sys.argv[:4]]))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


class ProgressHandler(logging.Handler):
    """Write log lines to stderr above a tqdm bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.tqdm.write(self.format(record), file=sys.stderr)


def progress_bar(total_steps: int, steps_done: int, rank: int) -> tqdm.tqdm:
    """Return a bar of the steps on rank 0, if stderr is a terminal; elsewhere it shows nothing."""
    disable = True if rank else None
    return tqdm.tqdm(total=total_steps, initial=steps_done, unit="step", disable=disable)


def describe_run(args: argparse.Namespace, device: torch.device) -> str:
    """Return the lines that start a log: arguments, versions, device, allow-listed environment."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = (
        f"python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {importlib.metadata.version('transformers')}, {device.type} ({name}), "
        f"{torch.get_num_threads()} threads"
    )
    environment = {k: v for k, v in sorted(os.environ.items()) if LOGGED_ENVIRONMENT.fullmatch(k)}
    return (
        f"arguments: {vars(args)}\nversions: {versions}\n"
        f"environment: {environment or 'nothing that matters here is set'}"
    )


def show_metrics(logger: logging.Logger, bar: tqdm.tqdm, metrics: dict[str, float | None]) -> None:
    """Log what a reader wants to see of a step's metrics, and put it beside the progress bar."""
    formats = {
        "loss": "loss {:.4f}",
        "lr": "lr {:.2e}",
        "grad_norm": "grad norm {:.2f}",
        "loss_scale": "loss scale {:,.0f}",
        "share_changed": "{:.1%} of the weights changed",
        "tokens_per_s": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
        "eval_loss": "eval loss {:.4f}",
        "perplexity": "perplexity {:.2f}",
        "bits_per_byte": "{:.3f} bits/byte",
        "time/wait_max": "waited up to {:.1f} ms for",
    }
    shown = {
        key: f.format(metrics[key]) for key, f in formats.items() if metrics.get(key) is not None
    }
    if "time/wait_max" in shown:
        shown["time/wait_max"] += f" rank {metrics['slowest_rank']} on {metrics['slowest_host']}"
    logger.info(" | ".join([f"step {metrics['step']}/{bar.total}", *shown.values()]))
    bar.set_postfix_str(", ".join(shown[key] for key in ("loss", "tokens_per_s") if key in shown))

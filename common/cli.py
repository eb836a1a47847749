"""The command line: arguments, one-line errors, log lines and progress bars."""

import argparse
import difflib
import importlib.metadata
import logging
import math
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, NoReturn

import torch
import tqdm

HEAD_START_S = 5.0  # how long other ranks let rank 0 report an error before they exit

# Only these variables are logged, because an environment also contains tokens and passwords.
LOGGED_ENVIRONMENT = re.compile(
    r"(CUDA_VISIBLE_DEVICES|HF_HOME|HF_HUB_OFFLINE|OMP_NUM_THREADS|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|SLURM_(JOB_ID|NNODES|PROCID)"
    r"|SLURM_RESTART_COUNT|SLURMD_NODENAME|GROUP_WORLD_SIZE|TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    r"|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS)|(GLOO|NCCL)_SOCKET_IFNAME"
    r"|NCCL_(DEBUG|IB_DISABLE|IB_HCA|P2P_DISABLE)|TORCH_DISTRIBUTED_DEBUG|WANDB_MODE)"
)


class InputError(Exception):
    """The user's input cannot be used. The message is one sentence that says what to do."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse that also reads arguments from a file, given as `@file`, and reports errors once.

    Each line of the file is like `--name value`, quoted as in a shell; # starts a comment. The
    help shows default values. On bad arguments only rank 0 prints, and all ranks exit with 2.
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

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: ([^\s=]+)", message)
        known = [name for action in self._actions for name in action.option_strings]
        if unknown and (similar := difflib.get_close_matches(unknown[1], known, n=1)):
            message += f" (did you mean {similar[0]}?)"
        self.exit(2, f"{self.prog}: error: {message}; --help shows all arguments\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        wait_for_rank_0(status)
        super().exit(status, message)

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if os.environ.get("RANK", "0") == "0":  # all ranks have the same message
            super()._print_message(message, file)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default value of each argument that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def wait_for_rank_0(status: int) -> None:
    """Wait before a rank other than 0 exits with an error, so that rank 0 can report it.

    A launcher reports the rank that exits first, and then kills the others.
    """
    if status and os.environ.get("RANK", "0") != "0":
        time.sleep(HEAD_START_S)


def _number(kind: type, accepts: Callable, description: str) -> Callable[[str], int | float]:
    def convert(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {description}")
        return value

    return convert


def at_least(low: int | float) -> Callable[[str], int | float]:
    """Return an argparse type: a number of the type of `low`, from `low` to 2^31."""
    kind = "whole number" if isinstance(low, int) else "number"
    description = f"a {kind} from {low} to {2**31}"
    return _number(type(low), lambda value: low <= value <= 2**31, description)


# Three more argparse types. `inf` is above zero, too.
above_zero = _number(float, lambda value: value > 0, "a number above 0")
decay = _number(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")
share = _number(float, lambda value: 0 < value <= 1, "a number above 0 and at most 1")


def check_output(file: Path | None) -> None:
    """Raise InputError if a new file already exists or if its folder is not writable."""
    if file and file.exists():
        raise InputError(f"{file} already exists: give another file, or delete it.")
    if file and not os.access(file.parent, os.W_OK):
        raise InputError(f"{file} cannot be written: give a file in another folder.")


class ProgressHandler(logging.Handler):
    """Writes log lines to stderr, above a tqdm progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.tqdm.write(self.format(record), file=sys.stderr)


def progress_bar(total_steps: int, steps_done: int, rank: int) -> tqdm.tqdm:
    """Return a progress bar, which is visible on rank 0 only, and only if stderr is a terminal."""
    disable = True if rank else None
    return tqdm.tqdm(total=total_steps, initial=steps_done, unit="step", disable=disable)


def progress(items: Iterable, name: str) -> Iterable:
    """Return the items again, with a progress bar that disappears when they end."""
    disable = True if os.environ.get("RANK", "0") != "0" else None
    return tqdm.tqdm(items, name, leave=False, disable=disable)


def describe_run(args: argparse.Namespace, device: torch.device) -> str:
    """Return the first lines of a log: arguments, versions, device and LOGGED_ENVIRONMENT."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = (
        f"python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {importlib.metadata.version('transformers')}, {device.type} ({name}), "
        f"{torch.get_num_threads()} threads"
    )
    environment = {k: v for k, v in sorted(os.environ.items()) if LOGGED_ENVIRONMENT.fullmatch(k)}
    return (
        f"arguments: {vars(args)}\nversions: {versions}\n"
        f"environment: {environment or 'no variable that affects training is set'}"
    )


def show_metrics(logger: logging.Logger, bar: tqdm.tqdm, metrics: dict[str, float | None]) -> None:
    """Log the most important metrics of a step, and show some of them at the progress bar."""
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

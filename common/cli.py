"""The command line: arguments, the log and progress bars."""

import argparse
import importlib.metadata
import logging
import math
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, NoReturn

import torch
import tqdm

from common import old_flags, variants
from common.arguments import ArgumentFileError, expand_files
from common.ranks import is_rank_0, wait_for_rank_0

# Only these variables are logged, because an environment also contains tokens and passwords.
LOGGED_ENVIRONMENT = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_PROCID", "SLURM_RESTART_COUNT", "SLURMD_NODENAME"),
    *("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"),
    *("TORCH_DISTRIBUTED_DEBUG", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "GLOO_SOCKET_IFNAME"),
    *("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_P2P_DISABLE"),
    *("HF_HOME", "HF_HUB_OFFLINE", "WANDB_MODE"),
)


class ArgumentParser(argparse.ArgumentParser):
    """argparse that also reads arguments from a file, given as `@file`, and reports errors once.

    The help shows default values. On bad arguments only rank 0 prints and exits with 2; the others
    follow some seconds later, unless the launcher has ended them.
    """

    def __init__(
        self, description: str, add_help: bool = True, argument_files: bool = True
    ) -> None:
        super().__init__(
            description=description,
            add_help=add_help,
            formatter_class=lambda prog: _HelpFormatter(prog, width=100),
            allow_abbrev=False,
        )
        self.argument_files = argument_files

    def parse_known_args(self, args: list[str] | None = None, namespace: object = None) -> tuple:
        words = sys.argv[1:] if args is None else args
        if self.argument_files:
            try:
                words = expand_files(words)
            except ArgumentFileError as error:
                self.error(str(error))
        # torch.distributed.launch adds --local-rank=N. It also sets LOCAL_RANK, as torchrun does.
        words = [word for word in words if not word.startswith("--local-rank=")]
        return super().parse_known_args(self._without_old_flags(words), namespace)

    def _without_old_flags(self, words: list[str]) -> list[str]:
        """Return the arguments of a train_llm.py without flags that only older scripts had."""
        script = Path(sys.argv[0])
        old = {row.flag for row in old_flags.OLD_FLAGS}
        if script.name != "train_llm.py" or old.isdisjoint(w.partition("=")[0] for w in words):
            return words
        try:
            words, warnings = old_flags.translate(words, script, self.format_help())
        except old_flags.OldFlagError as error:
            self.exit(2, f"{self.prog}: error: {error}\n")
        for warning in warnings:
            self._print_message(f"{self.prog}: warning: {warning}\n", sys.stderr)
        return words

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; --help shows all arguments\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        wait_for_rank_0(status)
        super().exit(status, message)

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if is_rank_0():  # all ranks have the same message
            super()._print_message(message, file)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default value of each argument that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def between(low: int | float, high: int | float) -> Callable[[str], int | float]:
    """Return an argparse type: a number of the type of `low`, from `low` to `high`."""
    type_name = "whole number" if isinstance(low, int) else "number"

    def convert(text: str) -> int | float:
        try:
            value = type(low)(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {type_name} from {low} to {high}")
        return value

    return convert


def at_least(low: int | float) -> Callable[[str], int | float]:
    """Return an argparse type: a number of the type of `low`, from `low` to 2^31."""
    return between(low, 2**31)


# --- the log ---


class ProgressHandler(logging.Handler):
    """Writes log lines to stderr, above a tqdm progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # a terminal that was closed, or `| head`: the training goes on
            self.handleError(record)


def start_log(args: argparse.Namespace, device: torch.device) -> None:
    """Begin the log with the arguments, the versions, the device and LOGGED_ENVIRONMENT.

    Rank 0 logs what is INFO, other ranks only warnings. With ranks, a line names host and rank.
    """
    has_rank = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    place = f"[{socket.gethostname()}] [rank {os.environ['RANK']}] " if has_rank else ""
    logging.basicConfig(
        level=logging.INFO if is_rank_0() else logging.WARNING,
        format=f"[%(asctime)s] {place}%(message)s",
        handlers=[ProgressHandler()],
    )
    if is_rank_0():  # the folder is the same for all
        about_variant = variants.describe_folder(Path(sys.argv[0]).parent)
        for line in about_variant[:1]:
            logging.info(line)
        for warning in about_variant[1:]:
            logging.warning(warning)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    environment = {k: v for k, v in sorted(os.environ.items()) if k in LOGGED_ENVIRONMENT}
    logging.info(
        f"arguments: {vars(args)}\n"
        f"versions: python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {importlib.metadata.version('transformers')}, {device.type} ({name}), "
        f"{torch.get_num_threads()} threads\n"
        f"environment: {environment or 'no variable that affects training is set'}"
    )


def progress(name: str, items: Iterable | None = None, **options: object) -> tqdm.tqdm:
    """Return a progress bar in rank 0's terminal, of these items or to be updated.

    options: of tqdm, such as total and initial.
    """
    # None disables the bar where stderr is no terminal.
    return tqdm.tqdm(items, name, leave=False, disable=None if is_rank_0() else True, **options)

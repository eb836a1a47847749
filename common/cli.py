"""The command line: arguments, one-sentence errors, log lines, and what a run says of itself."""

import argparse
import errno
import logging
import os
import platform
import re
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
LOGGED_ENVIRONMENT = re.compile(
    r"(CUDA_VISIBLE_DEVICES|HF_HOME|HF_HUB_OFFLINE|OMP_NUM_THREADS|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|SLURM_(JOB_ID|NNODES|PROCID)"
    r"|SLURM_RESTART_COUNT|NCCL_(DEBUG|IB_DISABLE|P2P_DISABLE|SOCKET_IFNAME)"
    r"|TORCH_DISTRIBUTED_DEBUG|WANDB_MODE)"
)

# Set when the run has a name, for a run that is interrupted.
_how_to_go_on = "nothing was started."


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

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description,
            fromfile_prefix_chars="@",
            formatter_class=lambda prog: _HelpFormatter(prog, width=100),
            allow_abbrev=False,
        )

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            return shlex.split(arg_line, comments=True)
        except ValueError as error:
            self.error(f"cannot read the line {arg_line!r} of the @file: {error}")


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


def run(main: Callable[[], None]) -> NoReturn:
    """Call `main` and exit: 0, or 2 with one sentence for bad input, or 130 after Ctrl-C."""
    try:
        main()
    except InputError as error:
        _leave(str(error), status=2)
    except KeyboardInterrupt:
        _leave(f"Interrupted; {_how_to_go_on}", 130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            raise
        where = f" {error.filename}" if error.filename else ""
        sentence = f"Cannot write{where}: {error.strerror}. Make room, then start this once more."
        print(sentence, file=sys.stderr, flush=True)
        os._exit(2)  # at once: what libraries do at the end of a process would fail the same way
    sys.exit(0)


def _leave(sentence: str, status: int) -> NoReturn:
    print(sentence, file=sys.stderr, flush=True)
    sys.exit(status)


class ProgressHandler(logging.Handler):
    """Write log lines to stderr above a tqdm bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.tqdm.write(self.format(record), file=sys.stderr)


def experiment_name(args: argparse.Namespace) -> str:
    """Return args.experiment_name, or where there is none a new one: model, data set, time.

    Ranks must agree on rank 0's.
    """
    if args.experiment_name is not None:
        return args.experiment_name
    parts = (
        Path(args.model_name).name,
        Path(args.dataset_name).stem,
        time.strftime("%Y%m%d-%H%M%S"),
    )
    return re.sub(r"[^\w.-]+", "-", "-".join(parts))


def how_to_go_on(experiment_name: str) -> str:
    """Return the sentence that says with which command the run goes on, as one can type it."""
    global _how_to_go_on
    words = list(sys.argv)
    if not {"-e", "--experiment-name"} & {word.split("=")[0] for word in words}:
        words += ["-e", experiment_name]
    python = Path(sys.executable)
    here = python.is_relative_to(Path.cwd())
    words.insert(0, str(python.relative_to(Path.cwd()) if here else python))
    _how_to_go_on = f"to go on with it after a stop: {shlex.join(words)}"
    return _how_to_go_on


def describe_run(args: argparse.Namespace, device: torch.device) -> str:
    """Return the lines that start a log: arguments, versions, device, allow-listed environment."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = (
        f"python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {device.type} ({name}), "
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
        "tokens_per_s": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
        "eval_loss": "eval loss {:.4f}",
        "perplexity": "perplexity {:.2f}",
        "bits_per_byte": "{:.3f} bits/byte",
    }
    shown = {
        key: f.format(metrics[key]) for key, f in formats.items() if metrics.get(key) is not None
    }
    logger.info(" | ".join([f"step {metrics['step']}/{bar.total}", *shown.values()]))
    bar.set_postfix_str(", ".join(shown[key] for key in ("loss", "tokens_per_s") if key in shown))


def describe_end(run_dir: Path, metrics: dict[str, float], prompt: str, text: str) -> str:
    """Return the lines that end a run: evaluation, sample, folder, and the command to go on."""
    return (
        f"a sample of the model, after the prompt {prompt!r}:\n\n{text}\n\n"
        f"evaluation: loss {metrics['eval_loss']:.4f}, perplexity {metrics['perplexity']:.2f}, "
        f"{metrics['bits_per_byte']:.3f} bits per byte\n"
        f"the run's folder: {run_dir}\n{_how_to_go_on}"
    )

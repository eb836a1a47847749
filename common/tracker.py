"""The folder of a run, and the metrics: to metrics.jsonl, to wandb and to the log."""

import argparse
import contextlib
import json
import logging
import math
import os
import re
import time
import uuid
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from common.errors import RunError
from common.ranks import on_rank_0, rank_and_world_size

logger = logging.getLogger(__name__)

PROJECT = "one-diff-at-a-time"
# After a restart, the rank 0 before may still hold the lock, if its node cannot be reached. The new
# one waits less than --dist-timeout (default: 600 s), for which the other ranks wait for it.
LOST_NODE_S = 500.0
LOCKS: dict[Path, FileLock] = {}  # held until the process ends
# What the log shows of a step's metrics, if it has them.
SHOWN = (
    "loss {loss:.4f}",
    "lr {lr:.2e}",
    "grad norm {grad_norm:.2f}",
    "loss scale {loss_scale:,.0f}",
    "{share_changed:.1%} of the weights changed",
    "{tokens_per_s:,.0f} tokens/s",
    "MFU {mfu:.1%}",
    "eval loss {eval_loss:.4f}",
    "perplexity {perplexity:.2f}",
    "{bits_per_byte:.3f} bits/byte",
    "waited up to {time/wait_max:.1f} ms for rank {slowest_rank} on {slowest_host}",
)


def make_run_dir(args: argparse.Namespace) -> Path:
    """Make, lock and log the folder args.save_dir/args.experiment_name; all ranks must call this.

    Without a name, rank 0 chooses one. Raises RunError on all ranks if the name cannot be a
    folder's, if the folder cannot be written, or if another process is training in it.
    """
    if "://" in args.save_dir:
        raise RunError("--save-dir is a local folder; --checkpoint-dir may be an address.")
    run_dir = Path(args.save_dir).expanduser() / _name_of(args)
    on_rank_0(_lock, run_dir)
    logger.info(f"the run's folder is {run_dir}")
    return run_dir


def _lock(run_dir: Path) -> None:
    """Make and lock a run's folder. The lock is held until this process ends.

    After a restart, wait for the lock, at most LOST_NODE_S.
    """
    restarts = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    is_restart = any(int(os.environ.get(name) or 0) for name in restarts)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = LOCKS.setdefault(run_dir, FileLock(run_dir / ".lock"))
        lock.acquire(timeout=LOST_NODE_S if is_restart else 0)
        (run_dir / "requeue").unlink(missing_ok=True)  # from the previous start
    except Timeout as error:
        raise RunError(
            f"Another process is training in {run_dir}: wait for it, or give another -e."
        ) from error
    except (OSError, NotImplementedError) as error:  # a cluster's file system may not have locks
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"Cannot write to {run_dir} ({reason}): give another --save-dir.") from error


def _name_of(args: argparse.Namespace) -> str:
    """Return args.experiment_name, or a new name: model, data set, time and process of rank 0."""
    if (name := args.experiment_name) is not None:
        if not re.fullmatch(r"[\w.-]{1,200}", name) or not name.strip("."):
            raise RunError(
                f"{name!r} cannot be an experiment's name: it names a folder, so use up to 200 "
                "letters, digits, '-', '_' and '.'."
            )
        return name
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):  # each restart would begin a new run
        raise RunError("With --max-restarts a run needs a name that stays: give one with -e.")
    model, dataset = Path(args.model_name).name, Path(args.dataset_name).stem
    # With the process id, runs that start in the same second have different folders.
    name = f"{model}-{dataset}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return on_rank_0(re.sub, r"[^\w.-]+", "-", name)


class Tracker:
    """Writes metrics to metrics.jsonl, wandb and the log, on rank 0; other ranks do nothing.

    run_dir: the run's folder. Its name is the name of the wandb run. The folder also keeps the id
        of the wandb run, so a new folder with the name of a deleted one begins a new wandb run.
    config: what wandb stores in addition to the metrics (arguments, sizes, "total_steps").
    step: how many steps are done. Lines of later steps, which a run that was killed may have left,
        are removed, because those steps are trained again.
    """

    def __init__(self, run_dir: Path, config: dict, step: int) -> None:
        rank, _ = rank_and_world_size()
        self._file = self._wandb = None
        self._total_steps = config["total_steps"]
        if rank == 0:
            self._file = _open_metrics(run_dir, step)
        # wandb takes a second to import, so it is not imported if it is not wanted at all.
        if rank == 0 and os.environ.get("WANDB_MODE") != "disabled":
            self._wandb = start_wandb(run_dir, config)

    def log(self, metrics: dict[str, float | str | None]) -> None:
        """Write the metrics of a step, including "step", at once, so that a kill loses no line.

        Values that are not finite become null, because JSON cannot represent them.
        """
        given = {key: value for key, value in metrics.items() if value is not None}
        shown = []
        for text in SHOWN:
            with contextlib.suppress(KeyError):
                shown.append(text.format_map(given))
        logger.info(" | ".join([f"step {metrics['step']}/{self._total_steps}", *shown]))
        metrics = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in metrics.items()
        }
        if self._file is not None:
            self._file.write(json.dumps(metrics) + "\n")
            self._file.flush()
        known = {key: value for key, value in metrics.items() if value is not None}
        self._call_wandb("log", known, step=metrics["step"])

    def finish(self) -> None:
        """Close the file and end the wandb run. A run that is killed loses neither."""
        if self._file is not None:
            self._file.close()
        self._call_wandb("finish")

    def _call_wandb(self, method: str, *args: object, **options: object) -> None:
        """Call a method of the wandb run, until wandb's own process has ended.

        SIGTERM also reaches that process, but a run that was told to stop must still save.
        """
        try:
            if self._wandb is not None:
                getattr(self._wandb, method)(*args, **options)
        except ConnectionError as error:
            logger.warning(f"wandb's own process has ended ({error}): only metrics.jsonl continues")
            self._wandb = None
            import wandb

            with contextlib.suppress(ConnectionError):
                wandb.teardown()  # at exit, wandb would do this and show a traceback


def _open_metrics(run_dir: Path, last: int) -> IO[str]:
    """Open metrics.jsonl to append to it, without later steps and a line that a kill cut off."""
    file, kept = run_dir / "metrics.jsonl", ""
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError, KeyError):
            if json.loads(line)["step"] <= last:
                kept += line + "\n"
    temporary = file.with_suffix(".tmp")
    temporary.write_text(kept, encoding="utf-8")
    temporary.replace(file)
    return file.open("a", encoding="utf-8")


def _run_id(run_dir: Path, name: str) -> str:
    file = run_dir / f"{name}.wandb-id"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)  # on another node, it may not be shared
        file.write_text(uuid.uuid4().hex)
    return file.read_text()


def start_wandb(run_dir: Path, config: dict, suffix: str = ""):
    """Start or resume a wandb run and return it. suffix: of its name and of the file of its id."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # sends errors even in offline mode
    os.environ.setdefault("WANDB_SAVE_CODE", "true")  # unless WANDB_DISABLE_CODE is set
    import wandb

    options = {
        "project": os.environ.get("WANDB_PROJECT", PROJECT),
        "dir": run_dir,
        "name": os.environ.get("WANDB_NAME", run_dir.name) + suffix,
        "id": _run_id(run_dir, run_dir.name + suffix),
        "resume": "allow",  # continue the run with this id if there is one
        "config": config,
    }
    try:
        options["settings"] = wandb.Settings(silent=True, console="off", init_timeout=30)
        mode = os.environ.get("WANDB_MODE")
        if mode is None and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        return wandb.init(mode=mode, **options)
    except wandb.Error as error:  # there is no network, or the login is out of date or malformed
        logger.warning(f"wandb runs offline, because: {str(error).splitlines()[0]}")
        wandb.teardown()  # forgets the run that did not start
        return wandb.init(mode="offline", **options)

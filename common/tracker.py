"""What a run leaves behind to be looked at: metrics.jsonl, and a run of Weights & Biases."""

import json
import logging
import math
import os
import re
from pathlib import Path

from filelock import FileLock, Timeout

from common.cli import InputError

logger = logging.getLogger(__name__)

PROJECT = "one-diff-at-a-time"
_locks: dict[Path, FileLock] = {}


def make_run_dir(save_dir: str, experiment_name: str, rank: int) -> Path:
    """Return <save_dir>/<experiment_name>, which now exists, can be written and is this run's.

    Rank 0 holds a lock on it until its process ends. Raises InputError for a name that is no
    folder's, a folder that cannot be written, or one in which another process is training.
    """
    if not re.fullmatch(r"[\w.-]+", experiment_name) or not experiment_name.strip("."):
        raise InputError(
            f"{experiment_name!r} cannot be an experiment's name: it names a folder, so use "
            "letters, digits, '-', '_' and '.'."
        )
    run_dir = Path(save_dir) / experiment_name
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            _locks.setdefault(run_dir, FileLock(run_dir / ".lock")).acquire(timeout=0)
    except Timeout as error:
        raise InputError(
            f"Another process is training in {run_dir}: wait for it, or give another -e."
        ) from error
    except OSError as error:
        raise InputError(
            f"Cannot write to {run_dir} ({error.strerror}): give another --save-dir."
        ) from error
    return run_dir


class Tracker:
    """Writes metrics.jsonl and tells wandb, on rank 0; on other ranks every call does nothing.

    run_dir: the run's folder. Its name is the name and the id of the wandb run.
    config: what wandb shall store beside the metrics (arguments, sizes).
    step: the step that the run begins after. Lines of later steps, which a run that was killed
        may have left, are removed: those steps are trained again.
    """

    def __init__(self, run_dir: Path, config: dict, step: int, rank: int = 0) -> None:
        self.active = rank == 0
        self._wandb = None
        if not self.active:
            return
        path = run_dir / "metrics.jsonl"
        _keep_steps(path, step)
        self._file = path.open("a", encoding="utf-8")
        if os.environ.get("WANDB_MODE") != "disabled":
            self._wandb = _start_wandb(run_dir, config)

    def log(self, metrics: dict[str, float | None]) -> None:
        """Add the metrics of a step, "step" among them; a kill of the process loses no line.

        What is not finite, as in a run that diverged, becomes null: JSON has no other way.
        """
        if not self.active:
            return
        metrics = {k: v if v is not None and math.isfinite(v) else None for k, v in metrics.items()}
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        if self._wandb is not None:
            known = {key: value for key, value in metrics.items() if value is not None}
            self._wandb.log(known, step=metrics["step"])

    def finish(self) -> None:
        """Close the file and end the wandb run; a run that is killed loses neither."""
        if not self.active:
            return
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def _keep_steps(path: Path, last: int) -> None:
    """Remove the lines of later steps, and one that a kill cut short, in one atomic change."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            if json.loads(line)["step"] <= last:
                kept.append(line + "\n")
        except ValueError:
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def _start_wandb(run_dir: Path, config: dict):
    # Offline means offline: left alone, wandb sends its own telemetry in that mode too.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode is None and not wandb.login(prompt=False, verify=False):
        mode = "offline"
    options = {
        "project": PROJECT,
        "dir": run_dir,
        "name": run_dir.name,
        "id": run_dir.name,
        "resume": "allow",  # a run of this id if there is one, offline or online
        "config": config,
        "save_code": True,
        "settings": wandb.Settings(silent=True, console="off", init_timeout=30),
    }
    try:
        return wandb.init(mode=mode, **options)
    except wandb.Error as error:  # a login on a machine without a network, or one out of date
        logger.warning(f"wandb runs offline, because: {str(error).splitlines()[0]}")
        wandb.teardown()  # forgets the run that did not start
        return wandb.init(mode="offline", **options)

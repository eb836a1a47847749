"""What a run leaves behind to be looked at: metrics.jsonl, and a run of Weights & Biases."""

import contextlib
import json
import logging
import math
import os
import re
import socket
import time
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

from common import remote
from common.cli import InputError
from common.record import gather, rank_and_world_size

logger = logging.getLogger(__name__)

PROJECT = "one-diff-at-a-time"
SEEN_WITHIN_S = 10.0  # network file systems show a new file to other nodes after some seconds
# What starts again may find its lock held on a node that is lost, until the ranks there give up or
# the network comes back. Below the ten minutes for which the other ranks wait meanwhile.
LOST_NODE_S = 500.0
_locks: dict[Path, FileLock] = {}


def make_run_dir(save_dir: str, experiment_name: str, rank: int) -> Path:
    """Return <save_dir>/<experiment_name>, which now exists, can be written and is this run's.

    Rank 0 holds a lock on it until its process ends; after a restart it waits for it, LOST_NODE_S
    at most. The lock of an address is a file of this machine, and holds on this one alone. Raises
    InputError for a name that is no folder's, a folder that cannot be written, one in which another
    process is training, or one that is another folder on another node. All ranks must call this.
    """
    if not re.fullmatch(r"[\w.-]+", experiment_name) or not experiment_name.strip("."):
        raise InputError(
            f"{experiment_name!r} cannot be an experiment's name: it names a folder, so use "
            "letters, digits, '-', '_' and '.'."
        )
    run_dir = remote.as_path(save_dir) / experiment_name
    here = remote.local_side(run_dir)  # the same folder, unless that is at an address
    try:
        here.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            lock = _locks.setdefault(here, FileLock(here / ".lock"))
            lock.acquire(timeout=LOST_NODE_S if _is_a_restart() else 0)
            (here / "requeue").unlink(missing_ok=True)  # from the start before this one
            remote.check_writable(run_dir)
    except Timeout as error:
        raise InputError(
            f"Another process is training in {run_dir}: wait for it, or give another -e."
        ) from error
    except (OSError, NotImplementedError) as error:  # some file systems of clusters cannot lock
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"Cannot write to {here} ({reason}): give another "
            f"{'--save-dir' if here == run_dir else 'HF_HOME'}."
        ) from error
    _check_that_all_see_it(run_dir)
    return run_dir


def _is_a_restart() -> bool:
    """Tell whether Slurm or torchrun started this once more after a failure."""
    counts = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return any(int(os.environ.get(count, 0)) for count in counts)


@remote.explained
def _check_that_all_see_it(run_dir: Path) -> None:
    """Raise InputError if this is not one folder for all ranks: a checkpoint would be in pieces."""
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return
    mark = run_dir / f".seen-{gather({0: uuid.uuid4().hex} if rank == 0 else {})[0]}"
    if rank == 0:
        mark.touch()
    gather({})  # from here on it is there
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = gather({} if seen else {rank: socket.gethostname()})
    if rank == 0:
        mark.unlink()
    if blind:
        rank, host = next(iter(blind.items()))
        raise InputError(
            f"Rank {rank} on {host} does not see {run_dir.absolute()} of rank 0: give a --save-dir "
            "on a file system that all nodes share."
        )


class Tracker:
    """Writes metrics.jsonl and tells wandb, on rank 0; with `node`, another rank tells wandb too.

    On all other ranks every call does nothing.

    run_dir: the run's folder. Its name is the name and the id of the wandb run.
    config: what wandb shall store beside the metrics (arguments, sizes).
    step: the step that the run begins after. Lines of later steps, which a run that was killed
        may have left, are removed: those steps are trained again.
    node: the name of the machine that this rank speaks for, or None. wandb measures the machine
        that it runs on; the runs of all nodes are a group with the name of the run's folder, and
        rank 0's is the same as without `node`.
    """

    def __init__(
        self, run_dir: Path, config: dict, step: int, rank: int = 0, node: str | None = None
    ) -> None:
        self._file = self._wandb = None
        if rank == 0:
            path = run_dir / "metrics.jsonl"
            _keep_steps(path, step)
            self._file = remote.open_to_append(path)
        if (rank == 0 or node) and os.environ.get("WANDB_MODE") != "disabled":
            name = run_dir.name if rank == 0 else f"{run_dir.name}-{node}"
            self._wandb = _start_wandb(run_dir, config, name, run_dir.name if node else None)

    def log(self, metrics: dict[str, float | str | None]) -> None:
        """Add the metrics of a step, "step" among them; a kill of the process loses no line.

        What is not finite, as in a run that diverged, becomes null: JSON has no other way.
        """
        metrics = {
            key: value
            if isinstance(value, str) or (value is not None and math.isfinite(value))
            else None
            for key, value in metrics.items()
        }
        if self._file is not None:
            self._file.write(json.dumps(metrics) + "\n")
            self._file.flush()
        known = {key: value for key, value in metrics.items() if value is not None}
        self._tell_wandb("log", known, step=metrics["step"])

    def finish(self) -> None:
        """Close the file and end the wandb run; a run that is killed loses neither."""
        if self._file is not None:
            self._file.close()
        self._tell_wandb("finish")

    def _tell_wandb(self, method: str, *args: object, **options: object) -> None:
        """Call a method of the wandb run, and do without it from the moment that its process ends.

        It is a process of its own, which SIGTERM ends; a run that was told to stop must still save.
        """
        try:
            if self._wandb is not None:
                getattr(self._wandb, method)(*args, **options)
        except ConnectionError as error:
            logger.warning(f"wandb's own process has ended ({error}): only metrics.jsonl goes on")
            self._wandb = None
            import wandb

            with contextlib.suppress(ConnectionError):
                wandb.teardown()  # wandb would do it when this process exits, and show a traceback


@remote.explained
def _keep_steps(path: Path, last: int) -> None:
    """Remove the lines of later steps, and one that a kill cut short, in one atomic change."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if remote.exists(path) else ():
        try:
            if json.loads(line)["step"] <= last:
                kept.append(line + "\n")
        except ValueError:
            continue
    if remote.is_remote(path):
        remote.put(path, "".join(kept))
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def _start_wandb(run_dir: Path, config: dict, name: str, group: str | None):
    # Offline means offline: left alone, wandb sends its own telemetry in that mode too.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode is None and not wandb.login(prompt=False, verify=False):
        mode = "offline"
    options = {
        "project": PROJECT,
        "dir": remote.local_side(run_dir),
        "name": name,
        "id": name,
        "group": group,
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

"""A new checkpoint in state.json, in an order that a kill at any moment cannot harm."""

import json
import logging
import os
import re
import shutil
import threading
from pathlib import Path

from common.record import FORMAT
from common.remote import exists, is_folder, is_remote, local_side, put, remove_folder

logger = logging.getLogger(__name__)

_removals: list[threading.Thread] = []  # what is deleted while the training goes on: one at most


def commit_checkpoint(
    run_dir: Path,
    path: Path,
    unfinished: Path,
    step: int,
    training: dict[str, object],
    files: dict[str, dict],
    keep: int,
) -> None:
    """Make the checkpoint in `unfinished` the newest one of the run, at run_dir / path.

    Renames it if it is not there yet, then replaces state.json, then has all but the newest `keep`
    deleted: at any moment state.json names only complete checkpoints. files: what the writer
    measured of each, by name.
    """
    records = _drop_stale(run_dir, step, training)
    if unfinished != run_dir / path:
        shutil.rmtree(run_dir / path, ignore_errors=True)
        unfinished.replace(run_dir / path)
    records = [*records, {"step": step, "path": path.as_posix(), "files": files}][-keep:]
    _write_record(run_dir, training, records)
    if is_remote(run_dir):
        _remove_all_but(records, run_dir)
        return
    # The new one is safe, and the training need not wait while a disk deletes.
    removal = threading.Thread(target=_try_removal, args=(records, run_dir))
    try:
        removal.start()
        _removals.append(removal)
    except RuntimeError:  # where AsyncCheckpoints commits while its process ends, no thread starts
        _try_removal(records, run_dir)


def _try_removal(records: list[dict], run_dir: Path) -> None:
    try:
        _remove_all_but(records, run_dir)
    except OSError as error:
        name = error.filename or run_dir / "checkpoints"
        logger.warning("an older checkpoint cannot be deleted: %s (%s)", name, error.strerror)


def finish_removal() -> None:
    """Wait until nothing is being deleted any more."""
    while _removals:
        _removals.pop().join()


def make_room(run_dir: Path, unfinished: Path, step: int, training: dict[str, object]) -> None:
    """Remove what state.json does not name, before the checkpoint of this step is written.

    That is what could not be deleted before, and what a kill has left: then there is never more
    than one checkpoint beside those that are kept. Raises OSError where one cannot be deleted.

    At an address this one is written in its final place. A record that names it goes first: else a
    kill while it is written again would leave the old record for new files.
    """
    finish_removal()
    if is_remote(run_dir):
        _remove_all_but(_drop_stale(run_dir, step, training), run_dir)
        return
    shutil.rmtree(unfinished, ignore_errors=True)
    if records := _read_records(run_dir):  # without them nobody has said what may go
        _remove_all_but(records, run_dir)


def _drop_stale(run_dir: Path, step: int, training: dict[str, object]) -> list[dict]:
    """Return the records that stand before a new one of this step, and remove all others."""
    records = _read_records(run_dir)
    # A checkpoint of this step or a later one is left from before a kill or a return to an older
    # one. It is trained again, so it is in the way.
    stale = [r for r in records if r["step"] >= step or not is_folder(run_dir / r["path"])]
    records = [r for r in records if r not in stale]
    if stale:  # or a kill after the renaming would leave old checksums for new files
        _write_record(run_dir, training, records)
    return records


def _read_records(run_dir: Path) -> list[dict]:
    file = run_dir / "state.json"
    return json.loads(file.read_text(encoding="utf-8"))["checkpoints"] if exists(file) else []


def _remove_all_but(records: list[dict], run_dir: Path) -> None:
    kept = {Path(record["path"]).name for record in records}
    for folder in (run_dir / "checkpoints").glob("*"):
        if re.fullmatch(r"(\.unfinished-)?step-\d+", folder.name) and folder.name not in kept:
            remove_folder(folder)


def _write_record(run_dir: Path, training: dict[str, object], records: list[dict]) -> None:
    content = {"format": FORMAT, "training": training, "checkpoints": records}
    if is_remote(run_dir):
        text = json.dumps(content, indent=1)
        put(run_dir / "state.json", text)
        # For a job script: by it, it sees whether the run has come further.
        (local_side(run_dir) / "state.json").write_text(text, encoding="utf-8")
        return
    temporary = run_dir / "state.json.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(run_dir / "state.json")

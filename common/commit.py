"""A new checkpoint in state.json, in an order that a kill at any moment cannot harm."""

import json
import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from common.record import FORMAT
from common.remote import exists, is_folder, is_remote, local_side, put, remove_folder

_removals: list[Future] = []  # what a thread deletes while the training goes on: one at most


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
    # In a thread: the new one is safe, and the training need not wait while a disk deletes.
    thread = ThreadPoolExecutor(max_workers=1)
    _removals.append(thread.submit(_remove_all_but, records, run_dir))
    thread.shutdown(wait=False)  # the process still ends only after it


def finish_removal() -> None:
    """Wait until what the last commit does not keep is gone. Raises OSError if that failed."""
    while _removals:
        _removals.pop().result()


def make_room(run_dir: Path, unfinished: Path, step: int, training: dict[str, object]) -> None:
    """Remove what a kill has left where the checkpoint of this step will be written.

    At an address that is its final place. A record that names it goes first: else a kill while it
    is written again would leave the old record for new files.

    First what is still being deleted must be gone: there is never more than one beside those that
    are kept. Raises OSError if that, or this, failed.
    """
    finish_removal()
    if is_remote(run_dir):
        _remove_all_but(_drop_stale(run_dir, step, training), run_dir)
    else:
        shutil.rmtree(unfinished, ignore_errors=True)


def _drop_stale(run_dir: Path, step: int, training: dict[str, object]) -> list[dict]:
    """Return the records that stand before a new one of this step, and remove all others."""
    record_file = run_dir / "state.json"
    records = []
    if exists(record_file):
        records = json.loads(record_file.read_text(encoding="utf-8"))["checkpoints"]
    # A checkpoint of this step or a later one is left from before a kill or a return to an older
    # one. It is trained again, so it is in the way.
    stale = [r for r in records if r["step"] >= step or not is_folder(run_dir / r["path"])]
    records = [r for r in records if r not in stale]
    if stale:  # or a kill after the renaming would leave old checksums for new files
        _write_record(run_dir, training, records)
    return records


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

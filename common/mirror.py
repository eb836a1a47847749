"""Data at an address, copied to this machine once, where it is then read as any local file."""

import errno
import hashlib
import logging
import shutil
import time
from pathlib import Path, PurePosixPath

from filelock import FileLock
from huggingface_hub import constants

from common.cli import InputError
from common.remote import as_path, explained, stamp_of

logger = logging.getLogger(__name__)

LOCAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def mirror(address: str, suffixes: tuple[str, ...]) -> Path:
    """Return a copy of a remote file, or of a folder's visible files with these suffixes.

    It lies below HF_HOME, in a folder for this address and for what the store says of each file
    (size, ETag or time): where one has changed, all are fetched into another folder. Processes of
    this machine that ask for the same wait for the first of them.

    Raises InputError where there is no such file, the store fails, or the copy cannot be written.
    """
    return _mirror(as_path(address), address, suffixes)


@explained
def _mirror(path: Path, address: str, suffixes: tuple[str, ...]) -> Path:
    root = path.path.rstrip("/")
    try:
        found = path.fs.find(root, detail=True)
    except FileNotFoundError:  # not even a bucket
        found = {}
    wanted = {
        name: info for name, info in sorted(found.items()) if _is_wanted(name, root, suffixes)
    }
    if not wanted:
        known = f"that ends in one of: {' '.join(suffixes)}." if found else "at all."
        raise InputError(f"There is no data set at '{address}': it has no file {known}")
    facts = [(name, info["size"], _version(info)) for name, info in wanted.items()]
    cache = Path(constants.HF_HOME) / "remote-data"
    folder = cache / hashlib.sha256(repr((address, facts)).encode()).hexdigest()[:32]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                _fetch(path, root, wanted, folder, address)
    except OSError as error:
        if error.errno not in LOCAL_ERRORS:
            raise
        raise InputError(
            f"Cannot write to the cache {cache} ({error.strerror}): set HF_HOME to another folder."
        ) from error
    return folder / PurePosixPath(root).name if root in wanted else folder


def _is_wanted(name: str, root: str, suffixes: tuple[str, ...]) -> bool:
    parts = PurePosixPath(name.removeprefix(root)).parts
    return PurePosixPath(name).suffix in suffixes and not any(p.startswith(".") for p in parts)


def _version(info: dict) -> str:
    """Return what changes with a file's content, or at least with each time that it is written."""
    times = [str(info[key]) for key in ("LastModified", "mtime", "created") if info.get(key)]
    return stamp_of(info) or repr(times)


def _fetch(path: Path, root: str, wanted: dict[str, dict], folder: Path, address: str) -> None:
    """Copy all files into `folder`, which appears when they are complete."""
    start = time.perf_counter()
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    base = root.rpartition("/")[0] if root in wanted else root
    targets = {name: unfinished / name.removeprefix(f"{base}/") for name in wanted}
    for target in targets.values():
        target.parent.mkdir(parents=True, exist_ok=True)
    path.fs.get(list(targets), [str(target) for target in targets.values()])
    for name, target in targets.items():
        if (size := target.stat().st_size) != wanted[name]["size"]:
            raise OSError(f"{name} has {wanted[name]['size']} bytes, and {size} arrived")
    unfinished.replace(folder)
    megabytes = sum(info["size"] for info in wanted.values()) / 1e6
    seconds = time.perf_counter() - start
    logger.info("fetched %s: %.1f MB in %.1f s", address, megabytes, seconds)

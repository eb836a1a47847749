"""Local paths, and addresses of object stores such as s3://bucket/prefix, which fsspec opens.

An address becomes a UPath. It has the methods of Path, so most code works for both.
"""

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path, PurePath

from filelock import FileLock
from huggingface_hub import constants

from common.cli import RunError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def is_remote(path: object) -> bool:
    """Return whether this is an address, as a string or as a UPath."""
    return "://" in str(path)


def as_path(path: str) -> Path:
    """Return the Path of a local file or folder, or the UPath of an address.

    Raises RunError for an unknown kind of address, or if a package that it needs is missing.
    """
    if not is_remote(path):
        return Path(path).expanduser()
    # Other machines write to the same store, so a cached listing could be out of date.
    options = {"use_listings_cache": False}
    if path.startswith(("file:", "local:")):
        options["auto_mkdir"] = True
    try:
        from upath import UPath

        for client in ("aiobotocore", "botocore", "fsspec"):  # they log each block that they read
            logging.getLogger(client).setLevel(logging.WARNING)
        opened = UPath(path, **options)
        opened.fs  # noqa: B018  imports the packages for this kind of address
    except ImportError as error:
        raise RunError(
            f"{path} needs more packages ({error}): for s3://, install them with pip install "
            "--constraint requirements.txt --editable '.[s3]'."
        ) from error
    except ValueError as error:
        raise RunError(f"{path} cannot be opened ({error}): check what is before ://.") from error
    return opened


def exists(path: Path) -> bool:
    """Return whether a file exists. Unlike UPath.exists, raises an error if the store fails."""
    try:
        return bool(path.fs.info(path.path)) if is_remote(path) else path.exists()
    except FileNotFoundError:
        return False


def remove_folder(path: Path) -> None:
    """Delete a folder, if it exists, with everything in it."""
    if is_remote(path):
        if path.fs.find(path.path):
            path.fs.rm(path.path, recursive=True)
    elif path.exists():
        shutil.rmtree(path)


def fetch(address: str) -> Path:
    """Return a local copy of a remote file or folder: a new copy when the store reports a change.

    Raises RunError if there is no such file, if the store fails, or if it cannot be written.
    """
    path = as_path(address)
    root = path.path.rstrip("/")
    try:
        found = path.fs.find(root, detail=True)
    except Exception as error:  # each client has its own; also if there is not even a bucket
        raise _unreadable(address, error) from error
    if not found:
        raise RunError(f"There is no data set at '{address}': check the address.")

    def fill(folder: Path) -> None:
        try:
            path.fs.get(root, f"{folder}/", recursive=True)
        except Exception as error:
            raise _unreadable(address, error) from error

    key = address, sorted(found.items())  # with all that the store says of a file
    return cached_folder("remote-data", key, fill) / PurePath(root).name


def _unreadable(address: str, error: Exception) -> RunError:
    return RunError(f"'{address}' cannot be read ({error}): check the address.")


def cached_folder(kind: str, key: object, fill: Callable[[Path], None]) -> Path:
    """Return a folder below HF_HOME/<kind> that `fill` has filled once for this key.

    Processes that need the same folder at the same time wait for the first one. The folder exists
    only if it is complete; the next `fill` overwrites what an unfinished one has left. Raises
    RunError if it cannot be written.
    """
    cache = Path(constants.HF_HOME) / kind
    folder = cache / hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    if folder.exists():  # also in a cache that can only be read
        return folder
    unfinished = folder.with_suffix(".unfinished")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                unfinished.mkdir(exist_ok=True)
                fill(unfinished)
                unfinished.replace(folder)
    except Exception as error:
        cause = disk_error(error)
        if cause is None and os.access(cache, os.W_OK):
            raise
        raise RunError(
            f"Cannot write to the cache {cache} ({cause or error}): set HF_HOME to another folder."
        ) from error
    return folder


def disk_error(error: BaseException | None) -> BaseException | None:
    """Return the disk's error that caused this one, or None: the datasets library wraps it."""
    while error is not None and getattr(error, "errno", None) not in DISK_ERRORS:
        error = error.__cause__
    return error

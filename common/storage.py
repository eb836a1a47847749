"""Local paths, and addresses of object stores such as s3://bucket/prefix, which fsspec opens.

An address becomes a UPath. It has the methods of Path, so most code works for both.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import IO

import fsspec
from filelock import FileLock
from huggingface_hub import constants

from common.errors import RunError, disk_error

OTHER_CACHE = "set HF_HOME to another folder"  # the end of messages


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


def open_file(file: Path, mode: str = "rt", **options: str) -> IO:
    """Open a local file that may be compressed."""
    local = fsspec.filesystem("file")
    return local.open(str(file), mode, compression="infer", **options)


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

    def fill(folder: Path) -> None:
        path.fs.get(root, f"{folder}/", recursive=True)

    try:
        found = path.fs.find(root, detail=True)
        if not found:
            raise RunError(f"There is no data set at '{address}': check the address.")
        key = address, sorted(found.items())  # with all that the store says of a file
        return cached_folder("remote-data", key, fill) / PurePath(root).name
    except RunError:
        raise
    except Exception as error:  # each client has its own; also if there is not even a bucket
        raise RunError(f"'{address}' cannot be read ({error}): check the address.") from error


def cached_folder(parent: str, key: object, fill: Callable[[Path], None]) -> Path:
    """Return a folder below HF_HOME/<parent> that `fill` has filled once for this key.

    Processes that need the same folder at the same time wait for the first one. The folder exists
    only if it is complete; the next `fill` overwrites what an unfinished one has left. Raises
    RunError if it cannot be read or written, for example because it is another user's.
    """
    cache = Path(constants.HF_HOME) / parent
    folder = cache / hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    unfinished = folder.with_suffix(".unfinished")
    try:
        if not folder.exists():  # otherwise nothing is written: some caches can only be read
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not folder.exists():
                    unfinished.mkdir(exist_ok=True)
                    fill(unfinished)
                    unfinished.replace(folder)
        for file in folder.iterdir():
            if file.is_file():
                file.open("rb").close()
    except RunError:
        raise
    except Exception as error:
        if cause := error_of_cache(cache, error):
            raise cause from error
        if os.access(cache, os.W_OK):
            raise
        raise RunError(f"Cannot write to the cache {cache} ({error}): {OTHER_CACHE}.") from error
    return folder


def error_of_cache(cache: Path, error: BaseException) -> RunError | None:
    """Return a RunError if the cause of an error is that a cache is full or another user's."""
    if full := disk_error(error):
        reason = getattr(full, "strerror", None) or full
        return RunError(f"Cannot write to the cache {cache} ({reason}): {OTHER_CACHE}.")
    cause = error
    while cause is not None and not isinstance(cause, PermissionError):
        cause = cause.__cause__
    path = getattr(cause, "filename", None)
    if path is None or not Path(path).is_relative_to(cache):
        return None
    return RunError(
        f"No permission for {path} in the cache {cache}: ask its owner to delete or to share it, "
        f"or {OTHER_CACHE}."
    )

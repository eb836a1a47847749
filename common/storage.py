"""Local paths, and addresses of object stores such as s3://bucket/prefix, which fsspec opens.

An address becomes a UPath. It has the methods of Path, so most code works for both.
"""

import errno
import functools
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from huggingface_hub import constants

from common.cli import RunError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
# Packages of object store clients. Their exceptions are not all OSErrors.
STORE_CLIENTS = {"aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests"}


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


def local_run_dir(run_dir: Path) -> Path:
    """Return a run's local folder for locks, logs and wandb files: for an address, below HF_HOME.

    If `run_dir` is not an address, it is `run_dir` itself.
    """
    if not is_remote(run_dir):
        return run_dir
    digest = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
    address = re.sub(r"[^\w.-]+", "-", str(run_dir))[-80:]
    return Path(constants.HF_HOME) / "remote-runs" / f"{address}-{digest}"


def cached_folder(kind: str, key: object, fill: Callable[[Path], None]) -> Path:
    """Return a folder below HF_HOME/<kind> that `fill` has filled once for this key.

    Processes that need the same folder at the same time wait for the first one. The folder exists
    only if it is complete; what an unfinished `fill` has written stays, for the next one. Raises
    RunError if it cannot be written.
    """
    cache = Path(constants.HF_HOME) / kind
    folder = cache / hashlib.sha256(repr(key).encode()).hexdigest()[:32]
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


def upload(run_dir: Path, name: str) -> None:
    """If a run is in a store, copy a file of its local folder there, if there is such a file.

    It is written in one request: others see either its old content or all of the new one.
    """
    local = local_run_dir(run_dir) / name
    if is_remote(run_dir) and local.exists():
        target = run_dir / name
        target.fs.pipe_file(target.path, local.read_bytes())


# --- errors ---


def disk_error(error: BaseException | None) -> BaseException | None:
    """Return the disk's error that caused this one, or None: the datasets library wraps it."""
    while error is not None and getattr(error, "errno", None) not in DISK_ERRORS:
        error = error.__cause__
    return error


def explain_store_errors(function: Callable) -> Callable:
    """Decorate a function so that it raises RunError if an object store fails.

    The function's first argument is a path or an address. FileNotFoundError is not changed.
    """

    @functools.wraps(function)
    def explaining(path: Path | str, *args: object, **options: object) -> object:
        try:
            return function(path, *args, **options)
        except FileNotFoundError:
            raise
        except Exception as error:
            is_client = type(error).__module__.split(".")[0] in STORE_CLIENTS
            if not is_remote(path) or not (is_client or isinstance(error, OSError)):
                raise
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            reason = reason.partition("\n")[0].rstrip(".")
            raise RunError(
                f"{path} cannot be used ({reason}): check the address and the credentials, then "
                "start the same command again."
            ) from error

    return explaining

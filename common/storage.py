"""Local paths, and addresses of object stores such as s3://bucket/prefix, which fsspec opens.

An address becomes a UPath. It has the methods of Path, so most code works for both.
"""

import errno
import functools
import hashlib
import logging
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
        return Path(path)
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


def local_save_dir(save_dir: Path) -> Path:
    """Return the local folder for locks, logs and wandb files: for an address, below HF_HOME."""
    if not is_remote(save_dir):
        return save_dir
    address = str(save_dir).rstrip("/")
    digest = hashlib.sha256(address.encode()).hexdigest()[:8]
    name = re.sub(r"[^\w.-]+", "-", address)[-80:]
    return Path(constants.HF_HOME) / "remote-runs" / f"{name}-{digest}"


def local_run_dir(run_dir: Path) -> Path:
    """Return the local folder of a run, which is `run_dir` itself if that is not an address."""
    return local_save_dir(run_dir.parent) / run_dir.name


def cached_folder(kind: str, key: object, fill: Callable[[Path], None]) -> Path:
    """Return a folder below HF_HOME/<kind> that `fill` has filled once for this key.

    Processes that need the same folder at the same time wait for the first one. The folder exists
    only if it is complete; what an unfinished `fill` has written stays, for the next one. Raises
    RunError if it cannot be written.
    """
    cache = Path(constants.HF_HOME) / kind
    folder = cache / hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    unfinished = folder.with_suffix(".unfinished")
    lock = FileLock(f"{folder}.lock")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # a cluster's file system may not have locks
        raise _cannot_write(cache, error) from error
    try:
        if not folder.exists():
            unfinished.mkdir(exist_ok=True)
            fill(unfinished)
            unfinished.replace(folder)
    except Exception as error:
        if (cause := disk_error(error)) is None:
            raise
        raise _cannot_write(cache, cause) from error
    finally:
        lock.release()
    return folder


def _cannot_write(cache: Path, error: Exception) -> RunError:
    reason = getattr(error, "strerror", None) or error
    return RunError(f"Cannot write to the cache {cache} ({reason}): set HF_HOME to another folder.")


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
            reason = reason_of(error)
            if reason is None or not is_remote(path):
                raise
            raise RunError(
                f"{path} cannot be used ({reason}): check the address and the credentials, then "
                "start the same command again."
            ) from error

    return explaining


def reason_of(error: BaseException | None) -> str | None:
    """Return in one line why a disk or a store failed, or None if the error is of another kind."""
    while isinstance(error, Exception):
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] in STORE_CLIENTS:
            text = getattr(error, "strerror", None) or str(error)
            if isinstance(error, FileNotFoundError) and " " not in text:  # only the file's name
                text = f"there is no {text}"
            return text.partition("\n")[0].rstrip(".") or type(error).__name__
        if not isinstance(error, RuntimeError):
            return None
        error = error.__cause__ or error.__context__  # PyTorch raises it when a write has failed
    return None

"""Runs and data at an address such as s3://bucket/prefix, through fsspec.

Addresses are UPaths, which have the methods of Path: what is written for one works for the other.
"""

import errno
import functools
import hashlib
import logging
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from huggingface_hub import constants

from common.cli import InputError

# What the clients of object stores raise that is no OSError.
CLIENTS = {"aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests"}
# By which a store says that an object is still the same one.
STAMPS = ("ETag", "etag", "md5Hash", "content_md5")


def is_remote(place: object) -> bool:
    """Tell whether this is an address, as words or opened, and not a path of this machine."""
    return "://" in str(place)


def as_path(place: str) -> Path:
    """Return the Path of a local folder or file, or the UPath of an address.

    Raises InputError for an address of a kind that nobody knows, or whose packages are missing.
    """
    if not is_remote(place):
        return Path(place)
    # Other machines write there too: a list of files that is a second old is of no use.
    options = {"use_listings_cache": False}
    if place.startswith(("file:", "local:")):
        options["auto_mkdir"] = True
    try:
        from upath import UPath

        for client in ("aiobotocore", "botocore", "fsspec"):  # they tell of each block
            logging.getLogger(client).setLevel(logging.WARNING)
        path = UPath(place, **options)
        path.fs  # noqa: B018  imports what this kind of address needs
    except ImportError as error:
        raise InputError(
            f"{place} needs more packages ({error}): pip install --constraint requirements.txt "
            "--editable '.[s3]' brings those for s3://."
        ) from error
    except ValueError as error:
        raise InputError(f"{place} cannot be opened ({error}): see its first letters.") from error
    return path


def local_folder(save_dir: Path) -> Path:
    """Return where this machine keeps what of its runs cannot be at an address: below HF_HOME."""
    if not is_remote(save_dir):
        return save_dir
    address = str(save_dir).rstrip("/")
    digest = hashlib.sha256(address.encode()).hexdigest()[:8]
    name = re.sub(r"[^\w.-]+", "-", address)[-80:]
    return Path(constants.HF_HOME) / "remote-runs" / f"{name}-{digest}"


def local_side(run_dir: Path) -> Path:
    """Return the folder of this machine for a run: its own, unless that is at an address."""
    return local_folder(run_dir.parent) / run_dir.name if is_remote(run_dir) else run_dir


def reason_of(error: BaseException | None) -> str | None:
    """Return in a line why a file or a store could not be used; None if it is another error."""
    while isinstance(error, Exception):
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] in CLIENTS:
            text = getattr(error, "strerror", None) or str(error)
            if isinstance(error, FileNotFoundError) and " " not in text:  # its name is all it says
                text = f"there is no {text}"
            return text.partition("\n")[0].rstrip(".") or type(error).__name__
        if not isinstance(error, RuntimeError):  # PyTorch's, when what it writes to has failed
            return None
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn what a store's client raises into an OSError that says why, as a disk's error does.

    It can be sent to other ranks, which the clients' own errors cannot all.
    """
    try:
        yield
    except Exception as error:
        reason = reason_of(error)
        if reason is None or (isinstance(error, OSError) and error.strerror):
            raise
        raise OSError(errno.EIO, reason) from error


def explained(function: Callable) -> Callable:
    """Let a function, whose first argument is a path, raise InputError where a store fails."""

    @functools.wraps(function)
    def explaining(path: Path, *args: object, **options: object) -> object:
        try:
            return function(path, *args, **options)
        except FileNotFoundError:
            raise
        except Exception as error:
            reason = reason_of(error)
            if reason is None or not is_remote(path):
                raise
            raise InputError(
                f"{path} cannot be used ({reason}): look at the address and the credentials, then "
                "start the same command again."
            ) from error

    return explaining


def check_writable(run_dir: Path) -> None:
    """Write an object and delete it, if this is an address. Raises InputError if that fails."""
    if not is_remote(run_dir):
        return
    mark = run_dir / f".writable-{uuid.uuid4().hex}"
    try:
        put(mark, "")
        mark.unlink()
    except Exception as error:
        if (reason := reason_of(error)) is None:
            raise
        raise InputError(
            f"Cannot write to {run_dir} ({reason}): look at the address and the "
            "credentials, or give another --save-dir."
        ) from error


def put(path: Path, text: str) -> None:
    """Write an object in one request: others see what was there before, or all of it."""
    path.fs.pipe_file(path.path, text.encode())


@explained
def read_text(path: Path) -> str:
    """Return the text of a file. Raises InputError if its store fails, FileNotFoundError."""
    return path.read_text(encoding="utf-8")


def open_to_append(path: Path) -> IO[str]:
    """Return a text file to which lines can be added."""
    return GrowingText(path) if is_remote(path) else path.open("a", encoding="utf-8")


def exists(path: Path) -> bool:
    """Tell whether there is such a file; a store that does not answer raises what it does."""
    try:
        return bool(path.fs.info(path.path)) if is_remote(path) else path.exists()
    except FileNotFoundError:
        return False


def is_folder(path: Path) -> bool:
    """Tell whether there is such a folder; in a store, whether anything's name begins so."""
    # s3fs's isdir says the same of a store that does not answer.
    return bool(path.fs.find(path.path)) if is_remote(path) else path.is_dir()


def remove_folder(path: Path) -> None:
    """Delete a folder that is there, with all that is in it."""
    if is_remote(path):
        path.fs.rm(path.path, recursive=True)
    else:
        shutil.rmtree(path)


def stamp_of(info: dict) -> str | None:
    """Return the store's own mark of an object's content, where it has one."""
    return next((str(info[key]) for key in STAMPS if info.get(key)), None)


class GrowingText:
    """A text file in a store, which cannot append: kept in memory, and put whole at each flush."""

    def __init__(self, path: Path) -> None:
        self._path, self._text = path, read_text(path)

    def write(self, text: str) -> None:
        self._text += text

    def flush(self) -> None:
        explained(put)(self._path, self._text)

    def close(self) -> None: ...

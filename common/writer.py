"""Files of a checkpoint, on a disk or in a store, and why they could not be written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as StoredFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystem as LocalFileSystem
from torch.futures import Future

from common.remote import is_remote, plain_errors, reason_of, stamp_of
from common.summing import Summed


class Writer(dcp.FileSystemWriter):
    """Fails with the operating system's reason, which else is lost on the way to other ranks.

    A full disk is a RuntimeError of the writer of PyTorch's files, with the real error in its
    context, and what goes from rank to rank has no context.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _LocalFiles()

    def write_data(self, *args: object) -> Future:
        try:
            with _without_crc32():
                return super().write_data(*args)
        except RuntimeError as error:
            link: BaseException | None = error
            while link is not None:
                if isinstance(link, OSError):
                    raise link from error
                link = link.__cause__ or link.__context__
            raise

    def measure(self) -> dict[str, dict]:
        """Return size and checksum of each file that this rank has written, by name.

        Raises OSError where the disk has another size.
        """
        for name, known in self.fs.sums.items():
            _check_size(name, (self.path / name).stat().st_size, known)
        return self.fs.sums


class RemoteWriter(FsspecWriter):
    """Writes to an address, right to where the files stay: a store cannot rename a folder."""

    def __init__(self, folder: Path) -> None:
        # An object is safe when the store says so: there is no disk of this machine to be synced.
        super().__init__(str(folder), sync_files=False, **folder.storage_options)
        self.fs = _StoredFiles()
        self.fs.init_path(str(folder), **folder.storage_options)

    def prepare_local_plan(self, *args: object) -> object:
        with plain_errors():
            return super().prepare_local_plan(*args)

    def write_data(self, *args: object) -> Future:
        with plain_errors(), _without_crc32():
            return super().write_data(*args)

    def finish(self, **parts: object) -> None:
        with plain_errors():
            super().finish(**parts)

    def measure(self) -> dict[str, dict]:
        """Return size and checksum of each file that this rank has written, by name.

        With the store's own mark of the content, if it has one. Raises OSError where the store has
        another size.
        """
        with plain_errors():
            for name, known in self.fs.sums.items():
                info = self.fs.fs.info(f"{self.path}/{name}")
                _check_size(name, info["size"], known)
                if stamp := stamp_of(info):
                    known["stamp"] = stamp
        return self.fs.sums


def _check_size(name: str, size: int, known: dict) -> None:
    if size != known["bytes"]:
        raise OSError(f"{name} has {size} bytes, not {known['bytes']}")


class RemoteReader(FsspecReader):
    """Reads from an address."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), **folder.storage_options)
        self.fs = _StoredFiles()
        self.fs.init_path(str(folder), **folder.storage_options)


class _LocalFiles(Summed, LocalFileSystem):
    """Files on a disk."""

    early = True


class _StoredFiles(Summed, StoredFileSystem):
    """Files in a store."""

    @contextmanager
    def create_stream(self, path: str, mode: str) -> Iterator:
        if mode == "rb":
            # PyTorch reads the end of a tensor before its beginning. The usual buffer, of what
            # comes next, would be filled anew each time: nearly three times the bytes.
            with self.fs.open(path, mode, cache_type="blockcache") as stream:
                yield stream
            return
        with super().create_stream(path, mode) as stream:
            yield stream

    def mkdir(self, path: str) -> None:
        """There are no folders. And s3fs would make a bucket that it cannot see."""


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Leave out the CRC-32 of each tensor: the whole file has a sum, which is faster."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def open_writer(folder: Path) -> Writer | RemoteWriter:
    """Return what writes a checkpoint's files to a local folder or an address."""
    return RemoteWriter(folder) if is_remote(folder) else Writer(folder)


def open_reader(folder: Path) -> dcp.FileSystemReader:
    """Return what reads a checkpoint's files from a local folder or an address."""
    return RemoteReader(folder) if is_remote(folder) else dcp.FileSystemReader(folder)


def cause_of(error: BaseException) -> str:
    """Return the system's or the store's reason in one line; raise what is no error of a file.

    CheckpointException holds an exception for each rank, Ctrl-C among them.
    """
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if reason := reason_of(error):
        return reason
    raise error

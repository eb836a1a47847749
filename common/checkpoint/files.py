"""A checkpoint's files, on a disk or in an object store.

PyTorch decides what the files contain. This module opens them, and takes the size and the checksum
of each file while it is written, so that nothing has to be read again.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.futures import Future

from common.storage import as_os_errors, exists, is_remote, reason_of, size_and_stamp

FLUSH_BYTES = 32 * 2**20  # Linux is asked to write to the disk each time this many bytes are new

# dcp warns if there is no process group. Chapter 1 has none.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


class Writer(dcp.FileSystemWriter):
    """Writes a checkpoint's files to a local folder or to an address."""

    def __init__(self, folder: Path) -> None:
        # A store confirms that it has stored an object. A file on a disk needs fsync.
        super().__init__("", sync_files=not is_remote(folder))
        self.fs, self.path = Files(), folder

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)  # goes into the metadata; a UPath would contain the credentials

    def write_data(self, *args: object) -> Future:
        # No CRC-32 of each tensor: the checksum of the whole file is faster.
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            return super().write_data(*args)
        finally:
            torch.serialization.set_crc32_options(before)

    def measure(self) -> dict[str, dict]:
        """Return size, checksum and, in a store, the stamp of each file that this rank has written.

        Raises OSError if the disk or the store reports another size.
        """
        for name, known in self.fs.measured.items():
            size, stamp = size_and_stamp(self.path / name)
            if size != known["bytes"]:
                raise OSError(f"{name} has {size} bytes, not {known['bytes']}")
            if stamp:
                known["stamp"] = stamp
        return self.fs.measured


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint's files from a local folder or an address."""

    def __init__(self, folder: Path) -> None:
        super().__init__("")
        self.fs, self.path = Files(), folder


class Files(FileSystemBase):
    """PyTorch's file operations, for local paths and for addresses.

    If the disk or the store fails, they raise an OSError with the reason. Without this, PyTorch
    would raise a RuntimeError, which loses its context on the way to the other ranks.

    measured: size in bytes and checksum of each file that was written, by name.
    """

    def __init__(self) -> None:
        self.measured: dict[str, dict] = {}

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[IO[bytes]]:
        # PyTorch reads the end of a tensor before its beginning. The default cache of an object
        # reads ahead, so it would fetch nearly three times the bytes.
        options = {"cache_type": "blockcache"} if mode == "rb" and is_remote(path) else {}
        with as_os_errors(), path.open(mode, **options) as stream:
            opened = SummingStream(stream, not is_remote(path)) if mode == "wb" else stream
            yield opened
        if mode == "wb":  # only a closed file is complete in a store
            known = {"bytes": opened.size, "xxh3_64": opened.digest.hexdigest()}
            self.measured[path.name] = known

    @as_os_errors()
    def rename(self, path: Path, new_path: Path) -> None:
        if is_remote(path):
            path.fs.mv(path.path, new_path.path)
        else:
            path.rename(new_path)
        self.measured[new_path.name] = self.measured.pop(path.name)

    @as_os_errors()
    def exists(self, path: Path) -> bool:
        return exists(path)

    def mkdir(self, path: Path) -> None:
        if not is_remote(path):  # a store has no folders, and s3fs would create a bucket
            path.mkdir(parents=True, exist_ok=True)

    def concat_path(self, path: Path, suffix: str) -> Path:
        return path / suffix

    def init_path(self, path: Path) -> Path:
        return path

    def rm_file(self, path: Path) -> None:
        path.unlink()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class SummingStream:
    """A file that is being written, with its size in bytes and its checksum so far."""

    def __init__(self, stream: IO[bytes], flush: bool) -> None:
        self.stream, self.size, self.digest = stream, 0, xxhash.xxh3_64()
        self.flush_early = flush and hasattr(os, "posix_fadvise")  # macOS does not have it
        self.flushed = 0

    def write(self, data: bytes | memoryview) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        count = self.stream.write(data)
        if self.flush_early and self.size - self.flushed >= FLUSH_BYTES:
            # Linux then starts to write the new pages to the disk. Without this advice it writes
            # most of them at the end, while fsync waits.
            os.posix_fadvise(self.stream.fileno(), self.flushed, 0, os.POSIX_FADV_DONTNEED)
            self.flushed = self.size
        return count

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def cause_of(error: BaseException) -> str:
    """Return in one line why the disk or the store failed; raise any other error.

    A CheckpointException contains one exception for each rank that failed, which may be Ctrl-C.
    """
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if (reason := reason_of(error)) is None:
        raise error
    return reason

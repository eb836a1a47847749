"""Size and checksum of files, taken while they are written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import xxhash

STRETCH = 32 * 2**20  # bytes of a file that a disk is given at once, at least


class Summed:
    """Notes size and checksum of each file that is written, by name.

    Of the bytes on their way: nothing has to be read back.
    """

    early = False  # whether a disk is to begin with a file before it is complete

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, dict] = {}

    @contextmanager
    def create_stream(self, path: str | Path, mode: str) -> Iterator:
        with super().create_stream(path, mode) as stream:
            summing = SummingStream(stream, self.early)
            yield summing if mode == "wb" else stream
        if mode == "wb":  # closed: it is there
            known = {"bytes": summing.size, "xxh3_64": summing.digest.hexdigest()}
            self.sums[PurePosixPath(path).name] = known

    def rename(self, path: str | Path, new_path: str | Path) -> None:
        super().rename(path, new_path)
        self.sums[PurePosixPath(new_path).name] = self.sums.pop(PurePosixPath(path).name)


class SummingStream:
    """A file that is being written."""

    def __init__(self, stream, early: bool) -> None:
        self.stream, self.size, self.digest = stream, 0, xxhash.xxh3_64()
        self.early = early and hasattr(os, "posix_fadvise")  # not on macOS
        self.asked = 0

    def write(self, data: bytes | memoryview) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        count = self.stream.write(data)
        if self.early and self.size - self.asked >= STRETCH:
            # Linux begins to write what is not needed again. Else it would wait until a save asks
            # for all of it at the end.
            os.posix_fadvise(self.stream.fileno(), self.asked, 0, os.POSIX_FADV_DONTNEED)
            self.asked = self.size
        return count

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

"""Ready-made tokens: a folder of shards, as .npy files or as .bin files of nanoGPT or llm.c."""

import hashlib
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.cli import InputError
from common.data.dataset import Sequences

# The header of llm.c, in which FineWeb is distributed for GPT-2: 256 int32 with MAGIC, a version
# and the number of tokens. https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
MAGIC, HEADER_BYTES = 20240520, 1024
CHECKED = 65536  # so many tokens at both ends of a shard are checked, and decoded once


class Shards:
    """Memory-mapped sequences [n, seq_length] of several files, indexed by lists of numbers."""

    def __init__(self, maps: list[tuple]) -> None:
        """maps: arguments of np.memmap, which a data worker gets instead of a copy."""
        self.maps, self.parts = maps, [np.memmap(*arguments) for arguments in maps]
        self.ends = np.cumsum([len(part) for part in self.parts])
        self.shape = (int(self.ends[-1]), self.parts[0].shape[1])

    def __reduce__(self) -> tuple:
        return Shards, (self.maps,)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        rows = np.empty((len(indices), self.shape[1]), np.uint32)
        shards = np.searchsorted(self.ends, indices, side="right")
        for shard in np.unique(shards):
            here = shards == shard
            rows[here] = self.parts[shard][indices[here] - self.ends[shard]]  # from the shard's end
        return rows


def find_shards(name: str) -> list[Path]:
    """Return the shards in a local folder, in the order of their names."""
    files = sorted(Path(name).glob("[!.]*")) if name else []
    return [path for path in files if path.suffix in (".bin", ".npy")]


def load_shards(
    files: list[Path], tokenizer: PreTrainedTokenizerBase, seq_length: int
) -> tuple[Sequences, Sequences]:
    """Return training and evaluation sequences; nothing is copied, and shorter rests are dropped.

    Shards with "val" in their names are for evaluation, otherwise the last one. Raises InputError
    if there is nothing else, if a file is not what it seems, or if the tokenizer is another one.
    """
    held_out = [file for file in files if "val" in file.name] or files[-1:]
    train = [file for file in files if file not in held_out]
    if not train:
        raise InputError(f"{files[0].parent} has no shard for training: give at least two shards.")
    opened = {file: _open(file, tokenizer, seq_length) for file in files}
    sample = np.memmap(*opened[held_out[0]]).reshape(-1)[:CHECKED].tolist()
    text = tokenizer.decode(sample, skip_special_tokens=True)
    tokens_per_byte = len(sample) / max(1, len(text.encode()))
    parts = []
    for part in (train, held_out):
        tokens = Shards([opened[file] for file in part])
        parts.append(Sequences(tokens, checksum(part), tokens_per_byte))
    return tuple(parts)


def checksum(files: list[Path]) -> str:
    """Return a checksum of names, sizes and both ends: to read the whole would take hours."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(CHECKED))
            content.seek(-min(CHECKED, file.stat().st_size), 2)
            digest.update(content.read())
    return digest.hexdigest()[:16]


def _open(file: Path, tokenizer: PreTrainedTokenizerBase, seq_length: int) -> tuple:
    """Return the arguments of np.memmap for a shard, after a check of both of its ends."""
    dtype, offset = np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4"), 0
    if file.suffix == ".npy":
        try:
            array = np.load(file, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise InputError(f"{file} is not an array of NumPy: {error}.") from error
        if array.ndim != 1:
            raise InputError(f"{file} has {array.ndim} dimensions: it must have one.")
        if array.dtype not in (np.uint16, np.uint32):
            raise InputError(f"{file} has {array.dtype}: it must have uint16 or uint32.")
        dtype, offset, count = array.dtype, array.offset, array.size
    else:
        count = file.stat().st_size // dtype.itemsize
        header = np.fromfile(file, "<i4", 3)
        if len(header) == 3 and header[0] == MAGIC:
            if header[1] != 1:
                raise InputError(f"{file} has a header of version {header[1]}: it must be 1.")
            dtype, offset, count = np.dtype("<u2"), HEADER_BYTES, int(header[2])
            if file.stat().st_size != HEADER_BYTES + 2 * count:
                raise InputError(f"{file} does not have the {count} tokens of its header.")
    if count < seq_length:
        raise InputError(f"{file} is shorter than one sequence of {seq_length} tokens.")
    tokens = np.memmap(file, dtype, "r", offset, (count,))
    highest = max(tokens[:CHECKED].max(), tokens[-CHECKED:].max())
    if highest >= len(tokenizer):
        raise InputError(
            f"{file} has the token {highest} and the tokenizer only {len(tokenizer)} tokens: give "
            "the one that made the file, with --tokenizer-name."
        )
    return file, dtype, "r", offset, (count // seq_length, seq_length)

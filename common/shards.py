"""Ready-made tokens: a folder of shards, as .npy files or as .bin files of nanoGPT or llm.c."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.cli import RunError
from common.documents import split_of
from common.models import vocabulary_size
from common.storage import fetch, is_remote

# The header of llm.c, in which FineWeb is distributed for GPT-2: 256 int32 with MAGIC, a version
# and the number of tokens. https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
MAGIC, HEADER_BYTES = 20240520, 1024
# Files that show that .bin files beside them are of Megatron, litdata or MosaicML, or that the
# tokens are those of nanoGPT's characters.
OF_OTHERS = ("*.idx", "index.json", "meta.pkl")
CHECKED = 65536  # so many tokens at both ends of a shard are checked, and bytes for its checksum


class Tokens(NamedTuple):
    """The tokens of one part of a data set.

    streams: arrays of tokens [n], memory-mapped. digest: a checksum of the tokens, or of shards
    (see checksum).
    tokens_per_byte: of the original text, for bits per byte.
    """

    streams: list[np.memmap]
    digest: str
    tokens_per_byte: float


def find_shards(name: str) -> list[Path]:
    """Return the shards in a folder, in the order of their names; of an address, local copies."""
    folder = fetch(name) if is_remote(name) else Path(name)
    files = sorted(folder.glob("[!.]*")) if name else []
    return [path for path in files if path.suffix in (".bin", ".npy")]


def open_shards(files: list[Path], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Return the tokens for training and for evaluation.

    Shards whose names say validation are for evaluation, otherwise the last one; those that say
    test are left out (see split_of). The tokens per byte are an estimate, from the start of a
    shard. Raises RunError if there is nothing else, if a file is not what it seems, or if the
    tokenizer is another one.
    """
    used = [file for file in files if split_of(Path(file.name)) != "test"]
    held_out = [file for file in used if split_of(Path(file.name)) == "validation"] or used[-1:]
    train = [file for file in used if file not in held_out]
    if not train:
        raise RunError(f"{files[0].parent} has no shard for training: give at least two shards.")
    if others := [file for pattern in OF_OTHERS for file in files[0].parent.glob(pattern)]:
        raise RunError(
            f"{others[0]} belongs to another format or vocabulary: give a folder with shards of "
            "this tokenizer only, or the text itself."
        )
    opened, n_tokens = {}, vocabulary_size(tokenizer)
    for file in used:
        try:
            opened[file] = tokens = _open(file, n_tokens)
            if (highest := max(tokens[:CHECKED].max(), tokens[-CHECKED:].max())) >= n_tokens:
                raise ValueError(f"token {highest}, and the tokenizer has {n_tokens}")
            if len(tokens) > 1 and not tokens[1:CHECKED:2].any():
                raise ValueError("every second number is 0, as if a token had more bytes")
        except (ValueError, EOFError) as error:
            raise RunError(
                f"{file} does not hold tokens of this tokenizer ({error}): make it again, or give "
                "the --tokenizer-name that it was made with."
            ) from error
    sample = opened[held_out[0]][:CHECKED].tolist()
    text = tokenizer.decode(sample, skip_special_tokens=True)
    tokens_per_byte = len(sample) / max(1, len(text.encode()))
    parts = (train, held_out)
    return [Tokens([opened[f] for f in part], checksum(part), tokens_per_byte) for part in parts]


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


def _open(file: Path, n_tokens: int) -> np.memmap:
    """Return a shard's tokens [n]. Raises ValueError or EOFError if it has another form."""
    if file.suffix == ".npy":
        tokens = np.load(file, mmap_mode="r")
        if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
            raise ValueError(f"{tokens.dtype} {list(tokens.shape)}, not uint16 or uint32 [n]")
        return tokens
    header = np.fromfile(file, "<i4", 3)
    if len(header) == 3 and header[0] == MAGIC:
        if header[1] != 1 or file.stat().st_size != HEADER_BYTES + 2 * int(header[2]):
            raise ValueError(f"a header of version {header[1]} with {header[2]} tokens")
        return np.memmap(file, "<u2", "r", HEADER_BYTES)
    return np.memmap(file, "<u2" if n_tokens <= 2**16 else "<u4", "r")

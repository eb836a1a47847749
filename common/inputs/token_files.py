"""Ready-made tokens: a folder of .npy files, or of .bin files of nanoGPT or llm.c."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.errors import RunError
from common.inputs.models import vocabulary_size
from common.inputs.names import split_of
from common.storage import fetch, is_remote

# The header of llm.c, in which FineWeb is distributed for GPT-2: 256 int32 with MAGIC, a version
# and the number of tokens. https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
MAGIC, HEADER_BYTES = 20240520, 1024
# Files that show that .bin files beside them are of Megatron, litdata or MosaicML, or that the
# tokens are those of nanoGPT's characters.
MARKS_OF_OTHER_FORMATS = ("*.idx", "index.json", "meta.pkl")
# At both ends of a file, because to read the whole would take hours: the tokens that are checked,
# and the bytes that its checksum includes.
CHECKED_TOKENS = 65536
CHECKSUM_BYTES = 65536


class Tokens(NamedTuple):
    """The tokens of one split of a data set.

    streams: arrays of tokens [n], memory-mapped. digest: a checksum of the tokens, or of files of
    tokens (see checksum).
    tokens_per_byte: of the original text, for bits per byte.
    """

    streams: list[np.memmap]
    digest: str
    tokens_per_byte: float


def find_token_files(name: str) -> list[Path]:
    """Return the files of tokens in a folder, by name; of an address, local copies."""
    folder = fetch(name) if is_remote(name) else Path(name)
    files = sorted(folder.glob("[!.]*")) if name else []
    return [path for path in files if path.suffix in (".bin", ".npy")]


def open_token_files(files: list[Path], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Return the tokens for training and for evaluation.

    Files whose names say validation are for evaluation, otherwise the last one; those that say
    test are left out (see split_of). The tokens per byte are an estimate, from the start of a
    file. Raises RunError if there is nothing else, if a file is not what it seems, or if the
    tokenizer is another one.
    """
    folder = files[0].parent
    used = [file for file in files if split_of(Path(file.name)) != "test"]
    held_out = [file for file in used if split_of(Path(file.name)) == "validation"] or used[-1:]
    train = [file for file in used if file not in held_out]
    if not train:
        raise RunError(f"{folder} has no shard for training: give at least two shards.")
    others = [file for pattern in MARKS_OF_OTHER_FORMATS for file in folder.glob(pattern)]
    if others:
        raise RunError(
            f"{others[0]} belongs to another format or vocabulary: give a folder with shards of "
            "this tokenizer only, or the text itself."
        )
    opened, n_tokens = {}, vocabulary_size(tokenizer)
    for file in used:
        try:
            opened[file] = tokens = _open(file, n_tokens)
            highest = max(tokens[:CHECKED_TOKENS].max(), tokens[-CHECKED_TOKENS:].max())
            if highest >= n_tokens:
                raise ValueError(f"token {highest}, and the tokenizer has {n_tokens}")
            if len(tokens) > 1 and not tokens[1:CHECKED_TOKENS:2].any():
                raise ValueError("every second number is 0, as if a token had more bytes")
        except (ValueError, EOFError) as error:
            raise RunError(
                f"{file} does not hold tokens of this tokenizer ({error}): make it again, or give "
                "the --tokenizer-name that it was made with."
            ) from error
    sample = opened[held_out[0]][:CHECKED_TOKENS].tolist()
    text = tokenizer.decode(sample, skip_special_tokens=True)
    tokens_per_byte = len(sample) / max(1, len(text.encode()))
    return [
        Tokens([opened[file] for file in of_split], checksum(of_split), tokens_per_byte)
        for of_split in (train, held_out)
    ]


def checksum(files: list[Path]) -> str:
    """Return a checksum of the names, sizes and both ends of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(CHECKSUM_BYTES))
            content.seek(-min(CHECKSUM_BYTES, file.stat().st_size), 2)
            digest.update(content.read())
    return digest.hexdigest()[:16]


def _open(file: Path, n_tokens: int) -> np.memmap:
    """Return a file's tokens [n]. Raises ValueError or EOFError if it has another form."""
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

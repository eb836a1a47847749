"""Documents -> tokens: tokenized once, written to one file, and memory-mapped from then on."""

import argparse
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import tqdm
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import PreTrainedTokenizerBase

from common.cli import InputError
from common.data.dataset import Sequences
from common.data.shards import find_shards, load_shards
from common.data.sources import DOCUMENTS_PER_READ, find_source
from common.storage import cached_folder

logger = logging.getLogger(__name__)

CACHE_VERSION = 3  # raise it when the same input gives other sequences
BATCH_CHARACTERS = 2**20  # encoding a batch needs about 40 times as many bytes of memory
FEW_BATCHES = 8  # so few are encoded without data workers
BATCHES_PER_NOTE = 100  # after so many batches, an interrupted tokenization can resume
SECONDS_PER_LINE = 30.0  # of the log, where no progress bar is shown


def load_sequences(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, seq_length: int
) -> tuple[Sequences, Sequences]:
    """Return the training and the evaluation sequences of args.dataset_name.

    The documents are tokenized and concatenated in order, with the end-of-text token after each
    document, and cut into sequences of seq_length tokens; a shorter rest is dropped. The result
    does not depend on the number of processes. It is cached below HF_HOME, once for all values of
    seq_length. A folder of ready-made tokens is used as it is (see shards.py).

    Raises InputError for an unknown data set or column, or a corpus shorter than one sequence.
    """
    if shards := find_shards(args.dataset_name):
        return load_shards(shards, tokenizer, seq_length)
    source = find_source(args.dataset_name, args.dataset_subset, args.text_column)
    encoding = (tokenizer.eos_token_id, _tokenizer_rules(tokenizer))

    def fill(folder: Path) -> None:
        start = time.perf_counter()
        for split, documents in zip(("train", "evaluation"), source.load(), strict=True):
            pack_documents(folder / split, documents, tokenizer, n_cores())
        logger.info("tokenized %s in %.1f s", args.dataset_name, time.perf_counter() - start)

    key = (CACHE_VERSION, source.fingerprint, encoding)
    folder = cached_folder("tokens", key, fill, resumes=True)
    train = _map_tokens(folder / "train", seq_length, f"training part of {args.dataset_name}")
    part = f"evaluation part of {args.dataset_name}"
    return train, _map_tokens(folder / "evaluation", seq_length, part)


def _tokenizer_rules(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return everything that determines how the tokenizer splits a text."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str()
    return repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())))


def _map_tokens(path: Path, seq_length: int, part: str) -> Sequences:
    facts = json.loads(path.with_suffix(".json").read_text())
    shape = (facts["tokens"] // seq_length, seq_length)
    if shape[0] == 0:
        raise InputError(
            f"The {part} is shorter than one sequence of {seq_length} tokens: give more text or a "
            "smaller --seq-length."
        )
    tokens = np.memmap(path.with_suffix(".bin"), facts["dtype"], mode="r", shape=shape)
    return Sequences(tokens, facts["digest"], facts["tokens"] / max(1, facts["bytes"]))


def pack_documents(
    path: Path, documents: Dataset, tokenizer: PreTrainedTokenizerBase, num_workers: int
) -> None:
    """Write the tokens of all documents to path.bin, and facts about them to path.json.

    documents: rows with a "text"; empty ones are left out. The tokens are uint16 or uint32,
    little-endian. Data workers encode batches of documents, and DataLoader keeps their order. The
    memory that this needs grows with the longest document, but not with the number of documents.

    What is done is noted in path.progress, so after an interruption the same call resumes.
    """
    dtype = np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")
    noted, done = path.with_suffix(".progress"), {"documents": 0, "tokens": 0, "bytes": 0}
    if noted.exists():
        done = json.loads(noted.read_text())
    batches = _read_batches(Subset(documents, range(done["documents"], len(documents))))
    first = list(itertools.islice(batches, FEW_BATCHES + 1))
    encoded = DataLoader(
        _Encoded(tokenizer),
        sampler=itertools.chain(first, batches),  # what a worker is given are texts
        batch_size=None,  # so it is already a batch
        num_workers=num_workers if len(first) > FEW_BATCHES else 0,
        worker_init_fn=_use_one_thread,
        generator=torch.Generator(),  # the global one must be the same if the tokens are cached
    )
    with path.with_suffix(".bin").open("ab") as file:
        file.truncate(done["tokens"] * dtype.itemsize)
        # Any rank may hold the lock, so this bar is not only rank 0's. None: only in a terminal.
        bar = tqdm.tqdm(desc="tokenizing", total=len(documents), leave=False, disable=None)
        bar.update(done["documents"])
        shown = time.monotonic()
        for number, (tokens, count, size) in enumerate(encoded, start=1):
            file.write(tokens.numpy().astype(dtype).tobytes())
            done["documents"] += count
            done["tokens"] += len(tokens)
            done["bytes"] += size
            bar.update(count)
            if bar.disable and time.monotonic() - shown >= SECONDS_PER_LINE:
                shown = time.monotonic()
                # A warning, because only rank 0 shows INFO.
                logger.warning(f"tokenizing: {done['documents']:,} of {len(documents):,} documents")
            if number % BATCHES_PER_NOTE == 0:
                file.flush()
                os.fsync(file.fileno())  # the note must never reach the disk before the tokens
                temporary = noted.with_suffix(".tmp")
                temporary.write_text(json.dumps(done))
                temporary.replace(noted)
        bar.close()
    with path.with_suffix(".bin").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    facts = {"dtype": dtype.str, "tokens": done["tokens"], "bytes": done["bytes"], "digest": digest}
    path.with_suffix(".json").write_text(json.dumps(facts))


def n_cores() -> int:
    """Return how many cores this process may use: Slurm and containers may allow only some."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _use_one_thread(worker: int) -> None:
    """The workers take all cores, so the tokenizer library needs no threads in any of them."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _read_batches(documents: Subset) -> Iterator[list[str]]:
    """Yield all texts; each batch ends with the one with which it reaches BATCH_CHARACTERS."""
    batch, size = [], 0
    for start in range(0, len(documents), DOCUMENTS_PER_READ):
        rows = range(start, min(start + DOCUMENTS_PER_READ, len(documents)))
        for text in (row["text"] for row in documents.__getitems__(rows)):
            batch.append(text)
            size += len(text)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


class _Encoded(Dataset):
    """Item: of a batch of texts, which is its index, (tokens: int32 [n], texts, UTF-8 bytes)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        if tokenizer.is_fast:  # its file can ask for both
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()

    def __getitem__(self, batch: list[str]) -> tuple[torch.Tensor, int, int]:
        texts = [text for text in batch if text]
        if not texts:
            return torch.zeros(0, dtype=torch.int32), len(batch), 0
        if self.tokenizer.is_fast:  # without the slower Python code around the library
            encode = self.tokenizer.backend_tokenizer.encode_batch_fast
            encoded = [each.ids for each in encode(texts, add_special_tokens=False)]
        else:
            encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        eos = [self.tokenizer.eos_token_id]
        tokens = np.concatenate([np.array(ids + eos, dtype=np.int32) for ids in encoded])
        return torch.from_numpy(tokens), len(batch), sum(len(text.encode()) for text in texts)

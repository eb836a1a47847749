"""Documents -> tokens -> sequences -> batches, in an order that no number of ranks changes."""

import argparse
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import Dataset, DistributedSampler
from transformers import PreTrainedTokenizerBase

from common.cli import RunError
from common.documents import Text, find_documents
from common.models import vocabulary_size
from common.shards import Tokens, find_shards, open_shards
from common.storage import cached_folder

logger = logging.getLogger(__name__)

IGNORED = -100  # the losses of transformers leave out this label
CACHE_VERSION = 8  # raise it when the same input gives other tokens
BATCH = 2**22  # characters that the tokenizer gets at once; it needs about 100 bytes for each token
BATCHES = 4  # at the same time: at the end of one, it has no work for some of its threads


def load_sequences(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> "tuple[Sequences, Sequences]":
    """Return the training and the evaluation sequences of args.dataset_name.

    The documents are tokenized and concatenated in order, with the end-of-text token after each
    document, and cut into sequences of args.seq_length tokens; a shorter rest is dropped. The
    tokens are cached below HF_HOME, once for all sequence lengths. A folder of ready-made tokens is
    used as it is (see shards.py).

    Raises RunError for an unknown data set or column, or a corpus shorter than one sequence.
    """
    files = find_shards(args.dataset_name)
    parts = open_shards(files, tokenizer) if files else tokenize(args, tokenizer)
    train, evaluation = (Sequences(tokens, args.seq_length) for tokens in parts)
    for part, sequences in (("training", train), ("evaluation", evaluation)):
        if not len(sequences):
            raise RunError(
                f"The {part} part of {args.dataset_name} is shorter than one sequence of "
                f"{args.seq_length} tokens: give more text or a smaller --seq-length."
            )
    return train, evaluation


# --- documents -> tokens ---


def tokenize(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Return the tokens for training and for evaluation. They are made once, below HF_HOME."""
    documents = find_documents(args.dataset_name, args.dataset_subset, args.text_column)
    # Everything that determines how the tokenizer splits a text.
    rules = repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())))
    if tokenizer.is_fast:
        rules = tokenizer.backend_tokenizer.to_str()
    key = (CACHE_VERSION, documents.key, tokenizer.eos_token_id, rules)

    def fill(folder: Path) -> None:
        start = time.perf_counter()
        write_tokens(folder, documents.read(), tokenizer)
        logger.info("tokenized %s in %.1f s", args.dataset_name, time.perf_counter() - start)

    folder = cached_folder("tokens", key, fill)
    parts = []
    for split, facts in json.loads((folder / "facts.json").read_text()).items():
        file = folder / f"{split}.bin"
        streams = [np.memmap(file, facts["dtype"], "r")] if file.stat().st_size else []
        parts.append(Tokens(streams, facts["digest"], facts["tokens_per_byte"]))
    return parts


def write_tokens(folder: Path, texts: Iterator[Text], tokenizer: PreTrainedTokenizerBase) -> None:
    """Write train.bin and evaluation.bin, and facts.json, which describes both."""
    dtype = np.dtype("uint16" if vocabulary_size(tokenizer) <= 2**16 else "uint32")
    names = ("train", "evaluation")  # held_out is the index: False, True
    files = [(folder / f"{name}.bin").open("wb") for name in names]
    digests, n_tokens, n_bytes = [hashlib.sha256(), hashlib.sha256()], [0, 0], [0, 0]
    for (text, held_out, ends), ids in encode(texts, tokenizer):
        tokens = np.array([*ids, tokenizer.eos_token_id] if ends else ids, dtype)
        files[held_out].write(tokens)
        digests[held_out].update(tokens)
        n_tokens[held_out] += len(tokens)
        n_bytes[held_out] += len(text.encode(errors="surrogatepass"))
    facts = {}
    for name, file, digest, n, m in zip(names, files, digests, n_tokens, n_bytes, strict=True):
        file.close()
        facts[name] = {"dtype": dtype.name, "digest": digest.hexdigest()[:16]}
        facts[name]["tokens_per_byte"] = n / max(1, m)
    (folder / "facts.json").write_text(json.dumps(facts))


def encode(
    texts: Iterator[Text], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Text, list[int]]]:
    """Yield each text with its tokens, in order.

    The tokenizer library uses all cores. Meanwhile, the caller writes the batch before.
    The name of a special token is text if a document contains it.
    """
    if tokenizer.is_fast:
        # A copy, because every call of the tokenizer itself sets these again.
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True

    def encode_batch(batch: list[Text]) -> list[list[int]]:
        words = [text for text, _, _ in batch]
        if tokenizer.is_fast:
            encoded = backend.encode_batch_fast(words, add_special_tokens=False)
            return [encoding.ids for encoding in encoded]
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return [tokenizer.encode(text, **options) for text in words]

    with ThreadPoolExecutor(BATCHES if tokenizer.is_fast else 1) as pool:
        waiting = []
        for batch in batches(texts):
            waiting.append((batch, pool.submit(encode_batch, batch)))
            if len(waiting) > BATCHES:
                done, future = waiting.pop(0)
                yield from zip(done, future.result(), strict=True)
        for done, future in waiting:
            yield from zip(done, future.result(), strict=True)


def batches(texts: Iterator[Text]) -> Iterator[list[Text]]:
    """Yield lists of texts with at least BATCH characters in all, but for the last list."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --- tokens -> sequences ---


class Sequences(Dataset):
    """Token sequences, which are read from the disk when they are needed.

    Item: {"input_ids": int64 [seq_length], "labels": the same}. The model itself shifts the labels.

    tokens: each of its streams is cut into sequences, and the rest of the stream is left out.
    """

    def __init__(self, tokens: Tokens, seq_length: int) -> None:
        self.streams, self.digest, self.tokens_per_byte = tokens
        self.seq_length = seq_length
        self.starts = np.cumsum([0, *(len(stream) // seq_length for stream in self.streams)])
        self.rows: Sequence[int] = range(self.starts[-1])  # numbers of sequences, -1 for padding

    def sample(self, limit: int) -> "Sequences":
        """Return at most `limit` of the sequences, evenly spaced, always the same ones."""
        count = min(limit, len(self.rows))
        return self._with([self.rows[i * len(self.rows) // count] for i in range(count)])

    def pad_to_multiple(self, multiple: int) -> "Sequences":
        """Append sequences without labels until the number of sequences divides by `multiple`."""
        return self._with([*self.rows, *[-1] * (-len(self.rows) % multiple)])

    def _with(self, rows: list[int]) -> "Sequences":
        tokens = Tokens(self.streams, self.digest, self.tokens_per_byte)
        chosen = Sequences(tokens, self.seq_length)
        chosen.rows = rows
        return chosen

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return the items of a batch, which DataLoader asks for at once: views of one tensor."""
        rows = np.array([self.rows[index] for index in indices])
        parts = np.searchsorted(self.starts, rows, side="right") - 1
        input_ids = np.zeros((len(rows), self.seq_length), np.int64)
        for place, (row, part) in enumerate(zip(rows, parts, strict=True)):
            if row >= 0:
                begin = (row - self.starts[part]) * self.seq_length
                input_ids[place] = self.streams[part][begin : begin + self.seq_length]
        input_ids = torch.from_numpy(input_ids)
        is_padding = torch.from_numpy(rows < 0)[:, None]
        labels = torch.where(is_padding, IGNORED, input_ids) if is_padding.any() else input_ids
        return [{"input_ids": x, "labels": y} for x, y in zip(input_ids, labels, strict=True)]

    def __getstate__(self) -> dict[str, object]:
        """Replace memory maps by the arguments that open them: a data worker gets no copy."""
        opened = [(s.filename, s.dtype, "r", s.offset, s.shape) for s in self.streams]
        return {**self.__dict__, "streams": opened}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state
        self.streams = [np.memmap(*arguments) for arguments in self.streams]


# --- sequences -> batches ---


class ResumableSampler(DistributedSampler):
    """DistributedSampler that can start in the middle of an epoch.

    The order of an epoch is a permutation that depends on seed + epoch. Each rank takes every
    num_replicas-th sample of it, so any number of ranks together trains on the same samples in
    each step.
    """

    start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and how many of its samples this rank skips without loading them."""
        super().set_epoch(epoch)
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.start, None)

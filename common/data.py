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

from common.errors import RunError
from common.inputs.documents import Text, find_documents
from common.inputs.models import tokenizer_checksum, vocabulary_size
from common.inputs.token_files import Tokens, find_token_files, open_token_files
from common.storage import cached_folder

logger = logging.getLogger(__name__)

IGNORED = -100  # the losses of transformers leave out this label
PADDING = -1  # instead of the number of a sequence
SPLITS = ("train", "evaluation")
CACHE_VERSION = 10  # raise it when the same input gives other tokens
CHUNK_CHARACTERS = 2**22  # that the tokenizer gets at once; it needs about 100 bytes for each token
# So many chunks are tokenized at the same time: when one is nearly done, only a few of the
# tokenizer's threads still have work, and those of another chunk use the other cores.
CHUNKS_AT_ONCE = 4


def load_sequences(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> "tuple[Sequences, Sequences]":
    """Return the training and the evaluation sequences of args.dataset_name.

    The documents are tokenized and concatenated in order, with the end-of-text token after each
    document, and cut into sequences of args.seq_length tokens; a shorter rest is dropped. The
    tokens are cached below HF_HOME, once for all sequence lengths. A folder of ready-made tokens is
    used as it is (see inputs/token_files.py).

    Raises RunError for an unknown data set or column, or a corpus shorter than one sequence.
    """
    files = find_token_files(args.dataset_name)
    splits = open_token_files(files, tokenizer) if files else tokenize(args, tokenizer)
    train, evaluation = (Sequences(tokens, args.seq_length) for tokens in splits)
    for part, sequences in (("training", train), ("evaluation", evaluation)):
        if not len(sequences):
            raise RunError(
                f"The {part} part of {args.dataset_name} is shorter than one sequence of "
                f"{args.seq_length} tokens: give more text or a smaller --seq-length."
            )
    train.tokenizer_checksum = tokenizer_checksum(tokenizer)
    return train, evaluation


# --- documents -> tokens ---


def tokenize(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Return the tokens for training and for evaluation. They are made once, below HF_HOME."""
    documents = find_documents(args.dataset_name, args.dataset_subset, args.text_column)
    rules = tokenizer.backend_tokenizer.to_str()  # all that determines how it splits a text
    key = (CACHE_VERSION, documents.key, tokenizer.eos_token_id, rules)

    def fill(folder: Path) -> None:
        start = time.perf_counter()
        write_tokens(folder, documents.read(), tokenizer)
        logger.info("tokenized %s in %.1f s", args.dataset_name, time.perf_counter() - start)

    folder = cached_folder("tokens", key, fill)
    splits = []
    for split, facts in json.loads((folder / "facts.json").read_text()).items():
        file = folder / f"{split}.bin"
        streams = [np.memmap(file, facts["dtype"], "r")] if file.stat().st_size else []
        splits.append(Tokens(streams, facts["digest"], facts["tokens_per_byte"]))
    return splits


def write_tokens(folder: Path, texts: Iterator[Text], tokenizer: PreTrainedTokenizerBase) -> None:
    """Write train.bin and evaluation.bin, and facts.json, which describes both."""
    dtype = np.dtype("uint16" if vocabulary_size(tokenizer) <= 2**16 else "uint32")
    train, evaluation = (_TokenWriter(folder / f"{name}.bin", dtype) for name in SPLITS)
    end, end_id = tokenizer.eos_token, tokenizer.eos_token_id  # looked up once: it takes long
    with_separator = 0  # texts that contain the separator's name
    for (text, held_out, ends), ids in encode(texts, tokenizer):
        with_separator += end in text
        tokens = np.array([*ids, end_id] if ends else ids, dtype)
        (evaluation if held_out else train).write(tokens, text)
    facts = {"train": train.close(), "evaluation": evaluation.close()}
    (folder / "facts.json").write_text(json.dumps(facts))
    if with_separator:
        logger.warning(
            f"{end} stands in {with_separator} texts, or pieces of large ones, and "
            "is read as text: to separate documents, give each its own file or row of a table"
        )


class _TokenWriter:
    """Writes the tokens of one split to a file, and finds out what facts.json says about them."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.file, self.dtype = path.open("wb"), dtype
        self.digest, self.n_tokens, self.n_bytes = hashlib.sha256(), 0, 0

    def write(self, tokens: np.ndarray, text: str) -> None:
        self.file.write(tokens)
        self.digest.update(tokens)
        self.n_tokens += len(tokens)
        self.n_bytes += len(text.encode(errors="surrogatepass"))

    def close(self) -> dict[str, object]:
        self.file.close()
        return {
            "dtype": self.dtype.name,
            "digest": self.digest.hexdigest()[:16],
            "tokens_per_byte": self.n_tokens / max(1, self.n_bytes),
        }


def encode(
    texts: Iterator[Text], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Text, list[int]]]:
    """Yield each text with its tokens, in order.

    The tokenizer library uses all cores. Meanwhile, the caller writes earlier chunks.
    The name of a special token is text if a document contains it.
    """
    # A copy, because every call of the tokenizer itself sets these again.
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    def encode_chunk(chunk: list[Text]) -> list[list[int]]:
        contents = [text for text, _, _ in chunk]
        encoded = backend.encode_batch_fast(contents, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    with ThreadPoolExecutor(CHUNKS_AT_ONCE) as pool:
        waiting = []
        for chunk in in_chunks(texts):
            waiting.append((chunk, pool.submit(encode_chunk, chunk)))
            if len(waiting) > CHUNKS_AT_ONCE:
                done, future = waiting.pop(0)
                yield from zip(done, future.result(), strict=True)
        for done, future in waiting:
            yield from zip(done, future.result(), strict=True)


def in_chunks(texts: Iterator[Text]) -> Iterator[list[Text]]:
    """Yield lists of texts, each with CHUNK_CHARACTERS or more in all, but for the last one."""
    chunk, size = [], 0
    for text in texts:
        chunk.append(text)
        size += len(text.text)
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


# --- tokens -> sequences ---


class Sequences(Dataset):
    """Token sequences, which are read from the disk when they are needed.

    Item: {"input_ids": int64 [seq_length], "labels": the same}. The model itself shifts the labels.

    tokens: each of its streams is cut into sequences, and the rest of the stream is left out.
    """

    tokenizer_checksum: str | None = None  # of the tokenizer of load_sequences

    def __init__(self, tokens: Tokens, seq_length: int) -> None:
        self.streams, self.digest, self.tokens_per_byte = tokens
        self.seq_length = seq_length
        self.starts = np.cumsum([0, *(len(stream) // seq_length for stream in self.streams)])
        # Which of the streams' sequences these are, in order; PADDING has no labels.
        self.numbers: Sequence[int] = range(self.starts[-1])

    def sample(self, limit: int) -> "Sequences":
        """Return at most `limit` of the sequences, evenly spaced, always the same ones."""
        count = min(limit, len(self))
        return self._with([self.numbers[i * len(self) // count] for i in range(count)])

    def pad_to_multiple(self, multiple: int) -> "Sequences":
        """Append sequences without labels until the number of sequences divides by `multiple`."""
        return self._with([*self.numbers, *[PADDING] * (-len(self) % multiple)])

    def _with(self, numbers: list[int]) -> "Sequences":
        tokens = Tokens(self.streams, self.digest, self.tokens_per_byte)
        chosen = Sequences(tokens, self.seq_length)
        chosen.numbers = numbers
        return chosen

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return the items of a batch: views of one tensor, which takes half the time of copies.

        DataLoader calls this for each batch.
        """
        numbers = np.array([self.numbers[index] for index in indices])
        stream_of = np.searchsorted(self.starts, numbers, side="right") - 1
        input_ids = np.zeros((len(numbers), self.seq_length), np.int64)
        for place, (number, stream) in enumerate(zip(numbers, stream_of, strict=True)):
            if number != PADDING:
                begin = (number - self.starts[stream]) * self.seq_length
                input_ids[place] = self.streams[stream][begin : begin + self.seq_length]
        input_ids = torch.from_numpy(input_ids)
        is_padding = torch.from_numpy(numbers == PADDING)[:, None]
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

"""Text -> packed blocks of tokens, in an order that does not depend on the number of processes."""

import argparse
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock
from huggingface_hub import constants
from torch.utils.data import Dataset, DistributedSampler
from transformers import PreTrainedTokenizerBase

from common.cli import InputError
from common.packing import pack_documents, tokenizer_rules
from common.sources import find_source

logger = logging.getLogger(__name__)

CACHE_VERSION = 1  # part of every cache key: raise it when the same input gives other blocks
CANNOT_CACHE = "Cannot write to the cache {} ({}): set HF_HOME to another folder."
IGNORED = -100  # the label that transformers' losses leave out


class Blocks(Dataset):
    """Packed blocks of tokens, read from the disk when asked for.

    Item: {"input_ids": int64 [seq_length], "labels": the same}; the model shifts the labels itself.

    tokens: [blocks, seq_length], integers of any type, in memory or mapped.
    digest: a checksum of the tokens; two corpora with the same digest are the same.
    tokens_per_byte: of the text that the blocks were made from, for bits per byte.
    """

    def __init__(self, tokens: np.ndarray, digest: str, tokens_per_byte: float) -> None:
        self.tokens, self.digest, self.tokens_per_byte = tokens, digest, tokens_per_byte
        self.padding = 0

    def __reduce__(self) -> tuple:
        """Pickle a mapped file by its name: a worker maps it, and does not get a copy."""
        tokens = self.tokens
        if isinstance(tokens, np.memmap):
            tokens = _MappedFile(tokens.filename, tokens.dtype.str, tokens.shape)
        return _restore_blocks, (tokens, self.digest, self.tokens_per_byte, self.padding)

    def pad_to_multiple(self, multiple: int) -> "Blocks":
        """Append blocks whose labels are all ignored, until the length divides by `multiple`."""
        padded = Blocks(self.tokens, self.digest, self.tokens_per_byte)
        padded.padding = -len(self.tokens) % multiple
        return padded

    def __len__(self) -> int:
        return len(self.tokens) + self.padding

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self.tokens):
            input_ids = torch.zeros(self.tokens.shape[1], dtype=torch.int64)
            return {"input_ids": input_ids, "labels": torch.full_like(input_ids, IGNORED)}
        input_ids = torch.from_numpy(self.tokens[index].astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids}


class _MappedFile(NamedTuple):
    path: Path
    dtype: str
    shape: tuple[int, int]

    def open(self) -> np.memmap:
        return np.memmap(self.path, self.dtype, mode="r", shape=self.shape)


def _restore_blocks(
    tokens: np.ndarray | _MappedFile, digest: str, tokens_per_byte: float, padding: int
) -> Blocks:
    tokens = tokens.open() if isinstance(tokens, _MappedFile) else tokens
    blocks = Blocks(tokens, digest, tokens_per_byte)
    blocks.padding = padding
    return blocks


class ResumableSampler(DistributedSampler):
    """DistributedSampler that can begin in the middle of an epoch.

    The order of an epoch is a permutation drawn from seed + epoch, of which each rank takes every
    num_replicas-th sample: whatever the number of ranks, together they have taken the same samples
    after the same number of steps.
    """

    start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and how many of this rank's samples of it to skip (indices only)."""
        super().set_epoch(epoch)
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.start, None)


def split_batch(args: argparse.Namespace, world_size: int, n_blocks: int) -> tuple[int, int]:
    """Return (sequences per device and micro-batch, micro-batches per step).

    The micro-batch is the largest divisor of a rank's share of args.global_batch_size that is not
    above args.batch_size, so that every step has exactly the global batch. Raises InputError if
    the ranks cannot share it evenly, or the n_blocks of training data are less than one step's.
    """
    global_batch_size = args.global_batch_size
    share, rest = divmod(global_batch_size, world_size)
    if rest:
        raise InputError(
            f"{world_size} devices cannot share --global-batch-size {global_batch_size} evenly: "
            f"give another number of devices, or a multiple of {world_size}."
        )
    if n_blocks < global_batch_size:
        raise InputError(
            f"The training data is only {n_blocks} sequences, less than --global-batch-size "
            f"{global_batch_size}: give more text, or fewer or shorter sequences."
        )
    limit = min(share, args.batch_size)
    micro_batch_size = max(n for n in range(1, limit + 1) if share % n == 0)
    return micro_batch_size, share // micro_batch_size


def describe_batch(
    micro_batch_size: int, world_size: int, accumulation: int, seq_length: int
) -> str:
    """Return the arithmetic of a step's batch in words."""
    sequences = micro_batch_size * world_size * accumulation
    return (
        f"{micro_batch_size} sequences x {world_size} device{'s' * (world_size > 1)} "
        f"x {accumulation} micro-batch{'es' * (accumulation > 1)} "
        f"= {sequences} sequences = {sequences * seq_length} tokens per step"
    )


def load_blocks(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, seq_length: int
) -> tuple[Blocks, Blocks]:
    """Return the training and the evaluation blocks of args.dataset_name.

    The documents are tokenized in order, each followed by the end-of-text token, put end to end
    and cut into blocks of seq_length tokens; the rest of less than a block is dropped. The result
    is the same for every args.num_workers, is kept below HF_HOME, and is mapped from there.
    Processes that ask for the same blocks at the same time wait for the first of them.

    Raises InputError for an unknown data set or column, and for a corpus of less than one block.
    """
    source = find_source(args.dataset_name, args.dataset_subset, args.text_column)
    encoding = (tokenizer.eos_token_id, tokenizer_rules(tokenizer))
    key = repr((CACHE_VERSION, source.fingerprint, encoding, seq_length))
    cache = Path(constants.HF_HOME) / "packed-blocks"
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
    with ExitStack() as held:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(f"{folder}.lock"))
        except (OSError, NotImplementedError) as error:  # some file systems of clusters cannot lock
            reason = getattr(error, "strerror", None) or error
            raise InputError(CANNOT_CACHE.format(cache, reason)) from error
        if not folder.exists():
            start = time.perf_counter()
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            parts = zip(("train", "evaluation"), source.load(), strict=True)
            try:
                unfinished.mkdir()
                for split, documents in parts:
                    pack_documents(unfinished / split, documents, tokenizer, args.num_workers)
                unfinished.replace(folder)
            except OSError as error:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise InputError(CANNOT_CACHE.format(cache, error.strerror)) from error
            logger.info("tokenized %s in %.1f s", args.dataset_name, time.perf_counter() - start)
    train = _read_blocks(folder / "train", seq_length)
    evaluation = _read_blocks(folder / "evaluation", seq_length)
    for split, blocks in (("training", train), ("evaluation", evaluation)):
        if len(blocks) == 0:
            raise InputError(
                f"The {split} part of {args.dataset_name} is smaller than one block of "
                f"{seq_length} tokens: give more text or a smaller --seq-length."
            )
    return train, evaluation


def _read_blocks(path: Path, seq_length: int) -> Blocks:
    facts = json.loads(path.with_suffix(".json").read_text())
    n_blocks = facts["tokens"] // seq_length
    tokens = np.zeros((0, seq_length), dtype=facts["dtype"])
    if n_blocks:
        shape = (n_blocks, seq_length)
        tokens = _MappedFile(path.with_suffix(".bin"), facts["dtype"], shape).open()
    return Blocks(tokens, facts["digest"], facts["tokens"] / max(1, facts["bytes"]))

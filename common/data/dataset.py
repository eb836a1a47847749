"""Tokens -> sequences -> batches, in an order that does not depend on the number of ranks."""

import argparse
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from common.cli import InputError

IGNORED = -100  # the losses of transformers leave out this label


class Sequences(Dataset):
    """Token sequences, which are read from the disk when they are needed.

    Item: {"input_ids": int64 [seq_length], "labels": the same}. The model itself shifts the labels.

    tokens: integers [sequences, seq_length], in memory or memory-mapped.
    digest: a checksum of the tokens. tokens_per_byte: of the original text, for bits per byte.
    """

    def __init__(self, tokens: np.ndarray, digest: str, tokens_per_byte: float) -> None:
        self.tokens, self.digest, self.tokens_per_byte = tokens, digest, tokens_per_byte
        self.padding = 0

    def pad_to_multiple(self, multiple: int) -> "Sequences":
        """Append sequences without labels until the number of sequences divides by `multiple`."""
        padded = Sequences(self.tokens, self.digest, self.tokens_per_byte)
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

    def __getstate__(self) -> dict[str, object]:
        """Replace a memory map by the arguments that open it: a data worker gets no copy of it."""
        state, tokens = dict(self.__dict__), self.tokens
        if isinstance(tokens, np.memmap):
            state["tokens"] = (tokens.filename, tokens.dtype, "r", tokens.offset, tokens.shape)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state
        if isinstance(self.tokens, tuple):
            self.tokens = np.memmap(*self.tokens)


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


def split_batch(args: argparse.Namespace, world_size: int, n_sequences: int) -> tuple[int, int]:
    """Return (sequences per device and micro-batch, micro-batches per step).

    The micro-batch is the largest divisor of a rank's share of args.global_batch_size that is at
    most args.batch_size, so every step has exactly the global batch. Raises InputError if the ranks
    cannot share the global batch evenly, or if n_sequences is less than one global batch.
    """
    global_batch_size = args.global_batch_size
    share, rest = divmod(global_batch_size, world_size)
    if rest:
        raise InputError(
            f"{world_size} devices cannot share --global-batch-size {global_batch_size} evenly: "
            f"give another number of devices, or a multiple of {world_size}."
        )
    if n_sequences < global_batch_size:
        raise InputError(
            f"The training data is only {n_sequences} sequences, less than --global-batch-size "
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

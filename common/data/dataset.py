"""Tokens -> sequences -> batches, in an order that does not depend on the number of ranks."""

import argparse
import logging
import math
import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from common.cli import InputError

logger = logging.getLogger(__name__)

IGNORED = -100  # the losses of transformers leave out this label
FEW_STEPS = 50  # shorter runs learn next to nothing


class Sequences(Dataset):
    """Token sequences, which are read from the disk when they are needed.

    Item: {"input_ids": int64 [seq_length], "labels": the same}. The model itself shifts the labels.

    tokens: integers [sequences, seq_length], in memory, memory-mapped or of several files (Shards).
    digest: a checksum of the tokens. tokens_per_byte: of the original text, for bits per byte.
    """

    def __init__(self, tokens: np.ndarray, digest: str, tokens_per_byte: float) -> None:
        self.tokens, self.digest, self.tokens_per_byte = tokens, digest, tokens_per_byte
        self.padding = 0

    def sample(self, limit: int) -> "Sequences":
        """Return at most `limit` of the sequences, evenly spaced, always the same ones."""
        count = min(limit, len(self.tokens))
        chosen = np.arange(count) * len(self.tokens) // count
        return Sequences(self.tokens[chosen], self.digest, self.tokens_per_byte)

    def pad_to_multiple(self, multiple: int) -> "Sequences":
        """Append sequences without labels until the number of sequences divides by `multiple`."""
        padded = Sequences(self.tokens, self.digest, self.tokens_per_byte)
        padded.padding = -len(self.tokens) % multiple
        return padded

    def __len__(self) -> int:
        return len(self.tokens) + self.padding

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return the items of a batch, which DataLoader asks for at once: views of one tensor."""
        rows = np.asarray(indices)
        is_padding = rows >= len(self.tokens)  # instead of which the first sequence is read
        input_ids = torch.from_numpy(self.tokens[rows * ~is_padding].astype(np.int64))
        labels = input_ids
        if is_padding.any():
            input_ids[is_padding] = 0
            labels = torch.where(torch.from_numpy(is_padding)[:, None], IGNORED, input_ids)
        return [{"input_ids": x, "labels": y} for x, y in zip(input_ids, labels, strict=True)]

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
        # The order of DistributedSampler, whose list of Python integers would need ten times the
        # memory. randperm draws the same numbers for both types.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        dtype = torch.int32 if len(self.dataset) < 2**31 else torch.int64
        order = torch.randperm(len(self.dataset), generator=generator, dtype=dtype)
        first = self.rank + self.start * self.num_replicas
        positions = range(first, self.total_size, self.num_replicas)
        share = order[first : self.total_size : self.num_replicas]
        # Without drop_last, the last ranks repeat samples, so that all ranks have equally many.
        repeated = [order[i % len(order)].item() for i in positions[len(share) :]]
        share = share.contiguous()
        del order
        for chunk in share.split(2**16):
            yield from chunk.tolist()
        yield from repeated


def split_batch(args: argparse.Namespace, world_size: int, n_sequences: int) -> tuple[int, int]:
    """Return (sequences per device and micro-batch, micro-batches per step).

    The micro-batch is the largest divisor of a rank's share of args.global_batch_size that is at
    most args.batch_size, so every step has exactly the global batch. Raises InputError if the ranks
    cannot share the global batch evenly, or if n_sequences is less than one global batch. Rank 0
    logs a warning if the run has fewer than FEW_STEPS steps and --max-steps does not ask for them.
    """
    global_batch_size = args.global_batch_size
    share, rest = divmod(global_batch_size, world_size)
    if rest:
        raise InputError(
            f"{world_size} devices cannot share --global-batch-size {global_batch_size} evenly: "
            f"give another number of devices, or a --global-batch-size that {world_size} divides."
        )
    if n_sequences < global_batch_size:
        raise InputError(
            f"The training data is only {n_sequences} sequences, less than --global-batch-size "
            f"{global_batch_size}: give more text, or fewer or shorter sequences."
        )
    if getattr(args, "max_steps", 1) is None and os.environ.get("RANK", "0") == "0":
        _warn_of_few_steps(args.num_epochs, n_sequences, global_batch_size)
    limit = min(share, args.batch_size)
    micro_batch_size = max(n for n in range(1, limit + 1) if share % n == 0)
    return micro_batch_size, share // micro_batch_size


def _warn_of_few_steps(num_epochs: float, n_sequences: int, global_batch_size: int) -> None:
    per_epoch = n_sequences // global_batch_size
    steps = max(1, round(num_epochs * per_epoch))
    if steps < FEW_STEPS:
        enough = math.ceil(10 * FEW_STEPS / per_epoch) / 10
        logger.warning(
            f"This run has only {steps} step{'s' * (steps > 1)}, because the training data is "
            f"only {n_sequences} sequences: give --num-epochs {enough:g} for at least {FEW_STEPS} "
            "steps, or --max-steps, or a smaller --global-batch-size."
        )


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

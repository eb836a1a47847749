"""Texts as tokens, and batches of alike lengths: which rank gets which examples, how padded."""

import argparse
import copy
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

from common.cli import InputError
from common.data import IGNORED

from classification.examples import Example, Examples

PADDINGS = ("grouped", "dynamic", "fixed")
WINDOW = 50  # so many global batches of examples are sorted by length at a time


def encode(
    splits: dict[str, Examples],
    classes: list[str],
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int,
    prompt: str | None,
) -> list[list[int]]:
    """Add tokens and counts to the splits, texts cut at their end to fit into seq_length tokens.

    prompt: with {text} in it, for a model without a head; then returned are the tokens of each
    class's words, end-of-text after them, so that no class begins with another one. Else nothing.
    Raises InputError for a prompt without {text}, or one that leaves no token for it.
    """
    before, after, words, room = [], [], [], seq_length
    if prompt is not None:
        if prompt.count("{text}") != 1:
            raise InputError(f"--prompt {prompt!r} must hold {{text}}, once.")
        parts = [*prompt.split("{text}"), *(f" {name}" for name in classes)]
        before, after, *words = tokenizer(parts, add_special_tokens=False)["input_ids"]
        words = [[*tokens, tokenizer.eos_token_id] for tokens in words]
        room -= len(before) + len(after) + max(map(len, words))
        if room < 1:
            raise InputError(
                f"The prompt and the longest label take {seq_length - room} tokens, and with "
                f"--seq-length {seq_length} none is left for the text: shorten them."
            )
    for examples in splits.values():
        texts = tokenizer(
            examples.texts, truncation=True, max_length=room, add_special_tokens=prompt is None
        )["input_ids"]
        examples.tokens = [before + tokens + after for tokens in texts]
        examples.counts = [len(words[label]) if words else 1 for label in examples.labels]
    return words


class GroupedSampler(Sampler[list[int]]):
    """Yields this rank's micro-batches: lists of indices, as many on every rank, some maybe empty.

    The global batches follow from seed + epoch alone, whatever the number of ranks: a permutation,
    of which WINDOW global batches at a time are sorted by length and cut, in an order drawn anew.
    The last one may be smaller. Each rank takes every num_replicas-th example of a global batch, so
    an epoch has every example exactly once, and each step texts of alike lengths on all ranks.

    lengths: of the examples, in tokens. args: of the script; batch_size is the most examples of a
    micro-batch, and only the padding "grouped" sorts.
    """

    def __init__(
        self, lengths: list[int], args: argparse.Namespace, num_replicas: int, rank: int
    ) -> None:
        self.lengths, self.num_replicas, self.rank = lengths, num_replicas, rank
        self.seed = args.seed
        self.batch_size, self.global_batch_size = args.batch_size, args.global_batch_size
        self.grouped = args.padding == "grouped"
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the epoch's global batches: `steps`, a list of indices for each step."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        size = self.global_batch_size
        if self.grouped:
            windows = [order[i : i + WINDOW * size] for i in range(0, len(order), WINDOW * size)]
            order = [i for window in windows for i in sorted(window, key=self.lengths.__getitem__)]
        steps = [order[i : i + size] for i in range(0, len(order), size)]
        if self.grouped:  # or training would go from short texts to long ones, again and again
            steps = [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]
        self.steps = steps

    def micro_batches(self, step: list[int]) -> int:
        """Return how many micro-batches a global batch makes: on every rank the same number."""
        return -(-len(step) // (self.num_replicas * self.batch_size))

    def parts(self, step: list[int], rank: int) -> list[list[int]]:
        """Return the micro-batches of a rank. Those of a short step may be empty on some ranks."""
        part, size = step[rank :: self.num_replicas], self.batch_size
        return [part[i * size : (i + 1) * size] for i in range(self.micro_batches(step))]

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            yield from self.parts(step, self.rank)

    def __len__(self) -> int:
        return sum(map(self.micro_batches, self.steps))

    def padded_tokens(self) -> int:
        """Return the tokens of this epoch on all ranks, if each micro-batch has its own length."""
        return sum(
            len(part) * max(self.lengths[index] for index in part)
            for step in self.steps
            for rank in range(self.num_replicas)
            for part in self.parts(step, rank)
            if part
        )

    def padded_by_way(self, seq_length: int) -> dict[str, int]:
        """Return the tokens of the first epoch on all ranks with each kind of padding."""
        found, other = {"fixed": len(self.lengths) * seq_length}, copy.copy(self)
        for way in ("dynamic", "grouped"):
            other.grouped = way == "grouped"
            other.set_epoch(0)
            found[way] = other.padded_tokens()
        return found


def batches_of_rank(
    lengths: list[int], batch_size: int, num_replicas: int, rank: int
) -> list[list[int]]:
    """Return a rank's batches for an evaluation: by length, every num_replicas-th one.

    Together the ranks have every example once, in the same batches whatever their number; some
    have a batch more than others.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return batches[rank::num_replicas]


class Collator:
    """Makes a batch of examples, padded on the right to its longest, or to `width` tokens.

    Returns tensors: input_ids int64 [rows, tokens]; of each example (a row, or a group of rows):
    index, label (both -1 and IGNORED for the filler that stands in an empty batch: its loss is 0);
    and `n`, the numbers of terms of the loss, of examples, of tokens without padding.

    words: the tokens of each class's words, for a model without a head; rows then end with them,
    and there are targets int64 [rows, columns]: the token to predict at each of `columns`, the
    positions of a row that have one in any row, IGNORED elsewhere. every_class: a row for each
    class, not only for the example's own.
    """

    def __init__(
        self,
        pad_token_id: int,
        width: int | None = None,
        words: list[list[int]] | None = None,
        every_class: bool = False,
    ) -> None:
        self.pad_token_id, self.width = pad_token_id, width
        self.words, self.every_class = words, every_class

    def __call__(self, examples: list[Example]) -> dict[str, torch.Tensor]:
        n = [len(examples), len(examples), sum(len(example.tokens) for example in examples)]
        examples = examples or [Example(-1, [self.pad_token_id], IGNORED)]
        rows, targets = [example.tokens for example in examples], []
        if self.words:
            pairs = [
                (example.tokens, self.words[label] if label != IGNORED else [])
                for example in examples
                for label in (range(len(self.words)) if self.every_class else [example.label])
            ]
            # The last word is to be predicted; nothing is predicted from it.
            rows = [tokens + answer[:-1] for tokens, answer in pairs]
            targets = [[IGNORED] * (len(tokens) - 1) + answer for tokens, answer in pairs]
        width = max(self.width or 1, *map(len, rows))
        batch = {
            "input_ids": _pad(rows, width, self.pad_token_id),
            "labels": torch.tensor([example.label for example in examples]),
            "index": torch.tensor([example.index for example in examples]),
        }
        if self.words:
            n[0] = sum(len(answer) for _, answer in pairs)
            padded = _pad(targets, width, IGNORED)
            wanted = (padded != IGNORED).any(dim=0)
            wanted[0] |= ~wanted.any()  # a filler: no column at all would be no tensor of a loss
            batch["columns"] = wanted.nonzero().squeeze(1)
            batch["targets"] = padded[:, batch["columns"]]
        return {**batch, "n": torch.tensor(n)}


def _pad(rows: list[list[int]], width: int, value: int) -> torch.Tensor:
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])

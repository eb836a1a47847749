"""Tokenize examples, group them by length, share them among the ranks, and pad them to batches."""

import argparse
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

from common.data import IGNORED
from common.errors import RunError

from classification.examples import Example, Examples

PADDINGS = ("grouped", "dynamic", "fixed")
WINDOW = 50  # global batches whose examples are sorted by length together


def encode(
    splits: dict[str, Examples],
    classes: list[str],
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int,
    prompt: str | None,
) -> list[list[int]]:
    """Add tokens and counts to the splits. Truncate the texts to fit into seq_length tokens.

    prompt: a template that contains {text}, for a model without a head, otherwise None. Returns the
    tokens of each class's label, or [] without a prompt. End-of-text ends a label, so that no label
    is the beginning of another one. Raises RunError for a prompt without {text}, or if the prompt
    leaves no token for the text.
    """
    before, after, label_tokens, room = [], [], [], seq_length
    if prompt is not None:
        if prompt.count("{text}") != 1:
            raise RunError(f"--prompt {prompt!r} must contain {{text}} exactly once.")
        parts = [*prompt.split("{text}"), *(f" {name}" for name in classes)]
        before, after, *labels = tokenizer(parts, add_special_tokens=False)["input_ids"]
        label_tokens = [[*tokens, tokenizer.eos_token_id] for tokens in labels]
        room -= len(before) + len(after) + max(map(len, label_tokens))
        if room < 1:
            raise RunError(
                f"--prompt and the longest label take {seq_length - room} tokens, but --seq-length "
                f"is {seq_length}: shorten the prompt or the labels."
            )
    for examples in splits.values():
        texts = tokenizer(
            examples.texts, truncation=True, max_length=room, add_special_tokens=prompt is None
        )["input_ids"]
        examples.tokens = [before + tokens + after for tokens in texts]
        examples.loss_terms = [
            len(label_tokens[label]) if label_tokens else 1 for label in examples.labels
        ]
    return label_tokens


class GroupedSampler(Sampler[list[int]]):
    """Yields the micro-batches of this rank: lists of indices, some of which may be empty.

    All ranks get the same number of micro-batches, and an epoch has every example exactly once. The
    global batches depend on seed + epoch, not on the number of ranks. The examples are shuffled.
    With --padding grouped, the examples of WINDOW global batches at a time are sorted by length and
    cut into global batches, whose order is then shuffled. The last global batch may be smaller.
    Each rank takes every num_replicas-th example of a global batch, so all ranks get similar
    lengths in a step.

    lengths: tokens of each example. args: the script's arguments.
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
        """Draw the global batches of an epoch: `steps` has a list of indices for each step."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        size = self.global_batch_size
        if self.grouped:
            windows = [order[i : i + WINDOW * size] for i in range(0, len(order), WINDOW * size)]
            order = [i for window in windows for i in sorted(window, key=self.lengths.__getitem__)]
        steps = [order[i : i + size] for i in range(0, len(order), size)]
        if self.grouped:  # otherwise each window would go from short texts to long ones
            steps = [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]
        self.steps = steps

    def micro_batches(self, step: list[int]) -> int:
        """Return the number of micro-batches of a global batch, which is the same on all ranks."""
        return -(-len(step) // (self.num_replicas * self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            part, size = step[self.rank :: self.num_replicas], self.batch_size
            for i in range(self.micro_batches(step)):
                yield part[i * size : (i + 1) * size]


class Collator:
    """Makes a batch of examples, padded on the right to the longest row, or to `width` tokens.

    label_tokens: the tokens of each class's label, for a model without a head. Each row then ends
    with a label. every_class: make one row for each class, not only for the example's own class.

    Returns int64 tensors:
    input_ids [rows, tokens]
    index, labels [examples]: an empty batch gets a filler with index -1, label IGNORED and loss 0
    n [3]: the number of loss terms, of examples, and of tokens without padding
    columns: without a head, the positions at which some row predicts a label token
    targets [rows, columns]: the token to predict there, or IGNORED
    """

    def __init__(
        self,
        pad_token_id: int,
        width: int | None = None,
        label_tokens: list[list[int]] | None = None,
        every_class: bool = False,
    ) -> None:
        self.pad_token_id, self.width = pad_token_id, width
        self.label_tokens, self.every_class = label_tokens, every_class

    def __call__(self, examples: list[Example]) -> dict[str, torch.Tensor]:
        n = [len(examples), len(examples), sum(len(example.tokens) for example in examples)]
        examples = examples or [Example(-1, [self.pad_token_id], IGNORED)]
        rows, targets = [example.tokens for example in examples], []
        if self.label_tokens:
            classes = range(len(self.label_tokens))
            pairs = [
                (example.tokens, self.label_tokens[label] if label != IGNORED else [])
                for example in examples
                for label in (classes if self.every_class else [example.label])
            ]
            # The last token is predicted, but predicts nothing, so it is no input.
            rows = [tokens + answer[:-1] for tokens, answer in pairs]
            targets = [[IGNORED] * (len(tokens) - 1) + answer for tokens, answer in pairs]
        width = max(self.width or 1, *map(len, rows))
        batch = {
            "input_ids": _pad(rows, width, self.pad_token_id),
            "labels": torch.tensor([example.label for example in examples]),
            "index": torch.tensor([example.index for example in examples]),
        }
        if self.label_tokens:
            n[0] = sum(len(answer) for _, answer in pairs)
            padded = _pad(targets, width, IGNORED)
            has_target = (padded != IGNORED).any(dim=0)
            has_target[0] |= ~has_target.any()  # a filler needs a column, or it has no loss
            batch["columns"] = has_target.nonzero().squeeze(1)
            batch["targets"] = padded[:, batch["columns"]]
        return {**batch, "n": torch.tensor(n)}


def _pad(rows: list[list[int]], width: int, value: int) -> torch.Tensor:
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])

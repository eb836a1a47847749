"""Documents -> tokens -> sequences -> batches, in an order that no number of ranks changes."""

import argparse
import hashlib
import json
import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler
from transformers import PreTrainedTokenizerBase

from common.cli import RunError, is_rank_0
from common.documents import are_few, find_documents, split_texts
from common.launch import end_with_parent, n_cores
from common.models import vocabulary_size
from common.shards import find_shards, open_shards
from common.storage import cached_folder

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

IGNORED = -100  # the losses of transformers leave out this label
FEW_STEPS = 50  # shorter runs learn next to nothing
CACHE_VERSION = 7  # raise it when the same input gives other tokens
BYTES_PER_PROCESS = 2**22  # of text; for less than two of these, one process tokenizes


def load_sequences(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, seq_length: int
) -> "tuple[Sequences, Sequences]":
    """Return the training and the evaluation sequences of args.dataset_name.

    The documents are tokenized and concatenated in order, with the end-of-text token after each
    document, and cut into sequences of seq_length tokens; a shorter rest is dropped. The result
    does not depend on the number of processes. The tokens are cached below HF_HOME, once for all
    values of seq_length. A folder of ready-made tokens is used as it is (see shards.py).

    Raises RunError for an unknown data set or column, or a corpus shorter than one sequence.
    """
    if files := find_shards(args.dataset_name):
        parts = open_shards(files, tokenizer)
    else:
        folder = tokenize(args, tokenizer)
        facts = json.loads((folder / "facts.json").read_text())
        read = facts.pop("read")
        logger.info(f"{args.dataset_name}: {read}")
        parts = []
        for split, (dtype, count, digest, tokens_per_byte) in facts.items():
            file = folder / f"{split}.bin"
            streams = [np.memmap(file, dtype, "r")] if count else []
            parts.append((streams, digest, tokens_per_byte))
    train, evaluation = (
        Sequences(streams, seq_length, digest, tokens_per_byte)
        for streams, digest, tokens_per_byte in parts
    )
    for part, sequences in (("training", train), ("evaluation", evaluation)):
        if not len(sequences):
            raise RunError(
                f"The {part} part of {args.dataset_name} is shorter than one sequence of "
                f"{seq_length} tokens: give more text or a smaller --seq-length."
            )
    return train, evaluation


# --- documents -> tokens ---


def tokenize(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Tokenize a data set, unless that is done already; return a folder below HF_HOME.

    train.bin and evaluation.bin hold the tokens, one after the other. facts.json has for each of
    the two: the type of a token, their number, a checksum, and the tokens per byte of the text; and
    "read", in words.
    """
    documents = find_documents(args.dataset_name, args.dataset_subset, args.text_column)
    key = (CACHE_VERSION, documents.fingerprint, tokenizer.eos_token_id, _rules_of(tokenizer))

    def fill(folder: Path) -> None:
        start = time.perf_counter()
        rows = documents.load()
        encoded = encode_documents(rows, tokenizer, folder / "encoded.arrow")
        facts = {
            split: write_tokens(folder / f"{split}.bin", encoded, split == "evaluation")
            for split in ("train", "evaluation")
        }
        facts["read"] = rows.info.description
        (folder / "facts.json").write_text(json.dumps(facts))
        del encoded  # closes its files
        for file in folder.iterdir():
            if file.suffix not in (".bin", ".json"):
                file.unlink()
        logger.info("tokenized %s in %.1f s", args.dataset_name, time.perf_counter() - start)

    return cached_folder("tokens", key, fill)


def _rules_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return everything that determines how the tokenizer splits a text."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str()
    return repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())))


def encode_documents(
    documents: "datasets.Dataset", tokenizer: PreTrainedTokenizerBase, file: Path
) -> "datasets.Dataset":
    """Return rows of "tokens", "held_out" and "bytes", which are mapped from files.

    file: where they are; each process does a part of the documents and adds a number to its name.
    """
    import datasets  # the documents have imported it

    size = documents.data.nbytes // BYTES_PER_PROCESS
    n_processes = max(1, min(n_cores(), len(documents), size))
    dtype = "uint16" if vocabulary_size(tokenizer) <= 2**16 else "uint32"
    options = {"few": are_few(documents), "dtype": dtype, "is_child": n_processes > 1}
    return documents.map(
        _encode,
        batched=True,
        batch_size=4 if "ends" in documents.column_names else 100,  # pieces of files are large
        num_proc=n_processes if n_processes > 1 else None,
        fn_kwargs={"tokenizer": tokenizer, **options},
        remove_columns=documents.column_names,
        features=datasets.Features(
            tokens=datasets.Sequence(datasets.Value(dtype)),
            held_out=datasets.Value("bool"),
            bytes=datasets.Value("int64"),
        ),
        cache_file_name=str(file),
        new_fingerprint="tokens",  # the library's own depends on what the tokenizer has done before
        desc="tokenizing",
    )


def _encode(
    batch: dict[str, list],
    tokenizer: PreTrainedTokenizerBase,
    few: bool,
    dtype: str,
    is_child: bool,
) -> dict[str, list]:
    """Return the columns that encode_documents describes, for some documents.

    few: see split_texts. is_child: whether the library has started this process.
    """
    if is_child:  # threads do not help if each core has its own process
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with which the library ends it
        end_with_parent()
    columns = {"tokens": [], "held_out": [], "bytes": []}
    for text, held_out, ends in split_texts(batch, few):
        # The name of a special token is text if a document contains it.
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        ids = tokenizer.encode(text, **options)
        if ends:
            ids.append(tokenizer.eos_token_id)
        columns["tokens"].append(np.array(ids, dtype))
        columns["held_out"].append(held_out)
        columns["bytes"].append(len(text.encode(errors="surrogatepass")))
    return columns


def write_tokens(
    file: Path, encoded: "datasets.Dataset", held_out: bool
) -> tuple[str, int, str, float]:
    """Write the tokens of the rows with this "held_out"; return what facts.json says about them."""
    digest, n_tokens, n_bytes = hashlib.sha256(), 0, 0
    with file.open("wb") as output:
        for batch in encoded.data.to_batches():
            rows = batch.filter(np.equal(batch["held_out"], held_out))
            tokens = rows["tokens"].flatten().to_numpy(zero_copy_only=False)
            output.write(tokens)
            digest.update(tokens)
            n_tokens += len(tokens)
            n_bytes += sum(rows["bytes"].to_pylist())
    dtype = encoded.features["tokens"].feature.dtype
    return dtype, n_tokens, digest.hexdigest()[:16], n_tokens / max(1, n_bytes)


# --- tokens -> sequences ---


class Sequences(Dataset):
    """Token sequences, which are read from the disk when they are needed.

    Item: {"input_ids": int64 [seq_length], "labels": the same}. The model itself shifts the labels.

    streams: arrays of tokens, memory-mapped; each is cut into sequences, and its rest is left out.
    digest: a checksum of the tokens. tokens_per_byte: of the original text, for bits per byte.
    """

    def __init__(
        self, streams: list[np.memmap], seq_length: int, digest: str, tokens_per_byte: float
    ) -> None:
        self.streams, self.seq_length = streams, seq_length
        self.digest, self.tokens_per_byte = digest, tokens_per_byte
        self.starts = np.cumsum([0, *(len(tokens) // seq_length for tokens in streams)])
        self.rows: Sequence[int] = range(self.starts[-1])  # numbers of sequences, -1 for padding

    def sample(self, limit: int) -> "Sequences":
        """Return at most `limit` of the sequences, evenly spaced, always the same ones."""
        count = min(limit, len(self.rows))
        return self._with([self.rows[i * len(self.rows) // count] for i in range(count)])

    def pad_to_multiple(self, multiple: int) -> "Sequences":
        """Append sequences without labels until the number of sequences divides by `multiple`."""
        return self._with([*self.rows, *[-1] * (-len(self.rows) % multiple)])

    def _with(self, rows: list[int]) -> "Sequences":
        chosen = Sequences(self.streams, self.seq_length, self.digest, self.tokens_per_byte)
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


def split_batch(args: argparse.Namespace, world_size: int, n_sequences: int) -> tuple[int, int]:
    """Return (sequences per device and micro-batch, micro-batches per step).

    The micro-batch is the largest divisor of a rank's share of args.global_batch_size that is at
    most args.batch_size, so every step has exactly the global batch. Raises RunError if the ranks
    cannot share the global batch evenly, or if n_sequences is less than one global batch. Rank 0
    logs a warning if micro-batches are less than half as large as args.batch_size allows, or if the
    run has fewer than FEW_STEPS steps and --max-steps does not ask for them.
    """
    global_batch_size = args.global_batch_size
    share, rest = divmod(global_batch_size, world_size)
    if rest:
        raise RunError(
            f"{world_size} devices cannot share --global-batch-size {global_batch_size} evenly: "
            f"give another number of devices, or a --global-batch-size that {world_size} divides."
        )
    if n_sequences < global_batch_size:
        raise RunError(
            f"The training data is only {n_sequences} sequences, less than --global-batch-size "
            f"{global_batch_size}: give more text, or fewer or shorter sequences."
        )
    if getattr(args, "max_steps", 1) is None and is_rank_0():
        _warn_of_few_steps(args.num_epochs, n_sequences, global_batch_size)
    limit = min(share, args.batch_size)
    micro_batch_size = max(n for n in range(1, limit + 1) if share % n == 0)
    if micro_batch_size < limit / 2 and is_rank_0():
        better = world_size * limit * max(1, round(share / limit))
        logger.warning(
            f"Each device trains on {share} sequences per step in micro-batches of only "
            f"{micro_batch_size}, because no larger number up to {limit} divides {share}: "
            f"--global-batch-size {better} allows {limit}."
        )
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

"""Documents -> tokens: tokenized once, written to one file, and memory-mapped from then on."""

import argparse
import hashlib
import json
import logging
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from common.cli import InputError
from common.data.dataset import Sequences
from common.data.sources import find_source
from common.storage import cached_folder

logger = logging.getLogger(__name__)

CACHE_VERSION = 1  # raise it when the same input gives other sequences
DOCUMENTS_PER_BATCH = 256


def load_sequences(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, seq_length: int
) -> tuple[Sequences, Sequences]:
    """Return the training and the evaluation sequences of args.dataset_name.

    The documents are tokenized and concatenated in order, with the end-of-text token after each
    document, and cut into sequences of seq_length tokens; a shorter rest is dropped. The result
    does not depend on args.num_workers. It is cached below HF_HOME.

    Raises InputError for an unknown data set or column, or a corpus shorter than one sequence.
    """
    source = find_source(args.dataset_name, args.dataset_subset, args.text_column)
    encoding = (tokenizer.eos_token_id, _tokenizer_rules(tokenizer))

    def fill(folder: Path) -> None:
        start = time.perf_counter()
        for split, documents in zip(("train", "evaluation"), source.load(), strict=True):
            pack_documents(folder / split, documents, tokenizer, args.num_workers)
        logger.info("tokenized %s in %.1f s", args.dataset_name, time.perf_counter() - start)

    key = (CACHE_VERSION, source.fingerprint, encoding, seq_length)
    folder = cached_folder("packed-blocks", key, fill)
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
    little-endian. Data workers encode batches of documents, and DataLoader keeps their order.
    """
    dtype = np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")
    batches = DataLoader(
        documents,
        batch_size=DOCUMENTS_PER_BATCH,
        collate_fn=_Encode(tokenizer),
        num_workers=num_workers,
        generator=torch.Generator(),  # the global one must be the same if the tokens are cached
    )
    digest, n_tokens, n_bytes = hashlib.sha256(), 0, 0
    with path.with_suffix(".bin").open("wb") as file:
        for tokens, size in batches:
            content = tokens.numpy().astype(dtype).tobytes()
            file.write(content)
            digest.update(content)
            n_tokens, n_bytes = n_tokens + len(tokens), n_bytes + size
    facts = {"dtype": dtype.str, "tokens": n_tokens, "bytes": n_bytes}
    facts["digest"] = digest.hexdigest()[:16]
    path.with_suffix(".json").write_text(json.dumps(facts))


class _Encode:
    """Turns rows into (tokens: int32 [n], number of UTF-8 bytes), in a data worker."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __call__(self, rows: list[dict[str, str]]) -> tuple[torch.Tensor, int]:
        texts = [row["text"] for row in rows if row["text"]]
        if not texts:
            return torch.zeros(0, dtype=torch.int32), 0
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        eos = [self.tokenizer.eos_token_id]
        tokens = np.concatenate([np.array(ids + eos, dtype=np.int32) for ids in encoded])
        return torch.from_numpy(tokens), sum(len(text.encode()) for text in texts)

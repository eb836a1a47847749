"""Documents -> one long line of tokens on the disk."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

DOCUMENTS_PER_BATCH = 256


def tokenizer_rules(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return all that determines what a tokenizer makes of a text."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str()
    return repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())))


def pack_documents(
    path: Path,
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    num_workers: int,
) -> None:
    """Write all tokens of the documents to path.bin and what is to be known of them to path.json.

    documents: rows with a "text", in order; each gets an end-of-text token after it, empty ones
    are left out. The file is the same for every num_workers: they take batches of documents in
    turn, and what they return is put back in order. uint16 or uint32, little-endian.
    """
    dtype = np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")
    batches = DataLoader(
        documents,
        batch_size=DOCUMENTS_PER_BATCH,
        collate_fn=_Encode(tokenizer),
        num_workers=num_workers,
        # Its own: a run that finds the tokens in the cache must see the same random numbers.
        generator=torch.Generator(),
    )
    digest, n_tokens, n_bytes = hashlib.sha256(), 0, 0
    with path.with_suffix(".bin").open("wb") as file:
        for tokens, size in batches:
            content = tokens.numpy().astype(dtype).tobytes()
            file.write(content)
            digest.update(content)
            n_tokens, n_bytes = n_tokens + len(tokens), n_bytes + size
    facts = {
        "dtype": dtype.str,
        "tokens": n_tokens,
        "bytes": n_bytes,
        "digest": digest.hexdigest()[:16],
    }
    path.with_suffix(".json").write_text(json.dumps(facts))


class _Encode:
    """Turn rows of documents into (tokens [n] int32, bytes of UTF-8); runs in the workers."""

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

"""Documents -> tokens -> sequences -> batches."""

from common.data.dataset import IGNORED, ResumableSampler, Sequences, describe_batch, split_batch
from common.data.token_cache import load_sequences

__all__ = [
    "IGNORED",
    "ResumableSampler",
    "Sequences",
    "describe_batch",
    "load_sequences",
    "split_batch",
]

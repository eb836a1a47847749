"""Checkpoints that resume a run exactly, in any chapter and on any number of ranks."""

from common.checkpoint.manifest import check_finite, find_checkpoint, fixed_settings
from common.checkpoint.save_load import load_checkpoint, save_checkpoint

__all__ = [
    "check_finite",
    "find_checkpoint",
    "fixed_settings",
    "load_checkpoint",
    "save_checkpoint",
]

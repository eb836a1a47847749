"""Checkpoints that a thread writes while the training goes on; async-checkpoint.diff uses them."""

import argparse
import atexit
import concurrent.futures
import datetime
import logging
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from common import checkpoint
from common.ranks import is_rank_0

logger = logging.getLogger(__name__)
LAST_WRITE_S = 60  # that an exit waits for a checkpoint; other ranks may be gone


class Checkpoints(checkpoint.Checkpoints):
    """Checkpoints whose `save` returns when all tensors are copied to host memory.

    A thread writes the copy. It talks to the other ranks in its own gloo group: in the default
    group, its messages could not be told from those of the training. A checkpoint counts as
    complete, and `newest` names it, from the next `save` or `finish` on.
    """

    def __init__(self, args: argparse.Namespace, run_dir: Path, settings: dict) -> None:
        super().__init__(args, run_dir, settings)
        # How long a rank waits for the other ranks to write their files.
        timeout = datetime.timedelta(seconds=args.dist_timeout)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        # A GPU copies several times as fast to pinned memory. Pinning is slow, so the memory is
        # used again. In PyTorch 2.11, DefaultStager can copy only once:
        # https://github.com/pytorch/pytorch/issues/183413.
        self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self._writing: tuple[Path, concurrent.futures.Future] | None = None
        atexit.register(self._finish_alone)  # after an error elsewhere

    def save(self, *args: object) -> None:
        """Save, after the checkpoint before is complete; see `finish` for what it raises."""
        self.finish()
        super().save(*args)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete; raises what `save` would raise."""
        if self._writing is not None:
            (folder, future), self._writing = self._writing, None
            self._complete(folder, future.result)

    def _write(self, content: dict, folder: Path) -> None:
        future = dcp.async_save(
            content,
            storage_writer=checkpoint.writer_of(folder),
            process_group=self._group,
            async_stager=self._stager,
        )
        self._writing = folder, future

    def _finish_alone(self) -> None:
        """At exit, wait for the checkpoint that is being written, and note it if it is complete."""
        if self._writing is None:
            return
        folder, future = self._writing
        if not future.done():
            logger.info("waiting until the checkpoint is written")
        done, _ = concurrent.futures.wait([future], LAST_WRITE_S)
        if done and future.exception() is None and is_rank_0():
            self._commit(folder)

"""Checkpoints that are written while the training goes on."""

import datetime
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.checkpoint import collect_content, write_content


class AsyncCheckpoints:
    """Called like save_checkpoint, it returns as soon as all tensors are copied to host memory.

    A thread writes the copy, as save_checkpoint does: until its last file is complete, the
    checkpoint before it stays in force. It talks to the other ranks through a gloo group of its
    own: in the default group its messages and those of the training would wait for each other.

    The copy stays in host memory between checkpoints, for the next one. All ranks must call this.

    timeout_s: seconds that a rank waits for the others to have written their parts.
    """

    def __init__(self, timeout_s: int) -> None:
        timeout = datetime.timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._on_gpu = torch.cuda.is_available()
        # Not DefaultStager, which in PyTorch 2.11 can copy only once, but what it copies with:
        # https://github.com/pytorch/pytorch/issues/183413. From a GPU a copy to pinned memory is
        # several times as fast.
        self._stager = StateDictStager(pin_memory=self._on_gpu, share_memory=False)
        gpu = torch.cuda.current_device() if self._on_gpu else None
        self._thread = ThreadPoolExecutor(max_workers=1, initializer=_own_stream, initargs=(gpu,))
        self._writing: Future | None = None

    def __call__(
        self,
        run_dir: Path,
        model: nn.Module,
        optimizer: Optimizer,
        lr_scheduler: LRScheduler,
        state: dict,
        training: dict[str, object],
        keep: int,
    ) -> None:
        """Copy what save_checkpoint saves, and have it written; waits for the one before it.

        Raises InputError if the one before it could not be written.
        """
        self._wait()
        content = self._copy(collect_content(model, optimizer, lr_scheduler, state))
        self._writing = self._thread.submit(
            write_content, run_dir, content, training, keep, self._group
        )

    def _copy(self, content: dict) -> dict:
        # From a GPU one tensor after the other, without the host in between.
        copied = self._stager.stage(content, non_blocking=self._on_gpu)
        if self._on_gpu:
            torch.cuda.synchronize()  # only now the host has them: the thread reads them at once
        return copied

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. Raises InputError if it is not written."""
        self._wait()
        self._thread.shutdown()
        self._stager.close()

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()


def _own_stream(gpu: int | None) -> None:
    """In the thread: this rank's GPU, not the first, and no waiting for the training's kernels."""
    if gpu is not None:
        torch.cuda.set_device(gpu)
        torch.cuda.set_stream(torch.cuda.Stream())

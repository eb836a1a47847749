"""Save checkpoints while the training continues."""

import datetime
import logging
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.checkpoint.save_load import collect_content, write_content
from common.cli import InputError

logger = logging.getLogger(__name__)


class AsyncCheckpoints:
    """Call this like save_checkpoint: it returns when all tensors are copied to host memory.

    A thread then writes the copy as save_checkpoint does. The thread talks to the other ranks in
    its own gloo group: in the default group, its messages could not be told from those of the
    training. All ranks must make and call this.

    If that fails, each rank logs it at once and sends itself SIGUSR1. As after Slurm's signal, the
    ranks then stop together, the next time they log metrics. There they call this again, which
    raises.

    timeout_s: how long a rank waits for the other ranks to write their files, in seconds.
    """

    def __init__(self, timeout_s: int) -> None:
        timeout = datetime.timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        # A GPU copies several times as fast to pinned memory. Pinning is slow, so the memory is
        # used again. In PyTorch 2.11, DefaultStager can copy only once:
        # https://github.com/pytorch/pytorch/issues/183413.
        self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = ThreadPoolExecutor(max_workers=1, initializer=_own_stream, initargs=(gpu,))
        self._writing: Future | None = None

    def __call__(
        self,
        run_dir: Path,
        model: nn.Module,
        optimizer: Optimizer,
        lr_scheduler: LRScheduler,
        state: dict,
        settings: dict[str, object],
        keep: int,
    ) -> None:
        """Copy what save_checkpoint saves, and start to write it. Raises the last save's error."""
        self._wait()
        content = self._copy(collect_content(model, optimizer, lr_scheduler, state))
        self._writing = self._thread.submit(self._write, run_dir, content, settings, keep)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. Raises InputError if that fails."""
        self._wait()
        self._thread.shutdown()

    def _write(self, *args: object) -> None:
        try:
            write_content(*args, self._group)
        except InputError as error:  # on all ranks, though perhaps not in the same step
            logger.error("%s This run stops the next time it logs metrics.", error)
            if callable(signal.getsignal(signal.SIGUSR1)):
                signal.raise_signal(signal.SIGUSR1)
            raise

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _copy(self, content: dict) -> dict:
        # Nothing changes the other values, which are Python objects.
        tensors = {name: content[name] for name in ("model", "optimizer", "state")}
        return {**content, **self._stager.stage(tensors)}


def _own_stream(gpu: int | None) -> None:
    """Give the thread this rank's GPU, and a stream that does not wait for training kernels."""
    if gpu is not None:
        torch.cuda.set_device(gpu)
        torch.cuda.set_stream(torch.cuda.Stream())

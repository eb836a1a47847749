"""Data workers of a rank that handles stop signals; workers.diff uses it."""

import atexit
import multiprocessing
import signal

from common.launch import signals_to_handle


def ignore_stop_signals(worker: int) -> None:
    """Make a data worker ignore the signals that tell its rank to stop; the rank ends it."""
    for number in signals_to_handle():
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def end_data_workers() -> None:
    """Kill the workers of a rank that exits: they ignore the signal that would end them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler raises for a dead data worker
    for worker in multiprocessing.active_children():
        worker.kill()

"""Log the share of all weights that each training step changes.

python 05-mixed-precision/log_changed.py 05-mixed-precision/train_llm.py --param-dtype bfloat16

It runs the given script with its arguments, and adds `share_changed` to its metrics.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from common import distributed
from common.cli import InputError
from common.tracker import Tracker

from given_script import run_given_script

weights_before: list[torch.Tensor] = []
share_changed = 0.0


def local_weights(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all weights, or this rank's shards of them."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]


@torch.no_grad()
def copy_weights(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    weights_before[:] = [weight.clone() for weight in local_weights(optimizer)]


@torch.no_grad()
def count_changed(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Set share_changed to the share of all weights that the step changed."""
    global share_changed
    counts = torch.zeros(2, dtype=torch.float64)
    for before, after in zip(weights_before, local_weights(optimizer), strict=True):
        counts[0] += (before != after).sum().cpu()
        counts[1] += before.numel()
    if dist.is_initialized():
        counts = counts.to(torch.accelerator.current_accelerator() or "cpu")
        dist.all_reduce(counts)
    share_changed = (counts[0] / counts[1]).item()


def log_changed() -> None:
    """Count in each optimizer step, and add the last count to what the script logs."""
    register_optimizer_step_pre_hook(copy_weights)
    register_optimizer_step_post_hook(count_changed)
    log = Tracker.log

    def log_with_share(tracker: Tracker, metrics: dict) -> None:
        if "loss" in metrics:
            metrics["share_changed"] = share_changed
        log(tracker, metrics)

    Tracker.log = log_with_share


def main() -> None:
    if len(sys.argv) < 2:
        raise InputError("No script to run: give one, such as 05-mixed-precision/train_llm.py.")
    run_given_script(log_changed)


if __name__ == "__main__":
    distributed.run(main)

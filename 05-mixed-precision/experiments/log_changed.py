"""Log the share of all weights that the training step before each log line has changed.

python 05-mixed-precision/experiments/log_changed.py SCRIPT --param-dtype bfloat16

It runs the given script with its arguments, and adds `share_changed` to its metrics.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from common import launch
from common.cli import RunError
from common.tracker import Tracker

from given_script import run_given_script

weights_and_copies: list[tuple[torch.Tensor, torch.Tensor]] = []


def local_weights(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all weights, or this rank's shards of them."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]


@torch.no_grad()
def copy_weights(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Copy the weights before a step, which does not wait for the GPU."""
    weights_and_copies[:] = [(weight, weight.clone()) for weight in local_weights(optimizer)]


@torch.no_grad()
def share_changed() -> float:
    """Return the share of all weights that the last step changed. All ranks must call this."""
    counts = torch.zeros(2, dtype=torch.float64)
    for weight, before in weights_and_copies:
        counts[0] += (weight != before).sum().cpu()
        counts[1] += weight.numel()
    if dist.is_initialized():
        counts = counts.to(torch.accelerator.current_accelerator() or "cpu")
        dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def log_changed() -> None:
    """Copy the weights in each optimizer step, and count when the script logs a step."""
    register_optimizer_step_pre_hook(copy_weights)
    log = Tracker.log

    def log_with_share(tracker: Tracker, metrics: dict) -> None:
        if "loss" in metrics:
            metrics["share_changed"] = share_changed()
        log(tracker, metrics)

    Tracker.log = log_with_share


def main() -> None:
    if len(sys.argv) < 2:
        raise RunError("No script to run: give one, such as 05-mixed-precision/train_llm.py.")
    run_given_script(log_changed)


if __name__ == "__main__":
    launch.run(main)

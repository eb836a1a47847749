"""Ranks: which one this process is, what rank 0 does for all, and what all of them agree on.

Two sources tell a process its rank: the environment, which a launcher or prepare_environment sets,
and the process group. What is printed asks the environment (is_rank_0), because a refused argument
must be reported before there is a group. What ranks do together asks the group
(rank_and_world_size), and a process without one is rank 0 of 1.
"""

import argparse
import os
import socket
import time
from collections.abc import Callable

import torch.distributed as dist

from common.errors import RunError

HEAD_START_S = 5.0  # how long other ranks let rank 0 report an error before they exit
# Arguments that may be another path on each node.
PATHS = ("save_dir", "checkpoint_dir", "dataset_name", "model_name", "tokenizer_name")

# --- by the environment: who prints ---


def is_rank_0() -> bool:
    """Return whether this process speaks for all; RANK alone may be left over in a shell."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def wait_for_rank_0(status: int) -> None:
    """Wait before a rank other than 0 exits with an error, so that rank 0 can report it.

    A launcher reports the rank that exits first, and then kills the others.
    """
    if status and not is_rank_0():
        time.sleep(HEAD_START_S)


# --- by the process group: what ranks do together ---


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: 0 and 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(own: dict) -> dict:
    """Return the union of all ranks' dictionaries, in the order of ranks; all must call this."""
    if not dist.is_initialized():
        return own
    of_each_rank = [None] * dist.get_world_size()
    dist.all_gather_object(of_each_rank, own)
    return {key: value for each in of_each_rank for key, value in sorted(each.items())}


def on_rank_0(action: Callable, *arguments: object) -> object:
    """Return what action(*arguments) returns on rank 0; all ranks must call this.

    If it raises a RunError there, all ranks raise it. Another exception ends rank 0 alone: the
    others wait for it in vain, until the launcher ends them.
    """
    rank, _ = rank_and_world_size()
    result = None
    if rank == 0:
        try:
            result = action(*arguments)
        except RunError as error:
            result = error
    result = gather({rank: result})[0]
    if isinstance(result, RunError):
        raise result
    return result


def check_agreement(facts: dict[str, object], remedy: str) -> None:
    """Raise RunError if a value differs from the one of rank 0; all ranks must call this.

    Also keeps the process group: all scripts that train call this before they do, at the latest
    when they load a checkpoint.
    """
    keep_process_group()
    rank, _ = rank_and_world_size()
    by_rank = gather({rank: (facts, socket.gethostname())})
    expected, host_0 = by_rank[0]
    for other, (found, host) in by_rank.items():
        for name, value in expected.items():
            if found.get(name) != value:
                raise RunError(
                    f"Rank {other} on {host} has {name} {found.get(name)}, rank 0 on {host_0} has "
                    f"{value}: {remedy}."
                )


def check_arguments(args: argparse.Namespace) -> None:
    """Raise RunError on all ranks if they have different arguments; all ranks must call this.

    With other arguments, a rank could call other collectives. Paths may differ between nodes.
    """
    given = {name: value for name, value in vars(args).items() if name not in PATHS}
    check_agreement(given, "give all nodes the same arguments")


kept_groups: list[dist.ProcessGroup] = []


def keep_process_group() -> None:
    """Let the process group, if there is one, live until the process ends.

    Otherwise DDP's would be the last reference when main() returns. To free the group, DDP waits
    for gloo's threads while it holds Python's global lock, and they may wait for that lock: the
    process would not end.
    """
    if dist.is_initialized() and dist.group.WORLD not in kept_groups:
        kept_groups.append(dist.group.WORLD)


def had_process_group() -> bool:
    """Return whether this process has kept a process group, which may be destroyed by now."""
    return bool(kept_groups)

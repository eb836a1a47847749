"""The machines that a run is on: how many ranks and how much memory each of them has."""

import os
import socket
from pathlib import Path

from common.cli import InputError
from common.record import gather, rank_and_world_size


def nodes_and_ranks() -> tuple[int, int]:
    """Return (number of machines, ranks on each); all ranks must call this.

    Raises InputError where there is one machine only, where they have different numbers of ranks,
    or where the ranks of one machine do not follow each other.
    """
    rank, _ = rank_and_world_size()
    # Two launchers on one machine are two nodes, as for torchrun: their local ranks begin at 0.
    local_ranks = gather({rank: int(os.environ["LOCAL_RANK"])})
    firsts = [rank for rank in local_ranks if local_ranks[rank] == 0]
    ends = [*firsts[1:], len(local_ranks)]
    sizes = [end - first for first, end in zip(firsts, ends, strict=True)]
    if list(local_ranks.values()) != [rank for size in sizes for rank in range(size)]:
        raise InputError(
            "--hsdp needs the ranks of a node to follow each other: start them with srun "
            "--distribution=block or mpirun --map-by slot, or leave it out."
        )
    if len(sizes) == 1:
        raise InputError("--hsdp replicates over nodes and there is one: leave it out.")
    if len(set(sizes)) > 1:
        raise InputError(
            f"--hsdp needs equally many ranks on all nodes, not {min(sizes)} here and {max(sizes)} "
            "there: start as many on each, or leave it out."
        )
    return len(sizes), sizes[0]


def check_memory(n_bytes: int, what: str) -> None:
    """Raise InputError if a machine has less memory than its ranks need together.

    n_bytes: what this rank needs. what: for, in the sentence. All ranks must call this.
    """
    rank, _ = rank_and_world_size()
    here = (socket.gethostname(), n_bytes, memory_bytes())
    needs: dict[str, int] = {}
    for host, n, memory in gather({rank: here}).values():
        needs[host] = needs.get(host, 0) + n
        if needs[host] > memory:
            raise InputError(
                f"{what} needs more than the {memory / 2**30:.0f} GiB of memory that {host} has: "
                "take more nodes or a smaller model, or leave it out."
            )


def memory_bytes() -> int:
    """Return the bytes of memory of this machine, in use or not, or of the container it is."""
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's own; "max" where there is none
    text = limit.read_text().strip() if limit.exists() else "max"
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(text), physical) if text.isdecimal() else physical

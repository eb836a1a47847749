"""Show the GPUs of all nodes in one table: utilization, power and memory.

python 03-multi-node/tools/watch_gpus.py node1 node2
python 03-multi-node/tools/watch_gpus.py node{1..4} --interval 5
python 03-multi-node/tools/watch_gpus.py --once          this machine, one table

The script runs nvidia-smi on each node over ssh. Nothing has to be installed there.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from common import cli, launch

# A GPU that waits in a collective runs a kernel that polls for data: its utilization is 100%, at 14
# to 22% of its power limit in the reports that watching.md cites.
BUSY = 95  # % utilization from which a GPU counts as busy
NEAR_IDLE = 0.3  # of the power limit, below which a busy GPU computes little or nothing
FIELDS = "name,utilization.gpu,power.draw,enforced.power.limit,memory.used,memory.total"
NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
CLEAR = "\x1b[H\x1b[J"  # move the cursor to the top and clear the terminal


class Gpu(NamedTuple):
    """What nvidia-smi says about a GPU; None where the GPU does not report a value."""

    name: str
    utilization: float | None  # %
    power: float | None  # W
    power_limit: float | None  # W
    used: float | None  # MiB of memory
    total: float | None  # MiB of memory

    def is_spinning(self) -> bool:
        """Return whether the GPU is busy at nearly idle power."""
        if None in (self.utilization, self.power, self.power_limit):
            return False
        return self.utilization >= BUSY and self.power < NEAR_IDLE * self.power_limit


def read_gpus(host: str | None, timeout: float) -> tuple[list[Gpu], str]:
    """Return the GPUs of a node and, if there are none, why. host: None for this machine."""
    ssh = ("ssh", "-o", "BatchMode=yes", host) if host else ()  # never asks for a password
    try:
        done = subprocess.run(
            [*ssh, *NVIDIA_SMI],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return [], f"no answer within {timeout:g} s"
    except OSError as error:  # this machine has no ssh or no nvidia-smi
        return [], str(error)
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    # A login can print other lines, too.
    gpus = [Gpu(row[0], *map(number, row[1:])) for row in rows if len(row) == len(Gpu._fields)]
    errors = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
    return gpus, "" if gpus else errors[-1]


def number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:  # [N/A], [Not Supported]
        return None


def table(readings: dict[str, tuple[list[Gpu], str]], since: dict[str, float]) -> str:
    """Return a line for each node.

    since: by node, when its GPUs became busy near idle power; this call keeps it up to date.
    """
    rows = [("node", "GPUs", "utilization, %", "power, W", "memory, MiB", "")]
    for node, (gpus, error) in readings.items():
        spinning = [str(index) for index, gpu in enumerate(gpus) if gpu.is_spinning()]
        if spinning:
            now = time.monotonic()
            seconds = now - since.setdefault(node, now)
            mark = f"busy near idle power for {seconds:.0f} s: GPU {' '.join(spinning)}"
        else:
            mark = ""
            since.pop(node, None)
        if gpus:
            names, utilization, power, limit, used, total = zip(*gpus, strict=True)
            devices = f"{len(gpus)} x {' and '.join(sorted(set(names)))}"
            cells = (span(utilization), f"{span(power)} of {span(limit)}")
            rows.append((node, devices, *cells, f"{span(used)} of {span(total)}", mark))
        else:
            rows.append((node, "none", "", "", "", error))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def span(values: list[float | None]) -> str:
    """Return the lowest and the highest value of a node's GPUs."""
    known = [f"{value:.0f}" for value in sorted(value for value in values if value is not None)]
    return "-".join(dict.fromkeys([*known[:1], *known[-1:]])) or "?"


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("hosts", nargs="*", help="names as for ssh (default: this machine)")
    add("--interval", default=2.0, type=cli.at_least(0.2), help="seconds between two tables")
    add("--timeout", default=5.0, type=cli.at_least(1.0), help="seconds to wait for a node")
    add("--once", action="store_true", help="print one table; status 1 if a node shows no GPU")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    hosts, since = args.hosts or [None], {}
    names = args.hosts or ["this machine"]
    read = partial(read_gpus, timeout=args.timeout)
    # Ctrl-C is the normal way to stop this script.
    with contextlib.suppress(KeyboardInterrupt), ThreadPoolExecutor(len(hosts)) as pool:
        while True:
            readings = dict(zip(names, pool.map(read, hosts), strict=True))
            if args.once:
                print(table(readings, since))
                sys.exit(0 if all(gpus for gpus, _ in readings.values()) else 1)
            top = CLEAR if sys.stdout.isatty() else ""
            print(f"{top}{time.strftime('%H:%M:%S')}\n{table(readings, since)}\n", flush=True)
            time.sleep(args.interval)


if __name__ == "__main__":
    launch.run(main)

"""Show the GPUs of all nodes in one table: utilization, power, memory, processes.

python 03-multi-node/watch_gpus.py node1 node2
python 03-multi-node/watch_gpus.py node[1-4] --interval 5
python 03-multi-node/watch_gpus.py --once          this machine, one table

The script sends the functions below the first banner to each node over ssh, and the node's python3
runs them. Nothing has to be installed there. For a node without GPUs the table shows its CPUs.
"""
# The functions that are sent use os and not pathlib, because Python 3.6 has no Path.readlink.
# ruff: noqa: PTH110, PTH115, PTH119, PTH123, PTH207

import argparse
import inspect
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

from common import cli, launch
from common.cli import RunError

# A GPU that waits in a collective runs a kernel that polls for data: its utilization is 100%, at 14
# to 22% of its power limit in the reports that watching.md cites.
BUSY = 95  # % utilization from which a GPU counts as busy
NEAR_IDLE = 0.3  # of the power limit, below which a busy GPU computes little or nothing
FALLEN = 0.5  # of the node's highest effort so far, below which its effort has fallen
WORKING = 10  # % of the cores that a node without GPUs must have used before its effort can fall
HOST = r"(\w[\w.-]*@)?\w[\w.:-]*(\[\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*\][\w.-]*)?"
CLEAR = "\x1b[H\x1b[J"  # move the cursor to the top and clear the terminal

# --- what runs on the nodes, with Python 3.6 or later and without this repository ---


def read_nvml() -> list:
    """Return a dictionary for each GPU, from NVIDIA's library. Raises if it is missing.

    "busy" is in % of the last sample period, "power" and "limit" are in W, "used" and "total" in
    GiB. What a GPU does not report is None. The calls are documented at
    https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
    """
    import pynvml as nvml  # from the package nvidia-ml-py

    def ask(call, *args):
        try:
            return call(*args)
        except nvml.NVMLError:  # not supported: utilization in MIG mode, power on some cards
            return None

    nvml.nvmlInit()
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        name = nvml.nvmlDeviceGetName(gpu)
        rates = ask(nvml.nvmlDeviceGetUtilizationRates, gpu)
        # Version 2 does not count what the driver reserves, like nvidia-smi.
        version = [nvml.nvmlMemory_v2] if hasattr(nvml, "nvmlMemory_v2") else []
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, gpu, *version)
        memory = memory or ask(nvml.nvmlDeviceGetMemoryInfo, gpu)
        power = ask(nvml.nvmlDeviceGetPowerUsage, gpu)  # in mW, since Ampere the mean of a second
        limit = ask(nvml.nvmlDeviceGetEnforcedPowerLimit, gpu)
        processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses, gpu)
        reading = {"name": name.decode() if isinstance(name, bytes) else name}
        reading["busy"] = rates and rates.gpu
        reading["power"], reading["limit"] = power and power / 1000, limit and limit / 1000
        reading["used"] = memory and memory.used / 2**30
        reading["total"] = memory and memory.total / 2**30
        reading["processes"] = None if processes is None else len(processes)
        gpus.append(reading)
    return gpus


def read_nvidia_smi() -> list:
    """Return the same as read_nvml, from the program nvidia-smi that comes with the driver."""
    import subprocess

    def query(what):
        command = ["nvidia-smi", "--query-" + what, "--format=csv,noheader,nounits"]
        lines = subprocess.check_output(command, stderr=subprocess.STDOUT).decode().splitlines()
        return [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]

    def number(cell, unit=1):
        try:
            return float(cell) / unit
        except ValueError:  # [N/A], [Not Supported], [Unknown Error]
            return None

    fields = "uuid,name,utilization.gpu,power.draw,enforced.power.limit,memory.used,memory.total"
    rows = query("gpu=" + fields)
    uuids = [row[0] for row in query("compute-apps=gpu_uuid,pid")]
    gpus = []
    for uuid, name, busy, power, limit, used, total in rows:
        reading = {"name": name, "busy": number(busy)}
        reading["power"], reading["limit"] = number(power), number(limit)
        reading["used"], reading["total"] = number(used, 1024), number(total, 1024)  # from MiB
        reading["processes"] = uuids.count(uuid)
        gpus.append(reading)
    return gpus


def read_cpu() -> dict:
    """Return the number of cores, the load, the memory in GiB, and the number of Python processes.

    "busy" is the share of all cores, in %, that these processes use.
    """
    import glob
    import os
    import time

    def ticks():
        found = {}
        for folder in glob.glob("/proc/[0-9]*"):
            try:
                # The nodes of local_cluster.sh are one machine, with a network namespace each.
                same = os.readlink(folder + "/ns/net") == os.readlink("/proc/self/ns/net")
                name = os.path.basename(os.readlink(folder + "/exe"))
                with open(folder + "/stat") as file:
                    stat = file.read().rpartition(")")[2].split()
            except OSError:  # it has ended, or belongs to another user
                continue
            if same and name.startswith("python") and int(folder[6:]) not in own:
                found[folder] = int(stat[11]) + int(stat[12])  # user and system time
        return found

    own = (os.getpid(), os.getppid())  # without ssh, the parent is the watching script
    before, start = ticks(), time.time()
    time.sleep(0.5)
    after, seconds = ticks(), time.time() - start
    used = sum(after[p] - before.get(p, after[p]) for p in after) / os.sysconf("SC_CLK_TCK")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = {"cores": cores, "load": os.getloadavg()[0], "processes": len(after)}
    cpu["busy"] = 100 * used / seconds / cores
    cpu["total"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cpu["used"] = None
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as file:
            kib = dict(line.split(":") for line in file)
        cpu["used"] = cpu["total"] - int(kib["MemAvailable"].split()[0]) / 2**20
    return cpu


def read_node() -> dict:
    """Return {"gpus": [...]}, or {"cpu": {...}, "why": ...} if no GPU can be read."""
    import shutil
    import subprocess

    gpus, why = [], "no GPU"
    try:
        gpus = read_nvml()
    except Exception:  # no package nvidia-ml-py, or no driver
        if shutil.which("nvidia-smi"):
            try:
                gpus = read_nvidia_smi()
            except subprocess.CalledProcessError as error:
                said = error.output.decode().strip() or str(error)
                why = "nvidia-smi: " + said.splitlines()[0]
    return {"gpus": gpus} if gpus else {"cpu": read_cpu(), "why": why}


# --- what runs on this machine ---

SENT = "\n".join(map(inspect.getsource, (read_nvml, read_nvidia_smi, read_cpu, read_node)))
SENT += "\nimport json\nprint(json.dumps(read_node()))"
LOCK = threading.Lock()  # readings must not change while a table is made


class Node:
    """A machine with its own thread, which takes a reading again and again.

    reading: the last result of read_node, or None. error: why there is no reading, or "". highest:
    the highest effort so far. since: when GPUs became busy near idle power, or None.
    """

    def __init__(self, host: str | None, args: argparse.Namespace) -> None:
        self.name = host.rpartition("@")[2] if host else "this machine"
        self.timeout = args.timeout
        self.command = [sys.executable, "-"]
        if host:
            config = ["-F", str(args.ssh_config)] if args.ssh_config else []
            ssh = ["ssh", *config, "-o", "BatchMode=yes", host]  # never asks for a password
            self.command = [*ssh, shlex.quote(args.python) + " -"]
        self.process: subprocess.Popen | None = None
        self.reading: dict | None = None
        self.error = ""
        self.highest = 0.0
        self.since: float | None = None

    def watch(self, interval: float) -> None:
        while True:
            start = time.monotonic()
            self.ask()
            time.sleep(max(0.0, start + interval - time.monotonic()))

    def ask(self) -> None:
        """Take a reading, within the timeout."""
        pipe = subprocess.PIPE
        try:
            # In a session of its own, so that only this script receives Ctrl-C.
            self.process = subprocess.Popen(
                self.command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
            output, errors = self.process.communicate(SENT.encode(), timeout=self.timeout)
            status = self.process.returncode
            if status == 0:  # a login can print lines before the reading
                self.take(json.loads(output.splitlines()[-1]))
                return
            lines = errors.decode(errors="replace").strip().splitlines()
            self.take(None, lines[-1] if lines else f"status {status}")
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.take(None, f"no answer within {self.timeout:g} s")
        except (OSError, ValueError, IndexError) as error:  # no ssh, or not the expected answer
            self.take(None, f"no reading ({error})")

    def take(self, reading: dict | None, error: str = "") -> None:
        """Remember a reading, or why there is none."""
        with LOCK:
            self.reading, self.error = reading, error
            self.highest = max(self.highest, self.effort())
            if not self.spinning():
                self.since = None
            elif self.since is None:
                self.since = time.monotonic()

    def gpus(self) -> list[dict]:
        return (self.reading or {}).get("gpus", [])

    def spinning(self) -> list[int]:
        """Return the numbers of the GPUs that are busy at nearly idle power."""
        return [
            number
            for number, gpu in enumerate(self.gpus())
            if None not in (gpu["busy"], gpu["power"], gpu["limit"])
            and gpu["busy"] >= BUSY
            and gpu["power"] < NEAR_IDLE * gpu["limit"]
        ]

    def effort(self) -> float:
        """Return the power of all GPUs in W or, without GPUs, the use of all cores in %."""
        cpu = (self.reading or {}).get("cpu", {"busy": 0.0})
        return sum(gpu["power"] or 0.0 for gpu in self.gpus()) or cpu["busy"]

    def has_fallen(self) -> bool:
        """Return whether the node has worked and has processes, but its effort fell by half."""
        idle = sum(NEAR_IDLE * (gpu["limit"] or 0.0) for gpu in self.gpus()) or WORKING
        devices = self.gpus() or [self.reading["cpu"]]
        running = any(device["processes"] != 0 for device in devices)
        return running and self.highest > idle and self.effort() < FALLEN * self.highest


def table(nodes: list[Node], every_gpu: bool) -> str:
    """Return the table of all nodes, and below it a line for each suspicion."""
    with LOCK:
        return "\n".join([*rows(nodes, every_gpu), *suspicions(nodes)])


def rows(nodes: list[Node], every_gpu: bool) -> list[str]:
    found = [("node", "devices", "utilization, %", "power, W", "memory, GiB", "processes", "")]
    for node in nodes:
        spinning = node.spinning()
        if node.reading is None:
            found.append((node.name, f"not reached: {node.error}" if node.error else "asking"))
        elif "cpu" in node.reading:
            cpu = node.reading["cpu"]
            devices, load = f"{cpu['cores']} CPU cores", f"load {cpu['load']:.2f}"
            found.append((node.name, devices, *cells([cpu], load), node.reading["why"]))
        elif every_gpu:
            for number, gpu in enumerate(node.gpus()):
                mark = "busy near idle power" if number in spinning else ""
                found.append((node.name, f"{number}: {gpu['name']}", *cells([gpu]), mark))
        else:
            names = " and ".join(sorted({gpu["name"] for gpu in node.gpus()}))
            mark = f"{len(spinning)} busy near idle power" if spinning else ""
            found.append((node.name, f"{len(node.gpus())} x {names}", *cells(node.gpus()), mark))
    # The second cell of a row with two cells may be wider than its column.
    full = [row for row in found if len(row) > 2]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    widths[0] = max(len(row[0]) for row in found)
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in found]


def cells(devices: list[dict], load: str = "") -> list[str]:
    """Return the cells of a row: for several devices the mean, and in brackets min or max."""

    def show(key: str, digits: int = 0, extreme=None) -> str:
        values = [device[key] for device in devices if device[key] is not None]
        if not values:
            return "?"
        mean = f"{sum(values) / len(values):.{digits}f}"
        if len(devices) == 1 or extreme is None:
            return mean
        return f"{mean} ({extreme.__name__} {extreme(values):.{digits}f})"

    known = [device["processes"] for device in devices if device["processes"] is not None]
    return [
        show("busy", 0, min),
        load or f"{show('power', 0, min)} of {show('limit')}",
        f"{show('used', 1, max)} of {show('total', 1)}",
        str(sum(known)) if known else "?",
    ]


def suspicions(nodes: list[Node]) -> list[str]:
    """Return a line if GPUs are busy near idle power, and one if the effort fell on all nodes."""
    lines = []
    if spinning := [node for node in nodes if node.spinning()]:
        seconds = time.monotonic() - min(node.since for node in spinning)
        where = ", ".join(
            f"{len(node.spinning())} of {len(node.gpus())} on {node.name}" for node in spinning
        )
        # The GPUs in a collective may be waiting for a GPU that does something else.
        others = []
        for node in nodes:
            spins = node.spinning()
            for number, gpu in enumerate(node.gpus()):
                idle = gpu["busy"] is not None and gpu["busy"] < BUSY
                if gpu["processes"] and number not in spins and (spins or idle):
                    others.append(f"GPU {number} of {node.name}")
        lines.append(
            f"Busy near idle power for {seconds:.0f} s: {where}. A collective that waits for a "
            "rank looks like this" + (f"; not waiting: {', '.join(others)}." if others else ".")
        )
    answering = [node for node in nodes if node.reading]
    if answering and all(node.has_fallen() for node in answering):
        lines.append(
            f"Every node that answers is below {FALLEN:.0%} of its highest power or CPU use so "
            "far, and its processes still run: a save, an evaluation, or a hang."
        )
    return lines


def expand(words: list[str]) -> list[str]:
    """Return the hosts in words such as node1, user@node1, node[1-3,7] or node1,node2.

    Raises RunError for a word that is not a host.
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:\[[^]]*\]|[^,])+", ",".join(words)):
        head, _, rest = part.partition("[")
        ranges, _, tail = rest.partition("]")
        found = [] if ranges else [part]
        if re.fullmatch(HOST, part):
            for first, last in re.findall(r"(\d+)-?(\d*)", ranges):
                numbers = range(int(first), int(last or first) + 1)
                found += [f"{head}{number:0{len(first)}}{tail}" for number in numbers]
        if not found or not re.fullmatch(HOST, part):
            raise RunError(f"{part!r} is not a host: give names as for ssh, or node[1-4].")
        hosts += found
    return list(dict.fromkeys(hosts))


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("hosts", nargs="*", help="names as for ssh, or node[1-4] (default: this machine)")
    add("-F", "--ssh-config", type=Path, help="configuration file for ssh")
    add("--interval", default=2.0, type=cli.at_least(0.2), help="seconds between two readings")
    add("--timeout", default=5.0, type=cli.at_least(1.0), help="seconds to wait for a node")
    add("--once", action="store_true", help="print one table; status 1 if a node did not answer")
    add("--gpus", action="store_true", help="print a line for each GPU, not for each node")
    add("--python", default="python3", help="Python on the nodes, preferably with nvidia-ml-py")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    if args.ssh_config and not args.ssh_config.is_file():
        raise RunError(f"-F {args.ssh_config} is not a file: give a configuration file for ssh.")
    nodes = [Node(host, args) for host in expand(args.hosts) or [None]]
    work = (lambda node: node.ask()) if args.once else (lambda node: node.watch(args.interval))
    threads = [threading.Thread(target=work, args=(node,), daemon=True) for node in nodes]
    try:
        for thread in threads:
            thread.start()
        if args.once:
            for thread in threads:
                thread.join()
            print(table(nodes, args.gpus))
            sys.exit(0 if all(node.reading for node in nodes) else 1)
        while True:
            top = CLEAR if sys.stdout.isatty() else ""
            print(f"{top}{time.strftime('%H:%M:%S')}\n{table(nodes, args.gpus)}\n", flush=True)
            time.sleep(args.interval)
    except KeyboardInterrupt:
        pass  # Ctrl-C is the normal way to stop this script
    finally:
        for node in nodes:
            if node.process and node.process.poll() is None:
                node.process.kill()


if __name__ == "__main__":
    launch.run(main)

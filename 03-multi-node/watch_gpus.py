"""Watch the GPUs of a whole cluster in one table: utilisation, power, memory, processes.

python 03-multi-node/watch_gpus.py node1 node2
python 03-multi-node/watch_gpus.py node[1-4] --interval 5
python 03-multi-node/watch_gpus.py --once          this machine, one table

The functions below the first banner are sent to each node over ssh, where a plain python3 runs
them: nothing has to be installed there. A node without GPUs shows its CPUs.
"""
# What is sent does without pathlib, as os.readlink is older than Path.readlink.
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
from common.cli import InputError

# A GPU that waits in a collective runs a kernel that only looks whether data has come: 100%
# utilised, at 14 to 22% of its power limit in the reports that watching.md names.
BUSY = 95  # % utilisation from which a GPU counts as busy
NEAR_IDLE = 0.3  # of the power limit, below which a busy GPU computes little or nothing
FALLEN = 0.5  # of the most that was seen, below which a node's power has fallen
WORKING = 10  # % of the cores; a node without GPUs that never used as much cannot fall
HOST = r"(\w[\w.-]*@)?\w[\w.:-]*(\[\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*\][\w.-]*)?"
CLEAR = "\x1b[H\x1b[J"  # the cursor to the top, and the terminal empty from there

# --- what runs on the nodes: Python 3.6 will do, and nothing of this repository ---


def read_nvml() -> list:
    """Return a dictionary for each GPU, from NVIDIA's library; raises where there is none.

    In % of the last sample period, W, GiB; None is what a GPU does not tell. The calls:
    https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
    """
    import pynvml as nvml  # the package is called nvidia-ml-py

    def ask(call, *args):
        try:
            return call(*args)
        except nvml.NVMLError:  # Not Supported: utilisation under MIG, power of some cards
            return None

    nvml.nvmlInit()
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        name = nvml.nvmlDeviceGetName(gpu)
        rates = ask(nvml.nvmlDeviceGetUtilizationRates, gpu)
        # Version 2 leaves out what the driver reserves, as nvidia-smi does.
        version = [nvml.nvmlMemory_v2] if hasattr(nvml, "nvmlMemory_v2") else []
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, gpu, *version)
        memory = memory or ask(nvml.nvmlDeviceGetMemoryInfo, gpu)
        power = ask(nvml.nvmlDeviceGetPowerUsage, gpu)  # mW, since Ampere the mean of a second
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
    """Return the same as read_nvml, from the program that comes with the driver."""
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
    """Return the load, the memory in GiB, how many Python processes there are, what % they use."""
    import glob
    import os
    import time

    def ticks():
        found = {}
        for folder in glob.glob("/proc/[0-9]*"):
            try:
                # The nodes of local_cluster.sh share one machine, but no network.
                same = os.readlink(folder + "/ns/net") == os.readlink("/proc/self/ns/net")
                name = os.path.basename(os.readlink(folder + "/exe"))
                with open(folder + "/stat") as file:
                    stat = file.read().rpartition(")")[2].split()
            except OSError:  # it has ended, or is somebody else's
                continue
            if same and name.startswith("python") and int(folder[6:]) not in own:
                found[folder] = int(stat[11]) + int(stat[12])  # user and system time
        return found

    own = (os.getpid(), os.getppid())  # the second is the watcher, where there is no ssh
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
    """Return {"gpus": [...]}, or {"cpu": {...}, "why": ...} where no GPU can be read."""
    import shutil
    import subprocess

    gpus, why = [], "no GPU"
    try:
        gpus = read_nvml()
    except Exception:  # no such package, or no driver
        if shutil.which("nvidia-smi"):
            try:
                gpus = read_nvidia_smi()
            except subprocess.CalledProcessError as error:
                said = error.output.decode().strip() or str(error)
                why = "nvidia-smi: " + said.splitlines()[0]
    return {"gpus": gpus} if gpus else {"cpu": read_cpu(), "why": why}


# --- what runs here ---

SENT = "\n".join(map(inspect.getsource, (read_nvml, read_nvidia_smi, read_cpu, read_node)))
SENT += "\nimport json\nprint(json.dumps(read_node()))"


class Node:
    """A machine that is asked again and again, in a thread of its own: a silent one delays nobody.

    reading: what read_node returned last, or None. error: why there is none, "" before the first.
    most: the highest effort seen. since: the time from which on GPUs spin, or None.
    """

    def __init__(self, host: str | None, args: argparse.Namespace) -> None:
        self.name = host.rpartition("@")[2] if host else "this machine"
        self.timeout = args.timeout
        self.command = [sys.executable, "-"]
        if host:
            config = ["-F", str(args.ssh_config)] if args.ssh_config else []
            ssh = ["ssh", *config, "-o", "BatchMode=yes", host]  # a password cannot be typed here
            self.command = [*ssh, shlex.quote(args.python) + " -"]
        self.process: subprocess.Popen | None = None
        self.reading: dict | None = None
        self.error = ""
        self.most = 0.0
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
            # In a session of its own, so that Ctrl-C reaches this script alone.
            self.process = subprocess.Popen(
                self.command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
            said, complaint = self.process.communicate(SENT.encode(), timeout=self.timeout)
            status = self.process.returncode
            if status == 0:  # a login may print lines of its own before
                self.take(json.loads(said.splitlines()[-1]))
                return
            lines = complaint.decode(errors="replace").strip().splitlines()
            self.take(None, lines[-1] if lines else f"status {status}")
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.take(None, f"no answer within {self.timeout:g} s")
        except (OSError, ValueError, IndexError) as error:  # no ssh here, no answer of ours
            self.take(None, f"no reading ({error})")

    def take(self, reading: dict | None, error: str = "") -> None:
        """Remember a reading, or why there is none."""
        self.reading, self.error = reading, error
        self.most = max(self.most, self.effort())
        if not self.spinning():
            self.since = None
        elif self.since is None:
            self.since = time.monotonic()

    def gpus(self) -> list[dict]:
        return (self.reading or {}).get("gpus", [])

    def spinning(self) -> list[int]:
        """Return the numbers of the GPUs that are busy at a power near that of doing nothing."""
        return [
            number
            for number, gpu in enumerate(self.gpus())
            if None not in (gpu["busy"], gpu["power"], gpu["limit"])
            and gpu["busy"] >= BUSY
            and gpu["power"] < NEAR_IDLE * gpu["limit"]
        ]

    def effort(self) -> float:
        """Return the power of all GPUs in W; on a node without, the use of its cores in %."""
        cpu = (self.reading or {}).get("cpu", {"busy": 0.0})
        return sum(gpu["power"] or 0.0 for gpu in self.gpus()) or cpu["busy"]

    def has_fallen(self) -> bool:
        """Whether it has worked, still has processes, and makes less than half of the effort."""
        idle = sum(NEAR_IDLE * (gpu["limit"] or 0.0) for gpu in self.gpus()) or WORKING
        devices = self.gpus() or [self.reading["cpu"]]
        alive = any(device["processes"] != 0 for device in devices)
        return alive and self.most > idle and self.effort() < FALLEN * self.most


def table(nodes: list[Node], every_gpu: bool) -> str:
    """Return the table of all nodes, and below it a line for each thing that looks wrong."""
    rows = [("node", "devices", "utilisation, %", "power, W", "memory, GiB", "processes", "")]
    for node in nodes:
        spinning = node.spinning()
        if node.reading is None:
            rows.append((node.name, f"not reached: {node.error}" if node.error else "asking"))
        elif "cpu" in node.reading:
            cpu = node.reading["cpu"]
            devices, load = f"{cpu['cores']} CPU cores", f"load {cpu['load']:.2f}"
            rows.append((node.name, devices, *cells([cpu], load), node.reading["why"]))
        elif every_gpu:
            for number, gpu in enumerate(node.gpus()):
                mark = "busy near idle power" if number in spinning else ""
                rows.append((node.name, f"{number}: {gpu['name']}", *cells([gpu]), mark))
        else:
            names = " and ".join(sorted({gpu["name"] for gpu in node.gpus()}))
            mark = f"{len(spinning)} busy near idle power" if spinning else ""
            rows.append((node.name, f"{len(node.gpus())} x {names}", *cells(node.gpus()), mark))
    # A row of two cells is a sentence, for which no column is made wider.
    full = [row for row in rows if len(row) > 2]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    widths[0] = max(len(row[0]) for row in rows)
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *suspicions(nodes)])


def cells(devices: list[dict], load: str = "") -> list[str]:
    """Return the cells of one device, or of several: the mean, and what is farthest from it."""

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
    """Return a line for GPUs that spin, and one for an effort that fell on all nodes."""
    lines = []
    if spinning := [node for node in nodes if node.spinning()]:
        seconds = time.monotonic() - min(node.since for node in spinning)
        where = ", ".join(
            f"{len(node.spinning())} of {len(node.gpus())} on {node.name}" for node in spinning
        )
        # Beside GPUs that wait, the one that works is the one they wait for.
        others = [
            f"GPU {number} of {node.name}"
            for node in nodes
            for spins in [node.spinning()]
            for number, gpu in enumerate(node.gpus())
            if gpu["processes"] and number not in spins
            if spins or (gpu["busy"] is not None and gpu["busy"] < BUSY)
        ]
        lines.append(
            f"Busy near idle power for {seconds:.0f} s: {where}. This is how a collective looks "
            "that waits for a rank" + (f"; not in it: {', '.join(others)}." if others else ".")
        )
    answering = [node for node in nodes if node.reading]
    if answering and all(node.has_fallen() for node in answering):
        lines.append(
            f"Every node that answers does less than {FALLEN:.0%} of the most seen of it, and its "
            "processes live: a save, an evaluation, or a hang."
        )
    return lines


def expand(words: list[str]) -> list[str]:
    """Return the hosts, in order, of words like node1, user@node1, node[1-3,7] or node1,node2.

    Raises InputError for a word that names no host.
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
            raise InputError(f"{part!r} is no host: give names as ssh takes them, or node[1-4].")
        hosts += found
    return list(dict.fromkeys(hosts))


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("hosts", nargs="*", help="as ssh takes them, or node[1-4]; none: this machine")
    add("-F", "--ssh-config", type=Path, help="file of options for ssh")
    add("--interval", default=2.0, type=cli.at_least(0.2), help="seconds between two readings")
    add("--timeout", default=5.0, type=cli.at_least(1.0), help="seconds that a node may take")
    add("--once", action="store_true", help="one table; status 1 if a node is missing in it")
    add("--gpus", action="store_true", help="a line for each GPU, not for each node")
    add("--python", default="python3", help="on the nodes; one that has nvidia-ml-py, if any")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    if args.ssh_config and not args.ssh_config.is_file():
        raise InputError(f"There is no file {args.ssh_config}: give one for ssh, or leave out -F.")
    nodes = [Node(host, args) for host in expand(args.hosts) or [None]]
    work = (lambda node: node.ask()) if args.once else (lambda node: node.watch(args.interval))
    threads = [threading.Thread(target=work, args=(node,), daemon=True) for node in nodes]
    try:
        for thread in threads:
            thread.start()
        for thread in threads if args.once else ():
            thread.join()
        while not args.once:
            top = CLEAR if sys.stdout.isatty() else ""
            print(f"{top}{time.strftime('%H:%M:%S')}\n{table(nodes, args.gpus)}\n", flush=True)
            time.sleep(args.interval)
        print(table(nodes, args.gpus))
        sys.exit(0 if all(node.reading for node in nodes) else 1)
    except KeyboardInterrupt:
        pass  # how a watch usually ends
    finally:
        for node in nodes:
            if node.process and node.process.poll() is None:
                node.process.kill()


if __name__ == "__main__":
    launch.run(main)

"""Check nodes and network before a run: one process per device, started as train_llm.py is.

MASTER_ADDR=node1 MASTER_PORT=29501 srun --ntasks-per-node 2 python 03-multi-node/preflight.py

Ends with one sentence and status 0 if all is sound, 1 if a fault was found, 2 for bad input.
"""

import argparse
import contextlib
import faulthandler
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import socket
import statistics
import threading
import time
import uuid
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
import xxhash

import common
from common import cli, launch, models
from common.cli import InputError, at_least
from common.data import load_blocks
from common.hosts import memory_bytes
from common.record import measure_file
from common.sources import find_source

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")

MAX_CLOCK_OFFSET_S = 1.0
LOW = 2.0  # times less free memory or disk than the other nodes have is a fault
SEEN_WITHIN_S = 10.0  # network file systems show a new file to other nodes after some seconds
ANSWER_WITHIN_S = 5.0  # after a failure: whoever says nothing for so long is gone
SERIES_S = 10.0  # a size whose all-reduces would take longer is left out
COMPARED_FROM = 2**20  # bytes: a busy core slows smaller all-reduces down tenfold
GOES = 2  # a fault is what is slow in each go: somebody else's work slows down one of them
ALL_PAIRS = 8  # up to so many nodes each pair is measured, beyond only neighbours on a ring

say = functools.partial(print, flush=True)  # a process that ends at once flushes nothing


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("run").add_argument
    add("--save-dir", default="outputs", help="folder that holds the runs' folders")
    add("--timeout", default=60, type=at_least(1), help="seconds for each check, the meeting too")
    add("--output", help="new file for the figures, as JSON")
    add = parser.add_argument_group("data").add_argument
    add("-d", "--dataset-name", default="python-stdlib", help="preset, file, folder or hub id")
    add("--dataset-subset", help="configuration of a hub data set")
    add("--text-column", help="column to train on (if absent: text)")
    add("--data-timeout", default=600, type=at_least(1), help="seconds to read code and data")
    add("--tokenize", action="store_true", help="compare tokens; fills the cache of each node")
    add("-s", "--seq-length", type=at_least(2), help="tokens (if absent: positions, <= 1024)")
    add("--num-workers", default=0, type=at_least(0), help="processes that tokenize")
    add("-m", "--model-name", default="gpt2-tiny", help="preset, folder or hub id")
    add("--tokenizer-name", help="folder or hub id (if absent: the model's)")
    add = parser.add_argument_group("network").add_argument
    add("--max-bytes", default=2**28, type=at_least(1024), help="largest all-reduce, in bytes")
    add("--min-bandwidth", type=cli.above_zero, help="GB/s (bus) that each link must have")
    add("--slow-factor", default=2.0, type=at_least(1.0), help="times slower that is a fault")
    return parser.parse_args()


# --- ranks that wait for one another, but not for ever ---


class Meeting(threading.Thread):
    """The ranks, what they hand to one another, and a thread that ends this one if that fails.

    All goes through the store, not through collectives: that needs no process group, and shows who
    is missing. The thread ends its rank if a stage takes too long or another rank has failed; it
    has a connection of its own, since the rank may hang. The lowest rank that answers says why.
    """

    def __init__(self, address: str, port: int, timeout: float) -> None:
        """Connect to the store; where that cannot be, end this rank with a sentence."""
        super().__init__(daemon=True)
        self.rank, self.world_size = (int(os.environ[name]) for name in TORCHRUN[:2])
        self.host = socket.gethostname()
        self.hosts: dict[int, str] = {}  # of all ranks, once they have met
        self.nodes: dict[str, list[int]] = {}  # the ranks of each node, rank 0's node first
        self.firsts: list[int] = []  # of each node
        self.waits = self.over = False
        # torchrun serves a store itself; with srun and mpirun rank 0 does.
        serve = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        first = connect(address, port, serve, timeout, self.rank)
        more = [connect(address, first.port, False, timeout, self.rank) for _ in range(2)]
        self.where = f"{address}:{first.port}"
        attempt = f"preflight-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        # One each for the rank, its thread and the process group: a call that waits blocks its own.
        stores = [dist.PrefixStore(attempt, store) for store in (first, *more)]
        self.mine, self.store, self.for_group = stores
        self.begin("rendezvous", timeout)
        self.start()

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.rank == 0:
            say(text)

    def begin(self, stage: str, timeout: float) -> None:
        """Note what this rank does from now on, and how many seconds it may take."""
        self.stage, self.timeout, self.deadline = stage, timeout, time.monotonic() + timeout
        # The last resort: where the network is gone, the store does not answer the thread either.
        faulthandler.dump_traceback_later(timeout + 4 * ANSWER_WITHIN_S, exit=True)

    def gather(self, what: str, part: object) -> list:
        """Return what all ranks hand over, as JSON, by rank; waits for the last of them."""
        self.mine.set(f"{what}/{self.rank}", json.dumps(part))
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        self.waits = True
        self.mine.wait(keys, timedelta(days=1))  # the thread will not wait that long
        self.waits = False
        return [json.loads(value) for value in self.mine.multi_get(keys)]

    def gather_nodes(self, what: str, part: object) -> dict:
        """Return what the first rank of each node hands over, by node; all ranks must call it."""
        parts = self.gather(what, part)
        return {node: parts[ranks[0]] for node, ranks in self.nodes.items()}

    def status(self, status: int) -> int:
        """Return the exit status of a rank that does not speak.

        srun and mpirun end all other ranks where one has failed, and report how those ended. So
        only the rank that speaks fails there; it is the last to end.
        """
        torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # it may itself run under srun
        return 0 if not torchrun and not {*MPIRUN, *SRUN}.isdisjoint(os.environ) else status

    def leave(self) -> None:
        """Let rank 0, whose process may serve the store, be the last that needs it."""
        self.begin("the end", 4 * ANSWER_WITHIN_S)
        self.gather("end", None)
        self.over = True
        self.join()
        if self.rank:
            self.mine.set(f"left/{self.rank}", "")
        elif self.world_size > 1:
            others = [f"left/{rank}" for rank in range(1, self.world_size)]
            self.mine.wait(others, timedelta(seconds=ANSWER_WITHIN_S))
        faulthandler.cancel_dump_traceback_later()

    def fail(self, reason: str) -> None:
        """End all ranks; called by the rank itself, does not return."""
        with contextlib.suppress(RuntimeError):  # the thread notices too if the store is gone
            if not self.mine.check(["failed"]):  # the first reason is the cause of the others
                self.mine.set("failed", f"{self.stage}: {reason}")
        self.join()

    def run(self) -> None:
        try:
            while not self.store.check(["failed"]):
                if self.over:
                    return
                if time.monotonic() > self.deadline:
                    self.store.set("failed", f"{self.stage}: not done in {self.timeout:g} s")
                time.sleep(0.2)
            self._end()
        except RuntimeError:  # the store's errors
            if not self.over:
                where = f"the store at {self.where} is gone, and with it rank 0 or its torchrun"
                say(f"[rank {self.rank}] Not sound: {self.stage}: {where}.")
                os._exit(1)

    def _end(self) -> None:
        self.store.set(f"here/{self.rank}", json.dumps([self.host, self.stage, self.waits]))
        keys = [f"here/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.2)
        came = [rank for rank, key in enumerate(keys) if self.store.check([key])]
        here = {rank: json.loads(self.store.get(keys[rank])) for rank in came}
        if self.rank == min(here):
            reason = self.store.get("failed").decode()
            who = who_failed(here, self.hosts, self.world_size, self.where)
            say(f"Not sound: {reason}; {who}.")
            self.store.set("said", "")
            time.sleep(1)  # the store may end with this process
            os._exit(1)
        while not self.store.check(["said"]) and time.monotonic() < deadline + 1:
            time.sleep(0.2)
        os._exit(self.status(1))  # at once: the rank may hang


def connect(host: str, port: int, serve: bool, timeout: float, rank: int) -> dist.TCPStore:
    """Return a connection to the store; ends this rank with a sentence if it cannot be reached."""
    deadline = time.monotonic() + timeout
    try:
        # Whoever serves is there. Others knock: the store's own attempts fill screens with traces.
        while not serve:
            with contextlib.suppress(ConnectionRefusedError):
                left = max(1.0, deadline - time.monotonic())
                socket.create_connection((host, port), timeout=left).close()
                break
            if time.monotonic() > deadline:
                raise ConnectionRefusedError("nobody listens there")
            time.sleep(0.2)
        limit = timedelta(seconds=timeout)
        return dist.TCPStore(host, port, None, serve, limit, wait_for_workers=False)
    except (OSError, dist.DistStoreError) as error:
        silent = isinstance(error, TimeoutError)
        why = "no answer, as behind a firewall" if silent else str(error).splitlines()[0]
    here = f"[rank {rank}] Not sound: {socket.gethostname()}"
    say(f"{here} cannot reach {host}:{port} within {timeout:g} s ({why}).")
    time.sleep(cli.HEAD_START_S + ANSWER_WITHIN_S)  # those who have met have more to say
    os._exit(1)


def who_failed(
    here: dict[int, tuple[str, str, bool]], hosts: dict[int, str], world_size: int, where: str
) -> str:
    """Return who is to blame for a stage that did not end.

    here: of each rank that still answers the host, the stage, and whether it waits there for the
    others. hosts: of all ranks, empty if they have not met yet. where: the store's host and port.
    """
    gone = [rank for rank in range(world_size) if rank not in here]
    if gone and not hosts:
        came = name_ranks({rank: host for rank, (host, _, _) in here.items()})
        nodes = os.environ.get("SLURM_STEP_NODELIST")
        expected = f" of the nodes {nodes}" if nodes else ""
        return f"only {came} came to {where}{expected}, and not {name_ranks(dict.fromkeys(gone))}"
    if gone:
        return f"no answer from {name_ranks({rank: hosts[rank] for rank in gone})}"
    if any(waits for _, _, waits in here.values()):
        late = {rank: host for rank, (host, _, waits) in here.items() if not waits}
        return f"the others wait for {name_ranks(late)}"
    stages = {rank: f"{host} at {stage!r}" for rank, (host, stage, _) in here.items()}
    return f"all answer, {name_ranks(stages)}"


def name_ranks(hosts: dict[int, str | None]) -> str:
    """Return "ranks 0, 1 on node1 and rank 2 on node2" for the host of each rank."""
    parts = []
    for host in dict.fromkeys(hosts.values()):
        ranks = [str(rank) for rank in hosts if hosts[rank] == host]
        name = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        parts.append(f"{name} on {host}" if host else name)
    return " and ".join(parts)


# --- which node is the odd one ---


def compare(what: str, values: dict[str, object]) -> list[str]:
    """Return a fault for each node whose value is not that of the majority.

    values: by node, rank 0's first; without a majority its value counts as right. Of dictionaries
    only what differs is said.
    """
    texts = {node: json.dumps(value, sort_keys=True) for node, value in values.items()}
    text, count = Counter(texts.values()).most_common(1)[0]
    others, first = "the others", next(iter(values))
    if 2 * count <= len(values):
        text, others = texts[first], f"rank 0's {first}"
    faults = []
    for node in (node for node in values if texts[node] != text):
        have, right = values[node], json.loads(text)
        if isinstance(have, dict) and isinstance(right, dict):
            keys = [key for key in {**right, **have} if right.get(key) != have.get(key)]
            what_differs = f"{', '.join(keys[:3])}{', ...' * (len(keys) > 3)}"
            have, right = ({key: side.get(key) for key in keys[:3]} for side in (have, right))
            have, right = (", ".join(map(str, side.values())) for side in (have, right))
            have = f"{have} for {what_differs}"
        faults.append(f"{what}: {node} has {have}, {others} {right}")
    return faults


def find_other_folders(save_dir: str, seen: dict[str, list[str]]) -> list[str]:
    """Return a fault for each node that has another folder of that name than the majority.

    seen: by node, the nodes whose files it sees there, itself among them.
    """
    faults = compare("save folder", {node: f"files of {', '.join(s)}" for node, s in seen.items()})
    if not faults and any(len(nodes) < len(seen) for nodes in seen.values()):
        faults = ["save folder: files come to the other nodes too late"]
    return [f"{fault} in {save_dir}, which all nodes must share" for fault in faults]


def find_wrong_clocks(clocks: dict[str, tuple[float, float]]) -> list[str]:
    """Return a fault for each node whose clock is not that of the majority.

    clocks: by node, rank 0's first: (seconds ahead of rank 0's, doubt). Without a majority rank 0's
    counts as right.
    """

    def is_off(node: str, right: float) -> bool:
        ahead, doubt = clocks[node]
        return abs(ahead - right) - doubt > MAX_CLOCK_OFFSET_S

    def agree(right: float) -> int:
        return sum(not is_off(node, right) for node in clocks)

    right = max((ahead for ahead, _ in clocks.values()), key=agree)  # of several, the first
    whose = "the others'" if 2 * agree(right) > len(clocks) > 2 else "rank 0's"
    return [
        f"clock: {node} is {clocks[node][0] - right:+.4f} s from {whose}, "
        f"give or take {clocks[node][1]:.4f} s"
        for node in clocks
        if is_off(node, right)
    ]


def far_below(values: dict[str, float], factor: float) -> dict[str, float]:
    """Return how many times less than the median of all others each has that is below by `factor`.

    Of one value alone nothing can be said.
    """
    found = {}
    for name, value in values.items():
        others = [values[other] for other in values if other != name]
        if others and value * factor < statistics.median_high(others):
            found[name] = statistics.median_high(others) / max(value, 1e-12)
    return found


def slow_ones(
    series: dict[str, dict], factor: float, least: float | None
) -> dict[str, tuple[float, float]]:
    """Return (GB/s, times less than the others, or 0 if it is only below `least`) of each slow one.

    series: of nodes or links, {bytes: {"GB/s": ...}} by name; the largest size of all counts.
    factor: how many times slower than the others is too slow, if any came to 1 MiB or more.
    least: GB/s, or None.
    """
    largest = [max(each) for each in series.values()]
    size = min(largest, default=0)
    rates = {name: each[size]["GB/s"] for name, each in series.items()}
    slow = far_below(rates, factor) if max(largest, default=0) >= COMPARED_FROM else {}
    slow |= {name: 0.0 for name in rates if least and rates[name] < least and name not in slow}
    return {name: (rates[name], times) for name, times in slow.items()}


def find_slow(kind: str, series: dict[str, dict], factor: float, least: float | None) -> list[str]:
    """Return a fault for each of slow_ones: nodes, or links ("A - B"); and before them one for a
    node all of whose links are slow.
    """
    slow = slow_ones(series, factor, least)
    faults = []
    for node in dict.fromkeys(end for name in series for end in name.split(" - ")):
        links = {name for name in series if node in name.split(" - ")}
        if len(links) > 1 and links <= set(slow):
            faults.append(f"bandwidth: every link of {node} is slow")
    for name, (rate, times) in slow.items():
        why = f"{times:.1f} times less than the others" if times else f"--min-bandwidth {least:g}"
        faults.append(f"bandwidth: {kind} {name} has {rate:.3g} GB/s, {why}")
    return faults


# --- what a rank measures ---


def describe_node(args: argparse.Namespace) -> dict[str, dict]:
    """Return what has to be the same on all nodes, by name, and what this one has free, in GiB."""
    here, shared = Path(__file__).resolve().parents[1], Path(common.__file__).resolve().parent
    files = {file.relative_to(here).as_posix(): file for file in here.glob("[0-9]*/*.py")}
    # As imported, which may be another checkout's.
    for file in (*shared.rglob("*.py"), *shared.rglob("presets/**/*.json")):
        files[file.relative_to(shared.parent).as_posix()] = file
    cuda = torch.cuda.is_available()
    same = {
        "code": {name: measure_file(file)["xxh3_64"] for name, file in sorted(files.items())},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "datasets": importlib.metadata.version("datasets"),
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "GPUs": dict(Counter(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))),
        "data": describe_data(args),
    }
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    available = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    folder = Path(args.save_dir).resolve()
    folder = next(each for each in (folder, *folder.parents) if each.exists())
    free = {
        "memory": min([memory_bytes(), *available]) / 2**30,
        "disk": shutil.disk_usage(folder).free / 2**30,
    }
    return {"same": same, "free": free}


def describe_data(args: argparse.Namespace) -> dict[str, object]:
    """Return size and checksum of the text, or of the tokens as a run compares them."""
    try:
        if args.tokenize:
            tokenizer = models.load_tokenizer(args.tokenizer_name or args.model_name)
            config = models.load_config(args.model_name)
            seq_length = models.check_sizes(config, tokenizer, args.seq_length)
            train, evaluation = load_blocks(args, tokenizer, seq_length)
            return {"sequences": len(train), "train": train.digest, "eval": evaluation.digest}
        digest, size = xxhash.xxh3_64(), 0
        source = find_source(args.dataset_name, args.dataset_subset, args.text_column)
        for batch in itertools.chain(*(split.iter(1000) for split in source.load())):
            for text in batch["text"]:
                content = text.encode(errors="replace")
                digest.update(b"%d:" % len(content) + content)
                size += len(content)
        return {"bytes": size, "checksum": digest.hexdigest()}
    except InputError as error:
        return {"error": str(error)}


def measure_clock(meeting: Meeting, peer: int) -> tuple[float, float] | None:
    """Return (seconds that this clock is ahead of rank 0's, give or take) on `peer`; rank 0 helps.

    Rank 0's clock is read at a moment between two readings of this one, so at best half of their
    distance is unknown (Cristian, 1989, https://doi.org/10.1007/BF01784024). The shortest of ten.
    """
    offsets = []
    for number in range(10):
        ping, pong = f"ping/{peer}/{number}", f"pong/{peer}/{number}"
        if meeting.rank == 0:
            meeting.mine.wait([ping], timedelta(days=1))
            meeting.mine.set(pong, repr(time.time()))
        elif meeting.rank == peer:
            start = time.time()
            meeting.mine.set(ping, "")
            meeting.mine.wait([pong], timedelta(days=1))
            theirs = float(meeting.mine.get(pong))
            end = time.time()
            offsets.append(((end - start) / 2, (start + end) / 2 - theirs))
    return min(offsets)[::-1] if offsets else None


def bus_bandwidth(n_bytes: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s (10^9 bytes).

    n_bytes / seconds x 2 (ranks - 1) / ranks: what each rank's link carries, whatever their number.
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return n_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9


def time_all_reduce(buffer: torch.Tensor, group: dist.ProcessGroup, repeats: int) -> float:
    """Return the median seconds of an all-reduce, of the slowest rank's; all of the group call it.

    They follow one another without a pause, as in nccl-tests, so ranks begin together from the
    second on. On a GPU events in its stream measure, and the host only waits at the end.
    """
    cuda = buffer.device.type == "cuda"
    marks = []
    for number in range(repeats + 1):
        marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
        if cuda:
            marks[-1].record()
        if number < repeats:
            dist.all_reduce(buffer, group=group)
    if cuda:
        torch.cuda.synchronize()
    spans = [a.elapsed_time(b) / 1000 if cuda else b - a for a, b in itertools.pairwise(marks)]
    slowest = torch.tensor(statistics.median(spans), dtype=torch.float64, device=buffer.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()


def measure(sizes: list[int], ranks: list[int], group, pattern, meeting, timeout) -> dict:
    """Return {"seconds": by size in bytes, "wrong": sizes whose sum was wrong on this rank}.

    ranks: of the group, this one among them. pattern: whole numbers, of the largest size or more.
    A size is left out, with all above it, where it would take too long.
    """
    seconds, wrong, place = {}, [], ranks.index(meeting.rank)
    for size in sizes:
        repeats = 20 if size < 2**20 or pattern.device.type == "cuda" else 5
        if size // 4 in seconds and 4 * seconds[size // 4] * repeats > SERIES_S:
            break
        meeting.begin(f"all-reduce of {size:,} bytes over {len(ranks)} ranks", timeout)
        addends = pattern[: size // 4]
        buffer = addends + place
        dist.all_reduce(buffer, group=group)  # the first one also connects the ranks
        # Whole numbers below 2^24: exact in float32, in whatever order they are added.
        if not torch.equal(buffer, len(ranks) * addends + sum(range(len(ranks)))):
            wrong.append(size)
        seconds[size] = time_all_reduce(buffer.zero_(), group, repeats)
    return {"seconds": seconds, "wrong": wrong}


def collect(
    meeting: Meeting, what: str, own: dict[str, dict], best: dict[str, dict], ranks: dict[str, list]
) -> list[str]:
    """Put what all ranks measured into `best`, if it is better; return a fault for each wrong sum.

    own: what `measure` returned to this rank, by name. best: {bytes: {"ms": ..., "GB/s": ...}} by
    name, the same on all ranks. ranks: of each name.
    """
    faults = []
    for rank, measured in enumerate(meeting.gather(what, own)):
        for name, each in measured.items():
            series = best.setdefault(name, {})
            for size, s in ((int(size), s) for size, s in each["seconds"].items()):
                if size not in series or 1000 * s < series[size]["ms"]:
                    rate = bus_bandwidth(size, s, len(ranks[name]))
                    series[size] = {"ms": 1000 * s, "GB/s": rate}
            if each["wrong"]:
                who = name_ranks({rank: meeting.hosts[rank]})
                faults.append(f"all-reduce: {who} has a wrong sum of {each['wrong'][0]:,} bytes")
    return faults


# --- the checks, in their order; each returns its faults, the same ones on all ranks ---


def meet(meeting: Meeting, args: argparse.Namespace) -> None:
    """Wait for all ranks, and note which node each is on."""
    output = Path(args.output) if args.output and meeting.rank == 0 else None
    refused = output is not None and (output.exists() or not output.parent.is_dir())
    # Two torchruns on one machine are two nodes.
    part = [meeting.host, os.environ.get("GROUP_RANK", "0"), refused]
    parts = meeting.gather("rendezvous", part)
    if parts[0][2]:
        meeting.leave()
        raise InputError(f"{args.output} is there already or cannot be: give a new --output.")
    meeting.hosts = {rank: host for rank, (host, _, _) in enumerate(parts)}
    several = len({tuple(part[:2]) for part in parts}) > len(set(meeting.hosts.values()))
    for rank, (host, number, _) in enumerate(parts):
        meeting.nodes.setdefault(f"{host}/{number}" if several else host, []).append(rank)
    meeting.firsts = [ranks[0] for ranks in meeting.nodes.values()]
    meeting.say(f"met    at {meeting.where}: {name_ranks(meeting.hosts)}")


def check_nodes(meeting: Meeting, args: argparse.Namespace) -> tuple[list[str], dict]:
    """Compare what the nodes have; return the faults, and what each has, by node."""
    meeting.begin("reading code and data", args.data_timeout)
    part = describe_node(args) if meeting.rank in meeting.firsts else None
    facts = meeting.gather_nodes("node", part)
    errors = {each["same"]["data"].get("error") for each in facts.values()}
    if len(errors) == 1 and None not in errors:  # on all nodes: none of them is the odd one
        meeting.leave()
        raise InputError(errors.pop())
    faults = []
    for what, value in next(iter(facts.values()))["same"].items():
        odd = compare(what, {node: each["same"][what] for node, each in facts.items()})
        faults += odd
        if value and not odd:
            meeting.say(f"same   {what}: {f'{len(value)} files' if what == 'code' else value}")
    # Each rank its own GPU's: to ask for another's would take memory there.
    gpu = torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else None
    gpus = enumerate(meeting.gather("GPU memory", gpu))
    left = {name_ranks({rank: meeting.hosts[rank]}): free for rank, free in gpus if free}
    by_name = {"GPU memory": left} if left else {}
    for what in ("memory", "disk"):
        by_name[what] = {node: each["free"][what] for node, each in facts.items()}
    for what, free in by_name.items():
        faults += [
            f"free {what}: {name} has {free[name]:.1f} GiB, {times:.1f} times less than the others"
            for name, times in far_below(free, LOW).items()
        ]
        meeting.say(f"free   {what}: {min(free.values()):.1f} to {max(free.values()):.1f} GiB")
    return faults, facts


def check_folder(meeting: Meeting, args: argparse.Namespace) -> list[str]:
    """Let each node leave a file in --save-dir and look for those of the others."""
    meeting.begin("looking for one another's files in --save-dir", args.timeout)
    folder = Path(args.save_dir) / f".preflight-{meeting.gather('name', uuid.uuid4().hex)[0]}"
    error, seen = None, []
    if meeting.rank in meeting.firsts:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(meeting.rank)).touch()
        except OSError as cause:
            error = cause.strerror
    errors = meeting.gather_nodes("written", error)  # from here on they are there
    deadline = time.monotonic() + min(SEEN_WITHIN_S, args.timeout / 2)
    while meeting.rank in meeting.firsts and not any(errors.values()):
        there = zip(meeting.nodes, meeting.firsts, strict=True)
        seen = [node for node, first in there if (folder / str(first)).exists()]
        if len(seen) == len(meeting.firsts) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    views = meeting.gather_nodes("seen", seen)
    if meeting.rank in meeting.firsts:
        shutil.rmtree(folder, ignore_errors=True)
    if any(errors.values()):
        return [
            f"save folder: {node} cannot write to {args.save_dir} ({why})"
            for node, why in errors.items()
            if why
        ]
    faults = find_other_folders(args.save_dir, views)
    if not faults:
        meeting.say(f"same   save folder: {args.save_dir}")
    return faults


def check_clocks(meeting: Meeting, args: argparse.Namespace) -> tuple[list[str], dict]:
    """Compare each node's clock with rank 0's; return the faults, and (offset, doubt) by node."""
    meeting.begin("comparing clocks", args.timeout)
    offset = None
    for peer in meeting.firsts[1:]:
        if meeting.rank in (0, peer):
            offset = measure_clock(meeting, peer)
    first, *others = meeting.gather_nodes("clock", offset).items()
    clocks = {first[0]: (0.0, 0.0), **dict(others)}
    faults = find_wrong_clocks(clocks)
    for node, (ahead, doubt) in others if not faults else ():
        text = f"clock: {node} is {ahead:+.4f} s from rank 0's, give or take {doubt:.4f} s"
        meeting.say(f"same   {text}")
    return faults, clocks


def check_network(meeting: Meeting, device: torch.device, args) -> tuple[list[str], dict]:
    """Time all-reduces within nodes, over all, and node to node; return the faults and figures."""
    nodes, timeout = meeting.nodes, args.timeout
    sizes = [4**power for power in range(5, 16) if 4**power <= args.max_bytes]
    meeting.begin("connecting the ranks", timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=meeting.for_group,
        rank=meeting.rank,
        world_size=meeting.world_size,
        # A collective that hangs is ended by the meeting's thread, which can say more than NCCL.
        timeout=timedelta(seconds=timeout + 2 * ANSWER_WITHIN_S),
    )
    pattern = torch.arange(max(sizes) // 4, dtype=torch.int32, device=device).remainder_(251)
    common_args = (pattern.float(), meeting, timeout)
    mine = next(node for node in nodes if meeting.rank in nodes[node])
    groups = {node: dist.new_group(ranks) for node, ranks in nodes.items()}  # all make all of them
    least = args.min_bandwidth
    within, faults = {}, []

    def slow(series: dict[str, dict], least: float | None) -> list[str]:
        return list(slow_ones(series, args.slow_factor, least))

    for go in range(GOES):
        own = {}
        if len(nodes[mine]) > 1:
            own[mine] = measure(sizes, nodes[mine], groups[mine], *common_args)
        meeting.begin("waiting for the other nodes", len(sizes) * SERIES_S + timeout)
        # From here on nobody measures beside another.
        faults += collect(meeting, f"within/{go}", own, within, nodes)
        if not slow(within, None if len(nodes) > 1 else least):
            break
    links, over_all = {}, {}
    if len(nodes) > 1:
        everyone = list(range(meeting.world_size))
        own = {"all": measure(sizes, everyone, dist.group.WORLD, *common_args)}
        faults += collect(meeting, "all", own, over_all, {"all": everyone})
        # One link can be so slow that all ranks together came to small sizes only.
        largest = max(*over_all["all"], min(COMPARED_FROM, sizes[-1]))
        two_sizes = sorted({sizes[0], largest})
        pairs = itertools.combinations(nodes, 2)
        if len(nodes) > ALL_PAIRS:
            pairs = itertools.pairwise([*nodes, next(iter(nodes))])
        ends = {" - ".join(pair): [nodes[node][0] for node in pair] for pair in pairs}
        again = list(ends)
        for go in range(GOES):
            for link in again:
                meeting.begin(f"waiting for {link}", 2 * SERIES_S + timeout)
                if link not in groups:
                    groups[link] = dist.new_group(ends[link])
                own = {}
                if meeting.rank in ends[link]:
                    own[link] = measure(two_sizes, sorted(ends[link]), groups[link], *common_args)
                faults += collect(meeting, f"{link}/{go}", own, links, ends)
            again = slow(links, least)
            if not again:
                break
    figures = {**within, **over_all, **links}
    faults += find_slow("within", within, args.slow_factor, None if links else least)
    faults += find_slow("link", links, args.slow_factor, least)
    if meeting.rank == 0:
        show_figures(within, over_all.get("all", {}), links)
    if len(links) == 1 and not least:
        meeting.say("note   one link has no others to be compared with: give --min-bandwidth")
    return list(dict.fromkeys(faults)), figures


def show_figures(within: dict[str, dict], across: dict, links: dict[str, dict]) -> None:
    """Print a table of the series and a line for each link, the slowest first."""
    say("\nall-reduce     within a node, the slowest          over all ranks")
    say("     bytes         ms       GB/s              ms       GB/s")
    for size in sorted({size for each in (across, *within.values()) for size in each}):
        here = [each[size] for each in within.values() if size in each]
        slowest = min(here, default=None, key=lambda cell: cell["GB/s"])
        cells = (slowest, across.get(size))
        shown = [f"{c['ms']:11.3f}{c['GB/s']:11.4f}" if c else " " * 22 for c in cells]
        say(f"{size:10,}{'     '.join(shown)}".rstrip())
    for name, each in sorted(links.items(), key=lambda item: item[1][max(item[1])]["GB/s"]):
        least, most = min(each), max(each)
        latency = f"{each[least]['ms']:.3f} ms for {least:,}"
        say(f"link   {name}: {each[most]['GB/s']:.4f} GB/s with {most:,} bytes, {latency}")


def describe_end(faults: list[str], nodes: dict, clocks: dict, figures: dict) -> str:
    """Return the one sentence that ends the check."""
    if faults:
        return f"Not sound, {len(faults)} fault{'s' * (len(faults) > 1)}: {'; '.join(faults)}."
    ranks = sum(map(len, nodes.values()))
    what = f"{ranks} rank{'s' * (ranks > 1)} on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    if series := figures.get("all") or figures.get(next(iter(nodes))):
        size = max(series)
        what += f", all-reduce of {size:,} bytes right and {series[size]['GB/s']:.3g} GB/s"
    return f"Sound: {what}."


def main() -> None:
    # torchrun first: it may itself run under srun, and mpirun too.
    for names in (TORCHRUN, MPIRUN, SRUN):
        if all(name in os.environ for name in names):
            places = (os.environ[name] for name in names)
            os.environ |= dict(zip(TORCHRUN, places, strict=True))
            break
    args = get_args()
    launch.complete_environment()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    meeting = Meeting(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), args.timeout)
    figures = {}
    try:
        meet(meeting, args)
        faults, facts = check_nodes(meeting, args)
        faults += check_folder(meeting, args)
        more, clocks = check_clocks(meeting, args)
        faults += more
        for fault in faults:
            meeting.say(f"FAULT  {fault}")
        if meeting.world_size > 1:
            more, figures = check_network(meeting, device, args)
            faults += more
    except RuntimeError as error:  # of torch: a rank is gone, or an address leads nowhere
        meeting.fail(str(error).splitlines()[0])
    if meeting.rank == 0 and args.output:
        found = {"nodes": meeting.nodes, "facts": facts, "clocks": clocks, "all_reduce": figures}
        Path(args.output).write_text(json.dumps({**found, "faults": faults}, indent=1) + "\n")
    meeting.say(describe_end(faults, meeting.nodes, clocks, figures))
    meeting.leave()
    status = 1 if faults else 0
    if meeting.rank:
        status = meeting.status(status)
    elif meeting.status(status) != status:
        time.sleep(2)  # or srun ends a rank that has left, not ended, and reports that instead
    os._exit(status)  # no rank is in a collective


if __name__ == "__main__":
    launch.run(main)

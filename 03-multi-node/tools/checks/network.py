"""Time all-reduces within each node, over all ranks, and between pairs of nodes."""

import argparse
import itertools
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from checks.nodes import far_below
from checks.rendezvous import ANSWER_WITHIN_S, Rendezvous, name_ranks, say

MAX_SERIES_S = 10.0  # a size is left out if its all-reduces would take longer
COMPARED_FROM = 2**20  # bytes: a busy core makes smaller all-reduces ten times slower
ATTEMPTS = 2  # only what is slow in every attempt is a fault: other work can slow down one attempt
ALL_PAIRS = 8  # with more nodes, only neighbors on a ring are measured, not all pairs

# The times of a node or a link, by size in bytes: {"ms": ..., "GB/s": ...}.
Series = dict[int, dict[str, float]]


def check_network(
    rdzv: Rendezvous, device: torch.device, args: argparse.Namespace
) -> tuple[list[str], str]:
    """Time all-reduces. Return the faults, and the bandwidth over all ranks in words."""
    nodes = rdzv.nodes
    sizes = [4**power for power in range(5, 16) if 4**power <= args.max_bytes]
    connect_ranks(rdzv, device, args.timeout)
    pattern = torch.arange(max(sizes) // 4, dtype=torch.int32, device=device).remainder_(251)
    pattern = pattern.float()
    process_groups = {"all": dist.group.WORLD}
    faults: list[str] = []

    def time_groups(
        groups: dict[str, list[int]], sizes: list[int], best: dict[str, Series], others: str
    ) -> None:
        """Measure these groups of ranks at the same time, and keep the best times in `best`."""
        stage = (f"waiting for {others}", len(sizes) * MAX_SERIES_S + args.timeout)
        rdzv.begin(*stage)
        own = {}
        for name, ranks in groups.items():
            if name not in process_groups:
                process_groups[name] = dist.new_group(ranks)  # all ranks must call this
        for name, ranks in groups.items():
            if rdzv.rank in ranks and len(ranks) > 1:
                group = process_groups[name]
                own[name] = measure(sizes, ranks, group, pattern, rdzv, args.timeout)
        rdzv.begin(*stage)
        faults.extend(collect(rdzv, own, best, groups))

    within: dict[str, Series] = {}
    min_bandwidth = args.min_bandwidth if len(nodes) == 1 else None
    for _ in range(ATTEMPTS):
        time_groups(nodes, sizes, within, "the other nodes")
        if not slow_ones(within, min_bandwidth):
            break
    faults += find_slow("node", within, min_bandwidth)
    all_ranks: dict[str, Series] = {}
    links: dict[str, Series] = {}
    if len(nodes) > 1:
        time_groups({"all": list(range(rdzv.world_size))}, sizes, all_ranks, "all ranks")
        # A single slow link can keep the series of all ranks from reaching the larger sizes.
        largest = max(*all_ranks["all"], min(COMPARED_FROM, sizes[-1]))
        pairs = itertools.combinations(nodes, 2)
        if len(nodes) > ALL_PAIRS:
            pairs = itertools.pairwise([*nodes, next(iter(nodes))])
        ends = {" - ".join(pair): sorted(nodes[node][0] for node in pair) for pair in pairs}
        names = list(ends)
        for _ in range(ATTEMPTS):
            for name in names:  # one link at a time
                time_groups({name: ends[name]}, sorted({sizes[0], largest}), links, name)
            names = list(slow_ones(links, args.min_bandwidth))
        faults += find_slow("link", links, args.min_bandwidth)
    if rdzv.rank == 0:
        show_table(within, all_ranks.get("all", {}), links)
    if len(links) == 1 and not args.min_bandwidth:
        rdzv.say("note   there is no other link to compare this one with: give --min-bandwidth")
    series = all_ranks.get("all") or within[next(iter(nodes))]
    size = max(series)
    bandwidth = f"all-reduce of {size:,} bytes correct and {series[size]['GB/s']:.3g} GB/s"
    return list(dict.fromkeys(faults)), bandwidth


def connect_ranks(rdzv: Rendezvous, device: torch.device, timeout: float) -> None:
    """Create the default process group, with NCCL on GPUs and gloo on CPUs."""
    rdzv.begin("connecting the ranks", timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=rdzv.group_store,
        rank=rdzv.rank,
        world_size=rdzv.world_size,
        # If a collective hangs, the rank's thread exits earlier, and reports more than NCCL.
        timeout=timedelta(seconds=timeout + 2 * ANSWER_WITHIN_S),
    )


def measure(
    sizes: list[int],
    ranks: list[int],
    group: dist.ProcessGroup,
    pattern: torch.Tensor,
    rdzv: Rendezvous,
    timeout: float,
) -> dict:
    """Return {"seconds": by size in bytes, "wrong": the sizes with a wrong sum on this rank}.

    ranks: of the group; all of them must call this. pattern: whole numbers, as many as the largest
    size needs. If a size would take too long, this size and all larger ones are left out.
    """
    seconds, wrong = {}, []
    for size in sizes:
        repeats = 20 if size < 2**20 or pattern.device.type == "cuda" else 5
        if size // 4 in seconds and 4 * seconds[size // 4] * repeats > MAX_SERIES_S:
            break
        rdzv.begin(f"all-reduce of {size:,} bytes over {len(ranks)} ranks", timeout)
        addends = pattern[: size // 4]
        buffer = addends + ranks.index(rdzv.rank)
        dist.all_reduce(buffer, group=group)  # the first one also connects the ranks
        # Whole numbers below 2^24 have exact sums in float32, whatever the order.
        if not torch.equal(buffer, len(ranks) * addends + sum(range(len(ranks)))):
            wrong.append(size)
        seconds[size] = time_all_reduce(buffer.zero_(), group, repeats)
    return {"seconds": seconds, "wrong": wrong}


def time_all_reduce(buffer: torch.Tensor, group: dist.ProcessGroup, repeats: int) -> float:
    """Return the median seconds of an all-reduce on the slowest rank. All ranks must call this.

    The all-reduces follow one another without a pause, as in nccl-tests, so that from the second
    one on the ranks start together. On a GPU, events measure them and the host waits only at the
    end.
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


def bus_bandwidth(n_bytes: int, seconds: float, n_ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s (10^9 bytes).

    It is n_bytes / seconds x 2 (n_ranks - 1) / n_ranks: what the link of each rank carries, for any
    number of ranks. https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return n_bytes / seconds * 2 * (n_ranks - 1) / n_ranks / 1e9


def collect(
    rdzv: Rendezvous, own: dict[str, dict], best: dict[str, Series], groups: dict[str, list[int]]
) -> list[str]:
    """Gather the times of all ranks, and keep the best ones in `best`, the same on all ranks.

    Return a fault for each wrong sum. own: what `measure` returned to this rank, by group.
    """
    faults = []
    for rank, measured in enumerate(rdzv.gather(own)):
        for name, each in measured.items():
            series = best.setdefault(name, {})
            for size, seconds in ((int(size), s) for size, s in each["seconds"].items()):
                if size not in series or 1000 * seconds < series[size]["ms"]:
                    rate = bus_bandwidth(size, seconds, len(groups[name]))
                    series[size] = {"ms": 1000 * seconds, "GB/s": rate}
            if each["wrong"]:
                who = name_ranks({rank: rdzv.hosts[rank]})
                faults.append(f"all-reduce: {who} has a wrong sum of {each['wrong'][0]:,} bytes")
    return faults


def slow_ones(
    series: dict[str, Series], min_bandwidth: float | None
) -> dict[str, tuple[float, float]]:
    """Return (GB/s, how many times slower than the others) of each slow node or link, by name.

    All are compared at the largest size that all of them reached, if one of them reached 1 MiB.
    min_bandwidth: in GB/s, or None. The second number is 0 for what is only slower than that.
    """
    largest = [max(each) for each in series.values()]
    size = min(largest, default=0)
    rates = {name: each[size]["GB/s"] for name, each in series.items()}
    slow = far_below(rates) if max(largest, default=0) >= COMPARED_FROM else {}
    too_low = [name for name in rates if min_bandwidth and rates[name] < min_bandwidth]
    slow |= {name: 0.0 for name in too_low if name not in slow}
    return {name: (rates[name], times) for name, times in slow.items()}


def find_slow(kind: str, series: dict[str, Series], min_bandwidth: float | None) -> list[str]:
    """Return a fault for each slow node or link, and before them one for a node with slow links."""
    slow = slow_ones(series, min_bandwidth)
    faults = []
    for node in dict.fromkeys(end for name in series for end in name.split(" - ")):
        links = {name for name in series if node in name.split(" - ")}
        if len(links) > 1 and links <= set(slow):
            faults.append(f"bandwidth: every link of {node} is slow")
    for name, (rate, times) in slow.items():
        if times:
            why = f"{times:.1f} times less than the others"
        else:
            why = f"--min-bandwidth is {min_bandwidth:g}"
        faults.append(f"bandwidth: {kind} {name} has {rate:.3g} GB/s, {why}")
    return faults


def show_table(within: dict[str, Series], all_ranks: Series, links: dict[str, Series]) -> None:
    """Print a table by size, and a line for each link, the slowest link first."""
    say(f"\nall-reduce{'in the slowest node':>22}     {'over all ranks':>22}")
    say(f"{'bytes':>10}{'ms':>11}{'GB/s':>11}     {'ms':>11}{'GB/s':>11}")
    for size in sorted({size for each in (all_ranks, *within.values()) for size in each}):
        nodes = [each[size] for each in within.values() if size in each]
        slowest = min(nodes, default=None, key=lambda cell: cell["GB/s"])
        cells = (slowest, all_ranks.get(size))
        shown = [f"{c['ms']:11.3f}{c['GB/s']:11.4f}" if c else " " * 22 for c in cells]
        say(f"{size:10,}{'     '.join(shown)}".rstrip())
    for name, each in sorted(links.items(), key=lambda item: item[1][max(item[1])]["GB/s"]):
        small, large = min(each), max(each)
        latency = f"{each[small]['ms']:.3f} ms with {small:,} bytes"
        say(f"link   {name}: {each[large]['GB/s']:.4f} GB/s with {large:,} bytes, {latency}")

"""Data parallelism on paper: what more GPUs bring, where it stops, and at which batch.

python 05-mixed-precision/growth.py

Measured are a GPU's step and an all-reduce within a node. The rest is bytes, links and hops:

    S bytes to or from all of n GPUs    (n - 1) / n S / bus + latency; an all-reduce is two of these
    bus                                 within a node measured, over nodes what a node's ports carry
    latency of a ring, on m nodes       (n - m) x 3.4 us + (m - 1) x 9.6 us; an all-reduce's twice
    of a tree, for an all-reduce only   2 ((n / m - 1) x 28 us + log2(m) x 50 us), if that is less

Sources: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md; of latencies, which
were not measured here, https://github.com/NVIDIA/nccl/blob/v2.12.7-1/src/graph/tuning.cc. Ports are
taken to carry the share of their rate that NVLink carries, and steps to be linear in their tokens.
"""

import json
import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from common import cli, launch, models
from common.timers import PEAK_FLOPS, flops_per_token

INPUTS = Path(__file__).parents[1] / "tests/benchmarks/results/growth.json"
PEAK, NVLINK = PEAK_FLOPS["NVIDIA H200"], 450e9  # bytes/s each way: nvidia.com/data-center/h200
GPUS, BUCKET = (1, 2, 4, 8, 64, 1024), 25 * 2**20  # bytes: DDP's default
HOPS = {"ring": (3.4e-6, 9.6e-6), "tree": (28e-6, 50e-6)}  # seconds in a node, between nodes


@dataclass(frozen=True)
class Cluster:
    bus: float  # bytes/s that each GPU sends in a collective within a node
    port: float = 50e9  # bytes/s of each GPU to other nodes: 400 Gbit/s
    node: int = 8  # GPUs


@dataclass(frozen=True)
class Work:
    """A step of one GPU, in seconds without communication, and what it has to send."""

    strategy: str  # ddp or fsdp
    tokens: int
    blocks: int
    block: int  # parameters of one block
    root: int  # all other parameters
    late: int  # of these, the input embedding's: their gradients come last
    flops: float  # of a token
    forward: float
    backward: float
    update: float  # of the whole model
    gathered: int = 2  # bytes of a weight that FSDP gathers


def work_of(strategy: str, name: str, seq_length: int, tokens: int, *seconds: float) -> Work:
    """Return the work of a preset; seconds: of forward pass, backward pass and update."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config := models.load_config(name))
    blocks = models.find_blocks(model)
    parts = (model, blocks[0], model.get_input_embeddings())
    whole, block, late = (sum(p.numel() for p in part.parameters()) for part in parts)
    root, flops = whole - len(blocks) * block, flops_per_token(model, config, seq_length)
    return Work(strategy, tokens, len(blocks), block, root, late, flops, *seconds)


def one_way(size: float, n: int, cluster: Cluster) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `size` bytes in all."""
    nodes = math.ceil(n / cluster.node)
    between = min(n, cluster.node) * cluster.port * cluster.bus / NVLINK if nodes > 1 else math.inf
    latency = (n - nodes) * HOPS["ring"][0] + (nodes - 1) * HOPS["ring"][1]
    return (n - 1) / n * size / min(cluster.bus, between) + latency


def all_reduce(size: float, n: int, cluster: Cluster, calls: int = 1) -> float:
    """Return the seconds of so many all-reduces of `size` bytes together, each by ring or tree."""
    nodes, ring = math.ceil(n / cluster.node), 2 * one_way(0, n, cluster)
    tree = 2 * ((n / nodes - 1) * HOPS["tree"][0] + math.log2(nodes) * HOPS["tree"][1])
    return 2 * one_way(size, n, cluster) - ring + calls * min(ring, tree)


def exposed(work: Work, n: int, cluster: Cluster) -> float:
    """Return the seconds of a step in which a GPU does nothing but send and receive.

    DDP sends float32 gradients beside the backward pass; nothing hides those that come last. FSDP
    gathers a block while another computes, twice, and sums its gradients in float32. Nothing hides
    the first gathers, of the root and a block, and the last sums, of the first block and the root.
    """
    if n == 1:
        return 0.0
    if work.strategy == "ddp":
        early = 4 * (work.blocks * work.block + work.root - work.late)  # bytes
        sent = all_reduce(early, n, cluster, math.ceil(early / BUCKET))
        hidden = work.backward * (work.blocks - 1) / work.blocks
        return max(0.0, sent - hidden) + all_reduce(4 * work.late, n, cluster)
    gather, scatter = (one_way(size * work.block, n, cluster) for size in (work.gathered, 4))
    share = (1 - 6 * work.late / work.flops) / work.blocks  # of a pass; the head is no block
    ahead = (work.blocks - 1) * max(0.0, gather - share * work.forward)
    behind = max(scatter, work.blocks * (gather + scatter - share * work.backward))
    root = one_way((work.gathered + 4) * work.root, n, cluster) + one_way(0, n, cluster)
    return root + gather + ahead + behind


def step(work: Work, n: int, cluster: Cluster, wait: float = 0.0) -> float:
    """Return the seconds of a step; wait: those for the slowest GPU, where there are several."""
    update = work.update / (n if work.strategy == "fsdp" else 1)
    return work.forward + work.backward + update + exposed(work, n, cluster) + wait * (n > 1)


def efficiency(work: Work, n: int, cluster: Cluster, tokens: float | None = None) -> float:
    """Return the share of a step that is forward and backward pass, if given on so many tokens."""
    part = tokens / work.tokens if tokens else 1
    work = replace(work, forward=part * work.forward, backward=part * work.backward)
    return (work.forward + work.backward) / step(work, n, cluster)


def smallest_batch(work: Work, n: int, cluster: Cluster, wanted: float) -> int:
    """Return the fewest tokens of a GPU with which it computes for that share of its time."""
    return bisect_left(range(2**40), wanted, 1, key=lambda t: efficiency(work, n, cluster, t))


def most_gpus(work: Work, batch: int, length: int, cluster: Cluster, wanted: float) -> int:
    """Return the largest power of two of GPUs that share a global batch of tokens that well."""
    shares = {2**i: efficiency(work, 2**i, cluster, batch / 2**i) for i in range(30)}
    return max(n for n, share in shares.items() if share >= wanted and batch / n >= length)


def main() -> None:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", default=50.0, type=cli.above_zero, help="GB/s between nodes")
    parser.add_argument("--node", default=8, type=cli.at_least(1), help="GPUs of a node")
    args, inputs = parser.parse_args(), json.loads(INPUTS.read_text())["results"]["inputs"]
    cluster = Cluster(inputs["bus"], 1e9 * args.port, args.node)
    for title, each in inputs["works"].items():
        work, batch = Work(**each["work"]), each["global_batch"]
        print(f"{title}\n  GPUs      tokens/s  computes    MFU   sends alone, ms  tokens for 90%")
        for n in GPUS:
            rate, share = n * work.tokens / step(work, n, cluster), efficiency(work, n, cluster)
            mfu, least = work.flops * rate / n / PEAK, smallest_batch(work, n, cluster, 0.9)
            alone = f"{1000 * exposed(work, n, cluster):18.1f}"
            print(f"{n:6}{rate:14,.0f}{share:10.1%}{mfu:7.1%}{alone}{least:16,}")
        most = most_gpus(work, batch, each["seq_length"], cluster, 0.9)
        print(f"{batch:,} tokens a step keep {most} GPUs computing for 90% of it\n")


if __name__ == "__main__":
    launch.run(main)

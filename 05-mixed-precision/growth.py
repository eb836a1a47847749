"""Predict how data parallelism scales to many GPUs, and which batch size they need.

python 05-mixed-precision/growth.py

growth.json beside this script has the measurements: the step time of one GPU, and the bandwidth of
an all-reduce within a node. Everything else is computed from bytes, bandwidths and latencies:

    all-gather or reduce-scatter of S bytes on n GPUs   (n - 1) / n S / bandwidth + latency
    all-reduce                                          twice that
    bandwidth    within a node as measured; between nodes, what the network ports of a node carry
    ring         latency (n - m) x 3.4 us + (m - 1) x 9.6 us on m nodes; an all-reduce twice that
    tree         all-reduce only: 2 ((n / m - 1) x 28 us + log2(m) x 50 us), if that is less

Sources: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and for the latencies,
which were not measured here, https://github.com/NVIDIA/nccl/blob/v2.12.7-1/src/graph/tuning.cc.
Two assumptions: network ports reach the same share of their peak bandwidth as NVLink, and the time
of a pass is proportional to its tokens.
"""

import json
import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from common import cli, launch, models
from common.sharding import find_layers
from common.timers import PEAK_FLOPS, flops_per_token

INPUTS = Path(__file__).with_name("growth.json")  # names the commit that made it
PEAK = PEAK_FLOPS["NVIDIA H200"]
NVLINK = 450e9  # bytes/s in each direction: nvidia.com/data-center/h200
BUCKET = 25 * 2**20  # bytes: DDP's default
HOPS = {"ring": (3.4e-6, 9.6e-6), "tree": (28e-6, 50e-6)}  # seconds within and between nodes
GPUS = (1, 2, 4, 8, 64, 1024)


@dataclass(frozen=True)
class Cluster:
    bus: float  # bytes/s per GPU in a collective within a node
    port: float = 50e9  # bytes/s from each GPU to other nodes: 400 Gbit/s
    node: int = 8  # GPUs per node


@dataclass(frozen=True)
class Work:
    """A training step of one GPU without communication, in seconds, and the parameters it sends."""

    strategy: str  # ddp or fsdp
    tokens: int
    layers: int
    layer: int  # parameters of one transformer layer
    root: int  # parameters outside of the layers
    embedding: int  # of root: the input embedding, whose gradients come last
    flops: float  # per token
    forward: float
    backward: float
    update: float  # of the whole model
    gathered: int = 2  # bytes per weight in FSDP's all-gathers


def work_of(strategy: str, name: str, seq_length: int, tokens: int, *seconds: float) -> Work:
    """Return the work of a preset; seconds: of the forward pass, the backward pass, the update."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config := models.load_config(name))
    layers = find_layers(model)
    parts = (model, layers[0], model.get_input_embeddings())
    total, layer, embedding = (sum(p.numel() for p in part.parameters()) for part in parts)
    root, flops = total - len(layers) * layer, flops_per_token(model, config, seq_length)
    return Work(strategy, tokens, len(layers), layer, root, embedding, flops, *seconds)


def one_way(size: float, n: int, cluster: Cluster) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `size` bytes in total."""
    nodes = math.ceil(n / cluster.node)
    between = min(n, cluster.node) * cluster.port * cluster.bus / NVLINK if nodes > 1 else math.inf
    latency = (n - nodes) * HOPS["ring"][0] + (nodes - 1) * HOPS["ring"][1]
    return (n - 1) / n * size / min(cluster.bus, between) + latency


def all_reduce(size: float, n: int, cluster: Cluster, calls: int = 1) -> float:
    """Return the seconds of `calls` all-reduces of `size` bytes in total, by ring or tree."""
    nodes, ring = math.ceil(n / cluster.node), 2 * one_way(0, n, cluster)
    tree = 2 * ((n / nodes - 1) * HOPS["tree"][0] + math.log2(nodes) * HOPS["tree"][1])
    return 2 * one_way(size, n, cluster) - ring + calls * min(ring, tree)


def exposed(work: Work, n: int, cluster: Cluster) -> float:
    """Return the seconds of a step in which a GPU only communicates.

    DDP all-reduces float32 gradients during the backward pass. The gradients of the input embedding
    come last, so nothing overlaps with their all-reduce. FSDP gathers a layer while another one
    computes, in the forward and in the backward pass, and reduces its gradients in float32. Nothing
    overlaps with the first all-gathers (root and one layer) and the last reduce-scatters (first
    layer and root).
    """
    if n == 1:
        return 0.0
    if work.strategy == "ddp":
        early = 4 * (work.layers * work.layer + work.root - work.embedding)  # bytes
        sent = all_reduce(early, n, cluster, math.ceil(early / BUCKET))
        hidden = work.backward * (work.layers - 1) / work.layers
        return max(0.0, sent - hidden) + all_reduce(4 * work.embedding, n, cluster)
    gather, scatter = (one_way(size * work.layer, n, cluster) for size in (work.gathered, 4))
    share = (1 - 6 * work.embedding / work.flops) / work.layers  # of a pass, for one layer
    ahead = (work.layers - 1) * max(0.0, gather - share * work.forward)
    behind = max(scatter, work.layers * (gather + scatter - share * work.backward))
    root = one_way((work.gathered + 4) * work.root, n, cluster) + one_way(0, n, cluster)
    return root + gather + ahead + behind


def step(work: Work, n: int, cluster: Cluster, wait: float = 0.0) -> float:
    """Return the seconds of a step; wait: seconds that the GPUs wait for the slowest one."""
    update = work.update / (n if work.strategy == "fsdp" else 1)
    return work.forward + work.backward + update + exposed(work, n, cluster) + wait * (n > 1)


def efficiency(work: Work, n: int, cluster: Cluster, tokens: float | None = None) -> float:
    """Return the share of forward and backward in a step; tokens: per GPU, if not work.tokens."""
    part = tokens / work.tokens if tokens else 1
    work = replace(work, forward=part * work.forward, backward=part * work.backward)
    return (work.forward + work.backward) / step(work, n, cluster)


def smallest_batch(work: Work, n: int, cluster: Cluster, wanted: float) -> int:
    """Return the fewest tokens per GPU that reach the wanted efficiency."""
    return bisect_left(range(2**40), wanted, 1, key=lambda t: efficiency(work, n, cluster, t))


def most_gpus(work: Work, batch: int, length: int, cluster: Cluster, wanted: float) -> int:
    """Return the most GPUs, as a power of two, that reach the wanted efficiency with this batch.

    batch: tokens per step on all GPUs together. Each GPU has at least one sequence of `length`.
    """
    shares = {2**i: efficiency(work, 2**i, cluster, batch / 2**i) for i in range(30)}
    return max(n for n, share in shares.items() if share >= wanted and batch / n >= length)


def main() -> None:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--port", default=50.0, type=cli.at_least(1e-3), help="GB/s of a GPU's port")
    add("--node", default=8, type=cli.at_least(1), help="GPUs per node")
    args, inputs = parser.parse_args(), json.loads(INPUTS.read_text())
    cluster = Cluster(inputs["bus"], 1e9 * args.port, args.node)
    for title, each in inputs["works"].items():
        work, batch = Work(**each["work"]), each["global_batch"]
        print(f"{title}\n  GPUs      tokens/s  efficiency    MFU   exposed, ms  tokens/GPU for 90%")
        for n in GPUS:
            speed, share = n * work.tokens / step(work, n, cluster), efficiency(work, n, cluster)
            mfu, fewest = work.flops * speed / n / PEAK, smallest_batch(work, n, cluster, 0.9)
            milliseconds = 1000 * exposed(work, n, cluster)
            print(f"{n:6}{speed:14,.0f}{share:12.1%}{mfu:7.1%}{milliseconds:14.1f}{fewest:20,}")
        most = most_gpus(work, batch, each["seq_length"], cluster, 0.9)
        print(f"With {batch:,} tokens per step, up to {most} GPUs reach an efficiency of 90%.\n")


if __name__ == "__main__":
    launch.run(main)

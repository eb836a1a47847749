"""Check nodes and network before a run, with one process per GPU, started like train_llm.py.

torchrun --standalone --nproc-per-node 2 03-multi-node/tools/preflight.py
MASTER_ADDR=node1 MASTER_PORT=29501 srun --ntasks-per-node 8 python 03-multi-node/tools/preflight.py

It checks whether all ranks start, whether all nodes have the same versions and code, and whether
they share --save-dir. Then it times all-reduces of four sizes over all ranks. The last line lists
the faults. The exit status is 0 if there are none, 1 if there are some, and 2 for bad input.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import socket
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from common import cli, launch, ranks
from common.cli import at_least

ROOT = Path(__file__).resolve().parents[2]
SIZES = (2**12, 2**20, 2**24, 2**28)  # bytes of an all-reduce
REPEATS = 5
SEEN_WITHIN_S = 10.0  # a network file system can take seconds to show a new file to other nodes
TOO_SLOW = 0.5  # a smaller share of --bandwidth is a fault


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--save-dir", default="outputs", help="folder that holds the run folders")
    add("--timeout", default=60, type=at_least(1), help="seconds to wait for other ranks")
    add("--bandwidth", type=at_least(1e-3), help="bus bandwidth that the link should give, in GB/s")
    add("--max-bytes", default=SIZES[-1], type=at_least(SIZES[0]), help="largest all-reduce")
    return parser.parse_args()


def say(text: str) -> None:
    """Print a line on rank 0."""
    if os.environ["RANK"] == "0":
        print(text, flush=True)


# --- ranks ---


def connect(timeout: float) -> dist.Store:
    """Connect to a store, which shows which ranks are missing. A process group would only hang.

    torchrun serves the store. Without torchrun, rank 0 serves it.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serve, limit = os.environ["RANK"] == "0" and not by_torchrun, timedelta(seconds=timeout)
    store = dist.TCPStore(host, port, None, serve, limit, wait_for_workers=False)
    return dist.PrefixStore(f"preflight-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def exchange(store: dist.Store, stage: str, part: object, timeout: float) -> list:
    """Return the parts of all ranks, by rank. If some ranks do not come, name them and exit.

    part: anything that JSON can hold.
    """
    keys = [f"{stage}/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    store.set(keys[int(os.environ["RANK"])], json.dumps([socket.gethostname(), part]))
    deadline = time.monotonic() + timeout
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.2)
    came = {rank: json.loads(store.get(k)) for rank, k in enumerate(keys) if store.check([k])}
    if missing := ", ".join(str(rank) for rank in range(len(keys)) if rank not in came):
        hosts = name_ranks([(rank, host) for rank, (host, _) in came.items()])
        nodes = os.environ.get("SLURM_STEP_NODELIST")
        expected = f" (the nodes are {nodes})" if nodes else ""
        say(f"Failed: {stage}: after {timeout} s, {hosts} came, ranks {missing} did not{expected}.")
        ranks.wait_for_rank_0(1)  # the other ranks exit later, so that rank 0 can say it
        sys.exit(1)
    return [part for _, part in came.values()]


def name_ranks(hosts: list[tuple[int, str]]) -> str:
    """Return "ranks 0, 1 on node1 and ranks 2, 3 on node2" for pairs of a rank and its host."""
    names = dict.fromkeys(host for _, host in hosts)
    ranks = {name: [str(rank) for rank, host in hosts if host == name] for name in names}
    return " and ".join(f"ranks {', '.join(ranks[name])} on {name}" for name in names)


# --- nodes ---


def describe_node() -> dict[str, str]:
    """Return what must be the same on all nodes."""
    same = {"python": platform.python_version(), "torch": torch.__version__}
    same["transformers"] = importlib.metadata.version("transformers")
    if torch.cuda.is_available():
        same["GPUs"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        same["CUDA"] = torch.version.cuda
        same["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    for file in sorted((*ROOT.glob("common/*.py"), *ROOT.glob("[0-9]*/*.py"))):
        same[str(file.relative_to(ROOT))] = xxhash.xxh3_64_hexdigest(file.read_bytes())
    return same


def wait_for(file: Path) -> bool:
    """Return whether this node sees a file."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return file.exists()


# --- network ---


def time_all_reduce(size: int, device: torch.device) -> float:
    """Return the seconds of an all-reduce of `size` bytes."""
    numbers = torch.zeros(size // 4, device=device)
    dist.all_reduce(numbers)
    numbers[0].item()  # waits for the GPU
    start = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(numbers)
    numbers[0].item()
    return (time.perf_counter() - start) / REPEATS


def check_network(store: dist.Store, device: torch.device, args: argparse.Namespace) -> float:
    """Time all-reduces and print a table. Return the bus bandwidth of the largest one, in GB/s."""
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=n_ranks,
        timeout=timedelta(seconds=args.timeout),
        device_id=device if device.type == "cuda" else None,  # NCCL connects now, not later
    )
    expected = f"of {args.bandwidth:g} GB/s" if args.bandwidth else ""
    say(f"\n{'bytes':>13}{'ms':>11}{'GB/s':>9}  {expected}".rstrip())
    for size in (size for size in SIZES if size <= args.max_bytes):
        seconds = time_all_reduce(size, device)
        seconds = max(exchange(store, f"all-reduce-{size}", seconds, args.timeout))
        # The bus bandwidth of nccl-tests: what the link of each rank carries in a ring.
        rate = size / seconds * 2 * (n_ranks - 1) / n_ranks / 1e9
        share = f"  {rate / args.bandwidth:.0%}" if args.bandwidth else ""
        say(f"{size:13,}{1000 * seconds:11.3f}{rate:9.3f}{share}")
    dist.barrier()
    dist.destroy_process_group()
    return rate


def main() -> None:
    launch.prepare_environment()
    args = get_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    save_dir, rank = Path(args.save_dir).resolve(), int(os.environ["RANK"])
    store = connect(args.timeout)
    name = f".preflight-{uuid.uuid4().hex}"  # of a file that all nodes should see
    if rank == 0:
        save_dir.mkdir(parents=True, exist_ok=True)
        (save_dir / name).touch()
    ranks = exchange(store, "start", (socket.gethostname(), describe_node(), name), args.timeout)
    hosts = [host for host, _, _ in ranks]
    say(f"came: {name_ranks(list(enumerate(hosts)))}")
    nodes = {host: same for host, same, _ in ranks}
    for host, same in nodes.items():
        words = [f"{key} {value}" for key, value in same.items() if not key.endswith(".py")]
        say(f"{host}: {', '.join(words)}")
    right = nodes[hosts[0]]  # what rank 0's node has
    faults = [
        f"{host} has {what} {same.get(what)}, but rank 0's node has {right[what]}"
        for host, same in nodes.items()
        for what in right
        if same.get(what) != right[what]
    ]
    file = save_dir / ranks[0][2]
    seen = exchange(store, "shared folder", wait_for(file), args.timeout + SEEN_WITHIN_S)
    blind = {host: None for host, sees in zip(hosts, seen, strict=True) if not sees}
    faults += [f"{host} does not see the file that rank 0 wrote to {save_dir}" for host in blind]
    if rank == 0:
        file.unlink()
    if len(ranks) > 1:
        rate = check_network(store, device, args)
        if args.bandwidth and rate < TOO_SLOW * args.bandwidth:
            faults.append(f"the all-reduce has {rate:.3g} GB/s, --bandwidth is {args.bandwidth:g}")
    say(f"Failed: {'; '.join(faults)}." if faults else "Passed.")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    launch.run(main)

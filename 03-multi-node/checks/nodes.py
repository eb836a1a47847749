"""Compare the nodes: code, versions, data, free memory and disk, the save folder, the clocks."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import statistics
import time
import uuid
from collections import Counter
from pathlib import Path

import torch
import transformers
import xxhash

import common
from common import models
from common.cli import RunError
from common.data import load_sequences
from common.documents import find_documents
from common.shards import checksum, find_shards

from checks.rendezvous import NO_LIMIT, Rendezvous, name_ranks

MAX_CLOCK_OFFSET_S = 1.0
FREE_FACTOR = 2.0  # this many times less free memory or disk than on the other nodes is a fault
SEEN_WITHIN_S = 10.0  # a network file system can take seconds to show a new file to other nodes

# Each check returns its faults. All ranks must call it, and all ranks get the same faults.


def check_nodes(rdzv: Rendezvous, args: argparse.Namespace) -> tuple[list[str], dict]:
    """Compare what the nodes have. Return the faults, and what each node has, by node."""
    rdzv.begin("reading code and data", args.data_timeout)
    facts = rdzv.gather_nodes(describe_node(args) if rdzv.rank in rdzv.first_ranks else None)
    errors = {each["same"]["data"].get("error") for each in facts.values()}
    if len(errors) == 1 and None not in errors:  # the same error on all nodes is bad input
        rdzv.leave()
        raise RunError(errors.pop())
    faults = []
    for what, value in next(iter(facts.values()))["same"].items():
        found = compare(what, {node: each["same"][what] for node, each in facts.items()})
        faults += found
        if value and not found:
            rdzv.say(f"same   {what}: {f'{len(value)} files' if what == 'code' else value}")
    # Each rank queries only its own GPU, because a query of another GPU allocates memory there.
    gpu = torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else None
    gpus = enumerate(rdzv.gather(gpu))
    left = {name_ranks({rank: rdzv.hosts[rank]}): free for rank, free in gpus if free}
    by_name = {"GPU memory": left} if left else {}
    for what in ("memory", "disk"):
        by_name[what] = {node: each["free"][what] for node, each in facts.items()}
    for what, free in by_name.items():
        faults += [
            f"free {what}: {name} has {free[name]:.1f} GiB, {times:.1f} times less than the others"
            for name, times in far_below(free, FREE_FACTOR).items()
        ]
        rdzv.say(f"free   {what}: {min(free.values()):.1f} to {max(free.values()):.1f} GiB")
    return faults, facts


def describe_node(args: argparse.Namespace) -> dict[str, dict]:
    """Return what must be the same on all nodes, and what is free on this node in GiB."""
    root = Path(__file__).resolve().parents[2]
    files = {file.relative_to(root).as_posix(): file for file in root.glob("[0-9]*/**/*.py")}
    # The modules of `common` as they were imported, perhaps from another checkout.
    shared = Path(common.__file__).resolve().parent
    for file in (*shared.rglob("*.py"), *shared.rglob("presets/**/*.json")):
        files[file.relative_to(shared.parent).as_posix()] = file
    cuda = torch.cuda.is_available()
    same = {
        "code": {
            name: xxhash.xxh3_64_hexdigest(file.read_bytes())
            for name, file in sorted(files.items())
        },
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


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the host memory in bytes of this machine or, if smaller, of a cgroup (version 2)."""
    own = root / "proc/self/cgroup"
    match = re.search("^0::/(.*)$", own.read_text() if own.exists() else "", re.MULTILINE)
    group = root / "sys/fs/cgroup" / (match[1] if match else "")
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in (group, *group.parents):  # Slurm's --mem limits a group deep below the top one
        text = (folder / "memory.max").read_text() if (folder / "memory.max").exists() else "max"
        sizes += [int(text)] if text.strip().isdecimal() else []  # "max": no limit
    return min(sizes)


def describe_data(args: argparse.Namespace) -> dict[str, object]:
    """Return size and checksum of the text or, with --tokenize, of the tokens.

    Ready-made tokens are compared by the names, the sizes and both ends of their files. If the data
    set cannot be read, return the message as "error".
    """
    try:
        if args.tokenize:
            tokenizer = models.load_tokenizer(args.tokenizer_name or args.model_name)
            config = models.load_config(args.model_name, tokenizer)
            seq_length = models.sequence_length(config, args.seq_length)
            train, evaluation = load_sequences(args, tokenizer, seq_length)
            return {"sequences": len(train), "train": train.digest, "eval": evaluation.digest}
        if shards := find_shards(args.dataset_name):
            n_bytes = sum(file.stat().st_size for file in shards)
            return {"files": len(shards), "bytes": n_bytes, "checksum": checksum(shards)}
        digest, size = xxhash.xxh3_64(), 0
        documents = find_documents(args.dataset_name, args.dataset_subset, args.text_column)
        for batch in documents.load().iter(16):
            for text in batch["text"]:
                content = text.encode(errors="replace")
                digest.update(b"%d:" % len(content) + content)
                size += len(content)
        return {"bytes": size, "checksum": digest.hexdigest()}
    except RunError as error:
        return {"error": str(error)}


def compare(what: str, values: dict[str, object]) -> list[str]:
    """Return a fault for each node whose value is not that of the majority.

    values: by node, rank 0's first. Without a majority, rank 0's value counts as right. For
    dictionaries, the fault names only the items that differ.
    """
    texts = {node: json.dumps(value, sort_keys=True) for node, value in values.items()}
    text, count = Counter(texts.values()).most_common(1)[0]
    others = "the others have"
    if 2 * count <= len(values):
        first = next(iter(values))
        text, others = texts[first], f"{first} (rank 0) has"
    faults = []
    for node in (node for node in values if texts[node] != text):
        found, right, items = values[node], json.loads(text), ""
        if isinstance(found, dict) and isinstance(right, dict):
            keys = [key for key in {**right, **found} if right.get(key) != found.get(key)]
            items = f" for {', '.join(keys[:3])}{', ...' * (len(keys) > 3)}"
            found, right = (", ".join(str(d.get(key)) for key in keys[:3]) for d in (found, right))
        faults.append(f"{what}: {node} has {found}{items}, {others} {right}")
    return faults


def far_below(values: dict[str, float], factor: float) -> dict[str, float]:
    """Return how many times some values are below the median of the others, by name.

    The result contains the values that are more than `factor` times below. A single value never is.
    """
    found = {}
    for name, value in values.items():
        others = [values[other] for other in values if other != name]
        if others and value * factor < statistics.median_high(others):
            found[name] = statistics.median_high(others) / max(value, 1e-12)
    return found


def check_folder(rdzv: Rendezvous, args: argparse.Namespace) -> list[str]:
    """Let each node write a file to --save-dir and look for the files of the other nodes."""
    rdzv.begin("looking for the other nodes' files in --save-dir", args.timeout)
    folder = Path(args.save_dir) / f".preflight-{rdzv.gather(uuid.uuid4().hex)[0]}"
    error, seen = None, []
    if rdzv.rank in rdzv.first_ranks:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(rdzv.rank)).touch()
        except OSError as cause:
            error = cause.strerror
    errors = rdzv.gather_nodes(error)  # now all files have been written
    deadline = time.monotonic() + min(SEEN_WITHIN_S, args.timeout / 2)
    while rdzv.rank in rdzv.first_ranks and not any(errors.values()):
        first_ranks = zip(rdzv.nodes, rdzv.first_ranks, strict=True)
        seen = [node for node, rank in first_ranks if (folder / str(rank)).exists()]
        if len(seen) == len(rdzv.nodes) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    views = rdzv.gather_nodes(seen)
    if rdzv.rank in rdzv.first_ranks:
        shutil.rmtree(folder, ignore_errors=True)
    if any(errors.values()):
        return [
            f"save folder: {node} cannot write to {args.save_dir} ({why})"
            for node, why in errors.items()
            if why
        ]
    faults = find_other_folders(args.save_dir, views)
    if not faults:
        rdzv.say(f"same   save folder: {args.save_dir}")
    return faults


def find_other_folders(save_dir: str, seen: dict[str, list[str]]) -> list[str]:
    """Return a fault for each node that does not share --save-dir with the majority.

    seen: by node, the nodes whose files it sees there, including its own.
    """
    views = {node: f"files of {', '.join(nodes)}" for node, nodes in seen.items()}
    faults = compare("save folder", views)
    if not faults and any(len(nodes) < len(seen) for nodes in seen.values()):
        faults = ["save folder: the nodes see one another's files too late"]
    return [f"{fault} in {save_dir}, which all nodes must share" for fault in faults]


def check_clocks(rdzv: Rendezvous, args: argparse.Namespace) -> tuple[list[str], dict]:
    """Compare each node's clock with rank 0's. Return the faults, and (offset, error) by node."""
    rdzv.begin("comparing clocks", args.timeout)
    offset = None
    for peer in rdzv.first_ranks[1:]:
        if rdzv.rank in (0, peer):
            offset = measure_clock(rdzv, peer)
    first, *others = rdzv.gather_nodes(offset).items()
    clocks = {first[0]: (0.0, 0.0), **dict(others)}
    faults = find_wrong_clocks(clocks)
    for node, (offset, error) in others if not faults else ():
        rdzv.say(f"same   clock: {node} is {offset:+.4f} s (+/- {error:.4f} s) off rank 0's clock")
    return faults, clocks


def measure_clock(rdzv: Rendezvous, peer: int) -> tuple[float, float] | None:
    """Return how far the clock of `peer` is ahead of rank 0's, and the error, in seconds.

    Rank 0 and `peer` must call this; rank 0 gets None. `peer` reads its clock before and after rank
    0 reads its own. The error is half of that time (Cristian, 1989,
    https://doi.org/10.1007/BF01784024). The best of ten measurements counts.
    """
    offsets = []
    for number in range(10):
        ping, pong = f"ping/{peer}/{number}", f"pong/{peer}/{number}"
        if rdzv.rank == 0:
            rdzv.store.wait([ping], NO_LIMIT)
            rdzv.store.set(pong, repr(time.time()))
        elif rdzv.rank == peer:
            start = time.time()
            rdzv.store.set(ping, "")
            rdzv.store.wait([pong], NO_LIMIT)
            rank_0 = float(rdzv.store.get(pong))
            end = time.time()
            offsets.append(((end - start) / 2, (start + end) / 2 - rank_0))
    return min(offsets)[::-1] if offsets else None


def find_wrong_clocks(clocks: dict[str, tuple[float, float]]) -> list[str]:
    """Return a fault for each node whose clock does not agree with the majority.

    clocks: by node, rank 0's first: seconds ahead of rank 0's clock, and the error. Without a
    majority, rank 0's clock counts as right.
    """

    def is_off(node: str, right: float) -> bool:
        offset, error = clocks[node]
        return abs(offset - right) - error > MAX_CLOCK_OFFSET_S

    def count_agreeing(right: float) -> int:
        return sum(not is_off(node, right) for node in clocks)

    right = max((offset for offset, _ in clocks.values()), key=count_agreeing)
    majority = 2 * count_agreeing(right) > len(clocks) > 2
    whose = "the other clocks" if majority else "rank 0's clock"
    return [
        f"clock: {node} is {offset - right:+.4f} s (+/- {error:.4f} s) off {whose}"
        for node, (offset, error) in clocks.items()
        if is_off(node, right)
    ]

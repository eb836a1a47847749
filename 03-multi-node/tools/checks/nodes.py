"""Compare the nodes: code, versions, data, free memory and disk, the save folder."""

import argparse
import importlib.metadata
import json
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
from common.cli import RunError
from common.documents import find_documents
from common.shards import checksum, find_shards

from checks.rendezvous import Rendezvous, name_ranks

FAULT_FACTOR = 2.0  # this many times less than the others have is a fault
SEEN_WITHIN_S = 10.0  # a network file system can take seconds to show a new file to other nodes

# Each check returns its faults. All ranks must call it, and all ranks get the same faults.


def check_nodes(rdzv: Rendezvous, args: argparse.Namespace) -> list[str]:
    """Compare what the nodes have."""
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
    for what in next(iter(facts.values()))["free"]:
        by_name[what] = {node: each["free"][what] for node, each in facts.items()}
    for what, free in by_name.items():
        faults += [
            f"free {what}: {name} has {free[name]:.1f} GiB, {times:.1f} times less than the others"
            for name, times in far_below(free).items()
        ]
        rdzv.say(f"free   {what}: {min(free.values()):.1f} to {max(free.values()):.1f} GiB")
    return faults


def describe_node(args: argparse.Namespace) -> dict[str, dict]:
    """Return what must be the same on all nodes, and what is free on this node in GiB."""
    root = Path(__file__).resolve().parents[3]
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
    folder = Path(args.save_dir).resolve()
    folder = next(each for each in (folder, *folder.parents) if each.exists())
    free = {}
    meminfo = Path("/proc/meminfo")  # of Linux
    if meminfo.exists():
        available = re.search(r"^MemAvailable: +(\d+) kB$", meminfo.read_text(), re.MULTILINE)
        free["memory"] = int(available[1]) / 2**20
    free["disk"] = shutil.disk_usage(folder).free / 2**30
    return {"same": same, "free": free}


def describe_data(args: argparse.Namespace) -> dict[str, object]:
    """Return size and checksum of the text.

    Ready-made tokens are compared by the names, the sizes and both ends of their files. If the data
    set cannot be read, return the message as "error".
    """
    try:
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


def far_below(values: dict[str, float]) -> dict[str, float]:
    """Return how many times some values are below the median of the others, by name.

    The result contains the values that are more than FAULT_FACTOR times below. A single value never
    is.
    """
    found = {}
    for name, value in values.items():
        others = [values[other] for other in values if other != name]
        if others and value * FAULT_FACTOR < statistics.median_high(others):
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

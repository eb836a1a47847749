"""What a step waits for its data: packed blocks, items that cost time, disks that are slow.

python tests/benchmarks/data_loading.py --output tests/benchmarks/results/data_loading_cpu.json
python tests/benchmarks/data_loading.py --batches --output tests/benchmarks/results/batches_cpu.json

A plain training loop with the timers of the chapters, on the GPU if there is one. The slow disks
are simulated: an item sleeps for as long as a share of a step, which is measured first.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from machine import write_result
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM

from common.data import Sequences
from common.models import causal_attention, load_config, load_tokenizer
from common.timers import PhaseTimers

STEPS, WARM_UP, SEQUENCES = 24, 4, 4
SLOW = 0.75  # of a step: what all items of a batch sleep on the slow disk, together
STUTTER, EVERY = 8, 8  # steps: how long one item sleeps on the stuttering disk, how often
DISK_BLOCKS, DISK_READS = 2**15, 500


class OnTheFly(Dataset):
    """A block of a source file, which is read and tokenized as a whole for it, each time anew."""

    def __init__(self, length: int) -> None:
        self.tokenizer, self.length = load_tokenizer("gpt2-tiny"), length
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.files = [file for file in files if 15_000 < file.stat().st_size < 30_000]

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = self.files[index % len(self.files)].read_text(encoding="utf-8")
        ids = torch.tensor(self.tokenizer(text, verbose=False)["input_ids"][: self.length])
        return {"input_ids": ids, "labels": ids}


class SlowDisk(Dataset):
    """The packed blocks, as if the file were on a disk that is slow or, now and then, very slow.

    seconds: that every item takes. stutter: that every EVERY-th batch takes more.
    """

    def __init__(self, blocks: Dataset, seconds: float, stutter: float = 0.0) -> None:
        self.blocks, self.seconds, self.stutter = blocks, seconds, stutter

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        late = index % (EVERY * SEQUENCES) == 0
        time.sleep(self.seconds + self.stutter * late)
        return self.blocks[index]


def packed(length: int, vocabulary: int) -> Sequences:
    tokens = np.random.default_rng(0).integers(vocabulary, size=(1000, length), dtype=np.uint16)
    return Sequences(tokens, "none", 1.0)


class Training:
    """A model that trains on whatever a dataloader gives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = "gpt2" if device.type == "cuda" else "gpt2-tiny"
        config = load_config(self.name)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=causal_attention(config), dtype=torch.float32
        )
        self.model = model.to(device).train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.length = min(1024, config.max_position_embeddings)

    def run(self, dataset: Dataset, workers: int, prefetch: int | None) -> dict[str, float]:
        """Return what the timers say of STEPS steps."""
        dataloader = DataLoader(
            dataset,
            batch_size=SEQUENCES,
            sampler=range((STEPS + WARM_UP) * SEQUENCES),  # not more: workers read ahead
            num_workers=workers,
            prefetch_factor=prefetch,
            pin_memory=self.device.type == "cuda",
        )
        timers = PhaseTimers(self.device)
        batches = iter(dataloader)
        for step in range(STEPS + WARM_UP):
            if step == WARM_UP:
                timers.read(1, 1, 1.0)
            with timers("data"):
                batch = next(batches)
                batch = {key: t.to(self.device, non_blocking=True) for key, t in batch.items()}
            with timers("forward"):
                loss = self.model(**batch).loss
            with timers("backward"):
                loss.backward()
            with timers("update"):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        found = timers.read(SEQUENCES * self.length, 1, 1.0)
        return {key: found[key] for key in ("time/data", "time/total", "tokens_per_s")}


def measure_loading(training: Training, rounds: int) -> tuple[float, list[dict]]:
    """Return the ms of a step that waits for nothing, and rows of (data, workers, prefetch)."""
    blocks = packed(training.length, 1024)
    training.run(blocks, 0, None)
    step = training.run(blocks, 0, None)["time/total"] / 1000
    slow = SlowDisk(blocks, SLOW * step / SEQUENCES)
    stuttering = SlowDisk(blocks, 0.0, STUTTER * step)
    rows = [
        {"data": data, "workers": workers, "prefetch": prefetch, "runs": []}
        for data, workers, prefetch in (
            *(("packed", workers, 2 if workers else None) for workers in (0, 1, 2)),
            *(("on the fly", workers, 2 if workers else None) for workers in (0, 1, 2)),
            *(("slow disk", workers, 2 if workers else None) for workers in (0, 1, 2)),
            *(("stuttering disk", 2, prefetch) for prefetch in (2, 8)),
        )
    ]
    datasets = {"packed": blocks, "on the fly": OnTheFly(training.length)}
    datasets |= {"slow disk": slow, "stuttering disk": stuttering}
    for _ in range(rounds):
        for row in rows:
            found = training.run(datasets[row["data"]], row["workers"], row["prefetch"])
            row["runs"].append(found)
    return 1000 * step, rows


def measure_starts(length: int) -> list[dict]:
    """Return how long an epoch takes until its first batch, in ms: the first one, later ones."""
    rows = []
    for workers, persistent in ((0, False), (1, False), (2, False), (2, True)):
        dataloader = DataLoader(
            packed(length, 1024),
            batch_size=SEQUENCES,
            num_workers=workers,
            persistent_workers=persistent,
        )
        times = []
        for _ in range(4):
            start = time.perf_counter()
            batches = iter(dataloader)
            next(batches)
            times.append(1000 * (time.perf_counter() - start))
            for _ in batches:  # to the end, or persistent workers would have to be interrupted
                pass
        rows.append({"workers": workers, "persistent": persistent, "ms": times})
    return rows


def measure_disk(folder: Path) -> dict[str, list[float]]:
    """Return ms: the median, the sum and the most of blocks read at random from a file here.

    cold: the kernel is told to forget the file first; a virtual machine's host may remember it.
    """
    length = 1024
    path = folder / "blocks.bin"
    rng = np.random.default_rng(0)
    rng.integers(2**16, size=(DISK_BLOCKS, length), dtype=np.uint16).tofile(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    found = {}
    for state in ("cold", "warm"):
        if state == "cold" and not hasattr(os, "posix_fadvise"):
            continue
        if state == "cold":
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        tokens = np.memmap(path, np.uint16, mode="r", shape=(DISK_BLOCKS, length))
        blocks = Sequences(tokens, "none", 1.0)
        indices = np.random.default_rng(1).permutation(DISK_BLOCKS)[:DISK_READS]
        times = []
        for index in indices:
            start = time.perf_counter()
            blocks[int(index)]
            times.append(1000 * (time.perf_counter() - start))
        found[state] = times
    return {
        state: [statistics.median(times), sum(times), max(times)] for state, times in found.items()
    }


class OneByOne(Dataset):
    """Sequences without __getitems__, so that DataLoader reads each row by itself."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        input_ids = torch.from_numpy(self.tokens[index].astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids}


def measure_batches(folder: Path, rounds: int, batches: int = 100) -> dict[str, object]:
    """Return the ms that DataLoader needs for a batch of GPT-2's size from a memory map.

    Rows are read in random order by 0 workers. The file has been read before, so that the time is
    the time of the code, and not of the disk.
    """
    batch_size, length = 64, 1024
    path, shape = folder / "blocks.bin", (DISK_BLOCKS // 2, length)
    np.random.default_rng(0).integers(50257, size=shape, dtype=np.uint16).tofile(path)
    tokens = np.memmap(path, np.uint16, "r", shape=shape)
    datasets = {"one by one": OneByOne(tokens), "in one go": Sequences(tokens, "none", 1.0)}
    times = {name: [] for name in datasets}
    for _ in range(rounds):
        order = np.random.default_rng(1).permutation(len(tokens))[: batches * batch_size].tolist()
        for name, data in datasets.items():
            loader = iter(DataLoader(data, batch_size=batch_size, sampler=order))
            for _ in range(batches):
                start = time.perf_counter()
                next(loader)
                times[name].append(1000 * (time.perf_counter() - start))
    rows = {
        name: {"median_ms": statistics.median(each), "fastest_ms": min(each)}
        for name, each in times.items()
    }
    return {"sequences": batch_size, "length": length, "batches": batches * rounds, "rows": rows}


def measure_copies(device: torch.device) -> list[dict]:
    """Return how long copies to the GPU take: the device, and how long they hold up the host."""
    rows = []
    for mib in (1, 256):
        for pinned in (False, True):
            batch = torch.zeros(mib * 2**17, dtype=torch.int64)
            batch = batch.pin_memory() if pinned else batch
            host, copy = [], []
            for _ in range(20):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                begin = time.perf_counter()
                start.record()
                batch.to(device, non_blocking=True)
                end.record()
                host.append(1000 * (time.perf_counter() - begin))
                torch.cuda.synchronize()
                copy.append(start.elapsed_time(end))
            times = {"host_ms": statistics.median(host[5:]), "ms": statistics.median(copy[5:])}
            rows.append({"mib": mib, "pinned": pinned, **times})
    return rows


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as in every worker
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each row, in turn")
    parser.add_argument("--batches", action="store_true", help="measure only the time per batch")
    parser.add_argument("--folder", type=Path, help="on the disk to measure, if not for /tmp")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    if device.type == "cpu":
        torch.set_num_threads(1)  # one core for the training leaves others to the workers
    if args.batches:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            results = measure_batches(Path(folder), args.rounds)
        print(json.dumps(results, indent=1))
        if args.output:
            write_result(args.output, results)
        return
    training = Training(device)
    step_ms, rows = measure_loading(training, args.rounds)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        disk = measure_disk(Path(folder))
    results = {
        "model": training.name,
        "sequences": SEQUENCES,
        "length": training.length,
        "step_ms": step_ms,
        "slow_ms_per_batch": SLOW * step_ms,
        "stutter_ms": STUTTER * step_ms,
        "rows": rows,
        "starts": measure_starts(training.length),
        "disk_ms": disk,
    }
    if device.type == "cuda":
        results["copies"] = measure_copies(device)
    print(json.dumps(results, indent=1))
    if args.output:
        write_result(args.output, results)


if __name__ == "__main__":
    main()

"""A slow data set is seen in `time/data`, and workers hide it; the losses stay what they are."""

import os
import statistics
import time
from pathlib import Path

import data_loading
import numpy as np
import pytest
import torch
from helpers import read_metrics
from runner import finish, start
from torch.utils.data import DataLoader

from common.data import Sequences

ITEM_MS, SEQUENCES = 20, 6  # 120 ms a step, in one process


def make_items_slow() -> None:
    """Every block takes its time, as from a disk that is far away; sleeping costs no core."""
    getitems = Sequences.__getitems__

    def slow_getitems(self: Sequences, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        if torch.is_grad_enabled():  # not in the evaluation
            time.sleep(ITEM_MS / 1000 * len(indices))
        return getitems(self, indices)

    Sequences.__getitems__ = slow_getitems


def metrics_of(corpus: Path, tmp_path: Path, workers: int, **options: object) -> list[dict]:
    arguments = ["-d", corpus, "-s", 32, "--global-batch-size", SEQUENCES, "-b", SEQUENCES]
    arguments += ["--max-steps", 25, "--log-freq", 5, "--num-workers", workers]
    name = f"workers-{workers}"
    process = start([*arguments, "--save-dir", tmp_path, "-e", name], **options)
    assert finish(process) == 0
    return read_metrics(tmp_path / name)


def assert_data_is_in_time(metrics: list[dict]) -> None:
    """The first line holds the start of the workers."""
    waits = statistics.median(line["time/data"] for line in metrics[1:])
    in_time = waits < ITEM_MS * SEQUENCES / 2
    assert in_time, f"a step waits {waits:.0f} ms for its data"


def test_slow_items_are_seen_and_workers_hide_them(corpus, tmp_path):
    slow = metrics_of(corpus, tmp_path, 0, plant=make_items_slow)
    with pytest.raises(AssertionError, match=r"^a step waits \d+ ms for its data"):
        assert_data_is_in_time(slow)
    # sleep() takes at least as long as it says; what else a step does comes on top.
    for line in slow:
        assert line["time/total"] > line["time/data"] > 0.9 * ITEM_MS * SEQUENCES
    hidden = metrics_of(corpus, tmp_path, 3, plant=make_items_slow)
    assert_data_is_in_time(hidden)
    assert [line["loss"] for line in hidden] == [line["loss"] for line in slow]


def test_packed_blocks_need_no_workers(corpus, tmp_path):
    assert_data_is_in_time(metrics_of(corpus, tmp_path, 0))


# --- what measures them ---


@pytest.mark.check
def test_items_of_the_benchmark():
    blocks = data_loading.packed(16, 100)
    assert blocks[0]["input_ids"].shape == (16,) and len(blocks) == 1000
    on_the_fly = data_loading.OnTheFly(16)
    assert len(on_the_fly.files) >= 5
    assert on_the_fly[3]["input_ids"].shape == (16,)
    assert not torch.equal(on_the_fly[0]["input_ids"], on_the_fly[1]["input_ids"])
    slow = data_loading.SlowDisk(blocks, 0.002, 0.05)
    every = data_loading.EVERY * data_loading.SEQUENCES
    for index, least in ((0, 0.052), (1, 0.002), (every - 1, 0.002), (every, 0.052)):
        begin = time.perf_counter()
        item = slow[index]
        assert time.perf_counter() - begin >= least
        assert torch.equal(item["input_ids"], blocks[index]["input_ids"])


@pytest.mark.check
def test_batches_of_the_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(data_loading, "DISK_BLOCKS", 2**8)
    found = data_loading.measure_batches(tmp_path, rounds=2, batches=2)
    assert found["batches"] == 4 and set(found["rows"]) == {"one by one", "in one go"}
    tokens = np.arange(96, dtype=np.uint16).reshape(6, 16)
    datasets = (data_loading.OneByOne(tokens), Sequences(tokens, "none", 1.0))
    by_row, at_once = (next(iter(DataLoader(data, batch_size=6))) for data in datasets)
    assert all(torch.equal(by_row[key], at_once[key]) for key in ("input_ids", "labels"))
    assert not hasattr(datasets[0], "__getitems__")


@pytest.mark.check
def test_disk_of_the_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(data_loading, "DISK_BLOCKS", 2**9)
    monkeypatch.setattr(data_loading, "DISK_READS", 100)
    found = data_loading.measure_disk(tmp_path)
    assert set(found) <= {"cold", "warm"} and "warm" in found
    assert all(0 < median <= most <= total for median, total, most in found.values())


def test_persistent_workers_start_once():
    """Who makes an item says which process it is: the same ones in the second epoch, or others."""
    pids = {}
    for persistent in (False, True):
        loader = DataLoader(Who(), batch_size=1, num_workers=2, persistent_workers=persistent)
        pids[persistent] = [{int(pid) for pid in loader} for _ in range(2)]
    first, second = pids[False]
    assert len(first) == len(second) == 2 and not first & second
    first, second = pids[True]
    assert first == second


class Who(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getpid()

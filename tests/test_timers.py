"""Timers, the arithmetic of MFU, stragglers, and time that a step waits for data."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import CHAPTERS, first_then_nightly, read_metrics
from runner import Ranks, finish, start
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from common import models, timers
from common.data import Sequences
from common.timers import PhaseTimers, flops_per_token, peak_flops


@pytest.mark.check
def test_phases_add_up(monkeypatch):
    monkeypatch.setattr(timers, "peak_flops", lambda device: 1e12)
    start = time.perf_counter()
    clock = PhaseTimers(torch.device("cpu"))
    for _ in range(4):
        for phase, seconds in (("data", 0.01), ("forward", 0.02), ("update", 0.005)):
            with clock(phase):
                time.sleep(seconds)
    with clock("wait"):  # only in the step that is logged
        time.sleep(0.02)
    with clock("evaluate"):
        time.sleep(0.2)
    with clock("save"):
        time.sleep(0.2)
    times = clock.read(tokens_per_step=1000, world_size=2, token_flops=1e6)
    assert "time/evaluate" not in times and "time/save" not in times
    # sleep() takes at least as long as it says: lower bounds hold on the busiest machine.
    assert times["time/data"] >= 10 and times["time/forward"] >= 20 and times["time/update"] >= 5
    assert times["time/wait"] >= 20
    phases = times["time/data"] + times["time/forward"] + times["time/update"]
    assert phases <= times["time/total"] <= (time.perf_counter() - start) * 1000 / 4 - 100
    assert times["tokens_per_s"] == pytest.approx(1000 / (times["time/total"] / 1000))
    assert times["tokens_per_s_per_device"] == times["tokens_per_s"] / 2
    assert times["peak_mem_gib"] > 0.01
    assert times["mfu"] == pytest.approx(times["tokens_per_s"] / 2 * 1e6 / 1e12)
    start = time.perf_counter()
    with clock("update"):
        pass
    elapsed_ms = (time.perf_counter() - start) * 1000
    assert clock.read(1, 1, 1.0)["time/update"] <= elapsed_ms, "it starts anew"


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        # 124,475,904 parameters: the embedding is also the output layer, so all of them count.
        ("gpt2", 6 * 124_475_904 + 12 * 12 * 12 * 64 * 1024),
        # 8,030,261,248 parameters less an input embedding of 128256 x 4096.
        ("llama-3.1-8b", 6 * (8_030_261_248 - 128_256 * 4096) + 12 * 32 * 32 * 128 * 1024),
    ],
)
def test_flops_per_token(preset, expected):
    config = models.load_config(preset)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert flops_per_token(model, config, seq_length=1024) == expected


@pytest.mark.check
def test_peak_rates(monkeypatch):
    names = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H200 NVL": 835e12,
        "NVIDIA GeForce RTX 4090": 165e12,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "Some other device": None,
    }
    for name, expected in names.items():
        monkeypatch.setattr(timers.torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(torch.device("cuda")) == expected
    assert peak_flops(torch.device("cpu")) is None


LATE_MS = 1200  # how late rank 1 is in each step, in 3 micro-batches
WORDS = ("-s", 32, "--global-batch-size", 12, "-b", 2, "--max-steps", 6, "--log-freq", 3)


def be_late() -> None:
    if os.environ["RANK"] == os.environ.get("LATE_RANK", "1"):
        time.sleep(LATE_MS / 3 / 1000)


def make_rank_1_late() -> None:
    forward = GPT2LMHeadModel.forward

    def late_forward(self, *args: object, **options: object):
        if self.training:
            be_late()
        return forward(self, *args, **options)

    GPT2LMHeadModel.forward = late_forward


def make_data_late() -> None:
    load = Sequences.__getitems__

    def late(self, indices: list[int]):
        if torch.is_grad_enabled():  # not in the evaluation
            be_late()  # once for each micro-batch
        return load(self, indices)

    Sequences.__getitems__ = late


def run_late(corpus: Path, folder: Path, late: Callable, *args: object, rank: int = 1) -> tuple:
    """Return the last line of metrics, of steps 4 to 6, and what rank 0 said."""
    files = [str(folder / f"stderr-{rank}") for rank in range(2)]
    options = {"chapter": CHAPTERS[2], "stderr_file": files, "plant": late}
    arguments = ["-d", corpus, *WORDS, "--save-dir", folder, "-e", "run", *args]
    assert Ranks(2, arguments, env={"LATE_RANK": rank}, **options).finish() == [0, 0]
    return read_metrics(folder / "run")[-1], Path(files[0]).read_text()


@pytest.mark.parametrize("late", first_then_nightly([make_data_late, make_rank_1_late]))
def test_a_late_rank_is_named(late, corpus, tmp_path):
    metrics, said = run_late(corpus, tmp_path, late)
    assert "2 sequences x world size 2 x accumulation 3" in said
    wait, host = metrics["time/wait_max"], socket.gethostname()
    assert wait > LATE_MS / 2
    assert (metrics["slowest_rank"], metrics["slowest_host"]) == (1, host)
    assert metrics["time/wait"] == wait, "rank 0 waits longest, and is the one that is timed"
    assert f" | waited up to {wait:.1f} ms for rank 1 on {host}\n" in said


@pytest.mark.ci
def test_a_late_rank_0_is_named(corpus, tmp_path):
    """Llama has buffers. DDP would wait for those of rank 0 at the start of the forward pass."""
    args = ("-m", "llama-tiny", "-b", 6)
    metrics, _ = run_late(corpus, tmp_path, make_data_late, *args, rank=0)
    assert metrics["time/wait_max"] > LATE_MS / 3 / 2, "the wait is not seen"
    assert metrics["slowest_rank"] == 0


# --- waiting for data ---

ITEM_MS, SEQUENCES = 20, 6


def make_items_slow() -> None:
    """Every sequence takes its time, as from a disk that is far away; sleeping costs no core."""
    getitems = Sequences.__getitems__

    def slow_getitems(self: Sequences, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        if torch.is_grad_enabled():  # not in the evaluation
            time.sleep(ITEM_MS / 1000 * len(indices))
        return getitems(self, indices)

    Sequences.__getitems__ = slow_getitems


@pytest.mark.ci
def test_slow_items_are_seen(corpus, tmp_path):
    arguments = ["-d", corpus, "-s", 32, "--global-batch-size", SEQUENCES, "-b", SEQUENCES]
    arguments += ["--max-steps", 4, "--log-freq", 2, "--save-dir", tmp_path, "-e", "run"]
    assert finish(start(arguments, plant=make_items_slow)) == 0
    for line in read_metrics(tmp_path / "run"):  # sleep() takes at least as long as it says
        assert line["time/total"] > line["time/data"] >= ITEM_MS * SEQUENCES

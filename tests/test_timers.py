"""Timers, memory and the arithmetic of MFU."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import CHAPTERS, first_then_nightly, plant, read_metrics
from runner import Ranks, ask_ranks
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from common import models, timers
from common.data import Sequences
from common.timers import PhaseTimers, find_straggler, flops_per_token, peak_flops


def test_phases_add_up():
    start = time.perf_counter()
    clock = PhaseTimers(torch.device("cpu"))
    for _ in range(4):
        for phase, seconds in (("data", 0.01), ("forward", 0.02), ("update", 0.005)):
            with clock(phase):
                time.sleep(seconds)
    with clock("evaluate"):
        time.sleep(0.2)
    with clock("save"):
        time.sleep(0.2)
    times = clock.read(tokens_per_step=1000, world_size=2, token_flops=1.0)
    assert "time/evaluate" not in times and "time/save" not in times
    # sleep() takes at least as long as it says: lower bounds hold on the busiest machine.
    assert times["time/data"] >= 10 and times["time/forward"] >= 20 and times["time/update"] >= 5
    phases = times["time/data"] + times["time/forward"] + times["time/update"]
    assert phases <= times["time/total"] <= (time.perf_counter() - start) * 1000 / 4 - 100
    assert times["tokens_per_s"] == pytest.approx(1000 / (times["time/total"] / 1000))
    assert times["tokens_per_s_per_device"] == times["tokens_per_s"] / 2
    assert times["mfu"] is None and times["peak_mem_gib"] > 0.01


def test_read_starts_anew():
    clock = PhaseTimers(torch.device("cpu"))
    with clock("update"):
        time.sleep(0.5)
    assert clock.read(1, 1, 1.0)["time/update"] >= 500
    start = time.perf_counter()
    with clock("update"):
        pass
    assert clock.read(1, 1, 1.0)["time/update"] <= (time.perf_counter() - start) * 1000


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


def test_peak_rates(monkeypatch):
    cuda = torch.device("cuda")
    names = {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A10G": 70e12,
        "NVIDIA GeForce RTX 4090": 165e12,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA GeForce RTX 4090 D": None,
        "NVIDIA GeForce RTX 3090": 71e12,
        "NVIDIA GeForce RTX 3090 Ti": None,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "NVIDIA L4": 121e12,
        "NVIDIA L40": 181e12,
        "NVIDIA H200 NVL": 835e12,
        "AMD Instinct MI300X OAM": 1307e12,
        "Some other device": None,
    }
    for name, expected in names.items():
        monkeypatch.setattr(timers.torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(cuda) == expected
    assert peak_flops(torch.device("cpu")) is None


def test_mfu(monkeypatch):
    monkeypatch.setattr(timers, "peak_flops", lambda device: 1e12)
    clock = PhaseTimers(torch.device("cpu"))
    with clock("update"):
        time.sleep(0.05)
    report = clock.read(tokens_per_step=500, world_size=5, token_flops=1e6)
    assert report["mfu"] == pytest.approx(report["tokens_per_s"] / 5 * 1e6 / 1e12)


WAITS_MS = {0: 12.0, 1: 0.5, 2: 30.0}  # by rank


def find_slowest_on(rank: int, meeting_file: Path, queue) -> None:
    socket.gethostname = lambda: f"node{rank}"
    store = f"file://{meeting_file}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=len(WAITS_MS))
    queue.put((rank, find_straggler(WAITS_MS[rank])))
    dist.barrier()
    dist.destroy_process_group()


def test_who_waits_least_is_the_slowest(tmp_path):
    found = ask_ranks(len(WAITS_MS), find_slowest_on, tmp_path / "store")
    expected = {"time/wait_max": 30.0, "slowest_rank": 1, "slowest_host": "node1"}
    assert found == [expected] * 3


def test_alone_nobody_waits():
    assert find_straggler(1.0) == {}


# How late rank 1 is in each step, in 3 micro-batches. What else delays a rank of a busy machine can
# be as long as the first; then the second is tried, which takes longer.
LATE_MS = (90, 1800)


def planted_lateness_s() -> float:
    """Return how late this rank is in each micro-batch."""
    return int(os.environ["LATE_MS"]) / 3 / 1000 if os.environ["RANK"] == "1" else 0.0


def make_rank_1_late() -> None:
    forward = GPT2LMHeadModel.forward

    def late_forward(self, *args: object, **options: object):
        if self.training:
            time.sleep(planted_lateness_s())
        return forward(self, *args, **options)

    GPT2LMHeadModel.forward = late_forward


def make_data_of_rank_1_late() -> None:
    load = Sequences.__getitems__

    def late(self, indices: list[int]):
        if torch.is_grad_enabled():  # not in the evaluation
            time.sleep(planted_lateness_s())  # once for each micro-batch
        return load(self, indices)

    Sequences.__getitems__ = late


def late_and_later(
    chapter: str | Path,
    corpus: Path,
    tmp_path: Path,
    check: Callable[[dict, str, float], None],
    plant: Callable[[], None] = make_rank_1_late,
) -> None:
    """Check what a run with a late rank measures; if that fails, check one with a later rank.

    check: is given the last line of metrics, of steps 4 to 6, what rank 0 said, and how late rank 1
    was in each step, in ms.
    """
    for late_ms in LATE_MS:
        folder = tmp_path / f"{plant.__name__}-{Path(chapter).name}-{late_ms}"
        folder.mkdir()
        arguments = ["-d", corpus, "-s", 32, "--global-batch-size", 12, "-b", 2, "--max-steps", 6]
        arguments += ["--log-freq", 3, "--save-dir", folder, "-e", "run"]
        files = [str(folder / f"stderr-{rank}") for rank in range(2)]
        options = {"chapter": chapter, "stderr_file": files, "plant": plant}
        assert Ranks(2, arguments, env={"LATE_MS": late_ms}, **options).finish() == [0, 0]
        said = Path(files[0]).read_text()
        assert "2 sequences x 2 devices x 3 micro-batches" in said
        try:
            check(read_metrics(folder / "run")[-1], said, late_ms)
            return
        except AssertionError:
            if late_ms == LATE_MS[-1]:
                raise


def assert_the_late_rank_is_named(metrics: dict, said: str, late_ms: float) -> None:
    wait, host = metrics["time/wait_max"], socket.gethostname()
    seen = wait > late_ms / 2
    assert seen, f"the wait is {wait} ms"
    assert (metrics["slowest_rank"], metrics["slowest_host"]) == (1, host)
    assert metrics["time/wait"] == wait, "rank 0 waits longest, and is the one that is timed"
    assert f" | waited up to {wait:.1f} ms for rank 1 on {host}\n" in said


def assert_the_wait_is_missed_in(phase: str) -> Callable[[dict, str, float], None]:
    """Return the check for a planted bug: the wait counts as time of this phase."""

    def check(metrics: dict, said: str, late_ms: float) -> None:
        assert metrics[phase] > late_ms / 2
        assert metrics["time/wait_max"] < late_ms / 2

    return check


def test_a_late_rank_is_named(corpus, tmp_path):
    late_and_later("03-multi-node", corpus, tmp_path, assert_the_late_rank_is_named)


@pytest.mark.parametrize("chapter", first_then_nightly(CHAPTERS[2:]))
def test_a_rank_with_late_data_is_named(chapter, corpus, tmp_path):
    check = assert_the_late_rank_is_named
    late_and_later(chapter, corpus, tmp_path, check, make_data_of_rank_1_late)


@pytest.mark.ci
def test_a_sharded_forward_pass_waits_itself(corpus, tmp_path):
    """With FSDP: who is late in it is waited for in it; and the planted bug meets after it only."""
    missed = assert_the_wait_is_missed_in("time/forward")
    late_and_later("04-fsdp", corpus, tmp_path, missed)
    meet = '            with timers("wait"):\n                dist.all_reduce(barrier_tensor)\n'
    chapter = plant("04-fsdp", tmp_path / "chapter", [(meet, "")])
    late_and_later(chapter, corpus, tmp_path, missed, make_data_of_rank_1_late)


@pytest.mark.nightly
def test_a_meeting_after_the_backward_pass_sees_no_wait(corpus, tmp_path):
    """The planted bug: the backward pass waits, and its time is that of a slow computation."""
    meet, backward = "            if last_backward:\n", '            with timers("backward"):\n'
    call = "                loss.backward()"
    comment = "  # adds to the gradients of earlier micro-batches\n"
    move = [(backward + call + comment, ""), (meet, f"{backward}{call}\n{meet}")]
    chapter = plant(CHAPTERS[2], tmp_path / "chapter", move)
    late_and_later(chapter, corpus, tmp_path, assert_the_wait_is_missed_in("time/backward"))

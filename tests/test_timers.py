"""Timers, the arithmetic of MFU, traces of ranks, and ranks that are late."""

import json
import os
import re
import socket
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, read_metrics
from runner import Ranks, load_script
from transformers import AutoModelForCausalLM

from common import timers
from common.data import Sequences
from common.inputs import models
from common.timers import PhaseTimers, flops_per_token, peak_flops

SCRIPT = ROOT / "02-ddp/trace_ranks.py"
trace_ranks = load_script(SCRIPT)


@pytest.mark.check
def test_phases_add_up(monkeypatch):
    monkeypatch.setattr(timers, "peak_flops", lambda device: 1e12)
    start = time.perf_counter()
    clock = PhaseTimers(torch.device("cpu"))
    for _ in range(4):
        for phase, seconds in (("data", 0.01), ("forward", 0.02), ("update", 0.005)):
            with clock(phase):
                time.sleep(seconds)
    for phase, seconds in (("wait", 0.02), ("evaluate", 0.2), ("save", 0.2)):  # in one step
        with clock(phase):
            time.sleep(seconds)
    times = clock.read(steps=4, tokens_per_step=1000, world_size=2, token_flops=1e6)
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
    assert "time/update" not in clock.read(1, 1, 1, 1.0), "it starts anew"


def test_flops_per_token():
    for preset, expected in (
        # 124,475,904 parameters: the embedding is also the output layer, so all of them count.
        ("gpt2", 6 * 124_475_904 + 12 * 12 * 12 * 64 * 1024),
        # 8,030,261,248 parameters less an input embedding of 128256 x 4096.
        ("llama-3.1-8b", 6 * (8_030_261_248 - 128_256 * 4096) + 12 * 32 * 32 * 128 * 1024),
    ):
        config = models.load_config(preset)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert flops_per_token(model, config, seq_length=1024) == expected, preset


@pytest.mark.check
def test_peak_rates(monkeypatch):
    for name, expected in (
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce RTX 5070", 61.7e12),
        ("NVIDIA GeForce RTX 5070 Ti", 87.9e12),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Some other device", None),
    ):
        monkeypatch.setattr(timers.torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(torch.device("cuda")) == expected
    assert peak_flops(torch.device("cpu")) is None


# --- traces ---


def event(category: str, name: str, start_ms: float, end_ms: float, thread: int = 1) -> dict:
    """Return an event as torch.profiler writes it."""
    span = {"ts": 1000 * start_ms, "dur": 1000 * (end_ms - start_ms)}
    return {"ph": "X", "cat": category, "name": name, "tid": thread, **span}


STEPS = [
    event("user_annotation", "ProfilerStep#12", 0, 100),
    event("user_annotation", "ProfilerStep#13", 100, 200),
    event("gpu_user_annotation", "ProfilerStep#12", 0, 170),
    {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": 1, "ts": 1},
]
ON_GPU = [
    event("kernel", "gemm", 0, 50),
    event("kernel", "gemm on another stream", 30, 60),
    event("kernel", "short gemm", 35, 40),
    event("gpu_memcpy", "Memcpy HtoD", 85, 88),
    event("kernel", "gemm", 100, 200),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 80),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 70, 90),
    event("kernel", "ncclDevKernel_AllGather_RING_LL", 150, 160),
    event("gpu_user_annotation", "nccl:all_reduce", 40, 99),
    event("cpu_op", "aten::mm", 60, 99),
]
ON_CPU = [
    event("cpu_op", "aten::linear", 0, 60),
    event("cpu_op", "aten::addmm", 10, 50),
    event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 60, 99),
    event("cpu_op", "aten::mm", 85, 88),
    event("cpu_op", "aten::mm", 100, 200),
    event("user_annotation", "gloo:all_reduce", 40, 80, thread=2),
    event("user_annotation", "gloo:all_reduce", 70, 90, thread=3),
    event("user_annotation", "gloo:all_gather", 150, 160, thread=2),
    event("cpu_op", "aten::copy_", 60, 70, thread=2),  # a part of the collective
]


@pytest.mark.check
def test_exposed_communication_of_made_up_traces():
    """Two steps: 163 ms of computation, 60 ms of communication, of which 27 ms are exposed."""
    expected = {"step": 100, "computation": 81.5, "communication": 30, "exposed": 13.5}
    assert trace_ranks.measure(STEPS + ON_GPU, on_gpu=True) == pytest.approx(expected)
    assert trace_ranks.measure(STEPS + ON_CPU, on_gpu=False) == pytest.approx(expected)
    assert trace_ranks.measure(STEPS + ON_CPU[:5], on_gpu=False)["exposed"] == 0


# --- late ranks ---

LATE_MS = 1200  # how late a rank is in each step, in 3 micro-batches
WORDS = ("-s", 32, "--global-batch-size", 12, "-b", 2, "--max-steps", 6, "--log-freq", 3)


def make_data_late() -> None:
    load = Sequences.__getitems__

    def late(self, indices: list[int]):
        is_training = torch.is_grad_enabled()
        if is_training and os.environ["RANK"] == os.environ["LATE_RANK"]:
            time.sleep(LATE_MS / 3 / 1000)  # once for each micro-batch
        return load(self, indices)

    Sequences.__getitems__ = late


def run_late(
    rank: int, chapter: str, corpus: Path, folder: Path, *args: object
) -> tuple[dict, str, str]:
    """Trace steps 3 to 5; return the metrics of steps 4 to 6, and what rank 0 logged and printed.

    rank: the one of two that is late.
    """
    out, err = ([str(folder / f"{name}-{n}") for n in range(2)] for name in ("out", "err"))
    words = ["--skip-steps", 2, "--output", folder, ROOT / chapter / "train_llm.py", "-d", corpus]
    words += [*WORDS, "--save-dir", folder, "-e", "run", *args]
    options = {"script": str(SCRIPT), "plant": make_data_late, "env": {"LATE_RANK": rank}}
    assert Ranks(2, words, stdout_file=out, stderr_file=err, **options).finish() == [0, 0]
    return read_metrics(folder / "run")[-1], Path(err[0]).read_text(), Path(out[0]).read_text()


def assert_traced(printed: str, folder: Path) -> None:
    """Rank 1 is late, and the table is that of the traces, whose steps have all phases."""
    assert "Rank 1 arrives last" in printed
    columns = ["step", "computation", "communication", "exposed"]
    header, *rows = re.findall(r"^rank .*|^ +\d+(?: +[\d.]+){4}$", printed, re.MULTILINE)
    assert header.split() == ["rank", *columns] and len(rows) == 2
    for rank, row in enumerate(rows):
        events = json.loads((folder / f"rank{rank}.json").read_text())["traceEvents"]
        times = trace_ranks.measure(events, on_gpu=False)
        shown = [float(number) for number in row.split()]  # with one decimal
        assert shown == pytest.approx([rank, *(times[name] for name in columns)], abs=0.051)
        assert 0 < times["exposed"] <= times["communication"] < times["step"]
        assert 0 < times["computation"] < times["step"]
        assert rank == 1 or times["exposed"] > LATE_MS / 2
        names = [each["name"] for each in events]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 3
        assert [names.count(phase) for phase in ("forward", "backward", "update")] == [9, 9, 3]


def test_a_late_rank_is_named(corpus, tmp_path):
    """In the metrics and the log, and by trace_ranks.py."""
    metrics, said, printed = run_late(1, "03-multi-node", corpus, tmp_path)
    assert "2 sequences x world size 2 x accumulation 3" in said
    wait, host = metrics["time/wait_max"], socket.gethostname()
    assert wait > LATE_MS / 2
    assert (metrics["slowest_rank"], metrics["slowest_host"]) == (1, host)
    assert metrics["time/wait"] == wait, "rank 0 waits longest, and is the one that is timed"
    assert f" | waited up to {wait:.1f} ms for rank 1 on {host}\n" in said
    assert_traced(printed, tmp_path)


@pytest.mark.nightly
def test_traces_of_chapter_4(corpus, tmp_path):
    _, _, printed = run_late(1, "04-fsdp", corpus, tmp_path)
    assert_traced(printed, tmp_path)
    # All layers are gathered for each of 9 micro-batches.
    assert (tmp_path / "rank0.json").read_text().count('"gloo:all_gather"') > 18


@pytest.mark.ci
def test_a_late_rank_0_is_named(corpus, tmp_path):
    """Llama has buffers. DDP would wait for those of rank 0 at the start of the forward pass."""
    args = ("-m", "llama-tiny", "-b", 6)
    metrics, _, _ = run_late(0, "03-multi-node", corpus, tmp_path, *args)
    assert metrics["time/wait_max"] > LATE_MS / 3 / 2, "the wait is not seen"
    assert metrics["slowest_rank"] == 0
    assert metrics["time/total"] > metrics["time/data"] >= LATE_MS / 3

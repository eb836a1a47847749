"""Traces of ranks: the arithmetic on made-up events, and a real run on two ranks."""

import json
import os
import re
import time
from pathlib import Path

import pytest
from helpers import ROOT, first_then_nightly
from runner import Ranks, load_script
from transformers import GPT2LMHeadModel

SCRIPT = ROOT / "02-ddp/trace_ranks.py"
COLUMNS = ["step", "computation", "communication", "exposed"]
SMALL = ("-s", 32, "-b", 4, "--global-batch-size", 8, "--eval-sequences", 4)

trace_ranks = load_script(SCRIPT)


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


def read_table(printed: str) -> dict[int, dict[str, float]]:
    header, *rows = re.findall(r"^rank .*|^ +\d+(?: +[\d.]+){4}$", printed, re.MULTILINE)
    assert header.split() == ["rank", *COLUMNS]
    return {
        int(rank): dict(zip(COLUMNS, map(float, numbers), strict=True))
        for rank, *numbers in map(str.split, rows)
    }


def make_rank_1_late() -> None:
    """Rank 1 sleeps before each collective that its gradients need."""
    forward = GPT2LMHeadModel.forward

    def late(self, *args: object, **options: object):
        if self.training and os.environ["RANK"] == "1":
            time.sleep(1.5)
        return forward(self, *args, **options)

    GPT2LMHeadModel.forward = late


@pytest.mark.parametrize("chapter", first_then_nightly(["02-ddp", "04-fsdp"]))
def test_two_ranks_of_which_one_is_late(tmp_path, chapter):
    """It is named, and the table is that of the traces, whose steps have all phases."""
    words = ["--skip-steps", 2, "--output", tmp_path / "traces", ROOT / chapter / "train_llm.py"]
    words += [*SMALL, "--max-steps", 5, "--save-dir", tmp_path]
    files = [str(tmp_path / f"stdout-{rank}") for rank in range(2)]
    options = {"script": str(SCRIPT), "stdout_file": files, "plant": make_rank_1_late}
    assert Ranks(2, words, **options).finish() == [0, 0]
    printed = Path(files[0]).read_text()
    assert "Rank 1 arrives last" in printed
    table = read_table(printed)
    assert list(table) == [0, 1] and table[0]["exposed"] > 1000
    for rank, times in table.items():
        assert 0 < times["exposed"] <= times["communication"] < times["step"]
        assert 0 < times["computation"] < times["step"]
        events = json.loads((tmp_path / f"traces/rank{rank}.json").read_text())["traceEvents"]
        again = trace_ranks.measure(events, on_gpu=False)
        assert again == pytest.approx(times, abs=0.051)  # one decimal is printed
        names = [each["name"] for each in events]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 3
        assert [names.count(phase) for phase in ("forward", "backward", "update")] == [3, 3, 3]
        assert ("gloo:all_gather" in names) == (chapter == "04-fsdp")

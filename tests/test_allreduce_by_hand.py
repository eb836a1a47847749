"""Chapter 2's three ways to average gradients: each is right, and sends what theory says."""

import re
from pathlib import Path

import pytest
import torch
from helpers import ROOT, first_then_nightly, register, run_ranks
from transformers import AutoModelForCausalLM

from common.inputs import models

SCRIPT = ROOT / "02-ddp/allreduce_by_hand.py"
COUNTERS = Path("/proc/self/io")  # Linux only
METHODS = ("parameter_server", "ring", "all_reduce")
NO_COUNTERS = (str(COUNTERS), "/proc/no-such-file")
WRONG = ("chunk.copy_(chunk + received", "chunk.copy_(received")  # nothing is added up
LONGER = ("range(2 * (world_size - 1))", "range(2 * world_size)")  # right means, more bytes
for bug in (NO_COUNTERS, WRONG, LONGER):
    register("02-ddp/allreduce_by_hand.py", [bug])


def check_table(text: str, world_size: int, counted: bool = COUNTERS.exists()) -> None:
    """Compare what rank 0 printed with theory; numbers of bytes, where counted, within 2%."""
    header, *rows, end = text.splitlines()
    assert "equal DDP's gradients" in end
    size = int(re.search(r"S = ([\d,]+) bytes", header)[1].replace(",", ""))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    assert size == 4 * sum(parameter.numel() for parameter in model.parameters())
    table = {name: numbers for name, *numbers in map(str.split, rows)}
    assert tuple(table) == METHODS
    spread = [2 * (world_size - 1) / world_size] * world_size
    theory = [[world_size - 1.0] + [1.0] * (world_size - 1), spread, spread]
    for (busiest, unit, ms, *each), expected in zip(table.values(), theory, strict=True):
        assert unit == "B" and float(ms) > 0
        if not counted:
            assert {busiest, *each} == {"-"}
            continue
        # Two decimals are shown.
        assert [float(share) for share in each] == pytest.approx(expected, rel=0.02, abs=0.005)
        assert int(busiest.replace(",", "")) == pytest.approx(max(expected) * size, rel=0.02)


# 3 does not divide the number of gradients.
@pytest.mark.parametrize("world_size", first_then_nightly([3, 2, 4]))
def test_on_any_number_of_ranks(world_size, tmp_path):
    statuses, printed = run_ranks(SCRIPT, tmp_path, world_size)
    assert statuses == [0] * world_size
    check_table(printed, world_size)


@pytest.mark.ci
def test_one_rank_sends_nothing_and_a_system_without_counters_shows_a_dash(tmp_path):
    statuses, printed = run_ranks(SCRIPT, tmp_path, 1, NO_COUNTERS)
    assert statuses == [0]
    check_table(printed, 1, counted=False)


def test_planted_wrong_gradients(tmp_path):
    statuses, printed = run_ranks(SCRIPT, tmp_path, 3, WRONG)
    assert all(statuses) and "equal" not in printed
    assert "AssertionError: Tensor-likes are not close" in (tmp_path / "stderr-0").read_text()


@pytest.mark.skipif(not COUNTERS.exists(), reason=f"needs {COUNTERS}")
def test_planted_byte_too_many(tmp_path):
    """The planted ring goes on for two steps more."""
    statuses, printed = run_ranks(SCRIPT, tmp_path, 3, LONGER)
    assert statuses == [0, 0, 0]
    with pytest.raises(AssertionError, match=r"1\.33"):
        check_table(printed, 3)

"""Chapter 2's three ways to average gradients: each is right, and sends what theory says."""

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TORCHRUN, run_ranks, run_script
from transformers import AutoModelForCausalLM

from common import models

SCRIPT = ROOT / "02-ddp/allreduce_by_hand.py"
COUNTERS = Path("/proc/self/io")  # Linux only
METHODS = ("parameter_server", "ring", "all_reduce")


def check_table(text: str, world_size: int) -> None:
    """Compare what rank 0 printed with theory; numbers of bytes within 2%."""
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
        assert unit == "B"
        assert float(ms) > 0
        if not COUNTERS.exists():
            assert {busiest, *each} == {"-"}
            continue
        # Two decimals are shown.
        assert [float(share) for share in each] == pytest.approx(expected, rel=0.02, abs=0.005)
        assert int(busiest.replace(",", "")) == pytest.approx(max(expected) * size, rel=0.02)


def redirect_output(folder: Path) -> None:
    sys.stdout = (folder / "stdout").open("a", buffering=1)


@pytest.mark.check
def test_the_recorded_output_is_of_this_form():
    recorded = (ROOT / "02-ddp/recorded/allreduce_by_hand.txt").read_text()
    check_table(recorded.split("\n", 2)[2], 4)


@pytest.mark.ci
def test_as_the_reader_runs_it():
    done = run_script(*TORCHRUN, 4, SCRIPT)
    assert done.returncode == 0, done.stderr
    check_table(done.stdout, 4)


@pytest.mark.parametrize("world_size", [2, 3])  # 3 does not divide the number of gradients
def test_on_any_number_of_ranks(world_size, tmp_path):
    statuses, printed = run_ranks(SCRIPT, tmp_path, world_size)
    assert statuses == [0] * world_size
    check_table(printed, world_size)


def test_one_rank_sends_nothing_and_a_system_without_counters_shows_a_dash(tmp_path):
    statuses, printed = run_ranks(SCRIPT, tmp_path, 1, (str(COUNTERS), "/proc/no-such-file"))
    assert statuses == [0]
    rows = [line.split() for line in printed.splitlines()[1:4]]
    assert [(name, busiest, each) for name, busiest, _, _, each in rows] == [
        (name, "-", "-") for name in METHODS
    ]


@pytest.mark.parametrize(
    "bug",
    [
        ("if step < world_size - 1 else", "if step < world_size - 2 else"),  # one step too few
        ("chunk.copy_(chunk + received", "chunk.copy_(received"),  # nothing is added up
        ("range(2 * (world_size - 1))", "range(2 * (world_size - 1) - 1)"),  # a mean stays behind
        ("[sum(gathered)]", "[sum(gathered[1:])]"),  # rank 0's own gradients are left out
        ("assert_close(total / world_size", "assert_close(total"),  # a sum, not a mean
    ],
)
def test_planted_wrong_gradients(tmp_path, bug):
    statuses, printed = run_ranks(SCRIPT, tmp_path, 3, bug)
    assert all(statuses)
    assert "equal" not in printed
    assert "AssertionError: Tensor-likes are not close" in (tmp_path / "stderr-0").read_text()


@pytest.mark.skipif(not COUNTERS.exists(), reason=f"needs {COUNTERS}")
def test_planted_byte_too_many(tmp_path):
    """The planted ring goes on for two steps more: right means, more bytes."""
    statuses, printed = run_ranks(SCRIPT, tmp_path, 3, ("2 * (world_size - 1)", "2 * world_size"))
    assert statuses == [0, 0, 0]
    with pytest.raises(AssertionError, match=r"1\.33"):
        check_table(printed, 3)

"""--compile compiles each block of chapter 4, whether it recomputes or not."""

import pytest
import torch
from test_parity import plant

from common.launch import ALONE

# Compiled with the hooks that gather its weights, a block that recomputes is left as it was.
WITH_HOOKS = [
    ("            compiled = torch.compile(block.forward)", "            compiled = block.forward"),
    ("            block.forward = compiled", "            block.compile()"),
]


def graphs(train, monkeypatch, chapter: str, mode: str) -> int:
    """Return how many graphs a run of one step was compiled to."""
    for name, value in ALONE.items():  # restored afterwards
        monkeypatch.setenv(name, value)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    args = ("--max-steps", 1, "-s", 32, "--global-batch-size", 2, "--eval-freq", 9)
    train(*args, "--compile", "--activation-checkpointing", mode, chapter=chapter, name=mode)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_blocks_are_compiled(train, monkeypatch, corpus, mode):
    assert graphs(train, monkeypatch, "04-fsdp", mode) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_planted_hooks_leave_a_block_uncompiled(train, monkeypatch, tmp_path, mode):
    chapter = plant("04-fsdp", tmp_path / "chapter", WITH_HOOKS)
    assert graphs(train, monkeypatch, str(chapter), mode) == 0

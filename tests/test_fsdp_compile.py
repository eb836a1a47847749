"""--compile compiles each block of chapter 4, whether it recomputes or not, and the loss."""

import functools

import pytest
import torch
from helpers import plant

from common.distributed import SINGLE_PROCESS

# Compiled with the hooks that gather its weights, a block that recomputes is left as it was.
WITH_HOOKS = (
    "            layer.forward = torch.compile(layer.forward)",
    "            layer.compile()",
)
COMPILE = torch.compile
LOSS = ("        model.loss_function = torch.compile(model.loss_function)", "        pass")


def graphs(train, monkeypatch, chapter: str, mode: str) -> int:
    """Return how many graphs a run of one step was compiled to."""
    for name, value in SINGLE_PROCESS.items():  # restored afterwards
        monkeypatch.setenv(name, value)
    # Graphs are counted; to make kernels of them takes a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    args = ("--max-steps", 1, "-s", 32, "--global-batch-size", 2, "--eval-freq", 9, "--compile")
    # To its last batch, which is one sequence short before it is padded.
    train(*args, "--activation-checkpointing", mode, chapter=chapter, name=mode, whole=True)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_blocks_and_the_loss_are_compiled(train, monkeypatch, mode):
    assert graphs(train, monkeypatch, "04-fsdp", mode) == 4


@pytest.mark.ci
@pytest.mark.parametrize(
    ("planted", "left"),
    [([WITH_HOOKS], 2), ([LOSS], 2), ([WITH_HOOKS, LOSS], 0)],
    ids=["hooks", "loss", "both"],
)
def test_planted_what_is_not_compiled(train, monkeypatch, tmp_path, planted, left):
    """Sequences alike are one graph in training and one in evaluation, and so is the loss."""
    chapter = plant("04-fsdp", tmp_path / "chapter", planted)
    assert graphs(train, monkeypatch, str(chapter), "full") == left

"""Linear layers that multiply in fp8, emulated on a CPU: what they compute, and how they train.

torchao is not in the environment but in a folder beside it; only processes of these tests see it.
"""

import copy
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers import (
    CHAPTERS,
    ROOT,
    make_variant,
    plant,
    random_texts,
    read_metrics,
    register,
    replace_in,
)
from runner import Series, ask_ranks
from torch import nn
from transformers.pytorch_utils import Conv1D

import fp8
from common.errors import RunError

TORCHAO = ROOT / ".venv/torchao"
CHAPTER, CPU = CHAPTERS[4], torch.device("cpu")
STEPS = 20
# How far a loss may be from bfloat16's, relative to it; the farthest of two models was 4e-3.
BAND = 0.02


def see_torchao() -> None:
    """Put torchao on the path of this process, which emulates fp8 on its CPU."""
    sys.path.insert(0, str(TORCHAO))
    fp8.check_fp8 = lambda device: None


@pytest.fixture(scope="module", autouse=True)
def torchao() -> None:
    """Skip without torchao, and fail where the tests must be complete."""
    if not (TORCHAO / "torchao").is_dir():
        assert not os.environ.get("CI"), f"there is no torchao in {TORCHAO}"
        pytest.skip("needs torchao")


# --- one layer ---


def compute_and_convert(rank: int, queue) -> None:
    see_torchao()
    queue.put((rank, (two_layers(), convert())))


@pytest.fixture(scope="module")
def layers() -> tuple[list, list[str]]:
    """What two_layers and convert return in a process that sees torchao."""
    return ask_ranks(1, compute_and_convert)[0]


def two_layers() -> list[list[list[float]]]:
    """Return what a Linear and a Conv1D of the same numbers compute in fp8, and one in bfloat16.

    Each is output, gradient of the input, gradient of the weight and of the bias.
    """
    torch.manual_seed(0)
    linear = nn.Linear(32, 48)
    nn.init.normal_(linear.bias)
    conv = Conv1D(48, 32)
    conv.weight.data, conv.bias.data = linear.weight.detach().t().contiguous(), linear.bias.detach()
    # One outlier takes the small numbers of its tensor away: a scale for the whole shows.
    x = torch.randn(4, 16, 32).to(torch.bfloat16)
    x[0, 0, 0] = 3000.0
    grad = torch.randn(4, 16, 48).to(torch.bfloat16)
    found = []
    for layer in (linear, conv, copy.deepcopy(linear)):
        block = nn.Sequential(layer).to(torch.bfloat16)
        names = list(block.state_dict())
        if len(found) < 2:
            fp8.convert_to_fp8([block], 16, CPU)
        assert list(block.state_dict()) == names
        inputs = x.clone().requires_grad_()
        y = block(inputs)
        y.backward(grad)
        weight_grad = block[0].weight.grad
        weight_grad = weight_grad.t() if layer is conv else weight_grad
        tensors = (y.detach(), inputs.grad, weight_grad, block[0].bias.grad)
        found.append([t.float().flatten().tolist() for t in tensors])
    return found


def test_gpt_2_s_layer_computes_what_a_linear_layer_does(layers):
    """And not what one in bfloat16 does: without the casts all but the bias differ."""
    linear, conv, bare = layers[0]
    for number, (found, expected, other) in enumerate(zip(conv, linear, bare, strict=True)):
        near = pytest.approx(expected, abs=max(map(abs, expected)) * 2**-7)  # the last place
        assert found == near, number
        if number < 3:  # of the bias nothing is cast
            assert other != near, number


def convert() -> list[str]:
    """Return the kinds of layers that a block has afterwards; parameters stay the same ones."""
    layers = nn.Linear(32, 64), nn.GELU(), Conv1D(32, 64), nn.LayerNorm(32), nn.Linear(32, 24)
    block = nn.Sequential(*layers)
    before = {name: id(parameter) for name, parameter in block.named_parameters()}
    assert fp8.convert_to_fp8([block], 16, CPU) == 2
    assert before == {name: id(parameter) for name, parameter in block.named_parameters()}
    with pytest.raises(RunError, match="No layer of this model supports fp8: use chapter 5"):
        fp8.convert_to_fp8([block[4:]], 16, CPU)
    return [type(layer).__name__ for layer in block]


def test_which_layers_are_converted(layers):
    """A side of 24 is no multiple of 16."""
    assert layers[1] == ["Float8Linear", "GELU", "Float8Conv1D", "LayerNorm", "Linear"]


# --- training ---


CHECK = ("    check_fp8(device)\n", f"    __import__('sys').path.insert(0, {str(TORCHAO)!r})\n")
NOT_CONVERTED = [("    convert_to_fp8(layers, args.seq_length, device)", "    pass")]
register(f"{CHAPTER}/diffs/fp8.py", [CHECK])
register(CHAPTER, NOT_CONVERTED, ["fp8"])


def assert_near_bfloat16(folder: Path, bug: list[tuple[str, str]] = ()) -> None:
    """Train on two ranks; this CPU emulates fp8 without the check for a GPU."""
    (folder / "corpus.json").write_text(json.dumps(random_texts(28)))
    flags = [
        *("-d", folder / "corpus.json", "-s", 16, "--lr", 1e-3, "--global-batch-size", 4),
        *("--max-steps", STEPS, "--log-freq", 1, "--save-dir", folder),
    ]
    variant = plant(make_variant(folder, CHAPTER, "fp8"), folder / "emulated", bug)
    replace_in(variant / "fp8.py", *CHECK)
    chapters = {"fp8": str(variant), "bf16": CHAPTER}
    runs = {
        name: {"args": [*flags, "-e", name], "chapter": chapter}
        for name, chapter in chapters.items()
    }
    Series(2, runs, folder / "series")
    found, right = ([line["loss"] for line in read_metrics(folder / run)] for run in runs)
    assert len(found) == len(right) == STEPS and found[-1] < found[0] - 0.3
    assert found == pytest.approx(right, rel=BAND)
    assert all(one != other for one, other in zip(found, right, strict=True)), "it is bfloat16"


@pytest.mark.ci
def test_trains_like_bfloat16(tmp_path):
    assert_near_bfloat16(tmp_path)


def test_planted_layers_that_stay_as_they_are_are_noticed(tmp_path):
    with pytest.raises(AssertionError, match=r"^it is bfloat16"):
        assert_near_bfloat16(tmp_path, NOT_CONVERTED)


@pytest.mark.check
def test_what_cannot_run_is_refused():
    with pytest.raises(RunError, match=r"8.9 or higher and this device is a cpu: use chapter 5"):
        fp8.check_fp8(CPU)

"""Linear layers that multiply in fp8, emulated on a CPU: what they compute, and how they train.

torchao is not in the environment but in a folder beside it; only processes of these tests see it.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import ROOT, assert_same_tensors, hand_over, random_texts, read_metrics, tensors
from runner import Series, ask_ranks
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import precision
from common import models, sharding
from common.cli import RunError

TORCHAO = ROOT / ".venv/torchao"
CHAPTER, FIRST = "05-mixed-precision", "01-single-gpu"
STEPS = 20
FP8 = ("--precision", "fp8")
# How far a loss may be from bfloat16's, relative to it; the farthest of two models was 4e-3.
BAND = 0.02
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def see_torchao() -> None:
    """Put torchao on the path of this process."""
    sys.path.insert(0, str(TORCHAO))


@pytest.fixture(scope="module", autouse=True)
def torchao() -> None:
    """Skip without torchao, and fail where the tests must be complete."""
    if not (TORCHAO / "torchao").is_dir():
        assert not os.environ.get("CI"), f"there is no torchao in {TORCHAO}"
        pytest.skip("needs torchao")


# --- one layer ---


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that are left of a tensor when it is scaled to the range of a type."""
    largest = torch.finfo(dtype).max
    scale = largest / tensor.abs().max().double().clamp(min=1e-12)
    scale = scale.float()  # as torchao's is
    scaled = (tensor.float() * scale).clamp(-largest, largest)
    return scaled.to(dtype).float() / scale


KINDS = ("Linear", "Conv1D")


def compute_and_convert(rank: int, queue) -> None:
    see_torchao()
    queue.put((rank, ({kind: one_layer(kind) for kind in KINDS}, convert())))


@pytest.fixture(scope="module")
def layers() -> tuple[dict, dict]:
    """What one_layer returns by kind, and what convert does; in a process that sees torchao."""
    return ask_ranks(1, compute_and_convert)[0]


def one_layer(kind: str) -> list[list[list[float]]]:
    """Return what a converted layer computes, the same by hand, and without the cast to fp8.

    Each is output, gradient of the input, gradient of the weight and of the bias.
    """
    torch.manual_seed(0)
    layer = nn.Sequential(Conv1D(48, 32) if kind == "Conv1D" else nn.Linear(32, 48))
    layer.to(torch.bfloat16)
    weight, bias = layer[0].weight.detach(), layer[0].bias
    nn.init.normal_(bias)
    # One outlier takes the small numbers of its tensor away: a scale for the whole shows.
    x = torch.randn(4, 16, 32).to(torch.bfloat16)
    x[0, 0, 0] = 3000.0
    grad = torch.randn(4, 16, 48).to(torch.bfloat16)
    matrix = weight if kind == "Conv1D" else weight.t()  # inputs by outputs
    rows, grad_rows = x.view(-1, 32), grad.view(-1, 48)

    def by_hand(cast, cast_grad) -> list[torch.Tensor]:
        y = (cast(rows) @ cast(matrix)).to(torch.bfloat16) + bias
        grad_weight = (cast_grad(grad_rows).t() @ cast(rows)).to(torch.bfloat16)
        grad_weight = grad_weight.t() if kind == "Conv1D" else grad_weight
        grad_x = (cast_grad(grad_rows) @ cast(matrix).t()).to(torch.bfloat16)
        return [y, grad_x, grad_weight, grad_rows.sum(0)]

    names = list(layer.state_dict())
    precision.convert_to_fp8([layer], 16)
    assert type(layer[0]) is not Conv1D and list(layer.state_dict()) == names
    x.requires_grad_()
    y = layer(x)
    y.backward(grad)
    found = [y.detach(), x.grad, layer[0].weight.grad, layer[0].bias.grad]
    right = by_hand(lambda t: cast(t, E4M3), lambda t: cast(t, E5M2))
    wrong = by_hand(lambda t: t.float(), lambda t: t.float())
    return [[t.float().flatten().tolist() for t in ts] for ts in (found, right, wrong)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_multiplies_what_fits_into_8_bits(layers, kind):
    """And adds up in float32. Not as bfloat16: without the casts all but the bias differ."""
    found, right, bare = layers[0][kind]
    for number, (ours, expected, other) in enumerate(zip(found, right, bare, strict=True)):
        largest = max(map(abs, expected))
        near = pytest.approx(expected, abs=largest * 2**-7)  # bfloat16's last place
        assert ours == near, number
        if number < 3:  # of the bias nothing is cast
            assert other != near, number


def convert() -> dict:
    """Return what becomes of two blocks with layers of many kinds, and of two models."""
    answers = {}
    for side in (64, 24):
        block = nn.Sequential(nn.Linear(32, side), nn.GELU(), Conv1D(32, side), nn.LayerNorm(32))
        before = {name: id(p) for name, p in block.named_parameters()}
        try:
            count = precision.convert_to_fp8([block], 16)
        except RunError as error:
            answers[side] = str(error)
            continue
        kept = before == {name: id(p) for name, p in block.named_parameters()}
        answers[side] = (count, kept, [type(layer).__name__ for layer in block])
    for name in ("gpt2-tiny", "llama-tiny"):
        model = AutoModelForCausalLM.from_config(models.load_config(name))
        count = precision.convert_to_fp8(sharding.find_layers(model), 16)
        answers[name] = (count, type(model.get_output_embeddings()).__name__)
    return answers


def test_which_layers_are_converted(layers):
    """A side of 24 is no multiple of 16; parameters stay the same ones, with their names."""
    answers = layers[1]
    assert answers[64] == (2, True, ["Float8Linear", "GELU", "Float8Conv1D", "LayerNorm"])
    assert answers[24].endswith("no layer of this model supports fp8, so give bf16.")
    # In each of two blocks: 4 layers, or 7.
    assert answers["gpt2-tiny"] == (8, "Linear") and answers["llama-tiny"] == (14, "Linear")


# --- training ---


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """On this CPU the check lets fp8 pass; what the script imports, it imports after that."""
    see_torchao()
    original = precision.check_precision

    def let_pass(args: argparse.Namespace, device: torch.device) -> str:
        return "fp8" if args.precision == "fp8" else original(args, device)

    precision.check_precision = let_pass
    yield
    precision.check_precision = original
    sys.path.remove(str(TORCHAO))


class Trained:
    """Runs on 2 ranks, all in one start, and then what goes on with copies of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "corpus.json").write_text(json.dumps(random_texts(28)))
        runs = {
            "bf16": self.options("bf16"),
            "fp8": self.options("fp8", *FP8),
        }
        Series(2, runs, folder / "series")
        resumed = {2: self.options(CHAPTER, *FP8), 1: self.options(FIRST, chapter=FIRST)}
        for world_size, run in resumed.items():
            hand_over(folder / "fp8", folder / run["chapter"], STEPS // 2)
            Series(world_size, {"resumed": run}, folder / f"resumed-{world_size}")

    def options(self, name: str, *args: object, chapter: str = CHAPTER) -> dict[str, object]:
        flags = [
            *("-d", self.folder / "corpus.json", "-s", 16, "--lr", 1e-3),
            *("--global-batch-size", 4, "--max-steps", STEPS, "--ckpt-freq", STEPS // 2),
            *("--log-freq", 1, "--save-dir", self.folder, "-e", name, *args),
        ]
        return {"args": flags, "chapter": chapter, "within": emulated}

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for line in read_metrics(self.folder / name)]


@pytest.fixture(scope="module")
def trained(make_folder) -> Trained:
    return Trained(make_folder("fp8"))


@pytest.mark.ci
def test_trains_like_bfloat16(trained):
    found, right = trained.losses("fp8"), trained.losses("bf16")
    assert len(found) == len(right) == STEPS and found[-1] < found[0] - 0.3
    assert found == pytest.approx(right, rel=BAND)
    assert all(one != other for one, other in zip(found, right, strict=True)), "it is bfloat16"


@pytest.mark.ci
@pytest.mark.parametrize("chapter", [CHAPTER, FIRST])
def test_goes_on(trained, chapter):
    """With fp8 the losses are the same bit by bit; in chapter 1 they are others, if near."""
    expected, found = trained.losses("fp8"), trained.losses(chapter)
    assert found[: STEPS // 2] == expected[: STEPS // 2] and len(found) == STEPS
    assert (found == expected) == (chapter == CHAPTER)
    assert found == pytest.approx(expected, rel=BAND)
    if chapter == CHAPTER:
        assert_same_tensors(*(tensors(trained.folder / run)["model"] for run in ("fp8", chapter)))

"""torch.nn.DataParallel as a variant of chapter 1: one process, and the same losses.

Two devices are simulated: DataParallel's own copies of the model run on the CPU, each in a thread.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from five_ways import AUTOCAST_OF_COPIES, COPIES
from helpers import (
    CHAPTERS,
    EXACT,
    ROOT,
    hand_over,
    make_variant,
    plant,
    read_metrics,
    register,
    run_script,
    write_corpus,
    write_narrow,
)
from transformers import GPT2LMHeadModel

from common import variants
from common.errors import RunError

NAME = "data-parallel"
SUM = (".loss.mean() /", ".loss.sum() /")
IN_BFLOAT16 = (COPIES, AUTOCAST_OF_COPIES)
register(CHAPTERS[0], [SUM], [NAME])
register(CHAPTERS[0], [IN_BFLOAT16], [NAME])


@pytest.fixture
def two_devices(monkeypatch) -> None:
    copying = sys.modules["torch.nn.parallel.replicate"]  # a function has the same name

    def copies(tensors: list, devices: list, detach: bool) -> list[list[torch.Tensor]]:
        return [[t.detach() if detach else t.clone() for t in tensors] for _ in devices]

    def forward(self: torch.nn.DataParallel, **batch: torch.Tensor) -> object:
        replicas = copying.replicate(self.module, [0, 1], not torch.is_grad_enabled())
        parts = [{key: tensor.chunk(2)[n] for key, tensor in batch.items()} for n in (0, 1)]
        with ThreadPoolExecutor() as pool:
            first, second = pool.map(lambda replica, part: replica(**part), replicas, parts)
        first["loss"] = torch.stack([first["loss"], second["loss"]])  # as DataParallel returns them
        return first

    monkeypatch.setattr(copying, "_get_device_index", lambda device, *_: device)
    monkeypatch.setattr(copying, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(torch.nn.DataParallel, "forward", forward)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def run(train, tmp_path):
    """Return a function that trains chapter 1, or a variant, and returns its metrics."""
    few = ("-d", write_corpus(tmp_path), "-m", write_narrow(tmp_path / "narrow", "gpt2-tiny"))
    few += ("--tokenizer-name", "gpt2-tiny", "-s", 32, "--global-batch-size", 8, "-b", 2)
    few += ("--max-steps", 8, "--log-freq", 1, "--ckpt-freq", 4, "--warmup-steps", 2)

    def trained(name: str, *args: object, script: Path = ROOT / CHAPTERS[0]) -> list[dict]:
        return train(*few, *args, name=name, chapter=os.path.relpath(script, ROOT))

    return trained


@pytest.fixture
def variant(tmp_path) -> Path:
    return make_variant(tmp_path, CHAPTERS[0], NAME)


def column(metrics: list[dict], key: str) -> list[float]:
    return [line[key] for line in metrics if key in line]


def test_one_device_is_chapter_1(run, variant):
    expected, found = run("one"), run("same", script=variant)
    for key in EXACT:
        assert column(found, key) == column(expected, key), key


def test_two_devices_give_the_same_losses(run, tmp_path, variant, two_devices):
    expected, found = run("one"), run("two", script=variant)
    for key, rel in (("loss", 1e-5), ("grad_norm", 1e-3), ("eval_loss", 1e-5)):
        assert column(found, key) == pytest.approx(column(expected, key), rel=rel), key
    assert column(found, "loss") != column(expected, "loss"), "nothing was split"
    # Chapter 1 goes on with a checkpoint of the variant, and the other way round.
    for source, other, chapter in (("two", "a", ROOT / CHAPTERS[0]), ("one", "b", variant)):
        hand_over(tmp_path / source, tmp_path / other, 4)
        again = run(other, script=chapter)
        assert column(again, "loss") == pytest.approx(column(expected, "loss"), rel=1e-5)


def test_planted_sum_changes_the_losses(run, tmp_path, variant, two_devices):
    script = plant(variant, tmp_path / "planted", [SUM])
    expected, found = run("one"), run("two", script=script)
    assert column(found, "loss") != pytest.approx(column(expected, "loss"), rel=1e-3)


def test_what_cannot_work_is_refused(run, variant, monkeypatch):
    with pytest.raises(RunError, match="cannot be compiled"):
        run("compiled", "--compile", script=variant)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(RunError, match="--global-batch-size 8 must be a multiple of 3"):
        run("uneven", script=variant)


@pytest.mark.ci
def test_bfloat16_with_autocast(run, tmp_path, variant, two_devices):
    """The class is decorated, as five_ways.py does it; the variant autocast is refused."""
    with pytest.raises(variants.VariantError, match="autocast do not go together"):
        variants.choose(1, [NAME, "autocast"])
    script = plant(variant, tmp_path / "planted", [IN_BFLOAT16])
    forward = GPT2LMHeadModel.forward
    try:
        found = run("bf16", "--lr", 1e-3, script=script)
    finally:
        GPT2LMHeadModel.forward = forward
    expected = run("one", "--lr", 1e-3)
    assert column(found, "loss") == pytest.approx(column(expected, "loss"), rel=1e-3)
    assert column(found, "loss") != pytest.approx(column(expected, "loss"), rel=1e-6), "no cast"


@pytest.mark.multi_gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_on_two_gpus(tmp_path, variant, precision):
    """Losses of one GPU, and the first GPU has more memory in use than the second."""
    changes = [] if precision == "tf32" else [IN_BFLOAT16]
    script = plant(variant, tmp_path / "planted", changes)
    few = ("--max-steps", 10, "--log-freq", 1, "--eval-sequences", 16, "--save-dir", tmp_path)
    one = run_script(f"{CHAPTERS[0]}/train_llm.py", *few, "-e", "one", CUDA_VISIBLE_DEVICES="0")
    (tmp_path / "peaks").mkdir()
    peaks = ("tests/benchmarks/with_peaks.py", tmp_path / "peaks", script / "train_llm.py")
    two = run_script(*peaks, *few, "-e", "two", CUDA_VISIBLE_DEVICES="0,1")
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    expected, found = (column(read_metrics(tmp_path / name), "loss") for name in ("one", "two"))
    assert found == pytest.approx(expected, rel=1e-3 if precision == "tf32" else 1e-2)
    first, second = json.loads((tmp_path / "peaks/0.json").read_text()).values()
    assert first > second > 0

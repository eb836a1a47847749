"""torch.nn.DataParallel as a diff of chapter 1: one process, and the same losses.

Two devices are simulated: DataParallel's own copies of the model run on the CPU, each in a thread.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import (
    CHAPTERS,
    EXACT,
    ROOT,
    apply,
    hand_over,
    patch,
    read_metrics,
    register,
    replace_in,
    run_script,
    write_corpus,
    write_narrow,
)
from transformers import GPT2LMHeadModel

from common.cli import RunError

DIFF = ROOT / "02-ddp/diffs/data-parallel.diff"
OF_THE_MODEL = "model.forward = autocast(model.forward)"
OF_THE_CLASS = "type(model).forward = autocast(type(model).forward)"
SUM = (".loss.mean() /", ".loss.sum() /")
register(DIFF, [SUM])


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
    """Return a function that trains chapter 1, or a patched copy, and returns its metrics."""
    few = ("-d", write_corpus(tmp_path), "-m", write_narrow(tmp_path / "narrow", "gpt2-tiny"))
    few += ("--tokenizer-name", "gpt2-tiny", "-s", 32, "--global-batch-size", 8, "-b", 2)
    few += ("--max-steps", 8, "--log-freq", 1, "--ckpt-freq", 4, "--warmup-steps", 2)

    def trained(name: str, *args: object, script: Path = ROOT / CHAPTERS[0]) -> list[dict]:
        return train(*few, *args, name=name, chapter=os.path.relpath(script, ROOT))

    return trained


def column(metrics: list[dict], key: str) -> list[float]:
    return [line[key] for line in metrics if key in line]


def test_one_device_is_chapter_1(run, tmp_path):
    expected, found = run("one"), run("same", script=patch(CHAPTERS[0], tmp_path / "p", diff=DIFF))
    for key in EXACT:
        assert column(found, key) == column(expected, key), key


def test_two_devices_give_the_same_losses(run, tmp_path, two_devices):
    script = patch(CHAPTERS[0], tmp_path / "p", diff=DIFF)
    expected, found = run("one"), run("two", script=script)
    for key, rel in (("loss", 1e-5), ("grad_norm", 1e-3), ("eval_loss", 1e-5)):
        assert column(found, key) == pytest.approx(column(expected, key), rel=rel), key
    assert column(found, "loss") != column(expected, "loss"), "nothing was split"
    # Chapter 1 goes on with a checkpoint of the patched script, and the other way round.
    for source, other, chapter in (("two", "a", ROOT / CHAPTERS[0]), ("one", "b", script)):
        hand_over(tmp_path / source, tmp_path / other, 4)
        again = run(other, script=chapter)
        assert column(again, "loss") == pytest.approx(column(expected, "loss"), rel=1e-5)


def test_planted_sum_changes_the_losses(run, tmp_path, two_devices):
    script = patch(CHAPTERS[0], tmp_path / "p", (SUM,), DIFF)
    expected, found = run("one"), run("two", script=script)
    assert column(found, "loss") != pytest.approx(column(expected, "loss"), rel=1e-3)


def test_what_cannot_work_is_refused(run, tmp_path, monkeypatch):
    script = patch(CHAPTERS[0], tmp_path / "p", diff=DIFF)
    with pytest.raises(RunError, match="cannot be compiled"):
        run("compiled", "--compile", script=script)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(RunError, match="--global-batch-size 8 must be a multiple of 3"):
        run("uneven", script=script)


def with_autocast(folder: Path) -> Path:
    """Return chapter 1 with both diffs, as five_ways.py makes it."""
    copy = patch(CHAPTERS[0], folder)
    assert apply(DIFF, folder, "-C1").returncode == 0
    replace_in(copy / "train_llm.py", OF_THE_MODEL, OF_THE_CLASS)
    return copy


@pytest.mark.ci
def test_bfloat16_with_autocast(run, tmp_path, two_devices):
    forward = GPT2LMHeadModel.forward
    try:
        found = run("bf16", "--lr", 1e-3, script=with_autocast(tmp_path / "p"))
    finally:
        GPT2LMHeadModel.forward = forward
    expected = run("one", "--lr", 1e-3)
    assert column(found, "loss") == pytest.approx(column(expected, "loss"), rel=1e-3)
    assert column(found, "loss") != pytest.approx(column(expected, "loss"), rel=1e-6), "no cast"


@pytest.mark.multi_gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_on_two_gpus(tmp_path, precision):
    """Losses of one GPU, and the first GPU has more memory in use than the second."""
    folder = tmp_path / "p"
    script = patch(CHAPTERS[0], folder, diff=DIFF) if precision == "tf32" else with_autocast(folder)
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

"""What all ranks refuse together, in one sentence and with status 2."""

import argparse
import contextlib
import functools
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import listing, speak_at_once, write_corpus, write_narrow
from runner import Ranks, Series
from transformers import AutoConfig, AutoModelForCausalLM

import precision
from common import models
from common.cli import RunError

NODES, FSDP, PRECISION = "03-multi-node", "04-fsdp", "05-mixed-precision"
SMALL = ("-s", 32, "--global-batch-size", 6, "--max-steps", 4, "--log-freq", 1, "--lr", 2e-3)
GPU = "NVIDIA A100-SXM4-80GB"


@pytest.fixture(scope="module")
def folder(make_folder) -> Path:
    """A folder with a corpus and weights."""
    folder = make_folder("folder")
    write_corpus(folder)
    config = AutoConfig.from_pretrained(write_narrow(folder / "gpt2", "gpt2-tiny"))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "gpt2")
    models.load_tokenizer("gpt2-tiny").save_pretrained(folder / "gpt2")
    return folder


def flags(folder: Path, name: str, *args: object) -> list[object]:
    model = ("-m", folder / "gpt2") if "-m" not in args else ()
    return ["-d", folder / "corpus.json", *SMALL, *model, "--save-dir", folder, "-e", name, *args]


# --- a device and a machine of another kind, which this one plays ---


@contextlib.contextmanager
def cannot_multiply_in(dtype: torch.dtype) -> Iterator[None]:
    """As PyTorch says it of a device that has no such product."""
    product = torch.Tensor.__matmul__

    def multiply(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if one.dtype == dtype:
            raise RuntimeError(f'"addmm_impl_cpu_" not implemented for {str(dtype)[6:]!r}')
        return product(one, other)

    with mock.patch.object(torch.Tensor, "__matmul__", multiply):
        yield


@contextlib.contextmanager
def on_a_node_of_its_own(folder: Path, rank: int) -> Iterator[None]:
    """A relative path is another one for each rank."""
    with (
        contextlib.chdir(folder / str(rank)),
        mock.patch.object(socket, "gethostname", lambda: f"node{rank}"),
    ):
        yield


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "param_dtype", "capability", "expected"),
    [
        ("fp8", "float32", None, "and this device is a cpu: give --precision bf16."),
        ("fp8", "float32", (8, 6), f"and this device is {GPU}: give --precision bf16."),
        ("fp8", "float32", (8, 9), "--precision fp8 needs torchao: install it with pip "),
        ("fp32", "bfloat16", None, "--precision fp32 needs float32 weights, but --param-dtype"),
    ],
)
def test_a_precision_that_cannot_be(monkeypatch, name, param_dtype, capability, expected):
    """On a CPU, or on a GPU of this compute capability, without torchao."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: GPU)
    monkeypatch.setitem(sys.modules, "torchao", None)
    args = argparse.Namespace(precision=name, param_dtype=param_dtype)
    device = torch.device("cuda:0" if capability else "cpu")
    with pytest.raises(RunError, match=re.escape(expected)):
        precision.check_precision(args, device)


@pytest.mark.check
def test_a_loss_scale_that_cannot_recover():
    for scale in (65536.0, precision.SMALLEST_SCALE):
        precision.check_scale(scale)
    with pytest.raises(RunError, match="no step has finite gradients: give --precision bf16"):
        precision.check_scale(precision.SMALLEST_SCALE / 2)


# --- what two ranks refuse ---


@contextlib.contextmanager
def with_flag(log_freq: str) -> Iterator[None]:
    with mock.patch.object(sys, "argv", [*sys.argv, "--log-freq", log_freq]):
        yield


def refused(nodes: Path) -> dict[str, tuple]:
    """Return by name: chapter, arguments, what to run it in, the sentence's beginning."""
    no_bf16 = functools.partial(cannot_multiply_in, torch.bfloat16)
    own_nodes = [functools.partial(on_a_node_of_its_own, nodes, rank) for rank in range(2)]
    return {
        "by default": (PRECISION, (), no_bf16, r"This device \(a cpu\) does not support \S+ bf16:"),
        "fp32 works": (PRECISION, ("--precision", "fp32"), no_bf16, None),
        "one node": (FSDP, ("--hsdp",), None, "--hsdp needs several nodes, with equally many"),
        "own data": (
            *(NODES, ("-d", "corpus.json"), own_nodes),
            r"Rank 1 on node1 has dataset_checksum \w+, rank 0 on node0 has \w+: give all",
        ),
        "own flags": (
            *(NODES, (), [functools.partial(with_flag, n) for n in ("3", "1")]),
            r"Rank 1 on \S+ has log_freq 1, rank 0 on \S+ has 3: give all nodes the same",
        ),
    }


def test_two_ranks_refuse(folder, tmp_path):
    """All cases in one start of the processes; all ranks say the sentence, and write nothing."""
    for rank, word in enumerate(("number", "page")):
        (tmp_path / str(rank)).mkdir()
        text = (folder / "corpus.json").read_text().replace("number", word)
        (tmp_path / str(rank) / "corpus.json").write_text(text)
    cases, before, runs = refused(tmp_path), set(listing(folder)), {}
    said = {name: [tmp_path / f"{name}-{rank}" for rank in range(2)] for name in cases}
    for name, (chapter, args, within, expected) in cases.items():
        runs[name] = {
            "args": flags(folder, name.replace(" ", "-"), *args),
            "chapter": chapter,
            "within": within,
            "expect": 2 if expected else 0,
            "stderr_file": [str(file) for file in said[name]],
        }
    series = Series(2, runs, tmp_path / "ended")
    for name, (*_, expected) in cases.items():
        series.assert_ended(name)
        if expected is None:
            continue
        first, second = (file.read_text() for file in said[name])
        sentence = first.splitlines()[-1]
        assert re.match(expected, sentence) and "Traceback" not in first, name
        assert second == f"[rank 1] {sentence}\n", name
    new = {Path(path).relative_to(folder).parts[0] for path in listing(folder).keys() - before}
    assert new == {"fp32-works", "own-data"}
    assert {path.name for path in (folder / "own-data").iterdir()} == {".lock", "checkpoints"}


def test_weights_that_rank_0_cannot_read(folder):
    """It says why, and no other rank waits for it."""
    broken = Path(shutil.copytree(folder / "gpt2", folder / "cut"))
    file = broken / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    stderr = [str(folder / f"cut-{rank}.stderr") for rank in range(2)]
    options = {"chapter": FSDP, "plant": speak_at_once, "stderr_file": stderr}
    args = flags(folder, "cut-weights", "--pretrained", "-m", broken)
    assert Ranks(2, args, **options).finish() == [2, 1]
    said = [Path(path).read_text() for path in stderr]
    assert said[0].splitlines()[-1].startswith(f"{broken} has no usable weights (Error while ")
    assert "other ranks are gone" in said[1] and "Traceback" not in "".join(said)

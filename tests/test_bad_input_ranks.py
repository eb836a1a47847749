"""What all ranks refuse together, in one sentence and with status 2. And weights in several files.

The folders of weights are as the hub has them: several files and an index, other dtypes, old names.
"""

import argparse
import contextlib
import functools
import json
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
from helpers import listing, read_metrics, speak_at_once, write_corpus
from runner import Ranks, Series
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import precision
from common import models
from common.cli import RunError

NODES, FSDP, PRECISION = "03-multi-node", "04-fsdp", "05-mixed-precision"
SMALL = ("-s", 32, "--global-batch-size", 6, "--max-steps", 4, "--log-freq", 1, "--lr", 2e-3)
INDEX = "model.safetensors.index.json"
EMBEDDING = "transformer.wte.weight"
GPU = "NVIDIA A100-SXM4-80GB"


def save_folder(folder: Path, model_type: str = "gpt2", dtype: torch.dtype = torch.float32) -> None:
    """Save a small model of this type, with weights in several files, and its tokenizer."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 128, "vocab_size": 4096}
    no_dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(model_type, **sizes, **no_dropout, **special)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder, max_shard_size="100KB")
    models.load_tokenizer("gpt2-tiny").save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) >= 2 and (folder / INDEX).exists()


@pytest.fixture(scope="module")
def folder(make_folder) -> Path:
    """A folder with a corpus and weights."""
    folder = make_folder("hub")
    write_corpus(folder)
    save_folder(folder / "gpt2")
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


# --- weights in several files ---


def test_weights_that_rank_0_cannot_read(folder):
    """It says why, and no other rank waits for it."""
    broken = Path(shutil.copytree(folder / "gpt2", folder / "cut"))
    file = broken / json.loads((broken / INDEX).read_text())["weight_map"][EMBEDDING]
    os.truncate(file, file.stat().st_size - 1)
    stderr = [str(folder / f"cut-{rank}.stderr") for rank in range(2)]
    options = {"chapter": FSDP, "plant": speak_at_once, "stderr_file": stderr}
    args = flags(folder, "cut-weights", "--pretrained", "-m", broken)
    assert Ranks(2, args, **options).finish() == [2, 1]
    said = [Path(path).read_text() for path in stderr]
    assert said[0].splitlines()[-1].startswith(f"{broken} has no usable weights (Error while ")
    assert "other ranks are gone" in said[1] and "Traceback" not in "".join(said)


def with_old_names(folder: Path) -> None:
    """As on the hub for years: no prefix, and the mask of each block beside its weights."""
    save_folder(folder)
    parts = [load_file(path) for path in folder.glob("*.safetensors")]
    weights = {n.removeprefix("transformer."): t for part in parts for n, t in part.items()}
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 128, 128).tril() for n in range(2)}
    assert "wte.weight" in weights and "lm_head.weight" not in weights
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(weights | masks, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.ci
def test_losses_of_pretrained_weights_are_chapter_1s(folder):
    """On 3 ranks, which not all rows can be divided by. Llama's are bfloat16, in several files."""
    with_old_names(folder / "old")
    save_folder(folder / "llama", "llama", torch.bfloat16)
    losses = {}
    for ranks, chapter in ((1, "01-single-gpu"), (3, FSDP)):
        runs = {}
        for model in ("old", "llama"):
            args = ("-m", folder / model, "--pretrained", "-b", 2)
            runs[f"{model}-{ranks}"] = {
                "args": flags(folder, f"{model}-{ranks}", *args),
                "chapter": chapter,
            }
        series = Series(ranks, runs, folder / f"on-{ranks}")
        for name in runs:
            series.assert_ended(name)
            metrics = read_metrics(folder / name)
            losses[name] = [*(line["loss"] for line in metrics), metrics[-1]["eval_loss"]]
    for model in ("old", "llama"):
        assert losses[f"{model}-3"] == pytest.approx(losses[f"{model}-1"], rel=1e-5), model

"""What all ranks refuse together, in one sentence and with status 2."""

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
from helpers import ROOT, listing, make_variant, speak_at_once, write_corpus, write_narrow
from runner import Ranks, Series, load_script
from transformers import AutoConfig, AutoModelForCausalLM

import fp8
from common import cli, launch
from common.errors import RunError
from common.inputs import models

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
def on_a_node_of_its_own(folder: Path, rank: int) -> Iterator[None]:
    """A relative path is another one for each rank."""
    with (
        contextlib.chdir(folder / str(rank)),
        mock.patch.object(socket, "gethostname", lambda: f"node{rank}"),
    ):
        yield


@pytest.mark.check
@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 6), f"and this device is {GPU}: "),
        ((8, 9), "fp8 needs torchao: install it with pip "),
    ],
)
def test_fp8_that_cannot_be(monkeypatch, capability, expected):
    """On a GPU of this compute capability, without torchao; test_fp8.py has the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: GPU)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(RunError, match=re.escape(expected)):
        fp8.check_fp8(torch.device("cuda:0"))


class SetUpError(Exception):
    """A script has got as far as its log."""


@pytest.mark.check
@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_a_gpu_without_bfloat16(monkeypatch, precision):
    """PyTorch emulates it there, many times slower; the default asks for it."""
    for name, value in launch.SINGLE_PROCESS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    emulated = lambda including_emulation=True: including_emulation  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", emulated)
    monkeypatch.setattr(cli, "start_log", mock.Mock(side_effect=SetUpError))
    flags = () if precision == "bf16" else ("--precision", precision)
    monkeypatch.setattr(sys, "argv", ["train_llm.py", *flags])
    before = torch.get_float32_matmul_precision()
    script = load_script(ROOT / PRECISION / "train_llm.py")
    try:
        if flags:
            with pytest.raises(SetUpError):
                script.main()
            return
        with pytest.raises(RunError, match=r"^This GPU does not have bfloat16: give --precision "):
            script.main()
    finally:
        torch.set_float32_matmul_precision(before)


# --- what two ranks refuse ---


@contextlib.contextmanager
def with_flag(log_freq: str) -> Iterator[None]:
    with mock.patch.object(sys, "argv", [*sys.argv, "--log-freq", log_freq]):
        yield


def refused(nodes: Path) -> dict[str, tuple]:
    """Return by name: chapter, arguments, what to run it in, the sentence's beginning."""
    own_nodes = [functools.partial(on_a_node_of_its_own, nodes, rank) for rank in range(2)]
    hsdp = str(make_variant(nodes, FSDP, "hsdp"))
    return {
        "one node": (hsdp, (), None, "HSDP needs several nodes, with equally many ranks on each"),
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
    for name, (chapter, args, within, _) in cases.items():
        runs[name] = {
            "args": flags(folder, name.replace(" ", "-"), *args),
            "chapter": chapter,
            "within": within,
            "expect": 2,
            "stderr_file": [str(file) for file in said[name]],
        }
    series = Series(2, runs, tmp_path / "ended")
    for name, (*_, expected) in cases.items():
        series.assert_ended(name)
        first, second = (file.read_text() for file in said[name])
        sentence = first.splitlines()[-1]
        assert re.match(expected, sentence) and "Traceback" not in first, name
        assert second == f"[rank 1] {sentence}\n", name
    new = {Path(path).relative_to(folder).parts[0] for path in listing(folder).keys() - before}
    assert new == {"own-data"}
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

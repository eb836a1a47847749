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
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import (
    ROOT,
    environment,
    listing,
    read_metrics,
    speak_at_once,
    write_corpus,
    write_narrow,
)
from runner import Ranks, Series
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import precision
from common import models, tracker
from common.cli import RunError

NODES, FSDP, PRECISION = "03-multi-node", "04-fsdp", "05-mixed-precision"
SMALL = ("-s", 32, "--global-batch-size", 6, "--max-steps", 4, "--log-freq", 1, "--lr", 2e-3)
INDEX = "model.safetensors.index.json"
EMBEDDING = "transformer.wte.weight"
GPU = "NVIDIA A100-SXM4-80GB"


def save_folder(folder: Path, preset: str, dtype: torch.dtype = torch.float32) -> Path:
    """Save a narrow model with weights of its own, in several files, and its tokenizer."""
    torch.manual_seed(7)
    write_narrow(folder, preset)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(dtype)
    model.save_pretrained(folder, max_shard_size="100KB")
    models.load_tokenizer(preset).save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) >= 2 and (folder / INDEX).exists()
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    parts = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for part in parts for name, tensor in part.items()}


def file_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


@pytest.fixture(scope="module")
def folder(make_folder) -> Path:
    """A folder with a corpus and weights."""
    folder = make_folder("hub")
    write_corpus(folder)
    save_folder(folder / "gpt2", "gpt2-tiny")
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
def on_a_gpu(*capability: int) -> Iterator[None]:
    """The check alone sees a GPU, and no torchao; nothing comes after it."""
    check = precision.check_precision
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda _: capability),
        mock.patch.object(torch.cuda, "get_device_name", lambda _: GPU),
        mock.patch.dict(sys.modules, {"torchao": None}),
        mock.patch.object(
            precision, "check_precision", lambda args, _: check(args, torch.device("cuda:0"))
        ),
    ):
        yield


@contextlib.contextmanager
def on_a_node_of_its_own(folder: Path, rank: int) -> Iterator[None]:
    """A relative path is another one for each rank."""
    with (
        contextlib.chdir(folder / str(rank)),
        mock.patch.object(socket, "gethostname", lambda: f"node{rank}"),
        mock.patch.object(tracker, "SEEN_WITHIN_S", 0.3),
    ):
        yield


# --- what two ranks refuse ---


CANNOT = (
    "This device (a cpu) does not support --precision {}: give another one; fp32 works on every "
    "device."
)
NO_FP8 = (
    "--precision fp8 needs a GPU of compute capability 8.9 or higher and this device is {}: "
    "give --precision bf16."
)
TWO_PRECISIONS = (
    "--precision {} needs float32 weights, but --param-dtype is bfloat16: "
    "give only one of the two flags."
)
PARAM_BF16 = ("--param-dtype", "bfloat16")
BF16, FP16, FP8 = (("--precision", name) for name in ("bf16", "fp16", "fp8"))


def refused(folder: Path, nodes: Path) -> dict[str, tuple]:
    """Return by name: chapter, arguments, what to run it in, the sentence ("...": any words)."""
    no_bf16 = functools.partial(cannot_multiply_in, torch.bfloat16)
    no_fp16 = functools.partial(cannot_multiply_in, torch.float16)
    a100, h100 = (functools.partial(on_a_gpu, *version) for version in ((8, 0), (9, 0)))
    own_nodes = [functools.partial(on_a_node_of_its_own, nodes, rank) for rank in range(2)]
    one_node = "--hsdp replicates over nodes and there is one: leave it out."
    return {
        "one node": (FSDP, ("--hsdp",), None, one_node),
        "by default": (PRECISION, (), no_bf16, CANNOT.format("bf16")),
        "fp16": (PRECISION, FP16, no_fp16, CANNOT.format("fp16")),
        "fp32 works": (PRECISION, ("--precision", "fp32"), no_bf16, None),
        "fp8": (PRECISION, FP8, None, NO_FP8.format("a cpu")),
        "fp8 on Ampere": (PRECISION, FP8, a100, NO_FP8.format(GPU)),
        "no torchao": (PRECISION, FP8, h100, "--precision fp8 needs torchao: ...bf16."),
        "two": (PRECISION, (*BF16, *PARAM_BF16), None, TWO_PRECISIONS.format("bf16")),
        "own folders": (
            *(NODES, ("--save-dir", "outputs"), own_nodes),
            "Rank 1 on node1 does not see .../outputs/own-folders of rank 0: give a --save-dir on "
            "a file system that all nodes share.",
        ),
        "own data": (
            *(NODES, ("-d", "corpus.json"), own_nodes),
            "Rank 1 on node1 has dataset_checksum ..., rank 0 on node0 has ...: give all nodes the "
            "same arguments, data and Python.",
        ),
    }


def assert_refused(world_size: int, cases: dict[str, tuple], folder: Path, env=None) -> None:
    """All ranks say the sentence of each case, in one start of the processes.

    env: by case, the variables of each rank.
    """
    stderr = folder.with_name(f"{folder.name}-said-by-{world_size}")
    stderr.mkdir()
    runs = {}
    for name, (chapter, args, within, expected) in cases.items():
        runs[name] = {
            "args": flags(folder, name.replace(" ", "-"), *args),
            "chapter": chapter,
            "within": within,
            "env": (env or {}).get(name),
            "expect": 2 if expected else 0,
            "stderr_file": [str(stderr / f"{name}-{rank}") for rank in range(world_size)],
        }
    series = Series(world_size, runs, stderr)
    wrong = {}
    for name, (*_, expected) in cases.items():
        if expected is None:
            series.assert_ended(name)
            continue
        said = [(stderr / f"{name}-{rank}").read_text() for rank in range(world_size)]
        pattern = ".*".join(map(re.escape, expected.split("...")))
        texts = [said[0].splitlines()[-1] + "\n", *said[1:]]
        for rank, text in enumerate(texts):
            if not re.fullmatch((rf"\[rank {rank}\] " if rank else "") + pattern + "\n", text):
                wrong[f"{name}, rank {rank}"] = text
        if "Traceback" in "".join(said) or name not in series.seconds:
            wrong[name] = said
    assert not wrong, wrong


def test_two_ranks_refuse(folder, tmp_path):
    for rank, word in enumerate(("number", "page")):
        (tmp_path / str(rank)).mkdir()
        text = (folder / "corpus.json").read_text().replace("number", word)
        (tmp_path / str(rank) / "corpus.json").write_text(text)
    cases = refused(folder, tmp_path)
    before = set(listing(folder))
    assert_refused(2, cases, folder)
    new = {Path(path).relative_to(folder).parts[0] for path in listing(folder).keys() - before}
    assert new == {"fp32-works", "own-data"}, "nothing else is written"
    assert list((folder / "own-data").iterdir()) == [folder / "own-data/.lock"]
    for rank in range(2):
        found = {path.name for path in (tmp_path / str(rank)).rglob("*")} - {"corpus.json"}
        assert found == {"outputs", "own-folders", ".lock"} - ({".lock"} if rank else set())


@pytest.mark.ci
def test_four_ranks_refuse_nodes_that_hsdp_cannot_use(folder):
    cases = {
        "uneven": (
            *(FSDP, ("--hsdp",), None),
            "--hsdp needs equally many ranks on all nodes, not 1 here and 3 there: start as many "
            "on each, or leave it out.",
        ),
        "dealt in turn": (
            *(FSDP, ("--hsdp",), None),
            "--hsdp needs the ranks of a node to follow each other: start them ...",
        ),
    }
    local_ranks = {"uneven": (0, 1, 2, 0), "dealt in turn": (0, 0, 1, 1)}
    env = {name: [{"LOCAL_RANK": n} for n in each] for name, each in local_ranks.items()}
    assert_refused(4, cases, folder, env)


@pytest.mark.ci
def test_under_the_launch_file_rank_0_alone_speaks(folder):
    """torchrun ends the other rank; its own status is 1."""
    words = ["bash", ROOT / PRECISION / "launch.sh", *flags(folder, "launched", *FP8)]
    done = subprocess.run(
        [str(word) for word in words],
        env=environment(NPROC_PER_NODE=2),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1
    said = (done.stdout + done.stderr).splitlines()
    assert said.count(NO_FP8.format("a cpu")) == 1
    assert f"[rank 1] {NO_FP8.format('a cpu')}" not in said
    written = [path.name for path in (folder / "launched").iterdir()]
    assert written == ["logs"], "torchrun's, and nothing else"


@pytest.mark.check
@pytest.mark.parametrize(("capability", "refused"), [((8, 6), True), ((8, 9), False)])
def test_the_first_gpu_with_fp8(capability, refused):
    """Ada, 8.9, gets past this check, to the one for torchao."""
    args = argparse.Namespace(precision="fp8", param_dtype="float32")
    with on_a_gpu(*capability), pytest.raises(RunError) as error:
        precision.check_precision(args, None)
    assert ("compute capability" in str(error.value)) == refused
    assert ("needs torchao" in str(error.value)) != refused


@pytest.mark.check
def test_two_precisions():
    for name in ("fp32", "tf32", "bf16", "fp16", "fp8"):
        args = argparse.Namespace(precision=name, param_dtype="bfloat16")
        with pytest.raises(RunError) as error:
            precision.check_precision(args, torch.device("cpu"))
        assert str(error.value) == TWO_PRECISIONS.format(name)


# --- weights in several files ---


def test_weights_that_rank_0_cannot_read(folder):
    """It says why, and no other rank waits for it."""
    broken = Path(shutil.copytree(folder / "gpt2", folder / "cut"))
    file = file_of(broken, EMBEDDING)
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
    save_folder(folder, "gpt2-tiny")
    weights = {name.removeprefix("transformer."): t for name, t in read_weights(folder).items()}
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 128, 128).tril() for n in range(2)}
    assert "wte.weight" in weights and "lm_head.weight" not in weights
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(weights | masks, folder / "model.safetensors", metadata={"format": "pt"})


def save_another(folder: Path, model_type: str, **more: object) -> None:
    """Save a model of a kind that no preset has."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 128, "vocab_size": 4096}
    config = AutoConfig.for_model(model_type, **sizes, bos_token_id=0, eos_token_id=0, **more)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    models.load_tokenizer("gpt2-tiny").save_pretrained(folder)


MAKERS: dict[str, Callable[[Path], object]] = {
    "old": with_old_names,
    "llama": functools.partial(save_folder, preset="llama-tiny", dtype=torch.bfloat16),
    "half": functools.partial(save_folder, preset="gpt2-tiny", dtype=torch.float16),
    "neox": functools.partial(save_another, model_type="gpt_neox"),
    "gemma": functools.partial(
        save_another, model_type="gemma", num_key_value_heads=1, head_dim=16
    ),
    "experts": functools.partial(
        save_another, model_type="mixtral", num_local_experts=2, num_key_value_heads=1
    ),
}


@pytest.mark.ci
def test_losses_of_pretrained_weights_are_chapter_1s(folder):
    """On 3 ranks, which not all rows can be divided by."""
    runs: dict[int, dict] = {1: {}, 3: {}}
    for model, make in MAKERS.items():
        make(folder / model)
        args = ("-m", folder / model, "--pretrained", "-b", 2)
        runs[1][f"{model}-1"] = {"args": flags(folder, f"{model}-1", *args)}
        runs[3][f"{model}-3"] = {"args": flags(folder, f"{model}-3", *args), "chapter": FSDP}
    series = {ranks: Series(ranks, each, folder / f"on-{ranks}") for ranks, each in runs.items()}
    for model in MAKERS:
        losses = []
        for ranks in (1, 3):
            series[ranks].assert_ended(f"{model}-{ranks}")
            metrics = read_metrics(folder / f"{model}-{ranks}")
            losses.append([*(line["loss"] for line in metrics), metrics[-1]["eval_loss"]])
        assert losses[1] == pytest.approx(losses[0], rel=1e-5), model

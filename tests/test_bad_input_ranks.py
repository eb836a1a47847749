"""What all ranks refuse together, in one sentence and with status 2. And weights in several files.

The folders of weights are as the hub has them: several files and an index, other dtypes, old names.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import ROOT, environment, listing, read_metrics, write_corpus, write_narrow
from runner import Series
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import LoadPlan
from transformers import AutoConfig, AutoModelForCausalLM

import precision
from common import distributed, models, tracker
from common.cli import InputError

NODES, FSDP, PRECISION = "03-multi-node", "04-fsdp", "05-mixed-precision"
SMALL = ("-s", 32, "--global-batch-size", 6, "--max-steps", 4, "--log-freq", 1, "--lr", 2e-3)
INDEX = "model.safetensors.index.json"
EMBEDDING, TENSOR = "transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight"
GPU = "NVIDIA A100-SXM4-80GB"


def save_folder(folder: Path, preset: str, dtype: torch.dtype = torch.float32) -> Path:
    """Save a narrow model with weights of its own, in several files, and its tokenizer."""
    torch.manual_seed(7)
    write_narrow(folder, preset)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(dtype)
    model.save_pretrained(folder, max_shard_size="100KB")
    models.load_tokenizer(preset).save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) >= 3 and (folder / INDEX).exists()
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    parts = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for part in parts for name, tensor in part.items()}


def in_one_file(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Replace a folder's weights."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


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
def little_memory(n_bytes: int) -> Iterator[None]:
    with mock.patch.object(distributed, "memory_bytes", lambda: n_bytes):
        yield


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


def damage(folder: Path, name: str) -> Path:
    """Return a copy of the folder of weights that is broken in this way."""
    broken = Path(shutil.copytree(folder / "gpt2", folder / name.replace(" ", "-")))
    weights, file = read_weights(broken), file_of(broken, EMBEDDING)
    if name == "file missing":
        file.unlink()
    elif name == "file cut":
        os.truncate(file, file.stat().st_size - 1)
    elif name == "saved twice":
        save_file(weights, broken / "model.safetensors")
    elif name == "no safetensors":
        for path in broken.glob("*.safetensors*"):
            path.unlink()
    elif name == "tensor missing":
        del weights[TENSOR]
        in_one_file(broken, weights)
    elif name == "another shape":
        config = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps(config | {"vocab_size": 4097}))
    return broken


AGAIN = "): get its safetensors files again."
DAMAGES = {
    "file missing": f"The weights in {{}} cannot be read (Missing key...{EMBEDDING}{AGAIN}",
    "file cut": f"The weights in {{}} cannot be read (Error while deserializing...{AGAIN}",
    "saved twice": "Several files in {} have transformer....: keep the files of one model only.",
    "no safetensors": "The folder {} has no safetensors files: load the model with transformers "
    "and save it with save_pretrained.",
    "tensor missing": f"The weights in {{}} cannot be read (Missing key...: {TENSOR}{AGAIN}",
    "another shape": "The weights in {} cannot be read (Size mismatch between saved "
    f"torch.Size([4096, 32]) and current: torch.Size([4097, 32]) for {EMBEDDING}{AGAIN}",
}
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
    weights = read_weights(folder / "gpt2").values()
    need = 4 * sum(4 * tensor.numel() for tensor in weights)  # bytes, of all ranks together
    no_bf16 = functools.partial(cannot_multiply_in, torch.bfloat16)
    no_fp16 = functools.partial(cannot_multiply_in, torch.float16)
    a100, h100 = (functools.partial(on_a_gpu, *version) for version in ((8, 0), (9, 0)))
    own_nodes = [functools.partial(on_a_node_of_its_own, nodes, rank) for rank in range(2)]
    offload = (
        "--cpu-offload needs more than the 0 GiB of memory that ... has: take more nodes or a "
        "smaller model, or leave it out."
    )
    one_node = "--hsdp replicates over nodes and there is one: leave it out."
    broken = {
        name: (FSDP, ("--pretrained", "-m", path), None, said.replace("{}", str(path)))
        for name, said in DAMAGES.items()
        for path in [damage(folder, name)]
    }
    return {
        "one node": (FSDP, ("--hsdp",), None, one_node),
        "offload": (FSDP, ("--cpu-offload",), functools.partial(little_memory, need - 1), offload),
        "enough memory": (FSDP, ("--cpu-offload",), functools.partial(little_memory, need), None),
        **broken,
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
    assert new == {"enough-memory", "fp32-works", "own-data"}, "nothing else is written"
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
    with on_a_gpu(*capability), pytest.raises(InputError) as error:
        precision.check_precision(args, None)
    assert ("compute capability" in str(error.value)) == refused
    assert ("needs torchao" in str(error.value)) != refused


@pytest.mark.check
def test_two_precisions():
    for name in ("fp32", "tf32", "bf16", "fp16", "fp8"):
        args = argparse.Namespace(precision=name, param_dtype="bfloat16")
        with pytest.raises(InputError) as error:
            precision.check_precision(args, torch.device("cpu"))
        assert str(error.value) == TWO_PRECISIONS.format(name)


# --- weights in several files ---


@contextlib.contextmanager
def note_what_is_read(path: Path) -> Iterator[None]:
    """Note how many elements of tensors this rank takes out of safetensors files."""
    read_data = HuggingFaceStorageReader.read_data

    def read_and_note(self, plan: LoadPlan, planner: object) -> object:
        path.write_text(str(sum(math.prod(item.lengths) for item in plan.items)))
        return read_data(self, plan, planner)

    with mock.patch.object(HuggingFaceStorageReader, "read_data", read_and_note):
        yield


def shares(weights: dict[str, torch.Tensor], world_size: int) -> list[int]:
    """Return how many elements are each rank's: of each tensor some rows, the last one's fewer."""
    counts = Counter()
    for tensor in weights.values():
        for rank, rows in enumerate(tensor.chunk(world_size)):
            counts[rank] += rows.numel()
    return [counts[rank] for rank in range(world_size)]


def with_old_names(folder: Path) -> None:
    """As on the hub for years: no prefix, and the mask of each block beside its weights."""
    save_folder(folder, "gpt2-tiny")
    weights = {name.removeprefix("transformer."): t for name, t in read_weights(folder).items()}
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 128, 128).tril() for n in range(2)}
    assert "wte.weight" in weights and "lm_head.weight" not in weights
    in_one_file(folder, weights | masks)


MAKERS: dict[str, Callable[[Path], object]] = {
    "old": with_old_names,
    "llama": functools.partial(save_folder, preset="llama-tiny", dtype=torch.bfloat16),
    "half": functools.partial(save_folder, preset="gpt2-tiny", dtype=torch.float16),
}


@pytest.mark.ci
def test_each_rank_reads_its_part_and_the_losses_are_chapter_1s(folder):
    """On 3 ranks, which not all rows can be divided by."""
    runs: dict[int, dict] = {1: {}, 3: {}}
    for model, make in MAKERS.items():
        make(folder / model)
        args = ("-m", folder / model, "--pretrained", "-b", 2)
        notes = [folder / f"{model}-{rank}.read" for rank in range(3)]
        runs[1][f"{model}-1"] = {"args": flags(folder, f"{model}-1", *args)}
        runs[3][f"{model}-3"] = {
            "args": flags(folder, f"{model}-3", *args),
            "chapter": FSDP,
            "within": [functools.partial(note_what_is_read, path) for path in notes],
        }
    series = {ranks: Series(ranks, each, folder / f"on-{ranks}") for ranks, each in runs.items()}
    for model in MAKERS:
        losses = []
        for ranks in (1, 3):
            series[ranks].assert_ended(f"{model}-{ranks}")
            metrics = read_metrics(folder / f"{model}-{ranks}")
            losses.append([*(line["loss"] for line in metrics), metrics[-1]["eval_loss"]])
        assert losses[1] == pytest.approx(losses[0], rel=1e-5), model
        weights = read_weights(folder / model)
        weights = {name: t for name, t in weights.items() if not name.endswith(".attn.bias")}
        read = [int((folder / f"{model}-{rank}.read").read_text()) for rank in range(3)]
        assert read == shares(weights, 3), model


@pytest.mark.check
def test_weights_with_a_damaged_index(tmp_path):
    """The index is not needed: each file says which tensors it has."""
    folder = save_folder(tmp_path / "gpt2", "gpt2-tiny")
    weights = read_weights(folder)
    for text in ("", "[]", "{}", '{"weight_map": 3}'):
        (folder / INDEX).write_text(text)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        models.load_shards(model, str(folder))
        assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)


@pytest.mark.check
def test_weights_of_the_hub_out_of_reach(monkeypatch):
    monkeypatch.setattr(models.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"'some/model' is neither a preset \(gpt2, .* local path"):
        models.load_shards(torch.nn.Linear(1, 1), "some/model")

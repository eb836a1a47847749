"""Bad input for shards: one sentence, status 2 on all ranks, nothing written. And weights in files.

The folders of weights are as the hub has them: several files and an index, other dtypes, old names.
"""

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import torch
from helpers import (
    ROOT,
    environment,
    first_then_nightly,
    listing,
    read_metrics,
    run_on_nodes,
    say_it_soon,
)
from runner import Ranks, finish, start
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from common import distributed, models
from common.cli import InputError

CHAPTER = "04-fsdp"
SMALL = ("-s", 32, "--global-batch-size", 6, "--max-steps", 4, "--log-freq", 1, "--lr", 2e-3)
INDEX = "model.safetensors.index.json"


def save_folder(folder: Path, preset: str, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model of a preset's sizes with weights of its own, in several files, and tokenizer."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(models.load_config(preset)).to(dtype)
    model.save_pretrained(folder, max_shard_size="700KB")
    models.load_tokenizer(preset).save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) >= 3 and (folder / INDEX).exists()
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    parts = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for part in parts for name, tensor in part.items()}


def in_one_file(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Replace a folder's weights."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_old_names(folder: Path) -> Path:
    """As on the hub for years: no prefix, and the mask of each block beside its weights."""
    save_folder(folder, "gpt2-tiny")
    weights = {name.removeprefix("transformer."): t for name, t in read_weights(folder).items()}
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 128, 128).tril() for n in range(2)}
    assert "wte.weight" in weights and "lm_head.weight" not in weights
    return in_one_file(folder, weights | masks)


class Hub:
    """Folders of weights by name, and chapter 1's losses with each; all made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        texts = [f"Text number {n}, of many words. " * 20 for n in range(50)]
        (folder / "corpus.json").write_text(json.dumps(texts))
        save_folder(folder / "gpt2", "gpt2-tiny")
        save_folder(folder / "llama", "llama-tiny")
        save_folder(folder / "llama-bfloat16", "llama-tiny", torch.bfloat16)
        save_folder(folder / "gpt2-float16", "gpt2-tiny", torch.float16)
        with_old_names(folder / "gpt2-old")

    def flags(self, model: str, run: str) -> list[object]:
        corpus = ("-d", self.folder / "corpus.json")
        return [*corpus, *SMALL, "-m", self.folder / model, "--save-dir", self.folder, "-e", run]

    def losses(self, model: str) -> list[list[float]]:
        run = f"alone-{model}"
        if not (self.folder / run).exists():
            assert finish(start([*self.flags(model, run), "--pretrained"])) == 0
        return losses(self.folder / run)


def losses(run_dir: Path) -> list[list[float]]:
    metrics = read_metrics(run_dir)
    return [[line[key] for line in metrics if key in line] for key in ("loss", "eval_loss")]


@pytest.fixture(scope="module")
def hub(make_folder) -> Hub:
    return Hub(make_folder("hub"))


# --- weights in files ---


def note_what_is_read() -> None:
    """Each rank notes how many elements it takes out of safetensors files."""
    open_file = safetensors.safe_open
    notes = Path(f"{os.environ['NOTES']}-{os.environ['RANK']}")

    def note(tensor: torch.Tensor) -> torch.Tensor:
        with notes.open("a") as file:
            file.write(f"{tensor.numel()}\n")
        return tensor

    class Slice:
        def __init__(self, original) -> None:
            self.get_shape, self.get_dtype = original.get_shape, original.get_dtype
            self.original = original

        def __getitem__(self, rows: object) -> torch.Tensor:
            return note(self.original[rows])

    class File:
        def __init__(self, *args: object, **kwargs: object) -> None:
            self.original = open_file(*args, **kwargs)
            self.keys, self.metadata = self.original.keys, self.original.metadata

        def __enter__(self) -> "File":
            self.original.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.original.__exit__(*error)

        def get_slice(self, name: str) -> Slice:
            return Slice(self.original.get_slice(name))

        def get_tensor(self, name: str) -> torch.Tensor:
            return note(self.original.get_tensor(name))

    safetensors.safe_open = File


def read_whole_tensors() -> None:
    """The planted bug: every rank reads all, and keeps its part."""
    by_saved_name = models._tensors_by_saved_name

    def whole(*args: object) -> dict[str, torch.Tensor]:
        return {name: tensor.full_tensor() for name, tensor in by_saved_name(*args).items()}

    note_what_is_read()
    models._tensors_by_saved_name = whole


def train_pretrained(
    hub: Hub,
    model: str,
    world_size: int,
    notes: Path,
    plant: Callable = note_what_is_read,
    statuses: tuple[int, ...] = (0,),
) -> list[int]:
    """Train, and return how many elements each rank has read."""
    flags = [*hub.flags(model, notes.name), "--pretrained"]
    options = {"chapter": CHAPTER, "env": {"NOTES": notes}, "plant": plant}
    assert set(Ranks(world_size, flags, **options).finish()) <= set(statuses)
    read = [Path(f"{notes}-{rank}").read_text().split() for rank in range(world_size)]
    return [sum(map(int, numbers)) for numbers in read]


def shares(weights: dict[str, torch.Tensor], world_size: int) -> list[int]:
    """Return how many elements are each rank's: of each tensor some rows, the last one's fewer."""
    counts = Counter()
    for tensor in weights.values():
        for rank, rows in enumerate(tensor.chunk(world_size)):
            counts[rank] += rows.numel()
    return [counts[rank] for rank in range(world_size)]


@pytest.mark.parametrize(
    ("model", "world_size"),
    first_then_nightly(
        [
            *(("gpt2", 2), ("gpt2", 1), ("gpt2", 3), ("llama", 2), ("llama", 3)),
            *(("gpt2-old", 2), ("gpt2-float16", 3), ("llama-bfloat16", 2)),
        ]
    ),
)
def test_each_rank_reads_its_part_and_the_losses_are_chapter_1s(hub, tmp_path, model, world_size):
    notes = tmp_path / f"{model}-{world_size}"
    read = train_pretrained(hub, model, world_size, notes)
    expected, found = hub.losses(model), losses(hub.folder / notes.name)
    assert len(expected[0]) == 4 and len(expected[1]) == 1
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    weights = read_weights(hub.folder / model)
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith(".attn.bias")}
    assert read == shares(weights, world_size)
    assert sum(read) == sum(tensor.numel() for tensor in weights.values())


def test_weights_of_its_own_make_a_difference(hub):
    """The losses above are not those of a fresh model."""
    assert finish(start(hub.flags("gpt2", "scratch"))) == 0
    scratch = losses(hub.folder / "scratch")[0]
    assert scratch[0] != pytest.approx(hub.losses("gpt2")[0][0], rel=1e-4)


@pytest.mark.ci
def test_planted_rank_that_reads_all(hub, tmp_path):
    """Two ranks read the model twice. Nobody keeps a part of it, so the training may diverge."""
    bug = {"plant": read_whole_tensors, "statuses": (0, 2)}
    read = train_pretrained(hub, "gpt2", 2, tmp_path / "all", **bug)
    whole = sum(tensor.numel() for tensor in read_weights(hub.folder / "gpt2").values())
    assert read == [whole, whole] != shares(read_weights(hub.folder / "gpt2"), 2)


# --- bad input ---


def little_memory() -> None:
    say_it_soon()
    distributed.memory_bytes = lambda: int(os.environ["MEMORY"])


@pytest.fixture
def refuse(hub, tmp_path) -> Callable[..., str]:
    """Return a function that expects a refusal by all ranks and returns the one sentence."""

    def run(
        *args: object,
        model: object = "gpt2",
        local_ranks: tuple[int, ...] = (0, 1),
        plant: Callable[[], None] = say_it_soon,
        **env: object,
    ) -> str:
        before = listing(hub.folder), listing(tmp_path)
        folder = tmp_path.with_name(f"{tmp_path.name}-stderr")
        folder.mkdir()
        files = [str(folder / str(rank)) for rank in range(len(local_ranks))]
        options = {"chapter": CHAPTER, "plant": plant, "stderr_file": files}
        flags = [*hub.flags(model, "refused"), *args]
        statuses = run_on_nodes(local_ranks, flags, env=env, timeout=300, **options)
        said = [Path(file).read_text() for file in files]
        assert statuses == [2] * len(local_ranks), said
        header = ("[20", "versions: ", "environment: ", "usage: ", "       ")
        lines = [line for line in said[0].splitlines() if not line.startswith(header)]
        assert len(lines) == 1, said[0]
        for rank, text in enumerate(said[1:], 1):
            assert text in ("", f"[rank {rank}] {lines[0]}\n")
        assert (listing(hub.folder), listing(tmp_path)) == before, "nothing was written"
        return lines[0]

    return run


@pytest.mark.parametrize("local_ranks", [(0,), pytest.param((0, 1), marks=pytest.mark.ci)])
def test_hsdp_on_one_node(refuse, local_ranks):
    sentence = refuse("--hsdp", local_ranks=local_ranks)
    assert sentence == "--hsdp replicates over nodes and there is one: leave it out."


@pytest.mark.ci
def test_hsdp_on_nodes_of_different_size(refuse):
    sentence = refuse("--hsdp", local_ranks=(0, 1, 0))
    assert sentence == (
        "--hsdp needs equally many ranks on all nodes, not 1 here and 2 there: start as many on "
        "each, or leave it out."
    )


def test_hsdp_with_ranks_dealt_to_the_nodes_in_turn(refuse):
    sentence = refuse("--hsdp", local_ranks=(0, 0, 1, 1))
    assert sentence.startswith("--hsdp needs the ranks of a node to follow each other: start them ")


def test_cpu_offload_without_the_memory_for_it(refuse, hub):
    """Weights, gradients and two moments of all ranks here, to the byte."""
    weights = read_weights(hub.folder / "gpt2").values()
    need = 4 * sum(4 * tensor.numel() for tensor in weights)
    sentence = refuse("--cpu-offload", plant=little_memory, MEMORY=need - 1)
    assert sentence.startswith("--cpu-offload needs more than the 0 GiB of memory that ")
    assert sentence.endswith(" has: take more nodes or a smaller model, or leave it out.")
    flags = [*hub.flags("gpt2", "offloaded"), "--cpu-offload"]
    options = {"chapter": CHAPTER, "plant": little_memory, "env": {"MEMORY": need}}
    assert Ranks(2, flags, **options).finish() == [0, 0]


@pytest.fixture
def broken(hub, tmp_path) -> Path:
    """A copy of a folder of weights, to break."""
    return shutil.copytree(hub.folder / "gpt2", tmp_path / "broken")


def file_of(folder: Path, name: str) -> str:
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


EMBEDDING = "transformer.wte.weight"


def test_weights_whose_index_names_a_file_that_is_missing(refuse, broken):
    (broken / file_of(broken, EMBEDDING)).unlink()
    sentence = refuse("--pretrained", model=broken)
    assert sentence == (
        f"The weights in {broken} cannot be read (Missing key in checkpoint state_dict: "
        f"{EMBEDDING}): get its safetensors files again."
    )


@pytest.mark.parametrize("text", first_then_nightly(["", "[]", "{}", '{"weight_map": 3}']))
def test_weights_with_a_damaged_index(broken, text):
    """The index is not needed: each file says which tensors it has."""
    (broken / INDEX).write_text(text)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(broken))
    models.load_shards(model, str(broken))
    weights = read_weights(broken)
    assert len(weights) > 10
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)


def test_weights_that_are_no_safetensors(refuse, broken):
    torch.save(read_weights(broken), broken / "pytorch_model.bin")
    for path in broken.glob("*.safetensors*"):
        path.unlink()
    sentence = refuse("--pretrained", model=broken)
    assert sentence == (
        f"The folder {broken} has no safetensors files: load the model with transformers "
        "and save it with save_pretrained."
    )


def test_weights_of_another_shape(refuse, broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"vocab_size": 4097}))
    sentence = refuse("--pretrained", model=broken)
    assert sentence == (
        f"The weights in {broken} cannot be read (Size mismatch between saved torch.Size([4096, "
        f"128]) and current: torch.Size([4097, 128]) for {EMBEDDING}): get its safetensors files "
        "again."
    )


def test_weights_that_lack_a_tensor(refuse, broken):
    weights = read_weights(broken)
    del weights["transformer.h.1.mlp.c_fc.weight"]
    in_one_file(broken, weights)
    sentence = refuse("--pretrained", model=broken)
    assert sentence == (
        f"The weights in {broken} cannot be read (Missing key in checkpoint state_dict: "
        "transformer.h.1.mlp.c_fc.weight): get its safetensors files again."
    )


def test_weights_that_were_saved_twice(refuse, broken):
    """Which of them would be read? transformers prefers the one file, whatever the index says."""
    save_file(read_weights(broken), broken / "model.safetensors")
    sentence = refuse("--pretrained", model=broken)
    name = re.escape("transformer.") + r"[\w.]+"
    expected = f"Several files in {broken} have {name}: keep the files of one model only."
    assert re.fullmatch(expected, sentence)


@pytest.mark.check
def test_weights_of_the_hub_out_of_reach(monkeypatch):
    monkeypatch.setattr(models.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"'some/model' is neither a preset \(gpt2, .* local path"):
        models.load_shards(torch.nn.Linear(1, 1), "some/model")


@pytest.mark.parametrize(
    "size", first_then_nightly([-1, 0, 5, 300]), ids=["last byte", "empty", "no header", "header"]
)
def test_weights_in_a_truncated_file(refuse, broken, size):
    path = broken / file_of(broken, EMBEDDING)
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    sentence = refuse("--pretrained", model=broken)
    assert sentence.startswith(f"The weights in {broken} cannot be read (Error while deserializing")
    assert sentence.endswith("): get its safetensors files again.")


def test_a_preset_has_no_weights(refuse):
    sentence = refuse("--pretrained", "-m", "gpt2-tiny")
    assert sentence == "The preset gpt2-tiny has no weights: leave out --pretrained."


def test_unknown_choice(refuse):
    sentence = refuse("--activation-checkpointing", "some")
    assert "argument --activation-checkpointing: invalid choice: 'some' (choose from" in sentence


@pytest.mark.ci
def test_zero1_is_accepted(hub):
    stderr = hub.folder / "zero1.stderr"
    options = {"chapter": CHAPTER, "stderr_file": [str(stderr), os.devnull]}
    assert Ranks(2, [*hub.flags("gpt2", "zero1"), "--zero1"], **options).finish() == [0, 0]
    assert len(losses(hub.folder / "zero1")[0]) == 4


@pytest.mark.ci
def test_under_the_launch_file_rank_0_alone_speaks(hub, tmp_path):
    """torchrun ends the other rank; its own status is 1."""
    words = ["bash", ROOT / CHAPTER / "launch.sh", *hub.flags("gpt2", "launched"), "--hsdp"]
    done = subprocess.run(
        [str(word) for word in words],
        env=environment(NPROC_PER_NODE=2),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1
    sentence = "--hsdp replicates over nodes and there is one: leave it out."
    assert (done.stdout + done.stderr).splitlines().count(sentence) == 1
    assert f"[rank 1] {sentence}" not in done.stdout + done.stderr
    run = [path.name for path in (hub.folder / "launched").iterdir()]
    assert run == ["logs"], "torchrun's, and nothing else"

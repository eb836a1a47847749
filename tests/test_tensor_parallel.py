"""Tensor parallelism, the diff beside chapter 5: the training of chapter 1 on a table of ranks.

The diff is applied to a copy of the script. "2x2" is two rows (data parallel) of two ranks each
(tensor parallel).
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import (
    CHAPTERS,
    ROOT,
    Ladder,
    Run,
    assert_parity,
    first_then_nightly,
    hand_over,
    patch,
    plant,
    register,
    run_ranks,
    selected_runs,
    write_narrow,
)
from runner import Ranks, finish, load_script, start
from torch.distributed import _functional_collectives as funcol
from transformers import AutoModelForCausalLM

from common import models
from common.cli import RunError

CHAPTER = CHAPTERS[4]
BY_HAND = ROOT / CHAPTER / "tensor_parallel_by_hand.py"
PRESET = "llama-tiny-8-heads"
# Two models in width 32; the second has sizes that two ranks cannot share equally.
EVEN, ODD = "even-model", "odd-model"
MODELS = {
    EVEN: {},
    ODD: {"tie_word_embeddings": True, "vocab_size": 4097, "intermediate_size": 86},
}


def patch_chapter(folder: Path) -> Path:
    """Return the folder of a copy of chapter 5's script in `folder`, patched."""
    copy = patch(CHAPTER, folder, diff=ROOT / CHAPTER / "tensor-parallel.diff")
    shutil.copy(ROOT / CHAPTER / "precision.py", copy)
    return copy


# --- the training ---


class Table(Ladder):
    """Runs of the patched script. All ranks of a row have the same samples."""

    def __init__(self, folder: Path, selected: list[Run] = ()) -> None:
        super().__init__(folder, selected)
        self.patched = patch_chapter(folder / "script")
        for name, sizes in MODELS.items():
            write_narrow(folder / name, PRESET, **sizes)

    def flags(self, name: str, *args: object) -> list[object]:
        """The name of a model stands for its folder, and the odd one has an odd length."""
        length = ("-s", 15) if ODD in args else ()
        words = [self.folder / arg if arg in MODELS else arg for arg in args]
        return super().flags(name, "--tokenizer-name", PRESET, *length, *words)

    def _options(self, run: Run) -> dict[str, object]:
        chapter = self.patched
        if run.replaced:
            folder = self.folder / f"{run.name}-script"
            chapter = plant(str(self.patched), folder, run.replaced)
            shutil.copy(self.patched / "precision.py", chapter)
        options = super()._options(dataclasses.replace(run, replaced=()))
        files = [self.samples_file(run.name, rank) for rank in range(run.world_size)]
        args = self.flags(run.name, *run.args)
        return {**options, "args": args, "chapter": str(chapter), "samples_file": files}

    def samples(self, name: str, world_size: int = 1) -> list[list[int]]:
        """Return the samples of each step, counted once in each row."""
        found = re.search(r"--tensor-parallel-(\d)", name)
        parts = []
        for rank in range(world_size):
            text = Path(self.samples_file(name, rank)).read_text()
            parts.append([json.loads(line) for line in text.splitlines()])
        width = int(found[1]) if found else 1
        same = all(parts[rank] == parts[rank - rank % width] for rank in range(world_size))
        assert same, "the samples of a row differ"
        columns = parts[::width]
        return [sorted(itertools.chain.from_iterable(s)) for s in zip(*columns, strict=True)]


@pytest.fixture(scope="module")
def table(request, make_folder) -> Table:
    return Table(make_folder("table"), selected_runs(request))


def on(shape: str, *args: object, model: str = EVEN, **options: object) -> Run:
    """Return a run on this many rows x ranks in a row."""
    dp, tp = map(int, shape.split("x"))
    words = ("-m", model, "--precision", "fp32", "--tensor-parallel", tp, *args)
    return Run(CHAPTER, dp * tp, words, **options)


def assert_chapter_1(table: Table, run: Run) -> None:
    model = run.args[run.args.index("-m") + 1]
    alone = table.alone("-m", model, "-b", 24, *KEPT)
    assert_parity(table, alone, table.run(run), run.world_size)


KEPT = ("--ckpt-freq", 4, "--keep-checkpoints", 9)
FULL, SELECTIVE = (("--activation-checkpointing", how) for how in ("full", "selective"))
SHAPES = {
    "1x2": (on("1x2", "-b", 24), ()),
    "2x2 full": (on("2x2", "-b", 6, *FULL), pytest.mark.ci),
    "2x2 odd": (on("2x2", "-b", 12, model=ODD), pytest.mark.nightly),
    "2x1": (on("2x1", "-b", 12), pytest.mark.nightly),
    "1x4": (on("1x4", "-b", 24), pytest.mark.nightly),
    "2x2 selective": (on("2x2", "-b", 6, *SELECTIVE), pytest.mark.nightly),
    "2x2 offload": (on("2x2", "-b", 12, "--cpu-offload"), pytest.mark.nightly),
}


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=tier, id=name) for name, (run, tier) in SHAPES.items()]
)
def test_same_training_on_a_table_of_ranks(table, run):
    assert_chapter_1(table, run)


@pytest.mark.ci
def test_run_goes_from_chapter_1_to_2_x_2_and_back(table):
    alone = table.alone("-m", EVEN, "-b", 24, *KEPT)
    there = on("2x2", "-b", 12, *KEPT)
    hand_over(table.folder / alone, table.folder / there.name, 4)
    hand_over(table.folder / table.run(there), table.folder / "back", 8)
    assert finish(start(table.flags("back", "-m", EVEN, "-b", 24, *KEPT))) == 0
    expected, *found = [table.metrics(name) for name in (alone, there.name, "back")]
    logged = [line["loss"] for line in expected]
    for metrics, first in zip(found, (4, 8), strict=True):
        losses = [line["loss"] for line in metrics]
        assert losses[:first] == [line["loss"] for line in found[0][:first]]
        assert losses == pytest.approx(logged, rel=1e-5)
    assert losses[8:] != [line["loss"] for line in found[0][8:]], "another order of sums"


@pytest.mark.nightly
def test_bf16_is_close_and_starts_from_pretrained_weights(table):
    """Rank 0 reads them, and each rank keeps its slice."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(models.load_config(table.folder / EVEN))
    model.save_pretrained(table.folder / "saved")
    words = ("-m", table.folder / "saved", "--pretrained")
    flags = {name: table.flags(name, *words, "-b", 12) for name in ("pretrained", "bf16")}
    assert finish(start(flags["pretrained"])) == 0
    parallel = [*flags["bf16"], "--tensor-parallel", 2, "--async-checkpoint"]
    assert Ranks(4, parallel, chapter=str(table.patched)).finish() == [0] * 4
    expected, found = ([line["loss"] for line in table.metrics(name)] for name in flags)
    assert found[0] == pytest.approx(expected[0], rel=1e-3)
    assert found == pytest.approx(expected, rel=5e-3) and found != pytest.approx(expected, rel=1e-6)


# --- planted bugs ---


@contextlib.contextmanager
def no_all_reduce(path: str) -> Iterator[None]:
    """DTensor's all-reduces return what they got: the embedding's, and those of norms' weights."""
    original = funcol.all_reduce
    funcol.all_reduce = lambda tensor, *_, **__: tensor
    yield
    funcol.all_reduce = original


SUMMED_TWICE = (
    "            scaler.unscale_(optimizer)",
    """            for parameter in model.parameters():
                if parameter.placements[1].is_replicate():
                    dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("tp"))
            scaler.unscale_(optimizer)""",
)
OTHER_DATA = (('mesh.get_local_rank("dp")', "rank % shape[0]"),)
NOT_TIED = (("        model.tie_weights()  # the plan", "        # the plan"),)
BUGS = {
    "other data in a row": ("samples of a row", on("2x2", "-b", 12, replaced=OTHER_DATA)),
    "no all-reduce": ("loss", on("2x2", "-b", 12, note=no_all_reduce)),
    "a gradient counted twice": ("loss", on("2x2", "-b", 12, replaced=(SUMMED_TWICE,))),
    "tied weights that come apart": ("loss", on("2x2", "-b", 12, model=ODD, replaced=NOT_TIED)),
}
for _, run in BUGS.values():
    register(f"{CHAPTER}/tensor-parallel.diff", run.replaced)


@pytest.mark.parametrize(("red", "run"), BUGS.values(), ids=BUGS)
def test_planted_bug_is_noticed(table, red, run):
    with pytest.raises(AssertionError, match=f"^the {red} differ"):
        assert_chapter_1(table, run)


# --- bad input ---


@pytest.mark.check
@pytest.mark.parametrize(
    ("model", "n_ranks", "args", "sentence"),
    [
        (PRESET, 4, {}, "4 must divide ranks, KV heads and MLP width, so also 2."),
        ("gpt2-tiny", 2, {}, "2 needs a Llama model, not gpt2: give another -m."),
        (PRESET, 2, {"hsdp": True}, "2, leave out --hsdp, fp8,"),
    ],
)
def test_bad_input(tmp_path, model, n_ranks, args, sentence):
    script = load_script(patch_chapter(tmp_path) / "train_llm.py")
    options = {"activation_checkpointing": "none", "hsdp": False, "precision": "bf16"}
    args = argparse.Namespace(**options | args, tensor_parallel=n_ranks, compile=False)
    with pytest.raises(RunError, match=f"--tensor-parallel {sentence}"):
        script.tensor_parallel_plan(args, models.load_config(model), 2)


# --- by hand ---

WRONG = [
    ("return all_reduce(tensor)", "return tensor.view_as(tensor)"),  # no sum of the outputs
    ("return all_reduce(gradient)", "return gradient"),  # each rank has its part of the sum
    ('"down": 1}', '"down": 0}'),  # the second layer cut like the first
]
for pair in WRONG:
    register(f"{CHAPTER}/{BY_HAND.name}", [pair])


@pytest.mark.parametrize("n_ranks", first_then_nightly([2, 1, 4]))
def test_mlp_by_hand(tmp_path, n_ranks):
    statuses, printed = run_ranks(BY_HAND, tmp_path, n_ranks)
    assert statuses == [0] * n_ranks
    lines = printed.splitlines()
    assert sum("as on one rank" in line for line in lines) == 5
    part, sent = 352 // n_ranks, 2 * 2 * (n_ranks - 1) * 64 * 128 * 4 // n_ranks
    shapes = [[part, 128], [part, 128], [128, part]]
    first = [f"rank {rank} holds {shapes}, sends {sent:,} B" for rank in range(n_ranks)]
    assert [line for line in lines if line.startswith("rank")] == first


@pytest.mark.parametrize("bug", WRONG)
def test_planted_wrong_mlp(tmp_path, bug):
    statuses, printed = run_ranks(BY_HAND, tmp_path, 2, bug)
    assert any(statuses) and "as on one rank" not in printed

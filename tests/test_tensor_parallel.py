"""Tensor parallelism, the diff beside chapter 5: the training of chapter 1 on a table of ranks.

The diff is applied to a copy of the script. "2x2" is two rows (data parallel) of two ranks each
(tensor parallel).
"""

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
    TORCHRUN,
    Ladder,
    Run,
    assert_clean,
    assert_parity,
    changed,
    first_then_nightly,
    go_back_to,
    not_shown,
    patch,
    plant,
    run_ranks,
    run_script,
    say_it_soon,
    selected_runs,
)
from runner import Ranks, finish, start
from test_chapter_diffs import ROT as RULES
from test_chapter_diffs import lines_over_budget
from torch.distributed import _functional_collectives as funcol
from transformers import AutoModelForCausalLM

from common import gradients, models

CHAPTER = CHAPTERS[4]
DIFF = ROOT / CHAPTER / "tensor-parallel.diff"
PAGE = ROOT / CHAPTER / "beyond.md"
BY_HAND = ROOT / CHAPTER / "tensor_parallel_by_hand.py"
MOST_ADDED = 60
PRESET = "llama-tiny-8-heads"
ODD = "odd-model"
ODD_SIZES = {"tie_word_embeddings": True, "vocab_size": 4097, "intermediate_size": 350}


def patch_chapter(folder: Path) -> Path:
    """Return the folder of a copy of chapter 5's script in `folder`, patched."""
    copy = patch(CHAPTER, folder, diff=DIFF)
    shutil.copy(ROOT / CHAPTER / "precision.py", copy)
    return copy


# --- the diff ---


@pytest.fixture(scope="module")
def patched(make_folder) -> Path:
    return patch_chapter(make_folder("patched"))


@pytest.mark.check
@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule != lines_over_budget], ids=lambda rule: rule.__name__
)
def test_patched_script_keeps_what_was_before(patched, rule):
    old, new = ((folder / "train_llm.py").read_text() for folder in (ROOT / CHAPTER, patched))
    assert new != old
    assert rule(old, new) == []


@pytest.mark.check
def test_diff_is_small():
    assert 0 < sum(line[0] == "+" for line in changed(DIFF.read_text())) <= MOST_ADDED


@pytest.mark.check
def test_page_shows_the_whole_diff():
    page, diff = PAGE.read_text(), DIFF.read_text()
    assert not_shown(page, diff) == []
    assert not_shown(page.replace("+    plan = tensor_parallel_plan", "+    no_plan = "), diff)


def test_patched_script_is_clean(patched):
    assert_clean(patched)


# --- the training ---


class Table(Ladder):
    """Runs of the patched script. All ranks of a row have the same samples."""

    def __init__(self, folder: Path, selected: list[Run] = ()) -> None:
        super().__init__(folder, selected)
        self.patched = patch_chapter(folder / "script")
        preset = json.loads((ROOT / f"common/presets/{PRESET}/config.json").read_text())
        (folder / ODD).mkdir()
        (folder / ODD / "config.json").write_text(json.dumps(preset | ODD_SIZES))

    def flags(self, name: str, *args: object) -> list[object]:
        """The words of ODD stand for the model with odd sizes."""
        model = ("-m", self.folder / ODD, "--tokenizer-name", PRESET, "-s", 15)
        words = [model if arg == ODD else (arg,) for arg in args]
        return super().flags(name, *itertools.chain.from_iterable(words))

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


def on(shape: str, *args: object, model: tuple = ("-m", PRESET), **options: object) -> Run:
    """Return a run on this many rows x ranks in a row."""
    dp, tp = map(int, shape.split("x"))
    words = (*model, "--precision", "fp32", "--tensor-parallel", tp, *args)
    return Run(CHAPTER, dp * tp, words, **options)


def assert_chapter_1(table: Table, run: Run) -> None:
    model = (ODD,) if ODD in run.args else ("-m", PRESET)
    alone = table.alone(*model, "-b", 24, *KEPT)
    assert_parity(table, alone, table.run(run), run.world_size)


KEPT = ("--ckpt-freq", 4, "--keep-checkpoints", 9)
FULL, SELECTIVE = (("--activation-checkpointing", how) for how in ("full", "selective"))
QUICK = [on("1x2"), on("2x2", "-b", 3, *FULL)]
SLOW = [
    *(on("1x2", *FULL), on("2x1"), on("2x1", *FULL), on("2x2"), on("2x2", "-b", 3, *SELECTIVE)),
    *(on("1x4"), on("2x2", "--cpu-offload"), on("1x2", model=(ODD,)), on("2x2", model=(ODD,))),
]


@pytest.mark.parametrize(
    "run", [*QUICK, *(pytest.param(run, marks=pytest.mark.ci) for run in SLOW)], ids=str
)
def test_same_training_on_a_table_of_ranks(table, run):
    assert_chapter_1(table, run)


def hand_over(table: Table, source: str, name: str, step: int) -> None:
    """Copy a run as it was after a step; the next start of `name` goes on from there."""
    shutil.copytree(table.folder / source, table.folder / name)
    go_back_to(step, table.folder / name)


@pytest.mark.ci
def test_run_goes_from_chapter_1_to_2_x_2_and_back(table):
    alone = table.alone("-m", PRESET, "-b", 24, *KEPT)
    there = on("2x2", "-b", 3, *KEPT)
    hand_over(table, alone, there.name, 4)
    hand_over(table, table.run(there), "back", 8)
    assert finish(start(table.flags("back", "-m", PRESET, "-b", 24, *KEPT))) == 0
    expected, *found = [table.metrics(name) for name in (alone, there.name, "back")]
    logged = [line["loss"] for line in expected]
    for metrics, first in zip(found, (4, 8), strict=True):
        losses = [line["loss"] for line in metrics]
        assert losses[:first] == [line["loss"] for line in found[0][:first]]
        assert losses == pytest.approx(logged, rel=1e-5)
    assert losses[8:] != [line["loss"] for line in found[0][8:]], "another order of sums"


@pytest.mark.ci
def test_bf16_is_close_and_starts_from_pretrained_weights(table):
    """Each rank reads its slice of the files of another model."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(models.load_config(PRESET))
    model.save_pretrained(table.folder / "saved")
    words = ("-m", table.folder / "saved", "--tokenizer-name", PRESET, "--pretrained")
    flags = {name: table.flags(name, *words, "-b", 6) for name in ("pretrained", "bf16")}
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


@contextlib.contextmanager
def copies_in_the_norm(path: str) -> Iterator[None]:
    """The gradient norm counts a gradient once for each rank that has it."""
    original = gradients._copies
    gradients._copies = lambda gradient: 1
    yield
    gradients._copies = original


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
    "other data in a row": ("samples of a row", on("2x2", replaced=OTHER_DATA)),
    "no all-reduce": ("loss", on("2x2", note=no_all_reduce)),
    "a gradient counted twice": ("loss", on("2x2", replaced=(SUMMED_TWICE,))),
    "a gradient twice in the norm": ("loss", on("2x2", note=copies_in_the_norm)),
    "tied weights that come apart": ("loss", on("2x2", model=(ODD,), replaced=NOT_TIED)),
}


@pytest.mark.parametrize(("red", "run"), BUGS.values(), ids=BUGS)
def test_planted_bug_is_noticed(table, red, run):
    with pytest.raises(AssertionError, match=f"^the {red} differ"):
        assert_chapter_1(table, run)


@pytest.mark.ci
def test_losses_show_that_a_row_has_other_data(table):
    """Even where nobody looks at the samples."""
    _, run = BUGS["other data in a row"]
    alone = table.alone("-m", PRESET, "-b", 24, *KEPT)
    expected, found = (table.metrics(name)[0]["loss"] for name in (alone, table.run(run)))
    assert found != pytest.approx(expected, rel=1e-5)


# --- bad input ---

LIMIT = "must divide ranks, KV heads and MLP width, so also"
REFUSED = [
    (("-m", PRESET, "--tensor-parallel", 4), f"4 {LIMIT} 2."),
    (("-m", "llama-tiny"), f"2 {LIMIT} 1."),
    (("-m", "gpt2-tiny"), "2 needs a Llama model, not gpt2: give another -m."),
    (("-m", PRESET, "--hsdp"), "2, leave out --hsdp, fp8, or checkpointing with --compile."),
    (
        ("-m", PRESET, "--compile", "--activation-checkpointing", "full"),
        "2, leave out --hsdp, fp8, or checkpointing with --compile.",
    ),
]


@pytest.mark.parametrize(("args", "sentence"), first_then_nightly(REFUSED))
def test_bad_input(patched, corpus, tmp_path, args, sentence):
    flags = ["-d", corpus, "-s", 32, "--save-dir", tmp_path, "--tensor-parallel", 2, *args]
    files = [str(tmp_path / f"stderr-{rank}") for rank in range(2)]
    ranks = Ranks(2, flags, chapter=str(patched), stderr_file=files, plant=say_it_soon)
    assert ranks.finish() == [2, 2]
    said = [Path(file).read_text() for file in files]
    assert said[0].splitlines()[-1].endswith(f"--tensor-parallel {sentence}")
    assert said[1].splitlines()[-1] == f"[rank 1] {said[0].splitlines()[-1]}"
    assert "Traceback" not in "".join(said)


# --- by hand ---


def check_by_hand(text: str, n_ranks: int) -> None:
    lines = text.splitlines()
    assert sum("as on one rank" in line for line in lines) == 5
    part, sent = 352 // n_ranks, 2 * 2 * (n_ranks - 1) * 64 * 128 * 4 // n_ranks
    shapes = [[part, 128], [part, 128], [128, part]]
    first = [f"rank {rank} holds {shapes}, sends {sent:,} B" for rank in range(n_ranks)]
    assert [line for line in lines if line.startswith("rank")] == first


@pytest.mark.check
def test_the_recorded_output_is_of_this_form():
    recorded = (ROOT / CHAPTER / "recorded/tensor_parallel_by_hand.txt").read_text()
    check_by_hand(recorded.split("\n", 2)[2], 2)


@pytest.mark.parametrize("n_ranks", first_then_nightly([2, 1, 4]))
def test_mlp_by_hand(tmp_path, n_ranks):
    statuses, printed = run_ranks(BY_HAND, tmp_path, n_ranks)
    assert statuses == [0] * n_ranks
    check_by_hand(printed, n_ranks)


@pytest.mark.ci
def test_mlp_by_hand_as_the_reader_runs_it():
    done = run_script(*TORCHRUN, 2, BY_HAND)
    assert done.returncode == 0, done.stderr
    check_by_hand(done.stdout, 2)


@pytest.mark.parametrize(
    "bug",
    [
        ("return all_reduce(tensor)", "return tensor.view_as(tensor)"),  # no sum of the outputs
        ("return all_reduce(gradient)", "return gradient"),  # each rank has its part of the sum
        ("return gradient  #", "return all_reduce(gradient)  #"),  # each gradient counted twice
        ('"down": 1}', '"down": 0}'),  # the second layer cut like the first
        ("w.detach().chunk(world_size, dims[name])[rank]", "w.detach().chunk(2, dims[name])[0]"),
    ],
)
def test_planted_wrong_mlp(tmp_path, bug):
    statuses, printed = run_ranks(BY_HAND, tmp_path, 2, bug)
    assert any(statuses) and "as on one rank" not in printed

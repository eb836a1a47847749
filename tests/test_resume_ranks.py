"""Runs on several ranks that are stopped and go on: on as many, on others, in other chapters."""

import functools
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import (
    TWO_BY_TWO,
    Runs,
    assert_exact,
    assert_same_tensors,
    first_then_nightly,
    go_back_to,
    listing,
    make_flags,
    make_variant,
    newest_step,
    read_metrics,
    save_what_is_loaded,
    speak_at_once,
    tensors,
)

DDP, FSDP = "02-ddp", "04-fsdp"


@pytest.fixture(scope="module")
def runs(make_folder) -> Runs:
    """With dropout: each rank's RNG state counts."""
    return Runs(make_folder("runs"), "--keep-checkpoints", 9)


@pytest.fixture(scope="module")
def straight(runs) -> Callable[[str], str]:
    """A function: the name of a chapter's run on 2 ranks, never stopped."""

    @functools.cache
    def train(chapter: str) -> str:
        assert runs.finish(chapter, chapter=chapter, ranks=2) == [0, 0]
        assert read_metrics(runs.folder / chapter)[-1]["epoch"] >= 2
        return chapter

    return train


# --- a rank that is killed ---


@pytest.mark.parametrize(("chapter", "victim"), first_then_nightly([(DDP, 0), (FSDP, 1)]))
def test_goes_on_after_kill_9_of_one_rank(runs, straight, chapter, victim):
    """The other ends, and says why and how to go on; the run that goes on is the same bit for bit.

    `finish` waits for less time than the process group's timeout.
    """
    name = f"{chapter}-killed"
    on = {"chapter": chapter, "ranks": 2}
    steps = [23 if rank == victim else None for rank in range(2)]
    statuses = runs.finish(name, **on, kill_after_steps=steps, plant=speak_at_once)
    assert statuses.pop(victim) == -signal.SIGKILL and statuses == [1]
    said = runs.said(name, 1 - victim).splitlines()[-1]
    gone = r"other ranks are gone or out of reach \(.*Connection (closed|reset).* after -e\.$"
    assert re.search(gone, said), said
    assert newest_step(runs.folder / name) == 20
    assert runs.finish(name, **on) == [0, 0]
    assert_exact(runs.folder / straight(chapter), runs.folder / name)


def test_each_rank_draws_its_own_dropout(runs, straight):
    saved = tensors(runs.folder / straight(DDP))
    assert not torch.equal(*(saved[f"rng-{rank}"]["torch"] for rank in range(2)))


# --- from chapter to chapter ---

EVERY = 4  # steps: then the next chapter takes over
# The chapters with their variants, and the numbers of ranks, with which a run goes on. With HSDP,
# the ranks are on two nodes.
ON_2_NODES = [{"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2} for rank in TWO_BY_TWO]
JOURNEYS = {
    "chapters": (
        *("01-single-gpu on 1", "04-fsdp+hsdp on 4", "04-fsdp on 3", "02-ddp+zero1 on 2"),
        *("05-mixed-precision+float16+loss-scaling on 2", "01-single-gpu on 1"),
    ),
    "ZeRO-1": ("02-ddp+zero1 on 2", "02-ddp+zero1 on 3", "02-ddp on 2", "03-multi-node+zero1 on 2"),
}


@pytest.fixture(scope="module")
def travels(make_folder) -> Runs:
    """Runs of any number of ranks, with chapter 1's, never stopped.

    There is no dropout, which each rank would draw for itself. There is no clipping: the norm of
    many float32 numbers is good to 1e-4. Adam hides a constant factor of all gradients, but not one
    that changes at a hand-over.
    """
    folder = make_folder("travels")
    runs = Runs(
        folder,
        *("--global-batch-size", 12, "--max-steps", 24, "--log-freq", 1, "--max-grad-norm", "inf"),
        *("--ckpt-freq", EVERY, "--keep-checkpoints", 9),
        flags=make_flags(folder, dropout=0.0),
    )
    assert runs.finish("straight") == [0]
    return runs


def assert_loaded(saved: Path, step: int, loaded: Path) -> None:
    """Weights, moments, schedule and position, bit for bit, on whatever number of ranks."""
    expected, found = tensors(saved, step), tensors(loaded)
    for content in (expected, found):
        (content["optimizer"]["param_groups"],) = content["optimizer"]["param_groups"]
    for key in ("model", "optimizer", "lr_scheduler"):
        assert_same_tensors(expected[key], found[key], key)
    assert expected["state"]["step"] == found["state"]["step"]


def travel(runs: Runs, name: str, stops: tuple[str, ...]) -> None:
    """Each part trains to the end, and is then set back to where the next one takes over.

    After every hand-over the tensors of the checkpoint are there, and the losses are chapter 1's.
    """
    run_dir, rel = runs.folder / name, 1e-5
    for number, stop in enumerate(stops):
        chapter, _, ranks = stop.split()
        if "+" in chapter:
            folder = runs.folder / f"{name}-{number}"
            chapter = str(make_variant(folder, *chapter.split("+")))
        loaded = runs.folder / f"{name}-loaded-{number}"
        planted = functools.partial(save_what_is_loaded, loaded)
        on = {"ranks": int(ranks), "env": ON_2_NODES if "hsdp" in stop else {}}
        statuses = runs.finish(name, chapter=chapter, plant=planted, **on)
        assert set(statuses) == {0}, stop
        if number:
            assert_loaded(run_dir, EVERY * number, loaded)
            shutil.rmtree(loaded)
        if "float16" in stop:
            rel = 0.05  # from here on, weights are those of 16 bits
        losses = [
            [line["loss"] for line in read_metrics(each)]
            for each in (runs.folder / "straight", run_dir)
        ]
        assert losses[1] == pytest.approx(losses[0], rel=rel), stop
        go_back_to(EVERY * (number + 1), run_dir)


@pytest.mark.parametrize("name", first_then_nightly(JOURNEYS))
def test_journey(travels, name):
    travel(travels, name.replace(" ", "-"), JOURNEYS[name])


# --- variants that compute in another way ---

# The chapter, its variants, and how the refusals begin: in the variant, and in the chapter.
ANOTHER_WAY = [
    (
        *("05-mixed-precision", ("reduce-bfloat16",)),
        "reduce_dtype the chapter's, not bfloat16 (see the variant reduce-bfloat16): ",
        "reduce_dtype bfloat16, not the chapter's (see the variant reduce-bfloat16): ",
    ),
    (
        *("05-mixed-precision", ("float16", "loss-scaling")),
        "--precision bf16, not fp16: ",
        "--precision fp16, not bf16: ",
    ),
    (
        *("01-single-gpu", ("autocast",)),
        "precision the chapter's, not bf16 (see the variant autocast): ",
        "precision bf16, not the chapter's (see the variant autocast): ",
    ),
    (
        *("01-single-gpu", ("bfloat16-weights", "stochastic-rounding")),
        "rounding the chapter's, not stochastic (see the variant stochastic-rounding): ",
        "rounding stochastic, not the chapter's (see the variant stochastic-rounding): ",
    ),
    (
        *("03-multi-node", ("bfloat16-weights",)),
        "param_dtype float32, not bfloat16 (see the variants bfloat16-weights and pure-bfloat16): ",
        "param_dtype bfloat16, not float32 (see the variants bfloat16-weights and pure-bfloat16): ",
    ),
]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("chapter", "variants", "in_variant", "in_chapter"),
    first_then_nightly(ANOTHER_WAY),
    ids=["+".join((chapter, *names)) for chapter, names, *_ in ANOTHER_WAY],
)
def test_another_way_is_refused_by_name(chapter, variants, in_variant, in_chapter, tmp_path):
    """From the chapter to the variant, and back; nothing is lost."""
    runs = Runs(tmp_path, "--max-steps", 10)
    variant = str(make_variant(tmp_path, chapter, *variants))
    for first, second, sentence in ((chapter, variant, in_variant), (variant, chapter, in_chapter)):
        name = f"from-{Path(first).name.replace('+', '-')}"
        assert runs.finish(name, chapter=first) == [0]
        go_back_to(5, tmp_path / name)
        before = listing(tmp_path / name)
        assert runs.finish(name, chapter=second) == [2]
        last = runs.said(name).splitlines()[-1]
        assert last.startswith(f"The run {tmp_path / name} was started with {sentence}resume it")
        assert listing(tmp_path / name) == before
        assert runs.finish(name, chapter=first) == [0]


# --- a full disk of one rank ---


@pytest.mark.ci
def test_a_full_disk_of_one_rank(runs):
    """A limit for each file stands for it; both ranks end with the same sentence."""
    limits = {"file_size_limit": [None, 100_000], "plant": speak_at_once}
    assert runs.finish("full", chapter=FSDP, ranks=2, **limits) == [2, 2]
    sentence = runs.said("full").splitlines()[-1]
    assert re.match(r"\S+/step-00000005 could not be used \(.*\): is the disk full", sentence)
    assert runs.said("full", 1) == f"[rank 1] {sentence}\n"
    assert runs.stopped_after("full") == (5, 0), "an incomplete checkpoint counts"

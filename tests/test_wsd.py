"""The variant wsd: what the learning rate is, and runs that train longer than they were planned."""

import functools
import math
import re

import pytest
from helpers import (
    Runs,
    assert_exact,
    first_then_nightly,
    listing,
    make_flags,
    make_variant,
    read_metrics,
    register,
    replace_in,
)

CHAPTER_1, FSDP = "01-single-gpu", "04-fsdp"
MODULE = "01-single-gpu/diffs/wsd.py"
PEAK, WARM_UP, DECAY = 1e-2, 6, 8
# The short run decays after 16 steps and saves in every fifth: step 15 comes before the decay.
SHORT, LONG, LAST_BEFORE = 24, 40, 15
CASES = [(CHAPTER_1, (), 1), (FSDP, ("async-checkpoint",), 2)]


@pytest.fixture(scope="module")
def runs(make_folder) -> Runs:
    """With dropout, so that the RNG state counts, and only one checkpoint kept."""
    folder = make_folder("wsd")
    flags = make_flags(folder)
    flags += ["--lr", PEAK, "--warmup-steps", WARM_UP, "--decay-steps", DECAY, "--log-freq", 1]
    return Runs(folder, "--keep-checkpoints", 1, flags=flags)


@pytest.fixture(scope="module")
def script(make_folder):
    """A function: the script of a chapter with wsd and other variants."""
    folder = make_folder("scripts")
    return functools.cache(lambda *names: str(make_variant(folder, *names)))


def train(runs: Runs, script: str, ranks: int, name: str, steps: int, *args: object) -> None:
    on = {"chapter": script, "ranks": ranks}
    assert runs.finish(name, "--max-steps", steps, *args, **on) == [0] * ranks, runs.said(name)


def steps_saved(runs: Runs, name: str) -> list[int]:
    return sorted(int(path.name[5:]) for path in (runs.folder / name / "checkpoints").iterdir())


def assert_goes_on(runs: Runs, script: str, ranks: int, name: str) -> None:
    """Bit for bit what a run does that was planned to be as long; the short run stays as it is."""
    short, long = f"{name}-short", f"{name}-long"
    train(runs, script, ranks, short, SHORT)
    assert steps_saved(runs, short) == [LAST_BEFORE, SHORT], "the checkpoints differ"
    assert f"a larger --max-steps and --extend {short}: the new run begins" in runs.said(short)
    before = listing(runs.folder / short)
    train(runs, script, ranks, long, LONG, "--extend", short)
    assert f"resumed after step {LAST_BEFORE} of {LONG}" in runs.said(long)
    assert len(runs.samples(long)) == LONG - LAST_BEFORE
    assert listing(runs.folder / short) == before
    train(runs, script, ranks, f"{name}-planned", LONG)
    assert_exact(runs.folder / f"{name}-planned", runs.folder / long)


@pytest.mark.ci
@pytest.mark.parametrize(("chapter", "also", "ranks"), first_then_nightly(CASES))
def test_a_finished_run_goes_on_as_if_planned_so(runs, script, chapter, also, ranks):
    name = "-".join([chapter, *also])
    assert_goes_on(runs, script(chapter, "wsd", *also), ranks, name)
    # What --extend gave may be left out when the longer run is resumed, or extended again.
    again = {"chapter": script(chapter, "wsd", *also), "ranks": ranks}
    assert runs.finish(f"{name}-long", "--max-steps", LONG, **again) == [0] * ranks
    longest = ("--max-steps", LONG + 5, "--extend", f"{name}-long")
    assert runs.finish(f"{name}-longest", *longest, **again) == [0] * ranks
    assert f"resumed after step 30 of {LONG + 5}" in runs.said(f"{name}-longest")


@pytest.mark.ci
def test_warm_up_stable_decay(runs, script):
    """Linear, constant, and one minus a square root."""
    train(runs, script(CHAPTER_1, "wsd"), 1, "schedule", SHORT)
    found = [line["lr"] for line in read_metrics(runs.folder / "schedule")]
    up = [PEAK * (step + 1) / WARM_UP for step in range(WARM_UP)]
    down = [PEAK * (1 - math.sqrt(step / DECAY)) for step in range(DECAY)]
    assert found == pytest.approx([*up, *[PEAK] * (SHORT - WARM_UP - DECAY), *down])


@pytest.mark.ci
def test_what_cannot_be_extended_is_refused(runs, script):
    """With one sentence; nothing is written to either run, but the new run's empty folder."""
    wsd, more = script(CHAPTER_1, "wsd"), ("--max-steps", LONG)
    train(runs, wsd, 1, "refused-short", SHORT)
    plain = Runs(
        runs.folder, "--max-steps", 5, flags=runs.flags[: runs.flags.index("--decay-steps")]
    )
    assert plain.finish("refused-plain") == [0]
    refused = {
        ("--extend", "nothing", *more): r"--extend nothing: \S+ has no complete checkpoint\.",
        ("--extend", "refused-plain", *more): (
            r"--extend refused-plain: the variant wsd has not trained this run\."
        ),
        ("--extend", "refused-short", *more, "--lr", 0.5): (
            r"--extend refused-short: the run was started with --lr 0\.01, not 0\.5\."
        ),
        ("--extend", "refused-short", "--max-steps", 14): (
            r"--extend refused-short: the run has no checkpoint of its first 6 steps, .*"
        ),
        ("--max-steps", 13): (
            r"--warmup-steps 6 and --decay-steps 8 are together more than the 13 steps .*"
        ),
    }
    before = listing(runs.folder / "refused-short")
    for number, (args, sentence) in enumerate(refused.items()):
        name = f"refused-{number}"
        assert runs.finish(name, *args, chapter=wsd) == [2]
        assert re.fullmatch(sentence, runs.said(name).splitlines()[-1]), runs.said(name)
        assert not (runs.folder / name / "newest").exists()
    assert listing(runs.folder / "refused-short") == before


# By name: what must be red, and what is replaced in wsd.py or in the script.
BUGS = {
    "the cleanup deletes it": ("the checkpoints differ", ("if path not in before[-1:]]", "]")),
    "a checkpoint of the decay": ("resumed after step 15", ("if step <= start]", "if step]")),
    "a schedule that depends on the end": (
        "^loss",
        (
            "return 1 - math.sqrt(min(1.0, max(0.0, progress)))",
            "return 1 - math.sqrt(step / total_steps)",
        ),
    ),
}
*OF_MODULE, OF_SCRIPT = BUGS
for name in OF_MODULE:
    register(MODULE, [BUGS[name][1]])
register(CHAPTER_1, [BUGS[OF_SCRIPT][1]], ["wsd"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_noticed(runs, name, tmp_path):
    red, (right, wrong) = BUGS[name]
    folder = make_variant(tmp_path, CHAPTER_1, "wsd")
    file = "train_llm.py" if name == OF_SCRIPT else "wsd.py"
    replace_in(folder / file, right, wrong)
    with pytest.raises(AssertionError, match=red):
        assert_goes_on(runs, str(folder), 1, f"planted-{list(BUGS).index(name)}")

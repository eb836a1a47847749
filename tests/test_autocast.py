"""Chapter 5's idea as diffs of chapters 1 to 3: torch.autocast, and torch.amp.GradScaler.

The diffs are applied to copies of the scripts, and those are run, alone or on two ranks.
"""

import contextlib
import dataclasses
import functools
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from helpers import (
    CHAPTERS,
    EXACT,
    ROOT,
    apply,
    assert_clean,
    changed,
    go_back_to,
    hunks,
    newest_step,
    patch,
    random_texts,
    read_metrics,
    tensors,
)
from runner import RunsByRanks, finish, start
from test_chapter_diffs import ROT as RULES
from torch.distributed.tensor import DTensor

PATCHED = CHAPTERS[:3]
ALONE, DDP, NODES = PATCHED
FSDP = CHAPTERS[4]
PAGE = ROOT / FSDP / "reference.md"
HEADING = "## Mixed precision in chapters 1 to 3"
STEPS, MIDDLE, LATE, OVERFLOW = 20, 10, 15, 2
FIRST_SCALE = 2.0**16  # of GradScaler, if it is not told another
LARGE_SCALE = 2.0**22
# How far a loss and a gradient norm may be from float32's in any step, relative. Measured on a CPU:
# 3e-4 and 5e-3 in bf16, 6e-5 and 3e-4 in fp16; 7e-5 where a run goes on in chapter 5 or from it.
BANDS = {"bf16": (1e-3, 2e-2), "fp16": (3e-4, 2e-3)}


def diff_file(chapter: str) -> Path:
    return ROOT / FSDP / f"autocast-{chapter[:2]}.diff"


# --- the diffs ---


@pytest.fixture(scope="module")
def patched(make_folder) -> Path:
    """Return a folder with the patched scripts."""
    folder = make_folder("patched")
    for chapter in PATCHED:
        patch(chapter, folder)
    return folder


@pytest.mark.check
def test_all_chapters_change_in_the_same_lines():
    """So that the page can show one of the diffs."""
    texts = [diff_file(chapter).read_text() for chapter in PATCHED]
    assert changed(texts[0]) and changed(texts[0]) == changed(texts[1]) == changed(texts[2])
    assert changed(texts[0]) != changed(texts[1].replace("+            scaler.update()\n", ""))


@pytest.mark.check
def test_scaler_is_used_as_in_chapter_5():
    added = [line[1:] for line in changed(diff_file(ALONE).read_text()) if line[0] == "+"]
    lines = [line for line in added if re.search(r"scaler|scale\b", line)]
    assert len(lines) > 10
    assert set(lines) <= set((ROOT / FSDP / "train_llm.py").read_text().splitlines())


@pytest.mark.check
@pytest.mark.parametrize("chapter", PATCHED)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_patched_chapter_keeps_what_was_before(patched, chapter, rule):
    old, new = ((root / chapter / "train_llm.py").read_text() for root in (ROOT, patched))
    assert new != old
    assert rule(old, new) == []


def test_patched_scripts_are_clean(patched):
    assert_clean(patched)


@pytest.mark.check
def test_diff_does_not_apply_to_a_changed_script(tmp_path):
    text = (ROOT / ALONE / "train_llm.py").read_text()
    (tmp_path / ALONE).mkdir()
    (tmp_path / ALONE / "train_llm.py").write_text(text.replace("loss.backward()", "go(loss)"))
    done = apply(diff_file(ALONE), tmp_path)
    assert done.returncode == 1 and "patch does not apply" in done.stderr


def wrong_diffs(text: str, diff: str) -> list[str]:
    """Return what is wrong with the diff blocks of a page's section about these diffs.

    They show all changed lines, in order; a block is one or several pieces of hunks, with a line of
    @@ between them, and may leave out unchanged lines at either end of a piece.
    """
    if HEADING not in text:
        return [f"no heading {HEADING}"]
    section = re.split(r"^##+ ", text.split(f"{HEADING}\n")[1], flags=re.M)[0]
    blocks = re.findall(r"^```diff\n((?:.*\n)*?)```$", section, re.M)
    pieces = [piece for block in blocks for piece in re.split(r"^@@.*\n", block, flags=re.M)]
    complaints, shown = [], []
    for piece in pieces:
        lines = [line or " " for line in piece.splitlines()]
        starts = [
            (hunk, i)
            for hunk in hunks(diff)
            for i in range(len(hunk))
            if hunk[i : i + len(lines)] == lines
        ]
        if lines and len(starts) != 1:
            complaints.append(f"stands {len(starts)} times in the diff:\n{piece}")
        shown += [line for line in lines if line[0] in "+-"]
    if shown != changed(diff):
        complaints.append(f"shown are {shown}")
    return complaints


def page_of(diff: str) -> str:
    """Return a page that shows a diff: two hunks in the first block, and one in each other."""
    first, *rest = ["\n".join(hunk) + "\n" for hunk in hunks(diff)]
    blocks = [f"{first}@@\n{rest[0]}", *rest[1:]]
    shown = "Words.\n\n".join(f"```diff\n{block}```\n\n" for block in blocks)
    return f"# Page\n\n{HEADING}\n\n{shown}## Next\n\n```diff\n+of another section\n```\n"


@pytest.mark.check
def test_page_shows_the_diff():
    assert wrong_diffs(PAGE.read_text(), diff_file(ALONE).read_text()) == []
    assert [page for page in ROOT.glob("*/*.md") if HEADING in page.read_text()] == [PAGE]


@pytest.mark.check
@pytest.mark.parametrize(
    ("pattern", "new", "complaint"),
    [
        ("## Mixed precision in", "## Another", "no heading"),
        (r"\+ .*scaler.update.*\n", "", "shown are"),
        (r"```diff\n(.*\n)*?```\n", "", "shown are"),
        ("( lr_scheduler = .*)", r"\1  # changed", "stands 0 times"),
        (
            r"(```diff\n(?:.*\n)*?```\n)((?:.*\n)*?)(```diff\n(?:.*\n)*?```\n)",
            r"\3\2\1",
            "shown are",
        ),
    ],
)
def test_wrong_page_is_noticed(pattern, new, complaint):
    diff = diff_file(ALONE).read_text()
    page = page_of(diff)
    assert wrong_diffs(page, diff) == []
    rotten = re.sub(pattern, new, page, count=1, flags=re.M)
    assert rotten != page, "nothing to replace"
    assert complaint in "\n".join(wrong_diffs(rotten, diff))


# --- the training ---


@dataclasses.dataclass(frozen=True)
class Run:
    """A training on some ranks.

    args: beside those of all runs. replaced: (right, wrong) texts in the script. source: the name
    of a run, one before it on as many ranks, that this one goes on with from its step `start`.
    patched: False for a chapter as it is.
    """

    chapter: str
    world_size: int
    args: tuple[object, ...] = ()
    replaced: tuple[tuple[str, str], ...] = ()
    source: str | None = None
    start: int = MIDDLE
    patched: bool = True

    def but(self, *more: object, **changes: object) -> "Run":
        """Return this run with more arguments and other values."""
        return dataclasses.replace(self, args=(*self.args, *more), **changes)


def overflow_on(rank: int) -> tuple[tuple[str, str]]:
    """Return what makes the gradients of one rank inf, in one step."""
    scale = "scaler.scale(loss"
    step = f'(rank, state["step"] + 1) == ({rank}, {OVERFLOW})'
    return ((scale, f"{scale} * (math.inf if {step} else 1)"),)


FP16 = ("--precision", "fp16")
SHORT = (*FP16, "--max-steps", OVERFLOW + 2)
# Some steps overflow, for real and on all ranks, until the scale is small enough.
SCALER = "torch.amp.GradScaler(device.type,"
TOO_LARGE = (SCALER, f"{SCALER} init_scale={LARGE_SCALE},")
UNSCALE = "            scaler.unscale_(optimizer)"
CLIP = "            grad_norm = clip_grad_norm(model, args.max_grad_norm)"
BACKWARD = "scaler.scale(loss).backward()"
# Chapter 3 with sharded moments: what --zero1 adds is word for word the same in chapter 2.
alone, ddp, nodes = Run(ALONE, 1), Run(DDP, 2), Run(NODES, 2, ("--zero1",))
not_saved = ('            state["scaler"] = scaler.state_dict()\n', "")
RUNS = {
    "alone-plain": alone.but(patched=False),
    "alone-fp32": alone.but("--precision", "fp32"),
    "alone-tf32": alone.but("--precision", "tf32"),
    "alone-bf16": alone,  # the default
    "alone-fp16": alone.but(*FP16),
    "ddp-plain": ddp.but(patched=False),
    "ddp-fp32": ddp.but("--precision", "fp32"),
    "ddp-bf16": ddp.but("--precision", "bf16"),
    "ddp-fp16": ddp.but(*FP16, "-b", 1),
    "nodes-plain": nodes.but(patched=False),
    "nodes-fp32": nodes.but("--precision", "fp32"),
    "nodes-bf16": nodes.but("--precision", "bf16"),
    "nodes-fp16": nodes.but(*FP16),
    "alone-overflow": alone.but(*SHORT, replaced=overflow_on(0)),
    "ddp-overflow": ddp.but(*SHORT, replaced=overflow_on(1)),
    "nodes-overflow": nodes.but(*SHORT, replaced=overflow_on(1)),
    "alone-large": alone.but(*FP16, replaced=(TOO_LARGE,)),
    "nodes-large": nodes.but(*FP16, replaced=(TOO_LARGE,)),
    "nodes-large-on": nodes.but(*FP16, replaced=(TOO_LARGE,), source="nodes-large"),
    # From chapter to chapter; chapter 5 is not patched, and chapter 1 unpatched has no scale.
    "nodes-to-fsdp": Run(FSDP, 2, FP16, source="nodes-large", patched=False),
    "fsdp-to-ddp": ddp.but(*FP16, source="nodes-to-fsdp", start=LATE),
    "alone-to-fsdp": Run(FSDP, 1, FP16, source="alone-large", patched=False),
    "fsdp-to-alone": alone.but(*FP16, source="alone-to-fsdp", start=LATE),
    "plain-to-alone": alone.but(*FP16, source="alone-plain"),
    "alone-to-plain": alone.but(source="alone-large", patched=False),
    # Planted bugs.
    "not-cast": alone.but(replaced=(('in ("bf16", "fp16")', "in ()"),)),
    "clipped-first": alone.but(
        *SHORT, replaced=((UNSCALE, "            pass"), (CLIP, f"{CLIP}\n{UNSCALE}"))
    ),
    "not-scaled": alone.but(
        *SHORT, replaced=((BACKWARD, f"scaler.scale(loss)\n{' ' * 16}loss.backward()"),)
    ),
    "no-average": ddp.but(
        *SHORT, replaced=(*overflow_on(1), ("micro_batch == accumulation - 1", "False"))
    ),
    "not-saved": alone.but(*FP16, replaced=(TOO_LARGE, not_saved)),
    "not-saved-on": alone.but(*FP16, replaced=(TOO_LARGE, not_saved), source="not-saved"),
}
PLACES = ("alone", "ddp", "nodes")


class NotingScaler(torch.amp.GradScaler):
    """Notes after each step the scale and a checksum of all weights of this rank."""

    file: Path

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        super().step(optimizer)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def update(self) -> None:
        super().update()
        weights = xxhash.xxh3_64()
        for parameter in self.parameters:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            weights.update(local.detach().numpy().tobytes())
        with self.file.open("a") as notes:
            notes.write(json.dumps([weights.hexdigest(), self.get_scale()]) + "\n")


@contextlib.contextmanager
def prepared(notes: Path, copied: tuple[Path, Path, int] | None) -> Iterator[None]:
    """Run with NotingScaler, and with `copied` from a copy of a run as it was after a step."""
    if copied is not None:
        source, run_dir, step = copied
        shutil.copytree(source, run_dir)
        go_back_to(step, run_dir)
    original = torch.amp.GradScaler
    NotingScaler.file = notes
    torch.amp.GradScaler = NotingScaler
    yield
    torch.amp.GradScaler = original


class Runs(RunsByRanks):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, RUNS)
        config = json.loads((ROOT / "common/presets/gpt2-tiny/config.json").read_text())
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text(json.dumps(config | {"n_embd": 32}))
        (folder / "corpus.json").write_text(json.dumps(random_texts(12)))

    def flags(self, name: str) -> list[object]:
        return [
            *("-m", self.folder / "model", "--tokenizer-name", "gpt2-tiny", "--lr", 1e-2),
            *("-d", self.folder / "corpus.json", "-s", 32, "--global-batch-size", 6, "-b", 3),
            *("--max-steps", STEPS, "--log-freq", 1, "--eval-freq", STEPS, "--warmup-steps", 5),
            *("--ckpt-freq", 5, "--keep-checkpoints", 9, "--save-dir", self.folder, "-e", name),
        ]

    def notes_file(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}-{rank}.notes"

    def notes(self, name: str) -> list[list[list]]:
        """Return for each rank the [checksum of its weights, scale] after each step."""
        files = [self.notes_file(name, rank) for rank in range(RUNS[name].world_size)]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    def options(self, name: str) -> dict[str, object]:
        run, chapter = RUNS[name], RUNS[name].chapter
        if run.patched:
            chapter = str(patch(chapter, self.folder / f"{name}-script", run.replaced))
        copied = (self.folder / run.source, self.folder / name, run.start) if run.source else None
        within = [
            functools.partial(prepared, self.notes_file(name, rank), None if rank else copied)
            for rank in range(run.world_size)
        ]
        return {"args": [*self.flags(name), *run.args], "chapter": chapter, "within": within}


@pytest.fixture(scope="module")
def runs(make_folder) -> Runs:
    return Runs(make_folder("runs"))


def column(run_dir: Path, key: str) -> list[float | None]:
    return [line[key] for line in read_metrics(run_dir) if key in line]


def assert_equal(expected: Path, found: Path, *more: str) -> None:
    for key in ("step", *EXACT, *more):
        assert column(found, key) == column(expected, key), f"the {key} differs"


def assert_close(expected: Path, found: Path, precision: str) -> None:
    """As many steps of the same training as there are: close to float32's, and not equal to it."""
    loss, grad_norm = BANDS[precision]
    for key, rel in (("loss", loss), ("grad_norm", grad_norm)):
        values = column(found, key)
        same = values == pytest.approx(column(expected, key)[: len(values)], rel=rel)
        assert same, f"the {key} is out of its band"
    assert column(found, "loss") != column(expected, "loss"), "nothing was cast"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("place", "precision"), [("alone", "tf32"), *((place, "fp32") for place in PLACES)]
)
def test_float32_is_the_unpatched_chapter(runs, place, precision):
    expected = runs[f"{place}-plain"]
    assert len(column(expected, "loss")) == STEPS
    assert_equal(expected, runs[f"{place}-{precision}"])
    with pytest.raises(AssertionError, match="the loss differs"):
        assert_equal(expected, runs[f"{place}-bf16"])


@pytest.mark.ci
@pytest.mark.parametrize("precision", BANDS)
@pytest.mark.parametrize("place", PLACES)
def test_16_bits_are_close_to_float32(runs, place, precision):
    expected, found = runs[f"{place}-plain"], runs[f"{place}-{precision}"]
    losses = column(found, "loss")
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1
    assert_close(expected, found, precision)
    evaluated = [column(path, "eval_loss") for path in (expected, found)]
    assert len(evaluated[0]) == 1
    assert evaluated[1] == pytest.approx(evaluated[0], rel=BANDS[precision][0])
    scales = column(found, "loss_scale")
    assert scales == ([FIRST_SCALE] * STEPS if precision == "fp16" else [])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("bug", "complaint"),
    [
        ("not-cast", "nothing was cast"),
        ("clipped-first", "the loss is out of its band"),
        ("not-scaled", "the loss is out of its band"),
    ],
)
def test_planted_bug_is_noticed(runs, bug, complaint):
    with pytest.raises(AssertionError, match=complaint):
        assert_close(runs["alone-plain"], runs[bug], "fp16" if bug != "not-cast" else "bf16")


def assert_skipped(runs: Runs, name: str) -> None:
    """In the step with the overflow no rank's weights change, and all go on with half the scale."""
    ranks = runs.notes(name)
    assert all(notes == ranks[0] for notes in ranks), "the ranks differ"
    before, skipped, after = ranks[0][OVERFLOW - 2 : OVERFLOW + 1]
    assert before[1] == FIRST_SCALE
    assert skipped == [before[0], FIRST_SCALE / 2], "the step is not skipped"
    assert after[0] != before[0] and after[1] == FIRST_SCALE / 2


@pytest.mark.ci
@pytest.mark.parametrize("place", PLACES)
def test_overflow_on_one_rank_makes_all_skip(runs, place):
    run_dir = runs[f"{place}-overflow"]
    assert_skipped(runs, run_dir.name)
    skipped = [norm is None for norm in column(run_dir, "grad_norm")]
    assert skipped == [step == OVERFLOW for step in column(run_dir, "step")]
    assert None not in column(run_dir, "loss")


@pytest.mark.ci
def test_planted_rank_that_decides_alone(runs):
    """The planted bug averages no gradients: rank 0 sees no overflow."""
    with pytest.raises(AssertionError, match="the ranks differ"):
        assert_skipped(runs, runs["no-average"].name)


def assert_goes_on(straight: Path, found: Path) -> None:
    assert_equal(straight, found, "loss_scale")
    scalers = [tensors(path)["state"]["scaler"] for path in (straight, found)]
    assert scalers[0] == scalers[1], "the scaler differs"


@pytest.mark.ci
def test_after_kill_9(runs):
    straight = runs["alone-large"]
    skipped = [norm is None for norm in column(straight, "grad_norm")]
    assert sum(skipped) >= 3 and not any(skipped[MIDDLE:])
    assert column(straight, "loss_scale")[MIDDLE] == LARGE_SCALE / 2 ** sum(skipped)
    args = [*runs.flags("killed"), *RUNS["alone-large"].args]
    chapter = str(runs.folder / "alone-large-script" / ALONE)
    killed = start(args, chapter=chapter, kill_after_steps=MIDDLE + 3)
    assert finish(killed) == -signal.SIGKILL
    assert newest_step(runs.folder / "killed") == MIDDLE
    assert finish(start(args, chapter=chapter)) == 0
    assert_goes_on(straight, runs.folder / "killed")


@pytest.mark.ci
def test_resumed_with_sharded_moments(runs):
    assert_goes_on(runs["nodes-large"], runs["nodes-large-on"])


@pytest.mark.ci
def test_planted_scale_that_is_not_saved(runs):
    with pytest.raises(AssertionError, match=r"the \w+ differs"):
        assert_goes_on(runs["not-saved"], runs["not-saved-on"])


@pytest.mark.ci
@pytest.mark.parametrize("name", [name for name in RUNS if "-to-" in name])
def test_checkpoint_goes_from_chapter_to_chapter(runs, name):
    """To chapter 5 and back, and to and from a chapter that has no scale and so saves none."""
    straight, found = runs[RUNS[name].source], runs[name]
    first = RUNS[name].start
    losses = [column(path, "loss") for path in (straight, found)]
    assert losses[1][:first] == losses[0][:first] and len(losses[1]) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=BANDS["fp16"][0])
    saved = column(straight, "loss_scale")[first:] or [FIRST_SCALE] * (STEPS - first)
    scales = [line.get("loss_scale") for line in read_metrics(found)[first:]]
    assert scales == (saved if "--precision" in RUNS[name].args else [None] * (STEPS - first))

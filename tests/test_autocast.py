"""Chapter 5's idea as diffs of chapters 1 to 3: torch.autocast, and torch.amp.GradScaler.

The diffs change the same lines in all three, so chapter 2's is applied to a copy of the script, and
that is run on two ranks. The page and the rules of the code are for test_chapter_diffs.py.
"""

import os
import re
from pathlib import Path

import pytest
from helpers import CHAPTERS, EXACT, ROOT, Ladder, Run, changed, patch

DDP, FSDP = CHAPTERS[1], CHAPTERS[4]
DIFFS = [ROOT / FSDP / f"diffs/autocast-{chapter[:2]}.diff" for chapter in CHAPTERS[:3]]
STEPS = 20
FEW = ("-b", 12, "--max-steps", STEPS, "--warmup-steps", 5, "--lr", 1e-2)
FIRST_SCALE = 2.0**16  # GradScaler's own
# How far a loss, a gradient norm and an evaluation's loss may be from float32's, relative. Measured
# on a CPU: 3e-4 and 5e-3 in bf16, 6e-5, 8e-3 and 5e-4 in fp16.
# This narrow model's norm is small when the loss has fallen, so it differs more than the loss.
BANDS = {"bf16": (1e-3, 2e-2, 1e-3), "fp16": (3e-4, 2e-2, 1e-3)}


@pytest.mark.check
def test_all_chapters_change_in_the_same_lines():
    """So that the page can show one of the diffs, and one is enough to train with."""
    first, *others = [changed(path.read_text()) for path in DIFFS]
    assert first and all(lines == first for lines in others)


@pytest.mark.check
def test_scaler_is_used_as_in_chapter_5():
    added = [line[1:] for line in changed(DIFFS[0].read_text()) if line[0] == "+"]
    lines = [line for line in added if re.search(r"scaler|scale\b", line)]
    assert len(lines) > 10
    assert set(lines) <= set((ROOT / FSDP / "train_llm.py").read_text().splitlines())


class Patched(Ladder):
    """Runs of the patched script and of chapters as they are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, model="gpt2-narrow")
        patched = os.path.relpath(patch(DDP, folder / "patched"), ROOT)
        self.runs = {
            "plain": Run(DDP, 2, FEW),
            "fp32": Run(patched, 2, (*FEW, "--precision", "fp32")),
            "bf16": Run(patched, 2, FEW),  # the default
            "fp16": Run(patched, 2, (*FEW, "--precision", "fp16", "-b", 3)),
        }
        self.selected = list(self.runs.values())

    def column(self, name: str, key: str) -> list[float | None]:
        metrics = self.metrics(self.run(self.runs[name]))
        return [line[key] for line in metrics if key in line]


@pytest.fixture(scope="module")
def runs(make_folder) -> Patched:
    return Patched(make_folder("autocast"))


@pytest.mark.ci
def test_float32_is_the_unpatched_chapter(runs):
    for key in ("step", *EXACT):
        expected, found = (runs.column(name, key) for name in ("plain", "fp32"))
        assert expected == found and found, key


@pytest.mark.ci
@pytest.mark.parametrize("precision", BANDS)
def test_16_bits_are_close_to_float32(runs, precision):
    losses = runs.column(precision, "loss")
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1
    for key, rel in zip(("loss", "grad_norm", "eval_loss"), BANDS[precision], strict=True):
        expected = runs.column("plain", key)
        assert runs.column(precision, key) == pytest.approx(expected, rel=rel), key
    assert losses != runs.column("plain", "loss"), "nothing was cast"
    scales = runs.column(precision, "loss_scale")
    assert scales == ([FIRST_SCALE] * STEPS if precision == "fp16" else [])

"""A run that diverges stops on all ranks, and its last good checkpoint stays."""

import json
from pathlib import Path

import pytest
from helpers import Runs, make_variant, plant, random_texts, read_metrics, register

from common.checkpoint import complete_checkpoints

LOG, SAVE, STEPS = 4, 8, 16
LOSS = "**batch).loss / accumulation"
UPDATE = '        with timers("update"):\n'
FINITE = "            if not (running_loss + grad_norm).isfinite():\n"
ONE_RANK = "            if not finite:\n"
SUM = "            running_loss /= world_size\n"
RUNNING = "running_loss += loss.detach()"


def becomes_nan(number: str, step: int, rank: int) -> tuple[str, str]:
    """Return a replacement in a script: this number is NaN in this step on this rank only."""
    wrong = f'(float("nan") if (state["step"], rank) == ({step - 1}, {rank}) else 1)'
    return number, f"{number} * {wrong}"


def bad_gradient(step: int) -> tuple[str, str]:
    """Return a replacement in a script: in this step, a gradient is infinite on all ranks."""
    return UPDATE, (
        f'        if state["step"] == {step - 1}:\n'
        f'            next(iter(model.parameters())).grad.mul_(float("inf"))\n{UPDATE}'
    )


# In the last step, a gradient is infinite on rank 1.
ONE_BAD_GRADIENT = tuple(
    text.replace('state["step"] ==', 'rank == 1 and state["step"] ==') for text in bad_gradient(16)
)
# The chapter, the ranks, the bug, variants, in which step it is noticed, and which checkpoint
# stays. With the sum of the losses only, this rank's gradients are good.
CASES = {
    "one rank only": ("02-ddp", 2, [becomes_nan(LOSS, 11, 1)], (), 12, 8),
    "with data workers": ("03-multi-node", 2, [becomes_nan(LOSS, 11, 1)], ("workers",), 12, 8),
    "in the step of a checkpoint": ("01-single-gpu", 1, [bad_gradient(16)], (), 16, 8),
    "sharded": ("04-fsdp", 2, [bad_gradient(9)], (), 12, 8),
    "one rank's sum only": ("02-ddp", 2, [becomes_nan(RUNNING, 12, 1)], (), 12, 8),
    # Steps 10 and 16 are logged, and step 10 is saved: the only outer steps.
    "of one rank alone": ("03-multi-node", 2, [becomes_nan(LOSS, 11, 1)], ("local-sgd",), 16, 10),
    "one rank's gradient": ("03-multi-node", 2, [ONE_BAD_GRADIENT], ("local-sgd",), 16, 10),
    "before the first checkpoint": ("01-single-gpu", 1, [becomes_nan(LOSS, 2, 0)], (), 4, 0),
}
# A script in which the bug is planted beside the case that must notice it.
BUGS = {
    "each rank its own loss": (
        "one rank's sum only",
        [(SUM, f"            finite = running_loss.isfinite()\n{SUM}"), (FINITE, ONE_RANK)],
    ),
    "each rank its own norm": (
        "one rank's gradient",
        [("            dist.all_reduce(grad_norm)\n", "")],
    ),
    "the loss only": (
        "in the step of a checkpoint",
        [("(running_loss + grad_norm).isfinite()", "running_loss.isfinite()")],
    ),
}
for chapter, _, replaced, variants, *_ in CASES.values():
    register(chapter, replaced, variants)
for case, replaced in BUGS.values():
    register(CASES[case][0], replaced, CASES[case][3])


def check_stop(folder: Path, case: str, wrong: list[tuple[str, str]] = ()) -> None:
    """Train with a script in which these texts are replaced; it stops as the case says."""
    chapter, world_size, replaced, variants, noticed, kept = CASES[case]
    if variants:
        chapter = str(make_variant(folder, chapter, *variants))
    (folder / "corpus.json").write_text(json.dumps(random_texts(14)))
    flags = ["-d", folder / "corpus.json", "-s", 16, "--global-batch-size", 24]
    flags += ["--max-steps", STEPS, "--log-freq", LOG, "--ckpt-freq", SAVE]
    runs = Runs(folder, flags=flags)
    script = str(plant(chapter, folder / "script", [*wrong, *replaced]))
    statuses = runs.finish("run", chapter=script, ranks=world_size)
    assert set(statuses) == {2}, f"the statuses are {statuses}"
    said = runs.said("run")
    assert f"The training has diverged: at step {noticed} " in said
    assert f"can be resumed from step {kept}, but" in said and "Traceback" not in said
    assert max(complete_checkpoints(folder / "run/checkpoints"), default=0) == kept
    assert all(line["loss"] is not None for line in read_metrics(folder / "run"))


QUICK = ("one rank only", "in the step of a checkpoint")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.ci) for case in CASES]
)
def test_stops(tmp_path, case):
    check_stop(tmp_path, case)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_noticed(tmp_path, bug):
    with pytest.raises(AssertionError, match=r"^the statuses are"):
        check_stop(tmp_path, *BUGS[bug])

"""A run that diverges stops on all ranks, and its last good checkpoint stays."""

import json
from pathlib import Path

import pytest
import torch
from helpers import newest_step, plant, random_texts, read_metrics, register
from runner import Ranks, finish, start
from torch import nn

from common.checkpoint import complete_checkpoints
from common.gradients import clip_grad_norm

LOG, SAVE, STEPS = 4, 8, 16
LOSS = "**batch).loss / accumulation"
START = "# --- train ---\n"
WRITE = "torch.distributed.checkpoint.FileSystemWriter"
UPDATE = '        with timers("update"):\n'
CHECK = '            check_finite(run_dir, state["step"], running_loss, grad_norm)\n'
SUM = "            running_loss /= world_size\n"
RUNNING = "running_loss += loss.detach()"


def bad_loss(step: int, rank: int) -> tuple[str, str]:
    """Return a replacement in a script: the loss of this step is NaN on this rank only."""
    wrong = f'(float("nan") if (state["step"], rank) == ({step - 1}, {rank}) else 1)'
    return LOSS, f"{LOSS} * {wrong}"


def bad_number(step: int, rank: int) -> tuple[str, str]:
    """Return a replacement in a script: this rank adds up NaN, but has good gradients."""
    wrong = f'(float("nan") if (state["step"], rank) == ({step - 1}, {rank}) else 1)'
    return RUNNING, f"{RUNNING} * {wrong}"


def bad_gradient(step: int) -> tuple[str, str]:
    """Return a replacement in a script: in this step, a gradient is infinite on all ranks."""
    return UPDATE, (
        f'        if state["step"] == {step - 1}:\n'
        f'            next(iter(model.parameters())).grad.mul_(float("inf"))\n{UPDATE}'
    )


# Writing a checkpoint takes some seconds more.
SLOW = (
    START,
    f"""{START}    import time
    write_data = {WRITE}.write_data
    {WRITE}.write_data = lambda *args: time.sleep(3) or write_data(*args)
""",
)
ASYNC = ("--async-checkpoint",)
# In which step it is noticed, and which checkpoint stays.
CASES = {
    "one rank only": ("02-ddp", 2, [bad_loss(11, 1)], (), 12, 8),
    "in the step of a checkpoint": ("01-single-gpu", 1, [bad_gradient(16)], (), 16, 8),
    "with data workers": ("03-multi-node", 2, [bad_loss(11, 1)], ("--num-workers", 1), 12, 8),
    "while a checkpoint is written": ("04-fsdp", 2, [bad_gradient(9), SLOW], ASYNC, 12, 8),
    "asynchronous": ("04-fsdp", 2, [bad_gradient(16)], ASYNC, 16, 8),
    "one rank's number only": ("02-ddp", 2, [bad_number(12, 1)], (), 12, 8),
    "before the first checkpoint": ("01-single-gpu", 1, [bad_loss(2, 0)], (), 4, None),
}
# A script in which the bug is planted beside the case that must notice it.
BUGS = {
    "no check": ("one rank only", [(CHECK, "            pass\n")]),
    "each rank its own loss": ("one rank's number only", [(CHECK, ""), (SUM, CHECK + SUM)]),
    "the loss only": ("asynchronous", [("running_loss, grad_norm)", "running_loss, None)")]),
}
for chapter, _, replaced, *_ in CASES.values():
    register(chapter, replaced)
for case, replaced in BUGS.values():
    register(CASES[case][0], replaced)


def run(folder: Path, chapter: str, world_size: int, replaced: list, args: tuple) -> list[int]:
    """Train with a script in which these texts are replaced; return the exit statuses."""
    (folder / "corpus.json").write_text(json.dumps(random_texts(14)))
    script = plant(chapter, folder / "script", replaced)
    arguments = [
        *("-d", folder / "corpus.json", "-s", 16, "--global-batch-size", 24, "--max-steps", STEPS),
        *("--log-freq", LOG, "--ckpt-freq", SAVE, "--save-dir", folder, "-e", "run", *args),
    ]
    errors = [str(folder / f"{rank}.stderr") for rank in range(world_size)]
    if world_size == 1:
        return [finish(start(arguments, chapter=str(script), stderr_file=errors[0]))]
    return Ranks(world_size, arguments, chapter=str(script), stderr_file=errors).finish()


def assert_stopped(
    folder: Path, statuses: list[int], noticed: int, kept: int | None, is_slow: bool = False
) -> None:
    assert set(statuses) == {2}, f"the statuses are {statuses}"
    said = (folder / "0.stderr").read_text()
    assert f"The training has diverged: at step {noticed} " in said
    shown = f"the checkpoint of step {kept} is kept" if kept else "no checkpoint is complete"
    assert shown in said or (is_slow and "no checkpoint is complete" in said)
    assert "Traceback" not in said
    assert "-e run" in said.splitlines()[-2 if is_slow else -1]  # then it waits for the writing
    if kept:
        assert max(complete_checkpoints(folder / "run")) == kept
        assert all(line["loss"] is not None for line in read_metrics(folder / "run"))
    else:
        assert newest_step(folder / "run") == 0


@pytest.mark.parametrize(
    "case",
    [
        *("one rank only", "in the step of a checkpoint", "with data workers"),
        pytest.param("while a checkpoint is written", marks=pytest.mark.ci),
        pytest.param("asynchronous", marks=pytest.mark.ci),
        pytest.param("one rank's number only", marks=pytest.mark.ci),
        pytest.param("before the first checkpoint", marks=pytest.mark.ci),
    ],
)
def test_stops(tmp_path, case):
    chapter, world_size, replaced, args, noticed, kept = CASES[case]
    statuses = run(tmp_path, chapter, world_size, replaced, args)
    assert_stopped(tmp_path, statuses, noticed, kept, is_slow=SLOW in replaced)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_noticed(tmp_path, bug):
    case, wrong = BUGS[bug]
    chapter, world_size, replaced, args, noticed, kept = CASES[case]
    statuses = run(tmp_path, chapter, world_size, [*wrong, *replaced], args)
    with pytest.raises(AssertionError):
        assert_stopped(tmp_path, statuses, noticed, kept)


@pytest.mark.nightly
def test_a_step_that_the_scaler_skips_is_no_divergence(tmp_path):
    """With float16, an infinite gradient in the step of a checkpoint stops nothing."""
    bug = [bad_gradient(8)]
    assert run(tmp_path, "05-mixed-precision", 2, bug, ("--precision", "fp16")) == [0, 0]
    assert newest_step(tmp_path / "run") == STEPS


@pytest.mark.check
def test_norm_is_that_of_float64_and_clips_as_pytorch_does():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 2000), nn.LayerNorm(2000), nn.Linear(2000, 3))
    model(torch.randn(8, 300)).square().sum().backward()
    exact = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()
    before = [p.grad.clone() for p in model.parameters()]
    assert clip_grad_norm(model, exact.item() / 3).item() == pytest.approx(exact.item(), rel=1e-7)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 3)
    again = [p.grad.clone() for p in model.parameters()]
    clip_grad_norm(model, float("inf"))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), again, strict=True))

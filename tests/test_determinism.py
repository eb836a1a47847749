"""Two runs of the same command are the same run; what is missing where they are not."""

import itertools
import json
import re
import shutil
import sys

import pytest
import torch
import torch.distributed.checkpoint
from helpers import ROOT, make_flags, plant, register
from runner import load_script
from transformers import set_seed

from common import checkpoint

STEPS = 12
CHAPTER = "01-single-gpu"
compare_runs = load_script(ROOT / "03-multi-node/tools/compare_runs.py")


@pytest.fixture
def run(train, tmp_path):
    """Return a function that trains a model with dropout and returns the losses of all steps."""
    flags = make_flags(tmp_path)
    states = itertools.count(1000)

    def losses(name: str, *args: object, chapter: str = CHAPTER) -> list[float]:
        # What a run must not depend on: the state of the generators before it.
        set_seed(next(states))
        few = ("--max-steps", STEPS, "--log-freq", 1, "--ckpt-freq", STEPS // 2)
        return [line["loss"] for line in train(*flags, *few, *args, name=name, chapter=chapter)]

    return losses


def compare(tmp_path, monkeypatch, capsys, *names: str) -> tuple[int, str]:
    """Return the status of compare_runs.py and what it prints."""
    folders = [str(tmp_path / name) for name in names]
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *folders])
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        compare_runs.launch.run(compare_runs.main)
    said = capsys.readouterr()
    return end.value.code, said.out + said.err


def test_two_runs_are_equal_to_the_last_bit(run, tmp_path, monkeypatch, capsys):
    assert run("one") == run("two")
    status, said = compare(tmp_path, monkeypatch, capsys, "one", "two")
    first, *checkpoints = said.splitlines()
    assert (status, first) == (
        0,
        f"all {STEPS} steps that both runs logged are identical, up to step {STEPS}",
    )
    assert [line.split(":")[0] for line in checkpoints] == ["step-00000006", "step-00000012"]
    assert all(re.search(r": 0 of \d\d+ values differ$", line) for line in checkpoints)


NO_SEED = [("    torch.manual_seed(args.seed)\n", "")]
register(CHAPTER, NO_SEED)


def test_planted_missing_seed_is_seen(run, tmp_path, monkeypatch, capsys):
    """That of the weights; dropout's is only there so that ranks differ from one another."""
    chapter = plant(CHAPTER, tmp_path / "planted", NO_SEED)
    assert run("one", chapter=chapter) != run("two", chapter=chapter)
    status, said = compare(tmp_path, monkeypatch, capsys, "one", "two")
    assert status == 1 and said.startswith("the runs differ from step 1 on: loss by")


def test_planted_rng_state_that_is_not_restored_is_seen(run, tmp_path, monkeypatch, capsys):
    """Dropout differs in the first step after the restart; the page determinism.md shows this."""
    run("straight")
    run("resumed")
    shutil.rmtree(tmp_path / f"resumed/checkpoints/step-{STEPS:08d}")  # back to the one before it
    monkeypatch.setattr(checkpoint, "set_rng_state", lambda rng: None)
    run("resumed")
    status, said = compare(tmp_path, monkeypatch, capsys, "straight", "resumed")
    first, early, late = said.splitlines()
    assert status == 1 and first.startswith("the runs differ from step 7 on: loss by ")
    assert early.startswith("step-00000006: 0 of "), "the checkpoint itself is right"
    assert re.match(rf"step-{STEPS:08d}: [1-9]\d* of \d+ values differ: ", late)


# --- compare_runs.py ---


def write_run(folder, losses: list[float | None], first: int = 1) -> str:
    folder.mkdir()
    lines = [{"step": first + n, "loss": loss, "lr": 0.1} for n, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder.name


@pytest.mark.check
def test_checkpoints_that_differ_behind_equal_logs_end_with_1(tmp_path, monkeypatch, capsys):
    """A random state, say, that nothing has been drawn from yet."""
    names = write_run(tmp_path / "one", [3, 2]), write_run(tmp_path / "two", [3, 2])
    assert compare(tmp_path, monkeypatch, capsys, *names)[0] == 0
    for number, name in enumerate(names):
        folder = tmp_path / name / "checkpoints/step-00000002"
        torch.distributed.checkpoint.save(
            {"model": torch.zeros(2), "rng-0": torch.tensor([number])},
            checkpoint_id=folder,
            no_dist=True,
        )
    status, said = compare(tmp_path, monkeypatch, capsys, *names)
    assert status == 1
    assert said.startswith("all 2 steps that both runs logged are identical, up to step 2\n")
    assert "step-00000002: 1 of 2 values differ: rng-0" in said


@pytest.mark.check
@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        (
            [3, 2, 1],
            [3, 2.002, 1],
            "the runs differ from step 2 on: loss by 1.0e-03; step 1 is identical\n",
        ),
        ([3, None], [3, 2], "the runs differ from step 2 on: loss by inf"),
        ([3, None], [3, None, 1], "all 2 steps that both runs logged are identical, up to step 2"),
    ],
)
def test_where_two_runs_part(tmp_path, monkeypatch, capsys, one, two, said):
    names = write_run(tmp_path / "one", one), write_run(tmp_path / "two", two)
    assert compare(tmp_path, monkeypatch, capsys, *names)[1].startswith(said)


@pytest.mark.check
def test_bad_input_of_compare_runs(tmp_path, monkeypatch, capsys):
    one, two = write_run(tmp_path / "one", [1]), write_run(tmp_path / "two", [1], first=5)
    status, said = compare(tmp_path, monkeypatch, capsys, one, two)
    sentence = "The two runs logged no common step: use the same --log-freq for both.\n"
    assert (status, said) == (2, sentence)
    status, said = compare(tmp_path, monkeypatch, capsys, one, "gone")
    assert status == 2 and said.startswith(f"Cannot read {tmp_path / 'gone'}/metrics.jsonl")
    (tmp_path / "two/metrics.jsonl").write_text("{")
    assert compare(tmp_path, monkeypatch, capsys, one, "two")[0] == 2

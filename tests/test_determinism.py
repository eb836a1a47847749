"""Two runs of the same command are the same run; what is missing where they are not."""

import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers import ROOT, make_flags, plant, register
from runner import load_script
from transformers import set_seed

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


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Return a function that compares the runs "one" and "two": the status and what is printed."""
    folders = [str(tmp_path / name) for name in ("one", "two")]

    def compared() -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["compare_runs.py", *folders])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            compare_runs.launch.run(compare_runs.main)
        return end.value.code, "".join(capsys.readouterr())

    return compared


def test_two_runs_are_equal_to_the_last_bit(run, compare, tmp_path):
    assert run("one") == run("two")
    status, said = compare()
    assert status == 0 and said.endswith("\nno difference in the logs and checkpoints\n")

    early, late = (tmp_path / f"two/checkpoints/step-{step:08d}" for step in (6, 12))
    shutil.rmtree(late)
    shutil.copytree(early, late)
    status, said = compare()
    assert status == 1, "checkpoints differ behind equal logs"
    last = said.splitlines()[-1]
    assert re.search(r"/two: step-0*12: [1-9]\d* of \d+ tensors and numbers differ: ", last)
    assert said.count("/two: ") == 1, "neither the logs nor the checkpoints of step 6"


NO_SEED = [("    torch.manual_seed(args.seed)\n", "")]
register(CHAPTER, NO_SEED)


def test_planted_missing_seed_is_seen(run, compare, tmp_path):
    """That of the weights; dropout's is only there so that ranks differ from one another."""
    chapter = plant(CHAPTER, tmp_path / "planted", NO_SEED)
    assert run("one", chapter=chapter) != run("two", chapter=chapter)
    status, said = compare()
    assert status == 1 and "/two: differs from step 1 on: loss by" in said


# --- compare_runs.py ---


def write_run(folder: Path, losses: dict[int, float]) -> None:
    """Write what a run has logged, given the losses by step."""
    folder.mkdir()
    speed = {"tokens_per_s": 1000.0, "time/forward": 2.0, "peak_mem_gib": 0.5}
    lines = [{"step": step, "loss": loss, "lr": 0.1, **speed} for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.check
@pytest.mark.parametrize(
    ("one", "two", "status", "said"),
    [
        ({1: 3, 2: 2, 3: 1}, {1: 3, 2: 2.002, 3: 1}, 1, "differs from step 2 on: loss by 1.0e-03"),
        ({1: 3, 2: 2}, {1: 3, 2: 2, 3: 1}, 0, "no difference in the logs and checkpoints"),
        ({1: 1}, {5: 1}, 2, "The runs logged no common step: use the same --log-freq for all."),
    ],
)
def test_where_two_runs_part(compare, tmp_path, one, two, status, said):
    write_run(tmp_path / "one", one)
    write_run(tmp_path / "two", two)
    ended, found = compare()
    assert ended == status and said in found
    if status < 2:
        row = re.search(r"/two +1,000 +0\.0 +2\.0 +0\.0 +0\.0 +0\.5 +1\.0000 +(\S+)$", found, re.M)
        assert row[1] == ("1.0e-03" if status else "0.0e+00")

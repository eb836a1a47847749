"""Two runs of the same command are the same run; what is missing where they are not."""

import itertools
import json
import os
import re
import shutil
import sys

import pytest
import torch
import torch.distributed.checkpoint
from helpers import ROOT, first_then_nightly, make_flags, plant
from runner import load_script
from transformers import set_seed

from common.checkpoint import save_load

STEPS = 12
CHAPTER = "01-single-gpu"
compare_runs = load_script(ROOT / "03-multi-node/compare_runs.py")


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
        compare_runs.distributed.run(compare_runs.main)
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


def test_a_missing_seed_is_seen(run, tmp_path, monkeypatch, capsys):
    """That of the weights; dropout's is only there so that ranks differ from one another."""
    seed = "    torch.manual_seed(args.seed)\n"
    chapter = plant(CHAPTER, tmp_path / "planted", [(seed, "")])
    assert run("one", chapter=chapter) != run("two", chapter=chapter)
    status, said = compare(tmp_path, monkeypatch, capsys, "one", "two")
    assert status == 1 and said.startswith("the runs differ from step 1 on: loss by")


def test_the_order_of_another_seed_is_seen(run, tmp_path, monkeypatch, capsys):
    """With the same weights and the same dropout, which would differ as well."""
    fixed = [
        ("torch.manual_seed(args.seed)", "torch.manual_seed(0)"),
        ("set_seed(args.seed + rank)", "set_seed(0)"),
    ]
    chapter = plant(CHAPTER, tmp_path / "planted", fixed)
    run("one", chapter=chapter), run("two", "--seed", 1, chapter=chapter)
    status, said = compare(tmp_path, monkeypatch, capsys, "one", "two")
    assert status == 1 and "the runs differ from step 1 on: loss by" in said
    assert "no earlier step is logged in both" in said


def go_back(tmp_path, name: str) -> None:
    """Remove the newest checkpoint: the run goes on from the one before it."""
    shutil.rmtree(tmp_path / name / f"checkpoints/step-{STEPS:08d}")


def test_a_restored_run_goes_on_to_the_last_bit(run, tmp_path):
    straight = run("straight")
    run("resumed")
    go_back(tmp_path, "resumed")
    assert run("resumed") == straight


@pytest.mark.parametrize("what", first_then_nightly(["rng", "moments", "schedule"]))
def test_what_is_not_restored_is_seen(run, tmp_path, monkeypatch, capsys, what):
    straight = run("straight")
    run("resumed")
    go_back(tmp_path, "resumed")
    if what == "rng":
        monkeypatch.setattr(save_load, "set_rng_state", lambda rng: None)
    if what == "moments":
        original = save_load.set_state_dict

        def forget(model, optimizer, **options: dict) -> None:
            original(model, optimizer, **options)
            for state in optimizer.state.values():
                state["exp_avg"].zero_()

        monkeypatch.setattr(save_load, "set_state_dict", forget)
    if what == "schedule":
        load = torch.optim.lr_scheduler.LambdaLR.load_state_dict
        monkeypatch.setattr(
            torch.optim.lr_scheduler.LambdaLR,
            "load_state_dict",
            lambda self, state: load(self, {**state, "last_epoch": 0}),
        )
    half = STEPS // 2
    resumed = run("resumed")
    assert resumed[:half] == straight[:half] and resumed[half:] != straight[half:]
    status, said = compare(tmp_path, monkeypatch, capsys, "straight", "resumed")
    # Dropout acts at once, moments on the next loss. The next rate is in the optimizer's state,
    # and the one after it is the schedule's.
    step, key = {"rng": (7, "loss"), "moments": (8, "loss"), "schedule": (8, "lr")}[what]
    first = f"the runs differ from step {step} on: {key} by "
    assert status == 1 and said.startswith(first), said
    early, late = said.splitlines()[1:]
    assert early.startswith(f"step-{half:08d}: 0 of "), "the checkpoint itself is right"
    assert re.match(rf"step-{STEPS:08d}: [1-9]\d* of \d+ values differ: ", late)


@pytest.mark.check
def test_threads_change_the_last_digits_of_a_sum():
    """A sum is cut into a part for each thread. So the number belongs to what must be the same."""
    numbers = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    before, sums = torch.get_num_threads(), {}
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums[threads] = {numbers.sum().item() for _ in range(5)}
    finally:
        torch.set_num_threads(before)
    assert all(len(found) == 1 for found in sums.values()), "the same number repeats"
    assert sums[1] != sums[2] or sums[1] != sums[3]
    ((one,), (two,)) = sums[1], sums[2]
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.skipif(os.cpu_count() == 1, reason="one core: its threads take turns")
def test_an_operation_without_an_order_and_what_orders_it():
    """On the CPU it is index_put_ that adds up as its threads come."""
    index = torch.randint(512, (8192,), generator=torch.Generator().manual_seed(0))
    source = torch.randn(8192, 256, generator=torch.Generator().manual_seed(1))

    def add() -> torch.Tensor:
        return torch.zeros(512, 256).index_put_((index,), source, accumulate=True)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    try:
        first = add()
        assert all(torch.equal(add(), first) for _ in range(20))
        torch.use_deterministic_algorithms(False)
        assert any(not torch.equal(add(), first) for _ in range(200))
        assert torch.allclose(add(), first, rtol=1e-3, atol=1e-3)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


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

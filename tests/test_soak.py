"""The soak: a short one, and what it compares, which planted faults turn red."""

import json
import random
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from runner import SAVE_STAGES

sys.path.append(str(ROOT / "tests/benchmarks"))
import report
import soak
from soak import NODES, Look, Soak, Watch, stage_of_save, wrong_lines, wrong_samples

RESULT = ROOT / report.result("soak")
STEPS = 6


def lines() -> list[dict]:
    """What a run has logged, with an evaluation at every third step."""
    drawn = random.Random(0)
    keys = ("loss", "lr", "grad_norm", "epoch")
    return [
        {"step": step, **{key: drawn.random() for key in keys}}
        | ({"eval_loss": drawn.random()} if step % 3 == 0 else {})
        for step in range(1, STEPS + 1)
    ]


def samples() -> dict[int, list[tuple[int, ...]]]:
    """Two ranks' samples of each step."""
    return {step: [(6 * step, 6 * step + 1), (6 * step + 2, 6 * step + 3)] for step in range(1, 7)}


# --- what is compared ---


@pytest.mark.check
def test_a_run_like_the_other_is_right():
    assert wrong_lines(lines(), lines()) == []
    assert wrong_samples(samples(), samples()) == []


@pytest.mark.check
def test_a_step_that_was_trained_again_is_right():
    """Times differ from run to run; what a step takes twice is the same."""
    found = [{**line, "tokens_per_s": 1.0} for line in lines()]
    assert wrong_lines(found, lines()) == []
    again = samples()
    again[3] = [*again[3], *reversed(again[3])]
    again[4] = [*again[4], again[4][1]]  # the other rank was killed in it
    assert wrong_samples(again, samples()) == []


def next_after(value: float) -> float:
    return value * (1 + 2**-52)


# What is done to the lines, and what is said of them.
FAULTS = {
    "missing": (lambda found: found.pop(2), ["step 3 is missing"]),
    "last missing": (lambda found: found.pop(), ["step 6 is missing"]),
    "all missing": (lambda found: found.clear(), [f"step {n} is missing" for n in range(1, 7)]),
    "doubled": (lambda found: found.insert(2, found[2]), ["step 3 stands 2 times"]),
    "one too many": (lambda found: found.append({"step": 7}), ["step 7 is one too many"]),
    "order": (lambda found: found.insert(1, found.pop()), ["the steps are in another order"]),
    "loss": (lambda found: found[1].update(loss=next_after(found[1]["loss"])), ["loss of step 2 "]),
    "no loss": (lambda found: found[1].pop("loss"), ["loss of step 2 is None"]),
    "rate": (lambda found: found[0].update(lr=2.0), ["lr of step 1 is 2.0"]),
    "no evaluation": (lambda found: found[5].pop("eval_loss"), ["eval_loss of step 6 is None"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_in_the_lines_is_noticed(fault):
    plant, said = FAULTS[fault]
    found = lines()
    plant(found)
    complaints = wrong_lines(found, lines())
    assert len(complaints) == len(said)
    assert all(map(str.startswith, complaints, said)), complaints


@pytest.mark.parametrize("fault", ["other", "order", "missing", "of one rank", "again, other"])
def test_planted_fault_in_the_samples_is_noticed(fault):
    found = samples()
    one, two = found[4]
    found[4] = {
        "other": [one, (*two[:-1], 99)],
        "order": [one, two[::-1]],
        "missing": [],
        "of one rank": [one, one],
        "again, other": [one, two, one, (98, 99)],
    }[fault]
    (complaint,) = wrong_samples(found, samples())
    assert complaint.startswith("the samples of step 4 are ")


# --- what is seen of a run ---


def put(path: Path, steps: range, end: str = "") -> None:
    """Replace a file by these lines, as a start of the run does."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + end)
    temporary.replace(path)


@pytest.mark.check
def test_starts_and_steps_are_seen(tmp_path):
    watch, path = Watch(tmp_path), tmp_path / "metrics.jsonl"
    assert (watch.look().start, watch.look().step) == (0, 0)
    put(path, range(1, 4), end='{"step": 4, "lo')  # being written
    assert (watch.look().start, watch.look().step) == (1, 3)
    with path.open("a") as file:
        file.write('ss": 1.0}\n')
    assert (watch.look().start, watch.look().step) == (1, 4)
    put(path, range(1, 3))
    assert (watch.look().start, watch.look().step) == (2, 2)
    assert len(watch.seen) == 4, "what has not changed is not kept"


@pytest.mark.check
def test_standstill(tmp_path):
    """Old steps in a file that was replaced are no new ones; a wait without a start is a gap."""
    watch = Watch(tmp_path)
    seen = [(0, 1, 10), (1, 1, 11), (9, 2, 8), (10, 2, 9), (11, 2, 10)]
    watch.seen = [Look(*each) for each in seen]
    assert watch.standstill(watch.seen[1]) == 9.0
    watch.seen = [Look(*each) for each in [(0, 1, 10), (1, 1, 11), (4, 1, 12), (5, 1, 13)]]
    assert watch.standstill(watch.seen[0]) == 3.0


@pytest.mark.check
@pytest.mark.parametrize("stage", SAVE_STAGES)
def test_stage_of_a_save(tmp_path, stage):
    """How far it came is read from what a kill has left."""
    names = {"writing": ".unfinished-step-00000004", "written": ".unfinished-step-00000004"}
    for name in ("step-00000002", names.get(stage, "step-00000004")):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    if stage == "written":
        (tmp_path / "checkpoints" / names[stage] / ".metadata").touch()
    step = 4 if stage == "committed" else 2
    (tmp_path / "state.json").write_text(json.dumps({"checkpoints": [{"step": step}]}))
    assert stage_of_save(tmp_path) == stage


# --- the soak ---


@pytest.mark.slow
@pytest.mark.slurm
def test_short_soak(cluster, tmp_path, monkeypatch):
    """Hits that torchrun and the queue mend; then a step is taken out, which is noticed."""
    kinds = ["worker", "save, launcher"]  # the seed draws node1, then node2
    monkeypatch.setattr(soak, "AT_MOST_S", 0.5)
    lab, hits = Soak(cluster, tmp_path, steps=200, seed=1), []
    with monkeypatch.context() as patch:
        patch.setattr(soak, "REAL", {})  # nobody kills this run's processes: they start quickly
        lab.undisturbed()
    run = lab.train("run", 1, len(kinds), hits.append, kinds)
    assert run["complaints"] == [], lab.log("run")[-5000:]
    assert [hit["kind"] for hit in hits] == kinds, "the run ended before the last hit"
    assert [hit["host"] for hit in hits] == NODES, "test_multi_node.py leaves node2 to this test"
    by = ["torchrun", "the queue"]
    assert [hit["started_again_by"] for hit in hits] == by
    assert run["steps"] == lab.steps and run["job_restarts"] == 1
    assert run["steps_trained"] >= lab.steps
    began = [hit["first_step_after"] for hit in hits]
    assert all(step % soak.CKPT_FREQ == 1 for step in began), "it goes on from a checkpoint"
    path = tmp_path / "run/metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert lab.complaints("run") == [f"step {lab.steps} is missing"]


# --- the result ---


@pytest.mark.check
def test_the_log_and_the_result_agree():
    result = json.loads(RESULT.read_text())["results"]
    hits = report.content(RESULT.with_suffix(".jsonl"))
    assert [hit["number"] for hit in hits] == list(range(1, len(hits) + 1))
    assert soak.summarise(hits, result["runs"], result["seed"], result["steps"]) == result
    assert result["hits"] == len(hits) >= 100 and result["complaints"] == 0
    assert result["steps_compared"] == result["steps"] * len(result["runs"])
    assert set(result["kinds"]) == set(soak.KINDS)

"""Losses also agree where they fall steeply: from 8.5 to 2 in 40 steps, and most are clipped.

There, a gradient norm that depends on how gradients are sharded drives the losses apart.
"""

import json
import random
from itertools import product
from pathlib import Path

import pytest
from helpers import Ladder, Run, first_then_nightly, float32, selected_runs

STEPS = 40

RUNS = [
    Run(chapter, world_size, float32(chapter))
    for chapter, world_size in product(("04-fsdp", "02-ddp", "05-mixed-precision"), (2, 1, 3, 4))
]
PYTORCHS_NORM = Run(
    *("04-fsdp", 4, ()),
    (
        ("from common.gradients import clip_grad_norm\n", "from torch import nn\n"),
        (
            "clip_grad_norm(model, args.max_grad_norm)",
            "nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).full_tensor()",
        ),
    ),
)


OWN_SAMPLE = Run(
    *("02-ddp", 2, ()),
    (("eval_data.sample(args.eval_sequences)", "eval_data.sample(args.eval_sequences + rank)"),),
)


class Steep(Ladder):
    """Runs on 60 documents of 100 words that are chosen at random."""

    def __init__(self, folder: Path, selected: list[Run]) -> None:
        super().__init__(folder, selected)
        choose = random.Random(0)
        letters = [choose.randint(2, 7) for _ in range(100)]
        words = ["".join(choose.choice("etaoinshrdlu") for _ in range(n)) for n in letters]
        texts = [" ".join(choose.choice(words) for _ in range(200)) for _ in range(60)]
        (folder / "corpus.json").write_text(json.dumps(texts))

    def flags(self, name: str, *args: object) -> list[object]:
        return [
            *("-d", self.folder / "corpus.json", "-m", "llama-tiny", "-s", 64),
            *("--global-batch-size", 12, "--max-steps", STEPS, "--log-freq", 1),
            *("--eval-freq", STEPS, "--eval-sequences", 5),
            *("--save-dir", self.folder, "-e", name, *args),
        ]


@pytest.fixture(scope="module")
def steep(request, make_folder) -> Steep:
    return Steep(make_folder("steep"), selected_runs(request))


def assert_same(steep: Steep, run: Run) -> None:
    right, found = steep.metrics(steep.alone()), steep.metrics(steep.run(run))
    assert len(right) == len(found) == STEPS
    losses = [line["loss"] for line in right]
    assert losses[0] > 8 and losses[-1] < 2.5
    assert sum(line["grad_norm"] > 1 for line in right) > 5  # these steps are clipped
    assert found[0]["grad_norm"] == pytest.approx(right[0]["grad_norm"], rel=1e-6), "the first norm"
    evaluated = pytest.approx(right[-1]["eval_loss"], rel=1e-5)
    assert found[-1]["eval_loss"] == evaluated, "the evaluations"
    assert [line["loss"] for line in found] == pytest.approx(losses, rel=1e-5), "the losses"


@pytest.mark.parametrize("run", first_then_nightly(RUNS), ids=lambda run: run.name)
def test_same_training(steep, run):
    assert_same(steep, run)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("run", "complaint"),
    [(PYTORCHS_NORM, "the first norm"), (OWN_SAMPLE, "the evaluations")],
    ids=["PyTorch's norm", "another sample on each rank"],
)
def test_planted_bug_is_noticed(steep, run, complaint):
    with pytest.raises(AssertionError, match=complaint):
        assert_same(steep, run)

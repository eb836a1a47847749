"""Mixed precision without FSDP, in chapters 1 to 3: the variant autocast, and float16 on top of it.

test_precision.py shows what the gradient scaler of float16 does when a gradient overflows.
"""

import pytest
from helpers import CHAPTERS, Ladder, Run, register, selected_runs

STEPS = 20
FEW = ("--max-steps", STEPS, "--warmup-steps", 5, "--lr", 1e-2)
RANKS = {CHAPTERS[0]: 1, CHAPTERS[1]: 2, CHAPTERS[2]: 2}
FIRST_SCALE = 2.0**16  # GradScaler's own
# By precision: the variants, sequences in a micro-batch, and how far a loss, a gradient norm and an
# evaluation's loss may be from float32's, relative. Measured on a CPU: 3e-4 and 5e-3 in bf16, 6e-5,
# 8e-3 and 5e-4 in fp16.
# This narrow model's norm is small when the loss has fallen, so it differs more than the loss.
PRECISIONS = {
    "bf16": (("autocast",), 12, (1e-3, 2e-2, 1e-3)),
    "fp16": (("autocast", "float16", "loss-scaling"), 3, (3e-4, 2e-2, 1e-3)),
}
NO_CAST = (
    ("torch.autocast(device.type, torch.bfloat16)", "torch.autocast(device.type, enabled=False)"),
)
register(CHAPTERS[1], NO_CAST, ["autocast"])


def run_in(precision: str, chapter: str, replaced: tuple = ()) -> Run:
    variants, b, _ = PRECISIONS[precision]
    return Run(chapter, RANKS[chapter], ("-b", b, *FEW), replaced, variants=variants)


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(make_folder("autocast"), selected_runs(request), model="gpt2-narrow")


def column(ladder: Ladder, name: str, key: str) -> list[float]:
    return [line[key] for line in ladder.metrics(name) if key in line]


def assert_close(ladder: Ladder, precision: str, run: Run) -> None:
    found, plain = ladder.run(run), ladder.run(Run(run.chapter, run.world_size, ("-b", 12, *FEW)))
    losses = column(ladder, found, "loss")
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1
    for key, rel in zip(("loss", "grad_norm", "eval_loss"), PRECISIONS[precision][2], strict=True):
        expected = column(ladder, plain, key)
        assert column(ladder, found, key) == pytest.approx(expected, rel=rel), key
    assert losses != column(ladder, plain, "loss"), "nothing was cast"
    scales = column(ladder, found, "loss_scale")
    assert scales == ([FIRST_SCALE] * STEPS if precision == "fp16" else [])


@pytest.mark.parametrize(
    ("precision", "run"),
    [
        pytest.param(
            *(precision, run_in(precision, chapter)),
            marks=pytest.mark.ci if chapter == CHAPTERS[1] else pytest.mark.nightly,
            id=f"{precision}-{chapter}",
        )
        for precision in PRECISIONS
        for chapter in RANKS
    ],
)
def test_16_bits_are_close_to_float32(ladder, precision, run):
    assert_close(ladder, precision, run)


@pytest.mark.parametrize("run", [run_in("bf16", CHAPTERS[1], NO_CAST)], ids=[""])
def test_planted_autocast_without_effect_is_noticed(ladder, run):
    with pytest.raises(AssertionError, match=r"^nothing was cast"):
        assert_close(ladder, "bf16", run)

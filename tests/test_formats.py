"""Chapter 5's scripts on number formats: against exact arithmetic and PyTorch."""

from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from helpers import (
    CHAPTERS,
    ROOT,
    first_then_nightly,
    make_variant,
    plant,
    read_metrics,
    register,
    tensors,
    write_corpus,
)
from runner import finish, load_script, start

CHAPTER = CHAPTERS[4]
EXPERIMENTS = ROOT / CHAPTER / "experiments"


# --- formats ---

# Name, bits of the exponent and of the mantissa, largest and smallest normal number. The 8-bit
# formats are those of https://arxiv.org/abs/2209.05433.
FORMATS = [
    ("float32", 8, 23, 2.0**128 - 2.0**104, 2.0**-126),
    ("TF32", 8, 10, 2.0**128 - 2.0**117, 2.0**-126),
    ("float16", 5, 10, 65504.0, 2.0**-14),
    ("bfloat16", 8, 7, 2.0**128 - 2.0**120, 2.0**-126),
    ("float8_e4m3fn", 4, 3, 448.0, 2.0**-6),
    ("float8_e5m2", 5, 2, 57344.0, 2.0**-14),
]


@pytest.mark.check
def test_formats():
    script = load_script(EXPERIMENTS / "formats.py")
    assert script.formats() == [script.Format(*row) for row in FORMATS]
    wide, one = script.formats()[0], torch.tensor(1.0)
    assert wide.spacing == (torch.nextafter(one, 2 * one) - 1).item()
    assert wide.subnormal == torch.nextafter(0 * one, one).item()
    assert wide.digits == pytest.approx(7.22, abs=0.01)


# --- sums over ranks ---


@pytest.mark.check
def test_simulated_sums():
    """Compare the simulation with a sum number by number, and with sums that are exact."""
    script = load_script(EXPERIMENTS / "reduction.py")
    grads = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = []
    for column in range(16):
        chunk = column // 2
        total = grads[(chunk - 1) % 8, column]
        for hop in range(2, 9):
            total = total + grads[(chunk - hop) % 8, column]
        expected.append(total)
    assert torch.equal(script.ring_sum(grads), torch.stack(expected))
    pairs = [grads[i] + grads[i + 1] for i in range(0, 8, 2)]
    tree = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    assert torch.equal(script.tree_sum(grads), tree)
    # bfloat16 has 8 significant bits: 256 + 1 is 256, from then on nothing is added.
    ones = torch.ones(1024, 1024, dtype=torch.bfloat16)
    assert script.ring_sum(ones).unique().tolist() == [256]
    assert script.tree_sum(ones).unique().tolist() == [1024]
    exact = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    assert script.error(torch.tensor([2.2, 4.4]), exact) == pytest.approx(0.1)


# --- loss scaling ---


def with_grad_scaler(steps: int, **options: float) -> tuple[list[dict], torch.Tensor]:
    """Do what by_hand does, with PyTorch's GradScaler."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(16, 16) / 4)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    inputs, targets = torch.randn(2, 64, 16)
    scaler = torch.amp.GradScaler("cpu", **options)
    rows = []
    for _ in range(steps):
        outputs = torch.nn.functional.linear(inputs.half(), weight.half())
        loss = torch.nn.functional.mse_loss(outputs.float(), targets)
        row = {"loss": loss.item(), "scale": scaler.get_scale()}
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        before = weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        rows.append(row | {"inf": torch.equal(before, weight)})
        optimizer.zero_grad()
    return rows, weight.detach()


@pytest.mark.check
def test_loss_scaling_by_hand(monkeypatch):
    """Compare with GradScaler: every scale, loss and verdict, and the last weights, bit for bit.

    Every fifth loss is 2^8 times as large: overflows come between two growths of the scale.
    """
    script = load_script(EXPERIMENTS / "loss_scaling.py")
    mse_loss, calls = torch.nn.functional.mse_loss, count(1)

    def spike(*tensors: torch.Tensor) -> torch.Tensor:
        return mse_loss(*tensors) * (256 if next(calls) % 5 == 0 else 1)

    monkeypatch.setattr(torch.nn.functional, "mse_loss", spike)
    for options in (script.TOO_HIGH, {"init_scale": 2.0**16, "growth_interval": 3}):
        rows, weight = script.by_hand(40, **options)
        expected, expected_weight = with_grad_scaler(40, **options)
        found = [{key: row[key] for key in ("loss", "scale", "inf")} for row in rows]
        assert found == expected
        assert torch.equal(weight, expected_weight)
        assert {bool(row["inf"]) for row in rows} == {True, False}


# --- rounding at random ---


@pytest.mark.check
def test_rounding_at_random():
    """Round with each of the 2^16 equally likely random numbers: the mean is exact."""
    script = load_script(EXPERIMENTS / "stochastic_rounding.py")
    drawn = torch.arange(2**16, dtype=torch.int32)
    tiny = torch.finfo(torch.float32).tiny
    numbers = [0.1, -0.1, 1 + 2**-20, 1 + 2**-7 - 2**-23, -3e-5, 3e38, tiny * (1 + 2**-9)]
    numbers += [2.0**-130, 1.0, 0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            script.torch, "randint", lambda low, high, *_, **__: drawn.clamp(low, high - 1)
        )
        for number in torch.tensor(numbers):
            rounded = script.stochastic_round(number.expand(2**16).contiguous())
            assert rounded.dtype == torch.bfloat16
            assert rounded.double().mean().item() == number.item()
            # The neighbors on both sides; a number that bfloat16 has stays what it is.
            found = rounded.unique().float().tolist()
            bits = number.view(torch.int32).item()
            below, above = (
                torch.tensor([bits & ~0xFFFF, (bits | 0xFFFF) + 1]).int().view(torch.float32)
            )
            exact = not bits & 0xFFFF
            assert sorted(found) == sorted([below.item()] if exact else [below, above])
        # Both infinities, and the first and the last nan.
        codes = torch.tensor([0x7F800000, -0x800000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
        for value in codes.view(torch.float32):
            values = value.expand(2**16).contiguous()
            rounded = script.stochastic_round(values).float()
            assert torch.equal(rounded.isnan(), values.isnan())
            assert torch.equal(rounded.nan_to_num(0), values.nan_to_num(0))
    # And as it is used: fresh numbers for each element and each call.
    torch.manual_seed(0)
    shares = [(script.stochastic_round(torch.full((10**5,), 1 + 2**-9)) > 1).float() for _ in "ab"]
    assert not torch.equal(*shares)
    for share in shares:
        assert share.mean().item() == pytest.approx(0.25, abs=6 * (0.25 * 0.75 / 10**5) ** 0.5)


ROUNDED = {
    CHAPTER: ("pure-bfloat16", "stochastic-rounding"),
    CHAPTERS[0]: ("bfloat16-weights", "stochastic-rounding"),
}
TO_NEAREST = ("optimizer = AdamW(", "optimizer = torch.optim.AdamW(")
for chapter, variants in ROUNDED.items():
    register(chapter, [TO_NEAREST], variants)


def assert_small_updates_stay(folder: Path, chapter: str, *bug: tuple[str, str]) -> None:
    """A step changes more weights than rounding to nearest lets through: 10% in the first one."""
    logged = ("share-changed",) if chapter == CHAPTER else ()
    variant = make_variant(folder, chapter, *ROUNDED[chapter], *logged)
    script = plant(variant, folder / "planted", list(bug)) / "train_llm.py"
    options = ("-s", 16, "-b", 1, "--global-batch-size", 1, "--max-steps", 3, "--log-freq", 1)
    options += ("-d", write_corpus(folder), "--save-dir", folder, "-e", "run", "--lr", 3e-5)
    options += ("--warmup-steps", 0, "--ckpt-freq", 1, "--keep-checkpoints", 3)
    assert finish(start(options, script=str(script))) == 0
    weights = [tensors(folder / "run", step)["model"] for step in (1, 2, 3)]
    shares = []
    for before, after in pairwise(weights):
        names = [name for name in before if name != "lm_head.weight"]  # the embedding, once more
        changed = sum((before[name] != after[name]).sum().item() for name in names)
        shares.append(changed / sum(before[name].numel() for name in names))
    assert 0.12 < shares[0] < 0.5, "the share of weights is another"
    if logged:
        found = [line["share_changed"] for line in read_metrics(folder / "run")]
        assert 0.15 < found[0] < 0.5 and found[1:] == shares


@pytest.mark.ci
@pytest.mark.parametrize("chapter", first_then_nightly(ROUNDED))
def test_a_chapter_with_random_rounding(tmp_path, chapter):
    assert_small_updates_stay(tmp_path, chapter)


@pytest.mark.parametrize("chapter", ROUNDED)
def test_planted_rounding_to_nearest_is_noticed(tmp_path, chapter):
    with pytest.raises(AssertionError, match=r"^the share of weights is another"):
        assert_small_updates_stay(tmp_path, chapter, TO_NEAREST)

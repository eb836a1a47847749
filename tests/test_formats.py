"""Chapter 5's scripts on number formats: against exact arithmetic, PyTorch, and what is recorded.

Each check takes a script as a module. It must hold for the script, and fail for each planted bug.
"""

import contextlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import matplotlib
import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, read_metrics, run_script
from runner import ask_ranks, load_script
from transformers import AutoModelForCausalLM

from common import distributed, models

CHAPTER = ROOT / "05-mixed-precision"
RECORDED = CHAPTER / "recorded"
RESULTS = ROOT / "tests/benchmarks/results"


def load(name: str, folder: Path, bug: tuple[str, str] = ()) -> ModuleType:
    """Import a script of the chapter, or a copy of it in which a text is replaced."""
    path = CHAPTER / f"{name}.py"
    if bug:
        assert path.read_text().count(bug[0]) == 1, bug[0]
        (folder / path.name).write_text(path.read_text().replace(*bug))
        path = folder / path.name
    return load_script(path)


def recorded(name: str) -> list[str]:
    """Return the lines of a recorded output, without those of the command and the machine."""
    return (RECORDED / f"{name}.txt").read_text().splitlines()[2:]


@pytest.fixture
def say(monkeypatch, capsys) -> Callable:
    """Return a function that runs a script in this process: status, lines, errors."""

    def run(name: str, *args: object) -> tuple[int, list[str], str]:
        path = CHAPTER / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            distributed.run(load_script(path).main)
        out, err = capsys.readouterr()
        return ended.value.code, out.splitlines(), err

    return run


# --- formats ---


def check_formats(script: ModuleType) -> None:
    """Compare with all numbers that a format has, which for up to 16 bits can be listed."""
    wide, tf32, *narrow = script.formats()
    assert (wide.name, tf32.name) == ("float32", "TF32")
    for each in narrow:
        dtype = getattr(torch, each.name)
        bits = torch.finfo(dtype).bits
        codes = torch.arange(2**bits, dtype=torch.int32)
        numbers = codes.to(torch.uint8 if bits == 8 else torch.uint16).view(dtype).double()
        numbers = numbers[numbers.isfinite() & (numbers > 0)].sort().values.tolist()
        assert each.exponent + each.mantissa + 1 == bits
        assert each.largest == numbers[-1]
        assert each.subnormal == numbers[0] == numbers[1] - numbers[0]
        assert each.spacing == numbers[numbers.index(1.0) + 1] - 1
        # Below, all steps are equal; the second power of two above has twice the step.
        at = numbers.index(2 * each.normal)
        assert numbers[at] - numbers[at - 1] == each.subnormal
        assert numbers[at + 1] - numbers[at] == 2 * each.subnormal
        assert each.digits == pytest.approx(math.log10(2 / each.spacing))
    one = torch.tensor(1.0)
    assert wide.spacing == (torch.nextafter(one, 2 * one) - 1).item()
    assert wide.subnormal == torch.nextafter(0 * one, one).item()
    assert (wide.exponent, wide.mantissa, wide.largest) == (8, 23, torch.finfo().max)
    assert (tf32.exponent, tf32.mantissa, tf32.normal) == (8, 10, wide.normal)
    assert tf32.largest == 2.0**128 - 2.0**117  # all ten bits of the mantissa


FORMAT_BUGS = [
    ("exponent = info.bits - 1 - mantissa", "exponent = info.bits - mantissa"),
    ("2.0**-self.mantissa", "2.0 ** -(self.mantissa + 1)"),
    ("self.normal * self.spacing", "self.normal * self.spacing / 2"),
    ("(self.mantissa + 1) *", "self.mantissa *"),
    ("(2 - half.spacing)", "(2 - wide.spacing)"),
    ("info.max, info.smallest_normal", "info.max, info.eps"),
]


@pytest.mark.check
def test_formats(tmp_path):
    script = load("formats", tmp_path)
    check_formats(script)
    assert script.table().splitlines() == recorded("formats")


def test_figures_are_those_that_the_script_draws(tmp_path, say):
    assert say("formats", "--figures", tmp_path) == (0, recorded("formats"), "")
    for name in ("formats.svg", "bf16_stall.svg"):
        committed = (CHAPTER / name).read_text()
        assert ElementTree.fromstring(committed).tag.endswith("svg")
        if f"Matplotlib v{matplotlib.__version__}," in committed:
            assert (tmp_path / name).read_text() == committed, "run formats.py --figures"


@pytest.mark.check
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ("formats", "--figures", "/nowhere"),
            "--figures /nowhere is not a folder: create it first.",
        ),
        (("loss_scaling", "gone.py"), "There is no script gone.py: give the path of one"),
        (("stochastic_rounding", "gone.py"), "There is no script gone.py: give the path of one"),
        (
            ("stochastic_rounding", CHAPTER / "train_llm.py", "--precision", "fp16"),
            "Stochastic rounding needs bfloat16 weights: give --param-dtype bfloat16.",
        ),
        (
            ("stochastic_rounding", CHAPTER / "train_llm.py", "bfloat16", "--hsdp"),
            "would round its copy differently: use chapter 4 or 5 without --hsdp.",
        ),
        (("compression", "--steps", 5), "'5' is not a whole number from 12"),
    ],
)
def test_bad_input(say, args, sentence):
    status, _, err = say(*args)
    assert status == 2
    assert sentence in err.splitlines()[-1]
    assert "Traceback" not in err


# --- sums over ranks ---


def rank_main(rank: int, world_size: int, folder: str, bug: tuple, queue) -> None:
    """Measure on the ranks of a gloo group; each kind of measurement is only of one script."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    own = Path(folder) / str(rank)
    own.mkdir()
    if world_size == 4:
        found = load("reduction", own, bug).measure_ranks()
    else:
        found = load("compression", own, bug).measure(COMPRESSED_STEPS)
    queue.put((rank, json.loads(json.dumps(found))))
    queue.close()
    queue.join_thread()
    os._exit(0)


def measure(world_size: int, folder: Path, bug: tuple[str, str] = ()) -> list[dict]:
    return ask_ranks(world_size, rank_main, world_size, str(folder), bug)


def check_sums(script: ModuleType) -> None:
    """Compare the simulation with a sum number by number, and with sums that are exact."""
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


SUM_BUGS = [
    ("chunks[(chunk - hop) %", "chunks[(chunk + hop) %"),
    ("range(2, world_size + 1)", "range(2, world_size)"),
    ("chunks = grads.view(", "chunks = grads.float().view("),  # no rounding on the way
    ("grads[0::2] + grads[1::2]", "grads[: len(grads) // 2] + grads[len(grads) // 2 :]"),
    ("(total.double() - exact).norm() / exact", "(total.double() - exact).norm() / total"),
]


@pytest.mark.check
def test_simulated_sums(tmp_path):
    check_sums(load("reduction", tmp_path))


@pytest.mark.parametrize("bug", [(), SUM_BUGS[0]], ids=["right", "wrong order"])
def test_gloo_adds_as_the_simulated_ring_does(tmp_path, bug):
    answers = measure(4, tmp_path, bug)
    assert len(answers[0]) == 6
    for answer in answers:
        assert all(row["as_ring"] for row in answer.values()) == (not bug)


@pytest.mark.ci
def test_errors_of_sums_are_those_of_the_results(tmp_path):
    results = json.loads((RESULTS / "reduction.json").read_text())["results"]
    script = load("reduction", tmp_path)
    lines = recorded("reduction")
    assert all("bit-identical to ring_sum" in line for line in lines[:6])
    assert all(row["as_ring"] for row in results["measured"].values())
    for row, expected, line in zip(script.simulate(), results["rows"], lines[8:], strict=False):
        assert list(row)[2:] == list(expected)[2:]
        assert list(row.values())[2:] == pytest.approx(list(expected.values())[2:], rel=0.05)
        # The kind and the number of ranks, then the errors to two digits.
        assert [float(n) for n in line.split()[2:]] == pytest.approx(
            list(expected.values())[2:], rel=0.06
        )
    assert [row["ranks"] for row in results["rows"][::2]] == list(script.WORLD_SIZES)
    last = results["rows"][-1]
    assert last["ring, bfloat16"] > 100 * last["tree, bfloat16"]


# --- compressed gradients ---

COMPRESSED_STEPS = 12  # the last two with PowerSGD's compression


def powersgd_numbers(rank: int) -> int:
    """Return how many numbers PowerSGD sends: p and q for a matrix that gets twice as small."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    total = 0
    for parameter in model.parameters():
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        thin = (rows + columns) * rank
        small = parameter.dim() > 1 and 2 * thin < parameter.numel()
        total += thin if small else parameter.numel()
    return total


def check_compression(results: dict[str, dict]) -> None:
    """Compare bytes with theory, but for headers, and errors with those of the formats."""
    whole = powersgd_numbers(10**6)  # no matrix is worth it
    numbers = {"none": 4 * whole, "float16": 2 * whole, "bfloat16": 2 * whole}
    numbers |= {f"PowerSGD, rank {rank}": 4 * powersgd_numbers(rank) for rank in (1, 4, 16)}
    assert list(results) == list(numbers)
    for name, row in results.items():
        if Path("/proc/self/io").exists():  # two ranks: each sends what it has once
            assert row["bytes"] == pytest.approx(numbers[name], abs=4096), name
    errors = [row["error"] for row in results.values()]
    assert errors[0] < 1e-6
    assert 2.0**-13 < errors[1] < 2.0**-10
    assert 2.0**-10 < errors[2] < 2.0**-7
    # How much rank 16 loses depends on the text and the step: 0.03 to 0.3 have been seen.
    assert 1 > errors[3] > errors[4] > errors[5] > 0.01


# Short batches, and one hook more, which leaves each rank its own gradient.
OWN_GRADIENT = """
def own_gradient(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_hooks = hooks


def hooks():
    return _hooks() | {"planted": (None, own_gradient)}


def tokens()"""


def test_compressed_gradients(tmp_path):
    right = (CHAPTER / "compression.py").read_text()
    assert right.count("SEQUENCES, LENGTH = 4, 128") == right.count("\ndef tokens()") == 1
    short = right.replace("SEQUENCES, LENGTH = 4, 128", "SEQUENCES, LENGTH = 2, 32")
    answers = measure(2, tmp_path, (right, short.replace("\ndef tokens()", OWN_GRADIENT)))
    planted = answers[0].pop("planted")
    check_compression(answers[0])
    losses = [[row["loss"] for name, row in each.items() if name != "planted"] for each in answers]
    assert losses[0] == losses[1]
    for name in ("none", "float16", "bfloat16"):
        with pytest.raises(AssertionError):
            check_compression(answers[0] | {name: planted})


@pytest.mark.check
def test_recorded_compression():
    results = json.loads((RESULTS / "compression.json").read_text())["results"]["hooks"]
    check_compression(results)
    losses = {name: row["loss"] for name, row in results.items()}
    assert max(abs(losses[name] - losses["none"]) for name in ("float16", "bfloat16")) < 0.05
    assert losses["PowerSGD, rank 1"] > losses["none"] + 0.3
    for line, (name, row) in zip(recorded("compression")[1:], results.items(), strict=True):
        *_, sent, error, loss = line.split()
        assert line.startswith(name)
        assert int(sent.replace(",", "")) == pytest.approx(row["bytes"], rel=0.01)
        assert float(error) == pytest.approx(row["error"], rel=0.06)
        assert float(loss) == pytest.approx(row["loss"], abs=0.01)


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


@contextlib.contextmanager
def spikes() -> Iterator[None]:
    """Make every fifth loss 2^8 times as large: overflows come between two growths of the scale."""
    right, calls = torch.nn.functional.mse_loss, itertools.count(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.nn.functional,
            "mse_loss",
            lambda *tensors: right(*tensors) * (256 if next(calls) % 5 == 0 else 1),
        )
        yield


def check_by_hand(script: ModuleType) -> None:
    """Compare with GradScaler: every scale, loss and verdict, and the last weights, bit by bit."""
    for options in (script.TOO_HIGH, {"init_scale": 2.0**16, "growth_interval": 3}):
        with spikes():
            rows, weight = script.by_hand(40, **options)
        with spikes():
            expected, expected_weight = with_grad_scaler(40, **options)
        found = [{key: row[key] for key in ("loss", "scale", "inf")} for row in rows]
        assert found == expected
        assert torch.equal(weight, expected_weight)
        assert {bool(row["inf"]) for row in rows} == {True, False}


SCALING_BUGS = [
    ("scale / 2, 0", "scale / 4, 0"),
    ("scale, good_steps = scale / 2, 0", "scale = scale / 2"),  # a skipped step is no good one
    ("if good_steps else scale * 2", "if good_steps else scale * 4"),
    ("% growth_interval", "% (growth_interval + 1)"),
    ("weight.grad /= scale", "weight.grad /= init_scale"),
    ("not weight.grad.isfinite().all()", "weight.grad.isnan().any()"),  # inf is taken
]


@pytest.mark.check
def test_loss_scaling_by_hand(tmp_path):
    check_by_hand(load("loss_scaling", tmp_path))


def check_lost(script: ModuleType) -> None:
    """Unscaled, most gradients of the logits are 0 in float16; with a scale of 2^16 almost none."""
    shares = script.lost(5, (1.0, 2.0**16), 3)
    assert set(shares) == {"logits", "embeddings", "matrices", "norms and biases"}
    assert shares["logits"][0] > 0.3
    assert shares["embeddings"][0] > 0.1
    assert all(unscaled > 0 for unscaled, _ in shares.values())
    assert all(scaled < 0.001 for _, scaled in shares.values())


def test_gradients_that_float16_loses(tmp_path):
    check_lost(load("loss_scaling", tmp_path))


@pytest.mark.ci
def test_recorded_loss_scaling(say):
    lines, (status, now, _) = recorded("loss_scaling"), say("loss_scaling")
    assert status == 0
    assert lines[:25] == now[:25]  # by hand: the same on each machine
    assert len(lines) == len(now)
    for then, line in zip(lines[27:], now[27:], strict=True):
        assert re.split(r"\s{2,}", then)[0] == re.split(r"\s{2,}", line)[0]
        numbers = [[float(n) for n in re.findall(r"([\d.]+)%", text)] for text in (then, line)]
        assert numbers[0] == pytest.approx(numbers[1], abs=10)  # another source file to train on


def check_scales(text: str) -> list[float]:
    """Replay the rule over a log: each line shows a step's norm and the scale after it."""
    steps = re.findall(r"grad norm (\S+) \| loss scale ([\d,]+)", text)
    scale, good_steps = 2.0**30, 0
    for norm, shown in steps:
        good_steps = good_steps + 1 if math.isfinite(float(norm)) else 0
        scale = scale if good_steps else scale / 2
        if good_steps == 4:
            scale, good_steps = 2 * scale, 0
        assert float(shown.replace(",", "")) == scale
    return [float(norm) for norm, _ in steps]


@pytest.mark.check
def test_recorded_overflow():
    text = (RECORDED / "loss_scaling_run.txt").read_text()
    norms = check_scales(text)
    assert len(norms) == 30
    first = [math.isfinite(norm) for norm in norms].index(True)
    assert first > 5
    assert not all(map(math.isfinite, norms[first:]))  # once more, after the scale has grown
    losses = [float(loss) for loss in re.findall(r"step \d+/30 \| loss ([\d.]+)", text)]
    assert max(losses[-3:]) < min(losses[:2])
    with pytest.raises(AssertionError):
        check_scales(text.replace("grad norm inf", "grad norm 1.0", 1))


@pytest.mark.ci
def test_the_chapter_s_script_with_a_scale_too_high(tmp_path, corpus):
    """Skipped steps change no weight; the first that is taken does."""
    script, options = (
        "05-mixed-precision/train_llm.py",
        ("-s", 8, "-b", 1, "--global-batch-size", 1),
    )
    options += ("-d", corpus, "--save-dir", tmp_path, "-e", "run", "--log-freq", 1)
    done = run_script(
        *(CHAPTER / "log_changed.py", CHAPTER / "loss_scaling.py"),
        *(script, "--precision", "fp16", "--max-steps", 20, *options),
    )
    assert done.returncode == 0, done.stderr
    norms = check_scales(done.stderr)
    assert len(norms) == 20
    assert {math.isfinite(norm) for norm in norms} == {True, False}
    for line, norm in zip(read_metrics(tmp_path / "run"), norms, strict=True):
        assert (line["share_changed"] > 0) == math.isfinite(norm)
    wrappers = f"{CHAPTER / 'log_changed.py'} {CHAPTER / 'loss_scaling.py'}"
    again = f"python {wrappers} {script} --precision fp16 --max-steps 20"
    assert f"to resume it after a stop: {again}" in done.stderr


# --- rounding at random ---


def check_rounding(script: ModuleType) -> None:
    """Round with each of the 2^16 equally likely random numbers: the mean is exact."""
    drawn = torch.arange(2**16, dtype=torch.int32)
    tiny = torch.finfo(torch.float32).tiny
    numbers = [
        0.1,
        -0.1,
        1 + 2**-20,
        1 + 2**-7 - 2**-23,
        -3e-5,
        3e38,
        tiny * (1 + 2**-9),
        2.0**-130,
        1.0,
        0.0,
    ]
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


def check_step(script: ModuleType) -> None:
    """With nearest rounding it is PyTorch's AdamW bit by bit; with random rounding on average."""
    torch.manual_seed(0)
    start, lr = 0.05 * torch.randn(1000), 3e-5
    options = {"lr": lr, "betas": (0.8, 0.95), "weight_decay": 0.1, "fused": True}
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(script, "stochastic_round", lambda x: x.to(torch.bfloat16))
            parameters = [torch.nn.Parameter(start.to(dtype)) for _ in range(2)]
            optimizers = [
                each([parameter], **options)
                for each, parameter in zip(
                    (torch.optim.AdamW, script.AdamW), parameters, strict=True
                )
            ]
            for _ in range(5):
                grad = torch.randn(1000).to(dtype)
                for parameter, optimizer in zip(parameters, optimizers, strict=True):
                    parameter.grad = grad.clone()
                    optimizer.step()
            assert torch.equal(*parameters)
            first, second = (o.state[p] for o, p in zip(optimizers, parameters, strict=True))
            assert all(torch.equal(first[key], second[key]) for key in first)
    assert script.walk(torch.optim.AdamW, torch.bfloat16, 0.95, 300)[0] == 1
    # 1000 weights that each make a few jumps of 2^-8, with a mean of 300 lr.
    after = script.walk(script.AdamW, torch.bfloat16, 0.95, 300)[0]
    assert after == pytest.approx(1 - 300 * lr, abs=0.001)


ROUNDING_BUGS = [
    ("randint(0, 2**16,", "randint(0, 2**15,"),
    ("randint(0, 2**16,", "randint(1, 2**16,"),
    ("noise) & ~0xFFFF", "0 * noise) & ~0xFFFF"),  # truncated
    ("noise) & ~0xFFFF", "noise)"),  # rounded twice
    ("torch.where(x.isfinite(), rounded.view(torch.float32), x)", "rounded.view(torch.float32)"),
]
STEP_BUGS = [
    ('[state["step"]]', '[state["step"].clone()]'),
    ("computed[0] = stochastic_round(weight)", "pass"),
    ('"beta2": beta2', '"beta2": beta1'),
]


@pytest.mark.check
def test_rounding_at_random(tmp_path):
    check_rounding(load("stochastic_rounding", tmp_path))


@pytest.mark.check
def test_a_step_that_rounds_at_random(tmp_path):
    check_step(load("stochastic_rounding", tmp_path))


def test_recorded_rounding(say):
    """And the shares of changed weights are those that the spacing of bfloat16 lets through."""
    lines = recorded("stochastic_rounding")
    assert say("stochastic_rounding") == (0, lines, "")
    # A step of lr moves a number of [2^e, 2^(e+1)) if it is more than half of the step 2^(e-7).
    for line in lines[1:7]:
        deviation, lr, nearest = re.search(r"N\(0, (.*?)\).* (\S+e-\d+) +([\d.]+)%", line).groups()
        limit = 2.0 ** (math.floor(math.log2(float(lr)) + 9))
        share = math.erf(limit / float(deviation) / 2**0.5)
        assert float(nearest) == pytest.approx(100 * share, abs=0.2)


@pytest.mark.check
def test_the_recorded_stall():
    runs = {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name in ("masters", "pure", "rounded")
        for path in [RECORDED / f"bf16_stall_{name}.metrics.jsonl"]
    }
    assert len({tuple(line["lr"] for line in run) for run in runs.values()}) == 1
    masters, pure, rounded = runs.values()
    for name, line, other in zip(range(len(masters)), masters, rounded, strict=True):
        assert other["loss"] == pytest.approx(line["loss"], abs=0.02), name
    assert pure[-1]["eval_loss"] > masters[-1]["eval_loss"] + 0.5
    # From step 300 on nothing is learned, while the others go on.
    assert min(line["loss"] for line in pure if line["step"] > 300) > pure[29]["loss"] - 0.1
    assert min(line["share_changed"] for line in masters) > 0.99
    assert max(line["share_changed"] for line in pure) < 0.1
    for name, run in runs.items():
        command = (RECORDED / f"bf16_stall_{name}.txt").read_text().splitlines()[0]
        assert ("stochastic_rounding.py" in command) == (name == "rounded")
        assert ("--param-dtype bfloat16" in command) == (name != "masters")
        assert f"loss {run[0]['loss']:.4f}" in "".join(recorded(f"bf16_stall_{name}"))


@pytest.mark.ci
def test_the_chapter_s_script_with_random_rounding(tmp_path, corpus):
    """The first step changes more weights than rounding to nearest lets through: 10%."""
    options = ("-s", 16, "-b", 1, "--global-batch-size", 1, "-d", corpus, "--save-dir", tmp_path)
    options += ("--max-steps", 3, "--param-dtype", "bfloat16", "--lr", 3e-5)
    options += ("--log-freq", 1, "--warmup-steps", 0, "-e", "run")
    script = "05-mixed-precision/train_llm.py"
    wrappers = (CHAPTER / "log_changed.py", CHAPTER / "stochastic_rounding.py")
    done = run_script(*wrappers, script, *options)
    assert done.returncode == 0, done.stderr
    assert 0.15 < read_metrics(tmp_path / "run")[0]["share_changed"] < 0.5
    again = f"python {wrappers[0]} {wrappers[1]} {script} -s 16 -b 1"
    assert f"to resume it after a stop: {again}" in done.stderr


# --- planted bugs ---

CHECKS: list[tuple[str, Callable, list]] = [
    ("formats", check_formats, FORMAT_BUGS),
    ("reduction", check_sums, SUM_BUGS),
    ("loss_scaling", check_by_hand, SCALING_BUGS),
    ("loss_scaling", check_lost, [("(loss / accumulation * scale)", "(loss / accumulation)")]),
    ("stochastic_rounding", check_rounding, ROUNDING_BUGS),
    ("stochastic_rounding", check_step, STEP_BUGS),
]


@pytest.mark.parametrize(
    ("name", "check", "bug"),
    [
        pytest.param(name, check, bug, id=f"{name}: {bug[1]}")
        for name, check, bugs in CHECKS
        for bug in bugs
    ],
)
def test_planted_bug_is_noticed(tmp_path, name, check, bug):
    with pytest.raises(AssertionError):
        check(load(name, tmp_path, bug))

"""Chapter 5: in float32 it is chapter 4 bit by bit, in few bits close to it; what is in which type.

And the gradient scaler of float16: who skips a step, what a resumed run knows of the scale.
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import (
    EXACT,
    TWO_BY_TWO,
    Ladder,
    Run,
    assert_exact,
    first_then_nightly,
    hand_over,
    read_metrics,
    register,
    selected_runs,
    tensors,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

CHAPTER, BEFORE = "05-mixed-precision", "04-fsdp"
STEPS = 6
FEW = ("-s", 16, "--global-batch-size", 6, "--max-steps", STEPS)
FEW += ("--eval-freq", 3, "--ckpt-freq", STEPS)
FP32, FP16 = ("--precision", "fp32"), ("--precision", "fp16")
PURE = ("--param-dtype", "bfloat16")
ON_TWO_NODES = {4: [{"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2} for rank in TWO_BY_TWO]}


def few(chapter: str, world_size: int, *args: object, **options: object) -> Run:
    """A run of few steps of 6 sequences."""
    return Run(chapter, world_size, (*FEW, *args), **options)


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(
        make_folder("ladder"), selected_runs(request), model="gpt2-narrow", places=ON_TWO_NODES
    )


def notes(ladder: Ladder, run: Run) -> list[list[dict]]:
    """Return what each rank of a run noted of each step."""
    ladder.run(run)
    files = [Path(path).read_text().splitlines() for path in ladder.notes(run)]
    return [[json.loads(line) for line in lines] for lines in files]


# --- in float32 ---


@pytest.mark.parametrize(
    ("expected", "run"),
    [
        [few(chapter, 2, "-b", 1, *args) for chapter, args in ((BEFORE, ()), (CHAPTER, FP32))],
        pytest.param(
            *(few(chapter, 2, "-b", 1, *PURE) for chapter in (BEFORE, CHAPTER)),
            marks=pytest.mark.ci,
        ),
    ],
    ids=["fp32", "bfloat16"],
)
def test_in_float32_it_is_chapter_4(ladder, expected, run):
    """Every number bit by bit; and where weights are bfloat16, in which nothing is cast either."""
    right, found = (ladder.metrics(ladder.run(each)) for each in (expected, run))
    assert len(right) == STEPS
    for key in ("step", *EXACT):
        assert [line.get(key) for line in found] == [line.get(key) for line in right], key


# --- which numbers are in which type ---


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# By what operators do: their names.
OPERATORS = {
    "products": ("mm", "addmm", "bmm"),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu",),
    "activations": ("gelu",),
    "gathered": ("_allgather_base_",),
    "reduced": ("_reduce_scatter_base_",),
}


class NoteTypes(TorchDispatchMode):
    """Notes in which types operators get their tensors, by what they do."""

    def __init__(self, types: dict[str, set[str]]) -> None:
        super().__init__()
        self.types = types

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        for group, names in OPERATORS.items():
            if operator.overloadpacket.__name__ in names:
                leaves = torch.utils._pytree.tree_leaves((args, kwargs))
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                # Not the counters and the meeting point.
                self.types[group] |= {short_name(t.dtype) for t in tensors if t.numel() > 100}
        return operator(*args, **kwargs or {})


@contextlib.contextmanager
def note_types(path: str) -> Iterator[None]:
    """Note, a JSON line for each optimizer step, the types of all that is in it."""
    types: dict[str, set[str]] = defaultdict(set)

    def write(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            types["weights"].add(short_name(parameter.dtype))
            types["gradients"].add(short_name(parameter.grad.dtype))
            moments = (optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))
            types["moments"] |= {short_name(moment.dtype) for moment in moments}
        with Path(path).open("a") as file:
            file.write(json.dumps({name: sorted(found) for name, found in types.items()}) + "\n")
        types.clear()

    handle = register_optimizer_step_post_hook(write)
    with NoteTypes(types):
        yield
    handle.remove()


IN_BF16 = ("--reduce-dtype", "bfloat16")
# By name: the types of products and of reductions, the arguments, and the tier.
TYPES = {
    "bf16": ("bfloat16", "float32", (), ()),
    "reduced in bf16": ("bfloat16", "bfloat16", IN_BF16, pytest.mark.ci),
    "fp16": ("float16", "float32", (*FP16, "--max-steps", 2), pytest.mark.ci),
}


@pytest.mark.parametrize(
    ("half", "reduced", "run"),
    [
        pytest.param(*types, few(CHAPTER, 2, "-b", 1, *args, note=note_types), marks=tier, id=name)
        for name, (*types, args, tier) in TYPES.items()
    ],
)
def test_what_is_in_which_type(ladder, half, reduced, run):
    """On each rank, in each step but the first, before which the optimizer has no moments.

    In a step of several micro-batches, gradients are added up.
    """
    expected = {
        **{name: ["float32"] for name in ("weights", "moments", "gradients")},
        **{name: [half] for name in ("products", "attention", "activations", "gathered")},
        "reduced": [reduced],
    }
    for lines in notes(ladder, run):
        assert len(lines) > 1
        for line in lines[1:]:
            assert {name: line.get(name) for name in expected} == expected


# --- the scaler ---

# Far from where a gradient overflows on its own.
SMALL_SCALE = ("GradScaler(device.type,", "GradScaler(device.type, init_scale=2.0**10,")
OVERFLOW = 3  # the step
UNSCALE = "            scaler.unscale_(optimizer)  #"
# The gradient has an inf in a row that only the first rank of each node holds.
LARGE = (
    UNSCALE,
    f'            if state["step"] == {OVERFLOW - 1} and local_rank == 0:\n'
    '                next(model.parameters()).grad.to_local()[0] = float("inf")\n'
    f"{UNSCALE}",
)
register(CHAPTER, (SMALL_SCALE, LARGE))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


@contextlib.contextmanager
def note_steps(path: str) -> Iterator[None]:
    """Note after each step, as JSON, the sum of this rank's weights and moments, and the scale."""
    update, numbers = torch.amp.GradScaler.update, []

    def update_and_write(scaler: torch.amp.GradScaler) -> None:
        update(scaler)
        total = sum(local(tensor).detach().double().sum().item() for tensor in numbers)
        with Path(path).open("a") as file:
            file.write(json.dumps({"sum": total, "scale": scaler.get_scale()}) + "\n")

    def note_numbers(optimizer: torch.optim.Optimizer, *_: object) -> None:
        moments = (tensor for state in optimizer.state.values() for tensor in state.values())
        numbers[:] = [*optimizer.param_groups[0]["params"], *moments]

    handle = register_optimizer_step_post_hook(note_numbers)
    with mock.patch.object(torch.amp.GradScaler, "update", update_and_write):
        yield
    handle.remove()


@contextlib.contextmanager
def without_agreement(path: str) -> Iterator[None]:
    """The planted bug: each rank looks at its own part of the gradients."""
    name = "_amp_foreach_non_finite_check_and_unscale_"
    check = getattr(torch, name)

    def check_own(gradients: list[torch.Tensor], *args: torch.Tensor) -> None:
        check([local(gradient) for gradient in gradients], *args)

    with mock.patch.object(torch, name, check_own), note_steps(path):
        yield


def overflowing(world_size: int, *args: object, note=note_steps) -> Run:
    args = ("-b", 6, *FP16, *args)
    return few(CHAPTER, world_size, *args, replaced=(SMALL_SCALE, LARGE), note=note)


def assert_all_skip(steps: list[list[dict]], metrics: list[dict]) -> None:
    """Of all steps, only the one that overflows changes nothing and halves the scale."""
    for lines in steps:
        pairs = pairwise(line["sum"] for line in lines)
        changed = [before != after for before, after in pairs]
        expected = [step != OVERFLOW for step in range(2, STEPS + 1)]
        assert changed == expected, "other steps are skipped"
        scales = [2.0**10 if step < OVERFLOW else 2.0**9 for step in range(1, STEPS + 1)]
        assert [line["scale"] for line in lines] == scales, "the scales are others"
    assert [line["loss_scale"] for line in metrics] == scales
    norms = [line["grad_norm"] for line in metrics]
    assert [norm is None for norm in norms] == [step == OVERFLOW for step in range(1, STEPS + 1)]
    losses = [line["loss"] for line in metrics]
    assert max(losses[OVERFLOW:]) < losses[0] - 0.5 and losses[-1] < losses[OVERFLOW - 1] - 0.5


ON_NODES = overflowing(4, "--hsdp", "--global-batch-size", 12)


@pytest.mark.parametrize(
    "run", first_then_nightly([overflowing(2), overflowing(3), ON_NODES]), ids=["2", "3", "nodes"]
)
def test_all_ranks_skip_a_step_that_overflows_on_one(ladder, run):
    assert_all_skip(notes(ladder, run), ladder.metrics(run.name))


@pytest.mark.parametrize("run", [overflowing(2, note=without_agreement)], ids=[""])
def test_planted_skip_of_one_rank_is_noticed(ladder, run):
    with pytest.raises(AssertionError, match=r"^other steps are skipped"):
        assert_all_skip(notes(ladder, run), ladder.metrics(run.name))


CLIP_FIRST = (
    (UNSCALE, "            pass  #"),
    ("scaler.step(optimizer)  #", "scaler.unscale_(optimizer); scaler.step(optimizer)  #"),
)
register(CHAPTER, CLIP_FIRST)
IN_FP32 = few(CHAPTER, 2, "-b", 3, *FP32)
CLIPPED_FIRST = few(CHAPTER, 2, "-b", 3, *FP16, replaced=CLIP_FIRST)
# How far a loss may be from float32's, relative to it.
BANDS = {
    "bf16": (few(CHAPTER, 2, "-b", 3), 1e-3),
    "fp16": (few(CHAPTER, 2, "-b", 3, *FP16), 2e-4),
}


def assert_close(ladder: Ladder, expected: Run, run: Run, band: float) -> None:
    right, found = (ladder.metrics(ladder.run(each)) for each in (expected, run))
    losses, right_losses = ([line["loss"] for line in lines] for lines in (found, right))
    assert losses == pytest.approx(right_losses, rel=band), "the losses differ"
    assert losses[1:] != right_losses[1:], "it is float32"
    norms, right_norms = ([line["grad_norm"] for line in lines] for lines in (found, right))
    assert max(norms) > 1.5, "there is nothing to clip"
    assert norms[:3] == pytest.approx(right_norms[:3], rel=0.02), "the norms differ"


@pytest.mark.parametrize(("run", "band"), BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("expected", [IN_FP32], ids=[""])
def test_16_bits_are_close_to_float32_and_clipped_by_the_true_norm(ladder, expected, run, band):
    assert_close(ladder, expected, run, band)


@pytest.mark.parametrize(("expected", "run"), [(IN_FP32, CLIPPED_FIRST)], ids=[""])
def test_planted_clip_before_unscale_is_noticed(ladder, expected, run):
    with pytest.raises(AssertionError, match=r"^the (losses|norms) differ"):
        assert_close(ladder, expected, run, BANDS["fp16"][1])


# --- resume ---

GROWING = ("GradScaler(device.type,", "GradScaler(device.type, 2.0**10, growth_interval=3,")
EVERY, LAST = 4, 8  # steps between checkpoints, in all
RESUMED = ("-s", 16, "--global-batch-size", 2, "--max-steps", LAST, "--ckpt-freq", EVERY, *FP16)
LOAD = ('scaler.load_state_dict(state["scaler"])', "pass")
register(CHAPTER, (GROWING, LOAD))


def growing(keep: int, *bug: tuple[str, str]) -> Run:
    """A run whose scale grows after every third step; `keep` checkpoints make its name."""
    return Run(CHAPTER, 2, (*RESUMED, "--keep-checkpoints", keep), (GROWING, *bug))


def assert_goes_on_with_its_scale(ladder: Ladder, resumed: Run) -> None:
    """Bit by bit as if it had not been stopped: what is logged and saved, the scale at every step.

    Tracker and scale are after steps 1 to 8: 1, 2, 0, ... and 2^10, 2^10, 2^11, ...
    """
    straight = ladder.folder / ladder.run(growing(9))
    hand_over(straight, ladder.folder / resumed.name, EVERY)
    run_dirs = [straight, ladder.folder / ladder.run(resumed)]
    scales = [[line["loss_scale"] for line in read_metrics(run_dir)] for run_dir in run_dirs]
    assert scales[0] == [2.0 ** (10 + step // 3) for step in range(1, LAST + 1)]
    assert scales[0] == scales[1], "the scales differ"
    assert_exact(*run_dirs)
    tracker = tensors(straight, EVERY)["state"]["scaler"]["_growth_tracker"]
    assert tracker == EVERY % 3


def test_goes_on_with_the_scale_it_had(ladder):
    assert_goes_on_with_its_scale(ladder, growing(10))


def test_planted_loss_of_the_scaler_is_noticed(ladder):
    with pytest.raises(AssertionError, match="the scales differ"):
        assert_goes_on_with_its_scale(ladder, growing(11, LOAD))

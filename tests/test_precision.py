"""Chapter 5: in float32 it is chapter 4 bit for bit, in few bits close to it; what has which type.

And the gradient scaler of float16: who skips a step, what a resumed run knows of the scale, and
when it gives up.
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
    Runs,
    assert_exact,
    first_then_nightly,
    hand_over,
    make_variant,
    plant,
    read_metrics,
    register,
    selected_runs,
    tensors,
    write_corpus,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CHAPTER, BEFORE = "05-mixed-precision", "04-fsdp"
STEPS = 6
FEW = ("-s", 16, "--global-batch-size", 6, "--max-steps", STEPS)
FEW += ("--eval-freq", 3, "--ckpt-freq", STEPS)
FP32, FP16 = ("--precision", "fp32"), ("float16", "loss-scaling")
PURE, WEIGHTS = ("pure-bfloat16",), ("bfloat16-weights",)
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


# Chapter 4 with weights in bfloat16, which is no variant of it.
CAST = "    layers = next("
TO_BFLOAT16 = (
    (
        CAST,
        "    for parameter in model.parameters():\n"
        f"        parameter.data = parameter.data.to(torch.bfloat16)\n{CAST}",
    ),
)
register(BEFORE, TO_BFLOAT16)


@pytest.mark.parametrize(
    ("expected", "run"),
    [
        [few(chapter, 2, "-b", 1, *args) for chapter, args in ((BEFORE, ()), (CHAPTER, FP32))],
        pytest.param(
            few(BEFORE, 2, "-b", 1, replaced=TO_BFLOAT16),
            few(CHAPTER, 2, "-b", 1, variants=PURE),
            marks=pytest.mark.ci,
        ),
    ],
    ids=["fp32", "bfloat16"],
)
def test_in_float32_it_is_chapter_4(ladder, expected, run):
    """Every number bit for bit; and where weights are bfloat16, in which nothing is cast either."""
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


def noted(*variants: str, replaced: tuple = ()) -> Run:
    return few(
        *(CHAPTER, 2, "-b", 1, "--max-steps", 2),
        replaced=replaced,
        note=note_types,
        variants=variants,
    )


# By name: the types of weights, of products and of reductions, the run, and the tier.
TYPES = {
    "bf16": ("float32", "bfloat16", "float32", noted(), ()),
    "reduced in bf16": (
        *("float32", "bfloat16", "bfloat16"),
        noted("reduce-bfloat16"),
        pytest.mark.ci,
    ),
    "fp16": ("float32", "float16", "float32", noted(*FP16), pytest.mark.ci),
    "weights in bf16": (*["bfloat16"] * 3, noted(*PURE), pytest.mark.ci),
}


@pytest.mark.parametrize(
    ("stored", "half", "reduced", "run"),
    [pytest.param(*values, marks=tier, id=name) for name, (*values, tier) in TYPES.items()],
)
def test_what_is_in_which_type(ladder, stored, half, reduced, run):
    """On each rank, in each step but the first, before which the optimizer has no moments.

    In a step of several micro-batches, gradients are added up.
    """
    assert_types(ladder, stored, half, reduced, run)


def assert_types(ladder: Ladder, stored: str, half: str, reduced: str, run: Run) -> None:
    expected = {
        **{name: [stored] for name in ("weights", "moments", "gradients")},
        **{name: [half] for name in ("products", "attention", "activations", "gathered")},
        "reduced": [reduced],
    }
    for lines in notes(ladder, run):
        assert len(lines) > 1
        for line in lines[1:]:
            assert {name: line.get(name) for name in expected} == expected, "the types differ"


# By row of TYPES: what undoes its line.
UNDONE = {
    "reduced in bf16": (("reduce_dtype=torch.bfloat16", "reduce_dtype=torch.float32"),),
    "fp16": (("param_dtype=torch.float16", "param_dtype=torch.bfloat16"),),
    "weights in bf16": (("parameter.data.to(torch.bfloat16)", "parameter.data"),),
}
for row, replaced in UNDONE.items():
    register(CHAPTER, replaced, TYPES[row][3].variants)


@pytest.mark.parametrize(
    ("stored", "half", "reduced", "run"),
    [
        (*TYPES[row][:3], noted(*TYPES[row][3].variants, replaced=replaced))
        for row, replaced in UNDONE.items()
    ],
    ids=UNDONE,
)
def test_planted_variant_without_effect_is_noticed(ladder, stored, half, reduced, run):
    with pytest.raises(AssertionError, match=r"^the types differ"):
        assert_types(ladder, stored, half, reduced, run)


# --- weights in bfloat16 ---

IN_BFLOAT16 = {
    "chapter 1": few("01-single-gpu", 1, "-b", 3, variants=WEIGHTS),
    "chapter 2": few("02-ddp", 2, "-b", 3, variants=WEIGHTS),
    "chapter 3": few("03-multi-node", 2, "-b", 3, variants=WEIGHTS),
    "chapter 5": few(CHAPTER, 2, "-b", 3, variants=PURE),
}
NOT_CAST = (("parameter.data.to(torch.bfloat16)", "parameter.data"),)
register("01-single-gpu", NOT_CAST, WEIGHTS)


def assert_in_bfloat16(ladder: Ladder, run: Run) -> None:
    """Losses near those of float32, and a checkpoint in which all but the state is bfloat16."""
    alone, found = (ladder.run(each) for each in (few("01-single-gpu", 1, "-b", 3), run))
    losses = [[line["loss"] for line in ladder.metrics(name)] for name in (alone, found)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    content = tensors(ladder.folder / found)
    numbers = [*content["model"].values()]
    numbers += [v for v in tree_leaves(content["optimizer"]) if isinstance(v, torch.Tensor)]
    types = {number.dtype for number in numbers if number.numel() > 1}
    assert types == {torch.bfloat16}, "the types differ"


@pytest.mark.ci
@pytest.mark.parametrize("run", first_then_nightly(IN_BFLOAT16.values()), ids=IN_BFLOAT16)
def test_weights_and_moments_in_bfloat16(ladder, run):
    assert_in_bfloat16(ladder, run)


@pytest.mark.parametrize(
    "run",
    [few("01-single-gpu", 1, "-b", 3, replaced=NOT_CAST, variants=WEIGHTS)],
    ids=[""],
)
def test_planted_weights_that_are_not_cast_are_noticed(ladder, run):
    with pytest.raises(AssertionError, match=r"^the types differ"):
        assert_in_bfloat16(ladder, run)


# --- the scaler ---

# Far from where a gradient overflows on its own.
SCALER = "GradScaler(device.type)"
SMALL_SCALE = (SCALER, "GradScaler(device.type, init_scale=2.0**10)")
OVERFLOW = 3  # the step
UNSCALE = "            scaler.unscale_(optimizer)  #"
# The gradient has an inf in a row that only the first rank of each node holds.
LARGE = (
    UNSCALE,
    f'            if state["step"] == {OVERFLOW - 1} and local_rank == 0:\n'
    '                next(model.parameters()).grad.to_local()[0] = float("inf")\n'
    f"{UNSCALE}",
)
register(CHAPTER, (SMALL_SCALE, LARGE), FP16)
# In chapters 1 to 3, whose gradients each rank has whole: those of the last rank are all inf or
# nan before DDP averages them.
IN_DDP = ("autocast", *FP16)
ALL_LARGE = (
    "scaler.scale(loss).backward()",
    'scaler.scale(loss * (float("inf") if (state["step"], rank) == '
    f"({OVERFLOW - 1}, world_size - 1) else 1)).backward()",
)
for ddp in ("01-single-gpu", "02-ddp", "03-multi-node"):
    register(ddp, (SMALL_SCALE, ALL_LARGE), IN_DDP)


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


def overflowing(world_size: int, *args: object, note=note_steps, variants=FP16) -> Run:
    replaced = (SMALL_SCALE, LARGE)
    return few(CHAPTER, world_size, "-b", 6, *args, replaced=replaced, note=note, variants=variants)


def overflowing_in_ddp(chapter: str, world_size: int) -> Run:
    replaced = (SMALL_SCALE, ALL_LARGE)
    return few(chapter, world_size, "-b", 3, replaced=replaced, note=note_steps, variants=IN_DDP)


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


ON_NODES = overflowing(4, "--global-batch-size", 12, variants=(*FP16, "hsdp"))
OVERFLOWING = {
    "2": overflowing(2),
    "3": overflowing(3),
    "nodes": ON_NODES,
    "offload": overflowing(2, variants=(*FP16, "cpu-offload")),
    "chapter 1": overflowing_in_ddp("01-single-gpu", 1),
    "chapter 2": overflowing_in_ddp("02-ddp", 2),
    "chapter 3": overflowing_in_ddp("03-multi-node", 2),
}


@pytest.mark.parametrize("run", first_then_nightly(OVERFLOWING.values()), ids=OVERFLOWING)
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
register(CHAPTER, CLIP_FIRST, FP16)
IN_FP32 = few(CHAPTER, 2, "-b", 3, *FP32)
CLIPPED_FIRST = few(CHAPTER, 2, "-b", 3, replaced=CLIP_FIRST, variants=FP16)
# How far a loss may be from float32's, relative to it.
BANDS = {
    "bf16": (few(CHAPTER, 2, "-b", 3), 1e-3),
    "fp16": (few(CHAPTER, 2, "-b", 3, variants=FP16), 2e-4),
}
REDUCED = few(CHAPTER, 2, "-b", 3, variants=("reduce-bfloat16",)), 2e-3


def assert_close(ladder: Ladder, expected: Run, run: Run, band: float) -> None:
    right, found = (ladder.metrics(ladder.run(each)) for each in (expected, run))
    losses, right_losses = ([line["loss"] for line in lines] for lines in (found, right))
    assert losses == pytest.approx(right_losses, rel=band), "the losses differ"
    assert losses[1:] != right_losses[1:], "it is float32"
    norms, right_norms = ([line["grad_norm"] for line in lines] for lines in (found, right))
    assert max(norms) > 1.5, "there is nothing to clip"
    assert norms[:3] == pytest.approx(right_norms[:3], rel=0.02), "the norms differ"


@pytest.mark.parametrize(
    ("run", "band"),
    [*BANDS.values(), pytest.param(*REDUCED, marks=pytest.mark.ci)],
    ids=[*BANDS, "reduced in bf16"],
)
@pytest.mark.parametrize("expected", [IN_FP32], ids=[""])
def test_16_bits_are_close_to_float32_and_clipped_by_the_true_norm(ladder, expected, run, band):
    assert_close(ladder, expected, run, band)


@pytest.mark.parametrize(("expected", "run"), [(IN_FP32, CLIPPED_FIRST)], ids=[""])
def test_planted_clip_before_unscale_is_noticed(ladder, expected, run):
    with pytest.raises(AssertionError, match=r"^the (losses|norms) differ"):
        assert_close(ladder, expected, run, BANDS["fp16"][1])


# --- resume ---

GROWING = (SCALER, "GradScaler(device.type, 2.0**10, growth_interval=3)")
EVERY, LAST = 4, 8  # steps between checkpoints, in all
RESUMED = ("-s", 16, "--global-batch-size", 2, "--max-steps", LAST, "--ckpt-freq", EVERY)
LOAD = ('scaler.load_state_dict(state["scaler"])', "pass")
register(CHAPTER, (GROWING, LOAD), FP16)


def growing(keep: int, *bug: tuple[str, str]) -> Run:
    """A run whose scale grows after every third step; `keep` checkpoints make its name."""
    args = (*RESUMED, "--keep-checkpoints", keep)
    return Run(CHAPTER, 2, args, (GROWING, *bug), variants=FP16)


def assert_goes_on_with_its_scale(ladder: Ladder, resumed: Run) -> None:
    """Bit for bit as if it had not been stopped: what is logged and saved, the scale at every step.

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


# --- a scale that falls too low ---

# The first scale and the step that is noticed: after four steps it is below 2^-14.
SMALLEST, TOO_LOW = 2.0**-11, 4
ALWAYS_INF = (
    (SCALER, f"GradScaler(device.type, init_scale={SMALLEST})"),
    (
        "scaler.scale(loss).backward()",
        'scaler.scale(loss * float("inf")).backward()',
    ),
)
NEVER_TOO_LOW = ("scaler.get_scale() < 2**-14", "False")
register(CHAPTER, (*ALWAYS_INF, NEVER_TOO_LOW), FP16)


def assert_gives_up(folder: Path, *bug: tuple[str, str]) -> None:
    """All ranks stop with status 2, before a checkpoint, and say why."""
    variant = make_variant(folder, CHAPTER, *FP16)
    script = str(plant(variant, folder / "planted", [*ALWAYS_INF, *bug]))
    flags = ["-d", write_corpus(folder), *FEW, "--log-freq", 1]
    runs = Runs(folder, flags=flags)
    statuses = runs.finish("run", chapter=script, ranks=2)
    assert statuses == [2, 2], "the statuses differ"
    said = runs.said("run")
    assert f"at step {TOO_LOW} the loss is not finite, or gradients overflow at every loss" in said
    assert "a smaller --lr" in said and "Traceback" not in said
    scales = [line["loss_scale"] for line in read_metrics(folder / "run")]
    assert scales == [SMALLEST / 2**step for step in range(1, TOO_LOW)]


@pytest.mark.ci
def test_scale_that_falls_too_low_ends_the_run(tmp_path):
    assert_gives_up(tmp_path)


def test_planted_scale_that_falls_for_ever_is_noticed(tmp_path):
    with pytest.raises(AssertionError, match=r"^the statuses differ"):
        assert_gives_up(tmp_path, NEVER_TOO_LOW)


# --- a scale that begins too high ---

HIGH = (*FP16, "high-scale")
NOT_HIGH = (("2.0**30", "2.0**4"),)
register(CHAPTER, NOT_HIGH, HIGH)


def too_high(replaced: tuple = ()) -> Run:
    return few(CHAPTER, 2, "-b", 3, "--max-steps", 24, replaced=replaced, variants=HIGH)


def assert_falls_and_trains(ladder: Ladder, run: Run) -> None:
    """The first steps are skipped, each with half the scale of the one before; then it trains."""
    lines = ladder.metrics(ladder.run(run))
    skipped = [line["grad_norm"] is None for line in lines].index(False)
    assert skipped > 2, "no step is skipped"
    scales = [line["loss_scale"] for line in lines[:skipped]]
    assert scales == [2.0 ** (29 - step) for step in range(skipped)]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5


@pytest.mark.ci
@pytest.mark.parametrize("run", [too_high()], ids=[""])
def test_scale_that_begins_too_high_falls(ladder, run):
    assert_falls_and_trains(ladder, run)


@pytest.mark.parametrize("run", [too_high(NOT_HIGH)], ids=[""])
def test_planted_scale_that_is_not_too_high_is_noticed(ladder, run):
    with pytest.raises(AssertionError, match=r"^no step is skipped"):
        assert_falls_and_trains(ladder, run)

"""Chapter 4: the training of chapter 1 with every option, what each does, and its checkpoints."""

import contextlib
import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch
from conftest import ROOT, first_then_slow
from test_parity import (
    BUGS,
    Ladder,
    Run,
    assert_chapter_1,
    assert_noticed,
    planted,
    selected_runs,
    without_kernels,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

CHAPTER = "04-fsdp"
SELECTIVE = ("--activation-checkpointing", "selective")
FULL = ("--activation-checkpointing", "full")
OPTIONS = {
    "whole": ("--no-reshard-after-forward",),
    "selective": SELECTIVE,
    "full": FULL,
    "offload": ("--cpu-offload",),
    "no-prefetch": ("--prefetch", 0),
    "prefetch-2": ("--prefetch", 2),
    "reduce": ("--reduce-every-backward", "-b", 4),
    "async": ("--async-checkpoint",),
    "accumulated": ("-b", 2),
    "zero1": ("--zero1",),
    "compile": ("--compile",),
}
# Together these cover every pair of options that can be given together.
TOGETHER = [
    ("whole", "selective", "offload", "no-prefetch", "reduce", "async", "compile"),
    ("whole", "full", "offload", "no-prefetch", "accumulated", "async", "compile"),
    ("selective", "accumulated"),
    ("full", "reduce"),
]
EXCLUDE_EACH_OTHER = [{"selective", "full"}, {"reduce", "accumulated"}]
ALONE = ("zero1", "prefetch-2")  # change nothing that another option does


def options(*names: str) -> tuple[object, ...]:
    return tuple(word for name in names for word in OPTIONS[name])


def runs_with_options() -> list[object]:
    """Return the runs on 2 ranks of options alone and together."""
    alone = [(name,) for name in ("whole", "offload", "selective", "full", "reduce", *ALONE)]
    cases = [((), names) for names in [*alone, *TOGETHER]]
    # --compile does the same to both models.
    cases += [(("-m", "llama-tiny"), names[:-1]) for names in TOGETHER[:2]]
    return [
        pytest.param(
            Run(
                *(CHAPTER, 2, (*model, *options(*names))),
                note=without_kernels if "compile" in names else None,
            ),
            marks=[] if names in alone[:2] else [pytest.mark.slow],
            id="+".join([*model[1:], *names]),
        )
        for model, names in cases
    ]


@pytest.mark.check
def test_every_pair_of_options_is_in_a_run():
    covered = {pair for names in TOGETHER for pair in map(frozenset, combinations(names, 2))}
    pairs = set(map(frozenset, combinations(OPTIONS.keys() - set(ALONE), 2)))
    assert pairs - covered == set(map(frozenset, EXCLUDE_EACH_OTHER))


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(make_folder("ladder"), selected_runs(request))


@pytest.mark.parametrize("run", runs_with_options())
def test_same_training_with_every_option(ladder, run):
    assert_chapter_1(ladder, run)


# In place of the norm over all ranks, each takes that of its own part.
LOCAL_CLIP = (
    "nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])\n"
    "            for p in model.parameters():\n"
    "                p.grad.to_local().mul_((args.max_grad_norm / grad_norm).clamp(max=1))"
)
SYNC = "model.set_requires_gradient_sync(last_backward or args.reduce_every_backward)"
LOAD = "set_model_state_dict(model, weights, options=options)"
SHARED = (
    *("loss not divided", "no set_epoch", "a rank skips one batch", "loss of one rank"),
    *("all ranks take the same samples", "evaluation of one rank", "every rank evaluates the same"),
)
# By name: the first check that must be red, what is replaced in the script, further arguments.
FSDP_BUGS = {
    "a block's gradients never averaged": (
        "loss",
        [(SYNC, f"{SYNC}\n            layers[0].set_requires_gradient_sync(False)")],
    ),
    "gradients added up over the ranks": (
        "loss|grad_norm",
        [("loss.backward()  # adds", "(world_size * loss).backward()  # adds")],
    ),
    "each rank clips by its own norm": (
        "loss",
        [
            ("nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)", LOCAL_CLIP),
            ("grad_norm.full_tensor().item()", "grad_norm.item()"),
        ],
    ),
    "weights not sent": (
        "loss",
        [
            (
                LOAD,
                f"{LOAD}\n        [p.data.to_local().zero_() for p in model.parameters() if rank]",
            )
        ],
    ),
    "weights not tied": ("run", [("    model.tie_weights()", "    pass")]),
    "rotary tables left out": (
        "loss",
        [("            model._init_weights(module)", "            pass")],
        *("-m", "llama-tiny"),
    ),
}


@pytest.mark.parametrize(("red", "run"), planted(CHAPTER, 2, FSDP_BUGS))
def test_planted_bug_is_noticed(ladder, red, run):
    assert_noticed(ladder, red, run)


@pytest.mark.parametrize(("red", "run"), planted(CHAPTER, 2, {n: BUGS[n] for n in SHARED}))
def test_planted_bug_of_chapter_2_is_noticed(ladder, red, run):
    assert_noticed(ladder, red, run)


class CountOperators(TorchDispatchMode):
    """Counts what PyTorch really computes, by the names of its operators."""

    def __init__(self, counts: Counter) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[operator.overloadpacket.__name__] += 1
        return operator(*args, **kwargs or {})


@contextlib.contextmanager
def note_calls(path: str) -> Iterator[None]:
    """Note, a JSON line for each optimizer step, how often it called what.

    And what this rank holds of the model: `built`, when the model is there; `held`, of weights and
    of gradients in the step; and how many blocks are gathered ahead of each.
    """
    counts: Counter = Counter()
    facts: dict[str, object] = {"forward": [], "backward": []}
    group = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    original = {name: getattr(group, name) for name in ("foreach_all_gather", "foreach_reduce")}
    build = AutoModelForCausalLM.from_config
    set_ahead = {
        way: getattr(FSDPModule, f"set_modules_to_{way}_prefetch")
        for way in ("forward", "backward")
    }

    def counted(name: str) -> Callable:
        def function(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return original[name](*args, **kwargs)

        return function

    def build_and_count(*args: object, **kwargs: object) -> torch.nn.Module:
        model = build(*args, **kwargs)
        facts["whole"] = sum(p.numel() for p in model.parameters())
        facts["built"] = sum(p.numel() for p in model.parameters() if not p.is_meta)
        return model

    def note_ahead(way: str) -> Callable:
        def function(block: FSDPModule, ahead: list[FSDPModule]) -> None:
            facts[way].append(len(ahead))
            set_ahead[way](block, ahead)

        return function

    def write(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = optimizer.param_groups[0]["params"]
        local = [getattr(p, "_local_tensor", p) for p in parameters]
        gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters]
        facts["held"] = [sum(t.numel() for t in tensors) for tensors in (local, gradients)]
        with Path(path).open("a") as file:
            file.write(json.dumps({**counts, **facts}) + "\n")
        counts.clear()

    for name in original:
        setattr(group, name, counted(name))
    for way in set_ahead:
        setattr(FSDPModule, f"set_modules_to_{way}_prefetch", note_ahead(way))
    AutoModelForCausalLM.from_config = build_and_count
    handle = register_optimizer_step_post_hook(write)
    with CountOperators(counts):
        yield
    handle.remove()
    AutoModelForCausalLM.from_config = build
    for way, function in set_ahead.items():
        setattr(FSDPModule, f"set_modules_to_{way}_prefetch", function)
    for name, function in original.items():
        setattr(group, name, function)


def noted(*args: object, world_size: int = 2, replaced=()) -> Run:
    """A run of 6 steps, without an evaluation before its end."""
    few = ("--max-steps", 6, "--eval-freq", 99)
    return Run(CHAPTER, world_size, (*few, *args), tuple(replaced), note_calls)


def calls(ladder: Ladder, run: Run, rank: int = 1) -> dict:
    """Return what a rank called in the fourth step; the first ones allocate and warm up."""
    ladder.run(run)
    return json.loads(Path(ladder.notes(run)[rank]).read_text().splitlines()[3])


def named(cases: list[tuple], *quick: str) -> list[object]:
    """Return the parameters of cases that begin with their names; all but `quick` are slow."""
    marks = {name: [] if name in quick else [pytest.mark.slow] for name, *_ in cases}
    marks |= {name: pytest.mark.planted for name in marks if name.startswith("bug: ")}
    return [pytest.param(*values, marks=marks[name], id=name) for name, *values in cases]


REDUCTIONS = [
    ("at once", 3, noted("-b", 24)),
    ("accumulated", 3, noted("-b", 4)),
    ("in every backward pass", 9, noted("-b", 4, "--reduce-every-backward")),
    ("bug: always", 9, noted("-b", 4, replaced=[(SYNC, "model.set_requires_gradient_sync(True)")])),
]


@pytest.mark.parametrize(("count", "run"), named(REDUCTIONS, "at once", "accumulated"))
def test_gradients_are_reduced_once_per_step(ladder, count, run):
    """Of two blocks and the rest, in the last of three backward passes or in each of them.

    The planted bug reduces without being asked to: the same losses, three times the traffic.
    """
    assert calls(ladder, run)["foreach_reduce"] == count


RESHARD = "reshard_after_forward=args.reshard_after_forward"
GATHERS = [
    ("twice", 5, noted("-b", 24)),
    ("once", 3, noted("-b", 24, *OPTIONS["whole"])),
    ("bug: always", 3, noted("-b", 24, replaced=[(RESHARD, "reshard_after_forward=False")])),
    ("bug: never", 5, noted("-b", 24, *OPTIONS["whole"], replaced=[(RESHARD, "**{}")])),
]


@pytest.mark.parametrize(("count", "run"), named(GATHERS, "twice", "once"))
def test_blocks_are_gathered_twice_per_step_or_once(ladder, count, run):
    """Each of two blocks; the rest stays between the forward and the backward pass either way."""
    assert calls(ladder, run)["foreach_all_gather"] == count


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
LLAMA = ("-m", "llama-tiny")
NO_PRODUCTS = ("models.SAVED_OPS", "models.SAVED_OPS[:-3]")
NOT_WRAPPED = (
    "layer.forward = partial(recompute, layer.forward,",
    "(lambda *_, **__: 0)(",
)
# Of two blocks: the last product of a block is of use to nobody who computes it once more.
RECOMPUTED = [
    ("none", {"addmm": 8, "gelu": 2, ATTENTION: 2}, noted("-b", 24)),
    ("full", {"addmm": 14, "gelu": 4, ATTENTION: 4}, noted("-b", 24, *FULL)),
    ("selective", {"addmm": 8, "gelu": 4, ATTENTION: 2}, noted("-b", 24, *SELECTIVE)),
    ("llama: none", {"mm": 45, "silu": 2, ATTENTION: 2}, noted("-b", 24, *LLAMA)),
    ("llama: full", {"mm": 57, "silu": 4, ATTENTION: 4}, noted("-b", 24, *LLAMA, *FULL)),
    ("llama: selective", {"mm": 45, "silu": 4, ATTENTION: 2}, noted("-b", 24, *LLAMA, *SELECTIVE)),
    (
        "bug: products not kept",
        {"addmm": 14, "gelu": 4, ATTENTION: 2},
        noted("-b", 24, *SELECTIVE, replaced=[NO_PRODUCTS]),
    ),
    (
        "bug: no block wrapped",
        {"addmm": 8, "gelu": 2, ATTENTION: 2},
        noted("-b", 24, *FULL, replaced=[NOT_WRAPPED]),
    ),
]


@pytest.mark.parametrize(("counts", "run"), named(RECOMPUTED, "none", "full", "selective"))
def test_activations_are_recomputed(ladder, counts, run):
    """Products (8 forward), activations and attention of a step; bugs show in these alone."""
    found = calls(ladder, run)
    assert {name: found[name] for name in counts} == counts


@pytest.mark.slow
def test_as_many_blocks_are_gathered_ahead_as_asked(ladder):
    config = json.loads((ROOT / "common/presets/gpt2-tiny/config.json").read_text())
    (ladder.folder / "deep").mkdir()
    (ladder.folder / "deep/config.json").write_text(json.dumps({**config, "n_layer": 4}))
    deep = ("-m", ladder.folder / "deep", "--tokenizer-name", "gpt2-tiny")
    backwards = ("[::-1])", "[::-1][:1])")
    runs = {
        (): noted(*deep, "--prefetch", 0),
        (1, 1, 1, 0): noted(*deep),
        (2, 2, 1, 0): noted(*deep, "--prefetch", 2),
        (3, 2, 1, 0): noted(*deep, "--prefetch", 3),
    }
    bug = noted(*deep, "--prefetch", 3, replaced=[backwards])
    ladder.selected = [*runs.values(), bug]
    for ahead, run in runs.items():
        found = calls(ladder, run)
        assert (found["forward"], found["backward"]) == ([*ahead], [*ahead][::-1])
    assert calls(ladder, bug)["backward"] == [0, 1, 1, 1]


EVERYBODY = [('"cpu" if rank == 0 and not args.pretrained else "meta"', '"cpu"')]
REPLICATED = [
    ('(world_size,), mesh_dim_names=("s', '(world_size, 1), mesh_dim_names=("replicate", "s')
]


def assert_sharded(ladder: Ladder, run: Run) -> None:
    """Rank 0 alone has built the model; each holds its rows of it, and of the gradients."""
    found = [calls(ladder, run, rank) for rank in range(run.world_size)]
    whole = found[0]["whole"]
    built = [facts["built"] for facts in found] == [whole] + [0] * (run.world_size - 1)
    assert built, "the ranks that built the model are others"
    for weights, gradients in (facts["held"] for facts in found):
        assert weights == gradients
        assert weights < 1.01 * whole / run.world_size, "the parts are too large"
    assert sum(facts["held"][0] for facts in found) == whole


@pytest.mark.parametrize(
    "run", first_then_slow([noted("-b", 24), noted("-b", 24, world_size=3)]), ids=["2", "3"]
)
def test_each_rank_holds_its_part(ladder, run):
    assert_sharded(ladder, run)


WHOLE = [
    ("built by all", "the ranks", noted("-b", 24, replaced=EVERYBODY)),
    ("replicated", "the parts", noted("-b", 24, replaced=REPLICATED)),
]


@pytest.mark.planted
@pytest.mark.parametrize(("red", "run"), named(WHOLE, "replicated", "built by all"))
def test_a_rank_that_holds_more_is_noticed(ladder, red, run):
    with pytest.raises(AssertionError, match=f"^{red}"):
        assert_sharded(ladder, run)

"""Chapter 4: the training of chapter 1 with every option and variant, and what each one does."""

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as fsdp
from helpers import (
    FSDP_OPTIONS,
    Ladder,
    Run,
    assert_chapter_1,
    assert_noticed,
    first_then_nightly,
    planted,
    register,
    selected_runs,
    without_kernels,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

CHAPTER = "04-fsdp"
LLAMA = ("-m", "llama-narrow")
FULL = ("--activation-checkpointing",)
CI, NIGHTLY = pytest.mark.ci, pytest.mark.nightly
# Together these cover every pair of options that can be given together.
TOGETHER = [
    ("whole", "selective", "offload", "reduce", "async", "compile"),
    ("whole", "full", "offload", "accumulated", "async", "compile"),
    ("selective", "accumulated"),
    ("full", "reduce"),
]


def with_options(*names: str, tier: object, model: tuple[str, ...] = ()) -> object:
    """Return a run on 2 ranks, as a parameter."""
    options = [FSDP_OPTIONS[name] for name in names]
    variants = tuple(chain.from_iterable(option[0] for option in options))
    args = chain.from_iterable(option[1] for option in options)
    note = without_kernels if "compile" in names else None
    run = Run(CHAPTER, 2, (*model, *args), note=note, variants=variants)
    return pytest.param(run, marks=tier, id="+".join([*model[1:], *names]))


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(make_folder("ladder"), selected_runs(request), model="gpt2-narrow")


@pytest.mark.parametrize(
    "run",
    [
        with_options("offload", tier=()),
        *(with_options(*names, tier=CI) for names in TOGETHER),
        # --compile does the same to both models.
        *(with_options(*names[:-1], tier=NIGHTLY, model=LLAMA) for names in TOGETHER[:2]),
    ],
)
def test_same_training_with_every_option(ladder, run):
    assert_chapter_1(ladder, run)


# In place of the norm over all ranks, each takes that of its own part.
LOCAL_CLIP = (
    "torch.nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])\n"
    "            for p in model.parameters():\n"
    "                p.grad.to_local().mul_((args.max_grad_norm / grad_norm).clamp(max=1))"
)
# By name: the first check that must be red, what is replaced in the script, further arguments.
BUGS = {
    "each rank clips by its own norm": (
        "loss",
        [("clip_grad_norm(model, args.max_grad_norm)", LOCAL_CLIP)],
    ),
    "buffers not broadcast": (  # what the memory holds then may be no number, and the run stops
        "loss|run",
        [("        dist.broadcast(buffer, src=0)\n", "")],
        *LLAMA,
    ),
}
for _, replaced, *_ in BUGS.values():
    register(CHAPTER, replaced)


@pytest.mark.parametrize(("red", "run"), planted(CHAPTER, 2, BUGS))
def test_planted_bug_is_noticed(ladder, red, run):
    assert_noticed(ladder, red, run)


class CountOperators(TorchDispatchMode):
    """Counts what PyTorch really computes and sends, by the names of its operators."""

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
    of gradients in the step. `offloaded`: how many groups of weights stay in host memory.
    """
    counts: Counter = Counter()
    facts: dict[str, object] = {"built": 0, "offloaded": 0}
    build, shard = AutoModelForCausalLM.from_config, fsdp.fully_shard

    def shard_and_count(module: torch.nn.Module, **options: object) -> torch.nn.Module:
        facts["offloaded"] += isinstance(options.get("offload_policy"), fsdp.CPUOffloadPolicy)
        return shard(module, **options)

    def build_and_count(*args: object, **kwargs: object) -> torch.nn.Module:
        model = build(*args, **kwargs)
        facts["whole"] = sum(p.numel() for p in model.parameters())
        facts["built"] += sum(p.numel() for p in model.parameters() if not p.is_meta)
        return model

    def write(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = optimizer.param_groups[0]["params"]
        local = [getattr(p, "_local_tensor", p) for p in parameters]
        gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters]
        facts["held"] = [sum(t.numel() for t in tensors) for tensors in (local, gradients)]
        with Path(path).open("a") as file:
            file.write(json.dumps({**counts, **facts}) + "\n")
        counts.clear()

    handle = register_optimizer_step_post_hook(write)
    with (
        CountOperators(counts),
        mock.patch.object(AutoModelForCausalLM, "from_config", build_and_count),
        mock.patch.object(fsdp, "fully_shard", shard_and_count),
    ):
        yield
    handle.remove()


def noted(*args: object, world_size: int = 2, replaced=(), variants: tuple[str, ...] = ()) -> Run:
    """A run of 4 steps, without an evaluation before its end."""
    few = ("--max-steps", 4, "--eval-freq", 99)
    if replaced:
        register(CHAPTER, replaced, variants)
    return Run(CHAPTER, world_size, (*few, *args), tuple(replaced), note_calls, variants)


def calls(ladder: Ladder, run: Run, rank: int = 1) -> dict:
    """Return what a rank called in the last step; the first ones allocate and warm up."""
    ladder.run(run)
    return json.loads(Path(ladder.notes(run)[rank]).read_text().splitlines()[-1])


REDUCES_EACH = ("reduce-every-backward",)
GATHER, REDUCE = "_allgather_base_", "_reduce_scatter_base_"
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
LLAMA_OPERATORS = {"mm": 45, "silu": 4, ATTENTION: 2}
SELECTIVE = {"variants": ("selective-recomputation",)}
# What a step of two blocks and the rest calls, the run, and the tier. The rest stays gathered
# between the forward and the backward pass either way. When a block is computed once more, its last
# product is of use to nobody.
CALLS = {
    "gathered twice, reduced once": (
        {GATHER: 5, REDUCE: 3, "addmm": 8, "gelu": 2, ATTENTION: 2},
        noted("-b", 24),
        (),
    ),
    "in host memory": ({"offloaded": 3}, noted("-b", 24, variants=("cpu-offload",)), CI),
    "gathered once": ({GATHER: 3}, noted("-b", 24, variants=("zero2",)), CI),
    "reduced once in three backward passes": ({REDUCE: 3}, noted("-b", 4), ()),
    "reduced in each of three": ({REDUCE: 9}, noted("-b", 4, variants=REDUCES_EACH), CI),
    "recomputed: full": ({"addmm": 14, "gelu": 4, ATTENTION: 4}, noted("-b", 24, *FULL), CI),
    "recomputed: selective": (
        {"addmm": 8, "gelu": 4, ATTENTION: 2},
        noted("-b", 24, **SELECTIVE),
        (),
    ),
    "recomputed: llama, selective": (LLAMA_OPERATORS, noted("-b", 24, *LLAMA, **SELECTIVE), CI),
}


@pytest.mark.parametrize(
    ("counts", "run"),
    [pytest.param(counts, run, marks=tier, id=name) for name, (counts, run, tier) in CALLS.items()],
)
def test_what_is_gathered_and_reduced(ladder, counts, run):
    """All-gathers, reduce-scatters, products, activations and attention; same losses."""
    assert_calls(ladder, counts, run)
    plain = noted("-b", 24, *(LLAMA if LLAMA[1] in run.args else ()))
    losses = [[line["loss"] for line in ladder.metrics(ladder.run(each))] for each in (plain, run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def assert_calls(ladder: Ladder, counts: dict[str, int], run: Run) -> None:
    found = calls(ladder, run)
    assert {name: found[name] for name in counts} == counts, "the calls differ"


# By variant: what undoes its line, and the counts that must be red.
UNDONE = {
    "cpu-offload": ([('    sharding["offload_policy"] = policy\n', "")], "in host memory"),
    "zero2": ([("reshard_after_forward=False", "reshard_after_forward=True")], "gathered once"),
    "reduce-every-backward": (
        [
            (
                "            last_backward = micro_batch == accumulation - 1\n",
                "            last_backward = micro_batch == accumulation - 1\n"
                "            model.set_requires_gradient_sync(last_backward)\n",
            )
        ],
        "reduced in each of three",
    ),
    "selective-recomputation": (  # everything is recomputed
        [("partial(checkpoint, context_fn=saved)", "checkpoint")],
        "recomputed: selective",
    ),
}


@pytest.mark.parametrize(
    ("counts", "run"),
    [
        pytest.param(
            CALLS[row][0],
            noted(*CALLS[row][1].args, replaced=replaced, variants=(name,)),
            marks=NIGHTLY,
            id=name,
        )
        for name, (replaced, row) in UNDONE.items()
    ],
)
def test_planted_variant_without_effect_is_noticed(ladder, counts, run):
    with pytest.raises(AssertionError, match=r"^the calls differ"):
        assert_calls(ladder, counts, run)


EVERYBODY = [("if rank > 0:\n        model = None", "if rank > world_size:\n        model = None")]
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
    "run", first_then_nightly([noted("-b", 24), noted("-b", 24, world_size=3)]), ids=["2", "3"]
)
def test_each_rank_holds_its_part(ladder, run):
    assert_sharded(ladder, run)


WHOLE = {
    "the ranks": noted("-b", 24, replaced=EVERYBODY),
    "the parts": noted("-b", 24, replaced=REPLICATED),
}


@pytest.mark.parametrize(("red", "run"), WHOLE.items(), ids=WHOLE)
def test_planted_rank_that_holds_more_is_noticed(ladder, red, run):
    with pytest.raises(AssertionError, match=f"^{red}"):
        assert_sharded(ladder, run)


# --- what --compile compiles ---

# Compiled with the hooks that gather its weights, a block that recomputes is left as it was.
NOT_COMPILED = (
    ("layer.forward = torch.compile(layer.forward)", "layer.compile()"),
    ("model.loss_function = torch.compile(model.loss_function)", "pass"),
)
register(CHAPTER, NOT_COMPILED)


@contextlib.contextmanager
def note_graphs(path: str) -> Iterator[None]:
    """Note how many graphs were compiled; to make kernels of them takes a minute."""
    torch._dynamo.utils.counters.clear()
    without = functools.partial(torch.compile, backend="eager")
    with mock.patch.object(torch, "compile", without):
        yield
    Path(path).write_text(str(torch._dynamo.utils.counters["stats"]["unique_graphs"]))


def compiled(*args: str, replaced: tuple = ()) -> Run:
    # The last batch of the evaluation has one sequence before it is padded.
    few = ("--max-steps", 1, "-b", 4, "--eval-sequences", 9)
    return Run(CHAPTER, 2, (*few, "--compile", *args), replaced, note_graphs)


@pytest.mark.parametrize(
    ("count", "run"),
    [
        pytest.param(4, compiled(*FULL), marks=CI, id="full"),
        pytest.param(4, compiled(), marks=NIGHTLY, id="none"),
        pytest.param(0, compiled(*FULL, replaced=NOT_COMPILED), marks=NIGHTLY, id="planted"),
    ],
)
def test_blocks_and_the_loss_are_compiled(ladder, count, run):
    """Sequences alike are one graph in training and one in evaluation, and so is the loss."""
    ladder.run(run)
    assert int(Path(ladder.notes(run)[1]).read_text()) == count

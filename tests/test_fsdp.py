"""Chapter 4: the training of chapter 1 with every option, what each does, and its checkpoints."""

import contextlib
import functools
import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch
from helpers import (
    FSDP_OPTIONS,
    Ladder,
    Run,
    assert_chapter_1,
    assert_noticed,
    first_then_nightly,
    plant,
    planted,
    register,
    selected_runs,
    without_kernels,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BertConfig

from common import models, sharding
from common.cli import RunError
from common.launch import SINGLE_PROCESS

CHAPTER = "04-fsdp"
SELECTIVE, FULL = FSDP_OPTIONS["selective"], FSDP_OPTIONS["full"]
# Together these cover every pair of options that can be given together.
TOGETHER = [
    ("whole", "selective", "offload", "reduce", "async", "compile"),
    ("whole", "full", "offload", "accumulated", "async", "compile"),
    ("selective", "accumulated"),
    ("full", "reduce"),
]
EXCLUDE_EACH_OTHER = [{"selective", "full"}, {"reduce", "accumulated"}]
ALONE = ("zero1",)  # changes nothing that another option does


def options(*names: str) -> tuple[object, ...]:
    return tuple(word for name in names for word in FSDP_OPTIONS[name])


def runs_with_options() -> Iterator[object]:
    """Each option alone and together, on 2 ranks. `make ci` runs those that cover every pair."""
    alone = [(name,) for name in ("offload", "whole", "selective", "full", "reduce", *ALONE)]
    for names in [*TOGETHER, *alone]:
        compiles = "compile" in names
        tier = [pytest.mark.ci if names in TOGETHER else pytest.mark.nightly]
        yield pytest.param(
            Run(CHAPTER, 2, options(*names), note=without_kernels if compiles else None),
            marks=[] if names == alone[0] else tier,
            id="+".join(names),
        )
        if compiles:  # --compile does the same to both models
            llama = Run(CHAPTER, 2, ("-m", "llama-narrow", *options(*names[:-1])))
            yield pytest.param(llama, marks=pytest.mark.nightly, id="+".join(["llama", *names]))


@pytest.mark.check
def test_every_pair_of_options_is_in_a_run():
    covered = {pair for names in TOGETHER for pair in map(frozenset, combinations(names, 2))}
    pairs = set(map(frozenset, combinations(FSDP_OPTIONS.keys() - set(ALONE), 2)))
    assert pairs - covered == set(map(frozenset, EXCLUDE_EACH_OTHER))


@pytest.mark.check
@pytest.mark.parametrize(
    ("preset", "layer"), [("gpt2-tiny", "GPT2Block"), ("llama-tiny", "LlamaDecoderLayer")]
)
def test_find_layers_knows_the_layers_by_no_split_modules(preset, layer):
    """If transformers drops this private attribute, find_layers can take model.get_decoder()'s
    longest nn.ModuleList."""
    config = models.load_config(preset)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = sharding.find_layers(model)
    assert [type(each).__name__ for each in layers] == [layer] * config.num_hidden_layers
    model._no_split_modules = None  # planted
    with pytest.raises(RunError, match=r"^transformers does not say what the layers of \w+ are"):
        sharding.find_layers(model)


@pytest.mark.check
def test_layers_are_in_a_list_and_share_no_weights():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(BertConfig(num_hidden_layers=2, is_decoder=True))
    assert "BertEmbeddings" in model._no_split_modules
    first, second = sharding.find_layers(model)
    assert type(first).__name__ == type(second).__name__ == "BertLayer"
    first.output.dense.weight = second.output.dense.weight  # as Zamba2 shares them
    with pytest.raises(RunError, match="Layers of bert share weights"):
        sharding.find_layers(model)


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(make_folder("ladder"), selected_runs(request), model="gpt2-narrow")


@pytest.mark.parametrize("run", list(runs_with_options()))
def test_same_training_with_every_option(ladder, run):
    assert_chapter_1(ladder, run)


# In place of the norm over all ranks, each takes that of its own part.
LOCAL_CLIP = (
    "torch.nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])\n"
    "            for p in model.parameters():\n"
    "                p.grad.to_local().mul_((args.max_grad_norm / grad_norm).clamp(max=1))"
)
SYNC = "model.set_requires_gradient_sync(last_backward or args.reduce_every_backward)"
BUFFERS = "    for name, buffer in list(model.named_buffers()):\n"
# By name: the first check that must be red, what is replaced in the script, further arguments.
BUGS = {
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
        [("clip_grad_norm(model, args.max_grad_norm)", LOCAL_CLIP)],
    ),
    "weights not sent": (
        "loss",
        [
            (
                BUFFERS,
                "    [p.data.to_local().zero_() for p in model.parameters() if rank]\n" + BUFFERS,
            )
        ],
    ),
    "buffers not broadcast": (  # what the memory holds then may be no number, and the run stops
        "loss|run",
        [("        dist.broadcast(buffer, src=0)\n", "")],
        *("-m", "llama-narrow"),
    ),
}


for _, replaced, *_ in BUGS.values():
    register(CHAPTER, replaced)


@pytest.mark.parametrize(("red", "run"), planted(CHAPTER, 2, BUGS))
def test_planted_bug_is_noticed(ladder, red, run):
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
    of gradients in the step.
    """
    counts: Counter = Counter()
    facts: dict[str, object] = {}
    group = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    original = {name: getattr(group, name) for name in ("foreach_all_gather", "foreach_reduce")}
    build = AutoModelForCausalLM.from_config

    def counted(name: str) -> Callable:
        def function(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return original[name](*args, **kwargs)

        return function

    def build_and_count(*args: object, **kwargs: object) -> torch.nn.Module:
        model = build(*args, **kwargs)
        facts["whole"] = sum(p.numel() for p in model.parameters())
        built = sum(p.numel() for p in model.parameters() if not p.is_meta)
        facts["built"] = facts.get("built", 0) + built
        return model

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
    AutoModelForCausalLM.from_config = build_and_count
    handle = register_optimizer_step_post_hook(write)
    with CountOperators(counts):
        yield
    handle.remove()
    AutoModelForCausalLM.from_config = build
    for name, function in original.items():
        setattr(group, name, function)


def noted(*args: object, world_size: int = 2, replaced=()) -> Run:
    """A run of 4 steps, without an evaluation before its end."""
    few = ("--max-steps", 4, "--eval-freq", 99)
    if replaced:
        register(CHAPTER, replaced)
    return Run(CHAPTER, world_size, (*few, *args), tuple(replaced), note_calls)


def calls(ladder: Ladder, run: Run, rank: int = 1) -> dict:
    """Return what a rank called in the last step; the first ones allocate and warm up."""
    ladder.run(run)
    return json.loads(Path(ladder.notes(run)[rank]).read_text().splitlines()[-1])


def named(cases: list[tuple], *quick: str) -> list[object]:
    """Return the parameters of cases that begin with their names; all but some are for `ci`."""
    tiers = {name: [] if name in quick else [pytest.mark.ci] for name, *_ in cases}
    return [pytest.param(*values, marks=tiers[name], id=name) for name, *values in cases]


REDUCTIONS = [
    ("at once", 3, noted("-b", 24)),
    ("accumulated", 3, noted("-b", 4)),
    ("in every backward pass", 9, noted("-b", 4, "--reduce-every-backward")),
]


@pytest.mark.parametrize(("count", "run"), named(REDUCTIONS, "accumulated"))
def test_gradients_are_reduced_once_per_step(ladder, count, run):
    """Of two blocks and the rest, in the last of three backward passes or in each of them."""
    assert calls(ladder, run)["foreach_reduce"] == count


GATHERS = [
    ("twice", 5, noted("-b", 24)),
    ("once", 3, noted("-b", 24, *FSDP_OPTIONS["whole"])),
]


@pytest.mark.parametrize(("count", "run"), named(GATHERS, "twice"))
def test_blocks_are_gathered_twice_per_step_or_once(ladder, count, run):
    """Each of two blocks; the rest stays between the forward and the backward pass either way."""
    assert calls(ladder, run)["foreach_all_gather"] == count


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
LLAMA = ("-m", "llama-narrow")
# Of two blocks: the last product of a block is of use to nobody who computes it once more.
RECOMPUTED = [
    ("none", {"addmm": 8, "gelu": 2, ATTENTION: 2}, noted("-b", 24)),
    ("full", {"addmm": 14, "gelu": 4, ATTENTION: 4}, noted("-b", 24, *FULL)),
    ("selective", {"addmm": 8, "gelu": 4, ATTENTION: 2}, noted("-b", 24, *SELECTIVE)),
    ("llama: selective", {"mm": 45, "silu": 4, ATTENTION: 2}, noted("-b", 24, *LLAMA, *SELECTIVE)),
]


@pytest.mark.parametrize(("counts", "run"), named(RECOMPUTED, "selective"))
def test_activations_are_recomputed(ladder, counts, run):
    """Products (8 forward), activations and attention of a step."""
    found = calls(ladder, run)
    assert {name: found[name] for name in counts} == counts


EVERYBODY = [
    ("    if rank > 0:\n        model = None", "    if rank > world_size:\n        model = None")
]
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


WHOLE = [
    ("built by all", "the ranks", noted("-b", 24, replaced=EVERYBODY)),
    ("replicated", "the parts", noted("-b", 24, replaced=REPLICATED)),
]


@pytest.mark.parametrize(("red", "run"), named(WHOLE))
def test_planted_rank_that_holds_more_is_noticed(ladder, red, run):
    with pytest.raises(AssertionError, match=f"^{red}"):
        assert_sharded(ladder, run)


# --- what --compile compiles ---

# Compiled with the hooks that gather its weights, a block that recomputes is left as it was.
WITH_HOOKS = (
    "            layer.forward = torch.compile(layer.forward)",
    "            layer.compile()",
)
EAGER_LOSS = ("        model.loss_function = torch.compile(model.loss_function)", "        pass")
NOT_COMPILED = [WITH_HOOKS, EAGER_LOSS]
register(CHAPTER, NOT_COMPILED)


@pytest.fixture
def count_graphs(train, monkeypatch) -> Callable[[str, str], int]:
    """Return a function that runs one step, and returns how many graphs it was compiled to.

    Sequences alike are one graph in training and one in evaluation, and so is the loss.
    """
    for name, value in SINGLE_PROCESS.items():
        monkeypatch.setenv(name, value)
    # Graphs are counted; to make kernels of them takes a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))

    def count(chapter: str, mode: str) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        args = ("--max-steps", 1, "-s", 32, "--global-batch-size", 2, "--eval-freq", 9)
        args += ("--compile", "--activation-checkpointing", mode)
        # To its last batch, which is one sequence short before it is padded.
        train(*args, "--eval-sequences", 9, chapter=chapter, whole=True)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    return count


@pytest.mark.ci
@pytest.mark.parametrize("mode", first_then_nightly(["full", "selective", "none"]))
def test_blocks_and_the_loss_are_compiled(count_graphs, mode):
    assert count_graphs(CHAPTER, mode) == 4


def test_planted_what_is_not_compiled_is_noticed(count_graphs, tmp_path):
    chapter = plant(CHAPTER, tmp_path / "chapter", NOT_COMPILED)
    assert count_graphs(str(chapter), "full") == 0

"""Chapter 4: the training of chapter 1 with every option, what each does, and its checkpoints."""

import contextlib
import datetime
import importlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import (
    Ladder,
    Run,
    assert_chapter_1,
    assert_noticed,
    first_then_nightly,
    planted,
    selected_runs,
    without_kernels,
)
from runner import ask_ranks
from test_parity import BUGS
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from common import models
from common.cli import InputError

CHAPTER = "04-fsdp"
SELECTIVE = ("--activation-checkpointing", "selective")
FULL = ("--activation-checkpointing", "full")
OPTIONS = {
    "whole": ("--no-reshard-after-forward",),
    "selective": SELECTIVE,
    "full": FULL,
    "offload": ("--cpu-offload",),
    "reduce": ("--reduce-every-backward", "-b", 4),
    "async": ("--async-checkpoint",),
    "accumulated": ("-b", 2),
    "zero1": ("--zero1",),
    "compile": ("--compile",),
}
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
            marks=[] if names in alone[:2] else [pytest.mark.ci],
            id="+".join([*model[1:], *names]),
        )
        for model, names in cases
    ]


@pytest.mark.check
def test_every_pair_of_options_is_in_a_run():
    covered = {pair for names in TOGETHER for pair in map(frozenset, combinations(names, 2))}
    pairs = set(map(frozenset, combinations(OPTIONS.keys() - set(ALONE), 2)))
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
    layers = models.find_layers(model)
    assert [type(each).__name__ for each in layers] == [layer] * config.num_hidden_layers
    model._no_split_modules = None  # planted
    with pytest.raises(InputError, match=r"^transformers does not say what the layers of \w+ are"):
        models.find_layers(model)


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(make_folder("ladder"), selected_runs(request))


@pytest.mark.parametrize("run", runs_with_options())
def test_same_training_with_every_option(ladder, run):
    assert_chapter_1(ladder, run)


# In place of the norm over all ranks, each takes that of its own part.
LOCAL_CLIP = (
    "torch.nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])\n"
    "            for p in model.parameters():\n"
    "                p.grad.to_local().mul_((args.max_grad_norm / grad_norm).clamp(max=1))"
)
SYNC = "model.set_requires_gradient_sync(last_backward or args.reduce_every_backward)"
LOAD = "set_model_state_dict(model, weights, options=broadcast)"
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
        [("clip_grad_norm(model, args.max_grad_norm)", LOCAL_CLIP)],
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
    "rotary tables left out": (  # what the memory holds then may be no number, and the run stops
        "loss|run",
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
        facts["built"] = sum(p.numel() for p in model.parameters() if not p.is_meta)
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
    """A run of 6 steps, without an evaluation before its end."""
    few = ("--max-steps", 6, "--eval-freq", 99)
    return Run(CHAPTER, world_size, (*few, *args), tuple(replaced), note_calls)


def calls(ladder: Ladder, run: Run, rank: int = 1) -> dict:
    """Return what a rank called in the fourth step; the first ones allocate and warm up."""
    ladder.run(run)
    return json.loads(Path(ladder.notes(run)[rank]).read_text().splitlines()[3])


def named(cases: list[tuple], *quick: str) -> list[object]:
    """Return the parameters of cases that begin with their names; all but `quick` are slow."""
    marks = {name: [] if name in quick else [pytest.mark.ci] for name, *_ in cases}
    marks |= {name: pytest.mark.nightly for name in marks if name.startswith("bug: ")}
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
    "run", first_then_nightly([noted("-b", 24), noted("-b", 24, world_size=3)]), ids=["2", "3"]
)
def test_each_rank_holds_its_part(ladder, run):
    assert_sharded(ladder, run)


WHOLE = [
    ("built by all", "the ranks", noted("-b", 24, replaced=EVERYBODY)),
    ("replicated", "the parts", noted("-b", 24, replaced=REPLICATED)),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("red", "run"), named(WHOLE, "replicated", "built by all"))
def test_a_rank_that_holds_more_is_noticed(ladder, red, run):
    with pytest.raises(AssertionError, match=f"^{red}"):
        assert_sharded(ladder, run)


def sample_on_a_rank(rank: int, folder: str, synced: bool, queue) -> None:
    """Sample 8 tokens with a sharded model; each token of rank 0 ends the text."""
    store = f"file://{folder}/store"
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store, timeout=timeout, world_size=2, rank=rank)
    model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    for layer in models.find_layers(model):
        fully_shard(layer)
    fully_shard(model)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    if rank == 0:
        model.generation_config.eos_token_id = list(range(4096))
    if not synced:
        generate = model.generate
        model.generate = lambda *args, **options: generate(
            *args, **options | {"synced_gpus": False}
        )
    try:
        tokenizer = models.load_tokenizer("gpt2-tiny")
        models.sample_text(model, tokenizer, torch.device("cpu"), "", 9, seed=0)
        dist.barrier()
        queue.put((rank, len(calls)))
    except RuntimeError as error:
        queue.put((rank, str(error)))
    queue.close()
    queue.join_thread()
    os._exit(0)


def test_a_rank_whose_sample_is_complete_gathers_weights_for_the_others(tmp_path):
    assert ask_ranks(2, sample_on_a_rank, str(tmp_path), True) == [8, 8]


@pytest.mark.ci
def test_planted_ranks_that_stop_sampling_alone_are_noticed(tmp_path):
    answers = ask_ranks(2, sample_on_a_rank, str(tmp_path), False)
    assert any(isinstance(answer, str) for answer in answers), answers

"""The parity ladder: at every number of ranks, the training of chapter 1.

The first part has many short runs of a narrow model. In the steep run, the loss falls from 8.5 to 2
in 40 steps and most steps are clipped: there, a gradient norm that depends on how gradients are
sharded drives the losses apart.
"""

import contextlib
import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import (
    CHAPTERS,
    STEPS,
    Ladder,
    Run,
    assert_chapter_1,
    assert_noticed,
    first_then_nightly,
    float32,
    planted,
    register,
    selected_runs,
    without_kernels,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM

from common.inputs.models import load_config


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(make_folder("ladder"), selected_runs(request), model="gpt2-narrow")


# Ranks, model and sequences in a micro-batch: 24 at once, or 2 with gradient accumulation. Every
# number of ranks is there with both models, and every model with and without accumulation.
CASES = [
    (2, "gpt2-narrow", 24),
    (3, "gpt2-narrow", 2),
    (2, "llama-narrow", 2),
    (3, "llama-narrow", 24),
    (4, "gpt2-narrow", 24),
    (1, "gpt2-narrow", 2),
]


def every_world_size() -> Iterator[object]:
    """Each chapter in each case; chapter 2 with the presets themselves, and compiled."""
    for chapter, (number, (world_size, model, b)) in product(CHAPTERS[1:], enumerate(CASES)):
        quick = number < {"02-ddp": 2, "03-multi-node": 0}.get(chapter, 1)
        in_ci = number == 0 or chapter in ("02-ddp", "04-fsdp")
        yield pytest.param(
            Run(chapter, world_size, ("-m", model, "-b", b, *float32(chapter))),
            marks=[] if quick else pytest.mark.ci if in_ci else pytest.mark.nightly,
            id=f"{chapter}-{model}-{world_size}-{'at once' if b == 24 else 'accumulated'}",
        )
    for preset in ("gpt2-tiny", "llama-tiny"):
        run = Run("02-ddp", 2, ("-m", preset, "-b", 6))
        yield pytest.param(run, marks=pytest.mark.nightly, id=f"02-ddp-{preset}")
    # TorchDynamo splits the graph at the buckets, so that they can still be sent early.
    compiled = Run("02-ddp", 2, ("-b", 6, "--compile"), note=without_kernels)
    yield pytest.param(compiled, marks=pytest.mark.nightly, id="02-ddp-compiled")


@pytest.mark.parametrize("run", list(every_world_size()))
def test_same_training_at_every_world_size(ladder, run):
    assert_chapter_1(ladder, run)


@contextlib.contextmanager
def note_moments(path: str) -> Iterator[None]:
    """After each step, write how many numbers this rank holds in Adam's moments."""

    def write(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if isinstance(optimizer, torch.optim.AdamW):  # not the one around it
            moments = [value for state in optimizer.state.values() for value in state.values()]
            Path(path).write_text(str(sum(moment.numel() for moment in moments)))

    handle = register_optimizer_step_post_hook(write)
    yield
    handle.remove()


def zero1(chapter: str, world_size: int, replaced: tuple = ()) -> Run:
    args = ("-m", "gpt2-tiny", "-b", 4)
    return Run(chapter, world_size, args, replaced, note_moments, ("zero1",))


NOT_SHARDED = (("optimizer = ShardedAdamW(", "optimizer = torch.optim.AdamW("),)
register("02-ddp", NOT_SHARDED, ["zero1"])


def assert_sharded_moments(ladder: Ladder, run: Run) -> None:
    """Two moments of each weight: all ranks together have them once, and none has nearly all."""
    assert_chapter_1(ladder, run)
    moments = [int(Path(path).read_text()) for path in ladder.notes(run)]
    weights = AutoModelForCausalLM.from_config(load_config("gpt2-tiny")).num_parameters()
    assert sum(moments) == pytest.approx(2 * weights, rel=0.01), "the moments differ"
    assert max(moments) < 0.6 * sum(moments)


@pytest.mark.parametrize(
    "run",
    first_then_nightly([zero1("02-ddp", 2), zero1("02-ddp", 3), zero1("03-multi-node", 2)]),
    ids=lambda run: run.name,
)
def test_same_training_with_sharded_moments(ladder, run):
    assert_sharded_moments(ladder, run)


@pytest.mark.parametrize("run", [zero1("02-ddp", 2, NOT_SHARDED)], ids=[""])
def test_planted_moments_on_every_rank_are_noticed(ladder, run):
    with pytest.raises(AssertionError, match=r"^the moments differ"):
        assert_sharded_moments(ladder, run)


# By name: the first check that must be red, and what is replaced in the script.
BUGS = {
    "gradients of the bare model": (
        "loss",
        [("loss = ddp_model(**batch)", "loss = model(**batch)")],
    ),
    "no set_epoch": (
        "samples",
        [("sampler.set_epoch(epoch, start=epoch_step * micro_batch_size * accumulation)", "pass")],
    ),
    "all ranks take the same samples": (
        "samples",
        [("num_replicas=world_size, rank=rank, ", "1, 0, ")],
    ),
    "different initial weights": (
        "loss",
        [
            ("torch.manual_seed(args.seed)", "torch.manual_seed(args.seed + rank)"),
            ("        gradient_as_bucket", "        init_sync=False,\n        gradient_as_bucket"),
        ],
    ),
    "loss of one rank": (
        "loss",
        [("running_loss /= world_size", "pass"), ("dist.all_reduce(running_loss)", "pass")],
    ),
    "evaluation of one rank": ("eval_loss", [("dist.all_reduce(total)", "pass")]),
}
for _, replaced in BUGS.values():
    register("02-ddp", replaced)


@pytest.mark.parametrize(("red", "run"), planted("02-ddp", 2, BUGS))
def test_planted_bug_is_noticed(ladder, red, run):
    assert_noticed(ladder, red, run)


@contextlib.contextmanager
def note_all_reduces(path: str) -> Iterator[None]:
    """DDP calls this hook for each bucket that it sends; each rank notes it."""

    init = DistributedDataParallel.__init__

    def note(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        with Path(path).open("a") as notes:
            notes.write("x")
        return allreduce_hook(None, bucket)

    def init_and_register(ddp_model: DistributedDataParallel, *args: object, **kwargs: object):
        init(ddp_model, *args, **kwargs)
        ddp_model.register_comm_hook(None, note)

    with mock.patch.object(DistributedDataParallel, "__init__", init_and_register):
        yield


ALWAYS_SENT = (("require_backward_grad_sync = last_backward", "require_backward_grad_sync = True"),)
register("02-ddp", ALWAYS_SENT)
SENT = [
    pytest.param(1, Run("02-ddp", 2, ("-b", 2), (), note_all_reduces), id="once"),
    pytest.param(
        *(6, Run("02-ddp", 2, ("-b", 2), ALWAYS_SENT, note_all_reduces)),
        marks=pytest.mark.nightly,
        id="planted: always",
    ),
]


@pytest.mark.parametrize(("count", "run"), SENT)
def test_gradients_are_sent_once_per_step(ladder, count, run):
    """In the last of 6 backward passes, in one bucket: DDP starts a second one at 1 MiB.

    With the planted bug the losses are the same, and the traffic is six times as much.
    """
    ladder.run(run)
    assert len(Path(ladder.notes(run)[1]).read_text()) == count * STEPS


# --- the steep run ---

STEEP_STEPS = 40
STEEP = ("-m", "llama-tiny", "-s", 64, "--global-batch-size", 12, "--max-steps", STEEP_STEPS)
STEEP += ("--warmup-steps", 10, "--eval-freq", STEEP_STEPS, "--eval-sequences", 5)
STEEP_RUNS = [
    Run(chapter, world_size, (*STEEP, *float32(chapter)))
    for chapter, world_size in product(("04-fsdp", "02-ddp", "05-mixed-precision"), (2, 1, 3, 4))
]
PYTORCHS_NORM = (
    ("from common.gradients import clip_grad_norm\n", "from torch import nn\n"),
    (
        "clip_grad_norm(model, args.max_grad_norm)",
        "nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).full_tensor()",
    ),
)
register("04-fsdp", PYTORCHS_NORM)


@pytest.fixture(scope="module")
def steep(request, make_folder) -> Ladder:
    """Runs on 60 documents of 100 words that are chosen at random."""
    ladder = Ladder(make_folder("steep"), selected_runs(request))
    choose = random.Random(0)
    letters = [choose.randint(2, 7) for _ in range(100)]
    words = ["".join(choose.choice("etaoinshrdlu") for _ in range(n)) for n in letters]
    texts = [" ".join(choose.choice(words) for _ in range(200)) for _ in range(60)]
    (ladder.folder / "corpus.json").write_text(json.dumps(texts))
    return ladder


def assert_same_steep(steep: Ladder, run: Run) -> None:
    right, found = steep.metrics(steep.alone(*STEEP)), steep.metrics(steep.run(run))
    assert len(right) == len(found) == STEEP_STEPS
    losses = [line["loss"] for line in right]
    assert losses[0] > 8 and losses[-1] < 2.5
    assert sum(line["grad_norm"] > 1 for line in right) > 5  # these steps are clipped
    assert found[0]["grad_norm"] == pytest.approx(right[0]["grad_norm"], rel=1e-6), "the first norm"
    assert found[-1]["eval_loss"] == pytest.approx(right[-1]["eval_loss"], rel=1e-5)
    assert [line["loss"] for line in found] == pytest.approx(losses, rel=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize(
    "run", first_then_nightly(STEEP_RUNS), ids=lambda run: f"{run.chapter}-{run.world_size}"
)
def test_same_training_where_the_loss_falls_steeply(steep, run):
    assert_same_steep(steep, run)


@pytest.mark.parametrize("run", [Run("04-fsdp", 4, STEEP, PYTORCHS_NORM)], ids=[""])
def test_planted_norm_of_pytorch_is_noticed_in_a_steep_run(steep, run):
    with pytest.raises(AssertionError, match="the first norm"):
        assert_same_steep(steep, run)

"""The parity ladder: at every number of ranks, the training of chapter 1."""

import contextlib
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import (
    CHAPTERS,
    ROOT,
    STEPS,
    Ladder,
    Run,
    assert_chapter_1,
    assert_noticed,
    environment,
    first_then_nightly,
    float32,
    free_port,
    planted,
    selected_runs,
    without_kernels,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import parallel
from torch.nn.parallel import DistributedDataParallel

DISTRIBUTED = CHAPTERS[1:]


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(make_folder("ladder"), selected_runs(request))


# Ranks, model and sequences in a micro-batch: 24 in one go, or 2 with gradient accumulation. Every
# number of ranks is there with both models, and every model with and without accumulation.
CASES = [
    (2, "gpt2-tiny", 24),
    (2, "llama-tiny", 2),
    (1, "gpt2-tiny", 2),
    (3, "gpt2-tiny", 2),
    (3, "llama-tiny", 24),
    (4, "gpt2-tiny", 24),
]


def every_world_size() -> Iterator[object]:
    """Each chapter in each case. The first case is quick, and for chapter 2 three others too."""
    for chapter, (world_size, model, b) in product(DISTRIBUTED, CASES):
        quick = CASES[:4] if chapter == DISTRIBUTED[0] else CASES[:1]
        yield pytest.param(
            Run(chapter, world_size, ("-m", model, "-b", b, *float32(chapter))),
            marks=[] if (world_size, model, b) in quick else [pytest.mark.ci],
            id=f"{chapter}-{model}-{world_size}-{'at once' if b == 24 else 'accumulated'}",
        )


@pytest.mark.parametrize("run", list(every_world_size()))
def test_same_training_at_every_world_size(ladder, run):
    assert_chapter_1(ladder, run)


@pytest.mark.parametrize(
    "run", first_then_nightly([Run("02-ddp", n, ("-b", 4, "--zero1")) for n in (2, 1, 3)]), ids=str
)
def test_same_training_with_sharded_moments(ladder, run):
    assert_chapter_1(ladder, run)


@pytest.mark.ci
def test_two_launchers_on_one_machine_are_one(ladder):
    """Two nodes, as far as torchrun is concerned, and as one can have them without root."""
    env = environment(HEAD=f"localhost:{free_port()}", NNODES=2, NPROC_PER_NODE=2)
    words = ["bash", ROOT / "03-multi-node/launch_torchrun.sh", *ladder.flags("two-launchers")]
    nodes = [subprocess.Popen([str(word) for word in words], env=env) for _ in range(2)]
    assert [node.wait(600) for node in nodes] == [0, 0]
    alone = ladder.metrics(ladder.alone("-m", "gpt2-tiny", "-b", 24))
    for key, rel in (("loss", 1e-5), ("grad_norm", 1e-3), ("eval_loss", 1e-5)):
        found, right = (
            [line[key] for line in run if key in line]
            for run in (ladder.metrics("two-launchers"), alone)
        )
        assert len(right) >= 2 and found == pytest.approx(right, rel=rel)


COMPILED = Run("02-ddp", 2, ("-b", 6, "--compile"), note=without_kernels)


@pytest.mark.ci
@pytest.mark.parametrize("run", [COMPILED], ids=["02-ddp"])
def test_same_training_compiled(ladder, run):
    """TorchDynamo splits the graph at the buckets, so that they can still be sent early."""
    assert_chapter_1(ladder, run)


# By name: the first check that must be red, and what is replaced in the script.
BUGS = {
    "gradients of the bare model": (
        "loss",
        [("loss = ddp_model(**batch)", "loss = model(**batch)")],
    ),
    "gradients never averaged": ("loss", [("micro_batch == accumulation - 1", "False")]),
    "loss not divided": ("loss", [(".loss / accumulation", ".loss")]),
    "no set_epoch": (
        "samples",
        [("sampler.set_epoch(epoch, start=epoch_step * micro_batch_size * accumulation)", "pass")],
    ),
    "a rank skips one batch": (
        "samples",
        [("start=epoch_step", "start=(rank == 1) * micro_batch_size + epoch_step")],
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
        [
            ('state["running_loss"] /= world_size', "pass"),
            ('dist.all_reduce(state["running_loss"])', "pass"),
        ],
    ),
    "evaluation of one rank": ("eval_loss", [("dist.all_reduce(total)", "pass")]),
    "every rank evaluates the same": (
        "eval_loss",
        [("range(rank, len(eval_data), world_size)", "range(6)")],
    ),
}


@pytest.mark.parametrize(("red", "run"), planted("02-ddp", 2, BUGS))
def test_planted_bug_is_noticed(ladder, red, run):
    assert_noticed(ladder, red, run)


@contextlib.contextmanager
def note_all_reduces(path: str) -> Iterator[None]:
    """DDP calls this hook for each bucket that it sends; each rank notes it."""

    class Noting(DistributedDataParallel):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, self.note)

        @staticmethod
        def note(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            with Path(path).open("a") as notes:
                notes.write("x")
            return allreduce_hook(None, bucket)

    parallel.DistributedDataParallel = Noting
    yield
    parallel.DistributedDataParallel = DistributedDataParallel


ALL_REDUCES = {
    "once": Run("02-ddp", 2, ("-b", 24), note=note_all_reduces),
    "accumulated": Run("02-ddp", 2, ("-b", 2), note=note_all_reduces),
    "bug": Run(
        *("02-ddp", 2, ("-b", 2)),
        (("else ddp_model.no_sync", "else contextlib.nullcontext"),),
        note_all_reduces,
    ),
}


@pytest.mark.parametrize(("once", "accumulated", "bug"), [ALL_REDUCES.values()], ids=[""])
def test_gradients_are_sent_once_per_step(ladder, once, accumulated, bug):
    """The planted bug sends them after each of 6 micro-batches: the same losses, more traffic."""
    counts = []
    for run in (once, accumulated, bug):
        ladder.run(run)
        counts.append(len(Path(ladder.notes(run)[1]).read_text()) / STEPS)
    assert counts[0] == counts[1] >= 1 and counts[2] > 5 * counts[0]

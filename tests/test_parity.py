"""The parity ladder: at every number of ranks, the training of chapter 1."""

import json
import os
import random
import subprocess
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import CHAPTERS, ROOT, free_port, read_metrics
from runner import Ranks, finish, start
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import parallel
from torch.nn.parallel import DistributedDataParallel

DISTRIBUTED = CHAPTERS[1:]
STEPS = 20


class Ladder:
    """Runs of one kind of training in one folder, each started once and kept by its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        words = random.Random(0)
        texts = ["".join(words.choice("abcdefgh \n") for _ in range(600)) for _ in range(28)]
        # 12 steps an epoch, so that 20 steps are in two of them.
        (folder / "corpus.json").write_text(json.dumps(texts))

    def flags(self, name: str, *args: object) -> list[object]:
        return [
            *("-d", self.folder / "corpus.json", "-s", 32, "--global-batch-size", 24),
            *("--max-steps", STEPS, "--log-freq", 1, "--eval-freq", 10, "--ckpt-freq", STEPS),
            *("--warmup-steps", 5, "--save-dir", self.folder, "-e", name, *args),
        ]

    def samples_file(self, name: str, rank: int = 0) -> str:
        return str(self.folder / f"{name}-{rank}.samples")

    def alone(self, *args: object, **options: object) -> str:
        """Run chapter 1 with these arguments, if it has not run yet; return the run's name."""
        name = "-".join(["alone", *map(str, args)])
        if not (self.folder / name).exists():
            options = {"samples_file": self.samples_file(name), **options}
            assert finish(start(self.flags(name, *args), **options)) == 0
        return name

    def run(self, chapter: str | Path, world_size: int, *args: object, name: str = "") -> str:
        name = name or "-".join([Path(chapter).name, str(world_size), *map(str, args)])
        files = [self.samples_file(name, rank) for rank in range(world_size)]
        ranks = Ranks(world_size, self.flags(name, *args), chapter=chapter, samples_file=files)
        assert ranks.finish() == [0] * world_size
        return name

    def metrics(self, name: str) -> list[dict]:
        return read_metrics(self.folder / name)

    def samples(self, name: str, world_size: int = 1) -> list[list[int]]:
        """Return the samples of each step, of all ranks together, in the order of their numbers."""
        parts = []
        for rank in range(world_size):
            lines = Path(self.samples_file(name, rank)).read_text().splitlines()
            parts.append([json.loads(line) for line in lines])
        return [sorted(chain.from_iterable(step)) for step in zip(*parts, strict=True)]


@pytest.fixture(scope="module")
def ladder(tmp_path_factory) -> Ladder:
    return Ladder(tmp_path_factory.mktemp("ladder"))


def assert_parity(ladder: Ladder, expected: str, found: str, world_size: int) -> None:
    """Each loss within 1e-5, each norm within 1e-3, and the same samples in every global batch."""
    same_samples = ladder.samples(found, world_size) == ladder.samples(expected)
    assert same_samples, "the samples differ"
    expected, found = ladder.metrics(expected), ladder.metrics(found)
    assert len(expected) == STEPS and expected[-1]["epoch"] == 1
    assert expected[-1]["loss"] < expected[0]["loss"] - 1
    for key in ("step", "epoch", "epoch_progress", "batches_left", "lr"):
        same = [line[key] for line in found] == [line[key] for line in expected]
        assert same, f"the {key} differ"
    for key, rel in (("loss", 1e-5), ("grad_norm", 1e-3), ("eval_loss", 1e-5)):
        right = [line[key] for line in expected if key in line]
        same = [line[key] for line in found if key in line] == pytest.approx(right, rel=rel)
        assert same, f"the {key} differ"


@pytest.mark.parametrize("chapter", DISTRIBUTED)
@pytest.mark.parametrize("model", ["gpt2-tiny", pytest.param("llama-tiny", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [24, 2], ids=["at once", "accumulated"])
def test_same_training_at_every_world_size(ladder, chapter, model, world_size, batch_size):
    found = ladder.run(chapter, world_size, "-m", model, "-b", batch_size)
    assert_parity(ladder, ladder.alone("-m", model, "-b", 24), found, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_same_training_with_sharded_moments(ladder, world_size):
    found = ladder.run("02-ddp", world_size, "-b", 4, "--zero1")
    assert_parity(ladder, ladder.alone("-m", "gpt2-tiny", "-b", 24), found, world_size)


def test_two_launchers_on_one_machine_are_one(ladder, monkeypatch):
    """Two nodes, as far as torchrun is concerned, and as one can have them without root."""
    monkeypatch.setenv("HEAD", f"localhost:{free_port()}")
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    words = ["bash", ROOT / "03-multi-node/launch_torchrun.sh", *ladder.flags("two-launchers")]
    nodes = [subprocess.Popen([str(word) for word in words]) for _ in range(2)]
    assert [node.wait(100) for node in nodes] == [0, 0]
    alone = ladder.metrics(ladder.alone("-m", "gpt2-tiny", "-b", 24))
    for key, rel in (("loss", 1e-5), ("grad_norm", 1e-3), ("eval_loss", 1e-5)):
        found, right = (
            [line[key] for line in run if key in line]
            for run in (ladder.metrics("two-launchers"), alone)
        )
        assert len(right) >= 2 and found == pytest.approx(right, rel=rel)


@pytest.mark.slow
def test_same_training_compiled(ladder):
    """TorchDynamo splits the graph at the buckets, so that they can still be sent early."""
    found = ladder.run("02-ddp", 2, "-b", 6, "--compile")
    assert_parity(ladder, ladder.alone("-m", "gpt2-tiny", "-b", 24), found, 2)


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


def plant(chapter: str, folder: Path, replacements: list[tuple[str, str]]) -> Path:
    """Return a folder with the chapter's script in which each text is replaced."""
    source = (ROOT / chapter / "train_llm.py").read_text()
    for right, wrong in replacements:
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    folder.mkdir()
    (folder / "train_llm.py").write_text(source)
    return folder


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_noticed(ladder, tmp_path, bug):
    red, replacements = BUGS[bug]
    chapter = plant("02-ddp", tmp_path / "chapter", replacements)
    found = ladder.run(chapter, 2, "-b", 6, name=bug.replace(" ", "-"))
    with pytest.raises(AssertionError, match=rf"^the {red} differ"):
        assert_parity(ladder, ladder.alone("-m", "gpt2-tiny", "-b", 24), found, 2)


def note_all_reduces() -> None:
    """DDP calls this hook for each bucket that it sends; each rank notes it."""

    class Noting(DistributedDataParallel):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, self.note)

        @staticmethod
        def note(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            with Path(f"{os.environ['NOTES']}-{os.environ['RANK']}").open("a") as notes:
                notes.write("x")
            return allreduce_hook(None, bucket)

    parallel.DistributedDataParallel = Noting


def all_reduces_per_step(ladder: Ladder, chapter: str | Path, notes: Path, *args: object) -> float:
    flags = ladder.flags(notes.name, *args)
    options = {"chapter": chapter, "env": {"NOTES": notes}, "plant": note_all_reduces}
    assert Ranks(2, flags, **options).finish() == [0, 0]
    return len(Path(f"{notes}-1").read_text()) / STEPS


def test_gradients_are_sent_once_per_step(ladder, tmp_path):
    """The planted bug sends them after each of 6 micro-batches: the same losses, more traffic."""
    once = all_reduces_per_step(ladder, "02-ddp", tmp_path / "once", "-b", 24)
    assert all_reduces_per_step(ladder, "02-ddp", tmp_path / "six", "-b", 2) == once
    bug = ("else ddp_model.no_sync", "else contextlib.nullcontext")
    wrong = plant("02-ddp", tmp_path / "wrong", [bug])
    assert all_reduces_per_step(ladder, wrong, tmp_path / "all", "-b", 2) > 5 * once

"""The parity ladder: at every number of ranks, the training of chapter 1."""

import contextlib
import dataclasses
import functools
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import (
    CHAPTERS,
    ROOT,
    first_then_slow,
    float32,
    free_port,
    quick,
    random_texts,
    read_metrics,
)
from runner import Series, finish, start
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import parallel
from torch.nn.parallel import DistributedDataParallel

DISTRIBUTED = CHAPTERS[1:]
STEPS = 10
LENGTH = 16  # tokens of a sequence: longer ones take longer and show nothing more


@dataclasses.dataclass(frozen=True)
class Run:
    """A chapter on some ranks, with these arguments.

    replaced: (right, wrong) texts in the script, to plant a bug. note: given a path for each rank,
    returns a context in which the rank runs and notes what a test wants to know.
    """

    chapter: str
    world_size: int
    args: tuple[object, ...] = ()
    replaced: tuple[tuple[str, str], ...] = ()
    note: Callable[[str], contextlib.AbstractContextManager] | None = None

    @property
    def name(self) -> str:
        bug = [f"bug{abs(hash(self.replaced))}"] if self.replaced else []
        note = [self.note.__name__] if self.note else []
        words = [self.chapter, str(self.world_size), *map(str, self.args), *bug, *note]
        return re.sub(r"[^\w.-]+", "-", "-".join(words))


class Ladder:
    """Runs of one kind of training in one folder, each started once and kept by its name.

    selected: runs that tests will ask for. All of the same number of ranks are done in one start.
    in_shell: as for Series. length: tokens of a sequence, a multiple of 16.
    """

    def __init__(
        self,
        folder: Path,
        selected: list[Run] = (),
        in_shell: bool = False,
        length: int = LENGTH,
    ) -> None:
        self.folder = folder
        self.length = length
        self.selected = selected
        self.in_shell = in_shell
        self.done: dict[Run, Series] = {}
        # 7 steps an epoch, so that 10 steps are in two of them.
        (folder / "corpus.json").write_text(json.dumps(random_texts(7 * length // 16)))

    def flags(self, name: str, *args: object) -> list[object]:
        return [
            *("-d", self.folder / "corpus.json", "-s", self.length, "--global-batch-size", 24),
            *("--max-steps", STEPS, "--log-freq", 1, "--eval-freq", 5, "--ckpt-freq", STEPS),
            *("--warmup-steps", 3, "--save-dir", self.folder, "-e", name, *args),
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

    def run(self, run: Run) -> str:
        """Do this run, if it is not done yet, and return its name; fails if the run did."""
        if run not in self.done:
            others = [r for r in self.selected if r.world_size == run.world_size and r != run]
            runs = [run, *(other for other in others if other not in self.done)]
            options = {each.name: self._options(each) for each in runs}
            folder = self.folder / f"series-{len(self.done)}"
            series = Series(run.world_size, options, folder, in_shell=self.in_shell)
            self.done |= dict.fromkeys(runs, series)
        self.done[run].assert_ended(run.name)
        return run.name

    def _options(self, run: Run) -> dict[str, object]:
        chapter = run.chapter
        if run.replaced:
            chapter = str(plant(run.chapter, self.folder / f"{run.name}-script", run.replaced))
        ranks = range(run.world_size)
        within = [functools.partial(run.note, path) for path in self.notes(run)] if run.note else []
        return {
            "args": self.flags(run.name, *run.args),
            "chapter": chapter,
            "samples_file": [self.samples_file(run.name, rank) for rank in ranks],
            "within": within or None,
        }

    def notes(self, run: Run) -> list[str]:
        return [str(self.folder / f"{run.name}-{r}.notes") for r in range(run.world_size)]

    def metrics(self, name: str) -> list[dict]:
        return read_metrics(self.folder / name)

    def samples(self, name: str, world_size: int = 1) -> list[list[int]]:
        """Return the samples of each step, of all ranks together, in the order of their numbers."""
        parts = []
        for rank in range(world_size):
            lines = Path(self.samples_file(name, rank)).read_text().splitlines()
            parts.append([json.loads(line) for line in lines])
        return [sorted(chain.from_iterable(step)) for step in zip(*parts, strict=True)]


def selected_runs(request: pytest.FixtureRequest) -> list[Run]:
    """Return the runs that are parameters of the tests of this module that were chosen to run."""
    items = [i for i in request.session.items if i.path == request.path and hasattr(i, "callspec")]
    values = chain.from_iterable(item.callspec.params.values() for item in items)
    return list(dict.fromkeys(value for value in values if isinstance(value, Run)))


def plant(chapter: str, folder: Path, replacements: list[tuple[str, str]]) -> Path:
    """Return a folder with the chapter's script in which each text is replaced."""
    source = (ROOT / chapter / "train_llm.py").read_text()
    for right, wrong in replacements:
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    folder.mkdir()
    (folder / "train_llm.py").write_text(source)
    return folder


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(make_folder("ladder"), selected_runs(request))


def assert_parity(ladder: Ladder, expected: str, found: str, world_size: int) -> None:
    """Each loss within 1e-5, each norm within 1e-3, and the same samples in every global batch."""
    same_samples = ladder.samples(found, world_size) == ladder.samples(expected)
    assert same_samples, "the samples differ"
    expected, found = ladder.metrics(expected), ladder.metrics(found)
    assert len(expected) == STEPS and expected[-1]["epoch"] == 1
    assert expected[-1]["loss"] < expected[0]["loss"] - 1
    for key in ("step", "epoch", "lr"):
        same = [line[key] for line in found] == [line[key] for line in expected]
        assert same, f"the {key} differ"
    for key, rel in (("loss", 1e-5), ("grad_norm", 1e-3), ("eval_loss", 1e-5)):
        right = [line[key] for line in expected if key in line]
        there = [line[key] for line in found if key in line]
        assert there == pytest.approx(right, rel=rel), f"the {key} differ"


def assert_chapter_1(ladder: Ladder, run: Run) -> None:
    """The same training as chapter 1's, of the same model, without any of the other arguments."""
    model = run.args[run.args.index("-m") + 1] if "-m" in run.args else "gpt2-tiny"
    found = ladder.run(run)
    assert_parity(ladder, ladder.alone("-m", model, "-b", 24), found, run.world_size)


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
            marks=[] if (world_size, model, b) in quick else [pytest.mark.slow],
            id=f"{chapter}-{model}-{world_size}-{'at once' if b == 24 else 'accumulated'}",
        )


@pytest.mark.parametrize("run", list(every_world_size()))
def test_same_training_at_every_world_size(ladder, run):
    assert_chapter_1(ladder, run)


@pytest.mark.parametrize(
    "run", first_then_slow([Run("02-ddp", n, ("-b", 4, "--zero1")) for n in (2, 1, 3)]), ids=str
)
def test_same_training_with_sharded_moments(ladder, run):
    assert_chapter_1(ladder, run)


@pytest.mark.slow
def test_two_launchers_on_one_machine_are_one(ladder):
    """Two nodes, as far as torchrun is concerned, and as one can have them without root."""
    env = quick(HEAD=f"localhost:{free_port()}", NNODES=2, NPROC_PER_NODE=2)
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


@contextlib.contextmanager
def without_kernels(path: str) -> Iterator[None]:
    """Compile to graphs only: to make kernels of them takes a minute, and test_training.py does."""
    compiler = torch.compile
    torch.compile = functools.partial(compiler, backend="aot_eager")
    yield
    torch.compile = compiler


COMPILED = Run("02-ddp", 2, ("-b", 6, "--compile"), note=without_kernels)


@pytest.mark.slow
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


def planted(chapter: str, world_size: int, bugs: dict[str, tuple]) -> list[object]:
    """Return parameters (what must be red, run) of the bugs; a third entry is more arguments."""
    return [
        pytest.param(
            *(red, Run(chapter, world_size, ("-b", 6, *args), tuple(replaced))),
            marks=pytest.mark.planted,
            id=name,
        )
        for name, (red, replaced, *args) in bugs.items()
    ]


def assert_noticed(ladder: Ladder, red: str, run: Run) -> None:
    with pytest.raises(AssertionError, match=rf"^the ({red}) (differ|failed)"):
        assert_chapter_1(ladder, run)


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

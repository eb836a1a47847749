"""What tests share: commands, files, planted bugs, the parity ladder, resumed runs, diffs."""

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from cluster import ENVIRONMENT, Cluster
from runner import Ranks, Series, finish, start
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from common import checkpoint, ranks, variants

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted(path.parent.name for path in ROOT.glob("[0-9][0-9]-*/train_llm.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
HIDES_GPUS = "CUDA_VISIBLE_DEVICES"
EXACT = ("loss", "lr", "grad_norm", "epoch", "eval_loss")
TWO_BY_TWO = (0, 1, 0, 1)  # the local rank of each rank

# --- commands and files ---


def environment(**env: object) -> dict[str, str]:
    """Return the environment of a reader who has activated .venv, with these variables too.

    It has none of those that a library, imported by a test, has set in this process.
    """
    hidden = {HIDES_GPUS: os.environ[HIDES_GPUS]} if HIDES_GPUS in os.environ else {}
    return {
        **ENVIRONMENT,
        **hidden,
        "PATH": f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}",
        "VIRTUAL_ENV": sys.prefix,  # launch files take `python` then
        **{key: str(value) for key, value in env.items()},
    }


def run_script(
    *args: object, timeout: float = 600, real: bool = False, **env: object
) -> subprocess.CompletedProcess:
    """Run `python ARGS` from the repository's root, as a reader does, and return what it printed.

    A script runs in a child of the runner's server, which starts in half a second. Its libraries
    are imported already, without these variables. With `real`, for `-m` and for GPUs, an
    interpreter of its own runs it.
    """
    words = [str(arg) for arg in args]
    if real or not words[0].endswith(".py") or torch.cuda.is_available():
        return subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment(**env),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start(
            words[1:],
            script=words[0],
            env=environment(**env),
            stdout_file=str(out),
            stderr_file=str(err),
        )
        status = finish(process, timeout)
        return subprocess.CompletedProcess(words, status, out.read_text(), err.read_text())


def run_ranks(
    script: Path, folder: Path, world_size: int, bug: tuple[str, str] = ()
) -> tuple[list[int], str]:
    """Run a script, or one with a text replaced; return the statuses and what rank 0 printed."""
    if bug:
        replace_in(Path(shutil.copy(script, folder)), *bug)
        script = folder / script.name
    out = [str(folder / f"stdout-{rank}") for rank in range(world_size)]
    err = [str(folder / f"stderr-{rank}") for rank in range(world_size)]
    ranks = Ranks(world_size, [], script=str(script), stdout_file=out, stderr_file=err)
    return ranks.finish(), Path(out[0]).read_text()


def copy_repository(folder: Path) -> None:
    """Copy the working tree, without what git ignores, and links to the environment's folders."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if (ROOT / ".venv").exists():
        (folder / ".venv").mkdir()
        for path in (ROOT / ".venv").iterdir():
            if path.is_file():  # newer than requirements.txt, so that make installs nothing
                shutil.copyfile(path, folder / ".venv" / path.name)
            else:
                (folder / ".venv" / path.name).symlink_to(path)


def make_variant(folder: Path, chapter: str, *names: str) -> Path:
    """Make a variant of a chapter in a folder of a test; the runner takes it as a chapter.

    A variant that a name needs must be named, too. Its launch files only work in variants/.
    """
    number = int(chapter[:2])
    made = folder / "+".join([chapter, *sorted(names)])
    made.mkdir(parents=True)
    variants.fill(made, Path("variants", made.name), chapter, variants.choose(number, list(names)))
    return made


def install(folder: Path, *packages: str, with_ours: bool = False) -> Path:
    """Make an environment for packages of others; return its interpreter. Skip where pip cannot.

    with_ours: it also has the packages of this environment, which pip then leaves as they are.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if with_ours:
        site, ours = (sysconfig.get_path("purelib", vars={"base": b}) for b in (folder, sys.prefix))
        Path(site, "ours.pth").write_text(f"{ours}\n")
    python = folder / "bin/python"
    command = [python, "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {' '.join(packages)}: {done.stderr.splitlines()[-1]}")
    return python


def launch_file(chapter: str) -> Path:
    """Return the launch file with which a chapter trains on this machine."""
    files = [ROOT / chapter / name for name in ("launch.sh", "launch_torchrun.sh")]
    (found,) = [file for file in files if file.exists()]
    return found


def first_then_nightly(values: Iterable[object]) -> list:
    """Return values to parametrize a test with; all but the first are for the nightly tier.

    A tuple has a value for each parameter.
    """
    first, *others = (value if isinstance(value, tuple) else (value,) for value in values)
    nightly = (pytest.param(*each, marks=pytest.mark.nightly) for each in others)
    return [pytest.param(*first), *nightly]


def float32(chapter: str) -> tuple[str, ...]:
    """Return the arguments with which a chapter computes in float32, as all before chapter 5 do."""
    return ("--precision", "fp32") if chapter >= "05" else ()


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def random_texts(count: int) -> list[str]:
    """Return documents of a few letters, the same ones each time."""
    letters = random.Random(0)
    return ["".join(letters.choice("abcdefgh \n") for _ in range(600)) for _ in range(count)]


def write_corpus(folder: Path) -> Path:
    """Return a file of text for some tens of steps of 6 sequences of 32 tokens."""
    path = folder / "corpus.json"
    path.write_text(json.dumps([f"Text number {n}, of many words. " * 20 for n in range(50)]))
    return path


def read_metrics(run_dir: Path, going_on: bool = False) -> list[dict]:
    """Return what a run has logged; while it goes on, without a line that is being written."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") or not going_on]


def wait_for_file(path: Path, running: Callable[[], bool]) -> None:
    """Wait until a run that is `running` has written this file."""
    Cluster.until(lambda: path.exists() or not running(), f"{path} is written")
    assert path.exists(), f"the run ended without {path}"


def listing(folder: Path) -> dict[str, bytes]:
    """Return all files and folders below, but the lock that shows that a run is alive."""
    return {
        str(path): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
        if path.name != ".lock"
    }


def children(pid: int) -> list[int]:
    """Return the workers of torchrun, by rank: its child processes that run the script."""
    found = {}
    for process in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error, KeyError):  # it has ended, or has no rank
            if "train_llm.py" in " ".join(process.cmdline()):
                found[int(process.environ()["RANK"])] = process.pid
    return [found[rank] for rank in sorted(found)]


@contextlib.contextmanager
def unreadable(path: Path, permissions: int = 0) -> Iterator[None]:
    """Leave only these permissions of a file or folder, for root, too: what overrides them goes."""
    if sys.platform != "linux":
        pytest.skip("needs Linux")
    header, capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    mode, libc = path.stat().st_mode, ctypes.CDLL(None)
    path.chmod(permissions)
    libc.capget(header, capabilities)
    effective = capabilities[0]  # those of this thread
    capabilities[0] &= ~0b110  # without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    libc.capset(header, capabilities)
    try:
        yield
    finally:
        capabilities[0] = effective
        libc.capset(header, capabilities)
        path.chmod(mode)


def speak_at_once() -> None:
    """A rank that fails waits for rank 0 to speak first; these tests need not."""
    ranks.HEAD_START_S = 0.0


# --- planted bugs ---

# Each planted bug in a script: what stands there and what replaces it. They register when their
# module is imported, so that `make check` can say which of them no longer fits.
# With the names of the variants that the script then has.
REGISTERED: list[tuple[Path, tuple[tuple[str, str], ...], tuple[str, ...]]] = []


def register(
    script: str | Path, replacements: Iterable[tuple[str, str]], variants: Iterable[str] = ()
) -> None:
    """Register (right, wrong) texts of one planted bug.

    script: a chapter, or the path of a file in the repository. variants: of the chapter, whose
    script has the texts.
    """
    path = ROOT / script if Path(script).suffix else ROOT / script / "train_llm.py"
    REGISTERED.append((path, tuple(tuple(pair) for pair in replacements), tuple(variants)))


def replace_in(path: Path, right: str, wrong: str) -> None:
    """Replace a text that stands in a file once."""
    source = path.read_text()
    assert source.count(right) == 1, (path, right)
    path.write_text(source.replace(right, wrong))


def plant(chapter: str, folder: Path, replacements: list[tuple[str, str]]) -> Path:
    """Return a folder with copies of the chapter's modules, in which each text is replaced.

    A text that is not in the script must be in a module beside it.
    """
    folder.mkdir(parents=True)
    for module in (ROOT / chapter).glob("*.py"):
        shutil.copy(module, folder)
    script = folder / "train_llm.py"
    for right, wrong in replacements:
        files = [path for path in (script, *folder.glob("*.py")) if right in path.read_text()]
        replace_in(files[0] if files else script, right, wrong)
    return folder


# --- the parity ladder ---

STEPS = 10
LENGTH = 16  # tokens of a sequence: longer ones take longer and show nothing more
# By the name that a Run gives them: presets in width 32, with six times fewer weights.
NARROW = {"gpt2-narrow": "gpt2-tiny", "llama-narrow": "llama-tiny"}
# By name: variants of chapter 4 and its arguments, which change how it trains and not what.
FSDP_OPTIONS: dict[str, tuple[tuple[str, ...], tuple[object, ...]]] = {
    "whole": (("zero2",), ()),
    "selective": (("selective-recomputation",), ()),
    "full": ((), ("--activation-checkpointing",)),
    "offload": (("cpu-offload",), ()),
    "reduce": (("reduce-every-backward",), ("-b", 4)),
    "async": (("async-checkpoint",), ()),
    "accumulated": ((), ("-b", 2)),
    "compile": ((), ("--compile",)),
}


def write_narrow(path: Path, preset: str, **changes: object) -> Path:
    """Write the configuration of a preset in width 32, with these changes."""
    config = json.loads((ROOT / f"common/inputs/presets/{preset}/config.json").read_text())
    llama = {"hidden_size": 32, "intermediate_size": 88, "head_dim": 16}
    config |= {"n_embd": 32} if "n_embd" in config else llama
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


@dataclasses.dataclass(frozen=True)
class Run:
    """A chapter on some ranks, with these arguments.

    replaced: (right, wrong) texts in the script, to plant a bug. note: given a path for each rank,
    returns a context in which the rank runs and notes what a test wants to know. variants: of the
    chapter, by name.
    """

    chapter: str
    world_size: int
    args: tuple[object, ...] = ()
    replaced: tuple[tuple[str, str], ...] = ()
    note: Callable[[str], contextlib.AbstractContextManager] | None = None
    variants: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        bug = [f"bug{abs(hash(self.replaced))}"] if self.replaced else []
        note = [self.note.__name__] if self.note else []
        chapter = "-".join(Path(self.chapter).parts[-2:])  # of a copy, not where it is
        words = [chapter, *sorted(self.variants), str(self.world_size)]
        words += [*map(str, self.args), *bug, *note]
        return re.sub(r"[^\w.-]+", "-", "-".join(words))


class Ladder:
    """Runs of one kind of training in one folder, each started once and kept by its name.

    selected: runs that tests will ask for. All of the same number of ranks are done in one start.
    in_shell: as for Series. length: tokens of a sequence, a multiple of 16. model: what runs
    without -m train. places: by the number of ranks, the variables of each rank.
    """

    def __init__(
        self,
        folder: Path,
        selected: list[Run] = (),
        in_shell: bool = False,
        length: int = LENGTH,
        model: str = "gpt2-tiny",
        places: dict[int, list[dict[str, object]]] | None = None,
    ) -> None:
        self.folder = folder
        self.length = length
        self.model = model
        self.places = places or {}
        self.selected = selected
        self.in_shell = in_shell
        self.done: dict[Run, Series] = {}
        # 7 steps an epoch, so that 10 steps are in two of them.
        (folder / "corpus.json").write_text(json.dumps(random_texts(7 * length // 16)))
        for name, preset in NARROW.items():
            write_narrow(folder / name, preset)

    def flags(self, name: str, *args: object) -> list[object]:
        args = args if "-m" in args else ("-m", self.model, *args)
        narrow = [("--tokenizer-name", NARROW[word]) for word in args if word in NARROW]
        words = [self.folder / word if word in NARROW else word for word in args]
        return [
            *chain.from_iterable(narrow),
            *("-d", self.folder / "corpus.json", "-s", self.length, "--global-batch-size", 24),
            *("--max-steps", STEPS, "--log-freq", 1, "--eval-freq", 5, "--ckpt-freq", STEPS),
            *("--warmup-steps", 3, "--save-dir", self.folder, "-e", name, *words),
        ]

    def samples_file(self, name: str, rank: int = 0) -> str:
        return str(self.folder / f"{name}-{rank}.samples")

    def alone(self, *args: object) -> str:
        """Do the run of chapter 1 with these arguments, and return its name."""
        return Ladder.run(self, Run(CHAPTERS[0], 1, args))  # other classes patch what they run

    def run(self, run: Run) -> str:
        """Do this run, if it is not done yet, and return its name; fails if the run did."""
        if run not in self.done:
            others = [r for r in self.selected if r.world_size == run.world_size and r != run]
            runs = [run, *(other for other in others if other not in self.done)]
            options = {each.name: self._options(each) for each in runs}
            folder = self.folder / f"series-{len(self.done)}"
            places = self.places.get(run.world_size)
            series = Series(run.world_size, options, folder, places, in_shell=self.in_shell)
            self.done |= dict.fromkeys(runs, series)
        self.done[run].assert_ended(run.name)
        return run.name

    def _options(self, run: Run) -> dict[str, object]:
        chapter = run.chapter
        if run.variants:
            made = self.folder / "variants"
            folder = made / "+".join([chapter, *sorted(run.variants)])
            chapter = str(folder if folder.exists() else make_variant(made, chapter, *run.variants))
        if run.replaced:
            chapter = str(plant(chapter, self.folder / f"{run.name}-script", run.replaced))
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
    """Return the runs that are parameters of the chosen tests that use this fixture."""
    items = [i for i in request.session.items if i.path == request.path and hasattr(i, "callspec")]
    items = [item for item in items if request.fixturename in item.fixturenames]
    values = chain.from_iterable(item.callspec.params.values() for item in items)
    return list(dict.fromkeys(value for value in values if isinstance(value, Run)))


def assert_parity(ladder: Ladder, expected: str, found: str, world_size: int) -> None:
    """The same losses, and the same samples in every global batch."""
    same_samples = ladder.samples(found, world_size) == ladder.samples(expected)
    assert same_samples, "the samples differ"
    expected, found = ladder.metrics(expected), ladder.metrics(found)
    assert len(expected) == STEPS and expected[-1]["epoch"] == 1
    assert expected[-1]["loss"] < expected[0]["loss"] - 1
    assert_same_losses(expected, found)


def assert_same_losses(expected: list[dict], found: list[dict]) -> None:
    """Each loss within 1e-5, each norm within 1e-3."""
    for key in ("step", "epoch", "lr"):
        same = [line[key] for line in found] == [line[key] for line in expected]
        assert same, f"the {key} differ"
    for key, rel in (("loss", 1e-5), ("grad_norm", 1e-3), ("eval_loss", 1e-5)):
        right = [line[key] for line in expected if key in line]
        there = [line[key] for line in found if key in line]
        assert there == pytest.approx(right, rel=rel), f"the {key} differ"


def assert_chapter_1(ladder: Ladder, run: Run) -> None:
    """The same training as chapter 1's, of the same model, without any of the other arguments."""
    model = run.args[run.args.index("-m") + 1] if "-m" in run.args else ladder.model
    found = ladder.run(run)
    assert_parity(ladder, ladder.alone("-m", model, "-b", 24), found, run.world_size)


def planted(chapter: str, world_size: int, bugs: dict[str, tuple]) -> list[object]:
    """Return parameters (what must be red, run) of the bugs; a third entry is more arguments."""
    return [
        pytest.param(
            *(red, Run(chapter, world_size, ("-b", 6, *args), tuple(replaced))),
            marks=pytest.mark.nightly,
            id=name,
        )
        for name, (red, replaced, *args) in bugs.items()
    ]


def assert_noticed(ladder: Ladder, red: str, run: Run) -> None:
    with pytest.raises(AssertionError, match=rf"^the ({red}) (differ|failed)"):
        assert_chapter_1(ladder, run)


@contextlib.contextmanager
def without_kernels(path: str) -> Iterator[None]:
    """Compile to graphs only: to make kernels of them takes a minute, and test_training.py does."""
    compiler = functools.partial(torch.compile, backend="aot_eager")
    with mock.patch.object(torch, "compile", compiler):
        yield


# --- resumed runs ---

RESUMED_STEPS = 40


def make_flags(folder: Path, dropout: float = 0.1) -> list[object]:
    """A model with dropout, so that the RNG state counts, and a corpus of 15 steps an epoch."""
    dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    write_narrow(folder / "model", "gpt2-tiny", **dropouts)
    words = random.Random(0)
    texts = ["".join(words.choice("abc \n") for _ in range(200)) for _ in range(24)]
    (folder / "corpus.json").write_text(json.dumps(texts))
    return [
        *("-m", folder / "model", "--tokenizer-name", "gpt2-tiny", "-d", folder / "corpus.json"),
        *("-s", 32, "--global-batch-size", 6, "-b", 3, "--max-steps", RESUMED_STEPS),
        *("--log-freq", 5, "--eval-freq", 10, "--ckpt-freq", 5, "--warmup-steps", 10),
        *("--lr", 1e-2),
    ]


class Runs:
    """Runs in one folder that end or are stopped, and that a start of the same name resumes.

    Each rank notes its samples and what it prints. flags: by default make_flags'.
    """

    def __init__(self, folder: Path, *args: object, flags: list[object] | None = None) -> None:
        self.folder = folder
        self.flags = [*(make_flags(folder) if flags is None else flags), *args]
        self.flags += ["--save-dir", folder]

    def start(
        self, name: str, *args: object, chapter: str = "01-single-gpu", ranks: int = 1, **options
    ) -> Ranks:
        files = {
            f"{kind}_file": [str(self.folder / f"{name}-{rank}.{kind}") for rank in range(ranks)]
            for kind in ("samples", "stderr")
        }
        options = {"chapter": chapter, **files, **options}
        return Ranks(ranks, [*self.flags, "-e", name, *args], **options)

    def finish(self, name: str, *args: object, **options: object) -> list[int]:
        """Start a run, wait until it ends or stops, and return the exit statuses."""
        return self.start(name, *args, **options).finish()

    def said(self, name: str, rank: int = 0) -> str:
        return (self.folder / f"{name}-{rank}.stderr").read_text()

    def samples(self, name: str, rank: int = 0) -> list[str]:
        """Return the samples of each step that a rank has trained, in all starts together."""
        return (self.folder / f"{name}-{rank}.samples").read_text().splitlines()

    def stopped_after(self, name: str) -> tuple[int, int]:
        """Return (steps trained so far, step that the run resumes after)."""
        complete = checkpoint.complete_checkpoints(self.folder / name / "checkpoints")
        return len(self.samples(name)), max(complete, default=0)

    def assert_same(self, straight: str, name: str, trained: int = 0, resumed_after: int = 0):
        """Bit for bit the numbers, tensors and samples of a run that nobody stopped.

        The run that was stopped has trained so many steps, and then those after `resumed_after`.
        """
        assert_exact(self.folder / straight, self.folder / name)
        for file in self.folder.glob(f"{name}-[0-9].samples"):
            rank = int(file.stem[-1])
            samples = self.samples(straight, rank)
            assert self.samples(name, rank) == samples[:trained] + samples[resumed_after:]


def assert_same_tensors(expected: object, found: object, key: str = "") -> None:
    if isinstance(expected, dict):
        assert expected.keys() == found.keys() and expected
        for name, value in expected.items():
            assert_same_tensors(value, found[name], f"{key}.{name}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(expected, found), key
    else:
        assert repr(expected) == repr(found), key


def go_back_to(step: int, run_dir: Path) -> None:
    """Delete the checkpoints after this step: the next start goes on from there."""
    for path in (run_dir / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def hand_over(source: Path, target: Path, step: int) -> None:
    """Copy a run as it was after a step; a start of the copy's name goes on from there."""
    shutil.copytree(source, target)
    go_back_to(step, target)


def newest_step(run_dir: Path) -> int:
    """Return the step of the last save, which `newest` tells job scripts; 0 before the first."""
    newest = run_dir / "newest"
    return int(newest.read_text().strip()[-8:]) if newest.exists() else 0


def tensors(run_dir: Path, step: int | None = None) -> dict:
    """Return all that the checkpoint of a step holds, by default the newest one."""
    path = run_dir / f"checkpoints/step-{step or newest_step(run_dir):08d}"
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(path, file.name)
        return torch.load(file.name, weights_only=False)


def assert_exact(expected: Path, found: Path) -> None:
    for key in ("step", *EXACT):
        values = [[line.get(key) for line in read_metrics(path)] for path in (expected, found)]
        assert values[0] == values[1], key
    assert_same_tensors(tensors(expected), tensors(found))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_run(
    run_dir: Path, model: torch.nn.Module, step: int, preset: str, dtype: str = "float32"
) -> None:
    """Save a model of a preset as a checkpoint of a run; all ranks must call this."""
    settings = {"seq_length": 32, "param_dtype": dtype, "dataset_checksum": "0" * 16}
    settings |= checkpoint.describe(model.config)
    settings["sources"] = {"model_name": preset, "tokenizer_name": None}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    checkpoints_of(run_dir, settings).save(model, optimizer, schedule, {"step": step})


def checkpoints_of(run_dir: Path, settings: dict, keep: int = 2) -> checkpoint.Checkpoints:
    """Return what saves a run in this folder; settings: what must not change."""
    args = argparse.Namespace(checkpoint_dir=None, keep_checkpoints=keep)
    return checkpoint.Checkpoints(args, run_dir, settings)


def save_what_is_loaded(folder: Path) -> None:
    """Once a checkpoint is loaded, save it as that of a run in this folder."""
    load = checkpoint.Checkpoints.load

    def load_and_save(self: checkpoint.Checkpoints, *run: object) -> bool:
        loaded = load(self, *run)
        if loaded:
            checkpoints_of(folder, self.settings, keep=1).save(*run)
        return loaded

    checkpoint.Checkpoints.load = load_and_save


# --- diffs beside the chapters ---


def hunks(diff: str) -> list[list[str]]:
    """Return the lines of each hunk of a diff, less the line with its position."""
    return [hunk.splitlines()[1:] for hunk in re.split(r"^(?=@@)", diff, flags=re.M)[1:]]


def changed(diff: str) -> list[str]:
    return [line for hunk in hunks(diff) for line in hunk if line[0] in "+-"]


def apply(diff: Path, folder: Path, *options: str) -> subprocess.CompletedProcess:
    """Apply a diff to the copies of the scripts in a folder, as a reader does it to the scripts.

    options: of git apply, such as "-C0" for a second diff that changes neighbouring lines.
    """
    command = ["git", "apply", "--verbose", *options, str(diff)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def patch(
    chapter: str,
    folder: Path,
    replaced: tuple[tuple[str, str], ...] = (),
    *,
    diff: Path,
) -> Path:
    """Return a copy of the chapter in `folder`; its script is patched, and has each text replaced.

    diff: of one chapter, such as a fault's; make_variant applies those of the gallery.
    """
    copy = plant(chapter, folder / chapter, [])
    done = apply(diff, folder)
    assert done.returncode == 0 and "Applied patch" in done.stderr, done.stderr
    for right, wrong in replaced:
        replace_in(copy / "train_llm.py", right, wrong)
    return copy


def assert_clean(path: Path) -> None:
    """A patched script, or a folder of them, keeps the rules of the repository's code."""
    for command in (["check"], ["format", "--check"]):
        done = run_script("-m", "ruff", *command, "--config", ROOT / "pyproject.toml", path)
        assert done.returncode == 0, done.stdout


# --- pages ---


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[tuple[str, str]]:
    """Return (what stands after the language, content) of each fenced block."""
    return re.findall(rf"^```{language}\b *(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)


def commands(text: str) -> list[tuple[set[str], str]]:
    """Return (what it needs, command) of each command in a page."""
    return [
        (set(needs.split()), line)
        for needs, block in blocks(text, "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


def prose(text: str) -> str:
    return re.sub(r"^```(?:.*\n)*?```$", "", text, flags=re.MULTILINE)

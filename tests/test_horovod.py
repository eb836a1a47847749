"""Horovod as a variant of chapter 2: its losses are DDP's, also with mixed precision.

Unless Horovod is installed, it is built here with the commands of the page.
"""

import importlib.util
import itertools
import subprocess
from pathlib import Path

import pytest
from helpers import (
    ROOT,
    TORCHRUN,
    commands,
    environment,
    hand_over,
    make_variant,
    plant,
    read_metrics,
    register,
    run_script,
    write_corpus,
)

CHAPTER = "02-ddp"
PAGE = ROOT / CHAPTER / "topics/five_ways.md"
STEPS, MIDDLE = 10, 5
PASSES = "backward_passes_per_step=accumulation,"
SUM = (PASSES, f"{PASSES} op=hvd.Sum,")
register(CHAPTER, [SUM], ["horovod"])

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def with_horovod(make_folder) -> dict[str, str]:
    """Return an environment in which horovodrun and its package are found."""
    if importlib.util.find_spec("horovod"):
        return environment()
    folder = make_folder("horovod")
    built = folder / "built"
    # Without --upgrade, pip leaves out horovodrun, because bin exists already.
    env = environment(PIP_TARGET=built, PIP_UPGRADE=1, PYTHONPATH=built)
    env["PATH"] = f"{built / 'bin'}:{env['PATH']}"
    page = [line for needs, line in commands(PAGE.read_text()) if needs == {"horovod"}]
    for command in itertools.takewhile(lambda line: not line.startswith("make"), page):
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True
        )
        if done.returncode:
            reason = (done.stderr or done.stdout).strip().splitlines()[-1]
            pytest.skip(f"Horovod cannot be built here: {command.split()[:2]}: {reason}")
    return env


@pytest.fixture(scope="module")
def folder(make_folder) -> Path:
    """A folder with a corpus and a run of chapter 2 as it is, `ddp`."""
    path = make_folder("runs")
    write_corpus(path)
    done = run_script(*TORCHRUN, 2, f"{CHAPTER}/train_llm.py", *few(path, "ddp"))
    assert done.returncode == 0, done.stderr
    return path


def few(folder: Path, name: str) -> list[object]:
    """Return the arguments of a run of some steps in two micro-batches each."""
    words = ("-d", folder / "corpus.json", "-s", 32, "--global-batch-size", 8, "-b", 2)
    words += ("--max-steps", STEPS, "--log-freq", 1, "--ckpt-freq", MIDDLE, "--warmup-steps", 2)
    return [*words, "--lr", 1e-3, "--save-dir", folder, "-e", name]


def horovodrun(
    env: dict[str, str], folder: Path, script: Path, name: str, *args: object
) -> subprocess.CompletedProcess:
    """Start a run with this name; folder: that of the corpus and the runs."""
    words = ["horovodrun", "-np", 2, "--gloo", "python", script, *few(folder, name), *args]
    return subprocess.run(
        [str(word) for word in words], cwd=ROOT, env=env, capture_output=True, text=True
    )


def assert_close(folder: Path, name: str, rel: float, key: str = "loss") -> None:
    expected, found = ([line[key] for line in read_metrics(folder / run)] for run in ("ddp", name))
    assert len(found) == STEPS and found == pytest.approx(expected, rel=rel), key


def test_losses_are_those_of_chapter_2(with_horovod, folder):
    """Also of a run that goes on with a checkpoint of chapter 2."""
    script = make_variant(folder, CHAPTER, "horovod") / "train_llm.py"
    hand_over(folder / "ddp", folder / "resumed", MIDDLE)
    for name in ("horovod", "resumed"):
        done = horovodrun(with_horovod, folder, script, name)
        assert done.returncode == 0, done.stderr
        assert_close(folder, name, 1e-6)
        assert_close(folder, name, 1e-5, "grad_norm")


def test_planted_sum_changes_the_gradients(with_horovod, folder):
    variant = make_variant(folder / "to-plant", CHAPTER, "horovod")
    script = plant(variant, folder / "sum", [SUM]) / "train_llm.py"
    assert horovodrun(with_horovod, folder, script, "sum").returncode == 0
    with pytest.raises(AssertionError):
        assert_close(folder, "sum", 1e-1, "grad_norm")


# By precision: the variants, and how far a loss may be from float32's, relative.
MIXED = {
    "bf16": (("autocast",), 1e-3),
    "fp16": (("autocast", "float16", "loss-scaling"), 1e-3),
}


@pytest.mark.parametrize("precision", MIXED)
def test_mixed_precision(with_horovod, folder, precision):
    """All variants together, as the page says."""
    names, rel = MIXED[precision]
    script = make_variant(folder, CHAPTER, "horovod", *names) / "train_llm.py"
    done = horovodrun(with_horovod, folder, script, precision)
    assert done.returncode == 0, done.stderr
    assert_close(folder, precision, rel)
    with pytest.raises(AssertionError):
        assert_close(folder, precision, 1e-7)
    scales = {line.get("loss_scale") for line in read_metrics(folder / precision)}
    assert scales == ({2.0**16} if precision == "fp16" else {None})

"""05-mixed-precision/compare.py: it trains what the chapters train, and says what failed."""

import contextlib
import importlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import (
    CHAPTERS,
    LENGTH,
    ROOT,
    Ladder,
    Run,
    first_then_nightly,
    patch,
    register,
    replace_in,
    write_corpus,
)
from runner import server_context

from common.cli import RunError

ALONE, DDP, FSDP = CHAPTERS[0], CHAPTERS[1], CHAPTERS[4]
SCRIPT = ROOT / FSDP / "compare.py"
MODULES = ROOT / FSDP / "comparison"
RESULT = ROOT / "tests/benchmarks/results/comparison_cpu.json"
GPU_RESULT = ROOT / "tests/benchmarks/results/comparison_gpu.json"
STEPS = 10  # 7 are an epoch of the corpus of the ladder
# By row: the chapter that trains the same, patched to autocast where it needs that, and its
# arguments.
ROWS = {
    "fsdp:bf16": (FSDP, ("--precision", "bf16")),
    "ddp:fp32": (DDP, ()),
    "single:bf16": (ALONE, ("--precision", "bf16")),
    "zero1:pure-bf16": (DDP, ("--param-dtype", "bfloat16", "--zero1")),
}
# By row: what is replaced, and where.
PLANTED = {
    "ddp:fp32": (
        "training.py",
        'if run.strategy in ("ddp", "zero1") and not last_backward',
        'if run.strategy == "ddp"',
    ),
    "single:bf16": (
        "training.py",
        'if run.precision == "pure-bf16":',
        'if "bf16" in run.precision:',
    ),
}
for file, *pair in PLANTED.values():
    register(f"{FSDP}/comparison/{file}", [pair])


class Comparisons:
    """Runs of compare.py in this process; its ranks are children that have PyTorch already."""

    def __init__(self, folder: Path) -> None:
        self.ladder = Ladder(folder)
        self.folder = folder
        # The corpus of the ladder, in blocks of the same length.
        self.constant = ("-d", folder / "corpus.json", "-s", LENGTH)

    def run(self, *args: object, bug: tuple[str, str, str] = ()) -> dict[str, dict]:
        """Return the rows of the result, by STRATEGY:PRECISION.

        bug: the file in which a text is replaced, and the two texts.
        """
        folder = self.folder / f"comparison-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        shutil.copy(SCRIPT, folder)
        shutil.copytree(MODULES, folder / MODULES.name, ignore=shutil.ignore_patterns("*.pyc"))
        if bug:
            file, right, wrong = bug
            replace_in(folder / MODULES.name / file, right, wrong)
        output = folder / "result.json"
        argv = ["compare.py", *self.constant, "--output", output, *args]
        with script(folder, argv) as compare, pytest.MonkeyPatch.context() as patched:
            server_context()
            patched.setattr("comparison.ranks.START_METHOD", "forkserver")
            # It shares out the cores to two devices. More threads add up in another order.
            patched.setattr(os, "cpu_count", lambda: 2 * torch.get_num_threads())
            compare.main()
            output = compare.get_args().output
        rows = json.loads(output.read_text())["results"]["rows"]
        return {f"{row['strategy']}:{row['precision']}": row for row in rows}

    def losses(self, *names: str, bug: tuple[str, str, str] = ()) -> dict[str, list[float]]:
        steps = ("--global-batch-size", 24, "-b", 6, "--steps", STEPS, "--seeds", 0)
        rows = self.run(*steps, "--parts", "loss", "--only", *names, bug=bug)
        assert {name: row["failed"] for name, row in rows.items() if row["failed"]} == {}
        return {name: row["runs"][0]["losses"] for name, row in rows.items()}

    def right(self, name: str) -> list[float]:
        """Return the losses of the chapter's own script."""
        chapter, args = ROWS[name]
        if "--precision" in args and chapter != FSDP:
            folder = self.folder / f"patched-{chapter}"
            script = folder / chapter if folder.exists() else patch(chapter, folder)
            chapter = os.path.relpath(script, ROOT)  # of which the run's name is made
        steps = ("--max-steps", STEPS, "--warmup-steps", STEPS // 4, "--eval-freq", 99, "-b", 6)
        run = Run(chapter, 1 if name.startswith("single") else 2, (*steps, *args))
        return [line["loss"] for line in self.ladder.metrics(self.ladder.run(run))]


@contextlib.contextmanager
def script(folder: Path, argv: list[object]):
    """Import compare.py from a folder in such a way that children find it too."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        forget_modules()
        patched.setattr(sys, "argv", [str(arg) for arg in argv])
        yield importlib.import_module("compare")
        forget_modules()


def forget_modules() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("compare", "comparison")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def comparisons(make_folder) -> Comparisons:
    return Comparisons(make_folder("comparisons"))


def assert_same(found: list[float], right: list[float], precision: str) -> None:
    assert len(right) == STEPS and right[-1] < right[0] - 0.3
    same = found == pytest.approx(right, rel=1e-5 if precision == "fp32" else 1e-6)
    assert same, "the losses differ"


@pytest.mark.ci
@pytest.mark.parametrize("name", first_then_nightly(ROWS))
def test_a_row_is_the_training_of_a_chapter(comparisons, name):
    found, right = comparisons.losses(name)[name], comparisons.right(name)
    assert_same(found, right, name.split(":")[1])


@pytest.mark.parametrize(("name", "bug"), PLANTED.items(), ids=PLANTED)
def test_planted_bug_is_noticed(comparisons, name, bug):
    found = comparisons.losses(name, bug=bug)[name]
    with pytest.raises(AssertionError, match=r"^the losses differ"):
        assert_same(found, comparisons.right(name), name.split(":")[1])


@pytest.mark.nightly
def test_rows_are_added_to_a_result(comparisons, capsys):
    file = comparisons.folder / "result.json"
    few = ("--steps", 10, "--speed-steps", 10, "--output", file)
    comparisons.run(*few, "--only", "single:fp32", "--seconds", 0)
    assert "single" not in capsys.readouterr().out, "something began after its time"
    comparisons.run(*few, "--only", "single:fp32", "--seeds", 0, 1, "--append")
    comparisons.run(*few, "--only", "single:*", "--seeds", 1, "--append")
    content = json.loads(file.read_text())
    rows = {row["precision"]: row for row in content["results"]["rows"]}
    runs = {name: [(r["part"], r["seed"]) for r in row["runs"]] for name, row in rows.items()}
    assert runs["fp32"] == [("loss", 0), ("speed", 0), ("loss", 1), ("speed", 1)]
    assert runs["bf16"] == [("loss", 1), ("speed", 1)]
    assert rows["tf32"]["left_out"] == {"loss": "On a CPU, tf32 is the same as fp32."}
    assert "compute capability 8.9" in rows["fp8"]["left_out"]["loss"]
    ends = {n: [r["losses"][-1] for r in row["runs"][::2]] for n, row in rows.items()}
    assert rows["fp32"]["summary"]["minus_fp32_on_one_device"] == [0, 0]
    difference = ends["bf16"][0] - ends["fp32"][1]
    assert rows["bf16"]["summary"]["minus_fp32_on_one_device"] == pytest.approx([difference])
    assert 0 < abs(difference) < 0.1
    assert len(content["results"]["added_by"]) == 2 and content["results"]["seconds"] > 0


@pytest.mark.parametrize("result", [RESULT, GPU_RESULT], ids=["cpu", "gpu"])
def test_the_figure_is_that_of_the_result(tmp_path, result):
    matplotlib = pytest.importorskip("matplotlib")
    if f"matplotlib=={matplotlib.__version__}\n" not in (ROOT / "requirements.txt").read_text():
        pytest.skip(f"matplotlib is another one: {matplotlib.__version__}")
    with script(SCRIPT.parent, []) as compare:
        compare.results.draw(result, tmp_path)
    (committed,) = SCRIPT.parent.glob(f"{result.stem}_*.svg")
    assert committed.read_bytes() == (tmp_path / committed.name).read_bytes()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--only", "ddp:int8"), "--only ddp:int8 matches no row: give STRATEGY:PRECISION, with"),
        (
            ("-d", "corpus.json", "--global-batch-size", 3),
            "cannot share --global-batch-size 3 evenly",
        ),
        (("--output", "result.json"), "result.json exists: give another --output, or add --append"),
        (("--append", "--output", "result.json", "-b", 7), "was measured with batch_size 4, not 7"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, args, sentence):
    shutil.copy(RESULT, tmp_path / "result.json")
    write_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    with script(SCRIPT.parent, ["compare.py", "--output", "new.json", *args]) as compare:
        monkeypatch.setattr(compare, "Ranks", None)  # nothing may start
        with pytest.raises(RunError, match=sentence):
            compare.main()
    assert not Path("new.json").exists()

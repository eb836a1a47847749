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
from helpers import LENGTH, ROOT, Ladder, Run, patch, run_script
from runner import server_context
from test_autocast import ALONE, DDP, FSDP

from common import distributed, timers

SCRIPT = ROOT / FSDP / "compare.py"
MODULES = ROOT / FSDP / "comparison"
RESULT = ROOT / "tests/benchmarks/results/comparison_cpu.json"
GPU_RESULT = ROOT / "tests/benchmarks/results/comparison_gpu.json"
STEPS = 10  # 7 are an epoch of the corpus of the ladder
BF16 = ("--param-dtype", "bfloat16")
# By row: the chapter that trains the same, and its arguments.
SAME = {
    "single:fp32": (ALONE, ()),
    "single:pure-bf16": (ALONE, BF16),
    "ddp:fp32": (DDP, ()),
    "ddp:pure-bf16": (DDP, BF16),
    "zero1:fp32": (DDP, ("--zero1",)),
    "zero1:pure-bf16": (DDP, (*BF16, "--zero1")),
    "fsdp:fp32": (FSDP, ("--precision", "fp32")),
    "fsdp:bf16": (FSDP, ("--precision", "bf16")),
    "fsdp:pure-bf16": (FSDP, BF16),
}
# The same where the chapter is patched.
AUTOCAST = {
    "single:bf16": (ALONE, ("--precision", "bf16")),
    "ddp:bf16": (DDP, ("--precision", "bf16")),
    "zero1:bf16": (DDP, ("--precision", "bf16", "--zero1")),
}
# Eight times slower than float32 on a CPU.
FP16 = {
    "fsdp:fp16": (FSDP, ("--precision", "fp16")),
    "ddp:fp16": (DDP, ("--precision", "fp16")),
}
PLANTED = {
    "gradients not averaged": (
        [('if run.strategy in ("ddp", "zero1") and not last_backward', 'if run.strategy == "ddp"')],
        "ddp:fp32",
    ),
    "another order of the samples": (
        [("rank=rank, seed=run.seed)", "rank=rank, seed=run.seed + 1)")],
        "single:fp32",
    ),
    "no new order in the second epoch": (
        [("sampler.set_epoch(epoch)", "sampler.set_epoch(0)")],
        "single:fp32",
    ),
    "sums in 16 bits": (
        [("reduce_dtype=torch.float32 if", "reduce_dtype=torch.bfloat16 if")],
        "fsdp:bf16",
    ),
    "weights in 16 bits": (
        [('if run.precision == "pure-bf16":', 'if "bf16" in run.precision:')],
        "single:bf16",
    ),
}


class Comparisons:
    """Runs of compare.py in this process; its ranks are children that have PyTorch already."""

    def __init__(self, folder: Path) -> None:
        self.ladder = Ladder(folder)
        self.folder, self.kept = folder, {}
        # The corpus of the ladder, in blocks of the same length.
        self.constant = ("-d", folder / "corpus.json", "-s", LENGTH)

    def run(self, *args: object, replaced: tuple | list = ()) -> dict[str, dict]:
        """Return the rows of the result, by STRATEGY:PRECISION."""
        folder = self.folder / f"comparison-{len(self.kept)}-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        shutil.copy(SCRIPT, folder)
        shutil.copytree(MODULES, folder / MODULES.name, ignore=shutil.ignore_patterns("*.pyc"))
        for right, wrong in replaced:
            files = [file for file in folder.rglob("*.py") if right in file.read_text()]
            assert len(files) == 1 and files[0].read_text().count(right) == 1, right
            files[0].write_text(files[0].read_text().replace(right, wrong))
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

    def losses(self, *names: str, replaced: tuple | list = ()) -> dict[str, list[float]]:
        steps = ("--global-batch-size", 24, "-b", 6, "--steps", STEPS, "--seeds", 0)
        rows = self.run(*steps, "--parts", "loss", "--only", *names, replaced=replaced)
        assert {name: row["failed"] for name, row in rows.items() if row["failed"]} == {}
        return {name: row["runs"][0]["losses"] for name, row in rows.items()}

    def right(self, names: list[str]) -> dict[str, list[float]]:
        """Return the losses of the chapters' own scripts."""
        steps = ("--max-steps", STEPS, "--warmup-steps", STEPS // 4, "--eval-freq", 99, "-b", 6)
        runs = {}
        for name in names:
            chapter, args = {**SAME, **AUTOCAST, **FP16}[name]
            if "--precision" in args and chapter != FSDP:
                folder = self.folder / f"patched-{chapter}"
                script = folder / chapter if folder.exists() else patch(chapter, folder)
                chapter = os.path.relpath(script, ROOT)  # of which the run's name is made
            world_size = 1 if name.startswith("single") else 2
            runs[name] = Run(chapter, world_size, (*steps, *args))
        self.ladder.selected = [*self.ladder.selected, *runs.values()]
        return {
            name: [line["loss"] for line in self.ladder.metrics(self.ladder.run(run))]
            for name, run in runs.items()
        }


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


@pytest.fixture(scope="module")
def found(comparisons) -> dict[str, list[float]]:
    return comparisons.losses(*SAME, *AUTOCAST)


@pytest.fixture(scope="module")
def right(comparisons) -> dict[str, list[float]]:
    return comparisons.right([*SAME, *AUTOCAST])


def assert_same(found: list[float], right: list[float], precision: str) -> None:
    assert len(right) == STEPS and right[-1] < right[0] - 0.3
    same = found == pytest.approx(right, rel=1e-5 if precision == "fp32" else 1e-6)
    assert same, "the losses differ"


@pytest.mark.ci
@pytest.mark.parametrize("name", [*SAME, *AUTOCAST])
def test_a_row_is_the_training_of_a_chapter(found, right, name):
    assert_same(found[name], right[name], name.split(":")[1])


@pytest.mark.ci
@pytest.mark.parametrize("name", FP16)
def test_a_row_in_fp16_is_the_training_of_a_chapter(comparisons, name):
    found, right = comparisons.losses(name)[name], comparisons.right([name])[name]
    assert_same(found, right, "fp16")


@pytest.mark.ci
@pytest.mark.parametrize(("replaced", "name"), PLANTED.values(), ids=PLANTED)
def test_planted_bug_is_noticed(comparisons, right, replaced, name):
    found = comparisons.losses(name, replaced=replaced)[name]
    with pytest.raises(AssertionError, match=r"^the losses differ"):
        assert_same(found, right[name], name.split(":")[1])


# Where others wait in a collective, and where nobody ever answers.
FAILURES = """import os, time
    n_ranks = number_of_ranks(run.strategy, run.devices)
    if run.strategy == "ddp" and rank == 1:
        raise MemoryError("planted")
    if run.strategy == "zero1" and rank == 1:
        os._exit(9)
    while run.precision == "bf16":
        time.sleep(1)"""


@pytest.mark.ci
def test_a_row_that_fails_does_not_end_the_others(comparisons):
    rows = comparisons.run(
        *("--only", "single:bf16", "ddp:fp32", "zero1:fp32", "fsdp:fp32", "--seeds", 0, 1),
        *("--parts", "loss", "--steps", 10, "--timeout", 20),
        replaced=[("n_ranks = number_of_ranks(run.strategy, run.devices)\n", f"{FAILURES}\n")],
    )
    assert {name: row["failed"] for name, row in rows.items()} == {
        "single:bf16": {"loss": "no answer within 20 s"},
        "ddp:fp32": {"loss": "MemoryError: planted"},
        "zero1:fp32": {"loss": "a rank exited with status 9"},
        "fsdp:fp32": {},
    }
    assert [run["seed"] for run in rows["fsdp:fp32"]["runs"]] == [0, 1]
    assert not any(rows[name]["runs"] for name in list(rows)[:3])


@pytest.mark.ci
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


def test_the_smallest_share_of_a_gpu_is_a_number(comparisons, monkeypatch):
    """The default model fills so little of a fast GPU that four decimals are all 0."""
    # Put back afterwards: the script, with what is planted in it, runs in this process too.
    monkeypatch.setattr(timers, "peak_flops", timers.peak_flops)
    imports = "from common.timers import PhaseTimers, flops_per_token\n"
    fast = f"from common import timers\n{imports}timers.peak_flops = lambda device: 1e18\n"
    rows = comparisons.run(
        *("--only", "single:fp32", "--seeds", 0, 1, "--parts", "speed"),
        *("-b", 1, "--global-batch-size", 1, "--speed-steps", 10),
        replaced=[(imports, fast)],
    )
    row = rows["single:fp32"]
    assert [run["mfu"] for run in row["runs"]] == [0, 0] and row["summary"]["speed"]["mfu"] == 0


@pytest.mark.check
@pytest.mark.parametrize("room", [1, 7, 8, 9, 23, 64, 100, 0])
def test_the_largest_batch_that_fits_is_found(comparisons, room):
    tried = []

    def measure(row: dict, part: str, seed: int, batch_size: int) -> dict | None:
        assert part == "largest" and batch_size >= 1
        tried.append(batch_size)
        return {"batch_size": batch_size} if batch_size <= room else None

    with script(SCRIPT.parent, []) as compare:
        found = compare.find_largest(measure, {"left_out": {}}, 8)
    assert found == ({"batch_size": room} if room else None)
    assert len(tried) == len(set(tried)) <= 11


# --- the committed result ---


@pytest.fixture
def compare():
    with script(SCRIPT.parent, []) as module:
        yield module


@pytest.mark.check
def test_the_result_is_complete(compare):
    content = compare.results.read(RESULT)
    assert {"command", "date", "commit", "torch", "cpu"} <= set(content["machine"])
    settings, rows = content["results"]["settings"], content["results"]["rows"]
    names = {(row["strategy"], row["precision"]) for row in rows}
    assert names == {(s, p) for s in compare.results.STRATEGIES for p in compare.results.PRECISIONS}
    measured = [row for row in rows if not row["left_out"]]
    assert {row["strategy"] for row in measured} >= {"single", "ddp", "zero1", "fsdp"}
    assert {row["precision"] for row in measured} == {"fp32", "bf16", "fp16", "pure-bf16"}
    reference = compare.results.last_losses(measured[0]["runs"])
    assert len(reference) == 3 and compare.results.label(measured[0]) == "single fp32 x1"
    table = compare.results.table(rows)
    for row in measured:
        assert not row["failed"]
        parts = sorted((run["part"], run["seed"]) for run in row["runs"])
        assert parts == [(part, seed) for part in ("loss", "speed") for seed in reference]
        assert row["summary"] == json.loads(
            json.dumps(compare.results.summarize(row["runs"], reference))
        )
        for run in row["runs"]:
            assert (
                len(run["losses"]) == settings["steps" if run["part"] == "loss" else "speed_steps"]
            )
            assert run["tokens_per_s"] and set(run["ms"]) == {*compare.results.PHASES, "total"}
        (line,) = [
            line for line in table.splitlines() if line.startswith(compare.results.label(row) + " ")
        ]
        assert f"{row['summary']['speed']['tokens_per_s']:,.0f}" in line.split()
        assert f"{row['summary']['final_loss']['mean']:.4f}" in line.split()
    for row in rows:
        for reason in row["left_out"].values():
            assert reason in table


@pytest.mark.parametrize(("result", "shown"), [(RESULT, 1), (GPU_RESULT, 1)], ids=["cpu", "gpu"])
def test_the_figures_are_those_of_the_result(compare, tmp_path, result, shown):
    matplotlib = pytest.importorskip("matplotlib")
    if f"matplotlib=={matplotlib.__version__}\n" not in (ROOT / "requirements.txt").read_text():
        pytest.skip(f"matplotlib is another one: {matplotlib.__version__}")
    compare.results.draw(result, tmp_path)
    committed = sorted(SCRIPT.parent.glob(f"{result.stem}_*.svg"))
    assert len(committed) == shown
    for path in committed:
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


# --- as a reader starts it ---


@pytest.mark.ci
def test_as_a_reader_runs_it(tmp_path):
    done = run_script(
        *("05-mixed-precision/compare.py", "--output", tmp_path / "new" / "result.json"),
        *("--only", "single:fp32", "ddp:bf16", "dp:fp32", "--seeds", 0, "--steps", 10, "-s", 16),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["single", "fp32", "x1"],
        ["ddp", "bf16", "x2"],
    ]
    assert "dp fp32 x2 left out: nn.DataParallel needs at least two GPUs." in lines
    content = json.loads((tmp_path / "new" / "result.json").read_text())
    assert content["machine"]["command"].startswith("python 05-mixed-precision/compare.py --output")


@pytest.fixture
def refuse(tmp_path, monkeypatch, capsys):
    """Return a function that runs the script, expects a refusal and returns its one sentence."""
    shutil.copy(RESULT, tmp_path / "result.json")

    def run(*args: object) -> str:
        monkeypatch.chdir(tmp_path)
        with script(SCRIPT.parent, ["compare.py", *args]) as compare:
            monkeypatch.setattr(compare, "Ranks", None)  # nothing may start
            with pytest.raises(SystemExit) as exit_:
                distributed.run(compare.main)
        err = capsys.readouterr().err
        assert exit_.value.code == 2 and "Traceback" not in err
        assert not Path("new.json").exists()
        return err.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ("--only", "ddp:int8"),
            "--only ddp:int8 matches no row: give STRATEGY:PRECISION, with a strategy of single",
        ),
        (("--parts", "largest"), "--parts largest needs a GPU"),
        (("--steps", 9), "argument --steps: '9' is not a whole number from 10"),
        (("--global-batch-size", 3), "2 devices cannot share --global-batch-size 3 evenly"),
        (("-s", 4096), "The model has 128 positions: --seq-length 4096 is more than that"),
        (("-d", "./none.txt"), "There is no data set at './none.txt'"),
        (("--output", "/dev/null/x.json"), "Cannot write to /dev/null/x.json"),
        (
            ("--output", "result.json"),
            "result.json exists: give another --output, or add --append.",
        ),
        (("-b", 10**6), "--batch-size 1000000 is too large: the data has"),
        (("--append",), "new.json is not a result file of compare.py"),
        (("--append", "--output", "result.json", "-b", 7), "was measured with batch_size 4, not 7"),
        (("--draw", "none.json"), "none.json is not a result file of compare.py"),
        (
            ("--draw", "result.json", "--figures", "none"),
            "There is no folder none for the figures: give another --figures.",
        ),
    ],
)
def test_bad_input(refuse, args, sentence):
    assert sentence in refuse("--output", "new.json", *args)


@pytest.mark.check
def test_without_matplotlib(refuse, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sentence = "--draw needs matplotlib: pip install matplotlib."
    assert refuse("--draw", "result.json") == sentence

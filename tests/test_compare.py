"""05-mixed-precision/compare.py: its rows are trainings of the chapters."""

import json
import re
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from helpers import CHAPTERS, ROOT, Ladder

SCRIPT = ROOT / CHAPTERS[4] / "compare.py"
STEPS, WINDOW = 10, 5  # 7 steps are an epoch of the corpus of the ladder
ORDER = ("single-fp32", "single-bf16", "single-fp16", "single-pure-bf16", "ddp-fp32")


@pytest.fixture
def ladder(tmp_path) -> Ladder:
    return Ladder(tmp_path)


@pytest.fixture
def compare(run_main, ladder) -> Callable[..., tuple[dict[str, dict], str, str]]:
    """Return a function that returns the rows by name, and what was printed."""

    def run(*args: object, plant: Callable[[ModuleType], object] = lambda module: None):
        output = ladder.folder / "result.json"
        data = ("-d", ladder.folder / "corpus.json", "-s", ladder.length, "--output", output)
        steps = ("--global-batch-size", 24, "-b", 6, "--steps", STEPS, "--devices", 2)
        printed = run_main(SCRIPT, *data, *steps, *args, plant=plant)
        rows = json.loads(output.read_text())["results"]["rows"]
        return {f"{row['strategy']}:{row['precision']}": row for row in rows}, *printed

    return run


def chapter_1(ladder: Ladder) -> list[float]:
    """Return the losses of chapter 1's own script."""
    args = ("-b", 6, "--warmup-steps", STEPS // 4, "--log-freq", WINDOW)
    return [line["loss"] for line in ladder.metrics(ladder.alone(*args))]


def losses(row: dict) -> list[float]:
    (run,) = row["runs"]
    return [line["loss"] for line in run["metrics"]]


def assert_same(found: list[float], right: list[float]) -> None:
    assert len(right) == STEPS // WINDOW and right[-1] < right[0] - 0.3
    assert found == pytest.approx(right, rel=1e-5), "the losses differ"


@pytest.mark.ci
def test_rows_are_trainings_of_the_chapters(compare, ladder):
    exact = ["ddp:fp32", "zero1:fp32", "fsdp:fp32"]
    rows, printed, _ = compare("--only", "single:bf16", *exact)
    assert list(rows) == ["single:bf16", *exact]
    right = chapter_1(ladder)
    for name in exact:
        assert_same(losses(rows[name]), right)
    assert 1e-6 < abs(losses(rows["single:bf16"])[-1] - right[-1]) < 0.1
    assert len(printed.splitlines()) == 1 + len(rows) + 1


def take_twice_the_batch(module: ModuleType) -> None:
    command = module.command
    module.command = lambda *args: [*command(*args), "--global-batch-size", "48"]


def test_planted_unfair_batch_is_noticed(compare, ladder):
    rows, _, _ = compare("--only", "single:fp32", plant=take_twice_the_batch)
    with pytest.raises(AssertionError, match=r"^the losses differ"):
        assert_same(losses(rows["single:fp32"]), chapter_1(ladder))


def train_nothing(row: dict, seed: int, *_: object) -> None:
    """Add three lines to a row, as a training does."""
    print(f"training {row['strategy']}-{row['precision']}-{seed}", file=sys.stderr)
    loss = 1 + seed / 10 + (row["precision"] != "fp32") / 100
    line = {"loss": loss, "mfu": None, "peak_mem_gib": 2.0}
    line |= {f"time/{phase}": 5.0 for phase in ("data", "forward", "backward", "update")}
    lines = [{**line, "tokens_per_s": speed + 100 * seed} for speed in (1, 100, 300)]
    row["runs"].append({"seed": seed, "metrics": lines})


def test_table_of_two_rounds(compare):
    """The first line of three is warm-up; a row that fails is not trained again."""
    rows = ("--only", "single:*", "ddp:fp32", "--seeds", 0, 1)

    def plant(module: ModuleType) -> None:
        train, module.command = module.train, lambda *_: ["false"]
        fails = lambda row: row["precision"] == "fp16"  # noqa: E731
        module.train = lambda row, *args: (train if fails(row) else train_nothing)(row, *args)

    _, out, err = compare(*rows, plant=plant)
    head, *lines = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    cells = {line[0]: line[1:] for line in lines}
    shown = ["250", "200", "300", "5.0", "5.0", "5.0", "5.0", "2.0"]
    for row in "single fp32 x1", "ddp fp32 x2":
        assert cells[row] == [*shown, "1.0500", "+0.00000 +0.00000"]
    assert cells["single bf16 x1"] == [*shown, "1.0600", "+0.01000 +0.01000"]
    assert head[-2:] == ["loss", "loss - single fp32"] and len(head) == len(shown) + 3
    assert "single fp16 x1 failed with exit status 1: the log above says why" in out
    rounds = re.findall("training (.*)", err)
    assert rounds[:5] == [f"{name}-0" for name in ORDER]
    assert rounds[5:] == [f"{name}-1" for name in ORDER[::-1] if "fp16" not in name]


def test_bad_input(refuse, ladder):
    """Nothing starts."""
    data = ("-d", ladder.folder / "corpus.json", "--devices", 2)
    said = refuse(SCRIPT, *data, "--only", "ddp:int8", "--output", ladder.folder / "new.json")
    assert "--only ddp:int8 matches no row of this machine: give STRATEGY:" in said
    said = refuse(SCRIPT, *data, "--output", SCRIPT)
    assert "compare.py already exists: give another file, or delete it." in said

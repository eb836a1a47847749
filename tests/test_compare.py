"""05-mixed-precision/compare.py: its rows are trainings of the chapters."""

import json
import re
import shutil
import sys

import pytest
from helpers import CHAPTERS, ROOT, Ladder, register, replace_in, run_script
from runner import load_script

SCRIPT = ROOT / CHAPTERS[4] / "compare.py"
STEPS, WINDOW = 10, 5  # 7 steps are an epoch of the corpus of the ladder
# What must be equal in all rows: planted, each device gets a global batch of its own.
UNFAIR = ('"--global-batch-size", args.global_batch_size', '"--global-batch-size", 2 * 24')
register(f"{CHAPTERS[4]}/compare.py", [UNFAIR])
# Instead of a training: writes what a training logs, or fails.
TRAINING = """
import json, pathlib, sys
_, _, seed, _, folder, _, name = sys.argv
if "fp16" in name:
    sys.exit("no memory")
run = pathlib.Path(folder, name)
run.mkdir()
times = {f"time/{phase}": 5.0 for phase in ("data", "forward", "backward", "update")}
for speed in 1, 100, 300:
    loss = 1 + int(seed) / 10 + ("bf16" in name) / 100
    line = {"loss": loss, "tokens_per_s": speed + 100 * int(seed), "mfu": None, "peak_mem_gib": 2.0}
    with (run / "metrics.jsonl").open("a") as file:
        print(json.dumps(line | times), file=file)
"""
ORDER = ("single-fp32", "single-bf16", "single-fp16", "single-pure-bf16", "ddp-fp32")


def compare(ladder: Ladder, *rows: str, script=SCRIPT) -> tuple[dict[str, dict], str]:
    """Return the rows of the result, by strategy and precision, and what was printed."""
    output = ladder.folder / "result.json"
    steps = ("--global-batch-size", 24, "-b", 6, "--steps", STEPS, "--devices", 2)
    data = ("-d", ladder.folder / "corpus.json", "-s", ladder.length)
    done = run_script(script, *data, *steps, "--output", output, "--only", *rows, real=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["results"]["rows"]
    return {f"{row['strategy']}:{row['precision']}": row for row in rows}, done.stdout


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
def test_rows_are_trainings_of_the_chapters(tmp_path):
    ladder = Ladder(tmp_path)
    exact = ["ddp:fp32", "zero1:fp32", "fsdp:fp32"]
    rows, printed = compare(ladder, "single:bf16", *exact)
    assert list(rows) == ["single:bf16", *exact]
    right = chapter_1(ladder)
    for name in exact:
        assert_same(losses(rows[name]), right)
    assert 1e-6 < abs(losses(rows["single:bf16"])[-1] - right[-1]) < 0.1
    assert len(printed.splitlines()) == 1 + len(rows) + 1


@pytest.mark.nightly
def test_planted_unfair_batch_is_noticed(tmp_path):
    ladder = Ladder(tmp_path)
    folder = tmp_path / "repository"
    for chapter in (CHAPTERS[0], CHAPTERS[4]):
        shutil.copytree(ROOT / chapter, folder / chapter)
    script = folder / CHAPTERS[4] / SCRIPT.name
    replace_in(script, *UNFAIR)
    rows, _ = compare(ladder, "single:fp32", script=script)
    with pytest.raises(AssertionError, match=r"^the losses differ"):
        assert_same(losses(rows["single:fp32"]), chapter_1(ladder))


def test_table_of_two_rounds(tmp_path, monkeypatch, capsys):
    """The first line of three is warm-up; a row that fails is not trained again."""
    module = load_script(SCRIPT)
    Ladder(tmp_path)
    argv = ("compare.py", "-d", tmp_path / "corpus.json", "-s", 16, "--output", tmp_path / "new")
    argv += ("--only", "single:*", "ddp:fp32", "--seeds", 0, 1)
    monkeypatch.setattr(sys, "argv", [str(word) for word in argv])
    monkeypatch.setattr(module, "command", lambda *args: [sys.executable, "-c", TRAINING])
    module.main()
    out, err = capsys.readouterr()
    head, *lines = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    cells = {line[0]: line[1:] for line in lines}
    shown = ["250", "200", "300", "5.0", "5.0", "5.0", "5.0", "2.0"]
    for row in "single fp32 x1", "ddp fp32 x2":
        assert cells[row] == [*shown, "1.0500", "+0.00000 +0.00000"]
    assert cells["single bf16 x1"] == [*shown, "1.0600", "+0.01000 +0.01000"]
    assert head[-2:] == ["loss", "loss - single fp32"] and len(head) == len(shown) + 3
    assert "single fp16 x1 failed with exit status 1: the log above says why" in out
    assert err.count("no memory") == 1
    rounds = re.findall("training (.*)", err)
    assert rounds[:5] == [f"{name}-0" for name in ORDER]
    assert rounds[5:] == [f"{name}-1" for name in ORDER[::-1] if "fp16" not in name]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--only", "ddp:int8"), "--only ddp:int8 matches no row of this machine: give STRATEGY:"),
        (("--global-batch-size", 3), "cannot share --global-batch-size 3 evenly"),
        (("-m", "no-model"), "There is no model or tokenizer 'no-model'"),
        (("--output", SCRIPT), "compare.py already exists: give another file, or delete it."),
    ],
)
def test_bad_input(tmp_path, args, sentence):
    """Nothing starts."""
    Ladder(tmp_path)
    data = ("-d", tmp_path / "corpus.json", "--devices", 2, "--output", tmp_path / "new.json")
    done = run_script(SCRIPT, *data, *args)
    assert done.returncode == 2 and sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "new.json").exists()

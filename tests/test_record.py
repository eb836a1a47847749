"""The script that makes the recorded outputs again: what it runs, and what it writes."""

import pytest
import record
from helpers import ROOT, name_of
from test_pages import RECORDED

pytestmark = pytest.mark.check

CPU = "# 2 cores of an AMD EPYC, 24 GiB, Linux; Python 3.11.7, torch 2.13.0+cpu; 2026-11-24"
OBSTACLES = {name_of(path): record.obstacle(*record.read(path)[:2]) for path in RECORDED}
RUNNABLE = [record.read(ROOT / name)[0] for name, why in OBSTACLES.items() if why is None]


def test_each_recording_can_be_made_again_or_has_a_reason():
    assert not [why for why in OBSTACLES.values() if why and why.startswith("unknown")]
    assert OBSTACLES["01-single-gpu/recorded/make-train.txt"] is None
    assert OBSTACLES["02-ddp/recorded/trace_ranks.txt"] == "needs a GPU"
    assert OBSTACLES["03-multi-node/recorded/job.txt"] == "needs a cluster"
    assert OBSTACLES["03-multi-node/recorded/fault_no-route.txt"].startswith("prepared by hand: ")
    missing = OBSTACLES["03-multi-node/recorded/compare_runs.txt"]
    assert missing == "no command on a page makes outputs/one, outputs/two"
    assert len(set(RUNNABLE)) == len(RUNNABLE), "a second recording would be left out"


def test_another_form_of_command_is_unknown():
    """Planted."""
    assert record.obstacle("NPROC_PER_NODE=4 bash 02-ddp/launch.sh", CPU) is None
    for command in ("ruby 01-single-gpu/train_llm.rb", "make test", "cd / && python a.py"):
        assert record.obstacle(command, CPU) == f"unknown form of command: {command}"


def test_what_a_command_reads_is_made_before_it():
    order = record.in_order(RUNNABLE)
    assert set(RUNNABLE) <= set(order) and len(set(order)) == len(order)
    made = set()
    for command in order:
        assert set(record.used_by(command)) <= made, command
        made |= set(record.made_by(command))
    chain = [
        "python 01-single-gpu/train_llm.py -e my-run",
        'python 01-single-gpu/generate.py outputs/my-run --prompt "    def"',
    ]
    assert record.in_order(chain[1:]) == chain
    (old_tuned,) = [each for each in RUNNABLE if "-e old-tuned" in each]
    names = ("> paragraphs.jsonl", "-e base", "base-model", "-e tuned", "tuned-model", old_tuned)
    for name, command in zip(names, record.in_order([old_tuned]), strict=True):
        assert name in command


def test_a_diff_that_the_page_applies_is_applied():
    (tuned,) = [each for each in RUNNABLE if "-e answers" in each]
    (parallel,) = [each for each in RUNNABLE if "--tensor-parallel" in each]
    assert record.DIFFS[tuned] == "02-ddp/instruct.diff"
    assert record.DIFFS[parallel] == "05-mixed-precision/tensor-parallel.diff"
    assert record.DIFFS["bash 02-ddp/launch.sh"] == ""


def test_a_diff_is_reverted_even_if_the_command_fails(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("one\n")
    (tmp_path / "a.diff").write_text("--- a/text\n+++ b/text\n@@ -1 +1 @@\n-one\n+two\n")
    command = "cat text; exit 3"
    monkeypatch.setitem(record.DIFFS, command, "a.diff")
    assert record.run(command, tmp_path) == (3, "two\n")
    assert (tmp_path / "text").read_text() == "one\n"


def test_what_is_written(tmp_path):
    """A failed command leaves the files as they were."""
    file, metrics = tmp_path / "a.txt", tmp_path / "a.metrics.jsonl"
    old = "12:00 loss 8.2 in 3 s\nthe run's folder is outputs/a-1; ...\n"
    file.write_text(f"python a.py\n{CPU}; tests ran on the same cores\n{old}")
    metrics.write_text("old")
    (tmp_path / "outputs/a-2").mkdir(parents=True)
    (tmp_path / "outputs/a-2/metrics.jsonl").write_text("new")
    before = file.read_text()
    new = "12:30 loss 8.3 in 4 s\nthe run's folder is outputs/a-2; ...\n"
    for status, output in ((1, new), (0, "no line about the folder\n")):
        assert record.record(file, status, output, tmp_path).startswith("FAILED")
        assert (file.read_text(), metrics.read_text()) == (before, "old")

    assert record.record(file, 0, new, tmp_path) == "only times and digits differ"
    command, machine, output = record.read(file)
    assert (command, output, metrics.read_text()) == ("python a.py", new, "new")
    assert ", torch 2." in machine and "same cores" not in machine
    assert record.obstacle(command, machine) is None
    assert record.record(file, 0, new, tmp_path) == "identical"
    assert record.record(file, 0, f"{new}more\n", tmp_path) == "1 line differs"

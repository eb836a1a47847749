"""The result files: each number can be made again with a program that exists.

Rows of measure.py have a commit and a checksum of the code that ran. They are compared with the
repository's history where it is complete: archives and shallow clones have none.
"""

import argparse
import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import figures
import measure
import optimizers
import predictions
import pytest
import report
from helpers import ROOT, environment

RESULTS = {path.name: json.loads(path.read_text()) for path in measure.RESULTS.glob("*.json")}
OF_ROWS = [f"{name}.json" for name in report.MEASURED]
# Files of a tree with uncommitted changes, which are to be made again.
DIRTY = {"fabrics_cpu.json", "model.json", "tokenizing.json", "trace_cpu.json"}


# --- rules: each returns complaints ---


def gone_programs(results: dict[str, dict], root: Path = ROOT) -> list[str]:
    """Each result file is of a program that exists."""
    complaints = []
    for name, found in results.items():
        if name in OF_ROWS:
            program = "tests/benchmarks/measure.py"
        elif name == "predictions.json":
            program = "tests/benchmarks/predictions.py"
        else:
            program = re.search(r"\S+\.(py|sh)\b", found["machine"]["command"])[0]
        if not (root / program).exists():
            complaints.append(f"{name}: no such program: {program}")
    return complaints


def wrong_rows(results: dict[str, dict]) -> list[str]:
    """Each row of a result file is a row of measure.py, as it is defined there."""
    complaints = []
    for name in OF_ROWS:
        for row in results.get(name, {"rows": []})["rows"]:
            label = row["label"]
            if label not in measure.ROWS:
                complaints.append(f"{name}: no row of measure.py: {label}")
            elif row["row"] != measure.ROWS[label].definition():
                complaints.append(f"{name}: measure.py defines this row differently: {label}")
            elif not measure.measured_runs(row):
                complaints.append(f"{name}: no run finished: {label}")
            elif not re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]) or not row["machine"]["torch"]:
                complaints.append(f"{name}: no date or no version: {label}")
            elif name != "older.json" and not re.fullmatch("[0-9a-f]{16}", row["checksum"] or ""):
                complaints.append(f"{name}: no checksum: {label}")
    return complaints


def wrong_commits(results: dict[str, dict]) -> list[str]:
    """Each result is of a commit, without changes. older.json says which of its rows are not."""
    complaints = []
    for name, found in results.items():
        if name == "predictions.json":  # they are compared with memory.py instead
            continue
        rows = found["rows"] if name in OF_ROWS else [found["machine"]]
        for row in rows:
            where = f"{name}: {row.get('label', '')}"
            if not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", row["commit"]):
                complaints.append(f"{where}: no commit: {row['commit']}")
            elif row["commit"].endswith("-dirty") and name not in {"older.json", *DIRTY}:
                complaints.append(f"{where}: uncommitted changes")
    return complaints


@functools.cache
def has_history() -> bool:
    """Return whether this is a complete clone: a new repository of the files has no such commit."""
    complete = (measure.git("rev-parse", "--is-shallow-repository") or "").strip() == "false"
    return complete and any(measure.files_at(row["commit"]) for row in RESULTS["h200.json"]["rows"])


def wrong_checksums(results: dict[str, dict]) -> list[str]:
    """The code of each row's commit has the row's checksum, where the history is complete."""
    if not has_history():
        return []
    complaints = []
    for name in OF_ROWS:
        for row in results.get(name, {"rows": []})["rows"] if name != "older.json" else ():
            there = measure.checksum_at(measure.ROWS[row["label"]], row["commit"])
            if there != row["checksum"]:
                complaints.append(f"{name}: {row['commit']} has other code: {row['label']}")
    return complaints


def unused_rows(results: dict[str, dict]) -> list[str]:
    """Something shows each row of older.json. Rows of h200.json may wait for a page."""
    for page in report.pages():
        report.fill(page.read_text(), page)
    figures.draw_all()
    labels = (row["label"] for row in results["older.json"]["rows"])
    return [
        f"older.json: nothing shows {label}"
        for label in labels
        if ("older", label) not in report.USED
    ]


RULES = (gone_programs, wrong_rows, wrong_commits, wrong_checksums, unused_rows)


@pytest.mark.check
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_results(rule):
    assert rule(RESULTS) == []


# --- planted mistakes ---


def a_result(**changes: object) -> dict[str, dict]:
    """Return a result file of measure.py with one row, which has some changes."""
    row = measure.ROWS["chapter 1, TF32"]
    found = {
        "label": row.label,
        "row": row.definition(),
        "commit": "0123456789ab",
        "checksum": "0" * 16,
        "date": "2026-11-29",
        "machine": {"torch": "2.11.0"},
        "runs": [{"tokens_per_s": 1.0}],
    }
    return {"h200.json": {"rows": [found | changes]}}


@pytest.mark.check
@pytest.mark.parametrize(
    ("rule", "changes", "complaint"),
    [
        (wrong_rows, {}, None),
        (wrong_commits, {}, None),
        (wrong_rows, {"label": "chapter 1, TF33"}, "no row of measure.py"),
        (wrong_rows, {"row": {"label": "chapter 1, TF32"}}, "defines this row differently"),
        (wrong_rows, {"runs": [{"failed": "out of memory"}]}, "no run finished"),
        (wrong_rows, {"checksum": None}, "no checksum"),
        (wrong_rows, {"date": "yesterday"}, "no date"),
        (wrong_commits, {"commit": "0123456789ab-dirty"}, "uncommitted changes"),
        (wrong_commits, {"commit": "unknown"}, "no commit"),
    ],
)
def test_planted_rows(rule, changes, complaint):
    found = rule(a_result(**changes))
    assert (complaint in "\n".join(found)) if complaint else found == []


@pytest.mark.check
def test_planted_program(tmp_path):
    """Without its program, each file is complained about."""
    found = gone_programs(RESULTS, tmp_path)
    assert len(found) == len(RESULTS)


@pytest.mark.check
def test_planted_code():
    """Rows are compared with the code of their commit, in a complete clone."""
    row = measure.ROWS["8B, TF32, full, zero2"]
    paths = ["04-fsdp/train_llm.py", "04-fsdp/diffs/zero2.diff", "04-fsdp/diffs/hsdp.diff"]
    paths += ["common/data.py", "common/README.md", "05-mixed-precision/train_llm.py"]
    files = dict.fromkeys(paths, b"before")
    before = measure.checksum(row, files, files.get)
    for path in paths:
        changed = measure.checksum(row, files, (files | {path: b"after"}).get)
        assert (changed != before) == (path in (*paths[:2], "common/data.py")), path
    if has_history():
        head = measure.git("rev-parse", "HEAD").strip()
        right = a_result(commit=head, checksum=measure.checksum_at(row, head))
        right["h200.json"]["rows"][0]["label"] = row.label
        assert wrong_checksums(right) == []
        right["h200.json"]["rows"][0]["checksum"] = "0" * 16
        assert "has other code" in "".join(wrong_checksums(right))


@pytest.mark.check
def test_numbers_that_were_changed_by_hand_are_found():
    """In a table and in a sentence; test_pages.py compares all pages."""
    page = ROOT / "02-ddp/README.md"
    text = page.read_text()
    assert report.fill(text, page) == text
    *_, sentence = report.SENTENCES[page]
    (match,) = sentence.matches(text)
    start, end = match.span(1)
    for wrong in ("9.99", "1,234"):
        assert report.fill(text[:start] + wrong + text[end:], page) == text
    page = ROOT / "02-ddp/measurements.md"
    text = page.read_text()
    row = re.search(r"^\| DDP \| [\d-]+ \| 512 \| 4 \| 64 \| (\d+) \|", text, re.MULTILINE)
    assert report.fill(text[: row.start(1)] + "1" + text[row.end(1) :], page) == text


# --- measure.py ---


@pytest.mark.check
def test_rows_are_measurable():
    """Their variants apply, and their changed texts are in the scripts."""
    for row in measure.ROWS.values():
        measure.variants.choose(row.chapter, row.variants.split())
        script = ROOT / measure.variants.CHAPTERS[row.chapter] / "train_llm.py"
        for text, _ in row.change:
            assert script.read_text().count(text) == 1, row.label
        assert row.gpus % row.nodes == 0 and row.warm_up < row.steps, row.label


@pytest.mark.check
def test_a_row_is_taken_only_with_the_code_of_its_commit(tmp_path, monkeypatch, capsys):
    (found,) = a_result(machine={"gpu": "NVIDIA H200"})["h200.json"]["rows"]
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    rows = {"right": {}, "other code": {"checksum": "f" * 16}, "failed": {}, "tiny": {"tiny": True}}
    monkeypatch.setattr(measure, "ROWS", dict.fromkeys(rows, measure.ROWS["chapter 1, TF32"]))
    monkeypatch.setattr(measure, "checksum_at", lambda row, commit: "0" * 16)
    new = [found | {"label": label} | changes for label, changes in rows.items()]
    new[2]["runs"] = [{"failed": "out of memory"}]
    (tmp_path / "new.json").write_text(json.dumps({"rows": [*new, found | {"label": "other"}]}))
    assert not measure.merge(tmp_path / "new.json")
    assert [*measure.read_rows(tmp_path / "h200.json")] == ["right"]
    complaints = capsys.readouterr().err
    expected = ("other code: 0123456789ab has other code", "failed: failed", "other: is no row")
    for each in (*expected, "tiny: was only tried"):
        assert each in complaints


@pytest.mark.ci
def test_rows_run_without_gpus(tmp_path):
    """One chapter, and one row that cannot run here, which does not stop the other."""
    command = [sys.executable, ROOT / "tests/benchmarks/measure.py", "--tiny", "--commit", "abc"]
    command += ["--only", "DDP, 8 per GPU on 1", "GPT-2, fp8", "--folder", tmp_path]
    command += ["--output", tmp_path / "rows.json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = measure.read_rows(tmp_path / "rows.json")
    (run,) = rows["DDP, 8 per GPU on 1"]["runs"]
    assert run["tokens_per_s"] > 0 and run["losses"].keys() == {"1", "2"}
    assert "fp8 needs a GPU" in rows["GPT-2, fp8"]["runs"][0]["failed"]
    assert rows["GPT-2, fp8"]["commit"] == "abc"


@pytest.mark.check
def test_what_a_run_has_printed_may_end_within_a_character(tmp_path):
    """measure.py reads the log while it is written, in whatever locale."""
    (tmp_path / "log").write_bytes("100%|█".encode()[:-1])
    assert measure.log_of(tmp_path) == "100%|\N{REPLACEMENT CHARACTER}"


# --- optimizers.py ---


@pytest.mark.check
def test_runs_of_another_training_are_not_taken_over(tmp_path):
    file = tmp_path / "optimizers.json"
    args = argparse.Namespace(output=file, training="-m llama-tiny")
    assert optimizers.read_rows(args) == []
    rows = [{"optimizer": "muon", "lr": 0.01, "seed": 0, "steps": 8, "eval_losses": {"8": 2.0}}]
    file.write_text(json.dumps({"results": {"training": "-m llama-tiny", "rows": rows}}))
    assert optimizers.read_rows(args) == rows
    args.training = ""
    with pytest.raises(SystemExit, match="has runs with --training '-m llama-tiny': give another"):
        optimizers.read_rows(args)


# --- predictions ---


@pytest.mark.check
def test_every_number_with_an_expression_is_of_a_row():
    """sentences.jinja names only rows of measure.py and setups of memory.py."""
    setups = predictions.SETUPS
    for fragments in report.SENTENCES.values():
        for expression in (e for fragment in fragments for e in fragment.parts[1::2]):
            for node in ast.walk(ast.parse(expression.replace("|f", "; f"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    known = node.value in measure.ROWS or node.value in setups
                    assert known or node.value.startswith((".", ",")), node.value

"""A chapter is the one before it plus what it teaches: what the diff between them may not hold.

A rule takes the older and the newer text and returns its complaints. ROT has a mistake that it must
find. The .diff files obey the rules too. At the end: how large common may be, and what its modules
may import.
"""

import ast
import functools
import io
import keyword
import re
import subprocess
import tempfile
import tokenize
from itertools import pairwise, product
from pathlib import Path

import helpers
import pytest
from helpers import CHAPTERS, ROOT, assert_clean, patch

pytestmark = pytest.mark.check

# More than these is a sign that a script holds what teaches too little.
FIRST_LINES, ADDED_LINES, MOST_LINES = 290, 65, 465
COMMON_MODULES, COMMON_LINES = 12, 2433
SECTIONS = ["setup", "model", "data", "optimizer", "resume", "train"]


@functools.cache
def hunks(old: str, new: str) -> list[tuple[list[str], list[str]]]:
    """Return the removed and the added lines of each hunk, as git shows them."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, "old.py"), Path(folder, "new.py")]
        for path, text in zip(paths, (old, new), strict=True):
            path.write_text(text)
        command = ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", "-U0", *paths]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return [
        tuple([line[1:] for line in lines if line[0] == sign] for sign in "-+")
        for lines in helpers.hunks(done.stdout)
    ]


@functools.cache
def names(text: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    words = {token.string for token in tokens if token.type == tokenize.NAME}
    return words - {*keyword.kwlist, "_"}


@functools.cache
def flags(text: str) -> dict[str, dict[str, str]]:
    """Map each flag, in the order of the parser, to its names and arguments."""
    (get_args,) = (each for each in ast.parse(text).body if getattr(each, "name", "") == "get_args")
    found = {}
    for statement in get_args.body:
        if isinstance(statement, ast.Expr):  # add(...)
            words = [word.value for word in statement.value.args]  # -s, --seq-length
            keywords = statement.value.keywords  # that of **options is None
            arguments = {str(each.arg): ast.unparse(each.value) for each in keywords}
            found[words[-1]] = {"names": ", ".join(words), **arguments}
    return found


# --- the rules ---


def moved_lines(old: str, new: str) -> list[str]:
    removed, added = (
        {line.strip() for hunk in hunks(old, new) for line in hunk[side]} for side in (0, 1)
    )
    moved = [line for line in sorted(removed & added) if re.search(r"\w", line)]
    return [f"moved or re-indented: {line}" for line in moved]


def renamed_names(old: str, new: str) -> list[str]:
    gone, fresh = names(old) - names(new), names(new) - names(old)
    complaints = []
    for removed, added in hunks(old, new):
        for line, name, new_name in product(removed, gone, fresh):
            renamed = re.sub(rf"\b{name}\b", new_name, line)
            if renamed != line and renamed in added:
                complaints.append(f"{name} is renamed to {new_name}: {renamed.strip()}")
    return complaints


def lines_over_budget(old: str, new: str) -> list[str]:
    """Chapter 1 has the empty text before it."""
    count = len(new.splitlines())
    budget = min(len(old.splitlines()) + ADDED_LINES, MOST_LINES) if old else FIRST_LINES
    return [f"{count} lines, of at most {budget}"] if count > budget else []


def changed_flags(old: str, new: str) -> list[str]:
    before, after = flags(old), flags(new)
    complaints = [f"{flag} is gone" for flag in before if flag not in after]
    kept = [flag for flag in before if flag in after]
    for flag in kept:
        for key in sorted(before[flag].keys() | after[flag].keys()):
            was, now = before[flag].get(key), after[flag].get(key)
            complaints += [f"{flag}: {key} was {was}, is {now}"] * (was != now)
    if kept != [flag for flag in after if flag in before]:
        complaints.append(f"flags in another order: {list(after)}")
    return complaints


# --- the chapters ---

# What each rule must find: a pattern in chapter 2, its replacement, and a part of the complaint.
ROT = {
    moved_lines: ("( +)(tracker.fin.*)", r"\1if True:\n\1    \2", "re-indented: tracker.finish()"),
    renamed_names: (r"\btoken_flops\b", "n_flops", "token_flops is renamed to n_flops"),
    lines_over_budget: (r"\Z", "pass\n" * 80, "lines, of at most"),
    changed_flags: ("default=0,", "default=0.0,", "--seed: default was 0, is 0.0"),
}
# The complaints that are meant, of diffs beside the chapters.
MEANT = {
    "context-parallel": ("lines_over_budget",),
    "share-changed": ("lines_over_budget",),
    "tensor-parallel": ("lines_over_budget",),
    "instruct": (
        "changed_flags: --text-column: help was",
        "renamed_names: load_sequences is renamed to load_conversations",
    ),
}


def read(chapter: str) -> str:
    return (ROOT / chapter / "train_llm.py").read_text()


@pytest.mark.parametrize("rule", ROT, ids=lambda rule: rule.__name__)
def test_chapters_keep_what_was_before(rule):
    """And the rule finds a planted mistake."""
    for old, new in pairwise(CHAPTERS):
        assert rule(read(old), read(new)) == [], new
    before, after = map(read, CHAPTERS[:2])
    pattern, new, complaint = ROT[rule]
    rotten = re.sub(pattern, new, after, flags=re.MULTILINE)
    assert rotten != after, "nothing to replace"
    assert complaint in "\n".join(rule(before, rotten))


def test_chapter_1_fits_its_budget():
    assert lines_over_budget("", read(CHAPTERS[0])) == []
    assert lines_over_budget("", "pass\n" * 291) == ["291 lines, of at most 290"]


def test_sections_and_docstrings():
    for chapter in CHAPTERS:
        assert re.findall(r"^ *# --- (.+) ---$", read(chapter), re.MULTILINE) == SECTIONS
        docstring = read(chapter).split('"""')[1].strip().splitlines()
        assert docstring[0].endswith(".")
        (started,) = re.findall(rf"{chapter}/[\w.]+", docstring[-1])
        assert (ROOT / started).exists()


def pages_of(chapter: str) -> str:
    return "".join((ROOT / chapter / name).read_text() for name in ("README.md", "reference.md"))


def test_pages_explain_each_flag():
    """Chapter 1 has a table with their defaults, and later chapters name those that they add."""
    row = r"^\| (?:`-\w`, )?`(--[\w-]+)[^|]*` \| ([^|]+) \|"
    rows = dict(reversed(re.findall(row, pages_of(CHAPTERS[0]), re.MULTILINE)))  # the first of each
    for flag, facts in flags(read(CHAPTERS[0])).items():
        value = re.escape(facts["default"].strip("'")) if "default" in facts else ".*"
        value = "off" if "action" in facts else value
        assert flag in rows, f"{CHAPTERS[0]}/reference.md has no row for {flag} with its default"
        assert re.search(rf"(?<![\w.]){value}(?![\w.])", rows[flag]), flag
    for before, after in pairwise(CHAPTERS):
        named = {*re.findall(r"`(--[\w-]+)", pages_of(after).replace("--no-", "--"))}
        missing = flags(read(after)).keys() - flags(read(before)).keys() - named
        assert not missing, f"no page of {after} names {missing}"


def test_diffs_beside_the_chapters(tmp_path):
    """They keep the rules, patched scripts are clean, and a page names each diff."""
    diffs = sorted(ROOT.glob("*/diffs/*.diff"))
    shown = "".join(page.read_text() for page in ROOT.glob("[0-9]*/**/*.md"))
    assert MEANT.keys() < {diff.stem for diff in diffs}
    for diff in diffs:
        text = diff.read_text()
        (chapter,) = re.findall(r"^--- a/(\S+)/train_llm.py", text, re.MULTILINE)
        script = patch(chapter, tmp_path / diff.stem, diff=diff) / "train_llm.py"
        old, new = read(chapter), script.read_text()
        assert new != old
        found = [f"{rule.__name__}: {each}" for rule in ROT for each in rule(old, new)]
        assert [each for each in found if not each.startswith(MEANT.get(diff.stem, ()))] == [], diff
        assert f"/{diff.name}" in shown, f"no page names {diff}"
    assert_clean(tmp_path)


# --- common ---


def common_files() -> dict[str, str]:
    """Map the name of each Python file in common to its text."""
    return {path.name: path.read_text() for path in (ROOT / "common").glob("*.py")}


def test_common_is_small_and_leaves_to_the_chapters_what_they_teach():
    files = common_files()
    assert sum(len(text.splitlines()) for text in files.values()) <= COMMON_LINES
    assert len(files) - 1 <= COMMON_MODULES, "without __init__.py"
    assert not re.search(r"DistributedDataParallel\(|fully_shard\(", "".join(files.values()))


def test_imports_in_common_point_downwards():
    """A module imports only from modules that are above it in the README's table."""
    files, readme = common_files(), (ROOT / "common/README.md").read_text()
    order = re.findall(r"^\| `(\w+\.py)` \|", readme, re.MULTILINE)
    assert {*order} == files.keys() - {"__init__.py"}, "the table has other modules"
    for row, file in enumerate(order):
        imported = re.findall(r"^ *(?:from|import) common\.(\w+)", files[file], re.MULTILINE)
        for names in re.findall(r"^ *from common import (.+)", files[file], re.MULTILINE):
            imported += names.split(", ")
        assert {f"{name}.py" for name in imported} <= {*order[:row]}, file

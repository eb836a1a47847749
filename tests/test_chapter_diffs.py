"""A chapter is the one before it plus what it teaches: what the diff between them may not hold.

A rule takes the older and the newer text and returns its complaints. ROT has a mistake that it must
find. Variants obey the rules too. At the end: what common leaves to the chapters, and what its
modules may import.
"""

import ast
import functools
import io
import keyword
import re
import subprocess
import tempfile
import tokenize
from collections.abc import Iterable
from itertools import pairwise, product
from pathlib import Path

import helpers
import pytest
from helpers import CHAPTERS, ROOT, assert_clean, make_variant

from common import variants

pytestmark = pytest.mark.check

# The goals are 285 lines for chapter 1, +42, +34, +55 and +15 lines for the steps, 400 lines and 30
# flags for chapter 5. The bounds are more than a tenth above the goals: nobody needs to squeeze a
# line in, and a second idea in a step does not fit.
FIRST_LINES, LAST_LINES, FLAGS = 315, 440, 33
ADDED_LINES = dict(zip(CHAPTERS[1:], (48, 38, 62, 20), strict=True))
SECOND_IDEA = "is the difference a second idea? Then it is a variant, in diffs/"
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
    """The chapter is the one that the docstring of the newer text starts."""
    (chapter,) = re.findall(rf"\b({'|'.join(CHAPTERS)})/", new.split('"""')[1])
    complaints, count = [], len(new.splitlines())
    if chapter in ADDED_LINES:
        added = sum(len(lines) for _, lines in hunks(old, new))
        if added > ADDED_LINES[chapter]:
            most = ADDED_LINES[chapter]
            complaints.append(f"+{added} lines, more than {most}: {SECOND_IDEA}")
    most = FIRST_LINES if chapter == CHAPTERS[0] else LAST_LINES
    if count > most:
        complaints.append(f"{count} lines, more than {most}: {SECOND_IDEA}")
    if len(flags(new)) > FLAGS:
        complaints.append(f"{len(flags(new))} flags, more than {FLAGS}: {SECOND_IDEA}")
    return complaints


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
    lines_over_budget: (r"\Z", "pass\n" * 40, "lines, more than 48: is the difference"),
    changed_flags: ("default=0,", "default=0.0,", "--seed: default was 0, is 0.0"),
}
# The complaints that are meant, by variant.
MEANT = {
    "float16": (
        "changed_flags: --precision: ",
        "renamed_names: bfloat16 is renamed to float16",
    ),
    "instruct": (
        "changed_flags: --text-column: help was",
        "renamed_names: load_sequences is renamed to load_conversations",
    ),
    "pure-bfloat16": ("changed_flags: --precision: ",),
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
    first = read(CHAPTERS[0])
    assert lines_over_budget("", first) == []
    (complaint,) = lines_over_budget("", first + "pass\n" * 60)
    assert "lines, more than 315: is the difference a second idea?" in complaint
    flag = '    add("--save-dir'
    many = "".join(f"{flag}-{n}')\n".replace("'", '"') for n in range(20))
    (complaint,) = lines_over_budget("", first.replace(flag, many + flag))
    assert "flags, more than 33" in complaint


def test_sections_and_docstrings():
    for chapter in CHAPTERS:
        assert re.findall(r"^ *# --- (.+) ---$", read(chapter), re.MULTILINE) == SECTIONS
        docstring = read(chapter).split('"""')[1].strip().splitlines()
        assert docstring[0].endswith(".")
        (started,) = re.findall(rf"{chapter}/[\w.]+", docstring[2])
        assert (ROOT / started).exists() and docstring[3].startswith("make variant  # ")


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


def test_variants_keep_the_rules(tmp_path):
    """Each in each chapter, on top of what it needs; the scripts are clean, and a page has it.

    How long a variant is, is no rule: it may need lines that a step would not get.
    """
    gallery, complaints = variants.all_variants(), []
    assert MEANT.keys() < {variant.name for variant in gallery}

    def code(number: int, names: Iterable[str]) -> str:
        """Return a script without its docstring, whose command differs between variants."""
        made = tmp_path / "+".join([variants.CHAPTERS[number], *sorted(names)])
        if not made.exists():
            make_variant(tmp_path, variants.CHAPTERS[number], *names)
        return (made / "train_llm.py").read_text().split('"""', 2)[2]

    for variant in gallery:
        for number, needs in variant.needs.items():
            old, new = code(number, needs), code(number, [variant.name, *needs])
            for rule in (moved_lines, renamed_names, changed_flags):
                found = [f"{rule.__name__}: {each}" for each in rule(old, new)]
                meant = MEANT.get(variant.name, ())
                complaints += [(variant, each) for each in found if not each.startswith(meant)]
    assert complaints == []
    assert_clean(tmp_path)


def test_a_page_has_each_variant():
    shown = "".join(page.read_text() for page in ROOT.glob("[0-9]*/**/*.md"))
    for variant in variants.all_variants():
        assert f"/{variant.name}.diff" in shown, f"no page links to {variant.path}"


# --- common ---


def common_files() -> dict[str, str]:
    """Map the path of each Python file in common to its text, but for __init__.py."""
    folder = ROOT / "common"
    paths = [path for path in folder.glob("**/*.py") if path.name != "__init__.py"]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def imported_files(text: str) -> set[str]:
    """Return the paths of the files in common that a file of common imports."""
    modules = set(re.findall(r"^ *(?:from|import) common\.([\w.]+)", text, re.MULTILINE))
    modules.discard("inputs")
    for package, names in re.findall(r"^ *from common(\.inputs)? import (.+)", text, re.MULTILINE):
        modules |= {f"{package[1:]}.{name}".lstrip(".") for name in names.split(", ")}
    return {module.replace(".", "/") + ".py" for module in modules}


def test_common_leaves_to_the_chapters_what_they_teach():
    text = "".join(common_files().values())
    assert not re.search(r"DistributedDataParallel\(|fully_shard\(", text)


@pytest.mark.parametrize("bug", [None, "from common import checkpoint\n"])
def test_imports_in_common_point_downwards(bug):
    """A module imports only from modules that are above it in the README's tables.

    Of what the scripts call, only data.py, which opens the data, imports from inputs.
    """
    files, readme = common_files(), (ROOT / "common/README.md").read_text()
    rows = re.findall(r"^\| `([\w/]+(?:\.py|/))` \|", readme, re.MULTILINE)
    inputs = [row for row in rows if re.fullmatch(r"inputs/\w+\.py", row)]
    order = []
    for row in rows:
        order += inputs if row == "inputs/" else [row] if row.endswith(".py") else []
    order = list(dict.fromkeys(order))
    assert {*order} == files.keys(), "the tables have other modules"
    found = []
    for row, file in enumerate(order):
        imported = imported_files((bug or "") * (file == "data.py") + files[file])
        allowed = {
            path for path in order[:row] if file == "data.py" or "/" in file or "/" not in path
        }
        found += [f"{file} imports {path}" for path in sorted(imported - allowed)]
    assert found == (["data.py imports checkpoint.py"] if bug else [])

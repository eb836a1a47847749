"""A chapter is the one before it plus what it teaches: what the diff between them may not hold.

A rule takes the older and the newer text and returns its complaints; below, planted rot turns each
of them red. At the end: how large common may be, and what its modules may import.
"""

import argparse
import ast
import functools
import io
import keyword
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, pairwise, product
from pathlib import Path

import pytest
from helpers import CHAPTERS, ROOT
from runner import load_script

pytestmark = pytest.mark.check

# More than these is a sign that a script holds what teaches too little.
FIRST_LINES, ADDED_LINES, MOST_LINES = 275, 60, 440
COMMON_MODULES, COMMON_LINES = 18, 3400
WORDS = ["-1", "0", "0.5", "1", "inf", "word", ""]  # tell the types of flags apart


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
    found = []
    for line in done.stdout.splitlines():
        if line.startswith("@@"):
            found.append(([], []))
        elif found and line[0] in "-+":
            found[-1]["-+".index(line[0])].append(line[1:])
    return found


def tokens(text: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


def names(text: str) -> set[str]:
    words = {token.string for token in tokens(text) if token.type == tokenize.NAME}
    return words - {*keyword.kwlist, "_"}


def code_of_lines(text: str) -> dict[str, list[str]]:
    """Map each line to its tokens, less its comment."""
    code = defaultdict(list)
    for token in tokens(text):
        if token.type != tokenize.COMMENT and token.string.strip():
            code[token.start[0] - 1].append(token.string)
    lines = text.splitlines()
    return {lines[number]: strings for number, strings in code.items()}


@functools.cache
def flags(text: str) -> dict[str, dict[str, str]]:
    """Map each flag, in the order of the parser's groups, to what argparse knows of it."""
    parsers = []
    parse = argparse.ArgumentParser.parse_args

    def note(self, *args: object) -> argparse.Namespace:
        parsers.append(self)
        return parse(self, *args)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(argparse.ArgumentParser, "parse_args", note)
        patch.setattr(sys, "argv", ["train_llm.py"])
        path = Path(folder, "train_llm.py")
        path.write_text(text)
        load_script(path).get_args()
    return {
        (action.option_strings or [action.dest])[-1]: facts(parsers[0], action, group.title)
        for group in parsers[0]._action_groups
        for action in group._group_actions
    }


def facts(parser: argparse.ArgumentParser, action: argparse.Action, group: str) -> dict[str, str]:
    known = {key: repr(value) for key, value in vars(action).items()}  # tells 1 from 1.0
    del known["container"], known["type"]  # shown with their addresses
    known |= {"kind": type(action).__name__, "group": group}
    for word in WORDS:
        try:
            known[f"the value for {word!r}"] = repr(parser._get_value(action, word))
        except argparse.ArgumentError as error:
            known[f"the value for {word!r}"] = error.message
    return known


# --- the rules ---


def moved_lines(old: str, new: str) -> list[str]:
    removed, added = (
        {line.strip() for hunk in hunks(old, new) for line in hunk[side]} for side in (0, 1)
    )
    moved = [line for line in sorted(removed & added) if re.search(r"\w", line)]
    return [f"moved or re-indented: {line}" for line in moved]


def renamed_names(old: str, new: str) -> list[str]:
    code, new_code = code_of_lines(old), code_of_lines(new)
    gone, fresh = names(old) - names(new), names(new) - names(old)
    complaints = []
    for line, new_line in chain(*(product(*hunk) for hunk in hunks(old, new))):
        for name, new_name in replaced(code.get(line, []), new_code.get(new_line, [])):
            if name in gone and new_name in fresh:
                complaints.append(f"{name} is renamed to {new_name}: {new_line.strip()}")
    return complaints


def replaced(code: list[str], new_code: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of names in which two lines differ; none if they differ in more."""
    if len(code) != len(new_code):
        return []
    pairs = set(zip(code, new_code, strict=True))
    consistent = all(len(set(side)) == len(pairs) for side in zip(*pairs, strict=True))
    differ = sorted((a, b) for a, b in pairs if a != b)
    return differ if consistent and all(name.isidentifier() for name in chain(*differ)) else []


def lines_over_budget(old: str, new: str) -> list[str]:
    """Chapter 1 has the empty text before it."""
    count = len(new.splitlines())
    budget = min(len(old.splitlines()) + ADDED_LINES, MOST_LINES) if old else FIRST_LINES
    return [f"{count} lines, of at most {budget}"] if count > budget else []


def changed_sections(old: str, new: str) -> list[str]:
    before, after = (re.findall(r"^ *# --- .*", text, re.MULTILINE) for text in (old, new))
    return [] if before == after else [f"sections were {before}, are {after}"]


def changed_functions(old: str, new: str) -> list[str]:
    """What is added may stand anywhere."""
    before, after = (top_level(text) for text in (old, new))
    kept = [name for name in after if name in before]
    return [] if before == kept else [f"functions were {before}, are {kept}"]


def top_level(text: str) -> list[str]:
    tree = ast.parse(text)
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return ["the docstring"] * bool(ast.get_docstring(tree)) + functions


def changed_flags(old: str, new: str) -> list[str]:
    before, after = flags(old), flags(new)
    complaints = [f"{flag} is gone" for flag in before if flag not in after]
    kept = [flag for flag in before if flag in after]
    for flag in kept:
        for key in before[flag]:
            was, now = before[flag][key], after[flag][key]
            complaints += [f"{flag}: {key} was {was}, is {now}"] * (was != now)
    if kept != [flag for flag in after if flag in before]:
        complaints.append(f"flags in another order: {list(after)}")
    for flag, following in pairwise(after):
        same_group = after[flag]["group"] == after[following]["group"]
        if same_group and flag not in before and following in before:
            complaints.append(f"{flag} is new and stands before {following}")
    return complaints


# --- planted rot ---

FLAG = r'^    add\("'
# What each rule must find: a pattern in chapter 2, its replacement, and a part of the complaint.
ROT = {
    moved_lines: [
        ("(.*model.eval.*\n)(.*\n)", r"\2\1", "re-indented: model.eval()"),
        ("( +)(tracker.fin.*)", r"\1if True:\n\1    \2", "re-indented: tracker.finish()"),
        (r"(.*\bsteps_per_epoch = .*\n)((?:.*\n)*?)(.*- resume)", r"\2\1\3", "steps_per_epoch ="),
    ],
    renamed_names: [
        (r"\btoken_flops\b", "n_flops", "token_flops is renamed to n_flops"),
        (r"\btokens_per_byte\b", "ratio", "tokens_per_byte is renamed to ratio"),
        (r"\blr_factor\b", "decay", "lr_factor is renamed to decay: def decay(step"),
    ],
    lines_over_budget: [(r"\Z", "pass\n" * 80, "lines, of at most")],
    changed_sections: [
        ("--- resume", "--- restore", "restore"),
        ("^    tracker.fin", r"    # --- end ---\n\g<0>", "# --- end"),
    ],
    changed_functions: [
        (r'\A"""[^"]*"""', "", "are ['get_args'"),
        ("def evaluate", "def validate", "are ['the docstring', 'get_args', 'main']"),
        (r"(?s)(@record.*)(@torch.no_g.*)(if __n)", r"\2\1\3", "'evaluate', 'main']"),
    ],
    changed_flags: [
        (FLAG + "--text-c.*\n", "", "--text-column is gone"),
        ('"--log-freq"', '"--log-every"', "--log-freq is gone"),
        ('"-b", ', "", "--batch-size: option_strings was"),
        ("default=24", "default=32", "--global-batch-size: default was 24, is 32"),
        ("default=0,", "default=0.0,", "--seed: default was 0, is 0.0"),
        (r'"bfloat16"\]', '"bfloat16", "float16"]', "--param-dtype: choices was"),
        (r"type=at_least\(2\)", "type=at_least(3)", "--seq-length: the value for 'word' was"),
        (r"type=at_least\(0.0\)", "type=float", "--lr: the value for '-1' was"),
        (r" type=at_least\(2\),", "", "--seq-length: the value for '0' was"),
        ('-column", ', r'\g<0>nargs="?", ', "--text-column: nargs was None, is '?'"),
        ("peak learning rate", "rate", "--lr: help was 'peak learning"),
        ("store_true", "store_false", "--compile: kind was"),
        ('"every N steps"', '"every"', "--log-freq: group was every N steps, is every"),
        (f"({FLAG}--seed.*\n)(.*\n.*\n)", r"\2\1", "--seed: group was run, is data"),
        (f"({FLAG}--eval.*\n)(.*\n)", r"\2\1", "flags in another order"),
        (FLAG + "--log-f", r'    add("--loud", help="")\n\g<0>', "--loud is new and stands before"),
    ],
}
# What no rule may complain of.
FINE = {
    "a comment": ("^    tracker.fin", r"    # Sends the rest.\n\g<0>"),
    "a line that stands twice already": ("^    progress_bar.close.*", r"\g<0>\n    dist.barrier()"),
    "a changed value": ("fused=True", "fused=False"),
    "another name that was there": ("args.max_grad_norm", "args.lr"),
    "a function": ("^@record", r"def shout() -> None:\n    print(1)\n\n\n\g<0>"),
    "a flag at the end": (FLAG + "--zero1.*\n", r'\g<0>    add("--loud", help="")\n'),
    "a flag of no group": ("^    return parser", r'    parser.add_argument("--loud")\n\g<0>'),
}
ROTS = [(rule, *rot) for rule, rots in ROT.items() for rot in rots]
by_rule = pytest.mark.parametrize("rule", ROT, ids=lambda rule: rule.__name__)


def read(chapter: str) -> str:
    return (ROOT / chapter / "train_llm.py").read_text()


def plant(text: str, pattern: str, replacement: str) -> str:
    planted = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    assert planted != text, "nothing to replace"
    return planted


@by_rule
@pytest.mark.parametrize("pair", list(pairwise(CHAPTERS)), ids=" to ".join)
def test_chapter_keeps_what_was_before(pair, rule):
    assert rule(*map(read, pair)) == []


def test_chapter_1_fits_its_budget():
    assert lines_over_budget("", read(CHAPTERS[0])) == []
    assert lines_over_budget("", "pass\n" * 276) == ["276 lines, of at most 275"]
    assert lines_over_budget("pass\n" * 430, "pass\n" * 441) == ["441 lines, of at most 440"]


@pytest.mark.parametrize(
    ("rule", "pattern", "new", "complaint"), ROTS, ids=[rot[-1] for rot in ROTS]
)
def test_rule_finds(rule, pattern, new, complaint):
    before, after = map(read, CHAPTERS[:2])
    assert rule(before, after) == []
    assert complaint in "\n".join(rule(before, plant(after, pattern, new)))


@by_rule
@pytest.mark.parametrize(("pattern", "new"), FINE.values(), ids=FINE)
def test_rule_allows(rule, pattern, new):
    before, after = map(read, CHAPTERS[:2])
    assert rule(before, plant(after, pattern, new)) == []


# --- common ---


def common_files() -> dict[str, str]:
    """Map the path of each Python file in common to its text."""
    folder = ROOT / "common"
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}


def modules(files: dict[str, str]) -> list[str]:
    return [file for file in files if not file.endswith("__init__.py")]


def too_large(files: dict[str, str]) -> list[str]:
    n_modules = len(modules(files))
    n_lines = sum(len(text.splitlines()) for text in files.values())
    complaints = []
    if n_modules > COMMON_MODULES:
        complaints.append(f"{n_modules} modules, of at most {COMMON_MODULES}")
    if n_lines > COMMON_LINES:
        complaints.append(f"{n_lines} lines, of at most {COMMON_LINES}")
    return complaints


def upward_imports(files: dict[str, str], readme: str) -> list[str]:
    """A module may import from its own folder and from modules above it in the README's table."""
    order = re.findall(r"^\| `(.*\.py)` \|", readme, re.MULTILINE)
    if sorted(order) != sorted(modules(files)):
        return [f"the table does not fit: {sorted({*order} ^ {*modules(files)})}"]
    # A package stands where the last of its modules stands.
    rows = {f"{Path(file).parent}/__init__.py": row for row, file in enumerate(order)}
    rows |= {file: row for row, file in enumerate(order)}
    return [
        f"{file} imports {imported}"
        for file, text in files.items()
        for imported in imported_files(text, rows)
        if rows[imported] >= rows[file]
        and (Path(file).parent != Path(imported).parent or "/" not in file)
    ]


def imported_files(text: str, files: Iterable[str]) -> list[str]:
    """Return which of common's files a text imports, also inside functions."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    inside = [name.split(".")[1:] for name in names if name.startswith("common.")]
    paths = ["/".join(parts) for parts in inside]
    return [
        found for path in paths for found in (f"{path}.py", f"{path}/__init__.py") if found in files
    ]


def readme_of_common() -> str:
    return (ROOT / "common/README.md").read_text()


def test_common_is_small():
    assert too_large(common_files()) == []


def test_planted_large_common():
    files = {"a.py": "pass\n" * COMMON_LINES, "b/__init__.py": ""}
    assert too_large(files) == []
    files |= {f"{number}.py": "" for number in range(COMMON_MODULES)}
    assert too_large(files) == ["19 modules, of at most 18"]
    files = {"a.py": "pass\n" * COMMON_LINES, "b/__init__.py": "pass\n"}
    assert too_large(files) == [f"{COMMON_LINES + 1} lines, of at most {COMMON_LINES}"]


def test_imports_in_common_point_downwards():
    assert upward_imports(common_files(), readme_of_common()) == []


@pytest.mark.parametrize(
    ("file", "planted", "imported"),
    [
        ("cli.py", "from common.models import sample_text", "models.py"),
        ("cli.py", "import common.tracker", "tracker.py"),
        ("models.py", "def f():\n    from common import timers", "timers.py"),
        (
            "data/sources.py",
            "from common.checkpoint import save_checkpoint",
            "checkpoint/__init__.py",
        ),
        ("distributed.py", "from common.data import Sequences", "data/__init__.py"),
        ("storage.py", "import common.storage", "storage.py"),
    ],
)
def test_planted_import_that_points_upwards(file, planted, imported):
    files = common_files()
    files[file] += f"\n{planted}\n"
    assert upward_imports(files, readme_of_common()) == [f"{file} imports {imported}"]


def test_planted_module_that_is_not_in_the_table():
    complaints = upward_imports({**common_files(), "extra.py": ""}, readme_of_common())
    assert complaints == ["the table does not fit: ['extra.py']"]

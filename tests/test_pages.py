"""The pages: each diff, command, link, table and recorded output is compared with the code.

A rule takes a page's path and text and returns complaints. ROT has a mistake that it must find. A
block of commands is marked with what it needs beyond this machine: ```bash gpu, cluster,
local_cluster, hub or horovod. The last section runs one command of each kind that this machine can
run.
"""

import argparse
import contextlib
import functools
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import report
from helpers import (
    CHAPTERS,
    ROOT,
    blocks,
    commands,
    copy_repository,
    environment,
    make_variant,
    name_of,
    prose,
    register,
    replace_in,
)
from runner import load_script

from common import variants

RECORDED = {name_of(path): path.read_text() for path in sorted(ROOT.glob("*/recorded/*.txt"))}
PAGES = [*report.pages(), ROOT / "common/README.md", ROOT / "tests/README.md"]
PAGES += [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")]
FRONT = ROOT / "README.md"
CHAPTER_PAGES = [ROOT / chapter / "README.md" for chapter in CHAPTERS]
HEADINGS = [
    *("The idea", "Run it", "The diff", "What it costs"),
    *("When it breaks", "Check yourself", "Where next"),
]
# How many words a page may have, as wc -w counts them. The longest pages had 10% fewer words when
# this was written: at a bound that is reached already, a contributor who adds a sentence would have
# to delete other people's.
TOPIC_WORDS = 1850
WORDS = {"reference.md": 3100, "measurements.md": 3100}
WORDS |= {f"{chapter}/README.md": 2900 for chapter in CHAPTERS}
WORDS |= {"README.md": 1300, "tests/README.md": 1800}
WORDS |= {"03-multi-node/topics/diagnosing.md": 2000}
WORDS |= {"05-mixed-precision/topics/gallery.md": 2600}  # which has a row for each variant
UNFOLDED_WORDS = 770  # of the front page
NEEDS = {"gpu", "cluster", "local_cluster", "hub", "horovod"}
LANGUAGES = (["bash"], ["diff"], ["text"], ["python"], ["dockerfile"])
# argparse, PyTorch and torchrun say these.
BY_OTHERS = ("unrecognized", "Unrecognized", "EADDRINUSE", "exitcode", "Expected", "CUDA")
BY_OTHERS += ("RendezvousConnectionError",)


# --- the rules ---


def wrong_headings(page: Path, text: str) -> list[str]:
    if page not in CHAPTER_PAGES:
        return []
    found = re.findall(r"^## (.+)$", text, re.MULTILINE)
    return [] if found == HEADINGS else [f"headings are {found}, not {HEADINGS}"]


def too_long(page: Path, text: str) -> list[str]:
    limit = WORDS.get(name_of(page), WORDS.get(page.name, TOPIC_WORDS))
    counted = [(text, limit)]
    if page == FRONT:
        counted.append((re.sub(r"<details>(?:.*\n)*?</details>", "", text), UNFOLDED_WORDS))
    words = ((len(part.split()), limit) for part, limit in counted)
    return [
        f"{found} words, {limit} at most: a reader meets the whole page at once, so move what only "
        "some readers need to another page"
        for found, limit in words
        if found > limit
    ]


def folded_headings(page: Path, text: str) -> list[str]:
    """The website closes a fold before a heading."""
    folds = re.findall(r"<details>\n((?:.*\n)*?)</details>", text)
    return [f"folded: {each}" for fold in folds for each in re.findall(r"^##+ .+", fold, re.M)]


def dead_links(page: Path, text: str) -> list[str]:
    complaints = []
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        if target.startswith("https://"):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            complaints.append(f"no such file: {target}")
        elif anchor and anchor not in anchors(text if file == page else file.read_text()):
            complaints.append(f"no such heading: {target}")
    return complaints


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}


def paths_that_are_gone(page: Path, text: str) -> list[str]:
    """Paths in `code` and in commands that begin with a folder of the repository.

    A path in variants/ is there if `make variant` can make its folder.
    """
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    words = " ".join(re.findall(r"`([^`]+)`", prose(text))).split()
    words += [word for _, command in commands(text) for word in command.split()]
    return [
        f"no such path: {word}"
        for word in words
        if re.fullmatch(r"[\w.-]+(/[\w.+-]+)+/?", word)
        and (
            word.split("/")[0] in folders - {".venv", "outputs"}
            or re.match(r"\d\d-|variants/\d\d-", word)
        )
        and not word.startswith("variants/...")
        and not exists(word)
    ]


# Made variants, until the process ends.
MADE = tempfile.TemporaryDirectory()


@functools.cache
def made(folder: str) -> Path:
    """Make the variant whose folder in variants/ has this name. Raises VariantError."""
    chapter, *names = folder.split("+")
    if names != sorted({*names}) or chapter not in CHAPTERS:
        raise variants.VariantError(f"make variant makes no folder {folder}")
    return make_variant(Path(tempfile.mkdtemp(dir=MADE.name)), chapter, *names)


def path_of(word: str) -> Path:
    """Return the path of a file of the repository or of a variant. Raises VariantError."""
    in_variant = re.fullmatch(r"variants/([\w+-]+)(/.*)?", word)
    return made(in_variant[1]) / (in_variant[2] or "").strip("/") if in_variant else ROOT / word


def exists(word: str) -> bool:
    try:
        return path_of(word).exists()
    except variants.VariantError:
        return False


def wrong_variants(page: Path, text: str) -> list[str]:
    """The variants that a command names apply together; the page makes those that it starts."""
    complaints, there, used = [], set(), set()
    for command in all_commands(text):
        used |= {*re.findall(r"variants/(\d\d-[\w+-]+)/", command)}
        for words in simple_commands(command):
            given = dict(word.split("=", 1) for word in words if "=" in word)
            if words[:1] != ["make"] or "WITH" not in given or given.get("CHAPTER") == "N":
                continue
            try:
                chosen = variants.choose(int(given.get("CHAPTER", 0)), given["WITH"].split())
                folder = [variants.CHAPTERS[int(given["CHAPTER"])]]
                folder = "+".join([*folder, *sorted(variant.name for variant in chosen)])
                made(folder)
                there |= {folder} if words[1] == "variant" else set()
            except variants.VariantError as error:
                complaints.append(f"{command}: {error}")
    return complaints + [f"nothing makes variants/{folder}" for folder in sorted(used - there)]


@functools.cache
def real_diff(page: Path) -> list[str]:
    """Return all lines of the diff that a lesson explains; none for other pages."""
    if page not in CHAPTER_PAGES[1:]:
        return []
    before = CHAPTER_PAGES[CHAPTER_PAGES.index(page) - 1]
    scripts = [each.with_name("train_llm.py") for each in (before, page)]
    command = ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", "-U999", *scripts]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.split("@@\n", 1)[1].splitlines()


def wrong_diffs(page: Path, text: str) -> list[str]:
    """A block is a piece of the real diff, or several pieces with a line of @@ between them.

    A block can also show a piece of a variant, or of another .diff file of the chapter. The front
    page shows pieces of the first diff. test_solutions.py looks at the solutions. What no block
    shows is for `make diff` and the website.
    """
    if page.parent.name == "solutions":
        return []
    real = real_diff(CHAPTER_PAGES[1] if page == FRONT else page)
    paths = {*ROOT.glob(f"{name_of(page)[:2]}-*/*/*.diff"), *ROOT.glob("[0-9]*/diffs/*.diff")}
    files = [path.read_text() for path in paths]
    complaints = []
    for _, block in blocks(text, "diff"):
        for piece in re.split(r"^@@.*\n", block, flags=re.MULTILINE):
            lines = [line or " " for line in piece.splitlines()]
            starts = [i for i in range(len(real)) if real[i : i + len(lines)] == lines]
            beside = any("\n".join(lines) in file for file in files)
            if lines and len(starts) != 1 and not beside:
                complaints.append(f"stands {len(starts)} times in the real diff:\n{piece}")
    return complaints


def wrong_diffstats(page: Path, text: str) -> list[str]:
    real = real_diff(page)
    if not real:
        return []
    added, removed = (sum(line[0] == sign for line in real) for sign in "+-")
    right = f"{added} insertion{'s' * (added != 1)}(+), {removed} deletion{'s' * (removed != 1)}(-)"
    found = {*re.findall(r"\d+ insertions?\(\+\)(?:, \d+ deletions?\(-\))?", text)}
    opening = text.split("## The diff\n")[1].split("```diff")[0]
    if found == {right} and right in opening:
        return []
    return [f"opens with {found}, not {right}: is the difference between the chapters meant?"]


def refused_arguments(page: Path, text: str) -> list[str]:
    """The parser of each script takes the arguments that a command gives it."""
    return [
        f"{command}: {script}: {complaint}"
        for command in all_commands(without_flags_of_diffs(text))
        for script, arguments in scripts_of(command)
        if (complaint := refusal(script, arguments))
    ]


def all_commands(text: str) -> list[str]:
    """Return the commands of a page in blocks and in `code`."""
    inline = re.findall(r"`((?:python|torchrun|bash|make)\s[^`]+)`", prose(text))
    return [*inline, *(command for _, command in commands(text))]


def without_flags_of_diffs(text: str) -> str:
    """Return a page less the flags, with their values, that diffs add which its commands apply."""
    for file in re.findall(r"^git apply (\S+\.diff)$", text, re.MULTILINE):
        diff = (ROOT / file).read_text()
        for flag in re.findall(r'^\+ +add\("(--[\w-]+)", default', diff, re.MULTILINE):
            text = re.sub(rf"{flag}\s[\w.]+", "", text)
    return text


def simple_commands(command: str) -> list[list[str]]:
    """Return the words of each part of a command between ; && || | and the like."""
    lexer = shlex.shlex(re.sub(r"\s#.*", "", command), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    parts = [[]]
    for word in lexer:
        if set(word) <= set("();<>|&"):
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def scripts_of(command: str) -> list[tuple[str, list[str]]]:
    """Return (script, its arguments) of each script of the repository that a command starts."""
    found = []
    for words in simple_commands(command):
        scripts = [word for word in words if re.search(r"\.(py|sh|sbatch)$", word)]
        if not scripts or {"pytest", "git", ".venv/bin/shellcheck"} & set(words):
            continue
        script = scripts[-1]  # a script that is given another script runs that one
        found.append((script, words[words.index(script) + 1 :]))
    return found


def refusal(script: str, arguments: list[str]) -> str:
    """Return what a script, or the script that a launch file starts, says against arguments."""
    if script.startswith("variants/..."):
        return ""
    if not exists(script):
        return "no such script"
    path = path_of(script)
    if path.name == "local_cluster.sh":  # its tests call it
        return ""
    if path.suffix != ".py":
        path = path.with_name(f"train_{'classifier' if 'classifier' in path.stem else 'llm'}.py")
    parser = parser_of(path)
    if parser is None:
        takes_words = "sys.argv" in path.read_text()
        return f"takes no arguments: {arguments}" if arguments and not takes_words else ""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            words = [f"@{ROOT / word[1:]}" if word[:1] == "@" else word for word in arguments]
            there = [word for word in words if word[:1] != "@" or Path(word[1:]).exists()]
            parser.parse_args(there)
        except SystemExit as end:
            return said.getvalue().splitlines()[-1] if end.code else ""
    return ""


@functools.cache
def parser_of(script: Path) -> argparse.ArgumentParser | None:
    """Run a script up to where it parses its arguments and return the parser; None without one.

    Horovod need not be installed.
    """
    if "parse_args(" not in script.read_text():
        return None

    stop = {"autospec": True, "side_effect": EOFError}
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", **stop) as parse_args,
        mock.patch.dict(os.environ),
        mock.patch.dict(sys.modules, dict.fromkeys(("horovod", "horovod.torch"), mock.Mock())),
        contextlib.suppress(EOFError),
    ):
        module = load_script(script)
        getattr(module, "get_args", module.main)()
    return parse_args.call_args.args[0]


def unknown_blocks(page: Path, text: str) -> list[str]:
    """A block of a language that no rule looks at, or a mark that no test knows."""
    opened = re.findall(r"^ *(?:```|~~~)(.*)$", text, re.MULTILINE)[::2]
    complaints = [
        f"unknown language: {each}" for each in opened if each.split()[:1] not in LANGUAGES
    ]
    unknown = ((needs - NEEDS, command) for needs, command in commands(text))
    return complaints + [f"unknown mark {marks}: {command}" for marks, command in unknown if marks]


def gone_tests(page: Path, text: str) -> list[str]:
    """The file of a command that runs tests is there, and so is a test that -k chooses.

    Nor does a page name a target that make does not have.
    """
    complaints = []
    for command in all_commands(text):
        words = shlex.split(command, comments=True)
        if words[:1] == ["make"] and f"\n{words[1]}:" not in (ROOT / "Makefile").read_text():
            complaints.append(f"no such target: {command}")
        for word in words if "pytest" in words else ():
            if word.startswith("tests/") and not (ROOT / word).exists():
                complaints.append(f"no such tests: {command}")
            elif word.startswith("tests/") and "-k" in words:
                wanted = rf"\ndef test_\w*{words[words.index('-k') + 1]}"
                if not re.search(wanted, (ROOT / word).read_text()):
                    complaints.append(f"no such test: {command}")
    return complaints


def unrecorded_output(page: Path, text: str) -> list[str]:
    if page.parent.name == "common":  # its blocks are drawings
        return []
    recorded = "".join(RECORDED.values())
    return [
        f"nobody recorded this:\n{block}"
        for _, block in blocks(text, "text")
        # Neither a drawing of the run's folder nor a diffstat, which has a rule of its own.
        if not block.startswith("outputs/<")
        and not re.fullmatch(r" 1 file changed, .*\n", block)
        and not re.search(rf"(^| ){re.escape(block)}", recorded, re.MULTILINE)
    ]


def stale_tables(page: Path, text: str) -> list[str]:
    """A table of numbers, right-aligned, is made by report.py; and its sources are linked to.

    report.py also renews the numbers in sentences.
    """
    complaints = [] if report.fill(text, page) == text else ["run make diffs"]
    rest = without_chapters(re.sub(r"<!-- table: \w+ -->\n(.*\n)*?<!-- end -->", "", text))
    number = r"[\d,.]+( ?(ms|s|%|GiB|MB|tokens/s))?"
    numbers = rf"^\|.*--:.*|^\|.*\| *{number} *\|.*"
    complaints += [f"no table of report.py: {row[0]}" for row in re.finditer(numbers, rest, re.M)]
    made = "".join(re.findall(r"<!-- table: \w+ -->\n((?:.*\n)*?)<!-- end -->", text))
    made = re.sub(r"^(\*(Measured|Not measured).*\*)?\n", "", made, flags=re.MULTILINE)
    complaints += [f"no row: {r}" for r in made.splitlines() if not re.fullmatch(r"\|.*\|", r)]
    links = {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", text)}
    for name in re.findall(r"<!-- table: (\w+) -->", text):
        for source in report.TABLES[name].sources:
            if ROOT / source not in links:
                complaints.append(f"table {name} does not link to {source}")
    return complaints


# A number with a unit of measurement in a sentence, and what marks a paragraph's numbers as
# calculated.
WITH_UNIT = re.compile(
    r"(?<![\w.,-])\d[\d.,]*(?:\s(?:million|billion))?\s(?:GiB|tokens/s|ms|s\sper\sstep|times\sas\sfast)\b"
    r"|\bMFU\b[^.\n]{0,30}?\d[\d.]*%|\d[\d.]*%\sMFU"
)
CALCULATED = re.compile(r"calculate|calculation|predict|memory\.py|simulat|\s=\s", re.IGNORECASE)


def numbers_without_row(page: Path, text: str) -> list[str]:
    """A number with a unit belongs to rows (sentences.jinja), or is marked as calculated."""
    hidden = r"<!-- table: (?:.*\n)*?<!-- end -->|^ *```(?:.*\n)*?^ *```$|^\|.*$"
    text = re.sub(hidden, lambda each: "#" * len(each[0]), text, flags=re.MULTILINE)
    fragments = report.SENTENCES.get(page, ())
    known = [match.span() for each in fragments for match in each.matches(text)]
    complaints = [
        f"no such sentence: {each.source}" for each in fragments if not each.matches(text)
    ]
    complaints += [f"not measured: {e.source}" for e in fragments if e.numbers() is None]
    for found in WITH_UNIT.finditer(text):
        paragraph = text[text.rfind("\n\n", 0, found.start()) + 1 :].lstrip().split("\n\n")[0]
        inside = any(start <= found.start() and found.end() <= end + 40 for start, end in known)
        if not inside and not CALCULATED.search(paragraph):
            complaints.append(f"no row has this number, nor is it marked as calculated: {found[0]}")
    return complaints


def without_chapters(text: str) -> str:
    """Return a text less the cells below "chapter" or "chapters" in its tables."""

    def emptied(table: re.Match) -> str:
        rows = [row.split("|") for row in table[0].splitlines()]
        columns = [n for n, cell in enumerate(rows[0]) if cell.strip() in ("chapter", "chapters")]
        for row in rows[2:]:
            row[:] = ["" if n in columns else cell for n, cell in enumerate(row)]
        return "".join("|".join(row) + "\n" for row in rows)

    return re.sub(r"(?:^\|.*\n)+", emptied, text, flags=re.MULTILINE)


@functools.cache
def said_by_the_product() -> str:
    """Return the words of all scripts, diffs and launch files, those of split strings in a row."""
    files = [path for folder in ("common", *CHAPTERS) for path in (ROOT / folder).rglob("*.*")]
    files = [path for path in sorted(files) if path.suffix in (".py", ".diff", ".sh", ".sbatch")]
    code = re.sub(r'"\s*f?"', "", "".join(path.read_text() for path in files))
    return " ".join(re.findall(r"[\w'-]+", code))


def invented_messages(page: Path, text: str) -> list[str]:
    """Of each message in "When it breaks", three words in a row stand in the code."""
    if "## When it breaks" not in text:
        return []
    section = text.split("## When it breaks")[1].split("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)
    complaints = [] if quoted else ["no message is quoted in the table of 'When it breaks'"]
    for message in quoted:
        words = re.findall(r"[\w'-]+", message)
        parts = (" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2)))
        if not any(part in said_by_the_product() for part in parts) and words[0] not in BY_OTHERS:
            complaints.append(f"no code says this: {message}")
    return complaints


def wrong_excerpts(page: Path, text: str) -> list[str]:
    """Blocks of Python that are pieces of a script, on the pages that show some.

    The first lesson has no diff. The fourth shows two functions of common, and an example of its
    own, which is not indented.
    """
    files = {
        CHAPTER_PAGES[0]: ["01-single-gpu/train_llm.py", "common/data.py"],
        CHAPTER_PAGES[3]: ["common/gradients.py", "common/checkpoint.py"],
        ROOT / "01-single-gpu/topics/model_by_hand.md": ["01-single-gpu/model_by_hand.py"],
    }
    code = "".join("\n" + (ROOT / file).read_text() for file in files.get(page, ()))
    shown = [block for _, block in blocks(text, "python")]
    if page == CHAPTER_PAGES[3]:
        shown = [block for block in shown if block.startswith(" ")]
    return [f"not in the script:\n{x}" for x in shown if page in files and f"\n{x}" not in code]


def gone_imports(page: Path, text: str) -> list[str]:
    """Code in Python on a page imports from common only what is there."""
    complaints = []
    for _, block in blocks(text, "python"):
        for line in re.findall(r"^from common.*$", block, re.MULTILINE):
            try:
                exec(line, {})
            except ImportError as error:
                complaints.append(f"{line}: {error}")
    return complaints


# --- planted mistakes ---

# What each rule must find: a pattern in one of these pages, its replacement, and a part of the
# complaint.
WITH_MISTAKES = [ROOT / "02-ddp" / name for name in ("README.md", "reference.md")]
WITH_MISTAKES += [CHAPTER_PAGES[0], FRONT, ROOT / "03-multi-node/topics/determinism.md"]
ROT = {
    wrong_headings: ("## What it costs", "## Price", "headings are"),
    too_long: ("\\A", "one more word " * 900, "words, 2900 at most"),
    folded_headings: (r"</summary>\n", "</summary>\n\n## A heading\n", "folded: ## A heading"),
    wrong_variants: ("WITH=zero1", "WITH=zero9", "There is no variant zero9"),
    dead_links: (r"\]\(#[a-z]", "](#x", "no such heading"),
    paths_that_are_gone: (r"`common/checkpoint\.py`", "`common/lunch.py`", "common/lunch.py"),
    wrong_diffs: (r"^\+.*init_process_group\(\n", "", "stands 0 times in the real diff"),
    wrong_diffstats: (r"\d+ insertions", "1 insertions", "1 insertions(+)"),
    wrong_excerpts: (r"^    state = \{\"step\": 0", '    state = {"step": 1', "not in the script"),
    refused_arguments: ("-e dying`", "--dying`", "arguments: --dying"),
    unknown_blocks: ("```bash\n", "```bash tpu\n", "unknown mark"),
    gone_tests: ("-k planted", "-k painted", "no such test"),
    unrecorded_output: ("```text\n", "```text\nall is well\n", "nobody recorded"),
    stale_tables: (r"(<!-- table: .*\n.*\n.*\n.*)\d(.*\d)", r"\g<1>00\2", "run make diffs"),
    numbers_without_row: (r"\A", "It trains at 1,234 tokens/s.\n\n", "no row has this number"),
    gone_imports: ("^import torch$", "from common import models", "cannot import name 'models'"),
    invented_messages: (r"^\| `[^`]+`", "| `moon rises over silent mountains`", "no code says"),
}


@pytest.mark.check
@pytest.mark.parametrize("rule", ROT, ids=lambda rule: rule.__name__)
def test_rule(rule):
    """No page breaks it, and it finds a planted mistake."""
    found = [f"{name_of(page)}: {each}" for page in PAGES for each in rule(page, page.read_text())]
    assert not found, "\n".join(found)
    pattern, new, complaint = ROT[rule]
    for page in WITH_MISTAKES:
        text = page.read_text()
        rotten = re.sub(pattern, new, text, flags=re.MULTILINE)
        if rotten != text:
            break
    assert rotten != text, "nothing to replace"
    assert complaint in "\n".join(rule(page, rotten))


@pytest.mark.check
@pytest.mark.parametrize(
    ("rule", "text", "complaint"),
    [
        (paths_that_are_gone, "`variants/02-ddp+zero1/zero1.py`", None),
        (paths_that_are_gone, "`variants/02-ddp+zero9/zero1.py`", "no such path"),
        (paths_that_are_gone, "`variants/02-ddp+zero1/zero9.py`", "no such path"),
        (paths_that_are_gone, "`variants/02-ddp+zero1+workers`", "no such path"),
        (refused_arguments, "`bash variants/02-ddp+workers/launch.sh --num-workers 2`", None),
        (refused_arguments, "`bash variants/02-ddp+zero1/launch.sh --num-workers 2`", "unrecogn"),
        (refused_arguments, "`bash variants/02-ddp+zero1/lunch.sh`", "no such script"),
        (wrong_variants, '`make variant CHAPTER=4 WITH="hsdp cpu-offload"`', None),
        (wrong_variants, "`make variant CHAPTER=1 WITH=hsdp`", "does not apply to chapter 1"),
        (wrong_variants, "`make diff CHAPTER=2 WITH=float16`", "needs autocast"),
        (wrong_variants, "`bash variants/02-ddp+zero1/launch.sh`", "nothing makes variants/02-"),
    ],
)
def test_commands_with_variants(rule, text, complaint):
    found = rule(FRONT, text)
    assert complaint in "\n".join(found) if complaint else found == []


@pytest.mark.check
def test_lesson_4_shows_lines_of_common():
    page = CHAPTER_PAGES[3]
    rotten = page.read_text().replace("dist.all_reduce(square)", "dist.all_reduce(norm)")
    assert wrong_excerpts(page, page.read_text()) == [] != wrong_excerpts(page, rotten)


# --- commands ---

TRAINS = r"\b(train_(llm|classifier)\.py|launch(_\w+)?\.sh)|^make train"
# What tests do not run from here: it changes the environment, needs other nodes, measures for
# minutes, applies a diff (test_chapter_diffs.py does that), needs an earlier command's model, or
# has tests of its own.
NOT_RUN = re.compile(
    r"^git |^cd |\bpip\b|-m venv|^make (?!train|diff|variant)|^docker |CONTAINER|pytest"
    r"|tests/benchmarks/|faults/|trace_ranks|NNODES|HEAD=|HOSTS|hosts\.txt|node\d|mpirun|sbatch|srun"
    r"|-m base-model"
)
# In a run of one step, the classifier spends most of its time on its texts.
EXAMPLES = "02-ddp/classification/examples.py"
FEWER = (", _stdlib_pieces()", ", _stdlib_pieces()[::40]")
register(EXAMPLES, [FEWER])
# The others run in the nightly tier.
IN_TEST = r"make|04-fsdp/export\.py|bash 02-ddp/launch\.sh|python 01-single-gpu/generate\.py"
IN_CI = (
    r"evaluate|train_tokenizer|torchrun 02-ddp/train_c|launch_torchrun|allreduce|preflight"
    r"|bash 0[45]\S+/launch\.sh|variants"
)


def tidy(command: str) -> str:
    """Return a command without its comment and without the path of the environment."""
    return re.sub(r"(^|\s)#.*", "", command).strip().removeprefix(".venv/bin/")


def shortened(command: str) -> str:
    """Return a command that takes one step and evaluates little."""
    few = "--max-steps 1" if "classifier" in command else "--max-steps 1 --eval-sequences 2"
    if command.startswith("make train"):
        return f"make train ARGS='{few}'"
    return f"{command} {few}" if re.search(TRAINS, command) else command


def kind(command: str) -> str:
    """Return how a command starts which scripts of the repository, or which target it makes."""
    if command.startswith("make"):
        return " ".join(command.split()[:2])
    words = re.sub(r"\S+/(?=(python|torchrun|bash) )", "", command).split()
    words = [re.sub(r"^variants/\d\d-[^/]+", "variants", word) for word in words]
    scripts = [word for word in words if re.fullmatch(r"(\d\d-|variants/)\S+\.(py|sh)", word)]
    starters = [word for word in words if word in ("python", "torchrun", "bash")]
    return " ".join(starters[:1] + scripts) if scripts else ""


# (what it needs, command) for each command on each page, and the first one of each kind that runs
# on this machine.
ALL = [(needs, tidy(line)) for page in PAGES for needs, line in commands(page.read_text())]
KINDS: dict[str, str] = {}
for needs, command in ALL:
    if not needs and kind(command) and not NOT_RUN.search(command):
        KINDS.setdefault(kind(command), command)


@pytest.fixture(scope="module")
def checkout(make_folder) -> Path:
    """A copy of the repository with its environment, a run, and the files that the pages name."""
    folder = make_folder("checkout")
    copy_repository(folder)
    texts = [f"Text number {n}, of many words that are not all the same. " * 60 for n in range(120)]
    (folder / "my-text.txt").write_text("\n".join(texts))
    (folder / "documents.json").write_text(json.dumps(texts))
    replace_in(folder / EXAMPLES, *FEWER)
    for needs, command in ALL:
        if re.search(r"[^<] > \S+$", command) and not needs and not kind(command):
            run_in(folder, command)
    run_in(folder, shortened("python 01-single-gpu/train_llm.py -e my-run"))
    return folder


def run_in(folder: Path, command: str) -> str:
    """Run a command as a reader of the pages does; return what it printed."""
    env = environment(PYTHONPATH=folder)
    if (folder / ".venv").exists():
        env.pop("VIRTUAL_ENV", None)
    elif re.match("make (train|demo)", command):
        pytest.skip("make would install from the network what Python has elsewhere")
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def tier_of(kind: str) -> list[pytest.MarkDecorator]:
    if re.search(IN_TEST, kind):
        return []
    return [pytest.mark.ci if re.search(IN_CI, kind) else pytest.mark.nightly]


@pytest.mark.parametrize(
    "command", [pytest.param(each, id=key, marks=tier_of(key)) for key, each in KINDS.items()]
)
def test_command(command, checkout):
    outputs = checkout / "outputs"
    trains = re.search(TRAINS, command)
    for name in re.findall(r" -e (\S+)" if trains else r"outputs/([\w-]+)", command):
        if trains:
            shutil.rmtree(outputs / name, ignore_errors=True)
        elif not (outputs / name).exists():
            shutil.copytree(outputs / "my-run", outputs / name)
    for chapter, names in re.findall(r"variants/(\d\d)-[a-z-]+\+([\w+-]+)", command):
        run_in(checkout, f'make variant CHAPTER={int(chapter)} WITH="{names.replace("+", " ")}"')
    before = set(outputs.iterdir())
    run_in(checkout, shortened(command))
    if trains:
        (run,) = set(outputs.iterdir()) - before - {outputs / "unnamed"}
        assert (run / ("best/config.json" if "classifier" in command else "newest")).exists()


@pytest.mark.check
def test_the_front_page_spells_out_what_make_installs():
    dry_run = ["make", "CONSTRAINTS=requirements.txt", "--dry-run", "--always-make"]
    dry_run += ["train", "test"]
    output = subprocess.check_output(dry_run, cwd=ROOT, text=True)
    made = {" ".join(tidy(line).split()) for line in output.splitlines()}
    shown = [line for _, line in commands(FRONT.read_text())]
    spelled_out = {tidy(line) for line in shown if re.search(r"\bpip\b|-m venv", line)}
    assert spelled_out and spelled_out <= made


@pytest.mark.ci
def test_demo(checkout):
    """Two in a row have runs of their own, and the losses of both processes are the same."""
    for demos in (1, 2):
        shown = run_in(checkout, "make demo ARGS='--max-steps 20 --log-freq 10 --eval-sequences 2'")
        rows = re.findall(r"^ *(\d+) +(\d+\.\d+) +(\d+\.\d+)$", shown, re.MULTILINE)
        assert [int(step) for step, _, _ in rows] == [10, 20]
        for _, one, two in rows:
            assert float(one) == pytest.approx(float(two), rel=1e-5)
        assert len(list(checkout.glob("outputs/demo-*/one/newest"))) == demos


@pytest.mark.check
def test_bash_can_read_every_command():
    assert len(ALL) > 200
    for _, command in ALL:
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


# --- recorded output ---


@pytest.mark.check
def test_recorded_output_names_its_command_and_machine():
    """And the metrics beside it are of the same run."""
    shown = {line.strip() for page in PAGES for _, line in commands(page.read_text())}
    for name, text in RECORDED.items():
        command, machine = text.splitlines()[:2]
        assert command in shown, f"{name}: no page has the command"
        assert machine.startswith("# ") and "torch " in machine, name
    for metrics in sorted(ROOT.glob("*/recorded/*.metrics.jsonl")):
        text = RECORDED[name_of(metrics).replace(".metrics.jsonl", ".txt")]
        logged = dict(re.findall(r"\bstep (\d+)/\d+ \| loss (\S+)", text))
        for step in map(json.loads, metrics.read_text().splitlines()):
            assert logged[str(step["step"])] == f"{step['loss']:.4f}", metrics

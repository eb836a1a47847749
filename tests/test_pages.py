"""The pages: each diff, command, link, table and recorded output is compared with the code.

A rule takes a page's path and text and returns complaints. Below the rules, planted rot makes each
rule complain. A block of commands is marked with what it needs beyond this machine: ```bash gpu,
cluster, local_cluster or hub. The last section runs each command that this machine can run.
"""

import argparse
import ast
import contextlib
import functools
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import picture
import pytest
import report
import yaml
from helpers import (
    CHAPTERS,
    EVALUATED_LITTLE,
    ROOT,
    blocks,
    commands,
    environment,
    free_port,
    name_of,
    prose,
    read_metrics,
    replace_in,
    wait_for_file,
)

from common import cli, distributed

PAGES = report.pages()
CHAPTER_PAGES = [ROOT / chapter / "README.md" for chapter in CHAPTERS]
HEADINGS = [
    *("The idea", "Run it", "The diff", "What it costs"),
    *("When it breaks", "Check yourself", "Where next"),
]
# How many words a page may have, as wc -w counts them. What is folded in a lesson does not count.
LESSON_WORDS, TOPIC_WORDS = 2500, 1500
WORDS = {
    "README.md": 1200,
    "03-multi-node/diagnosing.md": 2500,
    "05-mixed-precision/beyond.md": 2500,
}
LOOKED_UP = ("reference.md", "measurements.md", "classify_reference.md")  # have no limit
NEEDS = {"gpu", "cluster", "local_cluster", "hub"}
LANGUAGES = (["bash"], ["diff"], ["text"], ["python"], ["mermaid"], ["yaml"], ["dockerfile"])
CONTAINERS = ROOT / "03-multi-node/containers.md"


# --- the rules ---


def wrong_headings(page: Path, text: str) -> list[str]:
    if page not in CHAPTER_PAGES:
        return []
    found = re.findall(r"^## (.+)$", text, re.MULTILINE)
    return [] if found == HEADINGS else [f"headings are {found}, not {HEADINGS}"]


def too_long(page: Path, text: str) -> list[str]:
    if page.name in LOOKED_UP or page.parent.name == "solutions":
        return []
    limit = LESSON_WORDS if page in CHAPTER_PAGES else WORDS.get(name_of(page), TOPIC_WORDS)
    unfolded = re.sub(r"<details>(?:.*\n)*?</details>", "", text)
    words = len(unfolded.split())
    return [f"{words} words, {limit} at most"] if words > limit else []


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
    """Paths in `code` and in commands that begin with a folder of the repository."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "outputs"}
    words = " ".join(re.findall(r"`([^`]+)`", prose(text))).split()
    words += [word for _, command in commands(text) for word in command.split()]
    return [
        f"no such path: {word}"
        for word in words
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", word)
        and (word.split("/")[0] in folders - {".venv"} or re.match(r"\d\d-", word))
        and not (ROOT / word).exists()
    ]


def real_diff(page: Path) -> list[str] | None:
    """Return all lines of the diff that a chapter's page explains, None for other pages."""
    chapter = page.parent.name
    if page not in CHAPTER_PAGES[1:]:
        return None
    before = CHAPTERS[CHAPTERS.index(chapter) - 1]
    return whole_diff(before, chapter)


@functools.cache
def whole_diff(before: str, after: str) -> list[str]:
    scripts = [f"{chapter}/train_llm.py" for chapter in (before, after)]
    command = ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", "-U999", *scripts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split("@@\n", 1)[1].splitlines()


def wrong_diffs(page: Path, text: str) -> list[str]:
    """A block is a piece of the real diff, or several pieces with a line of @@ between them.

    A block can also show a piece of a .diff file beside the page.
    """
    real = real_diff(page) or []
    shown = [block for _, block in blocks(text, "diff")]
    files = [path.read_text() for path in page.parent.glob("*.diff")]
    if page.parent.name == "solutions":  # they show the whole of each file beside them
        complaints = [f"a diff of no file:\n{each}" for each in shown if each not in files]
        return complaints + [f"not shown:\n{each}" for each in files if each not in shown]
    complaints, covered = [], set()
    for block in shown:
        for piece in re.split(r"^@@.*\n", block, flags=re.MULTILINE):
            lines = [line or " " for line in piece.splitlines()]
            starts = [i for i in range(len(real)) if real[i : i + len(lines)] == lines]
            beside = any("\n".join(lines) in file for file in files)
            if lines and len(starts) != 1 and not beside:
                complaints.append(f"stands {len(starts)} times in the real diff:\n{piece}")
            for start in starts[:1]:
                covered |= set(range(start, start + len(lines)))
    return complaints + [
        f"not shown: {line}"
        for number, line in enumerate(real)
        if line[0] in "+-" and number not in covered
    ]


def wrong_diffstats(page: Path, text: str) -> list[str]:
    real = real_diff(page)
    if real is None:
        return []
    added, removed = (sum(line[0] == sign for line in real) for sign in "+-")
    right = f"{added} insertion{'s' * (added != 1)}(+), {removed} deletion{'s' * (removed != 1)}(-)"
    found = re.findall(r"\d+ insertions?\(\+\)(?:, \d+ deletions?\(-\))?", text)
    opening = text.split("## The diff\n")[1].split("```diff")[0]
    complaints = [f"{each}, really {right}" for each in found if each != right]
    return complaints if right in opening else [*complaints, f"does not open with {right}"]


def refused_arguments(page: Path, text: str) -> list[str]:
    """The parser of each script takes the arguments that a command gives it."""
    inline = re.findall(r"`((?:python|torchrun|bash)\s[^`]+)`", prose(text))
    added = added_by_diffs(text)
    return [
        f"{command}: {script}: {complaint}"
        for command in [*inline, *(command for _, command in commands(text))]
        for script, arguments in scripts_of(command)
        if (complaint := refusal(script, tuple(without_flags(arguments, added))))
    ]


def added_by_diffs(text: str) -> set[str]:
    """Return the flags that have a value, of the diffs that a page's commands apply."""
    files = re.findall(r"^git apply (\S+\.diff)$", text, re.MULTILINE)
    diffs = "".join((ROOT / file).read_text() for file in files if (ROOT / file).exists())
    return set(re.findall(r'^\+ +add\("(--[\w-]+)", default', diffs, re.MULTILINE))


def without_flags(arguments: list[str], flags: set[str]) -> list[str]:
    """Return arguments without these flags and their values."""
    values = {i + 1 for i, word in enumerate(arguments) if word in flags}
    return [w for i, w in enumerate(arguments) if w not in flags and i not in values]


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
        arguments = words[words.index(script) + 1 :]
        if "--" in arguments:  # what comes after it is for the chapter that the script runs
            end = arguments.index("--")
            arguments, others = arguments[:end], arguments[end + 1 :]
            chapter = CHAPTERS[0]
            if "--chapter" in arguments:
                chapter = arguments[arguments.index("--chapter") + 1]
            found.append((f"{chapter}/train_llm.py", others))
        found.append((script, arguments))
    return found


def refusal(script: str, arguments: tuple[str, ...]) -> str:
    """Return what a script, or the script that a launch file starts, says against arguments."""
    path = ROOT / script
    if not path.exists():
        return "no such script"
    if path.name == "local_cluster.sh":  # its tests call it
        return ""
    if path.name == "launch_ssh.sh":
        arguments = arguments[2:]
    if path.suffix != ".py":
        path = path.with_name(f"train_{'classifier' if 'classifier' in path.stem else 'llm'}.py")
    parser = parser_of(path)
    if parser is None:
        return f"takes no arguments: {arguments}" if arguments else ""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            parser.parse_args([word for word in arguments if not word.startswith("@")])
        except SystemExit as end:
            return said.getvalue().splitlines()[-1] if end.code else ""
    return ""


class Parsing(Exception):
    """Raised where a script would parse its arguments, with its parser."""


@functools.cache
def parser_of(script: Path) -> argparse.ArgumentParser | None:
    """Run a script up to where it parses its arguments and return the parser; None without one."""
    if "parse_args()" not in script.read_text():
        return None

    def stop(parser: argparse.ArgumentParser) -> None:
        raise Parsing(parser)

    modules = set(sys.modules)
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        mock.patch.dict(os.environ),
    ):
        try:
            script_names = runpy.run_path(str(script))
            script_names.get("get_args", script_names.get("main"))()
        except Parsing as reached:
            return reached.args[0]
        finally:  # folders have modules of the same name
            for name in set(sys.modules) - modules:
                if (
                    Path(getattr(sys.modules[name], "__file__", None) or "/").parent
                    == script.parent
                ):
                    del sys.modules[name]
    raise AssertionError(f"{script} has not parsed its arguments")


def unknown_blocks(page: Path, text: str) -> list[str]:
    """A block of a language that no rule looks at, or a mark that no test knows."""
    opened = re.findall(r"^ *(?:```|~~~)(.*)$", text, re.MULTILINE)[::2]
    complaints = [
        f"unknown language: {each}" for each in opened if each.split()[:1] not in LANGUAGES
    ]
    return complaints + [
        f"unknown mark {needs - NEEDS}: {command}"
        for needs, command in commands(text)
        if needs - NEEDS
    ]


def manifests(text: str) -> list:
    """Return the documents in a page's blocks of YAML."""
    return [each for _, block in blocks(text, "yaml") for each in yaml.safe_load_all(block)]


def shell_scripts(node: object) -> Iterator[str]:
    """Yield what follows -c in each list of a document."""
    if isinstance(node, list) and "-c" in node:
        yield node[node.index("-c") + 1]
    elif isinstance(node, list | dict):
        for each in node.values() if isinstance(node, dict) else node:
            yield from shell_scripts(each)


def wrong_yaml(page: Path, text: str) -> list[str]:
    """YAML can be read, and the scripts in it obey the rules for commands."""
    complaints = []
    try:
        for script in shell_scripts(manifests(text)):
            if not bash_can_read(script):
                complaints.append(f"bash cannot read: {script}")
            block = f"```bash\n{script}```\n"
            complaints += refused_arguments(page, block) + paths_that_are_gone(page, block)
    except yaml.YAMLError as error:
        complaints.append(f"not YAML: {error}")
    return complaints


def gone_tests(page: Path, text: str) -> list[str]:
    """A command that runs tests: the file is there, and -k chooses at least one test of it."""
    complaints = []
    inline = re.findall(r"`(python\s+-m\s+pytest\s[^`]+)`", prose(text))
    for command in [*inline, *(command for _, command in commands(text))]:
        words = shlex.split(command, comments=True)
        if "pytest" not in words:
            continue
        for word in words:
            if word.startswith("tests/") and not (ROOT / word).exists():
                complaints.append(f"no such tests: {command}")
            elif word.startswith("tests/") and "-k" in words:
                wanted = words[words.index("-k") + 1]
                tree = ast.parse((ROOT / word).read_text())
                tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
                if not any(name.startswith("test_") and wanted in name for name in tests):
                    complaints.append(f"no such test: {command}")
    return complaints


def unrecorded_output(page: Path, text: str) -> list[str]:
    recorded = "".join(path.read_text() for path in ROOT.glob("*/recorded/*.txt"))
    return [
        f"nobody recorded this:\n{block}"
        for _, block in blocks(text, "text")
        # Neither a drawing of the run's folder nor a diffstat, which has a rule of its own.
        if not block.startswith("outputs/<")
        and not re.fullmatch(r" 1 file changed, .*\n", block)
        and not re.search(rf"(^| ){re.escape(block)}", recorded, re.MULTILINE)
    ]


def stale_tables(page: Path, text: str) -> list[str]:
    """A table of numbers, right-aligned, is made by report.py; and its sources are linked to."""
    complaints = [] if report.fill(text) == text else ["run python tests/benchmarks/report.py"]
    rest = re.sub(r"<!-- table: \w+ -->\n(.*\n)*?<!-- end -->", "", text)
    number = r"[\d,.]+( ?(ms|s|%|GiB|MB|tokens/s))?"
    numbers = rf"^\|.*--:.*|^\|.*\| *{number} *\|.*"
    complaints += [f"no table of report.py: {row[0]}" for row in re.finditer(numbers, rest, re.M)]
    made = "".join(re.findall(r"<!-- table: \w+ -->\n((?:.*\n)*?)<!-- end -->", text))
    complaints += [f"no row: {r}" for r in made.splitlines() if not re.fullmatch(r"\|.*\|", r)]
    links = {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", text)}
    for name in re.findall(r"<!-- table: (\w+) -->", text):
        for source in report.TABLES[name].sources:
            if ROOT / source not in links:
                complaints.append(f"table {name} does not link to {source}")
    return complaints


def invented_messages(page: Path, text: str) -> list[str]:
    """Of each message in "When it breaks", three words in a row stand in the code or in a test."""
    if "## When it breaks" not in text:
        return []
    files = {*(ROOT / "common").glob("*.py"), *(ROOT / "tests").glob("*.py")} - {Path(__file__)}
    code = re.sub(r'"\s*f?"', "", "".join(path.read_text() for path in sorted(files)))
    said = " ".join(re.findall(r"[\w'-]+", code))
    section = text.split("## When it breaks")[1].split("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)
    complaints = [] if quoted else ["no message is quoted in the table of 'When it breaks'"]
    for message in quoted:
        words = re.findall(r"[\w'-]+", message)
        if not any(" ".join(words[i : i + 3]) in said for i in range(max(1, len(words) - 2))):
            complaints.append(f"no code says this: {message}")
    return complaints


def wrong_excerpts(page: Path, text: str) -> list[str]:
    """The first lesson has no diff: its blocks of Python are pieces of its script."""
    if page != CHAPTER_PAGES[0]:
        return []
    script = "\n" + (page.parent / "train_llm.py").read_text()
    shown = [block for _, block in blocks(text, "python")]
    if not shown:
        return ["shows nothing of its script"]
    return [f"not in the script:\n{each}" for each in shown if f"\n{each}" not in script]


RULES = (
    wrong_headings,
    too_long,
    dead_links,
    paths_that_are_gone,
    wrong_diffs,
    wrong_diffstats,
    wrong_excerpts,
    refused_arguments,
    unknown_blocks,
    wrong_yaml,
    gone_tests,
    unrecorded_output,
    stale_tables,
    invented_messages,
)


@pytest.mark.check
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page(page, rule):
    assert rule(page, page.read_text()) == []


@pytest.mark.check
def test_every_chapter_has_a_page():
    assert set(CHAPTER_PAGES) <= set(PAGES)


# --- planted rot ---

ROT = {
    wrong_headings: [("## What it costs", "## Price", "headings are")],
    too_long: [("\\A", "one more word " * 900, "words, 2500 at most")],
    dead_links: [
        (r"\]\(\.\./tests/", "](../tusts/", "no such file"),
        (r"\]\(#[a-z]", "](#x", "no such heading"),
    ],
    paths_that_are_gone: [
        ("bash 02-ddp/launch.sh\n", "bash 02-ddp/lunch.sh\n", "02-ddp/lunch.sh"),
        ("`common/distributed.py`", "`common/lunch.py`", "common/lunch.py"),
    ],
    wrong_diffs: [
        (r"\+.*destroy_process_group.*\n", "", "not shown: +"),
        (r"\+    dist.barrier\(\)  #.*", "+    dist.wait()", "stands 0 times"),
        (r"```diff\n(?:.*\n)*?```\n", "", "not shown"),
    ],
    wrong_diffstats: [
        (r"\d+ insertions", "1 insertions", "1 insertions(+)"),
        (r".* insertions.*\n", "", "does not open with"),
    ],
    wrong_excerpts: [
        (r"^    rank = 0$", "    rank = 1", "not in the script"),
        (r"^    world_size = 1\n", "", "not in the script"),
        (r"^```python\n(?=    )", "```bash\n", "shows nothing"),
    ],
    refused_arguments: [
        ("launch.sh -e three", "launch.sh --speed 3 -e three", "arguments: --speed"),
        ("launch.sh -e dying`", "launch.sh --dying`", "arguments: --dying"),
        ("--max-steps 40", "--max-steps forty", "'forty' is not a whole number"),
        ("bash 02-ddp/launch.sh\n", "bash 02-ddp/lunch.sh\n", "no such script"),
        ("allreduce_by_hand.py", "allreduce_by_hand.py --slow", "takes no arguments"),
        ("zero1.py --", "overhead.py --pairs 1 -- --pairs 1 --", "train_llm.py: "),
        ("zero1.py --", "overhead.py --zero1 -- -b 1 -- --", "overhead.py: "),
    ],
    unknown_blocks: [
        ("```bash gpu", "```bash tpu", "unknown mark"),
        ("```bash\n", "```sh\n", "unknown language: sh"),
    ],
    wrong_yaml: [
        ("^kind: Job$", "kind: {Job", "not YAML"),
        ("wait \\$AGENT$", "wait $(AGENT", "bash cannot read"),
        ("torchrun.sh -e my-run &", "torchrun.sh --my-run &", "arguments: --my-run"),
        ("launch_torchrun.sh -e my-run &", "lunch.sh -e my-run &", "lunch.sh"),
    ],
    gone_tests: [
        ("tests/test_parity.py -k", "tests/test_parrot.py -k", "no such tests"),
        ("-k planted", "-k painted", "no such test"),
    ],
    unrecorded_output: [("```text\n", "```text\nall is well\n", "nobody recorded")],
    stale_tables: [
        (r"(<!-- table: .*\n.*\n.*\n.*)\d(.*\d)", r"\g<1>00\2", "run python tests/benchmarks"),
        (r"<!-- table: .*\n", "", "no table of report.py"),
        (r"^\| mistake \|.*", "| mistake | 3.5 ms |", "no table of report.py: | mistake"),
        (r"\]\(\.\./tests/benchmarks/results/\w+.json\)", "](gone)", "does not link to"),
    ],
    invented_messages: [
        (r"^\| `[^`]+`", "| `moon rises over silent mountains`", "no code says this")
    ],
}
ROTS = [(rule, *rot) for rule, rots in ROT.items() for rot in rots]


@pytest.mark.check
def test_every_rule_has_planted_rot():
    assert set(ROT) == set(RULES)


@pytest.mark.check
@pytest.mark.parametrize(("rule", "pattern", "new", "complaint"), ROTS)
def test_rule_finds(rule, pattern, new, complaint):
    names = ("README.md", "reference.md", "measurements.md")
    for page in (*(ROOT / "02-ddp" / name for name in names), CHAPTER_PAGES[0], CONTAINERS):
        text = page.read_text()
        rotten = re.sub(pattern, new, text, flags=re.MULTILINE)
        if rotten != text:
            break
    assert rotten != text, "nothing to replace"
    assert rule(page, text) == []
    assert complaint in "\n".join(rule(page, rotten))


@pytest.mark.check
def test_only_a_diff_on_the_page_adds_a_flag():
    page = ROOT / "05-mixed-precision/beyond.md"
    text = page.read_text()
    assert refused_arguments(page, text) == []
    rotten = text.replace("git apply 05-mixed-precision/tensor-parallel.diff\n", "")
    assert "unrecognized arguments: --tensor-parallel" in refused_arguments(page, rotten)[0]
    rotten = text.replace("--tensor-parallel 2\n", "--tensor-serial 2\n")
    assert "unrecognized arguments: --tensor-serial" in refused_arguments(page, rotten)[0]


@pytest.mark.check
def test_a_changed_script_makes_its_page_stale(monkeypatch):
    page = ROOT / "02-ddp/README.md"
    real = real_diff(page)
    for changed in ([*real, "+    more()"], [line.replace("no_sync", "on_sync") for line in real]):
        monkeypatch.setattr(sys.modules[__name__], "whole_diff", lambda *_, new=changed: new)
        assert wrong_diffs(page, page.read_text())
    monkeypatch.setattr(sys.modules[__name__], "whole_diff", lambda *_: [*real, "+    more()"])
    assert wrong_diffstats(page, page.read_text())


@pytest.mark.check
def test_a_solution_shows_another_diff_than_its_file():
    """Planted."""
    page = ROOT / "01-single-gpu/solutions/README.md"
    text = page.read_text()
    assert wrong_diffs(page, text) == []
    rotten = text.replace(
        "+                loss = model(**batch).loss", "+                loss = 1"
    )
    assert rotten != text
    first, second = wrong_diffs(page, rotten)
    assert first.startswith("a diff of no file:") and second.startswith("not shown:")


@pytest.mark.check
def test_the_pods_find_each_other_and_their_runs():
    text = CONTAINERS.read_text()
    claim, service, job = manifests(text)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    job_name, service_name = job["metadata"]["name"], service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job_name}
    assert pod["subdomain"] == service_name
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["HEAD"].startswith(f"{job_name}-0.{service_name}.default.svc.cluster.local:")
    assert int(variables["NNODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert volumes["outputs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    ((_, dockerfile),) = blocks(text, "dockerfile")
    folder = re.search(r"^WORKDIR (.+)$", dockerfile, re.MULTILINE)[1]
    assert mounts["outputs"] == f"{folder}/outputs"
    install = re.search(r"^RUN (pip .+)$", dockerfile, re.MULTILINE)[1]
    assert f".venv/bin/python -m {install}\n" in (ROOT / "README.md").read_text()


@pytest.mark.check
def test_containers_change_two_commands_of_the_job_script():
    script = (ROOT / "03-multi-node/job.sbatch").read_text()
    script = " ".join(script.replace("\\\n", " ").split())
    lines = [line for _, line in commands(CONTAINERS.read_text())]
    plan, run = (next(filter(re.compile(each).match, lines)) for each in ("PLAN=", "srun "))
    assert plan.replace('srun --nodes=1 --ntasks=1 "${CONTAINER[@]}" python', '"$PYTHON"') in script
    assert run.replace('"${CONTAINER[@]}" ', "") in script


@pytest.mark.ci
def test_the_picture_is_of_todays_scripts(monkeypatch):
    """Planted: another prediction, another diffstat."""
    drawn = (ROOT / "01-single-gpu/chapters.svg").read_text()
    predicted = picture.predict()
    monkeypatch.setattr(picture, "predict", lambda: predicted)
    draw = "python tests/benchmarks/picture.py --output 01-single-gpu/chapters.svg"
    assert picture.picture() == drawn, f"run {draw}"
    halved = {
        name: {**rung, "parts": {part: size / 2 for part, size in rung["parts"].items()}}
        for name, rung in predicted.items()
    }
    with monkeypatch.context() as patch:
        patch.setattr(picture, "predict", lambda: halved)
        assert picture.picture() != drawn
    monkeypatch.setattr(report, "diffstat", lambda *_: (1, 1))
    assert picture.picture() != drawn


# --- commands ---

COUNTED = "commands on pages"  # conftest.py adds up what tests record under this name
RUN, SHORTENED, ELSEWHERE, PARSED = "run", "shortened", "run by other tests", "only parsed"
TRAINS = r"\b(train_(llm|classifier)\.py|launch(_\w+)?\.sh)|^make train"
# They fetch the repository, change the environment that tests run in, open a browser, need an image
# of a container, or run the tests themselves.
NOT_HERE = r"^git clone|^cd |\bpip\b|-m venv|^make (?!train|diff)|^docker |CONTAINER|-m pytest"
HAS_CLUSTER = shutil.which("slurmctld") and os.geteuid() == 0
OTHER_NODES = r"NNODES|HEAD=|HOSTS|hosts\.txt|node\d|mpirun|sbatch|srun|--precision fp8"
# Runs of two steps spend most of their time on the evaluation, the sample and the classifier's
# texts. Two other scripts train to measure something; their own tests look at what they find.
ABRIDGED = [
    *((f"{chapter}/train_llm.py", *EVALUATED_LITTLE) for chapter in CHAPTERS),
    ("common/models.py", "min(length, 256)", "min(length, 8)"),
    ("02-ddp/classification/examples.py", "), _stdlib_pieces()", "), _stdlib_pieces()[::40]"),
    ("tests/benchmarks/packing.py", "STEPS, SAMPLES = 100, 64", "STEPS, SAMPLES = 4, 4"),
    ("tests/benchmarks/packing.py", "ROUNDS, BATCHES = 9, 2", "ROUNDS, BATCHES = 1, 1"),
    ("05-mixed-precision/compression.py", "STEPS = 40", "STEPS = 12"),
]


def fate(needs: set[str], command: str) -> str:
    """Return what tests do with a command of a page."""
    if re.search(r"pytest tests/|fault_lab.py (?!list)|trace_ranks.py", command):
        return ELSEWHERE
    if needs == {"local_cluster"}:
        return ELSEWHERE if HAS_CLUSTER else PARSED
    small = re.search(rf"{TRAINS}|export\.py", command) and not re.search(OTHER_NODES, command)
    if re.search(NOT_HERE, command) or "hub" in needs or (needs and not small):
        return PARSED
    abridged = {name for name, *_ in ABRIDGED} & set(command.split())
    return SHORTENED if abridged or shortened(command) != command else RUN


def shortened(command: str) -> str:
    """Return a command that takes fewer steps and, made for a large model, a small one."""
    if "compare.py" in command:
        return f"{command} --seconds 1"  # begins no row after them
    if not re.search(TRAINS, command):
        return command
    for large, small in {"gpt2": "gpt2-tiny", "llama-3.1-8b": "llama-tiny"}.items():
        if f"-m {large} " in command:
            command = command.replace(f"-m {large} ", f"-m {small} ").replace(" --compile", "")
            command += " -s 32 -b 2 --global-batch-size 4"
    if command.startswith("make"):
        arguments = re.sub(r"^make train( ARGS=)?", "", command).strip("'\"")
        return f"make train ARGS='{arguments} --max-steps 1'"
    return f"{command} --max-steps 1"


def tidy(command: str) -> str:
    """Return a command without its comment and without the path of the environment."""
    return re.sub(r"(^|\s)#.*", "", command).strip().removeprefix(".venv/bin/")


def kind(command: str) -> str:
    """Return what is the same in commands that one run stands for: the script and its flags."""
    if command.startswith("make"):
        return command
    command = re.sub(r" (-e|--experiment-name) \S+", "", " ".join(command.split()))
    command = re.sub(r"( -m| --tokenizer-name) (?!gpt2|llama)\S+", r"\1 NAME", command)
    return re.sub(r"( --?[a-z]\S* |PER_NODE=)[\d.]+(e-?\d+)?(?= |$)", r"\1N", command)


# (what tests do with it, command) for each command on each page
ALL = [
    (fate(needs, tidy(line)), tidy(line))
    for page in PAGES
    for needs, line in commands(page.read_text())
]
KINDS: dict[str, list[tuple[str, str]]] = {}
for each in ALL:
    if each[0] in (RUN, SHORTENED):
        KINDS.setdefault(kind(each[1]), []).append(each)


@pytest.mark.check
def test_one_run_stands_for_the_same_flags_only():
    """Planted: another flag, another text, another chapter, what needs a GPU or other nodes."""
    command = "python 01-single-gpu/train_llm.py -e one -d a.csv --lr 3e-4"
    assert kind(command) == kind("python 01-single-gpu/train_llm.py  -d a.csv --lr 1 -e two")
    for other in (f"{command} --compile", command.replace("a.csv", "b.csv"), f"{command} -b 8"):
        assert kind(command) != kind(other)
    assert kind("make diff CHAPTER=2") != kind("make diff CHAPTER=3")
    assert fate(set(), command) == fate({"gpu"}, command) == SHORTENED
    assert fate({"hub"}, command) == fate({"cluster"}, f"NNODES=2 {command}") == PARSED
    assert fate({"gpu"}, "python tests/benchmarks/fsdp.py size") == PARSED
    assert fate(set(), "python 05-mixed-precision/formats.py") == RUN


@pytest.fixture(scope="module")
def checkout(make_folder) -> Path:
    """A copy of the repository with its environment, and the files that the pages name."""
    folder = make_folder("checkout")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if (ROOT / ".venv").exists():
        (folder / ".venv/bin").mkdir(parents=True)
        programs = (ROOT / ".venv/bin").iterdir()
        for name, path in {path.name: path for path in programs}.items():
            (folder / ".venv/bin" / name).symlink_to(path)
        for path in (ROOT / ".venv").iterdir():
            if path.is_file():  # newer than python, so that make has nothing to install
                (folder / ".venv" / path.name).write_text(path.read_text())
            elif path.name != "bin":
                (folder / ".venv" / path.name).symlink_to(path)
    texts = [f"Text number {n}, of many words that are not all the same. " * 60 for n in range(120)]
    (folder / "my-text.txt").write_text("\n".join(texts))
    (folder / "my-folder").mkdir()
    for number, text in enumerate(texts):
        (folder / f"my-folder/{number}.txt").write_text(text)
    (folder / "documents.json").write_text(json.dumps(texts))
    (folder / "table.csv").write_text("body\n" + "".join(f'"{text}"\n' for text in texts))
    for name, part, less in ABRIDGED:
        replace_in(folder / name, part, less)
    run_in(folder, "python 01-single-gpu/train_llm.py -e my-run --max-steps 1")
    return folder


def run_in(folder: Path, command: str) -> None:
    """Run a command as a reader of the pages does."""
    env = environment()
    if (folder / ".venv").exists():
        env.pop("VIRTUAL_ENV", None)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(same, id=key, marks=[pytest.mark.ci] if scripts_of(key) else [])
        for key, same in KINDS.items()
    ],
)
def test_command(same, checkout, record_property):
    """One run stands for all commands that differ only in a name or in a number."""
    command, outputs = same[0][1], checkout / "outputs"
    if command.startswith("make train") and not (checkout / ".venv").exists():
        pytest.skip("make would install from the network what Python has elsewhere")
    names = [
        name for _, each in same for name in re.findall(r" (?:-e|--experiment-name) (\S+)", each)
    ]
    trains = re.search(TRAINS, command)
    for name in names if trains else []:
        shutil.rmtree(outputs / name, ignore_errors=True)
    before = set(outputs.iterdir())
    run_in(checkout, shortened(command))
    if trains:
        (run,) = set(outputs.iterdir()) - before
        assert (run / ("best/config.json" if "classifier" in command else "state.json")).exists()
        for name in names:  # later commands ask for runs of these names
            if not (outputs / name).exists():
                shutil.copytree(run, outputs / name)
    record_property(COUNTED, [how for how, _ in same])


@pytest.mark.ci
def test_both_pods_start_again_if_one_is_stopped(checkout):
    """The script of the manifest runs twice on this machine, with a small model."""
    (script,) = shell_scripts(manifests(CONTAINERS.read_text()))
    small = "-e pods -s 32 -b 2 --global-batch-size 4 --max-steps 300 --ckpt-freq 300"
    right = script.replace("-e my-run", small).replace("my-run", "pods")
    wrong = right.replace("&& ! -e outputs/pods/requeue ", "")
    assert right != script and wrong != right
    run, real = checkout / "outputs/pods", {"PYTHON": sys.executable, "PYTHON_EXEC": sys.executable}

    def statuses(script: str, stop: bool) -> list[int]:
        env = environment(NNODES=2, HEAD=f"localhost:{free_port()}", NPROC_PER_NODE=1, **real)
        started = {"cwd": checkout, "env": env, "start_new_session": True}
        pods = [subprocess.Popen(["bash", "-c", script], **started) for _ in range(2)]
        try:
            if stop:
                wait_for_file(run / "metrics.jsonl", lambda: pods[0].poll() is None)
                last = read_metrics(run, going_on=True)[-1:]
                while read_metrics(run, going_on=True)[-1:] == last:
                    assert pods[0].poll() is None
                    time.sleep(0.1)
                pods[1].terminate()
            return [pod.wait(300) for pod in pods]
        finally:
            for pod in pods:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pod.pid, signal.SIGKILL)

    assert statuses(right, stop=True) == [1, 1]
    assert statuses(wrong, stop=True) == [0, 0], "planted: both pods would count as complete"
    assert statuses(right, stop=False) == [0, 0]
    assert read_metrics(run)[-1]["step"] == 300


def made_by_make() -> set[str]:
    """Return the lines that `make train` and `make test` stand for, less what keeps them quiet."""
    dry_run = ["make", "--dry-run", "--always-make", "train", "test"]
    output = subprocess.check_output(dry_run, cwd=ROOT, text=True)
    return {" ".join(tidy(line.replace("--quiet", "")).split()) for line in output.splitlines()}


def changes_of_the_environment(page: str) -> set[str]:
    return {tidy(line) for _, line in commands(page) if re.search(r"\bpip\b|-m venv", line)}


@pytest.mark.check
def test_the_front_page_spells_out_what_make_installs():
    page = (ROOT / "README.md").read_text()
    spelled_out, made = changes_of_the_environment(page), made_by_make()
    assert spelled_out and spelled_out <= made
    wrong = page.replace("--constraint requirements.txt", "--constraint other.txt")
    assert not changes_of_the_environment(wrong) <= made


@pytest.mark.check
def test_the_front_page_begins_with_three_commands():
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    three = [f"git clone REPOSITORY_URL {name}", f"cd {name}", "make train"]
    assert [line for _, line in commands((ROOT / "README.md").read_text())][:3] == three
    assert [fate(set(), line) for line in three] == [PARSED, PARSED, SHORTENED]


@pytest.mark.check
def test_commands_that_are_only_parsed(record_property):
    """Bash can read them, make has the targets; test_page has given scripts their arguments."""
    parsed = [command for how, command in ALL if how == PARSED]
    assert all(map(bash_can_read, parsed))
    assert not bash_can_read(parsed[0] + " 'a quote that stays open")
    for command in parsed:
        if command.startswith("make "):
            subprocess.run(["make", "--dry-run", *command.split()[1:]], cwd=ROOT, check=True)
    record_property(COUNTED, [PARSED] * len(parsed))


def bash_can_read(command: str) -> bool:
    return subprocess.run(["bash", "-n", "-c", command], capture_output=True).returncode == 0


def started_faults(source: str) -> set[tuple[str, bool]]:
    """Return (fault, mended) of each call of the fault lab in its tests."""
    import test_fault_lab

    calls = re.findall(r"(?<!def )\blab\((.*?)(, fixed=True)?\)", source)
    return {
        (fault, bool(fixed))
        for faults, fixed in calls
        for fault in eval(f"[{faults}]", vars(test_fault_lab))
    }


@pytest.mark.check
def test_faults_on_pages_are_started_by_other_tests():
    on_pages = {
        (word, "--fixed" in arguments)
        for _, command in ALL
        for script, arguments in scripts_of(command)
        for word in arguments
        if script.endswith("/fault_lab.py") and word not in ("list", "--fixed")
    }
    tests = (ROOT / "tests/test_fault_lab.py").read_text()
    # With --fixed, the lab starts lost-node itself before it shows that the mended run is right.
    assert ("lost-node", True) in started_faults(tests)
    on_pages.discard(("lost-node", False))
    assert on_pages and on_pages <= started_faults(tests)
    assert not on_pages <= started_faults(tests.replace('"no-route", fixed=True', '"no-route"'))


COLLECT = """
import pytest, sys
class Found:
    def pytest_collection_modifyitems(self, items):
        self.tests = [item.nodeid.split("::", 1) for item in items]
found, chosen = Found(), [each.split(" -k ") for each in sys.argv[1:]]
assert pytest.main([*{file for file, *_ in chosen}, "--collect-only", "-q"], [found]) == 0
for file, *words in chosen:
    tests = [test for path, test in found.tests if path == file and all(w in test for w in words)]
    assert tests, (file, words)
"""


@pytest.mark.ci  # so are most of the tests that it counts
def test_commands_that_other_tests_run(tmp_path, record_property):
    """Pytest finds the tests; test_multi_node.py types all commands of one page."""
    others = [command for how, command in ALL if how == ELSEWHERE]
    script = tmp_path / "collect.py"
    script.write_text(COLLECT)
    chosen = {each.split(" pytest ")[1] for each in others if " pytest " in each}
    run_in(ROOT, f"python {script} {shlex.join(chosen)}")
    with pytest.raises(AssertionError, match="no_such_test"):
        run_in(ROOT, f"python {script} 'tests/frozen.py -k no_such_test' tests/test_growth.py")
    pages = [page.name for page in PAGES if "```bash local_cluster" in page.read_text()]
    assert pages == ["slurm.md"]
    record_property(COUNTED, [ELSEWHERE] * len(others))


# --- recorded output ---

RECORDED = sorted(ROOT.glob("*/recorded/*.txt"))


@pytest.mark.check
@pytest.mark.parametrize("recorded", RECORDED, ids=name_of)
def test_recorded_output_names_its_command_and_machine(recorded):
    command, machine = recorded.read_text().splitlines()[:2]
    shown = [line.strip() for page in PAGES for _, line in commands(page.read_text())]
    assert command in shown, "the command stands on a page"
    assert machine.startswith("# ") and "torch " in machine


class EveryMetric(dict):
    """Metrics of a step, with every name that anybody asks for."""

    def __missing__(self, name: str) -> int:
        return 1

    get = dict.__getitem__


def fields(line: str) -> list[str]:
    """Return the fields of a step's log line, with N for each number."""
    line = re.sub(r"for rank \d+ on .*", "", line[re.search(r"\bstep \d+/", line).start() :])
    return [re.sub(r"-?(\d[\d,.]*(e[+-]\d+)?|nan|inf)", "N", each) for each in line.split(" | ")]


def stale_fields(recorded: str, show_metrics: Callable) -> set[str]:
    """Return the fields of recorded log lines that a script does not log today."""
    today = []
    bar = SimpleNamespace(total=1, set_postfix_str=lambda text: None)
    show_metrics(SimpleNamespace(info=today.append), bar, EveryMetric())
    lines = re.findall(r".*\bstep \d+/\d+ \| .*", recorded)
    return {field for line in lines for field in fields(line)} - set(fields(today[0]))


@pytest.mark.check
@pytest.mark.parametrize("recorded", RECORDED, ids=name_of)
def test_recorded_log_lines_have_the_fields_of_today(recorded):
    assert stale_fields(recorded.read_text(), cli.show_metrics) == set()


@pytest.mark.check
def test_planted_field_of_another_name_makes_recorded_output_stale():
    renamed = {}
    exec((ROOT / "common/cli.py").read_text().replace("grad norm {", "norm {"), renamed)
    recorded = "".join(path.read_text() for path in RECORDED)
    assert stale_fields(recorded, renamed["show_metrics"]) == {"grad norm N"}


@pytest.mark.check
def test_recorded_run_of_the_front_page_has_learnt_and_ends_as_today():
    output = (ROOT / "01-single-gpu/recorded/make-train.txt").read_text()
    last = json.loads((ROOT / report.MAKE_TRAIN).read_text().splitlines()[-1])
    assert last["bits_per_byte"] <= 1.6
    end = distributed.final_report(Path("FOLDER"), last, "    def", "TEXT")
    for part in re.split("FOLDER|TEXT", end.splitlines()[0]):
        assert part in output
    sample = output.split("a sample of the model")[1]
    assert "def " in sample and "self" in sample and "\n        " in sample


@pytest.mark.check
@pytest.mark.parametrize("metrics", sorted(ROOT.glob("*/recorded/*.metrics.jsonl")), ids=name_of)
def test_recorded_output_and_metrics_are_of_one_run(metrics):
    output = metrics.with_name(metrics.name.replace(".metrics.jsonl", ".txt")).read_text()
    logged = dict(re.findall(r"\bstep (\d+)/\d+ \| loss (\S+)", output))
    for line in map(json.loads, metrics.read_text().splitlines()):
        assert logged[str(line["step"])] == f"{line['loss']:.4f}"

"""The pages: every diff, command, link, table and recorded output in them, against what is real.

A rule takes a page's path and its text and returns its complaints; below, planted rot turns each of
them red. A block of commands is marked by what it needs beyond this machine: ```bash gpu, cluster
or hub. All others are run, those marked local_cluster by test_multi_node.py.
"""

import ast
import datetime
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHAPTERS, EVALUATED_LITTLE, ROOT, quick, quick_commands, replace_in

from common import launch

sys.path.append(str(ROOT / "tests/benchmarks"))
import picture
import report

PAGES = report.pages()
CHAPTER_PAGES = [ROOT / chapter / "README.md" for chapter in CHAPTERS]
HEADINGS = [
    *("What you learn", "Run it", "What changes", "How it works", "What it costs"),
    *("When it breaks", "Exercises", "Next"),
]
SCRIPTS = r"train_(llm|classifier)\.py|launch(_\w+)?\.sh"  # what runs for long
NEEDS = {"gpu", "cluster", "local_cluster", "hub"}
LANGUAGES = (["bash"], ["diff"], ["text"], ["python"], ["mermaid"])


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[tuple[str, str]]:
    """Return (what stands after the language, content) of each fenced block."""
    return re.findall(rf"^```{language}\b *(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)


def commands(text: str) -> list[tuple[set[str], str]]:
    """Return (what it needs, command) of each command in a page."""
    return [
        (set(needs.split()), line)
        for needs, block in blocks(text, "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


def prose(text: str) -> str:
    return re.sub(r"^```(?:.*\n)*?```$", "", text, flags=re.MULTILINE)


# --- the rules ---


def wrong_headings(page: Path, text: str) -> list[str]:
    if page not in CHAPTER_PAGES:
        return []
    found = re.findall(r"^## (.+)$", text, re.MULTILINE)
    return [] if found == HEADINGS else [f"headings are {found}"]


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
    """A block is a piece of the real diff, or several with a line of @@ between them.

    Less those of chapter 5 that are pieces of other diffs: test_autocast.py compares them.
    """
    text = re.sub(r"^### The same for chapters 1 to 3\n(?:(?!##).*\n)*", "", text, flags=re.M)
    real = real_diff(page)
    shown = [block for _, block in blocks(text, "diff")]
    if real is None:  # solutions show the files that lie beside them, and these whole
        files = [path.read_text() for path in page.parent.glob("*.diff")]
        files *= page.parent.name == "solutions"
        complaints = [f"a diff of no file:\n{each}" for each in shown if each not in files]
        return complaints + [f"not shown:\n{each}" for each in files if each not in shown]
    complaints, covered = [], set()
    for block in shown:
        for piece in re.split(r"^@@.*\n", block, flags=re.MULTILINE):
            lines = [line or " " for line in piece.splitlines()]
            starts = [i for i in range(len(real)) if real[i : i + len(lines)] == lines]
            if lines and len(starts) != 1:
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
    opening = text.split("## What changes\n")[1].split("```diff")[0]
    complaints = [f"{each}, really {right}" for each in found if each != right]
    return complaints if right in opening else [*complaints, f"does not open with {right}"]


def unknown_flags(page: Path, text: str) -> list[str]:
    complaints = []
    inline = re.findall(r"`((?:python|torchrun|bash)\s[^`]+)`", prose(text))
    for command in [*inline, *(command for _, command in commands(text))]:
        words = shlex.split(command, comments=True)
        scripts = [word for word in words if re.search(r"\.(py|sh)$", word)]
        if not scripts or "pytest" in words or words[0] in ("git", "diff"):
            continue
        # A script that is given another one runs it.
        flags = words[words.index(scripts[-1]) + 1 :]
        parts = {scripts[-1]: flags}
        if "--" in flags:  # what comes after it is for the chapter that the script runs
            own, others = flags[: flags.index("--")], flags[flags.index("--") + 1 :]
            chapter = own[own.index("--chapter") + 1] if "--chapter" in own else CHAPTERS[0]
            parts = {scripts[-1]: own, f"{chapter}/train_llm.py": others}
        for script, given in parts.items():
            for flag in given:
                if re.match(r"--?[a-z]", flag) and flag.split("=")[0] not in flags_of(script):
                    complaints.append(f"{script} knows no {flag}: {command}")
    return complaints


@functools.cache
def flags_of(script: str) -> set[str]:
    """Return the flags that stand in the script, or in what its launch file starts."""
    path = ROOT / script
    if path.suffix == ".sh":
        path = path.with_name(f"train_{'classifier' if 'classifier' in path.stem else 'llm'}.py")
    known = re.findall(r'"(--?[a-z][\w-]*)"', path.read_text()) if path.exists() else []
    return {*known, "--help", "-h"}


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
    complaints = [] if quoted else ["no message is quoted"]
    for message in quoted:
        words = re.findall(r"[\w'-]+", message)
        if not any(" ".join(words[i : i + 3]) in said for i in range(max(1, len(words) - 2))):
            complaints.append(f"no code says this: {message}")
    return complaints


RULES = (
    wrong_headings,
    dead_links,
    paths_that_are_gone,
    wrong_diffs,
    wrong_diffstats,
    unknown_flags,
    unknown_blocks,
    gone_tests,
    unrecorded_output,
    stale_tables,
    invented_messages,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page(page, rule):
    assert rule(page, page.read_text()) == []


def test_every_chapter_has_a_page():
    assert set(CHAPTER_PAGES) <= set(PAGES)


# --- planted rot ---

ROT = {
    wrong_headings: [("## What it costs", "## Price", "headings are")],
    dead_links: [
        (r"\]\(\.\./tests/", "](../tusts/", "no such file"),
        (r"\]\(#[a-z]", "](#x", "no such heading"),
    ],
    paths_that_are_gone: [
        ("bash 02-ddp/launch.sh\n", "bash 02-ddp/lunch.sh\n", "02-ddp/lunch.sh"),
        ("`common/launch.py`", "`common/lunch.py`", "common/lunch.py"),
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
    unknown_flags: [
        ("launch.sh -e three", "launch.sh --speed 3 -e three", "knows no --speed"),
        ("launch.sh -e dying`", "launch.sh --dying`", "knows no --dying"),
        ("zero1.py --", "overhead.py --pairs 1 -- --pairs 1 --", "train_llm.py knows no --pairs"),
        ("zero1.py --", "overhead.py --zero1 -- -b 1 -- --", "overhead.py knows no --zero1"),
    ],
    unknown_blocks: [
        ("```bash gpu", "```bash tpu", "unknown mark"),
        ("```bash\n", "```sh\n", "unknown language: sh"),
    ],
    gone_tests: [
        ("tests/test_parity.py -k", "tests/test_parrot.py -k", "no such tests"),
        ("-k planted", "-k painted", "no such test"),
    ],
    unrecorded_output: [("```text\n", "```text\nall is well\n", "nobody recorded")],
    stale_tables: [
        (r"(<!-- table: .*\n.*\n.*\n.*)\d(.*\d)", r"\g<1>00\2", "run python tests/benchmarks"),
        (r"<!-- table: .*\n", "", "no table of report.py"),
        (r"^\| node \|.*", "| node | 3.5 ms |", "no table of report.py: | node"),
        (r"\]\(\.\./tests/benchmarks/results/\w+.json\)", "](gone)", "does not link to"),
    ],
    invented_messages: [
        (r"^\| `[^`]+`", "| `moon rises over silent mountains`", "no code says this")
    ],
}
ROTS = [(rule, *rot) for rule, rots in ROT.items() for rot in rots]


def test_every_rule_has_planted_rot():
    assert set(ROT) == set(RULES)


@pytest.mark.parametrize(("rule", "pattern", "new", "complaint"), ROTS)
def test_rule_finds(rule, pattern, new, complaint):
    page = ROOT / "02-ddp/README.md"
    text = page.read_text()
    rotten = re.sub(pattern, new, text, flags=re.MULTILINE)
    assert rotten != text, "nothing to replace"
    assert rule(page, text) == []
    assert complaint in "\n".join(rule(page, rotten))


def test_a_changed_script_makes_its_page_stale(monkeypatch):
    page = ROOT / "02-ddp/README.md"
    real = real_diff(page)
    for changed in ([*real, "+    more()"], [line.replace("no_sync", "on_sync") for line in real]):
        monkeypatch.setattr(sys.modules[__name__], "whole_diff", lambda *_, new=changed: new)
        assert wrong_diffs(page, page.read_text())
    monkeypatch.setattr(sys.modules[__name__], "whole_diff", lambda *_: [*real, "+    more()"])
    assert wrong_diffstats(page, page.read_text())


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


@pytest.mark.slow
def test_the_picture_is_of_todays_scripts(monkeypatch):
    """Planted: another prediction, another diffstat."""
    drawn = (ROOT / "01-single-gpu/chapters.svg").read_text()
    draw = "python tests/benchmarks/picture.py --output 01-single-gpu/chapters.svg"
    assert picture.picture() == drawn, f"run {draw}"
    halved = {
        name: {**rung, "parts": {part: size / 2 for part, size in rung["parts"].items()}}
        for name, rung in picture.predict().items()
    }
    with monkeypatch.context() as patch:
        patch.setattr(picture, "predict", lambda: halved)
        assert picture.picture() != drawn
    monkeypatch.setattr(report, "diffstat", lambda *_: (1, 1))
    assert picture.picture() != drawn


# --- commands ---


# Of each run of two steps most of the time is the end: what evaluates, and draws the sample. Two
# scripts train to measure something; what they find, other tests look at.
ABRIDGED = [
    ("0*/train_llm.py", *EVALUATED_LITTLE),
    ("common/sample.py", "min(length, 256)", "min(length, 8)"),
    ("tests/benchmarks/packing.py", "STEPS, SAMPLES = 100, 64", "STEPS, SAMPLES = 4, 4"),
    ("05-mixed-precision/compression.py", "STEPS = 40", "STEPS = 12"),
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the repository with its environment, and the files of which the pages speak."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if (ROOT / ".venv").exists():
        (folder / ".venv/bin").mkdir(parents=True)
        commands = [*(ROOT / ".venv/bin").iterdir(), *quick_commands().iterdir()]
        for name, path in {path.name: path for path in commands}.items():
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
        for path in folder.glob(name):
            replace_in(path, part, less)
    # The run that pages use; those that they start go elsewhere.
    train = ["01-single-gpu/train_llm.py", "-e", "my-run", "--max-steps", "2"]
    subprocess.run([sys.executable, *train], cwd=folder, capture_output=True, check=True)
    return folder


@functools.cache
def made_by_make() -> set[str]:
    """Return the lines that `make train` and `make test` stand for, less what keeps them quiet."""
    command = ["make", "--dry-run", "--always-make", "train", "test"]
    output = subprocess.check_output(command, cwd=ROOT, text=True)
    return {" ".join(line.replace("--quiet", "").split()) for line in output.splitlines()}


RUN = [
    pytest.param(
        command,
        id=f"{name_of(page)}: {command.strip()}",
        marks=() if re.match("make (lab|test)", command) else pytest.mark.slow,
    )
    for page in PAGES
    for needs, command in commands(page.read_text())
    if not needs
]


@pytest.mark.parametrize("command", RUN)
def test_command(command, request, tmp_path):
    words = shlex.split(command, comments=True)
    if words[0] == "make" and words[1:] and words[1] in ("test", "test-all", "lint", "lab"):
        # What runs this very test, and what opens a browser.
        assert "make test-all" in (ROOT / ".ci/run").read_text()
        subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True)
        return
    if command.strip() in made_by_make():
        return  # this environment was made by it
    assert "pip" not in words, "it would change the environment that the tests run in"
    if "pytest" in words:
        return  # gone_tests has looked at it, and the tests run with the others
    if "fault_lab.py" in command and words[-1] != "list":
        return  # its own tests start every fault, and what mends it
    checkout = request.getfixturevalue("checkout")  # it takes a while, and not all need it
    added = f"--max-steps 2 --save-dir {tmp_path}"
    if words[:2] == ["make", "train"]:
        arguments = next((word[5:] for word in words if word.startswith("ARGS=")), "")
        command = f"make train ARGS='{arguments} {added}'"
    elif re.search(SCRIPTS, command) and words[0] not in ("git", "diff"):
        command = re.sub(r"(\s#.*)?$", f" {added}", command)
    elif "compare.py" in command:
        command += " --seconds 20"  # begins no row after them
    environment = quick()
    if (ROOT / ".venv").exists():
        environment.pop("VIRTUAL_ENV", None)
    done = subprocess.run(
        ["bash", "-c", command], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    if added in command:
        left = "best/config.json" if "classifier" in command else "state.json"
        (found,) = tmp_path.glob(f"*/{left}")
        run = tmp_path / found.relative_to(tmp_path).parts[0]
        # A later command may ask for this run by its name.
        shutil.copytree(run, checkout / "outputs" / run.name, dirs_exist_ok=True)


def test_make_knows_the_lines_that_the_page_spells_out():
    page = (ROOT / "README.md").read_text()
    spelled_out = {command for _, command in commands(page)} & made_by_make()
    assert len(spelled_out) >= 8, spelled_out
    wrong = page.replace("--constraint requirements.txt", "--constraint other.txt")
    assert not {command for _, command in commands(wrong) if "pip" in command} & made_by_make()


# --- recorded output ---


@pytest.mark.parametrize("recorded", sorted(ROOT.glob("*/recorded/*.txt")), ids=name_of)
def test_recorded_output_names_its_command_and_machine(recorded):
    command, machine = recorded.read_text().splitlines()[:2]
    shown = [line.strip() for page in PAGES for _, line in commands(page.read_text())]
    assert command in shown, "the command stands on a page"
    assert re.match(r"# \d+ cores of an .+", machine)


def recorded_metrics() -> list[dict]:
    return report.content(ROOT / report.MAKE_TRAIN)


def test_recorded_run_reaches_what_is_promised():
    last = recorded_metrics()[-1]
    assert last["bits_per_byte"] <= 1.6
    output = (ROOT / "01-single-gpu/recorded/make-train.txt").read_text()
    stamps = [
        datetime.datetime.fromisoformat(stamp.replace(",", "."))
        for stamp in re.findall(r"^\[(.+?)\]", output, re.MULTILINE)
    ]
    seconds = (stamps[-1] - stamps[0]).total_seconds()
    assert seconds <= 90
    assert f"after {seconds:.0f} seconds" in (ROOT / "README.md").read_text()
    end = launch.describe_end(Path("FOLDER"), last, "    def", "TEXT")
    for part in re.split("FOLDER|TEXT", end.splitlines()[0]):
        assert part in output, "recorded by another version of the code"
    sample = output.split("a sample of the model")[1]
    assert "def " in sample and "self" in sample and "\n        " in sample


@pytest.mark.parametrize("metrics", sorted(ROOT.glob("*/recorded/*.metrics.jsonl")), ids=name_of)
def test_recorded_output_and_metrics_are_of_one_run(metrics):
    output = metrics.with_name(metrics.name.replace(".metrics.jsonl", ".txt")).read_text()
    for line in report.content(metrics):
        assert f"step {line['step']}/464 | loss {line['loss']:.4f} " in output

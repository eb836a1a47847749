"""The page of a script shows all of its lines, and what its chapter changes in it.

The source of such a page is a chapter's train_llm.py, compared with the chapter before, or a .diff
file, whose page shows the patched script. A variant that needs others is compared with the script
that has those. The lines are those of `git diff`. Each block of a diff on another page has links to
its lines, and the lines have links back.
"""

import html
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby, zip_longest
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from files import highlighted, sidebars
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.parsers import Parser
from sphinx.transforms import SphinxTransform

from common import variants

ROOT = Path(__file__).parents[1]
PATTERNS = ["[0-9][0-9]-*/train_llm.py", "[0-9][0-9]-*/**.diff"]
EXCLUDED = ["[0-9][0-9]-*/solutions/*.diff"]  # they would give away the answers
SCRIPTS = sorted(ROOT.glob("[0-9][0-9]-*/train_llm.py"))


class Line(NamedTuple):
    """One line of a complete diff."""

    sign: str  # "+" is new, "-" is removed, and " " is unchanged
    old: int  # its number in the older script, or that of the next line there
    new: int  # its number in the newer script, or that of the next line there
    text: str

    @property
    def anchor(self) -> str:
        return f"R{self.old}" if self.sign == "-" else f"L{self.new}"


# --- the lines ---


@cache
def variant_of(source: Path) -> variants.Variant | None:
    """Return the variant whose .diff file is the source of a page, or None for other sources."""
    variant = variants.read_variant(source) if source.suffix == ".diff" else None
    return variant if variant and variant.needs else None


def base_of(source: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the script that a .diff file changes, and the variants that it has before.

    A variant is shown in its folder's chapter, or in the first chapter that it applies to.
    """
    if variant := variant_of(source):
        own = int(source.relative_to(ROOT).parts[0][:2])
        number = own if own in variant.needs else min(variant.needs)
        return ROOT / variants.CHAPTERS[number] / "train_llm.py", variant.needs[number]
    return patched_script(source), ()


def script_with(script: Path, names: tuple[str, ...]) -> str:
    """Return the text of a chapter's script with some variants."""
    chapter = script.parent.name
    with tempfile.TemporaryDirectory() as folder:
        chosen = variants.choose(number_of(script), names)
        variants.fill(Path(folder), Path(chapter), chapter, chosen)
        return Path(folder, "train_llm.py").read_text()


@cache
def before_and_after(source: Path) -> tuple[str, str]:
    """Return the older and the newer text of what a page's source shows; chapter 1 has no older."""
    if source in SCRIPTS:
        before = SCRIPTS[max(0, SCRIPTS.index(source) - 1)]
        return before.read_text(), source.read_text()
    script, names = base_of(source)
    if variant_of(source):
        return script_with(script, names), script_with(script, (*names, source.stem))
    with tempfile.TemporaryDirectory() as folder:
        patched = Path(folder, script.relative_to(ROOT))
        patched.parent.mkdir(parents=True)
        shutil.copy(script, patched)
        subprocess.run(["git", "apply", source], cwd=folder, check=True)
        return script.read_text(), patched.read_text()


def patched_script(diff: Path) -> Path:
    found = re.findall(r"^--- (?:a/)?(\S+)", diff.read_text(), re.MULTILINE)
    if len(found) != 1:
        raise ExtensionError(f"{diff}: a diff with a page changes one file, not {found}")
    return ROOT / found[0]


@cache
def all_lines(source: Path) -> list[Line]:
    """Return the complete diff, from the first to the last line of the scripts."""
    before, after = before_and_after(source)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.py").write_text(before)
        Path(folder, "b.py").write_text(after)
        command = ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", "-U1000000"]
        done = subprocess.run(
            [*command, "a.py", "b.py"], cwd=folder, capture_output=True, text=True
        )
    if before == after:
        signed = [f" {line}" for line in after.splitlines()]
    else:
        signed = done.stdout.split("@@\n", 1)[1].splitlines()
    found, old, new = [], 1, 1
    for line in signed:
        found.append(Line(line[0], old, new, line[1:]))
        old += line[0] != "+"
        new += line[0] != "-"
    return found


# --- the pieces that other pages show ---


def explained(page: Path) -> list[Path]:
    """Return the sources of which a page may show pieces, the likeliest first."""
    chapter = ROOT / page.relative_to(ROOT).parts[0]
    if page == ROOT / "README.md":
        return [SCRIPTS[1]]
    if chapter / "train_llm.py" not in SCRIPTS:
        return []
    diffs = [path for path in sorted(chapter.rglob("*.diff")) if path.parent.name != "solutions"]
    script = [chapter / "train_llm.py"]
    return [*script, *diffs] if page.parent == chapter and page.stem == "README" else diffs


def blocks(page: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (heading, language, lines) of each fenced block of a page."""
    heading, language, lines = "", None, []
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            if language is not None:
                yield heading, language, lines
            language, lines = (line[3:].split(" ")[0] if language is None else None), []
        elif language is not None:
            lines.append(line)
        elif title := re.match(r"#+ (.+)", line):
            heading = title[1]


def find(block: list[str], language: str, source: Path) -> list[list[Line]]:
    """Return the changed lines of each piece of a block; lines of @@ separate the pieces.

    Returns nothing unless all pieces are pieces of this source.
    """
    whole = all_lines(source)
    changes = any(line.sign != " " for line in whole)
    if language != ("diff" if changes else "python"):  # chapter 1 has no diff
        return []
    signed = [f"{line.sign}{line.text}" if changes else line.text for line in whole]
    found = []
    for separator, group in groupby(block, lambda line: line.startswith("@@")):
        if separator:
            continue
        piece = [line or " " * changes for line in group]
        starts = (i for i in range(len(signed)) if signed[i : i + len(piece)] == piece)
        start = next(starts, None)
        if start is None:
            return []
        lines = whole[start : start + len(piece)]
        found.append([line for line in lines if line.sign != " "] or lines)
    return found


def anchor_of(source: Path, piece: list[Line]) -> str:
    """Return the name of the place that shows a piece on another page."""
    return f"{source.stem}-{piece[0].anchor}"


def numbers(piece: list[Line]) -> str:
    """Return in words which lines of the newer script a piece shows."""
    new = [line.new for line in piece if line.sign != "-"]
    if not new:
        return f"removed before line {piece[0].new}"
    return f"line {new[0]}" if len(new) == 1 else f"lines {new[0]} to {new[-1]}"


class LinkBlocks(SphinxTransform):
    """Below each block of a diff, add links to its lines in the complete script."""

    default_priority = 800  # before Sphinx collects what it finds in the page

    def apply(self) -> None:
        page = Path(self.env.doc2path(self.env.docname))
        if page.suffix != ".md":
            return
        for block in list(self.document.findall(nodes.literal_block)):
            self.link(block, page)

    def link(self, block: nodes.literal_block, page: Path) -> None:
        lines, language = block.astext().splitlines(), block.get("language")
        shown = {source: find(lines, language, source) for source in explained(page)}
        shown = {source: pieces for source, pieces in shown.items() if pieces}
        if not shown:
            return
        source, pieces = next(iter(shown.items()))  # links to one script are enough
        docname = self.env.path2doc(str(source))
        uri = self.app.builder.get_relative_uri(self.env.docname, docname)
        links = nodes.paragraph(classes=["shown-lines"])
        links += nodes.Text(f"{'In the complete script' if source in SCRIPTS else source.name}: ")
        for number, piece in enumerate(pieces):
            links += nodes.Text(", " if number else "")
            target = f"{uri}#{piece[0].anchor}"
            links += nodes.reference("", numbers(piece), internal=True, refuri=target)
        ids = [anchor_of(source, piece) for source in shown for piece in shown[source]]
        container = nodes.container("", ids=ids, classes=["shown"])
        block.replace_self(container)
        container += [block, links]


# --- the pages ---


class ScriptParser(Parser):
    """Make the page of a script or of a diff."""

    supported = ("script",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        self.setup_parse(inputstring, document)
        env = document.settings.env
        source = Path(env.doc2path(env.docname))
        section = nodes.section("", nodes.title("", title(source)), ids=["script"])
        links = {} if source in SCRIPTS else links_to_variants(source, env)
        shown = introduction(source, links) + page_of(source, links_back(source, env))
        section += nodes.raw("", shown, format="html")
        document += section
        self.finish_parse()


def links_back(source: Path, env: BuildEnvironment) -> dict[str, str]:
    """Map the first changed line of each piece that a page shows to a link to the page."""
    links = {}
    for page in pages_about(source):
        uri = env.app.builder.get_relative_uri(env.docname, env.path2doc(str(page)))
        for heading, language, block in blocks(page):
            for piece in find(block, language, source):
                link = f'<a href="{uri}#{anchor_of(source, piece)}">{html.escape(heading)}</a>'
                links.setdefault(piece[0].anchor, link)
    return links


def page_of(source: Path, links: dict[str, str]) -> str:
    rows = []
    for line, code in zip(all_lines(source), highlighted_lines(source), strict=True):
        if line.anchor in links:
            rows.append(f'<span class="row explained">Explained in {links[line.anchor]}\n</span>')
        rows.append(row(line, code))
    return (
        f"{sections(all_lines(source))}"
        f'<div class="highlight script"><pre>{"".join(rows)}</pre></div>'
    )


CONTEXT = 3  # unchanged lines that the comparison shows around a change
KINDS = {"+": "new", "-": "old", " ": "same"}


def row(line: Line, code: str) -> str:
    number = line.new
    if line.sign == "-":
        indent = re.match(" *", code)[0]
        number, code = "", f"{indent}<del>{code[len(indent) :]}</del>"
    return (
        f'<span class="row {KINDS[line.sign]}" id="{line.anchor}">'
        f'<a class="number" href="#{line.anchor}">{number}</a>{code}\n</span>'
    )


def highlighted_lines(source: Path) -> list[str]:
    """Return the code of all_lines as HTML."""
    before, after = (highlighted(text, "script.py") for text in before_and_after(source))
    return [
        before[line.old - 1] if line.sign == "-" else after[line.new - 1]
        for line in all_lines(source)
    ]


def pages_about(source: Path) -> list[Path]:
    """Return the pages of a source's folder that show pieces of it; the lesson comes first."""
    chapter = ROOT / source.relative_to(ROOT).parts[0]
    pages = [chapter / "README.md"] if source in SCRIPTS else sorted(chapter.rglob("*.md"))
    return [page for page in pages if page.parent.name != "solutions"]


def number_of(script: Path) -> int:
    return int(script.parent.name[:2])


def title(source: Path) -> str:
    if source in SCRIPTS:
        return f"Chapter {number_of(source)}: train_llm.py"
    kind = "variant" if variant_of(source) else "diff"
    return f"{source.stem}: chapter {number_of(base_of(source)[0])} with this {kind}"


def introduction(source: Path, links: dict[str, str]) -> str:
    """Return what stands above a script; links: by name, the pages of variants."""
    lines = all_lines(source)
    added, removed = (sum(line.sign == sign for line in lines) for sign in "+-")
    if not added + removed:
        return f"<p>The complete script has {len(lines)} lines.</p>"
    about = ""
    if source in SCRIPTS:
        base = f"chapter {number_of(source) - 1}"
        command = f"make diff CHAPTER={number_of(source)}"
    else:
        script, needed = base_of(source)
        base = f"chapter {number_of(script)}"
        command = f"git apply {source.relative_to(ROOT)}"
        if variant := variant_of(source):
            words = " ".join(sorted([*needed, source.stem]))
            command = f'make variant CHAPTER={number_of(script)} WITH="{words}"'
            about = f"<p>{html.escape(variant.title)}{also_for(variant, number_of(script))}</p>"
        if needed:
            base += f" with {listed(links[name] for name in needed)}"
    return (
        f'{about}<p><span class="new">{added} lines</span> are new or changed since {base}, and '
        f'<span class="old"><del>{removed} lines</del></span> are gone. '
        f'<a href="{source.stem}-side-by-side.html">Compare both scripts side by side</a>, or run '
        f"<code>{command}</code>.</p>"
    )


def also_for(variant: variants.Variant, shown: int) -> str:
    """Return a sentence about the other chapters that a variant applies to."""
    others = [str(number) for number in sorted(variant.needs) if number != shown]
    if not others:
        return ""
    return f" The variant also applies to chapter{'s' * (len(others) > 1)} {listed(others)}."


def listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def links_to_variants(source: Path, env: BuildEnvironment) -> dict[str, str]:
    """Map the names of the variants that a page's variant needs to links to their pages."""
    script, names = base_of(source)
    links = {}
    for variant in variants.choose(number_of(script), names):
        uri = env.app.builder.get_relative_uri(env.docname, env.path2doc(str(variant.path)))
        links[variant.name] = f'<a href="{uri}">{variant.name}</a>'
    return links


def sections(lines: list[Line]) -> str:
    """Return links to the script's sections, and to the first of the lines that are new there."""
    found = []  # (name, anchor, new lines) of each section
    for line in lines:
        name = re.match(r"def (\w+)| *# --- (\w+) ---", line.text) if line.sign != "-" else None
        if name or not found:
            found.append(((name and (name[1] or name[2])) or "imports", line.anchor, []))
        found[-1][2].extend([line] if line.sign == "+" else [])
    links = (
        f'<span><a href="#{anchor}">{name}</a>'
        + (f' <a href="#{new[0].anchor}">+{len(new)}</a>' if new else "")
        + "</span>"
        for name, anchor, new in found
    )
    return f'<p class="sections">{" ".join(links)}</p>'


def side_by_side(app) -> Iterator[tuple[str, dict, str]]:
    """Make a page that shows both scripts in two columns; phones show one column."""
    sidebar = sidebars(app)
    for docname in sorted(app.env.found_docs):
        source = Path(app.env.doc2path(docname))
        if source.suffix not in (".py", ".diff") or source == SCRIPTS[0]:
            continue
        name = f"{docname}-side-by-side"
        body = (
            f"<h1>{html.escape(title(source))}, side by side</h1>"
            f'<div class="columns">{"".join(column_names(source, name, app))}</div>'
            f'<div class="highlight sides">{"".join(sides(source))}</div>'
        )
        context = {"title": f"{title(source)}, side by side", "body": body, **sidebar(name)}
        yield name, context, "page.html"


def column_names(source: Path, docname: str, app) -> Iterator[str]:
    """Yield links to the complete scripts of both columns.

    If a variant needs several others, no page has the older script. Then the link leads to the
    chapter's.
    """
    if source in SCRIPTS:
        older, needed = SCRIPTS[SCRIPTS.index(source) - 1], ()
        newer_name = f"Chapter {number_of(source)}"
    else:
        older, needed = base_of(source)
        newer_name = f"With {source.name}"
    older_name = f"Chapter {number_of(older)}"
    if needed:
        older_name += f" with {listed(needed)}"
    if len(needed) == 1:
        older = variants.choose(number_of(older), needed)[0].path
    for age, script, shown in (("old", older, older_name), ("new", source, newer_name)):
        uri = app.builder.get_relative_uri(docname, app.env.path2doc(str(script)))
        yield f'<span class="{age}"><a href="{uri}">{shown}</a></span>'


def sides(source: Path) -> Iterator[str]:
    """Yield rows of lines: the older ones on the left, the newer ones on the right."""
    both = zip(all_lines(source), highlighted_lines(source), strict=True)
    for same, group in groupby(both, lambda each: each[0].sign == " "):
        lines = list(group)
        if same:
            pairs = [*zip(lines, lines, strict=True)]
            folded = pairs[CONTEXT:-CONTEXT]
            yield grid(pairs[:CONTEXT])
            if folded:
                said = f"{len(folded)} unchanged line{'s' * (len(folded) > 1)}"
                yield f"<details><summary>{said}</summary>{grid(folded)}</details>"
            yield grid(pairs[max(CONTEXT, len(pairs) - CONTEXT) :])
        else:
            removed, added = ([each for each in lines if each[0].sign == sign] for sign in "-+")
            yield grid([*zip_longest(removed, added)])


def grid(pairs: list[tuple]) -> str:
    """Return one grid for neighbouring rows, so that a phone shows the older ones first."""
    rows = (f"{side(left, 'older')}{side(right, 'newer')}" for left, right in pairs)
    return f'<div class="grid">{"".join(rows)}</div>'


def side(line_and_code: tuple[Line, str] | None, age: str) -> str:
    if line_and_code is None:
        return f'<span class="absent {age}"></span><pre class="absent {age}"></pre>'
    line, code = line_and_code
    number = line.old if age == "older" else line.new
    return (
        f'<span class="number {age} {KINDS[line.sign]}">{number}</span>'
        f'<pre class="{age} {KINDS[line.sign]}">{code}</pre>'
    )


def setup(app) -> None:
    app.add_source_parser(ScriptParser)
    app.add_transform(LinkBlocks)
    app.connect("html-collect-pages", side_by_side)

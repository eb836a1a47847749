"""The website: all pages are in it once, and its scripts show the diffs that git shows.

The tests with a browser use Chromium of this machine, without a window.
"""

import functools
import html
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, pairwise
from pathlib import Path
from unittest import mock

import pytest
import report
from cluster import give_up
from helpers import CHAPTERS, ROOT, apply, changed, copy_repository, environment, name_of, patch
from playwright.sync_api import Browser, Page, sync_playwright

from common import variants

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# It must look for nothing on the network. As root, it cannot make its sandbox.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
FLAGS += ["--disable-component-update", "--disable-sync"]
WIDTHS, SCHEMES = (1280, 390), ("light", "dark")


def build(root: Path, folder: Path) -> str:
    """Build the website of a repository; return the warnings."""
    words = ["-m", "sphinx", "--fail-on-warning", "--quiet", "-c", root / ".site", root, folder]
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (done.returncode == 0) == (not done.stderr), done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def site(make_folder) -> Path:
    folder = make_folder("site")
    assert build(ROOT, folder) == ""
    return folder


@functools.cache
def read(page: Path) -> str:
    return page.read_text()


def article(page: Path) -> str:
    """Return what a page shows beside the sidebar."""
    return re.search(r"<article.*?</article>", read(page), re.DOTALL)[0]


def text_of(fragment: str) -> str:
    """Return what a reader sees of HTML."""
    return html.unescape(re.sub(r"<[^>]+>", "", fragment))


def scripts_and_diffs() -> list[Path]:
    """Return what has a page that shows a whole script. Diffs of solutions have none."""
    diffs = sorted(ROOT.glob("[0-9]*/*/*.diff"))
    scripts = [ROOT / chapter / "train_llm.py" for chapter in CHAPTERS]
    return [*scripts, *(diff for diff in diffs if diff.parent.name != "solutions")]


def page_of(source: Path) -> str:
    return name_of(source.with_suffix(".html"))


# --- what is in it ---


@pytest.mark.ci
def test_the_sidebar_has_every_page_once(site):
    """In the order of the chapters, which the links to the next page follow."""
    (tree,) = re.findall(r'<div class="sidebar-tree">(.*?)</div>', read(site / "README.html"), re.S)
    links = re.findall(r'<a [^>]*?href="([^"]+)"', tree)
    notebooks = [ROOT / chapter / "lab.ipynb" for chapter in CHAPTERS]
    others = ("common/README.md", "CONTRIBUTING.md", "tests/README.md", "CHANGELOG.md")
    others = [ROOT / name for name in others]
    sources = [*report.pages(), *notebooks, *others, *scripts_and_diffs()]
    assert sorted(links) == sorted({page_of(each) for each in sources} - {"README.html"})
    of_chapters = [[link for link in links if link.startswith(chapter)] for chapter in CHAPTERS]
    assert links == [*chain(*of_chapters), *map(page_of, others)]
    for chapter, pages in zip(CHAPTERS, of_chapters, strict=True):
        first = ["README", "train_llm", "lab", "reference", "measurements"]
        assert pages[:5] == [f"{chapter}/{name}.html" for name in first]
        assert pages[-1] == f"{chapter}/solutions/README.html"
    for page, following in pairwise(["README.html", *links]):
        (link,) = re.findall(r'class="next-page" href="([^"]+)"', read(site / page))
        assert (site / page).parent.joinpath(link).resolve() == site / following


@pytest.mark.ci
def test_links_lead_to_pages_and_places(site):
    """Sphinx checks most links. Those between hunks and scripts are made without it."""
    pages = sorted(site.rglob("*.html"))
    places = {page: {*re.findall(r'\bid="([^"]+)"', read(page))} for page in pages}
    anchors = 0
    for page in pages:
        for link in re.findall(r'<a [^>]*?href="([^"]+)"', read(page)):
            target, _, anchor = link.partition("#")
            if not re.match(r"\w+:", target):
                file = (page.parent / target).resolve() if target else page
                assert file.exists(), (page, link)
                assert not anchor or anchor in places[file], (page, link)
                anchors += bool(anchor)
    assert len(pages) > 100 and anchors > 1000


@pytest.mark.ci
def test_notebooks_show_their_outputs(site):
    for chapter in CHAPTERS:
        outputs = article(site / chapter / "lab.html").split('class="cell_output ')[1:]
        assert sum("<img" in output for output in outputs) >= 5
        assert sum("<pre" in output for output in outputs) >= 5


@pytest.mark.ci
def test_it_needs_no_network(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'\bsrc="([^"]+)"', read(page))
        loaded += re.findall(r'<link [^>]*?href="([^"]+)"', read(page))
        assert not [each for each in loaded if re.match(r"\w+:|//", each)], page


# --- scripts and diffs ---


def before_and_after(source: Path, folder: Path) -> list[Path]:
    """Return the older and the newer script of which a page shows the differences."""
    if source.suffix == ".py":
        scripts = [ROOT / chapter / "train_llm.py" for chapter in CHAPTERS]
        return scripts[scripts.index(source) - 1 :][:2]
    variant = variants.read_variant(source)
    if not variant.needs:
        (chapter,) = re.findall(r"^--- a/(\S+)/train_llm.py", source.read_text(), re.MULTILINE)
        patched = patch(chapter, folder, diff=source)
        return [each / "train_llm.py" for each in (ROOT / chapter, patched)]
    # The chapter of the variant's folder or, if it does not apply there, the first one.
    number = int(name_of(source)[:2])
    number = number if number in variant.needs else min(variant.needs)
    script = ROOT / variants.CHAPTERS[number] / "train_llm.py"
    before, after = folder / "before/train_llm.py", folder / "after/train_llm.py"
    diffs = [each.path for each in variants.choose(number, variant.needs[number])]
    for copy, applied in ((before, diffs), (after, [*diffs, source])):
        copy.parent.mkdir(parents=True)
        shutil.copy(script, copy)
        for diff in applied:
            assert apply(diff, copy.parent, "-p2").returncode == 0, diff
    return [before, after]


def rows(page: Path) -> dict[str, tuple[str, str, str]]:
    """Map the places of a script's page to lines: the sign of a diff, the number and the text."""
    row = r'<span class="row (\w+)" id="(\w+)"><a class="number"[^>]*>(\d*)</a>(.*)\n</span>'
    signs = {"new": "+", "old": "-", "same": " "}
    found = re.findall(row, read(page))
    return {place: (signs[kind], number, text_of(code)) for kind, place, number, code in found}


@pytest.mark.ci
def test_pages_of_scripts_show_both_scripts_and_the_lines_of_git_diff(site, tmp_path):
    """On one page with marks, and on another side by side."""
    for source in scripts_and_diffs()[1:]:
        before, after = before_and_after(source, tmp_path / name_of(source))
        command = ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", before, after]
        diff = subprocess.run(command, capture_output=True, text=True).stdout
        shown = [*rows(site / page_of(source)).values()]
        marked = [f"{sign}{text}" for sign, _, text in shown if sign != " "]
        assert marked == changed(diff) != []
        lines = after.read_text().splitlines()
        numbered = [(str(number), line) for number, line in enumerate(lines, start=1)]
        assert [row[1:] for row in shown if row[0] != "-"] == numbered
        page = read(site / page_of(source.with_stem(f"{source.stem}-side-by-side")))
        for age, script in (("older", before), ("newer", after)):
            lines = re.findall(rf'<pre class="{age} \w+">(.*?)</pre>', page)
            assert [text_of(line) for line in lines] == script.read_text().splitlines(), source
    script = (ROOT / CHAPTERS[0] / "train_llm.py").read_text()
    shown = rows(site / CHAPTERS[0] / "train_llm.html").values()
    assert [row[::2] for row in shown] == [(" ", line) for line in script.splitlines()]


@pytest.mark.ci
def test_each_hunk_of_a_lesson_is_linked_with_its_lines(site):
    """A hunk of a variant, with the lines on the variant's page."""
    for chapter in CHAPTERS:
        lesson = article(site / chapter / "README.html").split('id="the-diff"')[1]
        script = (ROOT / chapter / "train_llm.py").read_text()
        language = "python" if chapter == CHAPTERS[0] else "diff"
        block = rf'<div class="highlight-{language} .*?<pre>(.*?)</pre>(.*?)</p>'
        hunks = re.findall(block, lesson.split('</section>\n<section id="what-it-costs')[0], re.S)
        assert len(hunks) >= 4, chapter
        for code, links in hunks:
            if language == "python" and text_of(code) not in script:
                continue  # it is from common
            places = re.findall(r'href="(train_llm|diffs/[\w-]+)\.html#(\w+)"', links)
            pieces = re.split(r"^@@.*\n", text_of(code), flags=re.MULTILINE)
            for piece, (source, place) in zip(filter(None, pieces), places, strict=True):
                page = site / chapter / f"{source}.html"
                shown = [line[1:] if language == "diff" else line for line in piece.splitlines()]
                assert rows(page)[place][2] in shown
                back = rf'README.html#{page.stem}-{place}">.*\n</span><span class="row \w+" id='
                assert re.search(f'{back}"{place}"', read(page)), (chapter, source, place)


@pytest.mark.ci
def test_pages_of_variants_say_what_they_show(site):
    """The title, the command that makes the variant, and links to the variants that it needs."""
    for source in scripts_and_diffs():
        if source.suffix == ".diff" and (variant := variants.read_variant(source)).needs:
            shown = article(site / page_of(source)).split('<p class="sections">')[0]
            assert variant.title in text_of(shown), source
            chapter, names = re.search(
                r'make variant CHAPTER=(\d) WITH="(.+)"', text_of(shown)
            ).groups()
            assert {*names.split()} == {variant.name, *variant.needs[int(chapter)]}
            for name in variant.needs[int(chapter)]:
                assert re.search(rf'<a href="[^"]*{name}.html">{name}</a>', shown), source


def test_planted_mistakes_are_warnings(tmp_path):
    copy_repository(tmp_path)
    folder = tmp_path / CHAPTERS[1]
    with (folder / "README.md").open("a") as lesson:
        lesson.write("\n[one](gone.md) and [two](reference.md#gone)\n")
    (folder / "forgotten.md").write_text("# A page that is not in the sidebar\n")
    (folder / "measurements.md").unlink()
    warnings = build(tmp_path, tmp_path / "build/site")
    for said in ("'gone.md'", "'gone'", "forgotten.md: WARNING", "'02-ddp/measurements'"):
        assert said in warnings, warnings


# --- how it looks ---


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = [path for path in map(shutil.which, BROWSERS) if path]
    if not found:
        give_up("needs Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    """The site as a server sends it: from a file, the search cannot show excerpts."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=site)
    with (
        mock.patch.object(SimpleHTTPRequestHandler, "log_message"),
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def visit(browser, address) -> Iterator[Callable[..., Page]]:
    """Return a function that opens a page; at the end, the console must have no message.

    Chromium writes there what it could not load.
    """
    errors = []

    def open_page(name: str, width: int = 1280, scheme: str = "light") -> Page:
        viewport = {"width": width, "height": 900}
        page = browser.new_page(viewport=viewport, color_scheme=scheme)
        page.on("console", lambda message: errors.append((page.url, message.text)))
        page.on("pageerror", lambda error: errors.append((page.url, error)))
        page.goto(f"{address}/{name}")
        return page

    yield open_page
    for context in browser.contexts:
        context.close()
    assert errors == []


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_screen(visit, site, address, width, scheme):
    """And each one loads without an error. Pages of files are all alike: one mode is enough."""
    names = {str(path.relative_to(site)) for path in site.rglob("*.html")} - {"index.html"}
    page = visit("index.html", width, scheme)
    page.wait_for_url(f"{address}/README.html")
    for name in sorted(names):
        if scheme == "light" or not re.search(r"\.\w+\.html$", name):
            page.goto(f"{address}/{name}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name


@pytest.mark.nightly
def test_contents_are_beside_the_page_and_icons_do_not_touch(visit):
    """On a small screen and on a phone."""
    contents = visit("04-fsdp/README.html", 1280).locator(".toc-drawer").bounding_box()
    assert contents["x"] + contents["width"] <= 1280
    page = visit("04-fsdp/README.html", 390)
    icons = [
        page.locator(f".header-right {each}") for each in (".theme-toggle", ".toc-header-icon")
    ]
    mode, toc = (icon.bounding_box() for icon in icons)
    assert toc["x"] - mode["x"] - mode["width"] >= 8


@pytest.mark.nightly
def test_a_result_of_the_search_leads_to_the_words(visit):
    page = visit("README.html")
    page.get_by_placeholder("Search").fill("hsdp")
    page.keyboard.press("Enter")
    page.locator("ul.search a[href='04-fsdp/README.html']").click()
    page.wait_for_function(
        """[...document.querySelectorAll("article .highlighted")].some(word => {
            const {top, bottom} = word.getBoundingClientRect();
            return scrollY > 0 && top > 0 && bottom < innerHeight;
        })"""
    )


@pytest.mark.nightly
def test_new_and_removed_lines_have_colours_of_their_own(visit):
    page = visit("04-fsdp/train_llm.html")
    colour = "row => getComputedStyle(row).backgroundColor"
    kinds = ("new", "old", "same")
    colours = [page.locator(f".row.{kind}").first.evaluate(colour) for kind in kinds]
    assert len({*colours}) == 3, colours


@pytest.mark.nightly
def test_figures_switch_with_the_page(visit):
    """Also if the reader has chosen the other mode than the system's."""
    page = visit("04-fsdp/README.html", scheme="light")
    page.add_style_tag(content="* { background: gray !important; }")
    figure = page.locator("article img").first
    figure.evaluate("image => image.decode()")

    def seen_in(mode: str) -> bytes:
        page.evaluate(f"document.body.dataset.theme = '{mode}'")
        page.wait_for_timeout(300)
        return figure.screenshot()

    light, dark = seen_in("light"), seen_in("dark")
    assert light == seen_in("auto") == seen_in("light") != dark

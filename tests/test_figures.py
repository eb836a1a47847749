"""The figures of the pages: files are up to date, and each can be read on a phone.

A rule takes an SVG file and returns complaints; below it, planted faults make it complain.
"""

import functools
import re
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

import figures
import pytest
from helpers import ROOT

# One worker draws the figures once for all tests.
pytestmark = [pytest.mark.check, pytest.mark.xdist_group("figures")]
SVG = "{http://www.w3.org/2000/svg}"
SMALLEST = 13  # pixels, when the figure is 720 wide
REMAKE = "run .venv/bin/python tests/benchmarks/figures.py"

drawn = functools.cache(figures.draw_all)


def depend_on_versions() -> set[Path]:
    """Return the figures of predicted memory, if what is installed is not in requirements.txt.

    Another PyTorch may save other tensors for the backward pass.
    """
    pins = (ROOT / "requirements.txt").read_text()
    for name in ("torch", "transformers"):
        if f"{name}=={version(name).split('+')[0]}\n" not in pins:
            chapters = ("01-single-gpu", "04-fsdp")
            predicted = {Path(chapter, "figures/step_memory.svg") for chapter in chapters}
            return {*predicted, Path("01-single-gpu/chapters.svg")}
    return set()


def complaints(content: str) -> list[str]:
    """Return what makes an SVG file unfit for a page."""
    root = ElementTree.fromstring(content)
    width, height = (float(number) for number in root.get("viewBox").split()[2:])
    found = []
    if not (root.findtext(f"{SVG}title") or "").strip():
        found.append("no title")
    if width != 720:
        found.append(f"{width:g} wide")
    if "@media (prefers-color-scheme:dark)" not in (root.findtext(f"{SVG}style") or ""):
        found.append("no colours for dark mode")
    for element in root.iter(f"{SVG}text"):
        size, x, y = (float(element.get(name)) for name in ("font-size", "x", "y"))
        if size < SMALLEST:
            found.append(f"{size:g} px: {element.text}")
        if not (0 <= x <= width and size <= y <= height - 4):
            found.append(f"outside: {element.text}")
    sizes = re.findall(r"font-size:\s*([\d.]+)", content)
    found += [f"{size} px in the style" for size in sizes if float(size) < SMALLEST]
    return found


def test_figures_are_up_to_date():
    ours = {path: content for path, content in drawn().items() if path not in depend_on_versions()}
    assert figures.stale(ours) == [], REMAKE


def test_each_svg_in_a_figures_folder_has_a_drawing():
    files = {path.relative_to(ROOT) for path in ROOT.glob("[0-9]*/figures/*")}
    assert files <= set(figures.figures()), "remove the files that nothing draws"


@pytest.mark.parametrize("path", figures.figures(), ids=str)
def test_figure_is_readable(path: Path):
    assert complaints((ROOT / path).read_text(encoding="utf-8")) == []


def test_a_figure_is_drawn_twice_alike():
    path = Path("02-ddp/figures/samples.svg")
    assert figures.figures()[path]() == drawn()[path]


def test_a_changed_a_missing_and_a_wrong_file(tmp_path: Path):
    """Planted."""
    kept, changed, missing, *_ = drawn()
    for path in (kept, changed):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(drawn()[path], encoding="utf-8")
    some = {path: drawn()[path] for path in (kept, changed, missing)}
    assert figures.stale(some, tmp_path) == [missing]
    text = drawn()[changed].replace("<title>", "<title>Not ")
    (tmp_path / changed).write_text(text, encoding="utf-8")
    assert figures.stale(some, tmp_path) == [changed, missing]


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (r"<title>.*</title>", "<title> </title>", "no title"),
        (r'font-size="18"', 'font-size="12"', "12 px: "),
        (r"<style>", "<style>text{font-size:9px}", "9 px in the style"),
        (r'viewBox="0 0 720', 'viewBox="0 0 1200', "1200 wide"),
        (r"@media [^{]*", "@media print", "no colours for dark mode"),
        (r'<text x="\d+"', '<text x="800"', "outside: "),
    ],
)
def test_an_unreadable_figure(before: str, after: str, complaint: str):
    """Planted."""
    content = drawn()[Path("02-ddp/figures/ring.svg")]
    assert complaints(content) == []
    rotten = re.sub(before, after, content, count=1)
    assert rotten != content
    (found,) = complaints(rotten)
    assert found.startswith(complaint)

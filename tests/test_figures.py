"""The figures of the pages: those with data are up to date, and each can be read on a phone."""

import re
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

import figures
import pytest
import report
from helpers import ROOT

SVG = "{http://www.w3.org/2000/svg}"
SMALLEST = 13  # pixels, when the figure is 720 wide
# Figures of what 04-fsdp/memory.py predicts.
PREDICTED = [Path("01-single-gpu/chapters.svg")]
PREDICTED += [Path(name, "figures/step_memory.svg") for name in ("01-single-gpu", "04-fsdp")]
FILES = sorted([ROOT / "01-single-gpu/chapters.svg", *ROOT.glob("[0-9]*/figures/*.svg")])
REMAKE = "run .venv/bin/python tests/benchmarks/figures.py"


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


@pytest.mark.check
def test_figures_with_measurements_are_up_to_date(tmp_path):
    """Planted: a file that is missing, and one that differs."""
    drawn = {path: draw() for path, draw in figures.figures().items() if path not in PREDICTED}
    assert figures.stale(drawn) == [], REMAKE
    kept, changed, missing, *_ = drawn
    some = {path: drawn[path] for path in (kept, changed, missing)}
    for path in (kept, changed):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(drawn[path], encoding="utf-8")
    assert figures.stale(some, tmp_path) == [missing]
    text = drawn[changed].replace("<title>", "<title>Not ")
    (tmp_path / changed).write_text(text, encoding="utf-8")
    assert figures.stale(some, tmp_path) == [changed, missing]


@pytest.mark.ci
def test_figures_of_predicted_memory_are_up_to_date():
    """Another PyTorch may save other tensors for the backward pass."""
    pins = (ROOT / "requirements.txt").read_text()
    for name in ("torch", "transformers"):
        if f"{name}=={version(name).split('+')[0]}\n" not in pins:
            pytest.skip(f"the figures are of the {name} in requirements.txt")
    drawn = {path: figures.figures()[path]() for path in PREDICTED}
    assert figures.stale(drawn) == [], REMAKE


@pytest.mark.check
def test_each_figure_is_on_a_page():
    pages = {page: page.read_text() for page in report.pages()}
    shown = {
        (page.parent / link).resolve()
        for page, text in pages.items()
        for link in re.findall(r"\]\(([^)\s]+\.svg)\)", text)
    }
    assert len(FILES) > 15 and set(FILES) <= shown


@pytest.mark.check
def test_figures_are_readable():
    for path in FILES:
        assert complaints(path.read_text(encoding="utf-8")) == [], path
    content = (ROOT / "02-ddp/figures/ring.svg").read_text(encoding="utf-8")
    for before, after, complaint in (
        (r"<title>.*</title>", "<title> </title>", "no title"),
        (r'font-size="18"', 'font-size="12"', "12 px: "),
        (r"<style>", "<style>text{font-size:9px}", "9 px in the style"),
        (r'viewBox="0 0 720', 'viewBox="0 0 1200', "1200 wide"),
        (r"@media [^{]*", "@media print", "no colours for dark mode"),
        (r'<text x="\d+"', '<text x="800"', "outside: "),
    ):
        rotten = re.sub(before, after, content, count=1)
        assert rotten != content
        (found,) = complaints(rotten)
        assert found.startswith(complaint), "planted"

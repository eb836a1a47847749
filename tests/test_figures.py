"""The figures of the pages: their numbers are up to date, and each can be read on a phone."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import figures
import pytest
import report
from helpers import CHAPTERS, ROOT
from runner import load_script

from common.inputs import models

memory = load_script(ROOT / "04-fsdp/memory.py")

SVG = "{http://www.w3.org/2000/svg}"
SMALLEST = 13  # pixels, when the figure is 720 wide
FILES = sorted(ROOT.glob("[0-9]*/figures/*.svg"))


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
def test_figures_with_measurements_are_up_to_date():
    drawn = figures.draw_all()
    assert figures.stale(drawn) == [], "run .venv/bin/python tests/benchmarks/figures.py"
    changed, missing = next(iter(drawn)), Path("missing.svg")
    drawn |= {changed: drawn[changed].replace("<title>", "<title>Not "), missing: ""}
    assert figures.stale(drawn) == [changed, missing], "planted"


def texts(path: Path) -> list[str]:
    return [element.text for element in ElementTree.parse(path).iter(f"{SVG}text")]


@pytest.mark.ci
def test_figures_show_the_peak_memory_that_is_predicted():
    """Another PyTorch may save other tensors for the backward pass."""
    pins = (ROOT / "requirements.txt").read_text()
    for name in ("torch", "transformers"):
        if f"{name}=={version(name).split('+')[0]}\n" not in pins:
            pytest.skip(f"the figures are of the {name} in requirements.txt")

    def peaks(model: str, options: memory.Options, *setups: dict) -> list[float]:
        cache, config = {}, models.load_config(model)
        found = [memory.predict(config, replace(options, **each), cache) for each in setups]
        return [each["peak"] / memory.GIB for each in found]

    one = memory.Options(seq_length=1024)
    expected = peaks("gpt2", one, {"batch_size": 24}, {"batch_size": 8, "accumulation": 3})
    shown = texts(ROOT / CHAPTERS[0] / "figures/step_memory.svg")
    shown = [each for each in shown if each.startswith("peak ")]
    assert shown == [f"peak {gib:.1f} GiB" for gib in expected]


@pytest.mark.check
def test_each_figure_is_on_a_page():
    shown = {
        (page.parent / link).resolve()
        for page in report.pages()
        for link in re.findall(r"\]\(([^)\s]+\.svg)\)", page.read_text())
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


# --- sentences that quote results ---


@pytest.mark.check
def test_sentences_about_the_model_quote_its_metrics():
    """Its tables and its figure are compared by test_pages.py and test_figures.py."""
    lines = (ROOT / "tests/benchmarks/results/model_metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    evaluated = [line for line in metrics if "eval_loss" in line]
    first, last = evaluated[0], evaluated[-1]
    result = json.loads((ROOT / "tests/benchmarks/results/model.json").read_text())["results"]
    other, stop = result["uninterrupted"]["bits_per_byte"], 1000
    apart = {
        line["step"]: abs(line["bits_per_byte"] - other[str(line["step"])]) for line in evaluated
    }
    before = max(apart[step] for step in apart if step <= stop)
    after = max(apart[step] for step in apart if step > stop)
    page = (ROOT / "05-mixed-precision/topics/a_model.md").read_text().replace("\n", " ")
    saved = result["stopped_and_resumed"]["stopped_after_step"]
    for sentence in (
        f"# A model in {result['ends_s'] / 60:.0f} minutes ",
        f"fall from {first['bits_per_byte']:.3f} after ",
        f" to {last['bits_per_byte']:.3f} after ",
        f"ends at {last['eval_loss']:.2f}, far above the training loss of {last['loss']:.2f}.",
        f"The run saved a checkpoint at step {saved:,} and exited.",
        f"up to {before:.3f}](../../tests/benchmarks/results/model.json) before the signal and by "
        f"up to {after:.3f} after it",
    ):
        assert sentence in page, sentence
    assert last["step"] == metrics[-1]["step"]

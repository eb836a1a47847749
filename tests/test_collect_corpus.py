"""What collect_corpus.py takes from a package, and what the page about the model says."""

import json
from pathlib import Path

import pytest
from helpers import ROOT
from runner import load_script

collect_corpus = load_script(ROOT / "05-mixed-precision/experiments/collect_corpus.py")
ROW = {"kind": "pypi", "package": "numbers", "files": "*.py"}
CODE = {f"numbers/n{n}.py": f"x = {n}\n\n" * 100 for n in range(9)}  # 8 bytes, 100 times


@pytest.fixture
def package(monkeypatch):
    """Return a function that sets the files of the package that will be downloaded."""

    def set_files(files: dict[str, str]) -> None:
        def download(kind: str, name: str, folder: Path) -> Path:
            for file, text in files.items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(text)
            return folder / "numbers-1.0.whl"

        monkeypatch.setattr(collect_corpus, "download", download)

    return set_files


@pytest.mark.check
def test_takes_the_files_of_the_pattern_up_to_the_limit(package):
    left_out = {f"numbers/{name}/a.py": "y = 1\n" * 200 for name in ("tests", "_vendor")}
    others = {"numbers/a.txt": "words " * 200, "numbers/short.py": "x = 1\n"}
    others["numbers/chinese.py"] = "\u6570" * 600
    package(CODE | left_out | others)
    row, texts = collect_corpus.collect(ROW, 10**6)
    assert row["archive"] == "numbers-1.0.whl" and sorted(texts) == sorted(CODE.values())
    size = len(CODE["numbers/n0.py"])
    assert len(collect_corpus.collect(ROW, 4 * size)[1]) == 4
    assert len(collect_corpus.collect(ROW, 4 * size - 1)[1]) == 3


@pytest.mark.check
def test_what_all_pages_share_is_dropped_and_paragraphs_stay():
    pages = [
        f"Home\n  Menu\n\nFirst {n}.\n\n    Menu\nSecond {n}.\n\n\n\nHome\n" for n in range(20)
    ]
    assert collect_corpus.drop_menus(pages) == [f"First {n}.\n\nSecond {n}.\n" for n in range(20)]
    assert collect_corpus.drop_menus(pages[:5])[0].startswith("Home\n  Menu\n\nFirst 0.\n")


@pytest.mark.check
def test_sentences_about_the_model_quote_its_metrics():
    """Its tables and its figure are compared by test_pages.py and test_figures.py."""
    lines = (ROOT / "tests/benchmarks/results/model_metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    evaluated = [line for line in metrics if "eval_loss" in line]
    first, last = evaluated[0], evaluated[-1]
    result = json.loads((ROOT / "tests/benchmarks/results/model.json").read_text())["results"]
    page = (ROOT / "05-mixed-precision/topics/a_model.md").read_text().replace("\n", " ")
    for sentence in (
        f"# A model in {result['ends_s'] / 60:.0f} minutes ",
        f"fall from {first['bits_per_byte']:.3f} after ",
        f" to {last['bits_per_byte']:.3f} after ",
        f"ends at {last['eval_loss']:.2f}, far above the training loss of {last['loss']:.2f}.",
        f"saved step {result['stopped_and_resumed']['stopped_after_step']:,}.",
        f" the uninterrupted run {evaluated[5]['bits_per_byte']:.3f}.",
    ):
        assert sentence in page, sentence
    assert evaluated[5]["step"] == 1500 and last["step"] == metrics[-1]["step"]

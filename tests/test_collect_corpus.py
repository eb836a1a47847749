"""What collect_corpus.py takes from a package, without downloading one."""

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

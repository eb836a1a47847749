"""The solutions: every exercise has one, its page has its diff, and the diff applies."""

import re

import pytest
from helpers import CHAPTERS, ROOT, apply, assert_clean, blocks, make_variant

from common import variants

pytestmark = pytest.mark.check


def solutions_of(chapter: str) -> str:
    return (ROOT / chapter / "solutions/README.md").read_text()


def exercise_page(chapter: str) -> str:
    """Return the exercises of a lesson, followed by those of its reference page."""
    lesson = (ROOT / chapter / "README.md").read_text()
    section = lesson.split("## Check yourself\n")[1].split("\n## ")[0] + "\n"
    reference = (ROOT / chapter / "reference.md").read_text()
    for more in reference.split("## More exercises\n")[1:]:
        section += more.split("\n## ")[0] + "\n"
    return section


def exercises(section: str) -> list[str]:
    """Return the number and title of each exercise in a section."""
    return [n + title for n, title in re.findall(r"^(\d+\. )\*\*(.+?)\.\*\* ", section, re.M)]


def unsolved(page: str, solutions: str) -> list[str]:
    """The same numbers and titles in the same order, and nothing between them that is no section"""
    asked, solved = exercises(page), re.findall(r"^##+ (.+)$", solutions, re.M)
    return [] if asked and asked == solved else [f"{solved} for {asked}"]


def test_exercises_have_solutions():
    """And a solution that is left out is noticed."""
    for chapter in CHAPTERS:
        assert unsolved(exercise_page(chapter), solutions_of(chapter)) == [], chapter
    less = re.sub(r"^## 5\.(.*\n)*", "", solutions_of("02-ddp"), count=1, flags=re.M)
    assert unsolved(exercise_page("02-ddp"), less)


def test_diffs_are_shown_apply_and_are_clean(tmp_path):
    """A diff of a script is a variant, too."""
    diffs = sorted(ROOT.glob("*/solutions/*.diff"))
    texts = [variants.split_preamble(diff.read_text())[1] for diff in diffs]
    shown = [block for chapter in CHAPTERS for _, block in blocks(solutions_of(chapter), "diff")]
    assert sorted(shown) == sorted(texts) and len(diffs) >= 7
    for diff, text in zip(diffs, texts, strict=True):
        (script,) = re.findall(r"^--- a/(.+)$", text, re.M)
        if script.endswith("/train_llm.py"):
            (number, needs), *others = variants.read_variant(diff).needs.items()
            assert not others and script.startswith(f"{variants.CHAPTERS[number]}/"), diff
            copy = make_variant(tmp_path, variants.CHAPTERS[number], diff.stem, *needs)
            copy /= "train_llm.py"
        else:
            copy = tmp_path / diff.stem / script
            copy.parent.mkdir(parents=True)
            copy.write_text((ROOT / script).read_text())
            done = apply(diff, tmp_path / diff.stem)
            assert done.returncode == 0 and "Applied patch" in done.stderr, done.stderr
        assert copy.read_text() != (ROOT / script).read_text()
    assert_clean(tmp_path)

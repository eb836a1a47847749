"""The solutions: every exercise has one, its check and diff stand there, and its diff applies.

test_pages.py looks at whether each test is there.
"""

import re

import pytest
from helpers import CHAPTERS, ROOT, apply, assert_clean, blocks

pytestmark = pytest.mark.check


def flat(text: str) -> str:
    return " ".join(text.split())


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


def exercises(section: str) -> dict[str, str]:
    """Return the text of each exercise in a section, by number and title."""
    found = re.findall(r"^(\d+\. )\*\*(.+?)\.\*\* ((?:.*\n)*?)(?=^\d+\. |^\S|\Z)", section, re.M)
    return {number + title: flat(text) for number, title, text in found}


def unsolved(page: str, solutions: str) -> list[str]:
    """The same numbers and titles in the same order, and nothing between them that is no section"""
    asked, solved = [*exercises(page)], re.findall(r"^##+ (.+)$", solutions, re.M)
    return [] if asked and asked == solved else [f"{solved} for {asked}"]


def checks_left_out(page: str, solutions: str) -> list[str]:
    """An exercise's command of a check stands in its solution."""
    found = re.findall(r"^## (\d+\. .+)\n((?:.*\n)*?)(?=^## |\Z)", solutions, re.M)
    solved = {title: flat(text) for title, text in found}
    return [
        f"{title} lacks {command}"
        for title, text in exercises(page).items()
        for command in re.findall(r"[Cc]heck(?::|, run) `(.+?)`", text)
        if f"`{command}`" not in solved.get(title, "")
    ]


# What each rule must find: a pattern in chapter 2's solutions, its replacement, and a complaint.
ROT = {
    unsolved: (r"^## 5\.(.*\n)*", "", "for ["),
    checks_left_out: ("-k planted", "-k bugs", "lacks python -m pytest tests/test_parity.py"),
}


@pytest.mark.parametrize("rule", ROT, ids=lambda rule: rule.__name__)
def test_exercises_have_solutions(rule):
    """And the rule finds a planted mistake."""
    for chapter in CHAPTERS:
        assert rule(exercise_page(chapter), solutions_of(chapter)) == [], chapter
    pattern, new, complaint = ROT[rule]
    rotten = re.sub(pattern, new, solutions_of("02-ddp"), count=1, flags=re.M)
    assert complaint in "\n".join(rule(exercise_page("02-ddp"), rotten))


def test_diffs_are_shown_apply_and_are_clean(tmp_path):
    diffs = sorted(ROOT.glob("*/solutions/*.diff"))
    shown = [block for chapter in CHAPTERS for _, block in blocks(solutions_of(chapter), "diff")]
    assert sorted(shown) == sorted(diff.read_text() for diff in diffs) and len(diffs) >= 7
    for diff in diffs:
        (script,) = re.findall(r"^--- a/(.+)$", diff.read_text(), re.M)
        copy = tmp_path / diff.stem / script
        copy.parent.mkdir(parents=True)
        copy.write_text((ROOT / script).read_text())
        done = apply(diff, tmp_path / diff.stem)
        assert done.returncode == 0 and "Applied patch" in done.stderr, done.stderr
        assert copy.read_text() != (ROOT / script).read_text()
    assert_clean(tmp_path)

"""The solutions: every exercise has one, its check is named there, and its diff applies.

test_pages.py looks at whether each diff is shown and each test is there.
"""

import re

import pytest
from helpers import CHAPTERS, ROOT, apply, assert_clean

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


def exercises(section: str) -> dict[tuple[int, str], str]:
    """Return the text of each exercise in a section, by number and title."""
    found = re.findall(r"^(\d+)\. \*\*(.+?)\.\*\* ((?:.*\n)*?)(?=^\d+\. |^\S|\Z)", section, re.M)
    return {(int(number), title): flat(text) for number, title, text in found}


def sections(solutions: str) -> dict[tuple[int, str], str]:
    found = re.findall(r"^## (\d+)\. (.+)\n((?:.*\n)*?)(?=^## |\Z)", solutions, re.M)
    return {(int(number), title): text for number, title, text in found}


def unsolved(page: str, solutions: str) -> list[str]:
    """The same numbers and titles in the same order, and nothing between them that is no section"""
    asked = [f"{number}. {title}" for number, title in exercises(page)]
    solved = re.findall(r"^##+ (.+)$", solutions, re.M)
    return [] if asked and asked == solved else [f"{solved} for {asked}"]


def checks_left_out(page: str, solutions: str) -> list[str]:
    """An exercise's command of a check stands in its solution."""
    solved = {key: flat(text) for key, text in sections(solutions).items()}
    return [
        f"{key} lacks {command}"
        for key, text in exercises(page).items()
        for command in re.findall(r"[Cc]heck(?::|, run) `(.+?)`", text)
        if f"`{command}`" not in solved.get(key, "")
    ]


@pytest.mark.parametrize("rule", [unsolved, checks_left_out], ids=lambda rule: rule.__name__)
def test_exercises_have_solutions(rule):
    for chapter in CHAPTERS:
        assert rule(exercise_page(chapter), solutions_of(chapter)) == [], chapter


@pytest.mark.parametrize(
    ("rule", "pattern", "new", "complaint"),
    [
        (unsolved, r"^## 5\.(.*\n)*", "", "for ["),
        (checks_left_out, "-k planted", "-k bugs", "lacks python -m pytest tests/test_parity.py"),
    ],
)
def test_rule_finds_a_planted_mistake(rule, pattern, new, complaint):
    page, solutions = exercise_page("02-ddp"), solutions_of("02-ddp")
    rotten = re.sub(pattern, new, solutions, count=1, flags=re.M)
    assert rotten != solutions, "nothing to replace"
    assert complaint in "\n".join(rule(page, rotten))


def test_diffs_apply_and_are_clean(tmp_path):
    diffs = sorted(ROOT.glob("*/solutions/*.diff"))
    assert len(diffs) >= 7
    for diff in diffs:
        (script,) = re.findall(r"^--- a/(.+)$", diff.read_text(), re.M)
        copy = tmp_path / diff.stem / script
        copy.parent.mkdir(parents=True)
        copy.write_text((ROOT / script).read_text())
        done = apply(diff, tmp_path / diff.stem)
        assert done.returncode == 0 and "Applied patch" in done.stderr, done.stderr
        assert copy.read_text() != (ROOT / script).read_text()
    assert_clean(tmp_path)

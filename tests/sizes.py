"""Print how many words the pages have and how many lines the code has: make sizes

These are facts, not budgets: no test compares a total.
"""

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def files(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def count(unit: str, paths: Iterable[Path]) -> int:
    """Return the words (as wc -w counts them) or lines of files."""
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return sum(len(text.split() if unit == "words" else text.splitlines()) for text in texts)


def main() -> None:
    scripts = files("[0-9]*/train_llm.py")
    pages = files("*.md", "[0-9]*/**/*.md", "common/*.md", "tests/*.md")
    code = set(files("[0-9]*/**/*.py", "[0-9]*/**/*.sh", "[0-9]*/**/*.sbatch")) - set(scripts)
    for page in pages:
        print(f"{count('words', [page]):7,} words  {page.relative_to(ROOT)}")
    for script in scripts:
        print(f"{count('lines', [script]):7,} lines  {script.relative_to(ROOT)}")
    for unit, what, paths in (
        ("words", "all pages", pages),
        ("lines", "diffs of the gallery", files("[0-9]*/diffs/*.diff")),
        ("lines", "other code of the chapters", code),
        ("lines", "common", files("common/**/*.py", "common/*.sh")),
        ("lines", "tests", files("tests/*.py", "tests/hooks/*.py")),
        ("lines", "benchmarks", files("tests/benchmarks/*.py")),
    ):
        print(f"{count(unit, paths):7,} {unit}  {what}")


if __name__ == "__main__":
    main()

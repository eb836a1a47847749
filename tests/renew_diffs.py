"""Renew the .diff files of the chapters after a script has changed: make diffs

A .diff file fits the script of the last commit. Your change of the script is merged into the
script with the diff, and the difference to your script becomes the new diff. The text of a diff on
the page of solutions is replaced, too. A diff whose lines you have changed yourself is named and
left as it is: edit it by hand.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def git(folder: Path, *words: str | Path, **options: object) -> subprocess.CompletedProcess:
    command = ["git", *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, **options)


def renewed(text: str) -> str | None:
    """Return a diff that fits the script as it is now, or None where git finds a conflict."""
    (script,) = re.findall(r"^--- a/(.+)$", text, re.MULTILINE)
    now = (ROOT / script).read_text()
    committed = git(ROOT, "show", f"HEAD:./{script}").stdout
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        a, b, base = folder / "a" / script, folder / "b" / script, folder / script
        for file, content in ((a, now), (b, committed), (base, committed)):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        if git(folder / "b", "apply", "-", input=text).returncode:
            return None
        merged = git(ROOT, "merge-file", "-p", "--quiet", b, base, a)
        if merged.returncode:
            return None
        b.write_text(merged.stdout)
        words = ["diff", "--no-index", "--no-prefix", "--no-color", "--no-ext-diff"]
        words += [f"-U{context_of(text)}", "a", "b"]
        lines = git(folder, *words).stdout.splitlines(keepends=True)
    return "".join(lines[2:])


def context_of(text: str) -> int:
    """Return how many unchanged lines a diff shows around a change."""
    hunks = re.split(r"^@@.*\n", text, flags=re.MULTILINE)[1:]
    return max(len(re.match(r"(?: .*\n)*", hunk)[0].splitlines()) for hunk in hunks)


def without_headings(text: str) -> str:
    """Return a diff less the headings of functions, which depend on git's configuration."""
    return re.sub(r"^(@@ .*? @@).*", r"\1", text, flags=re.MULTILINE)


def main() -> None:
    left = []
    for file in sorted(ROOT.glob("[0-9]*/*/*.diff")):
        old, name = file.read_text(), file.relative_to(ROOT)
        new = renewed(old)
        if new is None:
            left.append(str(name))
            continue
        if without_headings(new) == without_headings(old):
            continue
        file.write_text(new)
        page = file.with_name("README.md")
        if page.exists():
            page.write_text(page.read_text().replace(old, new))
        print(f"renewed: {name}")
    if left:
        sys.exit(f"edit by hand, and run `make check`: {', '.join(left)}")


if __name__ == "__main__":
    main()

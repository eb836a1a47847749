"""Renew the .diff files of the chapters after a script has changed: make diffs

A .diff file fits the script of the last commit. Your change of the script is merged into the script
with the diff, and the difference to your script becomes the new diff. A variant that needs others
is renewed on top of the script with those. The lines before a diff stay as they are. The text of a
diff on the page of solutions is replaced, too. A diff whose lines you have changed yourself, in the
script or in another diff, is named and left as it is: edit it by hand.

All .diff files have the same form, whatever git's settings are: what `git diff` writes without any.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from common import variants

ROOT = Path(__file__).parents[1]


def git(folder: Path, *words: str, text: str | None = None) -> subprocess.CompletedProcess:
    """Run git in a folder without anybody's settings."""
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(
        ["git", "-c", f"core.attributesFile={os.devnull}", *words],
        cwd=folder,
        env=environment,
        input=text,
        capture_output=True,
        text=True,
    )


def committed(path: Path) -> str:
    """Return the text of a file in the last commit; of a file that is not there, what it is now."""
    result = git(ROOT, "show", f"HEAD:./{path.relative_to(ROOT).as_posix()}")
    return path.read_text() if result.returncode else result.stdout


def script_of(diff: str) -> str:
    """Return the path of the file that a diff changes."""
    (path,) = re.findall(r"^--- a/(.+)$", diff, re.MULTILINE)
    return path


def patched(text: str, diff: str, exact: bool = False) -> str | None:
    """Return a script with a diff applied, or None if it does not fit.

    exact: also if it fits other lines than those whose numbers it names.
    """
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, Path(script_of(diff)).name)
        file.write_text(text)
        strip = f"-p{script_of(diff).count('/') + 1}"
        result = git(Path(name), "apply", "--verbose", strip, "-", text=diff)
        if result.returncode or (exact and "offset" in result.stderr):
            return None
        return file.read_text()


def difference(script: str, old: str, new: str, context: int) -> str:
    """Return the diff between two texts of a script, with so many unchanged lines around."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "old").write_text(old)
        Path(name, "new").write_text(new)
        result = git(Path(name), "diff", "--no-index", f"-U{context}", "old", "new")
    _, found, hunks = result.stdout.partition("\n@@ ")
    return f"--- a/{script}\n+++ b/{script}{found}{hunks}"


def merged(base: str, one: str, other: str) -> str | None:
    """Return a text with the changes that two others make to it, or None if they conflict."""
    with tempfile.TemporaryDirectory() as name:
        for file, text in {"one": one, "base": base, "other": other}.items():
            Path(name, file).write_text(text)
        result = git(Path(name), "merge-file", "-p", "--quiet", "one", "base", "other")
    return None if result.returncode else result.stdout


def renewed(path: Path) -> str | None:
    """Return a .diff file that fits the script as it is now, or None where git finds a conflict."""
    preamble, diff = variants.split_preamble(path.read_text())
    script = script_of(diff)
    before, now = committed(ROOT / script), (ROOT / script).read_text()
    chapter = int(script[:2])
    for needed in variants.choose(chapter, variants.read_variant(path).needs.get(chapter, ())):
        new_diff = renewed(needed.path)
        if new_diff is None:
            return None
        before = patched(before, committed(needed.path))
        now = patched(now, new_diff)
    target = patched(now, diff, exact=True)
    with_diff = patched(before, diff, exact=target is not None)
    if with_diff is not None:
        target = merged(before, with_diff, now)
    if target is None:
        return None
    return preamble + difference(script, now, target, context_of(diff))


def context_of(diff: str) -> int:
    """Return how many unchanged lines a diff shows around a change."""
    hunks = re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]
    return max(len(re.match(r"(?: .*\n)*", hunk)[0].splitlines()) for hunk in hunks)


def main() -> None:
    left, new = [], {}
    for file in sorted(ROOT.glob("[0-9]*/*/*.diff")):
        new[file] = renewed(file)
    for file, text in new.items():
        name, old = file.relative_to(ROOT), file.read_text()
        if text is None:
            left.append(str(name))
        elif text != old:
            file.write_text(text)
            page = file.with_name("README.md")
            if page.exists():
                shown, shown_new = (variants.split_preamble(each)[1] for each in (old, text))
                page.write_text(page.read_text().replace(shown, shown_new))
            print(f"renewed: {name}")
    if left:
        sys.exit(f"edit by hand, and run `make check`: {', '.join(left)}")


if __name__ == "__main__":
    main()

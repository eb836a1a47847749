"""Variants: copies of a chapter with some of the gallery's diffs applied (make variant).

python -m common.variants                              lists the variants
python -m common.variants 4 hsdp cpu-offload           makes variants/04-fsdp+cpu-offload+hsdp
python -m common.variants --diff 4 hsdp                shows what a variant changes

Each .diff file in a chapter's diffs folder begins with a title and with the chapters that it
applies to, if need be together with other variants:

    Scale the loss up, so that float16's gradients do not underflow.
    Chapters: 1 2 3 with autocast
    Chapters: 5
    Not with: another-variant

A diff "with" another one is applied after it. A diff in a solutions folder that begins like this is
a variant, too, but is not listed. Everything here is in Python's standard library, so it also runs
before the guide is installed.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "variants"
ORIGIN = "variant.json"  # in a variant's folder: what it was made from
CHAPTERS = {int(path.parent.name[:2]): path.parent.name for path in ROOT.glob("0*/train_llm.py")}


class VariantError(Exception):
    """A variant cannot be made; one sentence says why and what to do."""


@dataclass(frozen=True)
class Variant:
    """One .diff file of the gallery.

    needs: by chapter it applies to, the names of the variants that must be applied before it.
    excludes: variants that make no sense beside it. launcher: what starts the script, if the
    chapter's launch files do not.
    """

    name: str
    path: Path
    title: str
    needs: dict[int, tuple[str, ...]]
    excludes: tuple[str, ...]
    launcher: str | None


def split_preamble(text: str) -> tuple[str, str]:
    """Return what stands before a diff in its file, and the diff."""
    start = re.search(r"^--- ", text, re.MULTILINE).start()
    return text[:start], text[start:]


def read_variant(path: Path) -> Variant:
    """Return what the first lines of a .diff file say about it."""
    head, _ = split_preamble(path.read_text(encoding="utf-8"))
    needs = {}
    for numbers, others in re.findall(r"^Chapters: ([\d ]+?)(?: with (.+))?$", head, re.MULTILINE):
        needs |= dict.fromkeys(map(int, numbers.split()), tuple(others.split()))
    fields = dict(re.findall(r"^(Not with|Launcher): (.+)$", head, re.MULTILINE))
    title = head.partition("\nChapters: ")[0].replace("\n", " ")
    excludes = tuple(fields.get("Not with", "").split())
    return Variant(path.stem, path, title, needs, excludes, fields.get("Launcher"))


def all_variants(*folders: str) -> list[Variant]:
    """Return the variants in all chapters' folders of these names (default: diffs), by name."""
    paths = (path for name in folders or ["diffs"] for path in ROOT.glob(f"[0-9]*/{name}/*.diff"))
    found = [variant for variant in map(read_variant, paths) if variant.needs]
    return sorted(found, key=lambda variant: (variant.name, min(variant.needs)))


def that_set(name: str, value: object) -> list[str]:
    """Return the names of the variants that add this entry to the settings of a run."""
    entry = f"+        {name}={json.dumps(value)},"
    return sorted({v.name for v in all_variants() if entry in v.path.read_text(encoding="utf-8")})


def choose(chapter: int, names: Iterable[str]) -> list[Variant]:
    """Return the variants with these names for a chapter, in the order in which they are applied.

    Raises VariantError if one does not exist, does not apply, or does not go with another one.
    """
    if chapter not in CHAPTERS:
        raise VariantError(f"CHAPTER is from 1 to {max(CHAPTERS)}.")
    chosen = {name: _find(chapter, name) for name in sorted(set(names))}
    for name, variant in chosen.items():
        if missing := [other for other in variant.needs[chapter] if other not in chosen]:
            raise VariantError(
                f"In chapter {chapter}, {name} needs {' and '.join(missing)}: "
                f'WITH="{" ".join(sorted([*chosen, *missing]))}".'
            )
        if others := [other for other in variant.excludes if other in chosen]:
            raise VariantError(f"{name} and {others[0]} do not go together: leave one of them out.")
    order = []
    while len(order) < len(chosen):  # by name, but each after those that it needs
        ready = [
            variant
            for variant in chosen.values()
            if variant not in order
            and all(chosen[other] in order for other in variant.needs[chapter])
        ]
        order.append(ready[0])
    return order


def _find(chapter: int, name: str) -> Variant:
    same_name = [each for each in all_variants("diffs", "solutions") if each.name == name]
    for variant in same_name:
        if chapter in variant.needs:
            return variant
    if same_name:
        numbers = sorted({number for variant in same_name for number in variant.needs})
        where = " and ".join(map(str, numbers))
        raise VariantError(f"{name} does not apply to chapter {chapter}, but to {where}.")
    names = ", ".join(variant.name for variant in all_variants() if chapter in variant.needs)
    raise VariantError(f"There is no variant {name}. Chapter {chapter} has {names}.")


def make(chapter: int, names: list[str]) -> Path:
    """Make the folder of a chapter with variants, and return it.

    A folder that is there already is returned if it is what would be made now. Raises VariantError
    if it is not, or if the variants cannot be combined; then nothing has changed.
    """
    chosen = choose(chapter, names)
    folder = FOLDER / "+".join([CHAPTERS[chapter], *sorted(variant.name for variant in chosen)])
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".") as name:
        new = Path(name, folder.name)
        new.mkdir()
        fill(new, folder.relative_to(ROOT), CHAPTERS[chapter], chosen)
        if not folder.exists():
            new.rename(folder)
        elif _contents(folder) != _contents(new):
            raise VariantError(_why_not_replaced(folder))
    return folder


def _why_not_replaced(folder: Path) -> str:
    shown = folder.relative_to(ROOT)
    files = _read_origin(folder).get("files", {})
    if _checksums(folder, files) != files or _contents(folder).keys() - {*files, ORIGIN}:
        return f"{shown} was edited and is not replaced: rename it, or delete it."
    return f"{shown} is of an older checkout: delete it, and make it again."


def fill(new: Path, shown: Path, chapter: str, variants: list[Variant]) -> None:
    """Write a variant's script, the modules that it imports, and its launch files to a folder.

    new: an empty folder. shown: the path, relative to the repository, that commands in it name.
    """
    shutil.copy(ROOT / chapter / "train_llm.py", new)
    _apply(new, chapter, variants)
    sources = [ROOT / chapter / "train_llm.py", *(variant.path for variant in variants)]
    sources += _copy_modules(new, [ROOT / chapter, *(variant.path.parent for variant in variants)])
    if not any(variant.launcher for variant in variants):
        sources += _copy_launch_files(new, ROOT / chapter)
    for path in new.iterdir():
        text = path.read_text(encoding="utf-8")
        if path.name == "train_llm.py":  # only the command in the docstring
            docstring, end, code = text.partition('"""\n')
            text = docstring.replace(f"{chapter}/", f"{shown.as_posix()}/") + end + code
        elif path.suffix != ".py":
            text = text.replace(f"{chapter}/", f"{shown.as_posix()}/")
            # One folder more is between the launch file and the repository's root.
            root = '"$(dirname "${BASH_SOURCE[0]}")/..'
            text = text.replace(root, f"{root}/..")
        path.write_text(text, encoding="utf-8")
    origin = {
        "chapter": chapter,
        "variants": sorted(variant.name for variant in variants),
        "sources": _checksums(ROOT, (path.relative_to(ROOT).as_posix() for path in sources)),
        "files": _checksums(new, (path.name for path in new.iterdir())),
    }
    (new / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")


def _apply(folder: Path, chapter: str, variants: list[Variant]) -> None:
    """Apply the diffs to the script in a folder."""
    # Without variables of a git hook, and without a repository above the folder, whose index git
    # would look into.
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    environment["GIT_CEILING_DIRECTORIES"] = str(folder.parent.absolute())
    for position, variant in enumerate(variants):
        command = ["git", "apply", "-p2", "--whitespace=nowarn", str(variant.path.absolute())]
        try:
            result = subprocess.run(command, cwd=folder, env=environment, capture_output=True)
        except FileNotFoundError:
            raise VariantError("git applies the diffs: install git.") from None
        if result.returncode and position:
            others = " and ".join(other.name for other in variants[:position])
            raise VariantError(
                f"{variant.name} cannot be combined with {others}: they change the same lines."
            )
        if result.returncode:
            diff = variant.path.relative_to(ROOT)
            raise VariantError(
                f"{diff} does not fit {chapter}/train_llm.py: undo your change of the script, or "
                "apply the diff by hand."
            )


def _copy_modules(new: Path, folders: list[Path]) -> list[Path]:
    """Copy the chapters' modules that a script imports, and that those import; return their paths.

    folders: where to look first, before the other folders below the chapters.
    """
    modules = {}
    for folder in (*sorted(ROOT.glob("[0-9]*/*/")), *reversed(folders)):
        modules |= {path.stem: path for path in folder.glob("*.py")}
    copied, left = [], [new / "train_llm.py"]
    while left:
        text = left.pop().read_text(encoding="utf-8")
        for name in re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE):
            if name in modules and modules[name] not in copied:
                copied.append(modules[name])
                left.append(Path(shutil.copy(modules[name], new)))
    return copied


def _copy_launch_files(new: Path, source: Path) -> list[Path]:
    """Copy the files that start a chapter's train_llm.py; return their paths."""
    paths = [
        path
        for path in sorted([*source.glob("*.sh"), *source.glob("*.sbatch")])
        if "train_classifier" not in path.read_text(encoding="utf-8")
    ]
    for path in paths:
        shutil.copy(path, new)
    return paths


def _contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a variant's folder, without what Python and Slurm write there."""
    files = (path for path in folder.iterdir() if path.is_file() and path.suffix != ".log")
    return {path.name: path.read_bytes() for path in files}


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, str | None]:
    paths = {name: folder / name for name in sorted(names)}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        for name, path in paths.items()
    }


def _read_origin(folder: Path) -> dict:
    try:
        return json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def chapter_and_variants(folder: Path) -> tuple[int, set[str]]:
    """Return the number of a script's chapter (0 if it has none) and the names of its variants."""
    origin = _read_origin(folder)
    numbers = {name: number for number, name in CHAPTERS.items()}
    chapter = numbers.get(origin.get("chapter", folder.absolute().name), 0)
    return chapter, set(origin.get("variants", ()))


def describe_folder(folder: Path) -> list[str]:
    """Return what the log says about a script's folder: nothing, unless it is a variant's.

    The first line has the chapter and the variants. A second one warns if the checkout has changed
    since the folder was made.
    """
    origin = _read_origin(folder)
    if not origin:
        return []
    lines = [f"chapter {origin['chapter']} with {', '.join(origin['variants'])}"]
    if _checksums(ROOT, origin["sources"]) != origin["sources"]:
        lines.append(f"{folder} is older than the checkout: delete it, and run make variant again")
    return lines


def commands(folder: Path) -> list[str]:
    """Return the commands that train with a variant."""
    shown = folder.relative_to(ROOT)
    files = [name for name in ("launch.sh", "launch_torchrun.sh") if (folder / name).exists()]
    if not files:
        return (folder / "train_llm.py").read_text(encoding="utf-8").splitlines()[2:3]
    jobs = [f"sbatch {shown}/job.sbatch -e my-run"] if (folder / "job.sbatch").exists() else []
    return [f"bash {shown}/{files[0]}", *jobs]


def main(words: list[str]) -> None:
    if not words:
        for variant in all_variants():
            where = " ".join(map(str, sorted(variant.needs)))
            print(f"{variant.name:24}chapters {where:10}{variant.title}")
        print('make variant CHAPTER=4 WITH="hsdp cpu-offload" makes a chapter with two variants.')
        return
    show = "--diff" in words
    number, *names = [word for word in words if word != "--diff"] or [""]
    chapter = int(number) if number.isdecimal() else 0
    if not choose(chapter, names):
        raise VariantError('WITH names the variants, for example WITH="workers".')
    if show:
        show_diff(chapter, names)
        return
    folder = make(chapter, names)
    print(f"{folder.relative_to(ROOT)} is a complete chapter. It trains with")
    print(*(f"    {command}" for command in commands(folder)), sep="\n")


def show_diff(chapter: int, names: list[str]) -> None:
    """Print what variants change in a chapter's script."""
    with tempfile.TemporaryDirectory() as name:
        old, new = Path(name, "a"), Path(name, "b")
        old.mkdir()
        new.mkdir()
        shutil.copy(ROOT / CHAPTERS[chapter] / "train_llm.py", old)
        fill(new, Path(CHAPTERS[chapter]), CHAPTERS[chapter], choose(chapter, names))
        files = ["a/train_llm.py", "b/train_llm.py"]
        subprocess.run(["git", "diff", "--no-index", "--no-prefix", *files], cwd=name, check=False)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except VariantError as error:
        print(error, file=sys.stderr)
        sys.exit(2)

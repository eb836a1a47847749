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

A diff "with" another one is applied after it. Everything here is in Python's standard library, so
it also runs before the guide is installed.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
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


def read_variant(path: Path) -> Variant:
    """Return what the first lines of a .diff file say about it."""
    head = path.read_text(encoding="utf-8").partition("\n--- ")[0]
    needs = {}
    for numbers, others in re.findall(r"^Chapters: ([\d ]+?)(?: with (.+))?$", head, re.MULTILINE):
        needs |= dict.fromkeys(map(int, numbers.split()), tuple(others.split()))
    fields = dict(re.findall(r"^(Not with|Launcher): (.+)$", head, re.MULTILINE))
    title = head.partition("\nChapters: ")[0].replace("\n", " ")
    excludes = tuple(fields.get("Not with", "").split())
    return Variant(path.stem, path, title, needs, excludes, fields.get("Launcher"))


def all_variants() -> list[Variant]:
    """Return the variants of all chapters' diffs folders, by name."""
    found = [read_variant(path) for path in ROOT.glob("[0-9]*/diffs/*.diff")]
    return sorted(found, key=lambda variant: (variant.name, min(variant.needs)))


def choose(chapter: int, names: list[str]) -> list[Variant]:
    """Return the variants with these names for a chapter, in the order in which they are applied.

    Raises VariantError if one does not exist, does not apply, or does not go with another one.
    """
    if chapter not in CHAPTERS:
        raise VariantError(f"CHAPTER is from 1 to {max(CHAPTERS)}.")
    known = all_variants()
    chosen = {}
    for name in sorted(set(names)):
        same_name = [variant for variant in known if variant.name == name]
        if not same_name:
            fitting = sorted({v.name for v in known if chapter in v.needs})
            raise VariantError(
                f"There is no variant {name}. Chapter {chapter} has {', '.join(fitting)}."
            )
        fitting = [variant for variant in same_name if chapter in variant.needs]
        if not fitting:
            where = sorted(number for variant in same_name for number in variant.needs)
            raise VariantError(
                f"{name} does not apply to chapter {chapter}, but to "
                f"{' and '.join(map(str, where))}."
            )
        chosen[name] = fitting[0]
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


def make(chapter: int, names: list[str]) -> Path:
    """Make the folder of a chapter with variants, and return it.

    A folder that is there already is returned if it is what would be made now. Raises VariantError
    if it is not, or if the variants cannot be combined; then nothing has changed.
    """
    chosen = choose(chapter, names)
    if not chosen:
        raise VariantError('WITH names the variants, for example WITH="workers".')
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
    if _checksums(folder, files) != files or set(_contents(folder)) - {*files, ORIGIN}:
        return f"{shown} was edited and is not replaced: rename it, or delete it."
    return f"{shown} is of an older checkout: delete it, and make it again."


def fill(new: Path, shown: Path, chapter: str, variants: list[Variant]) -> None:
    """Write a variant's script, the modules that it imports, and its launch files to a folder.

    new: an empty folder. shown: the path, relative to the repository, that commands in it name.
    """
    source = ROOT / chapter
    shutil.copy(source / "train_llm.py", new)
    used = [source / "train_llm.py"]
    for variant in variants:
        # No repository is above the folder: git would look for the files in its index.
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(new.parent)}
        command = ["git", "apply", "-p2", "--whitespace=nowarn", str(variant.path)]
        result = subprocess.run(command, cwd=new, env=environment, capture_output=True, text=True)
        if result.returncode:
            applied = [each.name for each in variants[: variants.index(variant)]]
            beside = " and ".join(applied) or chapter
            raise VariantError(
                f"{variant.name} cannot be combined with {beside}: both change the same lines."
                if applied
                else f"{variant.path.relative_to(ROOT)} does not fit {chapter}/train_llm.py."
            )
        used.append(variant.path)
    modules = [*source.glob("*.py"), *ROOT.glob("[0-9]*/*/*.py")]
    by_name = {path.stem: path for path in modules if path.name != "train_llm.py"}
    left = [new / "train_llm.py"]
    while left:
        text = left.pop().read_text(encoding="utf-8")
        for name in re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE):
            if name in by_name and not (new / f"{name}.py").exists():
                shutil.copy(by_name[name], new)
                used.append(by_name[name])
                left.append(new / f"{name}.py")
    if not any(variant.launcher for variant in variants):
        for path in sorted([*source.glob("*.sh"), *source.glob("*.sbatch")]):
            if "train_classifier" not in path.read_text(encoding="utf-8"):
                shutil.copy(path, new)
                used.append(path)
    for path in [new / "train_llm.py", *new.glob("*.sh"), *new.glob("*.sbatch")]:
        text = path.read_text(encoding="utf-8")
        head, rest = text, ""
        if path.suffix == ".py":  # only the command in the docstring
            head, quotes, rest = text.partition('"""\n')
            rest = quotes + rest
        head = head.replace(f"{chapter}/", f"{shown.as_posix()}/")
        # One folder more between the launch file and the repository's root.
        root = '"$(dirname "${BASH_SOURCE[0]}")/..'
        head = head.replace(root, f"{root}/..")
        path.write_text(head + rest, encoding="utf-8")
    names = [path.name for path in new.iterdir()]
    origin = {
        "chapter": chapter,
        "variants": sorted(variant.name for variant in variants),
        "sources": _checksums(ROOT, (str(path.relative_to(ROOT)) for path in used)),
        "files": _checksums(new, names),
    }
    (new / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")


def _contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a variant's folder, without what Python and Slurm write there."""
    files = (path for path in folder.iterdir() if path.is_file() and path.suffix != ".log")
    return {path.name: path.read_bytes() for path in files}


def _checksums(folder: Path, names: object) -> dict[str, str | None]:
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
    show = "--diff" in words
    words = [word for word in words if word != "--diff"]
    if not words:
        for variant in all_variants():
            where = " ".join(map(str, sorted(variant.needs)))
            print(f"{variant.name:24}chapters {where:10}{variant.title}")
        print('make variant CHAPTER=4 WITH="hsdp cpu-offload" makes a chapter with two variants.')
        return
    chapter = int(words[0]) if words[0].isdigit() else 0
    if not show:
        folder = make(chapter, words[1:])
        print(f"{folder.relative_to(ROOT)} is a complete chapter. It trains with")
        print(*(f"    {command}" for command in commands(folder)), sep="\n")
        return
    chosen = choose(chapter, words[1:])
    with tempfile.TemporaryDirectory() as name:
        for part in "ab":
            Path(name, part).mkdir()
        shutil.copy(ROOT / CHAPTERS[chapter] / "train_llm.py", Path(name, "a"))
        fill(Path(name, "b"), Path(CHAPTERS[chapter]), CHAPTERS[chapter], chosen)
        command = ["git", "diff", "--no-index", "--no-prefix", "a/train_llm.py", "b/train_llm.py"]
        subprocess.run(command, cwd=name, check=False)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except VariantError as error:
        print(error, file=sys.stderr)
        sys.exit(2)

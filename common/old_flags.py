"""Flags that the scripts had until November 2026, and the variants that do the same now."""

import re
from pathlib import Path
from typing import NamedTuple

from common import variants

NO_VALUE, ANY_VALUE = "", "N"


class OldFlag(NamedTuple):
    """A flag that some chapters had, with one of its values.

    variants: those that do now what the flag did. ignored: without the flag, a script computes the
    same, so that a job that is requeued goes on.
    """

    flag: str
    value: str
    chapters: str
    variants: str
    ignored: bool = False


# CHANGELOG.md has the same table. Other chapters' variants may be named, where a chapter has none.
OLD_FLAGS = (
    OldFlag("--num-workers", ANY_VALUE, "1 2 3 4 5", "workers", ignored=True),
    OldFlag("--param-dtype", "float32", "1 2 3 4 5", "", ignored=True),
    OldFlag("--param-dtype", "bfloat16", "1 2 3", "bfloat16-weights"),
    OldFlag("--param-dtype", "bfloat16", "4 5", "pure-bfloat16"),
    OldFlag("--precision", "tf32", "1 2 3", "", ignored=True),
    OldFlag("--precision", "bf16", "1 2 3", "autocast"),
    OldFlag("--precision", "fp16", "1 2 3", "autocast float16 loss-scaling"),
    OldFlag("--precision", "fp16", "5", "float16 loss-scaling"),
    OldFlag("--precision", "fp8", "5", "fp8"),
    OldFlag("--reduce-dtype", "float32", "5", "", ignored=True),
    OldFlag("--reduce-dtype", "bfloat16", "5", "reduce-bfloat16"),
    OldFlag("--zero1", NO_VALUE, "2 3", "zero1"),
    OldFlag("--zero1", NO_VALUE, "4 5", "", ignored=True),
    OldFlag("--reshard-after-forward", NO_VALUE, "4 5", "", ignored=True),
    OldFlag("--no-reshard-after-forward", NO_VALUE, "4 5", "zero2"),
    OldFlag("--reduce-every-backward", NO_VALUE, "4 5", "reduce-every-backward"),
    OldFlag("--hsdp", NO_VALUE, "4 5", "hsdp"),
    OldFlag("--cpu-offload", NO_VALUE, "4 5", "cpu-offload"),
    OldFlag("--activation-checkpointing", "none", "4 5", "", ignored=True),
    OldFlag("--activation-checkpointing", "selective", "4 5", "selective-recomputation"),
    OldFlag("--async-checkpoint", NO_VALUE, "4 5", "async-checkpoint"),
    OldFlag("--track-nodes", NO_VALUE, "3 4 5", "track-nodes"),
    OldFlag("--tensor-parallel", ANY_VALUE, "5", "mesh tensor-parallel"),
    OldFlag("--context-parallel", ANY_VALUE, "5", "context-parallel mesh"),
    OldFlag("--ulysses", NO_VALUE, "5", "context-parallel mesh"),
)


class OldFlagError(Exception):
    """An old flag asks for what only a variant does; the text says how to make the variant."""


def translate(words: list[str], script: Path, help_text: str) -> tuple[list[str], list[str]]:
    """Return the arguments of a script without old flags, and a warning for each that is ignored.

    help_text: of the script, which shows the flags and choices that it still has.
    Raises OldFlagError if an old flag asks for what only a variant does.
    """
    chapter, present = variants.chapter_and_variants(script.parent)
    kept, warnings, asked_for, wanted = [], [], [], set(present)
    rest = list(words)
    while rest:
        given = [rest.pop(0)]
        flag, equals, value = given[0].partition("=")
        rows = [
            row for row in OLD_FLAGS if row.flag == flag and str(chapter) in row.chapters.split()
        ]
        takes_value = any(row.value != NO_VALUE for row in rows)
        if takes_value and not equals and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
            given.append(value)
        row = next((row for row in rows if row.value in (value, value and ANY_VALUE)), None)
        if (flag, value) == ("--activation-checkpointing", "full") and rows:
            kept.append(flag)  # the flag without a value means the same now
        elif row is None or _still_has(help_text, flag, value) or _contradicts(row, present):
            kept += given
        elif row.ignored:
            hint = f"; the variant {row.variants} still has it" if row.variants else ""
            warnings.append(f"{' '.join(given)} is no longer a flag and is ignored{hint}")
        elif present.issuperset(row.variants.split()):
            warnings.append(f"{' '.join(given)} is ignored: this variant does that anyway")
        else:
            asked_for.append(" ".join(given))
            wanted |= set(row.variants.split())
    if asked_for:
        raise OldFlagError(_explain(asked_for, chapter, wanted))
    return kept, warnings


def _contradicts(row: OldFlag, present: set[str]) -> bool:
    """Return whether a flag asks for what the chapter computes, in a variant that does not."""
    others = {name for each in OLD_FLAGS if each.flag == row.flag for name in each.variants.split()}
    if "pure-bfloat16" in present:
        present = {*present, "reduce-bfloat16"}
    return row.ignored and not row.variants and not others.isdisjoint(present)


def _explain(asked_for: list[str], chapter: int, wanted: set[str]) -> str:
    """Return the sentences that say which command makes the variants that flags ask for."""
    if "pure-bfloat16" in wanted:
        wanted = wanted - {"reduce-bfloat16"}  # it does that, too
    applying = {each.name for each in variants.all_variants() if chapter in each.needs}
    number = chapter if wanted <= applying else max(variants.CHAPTERS)
    names = sorted(wanted)
    verb = "is a variant" if len(asked_for) == 1 else "are variants"
    start = f"{' and '.join(asked_for)} {verb} of the script now"
    try:
        variants.choose(number, names)
    except variants.VariantError as error:
        return f"{start}. {error}"
    folder = "+".join([f"variants/{variants.CHAPTERS[number]}", *names])
    return (
        f'{start}. Run make variant CHAPTER={number} WITH="{" ".join(names)}". It makes the folder '
        f"{folder} and prints the commands that train with it. Give them the same arguments."
    )


def _still_has(help_text: str, flag: str, value: str) -> bool:
    """Return whether a script still has a flag and, if the flag has choices, this value."""
    found = re.search(rf"{flag}(?![\w-])( [A-Z{{][^\s\]]*)?", help_text)
    if not found:
        return False
    metavar = (found[1] or "").strip()
    if metavar.startswith("{"):
        return value in re.findall(r"\w+", metavar)
    return bool(metavar) == bool(value)


def translate_settings(saved: dict) -> dict:
    """Return the settings of a run as a variant would have saved them.

    saved: of any run; those of the scripts that had flags instead of variants have no "of_variant".
    """
    if "of_variant" in saved:
        return saved
    settings, of_variant = dict(saved), []
    if settings.get("precision") == "fp8":
        settings |= {"precision": "bf16", "linear_layers": "fp8"}
        of_variant.append("linear_layers")
    if settings.get("precision") in ("bf16", "fp16") and "reduce_dtype" not in settings:
        of_variant.append("precision")  # chapters 1 to 3 with autocast
    reduce_dtype = settings.pop("reduce_dtype", None)
    if reduce_dtype not in (None, settings.get("param_dtype")):
        settings["reduce_dtype"] = reduce_dtype
        of_variant.append("reduce_dtype")
    return {**settings, "of_variant": of_variant}

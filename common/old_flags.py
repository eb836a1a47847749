"""Flags that the scripts had until November 2026, and the variants that do the same now."""

import re
from pathlib import Path

from common import variants

# By flag, what each of its values was replaced by; "" stands for a flag without a value, or for any
# value. IGNORED: it changes nothing any more, so that a job that is requeued goes on.
IGNORED = ""
NO_VALUE, ANY_VALUE = "", "..."
OLD_FLAGS = {
    "--num-workers": {ANY_VALUE: IGNORED},
    "--param-dtype": {"float32": IGNORED, "bfloat16": "bfloat16-weights pure-bfloat16"},
    "--zero1": {NO_VALUE: "zero1"},
    "--track-nodes": {NO_VALUE: "track-nodes"},
    "--reshard-after-forward": {NO_VALUE: IGNORED},
    "--no-reshard-after-forward": {NO_VALUE: "zero2"},
    "--reduce-every-backward": {NO_VALUE: "reduce-every-backward"},
    "--hsdp": {NO_VALUE: "hsdp"},
    "--cpu-offload": {NO_VALUE: "cpu-offload"},
    "--async-checkpoint": {NO_VALUE: "async-checkpoint"},
    "--reduce-dtype": {"float32": IGNORED, "bfloat16": "reduce-bfloat16"},
    "--activation-checkpointing": {"none": IGNORED, "selective": "selective-recomputation"},
    "--precision": {
        "fp32": IGNORED,
        "tf32": IGNORED,
        "bf16": "autocast",
        "fp16": "autocast float16",
        "fp8": "fp8",
    },
    "--tensor-parallel": {ANY_VALUE: "tensor-parallel"},
    "--context-parallel": {ANY_VALUE: "context-parallel"},
    "--ulysses": {NO_VALUE: "context-parallel"},
}


class OldFlagError(Exception):
    """An old flag is given whose variant is not there; the text has the commands to use instead."""


def translate(words: list[str], script: Path, help_text: str) -> tuple[list[str], list[str]]:
    """Return the arguments of a script without old flags, and a warning for each that is ignored.

    help_text: of the script, which shows the flags and choices that it still has.
    Raises OldFlagError if an old flag asks for what only a variant does.
    """
    chapter, present = variants.chapter_and_variants(script.parent)
    kept, warnings, asked_for, wanted = [], [], [], set()
    position = 0
    while position < len(words):
        flag, equals, value = words[position].partition("=")
        values = OLD_FLAGS.get(flag, {})
        position += 1
        if values and NO_VALUE not in values and not equals and position < len(words):
            value, equals = words[position], " "
        replacement = values.get(value, values.get(ANY_VALUE))
        names = set()
        for variant in variants.all_variants():
            if variant.name in (replacement or "").split() and chapter in variant.needs:
                names |= {variant.name, *variant.needs[chapter]}
        # Chapters 4 and 5 had --zero1, too, without effect. Other flags were where variants are.
        was_flag = replacement == IGNORED or names or flag == "--zero1"
        if replacement is None or not was_flag or _still_has(help_text, flag, value):
            kept.append(words[position - 1])
            if flag == "--activation-checkpointing" and value == "full":
                kept[-1] = flag  # what the flag without a value means now
                position += equals == " "
            continue
        position += equals == " "
        if names - present:
            asked_for.append(f"{flag}{equals}{value}")
            wanted |= names
        else:
            warnings.append(f"{flag}{equals}{value} is no longer a flag and is ignored")
    if asked_for:
        names = sorted(wanted | present)
        folder = "+".join([f"variants/{variants.CHAPTERS[chapter]}", *names])
        raise OldFlagError(
            f"{', '.join(asked_for)} is a variant of the script now: make variant "
            f'CHAPTER={chapter} WITH="{" ".join(names)}" makes the folder {folder}, whose launch '
            "files take the other arguments"
        )
    return kept, warnings


def _still_has(help_text: str, flag: str, value: str) -> bool:
    """Return whether a script still has a flag and, if the flag has choices, this value."""
    found = re.search(rf"{flag}(?![\w-])(?: {{(.*?)}})?", help_text, re.DOTALL)
    if not found:
        return False
    if flag in ("--precision", "--activation-checkpointing"):
        return value in re.findall(r"\w+", found[1] or "")
    return True

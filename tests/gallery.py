"""Write the table of the gallery's page from the .diff files: python tests/gallery.py"""

import re
from itertools import groupby, product

from common.variants import CHAPTERS, ROOT, Variant, all_variants

PAGE = ROOT / "05-mixed-precision/topics/gallery.md"
TABLE = re.compile(r"(<!-- gallery -->\n)(?:.*\n)*?(<!-- end of the gallery -->\n)")
HEAD = """\
| variant | what it is for | chapters: lines | needs | does not go with | gain or cost |
|---|---|---|---|---|---|
"""
OPTIONS = "04-fsdp/measurements.md#options-for-an-8b-model-on-four-gpus"
PRECISIONS = "05-mixed-precision/measurements.md#an-8b-model-on-two-and-four-gpus"
GPT2 = "05-mixed-precision/measurements.md#gpt-2-in-each-precision-on-one-gpu"
# What was measured, and the section of a page that has the number.
MEASURED = {
    "async-checkpoint": ("pauses of saves", "04-fsdp/measurements.md#saving-and-loading"),
    "autocast": ("tokens/s and memory", "01-single-gpu/measurements.md#speed-on-one-gpu"),
    "context-parallel": (
        "sequences can be twice as long on two GPUs",
        "05-mixed-precision/topics/context_parallel.md#what-it-costs",
    ),
    "cpu-offload": ("8B model: 17.0 GiB instead of 40.8 GiB, but 22% of the speed", OPTIONS),
    "data-parallel": ("two GPUs: 52% of DDP's speed in bfloat16", "02-ddp/topics/five_ways.md"),
    "float16": ("tokens/s and memory", GPT2),
    "fp8": ("8B model: 23% to 31% faster", PRECISIONS),
    "hsdp": (
        "8B model in one node: 64.8 GiB instead of 35.0 GiB, 4% slower",
        "05-mixed-precision/measurements.md#four-gpus",
    ),
    "local-sgd": (
        "GPT-2 on four nodes at 1 Gbit/s: a step of 0.2 s instead of 7.8 s (calculated)",
        "03-multi-node/topics/local_sgd.md#what-it-gains",
    ),
    "lora": (
        "8B model on one GPU, 8,192 tokens: 46.2 GiB (predicted)",
        "01-single-gpu/topics/lora.md#memory",
    ),
    "pure-bfloat16": ("tokens/s and memory; small updates are lost", GPT2),
    "reduce-bfloat16": ("8B model: 2% faster", PRECISIONS),
    "reduce-every-backward": (
        "8B model, two micro-batches: saves 22 GiB, less than 1% slower",
        OPTIONS,
    ),
    "selective-recomputation": ("8B model: saves 28 GiB, less than 1% slower", OPTIONS),
    "stochastic-rounding": (
        "a step of 3e-6 changes 10.2% of the weights instead of 3.9%",
        "05-mixed-precision/reference.md#stochastic-rounding",
    ),
    "tensor-parallel": (
        "8B model: 4% faster than with full recomputation, 47.8 GiB instead of 35.0 GiB",
        "05-mixed-precision/topics/tensor_parallel.md#what-it-costs",
    ),
    "zero1": ("tokens/s and memory", "02-ddp/measurements.md#zero-1-and-dataparallel"),
    "zero2": ("8B model: less than 1% faster, 24 GiB more", OPTIONS),
}


def link(text: str, target: str) -> str:
    """Return a link from the page to a path, relative to the repository."""
    up = "../" * len(PAGE.parent.relative_to(ROOT).parts)
    return f"[{text}]({up}{target})"


def excluded(known: list[Variant], chapter: int, names: set[str]) -> bool:
    """Return whether variants, or others that they need in a chapter, do not go together."""
    of_chapter = {variant.name: variant for variant in known if chapter in variant.needs}
    if not names <= of_chapter.keys():
        return False
    needed = names.union(*(of_chapter[name].needs[chapter] for name in names))
    if needed != names:
        return excluded(known, chapter, needed)
    return any(other in of_chapter[name].excludes for name, other in product(names, names))


def lines_of(variant: Variant) -> str:
    """Return how many lines a variant adds and removes, with a link to its .diff file."""
    body = variant.path.read_text(encoding="utf-8").partition("\n--- ")[2].partition("\n@@")[2]
    added, removed = (len(re.findall(f"^[{sign}]", body, re.MULTILINE)) for sign in ("+", "-"))
    return link(f"+{added} -{removed}", variant.path.relative_to(ROOT).as_posix())


def needs_of(files: list[Variant]) -> str:
    """Return what the variants of one name need; chapters only where they differ."""
    needs = sorted((number, others) for each in files for number, others in each.needs.items())
    groups = [
        (" ".join(str(number) for number, _ in group), ", ".join(f"`{name}`" for name in others))
        for others, group in groupby(needs, key=lambda pair: pair[1])
        for group in [list(group)]
    ]
    if len(groups) == 1:
        return groups[0][1]
    return "; ".join(f"{numbers}: {names}" for numbers, names in groups if names)


def table() -> str:
    """Return the table: a row for each name of a variant, even if it has several .diff files."""
    known, rows = all_variants(), []
    names = sorted({variant.name for variant in known})
    for name in names:
        files = [variant for variant in known if variant.name == name]
        lines = "; ".join(
            f"{' '.join(map(str, sorted(each.needs)))}: {lines_of(each)}" for each in files
        )
        pairs = [(other, {name, other}) for other in names]
        not_with = [
            other for other, pair in pairs if any(excluded(known, n, pair) for n in CHAPTERS)
        ]
        measured = link(*MEASURED[name]) if name in MEASURED else ""
        beside = ", ".join(f"`{other}`" for other in not_with)
        cells = [f"`{name}`", files[0].title, lines, needs_of(files), beside, measured]
        rows.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    return HEAD + "\n".join(rows) + "\n"


def fill(page: str) -> str:
    """Return the page with its table made anew."""
    return TABLE.sub(lambda found: found[1] + table() + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

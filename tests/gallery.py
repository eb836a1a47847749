"""Write the table of the gallery's page from the .diff files: python tests/gallery.py"""

import re
import sys
from itertools import groupby, product
from pathlib import Path

import jinja2

sys.path.append(str(Path(__file__).parent / "benchmarks"))
import report

from common.variants import CHAPTERS, ROOT, Variant, all_variants

PAGE = ROOT / "05-mixed-precision/topics/gallery.md"
TABLE = re.compile(r"(<!-- gallery -->\n)(?:.*\n)*?(<!-- end of the gallery -->\n)")
HEAD = """\
| variant | what it is for | chapters: lines | needs | cannot be combined with | gain or cost |
|---|---|---|---|---|---|
"""
OPTIONS = "04-fsdp/measurements.md#options-for-an-8b-model-on-four-gpus"
PRECISIONS = "05-mixed-precision/measurements.md#an-8b-model-on-two-and-four-gpus"
GPT2 = "05-mixed-precision/measurements.md#gpt-2-in-each-precision-on-one-gpu"


def speed_in_words(ratio: float) -> str:
    """Return how fast a row is relative to another one, to a percent: "4% slower"."""
    if abs(ratio - 1) < 0.01:
        return "about as fast"
    percent = round(100 * ratio - 100)
    return f"{abs(percent)}% {'faster' if percent > 0 else 'slower'}"


def memory_in_words(peak: float, other: float) -> str:
    """Return the peak memory of a row, and that of the other row if it differs, in GiB."""
    one, other = f"{peak:.1f} GiB", f"{other:.1f} GiB"
    return f"{one} in both cases" if one == other else f"{one} instead of {other}"


def compared(what: str, one: str, other: str) -> str:
    """Return a template of the speed and the memory of a row relative to another row."""
    speed = f"speed_in_words(ratio({one!r}, {other!r}))"
    memory = f"memory_in_words(peak({one!r}), peak({other!r}))"
    return f"{what}: {{{{ {speed} }}}}, {{{{ {memory} }}}}"


FULL = "8B, TF32, recomputation"
EIGHT = "8B, TF32, full, 2 micro-batches"
# What was measured, as in benchmarks/sentences.jinja, and the section of a page that has it. Where
# rows are not measured yet, the table has the text before the colon only.
MEASURED = {
    "autocast": ("speed and memory", "01-single-gpu/measurements.md#speed-on-one-gpu"),
    "chunked-loss": (
        compared("1B model, 4 x 8,192 tokens", "chunked-loss, 4 x 8192", "1B on 1, 4 x 8192"),
        "05-mixed-precision/measurements.md#a-loss-in-chunks",
    ),
    "context-parallel": (
        compared("1B model, 65,536 tokens", "context, 65536", "FSDP, 65536"),
        "05-mixed-precision/topics/context_parallel.md#what-it-costs",
    ),
    "cpu-offload": (compared("8B model", "8B, TF32, full, cpu-offload", FULL), OPTIONS),
    "data-parallel": ("two GPUs", "02-ddp/topics/five_ways.md"),
    "document-mask": (
        "fine-tune on paragraphs: evaluation loss 4.23 instead of 4.26",
        "05-mixed-precision/reference.md#attention-for-packed-documents",
    ),
    "float16": (compared("GPT-2", "GPT-2, float16", "chapter 5, bfloat16, compiled"), GPT2),
    "fp8": (
        compared("8B model", "8B on 2, fp8, compiled", "8B on 2, bfloat16, compiled"),
        PRECISIONS,
    ),
    "hsdp": (
        compared("8B model in one node", "8B, hsdp", "8B, recomputation"),
        "05-mixed-precision/measurements.md#four-gpus",
    ),
    "local-sgd": (
        "GPT-2 on four nodes at 1 Gbit/s: a step of 0.2 s instead of 7.8 s (calculated)",
        "03-multi-node/topics/local_sgd.md#what-it-gains",
    ),
    "lora": (
        "8B model on one GPU, 8,192 tokens: {{ '%.1f' % peak('8B on 1, lora') }} GiB",
        "01-single-gpu/topics/lora.md#speed",
    ),
    "muon": (
        "gpt2-tiny: the same loss after 325 steps instead of 464",
        "01-single-gpu/topics/muon_and_wsd.md#what-it-gains",
    ),
    "pure-bfloat16": (
        compared("GPT-2", "GPT-2, bfloat16 weights", "chapter 5, bfloat16, compiled"),
        GPT2,
    ),
    "reduce-bfloat16": (
        compared("8B model", "8B, selective, reduce-bfloat16", "8B, selective-recomputation"),
        PRECISIONS,
    ),
    "reduce-every-backward": (
        compared("8B model, two micro-batches", f"{EIGHT}, reduce-every-backward", EIGHT),
        OPTIONS,
    ),
    "selective-recomputation": (compared("8B model", "8B, TF32, selective", "8B, TF32"), OPTIONS),
    "stochastic-rounding": (
        "a step of 3e-6 changes 10.2% of the weights instead of 3.9%",
        "05-mixed-precision/reference.md#stochastic-rounding",
    ),
    "tensor-parallel": (
        compared("8B model", "8B, tensor parallelism", "8B, recomputation"),
        "05-mixed-precision/topics/tensor_parallel.md#what-it-costs",
    ),
    "zero1": (
        "8B model: {{ '%.0f' % scenario('Chapter 2 or 3 with zero1') }} GiB instead of "
        "{{ '%.0f' % scenario('Chapter 2 or 3') }} GiB (predicted)",
        "04-fsdp/README.md#what-it-costs",
    ),
    "zero2": (compared("8B model", "8B, TF32, full, zero2", FULL), OPTIONS),
}


def filled(template: str) -> str:
    """Return a text with its numbers; only what it begins with if they are not measured yet."""
    try:
        words = {"speed_in_words": speed_in_words, "memory_in_words": memory_in_words}
        return report.ENVIRONMENT.from_string(template).render(words)
    except (LookupError, TypeError, jinja2.UndefinedError):
        return template.partition(":")[0]


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
        text, target = MEASURED.get(name, ("", ""))
        measured = link(filled(text), target) if text else ""
        beside = ", ".join(f"`{other}`" for other in not_with)
        cells = [f"`{name}`", files[0].title, lines, needs_of(files), beside, measured]
        rows.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    return HEAD + "\n".join(rows) + "\n"


def fill(page: str) -> str:
    """Return the page with its table made anew."""
    return TABLE.sub(lambda found: found[1] + table() + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

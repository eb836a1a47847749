"""Draw the figures of the pages.

python tests/benchmarks/figures.py          writes the figures that changed
python tests/benchmarks/figures.py --check  exits with status 1 if a file differs from its figure

The modules in drawings/ draw them, one module for each chapter. A figure with measurements reads
them from the result files in results/; a figure with predicted memory calls 04-fsdp/memory.py.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import picture
from drawings import beyond, ddp, fsdp, mixed_precision, multi_node, single_gpu

REPOSITORY = Path(__file__).parents[2]
CHAPTERS = {
    "01-single-gpu": single_gpu.FIGURES,
    "02-ddp": ddp.FIGURES,
    "03-multi-node": multi_node.FIGURES,
    "04-fsdp": fsdp.FIGURES,
    "05-mixed-precision": mixed_precision.FIGURES | beyond.FIGURES,
}


def figures() -> dict[Path, Callable[[], str]]:
    """Return the file of each figure, relative to the repository, and what draws it."""
    found = {
        Path(chapter, "figures", f"{name}.svg"): draw
        for chapter, drawings in CHAPTERS.items()
        for name, draw in drawings.items()
    }
    return {Path("01-single-gpu/chapters.svg"): picture.picture, **found}


def draw_all() -> dict[Path, str]:
    return {path: draw() for path, draw in figures().items()}


def stale(drawn: dict[Path, str], root: Path = REPOSITORY) -> list[Path]:
    """Return the files below `root` that differ from the figures, or do not exist."""
    return [
        path
        for path, content in drawn.items()
        if not (root / path).exists() or (root / path).read_text(encoding="utf-8") != content
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    drawn = draw_all()
    changed = stale(drawn)
    for path in changed:
        print(f"{'stale' if args.check else 'wrote'}: {path}")
        if not args.check:
            (REPOSITORY / path).parent.mkdir(exist_ok=True)
            (REPOSITORY / path).write_text(drawn[path], encoding="utf-8")
    sys.exit(1 if changed and args.check else 0)


if __name__ == "__main__":
    main()

"""Draw the figures of the pages that show data.

python tests/benchmarks/figures.py          writes the figures that changed
python tests/benchmarks/figures.py --check  exits with status 1 if a file differs from its figure

A figure with measurements reads them from the result files in results/; a figure with predicted
memory calls 04-fsdp/memory.py. All other SVG files of the pages were drawn by hand: edit the file.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import picture
from drawings import charts

REPOSITORY = Path(__file__).parents[2]
FIGURES = {
    "01-single-gpu/chapters.svg": picture.picture,
    "01-single-gpu/figures/step_memory.svg": charts.accumulation_memory,
    "02-ddp/figures/scaling.svg": charts.scaling,
    "03-multi-node/figures/nodes_cost.svg": charts.nodes_cost,
    "04-fsdp/figures/step_memory.svg": charts.sharded_memory,
    "04-fsdp/figures/measured_memory.svg": charts.measured_memory,
    "05-mixed-precision/figures/ladder.svg": charts.ladder,
    "05-mixed-precision/figures/limits.svg": charts.limits,
}


def figures() -> dict[Path, Callable[[], str]]:
    """Return the file of each figure, relative to the repository, and what draws it."""
    return {Path(file): draw for file, draw in FIGURES.items()}


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

"""Draw the figures of the pages that show data.

python tests/benchmarks/figures.py    writes the figures that changed

They read the result files in results/. All other SVG files of the pages have no script: edit the
file.
"""

from pathlib import Path

from drawings import charts

REPOSITORY = Path(__file__).parents[2]
FIGURES = {
    "01-single-gpu/figures/gains.svg": charts.gains,
    "02-ddp/figures/scaling.svg": charts.scaling,
    "02-ddp/figures/trace.svg": charts.trace,
    "02-ddp/figures/strong_scaling.svg": charts.strong_scaling,
    "03-multi-node/figures/nodes_cost.svg": charts.nodes_cost,
    "04-fsdp/figures/memory_8b.svg": charts.memory_8b,
    "05-mixed-precision/figures/a_model.svg": charts.model,
    "05-mixed-precision/figures/ladder.svg": charts.ladder,
}


def draw_all() -> dict[Path, str]:
    """Return the content of each figure by its path, relative to the repository."""
    return {Path(file): draw() for file, draw in FIGURES.items()}


def stale(drawn: dict[Path, str]) -> list[Path]:
    """Return the files that differ from the figures, or do not exist."""
    return [
        path
        for path, content in drawn.items()
        if not (REPOSITORY / path).exists()
        or (REPOSITORY / path).read_text(encoding="utf-8") != content
    ]


def main() -> None:
    drawn = draw_all()
    for path in stale(drawn):
        (REPOSITORY / path).write_text(drawn[path], encoding="utf-8")
        print(f"wrote: {path}")


if __name__ == "__main__":
    main()

"""Compare runs: speed, memory and losses in a table, and the first step in which they differ.

python 03-multi-node/tools/compare_runs.py outputs/one outputs/two

The first run is the one that the others are compared with. Speeds and times are medians of the log
lines without the first third, which is warm-up. The exit status is 0 if nothing differs, 1 if
something differs, and 2 for bad input.
"""

import json
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common import cli, launch
from common.errors import RunError

# A step computes them in this order. The loss is that of the forward pass, before the update.
KEYS = ("lr", "loss", "grad_norm", "eval_loss")
PHASES = ("data", "forward", "backward", "update")
MEDIANS = ("tokens_per_s", *(f"time/{phase}" for phase in PHASES))


def read_metrics(run_dir: Path) -> dict[int, dict]:
    """Return the lines of metrics.jsonl by step. Raises RunError if it cannot be read."""
    path = run_dir / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {line["step"]: line for line in lines if "loss" in line}
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"Cannot read {path} ({error}): give the folder of a run.") from error


def difference(one: float | None, two: float | None) -> float:
    """Return |two - one| / |one|, which is infinite if only one of them is a number."""
    if one == two:
        return 0.0
    return abs(two - one) / (abs(one) or 1.0) if None not in (one, two) else math.inf


def row(name: str, run: dict[int, dict], first: dict[int, dict]) -> str:
    """Return a run's row of the table."""
    lines = list(run.values())
    counted = lines[len(lines) // 3 :]
    speed, *times = (statistics.median(line.get(key) or 0 for line in counted) for key in MEDIANS)
    largest = max(difference(first[step]["loss"], run[step]["loss"]) for step in first.keys() & run)
    cells = [f"{speed:,.0f}", *(f"{ms:,.1f}" for ms in times)]
    cells += [f"{max(line.get('peak_mem_gib') or 0 for line in lines):.1f}"]
    cells += [f"{lines[-1]['loss']:.4f}", f"{largest:.1e}"]
    return f"{name:20}" + "".join(f"{cell:>14}" for cell in cells)


def first_difference(one: dict[int, dict], two: dict[int, dict]) -> str | None:
    """Return the first step that differs and by how much, or None."""
    steps = sorted(one.keys() & two.keys())
    for before, step in zip([None, *steps], steps, strict=False):
        found = {key: difference(one[step].get(key), two[step].get(key)) for key in KEYS}
        if any(found.values()):
            shown = ", ".join(f"{key} by {value:.1e}" for key, value in found.items() if value)
            last = f"step {before} is identical" if before else "no earlier step is in both logs"
            return f"differs from step {step} on: {shown}; {last}"
    return None


def read_checkpoint(path: Path) -> dict[str, object]:
    """Return all values of a checkpoint, by names such as model.lm_head.weight."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        dcp_to_torch_save(path, file.name)
        return dict(flatten(torch.load(file.name, weights_only=False), ""))


def flatten(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def is_equal(one: object, two: object) -> bool:
    """Return whether two values are bit-identical."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    return repr(one) == repr(two)


def differing_values(one: Path, two: Path) -> Iterator[str]:
    """Yield a sentence for each checkpoint of both runs whose contents differ."""
    for path in sorted(one.glob("checkpoints/step-*")):
        if (other := two / "checkpoints" / path.name).exists():
            a, b = read_checkpoint(path), read_checkpoint(other)
            names = sorted(a.keys() | b.keys())
            wrong = [name for name in names if not is_equal(a.get(name), b.get(name))]
            if wrong:
                shown = ", ".join(wrong[:4]) + (", ..." if len(wrong) > 4 else "")
                count = f"{len(wrong)} of {len(names)} tensors and numbers"
                yield f"{path.name}: {count} differ: {shown}"


def main() -> None:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    folders = parser.parse_args().runs
    first, *others = runs = [read_metrics(folder) for folder in folders]
    if not all(first.keys() & run.keys() for run in runs):
        raise RunError("The runs logged no common step: use the same --log-freq for all.")
    titles = ("tokens/s", *(f"{phase}, ms" for phase in PHASES), "GiB", "loss", "differs")
    print(f"{'':20}" + "".join(f"{title:>14}" for title in titles))
    for folder, run in zip(folders, runs, strict=True):
        print(row(str(folder), run, first))
    differences = []
    for folder, run in zip(folders[1:], others, strict=True):
        found = first_difference(first, run)
        found = [*([found] if found else []), *differing_values(folders[0], folder)]
        differences += [f"{folder}: {each}" for each in found]
    print("\n".join(differences) if differences else "no difference in the logs and checkpoints")
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    launch.run(main)

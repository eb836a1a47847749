"""Find the first step in which two runs differ, and what differs in their checkpoints.

python 03-multi-node/tools/compare_runs.py outputs/one outputs/two

The exit status is 0 if nothing differs, 1 if something differs, and 2 for bad input.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common import cli, launch
from common.cli import RunError

# A step computes them in this order. The loss is that of the forward pass, before the update.
KEYS = ("lr", "loss", "grad_norm", "eval_loss")


def read_metrics(run_dir: Path) -> dict[int, dict]:
    """Return the lines of metrics.jsonl by step. Raises RunError if it cannot be read."""
    path = run_dir / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {line["step"]: line for line in lines}
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"Cannot read {path} ({error}): give the folder of a run.") from error


def difference(one: float | None, two: float | None) -> float:
    """Return |two - one| / |one|, which is infinite if only one of them is a number."""
    if one == two:
        return 0.0
    return abs(two - one) / (abs(one) or 1.0) if None not in (one, two) else float("inf")


def first_difference(runs: list[dict[int, dict]]) -> tuple[int, dict[str, float]] | None:
    """Return the first step that differs, and the relative differences by key."""
    one, two = runs
    for step in sorted(one.keys() & two.keys()):
        found = {key: difference(one[step].get(key), two[step].get(key)) for key in KEYS}
        if any(found.values()):
            return step, {key: value for key, value in found.items() if value}
    return None


def read_checkpoint(path: Path) -> dict[str, object]:
    """Return all values of a checkpoint, by names such as model.lm_head.weight."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        dcp_to_torch_save(path, file.name)
        content = torch.load(file.name, weights_only=False)
    return dict(flatten(content, ""))


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


def main() -> None:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs=2, type=Path, help="folders of two runs")
    folders = parser.parse_args().runs
    metrics = [read_metrics(folder) for folder in folders]
    steps = sorted(metrics[0].keys() & metrics[1].keys())
    if not steps:
        raise RunError("The two runs logged no common step: use the same --log-freq for both.")
    found = first_difference(metrics)
    if found is None:
        print(f"all {len(steps)} steps that both runs logged are identical, up to step {steps[-1]}")
    else:
        first, differences = found
        before = [step for step in steps if step < first]
        last = f"step {before[-1]} is identical" if before else "no earlier step is logged in both"
        shown = ", ".join(f"{key} by {value:.1e}" for key, value in differences.items())
        print(f"the runs differ from step {first} on: {shown}; {last}")
    checkpoints_differ = False
    paths = [{path.name: path for path in folder.glob("checkpoints/step-*")} for folder in folders]
    for name in sorted(paths[0].keys() & paths[1].keys()):
        one, two = (read_checkpoint(each[name]) for each in paths)
        names = sorted(one.keys() | two.keys())
        wrong = [key for key in names if not is_equal(one.get(key), two.get(key))]
        checkpoints_differ |= bool(wrong)
        shown = ", ".join(wrong[:4]) + (", ..." if len(wrong) > 4 else "")
        print(f"{name}: {len(wrong)} of {len(names)} values differ: {shown}".removesuffix(": "))
    sys.exit(1 if found or checkpoints_differ else 0)


if __name__ == "__main__":
    launch.run(main)

"""Find the first step in which two runs part, and what of their checkpoints differs by then.

python 03-multi-node/compare_runs.py outputs/one outputs/two
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common import cli, launch
from common.cli import InputError

# In the order in which a fault reaches them; the losses are of the forward pass before the update.
KEYS = ("lr", "loss", "grad_norm", "eval_loss")


def read_metrics(run_dir: Path) -> dict[int, dict]:
    """Return the lines of metrics.jsonl by step; raises InputError where there are none."""
    path = run_dir / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {line["step"]: line for line in lines}
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"Cannot read {path} ({error}): give the folders of two runs.") from error


def difference(one: float | None, two: float | None) -> float:
    """Return |two - one| / |one|; infinite where only one of them is a number."""
    if one == two:
        return 0.0
    return abs(two - one) / (abs(one) or 1.0) if None not in (one, two) else float("inf")


def first_difference(runs: list[dict[int, dict]]) -> tuple[int, dict[str, float]] | None:
    """Return the first step of both whose numbers differ, and by how much, relatively, by key."""
    one, two = runs
    for step in sorted(one.keys() & two.keys()):
        found = {key: difference(one[step].get(key), two[step].get(key)) for key in KEYS}
        if any(found.values()):
            return step, {key: value for key, value in found.items() if value}
    return None


def read_checkpoint(path: Path) -> dict[str, object]:
    """Return all values of a checkpoint by their names in it, joined by dots."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp_to_torch_save(path, file.name)
        content = torch.load(file.name, weights_only=False)
    return dict(flatten(content, ""))


def flatten(value: object, name: str):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def is_equal(one: object, two: object) -> bool:
    """Whether two values are the same to the last bit."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    return repr(one) == repr(two)


def main() -> None:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs=2, type=Path, help="folders of two runs")
    folders = parser.parse_args().runs
    metrics = [read_metrics(folder) for folder in folders]
    common = sorted(metrics[0].keys() & metrics[1].keys())
    if not common:
        raise InputError("The two runs have logged no step in common: give both one --log-freq.")
    parted = first_difference(metrics)
    if parted is None:
        print(f"equal to the last digit: {len(common)} logged steps, up to {common[-1]}")
    else:
        step, found = parted
        before = [each for each in common if each < step]
        last = f"step {before[-1]} is the last equal one" if before else "no logged step is equal"
        shown = ", ".join(f"{key} by {value:.1e}" for key, value in found.items())
        print(f"they part at step {step}: {shown}; {last}")
    differ = False
    paths = [{path.name: path for path in folder.glob("checkpoints/step-*")} for folder in folders]
    for name in sorted(paths[0].keys() & paths[1].keys()):
        one, two = (read_checkpoint(each[name]) for each in paths)
        names = sorted(one.keys() | two.keys())
        wrong = [key for key in names if not is_equal(one.get(key), two.get(key))]
        differ |= bool(wrong)
        shown = ", ".join(wrong[:4]) + (", ..." if len(wrong) > 4 else "")
        print(f"{name}: {len(wrong)} of {len(names)} values differ: {shown}".removesuffix(": "))
    sys.exit(1 if parted or differ else 0)


if __name__ == "__main__":
    launch.run(main)

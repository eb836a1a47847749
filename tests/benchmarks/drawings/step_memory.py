"""What a GPU holds in each phase of a training step, by the model of 04-fsdp/peak_memory.py.

peak_memory.predict returns the peak of a step only. The functions here combine the numbers that it
is made from, phase by phase, and check that their largest sum is that peak.
"""

import sys
from dataclasses import replace
from pathlib import Path

import report
from transformers import PretrainedConfig

from common import models
from drawings.svg import LEFT, RIGHT, SMALL, area, line, text

sys.path.append(str(report.REPOSITORY / "tests"))
from runner import load_script

GIB = 2**30
UPDATE_PHASES = 4  # how wide an update is drawn
AXIS = 72  # width of the labels of the axis
FILLS = {
    "weights": "blue",
    "Adam's moments": "green",
    "gradients": "sky",
    "gathered weights": "purple",
    "activations": "orange",
}
peak_memory = load_script(Path(report.REPOSITORY, "04-fsdp/peak_memory.py"))
Options = peak_memory.Options


def counted(config: PretrainedConfig, options: Options) -> tuple[int, list, list]:
    """Return what predict computes on its way: (peak, groups of shapes, bytes by phase)."""
    cache: dict = {}
    peak = peak_memory.predict(config, options, cache)["peak"]
    ((groups, activations),) = cache.values()
    return peak, groups, activations


def single_gpu(model_name: str, options: Options) -> list[dict[str, float]]:
    """Return GiB of each part in each phase of a step of chapter 1."""
    config = models.load_config(model_name)
    once, groups, with_gradients = counted(config, replace(options, accumulation=1))
    often, _, alone = counted(config, replace(options, accumulation=2))
    weights = 4 * sum(shape.numel() for group in groups for shape in group)
    states = {"weights": weights, "Adam's moments": 2 * weights}
    phases = []
    for micro_batch in range(options.accumulation):
        for (*_, total), (*_, size) in zip(with_gradients, alone, strict=True):
            # The first backward pass creates the gradients. Later ones add to them.
            gradients = total - size if micro_batch == 0 else weights
            phases.append({**states, "gradients": gradients, "activations": size})
    phases += [{**states, "gradients": weights, "activations": 0}] * UPDATE_PHASES
    return in_gib(phases, once if options.accumulation == 1 else often)


def ddp(model_name: str, options: Options) -> list[dict[str, float]]:
    """Return GiB of each part in each phase of a step of chapter 2 or 3, one micro-batch."""
    config = models.load_config(model_name)
    peak, groups, activations = counted(config, replace(options, sharding="ddp"))
    weights = 4 * sum(shape.numel() for group in groups for shape in group)
    states = {"weights": weights, "Adam's moments": 2 * weights, "gradients": weights}
    phases = [{**states, "activations": size} for *_, size in activations]
    phases += [{**states, "activations": 0}] * UPDATE_PHASES
    return in_gib(phases, peak)


def fsdp(model_name: str, options: Options) -> list[dict[str, float]]:
    """Return GiB of each part in each phase of a step of chapter 4, one micro-batch, float32."""
    config = models.load_config(model_name)
    options = replace(options, sharding="fsdp")
    peak, groups, activations = counted(config, options)
    shards = [4 * peak_memory.shard_numel(group, options.gpus) for group in groups]
    whole = [options.gpus * shard for shard in shards]  # bytes of a gathered group
    states = {"weights": sum(shards), "Adam's moments": 2 * sum(shards)}
    phases = []
    for phase, layer, size in activations:
        # The backward pass of a layer ends with the reduce-scatter of its gradients.
        reduced = shards[layer + 1 : -1] if phase == "backward" else []
        gathered = peak_memory.gathered_bytes(whole, whole, phase, layer, options)
        parts = {"gradients": sum(reduced), "gathered weights": gathered, "activations": size}
        phases.append({**states, **parts})
    last = {"gradients": sum(shards[:-1]), "gathered weights": 2 * whole[-1], "activations": 0}
    update = {"gradients": sum(shards), "gathered weights": 0, "activations": 0}
    phases += [{**states, **last}] + [{**states, **update}] * UPDATE_PHASES
    return in_gib(phases, peak)


def in_gib(phases: list[dict[str, int]], peak: int) -> list[dict[str, float]]:
    """Return the phases in GiB; `peak` is what predict says of them, in bytes."""
    found = max(sum(parts.values()) for parts in phases)
    assert found == peak, f"peak_memory.py predicts {peak}, the phases drawn here reach {found}"
    return [{name: size / GIB for name, size in parts.items()} for parts in phases]


# --- drawing ---


def chart(
    top: float,
    height: float,
    phases: list[dict[str, float]],
    most: float,
    ticks: list[int],
    limit: float | None = None,
    fills: dict[str, str] = FILLS,
) -> list[str]:
    """Return the parts of each phase, stacked, on an axis from 0 to `most` GiB.

    limit: GiB of a GPU, drawn as a dashed line.
    """
    left, bottom = LEFT + AXIS, top + height
    scale = height / most
    out = []
    for tick in ticks:
        y = bottom - tick * scale
        out.append(line(left, y, RIGHT, y, "softline thin"))
        out.append(
            text(left - 8, y + 6, f"{tick} GiB" if tick == ticks[-1] else str(tick), SMALL, "end")
        )
    widths = (RIGHT - left) / len(phases)
    xs = [left + widths * number for number in range(len(phases) + 1)]
    lower = [bottom] * len(phases)
    for name, fill in fills.items():
        sizes = [parts.get(name, 0) for parts in phases]
        upper = [y - size * scale for y, size in zip(lower, sizes, strict=True)]
        if any(sizes):
            out.append(area(xs, lower, upper, f"{fill} edge"))
        lower = upper
    if limit:
        y = bottom - limit * scale
        out.append(line(left, y, RIGHT, y, "line dashed"))
    peak = min(range(len(phases)), key=lambda number: lower[number])
    says = f"peak {sum(phases[peak].values()):.1f} GiB"
    x = (xs[peak] + xs[peak + 1]) / 2
    out.append(text(x, lower[peak] - 10, says, style="bold middle"))
    return out


def under(top: float, count: int, phases: int) -> list[str]:
    """Return the names of what happens along the axis; count: micro-batches, of equal phases."""
    left = LEFT + AXIS
    width = (RIGHT - left) / phases
    pass_width = width * (phases - UPDATE_PHASES) / count
    out = []
    for number in range(count):
        x = left + number * pass_width
        y = top + 10
        out.append(line(x + 3, y, x + pass_width - 3, y, "line"))
        says = f"micro-batch {number + 1}" if count > 1 else "forward and backward pass"
        out.append(text(x + pass_width / 2, y + 22, says, SMALL, "middle"))
    x = left + count * pass_width
    out.append(line(x + 3, top + 10, RIGHT, top + 10, "line"))
    out.append(text(RIGHT, top + 32, "update", SMALL, "end"))
    return out

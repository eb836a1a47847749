"""The results of the comparison: the file, the table that is printed, and the figures."""

import argparse
import json
import re
import statistics
from pathlib import Path

from common.cli import RunError

from comparison.machine import describe_machine
from comparison.training import PHASES, PRECISIONS, STRATEGIES, after_warmup

PARTS = ("loss", "speed", "largest")
# All rows of a result file have the same values of these arguments.
SETTINGS = ("model_name", "dataset_name", "seq_length", "batch_size", "global_batch_size")
SETTINGS += ("steps", "speed_steps", "lr", "compile", "threads")


def label(row: dict) -> str:
    return f"{row['strategy']} {row['precision']} x{row['devices']}"


# --- the file ---


def open_results(args: argparse.Namespace) -> dict:
    """Return the content of a new result file, or with --append that of the existing file."""
    machine = describe_machine()
    settings = {name: getattr(args, name) for name in SETTINGS}
    if not args.append:
        if args.output.exists():
            raise RunError(f"{args.output} exists: give another --output, or add --append.")
        return {"machine": machine, "results": {"settings": settings, "added_by": [], "rows": []}}
    content = read(args.output)
    before, now = content["machine"] | content["results"]["settings"], machine | settings
    for name in (*SETTINGS, "gpu", "cpu", "torch", "transformers"):
        if now.get(name) != before.get(name):
            raise RunError(
                f"{args.output} was measured with {name} {before.get(name)}, not {now.get(name)}: "
                "--append needs the same settings on the same kind of machine."
            )
    content["results"]["added_by"].append(machine["command"])
    return content


def add_row(content: dict, row: dict) -> dict:
    """Add a row to the results if it is new, and return the row in the results."""
    rows = content["results"]["rows"]
    found = [each for each in rows if label(each) == label(row)]
    if not found:
        rows.append(row | {"runs": [], "summary": {}})
    (row,) = found or rows[-1:]
    row |= {"left_out": {}, "failed": {}}  # the reason for each part
    return row


def read(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
        settings, _, _ = (content["results"][key] for key in ("settings", "rows", "added_by"))
        content["machine"]["cpu"], *(settings[name] for name in SETTINGS)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is not a result file of compare.py ({error}): give another file."
        ) from error
    return content


def write(path: Path, content: dict) -> None:
    """Write the result file with new summaries; each list of numbers is one line."""
    rows = content["results"]["rows"]
    runs = {label(row): row["runs"] for row in rows}
    reference = last_losses(runs.get("single fp32 x1", []))
    for row in rows:
        row["summary"] = summarize(row["runs"], reference)
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    text = re.sub(r"\[[\d\s.,e+-]+\]", lambda found: " ".join(found[0].split()), text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise RunError(
            f"Cannot write to {path} ({error.strerror}): give another --output."
        ) from error


def summarize(runs: list[dict], reference: dict[int, float]) -> dict[str, object]:
    """Return a row's medians over the rounds, and how its last losses differ from the reference.

    reference: by seed, the last loss in float32 on one device.
    """
    summary = {}
    for part in PARTS:
        measured = [run for run in runs if run["part"] == part]
        if not measured:
            continue
        speeds = [statistics.median(after_warmup(run["tokens_per_s"])) for run in measured]
        phases = measured[0]["ms"]
        ms = {key: statistics.median(run["ms"][key] for run in measured) for key in phases}
        mfu = [run["mfu"] for run in measured]
        peaks = [run["peak_mem_gib"] for run in measured]
        summary[part] = {
            "batch_size": measured[0]["batch_size"],
            "tokens_per_s": round(statistics.median(speeds), 1),
            "rounds": [round(speed, 1) for speed in speeds],
            "ms": {key: round(value, 3) for key, value in ms.items()},
            "mfu": None if None in mfu else statistics.median(mfu),
            "peak_mem_gib": None if None in peaks else max(peaks),
        }
    losses = last_losses(runs)
    if losses and None not in losses.values():
        known = [seed for seed in losses if reference.get(seed) is not None]
        differences = [round(losses[seed] - reference[seed], 7) for seed in known]
        summary["final_loss"] = {"mean": statistics.mean(losses.values()), "by_seed": losses}
        summary["minus_fp32_on_one_device"] = differences
    return summary


def last_losses(runs: list[dict]) -> dict[int, float | None]:
    """Return the last loss by seed."""
    return {run["seed"]: run["losses"][-1] for run in runs if run["part"] == "loss"}


# --- the table ---


def table(rows: list[dict]) -> str:
    """Return the table of the rows, and below it the reasons why rows are missing."""
    head = ("tokens/s", "slowest", "fastest", *PHASES, "GiB", "last loss")
    lines, reasons = [_line("", *head, "minus fp32 on one device")], {}
    for row in rows:
        for part, reason in row["failed"].items():
            reasons.setdefault(f"failed ({part}): {reason}", []).append(label(row))
        for reason in row["left_out"].values():
            reasons.setdefault(f"left out: {reason}", []).append(label(row))
        summary = row["summary"]
        for part in PARTS:
            if part not in summary or (part == "loss" and "speed" in summary):
                continue
            found = summary[part]
            name = label(row) + (f" at {found['batch_size']}" if part == "largest" else "")
            speeds = (found["tokens_per_s"], min(found["rounds"]), max(found["rounds"]))
            loss, differences = "-", ()
            if part != "largest" and "final_loss" in summary:
                loss = f"{summary['final_loss']['mean']:.4f}"
                differences = summary["minus_fp32_on_one_device"]
            lines.append(
                _line(
                    name,
                    *(f"{speed:,.0f}" for speed in speeds),
                    *(f"{found['ms'][phase]:,.1f}" for phase in PHASES),
                    f"{found['peak_mem_gib']:.1f}" if found["peak_mem_gib"] else "-",
                    loss,
                    " ".join(f"{each:+.5f}" for each in differences) or "-",
                )
            )
    return "\n".join([*lines, *(f"{', '.join(names)} {why}" for why, names in reasons.items())])


def _line(name: str, *cells: str) -> str:
    widths = (11, 11, 11, 7, 9, 9, 9, 7, 10, 30)
    return name.ljust(24) + "".join(f"{c:>{n}}" for c, n in zip(cells, widths, strict=True))


# --- the figures ---


def draw(result: Path, folder: Path) -> None:
    """Draw the losses over steps and over time, the speeds and, if measured, the peak memory."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("--draw needs matplotlib: pip install matplotlib.") from None
    content = read(result)
    if not folder.is_dir():
        raise RunError(f"There is no folder {folder} for the figures: give another --figures.")
    settings = content["results"]["settings"]
    where = f"{settings['model_name']} on {content['machine'].get('gpu') or 'a CPU'}"
    tokens = settings["global_batch_size"] * settings["seq_length"]
    per_step = f"{tokens} tokens per step, mean of the seeds"
    per_device = f"{settings['batch_size']} x {settings['seq_length']} tokens per device and step"
    figures = {  # by name: the part, what is drawn of it, the title, the x-axis
        "loss": ("loss", "", per_step, "step"),
        "time": ("loss", "tokens_per_s", per_step, "seconds"),
        "speed": ("speed", "tokens_per_s", per_device, "tokens/s of all devices; line: all rounds"),
        "memory": ("speed", "peak_mem_gib", per_device, "peak memory of a GPU, GiB"),
    }
    for name, (part, key, title, xlabel) in figures.items():
        rows = [
            row
            for row in content["results"]["rows"]
            if row["summary"].get(part, {}).get(key or "ms")
        ]
        if not rows:
            continue
        figure = Figure(figsize=(9, 5 if part == "loss" else 1 + len(rows) / 4))
        axes = figure.add_subplot()
        axes.set(title=f"{where}, {title}", xlabel=xlabel)
        if part == "loss":
            _draw_losses(axes, rows, tokens if key else None)
        else:
            _draw_bars(axes, rows, key)
        figure.tight_layout()
        path = folder / f"{result.stem}_{name}.svg"
        with matplotlib.rc_context({"svg.hashsalt": "comparison"}):  # the same file each time
            figure.savefig(path, metadata={"Date": None})
        print(f"wrote {path}")


def _color(row: dict) -> str:
    return f"C{PRECISIONS.index(row['precision'])}"


def _draw_losses(axes, rows: list[dict], tokens: int | None) -> None:
    """Draw the mean of the seeds over steps or, given the tokens of a step, over seconds."""
    styles = dict(zip(STRATEGIES, ("-", (0, (1, 3)), "--", "-.", ":", (0, (5, 5))), strict=True))
    for row in rows:
        runs = [run["losses"] for run in row["runs"] if run["part"] == "loss"]
        losses = [statistics.mean(step) for step in zip(*runs, strict=True) if None not in step]
        per_step = tokens / row["summary"]["loss"]["tokens_per_s"] if tokens else 1
        x = [per_step * (n + 1) for n in range(len(losses))]
        style = {"color": _color(row), "linestyle": styles[row["strategy"]]}
        axes.plot(x, losses, **style, label=label(row))
    axes.set_ylabel("loss in nats per token")
    axes.legend(ncols=3, fontsize="small")


def _draw_bars(axes, rows: list[dict], key: str) -> None:
    """Draw a bar for each row and, for speeds, a line from the slowest to the fastest round."""
    for row in rows:
        found = row["summary"]["speed"]
        axes.barh(label(row), found[key], color=_color(row))
        if key == "tokens_per_s":
            ends = [min(found["rounds"]), max(found["rounds"])]
            axes.plot(ends, [label(row)] * 2, color="black")
    axes.invert_yaxis()

"""Make the tables of the pages from result files.

python tests/benchmarks/report.py    writes the tables into the pages

A page holds a table between the lines `<!-- table: NAME -->` and `<!-- end -->`. The file
tables.jinja has the template of each table; the functions here compute what is in no result file.
"""

import json
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import jinja2

REPOSITORY = Path(__file__).parents[2]
RESULTS = "tests/benchmarks/results"
GIB = 2**30
STATES = ("weights", "gradients", "moments")


# --- result files ---


def path_of(source: str) -> str:
    """Return the path of a source of a table: a path, or the name of a result file."""
    return source if "/" in source else f"{RESULTS}/{source}.json"


def read(source: str, key: str = "results") -> object:
    """Return the results of a result file, the lines of a metrics file, the text of another.

    key: what to return of a JSON file.
    """
    path = REPOSITORY / path_of(source)
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)[key] if path.suffix == ".json" else text


def measured_runs(row: dict) -> list[dict]:
    """Return the runs of a row that finished; a run that ran out of memory is None."""
    return [run for run in row.get("runs", []) if run and "failed" not in run]


def measured_peak(row: dict) -> float | None:
    """Return the peak GiB of a row, of a search that of the largest that trained."""
    if "tries" in row:
        tries = {each["blocks"]: each.get("peak_mem_gib") for each in row["tries"]}
        return tries.get(row.get("blocks"))
    return median(values_of_runs(row, "peak_mem_gib"))


# --- tables and pages ---


@dataclass
class Table:
    name: str
    template: jinja2.Template

    def made(self) -> tuple[list[str], list[str]]:
        """Return the table's lines, and the paths of the files that it is made from."""
        paths = []

        def noted(source: str, *key: str) -> object:
            paths.append(path_of(source))
            return read(source, *key)

        lines = self.template.render(name=self.name, read=noted).strip().splitlines()
        return lines, sorted({*paths})

    @property
    def sources(self) -> list[str]:
        return self.made()[1]


def fill(text: str) -> str:
    """Return a page's text with all of its tables made anew."""

    def write(match: re.Match) -> str:
        lines, _ = TABLES[match[1]].made()
        return "\n".join([f"<!-- table: {match[1]} -->", *lines, "<!-- end -->"])

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", write, text, flags=re.DOTALL)


def pages() -> list[Path]:
    chapters = (REPOSITORY.glob(f"[0-9][0-9]-*/{name}") for name in ("*.md", "*/*.md"))
    return [REPOSITORY / "README.md", *sorted(path for found in chapters for path in found)]


# --- filters of the templates ---


def shown(value: object, spec: str) -> str:
    """Return a value as a cell; text as it is, nothing for None and what is missing."""
    if value is None or isinstance(value, str | jinja2.Undefined):
        return value or ""
    if not isinstance(value, Iterable):
        return format(value, spec)
    values = list(value)
    if not values:
        return ""
    ends = f" ({min(values):{spec}} to {max(values):{spec}})" if len(values) > 1 else ""
    return f"{statistics.median(values):{spec}}{ends}"


def values_of_runs(row: dict, key: str) -> list:
    return [run[key] for run in measured_runs(row)]


def median(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None


# --- what the templates call ---


def script(chapter: str) -> Path:
    return REPOSITORY / chapter / "train_llm.py"


def diffstat(before: Path, after: Path) -> tuple[int, int]:
    """Return how many lines git counts as added and as removed."""
    command = ["git", "diff", "--no-index", "--numstat", str(before), str(after)]
    done = subprocess.run(command, capture_output=True, text=True)
    added, removed = done.stdout.split()[:2]
    return int(added), int(removed)


def losses(metrics: list[dict]) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics if "loss" in line}


def with_minutes(metrics: list[dict]) -> Iterable[dict]:
    """Return the lines of metrics.jsonl, with the minutes that all steps so far took."""
    minutes, step = 0.0, 0
    for line in metrics:
        minutes += line["time/total"] / 60000 * (line["step"] - step)
        step = line["step"]
        yield {**line, "minutes": minutes}


def bits_per_byte(log: str) -> float:
    """Return the bits per byte of the last evaluation in a training log."""
    return float(re.findall(r"([\d.]+) bits/byte", log)[-1])


def largest_difference(one: Iterable[float], two: Iterable[float]) -> float:
    """Return the largest relative difference of two runs' losses."""
    return max(abs(b / a - 1) for a, b in zip(one, two, strict=True))


def state_gib(found: dict, rank: Callable = max) -> str:
    """Return the cells of the rank with the most state; rank=min: of the one with the least."""
    held = rank(found["bytes_by_rank"], key=lambda each: sum(each.values()))
    sizes = [held[state] for state in STATES]
    return " | ".join(f"{size / GIB:.2f}" for size in (*sizes, sum(sizes)))


def beside_predictions(found: dict, predictions: dict) -> Iterable[dict]:
    """Return the rows of a file that ran or ran out of memory, and what was expected."""
    for row in found["rows"]:
        expected = predictions.get(row["label"], {})  # peak_gib, parameters
        peak, peak_gib = measured_peak(row), expected.get("peak_gib")
        if peak:
            off = peak / peak_gib - 1 if peak_gib else None
            speed = values_of_runs(row, "tokens_per_s_per_device")
            yield {**row, **expected, "speed": speed, "peak": peak, "off": off}
        elif None in row["runs"]:
            yield {**row, **expected, "speed": "out of memory"}


def searches(read: Callable, names: Iterable[str]) -> list[dict]:
    """Return the rows of searches for the largest model, with what was expected."""
    expected = read("predictions")
    rows = [{**row, **expected[name][row["label"]]} for name in names for row in read(name)["rows"]]
    return sorted(rows, key=lambda row: (row["strategy"], row["gpus"]))


def one_node(read: Callable, precision: str) -> dict[str, float]:
    """Return the ms of a step of GPT-2 124M and of its backward pass, on one node of four GPUs."""
    if precision == "TF32":
        row = read("nodes_gpu")["rows"][-1]
    else:
        rows = read("many_gpus_h200_4")["parts"]["nodes"]["rows"]
        (row,) = (row for row in rows if row["label"] == "chapter 3 in bf16, one node of 4")
    step, backward = (median(values_of_runs(row, f"time/{key}")) for key in ("total", "backward"))
    return {"gpus": row.get("devices") or row["gpus"], "step": step, "backward": backward}


def two_nodes(read: Callable, precision: str, gigabits: float, algorithm: str) -> dict[str, float]:
    """Return the predicted step of GPT-2 124M on two nodes, whose networks have so many Gbit/s.

    A ring sends 2 (n - 1) / n of the gradients out of each node, a tree all of them once. The
    backward pass hides the all-reduce while it lasts, but not the one of the input embedding, whose
    gradients come last.
    """
    one, preset = one_node(read, precision), "common/presets/gpt2/config.json"
    gradients = read("step_memory")["gradients_bytes"]
    embedding = 4 * read(preset, "vocab_size") * read(preset, "n_embd") / gradients
    n = 2 * one["gpus"]
    ring = 2 * (n - 1) / n
    sent = {"ring": ring, "tree": 1}[algorithm]
    all_reduce = sent * gradients / gigabits * 8 / 1e6
    exposed = max(all_reduce - one["backward"], embedding * all_reduce)
    step = one["step"] + exposed
    found = {"sent_mb": sent * gradients / 1e6, "bus": gigabits / 8 * ring / sent}
    found |= {"all_reduce": all_reduce, "exposed": exposed, "step": step}
    return found | {"alone": one["step"], "speed": 2 * one["step"] / step}


def around_saves(row: dict) -> dict[str, list[float]]:
    """Return seconds of saves, and ms of the steps around them.

    during: steps that begin while a thread writes the checkpoint; after: the other steps that
    follow a save.
    """
    run = measured_runs(row)[0]
    words = row["command"].split()
    every = int(words[words.index("--ckpt-freq") + 1])
    saves, writes = ([c for c in run["saves"] if c["what"] == what] for what in ("save", "write"))
    found = {"save": [], "complete": [], "during": [], "after": []}
    for number, save in enumerate(saves, start=1):
        now = save["at"] + save["seconds"]
        ends = [write["at"] + write["seconds"] for write in writes if write["at"] >= save["at"]]
        end = min(ends, default=now)
        found["save"].append(save["seconds"])
        found["complete"].append(end - save["at"])
        for ms in run["total_ms"][every * number : every * (number + 1)]:
            found["during" if now < end else "after"].append(ms)
            now += ms / 1000
    return {**found, "before": run["total_ms"][row["warm_up"] : every]}


def read_templates() -> dict[str, Table]:
    environment = jinja2.Environment(
        line_statement_prefix="%", undefined=jinja2.ChainableUndefined, autoescape=False
    )
    environment.filters |= {"f": shown, "runs": values_of_runs, "median": median}
    environment.filters["gib"] = lambda size: size / GIB
    functions = (script, diffstat, losses, with_minutes, bits_per_byte, largest_difference, min)
    functions += (state_gib, beside_predictions, measured_peak, searches, two_nodes, around_saves)
    environment.globals |= {function.__name__: function for function in functions}
    text = Path(__file__).with_name("tables.jinja").read_text()
    templates = re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.MULTILINE)
    return {
        name: Table(name, environment.from_string(template))
        for names, template in templates
        for name in names.split()
    }


TABLES = read_templates()


def main() -> None:
    for page in pages():
        text = fill(page.read_text())
        if text != page.read_text():
            page.write_text(text)
            print(f"wrote: {page.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()

"""Make the tables of the pages from result files.

python tests/benchmarks/report.py    writes the tables into the pages

A page holds a table between the lines `<!-- table: NAME -->` and `<!-- end -->`. The file
tables.jinja has the template of each table; the functions here compute what is in no result file.
Below a table that shows rows of measure.py, a line says when they were measured. The numbers in
sentences are renewed with sentences.jinja.
"""

import ast
import functools
import json
import os
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import fabrics
import jinja2

REPOSITORY = Path(__file__).parents[2]
RESULTS = "tests/benchmarks/results"
GIB = 2**30
PASSES = ("total", "forward", "backward")


# --- result files ---


def path_of(source: str) -> str:
    """Return the path of a source of a table: a path, or the name of a result file."""
    return source if "/" in source else f"{RESULTS}/{source}.json"


def read(source: str) -> object:
    """Return the results of a result file, the lines of a metrics file, the text of another."""
    path = REPOSITORY / path_of(source)
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    if path.suffix == ".json":
        found = json.loads(text)
        return found.get("results", found)
    return text


def measured_runs(row: dict) -> list[dict]:
    """Return the runs of a row that finished; a run that ran out of memory is None."""
    return [run for run in row.get("runs", []) if run and "failed" not in run]


def measured_peak(row: dict) -> float | None:
    """Return the peak GiB of a row."""
    return median(values_of_runs(row, "peak_mem_gib"))


# --- tables and pages ---


USED: set[tuple[str, str]] = set()  # files and labels of the rows that something asked for
MEASURED = ("h200", "older")  # result files of measure.py, the one that counts first


@functools.cache
def measured_rows(file: str) -> dict[str, dict]:
    """Return the rows of a result file of measure.py by label, with the name of the file."""
    path = REPOSITORY / path_of(file)
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["label"]: {**row, "file": file} for row in rows}


def groups(*labels: str) -> list[dict[str, dict]]:
    """Return the rows of measure.py with these labels that can be compared: those of one file.

    A later file counts only if it has a row that the files before it do not have. Then all of its
    rows are returned, because the row needs them for comparison. Of several groups, those of a
    single row are left out: they compare nothing.
    """
    found: list[dict[str, dict]] = []
    for file in MEASURED:
        rows = measured_rows(file)
        group = {label: rows[label] for label in labels if label in rows}
        if any(all(label not in other for other in found) for label in group):
            found.append(group)
    return [group for group in found if len(group) > 1] or found


def measured(*labels: str) -> dict[str, dict]:
    """Return the rows of measure.py with these labels that can be compared: those of one file.

    That is the file that has most of them.
    """
    group = max(groups(*labels), key=len, default={})
    note_use(group)
    return group


def note_use(rows: dict[str, dict]) -> None:
    USED.update((row["file"], label) for label, row in rows.items())


@dataclass
class Table:
    name: str
    template: jinja2.Template

    def made(self, read: Callable = read, used: list | None = None) -> str:
        """Return the table's lines; add the rows of measure.py that it shows to `used`."""

        def noted(*labels: str) -> dict[str, dict]:
            found = measured(*labels)
            if used is not None:
                used.extend(found.values())
            return found

        def noted_groups(*labels: str) -> list[dict[str, dict]]:
            for group in (found := groups(*labels)):
                note_use(group)
                if used is not None:
                    used.extend(group.values())
            return found

        def row(label: str) -> dict:
            """Return one row, from whichever file; without runs if nobody has measured it."""
            return noted(label).get(label, {"runs": []})

        context = {"name": self.name, "read": read, "groups": noted_groups, "row": row}
        return self.template.render(context).strip()

    @property
    def sources(self) -> list[str]:
        """The paths of the files that the table is made from, without those of measure.py."""
        sources = set()

        def noted(source: str) -> object:
            sources.add(path_of(source))
            return read(source)

        self.made(noted)
        return sorted(sources)


def when_measured(rows: list[dict], page: Path) -> str:
    """Return a line that says when rows were measured, with links to their files."""
    up = os.path.relpath(REPOSITORY / RESULTS, page.parent)
    groups = {file: [row for row in rows if row["file"] == file] for file in MEASURED}
    groups = {file: group for file, group in groups.items() if group}
    measured = [row for group in groups.values() for row in group]
    versions = sorted({row["machine"]["torch"].split("+")[0] for row in measured})
    with_torch = f"Measured with torch {', '.join(versions)}"
    says = []
    for file, group in groups.items():
        dates = sorted({row["date"] for row in group})
        when = f"on {dates[0]}" if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"
        earlier = ", with earlier versions of the scripts" if file == "older" else ""
        link = f"[{file}.json]({up}/{file}.json)"
        if len(groups) == 1:
            return f"*{with_torch} {when}{earlier} ({link}).*"
        says += [f"The rows of {link} were measured {when}{earlier}."]
    return f"*{with_torch}. {' '.join(says)}*" if says else ""


def fill(text: str, page: Path) -> str:
    """Return a page's text with all of its tables made anew."""

    def write(match: re.Match) -> str:
        made = TABLES[match[1]].made(used=(used := []))
        if made.count("\n") < 2:  # only the heading
            made = "*Not measured yet. [measure.py]({}) has the rows.*".format(
                os.path.relpath(REPOSITORY / "tests/benchmarks/measure.py", page.parent)
            )
        when = when_measured(used, page)
        lines = [f"<!-- table: {match[1]} -->", made, *(["", when] if when else []), "<!-- end -->"]
        return "\n".join(lines)

    text = re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", write, text, flags=re.DOTALL)
    for fragment in SENTENCES.get(page, ()):
        text = fragment.renewed(text)
    return text


@dataclass
class Fragment:
    """A part of a sentence, with an expression for each of its measured numbers."""

    source: str

    @property
    def parts(self) -> list[str]:
        """Words, an expression, words, ..."""
        return re.split(r"\{\{ (.*?) \}\}", self.source)

    def matches(self, text: str) -> list[re.Match]:
        """Return where the fragment stands in a text, with any numbers."""
        words = (r"\s+".join(map(re.escape, part.split(" "))) for part in self.parts[::2])
        return [*re.finditer(r"(-?\d[\d.,]*\d|-?\d)".join(words), text)]

    def numbers(self) -> list[str] | None:
        """Return the numbers, or None if nobody has measured one of their rows."""
        try:
            return [ENVIRONMENT.from_string(f"{{{{ {e} }}}}").render() for e in self.parts[1::2]]
        except (LookupError, TypeError, jinja2.UndefinedError):
            return None

    def renewed(self, text: str) -> str:
        """Return a text with the numbers of today where the fragment stands."""
        if (numbers := self.numbers()) is None:
            return text
        for match in reversed(self.matches(text)):
            for group in range(len(numbers), 0, -1):
                start, end = match.span(group)
                text = text[:start] + numbers[group - 1] + text[end:]
        return text


def read_sentences() -> dict[Path, list[Fragment]]:
    """Return the fragments of sentences.jinja by page."""
    text = Path(__file__).with_name("sentences.jinja").read_text().partition("#}")[2]
    found: dict[Path, list[Fragment]] = {}
    for line in filter(None, text.splitlines()):
        if line.startswith("## "):
            fragments = found.setdefault(REPOSITORY / line[3:], [])
        else:
            fragments.append(Fragment(line))
    return found


def of_row(key: str) -> Callable[[str], float]:
    """Return a function from a label of measure.py to the median of `key` over the row's runs."""

    def value(label: str) -> float:
        return statistics.median(values_of_runs(measured(label)[label], key))

    return value


def ratio(one: str, other: str) -> float:
    """Return the speed of a row relative to that of another row of the same result file."""
    rows = measured(one, other)
    speeds = [
        statistics.median(values_of_runs(rows[each], "tokens_per_s")) for each in (one, other)
    ]
    return speeds[0] / speeds[1]


def scenario(setup: str) -> float:
    """Return the GiB that memory.py predicts for a setup of the pages' scenario."""
    return read("predictions")["scenario"][setup]["peak"]


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
    command = ["git", "diff", "--no-index", "--numstat", before, after]
    counted = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return int(counted[0]), int(counted[1])


def diffstat_of(diff: str) -> tuple[int, int]:
    """Return how many lines a .diff file adds and removes."""
    text = (REPOSITORY / diff).read_text()
    added, removed = (re.findall(line, text, re.M) for line in (r"^\+(?!\+\+)", "^-(?!--)"))
    return len(added), len(removed)


def options(chapter: str) -> Iterable[dict[str, str]]:
    """Yield the names, the default and the meaning of each flag of a chapter's script.

    The default is what the help says in parentheses, or else the value.
    """
    calls = re.findall(r"^    add\((.*?)\)$", script(chapter).read_text(), re.M | re.S)
    for call in (ast.parse(f"add({each})", mode="eval").body for each in calls):
        given = {each.arg: each.value for each in call.keywords}
        meaning = given["help"].value
        if found := re.fullmatch(r"(.+) \(default: (.+)\)", meaning):
            meaning, default = found.groups()
        elif "action" in given:
            default = "off"
        else:
            default = f"`{given['default'].value}`" if "default" in given else "none"
        names = [word.value for word in call.args]
        yield {"flag": names[-1], "names": names, "default": default, "meaning": meaning}


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


def differences(row: dict, first: int, last: int) -> float:
    """Return the largest relative difference of the losses of a row's two runs in these steps."""
    one, two = (run["losses"] for run in row["runs"])
    steps = [step for step in one if first <= int(step) <= last]
    return largest_difference(*([losses[step] for step in steps] for losses in (one, two)))


def predicted_peak(label: str) -> float | None:
    """Return the GiB that memory.py predicts for a row of measure.py."""
    return read("predictions")["rows"].get(label, {}).get("peak_gib")


def steps_on_one_node() -> dict[str, fabrics.Step]:
    """Return measured steps: of GPT-2 124M on four GPUs of one node, and of the 8B model on two."""
    gpt2, large = (124475904, 39421440), (8030261248, 1050677248)  # parameters, outside of layers
    labels = {
        "TF32": ("DDP, TF32, 64 per GPU on 4", gpt2),
        "bf16": ("DDP, 64 per GPU on 4", gpt2),
        "bf16, sharded": ("FSDP, 64 per GPU on 4", gpt2),
        "8B": ("8B on 2, bfloat16, compiled", large),
    }
    return {
        name: fabrics.Step(*(median(values_of_runs(row, f"time/{key}")) for key in PASSES), *sizes)
        for name, (label, sizes) in labels.items()
        for row in measured(label).values()
    }


def two_nodes(precision: str, gigabits: float) -> dict[str, float]:
    """Return the predicted step and speed of GPT-2 124M with DDP on two nodes of four GPUs.

    NCCL uses a tree, which sends what HSDP's all-reduce sends: all gradients, once.
    """
    step = steps_on_one_node()[precision]
    found = fabrics.predict("HSDP", step, 2, 4, gigabits)
    return found | {"alone": step.total, "speed": 2 * step.total / found["step"]}


def checked_fabrics(read: Callable) -> Iterable[tuple[str, float, float]]:
    """Return setups, with their measured and their predicted steps in ms."""
    first, *others = read("fabrics_cpu")["rows"]
    step = fabrics.Step(*(first[f"time/{key}"] for key in PASSES), 937472, 540928)  # gpt2-tiny
    for row in others:
        predicted = fabrics.predict("DDP", step, 2, 1, row["megabits"] / 1000)["step"]
        name = f"gpt2-tiny on two CPU cores, {row['megabits']} Mbit/s"
        yield name, row["time/total"], predicted


def make_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        line_statement_prefix="%", undefined=jinja2.ChainableUndefined, autoescape=False
    )
    environment.filters |= {"f": shown, "runs": values_of_runs, "median": median}
    environment.filters["gib"] = lambda size: size / GIB
    functions = (script, options, diffstat, diffstat_of, losses, with_minutes, bits_per_byte)
    functions += (largest_difference, measured_peak, predicted_peak)
    functions += (differences, two_nodes, steps_on_one_node, checked_fabrics, fabrics.predict)
    functions += (ratio, scenario)
    environment.globals |= {function.__name__: function for function in functions}
    keys = {"speed": "tokens_per_s", "per_gpu": "tokens_per_s_per_device", "mfu": "mfu"}
    keys |= {"peak": "peak_mem_gib", "ms": "time/total", "backward": "time/backward"}
    environment.globals |= {name: of_row(key) for name, key in keys.items()}
    return environment


def read_templates() -> dict[str, Table]:
    text = Path(__file__).with_name("tables.jinja").read_text()
    templates = re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.MULTILINE)
    return {
        name: Table(name, ENVIRONMENT.from_string(template))
        for names, template in templates
        for name in names.split()
    }


ENVIRONMENT = make_environment()
TABLES = read_templates()
SENTENCES = read_sentences()


def main() -> None:
    for page in pages():
        text = fill(page.read_text(), page)
        if text != page.read_text():
            page.write_text(text)
            print(f"wrote: {page.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()

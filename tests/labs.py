"""Run the notebooks of the chapters and store what they print and draw.

python tests/labs.py 01-single-gpu/lab.ipynb [...]      # all of them, if none is named

A notebook runs from top to bottom in its own folder, in a new kernel. test_labs.py compares what a
notebook prints with what is stored in it. The text must be the same, apart from the numbers and the
spaces between words. A number with a decimal point may differ by one in its last digit, so a cell
shows only the digits that are the same on every processor. Any other number must be the same.
Tags of a cell say what is different for it:

varies  shows times or memory, which differ from run to run: numbers are not compared
linux   counts what only Linux counts: compared on Linux only

The built-in corpus is the standard library of the Python that runs the notebook. Where it is not
the corpus of the stored run, no numbers are compared, only the text between them.
"""

import argparse
import functools
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

from common.inputs.documents import BUILT_IN, find_documents

ROOT = Path(__file__).parents[1]
LIMIT_S = 600  # a lab takes at most two minutes on two cores; tests run beside one another
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def labs() -> list[Path]:
    return sorted(ROOT.glob("[0-9][0-9]-*/lab.ipynb"))


@functools.cache
def corpus() -> str:
    """Return a digest of the built-in corpus."""
    texts = (piece.text for piece in find_documents(BUILT_IN, None, None).read())
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def digest_of_source(notebook: NotebookNode) -> str:
    """Return a digest of all code, by which stored outputs are known to be of this code."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\n\n".join(cells).encode()).hexdigest()[:16]


def is_left_out(output: NotebookNode) -> bool:
    """Logs, and the result of subprocess.run, which has the path of this machine's Python."""
    returned = output.get("data", {}).get("text/plain", "")
    return output.get("name") == "stderr" or returned.startswith("CompletedProcess(")


def execute(path: Path, environment: Mapping[str, str] = os.environ) -> NotebookNode:
    """Return a notebook with the outputs of a run, except what is_left_out names.

    Raises nbclient's CellExecutionError, with the logs of the cell that failed.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=LIMIT_S,
            startup_timeout=LIMIT_S,
            iopub_timeout=LIMIT_S,  # what a cell prints last may come late
            raise_on_iopub_timeout=True,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
            record_timing=False,
            # No ports: those that are free now, a test beside this one may take first.
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}}),
        )
        # Not the reader's own configuration and history.
        client.execute(env={**environment, "IPYTHONDIR": f"{folder}/ipython"})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not is_left_out(output)]
    notebook.metadata |= {"corpus": corpus(), "source": digest_of_source(notebook)}
    return notebook


def texts_of(cell: NotebookNode) -> list[str]:
    """Return what a code cell printed and the text of what it returned, not that of figures."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            texts.append(output.text)
        elif "image/png" not in output.data:
            texts.append(output.data.get("text/plain", ""))
    return texts


def figures_of(cell: NotebookNode) -> int:
    shown = (output for output in cell.outputs if output.output_type != "stream")
    return sum("image/png" in output.data for output in shown)


def tolerance(*numbers: str) -> float:
    """Return one in the last digit of printed numbers: 0.01 for 3.14, 0 for an integer."""
    parts = [number.partition("e") for number in numbers]
    decimals = [(mantissa.partition(".")[2], int(power or 0)) for mantissa, _, power in parts]
    return min(10.0 ** (power - len(digits)) if digits else 0.0 for digits, power in decimals)


def compare(stored: NotebookNode, fresh: NotebookNode) -> list[str]:
    """Return where a fresh run differs from what is stored, one sentence for each difference."""
    faults = []
    same_corpus = stored.metadata["corpus"] == fresh.metadata["corpus"]
    for old, new in zip(stored.cells, fresh.cells, strict=True):
        tags = old.metadata.get("tags", [])
        if old.cell_type != "code" or ("linux" in tags and sys.platform != "linux"):
            continue
        what = f"cell {old.execution_count} ({old.source.splitlines()[0][:40]})"
        if figures_of(old) != figures_of(new):
            faults.append(f"{what} drew {figures_of(new)} figures, stored are {figures_of(old)}")
        before, after = (" ".join("".join(texts_of(cell)).split()) for cell in (old, new))
        if NUMBER.sub("#", before) != NUMBER.sub("#", after):
            faults.append(f"{what} printed {after!r}, stored is {before!r}")
        elif same_corpus and "varies" not in tags:
            pairs = zip(NUMBER.findall(before), NUMBER.findall(after), strict=True)
            for one, two in ((a.replace(",", ""), b.replace(",", "")) for a, b in pairs):
                if abs(float(one) - float(two)) > 1.01 * tolerance(one, two):
                    faults.append(f"{what} printed {two}, stored is {one}")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="all of them, if none is named")
    for path in parser.parse_args().notebooks or labs():
        nbformat.write(execute(path), path)
        print(path)


if __name__ == "__main__":
    main()

"""The notebooks run offline from top to bottom and print again what is stored in them."""

import ast
import textwrap

import labs
import nbformat
import pytest
import report
from helpers import CHAPTERS, ROOT, environment, name_of


@pytest.mark.check
def test_labs_are_stored_as_they_ran_from_top_to_bottom():
    assert [path.parent.name for path in labs.labs()] == CHAPTERS
    for path in labs.labs():
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        in_order = [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        of_this_source = notebook.metadata["source"] == labs.digest_of_source(notebook)
        assert in_order and of_this_source, f"run it: python tests/labs.py {name_of(path)}"
        outputs = [output for cell in cells for output in cell.outputs]
        assert not any(o.output_type == "error" or o.get("name") == "stderr" for o in outputs)
        shown = "".join(text for cell in cells for text in labs.texts_of(cell))
        assert str(ROOT) not in shown and "/tmp" not in shown, "a path of one machine"
        assert any(map(labs.figures_of, cells)), "a lab has at least one figure"
        assert path.stat().st_size < 600_000


@pytest.mark.nightly
@pytest.mark.parametrize("lab", labs.labs(), ids=lambda path: path.parent.name)
def test_prints_again_what_is_stored(lab):
    faults = labs.compare(nbformat.read(lab, as_version=4), labs.execute(lab, environment()))
    assert not faults, "\n".join(faults)


@pytest.mark.check
def test_answers_are_folded():
    """After a prediction, outputs are folded, and so is the text that follows them: the answer."""
    for path in labs.labs():
        is_asked = False
        for cell in nbformat.read(path, as_version=4).cells:
            where = f"{name_of(path)}, cell {cell.id}"
            if cell.cell_type == "markdown":
                assert cell.source.startswith("<details>") == is_asked, where
                assert cell.source.count("<details>") == cell.source.count("</details>"), where
                is_asked = "**Predict:**" in cell.source
            elif cell.outputs and not cell.source.startswith("%%writefile"):
                folded = cell.metadata.get("jupyter", {}).get("outputs_hidden", False)  # in Jupyter
                hidden = "hide-output" in cell.metadata.get("tags", [])  # on a website of MyST-NB
                assert folded == hidden == is_asked, where


@pytest.mark.check
def test_a_command_that_fails_stops_a_notebook():
    for path in labs.labs():
        cells = nbformat.read(path, as_version=4).cells
        source = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        assert not any(line.startswith(("!", "%%bash")) for line in source.splitlines())
        assert source.count("subprocess.run(") == source.count("check=True")


@pytest.mark.check
def test_the_formula_that_a_lab_shows_is_the_scripts():
    script = (ROOT / "01-single-gpu/train_llm.py").read_text()
    start, end = script.index("    def lr_factor"), script.index("    lr_scheduler = LambdaLR")
    cells = nbformat.read(ROOT / "01-single-gpu/lab.ipynb", as_version=4).cells
    shown = "".join(t for c in cells if c.cell_type == "code" for t in labs.texts_of(c))
    assert textwrap.dedent(script[start:end]).strip() in shown, "run tests/labs.py again"


def written_in(chapter: str, name: str) -> dict:
    """Return the numbers that a cell of a notebook assigns to a variable."""
    cells = nbformat.read(ROOT / chapter / "lab.ipynb", as_version=4).cells
    (source,) = (cell.source for cell in cells if f"\n{name} = {{\n" in cell.source)
    assignments = [line for line in ast.parse(source).body if isinstance(line, ast.Assign)]
    (value,) = (a.value for a in assignments if ast.unparse(a.targets[0]) == name)
    return ast.literal_eval(value)


# The labels of measure.py for those of the lab.
LAB_4 = {
    "selective": "8B, TF32, selective",
    "full": "8B, TF32, recomputation",
    "no checkpointing": "8B, TF32",
    "full, not compiled": "8B, TF32, full, not compiled",
    "full, no reshard": "8B, TF32, full, zero2",
    "full, 2 micro-batches": "8B, TF32, full, 2 micro-batches",
    "full, 2 micro-batches, all reduced": "8B, TF32, full, 2 micro-batches, reduce-every-backward",
    "full, offload": "8B, TF32, full, cpu-offload",
}


@pytest.mark.check
def test_numbers_in_lab_4_are_those_of_the_result_files():
    measured, predicted = report.measured(*LAB_4.values()), report.read("predictions")["rows"]
    numbers = written_in("04-fsdp", "recorded")
    for name, label in LAB_4.items():
        peak = max(run["peak_mem_gib"] for run in measured[label]["runs"])
        expected = (predicted[label]["peak_gib"], peak)
        assert numbers[name] == pytest.approx(expected, abs=0.006), label


ROWS_OF_LAB_5 = {
    "fp32": "GPT-2, strict float32",
    "tf32": "chapter 5, TF32, compiled",
    "bf16": "chapter 5, bfloat16, compiled",
    "fp16": "GPT-2, float16",
    "pure-bf16": "GPT-2, bfloat16 weights",
    "fp8": "GPT-2, fp8",
}


@pytest.mark.check
def test_numbers_in_lab_5_are_those_of_the_result_files():
    speed, peak = report.of_row("tokens_per_s"), report.of_row("peak_mem_gib")
    rows = {name: (round(speed(row)), round(peak(row), 1)) for name, row in ROWS_OF_LAB_5.items()}
    assert written_in("05-mixed-precision", "gpu") == rows


def printed(text: str, *tags: str, corpus: str = "one") -> nbformat.NotebookNode:
    """Return a notebook of one cell that has printed a text."""
    output = nbformat.v4.new_output("stream", text=text)
    cell = nbformat.v4.new_code_cell("show()", outputs=[output], metadata={"tags": [*tags]})
    return nbformat.v4.new_notebook(cells=[cell], metadata={"corpus": corpus})


@pytest.mark.check
def test_what_is_compared():
    for text, same, other in (
        ("loss 8.566", "loss  8.567", "loss 8.568"),
        ("12 of 1,000 steps", "12 of 1000 steps", "12 of 1,001 steps"),
        ("differs by 9.9e-05", "differs by 1.0e-04", "differs by 1.1e-04"),
        ("differs by 0.0", "differs by 0.0", "differs by 0.0625"),
    ):
        assert not labs.compare(printed(text), printed(same))
        assert labs.compare(printed(text), printed(other))
        for stored in (printed(text, "varies"), printed(text, corpus="another")):
            assert not labs.compare(stored, printed(other))
            assert labs.compare(stored, printed("nan"))

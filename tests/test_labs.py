"""The notebooks run offline from top to bottom and print again what is stored in them."""

import labs
import nbformat
import pytest
from helpers import CHAPTERS, ROOT, environment, name_of

from common.lab import ranks


@pytest.mark.check
def test_each_chapter_has_one():
    assert [path.parent.name for path in labs.labs()] == CHAPTERS


@pytest.mark.check
def test_labs_are_stored_as_they_ran_from_top_to_bottom():
    for path in labs.labs():
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        in_order = [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        of_this_source = notebook.metadata["source"] == labs.digest_of_source(notebook)
        assert in_order and of_this_source, f"run it: python tests/labs.py {name_of(path)}"
        kinds = {output.output_type for cell in cells for output in cell.outputs}
        assert "error" not in kinds
        shown = "".join(text for cell in cells for text in labs.texts_of(cell))
        assert str(ROOT) not in shown and "/tmp" not in shown, "a path of one machine"
        assert not any(o.get("name") == "stderr" for cell in cells for o in cell.outputs)
        assert any(map(labs.figures_of, cells)), "a lab has at least one figure"
        assert path.stat().st_size < 600_000
        cells[0].source += "\n# changed"
        assert notebook.metadata["source"] != labs.digest_of_source(notebook), "planted"


@pytest.mark.nightly
@pytest.mark.parametrize("lab", labs.labs(), ids=lambda path: path.parent.name)
def test_prints_again_what_is_stored(lab):
    faults = labs.compare(nbformat.read(lab, as_version=4), labs.execute(lab, environment()))
    assert not faults, "\n".join(faults)


@pytest.mark.ci
def test_an_error_of_a_rank_is_shown():
    source = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
    source += "if dist.get_rank() == 1:\n    raise ValueError('the cause')\ndist.barrier()\n"
    with pytest.raises(RuntimeError, match="ValueError: the cause"):
        ranks(2, source)


def printed(text: str, *tags: str, corpus: str = "one") -> nbformat.NotebookNode:
    """Return a notebook of one cell that has printed a text."""
    output = nbformat.v4.new_output("stream", text=text)
    cell = nbformat.v4.new_code_cell("show()", outputs=[output], metadata={"tags": [*tags]})
    return nbformat.v4.new_notebook(cells=[cell], metadata={"corpus": corpus})


@pytest.mark.check
def test_what_is_compared():
    for before, after, noticed in (
        ("loss 8.566", "loss  8.567", set()),
        ("loss 8.566", "loss 8.568", {"numbers"}),
        ("loss 8.566", "loss nan", {"numbers", "varies", "other corpus"}),
        ("12 of 1,000 steps", "12 of 1,001 steps", {"numbers"}),
        ("differs by 9.9e-05", "differs by 1.0e-04", set()),
        ("differs by 9.8e-05", "differs by 1.0e-04", {"numbers"}),
        ("differs by 0.0", "differs by 0.0625", {"numbers"}),
        ("equal: True", "equal: False", {"numbers", "varies", "other corpus"}),
    ):
        faults = {
            "numbers": labs.compare(printed(before), printed(after)),
            "varies": labs.compare(printed(before, "varies"), printed(after)),
            "other corpus": labs.compare(printed(before), printed(after, corpus="another")),
        }
        assert {name for name, found in faults.items() if found} == noticed, after

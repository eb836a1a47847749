"""The notebooks run offline from top to bottom and print again what is stored in them."""

import labs
import nbformat
import pytest
from helpers import CHAPTERS, ROOT, environment, name_of

from common.lab import ranks


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

"""The notebooks run offline from top to bottom and print again what is stored in them."""

import copy
import platform
from pathlib import Path

import labs
import nbformat
import pytest
from conftest import CHAPTERS, ROOT, quick

from common import lab as helpers


def test_each_chapter_has_one():
    assert [path.parent.name for path in labs.labs()] == CHAPTERS


@pytest.fixture(params=labs.labs(), ids=lambda path: path.parent.name)
def lab(request) -> Path:
    return request.param


def test_is_stored_as_it_ran_from_top_to_bottom(lab):
    notebook = nbformat.read(lab, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert "error" not in kinds
    shown = "".join(text for cell in cells for text in labs.texts_of(cell))
    assert str(ROOT) not in shown and "/tmp" not in shown, "a path of one machine"
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)
    assert sum(map(labs.figures_of, cells)) > 0
    assert lab.stat().st_size < 600_000


def test_prints_again_what_is_stored(lab):
    stored = nbformat.read(lab, as_version=4)
    faults = labs.compare(stored, labs.execute(lab, quick()))
    version = stored.metadata.language_info.version
    if version != platform.python_version():
        assert not [fault for fault in faults if " drew " in fault]
        pytest.skip(f"it ran; stored with Python {version}, whose own source code is the corpus")
    assert not faults, "\n".join(faults)


def test_the_rank_that_failed_first_is_shown():
    source = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
    source += "if dist.get_rank() == 1:\n    raise ValueError('the cause')\ndist.barrier()\n"
    with pytest.raises(RuntimeError, match="ValueError: the cause"):
        helpers.ranks(2, source)


def test_another_number_is_noticed(lab):
    """Planted: in the first cell whose numbers count, one changes in the third digit."""
    stored = nbformat.read(lab, as_version=4)
    assert labs.compare(stored, stored) == []
    other = copy.deepcopy(stored)
    for cell in (cell for cell in other.cells if cell.cell_type == "code"):
        if "varies" not in cell.metadata.get("tags", []):
            for output in (each for each in cell.outputs if each.output_type == "stream"):
                if found := labs.NUMBER.search(output.text):
                    changed = f"{1.002 * float(found[0].replace(',', '')) + 0.01:.6f}"
                    output.text = output.text.replace(found[0], changed, 1)
                    (fault, *_) = labs.compare(stored, other)
                    assert f"printed {changed}, stored is" in fault
                    return
    pytest.fail("a lab without a number that has to come out again")

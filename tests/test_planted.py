"""Planted bugs still fit: each text that a test replaces in a script stands there once."""

import contextlib
import importlib
import re
from pathlib import Path

import pytest
from helpers import REGISTERED, make_variant, patch, plant

FEWEST = 75  # fewer mean that modules have stopped to register theirs

pytestmark = pytest.mark.check


def test_registered_bugs_fit_and_compile(tmp_path):
    """All test modules are imported here, in case that this file runs alone."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        with contextlib.suppress(pytest.skip.Exception):  # it lacks a package
            importlib.import_module(path.stem)
    assert len(REGISTERED) >= FEWEST
    for number, (path, replacements, variants) in enumerate(REGISTERED):
        script, folder = path, tmp_path / str(number)
        if variants:  # the script or a module beside it has the text
            made = make_variant(folder, path.parent.name, *variants)
            for changed in plant(made, folder / "planted", replacements).glob("*.py"):
                compile(changed.read_text(), str(changed), "exec")
            continue
        if path.suffix == ".diff":  # the bug is planted in the patched script
            (chapter,) = re.findall(r"^--- a/(\S+)/train_llm.py", path.read_text(), re.MULTILINE)
            script = patch(chapter, folder, diff=path) / "train_llm.py"
        text = script.read_text()
        for right, wrong in replacements:
            assert text.count(right) == 1, f"{path} has it {text.count(right)} times: {right}"
            text = text.replace(right, wrong)
        if script.suffix == ".py":
            compile(text, str(path), "exec")

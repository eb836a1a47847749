"""Planted bugs still fit: each text that a test replaces in a script stands there once."""

import contextlib
import importlib
from pathlib import Path

import pytest
from helpers import REGISTERED, patch

FEWEST = 90  # fewer mean that modules have stopped to register theirs

pytestmark = pytest.mark.check


def replaced(path: Path, text: str, replacements: tuple[tuple[str, str], ...]) -> str:
    """Return a text with a bug planted; the path is of a script, or of a diff that patched it."""
    for right, wrong in replacements:
        assert text.count(right) == 1, f"{path.name} has it {text.count(right)} times: {right}"
        text = text.replace(right, wrong)
    return text


def test_registered_bugs_fit_and_compile(tmp_path):
    """All test modules are imported here, in case that this file runs alone."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        with contextlib.suppress(pytest.skip.Exception):  # it lacks a package
            importlib.import_module(path.stem)
    assert len(REGISTERED) >= FEWEST
    for number, (path, replacements) in enumerate(REGISTERED):
        script = path
        if path.suffix == ".diff":  # the bug is planted in the patched script
            script = patch(path.parents[1].name, tmp_path / str(number), diff=path) / "train_llm.py"
        text = replaced(path, script.read_text(), replacements)
        if script.suffix == ".py":
            compile(text, str(path), "exec")


def test_a_text_that_is_gone_is_noticed():
    script, text = Path("script.py"), "loss.backward()"
    assert replaced(script, text, (("loss", "norm"),)) == "norm.backward()"
    for right in ("step()", "a"):
        with pytest.raises(AssertionError, match=r"script\.py has it"):
            replaced(script, text, ((right, "wrong"),))

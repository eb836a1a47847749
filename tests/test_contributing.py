"""What tests/README.md says about a new flag is enough: this adds one and runs `make check`."""

import re
import subprocess
from pathlib import Path

import pytest
from helpers import CHAPTERS, ROOT, copy_repository, environment

# By file: what the recipe's steps replace. The scripts have the same lines in all chapters.
AFTER = '    add = parser.add_argument_group("every N steps").add_argument\n'
SCRIPT = [
    (
        AFTER,
        '    add("--beta2", default=0.95, type=between(0.0, 0.9999), help="decay of its square")\n'
        + AFTER,
    ),
    ("betas=(args.beta1, 0.95),", "betas=(args.beta1, args.beta2),"),
]
TEST = [
    ('"--max-grad-norm", 0.01)', '"--max-grad-norm", 0.01, "--beta2", 0.9)'),
    ('{group["betas"][0] for group in groups}', '{group["betas"] for group in groups}'),
    ("set.union(*betas) == {BETA1}", "set.union(*betas) == {(BETA1, 0.9)}"),
    (
        '    "clipping": (',
        '    "beta2": ("args.beta2)", "0.95)", "beta1 is"),\n    "clipping": (',
    ),
]
FILES = {f"{chapter}/train_llm.py": SCRIPT for chapter in CHAPTERS} | {"tests/test_flags.py": TEST}


def replace_all(path: Path, pairs: list[tuple[str, str]]) -> None:
    text = path.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, f"{path.name} has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    path.write_text(text)


def recipe() -> str:
    """Return the section of tests/README.md."""
    text = (ROOT / "tests/README.md").read_text()
    return re.search(r"^## Add a flag\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)[1]


@pytest.mark.check
def test_the_recipe_names_every_file_that_a_person_edits():
    """At most eight, so that a flag takes minutes."""
    named = {name for name in FILES if Path(name).name in recipe()}
    assert named == FILES.keys() and len(FILES) <= 8
    assert "make diffs" in recipe() and "make check" in recipe()


@pytest.mark.nightly
def test_a_flag_that_is_added_by_the_recipe_passes_make_check(tmp_path):
    """Without this test, and without any other edit."""
    copy_repository(tmp_path)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "before"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    for name, pairs in FILES.items():
        replace_all(tmp_path / name, pairs)
    env = environment(PYTHONPATH=tmp_path, PYTEST_ADDOPTS="--deselect tests/test_contributing.py")
    for target in ("diffs", "check"):
        done = subprocess.run(
            ["make", target], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"make {target}:\n{done.stdout[-6000:]}{done.stderr[-3000:]}"

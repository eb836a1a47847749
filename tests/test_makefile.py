"""The targets that a contributor uses: help, diff, diffs, lint, and the package index."""

import re
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest
import renew_diffs
from helpers import ROOT

pytestmark = pytest.mark.check
MAKEFILE = (ROOT / "Makefile").read_text()


def shell(command: str, folder: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    command = ["bash", "-o", "pipefail", "-c", command]
    return subprocess.run(command, cwd=folder, env=env or None, capture_output=True, text=True)


def test_help_names_each_target_that_has_a_comment():
    explained = re.findall(r"^([a-z]+):.*  ## ", MAKEFILE, re.M)
    assert re.findall(r"^make (\S+)", shell("make help").stdout, re.M) == explained
    assert {"demo", "help", "diff", "diffs", "check"} <= {*explained}


def test_diff_of_any_two_chapters():
    assert shell("make diff CHAPTER=3").stdout == shell("make diff FROM=2 TO=3").stdout != ""
    assert "+    dist.init_process_group" in shell("make diff FROM=1 TO=5").stdout
    assert "Error" not in shell("make diff FROM=1 TO=5 | true").stderr
    for wrong in ("", "CHAPTER=1", "CHAPTER=6", "FROM=2", "CHAPTER=x"):
        done = shell(f"make diff {wrong}")
        assert done.returncode and "N is from 2 to 5" in done.stderr, wrong


def test_the_site_needs_the_packages_of_its_extra_alone():
    command = shell("make --dry-run --always-make .venv/.site").stdout
    (listed,) = re.findall(r"python (-c .*) \| xargs .* -m pip install", command)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expected = project["optional-dependencies"]["site"]
    assert shell(f"{sys.executable} {listed}").stdout.split() == expected != []


def test_lint_reads_only_what_git_knows(tmp_path):
    tracked = re.search(r"^TRACKED := (.*)", MAKEFILE, re.M)[1]
    (tmp_path / "known.py").write_text("one = 1\n")
    (tmp_path / "gone.py").write_text("one = 1\n")
    shell("git init --quiet && git add . && rm gone.py && echo one > my-table.csv", tmp_path)
    assert shell(f"{tracked} . | xargs -0", tmp_path).stdout == "known.py\n"


@pytest.mark.parametrize(("has_gpu", "reachable"), [*product((False, True), repeat=2)])
def test_the_package_index_is_asked_before_it_is_used(has_gpu, reachable, tmp_path):
    (tmp_path / "Makefile").write_text(MAKEFILE)
    programs = tmp_path / "programs"
    programs.mkdir()
    python = "case $1-$2 in -m-venv) mkdir -p .venv/bin; touch .venv/bin/python ;;"
    python += f" *urlopen*) exit {int(not reachable)} ;; esac"
    for program, lines in {"python3": python, "nvidia-smi": "true"}.items():
        if program == "python3" or has_gpu:
            (programs / program).write_text(f"#!/bin/sh\n{lines}\n")
            (programs / program).chmod(0o755)
    done = shell("make .venv/bin/python", tmp_path, PATH=f"{programs}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    settings = tmp_path / ".venv/pip.conf"
    assert settings.exists() == (reachable and not has_gpu)
    if settings.exists():
        address = "https://download.pytorch.org/whl/cpu"
        assert settings.read_text() == f"[global]\nextra-index-url = {address}\n"


def test_diffs_are_renewed_after_a_change_of_the_script(tmp_path, monkeypatch):
    (tmp_path / "01-x").mkdir()
    script, diff = tmp_path / "01-x/train_llm.py", tmp_path / "twenty.diff"
    before = "".join(f"line_{n} = {n}\n" for n in range(30))
    script.write_text(before)
    shell("git init --quiet && git add .", tmp_path)
    shell("git -c user.name=x -c user.email=x@example.org commit --quiet -m x", tmp_path)
    script.write_text(before.replace("line_20 = 20", "line_20 = 0"))
    old = shell("git diff | sed 1,2d", tmp_path).stdout
    monkeypatch.setattr(renew_diffs, "ROOT", tmp_path)
    for change in ("line_2 = two", "line_15 = x\nline_15b = x"):
        replaced = re.sub(rf"^{change.split(' =')[0]} = .*", change, before, flags=re.M)
        script.write_text(replaced)
        diff.write_text(renew_diffs.renewed(old))
        assert shell("git apply twenty.diff", tmp_path).returncode == 0
        assert script.read_text() == replaced.replace("line_20 = 20", "line_20 = 0")
    script.write_text(before.replace("line_20 = 20", "line_20 = 21"))
    assert renew_diffs.renewed(old) is None, "both change the same line"

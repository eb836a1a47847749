"""The targets that a contributor uses: help, diff, diffs, lint, and the package index.

test_variants.py has make variant.
"""

import re
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest
import renew_diffs
from helpers import ROOT

from common import variants

pytestmark = pytest.mark.check
MAKEFILE = (ROOT / "Makefile").read_text()


def shell(command: str, folder: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    command = ["bash", "-o", "pipefail", "-c", command]
    return subprocess.run(command, cwd=folder, env=env or None, capture_output=True, text=True)


def test_help_names_each_target_that_has_a_comment():
    explained = re.findall(r"^([a-z]+):.*  ## ", MAKEFILE, re.M)
    assert re.findall(r"^make (\S+)", shell("make help").stdout, re.M) == explained
    assert {"demo", "help", "diff", "diffs", "variant", "check"} <= {*explained}


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


@pytest.fixture
def guide(tmp_path, monkeypatch) -> Path:
    """Return a folder with a script, and with two diffs of which the second needs the first."""
    monkeypatch.setattr(renew_diffs, "ROOT", tmp_path)
    monkeypatch.setattr(variants, "ROOT", tmp_path)
    (tmp_path / "01-single-gpu/diffs").mkdir(parents=True)
    script, _, _ = guide_files(tmp_path)
    script.write_text(lines := "".join(f"line_{n} = {n}\n" for n in range(30)))
    with_twenty = lines.replace("line_20 = 20", "line_20 = 0")
    with_both = with_twenty.replace("line_20 = 0\n", "line_20 = 0\nline_20b = 0\n")
    for name, preamble, old, new in (
        ("twenty", "Twenty.\nChapters: 1\n", lines, with_twenty),
        ("more", "More.\nChapters: 1 with twenty\nNot with: x\n", with_twenty, with_both),
    ):
        diff = renew_diffs.difference("01-single-gpu/train_llm.py", old, new, 1)
        (tmp_path / f"01-single-gpu/diffs/{name}.diff").write_text(f"{preamble}\n{diff}")
    shell("git init --quiet && git add .", tmp_path)
    shell("git -c user.name=x -c user.email=x@example.org commit --quiet -m x", tmp_path)
    return tmp_path


def guide_files(guide: Path) -> list[Path]:
    names = ("train_llm.py", "diffs/twenty.diff", "diffs/more.diff")
    return [guide / "01-single-gpu" / name for name in names]


def test_diffs_are_renewed_after_a_change_of_the_script(guide, capsys):
    """Each change begins where the last one was committed; the preambles stay."""
    script, twenty, more = guide_files(guide)
    preambles = [variants.split_preamble(path.read_text())[0] for path in (twenty, more)]
    for change, n_renewed in {"line_2 = two": 0, "line_15 = x\nline_15b = x": 2}.items():
        before = script.read_text()
        replaced = re.sub(rf"^{change.split(' =')[0]} = .*", change, before, flags=re.M)
        script.write_text(replaced)
        renew_diffs.main()
        assert capsys.readouterr().out.count("renewed: ") == n_renewed
        found = [variants.split_preamble(path.read_text()) for path in (twenty, more)]
        assert [preamble for preamble, _ in found] == preambles
        with_twenty = renew_diffs.patched(replaced, found[0][1], exact=True)
        assert with_twenty == replaced.replace("line_20 = 20", "line_20 = 0")
        with_both = renew_diffs.patched(with_twenty, found[1][1], exact=True)
        assert with_both == with_twenty.replace("line_20 = 0\n", "line_20 = 0\nline_20b = 0\n")
        shell("git -c user.name=x -c user.email=x@example.org commit --quiet -am x", guide)
        renew_diffs.main()
        assert capsys.readouterr().out == "" == shell("git status --short", guide).stdout


def test_diffs_that_conflict_are_named_and_kept(guide):
    """Both change the same line. A diff that was edited by hand is right as it is."""
    script, twenty, more = guide_files(guide)
    before = [path.read_text() for path in (twenty, more)]
    script.write_text(script.read_text().replace("line_20 = 20", "line_20 = 21"))
    with pytest.raises(SystemExit, match=r"^edit by hand, .*diffs/more.diff, .*diffs/twenty.diff$"):
        renew_diffs.main()
    assert [path.read_text() for path in (twenty, more)] == before
    twenty.write_text(before[0].replace("-line_20 = 20", "-line_20 = 21"))
    renew_diffs.main()
    assert [path.read_text() for path in (twenty, more)] == [twenty.read_text(), before[1]]


def test_make_diffs_ignores_the_settings_of_git(tmp_path, monkeypatch):
    """On a tree whose diffs fit, it changes nothing."""
    settings = {"diff.noprefix": "true", "diff.context": "7", "color.ui": "always"}
    settings |= {"diff.algorithm": "histogram", "core.attributesFile": f"{tmp_path}/attributes"}
    (tmp_path / "attributes").write_text("* diff=python\n")
    for name, value in settings.items():
        shell(f"git config --file {tmp_path}/config {name} {value}")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setattr(renew_diffs, "committed", Path.read_text)
    for path in ROOT.glob("[0-9]*/*/*.diff"):
        assert renew_diffs.renewed(path) == path.read_text(), path

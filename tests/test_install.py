"""What a reader installs: without the tests' packages, and with the oldest versions allowed."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cluster import give_up
from helpers import ENVIRONMENT, ROOT, copy_repository, read_metrics

pytestmark = pytest.mark.nightly
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def clone(tmp_path) -> Path:
    """Return a copy of the repository, without what was installed or trained in it."""
    copy_repository(tmp_path)
    shutil.rmtree(tmp_path / ".venv", ignore_errors=True)
    return tmp_path


def can_download(folder: Path, requirement: str) -> bool:
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    command = [sys.executable, "-m", "pip", *map(str, words), requirement]
    return subprocess.run(command, capture_output=True).returncode == 0


def shell(folder: Path, command: str, **env: str) -> str:
    """Run a command in a folder, outside of any virtual environment; return what it printed."""
    own = {key: value for key, value in ENVIRONMENT.items() if key != "VIRTUAL_ENV"}
    # Without those of the test's own environment, a launch file finds the folder's .venv.
    paths = [path for path in own["PATH"].split(os.pathsep) if path != f"{sys.prefix}/bin"]
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**own, "PATH": os.pathsep.join(paths), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def version_of(package: str) -> str:
    """Return the version that the tests use."""
    return re.search(rf"^{package}==(\S+)", (ROOT / "requirements.txt").read_text(), re.M)[1]


def test_the_first_command_without_the_packages_of_the_tests(clone):
    if not can_download(clone / "probe", f"filelock=={version_of('filelock')}"):
        give_up("needs a package index")
    python = f"PYTHON={getattr(sys, '_base_executable', sys.executable)}"
    said = shell(clone, f"make {python} demo ARGS='--max-steps 20 --eval-sequences 24'")
    assert "step 20/20" in said and "two processes" in said
    installed = shell(clone, ".venv/bin/python -m pip list --format=freeze")
    assert f"torch=={version_of('torch')}" in installed and "pytest==" not in installed
    one, two = sorted(clone.glob("outputs/demo-*/*"))
    assert shell(clone, f".venv/bin/python 01-single-gpu/generate.py {one}")
    assert "bits" in shell(clone, f".venv/bin/python 01-single-gpu/evaluate.py {one}")
    losses = [[line["loss"] for line in read_metrics(run)] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def oldest(package: str) -> str:
    """Return the oldest version that pyproject.toml allows, with its three numbers."""
    requirements = " ".join(PROJECT["dependencies"])
    numbers = re.search(rf"\b{package}>=([\d.]+)", requirements)[1].split(".")
    return ".".join([*numbers, "0", "0"][:3])


# The ordinary package for Linux brings gigabytes of CUDA libraries; PyTorch's index has another.
TODAY, OLDEST = f"torch=={version_of('torch')}", f"torch=={oldest('torch')}+cpu"


@pytest.mark.parametrize("torch", [TODAY, OLDEST])
def test_oldest_versions(clone, torch):
    """The oldest transformers with today's and with the oldest PyTorch; the rest is the newest."""
    transformers = f"transformers=={oldest('transformers')}"
    if not can_download(clone / "probe", transformers):
        give_up("needs a package index")
    if torch == OLDEST and not can_download(clone / "probe", torch):
        pytest.skip(f"the package index has no {torch}; PyTorch's own has")
    shell(clone, f"{getattr(sys, '_base_executable', sys.executable)} -m venv .venv")
    shell(clone, f".venv/bin/python -m pip install --quiet {torch} {transformers} --editable .")
    flags = "-s 32 --max-steps 5 --log-freq 1 --ckpt-freq 5 --eval-sequences 24"
    for chapter in ("01-single-gpu", "02-ddp", "04-fsdp"):
        shell(clone, f"bash {chapter}/launch.sh -e {chapter} {flags}", OMP_NUM_THREADS="1")
    shell(clone, f"bash 05-mixed-precision/launch.sh -e 05 {flags} --precision fp32")
    runs = [read_metrics(path.parent) for path in sorted(clone.glob("outputs/*/metrics.jsonl"))]
    losses = [[line["loss"] for line in run if "loss" in line] for run in runs]
    assert len(losses) == 4 and len(losses[0]) == 5 and losses[0][4] < losses[0][0] - 0.5
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)

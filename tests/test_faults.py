"""Chapter 3's faults: with each one, what its page says happens, and a correction helps.

The diffs are applied to a copy of the script. test_chapter_diffs.py compares them with the page.
"""

import collections
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import (
    ROOT,
    commands,
    copy_repository,
    environment,
    patch,
    random_texts,
    read_metrics,
    speak_at_once,
)
from runner import Ranks

CHAPTER = "03-multi-node"
FAULTS = ROOT / CHAPTER / "faults"
PAGE = ROOT / CHAPTER / "topics/diagnosing.md"
LARGE = ("-s", 128, "--global-batch-size", 192, "--max-steps", 1, "--eval-sequences", 16)


def run(folder: Path, name: str, *args: object, **options: object) -> tuple[list[int], list[str]]:
    """Train with a fault on two ranks; return the exit statuses, and what each rank printed."""
    if not options.get("script"):
        script = folder / name
        options["chapter"] = patch(CHAPTER, script, diff=FAULTS / f"{name}.diff")
        args = (f"@{FAULTS}/short.args", "--save-dir", folder, "-e", "run", *args)
    for stream in ("stdout", "stderr"):
        options[f"{stream}_file"] = [str(folder / f"{stream}-{rank}") for rank in range(2)]
    statuses = Ranks(2, args, plant=speak_at_once, **options).finish()
    files = [(folder / f"stdout-{rank}", folder / f"stderr-{rank}") for rank in range(2)]
    return statuses, ["".join(file.read_text(errors="replace") for file in each) for each in files]


@pytest.mark.ci
def test_crash(tmp_path):
    statuses, said = run(tmp_path, "crash")
    assert statuses == [1, 1] and [line["step"] for line in read_metrics(tmp_path / "run")][-1] == 7
    assert said[1].endswith("IndexError: index out of range in self\n")
    assert "The other ranks are gone or out of reach (" in said[0]
    assert "IndexError" not in said[0]


@pytest.mark.ci
def test_skipped_collective(tmp_path):
    """The error file of each rank shows the line of its own collective."""
    files = [tmp_path / f"error-{rank}.json" for rank in range(2)]
    env = [{"TORCHELASTIC_ERROR_FILE": file} for file in files]
    statuses, said = run(tmp_path, "skipped-collective", "--dist-timeout", 20, env=env)
    assert statuses == [1, 1] and "Timed out waiting 20000ms" in said[0]
    stacks = [file.read_text() for file in files]
    assert "in evaluate" in stacks[0] and "all_reduce(total)" in stacks[0]
    assert "in evaluate" not in stacks[1] and "all_reduce(barrier_tensor)" in stacks[1]


@pytest.mark.nightly
def test_slow_rank(tmp_path):
    statuses, said = run(tmp_path, "slow-rank")
    assert statuses == [0, 0] and re.search(r"waited up to \S+ ms for rank 1 on ", said[0])
    slowest = collections.Counter(line["slowest_rank"] for line in read_metrics(tmp_path / "run"))
    assert slowest[1] > slowest[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "all_taken", "same_order"),
    [
        ("seed", False, False),
        ("set-epoch", True, True),
    ],
)
def test_samples_of_two_epochs(tmp_path, name, all_taken, same_order):
    statuses, said = run(tmp_path, name)
    epochs = re.findall(r"epoch \d: (\d+) of (\d+) samples, (\[.*\])", said[0])
    assert statuses == [0, 0] and len(epochs) == 2
    assert [taken == of for taken, of, _ in epochs] == [all_taken] * 2
    assert (epochs[0][2] == epochs[1][2]) == same_order


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the limit")
def test_out_of_memory(tmp_path):
    corpus = tmp_path / "corpus.json"
    corpus.write_text(json.dumps(random_texts(150)))
    large = ("-d", corpus, *LARGE)
    statuses, said = run(tmp_path, "out-of-memory", *large, "-b", 96)
    assert statuses == [1, 1] and "you tried to allocate" in said[1]
    (tmp_path / "smaller").mkdir()
    statuses, _ = run(tmp_path / "smaller", "out-of-memory", *large, "-b", 8)
    assert statuses == [0, 0]


# The rank whose time is over second may find that the first has left.
WAITED = "Timed out waiting|Connection closed by peer"

# By the arguments of each program: the statuses, and what rank 0 and rank 1 print.
PROGRAMS = {
    "shapes 4 3": ([1, 1], WAITED, r"the sum, on rank 1: \[1.0, 2.0, 2.0\]"),
    "shapes 2 1": ([1, 1], WAITED, WAITED),
    "shapes 9 5": ([1, -signal.SIGABRT], "RuntimeError", "op.preamble.length <= op.nbytes"),
    "shapes 4 3 pad": ([0, 0], *[r"the sum, .*: \[2.0, 2.0, 2.0, 1.0\]"] * 2),
    "uneven": ([1, 1], r"dist.barrier\(\)", r"backward\(\)"),
    "uneven name": ([1, 1], "Ranks 1 failed to pass monitoredBarrier", r"backward\(\)"),
    "uneven join": ([0, 0], "the epoch is over", "step 4 of 4"),
}


@pytest.mark.ci
@pytest.mark.parametrize("call", PROGRAMS)
def test_programs(tmp_path, call):
    name, *args = call.split()
    expected, *patterns = PROGRAMS[call]
    statuses, said = run(tmp_path, name, *args, script=str(FAULTS / f"{name}.py"))
    assert statuses == expected, said
    for text, pattern in zip(said, patterns, strict=True):
        assert re.search(pattern, text), text


# By the name of the run: what a command of the page prints.
COMMANDS = {
    "lost-node": "The other ranks are gone or out of reach",
    "no-route": "RendezvousConnectionError: The connection to the C10d store has failed",
    "no-interface": "Unable to find address for: ib7",
}


@pytest.fixture(scope="module")
def checkout(make_folder) -> Path:
    copy_repository(folder := make_folder("checkout"))
    return folder


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, workers outlive their torchrun")
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_the_page(checkout, name):
    (command,) = [
        line for _, line in commands(PAGE.read_text()) if re.search(rf"-e {name}\b", line)
    ]
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=checkout,
        env=environment(PYTHONPATH=checkout),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert re.search(COMMANDS[name], done.stdout), done.stdout

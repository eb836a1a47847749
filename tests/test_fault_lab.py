"""The fault lab of chapter 3: each fault fails as its page says, and --fixed succeeds.

The lab itself compares what happens with what its page says, and its exit status tells.
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, first_then_nightly, run_script
from runner import load_script

LAB = "03-multi-node/tools/fault_lab.py"
TIMEOUT = 30  # seconds that a rank waits for the others
fault_lab = load_script(ROOT / LAB)
shared = sys.modules["faults.lab"]


def run_lab(folder: Path, *words: str) -> None:
    """Start the lab as a reader does, with several faults in one call."""
    done = run_script(LAB, *words, "--dist-timeout", TIMEOUT, "--output", folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    "words",
    first_then_nightly(
        [
            "crash",
            "skipped-collective",
            "seed set-epoch",
            "lost-node --fixed",  # after the fault
            # For the first three the chapter's unchanged script, so one training is enough.
            "crash skipped-collective slow-rank no-route seed set-epoch shapes uneven --fixed",
        ]
    ),
)
def test_faults_and_their_corrections(tmp_path, words):
    run_lab(tmp_path, *words.split())


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the limit")
def test_out_of_memory(tmp_path):
    run_lab(tmp_path, "out-of-memory")
    run_lab(tmp_path, "out-of-memory", "--fixed")


# --- the lab itself ---


@pytest.mark.check
def test_what_is_not_as_the_page_says_ends_in_status_1(monkeypatch, tmp_path, capsys):
    surprise = SimpleNamespace(show_fault=lambda lab: lab.expect(False, "rank 1 should fail"))
    monkeypatch.setitem(fault_lab.FAULTS, "crash", surprise)
    monkeypatch.setattr(sys, "argv", [LAB, "crash", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        fault_lab.main()
    assert exit_.value.code == 1
    assert "NOT AS EXPECTED: rank 1 should fail" in capsys.readouterr().out


PATCHES = [
    fault_lab.crash.CRASH,
    fault_lab.skipped_collective.SKIPPED,
    fault_lab.skipped_collective.FLIGHT_RECORDER,
    fault_lab.skipped_collective.UNCHECKED_DDP,
    fault_lab.slow_rank.SLOW,
    fault_lab.seed.SEED,
    fault_lab.set_epoch.NO_SET_EPOCH,
    shared.CHECK_ORDER,
    fault_lab.out_of_memory.LIMITED,
    fault_lab.out_of_memory.KILLED,
]


@pytest.mark.check
@pytest.mark.parametrize("patch", PATCHES)
def test_the_patches_fit_the_script(patch):
    """So that a change of the script that breaks a fault is noticed without a training."""
    source = (ROOT / shared.SCRIPT).read_text()
    compile(shared.apply_patch(source, patch), shared.SCRIPT, "exec")


def test_list_has_every_fault():
    done = run_script(LAB, "list")
    assert done.returncode == 0
    assert re.findall(r"^([\w-]+)  +\S", done.stdout, re.MULTILINE) == list(fault_lab.FAULTS)
    page = (ROOT / "03-multi-node/topics/diagnosing.md").read_text()
    for fault in fault_lab.FAULTS:
        assert f"fault_lab.py {fault}\n" in page, "the page has a section on each"

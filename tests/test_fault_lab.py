"""The fault lab of chapter 3: each fault fails as its page says, and --fixed succeeds.

The tests start the lab as a reader does, with several faults in one call. With --fixed several of
them are then the same training, which the lab runs once.
"""

import re
import sys

import pytest
from helpers import ROOT, read_metrics, run_script
from runner import load_script

LAB = "03-multi-node/tools/fault_lab.py"
TIMEOUT = 30  # seconds that a rank waits for the others
fault_lab = load_script(ROOT / LAB)
shared = sys.modules["faults.lab"]


class Lab:
    """Calls of the lab, each made once: {fault: what it printed}."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.done: dict[tuple, dict[str, str]] = {}

    def __call__(self, *faults: str, fixed: bool = False) -> dict[str, str]:
        if (faults, fixed) not in self.done:
            words = [*faults, "--dist-timeout", TIMEOUT, "--output", self.folder]
            done = run_script(LAB, *words, *(["--fixed"] if fixed else []))
            assert done.returncode == 0, done.stdout + done.stderr
            parts = re.split(r"^=== ([\w-]+).*\n", done.stdout, flags=re.MULTILINE)
            self.done[faults, fixed] = dict(zip(parts[1::2], parts[2::2], strict=True))
        return self.done[faults, fixed]


@pytest.fixture(scope="module")
def lab(make_folder) -> Lab:
    return Lab(make_folder("fault-lab"))


def statuses(text: str) -> list[int]:
    """Return the exit status of each run, in the order in which they are shown."""
    return [int(status) for status in re.findall(r"torchrun exited with status (\d+) after", text)]


@pytest.mark.ci
def test_crash(lab):
    text = lab("crash")["crash"]
    assert statuses(text) == [1]
    assert "rank 1: IndexError: index out of range in self" in text, "the error file"
    assert re.search(r"rank 0: RuntimeError: .*(Connection (closed|reset) by peer)", text)
    assert "0| The other ranks are gone or out of reach (" in text


@pytest.mark.nightly
def test_skipped_collective(lab):
    text = lab("skipped-collective")["skipped-collective"]
    assert statuses(text) == [1, 1]
    # Said once, by whichever rank is first: the one that has waited, or the one that it leaves.
    waited = (
        rf"Timed out waiting {TIMEOUT}000ms for recv operation to complete|Connection \w+ by peer"
    )
    assert re.search(rf"out of reach \(({waited})", text)
    # The stacks, of the process of each rank, not of torchrun's.
    stacks = re.findall(r"process of rank (\d).*\n((?:    .*\n)+)", text)
    (_, first), (_, second) = sorted(stacks)
    assert "evaluate" in first and "evaluate" not in second
    assert "all_reduce" in first and "all_reduce" in second and "launcher" not in first + second
    assert re.search(
        r"rank_0: number (\d+), gloo:all_reduce of \[2\] Double, in evaluate.*not don", text
    )
    assert re.search(
        r"rank_1: number (\d+), gloo:all_reduce of \[\] Float, in main.*: not done", text
    )
    assert "Detected mismatch between collectives on ranks" in text, "DETAIL"


@pytest.mark.nightly
def test_wrong_order(lab):
    """Nothing fails, and all ranks have rank 0's weights. Which samples are taken is wrong."""
    texts = lab("seed", "set-epoch")
    assert all(statuses(text) == [0] for text in texts.values())
    taken = re.findall(r"epoch \d: (\d+) of (\d+) samples", texts["seed"])
    assert len(taken) == 2 and all(int(some) < 0.9 * int(every) for some, every in taken)
    for sums in re.findall(r"sums of weights \{0: (\S+), 1: (\S+)\}", texts["seed"]):
        assert sums[0] == sums[1]
    first, second = re.findall(r"samples taken, first (\[.*?\])", texts["set-epoch"])
    assert first == second, "the second epoch repeats the first"
    # The losses of the correct run and of the faulty run, which share the first epoch.
    rows = re.findall(r"^step +(\d+)  (\S+)  (\S+)$", texts["set-epoch"], re.MULTILINE)
    same = {int(step): right == wrong for step, right, wrong in rows}
    assert same == {1: True, 2: True, 11: True, 12: True, 13: False, 14: False}


@pytest.mark.nightly
def test_lost_node(lab):
    """The other node fails soon after the kill. Both start again and no step is lost."""
    text = lab("lost-node", fixed=True)["lost-node"]
    assert statuses(text) == [1, 0, 0]
    assert "0| The other ranks are gone or out of reach (" in text
    step = re.search(r"exited [\d.]+ s after the kill, in step (\d+)", text)[1]
    resumed = int(re.search(r"resumed after step (\d+) of 60", text)[1])
    assert 8 <= resumed < int(step)
    (folder,) = lab.folder.glob("lost-node-*")
    assert [line["step"] for line in read_metrics(folder / "run")] == list(range(1, 61))


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the limit")
def test_out_of_memory(lab):
    """Refused memory has a message, a kill has none. Smaller micro-batches are the fix."""
    text = lab("out-of-memory")["out-of-memory"]
    assert statuses(text) == [1, 1]
    refused, killed = text.split("what you see")[1:]
    assert re.search(r"you tried to allocate \d+ bytes.*Cannot allocate memory", refused)
    assert "Signal 9 (SIGKILL) received by PID" in killed
    assert re.search(r"exitcode +: -9 .*\n  error_file: <N/A>", killed)
    fixed = lab("out-of-memory", fixed=True)["out-of-memory"]
    assert "8 sequences x world size 2 x accumulation 12 = 192 sequences" in fixed


@pytest.mark.nightly
def test_the_corrected_versions(lab):
    """For the first three the chapter's unchanged script, so one training is enough."""
    faults = ("crash", "skipped-collective", "slow-rank", "no-route", "seed", "set-epoch")
    texts = lab(*faults, "shapes", "uneven", fixed=True)
    assert all(set(statuses(text)) == {0} for text in texts.values())
    for fault in faults[:4]:
        assert "step 14/14 | loss" in texts[fault]
    for fault in ("seed", "set-epoch"):
        taken = re.findall(r"epoch \d: (\d+) of (\d+) samples taken, first (\[.*?\])", texts[fault])
        assert len(taken) == 2 and all(some == every for some, every, _ in taken)
        assert taken[0][2] != taken[1][2]
    assert texts["shapes"].count("[2.0, 2.0, 2.0, 1.0]") == 2
    assert texts["uneven"].count("| rank 1: the epoch is over") == 2


# --- the lab itself ---


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

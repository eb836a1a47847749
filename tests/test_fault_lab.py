"""The fault lab of chapter 3: each fault fails as its page says, and --fixed succeeds.

The tests start the lab as a reader does, with several faults in one call. With --fixed several of
them are then the same training, which the lab runs once.
"""

import re
import sys

import pytest
import torch
from helpers import ROOT, read_metrics, run_script
from runner import load_script

LAB = "03-multi-node/fault_lab.py"
TIMEOUT = 8  # seconds that a rank waits for the others
START = 60  # seconds that a start may take, on a machine that has much else to do
ENDED = r"torchrun exited with status (\d+) after (\d+) s"
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


def ends(text: str) -> list[tuple[int, int]]:
    """Return (status, seconds) of each run, in the order in which they are shown."""
    return [(int(status), int(seconds)) for status, seconds in re.findall(ENDED, text)]


def failed_ranks(text: str) -> dict[int, str]:
    """Return the last line of each rank's part of torchrun's report, by rank."""
    parts = re.split(r"^  rank +: (\d)", text, flags=re.MULTILINE)
    return {
        int(rank): re.search(r"traceback :(?:.*recent call last\):)?\s*(.*)", part)[1]
        for rank, part in zip(parts[1::2], parts[2::2], strict=True)
    }


# The chapter's unchanged script is the fix of all of these, so one training is enough.
SAME_SCRIPT = ("crash", "skipped-collective", "slow-rank")
ORDER = ("seed", "set-epoch")


def test_crash(lab):
    text = lab("crash")["crash"]
    ((status, seconds),) = ends(text)
    assert status == 1 and seconds < START
    assert "rank 1: IndexError: index out of range in self" in text, "the error file"
    assert failed_ranks(text)[1] == "IndexError: index out of range in self"
    assert re.search(r"rank 0: RuntimeError: .*(Connection (closed|reset) by peer)", text)
    assert "0| The other ranks are gone or out of reach (" in text


@pytest.mark.ci
def test_skipped_collective(lab):
    text = lab("skipped-collective")["skipped-collective"]
    (hangs, checked) = ends(text)
    assert hangs[0] == checked[0] == 1
    assert TIMEOUT < hangs[1] < START + TIMEOUT
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
    # DETAIL does not wait for the timeout.
    assert re.search(r"Rank 0 is running collective: .*OpType=ALLREDUCE, TensorShape=\[2\]", text)
    assert "Detected mismatch between collectives on ranks" in text
    # Each is right of itself, and says of the other what that one does not do.
    own = re.findall(r"^(\d)\| .*ranks\. Rank \1 is running [^,]*, OpType=ALLREDUCE, ", text, re.M)
    assert sorted(own) == ["0", "1"]
    assert re.search(r"but Rank 1 is running collective: [^,]*OpType=ALLGATHER_COALESCED", text)


@pytest.mark.ci
def test_detail_checks_no_ddp_on_gloo(tmp_path):
    """Why the lab gives DDP a group of its own: else torch ends with SIGSEGV, so the page says."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip("said of torch 2.13 only")
    script = tmp_path / "detail.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))\n"
    )
    assert run_script(script, TORCH_DISTRIBUTED_DEBUG="INFO").returncode == 0
    assert run_script(script, TORCH_DISTRIBUTED_DEBUG="DETAIL").returncode == -11


@pytest.mark.ci
def test_shapes(lab):
    text = lab("shapes")["shapes"]
    aborts, wrong, hangs, checked = (status for status in ends(text))
    assert [each[0] for each in (aborts, wrong, hangs, checked)] == [1, 1, 1, 1]
    assert hangs[1] >= TIMEOUT > 0 and aborts[1] < START and checked[1] < START
    assert "op.preamble.length <= op.nbytes. 12 vs 4. Received data size doesn't match" in text
    assert re.search(r"exitcode +: -6 ", text), "SIGABRT"
    (total,) = re.findall(r"the sum, on rank 1: \[(.*)\]", text)
    assert total != "2.0, 2.0, 2.0", "wrong, and no rank reports it"
    assert f"Timed out waiting {TIMEOUT}000ms" in text
    assert "Tensor shapes: 4vs 3" in text, "DETAIL"


@pytest.mark.ci
def test_slow_rank(lab):
    text = lab("slow-rank")["slow-rank"]
    assert ends(text)[0][0] == 0, "nothing fails"
    wait, total = map(int, re.search(r"longest wait is (\d+) of (\d+) ms", text).groups())
    assert 300 < wait < total
    assert re.search(r"step 14/14 .*waited up to \d+\.\d ms for rank 1 on ", text)
    assert set(re.search(r"slowest rank of each step is ([\d ]+)", text)[1].split()) == {"1"}


@pytest.mark.ci
def test_uneven(lab):
    text = lab("uneven")["uneven"]
    (hangs, named) = ends(text)
    assert hangs[0] == named[0] == 1 and TIMEOUT < hangs[1] < START + TIMEOUT
    assert "rank 0: step 3 of 3" in text and "rank 1: step 3 of 4" in text
    assert "step 4 of 4" not in text and "the epoch is over\n" not in text.split("what you see")[1]
    assert f"Timed out waiting {TIMEOUT}000ms" in text
    assert re.search(r"\[rank0\]:     dist\.barrier\(\)", text)
    assert re.search(r"\[rank1\]:     ddp_model\(batch\)\.sum\(\)\.backward\(\)", text)
    assert f"[Rank 0]: Ranks 1 failed to pass monitoredBarrier in {TIMEOUT}000 ms" in text


def losses(text: str) -> dict[int, tuple[str, str]]:
    """Return (loss of the correct run, loss of the faulty run) by step."""
    return {int(n): (a, b) for n, a, b in re.findall(r"^step +(\d+)  (\S+)  (\S+)$", text, re.M)}


@pytest.mark.ci
def test_seed(lab):
    """Nothing fails. The weights are rank 0's on all ranks; the samples are not all taken."""
    text = lab(*ORDER)["seed"]
    assert [status for status, _ in ends(text)] == [0]
    taken = re.findall(r"epoch \d: (\d+) of (\d+) samples", text)
    assert len(taken) == 2 and all(int(some) < 0.9 * int(every) for some, every in taken)
    for sums in re.findall(r"sums of weights \{0: (\S+), 1: (\S+)\}", text):
        assert sums[0] == sums[1]
    assert all(right != wrong for right, wrong in losses(text).values()), "from the first step on"


@pytest.mark.ci
def test_set_epoch(lab):
    """Nothing fails. The first epoch is right, the second repeats it."""
    text = lab(*ORDER)["set-epoch"]
    assert [status for status, _ in ends(text)] == [0]
    first, second = re.findall(r"samples taken, first (\[.*?\])", text)
    assert first == second
    same = {step: right == wrong for step, (right, wrong) in losses(text).items()}
    assert same == {1: True, 2: True, 11: True, 12: True, 13: False, 14: False}


@pytest.mark.ci
def test_no_route(lab):
    text = lab("no-route")["no-route"]
    (interface, nowhere) = ends(text)
    assert interface[0] == nowhere[0] == 1
    assert interface[1] < START and nowhere[1] < START + 2 * TIMEOUT
    assert "out of reach (ifa != nullptr. Unable to find address for: ib7)" in text
    assert "RendezvousConnectionError: The connection to the C10d store has failed" in text
    assert re.search(r"the interfaces of this machine.*\n.*\blo", text)
    assert "is there a route to 198.51.100.1, and does it answer?" in text
    assert re.search(r"^(no answer within 2 s: |the connection )", text, re.MULTILINE)


@pytest.mark.ci
def test_lost_node(lab):
    """The other node fails soon after the kill. Both start again and no step is lost."""
    text = lab("lost-node", fixed=True)["lost-node"]
    killed, first, second = (status for status, _ in ends(text))
    assert (killed, first, second) == (1, 0, 0)
    assert "0| The other ranks are gone or out of reach (" in text
    seconds, step = re.search(r"exited ([\d.]+) s after the kill, in step (\d+)", text).groups()
    assert float(seconds) < 30, "the kernel has closed the connections"
    resumed = int(re.search(r"resumed after step (\d+) of 60", text)[1])
    assert 8 <= resumed < int(step)
    (folder,) = lab.folder.glob("lost-node-*")
    assert [line["step"] for line in read_metrics(folder / "run")] == list(range(1, 61))


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the limit")
def test_out_of_memory(lab, train):
    """Refused memory has a message, a kill has none. Smaller micro-batches: the same training."""
    text = lab("out-of-memory")["out-of-memory"]
    assert [status for status, _ in ends(text)] == [1, 1]
    refused, killed = text.split("what you see")[1:]
    assert re.search(
        r"you tried to allocate \d+ bytes.*Cannot allocate memory", failed_ranks(refused)[1]
    )
    assert failed_ranks(killed)[1].startswith("Signal 9 (SIGKILL) received by PID")
    assert re.search(r"exitcode +: -9 .*\n  error_file: <N/A>", killed)
    fixed = lab("out-of-memory", fixed=True)["out-of-memory"]
    assert "8 sequences x 2 devices x 12 micro-batches = 192 sequences" in fixed
    args = ("-s", 128, "--global-batch-size", 192, "--max-steps", 2, "--log-freq", 1, "-b", 96)
    alone = [line["loss"] for line in train(*args, "--warmup-steps", 4)]
    found = [float(loss) for loss in re.findall(r"step \d/2 \| loss (\S+)", fixed)]
    assert found == pytest.approx(alone, rel=1e-4)  # the log has 4 decimals


# --- fixed ---


@pytest.mark.ci
@pytest.mark.parametrize("fault", SAME_SCRIPT)
def test_the_unchanged_script_is_the_fix(lab, fault):
    text = lab(*SAME_SCRIPT, fixed=True)[fault]
    assert [status for status, _ in ends(text)] == [0] and "step 14/14 | loss" in text
    if fault == "slow-rank":
        assert int(re.search(r"longest wait is (\d+) of", text)[1]) < 300


@pytest.mark.ci
def test_fixed_order(lab):
    texts = lab(*ORDER, fixed=True)
    for text in texts.values():
        taken = re.findall(r"epoch \d: (\d+) of (\d+) samples taken, first (\[.*?\])", text)
        assert len(taken) == 2 and all(some == every for some, every, _ in taken)
        assert taken[0][2] != taken[1][2]


@pytest.mark.ci
def test_fixed_shapes_and_uneven(lab):
    texts = lab("shapes", "uneven", fixed=True)
    assert texts["shapes"].count("[2.0, 2.0, 2.0, 1.0]") == 2
    assert [status for status, _ in ends(texts["shapes"])] == [0]
    assert [status for status, _ in ends(texts["uneven"])] == [0, 0]
    assert texts["uneven"].count("| rank 1: the epoch is over") == 2


@pytest.mark.ci
def test_fixed_no_route(lab):
    text = lab("no-route", fixed=True)["no-route"]
    assert [status for status, _ in ends(text)] == [0] and "step 14/14 | loss" in text


# --- the lab itself ---


@pytest.mark.check
def test_an_unfinished_line_of_metrics_is_not_read(tmp_path):
    """A line is written at once, but a reader can see a part of it: a file grows by pages."""
    metrics, read_in_lab = tmp_path / "run/metrics.jsonl", shared.read_metrics
    assert read_in_lab(tmp_path) == []
    metrics.parent.mkdir()
    for text, steps in [('{"st', []), ('{"step": 1}\n{"step": 2', [1]), ('{"step": 1}\n', [1])]:
        metrics.write_text(text)
        for found in (read_in_lab(tmp_path), read_metrics(metrics.parent, going_on=True)):
            assert [line["step"] for line in found] == steps
        if not text.endswith("\n"):
            with pytest.raises(ValueError, match=r"line 1 column"):
                read_metrics(metrics.parent)  # as a run that has ended must not leave it


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
    with pytest.raises(AssertionError, match="must occur exactly once"):
        shared.apply_patch(source + source, patch)


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Return a function that calls the lab in this process."""

    def run(*words: object) -> tuple[int, str]:
        argv = ["fault_lab.py", *words, "--output", tmp_path]
        monkeypatch.setattr(sys, "argv", [str(word) for word in argv])
        with pytest.raises(SystemExit) as end:
            fault_lab.main()
        return end.value.code, capsys.readouterr().out

    return run


@pytest.mark.ci
def test_planted_fix_that_does_not_help_is_noticed(call, monkeypatch):
    monkeypatch.setattr(fault_lab.shapes, "PADDED", "")
    status, text = call("shapes", "--fixed", "--dist-timeout", 2)
    assert status == 1 and "NOT AS EXPECTED: both ranks should have the complete sum" in text


@pytest.mark.ci
def test_planted_fault_that_does_not_happen_is_noticed(call, monkeypatch):
    """The training reaches its end."""
    monkeypatch.setattr(fault_lab.crash, "CRASH", " import sys\n+import json\n")
    status, text = call("crash")
    assert status == 1 and "NOT AS EXPECTED: torchrun should exit with status 1" in text


def test_list_has_every_fault():
    done = run_script(LAB, "list")
    assert done.returncode == 0
    assert re.findall(r"^([\w-]+)  +\S", done.stdout, re.MULTILINE) == list(fault_lab.FAULTS)
    page = (ROOT / "03-multi-node/diagnosing.md").read_text()
    for fault in fault_lab.FAULTS:
        assert f"fault_lab.py {fault}\n" in page, "the page has a section on each"


@pytest.mark.ci
def test_bad_input(tmp_path):
    done = run_script(LAB, "flood")
    assert done.returncode == 2
    assert re.search(r"argument FAULT: invalid choice: 'flood' \(choose from '?list", done.stderr)
    (tmp_path / "file").write_text("mine")
    done = run_script(LAB, "crash", "--output", tmp_path / "file")
    assert done.returncode == 2 and "Cannot write to" in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.ci
def test_nothing_is_overwritten(call, tmp_path):
    (tmp_path / "shapes-1").mkdir()
    (tmp_path / "shapes-1/mine").write_text("mine")
    assert call("shapes", "--fixed", "--dist-timeout", 20)[0] == 0
    assert [path.name for path in (tmp_path / "shapes-1").iterdir()] == ["mine"]
    assert (tmp_path / "shapes-2/shapes.py").exists()

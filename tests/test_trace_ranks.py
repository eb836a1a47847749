"""Traces of ranks: the arithmetic on made-up events, and real runs on two ranks."""

import json
import random
import re
import shlex

import memory_timeline
import pytest
from helpers import ROOT, TORCHRUN, read_metrics, replace_in, run_script
from runner import load_script

SCRIPT = ROOT / "02-ddp/trace_ranks.py"
PAGES = ("02-ddp/reference.md", "04-fsdp/reference.md")
COLUMNS = ["step", "computation", "communication", "exposed"]
SMALL = ("-s", 32, "-b", 4, "--global-batch-size", 8, "--eval-sequences", 4)

trace_ranks = load_script(SCRIPT)


def event(category: str, name: str, start_ms: float, end_ms: float, thread: int = 1) -> dict:
    """Return an event as torch.profiler writes it."""
    span = {"ts": 1000 * start_ms, "dur": 1000 * (end_ms - start_ms)}
    return {"ph": "X", "cat": category, "name": name, "tid": thread, **span}


STEPS = [
    event("user_annotation", "ProfilerStep#12", 0, 100),
    event("user_annotation", "ProfilerStep#13", 100, 200),
    event("gpu_user_annotation", "ProfilerStep#12", 0, 170),
    {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": 1, "ts": 1},
]
ON_GPU = [
    event("kernel", "gemm", 0, 50),
    event("kernel", "gemm on another stream", 30, 60),
    event("kernel", "short gemm", 35, 40),
    event("gpu_memcpy", "Memcpy HtoD", 85, 88),
    event("kernel", "gemm", 100, 200),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 80),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 70, 90),
    event("kernel", "ncclDevKernel_AllGather_RING_LL", 150, 160),
    event("gpu_user_annotation", "nccl:all_reduce", 40, 99),
    event("cpu_op", "aten::mm", 60, 99),
]
ON_CPU = [
    event("cpu_op", "aten::linear", 0, 60),
    event("cpu_op", "aten::addmm", 10, 50),
    event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 60, 99),
    event("cpu_op", "aten::mm", 85, 88),
    event("cpu_op", "aten::mm", 100, 200),
    event("user_annotation", "gloo:all_reduce", 40, 80, thread=2),
    event("user_annotation", "gloo:all_reduce", 70, 90, thread=3),
    event("user_annotation", "gloo:all_gather", 150, 160, thread=2),
    event("cpu_op", "aten::copy_", 60, 70, thread=2),  # a part of the collective
]


def check_arithmetic(script) -> None:
    """Two steps: 163 ms of computation, 60 ms of communication, of which 27 ms are exposed."""
    expected = {"step": 100, "computation": 81.5, "communication": 30, "exposed": 13.5}
    assert script.measure(STEPS + ON_GPU, on_gpu=True) == pytest.approx(expected)
    assert script.measure(STEPS + ON_CPU, on_gpu=False) == pytest.approx(expected)
    assert script.measure(STEPS + ON_CPU[:5], on_gpu=False)["exposed"] == 0
    draw = random.Random(0)
    for _ in range(20):  # the covered milliseconds, counted one by one
        spans = [(start, start + draw.randint(0, 20)) for start in draw.choices(range(100), k=9)]
        covered = {ms for start, end in spans for ms in range(start, end)}
        assert script.covered(spans) == len(covered)
    assert script.covered([]) == 0


@pytest.mark.check
def test_exposed_communication_of_made_up_traces():
    check_arithmetic(trace_ranks)


@pytest.mark.check
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("covered(communication + computation) -", "covered(communication) -"),
        ("max(span_start, end)", "span_start"),  # counts what two spans share twice
        ("end = max(end, span_end)", "end = span_end"),  # forgets the longer span
        ("sorted(spans)", "spans"),
        (' and event["tid"] not in gloo_threads', ""),
        ("elif computes", "if computes"),
        (', "gpu_memcpy"', ""),
        ("1000 / len(steps)", "1000"),
        (' and category == "user_annotation"', ""),
    ],
)
def test_planted_error_in_the_arithmetic(tmp_path, right, wrong):
    copy = tmp_path / "trace_ranks.py"
    copy.write_text(SCRIPT.read_text())
    replace_in(copy, right, wrong)
    with pytest.raises(AssertionError):
        check_arithmetic(load_script(copy))


def by_rank(step: float, *communication: float) -> dict[int, dict[str, float]]:
    return {rank: {"step": step, "communication": each} for rank, each in enumerate(communication)}


@pytest.mark.check
def test_the_straggler_is_the_rank_with_the_shortest_collectives():
    sentence = trace_ranks.name_straggler(by_rank(100.0, 60.0, 2.0, 50.0))
    assert sentence.startswith("Rank 1 arrives last: it spends 2.0 ms per step in collectives, ")
    assert "rank 0 spends 60.0 ms" in sentence
    assert "Rank 0 arrives last" in trace_ranks.name_straggler(by_rank(100.0, 2.0, 60.0))
    for equal in ([30.0, 26.0], [0.0]):
        assert "No rank is late" in trace_ranks.name_straggler(by_rank(100.0, *equal))


@pytest.mark.check
def test_memory_of_a_made_up_step():
    """The peak of each bin includes what is allocated and freed within it."""

    def change(ms: float, total: int, size: int, device: int = 1) -> dict:
        args = {"Total Allocated": total, "Bytes": size, "Device Type": device}
        return {"ph": "i", "name": "[memory]", "ts": 1000 * ms, "args": args}

    events = [
        *(event("user_annotation", "update", 30, 40), event("user_annotation", "forward", 0, 10)),
        *(event("user_annotation", "backward", 20, 30), event("cpu_op", "forward", 0, 99)),
        event("user_annotation", "forward", 40, 50),  # of the next step
        *(change(5.01, 300, 200), change(15.05, 100, -200), change(24.01, 900, 800)),
        *(change(24.02, 100, -800), change(7, 12345, 12345, device=0), change(45, 7000, 6900)),
    ]
    step = memory_timeline.first_step(events, "cuda")
    assert step["phases"] == [["forward", 0.0], ["backward", 0.5], ["update", 0.75]]
    assert step["milliseconds"] == 40
    expected = [100] * 50 + [300] * 101 + [100] * 249
    expected[240] = 900
    assert step["peak_bytes_by_bin"] == expected


def trace(chapter: str, folder, *flags: object, script=None, skip: int = 4):
    return run_script(
        *(*TORCHRUN, 2, SCRIPT, "--skip-steps", skip, "--output", folder / "traces"),
        *(script or ROOT / chapter / "train_llm.py", *SMALL, "--save-dir", folder, *flags),
    )


def read_table(printed: str) -> dict[int, dict[str, float]]:
    header, *rows = re.findall(r"^rank .*|^ +\d+(?: +[\d.]+){4}$", printed, re.MULTILINE)
    assert header.split() == ["rank", *COLUMNS]
    return {
        int(rank): dict(zip(COLUMNS, map(float, numbers), strict=True))
        for rank, *numbers in map(str.split, rows)
    }


@pytest.mark.ci
@pytest.mark.parametrize("chapter", ["02-ddp", "04-fsdp"])
def test_two_ranks(tmp_path, chapter):
    flags = ("--max-steps", 7, "--log-freq", 1, "-e", "traced")
    done = trace(chapter, tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    table = read_table(done.stdout)
    assert list(table) == [0, 1]
    for rank, times in table.items():
        assert 0 <= times["exposed"] <= times["communication"] < times["step"]
        assert 0 < times["computation"] < times["step"]
        assert times["communication"] > 0
        events = json.loads((tmp_path / f"traces/rank{rank}.json").read_text())["traceEvents"]
        again = trace_ranks.measure(events, on_gpu=False)
        assert again == pytest.approx(times, abs=0.051)  # one decimal is printed
        names = [each["name"] for each in events]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 3
        assert [names.count(phase) for phase in ("forward", "backward", "update")] == [3, 3, 3]
        assert ("gloo:all_gather" in names) == (chapter == "04-fsdp")
    # The script trains as it does without the tracer.
    plain = run_script(
        *(*TORCHRUN, 2, f"{chapter}/train_llm.py", *SMALL, "--save-dir", tmp_path),
        *(*flags[:-1], "plain"),
    )
    assert plain.returncode == 0, plain.stderr
    losses = [[s["loss"] for s in read_metrics(tmp_path / name)] for name in ("traced", "plain")]
    assert len(losses[0]) == 7
    assert losses[0] == losses[1]


@pytest.mark.ci
@pytest.mark.parametrize(("chapter", "slow_rank"), [("02-ddp", 1), ("02-ddp", 0), ("04-fsdp", 1)])
def test_names_a_rank_that_sleeps(tmp_path, chapter, slow_rank):
    script = tmp_path / "train_llm.py"
    script.write_text((ROOT / chapter / "train_llm.py").read_text())
    sleep = f'__import__("time").sleep(1.5 * (rank == {slow_rank}))'
    replace_in(script, "batch = next(batches)\n", f"batch = next(batches)\n{' ' * 16}{sleep}\n")
    done = trace(chapter, tmp_path, "--max-steps", 7, script=script)
    assert done.returncode == 0, done.stderr
    assert f"Rank {slow_rank} arrives last" in done.stdout
    other = read_table(done.stdout)[1 - slow_rank]
    assert other["exposed"] > 1000


@pytest.mark.ci
@pytest.mark.parametrize("page", PAGES)
def test_the_command_of_a_page(page, tmp_path):
    (command,) = re.findall(r"^torchrun (.*trace_ranks\.py.*)$", (ROOT / page).read_text(), re.M)[
        :1
    ]
    words = ["-m", "torch.distributed.run", *shlex.split(command), "--save-dir", tmp_path]
    at = words.index("02-ddp/trace_ranks.py") + 1
    done = run_script(*words[:at], "--output", tmp_path, *words[at:])
    assert done.returncode == 0, done.stderr
    assert list(read_table(done.stdout)) == [0, 1]
    assert "the steps 13 to 15" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such.py"], "There is no script no_such.py: give a chapter's train_llm.py."),
        (
            ["--memory-snapshot", "02-ddp/train_llm.py"],
            "--memory-snapshot needs a GPU: leave it out.",
        ),
        (["--trace-steps", "0", "02-ddp/train_llm.py"], "'0' is not a whole number from 1"),
        ([], "the following arguments are required: script"),
        (["02-ddp/train_llm.py", "--max-step", "3"], "did you mean --max-steps?"),
    ],
)
def test_bad_input(arguments, message, tmp_path):
    done = run_script(SCRIPT, "--output", tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.ci
def test_a_run_that_is_too_short(tmp_path):
    chapter = ROOT / "01-single-gpu/train_llm.py"
    done = run_script(
        *(SCRIPT, "--output", tmp_path / "traces", chapter, *SMALL),
        *("--save-dir", tmp_path, "--max-steps", 2),
    )
    assert done.returncode == 2
    assert "The run took 2 steps, but the last traced step is 15" in done.stderr


@pytest.mark.multi_gpu
@pytest.mark.parametrize("chapter", ["02-ddp", "04-fsdp"])
def test_two_gpus(tmp_path, chapter):
    done = run_script(
        *(*TORCHRUN, 2, SCRIPT, "--memory-snapshot", "--output", tmp_path / "traces"),
        *(f"{chapter}/train_llm.py", "--max-steps", 16, "--save-dir", tmp_path),
    )
    assert done.returncode == 0, done.stderr
    for rank, times in read_table(done.stdout).items():
        assert 0 <= times["exposed"] <= times["communication"] < times["step"]
        assert 0 < times["computation"] < times["step"]
        assert (tmp_path / f"traces/rank{rank}-memory.pickle").stat().st_size > 0
        events = json.loads((tmp_path / f"traces/rank{rank}.json").read_text())["traceEvents"]
        assert max(memory_timeline.first_step(events, "cuda")["peak_bytes_by_bin"]) > 1e7

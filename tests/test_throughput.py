"""What measures speed: the bare loop trains as the chapter does, and rows are what they say."""

import json
import platform
import shlex
import sys
from types import SimpleNamespace

import baseline
import libraries
import pytest
import report
import throughput
import torch
from helpers import CHAPTERS, ROOT, TORCHRUN, run_script
from torch import nn

TINY = "-m gpt2-tiny -s 32 -b 2 --max-steps 6 --log-freq 2"


def args_of(words: str) -> SimpleNamespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["baseline.py", *shlex.split(words)])
        return baseline.get_args()


# --- the bare loop ---


def losses(words: str, steps: int = 3) -> list[float]:
    loop = baseline.Loop(args_of(words), torch.device("cpu"), 1)
    return [loop.step().item() for _ in range(steps)]


def test_accumulation_is_the_same_step(monkeypatch):
    monkeypatch.setattr(baseline, "BATCHES", 2)
    at_once = "-m gpt2-tiny -s 32 --precision tf32 -b 4 --global-batch-size 4"
    loop = baseline.Loop(args_of(at_once), torch.device("cpu"), 1)
    halves = baseline.Loop(args_of(at_once.replace("-b 4", "-b 2")), torch.device("cpu"), 1)
    assert (loop.accumulation, halves.accumulation) == (1, 2)
    halves.batches = loop.batches[0].view(2, 2, 32)
    loop.batches = loop.batches[:1].expand(2, -1, -1)
    for _ in range(3):
        assert loop.step().item() == pytest.approx(halves.step().item(), rel=1e-5)
    assert all(parameter.grad is None for parameter in loop.model.parameters())


def test_it_learns_in_either_precision():
    for precision in ("tf32", "bf16"):
        words = f"-m gpt2-tiny -s 32 -b 2 --global-batch-size 2 --lr 3e-3 --precision {precision}"
        found = losses(words, steps=10)
        assert found[8] < found[0] - 0.3  # the same batch once more


def test_autocast_is_on_where_it_says_so(monkeypatch):
    seen = []
    forward = nn.Linear.forward

    def noting(self, x):
        out = forward(self, x)
        seen.append(out.dtype)
        return out

    monkeypatch.setattr(nn.Linear, "forward", noting)
    for precision, dtype in (("tf32", torch.float32), ("bf16", torch.bfloat16)):
        seen.clear()
        losses(f"-m gpt2-tiny -s 32 -b 2 --global-batch-size 2 --precision {precision}", steps=1)
        assert set(seen) == {dtype}


@pytest.mark.ci
def test_two_ranks_log_what_one_does(tmp_path):
    for name, launcher in (("one", ()), ("two", (*TORCHRUN, 2))):
        words = f"{TINY} --global-batch-size 4 -e {name} --precision tf32"
        output = ("--output", tmp_path / f"{name}.json", "--save-dir", tmp_path)
        script = (*launcher, throughput.BASELINE, *shlex.split(words), *output)
        done = run_script(*script)
        assert done.returncode == 0, done.stderr
    found = {
        name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("one", "two")
    }
    for lines in found.values():
        assert [line["step"] for line in lines] == [2, 4, 6]
        for line in lines:  # 4 sequences of 32 tokens in a step
            assert line["tokens_per_s"] * line["time/total"] / 1000 == pytest.approx(4 * 32)
            assert line["mfu"] is None
    # Other tokens, the same weights to begin with: losses are near each other, not equal.
    assert found["two"][0]["loss"] == pytest.approx(found["one"][0]["loss"], rel=0.05)
    alone, both = found["one"][0], found["two"][0]
    assert both["tokens_per_s_per_device"] == both["tokens_per_s"] / 2
    assert alone["tokens_per_s_per_device"] == alone["tokens_per_s"]
    written = json.loads((tmp_path / "two.json").read_text())
    assert written["results"]["world_size"] == 2
    assert written["machine"]["command"].startswith("torchrun --standalone --nproc-per-node 2")


@pytest.mark.ci
def test_what_it_cannot_do_ends_in_a_sentence():
    script = throughput.BASELINE
    for words, said in (
        ("-m llama-tiny", "llama-tiny is no GPT-2"),
        ("-m gpt2-tiny -b 3 --global-batch-size 8", "Give a --global-batch-size"),
    ):
        done = run_script(script, *words.split())
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


# --- the sets ---


def test_names_and_rows_that_result_files_have_stay():
    sets = {"ddp_cpu": "ddp-cpu", "ddp_gpu": "ddp-gpu", "nodes_gpu": "nodes-gpu"}
    for name, chosen in sets.items():
        committed = report.content(ROOT / report.result(name))["rows"]
        rows, steps, _ = throughput.SETS[chosen]
        commands = {
            row["label"]: shlex.join(["python", *throughput.command_of(row, steps)]) for row in rows
        }
        assert {row["label"]: row["command"] for row in committed} == commands


@pytest.mark.parametrize("name", throughput.SETS)
def test_a_set_is_one_that_can_run(name):
    rows, steps, warm_up = throughput.SETS[name]
    labels = [row["label"] for row in rows]
    assert len(set(labels)) == len(labels)
    for row in rows:
        words = throughput.command_of(row, steps)
        script = next(word for word in words if word.endswith(".py"))
        assert (ROOT / script).exists()
        assert row["chapter"] in (*CHAPTERS, throughput.BASELINE)
        log_freq = int(words[words.index("--log-freq") + 1])
        assert steps - warm_up >= 2 * log_freq, "two lines at least are counted"
        assert warm_up >= log_freq
        if "against" in row:
            assert row["against"] in labels


def test_a_baseline_of_the_same_batch_stands_beside_chapter_5():
    for name in ("gpt2-bf16", "gpt2-bf16-scaling", "gpt2-bf16-accumulation"):
        rows, steps, _ = throughput.SETS[name]
        by_devices: dict[int, list[list[str]]] = {}
        for row in rows:
            words = throughput.command_of(row, steps)
            words = words[next(i for i, w in enumerate(words) if w.endswith(".py")) + 1 :]
            own = [word for word in words if word != throughput.NEVER]
            own = [word for word in own if word not in ("--eval-freq", "--ckpt-freq")]
            if "--num-workers" in own:  # the bare loop has its tokens in memory
                at = own.index("--num-workers")
                del own[at : at + 2]
            if "not resharded" in row["label"]:
                own.remove("--no-reshard-after-forward")
            by_devices.setdefault(row["devices"], []).append(own)
        for one, *others in by_devices.values():
            assert others
            assert all(other == one for other in others)


def test_rows_side_by_side_stay_on_the_gpus_that_they_may_use(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert throughput.visible_gpus(2, 2) == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,5,7")
    assert throughput.visible_gpus(0, 1) == "1"
    assert throughput.visible_gpus(1, 2) == "5,7"
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert throughput.visible_gpus(0, 1) == throughput.visible_gpus(1, 2) == none


# --- what is made of the runs ---


def lines(*speeds: float) -> list[dict]:
    return [
        {"step": 5 * (i + 1), "loss": 9.0 - i, "tokens_per_s": s, "tokens_per_s_per_device": s}
        for i, s in enumerate(speeds)
    ]


def test_warm_up_is_left_out_and_drift_is_seen():
    found = throughput.summarize(lines(1.0, 10.0, 100.0, 100.0, 110.0, 110.0), warm_up=10)
    assert found["tokens_per_s"] == 105.0
    assert found["drift"] == pytest.approx(1.1)
    assert found["loss"] == 4.0
    too_short = throughput.summarize(lines(1.0, 10.0, 100.0, 100.0), warm_up=5)
    assert too_short["tokens_per_s"] == 100.0 and too_short["drift"] == 10.0


def test_rows_get_medians_spread_and_ratios_by_round():
    rows = [
        {"label": "a", "devices": 1, "runs": []},
        {"label": "b", "devices": 2, "runs": [], "against": "a", "compared": "tokens_per_s"},
    ]
    # The machine is slower in the second round: ratios are not those of the medians' rounds.
    for speed in (100.0, 50.0, 102.0):
        throughput.add(rows[0], {"metrics": lines(speed, speed), "first_line_s": 3.0}, 0)
        throughput.add(rows[1], {"metrics": lines(1.5 * speed), "first_line_s": None}, 0)
    throughput.compare(rows)
    assert rows[0]["median"]["tokens_per_s"] == 100.0
    assert rows[0]["median"]["first_line_s"] == 3.0
    assert rows[0]["spread"] == [50.0, 102.0]
    assert rows[1]["ratio"] == {"median": 1.5, "rounds": [1.5, 1.5, 1.5]}
    assert "ratio" not in rows[0]


@pytest.mark.ci
def test_a_chapter_and_the_bare_loop_side_by_side(tmp_path, monkeypatch, capsys):
    """The whole way, with a small text: two scripts, one round, one file that report.py reads."""
    text = tmp_path / "text.txt"
    text.write_text("def one():\n    return 1\n" * 3000)
    small = "-m gpt2-tiny -s 32 -b 2 --global-batch-size 2 --log-freq 1"
    rows = [
        {"label": "baseline on 1", "chapter": throughput.BASELINE, "devices": 1, "args": small},
        {"label": "chapter on 1", "chapter": "01-single-gpu", "devices": 1,
            "args": f"{small} -d {text}"},
    ]  # fmt: skip
    rows = throughput.against("baseline on 1", rows)
    monkeypatch.setitem(throughput.SETS, "ddp-cpu", (rows, 4, 2))
    output = tmp_path / "out.json"
    words = ["throughput.py", "ddp-cpu", "--output", str(output), "--runs", "1"]
    monkeypatch.setattr(sys, "argv", words)
    throughput.main()
    assert "chapter on 1" in capsys.readouterr().out
    written = json.loads(output.read_text())
    assert {"command", "commit", "date", "torch", "transformers"} <= set(written["machine"])
    found = {row["label"]: row for row in written["results"]["rows"]}
    for label in ("baseline on 1", "chapter on 1"):
        row = found[label]
        assert len(row["runs"]) == len(row["ratio"]["rounds"]) == 1
        assert row["median"]["time/total"] > 0 and row["median"]["peak_mem_gib"] > 0
        assert row["median"]["first_line_s"] > 0.1
    assert found["baseline on 1"]["ratio"]["median"] == 1.0
    table = report.TABLES["nodes_gpu"].lines(lambda source: written["results"])
    assert len(table) == 4
    assert all(row.count("|") == table[0].count("|") for row in table)


# --- planted bugs ---


def red(test, *arguments) -> bool:
    try:
        test(*arguments)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("/ self.accumulation", "/ 1"), ("self.optimizer.zero_grad(set_to_none=True)", "pass")],
)
def test_planted_bug_in_the_loop(right, wrong, tmp_path, monkeypatch):
    text = (ROOT / throughput.BASELINE).read_text()
    assert text.count(right) == 1
    namespace = {"__name__": "planted"}
    exec(compile(text.replace(right, wrong), "baseline.py", "exec"), namespace)
    namespace["BATCHES"] = 2  # what the test sets
    monkeypatch.setattr(baseline.Loop, "step", namespace["Loop"].step)
    assert red(test_accumulation_is_the_same_step, monkeypatch)


def test_planted_warm_up_that_counts(monkeypatch):
    real = throughput.summarize
    monkeypatch.setattr(throughput, "summarize", lambda metrics, warm_up: real(metrics, 0))
    assert red(test_warm_up_is_left_out_and_drift_is_seen)


def test_planted_ratio_of_medians(monkeypatch):
    def of_first(rows: list[dict]) -> None:
        rows[1]["ratio"] = {"median": rows[1]["runs"][0]["tokens_per_s"] / 50.0, "rounds": []}

    monkeypatch.setattr(throughput, "compare", of_first)
    assert red(test_rows_get_medians_spread_and_ratios_by_round)


# --- chapter 1 beside libraries ---


def first_losses(steps: int) -> list[float]:
    """Return the losses of the first micro-batches of the loop that libraries.py writes by hand."""
    losses = []

    def note(module: nn.Module, _: object, output: object) -> None:
        if hasattr(output, "loss"):
            losses.append(output.loss.item())

    handle = nn.modules.module.register_module_forward_hook(note)
    libraries.by_hand(steps, "")
    handle.remove()
    return losses


def test_libraries_train_the_same_as_the_chapter():
    """All rows of the result begin with one loss. With the same Python, it is the loop's here.

    Another Python has another standard library, which is the corpus.
    """
    path = ROOT / report.result("libraries_cpu")
    rows = report.content(path)["rows"]
    assert [*rows] == [*libraries.WAYS]
    first = [row["first_loss"] for row in rows.values()]
    assert first == pytest.approx([first[0]] * 4, abs=1e-4)
    recorded = json.loads(path.read_text())["machine"]["python"]
    near = {"abs": 1e-4} if recorded == platform.python_version() else {"rel": 0.01}
    assert sum(first_losses(1)) / libraries.ACCUMULATION == pytest.approx(first[0], **near)

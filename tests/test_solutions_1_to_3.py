"""The solutions of chapters 1 to 3: every exercise has one, and what it says is computed or run.

A rule takes the text of a chapter's page and that of its solutions and returns its complaints;
below, planted rot turns each of them red. Each number in a solution is one of its CLAIMS.
"""

import contextlib
import datetime
import functools
import io
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import report
import torch
from helpers import (
    CHAPTERS,
    ROOT,
    apply,
    blocks,
    newest_step,
    prose,
    random_texts,
    read_metrics,
    run_ranks,
    speak_at_once,
    tensors,
)
from runner import Ranks, Series, after_steps, finish, start
from step_memory import saved_bytes
from test_allreduce_by_hand import SCRIPT, check_table
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM

from common import models
from common.data import dataset
from common.timers import flops_per_token

SOLVED = CHAPTERS[:3]
ALONE, DDP, NODES = SOLVED
DIFFS = {
    (ALONE, 2): "2-forgotten-division.diff",
    (DDP, 2): "2-wrong-model.diff",
    (NODES, 2): "2-leaves-alone.diff",
}


def solutions_of(chapter: str) -> Path:
    return ROOT / chapter / "solutions/README.md"


def flat(text: str) -> str:
    return " ".join(text.split())


def exercise_page(chapter: str) -> str:
    """Return the exercises of a lesson, followed by those of its reference page."""
    lesson = (ROOT / chapter / "README.md").read_text()
    section = lesson.split("## Check yourself\n")[1].split("\n## ")[0] + "\n"
    reference = (ROOT / chapter / "reference.md").read_text()
    for more in reference.split("## More exercises\n")[1:]:
        section += more.split("\n## ")[0] + "\n"
    return section


def exercises(section: str) -> dict[tuple[int, str], str]:
    """Return the text of each exercise in a section, by number and title."""
    found = re.findall(r"^(\d+)\. \*\*(.+?)\.\*\* ((?:.*\n)*?)(?=^\d+\. |^\S|\Z)", section, re.M)
    return {(int(number), title): flat(text) for number, title, text in found}


def sections(solutions: str) -> dict[tuple[int, str], str]:
    found = re.findall(r"^## (\d+)\. (.+)\n((?:.*\n)*?)(?=^## |\Z)", solutions, re.M)
    return {(int(number), title): text for number, title, text in found}


def section(chapter: str, number: int) -> str:
    texts = sections(solutions_of(chapter).read_text())
    return next(text for (found, _), text in texts.items() if found == number)


def patched(chapter: str, number: int, folder: Path) -> Path:
    """Return the folder of a copy of the chapter's script to which a solution's diff is applied."""
    (folder / chapter).mkdir(parents=True)
    script = folder / chapter / "train_llm.py"
    script.write_text((ROOT / chapter / "train_llm.py").read_text())
    done = apply(ROOT / chapter / "solutions" / DIFFS[chapter, number], folder)
    assert done.returncode == 0 and "Applied patch" in done.stderr, done.stderr
    return script.parent


# --- the rules ---


def unsolved(page: str, solutions: str) -> list[str]:
    """The same numbers and titles in the same order, and nothing between them that is no section"""
    asked = [f"{number}. {title}" for number, title in exercises(page)]
    solved = re.findall(r"^##+ (.+)$", solutions, re.M)
    return [] if asked and asked == solved else [f"{solved} for {asked}"]


def checks_left_out(page: str, solutions: str) -> list[str]:
    """An exercise's command of a check stands in its solution."""
    solved = {key: flat(text) for key, text in sections(solutions).items()}
    return [
        f"{key} lacks {command}"
        for key, text in exercises(page).items()
        for command in re.findall(r"Check:? `(.+?)`", text)
        if f"`{command}`" not in solved.get(key, "")
    ]


RULES = (unsolved, checks_left_out)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("chapter", SOLVED)
def test_solutions(chapter, rule):
    assert rule(exercise_page(chapter), solutions_of(chapter).read_text()) == []


@pytest.mark.parametrize("chapter", SOLVED)
def test_checks_choose_tests(chapter):
    """test_pages.py looks at whether these are there."""
    assert "`python -m pytest tests/" in flat(solutions_of(chapter).read_text())


@pytest.mark.parametrize(
    ("rule", "pattern", "new", "complaint"),
    [
        (unsolved, r"^## 3\..*", "## 3. A shorter ring", "A shorter ring"),
        (unsolved, r"^## 5\.(.*\n)*", "", "for ["),
        (unsolved, r"\Z", "\n## 6. One more\n", "One more"),
        (checks_left_out, "-k planted", "-k bugs", "lacks python -m pytest tests/test_parity.py"),
    ],
)
def test_rule_finds(rule, pattern, new, complaint):
    page, solutions = exercise_page(DDP), solutions_of(DDP).read_text()
    rotten = re.sub(pattern, new, solutions, count=1, flags=re.M)
    assert rotten != solutions, "nothing to replace"
    assert rule(page, solutions) == []
    assert complaint in "\n".join(rule(page, rotten))


# --- the diffs ---


def test_every_diff_is_known():
    for chapter in SOLVED:
        files = {path.name for path in (ROOT / chapter / "solutions").glob("*.diff")}
        assert files == {name for (of, _), name in DIFFS.items() if of == chapter}


def assert_clean_and_taken_back(diff: Path, folder: Path, script: str) -> None:
    """The patched script in this folder passes ruff; the reversed diff makes it the real one."""
    for command in (["check"], ["format", "--check"]):
        options = ["--config", ROOT / "pyproject.toml", folder / script]
        subprocess.run([sys.executable, "-m", "ruff", *command, *options], check=True)
    subprocess.run(["git", "apply", "--reverse", str(diff)], cwd=folder, check=True)
    assert (folder / script).read_text() == (ROOT / script).read_text()


@pytest.mark.parametrize(("chapter", "number"), DIFFS)
def test_diff_applies_and_is_shown(chapter, number, tmp_path):
    diff = (ROOT / chapter / "solutions" / DIFFS[chapter, number]).read_text()
    assert [block for _, block in blocks(section(chapter, number), "diff")] == [diff]
    patched(chapter, number, tmp_path)
    assert_clean_and_taken_back(
        ROOT / chapter / "solutions" / DIFFS[chapter, number], tmp_path, f"{chapter}/train_llm.py"
    )


# --- the numbers ---

LOSSES = {
    ALONE: "recorded/make-train.metrics.jsonl",
    DDP: "recorded/launch.metrics.jsonl",
    NODES: "recorded/job.metrics.jsonl",
}
DAY_S = 86_400


def recorded(chapter: str, key: str, file: str | None = None) -> list[float]:
    lines = report.content(ROOT / chapter / (file or LOSSES[chapter]))
    return [line[key] for line in lines if key in line]


def results(name: str) -> dict:
    return report.content(ROOT / report.result(name))


def differences(chapter: str, file: str | None = None) -> list[float]:
    """Return by how much each recorded loss is another than chapter 1's, relative."""
    pairs = zip(recorded(ALONE, "loss"), recorded(chapter, "loss", file), strict=True)
    return [abs(other / alone - 1) for alone, other in pairs]


def tiny(model: str = "gpt2-tiny", **settings: object) -> torch.nn.Module:
    """Return a preset's model, without memory for its weights."""
    config = models.load_config(model)
    for name, value in settings.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def accumulation() -> list[str]:
    config = models.load_config("gpt2-tiny")
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=models.causal_attention(config)
    )
    kept = [saved_bytes(model, torch.randint(config.vocab_size, (n, 128))) / 1e6 for n in (2, 24)]
    assert kept[1] / kept[0] == pytest.approx(12, rel=0.01)
    state = 16 * size(model) / 1e6
    return [
        f"are {state:.1f} MB of tensors",
        f"{kept[0]:.1f} MB with `-b 2` and {kept[1]:.1f} MB with `-b 24`, 12 times",
        f"every operation {24 // 2} times, on 2 sequences",
    ]


def division() -> list[str]:
    norms = recorded(ALONE, "grad_norm")
    assert max(norms) < 1 < 3 * min(norms)
    return [
        f"ln 4096 = {math.log(4096):.2f}",
        f"largest logged norm is {max(norms):.2f} and the smallest is {min(norms):.2f}",
        "within 1e-5",
    ]


def kill() -> list[str]:
    return ["repeats steps 51 to 73", f"resumed after step 50 of {recorded(ALONE, 'step')[-1]}"]


def last_digit() -> list[str]:
    changes = results("determinism_cpu")["changes"]
    assert changes["nothing"] == {"first_step": None, "largest": 0.0}
    one = changes["one thread"]
    return [
        f"differ at step {one['first_step']}. ",
        f"The relative difference is at most {one['largest']:.1e},",
        f"different seed causes a relative difference of {changes['seed']['largest']:.1e}",
    ]


def share_of_logits(model: torch.nn.Module, seq_length: int) -> float:
    config = model.config
    logits = 6 * config.vocab_size * config.hidden_size
    return logits / flops_per_token(model, config, seq_length)


def vocabulary() -> list[str]:
    model, small, large = tiny(), tiny(vocab_size=1024), tiny("gpt2")
    logits = model.config.vocab_size * model.config.hidden_size
    blocks = size(model.transformer.h)
    before, after = (flops_per_token(each, each.config, 128) for each in (model, small))
    return [
        f"{logits:,} of the model's {logits + blocks:,} weights, or "
        f"{100 * logits / (logits + blocks):.0f}%",
        f"share of the FLOPs is {100 * share_of_logits(model, 128):.0f}%",
        f"prints {share_of_logits(model, 128):.3f}",
        f"share to {100 * share_of_logits(small, 128):.0f}%, and the FLOPs per step by "
        f"{100 * (1 - after / before):.0f}%",
        f"sequences of 1024 tokens, it is {100 * share_of_logits(large, 1024):.0f}%",
        "vocabulary of 1024",
    ]


def same_training() -> list[str]:
    found = differences(DDP)
    rows = {row["label"]: row["runs"] for row in results("ddp_cpu")["rows"]}
    last = {run["loss"] for name in (ALONE, DDP) for run in rows[f"{name} on 1"]}
    assert len(last) == 1 and {len(rows[f"{name} on 1"]) for name in (ALONE, DDP)} == {5}
    return [
        f"Of the {len(found)} losses",
        f"{sum(each == 0 for each in found)} are equal to the last digit",
        f"largest relative difference is {max(found):.1e}",
        f"{results('ddp_cpu')['steps']} steps",
    ]


def ring() -> list[str]:
    text = (ROOT / DDP / "recorded/allreduce_by_hand.txt").read_text()
    shown = int(re.search(r"S = ([\d,]+) bytes", text)[1].replace(",", ""))
    assert shown == 4 * size(tiny())
    server, each = [
        int(line.split()[1].replace(",", "")) / shown for line in text.splitlines()[3:5]
    ]
    return [
        f"S = {shown:,} bytes",
        f"7 S = {7 * shown:,} bytes",
        f"2 x 7/8 S = {2 * 7 * shown // 8:,} bytes",
        f"from {server:.2f} S to {7:.2f} S",
        f"from {each:.2f} S to {2 * 7 / 8:.2f} S",
    ]


def arithmetic(devices: int) -> str:
    """Return how the default step is shared out, as the log says it."""
    args = type("Args", (), {"global_batch_size": 24, "batch_size": 8})
    micro_batch_size, accumulation = dataset.split_batch(args, devices, 1000)
    return dataset.describe_batch(micro_batch_size, devices, accumulation, 128).split(" = ")[0]


def back_and_forth() -> list[str]:
    places = (
        ("This chapter, 2 processes", 2),
        ("Chapter 1, 1 process", 1),
        ("This chapter, 4 processes", 4),
    )
    return [f"{place}: `{arithmetic(devices)}`" for place, devices in places]


def launchers() -> list[str]:
    found = differences(NODES)
    return [f"none of the {len(found)} losses differs", f"more than {max(found):.1e} of its value"]


def pauses() -> list[str]:
    shares = [
        backward / total / 2  # two micro-batches
        for backward, total in zip(
            recorded(DDP, "time/backward"), recorded(DDP, "time/total"), strict=True
        )
    ]
    assert arithmetic(2) in (ROOT / DDP / "recorded/launch.txt").read_text()
    return [f"takes {100 * statistics.median(shares):.0f}% of a step", "300 ms per step", "300 ms"]


def recovery(kind: str) -> tuple[float, set[int], set[int]]:
    """Return the seconds, how many steps were lost, and how often Slurm has restarted the job."""
    found = results("recovery_cpu")
    runs = found["runs"][kind]
    lost, restarts = ({run[key] for run in runs} for key in ("steps_lost", "restarts"))
    return found["seconds"][kind], lost, restarts


def kill_9_twice() -> list[str]:
    worker, torchrun = recovery("worker"), recovery("torchrun")
    assert worker[1:] == ({13}, {0}) and torchrun[1:] == ({13}, {1})
    found = results("recovery_cpu")
    return [
        f"killed {found['hit_at'] % found['ckpt_freq']} steps after",
        "lost 13 steps each",
        f"for {worker[0]} s after the loss of a worker, and for {torchrun[0]} s",
    ]


def cable() -> list[str]:
    second, gone = recovery("cable_second"), recovery("cable")
    assert second[1:] == ({0}, {0}) and gone[1:] == ({13}, {1})
    return [
        f"silent for {second[0]} s",
        "about 100 ms",
        f"took {gone[0]} s here, with 13 steps lost",
        f"from `{arithmetic(4)}` to `{arithmetic(2)}`",
    ]


def room() -> list[str]:
    assert recovery("preemption")[1:] == ({0}, {1})
    stopped = re.search(
        r"Told to stop; saved after step (\d+)", (ROOT / NODES / "recorded/job.txt").read_text()
    )
    assert int(stopped[1]) % 10 == 0
    seconds = 10 * statistics.median(recorded(NODES, "time/total")) / 1000
    assert -(-103 // 10) * 10 == 110
    return [f"Ten steps took {seconds:.1f} s", "step 103", "step 110"]


def two_one_two() -> list[str]:
    text = (ROOT / NODES / "recorded/elastic.txt").read_text()
    resumed = [int(step) for step in re.findall(r"resumed after step (\d+)", text)]
    (stopped,) = map(int, re.findall(r"Told to stop; saved after step (\d+)", text))
    assert resumed[1:] == [stopped]
    killed = max(map(int, re.findall(r"step (\d+)/", text.split("resumed after")[0])))
    again = killed - resumed[0]
    file = "recorded/elastic.metrics.jsonl"
    return [
        f"killed after step {killed}, and the first node resumes after step {resumed[0]}",
        f"{again} steps are trained twice, with the same {24 * again} samples",
        f"save after step {stopped} and resume after step {stopped}",
        f"more than {max(differences(NODES, file)):.1e} of its value",
    ]


def saves(chapter: str) -> tuple[list[float], list[float]]:
    """Return the ms in the log but not in time/total: after a step that was saved, and others.

    Less those in which the run was evaluated or started.
    """
    text = (ROOT / chapter / LOSSES[chapter].replace(".metrics.jsonl", ".txt")).read_text()
    stamps = re.findall(r"^\[(\S+ \S+)\] .*?step (\d+)/", text, re.M)
    times = [(datetime.datetime.fromisoformat(t.replace(",", ".")), int(n)) for t, n in stamps]
    starts = [int(step) for step in re.findall(r"resumed after step (\d+)", text)]
    total = dict(zip(recorded(chapter, "step"), recorded(chapter, "time/total"), strict=True))
    evaluated = recorded(chapter, "eval_loss")
    after, others = [], []
    for (then, step), (now, following) in itertools.pairwise(times):
        if step in starts or following % 200 == 0 or following == times[-1][1]:
            continue
        ms = (now - then).total_seconds() * 1000 - (following - step) * total[following]
        (others if step % 50 else after).append(ms)
    assert len(evaluated) == 3
    return after, others


def how_often() -> list[str]:
    after, others = saves(ALONE)
    assert max(map(abs, others)) < 5 < min(after)
    save = statistics.median(after) / 1000
    step = statistics.median(recorded(ALONE, "time/total")) / 1000
    best = math.sqrt(2 * round(save, 3) * DAY_S)
    last = recorded(ALONE, "step")[-1]
    assert last < best / step
    return [
        f"{1000 * save:.0f} ms more, the median of {len(after)} saves",
        f"one failure per day ({DAY_S:,} s) and {save:.3f} s per save",
        f"T = √(2 x {save:.3f} x {DAY_S:,}) = {best:.0f} s",
        f"At {1000 * step:.0f} ms per step, this means one checkpoint",
        f"every {best / step:.0f} steps",
        f"the {last} steps of the run",
        f"costs {100 * save / (50 * step):.1f}% of the time",
    ]


CLAIMS: dict[tuple[str, int], Callable[[], list[str]]] = {
    (ALONE, 1): accumulation,
    (ALONE, 2): division,
    (ALONE, 3): kill,
    (ALONE, 4): last_digit,
    (ALONE, 5): vocabulary,
    (DDP, 1): same_training,
    (DDP, 3): ring,
    (DDP, 5): back_and_forth,
    (NODES, 1): pauses,
    (NODES, 3): launchers,
    (NODES, 4): room,
    (NODES, 5): how_often,
    (NODES, 6): kill_9_twice,
    (NODES, 7): cable,
    (NODES, 8): two_one_two,
}


def numbers_nobody_claims(text: str, claims: list[str]) -> list[str]:
    """Numbers of three digits, or with a point or a comma, outside code and what is claimed."""
    text = flat(prose(text))
    for claim in claims:
        text = text.replace(claim, "")
    text = re.sub(r"`[^`]+`|\]\([^)]+\)|GPT-2 124M|1e-\d|ln 4096|of 4096", "", text)
    return re.findall(r"\d[\d,]*\.\d+|\d[\d,]*\d{2}", text)


def assert_claimed(chapter: str, number: int, claim: Callable[[], list[str]] | None) -> None:
    """All that is claimed stands in the solution, and no number besides."""
    text, claims = section(chapter, number), claim() if claim else []
    missing = [claim for claim in claims if claim not in flat(text)]
    assert missing == [], number
    assert numbers_nobody_claims(text, claims) == [], number


@pytest.mark.parametrize("chapter", SOLVED)
def test_numbers(chapter):
    for number, _ in sections(solutions_of(chapter).read_text()):
        assert_claimed(chapter, number, CLAIMS.get((chapter, number)))


def test_a_wrong_number_is_noticed():
    text, claims = section(NODES, 6), kill_9_twice()
    assert numbers_nobody_claims(text, claims) == []
    right = recovery("torchrun")[0]
    wrong = f"{right + 1:.1f}"
    assert wrong in numbers_nobody_claims(text.replace(f"{right} s", f"{wrong} s"), claims)


def test_the_five_lines_print_what_they_promise():
    ((_, code),) = blocks(section(ALONE, 5), "python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert f"prints {float(printed.getvalue()):.3f}" in flat(section(ALONE, 5))


# --- what is run: chapter 1 ---


def column(metrics: list[dict], key: str) -> list[float]:
    return [line[key] for line in metrics]


def test_forgotten_division(train, tmp_path):
    """As the exercise says, but for 20 steps and with a text and sequences that are shorter."""
    (tmp_path / "corpus.json").write_text(json.dumps(random_texts(28)))
    wrong = patched(ALONE, 2, tmp_path / "copy")
    flags = ("--global-batch-size", 8, "-b", 2, "--log-freq", 1, "--max-steps", 20)
    flags += ("-d", tmp_path / "corpus.json", "-s", 32)
    runs = {
        (clip, bug): train(
            *(*flags, "--max-grad-norm", clip),
            name=f"{clip}-{bool(bug)}",
            chapter=bug or ALONE,
        )
        for clip in ("1", "inf")
        for bug in (None, wrong)
    }
    for key in ("loss", "grad_norm"):
        first = [runs["1", bug][0][key] for bug in (None, wrong)]
        assert first[1] == pytest.approx(4 * first[0], rel=1e-6)
    assert "a loss of about 34" in flat(section(ALONE, 2))
    assert 4 * math.log(4096) < runs["1", wrong][0]["loss"] < 35.5
    norms = [column(runs["1", bug], "grad_norm") for bug in (None, wrong)]
    assert min(norms[1]) > 1 and min(norms[0]) < 1 < max(norms[0])
    for clip, rel in (("1", 5e-3), ("inf", 1e-5)):
        losses = [column(runs[clip, bug], "loss") for bug in (None, wrong)]
        assert [loss / 4 for loss in losses[1]] == pytest.approx(losses[0], rel=rel)


def test_steps_trained_twice(tmp_path, corpus):
    """Killed after 13 steps with a checkpoint every 5: the steps 11 to 13, as state.json says."""
    samples = tmp_path / "samples"
    flags = ["-d", corpus, "-s", 32, "--global-batch-size", 6, "-b", 6, "--max-steps", 16]
    flags += ["--log-freq", 1, "--ckpt-freq", 5, "--save-dir", tmp_path, "-e", "killed"]
    killed = start(flags, samples_file=str(samples), kill_after_steps=13)
    assert finish(killed) == -signal.SIGKILL
    before = read_metrics(tmp_path / "killed")
    saved = newest_step(tmp_path / "killed")
    assert saved == 10 and len(before) in (12, 13)
    assert finish(start(flags, samples_file=str(samples), stderr_file=f"{tmp_path}/log")) == 0
    assert f"resumed after step {saved} of 16" in (tmp_path / "log").read_text()
    taken = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(taken) == 13 + 16 - saved and taken[saved:13] == taken[13 : 13 + 13 - saved]
    after = read_metrics(tmp_path / "killed")
    assert column(after, "step") == list(range(1, 17))
    assert column(after, "loss")[: len(before)] == column(before, "loss")


# --- what is run: 2 ranks, chapters 2 and 3 ---

STEPS, STOP_IN, LOG_EVERY, PAUSE_S = 20, 13, 10, 6  # seconds: far above what other tests cost


def stop_for_a_while() -> None:
    """Stop this process as kill -STOP does; another one lets it go on."""
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


@contextlib.contextmanager
def pause_between_steps() -> Iterator[None]:
    handle = after_steps(STOP_IN, stop_for_a_while)
    yield
    handle.remove()


@contextlib.contextmanager
def pause_in_backward() -> Iterator[None]:
    backward, calls = torch.Tensor.backward, 0

    def stopping(self: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == STOP_IN:
            stop_for_a_while()
        backward(self)

    torch.Tensor.backward = stopping
    yield
    torch.Tensor.backward = backward


@contextlib.contextmanager
def note_weights(path: Path) -> Iterator[None]:
    """Write the weights of this rank after the last step."""
    done = 0

    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal done
        done += 1
        if done == STEPS:
            torch.save([p.detach() for p in optimizer.param_groups[0]["params"]], path)

    handle = register_optimizer_step_post_hook(hook)
    yield
    handle.remove()


@pytest.fixture(scope="module")
def runs(make_folder) -> Path:
    """The folder of the runs of chapter 2."""
    folder = make_folder("runs")
    weights = [functools.partial(note_weights, folder / f"weights-{rank}") for rank in range(2)]
    chosen = {
        "right": (DDP, 1, [contextlib.nullcontext] * 2),
        "wrong": (patched(DDP, 2, folder / "copy"), 1, weights),
    }
    return train_all(folder, chosen)


@pytest.fixture(scope="module")
def pauses(make_folder) -> Path:
    """The folder of the runs of chapter 3 in which a rank pauses."""
    nothing = contextlib.nullcontext
    chosen = {
        "pause-0": (NODES, LOG_EVERY, [pause_between_steps, nothing]),
        "pause-1": (NODES, LOG_EVERY, [nothing, pause_between_steps]),
        "in-backward": (NODES, LOG_EVERY, [nothing, pause_in_backward]),
    }
    return train_all(make_folder("pauses"), chosen)


def train_all(folder: Path, chosen: dict[str, tuple]) -> Path:
    """Do runs on 2 ranks in one start.

    chosen: by name, chapter, steps between log lines, and in what each rank runs.
    """
    (folder / "corpus.json").write_text(json.dumps(random_texts(28)))
    options = {
        name: {
            "args": [*flags(folder, name), "--log-freq", log_freq],
            "chapter": str(chapter),
            "within": within,
        }
        for name, (chapter, log_freq, within) in chosen.items()
    }
    series = Series(2, options, folder / "series")
    for name in chosen:
        series.assert_ended(name)
    return folder


def flags(folder: Path, name: str) -> list[object]:
    return [
        *("-d", folder / "corpus.json", "-s", 32, "-b", 12, "--max-steps", STEPS),
        *("--warmup-steps", 5, "--ckpt-freq", STEPS, "--save-dir", folder, "-e", name),
    ]


def test_wrong_model(runs):
    """The first loss is right, later ones are off; the checkpoint is of no rank's model."""
    right, wrong = (read_metrics(runs / name) for name in ("right", "wrong"))
    off = [abs(two["loss"] / one["loss"] - 1) for one, two in zip(right, wrong, strict=True)]
    assert off[0] < 1e-6 and min(off[1:]) > 1e-4 and 3e-3 < max(off) < 5e-2
    assert wrong[-1]["loss"] < wrong[0]["loss"] - 1, "the losses fall"
    assert wrong[0]["grad_norm"] > right[0]["grad_norm"] * 1.01
    ranks = [torch.load(runs / f"weights-{rank}") for rank in range(2)]
    saved = tensors(runs / "wrong")["model"]
    names = [name for name, _ in tiny().named_parameters()]
    of_rank = [
        {rank for rank in range(2) if torch.equal(saved[name], ranks[rank][number])}
        for number, name in enumerate(names)
    ]
    assert {0} in of_rank and {1} in of_rank


@pytest.mark.ci
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_pauses_is_named(pauses, rank):
    line = read_metrics(pauses / f"pause-{rank}")[-1]
    assert line["slowest_rank"] == rank
    per_step = 1000 * PAUSE_S / LOG_EVERY
    assert 0.9 * per_step < line["time/wait_max"] < 2 * per_step
    assert (line["time/wait"] < per_step / 2) == (rank == 0), "rank 0's own"


@pytest.mark.ci
def test_pause_in_the_last_backward_pass_shows_as_backward(pauses):
    line = read_metrics(pauses / "in-backward")[-1]
    per_step = 1000 * PAUSE_S / LOG_EVERY
    assert line["time/wait_max"] < per_step / 2 and line["time/backward"] > 0.9 * per_step


def test_rank_that_leaves_alone(tmp_path):
    """Both wait until the time of one is over: nothing is saved, and both fail."""
    (tmp_path / "corpus.json").write_text(json.dumps(random_texts(28)))
    said = [tmp_path / f"stderr-{rank}" for rank in range(2)]
    ranks = Ranks(
        2,
        [*flags(tmp_path, "left"), "--dist-timeout", 8],
        chapter=str(patched(NODES, 2, tmp_path / "copy")),
        plant=speak_at_once,
        stderr_file=[str(path) for path in said],
        signals_after_steps=[None, (3, [int(signal.SIGUSR1)])],
    )
    assert ranks.finish() == [1, 1]
    words = "The other ranks are gone or out of reach (Timed out"
    assert f"`{words}`" in flat(section(NODES, 2))
    texts = [path.read_text() for path in said]
    assert any(words in text for text in texts)
    assert all(re.search(r"out of reach \((Timed out|Connection)", text) for text in texts)
    assert not (tmp_path / "left/state.json").exists() and not (tmp_path / "left/requeue").exists()


# --- what is run: more ranks ---


@contextlib.contextmanager
def placed_by_mpirun() -> Iterator[None]:
    """Tell this rank its place as mpirun does, and no more as torchrun does."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    theirs = [f"OMPI_COMM_WORLD_{name.removeprefix('WORLD_')}" for name in ours]
    places = [os.environ.pop(name) for name in ours]
    os.environ |= dict(zip(theirs, places, strict=True))
    yield
    for name in theirs:
        del os.environ[name]


@pytest.mark.ci
def test_launchers_agree_to_the_last_digit(tmp_path):
    (tmp_path / "corpus.json").write_text(json.dumps(random_texts(28)))
    chosen = {"torchrun": contextlib.nullcontext, "mpirun": placed_by_mpirun}
    series = Series(
        4,
        {
            name: {
                "args": [*flags(tmp_path, name), "--log-freq", 1],
                "chapter": NODES,
                "within": within,
            }
            for name, within in chosen.items()
        },
        tmp_path / "series",
    )
    for name in chosen:
        series.assert_ended(name)
    losses = [column(read_metrics(tmp_path / name), "loss") for name in chosen]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


@pytest.mark.ci
def test_ring_of_8(tmp_path):
    statuses, printed = run_ranks(SCRIPT, tmp_path, 8)
    assert statuses == [0] * 8
    check_table(printed, 8)
    for line in printed.splitlines()[1:4]:
        sent = int(line.split()[1].replace(",", ""))
        theory = 7 * 3_749_888 if "server" in line else 7 * 3_749_888 // 4
        assert 0 <= sent / theory - 1 < 1e-3, "the heads"

"""The solutions of chapters 4 and 5: every exercise has one, and what it says is computed or run.

The rules are those of test_solutions_1_to_3.py. Each number in a solution is one of its CLAIMS.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
import shutil
import signal
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import (
    ROOT,
    Ladder,
    Run,
    apply,
    blocks,
    hunks,
    newest_step,
    random_texts,
    selected_runs,
    speak_at_once,
    tensors,
)
from runner import Ranks, finish, load_script
from test_formats import check_rounding, check_step, recorded
from test_fsdp import OPTIONS, REDUCTIONS, calls, note_calls
from test_memory import Alive
from test_precision import (
    FEW,
    FP16,
    OVERFLOW,
    SMALL_SCALE,
    local,
    notes,
    overflow,
    overflow_without_agreement,
)
from test_solutions_1_to_3 import (
    assert_claimed,
    assert_clean_and_taken_back,
    checks_left_out,
    exercise_page,
    exercises,
    flat,
    numbers_nobody_claims,
    report,
    section,
    size,
    solutions_of,
    tiny,
    unsolved,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from common import models

SOLVED = SHARDED, MIXED = ("04-fsdp", "05-mixed-precision")
ALONE = "01-single-gpu"
# The script and the diff of each exercise that changes code.
DIFFS = {
    (SHARDED, 4): ("train_llm.py", "4-smaller-root.diff"),
    (SHARDED, 5): ("train_llm.py", "5-broken-tie.diff"),
    (MIXED, 2): ("stochastic_rounding.py", "2-random-rounding.diff"),
    (MIXED, 3): ("train_llm.py", "3-wrong-order.diff"),
}


def diff_of(chapter: str, number: int) -> Path:
    return ROOT / chapter / "solutions" / DIFFS[chapter, number][1]


def replacements(chapter: str, number: int) -> tuple[tuple[str, str], ...]:
    """Return the (right, wrong) texts of a diff, as a Run takes them."""
    found = []
    for hunk in hunks(diff_of(chapter, number).read_text()):
        before, after = (
            "".join(f"{line[1:]}\n" for line in hunk if line[0] in kept) for kept in (" -", " +")
        )
        found.append((before, after))
    return tuple(found)


# --- the rules ---


RULES = (unsolved, checks_left_out)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("chapter", SOLVED)
def test_solutions(chapter, rule):
    assert rule(exercise_page(chapter), solutions_of(chapter).read_text()) == []


@pytest.mark.parametrize(
    ("rule", "pattern", "new", "complaint"),
    [
        (unsolved, r"^## 3\..*", "## 3. The right order", "The right order"),
        (unsolved, r"^## 6\.(.*\n)*", "", "for ["),
        (checks_left_out, "-k skip", "-k hop", "lacks python -m pytest tests/test_precision.py"),
    ],
)
def test_rule_finds(rule, pattern, new, complaint):
    page, solutions = exercise_page(MIXED), solutions_of(MIXED).read_text()
    rotten = re.sub(pattern, new, solutions, count=1, flags=re.M)
    assert rotten != solutions, "nothing to replace"
    assert rule(page, solutions) == []
    assert complaint in "\n".join(rule(page, rotten))


@pytest.mark.parametrize("chapter", SOLVED)
def test_checks_choose_tests(chapter):
    assert flat(solutions_of(chapter).read_text()).count("`python -m pytest tests/") >= 4


# --- the diffs ---


def test_every_diff_is_known():
    for chapter in SOLVED:
        files = {path.name for path in (ROOT / chapter / "solutions").glob("*.diff")}
        assert files == {name for (of, _), (_, name) in DIFFS.items() if of == chapter}


@pytest.mark.parametrize(("chapter", "number"), DIFFS)
def test_diff_applies_and_is_shown(chapter, number, tmp_path):
    diff, name = diff_of(chapter, number), DIFFS[chapter, number][0]
    shown = [block for _, block in blocks(section(chapter, number), "diff")]
    assert shown == [diff.read_text()]
    script = tmp_path / chapter / name
    script.parent.mkdir()
    shutil.copy(ROOT / chapter / name, script)
    done = apply(diff, tmp_path)
    assert done.returncode == 0 and "Applied patch" in done.stderr, done.stderr
    # As the tests below apply it.
    text = (ROOT / chapter / name).read_text()
    for right, wrong in replacements(chapter, number):
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    assert script.read_text() == text
    assert_clean_and_taken_back(diff, tmp_path, f"{chapter}/{name}")


# --- the numbers ---

MEMORY = load_script(ROOT / SHARDED / "memory.py")
PEAK_MEMORY = load_script(ROOT / SHARDED / "peak_memory.py")
LARGE = ("llama-3.1-8b", 8192, 80)  # the example of the last exercise: model, tokens, GiB
FIRST_SCALE = 2**16  # of GradScaler


def losses(chapter: str, name: str) -> list[float]:
    return [line["loss"] for line in report.content(ROOT / chapter / f"recorded/{name}.jsonl")]


def farthest(chapter: str) -> tuple[list[float], list[float], float]:
    """Return chapter 1's recorded losses, a chapter's, and the largest difference, relative."""
    right, found = losses(ALONE, "make-train.metrics"), losses(chapter, "launch.metrics")
    return right, found, max(abs(y / x - 1) for x, y in zip(right, found, strict=True))


@contextlib.contextmanager
def one_of(ranks: int, rank: int = 0) -> Iterator[None]:
    """A process group in which this process is a rank and nobody answers."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model: torch.nn.Module, shape: tuple[int, ...], output_layer: bool = False) -> None:
    """Shard a model as the chapter does, its output layer by itself if wanted."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    blocks = models.find_layers(model)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    if output_layer:
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)


def bytes_by_rank(name: str, ranks: int) -> list[int]:
    """Return the bytes of weights that each rank holds."""
    found = []
    for rank in range(ranks):
        model = tiny(name)
        with one_of(ranks, rank):
            shard(model, (ranks,))
            found.append(sum(p.to_local().nbytes for p in model.parameters()))
    return found


def two_ranks() -> list[str]:
    right, found, most = farthest(SHARDED)
    shown = [f"{x:.4f}" == f"{y:.4f}" for x, y in zip(right, found, strict=True)]
    assert all(shown) and most < 5e-6
    assert "compile" in OPTIONS
    return [
        f"largest difference is {most:.1e}, relative to the loss",
        "within 1e-5",
    ]


def half_the_ranks() -> list[str]:
    held = {ranks: bytes_by_rank("gpt2", ranks) for ranks in (2, 3, 4)}
    model = tiny("gpt2")
    uneven = [(n, p) for n, p in model.named_parameters() if p.shape[0] % 3]
    ((name, positions),) = uneven
    assert name == "transformer.wpe.weight" and positions.shape == (1024, 768)
    assert {p.shape[0] for n, p in model.named_parameters() if n != name} == {
        *(50304, 768, 2304, 3072)
    }
    for ranks in (2, 4):
        (whole,) = set(held[ranks])
        measured = report.content(ROOT / report.result(f"sharding_{ranks}"))["FSDP"]
        states = {"weights": whole, "gradients": whole, "moments": 2 * whole}
        assert measured["bytes_by_rank"] == [states] * ranks
    extra = held[3][0] - 4 * size(model) // 3
    assert 4 * size(model) % 3 == 0 and held[3][0] == held[3][1]
    assert held[3][0] == 4 * PEAK_MEMORY.shard_numel([p.shape for p in model.parameters()], 3)
    return [
        f"{size(model):,} parameters of 4 bytes",
        f"{held[2][0]:,} bytes of weights on 2 ranks and {held[4][0]:,} bytes on 4 ranks",
        f"ranks 0 and 1 store {held[3][0]:,} bytes of weights, and rank 2 stores {held[3][2]:,}",
        "50,304, 768, 2,304 or 3,072 rows",
        "1,024 rows",
        "342, 342 and 340",
        f"row has 768 numbers, so this adds {extra:,} bytes to rank 0",
    ]


def peak_of_llama(output_layer: bool) -> tuple[int, int]:
    """Return how many parameters a sharded llama-tiny has, and the most bytes of a step.

    Of rank 0 of 2, with 8 sequences of 128 tokens; nothing is sent.
    """
    alive = Alive()
    with one_of(2), alive:
        config = models.load_config("llama-tiny")
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=models.causal_attention(config)
        )
        shard(model, (2,), output_layer)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros((8, 128), dtype=torch.int64)
        for _ in range(2):  # the first makes the moments
            alive.most = 0
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return len(list(model.parameters())), alive.most


def smaller_root() -> list[str]:
    (before, root), (after, own) = (peak_of_llama(output_layer) for output_layer in (False, True))
    gpt2 = tiny()
    block = 4 * size(models.find_layers(tiny("llama-tiny"))[0])
    assert before == after and root - own == block
    counts = [len(list(gpt2.parameters()))]
    with one_of(2):
        shard(gpt2, (2,), output_layer=True)
        counts.append(len(list(gpt2.parameters())))
    return [
        "8 sequences of 128 tokens",
        "(torch 2.13)",
        f"falls from {root:,} to {own:,} bytes",
        f"less than {math.ceil(100 * (root - own) / root)}%",
        f"difference of {root - own:,} bytes is the size of one layer",
        f"has {counts[0]} parameters before and {counts[1]} after",
        f"Llama has {after} parameters in both cases",
    ]


def broken_tie() -> list[str]:
    model = tiny()
    whole, embedding = 4 * size(model), model.lm_head.weight.nbytes
    assert tiny(tie_word_embeddings=False).lm_head.weight.nbytes == embedding
    count = len(list(model.parameters()))
    return [
        f"rank 0 has {count + 1} parameters and rank 1 has {count}",
        f"`rank 0 holds {(whole + embedding) // 2:,} of the weights' {whole + embedding:,} bytes`",
        f"the total is {embedding:,} bytes larger than it should be",
    ]


def two_by_two() -> list[str]:
    """Which rows each of four ranks holds."""
    first_rows = []
    for rank in range(4):
        model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
        halves = model.transformer.wte.weight.detach().clone().split(2048)
        with one_of(4, rank):
            shard(model, (2, 2))
            mine = model.transformer.wte.weight.to_local()
            (half,) = [i for i, rows in enumerate(halves) if torch.equal(mine, rows)]
            first_rows.append(2048 * half)
    assert len(halves) == 2 and first_rows == [0, 2048, 0, 2048]
    return [
        "Ranks 0 and 2 store equal rows",
        "ranks 0 and 2 store rows 0 to 2,047",
        "rows 2,048 to 4,095",
    ]


def your_model() -> list[str]:
    name, seq_length, memory = LARGE
    config, counted = models.load_config(name), {}
    options = MEMORY.Options(seq_length=seq_length)
    one = MEMORY.predict_all(config, options, counted)
    full = "Chapter 4 with --activation-checkpointing full"
    offload = f"{full} --cpu-offload"
    assert MEMORY.first_fit(one, memory, host=False) is None
    assert MEMORY.first_fit(one, memory) == offload

    def on(gpus: int, rung: str) -> dict:
        changes = {**MEMORY.SETUPS[rung], "gpus": gpus}
        return MEMORY.predict(config, dataclasses.replace(options, **changes), counted)

    before = list(MEMORY.SETUPS)[: list(MEMORY.SETUPS).index(full) + 1]
    two = {rung: on(2, rung) for rung in before if rung != "Chapter 1"}
    assert MEMORY.first_fit(two, memory) == full
    eight, mixed = on(8, full), on(8, full.replace("4", "5"))
    kept = [two[rung] for rung in before[3:]]
    assert [rung["peak_at"][0] for rung in kept] == ["head", "head", "backward"]
    assert eight["peak_at"][0] == "head"
    gib = [f"{rung['peak'] / MEMORY.GIB:.1f}" for rung in (*kept, one[offload], eight, mixed)]
    host = f"{one[offload]['host'] / MEMORY.GIB:.1f}"
    return [
        "shape of Llama 3.1 8B",
        f"of {memory} GiB",
        f"one sequence of {seq_length} tokens",
        f"{gib[0]} GiB without checkpointing, {gib[1]} GiB with `selective`, and {gib[2]} GiB with",
        f"{gib[3]} GiB of GPU memory and {host} GiB of host memory",
        f"`full` needs {gib[4]} GiB, and the peak is at the head",
        f"lowers the peak to {gib[5]} GiB",
    ]


def in_tf32(number: float) -> float:
    """Return the nearest number with 10 bits of mantissa and float32's exponent."""
    bits = torch.tensor(float(number)).view(torch.int32) + 2**12
    return (bits & ~(2**13 - 1)).view(torch.float32).item()


def which_bits() -> list[str]:
    rows = []
    for each in load_script(ROOT / MIXED / "formats.py").formats():
        held = [
            in_tf32(x)
            if each.name == "TF32"
            else torch.tensor(x).to(getattr(torch, each.name)).double().item()
            for x in (257.0, 0.1, 1e-6, 70000.0)
        ]
        rows.append(f"| {each.name} " + "".join(f"| `{x:.10g}` " for x in held) + "|")
    spacing = in_tf32(70000 + 64.0) - in_tf32(70000)
    assert torch.finfo(torch.float16).max == 65504 and spacing == 64
    assert 257 == 2**8 + 1 and torch.finfo(torch.bfloat16).eps == 2.0**-7
    return [
        "| format | 257 becomes | 0.1 becomes | 1e-6 becomes | 70000 becomes |",
        *rows,
        "can represent 0.1 or 1e-6 exactly",
        "257 needs nine bits",
        "they round it to 256",
        "70000 is out of range for float16 and the fp8 formats",
        "ends at 65,504",
        "spacing at this size is 64",
    ]


def at_random() -> list[str]:
    """A weight of a binade moves with the probability that a step is of its spacing."""
    lr, deviation, share = 3e-6, 0.02, 0.0
    for exponent in range(-60, 3):
        inside = [math.erf(2.0**e / deviation / 2**0.5) for e in (exponent, exponent + 1)]
        share += (inside[1] - inside[0]) * min(1, lr / 2.0 ** (exponent - 7))
    (line,) = [x for x in recorded("stochastic_rounding") if "(0, 0.02)" in x and "3e-06" in x]
    nearest, random = re.findall(r"[\d.]+%", line)
    assert 100 * share == pytest.approx(float(random[:-1]), abs=0.1)
    distance = 2.0**-6 * 2.0**-7
    return [
        f"changes {random} of GPT-2's weights with stochastic rounding, and {nearest} with",
        f"{distance:.1e} apart",
        f"A weight of {deviation} has",
        f"one in {distance / lr:.0f}",
        f"comes to {100 * share:.1f}%",
    ]


def first_finite() -> tuple[int, int, float]:
    """Return of the recorded run the first step that is taken, its scale, and its norm."""
    text = "\n".join(recorded("loss_scaling_run"))
    steps = re.findall(r"step (\d+)/30 .*?grad norm (\S+) \| loss scale ([\d,]+)", text)
    first = next(i for i, (_, norm, _) in enumerate(steps) if math.isfinite(float(norm)))
    return int(steps[first][0]), int(steps[first - 1][2].replace(",", "")), float(steps[first][1])


def wrong_order() -> list[str]:
    norm = first_finite()[2]
    left = 1 / FIRST_SCALE
    return [
        f"{FIRST_SCALE:,} times the true norm",
        f"begins at {norm}",
        f"expect about {round(norm * FIRST_SCALE, -4):,.0f}",
        f"1/65536 = {left:.1e}",
        f"{left / size(tiny()) ** 0.5:.1e} on average",
        "epsilon of 1e-8",
    ]


def own_mind() -> list[str]:
    """By which factor each rank sees a gradient: both were scaled, averaged, and are divided."""
    scales = (0.5, 1.0)
    larger, smaller = (statistics.mean(scales) / scale for scale in scales)
    return [f"{larger:.1f} times as large", f"{smaller:.2f} times the true ones"]


def in_16_bits() -> list[str]:
    rows = report.content(ROOT / report.result("reduction"))["rows"]
    (error,) = [
        row["ring, bfloat16"]
        for row in rows
        if row["ranks"] == 2 and row["gradients"] == "independent"
    ]
    return [f"has an error of {error:.1e}"]


def warmer() -> list[str]:
    step, scale, norm = first_finite()
    by_hand = [line.split() for line in recorded("loss_scaling")[1:25]]
    taken = next(row for row in by_hand if row[-1] == "taken")
    largest = float(taken[3].replace(",", ""))
    power = int(taken[2].removeprefix("2^"))
    assert 2 * largest > 65504
    return [
        "overflows at scales above 65,504 / L.",
        "65,504 / norm",
        f"was {largest:,.0f} at 2^{power}, so L is {largest / 2**power:.3f}",
        f"65,504 / L = {65504 / (largest / 2**power):,.0f}",
        f"between 2^{power} and 2^{power + 1}",
        f"norm of {norm} in step {step}",
        f"at a scale of {scale:,}, which is 2^{math.log2(scale):.0f}",
        f"below {65504 / scale:.2f}",
        f"65,504 / {norm} = {65504 / norm:,.0f} is safe",
    ]


CLAIMS: dict[tuple[str, int], Callable[[], list[str]]] = {
    (SHARDED, 1): two_ranks,
    (SHARDED, 2): half_the_ranks,
    (SHARDED, 4): smaller_root,
    (SHARDED, 5): broken_tie,
    (SHARDED, 7): two_by_two,
    (SHARDED, 8): your_model,
    (MIXED, 1): which_bits,
    (MIXED, 2): at_random,
    (MIXED, 3): wrong_order,
    (MIXED, 4): own_mind,
    (MIXED, 5): in_16_bits,
    (MIXED, 6): warmer,
}


@pytest.mark.parametrize(
    ("chapter", "number"),
    [(chapter, number) for chapter in SOLVED for number, _ in exercises(exercise_page(chapter))],
)
def test_numbers(chapter, number):
    if (chapter, number) == (MIXED, 1) and torch.__version__ < "2.13":
        pytest.skip("what becomes of 70000 in float8_e4m3fn is said of torch 2.13")
    assert_claimed(chapter, number, CLAIMS.get((chapter, number)))


def test_a_wrong_number_is_noticed():
    text, claims = section(MIXED, 6), warmer()
    assert numbers_nobody_claims(text, claims) == []
    norm = first_finite()[2]
    assert str(norm + 1) in numbers_nobody_claims(text.replace(str(norm), str(norm + 1)), claims)


# --- what is run: in this process ---


def load_solution(folder: Path, bug: tuple[str, str] = ("", "")):
    """Import stochastic_rounding.py with the five lines of the solution, and a bug in them."""
    text = (ROOT / MIXED / "stochastic_rounding.py").read_text()
    ((right, solution),) = replacements(MIXED, 2)
    assert bug[0] in solution
    path = folder / "stochastic_rounding.py"
    path.write_text(text.replace(right, solution.replace(*bug, 1) if bug[0] else solution))
    return load_script(path)


def test_five_lines_round_at_random(tmp_path):
    """As those of the script do; the share that a step changes is the recorded one."""
    script = load_solution(tmp_path)
    check_rounding(script)
    check_step(script)
    torch.manual_seed(0)
    share = script.share_changed(0.02 * torch.randn(2**20), script.AdamW, 3e-6)
    assert f"{100 * share:.0f}%" == "10%"


def test_five_lines_with_a_bug_are_noticed(tmp_path):
    with pytest.raises(AssertionError):
        check_rounding(load_solution(tmp_path, ("drawn < dropped", "drawn <= dropped")))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="said of torch 2.13")
def test_an_embedding_in_two_groups_is_refused():
    """By torch 2.13; one that does not would train two tensors, which the count shows."""
    with one_of(2):
        model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
        shard(model, (2,), output_layer=True)
        tokens = torch.zeros((1, 8), dtype=torch.int64)
        with pytest.raises(ValueError, match="shared with a parameter already managed by another"):
            model(input_ids=tokens)
    said = "is shared with a parameter already managed by another FSDP group"
    assert f"`{said}`" in flat(section(SHARDED, 4))


# --- what is run: on ranks ---


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    """All runs of one number of ranks in one start."""
    # The bounds of these tests are of these texts, in sequences of this length.
    ladder = Ladder(make_folder("ladder"), selected_runs(request), length=32)
    (ladder.folder / "corpus.json").write_text(json.dumps(random_texts(28)))
    return ladder


SIX = ("--max-steps", 6, "--eval-freq", 99, "--warmup-steps", 5)
LLAMA = (*SIX, "-m", "llama-tiny", "-b", 12)
ROOTS = [
    Run(SHARDED, 2, LLAMA, replaced, note_calls) for replaced in ((), replacements(SHARDED, 4))
]
THREE = Run(SHARDED, 2, (*SIX, "-b", 4), (), note_calls)
REDUCING = Run(SHARDED, 2, (*SIX, "-b", 4, "--reduce-every-backward"), (), note_calls)


@pytest.mark.ci
@pytest.mark.parametrize(("root", "own"), [ROOTS], ids=[""])
def test_a_smaller_root_trains_the_same(ladder, root, own):
    """With two more all-gathers and one more reduce-scatter in each step."""
    counts = [
        (calls(ladder, run)["foreach_all_gather"], calls(ladder, run)["foreach_reduce"])
        for run in (root, own)
    ]
    assert counts == [(5, 3), (7, 4)]
    found = [[line["loss"] for line in ladder.metrics(run.name)] for run in (root, own)]
    assert found[0] == pytest.approx(found[1], rel=1e-5) and len(found[0]) == 6
    text = flat(section(SHARDED, 4))
    assert "7 all-gathers instead of 5" in text and "4 reduce-scatters instead of 3" in text


@pytest.mark.parametrize(("once", "each"), [(THREE, REDUCING)], ids=[""])
def test_three_micro_batches(ladder, once, each):
    found = [calls(ladder, run) for run in (once, each)]
    assert [line["foreach_reduce"] for line in found] == [3, 9]
    assert [line["foreach_all_gather"] for line in found] == [15, 15]
    text = flat(section(SHARDED, 3))
    for words in ("5 all-gathers", "3 with", "3 reduce-scatters", "it needs 9", "15 all-gathers"):
        assert words in text
    assert len(REDUCTIONS) == 4, "the check of the exercise"


TIES = [Run(SHARDED, 1, (*SIX, "-b", 24), replaced) for replaced in ((), replacements(SHARDED, 5))]


@pytest.mark.ci
@pytest.mark.parametrize(("tied", "untied"), [TIES], ids=[""])
def test_a_broken_tie_on_one_rank_is_not_noticed(ladder, tied, untied):
    """The first loss is right, and then the output layer goes its own way."""
    found = [ladder.metrics(ladder.run(run)) for run in (tied, untied)]
    right, wrong = ([line["loss"] for line in lines] for lines in found)
    assert right[0] == wrong[0]
    assert min(abs(y / x - 1) for x, y in zip(right[1:], wrong[1:], strict=True)) > 3e-4
    assert found[0][0]["grad_norm"] != pytest.approx(found[1][0]["grad_norm"], rel=1e-3)


def start_two(folder: Path, name: str, *args: object, **options: object) -> tuple[Ranks, Path]:
    """Start two ranks; return them and the file of what rank 0 says."""
    said = [folder / f"{name}-{rank}-stderr" for rank in range(2)]
    flags = ["-d", folder / "corpus.json", "-s", 32, "-b", 3, "--global-batch-size", 6]
    flags += ["--save-dir", folder, "-e", name, *args]
    return Ranks(2, flags, stderr_file=[str(path) for path in said], **options), said[0]


def test_a_broken_tie_on_two_ranks_is_refused(ladder, tmp_path):
    text = (ROOT / SHARDED / "train_llm.py").read_text()
    for right, wrong in replacements(SHARDED, 5):
        text = text.replace(right, wrong)
    (tmp_path / "train_llm.py").write_text(text)
    ranks, said = start_two(ladder.folder, "untied", "--max-steps", 2, chapter=str(tmp_path))
    assert ranks.finish() == [2, 2]
    message = said.read_text()
    assert re.search(r"Rank 1 on \S+ has model gpt2-\w+, rank 0 on \S+ has gpt2-\w+: ", message)
    assert "step 1/" not in message
    (holds,) = re.findall(r"rank 0 holds .* bytes", message)
    assert f"`{holds}`" in flat(section(SHARDED, 5))


@pytest.mark.ci
def test_killed_while_it_writes(ladder):
    """In the second of the checkpoints, after 20 steps each."""
    args = ("--max-steps", 45, "--ckpt-freq", 20, "--async-checkpoint")
    killed = {"kill_in_save": [(2, "writing"), None], "plant": speak_at_once, "chapter": SHARDED}
    ranks, _ = start_two(ladder.folder, "killed", *args, **killed)
    assert finish(ranks.processes[0]) == -signal.SIGKILL and finish(ranks.processes[1]) == 1
    assert newest_step(ladder.folder / "killed") == 20
    ranks, said = start_two(ladder.folder, "killed", *args, chapter=SHARDED)
    assert ranks.finish() == [0, 0]
    assert "resumed after step 20 of 45" in said.read_text()
    assert "`resumed after step 20`" in flat(section(SHARDED, 6))


SMALL = ("-s", 16, "-b", 2, "--global-batch-size", 2)
ORDERS = [
    Run(MIXED, 1, (*SMALL, *FP16, "--max-steps", 6), replaced)
    for replaced in ((), replacements(MIXED, 3))
]


@pytest.mark.parametrize(("right", "wrong"), [ORDERS], ids=[""])
def test_clipped_before_it_is_unscaled(ladder, right, wrong):
    """The norm is too large by the scale, and what is left is so small that it learns less."""
    found = [ladder.metrics(ladder.run(run)) for run in (right, wrong)]
    norms = [lines[0]["grad_norm"] for lines in found]
    assert norms[1] == pytest.approx(FIRST_SCALE * norms[0], rel=1e-3)
    assert min(line["grad_norm"] for line in found[1]) > 1e4, "each step is clipped"
    assert {line["loss_scale"] for line in found[1]} == {FIRST_SCALE}
    last = [lines[-1]["loss"] for lines in found]
    assert found[0][0]["loss"] == found[1][0]["loss"] and last[1] > last[0] + 0.5


MINDS = [
    Run(
        MIXED,
        2,
        (*FEW, "-b", 6, *FP16, "--warmup-steps", 5, "--ckpt-freq", 1, "--keep-checkpoints", 9),
        (SMALL_SCALE,),
        note,
    )
    for note in (overflow, overflow_without_agreement)
]


@pytest.mark.ci
@pytest.mark.parametrize(("agreed", "alone"), [MINDS], ids=[""])
def test_a_rank_that_skips_alone(ladder, agreed, alone):
    """It does not move, the other one does; the losses say little, the norm a bit more."""
    skipping, other = notes(ladder, alone)
    step = OVERFLOW - 1
    assert skipping[step]["changed"] == 0 and other[step]["changed"] > 0
    assert other[step]["norm_squared"] == 0, "a step with gradients of 0"
    assert other[-1]["scale"] == 2 * skipping[-1]["scale"]
    right, wrong = (ladder.metrics(ladder.run(run)) for run in (agreed, alone))
    assert right[step]["grad_norm"] is None and wrong[step]["grad_norm"] is None
    falls = [line["loss"] for line in wrong]
    assert sorted(falls, reverse=True) == falls
    assert [line["loss"] for line in right] == pytest.approx(falls, rel=0.05)
    for one, two in zip(right[OVERFLOW:], wrong[OVERFLOW:], strict=True):
        assert 0.75 < two["grad_norm"] / one["grad_norm"] < 1.5
        assert two["grad_norm"] > 1.2 * one["grad_norm"]
    # The first half of the rows is the skipping rank's.
    run_dir = ladder.folder / alone.name
    before, after = (tensors(run_dir, number)["model"] for number in (OVERFLOW - 1, OVERFLOW))
    for name in before:
        same = [
            torch.equal(*halves)
            for halves in zip(before[name].chunk(2), after[name].chunk(2), strict=True)
        ]
        assert same == [True, False], name
    saved = tensors(run_dir)["state"]["scaler"]["scale"]
    assert saved in {lines[-1]["scale"] for lines in (skipping, other)}, "one for all"


SUMS = [Run(MIXED, 2, ("-b", 12, *args)) for args in ((), ("--reduce-dtype", "bfloat16"))]


@pytest.mark.ci
@pytest.mark.parametrize(("wide", "narrow"), [SUMS], ids=[""])
def test_sums_in_16_bits(ladder, wide, narrow):
    """The first loss is the same, the others differ from the fourth digit on."""
    found = [[line["loss"] for line in ladder.metrics(ladder.run(run))] for run in (wide, narrow)]
    off = [abs(y / x - 1) for x, y in zip(*found, strict=True)]
    assert off[0] == 0 and min(off[1:]) > 0
    assert 1e-5 < statistics.median(off[1:]) < 1e-3 and max(off) < 2e-3


@contextlib.contextmanager
def note_largest(path: str) -> Iterator[None]:
    """Note the largest gradient of each step, a line each."""

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [local(p.grad) for p in optimizer.param_groups[0]["params"]]
        with Path(path).open("a") as file:
            file.write(f"{max(g.abs().max().item() for g in gradients)}\n")

    handle = register_optimizer_step_pre_hook(note)
    yield
    handle.remove()


@contextlib.contextmanager
def begin_too_high(path: str) -> Iterator[None]:
    """What loss_scaling.py does to the script that it is given."""
    original = torch.amp.GradScaler
    options = load_script(ROOT / MIXED / "loss_scaling.py").TOO_HIGH
    torch.amp.GradScaler = functools.partial(original, **options)
    yield
    torch.amp.GradScaler = original


# At a rate of 0 the weights stay what they are in all steps that are skipped.
STANDING = ("--precision", "fp32", "--lr", 0, "--max-grad-norm", "inf")
UNTIL_IT_FITS = ("--max-steps", 20)
WARM = [Run(MIXED, 1, (*SMALL, *STANDING, *UNTIL_IT_FITS), (), note_largest)]
WARM += [Run(MIXED, 1, (*SMALL, *FP16, *UNTIL_IT_FITS), (), begin_too_high)]


@pytest.mark.ci
@pytest.mark.parametrize(("exact", "scaled"), [WARM], ids=[""])
def test_the_largest_gradient_tells_the_scale(ladder, exact, scaled):
    """To a power of two: gradients of activations, which are not looked at, may be larger."""
    ladder.run(exact)
    largest = [float(line) for line in Path(ladder.notes(exact)[0]).read_text().splitlines()]
    metrics = ladder.metrics(ladder.run(scaled))
    taken = next(i for i, line in enumerate(metrics) if line["grad_norm"] is not None)
    fits = next(i for i, gradient in enumerate(largest) if gradient * 2.0 ** (30 - i) <= 65504)
    assert 5 < fits <= taken <= fits + 1
    assert 0.02 < largest[taken] / metrics[taken]["grad_norm"] < 0.2, "a small part of the norm"

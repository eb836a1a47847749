"""Parallelism beyond chapter 5: two variants, and programs in which it is done by hand.

Each variant has chapter 1's losses on a table of ranks. "2x2" is two rows (data parallel) of two
ranks each (tensor or context parallel).
"""

import argparse
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import (
    CHAPTERS,
    ROOT,
    Ladder,
    Run,
    assert_parity,
    first_then_nightly,
    float32,
    hand_over,
    make_variant,
    register,
    replace_in,
    run_ranks,
    selected_runs,
    write_narrow,
)
from runner import finish, load_script, start
from torch.utils.checkpoint import checkpoint as recompute
from transformers import MixtralConfig

import context_parallel
from common.errors import RunError
from common.inputs import models

CHAPTER, BEFORE = CHAPTERS[4], CHAPTERS[3]
TENSOR, CONTEXT = "tensor-parallel", "context-parallel"
BY_HAND = ROOT / CHAPTER / "experiments/tensor_parallel_by_hand.py"
EXPERTS = ROOT / CHAPTER / "experiments/experts_by_hand.py"
PIPELINE = ROOT / CHAPTER / "experiments/pipeline_by_hand.py"
ATTENTION = ROOT / CHAPTER / "diffs/context_attention.py"
PRESET = "llama-tiny-8-heads"
# Two models in width 32; the second has sizes that two ranks cannot share equally.
EVEN, ODD = "even-model", "odd-model"
MODELS = {
    EVEN: {},
    ODD: {"tie_word_embeddings": True, "vocab_size": 4097, "intermediate_size": 86},
}


# --- the training ---


class Table(Ladder):
    """Runs of the variants. All ranks of a row have the same samples."""

    def __init__(self, folder: Path, selected: list[Run] = ()) -> None:
        super().__init__(folder, selected)
        for name, sizes in MODELS.items():
            write_narrow(folder / name, PRESET, **sizes)

    def flags(self, name: str, *args: object) -> list[object]:
        """The name of a model stands for its folder, and the odd one has an odd length.

        torch 2.11 cannot view the odd pieces that tensor parallelism gathers.
        """
        odd = 16 if torch.__version__.startswith("2.11") else 15
        length = ("-s", odd) if ODD in args else ()
        words = [self.folder / arg if arg in MODELS else arg for arg in args]
        return super().flags(name, "--tokenizer-name", PRESET, *length, *words)

    def samples(self, name: str, world_size: int = 1) -> list[list[int]]:
        """Return the samples of each step, counted once in each row."""
        found = re.search(r"--(?:tensor|context)-parallel-(\d)", name)
        width = int(found[1]) if found else 1
        noted = [Path(self.samples_file(name, rank)).read_text() for rank in range(world_size)]
        same = all(noted[rank] == noted[rank - rank % width] for rank in range(world_size))
        assert same, "the samples of a row differ"
        return [step[::width] for step in super().samples(name, world_size)]


@pytest.fixture(scope="module")
def table(request, make_folder) -> Table:
    return Table(make_folder("table"), selected_runs(request))


def on(
    shape: str,
    *args: object,
    model: str = EVEN,
    diff: str = TENSOR,
    also: tuple[str, ...] = (),
    chapter: str = CHAPTER,
    replaced: tuple = (),
) -> Run:
    """Return a run on this many rows x ranks in a row; also: further variants."""
    rows, width = map(int, shape.split("x"))
    words = ("-m", model, *float32(chapter), f"--{diff}", width, *args)
    return Run(chapter, rows * width, words, replaced, variants=("mesh", diff, *also))


def assert_chapter_1(table: Table, run: Run) -> None:
    model = run.args[run.args.index("-m") + 1]
    alone = table.alone("-m", model, "-b", 24, *KEPT)
    assert_parity(table, alone, table.run(run), run.world_size)


KEPT = ("--ckpt-freq", 4, "--keep-checkpoints", 9)
FULL, SELECTIVE = ("--activation-checkpointing",), ("selective-recomputation",)
GPT2 = {"model": "gpt2-tiny", "diff": CONTEXT}
ULYSSES = "--ulysses"
SHAPES = {
    "1x2": (on("1x2", "-b", 24), ()),
    "2x2 full": (on("2x2", "-b", 6, *FULL), pytest.mark.ci),
    "2x2 odd": (on("2x2", "-b", 12, model=ODD), pytest.mark.nightly),
    "2x2 selective": (on("2x2", "-b", 6, also=(*SELECTIVE, "cpu-offload")), pytest.mark.nightly),
    "2x2 chapter 4": (on("2x2", "-b", 6, chapter=BEFORE), pytest.mark.nightly),
    "context 1x2": (on("1x2", "-b", 24, diff=CONTEXT), ()),
    "context 2x2 full gpt2": (on("2x2", "-b", 6, *FULL, **GPT2), pytest.mark.ci),
    "context 1x4 gpt2": (on("1x4", "-b", 24, **GPT2), pytest.mark.nightly),
    "context 2x2 selective": (
        on("2x2", "-b", 6, also=SELECTIVE, diff=CONTEXT),
        pytest.mark.nightly,
    ),
    "context 2x2 chapter 4": (
        on("2x2", "-b", 6, diff=CONTEXT, chapter=BEFORE),
        pytest.mark.nightly,
    ),
    "context 1x2 compile": (on("1x2", "-b", 24, "--compile", diff=CONTEXT), pytest.mark.nightly),
    "context 1x2 compile full": (
        on("1x2", "-b", 24, "--compile", *FULL, diff=CONTEXT),
        pytest.mark.nightly,
    ),
    "ulysses 1x2": (on("1x2", "-b", 24, ULYSSES, diff=CONTEXT), ()),
    "ulysses 1x2 compile full": (
        on("1x2", "-b", 24, ULYSSES, "--compile", *FULL, diff=CONTEXT),
        pytest.mark.nightly,
    ),
    "ulysses 2x2 full gpt2": (on("2x2", "-b", 6, ULYSSES, *FULL, **GPT2), pytest.mark.nightly),
}


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=tier, id=name) for name, (run, tier) in SHAPES.items()]
)
def test_same_training_on_a_table_of_ranks(table, run):
    assert_chapter_1(table, run)


class Layer(torch.nn.Module):
    """It is compiled before and after its attention."""

    @staticmethod
    @torch.compiler.disable
    def attention(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x.sin()).cos()


def compiled_and_gradient(monkeypatch, compile_layer, forward) -> tuple[set[str], torch.Tensor]:
    """Return the names of the functions that are compiled, and the gradient."""
    names = set()

    def backend(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        names.update(node.name for node in graph.graph.nodes if node.op.startswith("call"))
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    compile_layer(forward)(x).sum().backward()
    return names, x.grad


@pytest.mark.check
@pytest.mark.parametrize("repeat", [False, True])
def test_compiler_leaves_out_attention_only(monkeypatch, repeat):
    """Also in layers whose forward pass is repeated: the compiler skips whole checkpoints."""
    forward = Layer().forward
    _, expected = compiled_and_gradient(monkeypatch, lambda forward: forward, forward)
    if repeat:
        forward = partial(recompute, forward, use_reentrant=False)
    names, gradient = compiled_and_gradient(monkeypatch, context_parallel.compile_layer, forward)
    assert names == {"sin", "cos"}
    assert gradient.equal(expected)


@pytest.mark.check
def test_planted_compiler_around_a_checkpoint_is_noticed(monkeypatch):
    forward = partial(recompute, Layer().forward, use_reentrant=False)
    compile_layer = lambda forward: torch.compile(forward)  # noqa: E731
    assert compiled_and_gradient(monkeypatch, compile_layer, forward)[0] == set()


@pytest.mark.ci
@pytest.mark.parametrize("diff", [TENSOR, CONTEXT])
def test_run_goes_from_chapter_1_to_2_x_2_and_back(table, diff):
    alone = table.alone("-m", EVEN, "-b", 24, *KEPT)
    there, back = on("2x2", "-b", 12, *KEPT, diff=diff), f"back-{diff}"
    hand_over(table.folder / alone, table.folder / there.name, 4)
    hand_over(table.folder / table.run(there), table.folder / back, 8)
    assert finish(start(table.flags(back, "-m", EVEN, "-b", 24, *KEPT))) == 0
    expected, *found = [table.metrics(name) for name in (alone, there.name, back)]
    logged = [line["loss"] for line in expected]
    for metrics, first in zip(found, (4, 8), strict=True):
        losses = [line["loss"] for line in metrics]
        assert losses[:first] == [line["loss"] for line in found[0][:first]]
        assert losses == pytest.approx(logged, rel=1e-5)
    assert losses[8:] != [line["loss"] for line in found[0][8:]], "another order of sums"


@pytest.mark.nightly
def test_bf16_is_close(table):
    half = on("2x2", "-b", 12, "--precision", "bf16", also=("async-checkpoint",))
    names = (table.alone("-m", EVEN, "-b", 24, *KEPT), table.run(half))
    expected, found = ([line["loss"] for line in table.metrics(name)] for name in names)
    assert found == pytest.approx(expected, rel=5e-3) and found != pytest.approx(expected, rel=1e-6)


# --- attention whose keys are in two parts ---

SHAPES_OF_PARTS = [(4, 4, 4, 12), (4, 2, 5, 64), (4, 1, 64, 1024), (4, 2, 8, 8)]


def attention_and_gradients(attend, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    query, key, value = (tensor.clone().requires_grad_() for tensor in tensors)
    output = attend(query, key, value)
    torch.manual_seed(1)  # the same weights for all dtypes, so they fit into the shortest
    weights = torch.randn(output.shape, dtype=torch.bfloat16).to(output)
    gradients = torch.autograd.grad(output, (query, key, value), weights)
    return [output.detach(), *gradients]


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Queries of the last positions of the keys: one softmax over a masked matrix."""
    groups, (n, m) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    sees = torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)
    return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value


def draw(shape: tuple[int, ...], **options: object) -> list[torch.Tensor]:
    heads, key_heads, n, m = shape
    torch.manual_seed(0)
    sizes = ((heads, n), (key_heads, m), (key_heads, m))
    return [torch.randn(2, *size, 16, **options) for size in sizes]


def assert_merges(attention, shape: tuple[int, ...]) -> None:
    tensors = draw(shape, dtype=torch.float64)
    attend = partial(attention.attend_to_end, dropout=0.0, scale=None)
    found = attention_and_gradients(attend, tensors)
    torch.testing.assert_close(found, attention_and_gradients(plain_attention, tensors))


@pytest.mark.check
@pytest.mark.parametrize("shape", SHAPES_OF_PARTS)
def test_merged_attention_is_plain_attention(shape):
    """In float64: the output, and the gradients of queries, keys and values."""
    assert_merges(load_script(ATTENTION), shape)


@pytest.mark.check
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_without_a_merge_is_plain_attention(monkeypatch, dropout):
    """Other devices; and dropout, which leaves the values' mean as it is."""
    attention, tensors = load_script(ATTENTION), draw((4, 2, 4, 12))
    if dropout == 0:
        monkeypatch.setattr(attention, "can_merge", lambda query: False)
    tensors[2] = torch.ones_like(tensors[2])
    found = torch.stack(
        [attention.attend_to_end(*tensors, dropout, None).mean() for _ in range(400)]
    )
    assert found.mean().item() == pytest.approx(1, rel=0.05)
    assert (found.std() > 0) == (dropout > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(8, 2, 512, 1536), (4, 4, 8, 16), (4, 2, 8, 8)])
def test_attention_of_the_last_queries_on_a_gpu(dtype, shape):
    """In 16 bits, its error is that of the rounded inputs and outputs; float32 is exact enough."""
    attention = load_script(ATTENTION)
    tensors = draw(shape, device="cuda", dtype=getattr(torch, dtype))
    attend = partial(attention.attend_to_end, dropout=0.0, scale=None)
    found = attention_and_gradients(attend, tensors)
    expected = attention_and_gradients(plain_attention, [t.double() for t in tensors])
    near = {"rtol": 0, "atol": {"bfloat16": 0.1, "float16": 0.02, "float32": 2e-3}[dtype]}
    torch.testing.assert_close([t.double() for t in found], expected, **near)


def test_cudnn_takes_what_the_merge_gives_it():
    """On the meta device, which has shapes only: the arguments of PyTorch's private functions.

    If it fails after an upgrade, look at torch/distributed/tensor/experimental/_context_parallel,
    which calls the same functions.
    """
    tensors = draw((4, 2, 8, 32), device="meta", dtype=torch.bfloat16)
    merged = load_script(ATTENTION).MergedAttention
    found = attention_and_gradients(lambda *args: merged.apply(*args, None), tensors)
    assert [each.shape for each in found] == [each.shape for each in (tensors[0], *tensors)]


WRONG_MERGE = ("torch.logaddexp(log_sum_1, log_sum_2)", "log_sum_2")
register(ATTENTION, [WRONG_MERGE])


@pytest.mark.check
def test_planted_wrong_merge_is_noticed(tmp_path):
    shutil.copy(ATTENTION, tmp_path)
    replace_in(tmp_path / ATTENTION.name, *WRONG_MERGE)
    with pytest.raises(AssertionError, match="not close"):
        assert_merges(load_script(tmp_path / ATTENTION.name), SHAPES_OF_PARTS[0])


# --- planted bugs ---

OTHER_DATA = (("dp_rank = rank // (cp_size * tp_size)", "dp_rank = rank % dp_size"),)
NOT_TIED = (("        model.tie_weights()  # the plan", "        # the plan"),)
CONTEXT_BUGS = {
    "labels shifted after the cut": (
        'pad(batch["labels"], (0, 1), value=-100)[:, 1:]',
        'torch.cat([pad(c[:, 1:], (0, 1), value=-100) for c in batch["labels"].chunk(4, 1)], 1)',
    ),
    "positions that begin at 0 on every rank": (
        'batch["position_ids"] = torch.arange(batch["labels"].shape[1]).expand_as(batch["labels"])',
        "pass",
    ),
    "a mean over the labels of each rank": (", num_items_in_batch=n_labels)", ")"),
}
BUGS = {
    "other data in a row": ("samples of a row", on("2x2", "-b", 12, replaced=OTHER_DATA)),
    "tied weights that come apart": ("loss", on("2x2", "-b", 12, model=ODD, replaced=NOT_TIED)),
    **{
        name: ("loss", on("1x2", "-b", 24, diff=CONTEXT, replaced=(pair,)))
        for name, pair in CONTEXT_BUGS.items()
    },
}
for _, run in BUGS.values():
    register(CHAPTER, run.replaced, run.variants)


@pytest.mark.parametrize(("red", "run"), BUGS.values(), ids=BUGS)
def test_planted_bug_is_noticed(table, red, run):
    with pytest.raises(AssertionError, match=f"^the {red} differ"):
        assert_chapter_1(table, run)


# --- bad input ---


@pytest.mark.check
@pytest.mark.parametrize(
    ("diff", "model", "n_ranks", "setting", "sentence"),  # setting: the length, or --compile
    [
        (CONTEXT, "gpt2-tiny", 2, 30, "2 must divide the 2 ranks and half of 30."),
        (CONTEXT, "mixtral", 2, 32, "2 needs GPT-2 or Llama, not mixtral: give another -m."),
        (CONTEXT, "llama-tiny", 2, 32, "2 must divide the 1 heads of keys, or leave out --ulysses"),
        (TENSOR, PRESET, 4, False, "4 must divide ranks, KV heads and MLP width, so also 2."),
        (TENSOR, "gpt2-tiny", 2, False, "2 needs a Llama model, not gpt2: give another -m."),
        (TENSOR, PRESET, 2, True, "2, leave out --compile or --activation-checkpointing."),
    ],
)
def test_bad_input(tmp_path, diff, model, n_ranks, setting, sentence):
    config = MixtralConfig() if model == "mixtral" else models.load_config(model)
    options = {"context_parallel": n_ranks, "ulysses": True, "seq_length": setting}
    options |= {"activation_checkpointing": setting, "compile": setting}
    args = argparse.Namespace(**options, tensor_parallel=n_ranks)
    with pytest.raises(RunError, match=f"--{diff} {sentence}"):
        if diff == TENSOR:
            made = make_variant(tmp_path, CHAPTER, "mesh", TENSOR)
            load_script(made / "train_llm.py").plan_for(args, config, 2)
        else:
            context_parallel.check_context_parallel(args, config, 2)


# --- by hand ---

# By script: what is replaced in it. Each rank has its part of a gradient, not the sum.
WRONG = {
    BY_HAND: ("return all_reduce(gradient)", "return gradient"),
    PIPELINE: ("/ MICRO_BATCHES\n", "\n"),  # the sum instead of the mean
    EXPERTS: ("dist.all_reduce(parts[1].grad)", "pass"),
}
for script, bug in WRONG.items():
    register(script, [bug])


@pytest.mark.parametrize("n_ranks", first_then_nightly([2, 1, 4]))
def test_mlp_by_hand(tmp_path, n_ranks):
    statuses, printed = run_ranks(BY_HAND, tmp_path, n_ranks)
    assert statuses == [0] * n_ranks
    lines = printed.splitlines()
    assert sum("as on one rank" in line for line in lines) == 5
    part, sent = 352 // n_ranks, 2 * 2 * (n_ranks - 1) * 64 * 128 * 4 // n_ranks
    shapes = [[part, 128], [part, 128], [128, part]]
    first = [f"rank {rank} holds {shapes}, sends {sent:,} B" for rank in range(n_ranks)]
    assert [line for line in lines if line.startswith("rank")] == first


def test_pipeline_by_hand(tmp_path):
    """Its gradients are those of one process, and it is idle as long as the formula says."""
    statuses, printed = run_ranks(PIPELINE, tmp_path, 4)
    assert statuses == [0] * 4
    assert printed.count("the gradients of one process") == 3
    kept = [int(number) for number in re.findall(r"keeps (\d)", printed)]
    assert kept == [8, 8, 8, 8, 4, 3, 2, 1]
    lines = re.findall(r"rank \d (\S+)", printed)
    for rank, line in enumerate(lines[:4]):  # GPipe: all forward passes, then all backward passes
        assert re.sub(r"(.)\1*", r"\1", line.replace(".", "")) == "01234567abcdefgh", rank
    for line in lines[4:]:
        assert set(line) - {"."} == set("01234567abcdefgh")
    assert lines[7].replace(".", "")[0] == "0" and "a" in lines[7][: lines[7].index("1")]
    idle = [int(share) for share in re.findall(r"idle: (\d+)% .* = 27%", printed)]
    assert len(idle) == 2 and all(20 <= share <= 60 for share in idle)  # 75% without any overlap


@pytest.mark.parametrize("n_ranks", first_then_nightly([4, 1, 2]))
def test_experts_by_hand(tmp_path, n_ranks):
    statuses, printed = run_ranks(EXPERTS, tmp_path, n_ranks)
    assert statuses == [0] * n_ranks
    assert printed.count("outputs and gradients as on one rank") == 2
    computed = [int(number) for number in re.findall(r"computes (\d+) rows", printed)]
    assert len(computed) == 2 * n_ranks
    for rows in (computed[:n_ranks], computed[n_ranks:]):
        assert sum(rows) == n_ranks * 256 * 2, "no token is dropped"
    assert n_ranks == 1 or computed[n_ranks] > 1.2 * computed[0], "the bias changes the routes"


@pytest.mark.parametrize("script", WRONG, ids=lambda script: script.stem)
def test_planted_wrong_scripts(tmp_path, script):
    statuses, _ = run_ranks(script, tmp_path, 4, WRONG[script])
    errors = "".join(path.read_text() for path in tmp_path.glob("stderr-*"))
    assert any(statuses) and "AssertionError: Tensor-likes are not close" in errors

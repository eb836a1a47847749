"""The variant muon: the updates of torch.optim.Muon, whatever shards the matrices.

Muon computes in bfloat16, so a rounding error of a gradient changes an update by some 1e-3 of its
size. From the same gradients, all updates are the same bit for bit.
"""

import functools
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import (
    ROOT,
    Ladder,
    Run,
    Runs,
    assert_exact,
    assert_same_tensors,
    first_then_nightly,
    float32,
    go_back_to,
    hand_over,
    make_flags,
    make_variant,
    read_metrics,
    register,
    save_what_is_loaded,
    selected_runs,
    tensors,
)
from runner import ask_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from common.errors import RunError
from common.inputs.models import load_config
from muon import MuonAndAdamW, orthogonalize, split_parameters

CHECK = pytest.mark.check
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
MODULE = "01-single-gpu/diffs/muon.py"
CHAPTER_1, FSDP, MIXED = "01-single-gpu", "04-fsdp", "05-mixed-precision"

# --- one matrix ---


def matrices(shapes: list[tuple[int, int]]) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    return parameters


@CHECK
@pytest.mark.parametrize("shape", [(48, 48), (24, 96), (96, 24), (1, 8)])
def test_singular_values_become_1_and_their_vectors_stay(shape):
    """Nearly: torch.optim.Muon's iteration leaves them between 0.6 and 1.3."""
    matrix = torch.linspace(1, 3, shape[0])[:, None] * matrices([shape])[0].detach()
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ orthogonalize(matrix).float() @ v.T
    assert found.diagonal().min() > 0.6 and found.diagonal().max() < 1.3
    assert (found - found.diagonal().diag()).abs().max() < 0.05


@CHECK
@pytest.mark.parametrize("shape", [(48, 48), (24, 96), (96, 24)])
def test_the_same_as_torch(shape):
    """Without momentum, torch.optim.Muon moves the weights by this."""
    (weight,) = matrices([shape])
    before, gradient = weight.detach().clone(), weight.grad.clone()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    found = orthogonalize(gradient).float() * max(1, shape[0] / shape[1]) ** 0.5
    assert torch.allclose(before - weight.detach(), found, atol=2e-3)


@CHECK
@pytest.mark.parametrize("n_out", [24, 96])
def test_a_transposed_matrix_has_the_transposed_update(n_out):
    """GPT-2's Conv1D stores [in, out], and nn.Linear [out, in]."""
    linear, conv = torch.nn.Linear(48, n_out, bias=False), Conv1D(n_out, 48)
    conv.weight.data = linear.weight.data.T.clone()
    gradient = torch.randn(n_out, 48)
    linear.weight.grad, conv.weight.grad = gradient, gradient.T.clone()
    for layer in (linear, conv):
        torch.optim.Muon([layer.weight], **OPTIONS, adjust_lr_fn="match_rms_adamw").step()
    size = 0.01 * 0.2 * 96**0.5 if n_out == 96 else 0.01 * 0.2 * 48**0.5
    assert torch.allclose(linear.weight.T, conv.weight, atol=0.01 * size)


# --- a model ---


def build(preset: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(load_config(preset))


@CHECK
@pytest.mark.parametrize(("preset", "per_layer"), [("gpt2-tiny", 4), ("llama-tiny", 7)])
def test_the_matrices_of_the_layers_and_nothing_else(preset, per_layer):
    """Not embeddings, the output layer, norms or biases; each parameter once."""
    model = build(preset)
    chosen, others = split_parameters(model)
    assert len(chosen) == per_layer * model.config.num_hidden_layers
    assert {id(p) for p in model.parameters()} == {id(p) for p in (*chosen, *others)}
    assert len(chosen) + len(others) == len(list(model.parameters()))
    names = [name for name, p in model.named_parameters() if any(p is other for other in others)]
    kinds = ("wte", "wpe", "embed_tokens", "lm_head", "bias", "ln_", "norm")
    assert all(any(kind in name for kind in kinds) for name in names), names


@CHECK
def test_a_model_without_layers_is_refused():
    with pytest.raises(RunError, match=r"^Muon needs a model with matrices in a list of layers"):
        split_parameters(torch.nn.Linear(3, 3))


@CHECK
def test_one_optimizer_is_what_two_are():
    """Also after a state dict was loaded, which makes new groups; the schedule drives both."""
    one, two = build("gpt2-tiny"), build("gpt2-tiny")
    two.load_state_dict(one.state_dict())
    chosen, others = split_parameters(two)
    optimizers = [
        torch.optim.Muon(chosen, **OPTIONS, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, **OPTIONS, betas=(0.8, 0.95), fused=True),
    ]
    optimizer = MuonAndAdamW(one, **OPTIONS, betas=(0.8, 0.95), fused=True)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (step + 1))
        for each in (optimizer, *optimizers)
    ]
    for step in range(4):
        for left, right in zip(one.parameters(), two.parameters(), strict=True):
            left.grad = torch.randn(left.shape)
            right.grad = left.grad.clone()
        for each in (optimizer, *optimizers):
            each.step()
        for schedule in schedules:
            schedule.step()
        if step == 1:
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
    assert_same_tensors(one.state_dict(), two.state_dict())


# --- sharded ---

# Rows that ranks cannot share equally, fewer rows than ranks, and a batch with ranks that own none.
SHAPES = [(7, 4), (4, 7), (1, 5), (8, 8), (8, 8), (8, 8), (8, 8)]


def train_sharded(rank: int, n_ranks: int, replicas: int, module: str, store: str, queue) -> None:
    """Take steps on shards and on whole matrices; answer with the largest difference."""
    code = Path(module).read_text()
    exec(compile(code, module, "exec"), namespace := {"__name__": "muon"})
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=n_ranks)
    shape = (replicas, n_ranks // replicas) if replicas > 1 else (n_ranks,)
    mesh = init_device_mesh("cpu", shape)
    placements = [*[Replicate()] * (len(shape) - 1), Shard(0)]
    whole = matrices(SHAPES)
    shards = [
        torch.nn.Parameter(distribute_tensor(p.detach(), mesh, placements, src_data_rank=None))
        for p in whole
    ]
    options = {**OPTIONS, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = torch.optim.Muon(whole, **options), namespace["ShardedMuon"](shards, **options)
    for _ in range(3):
        for parameter, shard in zip(whole, shards, strict=True):
            parameter.grad = torch.randn(parameter.shape)
            shard.grad = distribute_tensor(parameter.grad, mesh, placements, src_data_rank=None)
        shards[2].grad = whole[2].grad = None  # not in the loss
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(whole, shards, strict=True)
    differences = [(p.detach() - shard.full_tensor()).abs().max().item() for p, shard in pairs]
    queue.put((rank, max(differences)))
    dist.barrier()
    dist.destroy_process_group()


def assert_as_whole(n_ranks: int, replicas: int, module: Path | str, folder: Path) -> None:
    """The bound is far below an update, of 0.002 or more; on one machine nothing differs."""
    found = ask_ranks(n_ranks, train_sharded, n_ranks, replicas, str(module), str(folder / "store"))
    assert max(found) < 2e-5, f"the matrices differ by {max(found)}"


@pytest.mark.parametrize(
    ("n_ranks", "replicas"), first_then_nightly([(3, 1), (1, 1), (2, 1), (4, 2)])
)
def test_shards_are_updated_as_whole_matrices(n_ranks, replicas, tmp_path):
    assert_as_whole(n_ranks, replicas, ROOT / MODULE, tmp_path)


# By name: what is replaced in muon.py.
BUGS = {
    "each rank orthogonalizes its rows": (
        "        matrix = self.received.view(self.owned)\n        if matrix.numel():",
        "        matrix = self.received.view(self.owned)\n        if False:",
    ),
    "rows come back to another rank": (
        "        pieces = self.received.split(self.local_sizes)",
        "        pieces = self.received.flip(0).split(self.local_sizes)",
    ),
    "no Nesterov momentum": ('gradient.lerp(mean, group["momentum"])', "mean"),
    "the learning rate of another shape": ("max(parameter.shape)", "min(parameter.shape)"),
}
for bug in BUGS.values():
    register(MODULE, [bug])


@pytest.mark.nightly
@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_of_shards_is_noticed(name, tmp_path):
    right, wrong = BUGS[name]
    module = tmp_path / "muon.py"
    module.write_text((ROOT / MODULE).read_text().replace(right, wrong))
    with pytest.raises(AssertionError, match=r"^the matrices differ"):
        assert_as_whole(3, 1, module, tmp_path)


# --- chapters ---


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(make_folder("ladder"), selected_runs(request), model="gpt2-narrow")


def with_muon(chapter: str, world_size: int, *args: object, replaced=(), also=()) -> Run:
    words = (*args, *float32(chapter))
    return Run(chapter, world_size, words, tuple(replaced), variants=("muon", *also))


def losses(ladder: Ladder, run: Run) -> list[float]:
    return [line["loss"] for line in ladder.metrics(ladder.run(run))]


def assert_chapter_1_with_muon(ladder: Ladder, run: Run) -> None:
    """The losses of chapter 1 with Muon, and the plain chapter's only in the first step."""
    model = [] if "-m" not in run.args else ["-m", run.args[run.args.index("-m") + 1]]
    expected = losses(ladder, with_muon(CHAPTER_1, 1, "-b", 24, *model))
    assert losses(ladder, run) == pytest.approx(expected, rel=BOUND), "the losses differ"
    plain = [line["loss"] for line in ladder.metrics(ladder.alone("-b", 24, *model))]
    assert plain[0] == pytest.approx(expected[0], rel=1e-6)
    assert plain[2:] != pytest.approx(expected[2:], rel=10 * BOUND)


# Of a loss: what gradients that differ by rounding errors make of it in ten steps.
BOUND = 3e-4
LLAMA = ("-m", "llama-narrow")
CHAPTERS = [
    with_muon(FSDP, 2, "-b", 4),
    with_muon(FSDP, 3, "-b", 24, *LLAMA),
    with_muon("02-ddp", 2, "-b", 4),
    with_muon("03-multi-node", 2, "-b", 24, *LLAMA),
    with_muon(MIXED, 1, "-b", 24),
    with_muon(MIXED, 2, "-b", 24, *LLAMA, also=("cpu-offload", "zero2")),
]


@pytest.mark.ci
@pytest.mark.parametrize("run", first_then_nightly(CHAPTERS), ids=lambda run: run.name)
def test_same_training_in_every_chapter(ladder, run):
    assert_chapter_1_with_muon(ladder, run)


def test_planted_rows_that_are_orthogonalized_alone_change_the_losses(ladder):
    bug = BUGS["each rank orthogonalizes its rows"]
    run = with_muon(FSDP, 2, "-b", 4, replaced=[bug])
    with pytest.raises(AssertionError, match=r"^the losses differ"):
        assert_chapter_1_with_muon(ladder, run)


# --- resumed runs ---

EVERY, LAST = 4, 16  # steps
# Chapters and numbers of ranks; each goes on for four steps.
JOURNEY = [(FSDP, 2), (FSDP, 1), (FSDP, 3), (CHAPTER_1, 1)]


@pytest.fixture(scope="module")
def runs(make_folder) -> Runs:
    folder = make_folder("runs")
    return Runs(
        folder,
        *("--global-batch-size", 12, "--max-steps", LAST, "--log-freq", 1, "--ckpt-freq", EVERY),
        *("--keep-checkpoints", 9),
        flags=make_flags(folder, dropout=0.0),
    )


@pytest.fixture(scope="module")
def scripts(make_folder):
    """A function: the script of a chapter with Muon."""
    folder = make_folder("scripts")
    return functools.cache(lambda chapter: str(make_variant(folder, chapter, "muon")))


@pytest.mark.nightly
@pytest.mark.parametrize(("chapter", "ranks"), [(FSDP, 2), (CHAPTER_1, 1)])
def test_goes_on_bit_by_bit(runs, scripts, chapter, ranks):
    straight, resumed = f"{chapter}-straight", f"{chapter}-resumed"
    on = {"chapter": scripts(chapter), "ranks": ranks}
    assert runs.finish(straight, **on) == [0] * ranks
    hand_over(runs.folder / straight, runs.folder / resumed, 2 * EVERY)
    assert runs.finish(resumed, **on) == [0] * ranks
    assert_exact(runs.folder / straight, runs.folder / resumed)


def assert_loaded(saved: dict, loaded: dict) -> None:
    """Weights, schedule, the moments of both optimizers and their options."""
    kinds = {key for state in saved["optimizer"]["state"].values() for key in state}
    assert kinds == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
    groups = [
        dict(enumerate(content["optimizer"].pop("param_groups"))) for content in (saved, loaded)
    ]
    assert_same_tensors(*groups)
    assert len(groups[0]) == 2
    for key in ("model", "optimizer", "lr_scheduler"):
        assert_same_tensors(saved[key], loaded[key], key)


@pytest.mark.nightly
def test_goes_on_on_other_ranks_and_in_another_chapter(runs, scripts):
    assert runs.finish("whole", chapter=scripts(CHAPTER_1)) == [0]
    for number, (chapter, ranks) in enumerate(JOURNEY):
        copy = runs.folder / f"loaded-{number}"
        plant = functools.partial(save_what_is_loaded, copy)
        on = {"chapter": scripts(chapter), "ranks": ranks, "plant": plant}
        assert runs.finish("journey", **on) == [0] * ranks
        if number:
            assert_loaded(tensors(runs.folder / "journey", number * EVERY), tensors(copy))
            shutil.rmtree(copy)
        go_back_to((number + 1) * EVERY, runs.folder / "journey")
    found, expected = (
        [line["loss"] for line in read_metrics(runs.folder / name)] for name in ("journey", "whole")
    )
    assert found == pytest.approx(expected, rel=2e-3)

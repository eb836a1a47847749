"""The variant local-sgd: ranks that train alone and average their weights every N steps.

With one rank it is chapter 1, bit for bit. With two, it computes what two models in one process and
PyTorch's own SGD with Nesterov's momentum compute.
"""

import argparse
import contextlib
import copy
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers import (
    CHAPTERS,
    EXACT,
    STEPS,
    Ladder,
    Run,
    Runs,
    assert_exact,
    first_then_nightly,
    make_flags,
    make_variant,
    newest_step,
    plant,
    register,
    speak_at_once,
    tensors,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM

from common.data import ResumableSampler, load_sequences
from common.inputs import models

CHAPTER = CHAPTERS[2]
NAME = ("local-sgd",)
EVERY = 4  # steps between outer steps: the last two of the 10 steps are followed by one, too
FLAGS = ("--local-steps", EVERY, "-b", 4)
DILOCO = ("--outer-lr", 0.7, "--outer-momentum", 0.9)
# By what is wrong: (right, wrong) texts.
BUGS = {
    "no average": [("dist.all_reduce(weight)\n", "pass\n"), ("weight /= world_size", "pass")],
    "no Nesterov": [("(gradient + args.outer_momentum * momentum)", "momentum")],
    "an old start": [("old_weight.copy_(weight)", "pass")],
}
ROUNDED = [("weight += gradient - step ", "weight.copy_(old_weight - 1.001 * step) ")]
ONE_FOR_ALL = [('f"moments-{rank}"', '"moments"')]
for bug in (*BUGS.values(), ROUNDED, ONE_FOR_ALL):
    register(CHAPTER, bug, NAME)


@contextlib.contextmanager
def note_weights(path: str) -> Iterator[None]:
    """Note the sum of this rank's weights before each of its steps."""
    sums = []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = optimizer.param_groups[0]["params"]
        sums.append(sum(weight.double().sum().item() for weight in weights))

    handle = register_optimizer_step_pre_hook(note)
    yield
    handle.remove()
    Path(path).write_text(json.dumps(sums))


@pytest.fixture(scope="module")
def ladder(make_folder) -> Ladder:
    # Without biases: the gradient of a key's bias is only rounding, which Adam makes large.
    return Ladder(make_folder("local-sgd"), model="llama-narrow")


def local(world_size: int, *args: object, replaced: tuple = ()) -> Run:
    return Run(CHAPTER, world_size, (*FLAGS, *args), tuple(replaced), note_weights, NAME)


# --- one rank ---


def assert_chapter_1_exactly(ladder: Ladder, run: Run) -> None:
    expected = ladder.alone("-b", 4, "--log-freq", EVERY, "--eval-freq", 8)
    found = ladder.run(run)
    for key in ("step", *EXACT):
        values = [[line.get(key) for line in ladder.metrics(name)] for name in (expected, found)]
        assert values[0] == values[1], f"the {key} differ"
    one, other = (tensors(ladder.folder / name)["model"] for name in (expected, found))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.ci
def test_one_rank_is_chapter_1_bit_by_bit(ladder):
    assert_chapter_1_exactly(ladder, local(1))


def test_planted_step_that_rounds_the_average(ladder):
    with pytest.raises(AssertionError, match=r"^the (loss|eval_loss) differ"):
        assert_chapter_1_exactly(ladder, local(1, replaced=ROUNDED))


# --- two ranks ---


def in_one_process(ladder: Ladder, ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the mean losses between outer steps and the last weights, without the variant."""
    rates = [line["lr"] for line in ladder.metrics(ladder.alone("-b", 24))]
    data = {"dataset_name": str(ladder.folder / "corpus.json"), "seq_length": ladder.length}
    args = argparse.Namespace(**data, dataset_subset=None, text_column=None)
    tokenizer = models.load_tokenizer("llama-tiny")
    config = models.load_config(str(ladder.folder / "llama-narrow"), tokenizer)
    train_data, _ = load_sequences(args, tokenizer)
    torch.manual_seed(0)
    outer_model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    options = {"momentum": 0.9, "nesterov": True}
    outer = torch.optim.SGD(outer_model.parameters(), lr=0.7, **options)
    replicas = [copy.deepcopy(outer_model) for _ in range(ranks)]
    adamw = [
        torch.optim.AdamW(m.parameters(), betas=(0.8, 0.95), weight_decay=0.1) for m in replicas
    ]
    share, losses, means = 24 // ranks, [], []
    for step in range(STEPS):
        epoch, epoch_step = divmod(step, len(train_data) // 24)
        for rank, (model, optimizer) in enumerate(zip(replicas, adamw, strict=True)):
            sampler = ResumableSampler(train_data, num_replicas=ranks, rank=rank, seed=0)
            sampler.set_epoch(epoch, start=epoch_step * share)
            samples = [train_data[number] for number in islice(sampler, share)]
            batch = {key: torch.stack([each[key] for each in samples]) for key in samples[0]}
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = rates[step]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            means.append(sum(losses) / len(losses))
            losses = []
            of_replicas = zip(*(model.parameters() for model in replicas), strict=True)
            for weight, found in zip(outer_model.parameters(), of_replicas, strict=True):
                weight.grad = weight.detach() - sum(each.detach() for each in found) / ranks
            outer.step()
            for model in replicas:
                model.load_state_dict(outer_model.state_dict())
    return means, dict(outer_model.named_parameters())


def assert_as_in_one_process(ladder: Ladder, run: Run) -> None:
    losses, weights = in_one_process(ladder, run.world_size)
    name = ladder.run(run)
    sums = [json.loads(Path(notes).read_text()) for notes in ladder.notes(run)]
    same = [len(set(of_ranks)) == 1 for of_ranks in zip(*sums, strict=True)]
    expected = [step % EVERY == 0 for step in range(STEPS)]
    assert same == expected, "the weights of the ranks differ after an outer step, or are averaged"
    lines = ladder.metrics(name)
    assert [line["step"] for line in lines] == [4, 8, 10]
    assert losses[-1] < losses[0] - 1, "it learns"
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=2e-5), "the losses differ"
    found = tensors(ladder.folder / name)["model"]
    for key, weight in weights.items():
        assert torch.allclose(found[key], weight, rtol=1e-3, atol=1e-4), f"{key} differs"


@pytest.mark.ci
@pytest.mark.parametrize("world_size", first_then_nightly([2, 3]))
def test_ranks_compute_what_one_process_computes(ladder, world_size):
    assert_as_in_one_process(ladder, local(world_size, *DILOCO))


@pytest.mark.parametrize("bug", BUGS)
def test_planted_outer_steps_are_noticed(ladder, bug):
    with pytest.raises(AssertionError, match=r"^the (weights of the ranks|losses) differ"):
        assert_as_in_one_process(ladder, local(2, *DILOCO, replaced=BUGS[bug]))


# --- resume ---


@pytest.fixture(scope="module")
def runs(make_folder) -> Runs:
    folder = make_folder("resumed")
    # With dropout: each rank's RNG state counts. Log lines and saves are moved to outer steps.
    flags = [*make_flags(folder), "--local-steps", 4, *DILOCO, "--log-freq", 3, "--ckpt-freq", 7]
    return Runs(folder, flags=flags)


@pytest.fixture(scope="module")
def script(make_folder) -> Path:
    return make_variant(make_folder("scripts"), CHAPTER, *NAME)


@pytest.fixture(scope="module")
def straight(runs, script) -> str:
    assert runs.finish("straight", chapter=str(script), ranks=2) == [0, 0], runs.said("straight")
    return "straight"


def resume_after_a_kill(runs: Runs, straight: str, name: str, script: Path) -> None:
    """Rank 1 is killed between two outer steps."""
    on = {"chapter": str(script), "ranks": 2}
    statuses = runs.finish(name, **on, kill_after_steps=[None, 23], plant=speak_at_once)
    assert statuses[1] == -9 and newest_step(runs.folder / name) == 16
    assert runs.finish(name, **on) == [0, 0], runs.said(name)
    assert_exact(runs.folder / straight, runs.folder / name)


@pytest.mark.nightly
def test_goes_on_bit_by_bit_after_kill_9(runs, straight, script):
    resume_after_a_kill(runs, straight, "killed", script)
    saved = tensors(runs.folder / straight)["state"]
    moments = [saved[f"moments-{rank}"]["transformer.wte.weight"]["exp_avg"] for rank in (0, 1)]
    assert not torch.equal(*moments), "each rank has its own"


def test_planted_moments_of_one_rank_for_all(runs, straight, script, tmp_path):
    wrong = plant(script, tmp_path / "planted", ONE_FOR_ALL)
    with pytest.raises(AssertionError):
        resume_after_a_kill(runs, straight, "one-for-all", wrong)


@pytest.mark.nightly
def test_a_signal_stops_all_ranks_after_an_outer_step(runs, straight, script):
    on = {"chapter": str(script), "ranks": 2}
    assert runs.finish("told", **on, signals_after_steps=[(6, []), (6, [15])]) == [75, 75]
    assert newest_step(runs.folder / "told") == 8
    assert runs.finish("told", **on) == [0, 0]
    assert_exact(runs.folder / straight, runs.folder / "told")


@pytest.mark.nightly
def test_another_number_of_ranks_is_refused(runs, straight, script):
    assert set(runs.finish(straight, chapter=str(script), ranks=3)) == {2}
    said = runs.said(straight)
    assert re.search(r"was started with world_size 2, not 3 .*: resume it as it was started", said)

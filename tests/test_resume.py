"""A run of chapter 1 that was stopped, however it was stopped, goes on as if it had not been."""

import json
import random
import re
import shutil
import signal
import sys
import tempfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    EXACT,
    RESUMED_STEPS,
    ROOT,
    Runs,
    assert_same_tensors,
    go_back_to,
    newest_step,
    read_metrics,
    write_narrow,
)
from runner import SAVE_STAGES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from common import checkpoint
from common.cli import RunError
from common.data import ResumableSampler


@pytest.fixture(scope="module")
def runs(make_folder) -> Runs:
    """With a run that nobody stops."""
    runs = Runs(make_folder("runs"))
    assert runs.finish("straight", "--keep-checkpoints", 9) == [0]
    last = read_metrics(runs.folder / "straight")[-1]
    assert last["step"] == RESUMED_STEPS and last["epoch"] >= 2
    return runs


KILLS = [
    pytest.param({"kill_after_steps": 23}, id="in the second epoch"),
    *(
        pytest.param(
            {"kill_in_save": (4, stage)}, marks=[pytest.mark.ci] if number else [], id=stage
        )
        for number, stage in enumerate(SAVE_STAGES)
    ),
]


@pytest.mark.parametrize("options", KILLS)
def test_goes_on_after_kill_9(runs, options, request):
    name = request.node.callspec.id.replace(" ", "-")
    assert runs.finish(name, **options) == [-signal.SIGKILL]
    trained, resumed_after = runs.stopped_after(name)
    if "kill_after_steps" in options:
        assert (trained, resumed_after) == (23, 20), "the checkpoint before the kill"
    else:
        stage = SAVE_STAGES.index(options["kill_in_save"][1])
        assert (trained, resumed_after) == (20, 20 if stage >= 2 else 15)
        assert newest_step(runs.folder / name) == (20 if stage == 3 else 15)
    assert runs.finish(name) == [0]
    runs.assert_same("straight", name, trained, resumed_after)
    kept = {path.name for path in (runs.folder / name / "checkpoints").iterdir()}
    assert kept == {"step-00000035", "step-00000040"}, "nothing half-written stays"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("options", "stop"),
    [
        ({"signals_after_steps": (23, [signal.SIGINT])}, (23, 20)),
        ({"interrupt_in_save": 4}, (20, 15)),
    ],
    ids=["in a step", "in a save"],
)
def test_goes_on_after_ctrl_c(runs, options, stop):
    """In a save it is not taken for a full disk."""
    name = f"interrupted-after-{stop[0]}"
    assert runs.finish(name, **options) == [130]
    said = runs.said(name)
    assert said.splitlines()[-1].startswith("Interrupted. The start of a run's log")
    assert re.search(f"; to resume it after a stop: .* -e {name}\n", said)
    assert runs.stopped_after(name) == stop
    assert runs.finish(name) == [0]
    runs.assert_same("straight", name, *stop)


def keep_seeded_rng(monkeypatch):
    monkeypatch.setattr(checkpoint, "set_rng_state", lambda rng: None)


def take_epoch_0s_order(monkeypatch):
    original = ResumableSampler.set_epoch
    monkeypatch.setattr(
        ResumableSampler, "set_epoch", lambda self, _, start: original(self, 0, start)
    )


def begin_the_epoch_anew(monkeypatch):
    original = ResumableSampler.set_epoch
    monkeypatch.setattr(
        ResumableSampler, "set_epoch", lambda self, epoch, start: original(self, epoch)
    )


def set_the_schedule_back_a_step(monkeypatch):
    original = LambdaLR.load_state_dict

    def load(self, state: dict) -> None:
        original(self, {**state, "last_epoch": state["last_epoch"] - 1})

    monkeypatch.setattr(LambdaLR, "load_state_dict", load)


def drop_the_moments(monkeypatch):
    original = checkpoint.set_state_dict

    def load(model, optimizer, *, model_state_dict: dict, optim_state_dict: dict) -> None:
        for moments in optim_state_dict["state"].values():
            moments["exp_avg"].zero_()
            moments["exp_avg_sq"].zero_()
        original(
            model, optimizer, model_state_dict=model_state_dict, optim_state_dict=optim_state_dict
        )

    monkeypatch.setattr(checkpoint, "set_state_dict", load)


BUGS = [
    None,
    drop_the_moments,
    keep_seeded_rng,
    take_epoch_0s_order,
    begin_the_epoch_anew,
    set_the_schedule_back_a_step,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: getattr(bug, "__name__", "no bug"))
def test_planted_bug_is_noticed(runs, train, monkeypatch, tmp_path, bug):
    """With each of these bugs a resumed run differs; without one it does not."""
    shutil.copytree(runs.folder / "straight", tmp_path / "run")
    if bug:
        bug(monkeypatch)
    for step in (30, 35):  # the second start resumes from what the first one has saved
        go_back_to(step, tmp_path / "run")
        resumed = train(*runs.flags)
    expected = read_metrics(runs.folder / "straight")
    assert [line["step"] for line in resumed] == [line["step"] for line in expected]
    differs = [
        key
        for key in EXACT
        if [line.get(key) for line in resumed] != [line.get(key) for line in expected]
    ]
    assert bool(differs) == (bug is not None), differs


# --- a checkpoint of an older commit ---

STORED = Path(__file__).parent / "checkpoint_2026_11.tar.xz"
STORED_AFTER, STORED_STEPS = 4, 8  # steps


def stored_runs(folder: Path) -> Runs:
    """Runs of the model, the tokenizer and the corpus in a folder."""
    flags = ["-m", folder / "model", "-d", folder / "corpus.json", "-s", 16, "-b", 2]
    flags += ["--global-batch-size", 4, "--max-steps", STORED_STEPS, "--log-freq", 1]
    flags += ["--ckpt-freq", STORED_AFTER, "--keep-checkpoints", 1, "--lr", 1e-2]
    return Runs(folder, flags=flags)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("chapter", "ranks"), [("01-single-gpu", 1), ("04-fsdp", 2)], ids=["chapter 1", "FSDP"]
)
def test_a_stored_checkpoint_is_resumed(tmp_path, chapter, ranks):
    """A reader's checkpoint outlives an update of this guide: the commit of 2026-11-26 saved this.

    Later commits must resume it, or refuse it in one sentence. When the format changes, replace
    this test by one of the refusal, and store a new checkpoint beside it with
    `.venv/bin/python tests/test_resume.py tests/checkpoint_YEAR_MONTH.tar.xz`, for the next change.
    """
    shutil.unpack_archive(STORED, tmp_path, filter="data")
    runs = stored_runs(tmp_path)
    assert runs.finish("run", chapter=chapter, ranks=ranks) == [0] * ranks
    assert len(runs.samples("run")) == STORED_STEPS - STORED_AFTER, "the others are not repeated"
    expected = json.loads((tmp_path / "losses.json").read_text())
    losses = [line["loss"] for line in read_metrics(runs.folder / "run")]
    assert losses == pytest.approx(expected, rel=1e-5) and len(losses) == STORED_STEPS


def store_checkpoint(archive: Path, folder: Path) -> None:
    """Archive a folder with a small model, a corpus, a stopped run of them, and all its losses."""
    letters = random.Random(0)
    texts = ["".join(letters.choice("abc ") for _ in range(100)) for _ in range(20)]
    (folder / "corpus.json").write_text(json.dumps(texts))
    vocabulary = {letter: number for number, letter in enumerate("abcĠ")} | {"<|endoftext|>": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 5}
    write_narrow(folder / "model", "gpt2-tiny", **sizes)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    ).save_pretrained(folder / "model")
    runs = stored_runs(folder)
    env = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": 1}
    assert runs.finish("straight", env=env) == [0]
    losses = [line["loss"] for line in read_metrics(folder / "straight")]
    (folder / "losses.json").write_text(json.dumps(losses))
    killed = runs.finish("run", kill_after_steps=STORED_AFTER + 1, env=env)
    assert killed == [-signal.SIGKILL]
    shutil.rmtree(folder / "straight")
    for file in chain(folder.glob("*.samples"), folder.glob("*.stderr"), folder.rglob(".lock")):
        file.unlink()
    shutil.make_archive(str(archive).removesuffix(".tar.xz"), "xztar", folder)


# --- what a checkpoint holds, and when it counts ---


def make_run(decay: float = 0.1) -> tuple:
    """Return a small model, its optimizer with two groups of parameters, and a schedule."""
    sizes = {"n_embd": 16, "n_layer": 1, "vocab_size": 64}
    config = AutoConfig.from_pretrained(ROOT / "common/presets/gpt2-tiny", **sizes)
    model = AutoModelForCausalLM.from_config(config)
    groups: dict[bool, list] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.ndim > 1].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": decay},
            {"params": groups[False], "weight_decay": decay / 10, "lr": 3e-2},
        ],
        lr=1e-2,
    )
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def check_the_order_of_saves(folder: Path, monkeypatch) -> None:
    """state.json comes first; what is deleted counts no longer, and state.json names a newer one.

    A folder that has lost its .metadata is left out, and the next save removes it.
    """
    run, state = make_run(), {"step": 0}

    def check_removal(path: Path) -> None:
        assert not checkpoint.is_complete(path), f"{path.name} is complete and being deleted"
        newest = max(checkpoint.complete_checkpoints(folder))
        assert newest_step(folder) == newest, f"{path.name} is deleted before state.json is written"
        shutil.rmtree(path)

    def steps() -> list[int]:
        return sorted(int(path.name[5:]) for path in (folder / "checkpoints").iterdir())

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "remove_folder", check_removal)
        assert not checkpoint.load_checkpoint(folder, *run, state, {"lr": 1})
        assert json.loads((folder / "state.json").read_text())["training"] == {"lr": 1}
        for step in (1, 2, 3):
            checkpoint.save_checkpoint(folder, *run, {"step": step}, keep=2)
    assert steps() == [2, 3] and newest_step(folder) == 3
    (folder / "checkpoints/step-00000003/.metadata").unlink()
    assert checkpoint.load_checkpoint(folder, *run, state, {"lr": 1}) and state == {"step": 2}
    checkpoint.save_checkpoint(folder, *run, {"step": 4}, keep=9)
    assert steps() == [2, 4] and newest_step(folder) == 4


@pytest.mark.check
def test_the_order_of_saves(tmp_path, monkeypatch):
    check_the_order_of_saves(tmp_path, monkeypatch)


def delete_at_once(monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "_delete", lambda folder: checkpoint.remove_folder(folder))


def delete_first(monkeypatch) -> None:
    write = checkpoint._write_state

    def delete_and_write(run_dir: Path, content: dict) -> None:
        for old in list(checkpoint.complete_checkpoints(run_dir).values())[:-2]:
            checkpoint._delete(old)
        write(run_dir, content)

    monkeypatch.setattr(checkpoint, "_write_state", delete_and_write)


@pytest.mark.check
@pytest.mark.parametrize(
    ("bug", "seen"), [(delete_at_once, "complete and being"), (delete_first, "before state.json")]
)
def test_planted_order_is_noticed(tmp_path, monkeypatch, bug, seen):
    bug(monkeypatch)
    with pytest.raises(RunError, match=f"step-00000001 is (deleted )?{seen}"):
        check_the_order_of_saves(tmp_path, monkeypatch)


@pytest.mark.check
def test_all_generators_go_on_where_they_were():
    """Also those that no model of this guide draws from: a reader's may."""

    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), np.random.rand(), random.random()

    state = checkpoint.get_rng_state()
    first = draw()
    assert all(one != other for one, other in zip(first, draw(), strict=True))
    checkpoint.set_rng_state(state)
    assert draw() == first


@pytest.mark.check
def test_a_checkpoint_holds_what_dcp_copies_from_a_gpu():
    """Its copy for an asynchronous checkpoint refuses other types, such as NumPy's arrays."""
    model, optimizer, lr_scheduler = make_run(0.1)
    content = checkpoint.collect_content(model, optimizer, lr_scheduler, {"step": 1})
    kinds = {type(leaf) for leaf in tree_leaves(content)}
    assert torch.Tensor in kinds and kinds <= {torch.Tensor, int, float, str, bool, type(None)}
    assert np.ndarray in {type(leaf) for leaf in tree_leaves({**content, "rng": np.ones(2)})}


@pytest.mark.check
def test_groups_of_parameters_keep_what_was_saved(tmp_path):
    """Many readers have two groups: norms and biases are not decayed. What was saved wins."""

    model, optimizer, lr_scheduler = saved = make_run(0.1)
    ids = torch.arange(64).view(2, 32)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    lr_scheduler.step()
    loaded, state = make_run(0.5), {"step": 0}
    assert not checkpoint.load_checkpoint(tmp_path, *loaded, state, {})
    checkpoint.save_checkpoint(tmp_path, *saved, {"step": 1}, keep=1)
    assert checkpoint.load_checkpoint(tmp_path, *loaded, state, {})
    for one, other in zip(saved, loaded, strict=True):
        assert_same_tensors(one.state_dict(), other.state_dict())
    assert [group["weight_decay"] for group in loaded[1].param_groups] == [0.1, 0.01]
    assert state["step"] == 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store_checkpoint(Path(sys.argv[1]).absolute(), Path(folder))

"""What chapter 1 computes and what it leaves behind."""

import contextlib
import math
import re
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT, make_variant, plant, read_metrics, register, run_script
from runner import load_script
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from common.data import ResumableSampler, Sequences, load_sequences
from common.inputs import models
from common.inputs.token_files import Tokens
from common.timers import PhaseTimers

SCRIPT = "01-single-gpu/train_llm.py"
FAST = ("-s", 32, "--max-steps", 20, "--log-freq", 1, "--warmup-steps", 5)
KEYS = {
    *("step", "epoch", "loss", "lr", "grad_norm"),
    *("tokens_per_s", "tokens_per_s_per_device", "mfu", "peak_mem_gib"),
    *("time/data", "time/forward", "time/backward", "time/update", "time/total"),
}
EVALUATION_KEYS = {"eval_loss", "perplexity", "bits_per_byte"}


def column(metrics: list[dict], key: str) -> list[float]:
    return [line[key] for line in metrics]


def test_accumulation_gives_the_same_losses(train):
    eight, four, two = (
        train(*FAST, "--global-batch-size", 8, "-b", size, name=f"b{size}") for size in (8, 4, 2)
    )
    assert eight[0]["loss"] > eight[-1]["loss"] + 0.5
    for found in (four, two):
        for key, rel in (("loss", 1e-6), ("grad_norm", 1e-3)):
            assert column(found, key) == pytest.approx(column(eight, key), rel=rel)


NOT_DIVIDED = "loss = model(**batch).loss / accumulation", "loss = model(**batch).loss"
NOT_APART = 'with timers("evaluate"):', "if True:"
register("01-single-gpu", [NOT_DIVIDED])
register("01-single-gpu", [NOT_APART])


@pytest.mark.nightly
def test_a_loss_that_is_not_divided_is_noticed(train, tmp_path, monkeypatch):
    """The planted bug adds up the micro-batches' gradients without taking their mean."""
    wrong = plant("01-single-gpu", tmp_path / "chapter", [NOT_DIVIDED])
    once = train(*FAST, "--global-batch-size", 8, "-b", 8, name="once")
    broken = train(*FAST, "--global-batch-size", 8, "-b", 2, name="broken", chapter=wrong)
    assert broken[0]["loss"] == pytest.approx(4 * once[0]["loss"], rel=1e-3)
    assert broken[0]["grad_norm"] == pytest.approx(4 * once[0]["grad_norm"], rel=1e-3)


@pytest.mark.ci
def test_logged_loss_is_the_mean_since_the_last_log(train):
    each = train(*FAST, "--global-batch-size", 2, "-b", 1, name="each")
    flags = [flag if flag != 1 else 7 for flag in FAST]
    seventh = train(*flags, "--global-batch-size", 2, "-b", 1, name="seventh")
    assert column(seventh, "step") == [7, 14, 20]
    losses = column(each, "loss")
    means = [sum(losses[a:b]) / (b - a) for a, b in ((0, 7), (7, 14), (14, 20))]
    assert column(seventh, "loss") == pytest.approx(means, rel=1e-6)


def test_learning_rate_follows_the_schedule(train):
    metrics = train(*FAST, "--global-batch-size", 2, "--lr", 0.01)
    expected = [0.01 * step / 5 for step in range(1, 6)]
    expected += [
        0.01 * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 6) / 14))) for step in range(6, 21)
    ]
    assert column(metrics, "lr") == pytest.approx(expected, rel=1e-12)
    # By default, a quarter of the steps warm up to 1 / width.
    few = ("-s", 32, "--global-batch-size", 2, "--max-steps", 8, "--log-freq", 1)
    short = column(train(*few, name="short"), "lr")
    assert short[:3] == pytest.approx([1 / 256, 1 / 128, 1 / 128]) and short[-1] < short[2]


def test_first_losses_are_those_of_a_loop_written_by_hand(train, monkeypatch):
    """An independent loop: the samples by the sampler, all else from the definition."""
    metrics = train(*FAST, "--global-batch-size", 8, "--max-grad-norm", 0.5, name="run")
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    args = load_script(ROOT / SCRIPT).get_args()
    config = models.load_config("gpt2-tiny")
    args.seq_length = 32
    blocks, _ = load_sequences(args, models.load_tokenizer("gpt2-tiny"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.95), weight_decay=0.1)
    order = list(ResumableSampler(blocks, num_replicas=1, rank=0, seed=0))
    for step in range(8):
        ids = torch.stack([blocks[i]["input_ids"] for i in order[8 * step : 8 * step + 8]])
        logits = model(ids).logits[:, :-1].log_softmax(-1)
        loss = -logits.gather(2, ids[:, 1:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert metrics[step]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics[step]["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = metrics[step]["lr"]
        optimizer.step()


@pytest.mark.check
def test_evaluation_counts_every_token_once():
    config = models.load_config("gpt2-tiny")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    evaluate = load_script(ROOT / SCRIPT).evaluate
    tokens = torch.randint(4096, (10, 16)).numpy()
    blocks = Sequences(Tokens([tokens.ravel()], "", tokens_per_byte=0.25), 16)
    ids = torch.from_numpy(tokens)
    expected = model(ids, labels=ids).loss.item()
    for batch_size in (1, 3, 4, 10):
        padded = blocks.pad_to_multiple(2 * batch_size)
        found = evaluate(
            model, DataLoader(padded, batch_size=batch_size), model.device, blocks.tokens_per_byte
        )
        assert found["eval_loss"] == pytest.approx(expected, rel=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(expected / math.log(2) / 4, rel=1e-6)
    assert model.training


@pytest.mark.check
@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-tiny"])
def test_attention_without_a_mask_is_causal(model):
    config = models.load_config(model)
    ids = torch.randint(4096, (2, 64), generator=torch.Generator().manual_seed(1))
    logits = []
    for attention in (models.causal_attention(config), "eager"):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        logits.append(network(ids).logits)
    assert torch.allclose(*logits, atol=1e-5)


@pytest.mark.check
def test_sequences_that_are_evaluated():
    """They are evenly spaced; all of them, if there are no more."""
    sequences = Sequences(Tokens([np.arange(30)], "", 1.0), 3)
    for limit, expected in ((3, [0, 3, 6]), (100, list(range(10)))):
        sample = sequences.sample(limit)
        rows = [sample[index]["input_ids"][0].item() // 3 for index in range(len(sample))]
        assert rows == expected


EVALUATED = ("-s", 32, "--max-steps", 12, "--log-freq", 5, "--eval-freq", 6)
IN_A_STEP = ("data", "forward", "backward", "update")


@pytest.fixture
def timed(monkeypatch) -> set[str]:
    """The phases that a script times; test_timers.py shows which of them count in a step."""
    phases, call = set(), PhaseTimers.__call__

    def note(self: PhaseTimers, phase: str) -> contextlib.AbstractContextManager:
        phases.add(phase)
        return call(self, phase)

    monkeypatch.setattr(PhaseTimers, "__call__", note)
    return phases


def test_metrics_and_run_directory(train, tmp_path, timed):
    metrics = train(*EVALUATED)
    assert timed == {*IN_A_STEP, "evaluate", "save"}
    assert column(metrics, "step") == [5, 6, 10, 12]
    assert set(metrics[0]) == set(metrics[2]) == KEYS
    assert set(metrics[1]) == EVALUATION_KEYS | {"step"}
    assert set(metrics[3]) == KEYS | EVALUATION_KEYS
    for line in (metrics[0], metrics[2], metrics[3]):
        assert 0 < sum(line[f"time/{phase}"] for phase in IN_A_STEP) <= line["time/total"]
        per_step = 24 * 32 / (line["time/total"] / 1000)
        assert line["tokens_per_s"] == pytest.approx(per_step)
        assert line["tokens_per_s_per_device"] == line["tokens_per_s"]
        assert 0.1 < line["peak_mem_gib"] < 20
    run_dir = tmp_path / "run"
    names = {path.name for path in run_dir.iterdir()}
    assert names == {"newest", "metrics.jsonl", "checkpoints", ".lock"}
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000012"]


def test_planted_evaluation_in_the_time_of_a_step_is_noticed(train, tmp_path, timed):
    train(*EVALUATED, chapter=plant("01-single-gpu", tmp_path / "chapter", [NOT_APART]))
    assert "evaluate" not in timed


@pytest.mark.nightly
def test_bfloat16_weights_train_and_rotary_tables_stay_float32(train, monkeypatch, tmp_path):
    buffers: list[torch.Tensor] = []
    note = lambda checkpoints, model, *_: buffers.extend(model.buffers())  # noqa: E731
    monkeypatch.setattr("common.checkpoint.Checkpoints.save", note)
    variant = make_variant(tmp_path, "01-single-gpu", "bfloat16-weights")
    metrics = train(*FAST, "-m", "llama-tiny", chapter=str(variant))
    assert {buffer.dtype for buffer in buffers} == {torch.float32}
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.3


@pytest.mark.nightly
def test_compiled_model_trains_alike(train):
    eager = train(*FAST, "--global-batch-size", 4, name="eager")
    compiled = train(*FAST, "--global-batch-size", 4, "--compile", name="compiled")
    assert column(compiled, "loss") == pytest.approx(column(eager, "loss"), rel=1e-5)


@pytest.mark.ci
def test_log_says_what_matters_and_no_secret(tmp_path):
    secrets = {"WANDB_API_KEY": "a" * 40, "HF_TOKEN": "hf_secret", "MY_PASSWORD": "hunter2"}
    variables = {**secrets, "OMP_NUM_THREADS": "2", "WANDB_MODE": "offline"}
    few = (*FAST, "--eval-sequences", 8, "--save-dir", tmp_path)
    done = run_script(SCRIPT, *few, **variables)
    assert done.returncode == 0, done.stderr
    (run_dir,) = tmp_path.iterdir()
    assert run_dir.name.startswith("gpt2-tiny-python-stdlib-20"), "a name is generated"
    assert "'OMP_NUM_THREADS': '2'" in done.stderr and "torch 2." in done.stderr
    assert "8 sequences x world size 1 x accumulation 3 = 24 sequences = 768 tokens" in done.stderr
    assert done.stderr.splitlines()[-1].endswith(f"01-single-gpu/generate.py {run_dir}")
    assert re.search(r" \| eval loss \S+ \| perplexity \S+ \| \S+ bits/byte\n", done.stderr)
    written = done.stdout + done.stderr
    for path in run_dir.rglob("*"):
        written += path.read_text(errors="replace") if path.is_file() else ""
    assert len(list(run_dir.glob("wandb/offline-run-*/*.wandb"))) == 1
    for secret in secrets.values():
        assert secret not in written


@pytest.mark.nightly
def test_default_training_runs_to_its_end(tmp_path):
    """The README's command, without a limit on its steps.

    The corpus is Python's standard library, so the numbers depend on Python's version: with 3.11,
    the loss is 3.90 and a byte takes 1.55 bits. A model that has learnt nothing has a loss of
    ln(4096) = 8.32. One that has seen the evaluated files, or sees the tokens that it predicts, has
    one far below 3.5.
    """
    done = run_script(SCRIPT, "--save-dir", tmp_path, "-e", "default", timeout=3600, real=True)
    assert done.returncode == 0, done.stderr
    last = read_metrics(tmp_path / "default")[-1]
    assert f"step {last['step']}/{last['step']} " in done.stderr
    assert 3.5 < last["eval_loss"] < 4.3
    assert 1.3 < last["bits_per_byte"] < 1.75

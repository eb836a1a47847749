"""A run becomes a folder that transformers loads, with the run's own numbers, and trains on."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import ROOT, first_then_nightly, read_metrics, save_run
from runner import finish, server_context, start
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import models

SCRIPT = ROOT / "04-fsdp/export.py"
SMALL = ["-s", 32, "--global-batch-size", 6, "--max-steps", 4, "--ckpt-freq", 2, "--log-freq", 1]
IDS = torch.arange(64).view(2, 32) * 61 % 4096
# By run: its model, and the step of its last checkpoint.
RUNS = {"gpt2": ("gpt2-tiny", 4), "fsdp": ("llama-tiny", 7)}
TIED = "lm_head.weight"


def random_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of which no two tensors are alike, the same each time."""
    model = AutoModelForCausalLM.from_config(models.load_config(name)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.1, generator=generator)
    return model


def save_sharded(rank: int, run_dir: Path) -> None:
    """Save a run as the ranks of FSDP2 do, each its shards."""
    dist.init_process_group("gloo", f"file://{run_dir}.store", rank=rank, world_size=2)
    model = random_model("llama-tiny")
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    save_run(run_dir, model, 7, "llama-tiny")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(make_folder) -> Path:
    """Return a folder with a corpus, a run of chapter 1 on it, and one that two ranks saved."""
    folder = make_folder("runs")
    corpus = "".join(f"Text number {n}, of many words. " * 20 for n in range(50))
    (folder / "corpus.txt").write_text(corpus)
    args = ["-d", folder / "corpus.txt", *SMALL, "--save-dir", folder, "-e", "gpt2"]
    process = server_context().Process
    ranks = [process(target=save_sharded, args=(rank, folder / "fsdp")) for rank in (0, 1)]
    for each in ranks:
        each.start()
    assert [finish(each) for each in (start(args), *ranks)] == [0, 0, 0]
    return folder


@pytest.fixture
def export(run_main):
    """Return a function that runs the script in this process and returns what it printed."""
    return lambda *args: run_main(SCRIPT, *args)[0]


def read_run(run_dir: Path, name: str, step: int) -> nn.Module:
    """Return the model that the run had after a step, by another way than the script's."""
    model = AutoModelForCausalLM.from_config(models.load_config(name))
    path = run_dir / f"checkpoints/step-{step:08d}"
    dcp.load({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)
    return model


def compare(folder: Path, expected: nn.Module) -> None:
    """Compare what plain transformers makes of a folder with a model, in all weights and logits."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    state, expected_state = model.state_dict(), expected.state_dict()
    assert state.keys() == expected_state.keys()
    for name, tensor in expected_state.items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name
    with torch.no_grad():
        logits, expected_logits = model(IDS).logits, expected.eval()(IDS).logits
    assert expected_logits.std() > 0.1
    assert torch.allclose(logits, expected_logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("run", first_then_nightly(RUNS))
def test_transformers_has_the_numbers_of_the_run(run, runs, export, tmp_path):
    """Of one process, and of shards of two ranks; in several files."""
    target, (name, step) = tmp_path / "model", RUNS[run]
    out = export(runs / run, target, "--max-shard-size", "1MB")
    expected = random_model(name) if run == "fsdp" else read_run(runs / run, name, step)
    compare(target, expected)
    files = [load_file(path) for path in target.glob("*.safetensors")]
    weights = [name for file in files for name in file]
    assert len(files) > 2 and sorted(weights) == sorted(dict(expected.named_parameters()))
    assert (TIED not in weights) == (run == "gpt2"), "tied weights stand there once"
    first_line, second_line, *_ = out.splitlines()
    names = f"(model {name}, tokenizer {name})"
    assert first_line == f"{target}: step {step} of {runs / run} {names}"
    assert second_line.startswith(f"{expected.num_parameters():,} parameters in float32, ")
    assert f"bash 04-fsdp/launch.sh --pretrained -m {target}\n" in out
    assert list(tmp_path.iterdir()) == [target]
    modes = {path.stat().st_mode for path in target.iterdir()}
    assert len(modes) == 1, "who may read one file may read all"


@pytest.mark.ci
def test_a_tokenizer_that_begins_texts_no_longer_does(runs, export, tmp_path):
    """The run has trained without the token."""
    tokenizer = models.load_tokenizer("gpt2-tiny")
    bare = tokenizer("def")["input_ids"]
    begin = (tokenizer.bos_token, tokenizer.bos_token_id)
    template = TemplateProcessing(f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(tmp_path / "begins")
    again = AutoTokenizer.from_pretrained(tmp_path / "begins")
    assert again("def")["input_ids"] == [begin[1], *bare]
    export(runs / "gpt2", tmp_path / "model", "--tokenizer-name", tmp_path / "begins")
    for load in (AutoTokenizer.from_pretrained, models.load_tokenizer):
        assert load(str(tmp_path / "model"))("def")["input_ids"] == bare


@pytest.mark.nightly
def test_tokenizer_and_settings_come_back(runs, export, tmp_path):
    folder = tmp_path / "model"
    export(runs / "gpt2", folder)
    before, after = models.load_tokenizer("gpt2-tiny"), AutoTokenizer.from_pretrained(folder)
    text = "\tStra\u00dfe, \u65e5\u672c <|endoftext|> a  b\n"
    ids = after(text)["input_ids"]
    assert ids == before(text)["input_ids"] and after.decode(ids) == text
    assert after.eos_token_id == before.eos_token_id == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == 0
    assert model.config.use_cache and model.generation_config.use_cache


@pytest.mark.ci
def test_training_goes_on_from_the_folder(runs, export, tmp_path):
    """A step at rate 0 changes no weight, so its evaluation is that of the folder."""
    folder = tmp_path / "model"
    export(runs / "gpt2", folder)
    args = ["-d", runs / "corpus.txt", *SMALL, "--max-steps", 1, "--lr", 0, "--seed", 5]
    args += ["--save-dir", tmp_path, "-e", "run", "-m", folder, "--pretrained"]
    assert finish(start(args)) == 0
    expected, found = (read_metrics(run)[-1] for run in (runs / "gpt2", tmp_path / "run"))
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


@pytest.mark.nightly
def test_dtypes(runs, export, tmp_path):
    export(runs / "gpt2", tmp_path / "half", "--param-dtype", "bfloat16")
    rounded = read_run(runs / "gpt2", "gpt2-tiny", 4).to(torch.bfloat16)
    compare(tmp_path / "half", rounded)
    model = random_model("gpt2-tiny", torch.bfloat16)
    save_run(tmp_path / "run", model, 7, "gpt2-tiny", "bfloat16")
    export(tmp_path / "run", tmp_path / "as-trained")
    compare(tmp_path / "as-trained", model)
    export(tmp_path / "run", tmp_path / "wide", "--param-dtype", "float32")
    compare(tmp_path / "wide", model.float())


# --- bad input ---


@pytest.mark.nightly
def test_bad_input(runs, refuse, tmp_path):
    run, thesis = runs / "gpt2", tmp_path / "thesis.txt"
    thesis.write_text("the only copy")
    for args, sentence in (
        ((runs,), "no run's folder with a complete checkpoint"),
        ((run, "--tokenizer-name", runs), "has no usable tokenizer"),
    ):
        assert sentence in refuse(SCRIPT, args[0], tmp_path / "model", *args[1:])
    assert f"{tmp_path} already exists" in refuse(SCRIPT, run, tmp_path)
    assert "could not be written (File exists)" in refuse(SCRIPT, run, thesis / "model")


def kill_at_rename() -> None:
    """All is written, but not yet under its name."""
    Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.nightly
def test_a_kill_leaves_nothing_under_the_name(runs, export, tmp_path):
    target = tmp_path / "model"
    process = start([runs / "gpt2", target], script=str(SCRIPT), plant=kill_at_rename)
    assert finish(process) == -signal.SIGKILL
    assert not target.exists() and len(list(tmp_path.glob(".model-*/model/*.safetensors"))) == 1
    export(runs / "gpt2", target)
    compare(target, read_run(runs / "gpt2", "gpt2-tiny", 4))

"""A run becomes a folder that transformers loads, with the run's own numbers, and trains on.

test_architectures.py does this with every architecture, from the shards of two ranks.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ROOT, read_metrics, save_run, write_corpus
from runner import finish, load_script, start
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from common.inputs import models

SCRIPT = ROOT / "04-fsdp/export.py"
SMALL = ["-s", 32, "--global-batch-size", 6, "--max-steps", 4, "--ckpt-freq", 2, "--log-freq", 1]
IDS = torch.arange(64).view(2, 32) * 61 % 4096


@pytest.fixture(scope="module")
def run(make_folder) -> Path:
    """Return the folder of a run of chapter 1. Its corpus is beside it."""
    folder = make_folder("runs")
    args = ["-d", write_corpus(folder), *SMALL, "--save-dir", folder, "-e", "run"]
    assert finish(start(args)) == 0
    return folder / "run"


@pytest.fixture
def export(run_main):
    """Return a function that runs the script in this process and returns what it printed."""
    return lambda *args: run_main(SCRIPT, *args)[0]


def read_run(run: Path) -> nn.Module:
    """Return the model that the run had after its last step, by another way than the script's."""
    model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    path = run / "checkpoints/step-00000004"
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


def test_transformers_has_the_numbers_of_the_run(run, export, tmp_path):
    """In several files."""
    target = tmp_path / "model"
    out = export(run, target, "--max-shard-size", "1MB")
    expected = read_run(run)
    compare(target, expected)
    files = [load_file(path) for path in target.glob("*.safetensors")]
    weights = [name for file in files for name in file]
    assert len(files) > 2 and sorted(weights) == sorted(dict(expected.named_parameters()))
    assert "lm_head.weight" not in weights, "tied weights stand there once"
    first_line, second_line, *_ = out.splitlines()
    names = "(model gpt2-tiny, tokenizer gpt2-tiny)"
    assert first_line == f"{target}: step 4 of {run} {names}"
    assert second_line.startswith(f"{expected.num_parameters():,} parameters in float32, ")
    assert f"bash 04-fsdp/launch.sh --pretrained -m {target}\n" in out
    assert list(tmp_path.iterdir()) == [target]
    modes = {path.stat().st_mode for path in target.iterdir()}
    assert len(modes) == 1, "who may read one file may read all"


@pytest.mark.ci
def test_a_tokenizer_that_begins_texts_no_longer_does(run, export, tmp_path):
    """The run has trained without the token."""
    tokenizer = models.load_tokenizer("gpt2-tiny")
    bare = tokenizer("def")["input_ids"]
    begin = (tokenizer.bos_token, tokenizer.bos_token_id)
    template = TemplateProcessing(f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(tmp_path / "begins")
    again = AutoTokenizer.from_pretrained(tmp_path / "begins")
    assert again("def")["input_ids"] == [begin[1], *bare]
    export(run, tmp_path / "model", "--tokenizer-name", tmp_path / "begins")
    for load in (AutoTokenizer.from_pretrained, models.load_tokenizer):
        assert load(str(tmp_path / "model"))("def")["input_ids"] == bare


@pytest.mark.nightly
def test_tokenizer_and_settings_come_back(run, export, tmp_path):
    folder = tmp_path / "model"
    export(run, folder)
    before, after = models.load_tokenizer("gpt2-tiny"), AutoTokenizer.from_pretrained(folder)
    text = "\tStra\u00dfe, \u65e5\u672c <|endoftext|> a  b\n"
    ids = after(text)["input_ids"]
    assert ids == before(text)["input_ids"] and after.decode(ids) == text
    assert after.eos_token_id == before.eos_token_id == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == 0
    assert model.config.use_cache and model.generation_config.use_cache


@pytest.mark.check
@pytest.mark.parametrize(
    ("stops", "expected"), [(2, 0), ([2, 3], 0), (None, 0), ([3, 4095], [0, 4095])]
)
def test_end_tokens_are_those_of_the_tokenizer(export, tmp_path, stops, expected):
    """The model had another vocabulary, in which token 2 was the end; here it is a quote.

    4095 is an added token: it ends the turns of a chat.
    """
    folder = tmp_path / "original"
    tokenizer = models.load_tokenizer("gpt2-tiny")
    assert tokenizer.eos_token_id == 0 and tokenizer.decode(2) == '"'
    tokenizer.add_special_tokens({"extra_special_tokens": [tokenizer.convert_ids_to_tokens(4095)]})
    tokenizer.save_pretrained(folder)
    config = models.load_config("gpt2-tiny")
    config.eos_token_id = 2
    model = AutoModelForCausalLM.from_config(config)
    if stops is None:
        config.save_pretrained(folder)
    else:
        model.generation_config = GenerationConfig(eos_token_id=stops, do_sample=True, top_k=7)
        model.save_pretrained(folder)
    save_run(tmp_path / "run", model, 7, str(folder))
    export(tmp_path / "run", tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert found.config.eos_token_id == 0 and found.generation_config.eos_token_id == expected
    assert found.generation_config.top_k == (None if stops is None else 7)


@pytest.mark.ci
def test_training_goes_on_from_the_folder(run, export, tmp_path):
    """A step at rate 0 changes no weight, so its evaluation is that of the folder."""
    folder = tmp_path / "model"
    export(run, folder)
    args = ["-d", run.parent / "corpus.json", *SMALL, "--max-steps", 1, "--lr", 0, "--seed", 5]
    args += ["--save-dir", tmp_path, "-e", "run", "-m", folder, "--pretrained"]
    assert finish(start(args)) == 0
    expected, found = (read_metrics(each)[-1] for each in (run, tmp_path / "run"))
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


@pytest.mark.nightly
def test_dtypes(run, export, tmp_path):
    model = read_run(run).to(torch.bfloat16)
    export(run, tmp_path / "half", "--param-dtype", "bfloat16")
    compare(tmp_path / "half", model)
    save_run(tmp_path / "run", model, 7, "gpt2-tiny", "bfloat16")
    export(tmp_path / "run", tmp_path / "as-trained")
    compare(tmp_path / "as-trained", model)


# --- bad input ---


@pytest.mark.nightly
def test_bad_input(run, refuse, tmp_path):
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("the only copy")
    other, target = run.parent, tmp_path / "model"
    assert "no run's folder with a complete checkpoint" in refuse(SCRIPT, other, target)
    said = refuse(SCRIPT, run, target, "--tokenizer-name", other)
    assert "has no usable tokenizer" in said
    assert f"{tmp_path} already exists" in refuse(SCRIPT, run, tmp_path)
    assert "could not be written (File exists)" in refuse(SCRIPT, run, thesis / "model")


@pytest.mark.check
@pytest.mark.parametrize("size", ["5", "5GiB", "abc", "0MB", "-5MB"])
def test_sizes_of_files_that_are_no_sizes(run, tmp_path, capsys, monkeypatch, size):
    words = ["export.py", str(run), str(tmp_path / "model"), f"--max-shard-size={size}"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as exit_:
        load_script(SCRIPT).main()
    assert exit_.value.code == 2
    assert f"{size!r} is not a size such as 500MB or 5GB" in capsys.readouterr().err


def kill_at_rename() -> None:
    """All is written, but not yet under its name."""
    Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.nightly
def test_a_kill_leaves_nothing_under_the_name(run, export, tmp_path):
    target = tmp_path / "model"
    process = start([run, target], script=str(SCRIPT), plant=kill_at_rename)
    assert finish(process) == -signal.SIGKILL
    assert not target.exists() and len(list(tmp_path.glob(".model-*/model/*.safetensors"))) == 1
    export(run, target)
    compare(target, read_run(run))

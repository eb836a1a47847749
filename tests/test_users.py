"""What users bring: launchers, terminals, variables, models, and workers that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb
from helpers import ROOT, environment, read_metrics, run_script, save_run, write_narrow
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from common import launch, storage, tracker
from common.errors import RunError
from common.inputs import models

from trained_model import load_trained


def change_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- launchers ---

ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def prepare(monkeypatch: pytest.MonkeyPatch, place: dict[str, object]) -> dict[str, str]:
    """Return the variables that torchrun would set, after prepare_environment."""
    monkeypatch.setattr(os, "environ", {key: str(value) for key, value in place.items()})
    launch.prepare_environment()
    return {name: os.environ[name] for name in launch.RANK_VARIABLES}


@pytest.mark.check
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK is 0"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "SLURM_NTASKS is 2"),
        ({"RANK": "1", "PALS_RANKID": "1"}, "PALS_RANKID is 1"),
    ],
)
def test_a_process_that_cannot_know_its_rank_does_not_train_alone(monkeypatch, place, name):
    with pytest.raises(RunError) as error:
        prepare(monkeypatch, place)
    assert str(error.value).startswith(f"{name}, so there are several processes, but this one")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert prepare(monkeypatch, {**place, "WORLD_SIZE": "1"}).items() >= alone.items()
    one = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert prepare(monkeypatch, one).items() >= alone.items()


@pytest.mark.check
@pytest.mark.parametrize(
    ("n_gpus", "place", "refused"),
    [
        (1, {}, False),  # each process sees another GPU
        (1, {"LOCAL_WORLD_SIZE": "4"}, True),  # torchrun
        (3, {}, True),
        (4, {"LOCAL_WORLD_SIZE": "4"}, False),
        (0, {}, False),
    ],
)
def test_processes_and_the_gpus_that_they_see(monkeypatch, n_gpus, place, refused):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", **ADDRESS, **place}
    if refused:
        for call in (lambda: prepare(monkeypatch, place), lambda: launch.gpu_of(3)):
            with pytest.raises(RunError, match=f"4 processes on .* need 4 GPUs.* sees {n_gpus}:"):
                call()
    else:
        assert prepare(monkeypatch, place)["LOCAL_RANK"] == "3"
        assert n_gpus == 0 or launch.gpu_of(3) == (0 if n_gpus == 1 else 3)


# --- what is left over in a shell, and terminals that close ---


@pytest.mark.check
@pytest.mark.parametrize("left_over", [{"RANK": 1}, {"RANK": 1, "WORLD_SIZE": 1}])
def test_a_rank_that_is_left_over_in_the_shell_prints(left_over):
    script = "01-single-gpu/generate.py"
    assert run_script(script, "--help", **left_over).stdout.startswith("usage: ")
    done = run_script(script, "run", "--no-such-flag", **left_over)
    assert done.returncode == 2 and "--no-such-flag" in done.stderr


@pytest.mark.parametrize(
    ("chapter", "open_pair"), [("01-single-gpu", os.pipe), ("03-multi-node", os.openpty)]
)
def test_a_training_survives_its_terminal(corpus, tmp_path, chapter, open_pair):
    """And a pipe whose reader ends, such as head -1."""
    flags = ["-d", corpus, "--save-dir", tmp_path, "-e", "run", "-s", 32]
    flags += ["--global-batch-size", 6, "--log-freq", 1, "--max-steps", 4]
    reader, writer = open_pair()
    command = [sys.executable, f"{chapter}/train_llm.py", *map(str, flags)]
    env = environment(WANDB_MODE="disabled")
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=writer, stderr=writer)
    os.close(writer)
    assert b"20" in os.read(reader, 100)
    os.close(reader)
    assert process.wait(300) == 0
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


# --- variables and arguments ---


@pytest.mark.check
def test_the_variables_of_wandb(tmp_path, monkeypatch):
    """Without them, see test_wandb.py."""
    given = {}
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options))
    variables = {"WANDB_MODE": "offline", "WANDB_PROJECT": "p", "WANDB_NAME": "n"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracker.Tracker(tmp_path, {"total_steps": 1}, 0)
    assert (given["project"], given["name"]) == ("p", "n")


@pytest.mark.check
def test_a_home_folder_is_not_a_folder_named_tilde(monkeypatch, tmp_path):
    """The shell does not know it in --save-dir=~/runs and in an @file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage.as_path("~/runs") == tmp_path / "runs"


# --- models and tokenizers ---


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model with its tokenizer."""
    path = write_narrow(tmp_path / "model", "llama-tiny")
    models.load_tokenizer("gpt2-tiny").save_pretrained(path)
    return path


@pytest.mark.check
@pytest.mark.parametrize("pad", [0, 1, -1, 10**6])
def test_padding_is_no_token_of_a_text_and_not_too_large(folder, pad):
    """The embedding of a padding token is zero and is not trained; sequences have no padding.

    0 is the end-of-text token, and 1 is an exclamation mark.
    """
    change_json(folder / "config.json", pad_token_id=pad)
    tokenizer = models.load_tokenizer(str(folder))
    assert tokenizer.eos_token_id == 0 and tokenizer.decode(1) == "!"
    config = models.load_config(str(folder), tokenizer)
    assert config.pad_token_id is None
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.tensor([[5, 0, 6, 1, 4095, 7]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    weight = model.get_input_embeddings().weight
    for token in (0, 1, 4095):
        assert weight[token].norm() > 0 and weight.grad[token].norm() > 0


@pytest.mark.check
@pytest.mark.parametrize("is_named", [True, False], ids=["pad_token", "another special token"])
def test_padding_that_is_a_special_token_is_kept(folder, is_named):
    change_json(folder / "config.json", pad_token_id=4095)
    tokenizer = models.load_tokenizer(str(folder))
    last = tokenizer.convert_ids_to_tokens(4095)
    special = {"pad_token": last} if is_named else {"extra_special_tokens": [last]}
    tokenizer.add_special_tokens(special)
    tokenizer.save_pretrained(folder)
    again = models.load_tokenizer(str(folder))
    assert models.load_config(str(folder), again).pad_token_id == 4095


@pytest.mark.check
def test_padding_that_is_no_token_is_kept(folder):
    """Without it, a training would start from other weights than before."""
    change_json(folder / "config.json", pad_token_id=4097, vocab_size=4100)
    tokenizer = models.load_tokenizer(str(folder))
    assert models.load_config(str(folder), tokenizer).pad_token_id == 4097


@pytest.mark.check
def test_a_run_with_a_letter_as_padding_is_still_read(folder, tmp_path):
    """Earlier versions trained it so. The padding does not change what the model computes."""
    change_json(folder / "config.json", pad_token_id=1)
    config = AutoConfig.from_pretrained(folder, use_cache=False)
    assert config.pad_token_id == 1
    model = AutoModelForCausalLM.from_config(config)
    save_run(tmp_path / "run", model, 7, str(folder))
    trained = load_trained(str(tmp_path / "run"), None, None, None)
    assert trained.model.config.pad_token_id is None
    expected = model.get_input_embeddings().weight
    assert torch.equal(trained.model.get_input_embeddings().weight, expected)


@pytest.mark.check
@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GemmaTokenizer", "GPT2Tokenizer"])
def test_tokenizer_json_counts_not_the_rules_of_a_class(folder, name):
    """https://github.com/huggingface/transformers/issues/45488"""
    change_json(folder / "tokenizer_config.json", tokenizer_class=name)
    text = "def size(a):\n    return 'Größe' + str(12345)  # can't"
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    tokenizer = models.load_tokenizer(str(folder))
    found = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert found == expected
    assert tokenizer.eos_token == "<|endoftext|>"


@pytest.mark.check
def test_token_ids_with_a_gap(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["zzzz"] = 70_000
    file.write_text(json.dumps(content))
    tokenizer = models.load_tokenizer(str(folder))
    with pytest.raises(RunError, match="The tokenizer has 70001 tokens and the model only 4096"):
        models.load_config(str(folder), tokenizer)
    assert models.load_config("gpt2-tiny", tokenizer).vocab_size == 70_016

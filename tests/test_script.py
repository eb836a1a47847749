"""The form of the scripts: what the style asks for and a machine can count."""

import argparse
import re
import sys

import pytest
from conftest import CHAPTERS, ROOT, load_script

SECTIONS = ["setup", "model", "data", "optimizer", "resume", "train"]
FLAGS = {
    "experiment_name": None,
    "save_dir": "outputs",
    "seed": 0,
    "dataset_name": "python-stdlib",
    "dataset_subset": None,
    "text_column": None,
    "seq_length": None,
    "num_workers": 0,
    "model_name": "gpt2-tiny",
    "tokenizer_name": None,
    "pretrained": False,
    "param_dtype": "float32",
    "compile": False,
    "batch_size": 8,
    "global_batch_size": 24,
    "lr": None,
    "warmup_steps": None,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "num_epochs": 0.6,
    "max_steps": None,
    "log_freq": 10,
    "eval_freq": 200,
    "ckpt_freq": 50,
    "keep_checkpoints": 2,
}
SHORT = {"e": "experiment_name", "d": "dataset_name", "s": "seq_length", "m": "model_name"}


@pytest.fixture(params=CHAPTERS)
def chapter(request) -> str:
    return request.param


def test_sections_stand_in_order(chapter):
    source = (ROOT / chapter / "train_llm.py").read_text()
    assert re.findall(r"^    # --- (\w+) ---$", source, re.MULTILINE) == SECTIONS
    docstring = source.split('"""')[1].strip().splitlines()
    assert docstring[0].endswith(".")
    (started,) = re.findall(rf"{chapter}/[\w.]+", docstring[-1])
    assert (ROOT / started).exists()


def test_script_is_plain(chapter):
    source = (ROOT / chapter / "train_llm.py").read_text()
    assert source.isascii() and max(map(len, source.splitlines())) <= 100
    for word in ("sys.path", "Trainer", "callback", "NEW"):
        assert word not in source
    assert not re.search(r"^\s*class ", source, re.MULTILINE)


def test_flags_and_their_help(chapter, monkeypatch):
    parsers = []
    parse = argparse.ArgumentParser.parse_args

    def note(self, *args: object) -> argparse.Namespace:
        parsers.append(self)
        return parse(self, *args)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", note)
    monkeypatch.setattr(sys, "argv", ["train_llm.py"])
    args = vars(load_script(ROOT / chapter / "train_llm.py").get_args())
    assert {name: args[name] for name in FLAGS} == FLAGS
    for action in parsers[0]._actions:
        assert action.help and len(action.help) <= 45, action.dest
    by_flag = parsers[0]._option_string_actions
    for letter, name in {**SHORT, "b": "batch_size"}.items():
        assert by_flag[f"-{letter}"].dest == name


def test_common_modules_are_small_and_quiet():
    for path in (ROOT / "common").glob("*.py"):
        source = path.read_text()
        assert len(source.splitlines()) <= 200, path
        for word in ("DistributedDataParallel", "fully_shard"):
            assert word not in source

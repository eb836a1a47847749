"""The form of the scripts: their sections and flags."""

import argparse
import re
from pathlib import Path

import pytest
from helpers import CHAPTERS, ROOT
from runner import load_script

pytestmark = pytest.mark.check

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
    "eval_sequences": 512,
    "ckpt_freq": 50,
    "keep_checkpoints": 2,
}
SHORT = {"e": "experiment_name", "d": "dataset_name", "s": "seq_length", "m": "model_name"}
SHORT |= {"b": "batch_size"}


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


def get_parser(script: Path, monkeypatch) -> argparse.ArgumentParser:
    """Return the parser that a script's get_args() makes."""
    parsers = []

    def note(self, *_: object, **__: object) -> argparse.Namespace:
        parsers.append(self)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", note)
    with pytest.raises(SystemExit):
        load_script(script).get_args()
    return parsers[0]


def test_flags_and_their_defaults(chapter, monkeypatch):
    parser = get_parser(ROOT / chapter / "train_llm.py", monkeypatch)
    assert {name: parser.get_default(name) for name in FLAGS} == FLAGS
    for letter, name in SHORT.items():
        assert parser._option_string_actions[f"-{letter}"].dest == name


SCRIPTS = [path for path in ROOT.glob("[0-9]*/*.py") if "def get_args" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_flag_has_a_help_text(script, monkeypatch):
    parser = get_parser(script, monkeypatch)
    assert [action.dest for action in parser._actions if not action.help] == []


def test_common_leaves_to_the_chapters_what_they_teach():
    for path in (ROOT / "common").rglob("*.py"):
        for word in ("DistributedDataParallel(", "fully_shard("):
            assert word not in path.read_text(), path

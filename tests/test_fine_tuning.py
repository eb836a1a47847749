"""Fine-tuning: weights of a folder in every chapter, and data sets of the hub."""

import argparse
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from helpers import (
    CHAPTERS,
    Ladder,
    Run,
    assert_parity,
    first_then_nightly,
    float32,
    read_metrics,
    run_script,
)
from runner import finish, start
from transformers import AutoModelForCausalLM

from common import models
from common.data import load_sequences
from common.documents import is_held_out


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer("gpt2-tiny")


# --- weights of a folder, in every chapter ---


def own_weights(folder: Path) -> Path:
    """Save a model with weights that no seed of the tests draws."""
    torch.manual_seed(99)
    model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    model.save_pretrained(folder)
    models.load_tokenizer("gpt2-tiny").save_pretrained(folder)
    return folder


RATE = ("--lr", 1e-2)  # to see losses fall in a few steps


@pytest.mark.check
def test_the_default_rate_is_lower_for_pretrained_weights(train, tmp_path):
    few = ("-m", own_weights(tmp_path / "model"), "-s", 16, "--max-steps", 1, "--warmup-steps", 0)
    for args, rate in (((), 1 / 128), (("--pretrained",), 5e-5)):
        (line,) = train(*few, *args, name=f"run-{len(args)}")
        assert line["lr"] == pytest.approx(rate)


class FineTuning:
    """A folder of weights, chapter 1's training from it, and those of others on two ranks."""

    def __init__(self, folder: Path) -> None:
        self.model, self.ladder, self.alone = own_weights(folder / "model"), Ladder(folder), "alone"
        flags = self.ladder.flags(self.alone, "-m", self.model, "--pretrained", "-b", 24, *RATE)
        assert finish(start(flags, samples_file=self.ladder.samples_file(self.alone))) == 0

    def compare(self, chapter: str, *pretrained: str) -> None:
        args = ("-m", self.model, *pretrained, "-b", 4, *RATE, *float32(chapter))
        found = self.ladder.run(Run(chapter, 2, args))
        assert_parity(self.ladder, self.alone, found, 2)


@pytest.fixture(scope="module")
def fine_tuning(make_folder) -> FineTuning:
    return FineTuning(make_folder("tuned"))


@pytest.mark.parametrize("chapter", first_then_nightly(CHAPTERS[1:]))
def test_same_losses_from_the_same_weights(fine_tuning, chapter):
    fine_tuning.compare(chapter, "--pretrained")


def test_planted_weights_that_are_drawn(fine_tuning):
    """The ranks draw their weights, and do not read the folder."""
    with pytest.raises(AssertionError, match=r"^the loss differ"):
        fine_tuning.compare("02-ddp")


# --- data sets of the hub ---

SQUAD = """---
dataset_info:
  config_name: plain_text
configs:
- config_name: plain_text
  data_files:
  - split: train
    path: plain_text/train-*
  - split: validation
    path: plain_text/validation-*
---
"""


@pytest.fixture(scope="module")
def hub(make_folder) -> Path:
    """Return a folder with squad and alpaca, each with the files and columns that the hub has."""
    folder = make_folder("hub")
    squad, alpaca = folder / "squad", folder / "alpaca"
    (squad / "plain_text").mkdir(parents=True)
    (squad / "README.md").write_text(SQUAD)
    for split, count in (("train", 200), ("validation", 40)):
        rows = [
            {
                "id": f"{split}{n}",
                "title": "Notre_Dame",
                # Each context stands once for each of its questions.
                "context": f"In the {split} part, context {n // 2} tells of many things. " * 6,
                "question": f"What does question {n} ask?",
                "answers": {"text": [f"answer {n}"], "answer_start": [7]},
            }
            for n in range(count)
        ]
        table = pa.Table.from_pylist(rows)
        pa.parquet.write_table(table, squad / f"plain_text/{split}-00000-of-00001.parquet")
    (alpaca / "data").mkdir(parents=True)
    rows = [
        {
            "instruction": f"Add {n}.",
            "input": "",
            "output": f"It is {2 * n}.",
            "text": f"Below is an instruction.\n\n### Instruction:\nAdd {n}.\n\n### Response:\n"
            f"It is {2 * n}.",
        }
        for n in range(300)
    ]
    table = pa.Table.from_pylist(rows)
    pa.parquet.write_table(table, alpaca / "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet")
    return folder


def arguments(dataset: Path, text_column: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(
        dataset_name=str(dataset), dataset_subset=None, text_column=text_column, num_workers=0
    )


@pytest.mark.check
def test_the_columns_that_are_text(hub, tokenizer):
    """Of squad the contexts, with its own validation split; of alpaca the whole dialogue."""

    def read(*args: object) -> list[str]:
        parts = load_sequences(arguments(*args), tokenizer, 16)
        return [tokenizer.decode(part.streams[0].tolist()) for part in parts]

    train, evaluation = read(hub / "squad", "context")
    assert train.startswith("In the train part, context 0 tells of many things. In the train")
    assert train.count("context 7 ") == 12, "as often as it has questions"
    assert evaluation.startswith("In the validation part") and "train part" not in evaluation
    assert not re.search("question|answer|Notre", train + evaluation)
    train, evaluation = read(hub / "alpaca")
    whole = "Below is an instruction.\n\n### Instruction:\nAdd {n}.\n\n### Response:\nIt is {two}."
    texts = [whole.format(n=n, two=2 * n) for n in range(300)]
    expected = "<|endoftext|>".join(text for text in texts if not is_held_out(text))
    assert expected.startswith(train[:-20]) and len(train) > len(expected) - 100
    assert evaluation.count("### Response:") > 5
    with pytest.raises(models.RunError, match="one of id, title, context, question"):
        read(hub / "squad")


@pytest.mark.nightly
def test_from_a_run_to_its_fine_tune(corpus, hub, tmp_path):
    """As on the page: chapter 1, export, then chapter 1 from that folder on other data."""
    small = ["-s", 32, "--global-batch-size", 6, "--save-dir", tmp_path]
    old = ["-d", corpus, *small]
    new = ["-d", hub / "squad", "--text-column", "context", *small]
    assert finish(start([*old, "-e", "base", "--max-steps", 12])) == 0
    done = run_script("04-fsdp/export.py", tmp_path / "base", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    weights = ["-m", tmp_path / "model", "--pretrained"]
    look = ["--max-steps", 1, "--lr", 0]
    for name, args in {
        "before": [*new, *weights, *look],
        "tuned": [*new, *weights, "--max-steps", 12, "--lr", 1e-3],
        "old": [*old, *weights, *look],
    }.items():
        assert finish(start([*args, "-e", name])) == 0
    loss = {
        name: read_metrics(tmp_path / name)[-1]["eval_loss"]
        for name in ("base", "before", "tuned", "old")
    }
    assert loss["old"] == pytest.approx(loss["base"], rel=1e-6), "lr 0 changes nothing"
    assert loss["tuned"] < loss["before"] - 0.1

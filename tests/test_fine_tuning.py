"""Fine-tuning: weights of a folder in every chapter, and a data set of the hub."""

import argparse
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import (
    CHAPTERS,
    Ladder,
    Run,
    assert_parity,
    first_then_nightly,
    float32,
)
from runner import finish, start
from transformers import AutoModelForCausalLM

from common import models
from common.cli import RunError
from common.data import load_sequences


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


# --- a data set of the hub ---


@pytest.mark.check
def test_a_column_and_the_validation_split_of_a_data_set(tmp_path):
    """Of squad, with the files and columns that the hub has."""
    lines = ["---", "configs:", "- config_name: plain_text", "  data_files:"]
    for split, count in (("train", 200), ("validation", 40)):
        rows = {
            "context": [f"In the {split} part, context {n // 2}." for n in range(count)],
            "question": [f"What does question {n} ask?" for n in range(count)],
            "answers": [{"text": [f"answer {n}"], "answer_start": [7]} for n in range(count)],
        }
        file = f"{split}-00000-of-00001.parquet"
        Dataset.from_dict(rows).to_parquet(tmp_path / file)
        lines += [f"  - split: {split}", f"    path: {file}"]
    (tmp_path / "README.md").write_text("\n".join([*lines, "---\n"]))
    args = argparse.Namespace(dataset_name=str(tmp_path), dataset_subset=None, num_workers=0)
    args.text_column = "context"
    tokenizer = models.load_tokenizer("gpt2-tiny")
    parts = load_sequences(args, tokenizer, 16)
    for part, split, count in zip(parts, ("train", "validation"), (200, 40), strict=True):
        texts = [f"In the {split} part, context {n // 2}." for n in range(count)]
        expected = "<|endoftext|>".join(texts)
        assert tokenizer.decode(part.streams[0].tolist()).startswith(expected)
    args.text_column = None
    with pytest.raises(RunError, match="one of context, question"):
        load_sequences(args, tokenizer, 16)

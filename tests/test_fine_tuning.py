"""Fine-tuning: weights of a folder in every chapter, data sets of the hub, padding and packing."""

import argparse
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import packing
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from helpers import (
    CHAPTERS,
    ROOT,
    Ladder,
    Run,
    assert_parity,
    first_then_nightly,
    float32,
    read_metrics,
)
from runner import finish, load_script, start
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling

from common import distributed, models
from common.data import load_sequences
from common.data.sources import is_held_out

RECORDED = ROOT / "01-single-gpu/recorded"
RESULTS = ROOT / "tests/benchmarks/results/packing.json"
PAGE = ROOT / "01-single-gpu/fine_tuning.md"


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


PLACES = [(chapter, world_size) for chapter in CHAPTERS[1:] for world_size in (2, 1)]


class FineTuning:
    """A folder of weights, chapter 1's training from it, and others', by chapter and ranks."""

    def __init__(self, folder: Path, places: set[tuple[str, int]]) -> None:
        model = own_weights(folder / "model")
        self.runs = {
            (chapter, n): Run(chapter, n, ("-m", model, "--pretrained", "-b", 4, *float32(chapter)))
            for chapter, n in sorted(places)
        }
        # The planted bug: the ranks draw their weights, and do not read the folder.
        self.drawn = Run("02-ddp", 2, ("-m", model, "-b", 4))
        self.ladder = Ladder(folder, [*self.runs.values(), self.drawn])
        self.alone = "alone"
        flags = self.ladder.flags(self.alone, "-m", model, "--pretrained", "-b", 24)
        assert finish(start(flags, samples_file=self.ladder.samples_file(self.alone))) == 0


@pytest.fixture(scope="module")
def fine_tuning(request, make_folder) -> FineTuning:
    """With the places that are parameters of tests that were chosen to run."""
    items = [i for i in request.session.items if i.path == request.path and hasattr(i, "callspec")]
    chosen = [item.callspec.params for item in items if "world_size" in item.callspec.params]
    places = {(params["chapter"], params["world_size"]) for params in chosen}
    return FineTuning(make_folder("tuned"), places)


@pytest.mark.parametrize(("chapter", "world_size"), first_then_nightly(PLACES))
def test_same_losses_from_the_same_weights(fine_tuning, chapter, world_size):
    ladder = fine_tuning.ladder
    found = ladder.run(fine_tuning.runs[chapter, world_size])
    assert_parity(ladder, fine_tuning.alone, found, world_size)


def test_planted_weights_that_are_drawn(fine_tuning):
    ladder = fine_tuning.ladder
    found = ladder.run(fine_tuning.drawn)
    with pytest.raises(AssertionError, match=r"^the loss differ"):
        assert_parity(ladder, fine_tuning.alone, found, 2)


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
        return [tokenizer.decode(part.tokens.reshape(-1).tolist()) for part in parts]

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
    with pytest.raises(models.InputError, match="one of id, title, context, question"):
        read(hub / "squad")


@pytest.mark.parametrize("name", ["squad", "alpaca"])
def test_fine_tuning_on_it(name, hub, train, tmp_path):
    """Two steps from weights of a folder: the first loss is that of these weights."""
    model = own_weights(tmp_path / "model")
    column = ("--text-column", "context") if name == "squad" else ()
    args = ("-d", hub / name, *column, "-s", 16, "--max-steps", 2, "--log-freq", 1, "-m", model)
    tuned = train(*args, "--pretrained", "--lr", 0, name="tuned")
    scratch = train(*args, "--lr", 0, name="scratch")
    assert len(tuned) == 2 and tuned[0]["loss"] != scratch[0]["loss"]


# --- padding ---


@pytest.mark.check
def test_arithmetic_of_padding():
    sizes = [4, 2, 10, 1, 1, 1, 1, 1, 3]  # a batch of 8, and one of 1
    found = packing.count_padding(sizes, 8)
    kept = 4 + 2 + 8 + 5 * 1 + 3
    assert found["fixed length"] == {"padding": 1 - kept / 72, "lost": 1 - kept / 24}
    assert found["longest of the batch"]["padding"] == 1 - kept / (8 * 8 + 3)
    assert found["packed"] == {"padding": 0, "lost": 0}
    assert packing.count_padding([*sizes, 2], 8)["packed"]["lost"] == 2 / 26


@pytest.mark.check
def test_batches_are_the_texts(tokenizer):
    """Each way's labels are the texts, once and in order, and padding is in none of them."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh ", k=rng.randrange(5, 200))) for _ in range(200)]
    encoded = packing.encode(texts, tokenizer)
    line = [i for text in encoded for i in text]
    for way in packing.WAYS:
        batches = packing.batches_of(way, encoded, 4)
        kept = [labels[labels != packing.IGNORED].tolist() for _, labels in batches]
        found = [i for part in kept for i in part]
        cut = [i for text in encoded[:32] for i in text[: packing.LENGTH]]
        assert found == (line[: len(found)] if way == "packed" else cut)
        shapes = {tuple(ids.shape) for ids, _ in batches}
        assert len(shapes) > 1 or way != "longest of the batch"
        assert shapes == {(8, 128)} or way == "longest of the batch"
        assert all(ids[labels == packing.IGNORED].eq(0).all() for ids, labels in batches)


@pytest.mark.check
def test_every_end_ignored_is_what_a_collator_does(tokenizer):
    """If texts are padded with the end-of-text token, transformers ignores both."""
    tokenizer = models.load_tokenizer("gpt2-tiny")
    tokenizer.pad_token = tokenizer.eos_token
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    encoded = packing.encode(["a text", "one more text, which is longer"], tokenizer)
    found = collate([{"input_ids": ids} for ids in encoded])
    end = tokenizer.eos_token_id
    ids, mask = packing.pad(encoded, found["input_ids"].shape[1], end)
    assert torch.equal(found["input_ids"], ids)
    made = {how: packing.labels_of(how, ids, mask, end) for how in packing.LABELS}
    assert torch.equal(found["labels"], made["every end ignored"])
    assert [(labels == end).sum().item() for labels in made.values()] == [2, 0, (~mask).sum() + 2]


@pytest.fixture(scope="module")
def labelled(tokenizer) -> dict[str, dict[str, float]]:
    """Return the results of a few steps with each kind of labels, on sentences of one form."""
    rng = random.Random(0)
    words = ["red", "green", "blue", "old", "new"]
    texts = [f"The {rng.choice(words)} one and the {rng.choice(words)} one." for _ in range(200)]
    encoded = packing.encode(texts, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "LENGTH", 32)
        return {how: packing.train_on(how, encoded, 40) for how in packing.LABELS}


def check_labels(found: dict[str, dict[str, float]]) -> None:
    """Check that a model trained without end labels never ends a text, and that with labels on the
    padding, the logged loss is mostly that of the padding."""
    right, endless, nothing = (found[how] for how in packing.LABELS)
    assert right["end_probability"] > 0.1 and right["samples_that_end"] > packing.SAMPLES / 2
    assert endless["end_probability"] < 0.001 and endless["samples_that_end"] == 0
    assert nothing["end_probability"] > 0.1
    assert nothing["shown_loss"] < 0.8 * nothing["text_loss"]
    assert right["shown_loss"] > 0.8 * right["text_loss"]


@pytest.mark.ci
def test_what_wrong_labels_do(labelled):
    check_labels(labelled)


@pytest.mark.ci
@pytest.mark.parametrize("swapped", [(0, 1), (0, 2), (1, 2)])
def test_planted_labels_are_noticed(labelled, swapped):
    names = list(packing.LABELS)
    one, two = (names[n] for n in swapped)
    with pytest.raises(AssertionError):
        check_labels(labelled | {one: labelled[two], two: labelled[one]})


# --- what is recorded ---


@pytest.mark.check
def test_recorded_packing():
    """The recorded lines match the result file, and the measured gain matches the arithmetic."""
    results = json.loads(RESULTS.read_text())["results"]
    lines = (RECORDED / "fine_tune_packing.txt").read_text().splitlines()
    assert lines[2:-1] == packing.describe(results)
    check_labels(results["labels"])
    short = results["texts"]["paragraphs of the reference"]
    padding = [short["arithmetic"][str(n)]["fixed length"]["padding"] for n in packing.LENGTHS]
    assert padding == sorted(padding) and padding[0] > 0.3 and padding[-1] > 0.9
    # Batches of the same shape take the same time, so the gain follows from the share of padding.
    gain = short["rates"]["packed"]["gain"]
    assert gain == pytest.approx(1 / (1 - padding[0]), rel=0.25)
    long = results["texts"]["files of the standard library"]
    assert long["arithmetic"]["128"]["fixed length"]["lost"] > 0.9


def evaluation(name: str) -> tuple[float, float]:
    """Return loss and bits per byte of the last step of a recorded run."""
    text = (RECORDED / f"{name}.txt").read_text()
    *_, found = re.findall(r"eval loss ([\d.]+) \| perplexity [\d.]+ \| ([\d.]+) bits/byte", text)
    return float(found[0]), float(found[1])


@pytest.mark.check
def test_recorded_runs():
    """Fine-tuning improves the new text, worsens the old one, and beats training from scratch."""
    names = ("before", "gentle", "tuned", "scratch", "old_gentle", "old_tuned")
    loss = {name: evaluation(f"fine_tune_{name}")[0] for name in names}
    assert loss["tuned"] < loss["gentle"] < loss["before"]
    assert loss["tuned"] < loss["scratch"] < loss["before"]
    assert evaluation("make-train")[0] < loss["old_gentle"] < loss["old_tuned"]


def page_commands() -> list[str]:
    text = PAGE.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```bash.*\n((?:.*\n)*?)```$", text, re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.check
def test_the_page_s_paragraphs_are_those_that_were_measured(tmp_path):
    (command,) = [line for line in page_commands() if "pydoc_data" in line]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=True)
    lines = (tmp_path / "paragraphs.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"context": p} for p in packing.paragraphs()]


def test_from_a_run_to_its_fine_tune(corpus, hub, tmp_path, monkeypatch):
    """As on the page: chapter 1, export, then chapter 1 from that folder on other data."""
    small = ["-s", 32, "--global-batch-size", 6, "--save-dir", tmp_path]
    old = ["-d", corpus, *small]
    new = ["-d", hub / "squad", "--text-column", "context", *small]
    assert finish(start([*old, "-e", "base", "--max-steps", 12])) == 0
    argv = ["export.py", str(tmp_path / "base"), str(tmp_path / "model")]
    monkeypatch.setattr(sys, "argv", argv)
    load_script(ROOT / "04-fsdp/export.py").main()
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
    monkeypatch.setattr(sys, "argv", ["train_llm.py", "--pretrained", "-m", "gpt2-tiny"])
    with pytest.raises(SystemExit) as exit_:
        distributed.run(load_script(ROOT / "01-single-gpu/train_llm.py").main)
    assert exit_.value.code == 2

"""The classifier: the same losses and the same report on 1, 2 and 3 ranks, each example once."""

import argparse
import json
import random
import re
import shutil
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from helpers import ROOT, first_then_nightly, read_metrics, register, replace_in, run_script
from runner import Ranks
from transformers import pipeline

from common.errors import RunError

from classification.batches import GroupedSampler
from classification.examples import DEAL, PACKAGES, load_examples

SCRIPT = ROOT / "02-ddp/train_classifier.py"
CLASSES = ["fruit", "metal", "weather"]
SIZES = {"train": 50, "validation": 10, "test": 11}  # 50: the eighth global batch of 7 has one
ARGS = ("-s", 32, "-b", 2, "--global-batch-size", 7, "--log-freq", 1, "--lr", 5e-4)


def write_splits(folder: Path) -> Path:
    """Write a CSV for each split: texts of 1 to 40 words, some of them the class's own."""
    folder.mkdir()
    letters = random.Random(0)
    for split, size in SIZES.items():
        labels, texts = [CLASSES[number % 3] for number in range(size)], []
        for number, label in enumerate(labels):
            words = (f"{label} w{letters.randrange(9)}" for _ in range(1 + number % 20))
            texts.append(" ".join(words))
        Dataset.from_dict({"text": texts, "label": labels}).to_csv(folder / f"{split}.csv")
    return folder


# --- runs, and what is planted in them ---


# Each bug: (right, wrong) texts in the script.
LOSS = "losses.sum() * world_size / n_terms"
MEAN = ((LOSS, "losses.sum() / (batch['index'] >= 0).sum().clamp(min=1) / micro_batches"),)
OWN_PART = (("gather({rank: torch.cat(parts).cpu()})", "{rank: torch.cat(parts).cpu()}"),)
# As another Python's standard library would have it, on another node.
ENCODE = "    label_tokens = encode("
ANOTHER_TEXT = ((ENCODE, f"    splits['train'].texts[3] += ' w1' * rank\n{ENCODE}"),)
# In the second epoch, on the last rank only.
NAN = "math.nan if epoch == 1 and rank == world_size - 1 else 1"
NAN_LOSS = (("losses.detach().sum()", f"losses.detach().sum() * ({NAN})"),)
# The head takes padding for text: no text has this token.
PAD = "model.config.pad_token_id = "
PADDING_READ = ((f"{PAD}tokenizer.pad_token_id", f"{PAD}4095"),)
# No bug: the labels of the validation are those of the next class.
VALIDATION = "splits['validation'].labels"
CONTRARY = ((ENCODE, f"    {VALIDATION} = [(n + 1) % 3 for n in {VALIDATION}]\n{ENCODE}"),)
LAST = (*CONTRARY, ("eval_loss < best_loss", "True"))
for bug in (MEAN, OWN_PART, ANOTHER_TEXT, NAN_LOSS, PADDING_READ, LAST):
    register("02-ddp/train_classifier.py", bug)

LINEAR = (*ARGS, "--num-epochs", 2)
SHORT = (*ARGS, "--num-epochs", 1)
LONG = (*ARGS, "--num-epochs", 3, "--lr", 3e-3)
RUNS = {
    "linear": (LINEAR, ()),
    "none": ((*LONG, "--head", "none"), ()),
    "dynamic": ((*SHORT, "--padding", "dynamic"), ()),
    "fixed": ((*SHORT, "--padding", "fixed"), ()),
    "padding_read": ((*SHORT, "--padding", "dynamic"), PADDING_READ),
    "contrary": (LONG, CONTRARY),
    "last": (LONG, LAST),
    "another_text": (SHORT, ANOTHER_TEXT),
    "mean": (LINEAR, MEAN),
    "own_part": (SHORT, OWN_PART),
    "nan_loss": (LINEAR, NAN_LOSS),
}


class Runs:
    """The runs of all tests, each done when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.errors = folder, {}
        write_splits(folder / "data")

    def error(self, name: str, world_size: int = 1) -> str | None:
        """Return the last line of rank 0 if the run failed."""
        run = f"{name}-{world_size}"
        if run not in self.errors:
            args, replacements = RUNS[name]
            script = Path(shutil.copy(SCRIPT, self.folder / f"{run}.py"))
            for pair in replacements:
                replace_in(script, *pair)
            words = [*args, "-d", self.folder / "data", "--save-dir", self.folder, "-e", run]
            stderr = [str(self.folder / f"{run}-{rank}.stderr") for rank in range(world_size)]
            ranks = Ranks(world_size, words, script=str(script), stderr_file=stderr)
            failed = any(ranks.finish())
            self.errors[run] = Path(stderr[0]).read_text().splitlines()[-1] if failed else None
        return self.errors[run]

    def metrics(self, name: str, world_size: int = 1) -> list[dict]:
        assert self.error(name, world_size) is None
        return read_metrics(self.folder / f"{name}-{world_size}")

    def losses(self, name: str, world_size: int = 1) -> list[float]:
        return [line["loss"] for line in self.metrics(name, world_size)]

    def report(self, name: str, world_size: int = 1) -> dict:
        assert self.error(name, world_size) is None
        return json.loads((self.folder / f"{name}-{world_size}/test_report.json").read_text())


@pytest.fixture(scope="module")
def runs(make_folder) -> Runs:
    return Runs(make_folder("runs"))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("head", "world_size"),
    first_then_nightly([("linear", 2), ("linear", 3), ("none", 2)]),
)
def test_the_same_training_and_report_on_every_number_of_ranks(runs, head, world_size):
    alone = runs.metrics(head)
    assert len(alone) == (16 if head == "linear" else 24)
    assert alone[0]["loss"] > 1.5 * alone[-1]["loss"], "it learns, so orders and weights matter"
    keys = ("loss", "train_loss", "train_accuracy", "eval_loss", "eval_accuracy")
    for one, many in zip(alone, runs.metrics(head, world_size), strict=True):
        assert many.keys() == one.keys()
        for key in one.keys() & set(keys):
            assert many[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), (one["step"], key)
    first, other = runs.report(head), runs.report(head, world_size)
    assert other.pop("loss") == pytest.approx(first.pop("loss"), rel=1e-5)
    assert other == first
    pictures = [runs.folder / f"{head}-{n}/confusion_matrix.svg" for n in (1, world_size)]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert sum(map(sum, first["confusion_matrix"])) == SIZES["test"]


def test_planted_another_example_on_a_rank_and_a_ranks_own_report(runs):
    assert runs.error("own_part", 2) == "AssertionError: an example is missing or repeated"
    sentence = r"Rank 1 on \S+ has examples with checksum \w+, rank 0 on \S+ has \w+: use the "
    assert re.match(sentence, runs.error("another_text", 2))


@pytest.mark.nightly
def test_a_run_that_diverges_stops_and_keeps_the_best_model(runs):
    """Rank 0 stops in the same step if only rank 1 has a loss that is not finite."""
    best = runs.folder / "nan_loss-2/best"
    said = runs.error("nan_loss", 2)
    assert "diverged at step 9:" in said and f"{best} has the best model so far." in said
    assert (best / "model.safetensors").exists()


def test_planted_a_mean_of_each_ranks_batch(runs):
    losses, wrong = runs.losses("linear"), runs.losses("mean", 2)
    assert wrong[0] == pytest.approx(losses[0], rel=1e-5), "before the first update"
    assert wrong[3:] != pytest.approx(losses[3:], rel=1e-3)


@pytest.mark.nightly
def test_padding_changes_no_loss_but_planted_read(runs):
    dynamic = runs.losses("dynamic")
    assert runs.losses("fixed") == pytest.approx(dynamic, rel=1e-5)
    assert runs.losses("padding_read") != pytest.approx(dynamic, rel=1e-3)
    assert runs.losses("linear")[:8] != pytest.approx(dynamic, rel=1e-3), "other batches"


@pytest.mark.nightly
def test_the_best_epoch_is_kept_but_planted_the_last(runs):
    """Labels of the validation are wrong here: the better the model, the higher its loss."""
    metrics = runs.metrics("contrary")
    evaluated = [line["eval_loss"] for line in metrics if "eval_loss" in line]
    best = evaluated.index(min(evaluated)) + 1
    assert len(evaluated) == 3 and best < 3
    assert runs.report("contrary")["epoch"] == best
    assert runs.report("last")["epoch"] == 3, "planted: the last one is kept"
    assert runs.report("last")["loss"] != pytest.approx(runs.report("contrary")["loss"], rel=1e-3)


@pytest.mark.nightly
def test_transformers_pipeline_says_what_the_report_says(runs):
    report = runs.report("linear")
    folder = runs.folder / "linear-1/best"
    classify = pipeline("text-classification", model=str(folder), device="cpu")
    rows = list(Dataset.from_csv(str(runs.folder / "data/test.csv")))
    found = classify([row["text"] for row in rows], truncation=True, batch_size=4)
    pairs = Counter((row["label"], each["label"]) for row, each in zip(rows, found, strict=True))
    matrix = [[pairs[true, predicted] for predicted in CLASSES] for true in CLASSES]
    assert report["classes"] == CLASSES and matrix == report["confusion_matrix"]
    assert classify.tokenizer.padding_side == "right" and classify.model.config.pad_token_id == 0


# --- GPUs ---


@pytest.mark.gpu
def test_first_losses_on_a_gpu_agree_with_the_cpu(tmp_path):
    data = write_splits(tmp_path / "data")
    found = {}
    for device, visible in (("gpu", "0"), ("cpu", "")):
        args = (*ARGS, "-d", data, "--max-steps", 6)
        place = ("--save-dir", tmp_path, "-e", device)
        done = run_script(SCRIPT, *args, *place, CUDA_VISIBLE_DEVICES=visible)
        assert done.returncode == 0, done.stderr
        metrics = read_metrics(tmp_path / device)
        found[device] = [line["loss"] for line in metrics] + [metrics[-1]["eval_loss"]]
        assert (tmp_path / device / "test_report.json").exists()
    # TF32 has 3 digits, and with each step the weights are further apart.
    assert len(found["gpu"]) == 7 and found["gpu"] == pytest.approx(found["cpu"], rel=3e-3)


# --- data ---


def files_in_two_splits(splits: dict) -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    where = {text: split for split, examples in splits.items() for text in examples.texts}
    torn = []
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            pieces = re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace"))
            found = {where[p.strip("\n")] for p in pieces if p.strip("\n") in where}
            torn += [path.name] if len(found) > 1 and "test" not in path.parts else []
    return torn


@pytest.mark.check
def test_built_in_pieces_of_a_file_stay_together():
    classes, splits = load_examples("python-stdlib")
    assert classes == list(PACKAGES)
    for examples in splits.values():
        assert set(examples.labels) == set(range(len(PACKAGES)))
    texts = [text for examples in splits.values() for text in examples.texts]
    assert len(set(texts)) == len(texts) > 3000 and min(text.count("\n") for text in texts) >= 2
    assert len(splits["train"]) > len(texts) / 2 and set(DEAL) == set(splits)
    assert files_in_two_splits(splits) == []
    splits["test"].texts.append(splits["train"].texts.pop(0))  # the planted bug
    assert len(files_in_two_splits(splits)) == 1


@pytest.mark.check
def test_a_folder_in_the_shape_of_imdb(tmp_path):
    """Its test stays whole, its validation is cut from train, what has no label is left alone."""
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    tables = DatasetDict()
    for split, size in (("train", 200), ("test", 50), ("unsupervised", 40)):
        labels = [-1 if split == "unsupervised" else n % 2 for n in range(size)]
        texts = [f"{split} review {n}, so {'good' if n % 2 else 'bad'}" for n in range(size)]
        tables[split] = Dataset.from_dict({"text": texts, "label": labels}, features)
    tables.save_to_disk(tmp_path / "imdb")
    classes, splits = load_examples(str(tmp_path / "imdb"))
    assert classes == ["neg", "pos"]
    assert len(splits["test"]) == 50 and 5 <= len(splits["validation"]) <= 40
    assert len(splits["train"]) + len(splits["validation"]) == 200
    for examples in splits.values():
        for text, label in zip(examples.texts, examples.labels, strict=True):
            assert text.endswith(("bad", "good")[label]) and "unsupervised" not in text


@pytest.mark.check
def test_a_table_of_your_own(tmp_path):
    """Both splits are cut; a text that occurs twice stands in one of them."""
    texts = [f"text number {n % 90}" for n in range(180)]
    table = Dataset.from_dict({"body": [*texts, "", None], "stars": [n % 3 for n in range(182)]})
    path = tmp_path / "table.csv"
    table.to_csv(path)
    classes, splits = load_examples(str(path), None, "body", "stars")
    assert classes == ["0", "1", "2"]
    assert sum(map(len, splits.values())) == 180, "rows without a text are left out"
    parts = [set(examples.texts) for examples in splits.values()]
    assert sum(map(len, parts)) == 90 == len(set().union(*parts)) and all(parts)


def write_tables(folder: Path, labels: dict[str, list]) -> str:
    """Save a table with these labels for each split, and return its folder."""
    tables = DatasetDict()
    for split, column in labels.items():
        texts = [f"{split} text {n}" for n in range(len(column))]
        tables[split] = Dataset.from_dict({"text": texts, "label": column})
    tables.save_to_disk(folder)
    return str(folder)


@pytest.mark.check
def test_rows_without_a_usable_label_are_left_out(tmp_path):
    """NaN and None are no label. -1 is none either, unless the training has this class."""
    hidden = {"train": [0, 1] * 60, "validation": [0, 1] * 5, "test": [-1] * 20}
    classes, splits = load_examples(write_tables(tmp_path / "hidden", hidden))
    assert classes == ["0", "1"] and sum(map(len, splits.values())) == 130
    assert not any(text.startswith("test") for text in splits["test"].texts)
    nan = {"train": [0.0, 1.0, float("nan"), None] * 60}
    classes, splits = load_examples(write_tables(tmp_path / "nan", nan))
    assert classes == ["0.0", "1.0"] and sum(map(len, splits.values())) == 120
    classes, splits = load_examples(write_tables(tmp_path / "three", {"train": [-1, 0, 1] * 60}))
    assert classes == ["-1", "0", "1"] and sum(map(len, splits.values())) == 180


@pytest.mark.check
@pytest.mark.parametrize("label", [[1, 2], {"stars": 1}])
def test_labels_that_are_lists_are_refused(tmp_path, label):
    folder = write_tables(tmp_path / "lists", {"train": [label] * 9})
    with pytest.raises(RunError, match=r"label column 'label' of .* one value in each row.*\.$"):
        load_examples(folder)


ROWS = "text,label\n" + "".join(f"text number {n},{'ab'[n % 2]}\n" for n in range(100))
BAD_TABLES = {
    "has no text column 'text': give --text-column one of body, label": "body,label\na,b\n",
    "has no label column 'label': give --label-column one of text, class": "text,class\na,b\n",
    "have 1 different values in 50 rows: give a --label-column": ROWS.replace(",b\n", ",\n"),
    "The labels of .* have 100 different values in 100 rows": "text,label\n"
    + "".join(f"text {n},label {n}\n" for n in range(100)),
    "The validation split of .* is empty": "text,label\na,b\n" + "c,d\n" * 9,
}


@pytest.mark.check
def test_bad_tables(tmp_path):
    for number, (sentence, content) in enumerate(BAD_TABLES.items()):
        path = tmp_path / f"table-{number}.csv"
        path.write_text(content)
        with pytest.raises(RunError, match=f"{sentence}.*\\.$"):
            load_examples(str(path))


# --- batches ---


@pytest.mark.check
@pytest.mark.parametrize(("n", "world_size"), [(1, 3), (7, 5), (50, 3)])
def test_every_example_once_and_as_many_passes_on_every_rank(world_size, n):
    lengths = [random.Random(i).randrange(1, 99) for i in range(n)]
    for padding in ("grouped", "dynamic"):
        args = argparse.Namespace(batch_size=2, global_batch_size=7, seed=3, padding=padding)
        samplers = [GroupedSampler(lengths, args, world_size, rank) for rank in range(world_size)]
        orders = set()
        for epoch in (0, 1):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            parts = [list(sampler) for sampler in samplers]
            assert len({len(part) for part in parts}) == 1, "or a rank would wait"
            seen = sorted(index for part in parts for batch in part for index in batch)
            assert seen == list(range(n))
            alone = GroupedSampler(lengths, args, 1, 0)
            alone.set_epoch(epoch)
            assert alone.steps == samplers[0].steps, "the global batches of any number of ranks"
            orders.add(str(alone.steps))
        assert len(orders) == 2 or n < 50, "each epoch another"

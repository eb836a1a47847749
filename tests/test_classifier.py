"""The classifier: the same losses and the same report on 1, 2 and 3 ranks, each example once."""

import argparse
import csv
import json
import logging
import os
import random
import re
import subprocess
import sysconfig
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, free_port, load_script, read_metrics, run_script
from datasets import ClassLabel, Dataset, Features, Value
from runner import ask_ranks, place_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from common import cli, grouping, models
from common.classification import DEAL, PACKAGES, Example, encode, load_examples
from common.cli import InputError
from common.data import IGNORED
from common.grouping import Collator, GroupedSampler, batches_of_rank

SCRIPT = ROOT / "02-ddp/train_classifier.py"
CLASSES = ["fruit", "metal", "weather"]
SIZES = {"train": 50, "validation": 10, "test": 11}  # 50: the eighth global batch of 7 has one
ARGS = ["-s", 32, "-b", 2, "--global-batch-size", 7, "--log-freq", 1, "--lr", 5e-4]
LOSS = "losses.sum() * world_size / n_terms"


def write_splits(folder: Path, sizes: dict[str, int], wrong: str = "") -> Path:
    """Write a CSV for each split: texts of 1 to 40 words, some the class's own; `wrong` names a
    split whose labels are those of the next class."""
    folder.mkdir()
    letters = random.Random(0)
    for split, size in sizes.items():
        with (folder / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            for number in range(size):
                label = number % 3
                words = [
                    f"{CLASSES[label]} w{letters.randrange(9)}" for _ in range(1 + number % 20)
                ]
                name = CLASSES[(label + 1) % 3] if split == wrong else CLASSES[label]
                writer.writerow([" ".join(words), name])
    return folder


# --- what is planted ---


def pad_left(rows: list[list[int]], width: int, value: int):
    right = real_pad([row[::-1] for row in rows], width, value)
    return right.flip(1)


def pad_batches(lengths: list[int], batch_size: int, num_replicas: int, rank: int):
    """As DistributedSampler does: ranks with fewer get some that another has as well."""
    order = list(range(len(lengths)))
    order += order[: -len(order) % num_replicas]
    return [[index] for index in order[rank::num_replicas]]


def own_part(part: dict) -> dict:
    return part


real_pad = grouping._pad
# By name: (what to replace in the script's text, by what), or (what of the script, by what).
MEAN = (LOSS, "losses.sum() / (batch['index'] >= 0).sum().clamp(min=1) / micro_batches")
NO_PAD_TOKEN = ("model.config.pad_token_id = tokenizer.pad_token_id", "pass")
LAST = ("eval_loss < best_loss", "True")


def rank_main(rank: int, world_size: int, runs: dict, folder: str, queue) -> None:
    """Run the script for each of `runs` (port, arguments, plant); put None or the error of each."""
    os.chdir(ROOT)
    place = place_of(rank, world_size) | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    answers = {}
    for name, (port, args, plant) in runs.items():
        os.environ |= {key: str(value) for key, value in place.items()} | {"MASTER_PORT": str(port)}
        argv = [SCRIPT.name, *args, "--save-dir", folder, "-e", f"{name}-{world_size}"]
        with ExitStack() as stack:
            stack.enter_context(mock.patch("sys.argv", [str(arg) for arg in argv]))
            text = SCRIPT.read_text()
            if isinstance(plant, tuple):
                assert text.count(plant[0]) == 1, plant
                text = text.replace(*plant)
            path = Path(folder) / f"{name}-{world_size}-{rank}.py"
            path.write_text(text)
            script = load_script(path)
            for attribute, replacement in plant.items() if isinstance(plant, dict) else ():
                owner = grouping if attribute == "_pad" else script
                stack.enter_context(mock.patch.object(owner, attribute, replacement))
            try:
                script.main()
                answers[name] = None
            except Exception as error:
                answers[name] = f"{type(error).__name__}: {error}"
            if dist.is_initialized():
                dist.destroy_process_group()
        logging.getLogger().handlers.clear()
    queue.put((rank, answers))
    queue.close()
    queue.join_thread()
    os._exit(0)


class Runs:
    """The runs of all tests: one start of processes for each number of ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        data = write_splits(folder / "data", SIZES)
        contrary = write_splits(folder / "contrary", SIZES, wrong="validation")
        linear = [*ARGS, "-d", data, "--num-epochs", 2]
        none = [*ARGS, "-d", data, "--num-epochs", 3, "--head", "none", "--lr", 3e-3]
        same = {"linear": (linear, None), "none": (none, None)}
        short = [*linear, "--num-epochs", 1]
        dynamic = [*short, "--padding", "dynamic"]
        still = [*linear, "--pretrained", "--max-steps", 1, "--lr", 0]
        alone = same | {
            "dynamic": (dynamic, None),
            "fixed": ([*short, "--padding", "fixed"], None),
            "left": (dynamic, {"_pad": pad_left}),
            "no_pad_token": (short, NO_PAD_TOKEN),
            "contrary": ([*linear, "-d", contrary, "--num-epochs", 3, "--lr", 3e-3], None),
            "go_on": ([*still, "-m", folder / "linear-1/best"], None),
            "new_head": ([*still, "-m", folder / "none-1/best"], None),
            "last": ([*linear, "-d", contrary, "--num-epochs", 3, "--lr", 3e-3], LAST),
        }
        two = same | {
            "mean": (short, MEAN),
            "padded": (short, {"batches_of_rank": pad_batches}),
            "own": (short, {"gather": own_part}),
        }
        self.errors = {}
        for world_size, runs in ((1, alone), (2, two), (3, same)):
            ports = {name: (free_port(), *run) for name, run in runs.items()}
            arguments = (world_size, ports, str(folder))
            self.errors[world_size] = ask_ranks(world_size, rank_main, *arguments, timeout=300)[0]

    def metrics(self, name: str, world_size: int = 1) -> list[dict]:
        assert self.errors[world_size][name] is None
        return read_metrics(self.folder / f"{name}-{world_size}")

    def losses(self, name: str, world_size: int = 1) -> list[float]:
        return [line["loss"] for line in self.metrics(name, world_size)]

    def report(self, name: str, world_size: int = 1) -> dict:
        return json.loads((self.folder / f"{name}-{world_size}/test_report.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("head", ["linear", "none"])
def test_the_same_training_and_report_on_every_number_of_ranks(runs, head):
    alone = runs.metrics(head)
    assert len(alone) == (16 if head == "linear" else 24)
    assert alone[0]["loss"] > 1.5 * alone[-1]["loss"], "it learns, so orders and weights matter"
    keys = ("loss", "train_loss", "train_accuracy", "eval_loss", "eval_accuracy")
    for world_size in (2, 3):
        for one, many in zip(alone, runs.metrics(head, world_size), strict=True):
            assert many.keys() == one.keys()
            for key in one.keys() & set(keys):
                assert many[key] == pytest.approx(one[key], rel=1e-5), (one["step"], key)
        first, other = runs.report(head), runs.report(head, world_size)
        assert other.pop("loss") == pytest.approx(first.pop("loss"), rel=1e-5)
        assert other == first
        pictures = [runs.folder / f"{head}-{n}/confusion_matrix.svg" for n in (1, world_size)]
        assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert sum(map(sum, first["confusion_matrix"])) == SIZES["test"]


def test_planted_a_mean_of_each_ranks_batch(runs):
    losses, wrong = runs.losses("linear")[:8], runs.losses("mean", 2)
    assert wrong[0] == pytest.approx(losses[0], rel=1e-5), "before the first update"
    assert wrong[3:] != pytest.approx(losses[3:], rel=1e-3)


def test_planted_duplicates_and_a_ranks_own_report(runs):
    for name in ("padded", "own"):
        assert runs.errors[2][name] == "AssertionError: each example once, none twice"


def test_padding_changes_no_loss_but_planted_on_the_left(runs):
    """The planted bug pads on the left: positions of a text then depend on the batch it is in."""
    dynamic = runs.losses("dynamic")
    assert runs.losses("fixed") == pytest.approx(dynamic, rel=1e-5)
    assert runs.losses("left") != pytest.approx(dynamic, rel=1e-3)
    assert runs.losses("linear")[:8] != pytest.approx(dynamic, rel=1e-3), "other batches"


def test_planted_without_a_pad_token(runs):
    assert "Cannot handle batch sizes > 1" in runs.errors[1]["no_pad_token"]


def test_the_best_epoch_is_kept_but_planted_the_last(runs):
    """Labels of the validation are wrong here: the better the model, the higher its loss."""
    metrics = runs.metrics("contrary")
    evaluated = [line["eval_loss"] for line in metrics if "eval_loss" in line]
    best = evaluated.index(min(evaluated)) + 1
    assert len(evaluated) == 3 and best < 3
    assert runs.report("contrary")["epoch"] == best
    assert runs.report("last")["epoch"] == 3, "planted: the last one is kept"
    assert runs.report("last")["loss"] != pytest.approx(runs.report("contrary")["loss"], rel=1e-3)


def test_transformers_pipeline_says_what_the_report_says(runs):
    folder = runs.folder / "linear-1/best"
    classify = pipeline("text-classification", model=str(folder), device="cpu")
    with (runs.folder / "data/test.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = classify([row["text"] for row in rows], truncation=True, batch_size=4)
    pairs = Counter((row["label"], each["label"]) for row, each in zip(rows, found, strict=True))
    matrix = [[pairs[true, predicted] for predicted in CLASSES] for true in CLASSES]
    report = runs.report("linear")
    assert report["classes"] == CLASSES and matrix == report["confusion_matrix"]
    assert classify.tokenizer.padding_side == "right" and classify.model.config.pad_token_id == 0


def test_pretrained_begins_with_the_folders_weights(runs):
    """With a rate of 0: a classifier goes on as it was, a language model gets a new head."""
    best = min(line["eval_loss"] for line in runs.metrics("linear") if "eval_loss" in line)
    assert runs.metrics("go_on")[-1]["eval_loss"] == pytest.approx(best, rel=1e-5)
    weights, other = (
        load_file(runs.folder / f"{name}/best/model.safetensors")
        for name in ("new_head-1", "none-1")
    )
    assert weights.keys() - other.keys() == {"score.weight"}
    assert all(torch.equal(weights[name], other[name]) for name in other)
    assert weights["score.weight"].shape == (3, 128) and weights["score.weight"].std() > 0.01


def test_without_a_head_it_is_a_language_model_that_writes_the_label(runs):
    """What the report predicts by likelihood, and what greedy decoding of the prompt writes."""
    folder = runs.folder / "none-1/best"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert runs.report("none")["this model"]["accuracy"] > 0.8
    ids = tokenizer("metal w3 metal w1\nlabel:", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(out[0]).endswith("label: metal<|endoftext|>")


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


def test_built_in_pieces_of_a_file_stay_together():
    classes, splits = load_examples("python-stdlib", None, "text", "label")
    assert classes == list(PACKAGES)
    for examples in splits.values():
        assert set(examples.labels) == set(range(len(PACKAGES)))
    texts = [text for examples in splits.values() for text in examples.texts]
    assert len(set(texts)) == len(texts) > 3000 and min(text.count("\n") for text in texts) >= 2
    assert len(splits["train"]) > len(texts) / 2 and set(DEAL) == set(splits)
    assert files_in_two_splits(splits) == []
    splits["test"].texts.append(splits["train"].texts.pop(0))  # the planted bug
    assert len(files_in_two_splits(splits)) == 1


def test_a_folder_in_the_shape_of_imdb(tmp_path):
    """Its test stays whole, its validation is cut from train, what has no label is left alone."""
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    files, folder = [], tmp_path / "imdb"
    (folder / "plain_text").mkdir(parents=True)
    for split, size in (("train", 200), ("test", 50), ("unsupervised", 40)):
        labels = [-1 if split == "unsupervised" else n % 2 for n in range(size)]
        texts = [f"{split} review {n}, so {'good' if n % 2 else 'bad'}" for n in range(size)]
        name = f"plain_text/{split}-00000-of-00001.parquet"
        Dataset.from_dict({"text": texts, "label": labels}, features).to_parquet(folder / name)
        files.append(f"  - split: {split}\n    path: {name}\n")
    card = "---\nconfigs:\n- config_name: plain_text\n  data_files:\n" + "".join(files) + "---\n"
    (folder / "README.md").write_text(card)
    classes, splits = load_examples(str(folder), None, "text", "label")
    assert classes == ["neg", "pos"]
    assert len(splits["test"]) == 50 and 5 <= len(splits["validation"]) <= 40
    assert len(splits["train"]) + len(splits["validation"]) == 200
    for examples in splits.values():
        for text, label in zip(examples.texts, examples.labels, strict=True):
            assert text.endswith(("bad", "good")[label]) and "unsupervised" not in text
    again = load_examples(str(folder), None, "text", "label")[1]
    assert again == splits


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_table_of_your_own(tmp_path, suffix):
    """Both splits are cut; a text that occurs twice stands in one of them."""
    texts = [f"text number {n % 90}" for n in range(180)]
    table = Dataset.from_dict({"body": [*texts, "", None], "stars": [n % 3 for n in range(182)]})
    path = tmp_path / f"table.{suffix}"
    getattr(table, {"jsonl": "to_json"}.get(suffix, f"to_{suffix}"))(path)
    classes, splits = load_examples(str(path), None, "body", "stars")
    assert classes == ["0", "1", "2"]
    assert sum(map(len, splits.values())) == 180, "rows without a text are left out"
    parts = [set(examples.texts) for examples in splits.values()]
    assert sum(map(len, parts)) == 90 == len(set().union(*parts)) and all(parts)


ROWS = "text,label\n" + "".join(f"text number {n},{'ab'[n % 2]}\n" for n in range(100))
BAD_TABLES = {
    "has no text column 'text': give --text-column one of body, label": "body,label\na,b\n" * 9,
    "has no label column 'label': give --label-column one of text, class": "text,class\na,b\n",
    "All training rows of .* are of the class 'a'": ROWS.replace(",b\n", ",a\n"),
    "50 of 100 rows in the train split of .* have no label in the": ROWS.replace(",b\n", ",\n"),
    "has 100 different values in 100 rows, so it holds no classes": "text,label\n"
    + "".join(f"text {n},label {n}\n" for n in range(100)),
    "The validation part of .* is empty": "text,label\na,b\n" + "c,d\n" * 9,
}


@pytest.mark.parametrize("sentence", BAD_TABLES)
def test_bad_tables(tmp_path, sentence):
    path = tmp_path / "table.csv"
    path.write_text(BAD_TABLES[sentence])
    with pytest.raises(InputError, match=sentence) as error:
        load_examples(str(path), None, "text", "label")
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_bad_names_and_prompts(tmp_path):
    (tmp_path / "text.txt").write_text("a")
    (tmp_path / "table.parquet").write_text("a")
    for name, sentence in {
        f"{tmp_path}/text.txt": "does not end in one of: .json .jsonl",
        f"{tmp_path}/table.parquet": "Cannot read .* as a data set",
        f"{tmp_path}/nothing": "There is no data set at",
        "stanfordnlp/imdb": "is neither a preset .* cannot be reached",
    }.items():
        with pytest.raises(InputError, match=sentence):
            load_examples(name, None, "text", "label")
    classes, splits = load_examples("python-stdlib", None, "text", "label")
    tokenizer = models.load_tokenizer("gpt2-tiny")
    for prompt, sentence in {
        "which class?": r"must hold {text}, once",
        "{text}" + " of what" * 60: "longest label take .* none is left for the text",
    }.items():
        with pytest.raises(InputError, match=sentence):
            encode(splits, classes, tokenizer, 32, prompt)


def test_a_run_is_not_overwritten_and_a_preset_has_no_weights(runs):
    args = (SCRIPT, *ARGS, "-d", runs.folder / "data", "--save-dir", runs.folder)
    before = (runs.folder / "linear-1/metrics.jsonl").read_bytes()
    done = run_script(*args, "-e", "linear-1")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("linear-1 holds a run already: give another -e.")
    assert (runs.folder / "linear-1/metrics.jsonl").read_bytes() == before
    with pytest.raises(InputError, match="preset gpt2-tiny has no weights"):
        load_script(SCRIPT).classifier.load_weights(None, "gpt2-tiny", None, {})


# --- batches ---


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 7, 50])
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
            assert {len(part) for part in parts} == {len(samplers[0])}, "or a rank would wait"
            seen = sorted(index for part in parts for batch in part for index in batch)
            assert seen == list(range(n))
            alone = GroupedSampler(lengths, args, 1, 0)
            alone.set_epoch(epoch)
            assert alone.steps == samplers[0].steps, "the global batches of any number of ranks"
            orders.add(str(alone.steps))
        assert len(orders) == 2 or n < 50, "each epoch another"
    batches = [batches_of_rank(lengths, 4, world_size, rank) for rank in range(world_size)]
    assert sorted(i for part in batches for batch in part for i in batch) == list(range(n))


def test_grouping_leaves_less_padding():
    args = argparse.Namespace(batch_size=4, global_batch_size=8, seed=0, padding="grouped")
    lengths = [random.Random(i).randrange(1, 99) for i in range(400)]
    grouped = GroupedSampler(lengths, args, 2, 0).padded_tokens()
    args.padding = "dynamic"
    dynamic = GroupedSampler(lengths, args, 2, 0).padded_tokens()
    assert sum(lengths) <= grouped < 1.1 * sum(lengths) < dynamic < 99 * 400


def test_batches():
    collate = Collator(0, words=[[5, 6], [7]])
    batch = collate([Example(3, [1, 2, 3], 0), Example(8, [4], 1)])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 5], [4, 0, 0, 0]]
    assert batch["columns"].tolist() == [0, 2, 3]
    assert batch["targets"].tolist() == [[IGNORED, 5, 6], [7, IGNORED, IGNORED]]
    assert batch["n"].tolist() == [3, 2, 4]
    for empty in (collate([]), Collator(0)([])):
        assert empty["n"].tolist() == [0, 0, 0] and empty["index"].tolist() == [-1]
    assert Collator(0, width=4)([Example(0, [1, 2], 1)])["input_ids"].tolist() == [[1, 2, 0, 0]]


# --- the script, its launch file, its page ---


def test_the_script_has_the_form_of_the_others(monkeypatch):
    source = SCRIPT.read_text()
    sections = ["setup", "model", "data", "optimizer", "train", "test report"]
    assert re.findall(r"^    # --- (.+) ---$", source, re.MULTILINE) == sections
    assert len(source.splitlines()) <= 300 and source.isascii()
    parsers = []
    parse = cli.ArgumentParser.parse_args
    note = mock.patch.object(
        cli.ArgumentParser, "parse_args", lambda self: parsers.append(self) or parse(self, [])
    )
    with note:
        load_script(SCRIPT).get_args()
    for action in parsers[0]._actions:
        assert action.help and len(action.help) <= 45, action.dest


def test_what_the_old_launcher_adds_is_refused(monkeypatch, capsys):
    """The page says what to do about it."""
    monkeypatch.setattr("sys.argv", ["train_classifier.py", "--local-rank=0"])
    with pytest.raises(SystemExit):
        load_script(SCRIPT).get_args()
    assert "unrecognized arguments: --local-rank=0" in capsys.readouterr().err


def test_launch_file_works_from_anywhere(runs, tmp_path):
    command = ["bash", str(ROOT / "02-ddp/launch_classifier.sh"), "--model-name", "gpt2-tiny"]
    command += ["--num-epochs", "1", "--batch-size", "4", "-d", str(runs.folder / "data")]
    command += ["--save-dir", str(tmp_path), "-e", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path / "run")[-1]["step"] == 3
    assert "largest class" in done.stdout + done.stderr
    assert (tmp_path / "run/best/model.safetensors").exists()


def test_recorded_model_beats_the_largest_class():
    """And the report that the page shows is one of this version of the code."""
    text = (ROOT / "02-ddp/recorded/classify.txt").read_text()
    accuracy = {
        name: float(re.search(rf"^{name} +([\d.]+) +[\d.]+$", text, re.MULTILINE)[1])
        for name in ("this model", "bag of words", "largest class")
    }
    assert accuracy["this model"] > 1.5 * accuracy["largest class"]
    assert "of the texts; with padding: fixed" in text and "(the best so far)" in text

"""The classifier: the same losses and the same report on 1, 2 and 3 ranks, each example once."""

import argparse
import contextlib
import csv
import datetime
import errno
import json
import logging
import os
import random
import re
import resource
import subprocess
import sysconfig
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import ClassLabel, Dataset, Features, Value
from helpers import ROOT, TORCHRUN, environment, free_port, read_metrics, run_script
from runner import ask_ranks, load_script, place_of
from safetensors.torch import load_file
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig, MambaConfig, pipeline

from common import models
from common.cli import InputError
from common.data import IGNORED

from classification import batches, results
from classification.batches import Collator, GroupedSampler, batches_of_rank, encode
from classification.examples import DEAL, PACKAGES, Example, load_examples

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


def another_text(*args: object):
    """As another Python's standard library would have it, on another node."""
    classes, splits = load_examples(*args)
    if os.environ["RANK"] == "1":
        splits["train"].texts[3] += " w1"
    return classes, splits


def another_class(*args: object):
    classes, splits = load_examples(*args)
    return classes + ["wood"] * (os.environ["RANK"] == "1"), splits


real_pad = batches._pad
# By name: (what to replace in the script's text, by what, ...), or {what of the script: by what}.
MEAN = (LOSS, "losses.sum() / (batch['index'] >= 0).sum().clamp(min=1) / micro_batches")
NO_PAD_TOKEN = ("model.config.pad_token_id = tokenizer.pad_token_id", "pass")
LAST = ("eval_loss < best_loss", "True")
EVALUATION = 'splits["validation"], *eval_args)'
NAN_EVALUATION = (EVALUATION, f"{EVALUATION}\n            eval_loss *= math.nan")
# In the second epoch, on the last rank only.
NAN = "math.nan if epoch == 1 and rank == world_size - 1 else 1"
NAN_GRADIENTS = (LOSS, f"{LOSS} * ({NAN})")
NAN_LOSS = ("losses.detach().sum()", f"losses.detach().sum() * ({NAN})")
CHECK = "results.check_finite(values, step, run_dir, best_epoch)"
UNCHECKED = (*NAN_GRADIENTS, CHECK, "pass")
# Before the losses of the ranks are added up.
ALL_REDUCE = "            dist.all_reduce(sums)\n            # Equal"
EARLY = (
    *NAN_LOSS,
    ALL_REDUCE,
    f"            values = {{'loss': sums[0]}}\n            {CHECK}\n{ALL_REDUCE}",
)


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
            pairs = plant if isinstance(plant, tuple) else ()
            for old, new in zip(pairs[::2], pairs[1::2], strict=True):
                assert text.count(old) == 1, plant
                text = text.replace(old, new)
            path = Path(folder) / f"{name}-{world_size}-{rank}.py"
            path.write_text(text)
            script = load_script(path)
            for attribute, replacement in plant.items() if isinstance(plant, dict) else ():
                owner = batches if attribute == "_pad" else script
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
        go_on = {
            "go_on": ([*still, "-m", folder / "linear-1/best"], None),
            "go_on_none": ([*still, "-m", folder / "none-1/best", "--head", "none"], None),
        }
        alone = same | {
            "dynamic": (dynamic, None),
            "fixed": ([*short, "--padding", "fixed"], None),
            "left": (dynamic, {"_pad": pad_left}),
            "no_pad_token": (short, NO_PAD_TOKEN),
            "contrary": ([*linear, "-d", contrary, "--num-epochs", 3, "--lr", 3e-3], None),
            **go_on,
            "nan_gradients": (linear, NAN_GRADIENTS),
            "nan_evaluation": (linear, NAN_EVALUATION),
            "unchecked": (linear, UNCHECKED),
            "new_head": ([*still, "-m", folder / "none-1/best"], None),
            "last": ([*linear, "-d", contrary, "--num-epochs", 3, "--lr", 3e-3], LAST),
        }
        two = same | {
            **go_on,
            "another_text": (short, {"load_examples": another_text}),
            "another_class": (short, {"load_examples": another_class}),
            "mean": (short, MEAN),
            "padded": (short, {"batches_of_rank": pad_batches}),
            "own": (short, {"gather": own_part}),
            "nan_loss": (linear, NAN_LOSS),
            "nan_gradients": (linear, NAN_GRADIENTS),
            "early": ([*linear, "--dist-timeout", 5], EARLY),
        }
        self.errors = {}
        for world_size, runs in ((1, alone), (2, two), (3, same | go_on)):
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
def runs(make_folder) -> Runs:
    return Runs(make_folder("runs"))


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
                assert many[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), (one["step"], key)
        first, other = runs.report(head), runs.report(head, world_size)
        assert other.pop("loss") == pytest.approx(first.pop("loss"), rel=1e-5)
        assert other == first
        pictures = [runs.folder / f"{head}-{n}/confusion_matrix.svg" for n in (1, world_size)]
        assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert sum(map(sum, first["confusion_matrix"])) == SIZES["test"]


@pytest.mark.parametrize("head", ["linear", "none"])
def test_one_saved_model_gets_the_same_report_on_every_number_of_ranks(runs, head):
    """To the last digit: all ranks together have the same batches."""
    name = "go_on" if head == "linear" else "go_on_none"
    report = runs.report(name)
    assert report["this model"] == runs.report(head)["this model"]
    assert runs.report(name, 2) == runs.report(name, 3) == report


def test_the_model_beats_the_largest_class(runs):
    report = runs.report("none")
    assert report["this model"]["accuracy"] > 1.3 * report["largest class"]["accuracy"]


@pytest.mark.ci
def test_built_in_default_beats_the_largest_class(tmp_path):
    done = run_script(
        *(*TORCHRUN, 2, SCRIPT, "--num-epochs", 2, "--save-dir", tmp_path, "-e", "run"), timeout=900
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run/test_report.json").read_text())
    assert report["classes"] == list(PACKAGES)
    assert report["this model"]["accuracy"] > 1.3 * report["largest class"]["accuracy"]


def test_rate_goes_up_and_then_down_to_0(runs):
    """And the first step trains: two of 24 warm up."""
    up, down = [0.5, 1.0], [n / 22 for n in range(22, 0, -1)]
    found = [line["lr"] for line in runs.metrics("none")]
    assert found == pytest.approx([3e-3 * factor for factor in up + down], rel=1e-6)


def test_planted_another_example_or_class_on_a_rank(runs):
    for name, what in (("text", r"train examples with checksum \w{16}"), ("class", "classes .*")):
        value = what.split()[-1]
        sentence = rf"InputError: Rank 1 on \S+ has {what}, rank 0 on \S+ has {value}: use the .*\."
        assert re.fullmatch(sentence, runs.errors[2][f"another_{name}"])
    assert "weather, wood, rank 0" in runs.errors[2]["another_class"]


@pytest.mark.parametrize(
    ("name", "world_size", "step", "value"),
    [
        ("nan_gradients", 1, 9, "gradient norm"),
        ("nan_gradients", 2, 9, "gradient norm"),
        ("nan_loss", 2, 9, "loss"),
        ("nan_evaluation", 1, 8, "evaluation loss"),
    ],
)
def test_a_run_that_diverges_stops_and_keeps_the_best_model(runs, name, world_size, step, value):
    """Rank 0 stops in the same step if only rank 1 has a loss that is not finite."""
    folder = runs.folder / f"{name}-{world_size}"
    kept = f"the best model so far, of epoch 1, is kept in {folder}/best"
    assert runs.errors[world_size][name] == (
        f"InputError: The training has diverged: at step {step} the {value} is nan; "
        f"{kept if step > 8 else 'no model was saved'}. Start a new run with a smaller --lr or "
        "more --warmup-steps."
    )
    assert (folder / "best/model.safetensors").exists() == (step > 8)


def test_planted_a_run_that_diverges_and_does_not_stop_at_once(runs):
    """Without the check, the next evaluation notices; before the all_reduce, one rank stops."""
    assert "at step 16 the evaluation loss is nan" in runs.errors[1]["unchecked"]
    assert "diverged" not in runs.errors[2]["early"]


def test_planted_a_mean_of_each_ranks_batch(runs):
    losses, wrong = runs.losses("linear")[:8], runs.losses("mean", 2)
    assert wrong[0] == pytest.approx(losses[0], rel=1e-5), "before the first update"
    assert wrong[3:] != pytest.approx(losses[3:], rel=1e-3)


def test_planted_duplicates_and_a_ranks_own_report(runs):
    for name in ("padded", "own"):
        assert runs.errors[2][name] == "AssertionError: an example is missing or repeated"


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


# --- what is written ---


MARKS = {
    "han": ("天地人你我他来去", {"好": "好", "坏": "$_$"}),
    "emoji": ("🍏🍋🍇🍒", {"😀": "👍", "😡": "👎"}),
}


@pytest.mark.parametrize("kind", MARKS)
def test_words_are_counted_in_any_script_but_planted_with_the_defaults(tmp_path, kind):
    """Scikit-learn's takes a clause for a word, and no word of one character at all."""
    letters, (alphabet, classes) = random.Random(0), MARKS[kind]
    lines = ["text,label"]
    for number in range(300):
        mark = sorted(classes)[number % 2]
        words = [*letters.choices(alphabet, k=9), mark]
        letters.shuffle(words)
        lines.append(f"{''.join(words)},{classes[mark]}")
    (tmp_path / "table.csv").write_text("\n".join(lines), encoding="utf-8")
    names, splits = load_examples(str(tmp_path / "table.csv"))
    labels = splits["test"].labels
    assert set(names) == set(classes.values()) and len(labels) > 15
    text = results.write_report(tmp_path, names, splits, labels, 0.0, 1)
    report = json.loads((tmp_path / "test_report.json").read_text())
    assert report["bag of words"]["accuracy"] == 1 and all(name in text for name in names)
    picture = (tmp_path / "confusion_matrix.svg").read_text(encoding="utf-8")
    assert all(f">{name}</text>" in picture for name in names)
    plant = make_pipeline(TfidfVectorizer(), LogisticRegression())
    with mock.patch.dict(results.BASELINES, {"bag of words": plant}):
        if kind == "emoji":
            with pytest.raises(ValueError, match="empty vocabulary"):
                results.write_report(tmp_path, names, splits, labels, 0.0, 1)
        else:
            results.write_report(tmp_path, names, splits, labels, 0.0, 1)
            report = json.loads((tmp_path / "test_report.json").read_text())
            assert report["bag of words"]["accuracy"] < 0.8


def test_confusion_matrix_has_names_as_they_are_and_numbers_while_they_can_be_read(tmp_path):
    for count in (30, 31):
        names = [f"class {n}" for n in range(count)]
        results.draw_matrix(tmp_path / "m.svg", np.full((count, count), 777), names)
        picture = (tmp_path / "m.svg").read_text()
        assert picture.count(">777</text>") == (900 if count == 30 else 0)
        assert all(f">{name}</text>" in picture for name in names)
    matrix, names = np.eye(2, dtype=int), ["$_$", "other"]
    results.draw_matrix(tmp_path / "m.svg", matrix, names)
    with (
        mock.patch.object(results.matplotlib, "rc_context", contextlib.nullcontext),
        pytest.raises(ValueError, match=r"Expected|Parse"),  # planted: a formula
    ):
        results.draw_matrix(tmp_path / "m.svg", matrix, names)


@pytest.fixture
def best(tmp_path) -> tuple:
    """Return the arguments of save_model after it has written its first folder, and what is in it;
    the model is another one since."""
    model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    arguments = (model, models.load_tokenizer("gpt2-tiny"), tmp_path / "best")
    results.save_model(*arguments)
    before = {file.name: file.read_bytes() for file in (tmp_path / "best").iterdir()}
    torch.nn.init.zeros_(model.transformer.wte.weight)
    return arguments, before


@pytest.mark.check
def test_best_is_replaced_as_a_whole_and_all_may_read_it(best, tmp_path):
    arguments, before = best
    results.save_model(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    after = {file.name: file.read_bytes() for file in (tmp_path / "best").iterdir()}
    changed = {name for name in before.keys() | after.keys() if after[name] != before[name]}
    assert changed == {"model.safetensors"}
    modes = {file.stat().st_mode for file in (tmp_path / "best").iterdir()}
    (tmp_path / "other").write_text("")
    assert modes == {(tmp_path / "other").stat().st_mode}


def between_the_renames(path: Path, target: Path) -> Path:
    if path.name == ".unfinished-best":
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    path.rename(target)


@pytest.mark.check
@pytest.mark.parametrize("fault", ["full disk", "between the renames"])
def test_best_is_kept_when_the_next_one_cannot_be_written(best, tmp_path, fault):
    arguments, before = best
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if fault == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
        replace = mock.patch.object(Path, "replace", between_the_renames)
        with (
            replace if fault != "full disk" else contextlib.nullcontext(),
            pytest.raises(InputError, match=r"best cannot be written \(.+\): free disk space\.$"),
        ):
            results.save_model(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in (tmp_path / "best").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["best"], "nothing else is left"


@pytest.mark.check
def test_models_without_a_classification_head_are_refused():
    for config in (GraniteConfig(), MambaConfig()):
        sentence = f"no classification head for {config.model_type}: give --head none.$"
        with pytest.raises(InputError, match=sentence):
            results.model_class("linear", config)
        assert results.model_class("none", config) is AutoModelForCausalLM


# --- GPUs ---


@pytest.mark.gpu
@pytest.mark.parametrize("head", ["linear", "none"])
def test_first_losses_on_a_gpu_agree_with_the_cpu(tmp_path, head):
    data = write_splits(tmp_path / "data", SIZES)
    found = {}
    for device, visible in (("gpu", "0"), ("cpu", "")):
        args = (*ARGS, "-d", data, "--head", head, "--max-steps", 6)
        place = ("--save-dir", tmp_path, "-e", device)
        done = run_script(SCRIPT, *args, *place, CUDA_VISIBLE_DEVICES=visible)
        assert done.returncode == 0, done.stderr
        metrics = read_metrics(tmp_path / device)
        found[device] = [line["loss"] for line in metrics] + [metrics[-1]["eval_loss"]]
        assert (tmp_path / device / "test_report.json").exists()
    # TF32 has 3 digits, and with each step the weights are further apart.
    assert len(found["gpu"]) == 7 and found["gpu"] == pytest.approx(found["cpu"], rel=3e-3)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("head", ["linear", "none"])
def test_one_saved_model_gets_the_same_report_on_one_gpu_and_on_two(tmp_path, head):
    data = write_splits(tmp_path / "data", SIZES)
    args = (SCRIPT, *ARGS, "-d", data, "--head", head, "--save-dir", tmp_path)
    still = ("--pretrained", "-m", tmp_path / "first/best", "--max-steps", 1, "--lr", 0)
    for ranks, name, more in ((2, "first", ()), (1, "one", still), (2, "two", still)):
        done = run_script(*TORCHRUN, ranks, *args, *more, "-e", name)
        assert done.returncode == 0, done.stderr
    one, two = (
        json.loads((tmp_path / name / "test_report.json").read_text()) for name in ("one", "two")
    )
    assert one.pop("loss") == pytest.approx(two.pop("loss"), rel=1e-5)
    assert one == two


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
    classes, splits = load_examples(str(folder))
    assert classes == ["neg", "pos"]
    assert len(splits["test"]) == 50 and 5 <= len(splits["validation"]) <= 40
    assert len(splits["train"]) + len(splits["validation"]) == 200
    for examples in splits.values():
        for text, label in zip(examples.texts, examples.labels, strict=True):
            assert text.endswith(("bad", "good")[label]) and "unsupervised" not in text
    again = load_examples(str(folder))[1]
    assert again == splits


@pytest.mark.check
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
    "All training rows of .* have the class 'a'": ROWS.replace(",b\n", ",a\n"),
    "50 of 100 rows in the train split of .* have no label in the": ROWS.replace(",b\n", ",\n"),
    "has 100 different values in 100 rows, so it has no classes": "text,label\n"
    + "".join(f"text {n},label {n}\n" for n in range(100)),
    "The validation split of .* is empty": "text,label\na,b\n" + "c,d\n" * 9,
}


@pytest.mark.check
@pytest.mark.parametrize("sentence", BAD_TABLES)
def test_bad_tables(tmp_path, sentence):
    path = tmp_path / "table.csv"
    path.write_text(BAD_TABLES[sentence])
    with pytest.raises(InputError, match=sentence) as error:
        load_examples(str(path))
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.check
def test_labels_of_any_kind(tmp_path):
    """A date is a class by its name; a list is none, and neither is what is no number."""
    path, texts = tmp_path / "table.parquet", [f"text number {n}" for n in range(90)]
    days = [datetime.date(2024, 2, 1 + n % 3) for n in range(90)]
    Dataset.from_dict({"text": texts, "label": days}).to_parquet(path)
    classes, splits = load_examples(str(path))
    assert classes == ["2024-02-01", "2024-02-02", "2024-02-03"]
    text, label = splits["train"].texts[5], splits["train"].labels[5]
    assert label == int(text.split()[-1]) % 3
    Dataset.from_dict({"text": texts, "label": [float(n % 2) for n in range(90)]}).to_parquet(path)
    assert load_examples(str(path))[0] == ["0.0", "1.0"]
    for labels, sentence in (
        ([[n % 2] for n in range(90)], "has lists: give one class per row"),
        ([{"name": n % 2} for n in range(90)], "has objects: give one class per row"),
        ([float(n % 2) if n % 3 else float("nan") for n in range(90)], "30 of 90 .* no label in"),
    ):
        Dataset.from_dict({"text": texts, "label": labels}).to_parquet(path)
        with pytest.raises(InputError, match=f"column 'label'.* {sentence}|{sentence}"):
            load_examples(str(path))


@pytest.mark.check
def test_arguments_without_an_effect_are_refused(tmp_path):
    for arguments in (("plain_text",), (None, "body"), (None, None, "class")):
        with pytest.raises(InputError, match="python-stdlib is not a table: leave out --dataset"):
            load_examples("python-stdlib", *arguments)
    (tmp_path / "table.csv").write_text(ROWS)
    with pytest.raises(InputError, match=r"table.csv is a single file: leave out --"):
        load_examples(str(tmp_path / "table.csv"), "plain_text")
    assert load_examples(str(tmp_path / "table.csv"))[0] == ["a", "b"]


@pytest.mark.check
def test_the_log_counts_what_stands_in_train_and_in_test(tmp_path):
    """Splits of a table's own are left as they are."""
    args = argparse.Namespace(batch_size=2, global_batch_size=4, seed=0, padding="grouped")
    found = []
    for shared in (0, 3):
        folder = tmp_path / f"table-{shared}"
        folder.mkdir()
        rows = ROWS.splitlines(keepends=True)
        (folder / "train.csv").write_text("".join(rows[: 81 + shared]))
        (folder / "test.csv").write_text("".join(rows[:1] + rows[81:]))
        classes, splits = load_examples(str(folder))
        # Of the shared texts, some may have gone to the validation.
        assert len(splits["test"]) == 20
        encode(splits, classes, models.load_tokenizer("gpt2-tiny"), 32, None)
        sampler = GroupedSampler(splits["train"].lengths(), args, 1, 0)
        said = results.describe_data(classes, splits, sampler, 32).splitlines()
        both = len(set(splits["train"].texts) & set(splits["test"].texts))
        line = f"{both} texts of the test split are also in the training split"
        assert said[2:] == ([line] if both else [])
        found.append(both)
    assert found[0] == 0 < found[1] <= 3


@pytest.mark.check
def test_bad_names_and_prompts(tmp_path):
    (tmp_path / "text.txt").write_text("a")
    (tmp_path / "table.parquet").write_text("a")
    for name, sentence in {
        f"{tmp_path}/text.txt": "text.txt is no table: give a .json, .jsonl",
        f"{tmp_path}/table.parquet": "Cannot read .* as a data set",
        f"{tmp_path}/nothing": "There is no data set at",
        "stanfordnlp/imdb": "is neither a preset .* cannot be reached",
    }.items():
        with pytest.raises(InputError, match=sentence):
            load_examples(name)
    classes, splits = load_examples("python-stdlib")
    tokenizer = models.load_tokenizer("gpt2-tiny")
    for prompt, sentence in {
        "which class?": r"must contain {text} exactly once",
        "{text}" + " of what" * 60: "longest label take .* tokens, but --seq-length is 32: shorten",
    }.items():
        with pytest.raises(InputError, match=sentence):
            encode(splits, classes, tokenizer, 32, prompt)


@pytest.mark.ci
def test_a_run_is_not_overwritten_and_a_preset_has_no_weights(runs):
    args = (SCRIPT, *ARGS, "-d", runs.folder / "data", "--save-dir", runs.folder)
    before = (runs.folder / "linear-1/metrics.jsonl").read_bytes()
    done = run_script(*args, "-e", "linear-1")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    sentence = "linear-1 already contains a run: give another -e."
    assert done.stderr.splitlines()[-1].endswith(sentence)
    assert (runs.folder / "linear-1/metrics.jsonl").read_bytes() == before
    with pytest.raises(InputError, match="preset gpt2-tiny has no weights"):
        models.from_pretrained(None, "gpt2-tiny", None, {})


# --- batches ---


@pytest.mark.check
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


@pytest.mark.check
def test_grouping_leaves_less_padding():
    args = argparse.Namespace(batch_size=4, global_batch_size=8, seed=0, padding="grouped")
    lengths = [random.Random(i).randrange(1, 99) for i in range(400)]
    grouped = GroupedSampler(lengths, args, 2, 0).padded_tokens()
    args.padding = "dynamic"
    dynamic = GroupedSampler(lengths, args, 2, 0).padded_tokens()
    assert sum(lengths) <= grouped < 1.1 * sum(lengths) < dynamic < 99 * 400


@pytest.mark.check
def test_batches():
    collate = Collator(0, label_tokens=[[5, 6], [7]])
    batch = collate([Example(3, [1, 2, 3], 0), Example(8, [4], 1)])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 5], [4, 0, 0, 0]]
    assert batch["columns"].tolist() == [0, 2, 3]
    assert batch["targets"].tolist() == [[IGNORED, 5, 6], [7, IGNORED, IGNORED]]
    assert batch["n"].tolist() == [3, 2, 4]
    for empty in (collate([]), Collator(0)([])):
        assert empty["n"].tolist() == [0, 0, 0] and empty["index"].tolist() == [-1]
    assert Collator(0, width=4)([Example(0, [1, 2], 1)])["input_ids"].tolist() == [[1, 2, 0, 0]]


# --- the script, its launch file, its page ---


@pytest.mark.check
def test_the_script_has_the_sections_of_the_others():
    source = SCRIPT.read_text()
    sections = ["setup", "model", "data", "optimizer", "train", "test report"]
    assert re.findall(r"^    # --- (.+) ---$", source, re.MULTILINE) == sections


@pytest.mark.check
def test_what_the_old_launcher_adds_is_refused(monkeypatch, capsys):
    """The page says what to do about it."""
    monkeypatch.setattr("sys.argv", ["train_classifier.py", "--local-rank=0"])
    with pytest.raises(SystemExit):
        load_script(SCRIPT).get_args()
    assert "unrecognized arguments: --local-rank=0" in capsys.readouterr().err


@pytest.mark.ci
def test_launch_file_works_from_anywhere(runs, tmp_path):
    command = ["bash", str(ROOT / "02-ddp/launch_classifier.sh"), "--model-name", "gpt2-tiny"]
    command += ["--num-epochs", "1", "--batch-size", "4", "-d", str(runs.folder / "data")]
    command += ["--save-dir", str(tmp_path), "-e", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path / "run")[-1]["step"] == 3
    assert "largest class" in done.stdout + done.stderr
    assert (tmp_path / "run/best/model.safetensors").exists()

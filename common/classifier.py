"""A classifier's folder, and what there is to say of its test."""

import copy
import json
import re
import shutil
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from safetensors import SafetensorError
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import ConfusionMatrixDisplay, classification_report, confusion_matrix
from sklearn.pipeline import make_pipeline
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from common.classification import Examples
from common.cli import InputError
from common.grouping import GroupedSampler
from common.models import PRESET_NAMES, cannot_load, first_line, resolve_model
from common.remote import is_remote

BASELINES = {
    # Weighted counts of words: https://scikit-learn.org/stable/modules/feature_extraction.html
    "bag of words": make_pipeline(TfidfVectorizer(), LogisticRegression(max_iter=1000)),
    "largest class": DummyClassifier(strategy="most_frequent"),
}


def check_name(name: str, save_dir: str) -> str:
    """Return the name of a run. Raises InputError where one has it already: its log and its best
    model would be overwritten, and where save_dir is an address: its model's folder is local."""
    if is_remote(save_dir):
        raise InputError(f"A classifier cannot be saved to {save_dir}: give a folder.")
    run_dir = Path(save_dir) / name
    if (run_dir / "metrics.jsonl").exists():
        raise InputError(f"{run_dir} holds a run already: give another -e.")
    return name


def load_weights(
    model_class: type, name: str, config: PretrainedConfig | None, options: dict[str, object]
) -> PreTrainedModel:
    """Load a folder's or a hub model's own weights, in the shape of config or its own, on the CPU.

    A head that it lacks, or that is for another number of classes, is drawn. Raises InputError for
    a preset (it has no weights) and where the weights cannot be had.
    """
    disable_progress_bar()
    if name in PRESET_NAMES:
        raise InputError(f"The preset {name} has no weights: leave out --pretrained.")
    try:
        return model_class.from_pretrained(
            resolve_model(name), config=config, ignore_mismatched_sizes=True, **options
        )
    except (OSError, ValueError) as error:
        raise cannot_load("model", name, f"usable weights: {first_line(error)}", error) from error


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder that transformers loads; it replaces the one before only when it is complete.

    Raises InputError if it cannot be written (a full disk); what was there before is kept.
    """
    disable_progress_bar()
    unfinished, old = folder.with_name(f".unfinished-{folder.name}"), folder.with_name(".old")
    try:
        for left in (unfinished, old):
            shutil.rmtree(left, ignore_errors=True)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if folder.exists():
            folder.replace(old)
        unfinished.replace(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{folder} could not be written ({reason}): make room.") from error


def describe_data(
    classes: list[str], splits: dict[str, Examples], sampler: GroupedSampler, seq_length: int
) -> str:
    """Return what there is to learn from, and what padding adds to an epoch's tokens."""
    sizes = ", ".join(f"{len(examples):,} {split}" for split, examples in splits.items())
    lengths = splits["train"].lengths()
    padded = {"fixed": len(lengths) * seq_length}
    for name in ("dynamic", "grouped"):
        other = copy.copy(sampler)
        other.grouped = name == "grouped"
        other.set_epoch(0)
        padded[name] = other.padded_tokens()
    ways = ", ".join(f"{name} {n:,}" for name, n in padded.items())
    return (
        f"{len(classes)} classes ({', '.join(classes)}), examples: {sizes}\n"
        f"tokens of an epoch: {sum(lengths):,} of the texts; with padding: {ways}"
    )


def describe_epoch(epoch: int, metrics: dict[str, float], best_epoch: int) -> str:
    """Return an epoch's numbers, over all ranks, in a line."""
    shown = {name: f"{metrics[name]:.4f}" for name in metrics if re.search("_loss|_accuracy", name)}
    return (
        f"epoch {epoch}: training loss {shown['train_loss']}, accuracy {shown['train_accuracy']}; "
        f"validation loss {shown['eval_loss']}, accuracy {shown['eval_accuracy']}"
        f"{' (the best so far)' * (epoch == best_epoch)}"
    )


def write_report(
    run_dir: Path,
    classes: list[str],
    splits: dict[str, Examples],
    predictions: list[int],
    loss: float,
    epoch: int,
) -> str:
    """Write test_report.json and confusion_matrix.svg to run_dir, and return the report as text.

    predictions: the class of each example of the test, in their order; loss: on the test; epoch:
    the best. Baselines are trained here, on all words of the texts, also those that were cut off.
    """
    train, test = splits["train"], splits["test"]
    options = {"labels": range(len(classes)), "target_names": classes, "zero_division": 0}
    found = {"this model": predictions}
    for name, baseline in BASELINES.items():
        found[name] = baseline.fit(train.texts, train.labels).predict(test.texts).tolist()
    reports = {
        name: classification_report(test.labels, each, output_dict=True, **options)
        for name, each in found.items()
    }
    matrix = confusion_matrix(test.labels, predictions, labels=options["labels"])
    content = {
        "epoch": epoch,
        "loss": loss,
        "classes": classes,
        "confusion_matrix": matrix.tolist(),
        **reports,
    }
    (run_dir / "test_report.json").write_text(json.dumps(content, indent=1) + "\n")
    draw_matrix(run_dir / "confusion_matrix.svg", matrix, classes)
    lines = [
        classification_report(test.labels, predictions, digits=3, **options),
        f"{'':24}accuracy  macro F1",
    ]
    for name, each in reports.items():
        lines.append(f"{name:24}{each['accuracy']:8.3f}{each['macro avg']['f1-score']:10.3f}")
    return "\n".join(lines)


def draw_matrix(path: Path, matrix: object, classes: list[str]) -> None:
    """Draw how many examples of each class (rows) are given which (columns); the same file again
    for the same counts."""
    size = 3 + len(classes) / 2
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    display = ConfusionMatrixDisplay(matrix, display_labels=classes)
    display.plot(
        ax=figure.add_subplot(), cmap="Blues", colorbar=False, xticks_rotation=45, values_format="d"
    )
    with matplotlib.rc_context({"svg.hashsalt": "confusion matrix"}):
        figure.savefig(path, metadata={"Date": None})

"""A classifier's folder, and what there is to say of its test."""

import json
import re
import shutil
import warnings
from pathlib import Path

import matplotlib
import transformers
from matplotlib.figure import Figure
from safetensors import SafetensorError
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import ConfusionMatrixDisplay, classification_report, confusion_matrix
from sklearn.pipeline import make_pipeline
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from common import models
from common.cli import InputError
from common.distributed import check_agreement
from common.models import let_others_read
from common.storage import is_remote

from classification.batches import GroupedSampler
from classification.examples import Examples

# A Han or Kana character (no spaces part them into words), a word, a sign: any text has one.
WORD = r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]"
BASELINES = {
    # Weighted counts of words: https://scikit-learn.org/stable/modules/feature_extraction.html
    "bag of words": make_pipeline(
        TfidfVectorizer(token_pattern=WORD), LogisticRegression(max_iter=1000)
    ),
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


def model_class(head: str, config: PretrainedConfig) -> type:
    """Return the class for --head. Raises InputError where transformers has no head for a model."""
    if head == "none":
        return transformers.AutoModelForCausalLM
    if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        kind = config.model_type
        raise InputError(f"transformers has no classification head for {kind}: give --head none.")
    return transformers.AutoModelForSequenceClassification


def load_weights(
    model_class: type, name: str, config: PretrainedConfig | None, options: dict[str, object]
) -> PreTrainedModel:
    """Load a folder's or a hub model's own weights, in the shape of config or its own, on the CPU.

    A head that it lacks, or that is for another number of classes, is drawn. Raises InputError as
    models.load_weights does.
    """
    disable_progress_bar()
    options = {**options, "ignore_mismatched_sizes": True}
    return models.load_weights(model_class, name, config, options)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder that transformers loads; it replaces the one before only when it is complete.

    Raises InputError if it cannot be written (a full disk); what was there before is kept.
    """
    disable_progress_bar()
    unfinished, old = folder.with_name(f".unfinished-{folder.name}"), folder.with_name(".old")
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        let_others_read(unfinished)
        if folder.exists():
            folder.replace(old)
        unfinished.replace(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{folder} could not be written ({reason}): make room.") from error
    finally:
        if old.exists() and not folder.exists():  # it failed between the two renames
            old.replace(folder)
        for left in (unfinished, old):
            shutil.rmtree(left, ignore_errors=True)


def check_same(classes: list[str], splits: dict[str, Examples]) -> None:
    """Raise InputError if a rank has other examples than rank 0, or in another order: the ranks
    share them by their numbers. All ranks must call this."""
    facts = {"classes": ", ".join(classes)}
    for name, examples in splits.items():
        facts[f"{name} examples of checksum"] = examples.checksum()
    check_agreement(facts, "give all nodes the same arguments, data and Python")


def describe_data(
    classes: list[str], splits: dict[str, Examples], sampler: GroupedSampler, seq_length: int
) -> str:
    """Return what there is to learn from, and what padding adds to an epoch's tokens; and how many
    texts of the test are in train as well, if any."""
    sizes = ", ".join(f"{len(examples):,} {split}" for split, examples in splits.items())
    ways = ", ".join(f"{way} {n:,}" for way, n in sampler.padded_by_way(seq_length).items())
    known = set(splits["train"].texts)
    shared = sum(text in known for text in splits["test"].texts)
    lines = [
        f"{len(classes)} classes ({', '.join(classes)}), examples: {sizes}",
        f"tokens of an epoch: {sum(sampler.lengths):,} of the texts; with padding: {ways}",
    ]
    if shared:  # of a table with splits of its own, which are left as they are
        lines.append(f"{shared:,} of the test's texts also stand in train")
    return "\n".join(lines)


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
    content = {"epoch": epoch, "loss": loss, "classes": classes}
    content |= {"confusion_matrix": matrix.tolist(), **reports}
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
    size = 3 + min(len(classes), 60) / 2
    display = ConfusionMatrixDisplay(matrix, display_labels=classes)
    options = {"values_format": "d", "include_values": len(classes) <= 30}  # more are not readable
    # Names as they are: a $ begins no formula, and the reader's font has what this one lacks.
    names = {"svg.fonttype": "none", "text.parse_math": False}
    with (
        matplotlib.rc_context({"svg.hashsalt": "confusion matrix", **names}),
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):
        figure = Figure(figsize=(size + 1, size), layout="constrained")
        axes = figure.add_subplot()
        display.plot(ax=axes, cmap="Blues", colorbar=False, xticks_rotation=45, **options)
        figure.savefig(path, metadata={"Date": None})

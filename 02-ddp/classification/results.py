"""Load and save a classifier, describe its data, and write its test report."""

import json
import math
import re
import shutil
import sys
import warnings
from pathlib import Path

import transformers
from safetensors import SafetensorError
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from common import models
from common.cli import RunError
from common.launch import check_agreement, gather, rank_and_world_size
from common.storage import is_remote

from classification.batches import GroupedSampler
from classification.examples import Examples

try:
    import matplotlib
    from matplotlib.figure import Figure
    from sklearn.dummy import DummyClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import ConfusionMatrixDisplay, classification_report, confusion_matrix
    from sklearn.pipeline import make_pipeline
except ImportError as error:
    print(  # each rank: they have not met yet
        f"The classifier needs more packages ({error}): pip install --constraint requirements.txt "
        "--editable '.[classify]'.",
        file=sys.stderr,
    )
    sys.exit(2)

# A Han or Kana character (there are no spaces between words), a word, or a punctuation mark.
WORD = r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]"
BASELINES = {
    # Word counts, weighted by TF-IDF: https://scikit-learn.org/stable/modules/feature_extraction.html
    "bag of words": make_pipeline(
        TfidfVectorizer(token_pattern=WORD), LogisticRegression(max_iter=1000)
    ),
    "largest class": DummyClassifier(strategy="most_frequent"),
}


def check_new(run_dir: Path) -> None:
    """Raise RunError if the folder is an address, or if it contains a run, whose metrics and best
    model would be overwritten. All ranks must call this: rank 0 looks before it writes."""
    if is_remote(run_dir):
        raise RunError(f"A classifier cannot be saved to {run_dir}: give a folder.")
    rank, _ = rank_and_world_size()
    if gather({rank: (run_dir / "metrics.jsonl").exists()})[0]:
        raise RunError(f"{run_dir} already contains a run: give another -e.")


def model_class(head: str, config: PretrainedConfig) -> type:
    """Return the class for --head. Raises RunError if transformers has no head for the model."""
    if head == "none":
        return transformers.AutoModelForCausalLM
    if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        kind = config.model_type
        raise RunError(f"transformers has no classification head for {kind}: give --head none.")
    return transformers.AutoModelForSequenceClassification


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model folder for transformers. A previous folder is only replaced by a complete one.

    Raises RunError if the folder cannot be written, for example on a full disk.
    """
    disable_progress_bar()
    unfinished, old = folder.with_name(f".unfinished-{folder.name}"), folder.with_name(".old")
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        models.let_others_read(unfinished)
        if folder.exists():
            folder.replace(old)
        unfinished.replace(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{folder} cannot be written ({reason}): free disk space.") from error
    finally:
        if old.exists() and not folder.exists():  # the second rename failed
            old.replace(folder)
        for left in (unfinished, old):
            shutil.rmtree(left, ignore_errors=True)


def check_same(classes: list[str], splits: dict[str, Examples]) -> None:
    """Raise RunError if a rank's examples or their order differ from rank 0's, because the ranks
    share them by index. All ranks must call this."""
    facts = {"classes": ", ".join(classes)}
    for name, examples in splits.items():
        facts[f"{name} examples with checksum"] = examples.checksum()
    check_agreement(facts, "use the same arguments, data and Python version on all nodes")


def describe_data(
    classes: list[str], splits: dict[str, Examples], sampler: GroupedSampler, seq_length: int
) -> str:
    """Return the classes, the size of each split, the tokens of an epoch with each kind of padding,
    and, if there are any, the number of test texts that are also in the training split."""
    sizes = ", ".join(f"{len(examples):,} {split}" for split, examples in splits.items())
    paddings = sampler.tokens_by_padding(seq_length)
    padded = ", ".join(f"{padding} {n:,}" for padding, n in paddings.items())
    trained = set(splits["train"].texts)
    shared = sum(text in trained for text in splits["test"].texts)
    lines = [
        f"{len(classes)} classes ({', '.join(classes)}), examples: {sizes}",
        f"tokens of an epoch: {sum(sampler.lengths):,} of the texts; with padding: {padded}",
    ]
    if shared:  # only if the table has its own splits, which are not changed
        lines.append(f"{shared:,} texts of the test split are also in the training split")
    return "\n".join(lines)


def check_finite(values: dict[str, float], step: int, run_dir: Path, best_epoch: int) -> None:
    """Raise RunError if one of the values, by name, is not finite.

    All ranks must call this with equal values, so that all of them stop. best_epoch: the epoch
    whose model is saved in run_dir/best, or 0 if there is none yet.
    """
    if bad := [f"the {name} is {v:.0f}" for name, v in values.items() if not math.isfinite(v)]:
        kept = f"the best model so far, of epoch {best_epoch}, is kept in {run_dir / 'best'}"
        raise RunError(
            f"The training has diverged: at step {step} {' and '.join(bad)}; "
            f"{kept if best_epoch else 'no model was saved'}. Start a new run with a smaller --lr "
            "or more --warmup-steps."
        )


def describe_epoch(epoch: int, metrics: dict[str, float], best_epoch: int) -> str:
    """Return a line with the losses and accuracies of an epoch."""
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

    predictions: the predicted class of each test example, in order. loss: on the test split. epoch:
    the best one. The baselines are trained here, on the full texts without truncation.
    """
    train, test = splits["train"], splits["test"]
    options = {"labels": range(len(classes)), "target_names": classes, "zero_division": 0}
    by_model = {"this model": predictions}
    for name, baseline in BASELINES.items():
        by_model[name] = baseline.fit(train.texts, train.labels).predict(test.texts).tolist()
    reports = {
        name: classification_report(test.labels, predicted, output_dict=True, **options)
        for name, predicted in by_model.items()
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
    for name, report in reports.items():
        lines.append(f"{name:24}{report['accuracy']:8.3f}{report['macro avg']['f1-score']:10.3f}")
    return "\n".join(lines)


def draw_matrix(path: Path, matrix: object, classes: list[str]) -> None:
    """Draw the confusion matrix (rows: true classes, columns: predictions). The same counts always
    give the same file."""
    size = 3 + min(len(classes), 60) / 2
    display = ConfusionMatrixDisplay(matrix, display_labels=classes)
    options = {"values_format": "d", "include_values": len(classes) <= 30}  # more are unreadable
    # A $ starts no formula. Names are stored as text, because matplotlib's font lacks many scripts.
    names = {"svg.fonttype": "none", "text.parse_math": False}
    with (
        matplotlib.rc_context({"svg.hashsalt": "confusion matrix", **names}),
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):
        figure = Figure(figsize=(size + 1, size), layout="constrained")
        axes = figure.add_subplot()
        display.plot(ax=axes, cmap="Blues", colorbar=False, xticks_rotation=45, **options)
        figure.savefig(path, metadata={"Date": None})

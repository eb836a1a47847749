"""Check a classifier's data and losses, describe them, and write its test report."""

import json
import math
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import ConfusionMatrixDisplay, classification_report, confusion_matrix
from sklearn.pipeline import make_pipeline

from common.cli import RunError
from common.launch import check_agreement, gather, rank_and_world_size

from classification.examples import Examples

BASELINES = {
    # Word counts, weighted by TF-IDF: https://scikit-learn.org/stable/modules/feature_extraction.html
    "bag of words": make_pipeline(
        TfidfVectorizer(token_pattern=r"\w+|[^\w\s]"), LogisticRegression(max_iter=1000)
    ),
    "largest class": DummyClassifier(strategy="most_frequent"),
}


def check_new(run_dir: Path) -> None:
    """Raise RunError on all ranks if rank 0 finds an earlier run, which would be overwritten."""
    rank, _ = rank_and_world_size()
    if gather({rank: (run_dir / "metrics.jsonl").exists()})[0]:
        raise RunError(f"{run_dir} already contains a run: give another -e.")


def check_same(classes: list[str], splits: dict[str, Examples]) -> None:
    """Raise RunError if a rank's examples or their order differ from rank 0's, because the ranks
    share them by index. All ranks must call this."""
    facts = {"classes": ", ".join(classes)}
    for name, examples in splits.items():
        facts[f"{name} examples with checksum"] = examples.checksum()
    check_agreement(facts, "use the same arguments, data and Python version on all nodes")


def check_finite(values: dict[str, float], step: int, run_dir: Path) -> None:
    """Raise RunError if one of the values, by name, is not finite.

    All ranks must call this with equal values, so that all of them stop.
    """
    if bad := [f"the {name} is {v:.0f}" for name, v in values.items() if not math.isfinite(v)]:
        raise RunError(
            f"The training has diverged: at step {step} {' and '.join(bad)}. If an epoch was "
            f"complete, {run_dir / 'best'} has the best model. Start a new run with a smaller --lr "
            "or more --warmup-steps."
        )


def describe_data(classes: list[str], splits: dict[str, Examples]) -> str:
    """Return the classes, the size of each split, the tokens of an epoch, and the number of test
    texts that are also in the training split."""
    sizes = ", ".join(f"{len(examples):,} {split}" for split, examples in splits.items())
    trained = set(splits["train"].texts)
    shared = sum(text in trained for text in splits["test"].texts)
    return (
        f"{len(classes)} classes ({', '.join(classes)}), examples: {sizes}\n"
        f"tokens of an epoch: {sum(splits['train'].lengths()):,}; test texts that are also in the "
        f"training split: {shared:,}"
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
    # The same counts always give the same picture. A $ in a name starts no formula.
    with matplotlib.rc_context({"svg.hashsalt": "confusion matrix", "text.parse_math": False}):
        figure = Figure(figsize=(4 + len(classes) / 2, 3 + len(classes) / 2), layout="constrained")
        display = ConfusionMatrixDisplay(matrix, display_labels=classes)
        display.plot(ax=figure.add_subplot(), cmap="Blues", colorbar=False, xticks_rotation=45)
        figure.savefig(run_dir / "confusion_matrix.svg", metadata={"Date": None})
    lines = [
        classification_report(test.labels, predictions, digits=3, **options),
        f"{'':24}accuracy  macro F1",
    ]
    for name, report in reports.items():
        lines.append(f"{name:24}{report['accuracy']:8.3f}{report['macro avg']['f1-score']:10.3f}")
    return "\n".join(lines)

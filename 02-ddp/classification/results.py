"""Write the test report of a classifier, beside the reports of two baselines."""

import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import ConfusionMatrixDisplay, classification_report, confusion_matrix
from sklearn.pipeline import make_pipeline

from classification.examples import Examples

BASELINES = {
    # Word counts, weighted by TF-IDF: https://scikit-learn.org/stable/modules/feature_extraction.html
    "bag of words": make_pipeline(
        TfidfVectorizer(token_pattern=r"\w+|[^\w\s]"), LogisticRegression(max_iter=1000)
    ),
    "largest class": DummyClassifier(strategy="most_frequent"),
}


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

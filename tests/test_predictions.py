"""What 04-fsdp/memory.py predicts against what GPUs held."""

import copy

import measure
import predictions
import pytest
import report


def wrong_peaks(expected: dict) -> tuple[int, list[str]]:
    """Return how many predictions were measured, and the rows that are off by more than 2%.

    Where all activations are kept, the compiler may still choose to compute some of them again.
    Then the prediction is an upper bound.
    """
    compared, wrong = 0, []
    for label, predicted in expected.items():
        for row in report.measured(label).values():
            compared += 1
            ratio = report.measured_peak(row) / predicted["peak_gib"]
            options = predicted["options"]
            keeps_all = options.get("activation_checkpointing", "none") == "none"
            least = 0 if options.get("compile") and keeps_all else 0.98
            if not least <= ratio <= 1.02:
                wrong.append(label)
    return compared, wrong


@pytest.mark.check
def test_gpus_hold_what_was_predicted():
    """Planted: a prediction that is 5% too high."""
    expected = report.read("predictions")["rows"]
    compared, wrong = wrong_peaks(expected)
    assert compared > 20
    assert wrong == []
    planted = copy.deepcopy(expected)
    planted["8B, TF32, recomputation"]["peak_gib"] *= 1.05
    assert wrong_peaks(planted)[1] == ["8B, TF32, recomputation"]


@pytest.mark.check
def test_predictions_are_for_the_rows_of_measure():
    known = {label for label, row in measure.ROWS.items() if predictions.options_of(row)}
    assert report.read("predictions")["rows"].keys() == known, (
        "run python tests/benchmarks/predictions.py"
    )


@pytest.mark.nightly
def test_the_file_of_predictions_is_what_memory_py_says():
    known = report.read("predictions")
    assert predictions.predict_all() == known, "run python tests/benchmarks/predictions.py"

"""What 04-fsdp/memory.py predicts against what GPUs held, and what the page shows of it."""

import predictions
import pytest
import report
from helpers import ROOT

MEASURED = sorted(path.stem for path in predictions.RESULTS.glob("fsdp_*.json"))
STALE = f"run python tests/benchmarks/predictions.py --output {report.result('predictions')}"


def rows_of(name: str) -> list[dict]:
    return report.content(ROOT / report.result(name))["rows"]


def predicted() -> dict:
    return report.content(ROOT / report.result("predictions"))


def wrong_peaks(expected: dict) -> tuple[int, list[str]]:
    """Return how many rows memory.py can know, and those of them that are off by more than 2%.

    On one GPU with offload by more than 10%: about a block's gradients are not counted. Left out:
    where blocks of Llama are compiled and keep all, it is the compiler that chooses what. And
    chapter 4 did not compile the loss yet when GPT-2 was measured with it.
    """
    compared, wrong = 0, []
    for name in MEASURED:
        for each in rows_of(name):
            peak = report.measured_peak(each)
            model, _, options = predictions.options_of(each)
            keeps_all = options.activation_checkpointing == "none"
            unknown = model.startswith("llama") or each["chapter"] == "04-fsdp"
            if peak is None or (options.compile and keeps_all and unknown):
                continue
            compared += 1
            assert each["label"] in expected.get(name, {}), STALE
            near = 0.1 if name == "fsdp_largest_offload" else 0.02
            if expected[name][each["label"]]["peak_gib"] != pytest.approx(peak, rel=near):
                wrong.append(each["label"])
    return compared, wrong


def test_gpus_hold_what_was_predicted():
    """Planted: a prediction that is 5% too high."""
    expected = predicted()
    compared, wrong = wrong_peaks(expected)
    assert compared >= 25
    assert wrong == []
    expected["fsdp_options"]["full"]["peak_gib"] *= 1.05
    assert wrong_peaks(expected)[1] == ["full"]


@pytest.mark.nightly
def test_the_file_of_predictions_is_what_memory_py_says():
    assert predictions.predict_all() == predicted(), STALE

"""What 04-fsdp/memory.py predicts against what GPUs held, and what the page shows of it."""

import shlex
from itertools import pairwise

import predictions
import pytest
import report

# Where all activations are kept, the compiler may still choose to compute some of them again.
UNKNOWN = {
    "fsdp_options": ["no checkpointing"],
    "options_two_gpus": [
        "Llama 1B, FSDP",
        "Llama 1B, FSDP, no reshard",
        "Llama 1B, FSDP, offload",
        "Llama 1B, FSDP, 4 micro-batches",
        "Llama 1B, FSDP, 4 micro-batches, all reduced",
    ],
}


def wrong_options(name: str, predicted: dict) -> list[str]:
    """Return the rows that were predicted for another run than that of their command.

    The recorded commands have flags for what are variants now, such as --cpu-offload.
    """
    wrong = []
    for row in report.read(name)["rows"]:
        if "command" not in row or row["label"] not in predicted:
            continue
        words = shlex.split(row["command"])
        options = predictions.Options(**predicted[row["label"]]["options"])
        given = dict(pairwise(words))
        same = {
            "chapter 1": ("01-single-gpu" in row["command"]) == (options.sharding == "none"),
            "GPUs": row["gpus"] == options.gpus,
            "compile": ("--compile" in words) == options.compile,
            "offload": ("--cpu-offload" in words) == options.cpu_offload,
            "reduction": ("--reduce-every-backward" in words) == options.reduce_every_backward,
            "shared": given.get("--context-parallel", "1") == str(options.context_parallel),
            "length": given.get("-s", "1024") == str(options.seq_length),
            "checkpointing": given.get("--activation-checkpointing", "none")
            == options.activation_checkpointing,
        }
        wrong += [f"{name}, {row['label']}: {key}" for key, is_same in same.items() if not is_same]
    return wrong


def wrong_peaks(expected: dict) -> tuple[int, list[str]]:
    """Return how many predictions were measured, and the rows that are off by more than 2%."""
    compared, wrong = 0, []
    for name, predicted in expected.items():
        for row in report.read(name)["rows"]:
            label, peak = row["label"], report.measured_peak(row)
            if peak is None or label not in predicted or label in UNKNOWN.get(name, ()):
                continue
            compared += 1
            if predicted[label]["peak_gib"] != pytest.approx(peak, rel=0.02):
                wrong.append(label)
    return compared, wrong


def test_gpus_hold_what_was_predicted():
    """Planted: a prediction that is 5% too high."""
    expected = report.read("predictions")
    assert [row for each in expected.items() for row in wrong_options(*each)] == []
    compared, wrong = wrong_peaks(expected)
    assert compared == 78
    assert wrong == []
    expected["fsdp_options"]["full"]["peak_gib"] *= 1.05
    assert wrong_peaks(expected)[1] == ["full"]


@pytest.mark.nightly
def test_the_file_of_predictions_is_what_memory_py_says():
    known = report.read("predictions")
    assert predictions.predict_all(known) == known, "run python tests/benchmarks/predictions.py"

"""What 04-fsdp/memory.py predicts against what GPUs held, and what the page shows of it."""

import re

import matplotlib
import predictions
import pytest
import report
from helpers import ROOT, run_script

FIGURE = ROOT / "04-fsdp/memory.svg"
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


def test_the_head_is_predicted_to_a_hundredth_of_a_gib():
    """All have cuBLAS' workspace and the like on top; a block's last matmul is 0.06 or 0.12."""
    expected, off = predicted(), {}
    for name in ("fsdp_options", "fsdp_precision", "fsdp_precision_4"):
        for each in rows_of(name):
            known, peak = expected[name][each["label"]], report.measured_peak(each)
            if peak and known["fullest_at"][0] == "head" and "no checkpoint" not in each["label"]:
                off[f"{name}, {each['label']}"] = peak - known["peak_gib"]
    assert len(off) >= 20
    assert all(0.06 < each < 0.07 for each in off.values()), off


@pytest.mark.ci
def test_compiled_gpt2_holds_what_was_predicted():
    """Chapter 5 in bfloat16 on one GPU and on two, of which throughput.py has measured each."""
    for name in ("gpt2_bf16", "gpt2_bf16_scaling"):
        for each in rows_of(name):
            if not each["chapter"].startswith("05") or not each["runs"]:
                continue
            words = each["command"].split("--nproc-per-node ")[1].split(" ", 1)[1]
            row = {"command": words, "chapter": each["chapter"], "gpus": each["devices"]}
            expected = predictions.predict_rows([{**row, "label": "row"}], {})["row"]["peak_gib"]
            assert each["median"]["peak_mem_gib"] == pytest.approx(expected, rel=0.01)


@pytest.mark.nightly
def test_the_file_of_predictions_is_what_memory_py_says():
    assert predictions.predict_all() == predicted(), STALE


def test_models_have_the_published_numbers_of_parameters():
    """https://huggingface.co/meta-llama/Llama-3.1-8B: 8.03B. GPT-2: 124M to 1.5B."""
    found = {each["parameters"] for each in predicted()["fsdp_options"].values()}
    assert found == {8_030_261_248}
    sizes = [each["parameters"] for each in predicted()["fsdp_size"].values()]
    assert [round(size / 1e6) for size in sizes] == [124, 355, 774, 1558]


def test_states_on_cpus_are_as_predicted():
    for ranks in (2, 4):
        found = report.content(ROOT / report.result(f"sharding_{ranks}"))
        for name in ("DDP", "DDP with ZeRO-1", "FSDP"):
            held = found[name]["bytes_by_rank"]
            assert len(held) == ranks
            assert max(held, key=lambda each: sum(each.values())) == found[name]["predicted"], name


@pytest.mark.ci
def test_the_figure_is_what_the_command_draws(tmp_path):
    committed = FIGURE.read_text()
    version = re.search(r"Matplotlib v([\d.]+\d)", committed)[1]
    if matplotlib.__version__ != version:
        pytest.skip(f"needs matplotlib {version}, which drew the figure")
    chart = tmp_path / "memory.svg"
    words = "-m llama-3.1-8b -s 8192 -b 1 --gpus 8 --gpu-memory 139 --chart"
    run = run_script("04-fsdp/memory.py", *words.split(), chart)
    assert run.returncode == 0, run.stderr
    assert chart.read_text() == committed
    assert len(committed) < 100_000

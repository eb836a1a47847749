"""What 04-fsdp/memory.py predicts against what GPUs held, and what the page shows of it."""

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path

import fsdp
import matplotlib
import predictions
import pytest
import report
from helpers import ROOT, run_script

import peak_memory

FIGURE = ROOT / "04-fsdp/memory.svg"
MEASURED = sorted(path.stem for path in predictions.RESULTS.glob("fsdp_*.json"))
FOLDER = "04-fsdp/train_llm.py -m /a/folder/model -s 8192 -b 1 --global-batch-size 8"
STALE = f"run python tests/benchmarks/predictions.py --output {report.result('predictions')}"
KEEP = "activation_checkpointing"


def rows_of(name: str) -> list[dict]:
    return report.content(ROOT / report.result(name))["rows"]


def predicted() -> dict:
    return report.content(ROOT / report.result("predictions"))


def row(command: str, **more: object) -> dict:
    return {"command": command, "chapter": command.split("/")[0], "gpus": 8, **more}


# --- the options of a row ---


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (row(FOLDER), {}),
        (row(f"{FOLDER} --compile --activation-checkpointing full"),
            {KEEP: "full", "compile": True}),
        (row(FOLDER.replace("size 8", "size 16")), {"accumulation": 2}),
        (row(FOLDER.replace("-b 1", "-b 4").replace("size 8", "size 48")),
            {"batch_size": 3, "accumulation": 2}),
        (row(f"{FOLDER} --hsdp", nodes=2), {"hsdp": True, "gpus_per_node": 4}),
        (row(f"{FOLDER} --no-reshard-after-forward"), {"reshard_after_forward": False}),
        (row(f"{FOLDER} --cpu-offload"), {"cpu_offload": True}),
        (row(f"{FOLDER} --reduce-every-backward"), {"reduce_every_backward": True}),
        (row(f"{FOLDER} --param-dtype bfloat16"), {"param_dtype": "bfloat16"}),
        (row(FOLDER.replace("04-fsdp", "03-multi-node")), {"sharding": "ddp"}),
        (row(FOLDER.replace("04-fsdp", "03-multi-node") + " --zero1"), {"sharding": "zero1"}),
    ],
)  # fmt: skip
def test_options_of_a_row(given, expected):
    name, blocks, options = predictions.options_of(given)
    assert (name, blocks) == ("llama-3.1-8b", None)
    plain = {"sharding": "fsdp", "gpus": 8, "seq_length": 8192, **expected}
    assert asdict(options) == asdict(predictions.memory.Options(**plain))


def test_a_searched_shape_has_the_blocks_that_trained():
    """Its command is the one of the last try, which failed."""
    given = row(FOLDER.replace("/model", "/shape-30"), blocks=29)
    assert predictions.options_of(given)[:2] == ("llama-3.1-8b", 29)


def grown(tmp_path, name: str) -> list[dict]:
    """Return the rows of a set of fsdp.py that grows."""
    args = {"tiny": False, "folder": tmp_path, "append": False}
    sets = fsdp.Sets(argparse.Namespace(**args))
    sets.in_turns = lambda: None
    getattr(sets, name)()
    return sets.rows


@pytest.mark.parametrize("name", ["length", "length_llama"])
def test_lengths_have_the_same_tokens_and_positions_enough(tmp_path, name):
    rows = grown(tmp_path, name)
    assert len({each["label"] for each in rows}) == len(rows) == 6
    for each in rows:
        _, _, options = predictions.options_of(each)
        assert options.seq_length * options.batch_size == 2**15 and options.accumulation == 1
        folder = Path(predictions.read_args(each).model_name)
        config = json.loads((folder / "config.json").read_text())
        assert config | each["shape"] == config
        assert options.seq_length in (
            config.get("n_positions"),
            config.get("max_position_embeddings"),
        )


def test_sizes_are_predicted_in_their_shape(tmp_path):
    """Published as 124M to 1.5B, from the same vocabulary and positions."""
    small, *_ = rows = grown(tmp_path, "size")
    (label, found) = next(iter(predictions.predict_rows(rows[:1], {}).items()))
    assert (label, round(found["parameters"] / 1e6)) == (small["label"], 124)
    (found,) = predictions.predict_rows(rows[1:2], {}).values()
    assert round(found["parameters"] / 1e6) == 355


def test_a_shape_that_a_preset_has_not_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="n_layers"):
        # Its name is n_layer.
        fsdp.shaped_folder(fsdp.PRESETS / "gpt2/config.json", {"n_layers": 3}, tmp_path)


@pytest.mark.parametrize(
    ("flag", "wrong"),
    [("-s 512", "-s 128"), ("-b 1", "-b 2"), ("checkpointing full", "checkpointing none")],
)
def test_a_wrong_flag_is_noticed(flag, wrong):
    command = "04-fsdp/train_llm.py -m gpt2 -s 512 -b 1 --global-batch-size 16"
    command += " --activation-checkpointing full"
    assert flag in command
    right, planted = (
        predictions.predict_rows([row(text, label="row")], {})["row"]["peak_gib"]
        for text in (command, command.replace(flag, wrong))
    )
    assert planted != pytest.approx(right, rel=0.1)


# --- against what was measured ---


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
    compared, wrong = wrong_peaks(predicted())
    assert compared >= 25
    assert wrong == []


def beyond_the_head(expected: dict) -> dict[str, float]:
    """Return by how many GiB rows of the 8B model that peak at the head are off."""
    found = {}
    for name in ("fsdp_options", "fsdp_precision", "fsdp_precision_4"):
        for each in rows_of(name):
            known, peak = expected[name][each["label"]], report.measured_peak(each)
            if peak and known["fullest_at"][0] == "head" and "no checkpoint" not in each["label"]:
                found[f"{name}, {each['label']}"] = peak - known["peak_gib"]
    return found


def test_the_head_is_predicted_to_a_hundredth_of_a_gib():
    """All have cuBLAS' workspace and the like on top; a block's last product is 0.06 or 0.12."""
    off = beyond_the_head(predicted())
    assert len(off) >= 20
    assert all(0.06 < each < 0.07 for each in off.values()), off


def test_a_product_too_many_is_noticed(monkeypatch):
    """Of all blocks but one, as if the head came before the last block were done."""
    (row_,) = (each for each in rows_of("fsdp_precision_4") if each["label"] == "bf16, compiled")
    count = peak_memory.count_activations

    def one_more(config, options, lifetime):
        groups, phases = count(config, options, lifetime)
        matmul = options.batch_size * options.seq_length * config.hidden_size * 2
        return groups, [(phase, layer, size + matmul) for phase, layer, size in phases]

    monkeypatch.setattr(peak_memory, "count_activations", one_more)
    expected = predicted()
    expected["fsdp_precision_4"] |= predictions.predict_rows([row_], {})
    off = beyond_the_head(expected)["fsdp_precision_4, bf16, compiled"]
    assert not 0.06 < off < 0.07


def test_a_wrong_prediction_is_noticed():
    expected = predicted()
    expected["fsdp_options"]["full"]["peak_gib"] *= 1.05
    assert wrong_peaks(expected)[1] == ["full"]


def test_compiled_gpt2_holds_what_was_predicted():
    """Chapter 5 in bfloat16 on one GPU and on two, of which throughput.py has measured each."""
    for name in ("gpt2_bf16", "gpt2_bf16_scaling"):
        for each in report.content(ROOT / report.result(name))["rows"]:
            if not each["chapter"].startswith("05") or not each["runs"]:
                continue
            words = each["command"].split("--nproc-per-node ")[1].split(" ", 1)[1]
            as_fsdp_writes = row(words, gpus=each["devices"], label="row")
            expected = predictions.predict_rows([as_fsdp_writes], {})["row"]["peak_gib"]
            assert each["median"]["peak_mem_gib"] == pytest.approx(expected, rel=0.01)
            eager = row(words.replace("--compile", ""), gpus=each["devices"], label="row")
            planted = predictions.predict_rows([eager], {})["row"]["peak_gib"]
            assert each["median"]["peak_mem_gib"] != pytest.approx(planted, rel=0.3)


@pytest.mark.ci
def test_the_file_of_predictions_is_what_memory_py_says():
    assert predictions.predict_all() == predicted(), STALE


@pytest.mark.parametrize("ranks", [2, 4])
def test_states_on_cpus_are_as_predicted(ranks):
    found = report.content(ROOT / report.result(f"sharding_{ranks}"))
    for name in ("DDP", "DDP with ZeRO-1", "FSDP"):
        held = found[name]["bytes_by_rank"]
        assert len(held) == ranks
        assert max(held, key=lambda each: sum(each.values())) == found[name]["predicted"], name


# --- tables ---


def test_parameters_are_those_of_the_shapes():
    found = {each["parameters"] for each in predicted()["fsdp_options"].values()}
    assert found == {8_030_261_248}  # https://huggingface.co/meta-llama/Llama-3.1-8B: 8.03B


def test_what_was_not_measured_is_not_shown():
    run = {"tokens_per_s_per_device": 10.0, "time/total": 5.0, "peak_mem_gib": 2.0}
    runs = {"one": [run], "short": [None], "broken": [{"failed": [1]}], "absent": []}
    found = {"rows": [{"label": label, "runs": each} for label, each in runs.items()]}
    known = {"fsdp_options": {"one": {"peak_gib": 1.0}}}
    files = {"fsdp_options": found, "predictions": known}
    _, _, *rows = report.TABLES["fsdp_options"].lines(files.get)
    assert rows == [
        "| one | 10 | 5 | 2.0 | 1.0 | +100.0% |",
        "| short | out of memory |  |  |  |  |",
    ]


def test_out_of_memory_is_a_row_too():
    found = {"rows": [{"label": "one", "runs": [None]}, {"label": "two", "runs": []}]}
    known = {"fsdp_precision": {"one": {"peak_gib": 150.0}}}
    files = {"fsdp_precision": found, "predictions": known}
    _, _, *rows = report.TABLES["fsdp_precision"].lines(files.get)
    assert rows == ["| one | out of memory |  |  |  |  | 150.0 |"]


def test_steps_around_a_save():
    """A copy of 0.5 s, then a write of 1 s: it ends within the second of the steps of 0.6 s."""
    saves = [
        {"what": "copy", "seconds": 0.5, "at": 10.0},
        {"what": "save", "seconds": 0.5, "at": 10.0},
        {"what": "write", "seconds": 1.0, "at": 10.5},
    ]
    total_ms = [900.0, 500.0, 500.0, 600.0, 600.0, 400.0]
    run = {"saves": saves, "total_ms": total_ms}
    command = "04-fsdp/train_llm.py --ckpt-freq 3"
    each = {"label": "async", "command": command, "warm_up": 1, "runs": [run]}
    *_, shown = report.TABLES["fsdp_checkpoint"].lines(lambda source: {"rows": [each]})
    before, during = "500 (500 to 500)", "600 (600 to 600)"
    assert shown == f"| async | 0.50 | 1.50 | {before} | {during} | 400 |"


# --- figure ---


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

"""Bad input ends in one sentence on stderr and status 2; nothing that was there is lost."""

import argparse
import errno
import json
import os
import random
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers import (
    ROOT,
    listing,
    newest_step,
    read_metrics,
    run_script,
    wait_for_file,
    write_corpus,
    write_narrow,
)
from runner import finish, load_script, start
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from common import checkpoint, launch, models, storage, tracker
from common.cli import RunError
from common.documents import BUILT_IN

SCRIPT = "01-single-gpu/train_llm.py"
SMALL = ["-s", 32, "--global-batch-size", 6, "--max-steps", 4, "--ckpt-freq", 2, "--log-freq", 1]
HEADER = ("[20", "versions: ", "environment: ", "Loading weights: ")


@pytest.fixture(scope="module")
def templates(make_folder) -> Path:
    """What most cases break a copy of: a corpus, a model with weights, a run of four steps."""
    folder = make_folder("templates")
    write_corpus(folder)
    write_narrow(folder / "model", "gpt2-tiny")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    model.save_pretrained(folder / "model")
    models.load_tokenizer("gpt2-tiny").save_pretrained(folder / "model")
    run = [*SMALL, "-d", folder / "corpus.json", "-m", folder / "model"]
    assert finish(start([*run, "--save-dir", folder, "-e", "run"])) == 0
    return folder


@pytest.fixture
def folder(templates, tmp_path) -> Path:
    return Path(shutil.copytree(templates, tmp_path, dirs_exist_ok=True))


def fill(folder: Path, *args: object) -> list[str]:
    """Return words for a command line: {} is the folder."""
    return [str(arg).replace("{}", str(folder)) for arg in args]


@pytest.fixture
def refuse(folder, monkeypatch, capfd) -> Callable[..., str]:
    """Return a function that runs chapter 1, expects a refusal and returns its one sentence."""

    def run(*args: object) -> str:
        before = listing(folder)
        words = fill(folder, "--save-dir", "{}", *args)
        monkeypatch.setattr(sys, "argv", [SCRIPT, *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            launch.run(load_script(ROOT / SCRIPT).main)
        err = capfd.readouterr().err
        assert exit_.value.code == 2, err
        lines = err.replace("\r", "").splitlines()
        lines = [line for line in lines if not line.startswith(HEADER)]
        assert "Traceback" not in err and len(lines) == 1, err
        assert listing(folder) == before, "nothing was written, nothing lost"
        return lines[0]

    return run


def assert_says(sentence: str, expected: str, folder: Path) -> None:
    """The sentence contains what is expected: ... stands for any words, {} for the folder."""
    parts = expected.replace("{}", str(folder)).split("...")
    assert re.search(".*".join(map(re.escape, parts)), sentence), (sentence, expected)


# --- one table: files, arguments, the sentence ---

# Files that a case writes: by path, the content as text or bytes; None deletes, {} is a new folder.
Files = dict[str, object]
DATA = ("-d", "{}/data")
CORPUS = ("-d", "{}/corpus.json", "-s", 32)
MODEL = ("-m", "{}/model")
RUN = ("-d", "{}/corpus.json", "-m", "{}/model", "-e", "run", *SMALL)
# The package tokenizers raises a plain Exception.
DAMAGED_TOKENIZER = '{"version": "1.0", "added_tokens": [], "model": {}}'
HUB = "...https://huggingface.co) cannot be reached...-d python-stdlib -m gpt2-tiny"
NO_TOKENIZER = "has no usable tokenizer"
NAME = "cannot be an experiment's name"
STATE = "{}/run/state.json is damaged"
OTHER = "{}/run has no state.json that describes a run like this: give another -e."
TABLE = "question,answer,number\n" + "why,because,1\n" * 200
NEWEST = "run/checkpoints/step-00000004"


def gpt2_with(**settings: object) -> Files:
    return {"model/config.json": json.dumps({"model_type": "gpt2", **settings})}


REFUSALS: list[tuple[Files, tuple[object, ...], str]] = [
    # data sets
    ({}, ("-d", "no/set"), f"There is no data set 'no/set': it is no preset, no local path{HUB}"),
    ({}, ("-d", "./nope"), "There is no data set at './nope'"),
    ({}, ("-d", ""), "There is no data set at ''"),
    ({}, ("--dataset-subset", "foo"), "is text: it has no"),
    ({}, ("--text-column", "body"), "is text: it has no"),
    ({"data/a.png": ""}, DATA, "has no file that ends in one of: .txt"),
    ({"a.csv": TABLE}, ("-d", "{}/a.csv"), "column 'text'...--text-column one of question, answer"),
    ({"a.csv": TABLE}, ("-d", "{}/a.csv", "--text-column", "body"), "no text column 'body'"),
    (
        {"data.parquet": b"none"},
        ("-d", "{}/data.parquet"),
        "{}/data.parquet has no usable data set (Parq",
    ),
    (
        {"data.jsonl": b"none"},
        ("-d", "{}/data.jsonl"),
        "{}/data.jsonl has no usable data set (JSON p",
    ),
    ({"data.gz": b"\x1f\x8b"}, ("-d", "{}/data.gz"), "data.gz does not end in one of: .txt"),
    *(
        ({"data.json": text}, ("-d", "{}/data.json"), "no text column 'text': no column is text")
        for text in ('["a", 3]', '["a", {"text": "b"}]')
    ),
    *(
        ({"data.json": text}, ("-d", "{}/data.json"), "data.json has no usable data set (")
        for text in ("3", '["a", "b"', "", b'["\xe4"]')
    ),
    ({"a.txt": "Few words."}, ("-d", "{}/a.txt"), "shorter than one sequence of 128 tokens"),
    ({"a.txt": ""}, ("-d", "{}/a.txt"), "There is no text in these files: give -d another path."),
    *(
        ({f"a.txt{end}": b"none"}, ("-d", f"{{}}/a.txt{end}"), f"a.txt{end} has no usable text (")
        for end in (".gz", ".bz2", ".xz")
    ),
    ({}, (*CORPUS, "--global-batch-size", 5000), "less than --global-batch-size 5000"),
    # models
    (
        {},
        ("-m", "some/model"),
        f"There is no model or tokenizer 'some/model': it is no preset{HUB}",
    ),
    ({}, ("-m", "a/b/c"), "There is no model or tokenizer at 'a/b/c'"),
    ({"empty": {}}, ("-m", "{}/empty"), "has no usable tokenizer"),
    ({}, ("--pretrained",), "preset gpt2-tiny has no weights: leave out --pretrained"),
    ({}, ("-m", ROOT / "common/presets/gpt2-tiny"), NO_TOKENIZER),
    *(
        ({"model/tokenizer.json": text}, MODEL, NO_TOKENIZER)
        for text in ("", "[]", "{}", '{"model": {}}', DAMAGED_TOKENIZER)
    ),
    *(
        (gpt2_with(n_layer=value), MODEL, "no usable tokenizer (...'n_layer' expected int")
        for value in ("two", [2], None)
    ),
    (gpt2_with(vocab_size=1000), MODEL, "The tokenizer has 4096 tokens and the model only 1000"),
    # mamba has no attention heads, and gemma3 has the vocabulary size in a nested configuration.
    *(
        (gpt2_with(model_type=name), MODEL, f"({name}) is not a causal language model")
        for name in ("bert", "bart", "t5", "vit", "mamba", "gemma3")
    ),
    ({}, ("-s", 129), "The model has 128 positions: --seq-length 129"),
    # the run's folder
    *(({}, (*CORPUS, "-e", name), NAME) for name in ("a/b", "..", "a b:c", "run ", "")),
    ({"f": ""}, (*CORPUS, "-e", "a", "--save-dir", "{}/f"), "Cannot write to...another --save-dir"),
    ({}, (*CORPUS, "-e", "a", "--save-dir", "/proc"), "Cannot write to /proc/"),
    ({"run/state.json": None, "run/checkpoints": None, "run/best": {}}, RUN, OTHER),
    ({"run/state.json": None}, RUN, OTHER),
    *(
        ({"run/state.json": text}, RUN, STATE)
        for text in ("", "{", "[]", '{"format": 99, "training": {}, "checkpoints": []}')
    ),
    ({}, (*RUN, "--lr", 1e-3), "was started with --lr 0.03125, not 0.001: give the old value"),
    ({"corpus.json": json.dumps(["x" * 999] * 99)}, RUN, "with dataset_checksum...--dataset-name)"),
]


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        if content is None:
            path.unlink() if path.is_file() else shutil.rmtree(path)
        elif content == {}:
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(
    ("files", "args", "expected"),
    REFUSALS,
    ids=[re.sub(r"\W+", " ", expected)[:50] for _, _, expected in REFUSALS],
)
def test_refused(refuse, folder, files, args, expected):
    write(folder, files)
    assert_says(refuse(*args), expected, folder)


@pytest.mark.check
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-b", "0"), "'0' is not a whole number from 1 to 2147483648"),
        (("--lr", "fast"), "'fast' is not a number from 0.0"),
        (("--lr", "nan"), "'nan' is not a number"),
        (("--num-epochs", "inf"), "'inf' is not a number"),
        (("--max-grad-norm", "0"), "'0' is not a number from 1e-06"),
        (("--seed", "-1"), "'-1' is not a whole number from 0"),
        (("--seed", str(2**40)), "is not a whole number"),
        (("--param-dtype", "float8"), "invalid choice: 'float8'"),
        (("@/no/such/file",), "No such file"),
        (("--batch", "3"), "unrecognized arguments: --batch 3"),
    ],
)
def test_arguments(monkeypatch, capsys, args, message):
    """Rank 0 says it once, for all ranks."""
    monkeypatch.setattr(sys, "argv", ["train_llm.py", *args])
    monkeypatch.setattr("common.cli.HEAD_START_S", 0.0)
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as exit_:
            load_script(ROOT / SCRIPT).get_args()
        assert exit_.value.code == 2
        said = capsys.readouterr().err
        assert message in said.splitlines()[-1] if rank == 0 else said == ""


@pytest.mark.check
def test_arguments_from_a_file(monkeypatch, tmp_path):
    (tmp_path / "args").write_text("# a comment\n--lr 3e-4\n-e 'my run'  # another\n\n--compile\n")
    monkeypatch.setattr(sys, "argv", ["train_llm.py", f"@{tmp_path}/args", "--lr", "1e-3"])
    args = load_script(ROOT / SCRIPT).get_args()
    assert (args.lr, args.experiment_name, args.compile) == (1e-3, "my run", True)


def test_a_cache_that_cannot_be_written(refuse, folder, monkeypatch):
    monkeypatch.setattr(storage.constants, "HF_HOME", "/proc/nothing")
    assert "Cannot write to the cache /proc/nothing" in refuse(*CORPUS)


@pytest.mark.parametrize("module", [storage, tracker], ids=["the cache", "the run's folder"])
def test_a_file_system_without_locks(refuse, folder, monkeypatch, module):
    class NoLock(FileLock):
        def _acquire(self) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module, "FileLock", NoLock)
    no_locks = "(No locks available)"
    cache = f"{storage.constants.HF_HOME}/tokens"
    expected = {
        storage: f"Cannot write to the cache {cache} {no_locks}: set HF_HOME to another folder.",
        tracker: f"Cannot write to {folder}/run {no_locks}: give another --save-dir.",
    }
    assert refuse(*RUN) == expected[module]


# --- weights and checkpoints that are cut short, missing or of another model ---


@pytest.fixture(params=[False, True], ids=["empty", "cut"])
def size(request) -> Callable[[int], int]:
    """A function of a file's size: how many bytes of it remain."""
    lengths = random.Random(0)
    return lambda whole: lengths.randrange(1, whole) if request.param else 0


def test_weights_cut_short(refuse, folder, size):
    file = folder / "model/model.safetensors"
    os.truncate(file, size(file.stat().st_size))
    said = refuse(*MODEL, "--pretrained")
    assert said.startswith(f"{folder}/model has no usable weights (Error while ")


def test_checkpoints_cut_short_or_missing_and_the_way_back(refuse, folder, train, size):
    """Whatever file it is. Once the folder is deleted, the run goes on from the older one.

    Without .metadata, it is no checkpoint.
    """
    newest = folder / NEWEST
    for file in sorted(newest.iterdir()):
        content = file.read_bytes()
        os.truncate(file, size(len(content)))
        said = refuse(*RUN)
        assert said.startswith(f"The checkpoint file {file} is damaged: delete {newest} to resume ")
        if file.name != ".metadata":
            file.unlink()
            assert f"{file} is damaged" in refuse(*RUN)
        file.write_bytes(content)
    expected = [line["loss"] for line in read_metrics(folder / "run")]
    shutil.rmtree(newest)
    assert [line["loss"] for line in train(*fill(folder, *RUN))] == expected
    assert newest_step(folder / "run") == 4


TENSOR = "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize("cut", [False, True], ids=["no tensor", "another shape"])
def test_weights_that_are_not_those_of_the_configuration(refuse, folder, cut):
    """transformers would draw random values for the tensor."""
    file = folder / "model/model.safetensors"
    weights = load_file(file)
    tensor = weights.pop(TENSOR)
    if cut:
        weights[TENSOR] = tensor[1:].clone()
    save_file(weights, file, metadata={"format": "pt"})
    assert refuse(*MODEL, "--pretrained") == (
        f"The weights of {folder}/model have no {TENSOR} of the right shape: get all files that "
        "match config.json, or leave out --pretrained."
    )
    with pytest.raises(RunError, match=f"have no {TENSOR} of the right shape"):
        models.load_pretrained(str(folder / "model"), None, AutoModelForSequenceClassification)


def test_a_new_head_and_tied_weights_are_not_missing(folder):
    name = str(folder / "model")
    weights = load_file(folder / "model/model.safetensors")
    assert "lm_head.weight" not in weights
    model = models.load_pretrained(name, models.load_config(name))
    assert all(torch.equal(model.state_dict()[each], weights[each]) for each in weights)
    assert model.lm_head.weight is model.transformer.wte.weight
    model = models.load_pretrained(name, None, AutoModelForSequenceClassification)
    assert torch.equal(model.state_dict()[TENSOR], weights[TENSOR])


# --- another training ---


def settings_of(**changes: object) -> dict[str, object]:
    """Return what chapter 1 fixes for a run, with some of its values changed."""
    own = {name: changes.get(name, 0) for name in checkpoint.MODEL_SETTINGS}
    model = types.SimpleNamespace(
        config=types.SimpleNamespace(model_type="gpt2", **own),
        named_parameters=lambda: [("weight", torch.empty(changes.get("weight", 2)))],
    )
    given = {"seq_length": 32, "lr": 1e-2, "total_steps": 4} | changes
    facts = {"dataset_checksum": "0123", "global_batch_size": 6} | changes
    fixed = {name: changes.get(name, 0) for name in checkpoint.FIXED_ARGUMENTS}
    args = argparse.Namespace(
        **dict.fromkeys(checkpoint.SOURCES, BUILT_IN),
        **fixed,
        global_batch_size=facts["global_batch_size"],
    )
    data = types.SimpleNamespace(digest=facts["dataset_checksum"])
    return checkpoint.fixed_settings(
        args, model, data, given["seq_length"], given["lr"], given["total_steps"]
    )


@pytest.mark.check
def test_each_fixed_setting_that_is_changed_is_refused_by_name(tmp_path):
    """And each setting of the model, which the shapes of its parameters do not show."""
    settings = settings_of()
    run = [None] * 4  # refused before it is loaded
    assert not checkpoint.load_checkpoint(tmp_path, *run, settings)
    fixed = settings.keys() - {"model", "sources"}
    assert set(checkpoint.FIXED_ARGUMENTS) < fixed
    for name in sorted(fixed | {*checkpoint.MODEL_SETTINGS, "weight"}):
        with pytest.raises(RunError) as error:
            checkpoint.load_checkpoint(tmp_path, *run, settings_of(**{name: 3}))
        if name in fixed:
            named = name if name in checkpoint.ORIGINS else f"--{name.replace('_', '-')}"
            named = f"{named} {settings[name]}, not 3"
        else:
            named = f"model {settings['model']}, not gpt2-"
        assert f"The run {tmp_path} was started with {named}" in str(error.value)
        assert str(error.value).endswith("or start a new run with another -e.")
    assert not checkpoint.load_checkpoint(tmp_path, *run, settings)


def test_what_may_change(folder, train):
    """Where the corpus is, the size of a micro-batch, how often something is done."""
    shutil.rmtree(folder / "run/checkpoints/step-00000004")
    (folder / "corpus.json").rename(folder / "moved.json")
    words = fill(folder, *RUN, "-d", "{}/moved.json")
    losses = [line["loss"] for line in read_metrics(folder / "run")]
    moved = train(*words, "-b", 2, "--eval-freq", 1)
    assert [line["loss"] for line in moved] == pytest.approx(losses, rel=1e-5)


def test_a_complete_run_says_so(folder, monkeypatch, caplog):
    monkeypatch.setattr(sys, "argv", [SCRIPT, *fill(folder, *RUN, "--save-dir", "{}")])
    before = listing(folder / "run/checkpoints")
    caplog.set_level("INFO", logger="train_llm")
    load_script(ROOT / SCRIPT).main()
    said = caplog.text
    assert said.splitlines()[-1].endswith(
        "all steps of this run are done; to train longer, start a new run: give another -e"
    )
    assert listing(folder / "run/checkpoints") == before


# --- the whole process ---


def test_odd_text_is_trained_on(train, tmp_path):
    """Empty cells are left out, and the shortest sequences are no error."""
    rows = [f'{n},"Some text, number {n}, with a few more words."\n' for n in range(50)]
    (tmp_path / "cells.csv").write_text("number,body\n" + "7,\n".join(rows))
    for length in (32, 2):
        metrics = train("-d", tmp_path / "cells.csv", *SMALL, "-s", length, name=f"run-{length}")
        assert metrics[-1]["step"] == 4


@pytest.mark.ci
def test_text_that_is_not_utf_8_is_pointed_out(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("Stra\xdfe und B\xe4ume. ".encode("latin-1") * 500)
    done = run_script(SCRIPT, *SMALL, "-d", path, "--save-dir", tmp_path, "-e", "run")
    assert done.returncode == 0 and f"{path} is not UTF-8" in done.stderr


def test_the_whole_command_leaves_with_status_2(tmp_path):
    done = run_script(SCRIPT, "-s", 1000, "--save-dir", tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("The model has 128 positions")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_a_second_process_in_the_same_run(corpus, tmp_path):
    args = ["-d", corpus, "-s", 32, "--global-batch-size", 6, "--max-steps", 10**5]
    args += ["--save-dir", tmp_path, "-e", "run"]
    first = start(args, stderr_file=str(tmp_path / "first"))
    wait_for_file(tmp_path / "run/metrics.jsonl", first.is_alive)
    assert finish(start(args, stderr_file=str(tmp_path / "second"))) == 2
    first.kill()
    finish(first)
    assert "Another process is training in" in (tmp_path / "second").read_text().splitlines()[-1]


def test_a_file_that_may_not_grow(folder):
    """The limit stands for a full disk on every machine: the write fails halfway."""
    args = fill(folder, *RUN, "--save-dir", "{}")
    shutil.rmtree(folder / "run/checkpoints/step-00000004")
    before = listing(folder / "run/checkpoints")
    options = {"file_size_limit": 200_000, "stderr_file": str(folder / "stderr")}
    assert finish(start(args, **options)) == 2
    sentence = (folder / "stderr").read_text().splitlines()[-1]
    assert sentence.startswith(f"The checkpoint {folder}/{NEWEST} could not be written (")
    assert sentence.endswith(
        "): is the disk full? The previous checkpoint is kept; start the same command again to "
        "resume from it."
    )
    assert listing(folder / "run/checkpoints") == before
    assert finish(start(args)) == 0
    assert read_metrics(folder / "run")[-1]["step"] == 4


def no_space_for_metrics() -> None:
    dumps = json.dumps

    def full(value: object, **options: object) -> str:
        if isinstance(value, dict) and "grad_norm" in value:
            raise OSError(errno.ENOSPC, "No space left on device")
        return dumps(value, **options)

    json.dumps = full


@pytest.mark.ci
def test_a_full_disk_outside_a_checkpoint(corpus, tmp_path):
    """One sentence, although wandb cannot end its run either."""
    args = ["-d", corpus, *SMALL, "--save-dir", tmp_path, "-e", "run"]
    options = {"stderr_file": str(tmp_path / "stderr"), "env": {"WANDB_MODE": "offline"}}
    assert finish(start(args, plant=no_space_for_metrics, **options)) == 2
    said = (tmp_path / "stderr").read_text()
    assert said.splitlines()[-1].startswith("Cannot write: No space left on device.")
    assert "Traceback" not in said

"""Bad input ends in one sentence on stderr and status 2; nothing that was there is lost."""

import argparse
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers import ROOT, listing, read_metrics, run_script, wait_for_file
from runner import Ranks, finish, load_script, start
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from common import checkpoint, cli, distributed, models, storage, tracker
from common.cli import InputError

SCRIPT = "01-single-gpu/train_llm.py"
# The package tokenizers raises a plain Exception.
DAMAGED_TOKENIZER = '{"version": "1.0", "added_tokens": [], "model": {}}'
SMALL = ["-s", 32, "--global-batch-size", 6, "--max-steps", 4, "--ckpt-freq", 2, "--log-freq", 1]


@pytest.fixture
def refuse(tmp_path, monkeypatch, capfd):
    """Return a function that runs chapter 1, expects a refusal and returns its one sentence."""

    def run(*args: object, name: str = "run") -> str:
        before = listing(tmp_path)
        argv = [SCRIPT, "--save-dir", tmp_path, "-e", name, *args]
        monkeypatch.setattr(sys, "argv", [str(arg) for arg in argv])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            distributed.run(load_script(ROOT / SCRIPT).main)
        err = capfd.readouterr().err
        assert exit_.value.code == 2, err
        header = ("[20", "versions: ", "environment: ", "Loading weights: ")
        lines = err.replace("\r", "").splitlines()
        lines = [line for line in lines if not line.startswith(header)]
        assert "Traceback" not in err and len(lines) == 1, err
        assert listing(tmp_path) == before, "nothing was written, nothing lost"
        return lines[0]

    return run


@pytest.mark.check
def test_unknown_dataset(refuse):
    sentence = refuse("-d", "no-such/dataset")
    assert "'no-such/dataset' is neither a preset (python-stdlib) nor a local path" in sentence
    assert "https://huggingface.co) cannot be reached" in sentence
    assert "-d python-stdlib -m gpt2-tiny" in sentence


@pytest.mark.check
def test_a_path_that_is_not_there(refuse, tmp_path):
    for path in (tmp_path / "nope.txt", "./nope", "a/b/c"):
        for flag, kind in (("-d", "data set"), ("-m", "model")):
            assert f"There is no {kind} at '{path}'" in refuse(flag, path)
    assert "There is no data set at ''" in refuse("-d", "")


def test_text_has_no_columns(refuse, tmp_path):
    assert "is text: it has no" in refuse("--dataset-subset", "foo")
    assert "is text: it has no" in refuse("--text-column", "body")


@pytest.mark.check
def test_a_folder_without_a_tokenizer(refuse):
    sentence = refuse("-m", ROOT / "common/presets/gpt2-tiny")
    assert "has no usable tokenizer" in sentence and sentence.endswith(": give --tokenizer-name.")


def test_state_json_is_gone(train, refuse, corpus, tmp_path):
    train("-d", corpus, *SMALL)
    (tmp_path / "run/state.json").unlink()
    assert "has checkpoints and no state.json" in refuse("-d", corpus, *SMALL)


def test_the_folder_of_a_classifier(refuse, corpus, tmp_path):
    (tmp_path / "run/best").mkdir(parents=True)
    (tmp_path / "run/metrics.jsonl").write_text("kept")
    assert "is the folder of a classifier: give another -e." in refuse("-d", corpus, *SMALL)


@pytest.mark.ci
def test_text_that_is_not_utf_8_is_pointed_out(corpus, tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("Stra\xdfe und B\xe4ume. ".encode("latin-1") * 500)
    args = (*SMALL, "-d", path, "--save-dir", tmp_path, "-e", "run")
    done = run_script(SCRIPT, *args)
    assert done.returncode == 0 and f"{path} is not UTF-8" in done.stderr


@pytest.mark.ci
def test_a_full_disk_outside_a_checkpoint(corpus, tmp_path):
    """One sentence, although wandb cannot end its run either."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import json, errno\ndumps = json.dumps\n"
        "def full(value, **options):\n"
        "    if isinstance(value, dict) and 'grad_norm' in value:\n"
        "        raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "    return dumps(value, **options)\n"
        "json.dumps = full\n"
    )
    args = (SCRIPT, "-d", corpus, *SMALL, "--save-dir", tmp_path, "-e", "run")
    done = run_script(*args, PYTHONPATH=str(hook), WANDB_MODE="offline")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("Cannot write: No space left on device.")
    assert "Traceback" not in done.stderr


@pytest.mark.check
def test_unknown_model(refuse):
    sentence = refuse("-m", "openai-community/gpt2", "-d", "tatsu-lab/alpaca")
    assert "model 'openai-community/gpt2' is neither a preset (gpt2, gpt2-tiny," in sentence
    assert "cannot be reached" in sentence and "-d python-stdlib -m gpt2-tiny" in sentence


@pytest.mark.check
def test_folder_that_is_no_model(refuse, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no usable config.json" in refuse("-m", tmp_path / "empty")


@pytest.mark.check
def test_preset_has_no_weights(refuse):
    assert "preset gpt2-tiny has no weights: leave out --pretrained" in refuse("--pretrained")


@pytest.fixture
def saved_model(tmp_path) -> Path:
    """A folder with a configuration, a tokenizer and weights, to break."""
    model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    model.save_pretrained(tmp_path / "model")
    models.load_tokenizer("gpt2-tiny").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


TENSOR = "transformer.h.1.mlp.c_fc.weight"


def lose_a_tensor(weights: dict[str, torch.Tensor]) -> None:
    del weights[TENSOR]


def cut_a_tensor(weights: dict[str, torch.Tensor]) -> None:
    weights[TENSOR] = weights[TENSOR][1:].clone()


@pytest.mark.check
@pytest.mark.parametrize("damage", [lose_a_tensor, cut_a_tensor])
def test_weights_that_are_not_those_of_the_configuration(refuse, saved_model, damage):
    """transformers would draw random values for the tensor."""
    file = saved_model / "model.safetensors"
    weights = load_file(file)
    damage(weights)
    save_file(weights, file, metadata={"format": "pt"})
    assert refuse("-m", saved_model, "--pretrained") == (
        f"The weights of {saved_model} have no {TENSOR} of the right shape: get all files that "
        "match config.json, or leave out --pretrained."
    )
    with pytest.raises(InputError, match=f"have no {TENSOR} of the right shape"):
        models.from_pretrained(AutoModelForSequenceClassification, str(saved_model), None, {})


@pytest.mark.check
def test_a_new_head_and_tied_weights_are_not_missing(saved_model):
    weights = load_file(saved_model / "model.safetensors")
    assert "lm_head.weight" not in weights
    model = models.load_pretrained(str(saved_model), models.load_config(str(saved_model)))
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)
    assert model.lm_head.weight is model.transformer.wte.weight
    model = models.from_pretrained(AutoModelForSequenceClassification, str(saved_model), None, {})
    assert torch.equal(model.state_dict()[TENSOR], weights[TENSOR])


@pytest.mark.check
@pytest.mark.parametrize("size", [0, 5, 300, -1])
def test_weights_in_a_truncated_file(refuse, saved_model, size):
    file = saved_model / "model.safetensors"
    os.truncate(file, size if size >= 0 else file.stat().st_size - 1)
    sentence = refuse("-m", saved_model, "--pretrained")
    assert sentence.startswith(f"{saved_model} has no usable weights (Error while ")


@pytest.mark.check
@pytest.mark.parametrize("value", ["two", [2], None])
def test_a_configuration_with_a_value_of_another_type(refuse, saved_model, value):
    file = saved_model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_layer": value}))
    sentence = refuse("-m", saved_model)
    assert sentence.startswith(f"{saved_model} has no usable config.json (")
    assert "'n_layer' expected int" in sentence


@pytest.mark.check
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {}}', DAMAGED_TOKENIZER])
def test_a_damaged_tokenizer(refuse, saved_model, text):
    (saved_model / "tokenizer.json").write_text(text)
    sentence = refuse("-m", saved_model)
    assert sentence.startswith(f"{saved_model} has no usable tokenizer")
    assert sentence.endswith(": give --tokenizer-name.")


@pytest.mark.check
def test_folder_without_text(refuse, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").touch()
    assert "has no file that ends in one of: .txt" in refuse("-d", tmp_path / "pictures")


@pytest.mark.check
def test_text_column_that_does_not_exist(refuse, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("question,answer,number\n" + "why,because,1\n" * 200)
    for args in ((), ("--text-column", "body")):
        sentence = refuse("-d", path, *args)
        wanted = args[1] if args else "text"
        assert f"no text column '{wanted}'" in sentence
        assert "--text-column one of question, answer" in sentence


@pytest.mark.check
def test_json_dictionary(refuse, tmp_path):
    path = tmp_path / "train.json"
    for text in ('{"Hello World": "1", "I am fine": "0"}', '{\n "a": "1",\n "b": "0"\n}'):
        path.write_text(text)
        assert "must hold an array of strings, or of objects, or" in refuse("-d", path)


@pytest.mark.check
@pytest.mark.parametrize(
    "content",
    [
        b'["a", "b"',
        b'["a", {"text": "b"}]',
        b"",
        b'["a", 3]',
        b"3",
        b"null",
        b'"text"',
        b'["\xe4"]',
    ],
)
def test_json_that_cannot_be_used(refuse, tmp_path, content):
    path = tmp_path / "train.json"
    path.write_bytes(content)
    sentence = refuse("-d", path)
    assert "is not valid JSON" in sentence or "must hold an array of strings" in sentence


@pytest.mark.check
def test_a_file_of_another_kind(refuse, tmp_path):
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(os.urandom(100_000))
    assert f"The file {path} does not end in one of: .txt" in refuse("-d", path)


@pytest.mark.check
def test_models_that_are_not_causal(refuse, tmp_path):
    # mamba has no attention heads, and gemma3 has the vocabulary size in a nested configuration.
    for name in ("bert", "bart", "t5", "vit", "mamba", "gemma3"):
        CONFIG_MAPPING[name]().save_pretrained(tmp_path / name)
        assert f"({name}) is not a causal language model" in refuse("-m", tmp_path / name)


@pytest.mark.check
def test_a_cache_that_cannot_be_written(refuse, monkeypatch, corpus):
    monkeypatch.setattr(storage.constants, "HF_HOME", "/proc/nothing")
    assert "Cannot write to the cache /proc/nothing" in refuse("-d", corpus)


@pytest.mark.check
@pytest.mark.parametrize("module", [storage, tracker], ids=["the cache", "the run's folder"])
@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock here")],
    ids=["ENOLCK", "ENOSYS"],  # of the second one, older releases of filelock make this
)
def test_a_file_system_without_locks(refuse, monkeypatch, corpus, tmp_path, module, error):
    class NoLock(FileLock):
        def _acquire(self) -> None:
            raise error

    monkeypatch.setattr(module, "FileLock", NoLock)
    (tmp_path / "run").mkdir()
    sentence = refuse("-d", corpus, *SMALL)
    reason = error.strerror if isinstance(error, OSError) else error
    cache = Path(storage.constants.HF_HOME) / "tokens"
    assert (
        sentence
        == {
            storage: f"Cannot write to the cache {cache} ({reason}): "
            "set HF_HOME to another folder.",
            tracker: f"Cannot write to {tmp_path}/run ({reason}): give another --save-dir.",
        }[module]
    )


def test_empty_cells_are_left_out(train, tmp_path):
    for count in (50, 200):
        path = tmp_path / f"{count}.csv"
        rows = [f'{n},"Some text, number {n}, with a few more words."\n' for n in range(count)]
        path.write_text("number,body\n" + "7,\n".join(rows))
        metrics = train("-d", path, *SMALL, name=f"run{count}")
        assert metrics[-1]["step"] == 4


def test_half_a_surrogate_pair(train, tmp_path):
    path = tmp_path / "text.json"
    path.write_text(json.dumps(["half \ud800 of a pair, and more words. " * 20] * 50))
    assert train("-d", path, *SMALL)[-1]["step"] == 4


def test_a_run_that_diverges_is_stopped(train, corpus):
    config = ("--lr", 1e9, "--warmup-steps", 0, "--max-grad-norm", "inf", "--eval-freq", 1)
    with pytest.raises(InputError, match=r"diverged: at step 2 .* a smaller --lr"):
        train("-d", corpus, *SMALL, *config)


def test_the_shortest_sequences(train, corpus):
    args = ("-d", corpus, "-s", 2, "--global-batch-size", 6, "--max-steps", 2)
    assert train(*args)[-1]["step"] == 2


@pytest.mark.check
def test_a_generated_name_is_a_name():
    args = argparse.Namespace(
        experiment_name=None, model_name="gpt2-tiny", dataset_name="/my data/notes, part 1.txt"
    )
    name = distributed.experiment_name(args)
    assert re.fullmatch(r"gpt2-tiny-notes-part-1-\d{8}-\d{6}-\d+", name)


@pytest.mark.check
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_table_that_cannot_be_read(refuse, tmp_path, suffix):
    path = tmp_path / f"table.{suffix}"
    path.write_bytes(b"no table at all")
    assert f"Cannot read {path} as a data set: " in refuse("-d", path)


@pytest.mark.check
def test_corpus_too_small_for_one_block(refuse, tmp_path):
    path = tmp_path / "small.txt"
    path.write_text("A few words.")
    assert "training part of" in (sentence := refuse("-d", path))
    assert "shorter than one sequence of 128 tokens" in sentence


@pytest.mark.check
def test_corpus_too_small_for_one_step(refuse, corpus):
    sentence = refuse("-d", corpus, "-s", 32, "--global-batch-size", 5000)
    assert "less than --global-batch-size 5000" in sentence


@pytest.mark.check
def test_sequence_longer_than_the_positions(refuse):
    assert "The model has 128 positions: --seq-length 129" in refuse("-s", 129)


@pytest.mark.check
def test_tokenizer_larger_than_the_vocabulary(refuse, tmp_path):
    config = json.loads((ROOT / "common/presets/gpt2-tiny/config.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"vocab_size": 1000}))
    sentence = refuse("-m", tmp_path / "model", "--tokenizer-name", "gpt2-tiny")
    assert "The tokenizer has 4096 tokens and the model only 1000" in sentence


@pytest.mark.check
@pytest.mark.parametrize("name", ["a/b", "..", "a b:c", "run ", ""])
def test_name_that_is_no_folder(refuse, corpus, name):
    assert "cannot be an experiment's name" in refuse("-d", corpus, *SMALL, name=name)


@pytest.mark.check
def test_save_folder_that_cannot_be_written(refuse, corpus, tmp_path):
    (tmp_path / "file").touch()
    sentence = refuse("-d", corpus, *SMALL, "--save-dir", tmp_path / "file")
    assert "Cannot write to" in sentence and "give another --save-dir" in sentence
    assert "Cannot write to /proc/" in refuse("-d", corpus, *SMALL, "--save-dir", "/proc")


@pytest.mark.check
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-b", "0"), "'0' is not a whole number from 1 to 2147483648"),
        (("--lr", "fast"), "'fast' is not a number from 0.0"),
        (("--lr", "nan"), "'nan' is not a number"),
        (("--num-epochs", "inf"), "'inf' is not a number"),
        (("--max-grad-norm", "0"), "'0' is not a number above 0"),
        (("--seed", "-1"), "'-1' is not a whole number from 0"),
        (("--seed", str(2**40)), "is not a whole number"),
        (("--param-dtype", "float8"), "invalid choice: 'float8'"),
        (("@/no/such/file",), "No such file"),
        (("--batch", "3"), "unrecognized arguments: --batch 3"),
        (("--max-step", "3"), "unrecognized arguments: --max-step 3 (did you mean --max-steps?)"),
    ],
)
def test_arguments(monkeypatch, capsys, args, message):
    monkeypatch.setattr(sys, "argv", ["train_llm.py", *args])
    with pytest.raises(SystemExit) as exit_:
        load_script(ROOT / SCRIPT).get_args()
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.check
def test_arguments_from_a_file(monkeypatch, tmp_path):
    (tmp_path / "args").write_text("# a comment\n--lr 3e-4\n-e 'my run'  # another\n\n--compile\n")
    monkeypatch.setattr(sys, "argv", ["train_llm.py", f"@{tmp_path}/args", "--lr", "1e-3"])
    args = load_script(ROOT / SCRIPT).get_args()
    assert (args.lr, args.experiment_name, args.compile) == (1e-3, "my run", True)


ANOTHER_TRAINING = [
    (("-m", "llama-tiny"), "model gpt2-"),
    (("-s", 16), "--seq-length 32, not 16"),
    (("-m", "4-heads", "--tokenizer-name", "gpt2-tiny"), "model gpt2-"),
    (("--global-batch-size", 12), "--global-batch-size 6, not 12"),
    (("--max-steps", 8), "total_steps 4, not 8 (see --max-steps and --num-epochs): give"),
    (("--lr", 1e-3), "--lr 0.0078125, not 0.001"),
    (("--seed", 1), "--seed 0, not 1"),
    (("--warmup-steps", 3), "--warmup-steps 1, not 3"),
    (("--param-dtype", "bfloat16"), "--param-dtype float32, not bfloat16"),
    (("--max-grad-norm", 2), "--max-grad-norm 1.0, not 2.0"),
    (("--weight-decay", 0), "--weight-decay 0.1, not 0.0"),
]


def test_resume_with_another_training(train, refuse, corpus, tmp_path):
    config = json.loads((ROOT / "common/presets/gpt2-tiny/config.json").read_text())
    (tmp_path / "4-heads").mkdir()
    (tmp_path / "4-heads/config.json").write_text(json.dumps(config | {"n_head": 4}))
    train("-d", corpus, *SMALL)
    for args, named in ANOTHER_TRAINING:
        args = [tmp_path / arg if arg == "4-heads" else arg for arg in args]
        sentence = refuse("-d", corpus, *SMALL, *args)
        assert (
            f"was started with {named}" in sentence
            and "start a new run with another -e" in sentence
        )


def test_resume_with_another_corpus(train, refuse, corpus):
    train("-d", corpus, *SMALL)
    corpus.write_text(corpus.read_text().replace("Text number 7,", "Text number 8,"))
    sentence = refuse("-d", corpus, *SMALL)
    assert "was started with dataset_checksum " in sentence and "(see --dataset-name)" in sentence


def test_resume_with_what_may_change(train, corpus, tmp_path):
    straight = train("-d", corpus, *SMALL, name="straight")
    train("-d", corpus, *SMALL)
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    shutil.copy(corpus, tmp_path / "moved.json")
    moved = train("-d", tmp_path / "moved.json", *SMALL, "-b", 2, "--eval-freq", 1)
    losses = [line["loss"] for line in straight]
    assert [line["loss"] for line in moved] == pytest.approx(losses, rel=1e-5)


def newest_file(run_dir: Path) -> Path:
    record = json.loads((run_dir / "state.json").read_text())["checkpoints"][-1]
    return run_dir / record["path"] / "__0_0.distcp"


def test_damaged_checkpoint_and_the_way_back(train, refuse, corpus, tmp_path):
    straight = train("-d", corpus, *SMALL)
    file = newest_file(tmp_path / "run")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # one flipped bit, in a tensor: the library would load it
    file.write_bytes(content)
    sentence = refuse("-d", corpus, *SMALL)
    assert f"The checkpoint file {file} is damaged" in sentence
    assert "step-00000004 to resume from step 2" in sentence
    shutil.rmtree(file.parent)
    resumed = train("-d", corpus, *SMALL)
    assert [line["loss"] for line in resumed] == [line["loss"] for line in straight]


def test_checkpoint_with_a_missing_or_short_file(train, refuse, corpus, tmp_path):
    train("-d", corpus, *SMALL)
    file = newest_file(tmp_path / "run")
    os.truncate(file, 1000)
    assert "is damaged" in refuse("-d", corpus, *SMALL)
    file.unlink()
    assert "is damaged" in refuse("-d", corpus, *SMALL)


def test_the_only_checkpoint_is_damaged(train, refuse, corpus, tmp_path):
    train("-d", corpus, *SMALL, "--keep-checkpoints", 1)
    os.truncate(newest_file(tmp_path / "run"), 1000)
    assert refuse("-d", corpus, *SMALL).endswith("is damaged: start a new run with another -e.")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 99, "training": {}, "checkpoints": []}']
)
def test_damaged_state_json(train, refuse, corpus, tmp_path, text):
    train("-d", corpus, *SMALL)
    (tmp_path / "run/state.json").write_text(text)
    assert "state.json is damaged" in refuse("-d", corpus, *SMALL)


def test_checkpoints_are_gone(train, refuse, corpus, tmp_path):
    train("-d", corpus, *SMALL)
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert "The checkpoints of" in refuse("-d", corpus, *SMALL)


@pytest.mark.ci
def test_a_second_process_in_the_same_run(corpus, tmp_path):
    args = ["-d", corpus, "-s", 32, "--global-batch-size", 6, "--max-steps", 3000]
    args += ["--save-dir", tmp_path, "-e", "run"]
    first = start(args, stderr_file=str(tmp_path / "first"))
    wait_for_file(tmp_path / "run/metrics.jsonl", first.is_alive)
    assert finish(start(args, stderr_file=str(tmp_path / "second"))) == 2
    first.kill()
    finish(first)
    assert "Another process is training in" in (tmp_path / "second").read_text().splitlines()[-1]


def test_a_file_that_may_not_grow(corpus, tmp_path):
    """The limit stands for a full disk on every machine: the write fails halfway."""
    args = ["-d", corpus, *SMALL, "--save-dir", tmp_path, "-e", "run"]
    assert finish(start(args)) == 0
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    before = listing(tmp_path / "run/checkpoints")
    status = finish(start(args, file_size_limit=2_000_000, stderr_file=str(tmp_path / "stderr")))
    assert status == 2
    sentence = (tmp_path / "stderr").read_text().splitlines()[-1]
    assert "The checkpoint of step 4 could not be written" in sentence
    assert "File too large" in sentence and "last complete checkpoint" in sentence
    assert listing(tmp_path / "run/checkpoints") == before
    assert finish(start(args)) == 0
    assert read_metrics(tmp_path / "run")[-1]["step"] == 4


@pytest.fixture
def small_disk(tmp_path):
    """A folder that holds 30 MB. It is mounted for one process only, and ends with that process."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs Linux and root, to mount a small file system")
    mount = f"mount -n -t tmpfs -o size=30m tmpfs {disk} && echo mounted && read -r"
    command = ["unshare", "--mount", "bash", "-c", mount]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        if not holder.stdout.readline():
            pytest.skip("needs the right to mount a file system")
        yield Path(f"/proc/{holder.pid}/root{disk}")


def test_a_full_disk(corpus, tmp_path, small_disk):
    """30 MB hold two checkpoints of 14 MB, not the third that is written before one goes."""
    args = ["-d", corpus, "-s", 32, "--global-batch-size", 6, "--max-steps", 6, "--ckpt-freq", 2]
    args += ["--save-dir", small_disk, "-e", "run"]
    assert finish(start(args, stderr_file=str(tmp_path / "stderr"))) == 2
    sentence = (tmp_path / "stderr").read_text().splitlines()[-1]
    assert "The checkpoint of step 6 could not be written" in sentence
    assert "No space left on device" in sentence
    names = sorted(path.name for path in (small_disk / "run/checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004"]
    shutil.rmtree(small_disk / "run/checkpoints/step-00000002")
    assert finish(start(args, stderr_file=str(tmp_path / "stderr"))) == 0
    assert "resumed after step 4 of 6" in (tmp_path / "stderr").read_text()


@pytest.mark.ci
def test_a_complete_run_says_so(corpus, tmp_path):
    args = (SCRIPT, "-d", corpus, *SMALL, "--save-dir", tmp_path, "-e", "run")
    assert run_script(*args).returncode == 0
    before = listing(tmp_path)
    again = run_script(*args)
    assert again.returncode == 0
    assert "this run is complete: all of its 4 steps are done" in again.stderr
    assert f"01-single-gpu/generate.py {tmp_path / 'run'};" in again.stderr
    assert "to resume" not in again.stderr
    assert listing(tmp_path) == before


@pytest.mark.ci
def test_the_whole_command_leaves_with_status_2(tmp_path):
    done = run_script(SCRIPT, "-s", 1000, "--save-dir", tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("The model has 128 positions")
    assert list(tmp_path.iterdir()) == []


def each_on_a_node_of_its_own() -> None:
    """A relative path is another one for each rank; and a rank that failed says so at once."""
    os.chdir(Path(os.environ["NODES"]) / os.environ["RANK"])
    host = f"node{os.environ['RANK']}"
    socket.gethostname = lambda: host
    tracker.SEEN_WITHIN_S = 0.3
    cli.HEAD_START_S = 0.0


def trust_the_folder() -> None:
    each_on_a_node_of_its_own()
    tracker._check_that_all_see_it = lambda run_dir: None


def trust_the_data() -> None:
    each_on_a_node_of_its_own()
    checkpoint.find_checkpoint = lambda run_dir, training: None


def run_on_two_nodes(folder: Path, plant: Callable[[], None], *args: object) -> tuple:
    """Return the exit statuses of two ranks, and the last line of each or nothing."""
    files = [str(folder / f"stderr-{rank}") for rank in range(2)]
    options = {"chapter": "03-multi-node", "env": {"NODES": folder}, "stderr_file": files}
    for rank in range(2):
        (folder / str(rank)).mkdir(exist_ok=True)
    statuses = Ranks(2, [*args, *SMALL, "-e", "run"], plant=plant, **options).finish()
    return statuses, ["".join(Path(file).read_text().splitlines()[-1:]) for file in files]


def test_a_folder_that_the_nodes_do_not_share(corpus, tmp_path):
    """The planted bug does not look: all seems well, and each folder has a part of a checkpoint."""
    args = ("-d", corpus, "--save-dir", "outputs")
    statuses, said = run_on_two_nodes(tmp_path, each_on_a_node_of_its_own, *args)
    assert statuses == [2, 2]
    rest = f" on node1 does not see {tmp_path}/0/outputs/run of rank 0: "
    rest += "give a --save-dir on a file system that all nodes share."
    assert said[0] == f"Rank 1{rest}"
    assert said[1].startswith("[rank 1] Rank 1 on node1 does not see ")
    for rank in range(2):
        found = [path.name for path in (tmp_path / str(rank)).rglob("*")]
        assert sorted(found) == [".lock", "outputs", "run"][rank:], "nothing else was written"
    statuses, said = run_on_two_nodes(tmp_path, trust_the_folder, *args)
    assert statuses == [0, 0]
    files = tmp_path.rglob("*_0.distcp")
    parts = {(path.relative_to(tmp_path).parts[0], path.name) for path in files}
    assert parts == {("0", "__0_0.distcp"), ("1", "__1_0.distcp")}, "neither folder has all"


@pytest.mark.ci
def test_data_that_is_not_the_same_on_all_nodes(corpus, tmp_path):
    """The planted bug does not compare: each rank trains on another text, and nobody notices."""
    args = ("-d", "corpus.json", "--save-dir", tmp_path / "outputs")
    for rank, word in enumerate(("number", "page")):
        (tmp_path / str(rank)).mkdir()
        text = corpus.read_text().replace("number", word)
        (tmp_path / str(rank) / "corpus.json").write_text(text)
    statuses, said = run_on_two_nodes(tmp_path, each_on_a_node_of_its_own, *args)
    assert statuses == [2, 2]
    sentence = r"Rank 1 on node1 has dataset_checksum (\w{16}), rank 0 on node0 has (\w{16}): "
    sentence += "give all nodes the same arguments, data and Python."
    theirs, ours = re.fullmatch(sentence, said[0]).groups()
    assert theirs != ours and said[1] == f"[rank 1] {said[0]}"
    assert [path.name for path in (tmp_path / "outputs/run").iterdir()] == [".lock"]
    statuses, _ = run_on_two_nodes(tmp_path, trust_the_data, *args)
    assert statuses == [0, 0]

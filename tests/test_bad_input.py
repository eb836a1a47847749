"""Bad input ends in one sentence on stderr and status 2; nothing that was there is lost."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import ROOT, listing, read_metrics, run_script, write_corpus, write_narrow
from runner import finish, load_script, start
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from common import launch, storage
from common.errors import RunError
from common.inputs import models

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
        made = {str(path): b"" for path in folder.glob("*/checkpoints")}  # an empty folder
        assert listing(folder) == before | made, "nothing was written, nothing lost"
        return lines[0]

    return run


def assert_says(sentence: str, expected: str, folder: Path) -> None:
    """The sentence contains what is expected: ... stands for any words, {} for the folder."""
    parts = expected.replace("{}", str(folder)).split("...")
    assert re.search(".*".join(map(re.escape, parts)), sentence), (sentence, expected)


# --- one table: files, arguments, the sentence ---

# Files that a case writes: by path, the content as text or bytes; None deletes, {} is a new folder,
# and a path is where a link leads.
Files = dict[str, object]
DATA = ("-d", "{}/data")
CORPUS = ("-d", "{}/corpus.json", "-s", 32)
MODEL = ("-m", "{}/model")
PRETRAINED = (*MODEL, "--pretrained")
RUN = ("-d", "{}/corpus.json", "-m", "{}/model", "-e", "run", *SMALL)
# The package tokenizers raises a plain Exception.
DAMAGED_TOKENIZER = '{"version": "1.0", "added_tokens": [], "model": {}}'
HUB = "...and the hub says: ...use -d python-stdlib and -m gpt2-tiny, or local paths."
NO_TOKENIZER = "has no usable tokenizer"
NAME = "cannot be an experiment's name"
TABLE = "question,answer,number\n" + "why,because,1\n" * 200
CLASSIFIER = {"run/checkpoints": None, "run/newest": None, "run/best": {}}


def gpt2_with(**settings: object) -> Files:
    return {"model/config.json": json.dumps({"model_type": "gpt2", **settings})}


REFUSALS: list[tuple[Files, tuple[object, ...], str]] = [
    # data sets
    ({}, ("-d", "no/set"), f"There is no data set 'no/set': it is no preset{HUB}"),
    ({}, ("-d", "./nope"), "There is no data set at './nope'"),
    ({}, ("-d", ""), "There is no data set at ''"),
    ({}, ("-d", "my_text.txt"), "There is no file 'my_text.txt': check the path."),
    ({}, ("--text-column", "body"), "is text: it has no"),
    ({"data/a.png": ""}, DATA, "has no file that ends in one of: .txt"),
    ({"data/a.txt": "text", "data/b.csv": TABLE}, DATA, "several kinds (a.txt, b.csv): give one"),
    ({"data/a.csv": TABLE, "data/b.csv": Path("lost")}, DATA, "b.csv is a link to nothing"),
    ({"a.txt": "Straße".encode("utf-16")}, ("-d", "{}/a.txt"), "a.txt is not UTF-8 ("),
    ({"a.csv": TABLE}, ("-d", "{}/a.csv"), "column 'text'...--text-column one of question, answer"),
    ({"a.csv": TABLE}, ("-d", "{}/a.csv", "--text-column", "body"), "no text column 'body'"),
    ({"a.parquet": b"none"}, ("-d", "{}/a.parquet"), "a.parquet has no usable data set ("),
    ({"data.gz": b"\x1f\x8b"}, ("-d", "{}/data.gz"), "data.gz does not end in one of: .txt"),
    ({"a.json": "[1, 3]"}, ("-d", "{}/a.json"), "no text column 'text': no column is text"),
    ({"a.json": '["a", "b"'}, ("-d", "{}/a.json"), "a.json has no usable data set ("),
    ({"a.txt": "Few words."}, ("-d", "{}/a.txt"), "shorter than one sequence of 128 tokens"),
    ({"a.txt": ""}, ("-d", "{}/a.txt"), "The training part of {}/a.txt is shorter than one"),
    ({"a.txt.xz": b"none"}, ("-d", "{}/a.txt.xz"), "a.txt.xz has no usable text ("),
    ({}, (*CORPUS, "--global-batch-size", 5000), "5000 must be a multiple of 1...at most 262"),
    # models
    ({}, ("-m", "some/model"), f"There is no model or tokenizer 'some/model'{HUB}"),
    ({}, ("-m", "a/b/c"), "There is no model or tokenizer at 'a/b/c'"),
    ({"empty": {}}, ("-m", "{}/empty"), NO_TOKENIZER),
    ({}, ("--pretrained",), "preset gpt2-tiny has no weights: leave out --pretrained"),
    ({}, ("-m", ROOT / "common/inputs/presets/gpt2-tiny"), NO_TOKENIZER),
    *(({"model/tokenizer.json": text}, MODEL, NO_TOKENIZER) for text in ("", DAMAGED_TOKENIZER)),
    (gpt2_with(n_layer="two"), MODEL, "no usable tokenizer (...'n_layer' expected int"),
    (gpt2_with(vocab_size=1000), MODEL, "The tokenizer has 4096 tokens and the model only 1000"),
    ({"model/adapter_config.json": "{}"}, PRETRAINED, "holds an adapter of PEFT: merge it into"),
    # mamba has no attention heads, and gemma3 has the vocabulary size in a nested configuration.
    *(
        (gpt2_with(model_type=name), MODEL, f"({name}) is not a causal language model")
        for name in ("bert", "t5", "mamba", "gemma3")
    ),
    ({"model/model.safetensors": b""}, PRETRAINED, "{}/model has no usable weights (Error while "),
    # the run's folder
    *(({}, (*CORPUS, "-e", name), NAME) for name in ("a/b", "..", "")),
    ({"f": ""}, (*CORPUS, "-e", "a", "--save-dir", "{}/f"), "Cannot write to...another --save-dir"),
    ({}, (*CORPUS, "--save-dir", "s3://bucket"), "--save-dir is a local folder; --checkpoint-dir"),
    (CLASSIFIER, RUN, "{}/run is the folder of a classifier: give another -e."),
    # another training
    ({}, (*RUN, "--lr", 1e-3), "was started with --lr 0.03125, not 0.001: resume it as it was"),
    ({}, (*RUN, "--max-steps", 5), "was started with total_steps 4, not 5 (see --max-steps"),
    ({"corpus.json": json.dumps(["x" * 999] * 99)}, RUN, "with dataset_checksum...--dataset-name)"),
    (
        gpt2_with(vocab_size=4096, n_embd=32, n_head=4, n_layer=1),
        *(RUN, "was started with model ...(see --model-name"),
    ),
]


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        if content is None:
            path.unlink() if path.is_file() else shutil.rmtree(path)
        elif content == {}:
            path.mkdir(parents=True)
        elif isinstance(content, Path):
            path.symlink_to(content)
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
        (("--lr", "nan"), "'nan' is not a number"),
        (("--seed", str(2**40)), "is not a whole number"),
        (("@/no/such/file",), "No such file"),
        (("--batch", "3"), "unrecognized arguments: --batch 3"),
    ],
)
def test_arguments(monkeypatch, capsys, args, message):
    """Rank 0 says it once, for all ranks, under srun too: they have not met yet."""
    monkeypatch.setattr(sys, "argv", ["train_llm.py", *args])
    monkeypatch.setattr("common.ranks.HEAD_START_S", 0.0)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for rank in range(2):
        place = dict(zip(launch.SRUN, (str(rank), "2", str(rank)), strict=True))
        monkeypatch.setattr(os, "environ", address | place)
        launch.prepare_environment()
        with pytest.raises(SystemExit) as exit_:
            load_script(ROOT / SCRIPT).get_args()
        assert exit_.value.code == 2
        said = capsys.readouterr().err
        assert message in said.splitlines()[-1] if rank == 0 else said == ""


@pytest.mark.check
def test_arguments_from_a_file(monkeypatch, tmp_path):
    (tmp_path / "args").write_text("# a comment\n--lr 3e-4\n-d 'my data'  # another\n\n--compile\n")
    monkeypatch.setattr(sys, "argv", ["train_llm.py", f"@{tmp_path}/args", "--lr", "1e-3"])
    args = load_script(ROOT / SCRIPT).get_args()
    assert (args.lr, args.dataset_name, args.compile) == (1e-3, "my data", True)


def test_a_cache_that_cannot_be_written(refuse, folder, monkeypatch):
    monkeypatch.setattr(storage.constants, "HF_HOME", "/proc/nothing")
    assert "Cannot write to the cache /proc/nothing" in refuse(*CORPUS)


# --- weights that are missing or of another model ---


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
    expected = f"have no {TENSOR} of the right shape"
    assert expected in refuse(*PRETRAINED)
    with pytest.raises(RunError, match=expected):
        models.load_pretrained(str(folder / "model"), None, AutoModelForSequenceClassification)


def write_weights(folder: Path, **changes: torch.Tensor) -> None:
    """Add tensors to the file of a model."""
    file = folder / "model/model.safetensors"
    save_file(load_file(file) | changes, file, metadata={"format": "pt"})


HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"


@pytest.mark.parametrize("n_layer", [2, 1])
def test_weights_that_the_configuration_does_not_have(refuse, folder, n_layer):
    """transformers would drop a bias of another model, or a layer, silently."""
    write_weights(folder, **{"transformer.h.0.attn.gate": torch.ones(32)} if n_layer == 2 else {})
    config = folder / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_layer": n_layer}))
    unused = "transformer.h.0.attn.gate" if n_layer == 2 else "transformer.h.1.attn.c_attn.weight"
    assert f"have {unused}, which the model of config.json does not have" in refuse(*PRETRAINED)
    models.load_pretrained(str(folder / "model"), None, AutoModelForSequenceClassification)


def test_a_head_that_the_configuration_ties(refuse, folder):
    """One with other values than the embeddings is refused; a copy of the embeddings is not."""
    name, config = str(folder / "model"), folder / "model/config.json"
    embedding = load_file(folder / "model/model.safetensors")[EMBEDDING]
    write_weights(folder, **{HEAD: embedding.clone()})
    model = models.load_pretrained(name, models.load_config(name))
    assert model.lm_head.weight is model.transformer.wte.weight
    write_weights(folder, **{HEAD: -embedding})
    said = refuse(*PRETRAINED)
    assert f"have their own {HEAD}, but config.json ties it to the embeddings: set tie_" in said
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    model = models.load_pretrained(name, models.load_config(name))
    assert torch.equal(model.lm_head.weight, -embedding)
    assert torch.equal(model.transformer.wte.weight, embedding)


PAGE = "<!DOCTYPE html>"  # a proxy or a login page may answer instead of the hub
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content"),
    [("pytorch_model.bin", PAGE), (INDEX, PAGE), (INDEX, "{}"), (INDEX, '{"weight_map": {}}')],
    ids=["page as weights", "page as index", "empty index", "index without metadata"],
)
def test_weights_and_an_index_that_are_something_else(refuse, folder, name, content):
    """transformers raises errors of several kinds for them."""
    write(folder, {"model/model.safetensors": None, f"model/{name}": content})
    assert f"{folder}/model has no usable weights (" in refuse(*PRETRAINED)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(refuse, folder, value):
    """A training would diverge in its first step, and a text would be random."""
    weight = load_file(folder / "model/model.safetensors")[TENSOR]
    weight[0, 0] = value
    write_weights(folder, **{TENSOR: weight})
    assert f"{folder}/model have NaN or infinity in {TENSOR}: get" in refuse(*PRETRAINED)


# --- what is not refused ---


def test_a_new_head_and_tied_weights_are_not_missing(folder):
    """Nor old names. GPT-2 on the hub has no prefix, and a mask beside the weights of a block."""
    name, file = str(folder / "model"), folder / "model/model.safetensors"
    weights = {key: tensor.bfloat16() for key, tensor in load_file(file).items()}
    assert "lm_head.weight" not in weights
    old = {key.removeprefix("transformer."): tensor for key, tensor in weights.items()}
    old |= {f"h.{n}.attn.bias": torch.ones(1, 1, 128, 128).tril() for n in range(2)}
    old |= {f"h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(2)}
    for stored in (old, weights):
        save_file(stored, file, metadata={"format": "pt"})
        model = models.load_pretrained(name, models.load_config(name))
        for key, tensor in weights.items():
            assert torch.equal(model.state_dict()[key], tensor.float())
        assert model.lm_head.weight is model.transformer.wte.weight
    model = models.load_pretrained(name, None, AutoModelForSequenceClassification)
    assert torch.equal(model.state_dict()[TENSOR], weights[TENSOR].float())


def test_what_may_change(folder, train):
    """Where the corpus is, the size of a micro-batch, how often something is done."""
    shutil.rmtree(folder / "run/checkpoints/step-00000004")
    (folder / "corpus.json").rename(folder / "moved.json")
    words = fill(folder, *RUN, "-d", "{}/moved.json")
    losses = [line["loss"] for line in read_metrics(folder / "run")]
    moved = train(*words, "-b", 2, "--eval-freq", 1)
    assert [line["loss"] for line in moved] == pytest.approx(losses, rel=1e-5)


# --- the whole process ---


def test_the_whole_command_leaves_with_status_2(tmp_path):
    done = run_script(SCRIPT, "-s", 1000, "--save-dir", tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("The model has 128 positions")
    assert list(tmp_path.iterdir()) == []

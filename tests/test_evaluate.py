"""What a model is worth on a text: each token counts once, on any number of ranks."""

import json
import math
import os
import shutil
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, first_then_nightly, random_texts, read_metrics
from runner import ask_ranks, finish, load_script, place_of, start
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from common import launch, models
from common.cli import RunError
from common.documents import find_documents, read_documents

from trained_model import load_trained

SCRIPT = ROOT / "01-single-gpu/evaluate.py"
SMALL = ["-s", 32, "--global-batch-size", 6, "--max-steps", 4, "--eval-freq", 4]
RUNS = {
    "gpt2": ("-m", "gpt2-tiny"),
    "llama": ("-m", "llama-tiny"),
    "half": ("-m", "gpt2-tiny", "--param-dtype", "bfloat16"),
}


@pytest.fixture(scope="module")
def saved(make_folder) -> Path:
    """Return a folder with a corpus, and with the runs and folders that tests have asked for."""
    folder = make_folder("saved")
    (folder / "corpus.json").write_text(json.dumps(random_texts(30)))
    provide(folder, "gpt2")
    return folder


def provide(folder: Path, name: str) -> None:
    """Train this run, or save the weights of one as a folder, if that is not done yet."""
    if (folder / name).exists():
        return
    if name in RUNS:
        args = ["-d", folder / "corpus.json", *SMALL, *RUNS[name], "--save-dir", folder, "-e", name]
        assert finish(start(args)) == 0
    if name == "llama-folder":
        provide(folder, "llama")
        trained = load_trained(str(folder / "llama"), None, None, None)
        trained.model.save_pretrained(folder / name)
        trained.tokenizer.save_pretrained(folder / name)
    if name == "own":
        rows = [f'"{text[::-1]}",other\n' for text in random_texts(30)]
        (folder / "table.csv").write_text("body,author\n" + "".join(rows))
        args = ["-d", folder / "table.csv", "--text-column", "body", "-m", "llama-tiny", *SMALL]
        args += ["--tokenizer-name", save_letters(folder / "own-letters", "abcdefgh \n")]
        assert finish(start([*args, "--save-dir", folder, "-e", name])) == 0


@pytest.fixture
def evaluate(monkeypatch, capfd, saved, tmp_path):
    """Return a function that runs the script in this process and returns what it wrote as JSON."""
    for name in launch.RANK_VARIABLES:  # the script sets them
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)

    def run(name: str, *args: object, plant: Callable = lambda script: None) -> dict:
        provide(saved, name)
        script = load_script(SCRIPT)
        plant(script)
        output = tmp_path / "facts.json"
        words = ["evaluate.py", saved / name, "--output", output]
        if "-d" not in args and not (saved / name / "state.json").exists():
            words += ["-d", saved / "corpus.json"]  # a run has its own
        monkeypatch.setattr(sys, "argv", [str(word) for word in (*words, *args)])
        script.main()
        facts = json.loads(output.read_text())
        output.unlink()
        return facts

    return run


def tokens_of(saved: Path, split: str) -> list[int]:
    """Return a part of the corpus as one line of tokens, without the code for training's data."""
    tokenizer = models.load_tokenizer("gpt2-tiny")
    documents = find_documents(str(saved / "corpus.json"), None, None).load()
    texts = read_documents(documents, split == "evaluation")
    return [token for text in texts for token in [*tokenizer(text)["input_ids"], 0]]


@pytest.mark.parametrize("name", first_then_nightly(RUNS))
def test_without_overlap_it_is_the_number_of_the_run(name, evaluate, saved):
    facts, last = evaluate(name), read_metrics(saved / name)[-1]
    for key, own in (("loss", "eval_loss"), ("perplexity",) * 2, ("bits_per_byte",) * 2):
        assert facts[key] == pytest.approx(last[own], rel=1e-6), key
    n_tokens = len(tokens_of(saved, "evaluation"))
    assert facts["tokens"] == n_tokens and facts["scored_tokens"] == n_tokens // 32 * 31
    assert (facts["seq_length"], facts["stride"], facts["split"]) == (32, 32, "evaluation")


def losses_of(model, tokens: list[int], seq_length: int, stride: int) -> list[float]:
    """Return the loss of each token but the first, each by a forward pass of its own."""
    losses = []
    for position in range(1, len(tokens)):
        begin = max(0, -(-(position + 1 - seq_length) // stride) * stride)
        begin = min(begin, len(tokens) - seq_length)
        with torch.no_grad():
            logits = model(torch.tensor([tokens[begin:position]])).logits[0, -1]
        losses.append(-logits.log_softmax(0)[tokens[position]].item())
    return losses


def score_the_overlap_twice(script) -> None:
    find = script.find_windows

    def wrong(*args: int) -> tuple[np.ndarray, np.ndarray]:
        begins, _ = find(*args)
        return begins, begins + 1

    script.find_windows = wrong


@pytest.mark.ci
@pytest.mark.parametrize("stride", first_then_nightly([5, 31]))
def test_each_token_has_its_context_and_counts_once(stride, evaluate, saved):
    trained = load_trained(str(saved / "gpt2"), None, None, None)
    tokens = tokens_of(saved, "evaluation")
    losses = losses_of(trained.model, tokens, 32, stride)
    facts = evaluate("gpt2", "--stride", stride)
    assert facts["scored_tokens"] == len(tokens) - 1
    assert facts["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    wrong = evaluate("gpt2", "--stride", stride, plant=score_the_overlap_twice)
    if stride < 31:
        assert wrong["scored_tokens"] > len(tokens) - 1
    assert wrong["loss"] != pytest.approx(facts["loss"], rel=1e-6)


def scored(windows: tuple[np.ndarray, np.ndarray], seq_length: int) -> Counter:
    """Return how often each token is scored; each has something before it in its window."""
    found = Counter()
    for begin, first in zip(*windows, strict=True):
        assert begin < first <= begin + seq_length
        found.update(range(first, begin + seq_length))
    return found


@pytest.mark.check
def test_windows():
    """All short lines: every token once, with at least what the stride leaves before it."""
    find = load_script(SCRIPT).find_windows
    for seq_length in (2, 3, 8):
        for n_tokens in range(seq_length, 30):
            for stride in range(1, seq_length + 1):
                windows = find(n_tokens, seq_length, stride)
                expected = set(range(1, n_tokens))
                if stride == seq_length:
                    whole = n_tokens // seq_length * seq_length
                    expected = {token for token in range(whole) if token % seq_length}
                found = scored(windows, seq_length)
                assert found == Counter(expected), (n_tokens, seq_length, stride)
                for begin, first in list(zip(*windows, strict=True))[1:]:
                    assert first - begin >= max(1, seq_length - stride)
    script = load_script(SCRIPT)
    score_the_overlap_twice(script)
    assert max(scored(script.find_windows(20, 8, 3), 8).values()) > 1


# --- ranks ---


def mean_of_means(script) -> None:
    """Plant: each rank's mean counts the same, however many tokens it has."""

    def all_reduce(total: torch.Tensor) -> None:
        total[0] /= total[1]
        total[1] = 1
        dist.all_reduce(total)

    script.dist = types.SimpleNamespace(**{**vars(dist), "all_reduce": all_reduce})


def evaluate_ranks(rank: int, jobs: list[tuple], world_size: int, queue) -> None:
    """Evaluate several times, each with a store of its own."""
    os.chdir(ROOT)
    for port, args, plant in jobs:
        os.environ |= {k: str(v) for k, v in place_of(rank, world_size).items()}
        os.environ["MASTER_PORT"] = str(port)
        script = load_script(SCRIPT)
        if plant:
            plant(script)
        sys.argv = ["evaluate.py", *map(str, args)]
        script.main()
    queue.put((rank, len(jobs)))


@pytest.mark.parametrize("world_size", first_then_nightly([2, 3]))
def test_ranks_give_the_same_number(world_size, evaluate, saved, tmp_path):
    expected = evaluate("gpt2", "--stride", 20)
    stores, jobs, outputs = [], [], []
    for plant in (None, mean_of_means):
        stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        outputs.append(tmp_path / f"{len(outputs)}.json")
        args = (saved / "gpt2", "--stride", 20, "--output", outputs[-1])
        jobs.append((stores[-1].port, args, plant))
    done = ask_ranks(world_size, evaluate_ranks, jobs, world_size)
    assert done == [len(jobs)] * world_size
    found, means = (json.loads(output.read_text()) for output in outputs)
    for key in ("loss", "perplexity", "bits_per_byte"):
        assert found[key] == pytest.approx(expected[key], rel=1e-6)
    for key in ("tokens", "scored_tokens", "bytes"):
        assert found[key] == expected[key]
    assert found["ranks"] == world_size
    assert means["loss"] != pytest.approx(expected["loss"], rel=1e-6)


def refuse_ranks(rank: int, port: int, args: tuple, world_size: int, queue) -> None:
    """Evaluate, the last rank another checkpoint, and answer with the sentence that ends it."""
    os.chdir(ROOT)
    os.environ |= {k: str(v) for k, v in place_of(rank, world_size).items()}
    os.environ["MASTER_PORT"] = str(port)
    script = load_script(SCRIPT)
    another_checkpoint(script)
    sys.argv = ["evaluate.py", *map(str, args)]
    try:
        script.main()
    except RunError as error:
        queue.put((rank, str(error)))


def another_checkpoint(script) -> None:
    """The run has gone on when the last rank reads it."""
    load = script.load_trained

    def load_another(*args: object):
        trained = load(*args)
        late = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        return trained._replace(origin="step 9 of it") if late else trained

    script.load_trained = load_another


@pytest.mark.nightly
def test_ranks_that_read_different_checkpoints(saved, tmp_path):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    args = (saved / "gpt2", "-d", saved / "corpus.json", "--output", tmp_path / "facts.json")
    said = ask_ranks(2, refuse_ranks, store.port, args, 2)
    for sentence in said:
        assert sentence.startswith("Rank 1 on ")
        assert " has model step 9 of it, rank 0 on " in sentence
        assert sentence.endswith("): give --step, and the same data on all nodes."), said
        assert "/gpt2 (model gpt2-tiny, tokenizer gpt2-tiny): " in sentence
    assert not (tmp_path / "facts.json").exists()


# --- what a run was trained on ---


@pytest.mark.nightly
def test_a_run_is_evaluated_on_its_own_data(evaluate, saved, tmp_path, capfd, monkeypatch):
    """With its own text column, model and tokenizer, from any folder; arguments replace them."""
    monkeypatch.chdir(tmp_path)
    facts = evaluate("own")
    own_loss = pytest.approx(read_metrics(saved / "own")[-1]["eval_loss"], rel=1e-6)
    assert facts["loss"] == own_loss and facts["unknown"] == 0
    names = f"(model llama-tiny, tokenizer {saved}/own-letters)"
    first_line = f"step 4 of {saved}/own {names} on the evaluation part of {saved}/table.csv"
    assert capfd.readouterr().out.splitlines()[0] == first_line
    assert (facts["dataset_name"], facts["text_column"]) == (f"{saved}/table.csv", "body")

    facts = evaluate("own", "-d", saved / "corpus.json")
    assert facts["loss"] != own_loss and facts["text_column"] is None
    assert f" on the evaluation part of {saved}/corpus.json\n" in capfd.readouterr().out
    letters = save_letters(saved / "other-letters", "hgfedcba \n")
    assert evaluate("own", "--tokenizer-name", letters)["loss"] != own_loss
    assert f"(model llama-tiny, tokenizer {letters})" in capfd.readouterr().out
    with pytest.raises(RunError, match="another model than gpt2-tiny"):
        evaluate("own", "-m", "gpt2-tiny")


@pytest.mark.nightly
def test_tokens_that_are_not_those_of_the_run(evaluate, saved, capfd):
    """A run on conversations, of which this script reads the plain text, is one such run."""
    provide(saved, "own")
    shutil.copytree(saved / "own", saved / "changed")
    state = json.loads((saved / "changed/state.json").read_text())
    state["training"]["dataset_checksum"] = "of other tokens"
    (saved / "changed/state.json").write_text(json.dumps(state))
    for run, said in (("own", ""), ("changed", ", which gave the run other tokens: the text or ")):
        evaluate(run)
        first_line = capfd.readouterr().out.splitlines()[0]
        assert first_line.partition(f"of {saved}/table.csv")[2].startswith(said)
        assert ("questions and answers" in first_line) == bool(said)


# --- what it measures ---


def save_letters(folder: Path, letters: str) -> Path:
    """Save a tokenizer of these characters; all others are unknown."""
    vocabulary = {letter: n for n, letter in enumerate(["<end>", "<unknown>", *letters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, "<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"eos_token": "<end>", "unk_token": "<unknown>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


@pytest.mark.nightly
def test_unknown_tokens_are_counted(evaluate, saved):
    """They make a text look easy: what they stand for is never guessed."""
    model = ("llama-folder", "-s", 32)  # a folder's weights take any tokenizer that is small enough
    assert evaluate(*model)["unknown"] == 0
    folder = save_letters(saved / "no-h", "abcdefg \n")
    documents = find_documents(str(saved / "corpus.json"), None, None).load()
    expected = sum(text.count("h") for text in read_documents(documents, held_out=True))
    assert evaluate(*model, "--tokenizer-name", folder)["unknown"] == expected > 10


@pytest.mark.nightly
def test_bits_per_byte_is_of_the_text(evaluate, saved):
    """A tokenizer of characters has other tokens and another loss, and the same bytes."""
    folder = save_letters(saved / "letters", "abcdefgh \n")
    before = evaluate("llama-folder", "-s", 32)
    facts = evaluate("llama-folder", "-s", 32, "--tokenizer-name", folder)
    assert facts["bytes"] == before["bytes"] and facts["tokens"] > 1.2 * before["tokens"]
    documents = find_documents(str(saved / "corpus.json"), None, None).load()
    evaluation = list(read_documents(documents, held_out=True))
    assert facts["bytes"] == sum(len(text.encode()) for text in evaluation)
    assert facts["tokens"] == facts["bytes"] + len(evaluation), "an end after each document"
    assert facts["unknown"] == 0
    for each in (before, facts):
        bits = each["loss"] / math.log(2) * each["tokens"] / each["bytes"]
        assert each["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
        assert each["perplexity"] == pytest.approx(math.exp(each["loss"]), rel=1e-9)


@pytest.mark.nightly
def test_a_model_that_knows_nothing(evaluate, saved):
    """All tokens are as likely: the loss is the logarithm of their number."""
    model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    for parameter in model.parameters():
        parameter.data.zero_()
    model.save_pretrained(saved / "nothing")
    models.load_tokenizer("gpt2-tiny").save_pretrained(saved / "nothing")
    facts = evaluate("nothing", "-s", 16, "--stride", 3)
    assert facts["loss"] == pytest.approx(math.log(4096), rel=1e-6)
    assert facts["perplexity"] == pytest.approx(4096, rel=1e-5)


@pytest.mark.nightly
def test_parts_and_batches(evaluate, saved):
    found = {split: evaluate("gpt2", "--split", split) for split in ("train", "evaluation", "all")}
    for key in ("tokens", "scored_tokens", "bytes"):
        assert found["all"][key] == found["train"][key] + found["evaluation"][key]
    assert found["train"]["tokens"] == len(tokens_of(saved, "train"))
    sums = {split: facts["loss"] * facts["scored_tokens"] for split, facts in found.items()}
    assert sums["all"] == pytest.approx(sums["train"] + sums["evaluation"], rel=1e-6)
    for batch_size in (1, 100):
        facts = evaluate("gpt2", "-b", batch_size)
        assert facts["loss"] == pytest.approx(found["evaluation"]["loss"], rel=1e-6)


@pytest.mark.nightly
def test_a_folder_is_its_run(evaluate):
    run, folder = evaluate("llama"), evaluate("llama-folder", "-s", 32)
    assert folder["loss"] == pytest.approx(run["loss"], rel=1e-6)
    assert evaluate("llama-folder")["seq_length"] == 128, "its positions"


@pytest.mark.nightly
def test_bad_input(evaluate, saved, tmp_path, monkeypatch, capfd):
    def refuse(*args: object) -> str:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            launch.run(load_script(SCRIPT).main)
        out, err = capfd.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith("tokenized ")]
        assert exit_.value.code == 2 and not out and len(lines) == 1, err
        return lines[0]

    run, data = saved / "gpt2", ("-d", saved / "corpus.json")
    assert "There is no nope in" in refuse(tmp_path / "nope")
    assert "neither a run's folder with a complete checkpoint" in refuse(tmp_path)
    assert "--stride 33 would leave out tokens: give at most 32." in refuse(run, "--stride", 33)
    assert "The model has 128 positions: --seq-length 129" in refuse(run, "-s", 129)
    assert "There is no data set at '/nope.txt'" in refuse(run, "-d", "/nope.txt")
    assert "has no text column 'text'" in refuse(saved / "gpt2", "-d", csv(tmp_path))
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 9)
    none = "chats.jsonl has no text column 'text': no column is text."
    assert none in refuse(run, "-d", tmp_path / "chats.jsonl")
    (tmp_path / "short.txt").write_text("A few words.")
    assert "shorter than one sequence of 32 tokens" in refuse(run, "-d", tmp_path / "short.txt")
    (tmp_path / "thesis").write_text("the only copy")
    assert "thesis already exists" in refuse(run, *data, "--output", tmp_path / "thesis")
    assert "cannot be written" in refuse(run, *data, "--output", tmp_path / "nope/facts.json")
    assert (tmp_path / "thesis").read_text() == "the only copy"


def csv(folder: Path) -> Path:
    (folder / "table.csv").write_text("question,answer\n" + "why,because\n" * 9)
    return folder / "table.csv"

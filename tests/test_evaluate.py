"""What a model is worth on a text: each token counts once, on any number of ranks."""

import json
import math
import os
import shutil
import sys
import types
from collections import Counter
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


def save_letters(folder: Path, letters: str) -> Path:
    """Save a tokenizer of these characters; all others are unknown."""
    vocabulary = {letter: n for n, letter in enumerate(["<end>", "<unknown>", *letters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, "<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"eos_token": "<end>", "unk_token": "<unknown>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(make_folder) -> Path:
    """Return a folder with a corpus and a run, whose text column and tokenizer are its own."""
    folder = make_folder("saved")
    rows = [f'"{text}",other\n' for text in random_texts(30)]
    (folder / "table.csv").write_text("body,author\n" + "".join(rows))
    letters = save_letters(folder / "letters", "abcdefgh \n")
    args = ["-d", folder / "table.csv", "--text-column", "body", "--tokenizer-name", letters]
    args += ["-s", 32, "--global-batch-size", 6, "--max-steps", 4, "--eval-freq", 4]
    assert finish(start([*args, "--save-dir", folder, "-e", "run"])) == 0
    return folder


@pytest.fixture
def evaluate(monkeypatch, run_main, saved, tmp_path):
    """Return a function that runs the script in this process and returns (facts, first line)."""
    for name in launch.RANK_VARIABLES:  # the script sets them
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)

    def run(name: str, *args: object) -> tuple[dict, str]:
        output = tmp_path / "facts.json"
        out, _ = run_main(SCRIPT, saved / name, "--output", output, *args)
        facts = json.loads(output.read_text())
        output.unlink()
        return facts, out.splitlines()[0]

    return run


def texts_of(saved: Path, split: str) -> list[str]:
    """Return the texts of a part of the corpus."""
    documents = find_documents(str(saved / "table.csv"), None, "body").load()
    return list(read_documents(documents, split == "evaluation"))


def tokens_of(saved: Path, split: str) -> list[int]:
    """Return a part of the corpus as one line of tokens, without the code for training's data."""
    tokenizer = models.load_tokenizer(str(saved / "letters"))
    texts = texts_of(saved, split)
    return [token for text in texts for token in [*tokenizer(text)["input_ids"], 0]]


def test_without_overlap_it_is_the_number_of_the_run(evaluate, saved):
    """On its own text, with its own tokenizer; the batch size changes nothing."""
    facts, first_line = evaluate("run", "-b", 5)
    last = read_metrics(saved / "run")[-1]
    for key, own in (("loss", "eval_loss"), ("perplexity",) * 2, ("bits_per_byte",) * 2):
        assert facts[key] == pytest.approx(last[own], rel=1e-6), key
    texts = texts_of(saved, "evaluation")
    n_bytes = sum(len(text.encode()) for text in texts)
    n_tokens = n_bytes + len(texts)  # an end after each document
    bits = facts["loss"] / math.log(2) * n_tokens / n_bytes
    assert facts["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert facts["perplexity"] == pytest.approx(math.exp(facts["loss"]), rel=1e-9)
    assert (facts["tokens"], facts["bytes"], facts["unknown"]) == (n_tokens, n_bytes, 0)
    assert facts["scored_tokens"] == n_tokens // 32 * 31
    assert (facts["seq_length"], facts["stride"], facts["split"]) == (32, 32, "evaluation")
    names = f"(model gpt2-tiny, tokenizer {saved}/letters)"
    where = f"on the evaluation part of {saved}/table.csv"
    assert first_line == f"step 4 of {saved}/run {names} {where}"


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


@pytest.mark.ci
def test_each_token_has_its_context_and_counts_once(evaluate, saved):
    trained = load_trained(str(saved / "run"), None, None, None)
    tokens = tokens_of(saved, "evaluation")
    facts, _ = evaluate("run", "--stride", 5)
    assert facts["scored_tokens"] == len(tokens) - 1
    losses = losses_of(trained.model, tokens, 32, 5)
    assert facts["loss"] == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.check
def test_windows():
    """All short lines: every token once, with at least what the stride leaves before it."""
    find = load_script(SCRIPT).find_windows
    for seq_length in (2, 3, 8):
        for n_tokens in range(seq_length, 30):
            for stride in range(1, seq_length + 1):
                expected = set(range(1, n_tokens))
                if stride == seq_length:
                    whole = n_tokens // seq_length * seq_length
                    expected = {token for token in range(whole) if token % seq_length}
                windows = list(zip(*find(n_tokens, seq_length, stride), strict=True))
                found = Counter()
                for begin, first in windows:
                    assert begin < first <= begin + seq_length
                    found.update(range(first, begin + seq_length))
                assert found == Counter(expected), (n_tokens, seq_length, stride)
                assert all(first - begin >= seq_length - stride for begin, first in windows[1:])


# --- ranks ---


def mean_of_means(script) -> None:
    """Plant: each rank's mean counts the same, however many tokens it has."""

    def all_reduce(total: torch.Tensor) -> None:
        total[0] /= total[1]
        total[1] = 1
        dist.all_reduce(total)

    script.dist = types.SimpleNamespace(**{**vars(dist), "all_reduce": all_reduce})


def another_checkpoint(script) -> None:
    """The run has gone on when the last rank reads it."""
    load = script.load_trained

    def load_another(*args: object):
        trained = load(*args)
        late = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        return trained._replace(origin="step 9 of it") if late else trained

    script.load_trained = load_another


def evaluate_ranks(rank: int, jobs: list[tuple], world_size: int, queue) -> None:
    """Evaluate several times, each with a store of its own; answer with what ends the last one."""
    os.chdir(ROOT)
    for port, args, plant in jobs:
        os.environ |= {k: str(v) for k, v in place_of(rank, world_size).items()}
        os.environ["MASTER_PORT"] = str(port)
        script = load_script(SCRIPT)
        if plant:
            plant(script)
        sys.argv = ["evaluate.py", *map(str, args)]
        try:
            script.main()
        except RunError as error:
            queue.put((rank, str(error)))


@pytest.mark.parametrize("world_size", first_then_nightly([2, 3]))
def test_ranks_give_the_same_number(world_size, evaluate, saved, tmp_path):
    """And are refused if the last one reads another checkpoint."""
    expected, _ = evaluate("run", "--stride", 20)
    stores, jobs, outputs = [], [], []
    for plant in (None, mean_of_means, another_checkpoint):
        stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        outputs.append(tmp_path / f"{len(outputs)}.json")
        args = (saved / "run", "--stride", 20, "--output", outputs[-1])
        jobs.append((stores[-1].port, args, plant))
    said = ask_ranks(world_size, evaluate_ranks, jobs, world_size)
    found, means = (json.loads(output.read_text()) for output in outputs[:2])
    for key in ("loss", "perplexity", "bits_per_byte"):
        assert found[key] == pytest.approx(expected[key], rel=1e-6)
    for key in ("tokens", "scored_tokens", "bytes"):
        assert found[key] == expected[key]
    assert found["ranks"] == world_size
    assert means["loss"] != pytest.approx(expected["loss"], rel=1e-6)
    for sentence in said:
        assert sentence.startswith(f"Rank {world_size - 1} on ")
        assert " has model step 9 of it, rank 0 on " in sentence
        assert sentence.endswith("): give --step, and the same data on all nodes."), said
    assert not outputs[2].exists()


# --- other texts and models ---


@pytest.mark.nightly
def test_parts_and_other_tokens(evaluate, saved):
    parts = {split: evaluate("run", "--split", split)[0] for split in ("train", "evaluation")}
    both, _ = evaluate("run", "--split", "all")
    for key in ("tokens", "scored_tokens", "bytes"):
        assert both[key] == sum(facts[key] for facts in parts.values())
    assert parts["train"]["tokens"] == len(tokens_of(saved, "train"))
    losses = sum(facts["loss"] * facts["scored_tokens"] for facts in parts.values())
    assert both["loss"] * both["scored_tokens"] == pytest.approx(losses, rel=1e-6)
    shutil.copytree(saved / "run", saved / "changed")
    state = json.loads((saved / "changed/state.json").read_text())
    state["training"]["dataset_checksum"] = "of other tokens"
    (saved / "changed/state.json").write_text(json.dumps(state))
    _, first_line = evaluate("changed")
    assert ", which gave the run other tokens: the text or the tokenizer has changed" in first_line


@pytest.mark.nightly
def test_a_folder_that_knows_nothing(evaluate, saved):
    """All tokens are as likely: the loss is the logarithm of their number. No "h" is guessed."""
    model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    for parameter in model.parameters():
        parameter.data.zero_()
    model.save_pretrained(saved / "nothing")
    save_letters(saved / "nothing", "abcdefg \n")
    data = ("-d", saved / "table.csv", "--text-column", "body")
    facts, _ = evaluate("nothing", *data, "--stride", 30)
    assert facts["loss"] == pytest.approx(math.log(4096), rel=1e-6)
    assert facts["perplexity"] == pytest.approx(4096, rel=1e-5)
    assert facts["seq_length"] == 128, "its positions"
    expected = sum(text.count("h") for text in texts_of(saved, "evaluation"))
    assert facts["unknown"] == expected > 10


@pytest.mark.nightly
def test_bad_input(refuse, saved, tmp_path):
    (tmp_path / "short.txt").write_text("A few words.")
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 9)
    for args, sentence in (
        (("--stride", 33), "--stride 33 would leave out tokens: give at most 32."),
        (("-s", 129), "The model has 128 positions: --seq-length 129"),
        (("-m", "llama-tiny"), "has another model than llama-tiny: give -m and --tokenizer-name."),
        (("-d", tmp_path / "short.txt"), "shorter than one sequence of 32 tokens"),
        (("-d", tmp_path / "chats.jsonl"), "has no text column 'text': no column is text."),
    ):
        assert sentence in refuse(SCRIPT, saved / "run", *args)

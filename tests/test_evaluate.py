"""What a model is worth on a text: each token counts once, on any number of ranks."""

import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    first_then_nightly,
    random_texts,
    read_metrics,
    register,
    replace_in,
    save_run,
    speak_at_once,
)
from runner import Ranks, finish, load_script, start
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from common import launch
from common.inputs import models
from common.inputs.documents import find_documents

SCRIPT = ROOT / "01-single-gpu/evaluate.py"


def save_letters(folder: Path, letters: str, begin: str | None = None) -> Path:
    """Save a tokenizer of these characters; all others are unknown.

    begin: a special token that it puts before each text.
    """
    vocabulary = {letter: n for n, letter in enumerate(["<end>", "<unknown>", *letters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, "<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"eos_token": "<end>", "unk_token": "<unknown>"}
    if begin:
        special["bos_token"] = begin
        tokenizer.add_special_tokens([begin])
        ids = [(begin, tokenizer.token_to_id(begin))]
        tokenizer.post_processor = TemplateProcessing(f"{begin} $A", special_tokens=ids)
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
    texts = find_documents(str(saved / "table.csv"), None, "body").read()
    return [each.text for each in texts if each.held_out == (split == "evaluation")]


def test_without_overlap_it_is_the_number_of_the_run(evaluate, saved):
    """On its own text, with its own tokenizer; the batch size changes nothing."""
    facts, first_line = evaluate("run", "-b", 5)
    last = read_metrics(saved / "run")[-1]
    for key, own in (("loss", "eval_loss"), ("perplexity",) * 2, ("bits_per_byte",) * 2):
        assert facts[key] == pytest.approx(last[own], rel=1e-6), key
    texts = texts_of(saved, "evaluation")
    n_bytes = sum(len(text.encode()) for text in texts)
    n_tokens = n_bytes + len(texts)  # an end after each document
    assert (facts["tokens"], facts["bytes"], facts["unknown"]) == (n_tokens, n_bytes, 0)
    assert facts["scored_tokens"] == n_tokens // 32 * 31
    assert (facts["seq_length"], facts["stride"], facts["split"]) == (32, 32, "evaluation")
    names = f"(model gpt2-tiny, tokenizer {saved}/letters)"
    where = f"on the evaluation part of {saved}/table.csv"
    assert first_line == f"step 4 of {saved}/run {names} {where}"


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


# Each rank's mean counts the same, however many tokens it has.
SUM = "dist.all_reduce(total)"
MEAN_OF_MEANS = (SUM, f"total = total / total[1]\n        {SUM}")
# The run has gone on when the last rank reads it.
ANOTHER_CHECKPOINT = ('"model": trained.origin,', '"model": f"step {8 + rank} of it",')
for bug in (MEAN_OF_MEANS, ANOTHER_CHECKPOINT):
    register("01-single-gpu/evaluate.py", [bug])


@pytest.mark.parametrize("world_size", first_then_nightly([2, 3]))
def test_ranks_give_the_same_number(world_size, evaluate, saved, tmp_path):
    """And are refused if one reads another checkpoint."""
    expected, _ = evaluate("run", "--stride", 20)
    output, stderr = tmp_path / "found.json", tmp_path / "stderr"

    def start_ranks(*bug: str) -> list[int]:
        script = Path(shutil.copy(SCRIPT, tmp_path))
        if bug:
            replace_in(script, *bug)
        output.unlink(missing_ok=True)
        args = (saved / "run", "--stride", 20, "--output", output)
        files = [str(stderr), *[os.devnull] * (world_size - 1)]
        options = {"script": str(script), "stderr_file": files, "plant": speak_at_once}
        return Ranks(world_size, args, **options).finish()

    assert not any(start_ranks())
    found = json.loads(output.read_text())
    for key in ("loss", "perplexity", "bits_per_byte"):
        assert found[key] == pytest.approx(expected[key], rel=1e-6)
    for key in ("tokens", "scored_tokens", "bytes"):
        assert found[key] == expected[key]
    assert found["ranks"] == world_size
    assert not any(start_ranks(*MEAN_OF_MEANS))
    assert json.loads(output.read_text())["loss"] != pytest.approx(expected["loss"], rel=1e-6)
    assert start_ranks(*ANOTHER_CHECKPOINT) == [2] * world_size
    sentence = r"Rank 1 on \S+ has model step 9 of it, rank 0 on \S+ has step 8 of it: give --step,"
    assert re.match(sentence, stderr.read_text().splitlines()[-1])


# --- another tokenizer ---


@pytest.mark.ci
def test_a_tokenizer_that_was_made_again_is_refused(
    evaluate, refuse, run_main, train, saved, tmp_path
):
    """It has as many tokens as the run's own, in the same folder, but other ones.

    A copy of the run's own is accepted elsewhere. A checkpoint of an earlier version, which knows
    no tokenizer, is read and resumed.
    """
    letters = save_letters(tmp_path / "letters", "abcdefgh \n")
    own = shutil.copytree(letters, tmp_path / "own")
    args = ["-d", saved / "table.csv", "--text-column", "body", "--tokenizer-name", letters]
    args += ["-s", 32, "--global-batch-size", 6, "--max-steps", 2, "--log-freq", 1]
    losses = train(*args)
    run = tmp_path / "run"
    save_letters(letters, "hgfedcba \n")
    generate, export = ROOT / "01-single-gpu/generate.py", ROOT / "04-fsdp/export.py"
    uses = [(SCRIPT, ()), (generate, ("-p", "abc")), (export, (tmp_path / "model",))]
    for script, options in uses:
        assert "was trained with another tokenizer than" in refuse(script, run, *options)
    out, _ = run_main(generate, run, "-p", "abc", "--tokenizer-name", own)
    assert out.startswith("a b c ")
    (file,) = run.glob("checkpoints/*/settings.json")
    settings = json.loads(file.read_text())
    assert len(settings["sources"].pop("tokenizer_checksum")) == 16
    file.write_text(json.dumps(settings))
    run_main(generate, run, "-p", "abc")
    save_letters(letters, "abcdefgh \n")
    assert train(*args) == losses, "it is complete, and nothing is repeated"


# --- parts of a text ---


@pytest.mark.nightly
def test_parts_and_other_tokens(evaluate, saved):
    parts = {split: evaluate("run", "--split", split)[0] for split in ("train", "evaluation")}
    both, _ = evaluate("run", "--split", "all")
    for key in ("tokens", "scored_tokens", "bytes"):
        assert both[key] == sum(facts[key] for facts in parts.values())
    expected = sum(len(text) + 1 for text in texts_of(saved, "train"))  # 1: the end
    assert parts["train"]["tokens"] == expected
    losses = sum(facts["loss"] * facts["scored_tokens"] for facts in parts.values())
    assert both["loss"] * both["scored_tokens"] == pytest.approx(losses, rel=1e-6)
    shutil.copytree(saved / "run", saved / "changed")
    file = saved / "changed/checkpoints/step-00000004/settings.json"
    settings = json.loads(file.read_text()) | {"dataset_checksum": "of other tokens"}
    file.write_text(json.dumps(settings))
    _, first_line = evaluate("changed")
    assert ", which gave the run other tokens: the text or the tokenizer has changed" in first_line


# --- tokenizers that begin each text with a token, as those of Gemma and Llama 3 do ---


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
@pytest.mark.parametrize("begin", ["<begin>", "<end>"])
def test_a_model_whose_tokenizer_begins_each_text(evaluate, saved, begin):
    """The token is before each document, or before the first one if it also ends documents.

    It is not scored. A run has trained without it. All other tokens count once, with their context;
    "h" is unknown.
    """
    folder = save_letters(saved / begin[1:-1], "abcdefg \n", begin)
    model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.1, generator=generator)
    model.eval().save_pretrained(folder)
    tokenizer, tokens, bare = models.load_tokenizer(str(folder)), [], []
    for text in texts_of(saved, "evaluation"):
        ids = [*tokenizer(text)["input_ids"], 0]
        assert tokenizer.decode(ids[0]) == begin
        tokens += ids[1:] if tokens and begin == "<end>" else ids
        bare += ids[1:]
    args = ("-d", saved / "table.csv", "--text-column", "body", "-s", 32, "--stride", 20)
    facts, first_line = evaluate(folder.name, *args)
    assert first_line.endswith(f"; each document begins with {begin}, as the tokenizer says")
    losses = zip(losses_of(model, tokens, 32, 20), tokens[1:], strict=True)
    losses = [loss for loss, token in losses if begin == "<end>" or token != tokens[0]]
    assert (facts["tokens"], facts["scored_tokens"]) == (len(bare), len(losses))
    assert facts["unknown"] == bare.count(tokenizer.unk_token_id) > 10
    assert facts["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    save_run(saved / f"{folder.name}-run", model, 4, str(folder))
    own, first_line = evaluate(f"{folder.name}-run", *args)
    losses = losses_of(model, bare, 32, 20)
    assert own["scored_tokens"] == len(losses) and "begins" not in first_line
    assert own["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert own["loss"] != pytest.approx(facts["loss"], rel=1e-6)


@pytest.mark.nightly
def test_bad_input(refuse, saved, tmp_path):
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 9)
    for args, sentence in (
        (("--stride", 33), "--stride 33 would leave out tokens: give at most 32."),
        (("-s", 129), "The model has 128 positions: --seq-length 129"),
        (("-d", tmp_path / "chats.jsonl"), "has no text column 'text': no column is text."),
    ):
        assert sentence in refuse(SCRIPT, saved / "run", *args)

"""What a model writes: the tokens that it says, whatever the batch, the cache and the folder."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from helpers import ROOT, first_then_nightly, save_run, unreadable
from runner import load_script
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from common import launch
from common.errors import RunError
from common.inputs import models

from trained_model import load_trained

SCRIPT = ROOT / "01-single-gpu/generate.py"
NAMES = ["gpt2-tiny", "llama-tiny"]
PROMPTS = ["def", "", "    for name in sorted(names):  # of several tokens", "class Reader:", "x"]
GREEDY = ("--temperature", "0")
DRAWN = ("--temperature", "1", "--top-k", "0", "--seed", "3")


def random_model(name: str) -> PreTrainedModel:
    """Return a model that does not just repeat itself, and comes to an end now and then."""
    model = AutoModelForCausalLM.from_config(models.load_config(name))
    generator = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        std = 1.0 if parameter.dim() == 1 and not key.endswith("bias") else 0.1
        nn.init.normal_(parameter.data, std=std, generator=generator)
    model.lm_head.weight.data[0] *= {"gpt2-tiny": 8, "llama-tiny": 2}[name]  # the end's
    return model.eval()


@pytest.fixture(scope="module")
def saved(make_folder) -> Path:
    """Return a folder with runs, weights, a classifier, and prompts.

    In step 5, the weights of the runs had the other sign. "begins" has a tokenizer that begins each
    text with a token.
    """
    folder = make_folder("saved")
    for name in NAMES:
        model = random_model(name)
        for step in (5, 7):
            for parameter in model.parameters():
                parameter.data.neg_()
            save_run(folder / name, model, step, name)
    model, tokenizer = random_model("gpt2-tiny"), models.load_tokenizer("gpt2-tiny")
    for each in (model, tokenizer):
        each.save_pretrained(folder / "weights")
    begin = (tokenizer.bos_token, tokenizer.bos_token_id)
    begins = TemplateProcessing(f"{tokenizer.bos_token} $A", special_tokens=[begin])
    tokenizer.backend_tokenizer.post_processor = begins
    for each in (model, tokenizer):
        each.save_pretrained(folder / "begins")
    save_run(folder / "begins-run", model, 7, str(folder / "begins"))
    model.config.architectures = ["GPT2ForSequenceClassification"]
    model.config.save_pretrained(folder / "classifier")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


@pytest.fixture
def ask(run_main, saved, tmp_path):
    """Return a function that returns the facts of each text; by default of all prompts."""

    def run(name: str, *args: object, plant: Callable = lambda script: None) -> list[dict]:
        output = tmp_path / "texts.jsonl"
        prompts = () if "-p" in args else ("--prompts", saved / "prompts.txt")
        run_main(SCRIPT, saved / name, *prompts, "--output", output, *args, plant=plant)
        lines = output.read_text().splitlines()
        output.unlink()
        return [json.loads(line) for line in lines]

    return run


def likeliest(name: str, prompt: str, count: int, begin: bool = False) -> str:
    """Return a greedy text by one forward pass of the whole text for each token."""
    model, tokenizer = random_model(name), models.load_tokenizer(name)
    ids = tokenizer(prompt)["input_ids"]
    ids = [tokenizer.bos_token_id] * begin + ids or [tokenizer.eos_token_id]
    for _ in range(count):
        with torch.no_grad():
            token = model(torch.tensor([ids])).logits[0, -1].argmax().item()
        if token == tokenizer.eos_token_id:
            break
        ids.append(token)
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", first_then_nightly(NAMES))
def test_greedy_texts_are_those_of_the_model(name, ask, monkeypatch):
    """Many prompts padded to one length, with the cache, against one at a time without either."""
    facts = ask(name, *GREEDY)
    expected = [likeliest(name, prompt, 64) for prompt in PROMPTS]
    assert [each["text"] for each in facts] == expected
    assert [each["prompt"] for each in facts] == PROMPTS
    counts = [each["new_tokens"] for each in facts]
    assert len(set(expected)) == len(PROMPTS) and max(counts) > 1 and min(counts) < 64
    monkeypatch.setattr(DynamicCache, "update", None)
    assert ask(name, *GREEDY, "--no-cache") == facts
    with pytest.raises(TypeError):
        ask(name, *GREEDY)


@pytest.mark.ci
def test_prompts_begin_as_the_tokenizer_begins_texts(ask):
    """Those of a model, but not those of a run, which has trained without the token."""
    args = (*GREEDY, "--max-new-tokens", 12)
    for name, begin in (("begins", True), ("begins-run", False)):
        expected = [likeliest("gpt2-tiny", prompt, 12, begin) for prompt in PROMPTS]
        assert [each["text"] for each in ask(name, *args)] == expected
    assert expected != [likeliest("gpt2-tiny", prompt, 12, True) for prompt in PROMPTS]


@pytest.mark.check
def test_a_chat_begins_once(saved):
    """Its template has the token; the tokenizer would add it again."""
    trained = load_trained(str(saved / "begins"), None, None, None)
    tokenizer = trained.tokenizer
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "def"}], tokenize=False)
    assert tokenizer(rendered)["input_ids"][:2] == [trained.begin] * 2
    ids = load_script(SCRIPT).encode_prompt("def", trained, chat=True)
    assert ids == [trained.begin, *tokenizer("def", add_special_tokens=False)["input_ids"]]


# --- what ends a text ---

END, TURN = 4159, 4100  # of a tokenizer with 4098 tokens


def write_chat_model(folder: Path, words: list[int], stops: int | list[int]) -> Path:
    """Write a model that always says these tokens, one after the other.

    stops: what generation_config.json says. The tokenizer has a gap in its ids: the end-of-text
    token is END, and a turn of a chat can end with TURN.
    """
    models.load_tokenizer("gpt2-tiny").save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    added, vocabulary = content["added_tokens"], content["model"]["vocab"]
    for name, number in (("<turn>", TURN), ("<end>", END)):
        vocabulary[name] = number
        added.append(added[0] | {"content": name, "id": number})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = "<end>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = models.load_config("gpt2-tiny")
    config.vocab_size, config.eos_token_id, config.tie_word_embeddings = END + 1, END, False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    embedding = model.transformer.wte.weight.data
    for name, parameter in model.named_parameters():  # only the last token decides
        if ".h." in name or ".wpe." in name or name == "lm_head.weight":
            parameter.data.zero_()
    last = models.load_tokenizer(str(folder)).encode("\n")[-1]  # of each prompt
    for before, after in pairwise([last, *words]):
        model.lm_head.weight.data[after] = embedding[before]
    model.generation_config = GenerationConfig(eos_token_id=stops)
    model.save_pretrained(folder)
    return folder


@pytest.mark.check
@pytest.mark.parametrize(
    ("words", "stops"),
    [([7, END, 9], END), ([7, TURN, 9], [END, TURN]), ([7, TURN, 9], TURN)],
    ids=["a gap before the end", "the end of a turn", "another end"],
)
def test_a_text_stops_at_each_end(ask, tmp_path, words, stops):
    """Of a folder and of a run that started from it; the end tokens are no part of the text."""
    folder = write_chat_model(tmp_path / "model", words, stops)
    tokenizer = models.load_tokenizer(str(folder))
    assert len(tokenizer) == 4098 and tokenizer.eos_token_id == END
    model = models.load_pretrained(str(folder), models.load_config(str(folder), tokenizer))
    save_run(tmp_path / "run", model, 7, str(folder))
    for trained in ("model", "run"):
        for args in (("--chat", "-p", "def"), ("-p", "def\n")):
            (found,) = ask(tmp_path / trained, *args, *GREEDY, "--max-new-tokens", 3)
            assert found["new_tokens"] == 1, (trained, args)
    assert found["text"] == "def\n" + tokenizer.decode(7)


def no_mask(script) -> None:
    pad = script.pad
    script.pad = lambda rows: (pad(rows)[0], torch.ones_like(pad(rows)[1]))


def pad_with_the_end(script) -> None:
    pad = script.pad
    script.pad = lambda rows: (pad(rows)[0] * pad(rows)[1], pad(rows)[1])  # its id is 0


@pytest.mark.nightly
def test_a_batch_gives_the_texts_of_one_at_a_time(ask, monkeypatch):
    """Also with a penalty that counts padding, as that of transformers 5.17 does."""
    create = RepetitionPenaltyLogitsProcessor.__init__
    monkeypatch.setattr(
        RepetitionPenaltyLogitsProcessor,
        "__init__",
        lambda self, penalty, **options: create(self, penalty),
    )
    args = ("gpt2-tiny", *GREEDY, "--repetition-penalty", 4)
    single = ask(*args, "-b", 1)
    assert any(each["new_tokens"] < 64 for each in single), "one comes to its end"
    assert ask(*args, "-b", 5) == ask(*args, "-b", 2) == single
    for plant in (no_mask, pad_with_the_end):
        assert ask(*args, "-b", 5, plant=plant) != single, plant


def test_a_run_and_its_folder_write_the_same(ask):
    """The seed and the step decide; of one token to draw from, it is the most likely one."""
    short = ("-p", "def", "--max-new-tokens", 12)
    greedy, drawn = ask("gpt2-tiny", *short, *GREEDY), ask("gpt2-tiny", *short, *DRAWN)
    assert ask("weights", *short, *GREEDY) == greedy
    assert ask("weights", *short, *DRAWN) == drawn
    for args in (("--seed", 4), ("--step", 5)):
        assert ask("gpt2-tiny", *short, *DRAWN, *args) != drawn, args
    for args in (("--top-k", 1), ("--top-p", 1e-6), ("--temperature", 1e-3)):
        assert ask("gpt2-tiny", *short, *DRAWN, *args) == greedy, args
    assert len({each["text"] for each in ask("gpt2-tiny", *short, *DRAWN, "-n", 3)}) == 3


@pytest.mark.check
def test_what_is_printed(run_main, saved):
    """Lines of stdin are prompts; several texts have titles."""
    run, short = saved / "gpt2-tiny", ("--max-new-tokens", 3)
    together, said = run_main(SCRIPT, run, *GREEDY, *short, stdin="def\n\nclass Reader:")
    prompts = ("def", "", "class Reader:")
    single = [run_main(SCRIPT, run, *GREEDY, *short, "-p", prompt)[0] for prompt in prompts]
    titles = [f"--- sample 1 of {prompt!r}\n" for prompt in prompts]
    assert together == "".join(chain(*zip(titles, single, strict=True)))
    names = "(model gpt2-tiny, tokenizer gpt2-tiny)"
    assert said == f"step 7 of {run} {names}; greedy: always the most likely token\n"
    out, _ = run_main(SCRIPT, run, "-p", "def", "-n", 2, *short)
    assert out.startswith("--- sample 1 of 'def'\ndef") and "\n--- sample 2 of 'def'\ndef" in out


@pytest.mark.check
def test_a_terminal_that_has_no_umlauts(saved):
    """As on a cluster's node without a locale, or on Windows. The others are shown as numbers."""
    words = [sys.executable, SCRIPT, saved / "gpt2-tiny", *GREEDY, "--max-new-tokens", 1]
    latin = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    asked = [*map(str, words), "--prompt", "Straße: 5 €"]
    done = subprocess.run(asked, env=latin, capture_output=True, check=True)
    assert done.stdout.startswith(b"Stra\xdfe: 5 \\u20ac")


@pytest.mark.check
def test_a_run_of_another_user_that_may_not_be_read(saved):
    """Its folder, the folder of a checkpoint, or a file."""
    run = saved / "gpt2-tiny"
    for secret in ("", "checkpoints/step-00000007", "checkpoints/step-00000007/__0_0.distcp"):
        with unreadable(run / secret), pytest.raises((RunError, PermissionError)) as error:
            load_trained(str(run), None, None, None)
        sentence, status = launch._explain(error.value)
        assert str(run / secret) in sentence and "ermission" in sentence and status == 2


NAMED = [{"name": name, "template": "{{ messages[0].content }}"} for name in ("rag", "tool_use")]


@pytest.mark.check
def test_chat_templates_without_a_default(refuse, saved, tmp_path):
    folder = tmp_path / "tokenizer"
    models.load_tokenizer("gpt2-tiny").save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    config = folder / "tokenizer_config.json"
    for templates, sentence in (
        (NAMED, f"{folder} has several chat templates (rag, tool_use) and no default: leave"),
        ([], f"{folder} has no chat template: leave out --chat"),
    ):
        content = json.loads(config.read_text()) | {"chat_template": templates}
        config.write_text(json.dumps(content))
        said = refuse(SCRIPT, saved / "gpt2-tiny", "--chat", "--tokenizer-name", folder, "-p", "x")
        assert sentence in said


@pytest.mark.nightly
def test_bad_input(refuse, saved, tmp_path):
    run, text = saved / "gpt2-tiny", "word of " * 40
    room = 128 - len(models.load_tokenizer("gpt2-tiny")(text)["input_ids"])
    (tmp_path / "latin.txt").write_bytes(b"Stra\xdfe")
    (tmp_path / "thesis").write_text("the only copy")
    for args, sentence in (
        ((tmp_path / "nope",), f"There is no nope in {tmp_path}: give another folder."),
        ((saved,), "neither a run's folder with a complete checkpoint nor a model's folder"),
        ((saved / "classifier",), "classifier is a classifier, not a language model"),
        (("gpt2-tiny",), "The preset gpt2-tiny has no weights: give a run's folder"),
        ((run, "-m", "llama-tiny"), "give the run's own -m and --tokenizer-name."),
        ((run, "--step", 3), "keeps no checkpoint of step 3: give one of 5, 7."),
        ((saved / "weights", "--step", 3), "leave out --step."),
        ((run, "-p", text), f"128 positions: give --max-new-tokens {room} or less."),
        ((run, *GREEDY, "-n", 2), "--temperature 0 always gives the same text"),
        ((run, "--prompts", tmp_path / "latin.txt"), "Cannot read the prompts ('utf-8' codec"),
        ((run, "--output", tmp_path / "thesis"), "thesis already exists"),
        ((run, "--output", tmp_path / "nope/texts.jsonl"), "cannot be written"),
    ):
        assert sentence in refuse(SCRIPT, *args, stdin="def\n")

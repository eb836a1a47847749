"""What a model writes: the tokens that it says, whatever the batch, the cache and the folder."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import helpers
import pytest
import torch
from helpers import ROOT, first_then_nightly
from runner import load_script
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from common import checkpoint, launch, models

SCRIPT = ROOT / "01-single-gpu/generate.py"
NAMES = ["gpt2-tiny", "llama-tiny"]
PROMPTS = ["def", "", "    for name in sorted(names):  # of several tokens", "class Reader:", "x"]
DRAWN = ("--temperature", "1", "--top-k", "0", "--seed", "3")
SAMPLINGS = {"greedy": ("--temperature", "0"), "drawn": DRAWN}


def random_model(name: str) -> PreTrainedModel:
    """Return a model that does not just repeat itself, and comes to an end now and then."""
    model = AutoModelForCausalLM.from_config(models.load_config(name))
    generator = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        std = 1.0 if parameter.dim() == 1 and not key.endswith("bias") else 0.1
        nn.init.normal_(parameter.data, std=std, generator=generator)
    model.lm_head.weight.data[0] *= {"gpt2-tiny": 8, "llama-tiny": 2}[name]  # the end's
    return model.eval()


def save_run(run_dir: Path, name: str, model: nn.Module, step: int = 7) -> None:
    settings = {"model": checkpoint.describe_model(model), "seq_length": 32}
    settings |= {"param_dtype": "float32"}
    settings["sources"] = {"model_name": name, "tokenizer_name": None}
    helpers.save_run(run_dir, model, step, settings)


@pytest.fixture(scope="module")
def saved(make_folder) -> Path:
    """Return a folder with a run of each model and one of its weights, and a file of prompts."""
    folder = make_folder("saved")
    for name in NAMES:
        model = random_model(name)
        save_run(folder / name, name, model)
        model.save_pretrained(folder / f"{name}-folder")
        models.load_tokenizer(name).save_pretrained(folder / f"{name}-folder")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


@pytest.fixture
def generate(monkeypatch, capfd):
    """Return a function that runs the script in this process and returns (stdout, stderr)."""

    def run(*args: object, stdin: str = "", plant: Callable = lambda script: None) -> tuple:
        script = load_script(SCRIPT)
        plant(script)
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capfd.readouterr()
        script.main()
        return capfd.readouterr()

    return run


@pytest.fixture
def ask(generate, saved, tmp_path):
    """Return a function that returns the facts of each text."""

    def run(name: str, *args: object, **options: object) -> list[dict]:
        output = tmp_path / "texts.jsonl"
        generate(saved / name, "--output", output, *args, **options)
        lines = output.read_text().splitlines()
        output.unlink()
        return [json.loads(line) for line in lines]

    return run


def likeliest(name: str, prompt: str, count: int) -> str:
    """Return a greedy text by one forward pass of the whole text for each token."""
    model, tokenizer = random_model(name), models.load_tokenizer(name)
    ids = tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id]
    for _ in range(count):
        with torch.no_grad():
            token = model(torch.tensor([ids])).logits[0, -1].argmax().item()
        if token == tokenizer.eos_token_id:
            break
        ids.append(token)
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", first_then_nightly(NAMES))
def test_greedy_texts_are_those_of_the_model(name, ask, saved):
    """Many prompts padded to one length, with the cache, against one at a time without either."""
    facts = ask(name, "--prompts", saved / "prompts.txt", "--temperature", 0)
    expected = [likeliest(name, prompt, 64) for prompt in PROMPTS]
    assert [each["text"] for each in facts] == expected
    assert [each["prompt"] for each in facts] == PROMPTS
    counts = [each["new_tokens"] for each in facts]
    assert len(set(expected)) == len(PROMPTS) and max(counts) > 1 and min(counts) < 64


def restart_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant: each new token is at position 0, where the tokens before it come from the cache."""
    prepare = GenerationMixin.prepare_inputs_for_generation

    def wrong(self, *args: object, **kwargs: object) -> dict:
        inputs = prepare(self, *args, **kwargs)
        if inputs["input_ids"].shape[1] == 1:
            inputs["position_ids"] = torch.zeros_like(inputs["position_ids"])
        return inputs

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_the_cache_changes_no_text(name, sampling, ask, saved, monkeypatch):
    args = (name, "--prompts", saved / "prompts.txt", "--max-new-tokens", 40, *SAMPLINGS[sampling])
    asked, made = [], PreTrainedModel.__call__

    def note(self, *args: object, **kwargs: object) -> object:
        if hasattr(self, "lm_head"):  # the whole model, not the part below
            asked.append(kwargs["input_ids"].shape[1])
        return made(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "__call__", note)
    with_cache = ask(*args)
    assert asked[0] > 1 and set(asked[1:]) == {1}, "one token a step"
    asked.clear()
    assert ask(*args, "--no-cache") == with_cache
    assert asked == list(range(asked[0], asked[0] + len(asked))), "all tokens in each step"
    restart_positions(monkeypatch)
    assert ask(*args) != with_cache


def no_mask(script) -> None:
    pad = script.pad
    script.pad = lambda rows: (pad(rows)[0], torch.ones_like(pad(rows)[1]))


def pad_on_the_right(script) -> None:
    pad = script.pad

    def wrong(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = pad([row[::-1] for row in rows])
        return ids.flip(1), mask.flip(1)

    script.pad = wrong


def pad_with_the_end(script) -> None:
    pad = script.pad
    script.pad = lambda rows: (pad(rows)[0] * pad(rows)[1], pad(rows)[1])  # its id is 0


def attention_of_training(script) -> None:
    PreTrainedModel.set_attn_implementation = lambda self, name: None


@pytest.mark.nightly
@pytest.mark.parametrize("name", first_then_nightly(NAMES))
def test_a_batch_gives_the_texts_of_one_at_a_time(name, ask, saved, monkeypatch):
    args = (name, "--prompts", saved / "prompts.txt", "--temperature", 0)
    args += ("--repetition-penalty", 1.5)
    single = ask(*args, "-b", 1)
    assert any(each["new_tokens"] < 64 for each in single), "one comes to its end"
    assert ask(*args, "-b", 5) == ask(*args, "-b", 2) == single
    # SavedCheckpoint by monkeypatch, which puts it back after the plants.
    monkeypatch.setattr(
        PreTrainedModel, "set_attn_implementation", PreTrainedModel.set_attn_implementation
    )
    for plant in (no_mask, pad_on_the_right, attention_of_training):
        assert ask(*args, "-b", 5, plant=plant) != single, plant


@pytest.mark.nightly
@pytest.mark.parametrize("name", first_then_nightly(NAMES))
def test_padding_is_no_text_for_the_penalty(name, ask, saved, monkeypatch):
    """Also where it counts all ids of a row, as that of transformers 5.17 does."""
    args = (name, "--prompts", saved / "prompts.txt", "--temperature", 0)
    args += ("--repetition-penalty", 4)
    single = ask(*args, "-b", 1)
    create = RepetitionPenaltyLogitsProcessor.__init__
    monkeypatch.setattr(
        RepetitionPenaltyLogitsProcessor,
        "__init__",
        lambda self, penalty, **options: create(self, penalty),
    )
    assert ask(*args, "-b", 5) == single
    assert ask(*args, "-b", 5, plant=pad_with_the_end) != single


@pytest.mark.parametrize("name", first_then_nightly(NAMES))
def test_a_run_and_its_folder_write_the_same(name, ask):
    short = ("-p", "def", "--max-new-tokens", 12)
    for args in SAMPLINGS.values():
        texts = ask(name, *short, *args)
        assert ask(f"{name}-folder", *short, *args) == texts
    assert ask(name, *short, *DRAWN[:-1], "4") != texts, "the seed decides"
    assert len({each["text"] for each in ask(name, *short, *DRAWN, "-n", 3)}) == 3


@pytest.mark.nightly
def test_what_is_drawn_from(ask):
    """Each argument leaves the tokens that it should, by the probabilities of the model."""
    model, tokenizer = random_model("gpt2-tiny"), models.load_tokenizer("gpt2-tiny")
    ids = tokenizer("def")["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    order = logits.argsort(descending=True)
    texts = [tokenizer.decode([*ids, token], skip_special_tokens=True) for token in order.tolist()]

    def draw(*args: object) -> set[str]:
        first = ("-p", "def", "--max-new-tokens", 1, "-n", 300, "-b", 300)
        return {each["text"] for each in ask("gpt2-tiny", *first, *args)}

    assert draw("--temperature", 5, "--top-k", 4) == set(texts[:4])
    shares = (logits[order] / 0.5).softmax(0).cumsum(0)
    nucleus = set(texts[: int((shares < 0.6).sum()) + 1])
    drawn = draw("--temperature", 0.5, "--top-k", 0, "--top-p", 0.6)
    assert drawn <= nucleus and len(drawn) > 1
    assert not draw("--temperature", 5, "--top-k", 0) <= nucleus


def other_model(name: str) -> PreTrainedModel:
    model = random_model(name)
    for parameter in model.parameters():
        parameter.data.neg_()
    return model


@pytest.mark.nightly
def test_newest_checkpoint_and_another_one(generate, tmp_path):
    save_run(tmp_path / "run", "gpt2-tiny", random_model("gpt2-tiny"), 3)
    args = (tmp_path / "run", "-p", "def", "--temperature", 0)
    old = generate(*args)
    names = "(model gpt2-tiny, tokenizer gpt2-tiny)"
    assert old.err == f"step 3 of {tmp_path}/run {names}; greedy: always the most likely token\n"
    save_run(tmp_path / "run", "gpt2-tiny", other_model("gpt2-tiny"), 5)
    new = generate(*args)
    assert new.err.startswith("step 5 of ") and new.out != old.out
    assert generate(*args, "--step", 3) == old


@pytest.mark.nightly
def test_lines_of_stdin(generate, saved):
    run = saved / "gpt2-tiny"
    together = generate(run, "--temperature", 0, stdin="def\n\nclass Reader:").out
    one_by_one = [
        generate(run, "--temperature", 0, "-p", p).out for p in ("def", "", "class Reader:")
    ]
    assert together == "".join(one_by_one) and together.startswith("def")
    assert generate(run).out == "", "nothing asked, nothing said"
    twice = generate(run, *DRAWN, "--max-new-tokens", 9, stdin="def\ndef\n").out
    (once, again) = twice.removeprefix("def").split("\ndef", 1)
    assert once != again.rstrip("\n"), "a line that comes twice gets another text"
    assert generate(run, *DRAWN, "--max-new-tokens", 9, stdin="def\ndef\n").out == twice


@pytest.mark.check
def test_several_texts_have_titles(generate, saved):
    out = generate(saved / "gpt2-tiny", "-p", "def", "-n", 2, "--max-new-tokens", 3).out
    assert out.startswith("--- sample 1 of 'def'\ndef") and "\n--- sample 2 of 'def'\ndef" in out


@pytest.fixture
def refuse(generate, monkeypatch, capfd):
    """Return a function that expects a refusal and returns its one sentence."""

    def run(*args: object) -> str:
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO("def\n"))
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            launch.run(load_script(SCRIPT).main)
        out, err = capfd.readouterr()
        assert exit_.value.code == 2 and not out, err
        *said, sentence = err.splitlines()
        assert all(line.startswith("step 7 of ") for line in said) and sentence.endswith("."), err
        return sentence

    return run


@pytest.mark.nightly
def test_bad_input(refuse, saved, tmp_path):
    run, text = saved / "gpt2-tiny", "word of " * 40
    assert refuse(tmp_path / "nope") == f"There is no nope in {tmp_path}: give another folder."
    assert "There is no model at '/no/such/run'" in refuse("/no/such/run")
    assert "neither a run's folder with a complete checkpoint (it has no state.json)" in refuse(
        saved
    )
    assert "The preset gpt2-tiny has no weights: give a run's folder" in refuse("gpt2-tiny")
    assert "another model than llama-tiny: give -m" in refuse(run, "-m", "llama-tiny")
    assert "keeps no checkpoint of step 3: give one of 7" in refuse(run, "--step", 3)
    assert "leave out --step" in refuse(saved / "gpt2-tiny-folder", "--step", 3)
    length = len(models.load_tokenizer("gpt2-tiny")(text)["input_ids"])
    assert refuse(run, "-p", text) == (
        f"The prompt {text[:30]!r} has {length} tokens and the model has 128 positions: "
        f"give --max-new-tokens {128 - length} or less."
    )
    assert refuse(run, "-p", text * 4).endswith("the model has 128 positions: shorten the prompt.")
    greedy = ("-p", "", "--temperature", 0)
    assert "--temperature 0 always gives the same text" in refuse(run, *greedy, "-n", 2)
    assert "nope.txt cannot be read ([Errno 2]" in refuse(run, "--prompts", tmp_path / "nope.txt")
    (tmp_path / "latin.txt").write_bytes(b"Stra\xdfe")
    assert "cannot be read ('utf-8' codec" in refuse(run, "--prompts", tmp_path / "latin.txt")
    (tmp_path / "thesis").write_text("the only copy")
    assert "thesis already exists" in refuse(run, "--output", tmp_path / "thesis")
    assert "cannot be written" in refuse(run, "--output", tmp_path / "nope/texts.jsonl")
    (tmp_path / "prompts").write_text(f"def\n{text}\n")
    refuse(run, "--prompts", tmp_path / "prompts", "--output", tmp_path / "texts.jsonl")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"latin.txt", "thesis", "prompts"}, "and no file with nothing in it"
    assert (tmp_path / "thesis").read_text() == "the only copy"


@pytest.mark.check
def test_a_classifier_is_refused(refuse, tmp_path):
    config = models.load_config("gpt2-tiny")
    config.architectures = ["GPT2ForSequenceClassification"]
    config.save_pretrained(tmp_path)
    assert refuse(tmp_path) == (
        f"{tmp_path} is a classifier, not a language model: give another folder."
    )

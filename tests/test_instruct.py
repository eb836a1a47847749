"""Instruction tuning, a diff of chapter 2: the loss is the mean over the global batch's answers.

The diff is applied to a copy of the script. The same losses on 1, 2 and 3 ranks, for all
micro-batches; the tuned model answers, also after an export, through the chat template.
"""

import argparse
import contextlib
import csv
import dataclasses
import functools
import json
import random
import shutil
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from datasets import Dataset
from helpers import (
    ROOT,
    assert_exact,
    first_then_nightly,
    go_back_to,
    patch,
    read_metrics,
    register,
    run_script,
)
from runner import RunsByRanks
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import models
from common.cli import RunError
from common.data import IGNORED

import conversations
from conversations import Conversations, as_messages, encode, load_conversations, pack

CHAPTER = "02-ddp"
DIFF = ROOT / CHAPTER / "instruct.diff"
STEPS, MIDDLE, LEARNT_STEPS = 20, 10, 60
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi"}


def write_table(path: Path, rows: list[tuple[str, str]], head=("question", "answer")) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path


def questions(count: int) -> list[tuple[str, str]]:
    """Return questions with answers of 1 or 12 words, which say how often a word is repeated."""
    words, numbers = ["self", "return", "import", "class", "for", "while"], random.Random(0)
    pairs = [(numbers.choice(words), numbers.choice((1, 1, 1, 12))) for _ in range(count)]
    return [(f"{i}: {word} {n} times", " ".join([word] * n)) for i, (word, n) in enumerate(pairs)]


# --- the training ---


def label_all_tokens(messages: list, tokenizer: object) -> tuple[list[int], list[int]]:
    input_ids, _ = encode(messages, tokenizer)
    return input_ids, [IGNORED, *input_ids[1:]]


@contextlib.contextmanager
def prepared(plant: dict[str, object], copied: tuple[Path, Path] | None) -> Iterator[None]:
    """Run with names of conversations.py replaced, and with a copy of a run as it was."""
    if copied is not None:
        shutil.copytree(*copied)
        go_back_to(MIDDLE, copied[1])
    with contextlib.ExitStack() as stack:
        for name, value in plant.items():
            stack.enter_context(mock.patch.object(conversations, name, value))
        yield


@dataclasses.dataclass(frozen=True)
class Run:
    """A training. replaced: (right, wrong) texts in the script. plant: in conversations.py.
    source: the run, one before it on as many ranks, that this one goes on with from MIDDLE."""

    world_size: int
    args: tuple[object, ...]
    replaced: tuple[tuple[str, str], ...] = ()
    plant: dict[str, object] = dataclasses.field(default_factory=dict)
    source: str | None = None


LOSS = "ddp_model(**batch, num_items_in_batch=answer_tokens).loss * world_size"
OF_MICRO_BATCH = ((LOSS, "ddp_model(**batch).loss / accumulation"),)
COUNTED = "            dist.all_reduce(answer_tokens)\n"
OF_RANK = ((COUNTED, "            answer_tokens = answer_tokens * world_size\n"),)
for bug in (OF_MICRO_BATCH, OF_RANK):
    register("02-ddp/instruct.diff", bug)
DROPOUT = ("-m", "dropout", "-b", 1)
RUNS = {
    "1-b6": Run(1, ("-b", 6)),
    "1-b2": Run(1, ("-b", 2)),
    "1-llama": Run(1, ("-b", 6, "-m", "llama")),
    "1-mask": Run(1, ("-b", 6), plant={"encode": label_all_tokens}),
    "1-messages": Run(1, ("-b", 6, "-d", "messages.jsonl")),
    "1-learnt": Run(
        1,
        ("-d", "capitals.csv", "--text-column", "country,capital", "-m", "gpt2-tiny"),
    ),
    "2-b3": Run(2, ("-b", 3)),
    "2-b1": Run(2, ("-b", 1)),
    "2-llama": Run(2, ("-b", 1, "-m", "llama")),
    "2-of-rank": Run(2, ("-b", 3), OF_RANK),
    "2-of-micro-batch": Run(2, ("-b", 3), OF_MICRO_BATCH),
    "2-straight": Run(2, DROPOUT),
    "2-resumed": Run(2, DROPOUT, source="2-straight"),
    "3-b1": Run(3, ("-b", 1)),
}
PAIRS = (
    *(("1-b6", "2-b1"), ("1-b6", "1-b2"), ("1-b6", "2-b3"), ("1-b6", "3-b1")),
    *(("1-llama", "2-llama"), ("1-b6", "1-messages")),
)


class Runs(RunsByRanks):
    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        super().__init__(folder, {name: RUNS[name] for name in names})
        for name, preset, changes in (
            ("gpt2", "gpt2-tiny", {"n_embd": 32}),
            ("dropout", "gpt2-tiny", {"n_embd": 32, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
            ("llama", "llama-tiny", {"hidden_size": 32, "head_dim": 16, "intermediate_size": 64}),
        ):
            config = json.loads((ROOT / f"common/presets/{preset}/config.json").read_text())
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config | changes))
        write_table(folder / "qa.csv", questions(900))
        write_table(folder / "capitals.csv", 50 * [*CAPITALS.items()], ("country", "capital"))
        messages = [json.dumps({"messages": as_messages(*pair)}) for pair in questions(900)]
        (folder / "messages.jsonl").write_text("\n".join(messages))

    def flags(self, name: str) -> list[object]:
        steps = LEARNT_STEPS if name == "1-learnt" else STEPS
        args = ["-m", "gpt2", "-d", "qa.csv", *RUNS[name].args]
        local = [self.folder / arg if (self.folder / str(arg)).exists() else arg for arg in args]
        return [
            *("--tokenizer-name", "gpt2-tiny", "-s", 48, "--global-batch-size", 6, "--lr", 1e-2),
            *("--max-steps", steps, "--log-freq", 1, "--eval-freq", STEPS, "--warmup-steps", 5),
            *("--ckpt-freq", MIDDLE, "--keep-checkpoints", 9, "--save-dir", self.folder),
            *("-e", name, *local),
        ]

    def options(self, name: str) -> dict[str, object]:
        run = RUNS[name]
        chapter = str(patch(CHAPTER, self.folder / f"{name}-script", run.replaced, DIFF))
        copied = (self.folder / run.source, self.folder / name) if run.source else None
        within = [
            functools.partial(prepared, run.plant, None if rank else copied)
            for rank in range(run.world_size)
        ]
        return {"args": self.flags(name), "chapter": chapter, "within": within}

    def numbers(self, name: str) -> list[float]:
        """Return all losses and norms of a run, and the last evaluation."""
        metrics = read_metrics(self[name])
        found = [line[key] for line in metrics for key in ("loss", "grad_norm")]
        return [*found, metrics[-1]["eval_loss"]]


@pytest.fixture(scope="module")
def runs(request, make_folder) -> Runs:
    """All runs, or those of the one pair that is compared outside of the nightly tier."""
    chosen = [item for item in request.session.items if item.path == request.path]
    nightly = any(item.get_closest_marker("nightly") for item in chosen)
    return Runs(make_folder("runs"), RUNS if nightly else PAIRS[0])


def assert_same(expected: list[float], found: list[float], rel: float = 1e-5) -> None:
    assert found == pytest.approx(expected, rel=rel), "the losses differ"


@pytest.mark.ci
@pytest.mark.parametrize(("name", "other"), first_then_nightly(PAIRS))
def test_the_same_losses_for_all_ranks_and_micro_batches(runs, name, other):
    losses = [line["loss"] for line in read_metrics(runs[name])]
    assert len(losses) == STEPS and losses[-1] < losses[0] / 1.5, "it learns, so weights matter"
    found = [line["loss"] for line in read_metrics(runs[other])]
    assert_same(losses, found)
    # A norm in a steep part of the training is less exact than a loss.
    assert_same(runs.numbers(name), runs.numbers(other), rel=1e-3)


@pytest.mark.parametrize("bug", ["2-of-micro-batch", "2-of-rank", "1-mask"])
def test_planted_mean_of_means_or_loss_on_questions(runs, bug):
    """A micro-batch or a rank divides by its own number of answer tokens."""
    with pytest.raises(AssertionError, match="the losses differ"):
        assert_same(runs.numbers("1-b6"), runs.numbers(bug), rel=1e-3)


@pytest.mark.nightly
def test_a_resumed_run_is_exact(runs):
    straight, resumed = runs["2-straight"], runs["2-resumed"]
    assert_exact(straight, resumed)
    assert len(read_metrics(straight)) == STEPS


@pytest.mark.nightly
def test_model_answers_also_after_an_export(runs, tmp_path):
    """Planted: a prompt that does not go through the chat template."""
    run = runs["1-learnt"]
    generate = ("01-single-gpu/generate.py", run, "--temperature", 0, "--max-new-tokens", 8)
    for country, capital in list(CAPITALS.items())[:2]:
        done = run_script(*generate, "--chat", "-p", country)
        assert (done.returncode, done.stdout) == (0, f"{capital}\n"), done.stderr
    done = run_script(*generate, "-p", country)
    assert done.returncode == 0 and done.stdout != f"{country}{capital}\n"
    done = run_script("04-fsdp/export.py", run, tmp_path / "model")
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for country, capital in CAPITALS.items():
        messages = [{"role": "user", "content": country}]
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        prompt = tokenizer.apply_chat_template(messages, **options)
        tokens = model.generate(**prompt, do_sample=False, max_new_tokens=8, pad_token_id=0)
        answer = tokens[0, prompt["input_ids"].shape[1] :]
        assert answer[-1] == tokenizer.eos_token_id, "the answer does not end"
        assert tokenizer.decode(answer, skip_special_tokens=True) == capital


# --- tokens, labels, sequences ---


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer("gpt2-tiny")


TALK = [
    {"role": "system", "content": "Be brief."},
    *as_messages("What is 1 + 1?", "It is 2."),
    *as_messages("And 2 + 2?", "4"),
    {"role": "user", "content": "Thanks."},
]


def answers_of(messages: list, tokenizer: object, encoder=encode) -> str:
    input_ids, labels = encoder(messages, tokenizer)
    assert len(input_ids) == len(labels)
    labelled = [(i, label) for i, label in zip(input_ids, labels, strict=True) if label != IGNORED]
    assert all(i == label for i, label in labelled)
    return tokenizer.decode([i for i, _ in labelled])


@pytest.mark.check
def test_only_answers_and_their_ends_have_labels(tokenizer):
    """Planted: labels for all tokens."""
    assert answers_of(TALK, tokenizer) == "It is 2.<|endoftext|>4<|endoftext|>"
    assert "What is" in answers_of(TALK, tokenizer, label_all_tokens)


@pytest.mark.check
def test_prompt_has_the_tokens_with_which_generation_starts(tokenizer):
    messages = as_messages("What is it?", "    an answer that begins with spaces")
    input_ids, labels = encode(messages, tokenizer)
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert prompt == "user:\nWhat is it?\nassistant:\n"
    assert input_ids[: labels.count(IGNORED)] == tokens


@pytest.mark.check
def test_pack_has_each_conversation_once(tokenizer):
    encoded = [encode(as_messages(*pair), tokenizer) for pair in questions(200)]
    rows = pack(encoded, 48)
    assert rows.shape[1:] == (3, 48) and len(rows) < len(encoded) / 1.5
    found = []
    for input_ids, labels, positions in rows.tolist():
        starts = [i for i, position in enumerate(positions) if position == 0] + [48]
        for start, end in pairwise(starts):
            assert positions[start:end] == list(range(end - start))
            if set(labels[start:end]) != {IGNORED}:
                found.append((input_ids[start:end], labels[start:end]))
    assert sorted(found) == sorted(encoded)
    data = Conversations(rows, "", 1.0)
    other = rows.clone()
    other[0, 1, 0] = 7
    assert Conversations(other, "", 1.0).digest != data.digest, "so that no run resumes with it"
    padded = data.sample(5).pad_to_multiple(4)
    assert len(padded) == 8
    assert [(item["labels"] == IGNORED).all().item() for item in padded] == 5 * [False] + 3 * [True]


@pytest.mark.check
@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-tiny"])
def test_attention_does_not_cross_conversations(preset, tokenizer):
    """Planted: positions that do not begin again, and the chapter's own attention."""
    config = models.load_config(preset)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation("sdpa")  # as the diff does
    encoded = [encode(as_messages(*pair), tokenizer) for pair in questions(6)]
    rows = pack(encoded, 128)
    batch = Conversations(rows, "", 1.0)[0]
    input_ids, positions = batch["input_ids"][None], batch["position_ids"][None]
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    assert len(starts) > 2
    parts = zip(starts, [*starts[1:], 128], strict=True)
    with torch.no_grad():
        alone = [model(input_ids=input_ids[:, a:b]).logits[0] for a, b in parts]
        expected = torch.cat(alone)
        found = model(input_ids=input_ids, position_ids=positions).logits[0]
        crossing = [model(input_ids=input_ids).logits[0]]
        model.set_attn_implementation(models.causal_attention(config))
        crossing.append(model(input_ids=input_ids, position_ids=positions).logits[0])
    assert torch.allclose(found, expected, atol=1e-4)
    assert not any(torch.allclose(each, expected, atol=1e-2) for each in crossing)


@pytest.mark.nightly
def test_built_in_example(tokenizer):
    args = argparse.Namespace(dataset_name="python-stdlib", dataset_subset=None, text_column=None)
    train, evaluation = load_conversations(args, tokenizer, 128)
    assert len(train) > 1000 and len(evaluation) > 20
    assert evaluation.prompt.startswith("user:\n") and evaluation.prompt.endswith("assistant:\n")
    assert 0.1 < evaluation.tokens_per_byte < 1
    texts = [set(tokenizer.batch_decode(part.rows[:, 0])) for part in (train, evaluation)]
    assert not texts[0] & texts[1]
    args.text_column = "question,answer"
    with pytest.raises(RunError, match="python-stdlib is no table: leave out"):
        load_conversations(args, tokenizer, 128)


# --- bad input ---


@pytest.mark.nightly
def test_bad_input_ends_in_one_sentence(tmp_path):
    """All three in the script: a missing column, an answer that does not fit, no chat template."""
    rows = [*questions(40), ("a question", "word " * 60)]
    table = write_table(tmp_path / "qa.csv", rows)
    plain = shutil.copytree(ROOT / "common/presets/tokenizer", tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    script = patch(CHAPTER, tmp_path / "script", diff=DIFF) / "train_llm.py"
    shutil.copy(ROOT / CHAPTER / "conversations.py", script.parent)
    for arguments, sentence in (
        (["--text-column", "question,reply"], "has no column 'reply': give --text-column QUESTION"),
        (["-s", 48], "do not fit in 48 tokens (the longest has"),
        (["--tokenizer-name", plain], "has no chat template: give --tokenizer-name a folder"),
    ):
        found = run_script(
            *(script, "-d", table, "--save-dir", tmp_path, "-e", "run", "--max-steps", 1),
            *arguments,
        )
        assert found.returncode == 2 and "Traceback" not in found.stderr, found.stderr
        last = found.stderr.splitlines()[-1]
        assert sentence in last and last.endswith("."), found.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.check
@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ({"question": ["a"], "reply": ["b"]}, "no column 'answer': .* from: question, reply"),
        ({"question": ["a", "b"], "answer": ["c", " "]}, "Row 2 of .* is no conversation"),
        ({"question": ["a", "b"], "answer": ["c", None]}, "Row 2 of .* is no conversation"),
        ({"question": ["a"], "answer": ["b"]}, "has only one conversation: give at least two"),
        ({"messages": ["hello"]}, "Row 1 of .* is no conversation"),
        ({"messages": [[{"role": "user", "content": "a"}]]}, "Row 1 of .* is no conversation"),
        ({"messages": [[{"from": "human", "value": "a"}]]}, "Row 1 of .* is no conversation"),
    ],
)
def test_bad_tables(rows, sentence, tmp_path):
    path = tmp_path / "table.parquet"
    Dataset.from_dict(rows).to_parquet(path)
    args = argparse.Namespace(dataset_name=str(path), dataset_subset=None, text_column=None)
    with pytest.raises(RunError, match=sentence) as error:
        load_conversations(args, None, 128)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.check
def test_bad_templates(tokenizer, tmp_path):
    folder = shutil.copytree(ROOT / "common/presets/tokenizer", tmp_path / "tokenizer")
    for template, sentence in {
        "{{ raise_exception('no system message') }}": r"does not accept .* \(no system message\)",
        "{{ messages[-1].content }}": "changes earlier messages when later ones follow",
        "{% for %}": "does not accept",
    }.items():
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(RunError, match=sentence) as error:
            encode(TALK, models.load_tokenizer(str(folder)))
        assert "\n" not in str(error.value)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RunError, match="has no chat template: give --tokenizer-name"):
        encode(TALK, models.load_tokenizer(str(folder)))

"""Instruction tuning, a variant of chapters 2 to 5: the mean loss of a global batch's answers.

The same losses in each chapter on 1, 2 and 3 ranks, for all micro-batches; the tuned model answers,
also after an export, through the chat template.
"""

import argparse
import json
import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers.decoders
import torch
from datasets import Dataset
from helpers import (
    CHAPTERS,
    ROOT,
    Ladder,
    Run,
    assert_same_losses,
    first_then_nightly,
    float32,
    register,
    run_script,
)
from runner import load_script
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.trainers import BpeTrainer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from common.data import IGNORED
from common.errors import RunError
from common.inputs import models
from conversations import (
    Conversations,
    as_messages,
    encode,
    keep_apart,
    load_conversations,
    mixes_conversations,
    pack,
)

CHAPTER = "02-ddp"
COLUMNS = ("question", "answer")
INSTRUCT = ("instruct",)
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi"}


def questions(count: int) -> list[tuple[str, str]]:
    """Return questions with answers of 1 or 12 words, which say how often a word is repeated."""
    words, numbers = ["self", "return", "import", "class", "for", "while"], random.Random(0)
    pairs = [(numbers.choice(words), numbers.choice((1, 1, 1, 12))) for _ in range(count)]
    return [(f"{i}: {word} {n} times", " ".join([word] * n)) for i, (word, n) in enumerate(pairs)]


# --- the training ---

# Each bug: (right, wrong) texts in the variant's script.
LOSS = "ddp_model(**batch, num_items_in_batch=answer_tokens).loss * world_size"
OF_MICRO_BATCH = ((LOSS, "ddp_model(**batch).loss / accumulation"),)
DATA = "train_data, eval_data = load_conversations(args, tokenizer)\n"
ALL_TOKENS = ((DATA, f"{DATA}    train_data.rows[:, 1] = train_data.rows[:, 0]\n"),)
BUGS = {"mean of means": OF_MICRO_BATCH, "loss on questions": ALL_TOKENS}
for bug in BUGS.values():
    register(CHAPTER, bug, INSTRUCT)


def make_ladder(folder: Path, columns: tuple[str, str], rows: list[tuple[str, str]]) -> Ladder:
    """Return a ladder with these rows as the data."""
    ladder = Ladder(folder, length=48, model="gpt2-narrow")
    write_table(folder / "corpus.json", columns, rows)
    return ladder


def write_table(path: Path, columns: tuple[str, str], rows: list[tuple[str, str]]) -> Path:
    path.write_text(json.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
    return path


def train(
    ladder: Ladder, world_size: int, *args: object, replaced: tuple = (), chapter: str = CHAPTER
) -> str:
    """Return the name of a run of the variant."""
    args = (*float32(chapter), *args)
    return ladder.run(Run(chapter, world_size, args, replaced, variants=INSTRUCT))


@pytest.fixture(scope="module")
def ladder(make_folder) -> Ladder:
    return make_ladder(make_folder("ladder"), COLUMNS, questions(900))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("chapter", "world_size"),
    first_then_nightly([(CHAPTER, 2), (CHAPTER, 3), *((chapter, 2) for chapter in CHAPTERS[2:])]),
)
def test_the_same_losses_for_all_ranks_and_micro_batches(ladder, chapter, world_size):
    expected = ladder.metrics(train(ladder, 1, "-b", 24))
    assert expected[-1]["loss"] < expected[0]["loss"] - 1, "it learns, so weights matter"
    found = train(ladder, world_size, "-b", 1, chapter=chapter)
    assert_same_losses(expected, ladder.metrics(found))


@pytest.mark.parametrize("bug", BUGS)
def test_planted_mean_of_means_or_loss_on_questions(ladder, bug):
    expected = ladder.metrics(train(ladder, 1, "-b", 24))
    found = ladder.metrics(train(ladder, 2, "-b", 6, replaced=BUGS[bug]))
    with pytest.raises(AssertionError, match="the loss differ"):
        assert_same_losses(expected, found)


@pytest.mark.nightly
def test_model_answers_also_after_an_export(tmp_path):
    """Planted: a prompt that does not go through the chat template."""
    ladder = make_ladder(tmp_path, ("country", "capital"), 50 * [*CAPITALS.items()])
    args = ("-m", "gpt2-tiny", "--text-column", "country,capital", "--global-batch-size", 6)
    run = tmp_path / train(ladder, 1, *args, "--max-steps", 60, "--warmup-steps", 5, "--lr", 1e-2)
    done = run_script("04-fsdp/export.py", run, tmp_path / "model")
    assert done.returncode == 0, done.stderr
    greedy = ("--temperature", 0, "--max-new-tokens", 8, "-p")
    for model in (run, tmp_path / "model"):
        for country, capital in list(CAPITALS.items())[:2]:
            done = run_script("01-single-gpu/generate.py", model, "--chat", *greedy, country)
            assert (done.returncode, done.stdout) == (0, f"{capital}\n"), done.stderr
    done = run_script("01-single-gpu/generate.py", run, *greedy, country)
    assert done.returncode == 0 and done.stdout != f"{country}{capital}\n"


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


@pytest.mark.check
def test_the_tokenizer_is_known(tokenizer, tmp_path):
    table = write_table(tmp_path / "table.json", COLUMNS, questions(9))
    names = {"dataset_name": str(table), "dataset_subset": None, "text_column": None}
    for part in load_conversations(argparse.Namespace(**names, seq_length=48), tokenizer):
        assert part.tokenizer_checksum == models.tokenizer_checksum(tokenizer)


@pytest.mark.check
def test_only_answers_and_their_ends_have_labels(tokenizer):
    input_ids, labels = encode(TALK, tokenizer)
    labelled = [(i, label) for i, label in zip(input_ids, labels, strict=True) if label != IGNORED]
    assert all(i == label for i, label in labelled)
    answers = tokenizer.decode([i for i, _ in labelled])
    assert answers == "It is 2.<|endoftext|>4<|endoftext|>"


@pytest.mark.check
def test_the_name_of_a_special_token_is_text(tokenizer):
    """Those of the chat template are control tokens, which end an answer.

    The tokens of a chat's prompt are those of the training, up to the answer.
    """
    end = tokenizer.eos_token
    prompt, answer = f"What is {end}{end}?", f"    {end} ends\na text: {end}"
    input_ids, labels = encode(as_messages(prompt, answer), tokenizer)
    assert tokenizer.decode(input_ids) == f"user:\n{prompt}\nassistant:\n{answer}{end}"
    assert input_ids.index(tokenizer.eos_token_id) == len(input_ids) - 1
    assert tokenizer.decode([each for each in labels if each != IGNORED]) == f"{answer}{end}"
    generate = load_script(ROOT / "01-single-gpu/generate.py")
    trained = argparse.Namespace(tokenizer=tokenizer, begin=None)
    asked = generate.encode_prompt(prompt, trained, chat=True)
    assert asked == input_ids[: labels.count(IGNORED)]
    assert generate.encode_prompt(end, trained, chat=False) == [tokenizer.eos_token_id]
    plain = as_messages("What is it?", "It is\nthis.")
    rendered = tokenizer.apply_chat_template(plain, tokenize=False)
    assert encode(plain, tokenizer)[0] == tokenizer.encode(rendered)


def sentencepiece(spaces: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that writes a space in front of a text, as Llama 2 and Mistral have it.

    spaces: where it does so: at the "first" text only, or also "after" each special token.
    """
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if spaces == "first":
        made.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
    else:
        made.normalizer = Sequence([Prepend("\u2581"), Replace(" ", "\u2581")])
    special = ["<unk>", "<s>", "</s>", *byte_tokens]
    trainer = BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    made.train_from_iterator([message["content"] for message in TALK] * 9, trainer)
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), ByteFallback(), Fuse()]
    )
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names, chat_template=ZEPHYR)


ZEPHYR = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""


@pytest.mark.check
@pytest.mark.parametrize("spaces", ["first", "after"])
def test_answers_of_a_tokenizer_that_adds_a_space_to_a_text(spaces):
    """The tokens are those of the complete text: an answer alone would begin with a space."""
    tokenizer = sentencepiece(spaces)
    generate = load_script(ROOT / "01-single-gpu/generate.py")
    trained = argparse.Namespace(tokenizer=tokenizer, begin=None)
    expected = tokenizer.apply_chat_template(TALK[:-1], tokenize=True)["input_ids"]
    input_ids, labels = encode(TALK, tokenizer)
    assert input_ids == expected
    assert all(label in (i, IGNORED) for i, label in zip(input_ids, labels, strict=True))
    answers = tokenizer.decode([label for label in labels if label != IGNORED])
    gap = " " if spaces == "after" else ""  # between </s> and the line's end
    assert answers == f"It is 2.</s>{gap}\n4</s>{gap}\n"
    # A message with names of special tokens, and the prompt of a chat with the trained model.
    prompt, answer = "What is </s></s>? <s>", "It is </s>."
    input_ids, labels = encode(as_messages(prompt, answer), tokenizer)
    end = tokenizer.eos_token_id
    assert input_ids.count(end) == 2 and tokenizer.bos_token_id not in input_ids
    answer_ids = [label for label in labels if label != IGNORED]
    assert tokenizer.decode(answer_ids) == f"{answer}</s>{gap}\n" and answer_ids.count(end) == 1
    asked = generate.encode_prompt(prompt, trained, chat=True)
    assert asked == input_ids[: len(asked)] and set(labels[: len(asked)]) == {IGNORED}
    assert labels[len(asked)] != IGNORED
    assert tokenizer.decode(asked).lstrip() == f"<|user|>\n{prompt}</s>{gap}\n<|assistant|>\n"


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
    data = Conversations(rows, 1.0)
    other = rows.clone()
    other[0, 1, 0] = 7
    assert Conversations(other, 1.0).digest != data.digest, "so that no run resumes with it"
    padded = data.sample(5).pad_to_multiple(4)
    assert len(padded) == 8
    assert [(item["labels"] == IGNORED).all().item() for item in padded] == 5 * [False] + 3 * [True]


@pytest.mark.check
@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-tiny"])
def test_attention_does_not_cross_conversations(preset, tokenizer):
    """Planted: the chapter's own attention."""
    config = models.load_config(preset)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    keep_apart(model, model)
    encoded = [encode(as_messages(*pair), tokenizer) for pair in questions(6)]
    rows = pack(encoded, 128)
    batch = Conversations(rows, 1.0)[0]
    input_ids, positions = batch["input_ids"][None], batch["position_ids"][None]
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    assert len(starts) > 2
    parts = zip(starts, [*starts[1:], 128], strict=True)
    with torch.no_grad():
        alone = [model(input_ids=input_ids[:, a:b]).logits[0] for a, b in parts]
        expected = torch.cat(alone)
        found = model(input_ids=input_ids, position_ids=positions).logits[0]
        model.set_attn_implementation(models.causal_attention(config))
        crossing = model(input_ids=input_ids, position_ids=positions).logits[0]
    assert mixes_conversations(model) and not model.training
    assert torch.allclose(found, expected, atol=1e-4)
    assert not torch.allclose(crossing, expected, atol=1e-2)


# By type: whether conversations in a sequence mix, and what a small model needs.
SMALL = dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers"), 4)
MIXES = {
    "gemma2": (False, {"head_dim": 4, "num_key_value_heads": 2, "intermediate_size": 8}),
    "qwen3": (False, {"head_dim": 4, "num_key_value_heads": 2, "intermediate_size": 8}),
    "qwen3_moe": (False, {"head_dim": 4, "num_key_value_heads": 2, "num_experts": 8}),
    "opt": (True, {"ffn_dim": 8, "word_embed_proj_dim": 4}),
    "bloom": (True, {}),
    "xglm": (True, {"d_model": 4, "attention_heads": 2, "num_layers": 2, "ffn_dim": 8}),
    "biogpt": (True, {"intermediate_size": 8}),
    # With transformers 5.24, its mask does not depend on the positions.
    "gpt_oss": (True, {"head_dim": 4, "num_key_value_heads": 2, "intermediate_size": 8}),
}


@pytest.mark.check
@pytest.mark.parametrize("kind", MIXES)
def test_models_that_mix_conversations_are_refused(kind, tmp_path):
    """Those without SDPA keep their own attention."""
    mixes, sizes = MIXES[kind]
    CONFIG_MAPPING[kind](**SMALL, **sizes, vocab_size=64).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = models.load_config(str(tmp_path))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    if mixes:
        with pytest.raises(RunError, match=f"Models of the type {kind} mix .* Gemma 2\\.$"):
            keep_apart(model, model)
    else:
        keep_apart(model, model)
        found = model.config._attn_implementation
        assert found == ("eager" if kind == "gemma2" else "sdpa") and model.training


def load(name: str, tokenizer: object) -> tuple[Conversations, Conversations]:
    names = {"dataset_name": str(name), "dataset_subset": None, "text_column": None}
    return load_conversations(argparse.Namespace(**names, seq_length=128), tokenizer)


@pytest.mark.check
def test_messages_are_the_same_as_questions_and_answers(tokenizer, tmp_path):
    table = write_table(tmp_path / "qa.json", COLUMNS, questions(90))
    messages = [json.dumps({"messages": as_messages(*pair)}) for pair in questions(90)]
    (tmp_path / "messages.jsonl").write_text("\n".join(messages))
    parts = zip(load(table, tokenizer), load(tmp_path / "messages.jsonl", tokenizer), strict=True)
    assert all(torch.equal(one.rows, other.rows) for one, other in parts)


@pytest.mark.nightly
def test_built_in_example(tokenizer):
    train, evaluation = load("python-stdlib", tokenizer)
    assert len(train) > 1000 and len(evaluation) > 20
    assert 0.1 < evaluation.tokens_per_byte < 1
    texts = [set(tokenizer.batch_decode(part.rows[:, 0])) for part in (train, evaluation)]
    assert not texts[0] & texts[1]


# --- bad input ---

ANSWER_FIRST = as_messages("a", "b")[::-1] + as_messages("c", "d")[1:]
BAD_TABLES = [
    ({"question": ["a"], "reply": ["b"]}, "no column 'answer': .* from: question, reply"),
    ({"question": ["a", "b"], "answer": ["c", " "]}, "Row 2 of .* is no conversation"),
    ({"question": ["a"], "answer": ["b"]}, "has only one conversation: give at least two"),
    ({"messages": [[{"role": "user", "content": "a"}]]}, "Row 1 of .* is no conversation"),
    ({"messages": [[{"from": "human", "value": "a"}]]}, "Row 1 of .* is no conversation"),
    ({"messages": [as_messages("a", "b"), ANSWER_FIRST]}, "Row 2 of .* begins with an answer"),
    (
        {"question": ["a", "b", "c"], "answer": ["d", "e", "word " * 200]},
        r"do not fit in 128 tokens \(the longest has",
    ),
]


@pytest.mark.check
def test_bad_tables(tokenizer, tmp_path):
    for number, (rows, sentence) in enumerate(BAD_TABLES):
        path = tmp_path / f"table-{number}.parquet"
        Dataset.from_dict(rows).to_parquet(path)
        with pytest.raises(RunError, match=f"{sentence}.*\\.$"):
            load(path, tokenizer)


# As Gemma's template does.
NO_SYSTEM = """\
{%- if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}
{%- for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"""


@pytest.mark.check
def test_a_row_that_the_template_refuses(tmp_path):
    folder = shutil.copytree(ROOT / "common/inputs/presets/tokenizer", tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(NO_SYSTEM)
    rows = [as_messages(f"{i}", "b") for i in range(40)] + [TALK]
    Dataset.from_dict({"messages": rows}).to_parquet(tmp_path / "talk.parquet")
    with pytest.raises(
        RunError, match=r"Row 41 of .* cannot be rendered .*: System role not supported.*\.$"
    ):
        load(tmp_path / "talk.parquet", models.load_tokenizer(str(folder)))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content + messages[0].name }}")
    with pytest.raises(RunError, match=r"Row 1 of .* cannot be rendered .*\.$"):
        load(tmp_path / "talk.parquet", models.load_tokenizer(str(folder)))


# As those of Llama 3.2 and GPT-OSS do.
TODAY = """\
{%- if strftime_now is defined %}{{ strftime_now("%d %b %Y") }}{% endif %}
{{- strftime_now( '%Y-%m-%d' ) }}
{%- for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"""


@pytest.mark.check
def test_a_run_has_the_same_tokens_on_the_next_day(tmp_path):
    """So it can resume then. A chat with the trained model has the same date."""
    folder = shutil.copytree(ROOT / "common/inputs/presets/tokenizer", tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(TODAY)
    tokenizer = models.load_tokenizer(str(folder))
    input_ids, _ = encode(as_messages("a", "b"), tokenizer)
    end = tokenizer.eos_token
    assert tokenizer.decode(input_ids) == f"26 Jul 20242024-07-26a{end}b{end}"
    generate = load_script(ROOT / "01-single-gpu/generate.py")
    asked = generate.encode_prompt("a", argparse.Namespace(tokenizer=tokenizer), chat=True)
    assert asked == input_ids[: len(asked)]


@pytest.mark.check
def test_bad_templates(tokenizer, tmp_path):
    folder = shutil.copytree(ROOT / "common/inputs/presets/tokenizer", tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(RunError, match="changes earlier messages when later ones follow"):
        encode(TALK, models.load_tokenizer(str(folder)))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RunError, match="has no chat template: give --tokenizer-name"):
        encode(TALK, models.load_tokenizer(str(folder)))

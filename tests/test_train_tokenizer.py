"""Tokenizers of three kinds: what they know, what is reported of them, and models for them."""

import json
import random
import re
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers import ROOT, write_corpus
from runner import load_script
from transformers import PreTrainedTokenizerFast

from common.errors import RunError
from common.inputs import models
from common.inputs.documents import Documents, is_held_out

SCRIPT = ROOT / "01-single-gpu/train_tokenizer.py"


@pytest.fixture(scope="module")
def corpus(make_folder) -> Path:
    """Return a JSON array of 200 documents."""
    rng, texts = random.Random(0), []
    words = [f"word{n}" for n in range(300)]
    weights = [1 / (n + 1) for n in range(300)]
    for n in range(200):
        drawn = (f"{w}{rng.choice(' ,.(')} " for w in rng.choices(words, weights, k=80))
        texts.append(f"def {''.join(drawn)}\n\n    return\t{n}\n")
    path = make_folder("corpus") / "texts.json"
    path.write_text(json.dumps(texts))
    return path


def split(corpus: Path) -> tuple[list[str], list[str]]:
    """Return the texts for training and for evaluation."""
    texts = json.loads(corpus.read_text())
    held_out = [text for text in texts if is_held_out(text)]
    assert 3 < len(held_out) < 30
    return [text for text in texts if not is_held_out(text)], held_out


# --- what they know ---


def test_texts_come_back(run_main, corpus, tmp_path):
    """All that the vocabulary knows, with its spaces, tabs and newlines; of bytes, every text."""
    for kind in ("bpe", "word", "character"):
        run_main(SCRIPT, tmp_path / kind, "-d", corpus, "--kind", kind, "--min-frequency", 1)
        tokenizer = models.load_tokenizer(str(tmp_path / kind))
        train, held_out = split(corpus)
        texts = train if kind == "word" else [*train, *held_out]
        if kind == "bpe":
            rng = random.Random(0)
            texts = [*texts, "".join(chr(rng.randrange(32, 0xD800)) for _ in range(2000))]
        for text in texts:
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
        assert tokenizer.unk_token_id == (None if kind == "bpe" else 1)
        unknown = tokenizer("\u0e01\u0e02 \u0e03")["input_ids"]  # Thai, which stands nowhere
        assert (1 in unknown) == (kind != "bpe")


def test_scripts_without_spaces_are_split_into_characters():
    """A run of Han characters is not one word; Latin words beside them are."""
    tokenizer = load_script(SCRIPT).train("word", 100, 1, iter(["深度学习, GPU 的"]))
    assert tokenizer.tokenize("深度学习, GPU 的") == [*"深度学习,", " GPU", " ", "的"]


def test_text_without_spaces_takes_no_longer():
    """Such as DNA. Without the cut, this takes minutes, and each letter more takes longer."""
    letters = "".join(random.Random(0).choices("ACGT", k=300_000))
    start = time.process_time()
    tokenizer = load_script(SCRIPT).train("bpe", 1000, 2, iter([letters]))
    assert time.process_time() - start < 60
    ids = tokenizer(letters[:5000])["input_ids"]
    assert len(tokenizer) == 1000 and len(ids) < 1500 and tokenizer.decode(ids) == letters[:5000]


# In Python's expressions there is no Han.
PIECES = {"word": r" ?\w+| ?[^\w\s]|\n+| +|\s", "character": r"[\s\S]"}


@pytest.mark.parametrize(("kind", "size", "least"), [("word", 150, 2), ("character", 18, 5)])
def test_report_is_what_one_counts_by_hand(run_main, corpus, tmp_path, kind, size, least):
    """The vocabulary has the most frequent pieces."""
    train, held_out = split(corpus)
    args = ("-d", corpus, "--kind", kind, "--vocab-size", size, "--min-frequency", least)
    said, _ = run_main(SCRIPT, tmp_path / "tokenizer", *args)
    counts = Counter(piece for text in train for piece in re.findall(PIECES[kind], text))
    kept = sorted((-count, piece) for piece, count in counts.items() if count >= least)
    vocabulary = [piece for _, piece in kept][: size - 2]
    tokenizer = models.load_tokenizer(str(tmp_path / "tokenizer"))
    assert tokenizer.convert_ids_to_tokens(range(2, len(tokenizer))) == vocabulary
    pieces = [piece for text in held_out for piece in re.findall(PIECES[kind], text)]
    unknown = [piece for piece in pieces if piece not in vocabulary]
    n_characters = sum(map(len, held_out))
    assert unknown and len("".join(pieces)) == n_characters
    assert f"{len(tokenizer):,} tokens, trained on {sum(map(len, train)):,} characters" in said
    assert f"{n_characters:,} other characters: {len(pieces) / n_characters:.3f} tokens" in said
    assert (
        f"covers {1 - len(''.join(unknown)) / n_characters:.2%} of these characters and "
        f"{1 - len(unknown) / len(pieces):.2%} of the tokens; {len(unknown):,} tokens are" in said
    )


def train_on_all(script) -> None:
    find = script.find_documents

    def find_with_leak(*names: str | None) -> Documents:
        key, read = find(*names)
        return Documents(key, lambda: (t for x in read() for t in {x, x._replace(held_out=False)}))

    script.find_documents = find_with_leak


def test_a_tokenizer_that_could_not_be_written_is_not_there(run_main, tmp_path, monkeypatch):
    """The next start of pipeline.sbatch would use a half of one."""
    save = PreTrainedTokenizerFast.save_pretrained

    def save_and_fail(tokenizer, folder: Path) -> None:
        save(tokenizer, folder)
        raise OSError(28, "No space left on device")

    corpus = write_corpus(tmp_path)
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", save_and_fail)
    with pytest.raises(OSError):
        run_main(SCRIPT, tmp_path / "tokenizer", "-d", corpus, "--kind", "word")
    assert not (tmp_path / "tokenizer").exists()


def test_it_learns_from_the_training_part_alone(run_main, tmp_path):
    """The planted bug learns the word that only texts for evaluation have."""
    texts = [f"text {n}" + " word" * 9 for n in range(200)]
    held_out = [t for t in (f"secret {n} secret" for n in range(200)) if is_held_out(t)]
    (tmp_path / "corpus.json").write_text(json.dumps([*texts, *held_out]))
    for name, plant in (("right", lambda script: None), ("leak", train_on_all)):
        args = ("-d", tmp_path / "corpus.json", "--kind", "word", "--min-frequency", 1)
        run_main(SCRIPT, tmp_path / name, *args, plant=plant)
        vocabulary = models.load_tokenizer(str(tmp_path / name)).get_vocab()
        assert ("secret" in vocabulary) == (name == "leak")
        assert " word" in vocabulary


# --- models for them ---


def many_characters(count: int):
    """Return a tokenizer of so many characters, and the two special tokens, as if loaded."""
    texts = ["".join(map(chr, range(0x20000, 0x20000 + count)))] * 2
    tokenizer = load_script(SCRIPT).train("character", 10**5, 1, iter(texts))
    assert len(tokenizer) == count + 2
    tokenizer.name_or_path = "my-tokenizer"
    return tokenizer


@pytest.mark.check
def test_a_preset_takes_size_and_end_of_text_of_the_tokenizer(tmp_path):
    """Smaller or larger. With its own tokenizer it stays, and so does a folder: of weights?"""
    for count, rows in ((62, 64), (63, 128), (5000, 5056)):
        assert models.load_config("gpt2-tiny", many_characters(count)).vocab_size == rows
    for name, size in (("gpt2-tiny", 4096), ("gpt2", 50304), ("llama-3.1-8b", 128256)):
        assert models.load_config(name, models.load_tokenizer(name)).vocab_size == size
    shutil.copytree(ROOT / "common/inputs/presets/gpt2-tiny", tmp_path / "model")
    folder = str(tmp_path / "model")
    assert models.load_config(folder, many_characters(62)).vocab_size == 4096
    with pytest.raises(RunError, match="5002 tokens and the model only 4096"):
        models.load_config(folder, many_characters(5000))
    tokenizer = many_characters(62)
    tokenizer.eos_token = chr(0x20000)
    config = models.load_config("llama-tiny", tokenizer)
    assert config.eos_token_id == tokenizer.eos_token_id > 1


# --- bad input ---


@pytest.mark.check
def test_bad_input(corpus, refuse, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("the only copy")
    short = tmp_path / "short.json"
    short.write_text('["too short"]')
    for target, args, expected in (
        ("mine", ("-d", corpus), "mine already exists"),
        ("new", ("-d", corpus, "--vocab-size", 256), "--vocab-size 256 is too small"),
        ("new", ("-d", short), "short.json is too short to hold text out"),
    ):
        assert expected in refuse(SCRIPT, tmp_path / target, *args)

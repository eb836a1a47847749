"""Tokenizers of three kinds: what they know, what is reported of them, and training with them."""

import json
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import ROOT, run_script
from runner import load_script
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import launch, models
from common.documents import is_held_out

SCRIPT = ROOT / "01-single-gpu/train_tokenizer.py"
KINDS = ("bpe", "word", "character")
STEPS = ["-s", 32, "--global-batch-size", 6, "--max-steps", 6, "--ckpt-freq", 2, "--log-freq", 1]
CHINESE = [
    "深度学习",
    "的",
    "模型",
    "在",
    "许多",
    "设备",
    "上",
    "训练",
    "每个",
    "进程",
    "数据",
    "求和",
]


def english(count: int) -> list[str]:
    rng = random.Random(0)
    words = [f"word{n}" for n in range(300)]
    weights = [1 / (n + 1) for n in range(300)]
    return [
        "def "
        + "".join(f"{w}{rng.choice(' ,.(')} " for w in rng.choices(words, weights, k=80))
        + f"\n\n    return\t{n}\n"
        for n in range(count)
    ]


def chinese(count: int) -> list[str]:
    rng = random.Random(0)
    return [
        "".join(rng.choices(CHINESE, k=40)) + f"。第{n}句, GPU {n % 7} 个。" for n in range(count)
    ]


@pytest.fixture(scope="module")
def corpora(make_folder) -> Path:
    """Return a folder with two JSON arrays of 200 documents, english.json and chinese.json."""
    folder = make_folder("corpora")
    for make in (english, chinese):
        texts = json.dumps(make(200), ensure_ascii=False)
        (folder / f"{make.__name__}.json").write_text(texts, encoding="utf-8")
    return folder


@pytest.fixture
def make(monkeypatch, capfd, tmp_path):
    """Return a function that runs the script and returns what it printed."""

    def run(*args: object, target: str = "tokenizer", plant=lambda script: None) -> str:
        script = load_script(SCRIPT)
        plant(script)
        argv = ["train_tokenizer.py", tmp_path / target, *args]
        monkeypatch.setattr(sys, "argv", [str(arg) for arg in argv])
        capfd.readouterr()
        script.main()
        return capfd.readouterr().out

    return run


def split(corpus: Path) -> tuple[list[str], list[str]]:
    """Return the texts for training and for evaluation."""
    texts = json.loads(corpus.read_text(encoding="utf-8"))
    held_out = [text for text in texts if is_held_out(text)]
    assert 3 < len(held_out) < 30
    return [text for text in texts if not is_held_out(text)], held_out


def reported(out: str) -> tuple[int, int, int, float, float, float, int]:
    """Return all numbers of the first three lines, the percentages as shares."""
    lines = out.splitlines()
    assert len(lines) == 4
    said = re.sub(r"^\S+ (byte-level BPE|words|characters)", "", "\n".join(lines[:3]))
    said = re.sub(r"of \S+\n", "\n", said)
    numbers = [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", said)]
    size, n_train, n_evaluation, per_character, characters, tokens, unknown = numbers
    return size, n_train, n_evaluation, per_character, characters / 100, tokens / 100, unknown


# --- what they know ---


def test_texts_come_back(make, corpora, tmp_path):
    """All that the vocabulary knows, with its spaces, tabs and newlines; of bytes, every text."""
    for name, kind in [(n, k) for n in ("english", "chinese") for k in KINDS]:
        folder = tmp_path / f"{name}-{kind}"
        options = ("--kind", kind, "--min-frequency", 1)
        make("-d", corpora / f"{name}.json", *options, target=folder.name)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        train, held_out = split(corpora / f"{name}.json")
        texts = train if kind == "word" else [*train, *held_out]
        if kind == "bpe":
            rng = random.Random(0)
            texts = [*texts, "".join(chr(rng.randrange(32, 0xD800)) for _ in range(2000))]
        for text in texts:
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert models.load_tokenizer(str(folder)).get_vocab() == tokenizer.get_vocab()
        assert len(tokenizer) <= 4096
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
        assert tokenizer.unk_token_id == (None if kind == "bpe" else 1)
        unknown = tokenizer("\u0e01\u0e02 \u0e03")["input_ids"]  # Thai, which stands nowhere
        assert (1 in unknown) == (kind != "bpe")


def expected_vocabulary(kind: str, texts: list[str], size: int, least: int) -> list[str]:
    """Return the most frequent pieces, counted by hand; in Python's expressions there is no Han."""
    pattern = r" ?\w+| ?[^\w\s]|\n+| +|\s" if kind == "word" else r"[\s\S]"
    counts = Counter(piece for text in texts for piece in re.findall(pattern, text))
    kept = sorted((-count, piece) for piece, count in counts.items() if count >= least)
    return [piece for _, piece in kept][: size - 2]


@pytest.mark.parametrize(("kind", "size", "least"), [("word", 150, 2), ("character", 18, 5)])
def test_report_is_what_one_counts_by_hand(make, corpora, tmp_path, kind, size, least):
    corpus = corpora / "english.json"
    train, held_out = split(corpus)
    options = ("--kind", kind, "--vocab-size", size, "--min-frequency", least)
    found = reported(make("-d", corpus, *options))
    vocabulary = expected_vocabulary(kind, train, size, least)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert tokenizer.convert_ids_to_tokens(range(2, len(tokenizer))) == vocabulary
    pattern = r" ?\w+| ?[^\w\s]|\n+| +|\s" if kind == "word" else r"[\s\S]"
    pieces = [piece for text in held_out for piece in re.findall(pattern, text)]
    unknown = [piece for piece in pieces if piece not in vocabulary]
    n_characters = sum(map(len, held_out))
    assert unknown and len("".join(pieces)) == n_characters
    assert found == (
        *(len(vocabulary) + 2, sum(map(len, train)), n_characters),
        pytest.approx(len(pieces) / n_characters, abs=5.1e-4),
        pytest.approx(1 - len("".join(unknown)) / n_characters, abs=5.1e-5),
        pytest.approx(1 - len(unknown) / len(pieces), abs=5.1e-5),
        len(unknown),
    )


@pytest.mark.nightly
def test_chinese_has_no_spaces(make, corpora, tmp_path):
    """A run of Han characters is not one word; Latin words beside them are."""
    found = {}
    for kind in ("word", "character"):
        out = make("-d", corpora / "chinese.json", "--kind", kind, target=kind)
        found[kind] = reported(out)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / kind)
        pieces = tokenizer.tokenize("深度学习, GPU 的")
        latin = [" GPU"] if kind == "word" else [" ", "G", "P", "U"]
        assert pieces[:5] == ["深", "度", "学", "习", ","] and pieces[5 : 5 + len(latin)] == latin
    assert found["character"][3] == 1 > found["word"][3] > 0.8
    assert all(0.97 < found[kind][4] <= 1 for kind in found)


def train_on_all(script) -> None:
    read = script.read_documents

    def leak(documents: object, held_out: bool) -> Iterator[str]:
        yield from read(documents, held_out=True)
        if not held_out:
            yield from read(documents, held_out=False)

    script.read_documents = leak


def test_it_learns_from_the_training_part_alone(make, tmp_path):
    """The planted bug learns the word that only texts for evaluation have."""
    texts = [f"text {n}" + " word" * 9 for n in range(200)]
    texts = [text.replace("word", "secret") if is_held_out(text) else text for text in texts]
    held_out = [text for text in texts if "secret" in text]
    texts = [t for t in texts if "secret" not in t] + [t for t in held_out if is_held_out(t)]
    extra = (f"secret {n} secret" for n in range(10**6))
    texts += [next(t for t in extra if is_held_out(t)) for _ in range(5)]
    (tmp_path / "corpus.json").write_text(json.dumps(texts))
    for name, plant in (("right", lambda script: None), ("leak", train_on_all)):
        args = ("-d", tmp_path / "corpus.json", "--kind", "word", "--min-frequency", 1)
        make(*args, target=name, plant=plant)
        vocabulary = AutoTokenizer.from_pretrained(tmp_path / name).get_vocab()
        assert ("secret" in vocabulary) == (name == "leak")
        assert " word" in vocabulary


# --- training with them ---


def test_chapter_1_trains_with_it_and_exports_it(make, corpora, train, tmp_path):
    """The rows of the embedding fit the tokenizer; the folder has both, and gives the same loss."""
    folder = tmp_path / "tokenizer"
    make("-d", corpora / "chinese.json", "--kind", "character")
    rows = -(-len(AutoTokenizer.from_pretrained(folder)) // 64) * 64
    assert rows < 256
    args = ["-d", corpora / "chinese.json", *STEPS, "--tokenizer-name", folder]
    alone = train(*args, name="alone")
    # Weights this small make all tokens about equally likely at first.
    assert alone[0]["loss"] == pytest.approx(torch.tensor(rows).log().item(), rel=0.1)
    done = run_script("04-fsdp/export.py", tmp_path / "alone", tmp_path / "model")
    assert f"alone (model gpt2-tiny, tokenizer {folder})\n" in done.stdout
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert exported.get_input_embeddings().num_embeddings == rows
    assert exported.get_output_embeddings().out_features == rows
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab().keys() == (
        AutoTokenizer.from_pretrained(folder).get_vocab().keys()
    )
    again = ["-d", corpora / "chinese.json", *STEPS[:4], "--max-steps", 1, "--lr", 0]
    (*_, metrics) = train(*again, "-m", tmp_path / "model", "--pretrained", name="again")
    assert metrics["eval_loss"] == pytest.approx(alone[-1]["eval_loss"], rel=1e-5)


def many_characters(count: int):
    """Return a tokenizer of so many characters, and the two special tokens, as if loaded."""
    texts = ["".join(map(chr, range(0x20000, 0x20000 + count)))] * 2
    tokenizer = load_script(SCRIPT).train("character", 10**5, 1, iter(texts))
    assert len(tokenizer) == count + 2
    tokenizer.name_or_path = "my-tokenizer"
    return tokenizer


@pytest.mark.check
def test_a_preset_takes_the_size_of_the_tokenizer(tmp_path):
    """Smaller or larger. With its own tokenizer it stays, and so does a folder: of weights?"""
    for count, rows in ((62, 64), (63, 128), (5000, 5056)):
        assert models.load_config("gpt2-tiny", many_characters(count)).vocab_size == rows
    for name, size in (("gpt2-tiny", 4096), ("gpt2", 50304), ("llama-3.1-8b", 128256)):
        assert models.load_config(name, models.load_tokenizer(name)).vocab_size == size
    tokenizer = many_characters(50_255)
    config = models.load_config("gpt2", tokenizer)
    assert (len(tokenizer), config.vocab_size) == (50_257, 50_304), "as with GPT-2's own"
    shutil.copytree(ROOT / "common/presets/gpt2-tiny", tmp_path / "model")
    folder = str(tmp_path / "model")
    assert models.load_config(folder, many_characters(62)).vocab_size == 4096
    with pytest.raises(models.RunError, match="5002 tokens and the model only 4096"):
        models.load_config(folder, many_characters(5000))


@pytest.mark.check
def test_a_preset_takes_the_end_of_text():
    tokenizer = many_characters(100)
    tokenizer.eos_token = chr(0x20000)
    config = models.load_config("llama-tiny", tokenizer)
    assert config.eos_token_id == tokenizer.eos_token_id > 1


# --- bad input ---


@pytest.fixture
def refuse(monkeypatch, capfd, tmp_path):
    """Return a function that expects a refusal and returns its one sentence."""

    def run(*args: object) -> str:
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            launch.run(load_script(SCRIPT).main)
        out, err = capfd.readouterr()
        assert exit_.value.code == 2 and not out, err
        assert sorted(tmp_path.rglob("*")) == before, "nothing was written, nothing lost"
        return err.splitlines()[-1]

    return run


@pytest.mark.nightly
def test_bad_input(refuse, corpora, tmp_path):
    corpus, target = corpora / "english.json", tmp_path / "tokenizer"
    assert "There is no data set at" in refuse(target, "-d", tmp_path / "nothing.txt")
    assert "--vocab-size 256 is too small" in refuse(target, "-d", corpus, "--vocab-size", 256)
    assert "not a whole number from 3" in refuse(target, "--kind", "word", "--vocab-size", 2)
    assert "not a whole number from 1" in refuse(target, "--min-frequency", 0)
    assert "invalid choice: 'letters'" in refuse(target, "--kind", "letters")
    assert "is text: it has no" in refuse(target, "--text-column", "body")
    for texts, part in ((["", "", ""], "training"), (["too short"], "evaluation")):
        (tmp_path / "short.json").write_text(json.dumps(texts))
        sentence = refuse(target, "-d", tmp_path / "short.json")
        assert f"The {part} part of {tmp_path}/short.json is empty: give more text." in sentence
    (tmp_path / "table.csv").write_text("question,answer\n" + "why,because\n" * 200)
    assert "one of question, answer" in refuse(target, "-d", tmp_path / "table.csv")
    target.mkdir()
    (target / "thesis.txt").write_text("the only copy")
    assert f"{target} already exists" in refuse(target, "-d", corpus)
    assert "already exists" in refuse(target / "thesis.txt", "-d", corpus)
    assert "Not a directory" in refuse(target / "thesis.txt/tokenizer", "-d", corpus)

"""From text to blocks of tokens, and the order that they are trained in."""

import argparse
import functools
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from helpers import ROOT, read_metrics, run_script
from runner import finish
from runner import start as start_run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from common import data, storage
from common.data import IGNORED, ResumableSampler, Sequences, load_sequences
from common.errors import RunError
from common.inputs import documents, token_files
from common.inputs.models import load_tokenizer


def draw_texts(count: int) -> list[str]:
    """Return documents of all kinds of letters, with what a reader of tables takes for no text.

    And one with the literal text of a special token in each. At U+2028 and U+0085, Python's
    splitlines() would end a line.
    """
    rng = random.Random(0)
    frequent = list("\n\t ,\"'\u2028\x85" * 500) + ["🙂"] * 100
    letters = [chr(n) for n in range(32, 0x3000)] + frequent
    drawn = ["".join(rng.choices(letters, k=rng.randrange(200))) for _ in range(count)]
    return ["NA", "None", "null", "", "7", *(f"{text}<|endoftext|> is text" for text in drawn)]


TEXTS = draw_texts(240)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("gpt2-tiny")


def arguments(path: object, seq_length: int = 16) -> argparse.Namespace:
    names = {"dataset_name": str(path), "dataset_subset": None, "text_column": None}
    return argparse.Namespace(**names, seq_length=seq_length)


def write_form(folder: Path, form: str) -> Path:
    """Write TEXTS as a file or folder of this form and return its path."""
    path = folder / f"data.{form.partition('.')[2]}"
    table = pandas.DataFrame({"text": TEXTS, "number": range(len(TEXTS))})
    if form == "folder":
        path = folder / "texts"
        path.mkdir()
        for number, text in enumerate(TEXTS):
            (path / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    elif form == "strings.json":
        path.write_text(json.dumps(TEXTS, ensure_ascii=False), encoding="utf-8")
    elif form == "objects.json":
        table.to_json(path, orient="records")
    elif form == "lines.jsonl":
        table.to_json(path, orient="records", lines=True, force_ascii=False)
    elif form == "table.csv":
        table.to_csv(path, index=False)
    elif form == "table.parquet":
        table.to_parquet(path)
    return path


FORMS = ("strings.json", "objects.json", "lines.jsonl", "table.csv", "table.parquet", "folder")


def rows_of(sequences: Sequences) -> np.ndarray:
    """Return all sequences [n, seq_length]."""
    items = sequences.__getitems__(range(len(sequences)))
    return torch.stack([item["input_ids"] for item in items]).numpy()


@pytest.fixture(scope="module")
def reference(tokenizer) -> list[list[int]]:
    """The tokens of TEXTS for training and for evaluation, computed in the plainest way."""
    parts = [], []
    for text in filter(None, TEXTS):
        ids = tokenizer.encode(text, split_special_tokens=True)
        assert tokenizer.decode(ids) == text
        parts[documents.is_held_out(text)].extend([*ids, tokenizer.eos_token_id])
    n_documents = sum(part.count(tokenizer.eos_token_id) for part in parts)
    assert n_documents == len(TEXTS) - 1, "a special token in a text counts as one"
    assert len(parts[0]) > 10 * len(parts[1]) > 1000
    return parts


def check_tokens(path: Path, reference: list, patch: pytest.MonkeyPatch) -> None:
    """Tokenize TEXTS in several batches."""
    patch.setattr(data, "CHUNK_CHARACTERS", 2000)
    parts = load_sequences(arguments(path), load_tokenizer("gpt2-tiny"))
    for part, expected in zip(parts, reference, strict=True):
        assert np.array_equal(part.streams[0], expected), "the tokens differ"


@pytest.mark.check
@pytest.mark.parametrize("form", FORMS)
def test_the_same_documents_give_the_same_tokens(tmp_path, reference, monkeypatch, form):
    """Whatever the form of the files."""
    check_tokens(write_form(tmp_path, form), reference, monkeypatch)


def test_planted_batches_out_of_order_are_noticed(tmp_path, reference, monkeypatch):
    encode = data.encode
    monkeypatch.setattr(data, "encode", lambda *args: reversed(list(encode(*args))))
    with pytest.raises(AssertionError, match="the tokens differ"):
        check_tokens(write_form(tmp_path, "table.csv"), reference, monkeypatch)


@pytest.mark.check
@pytest.mark.parametrize("has", ["a program", "vocab.json and merges.txt"])
def test_a_tokenizer_without_tokenizer_json_is_refused(tmp_path, tokenizer, has):
    """The sentence says how to convert it; the converted one is accepted."""
    folder = tmp_path / "tokenizer"
    if has == "a program":
        ByT5Tokenizer().save_pretrained(folder)
    else:
        tokenizer.save_pretrained(folder)
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
        (folder / "tokenizer.json").unlink()
        settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": tokenizer.eos_token}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(RunError, match=r"has no tokenizer\.json: write one with transformers, by"):
        load_tokenizer(str(folder))
    if has != "a program":
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "converted")
        text = "def main() -> None:"
        assert load_tokenizer(str(tmp_path / "converted")).encode(text) == tokenizer.encode(text)


@pytest.mark.nightly
def test_built_in_corpus(tokenizer):
    """Modules of Python's library, without tests and tables."""
    train, evaluation = load_sequences(arguments("python-stdlib", 128), tokenizer)
    assert len(train) > 10_000 and 100 < len(evaluation) < len(train) / 10
    assert 0.2 < train.tokens_per_byte < 0.35
    root = Path(argparse.__file__).parent
    found = documents.list_files(root, skip=documents.NOT_CODE)
    folders = {part for file in found for part in file.relative_to(root).parent.parts}
    assert root / "argparse.py" in found and "json" in folders
    assert not folders & {"site-packages", "test", "encodings", "idlelib", "__pycache__"}


@functools.cache
def word_tokenizer(n_tokens: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0, w1, ..., and an end-of-text token, the last one."""
    vocabulary = {f"w{number}": number for number in range(n_tokens - 1)}
    vocabulary["<|endoftext|>"] = n_tokens - 1
    words = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")


@pytest.mark.check
@pytest.mark.parametrize(("n_tokens", "n_bytes"), [(2**16, 2), (2**16 + 1, 4)])
def test_tokens_of_a_large_vocabulary_do_not_wrap(tmp_path, n_tokens, n_bytes):
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([f"w0 w{n} w{n_tokens - 2}" for n in range(500)]))
    train, _ = load_sequences(arguments(path, 4), word_tokenizer(n_tokens))
    assert train.streams[0].itemsize == n_bytes
    lowest, _, *highest = rows_of(train).T
    assert not lowest.any()
    assert all((np.array(highest) == [[n_tokens - 2], [n_tokens - 1]]).flatten())


@pytest.mark.check
def test_few_documents_give_their_ends(tmp_path, tokenizer):
    path = tmp_path / "book.txt"
    text = "".join(f"Line {n} of the book.\n" for n in range(1000))
    path.write_text(text)
    train, evaluation = documents.find_documents(str(path), None, None).read()
    assert train.text + evaluation.text == text
    assert (train.held_out, evaluation.held_out, train.ends, evaluation.ends) == (0, 1, 1, 1)
    assert 0.04 < len(evaluation.text) / len(text) < 0.06
    assert all(len(part) for part in load_sequences(arguments(path, 32), tokenizer))


@pytest.mark.check
def test_second_start_reads_the_cache(tmp_path, tokenizer, monkeypatch):
    """With another sequence length, too, and where nothing may be written, such as a container.

    A data worker opens the file: it gets no copy.
    """
    path = write_form(tmp_path, "lines.jsonl")
    first, _ = load_sequences(arguments(path), tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "FileLock", None)  # calling it would fail
        patch.setattr(Path, "mkdir", None)
        again, _ = load_sequences(arguments(path, 32), tokenizer)
    assert again.digest == first.digest
    assert np.array_equal(rows_of(again).ravel(), rows_of(first).ravel()[: rows_of(again).size])
    content = pickle.dumps(first)
    assert len(content) < 1000 < first.streams[0].nbytes
    assert np.array_equal(rows_of(pickle.loads(content)), rows_of(first))


@pytest.mark.check
def test_an_epoch_can_start_anywhere():
    """Otherwise the order is DistributedSampler's, with which ranks together take a permutation."""
    rng = random.Random(0)
    for _ in range(100):
        n, world, epoch = rng.randrange(1, 300), rng.randrange(1, 9), rng.randrange(3)
        start = rng.randrange(n // world + 2)
        options = {"num_replicas": world, "rank": rng.randrange(world), "seed": 5}
        options["drop_last"] = rng.random() < 0.5
        expected = DistributedSampler(range(n), **options)
        expected.set_epoch(epoch)
        found = ResumableSampler(range(n), **options)
        found.set_epoch(epoch, start=start)
        assert list(found) == list(expected)[start:]


def check_that_batches_are_their_rows(part: Sequences, expected: np.ndarray) -> None:
    """Read two batches in one go, one of them with padding, without and with workers."""
    n_padding = len(part) - len(expected)
    rows = [*expected.tolist(), *[[0] * expected.shape[1]] * n_padding]
    labels = [*expected.tolist(), *[[IGNORED] * expected.shape[1]] * n_padding]
    order = [len(part) - 1, 0, len(expected) - 1, 2, 2, 1, len(expected) // 2, 3]
    for workers in (0, 2):
        batches = list(DataLoader(part, batch_size=4, sampler=order, num_workers=workers))
        found = torch.cat([batch["input_ids"] for batch in batches])
        assert found.dtype == torch.int64
        assert found.tolist() == [rows[index] for index in order], "the rows differ"
        found = torch.cat([batch["labels"] for batch in batches])
        assert found.tolist() == [labels[index] for index in order], "the labels differ"
    for index in order:
        assert part[index]["input_ids"].tolist() == rows[index], "the rows differ"


def padded_shards(folder: Path) -> tuple[Sequences, np.ndarray]:
    """Return sequences in two shards, with padding, and what the shards hold."""
    written = write_shards(folder / "tokens", "npy", LARGE)[:2]
    written[0] = np.arange(100, dtype="<u2")
    np.save(folder / "tokens/a_train.npy", written[0])
    files = token_files.find_token_files(str(folder / "tokens"))
    tokens, _ = token_files.open_token_files(files, word_tokenizer(10**5))
    expected = np.concatenate([whole_rows(shard) for shard in written])
    return Sequences(tokens, 16).pad_to_multiple(len(expected) + 3), expected


@pytest.mark.check
def test_a_batch_in_one_go_is_its_rows(tmp_path):
    check_that_batches_are_their_rows(*padded_shards(tmp_path))


def test_planted_rows_in_the_order_of_the_file(tmp_path, monkeypatch):
    """Sorted reads are faster on a disk, and the rows must come back in the order of the batch."""
    getitems = Sequences.__getitems__
    monkeypatch.setattr(Sequences, "__getitems__", lambda self, rows: getitems(self, sorted(rows)))
    with pytest.raises(AssertionError, match="the rows differ"):
        check_that_batches_are_their_rows(*padded_shards(tmp_path))


@pytest.mark.check
@pytest.mark.parametrize("name", ["csv", "table[1].csv"])
def test_a_name_that_means_something_else_to_the_library(tmp_path, monkeypatch, name):
    """A reader of the library, which would take all tables that are here, and a pattern."""
    monkeypatch.chdir(tmp_path)
    Path("csv").mkdir()
    for path in ("csv/part.csv", "table[1].csv"):
        Path(path).write_text("text\nright\n")
    for path in ("other.csv", "table1.csv"):
        Path(path).write_text("text\nwrong\n")
    assert documents.load_table(name, None)["train"]["text"][:] == ["right"]


def pieces_of(path: Path) -> list[tuple[str, bool]]:
    texts = documents.find_documents(str(path), None, None).read()
    return [(text.text, text.ends) for text in texts]


@pytest.mark.check
def test_text_and_json_as_windows_writes_them(tmp_path):
    (tmp_path / "a.txt").write_text("Straße\r\nund Bäume", "utf-8-sig", newline="")
    assert pieces_of(tmp_path / "a.txt") == [("Straße\nund Bäume", True)]
    (tmp_path / "a.json").write_text('["Bäume"]', "utf-8-sig")
    assert documents.load_table(str(tmp_path / "a.json"), None)["train"]["text"][:] == ["Bäume"]


@pytest.mark.check
def test_a_large_file_is_read_in_pieces(tmp_path, tokenizer, monkeypatch):
    """Pieces end at the end of a line; the end-of-text token comes where the file ends."""
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 100)
    whole = {}
    for name in "ab":
        lines = [f"{name} {n} of the lines of this document\n" for n in range(60)]
        whole[name] = "".join(lines)
        (tmp_path / f"{name}.txt").write_text(whole[name])
    with monkeypatch.context() as patch:
        patch.setattr(documents, "FEW_DOCUMENTS", 0)  # so that no ends are cut off
        texts, ends = zip(*pieces_of(tmp_path), strict=True)
    assert len(texts) > 20 and all(text.endswith("\n") for text in texts)
    middle = len(texts) // 2
    assert ["".join(texts[:middle]), "".join(texts[middle:])] == list(whole.values())
    assert [number for number, end in enumerate(ends) if end] == [middle - 1, len(texts) - 1]
    train, evaluation = load_sequences(arguments(tmp_path), tokenizer)
    for part in (train, evaluation):
        assert np.count_nonzero(part.streams[0] == tokenizer.eos_token_id) == 2


@pytest.mark.check
def test_a_tokenizer_that_was_saved_with_limits_keeps_all_text(tmp_path, tokenizer):
    """Its tokenizer.json can ask for truncation or padding, which must not change a corpus."""
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(["short", "a text of many words " * 99]))
    limited = load_tokenizer("gpt2-tiny")
    limited.backend_tokenizer.enable_truncation(16)
    limited.backend_tokenizer.enable_padding()
    plain = load_sequences(arguments(path), tokenizer)[0].streams[0]
    assert len(plain) > 100
    assert np.array_equal(load_sequences(arguments(path), limited)[0].streams[0], plain)


# --- a large file ---

TOKENIZE = """
import argparse, resource, sys
from common import data
from common.inputs import models
tokenizer = models.load_tokenizer("gpt2-tiny")
args = {"dataset_name": sys.argv[1], "dataset_subset": None, "text_column": None}
print(len(data.tokenize(argparse.Namespace(**args), tokenizer)[0].streams[0]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, form):
    """Three times as much text in one file needs hardly more memory."""
    rng, peaks = random.Random(0), []
    words = ["".join(rng.choices("abcdefghijklmnopqrst", k=2 + n % 8)) for n in range(5000)]
    lines = [" ".join(rng.choices(words, k=150)) for _ in range(1000)]
    lines = [f"{line}\n" if form == "txt" else f'{{"text": "{line}"}}\n' for line in lines]
    for megabytes in (24, 72):
        path = tmp_path / f"{megabytes}.{form}"
        with path.open("w") as file:
            while file.tell() < megabytes * 10**6:
                file.writelines(lines)
        done = run_script("-c", TOKENIZE, path, PYTHONPATH=ROOT, timeout=3600)
        assert done.returncode == 0, done.stderr
        n_tokens, peak = map(int, done.stdout.split())
        assert n_tokens > megabytes * 10**5
        peaks.append(peak)
    assert peaks[1] < 1.3 * peaks[0], peaks


# --- an interruption ---


@pytest.mark.check
def test_an_interrupted_tokenization_starts_again(tmp_path, tokenizer, reference, monkeypatch):
    """What was left by it changes nothing."""
    path = write_form(tmp_path, "table.csv")

    def stop(folder: Path, *args: object) -> None:
        (folder / "train.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data, "write_tokens", stop)
        load_sequences(arguments(path), tokenizer)
    check_tokens(path, reference, monkeypatch)


# --- ready-made tokens ---


def write_shards(folder: Path, form: str, first: int = 0) -> list[np.ndarray]:
    """Write three shards of 100 to 120 tokens, one of them for evaluation; return their tokens.

    first: the lowest token; above 65535, a token needs 32 bits.
    """
    folder.mkdir()
    dtype = "<u4" if first > 2**16 else "<u2"
    shards = [np.arange(first + n, first + 100 + 11 * n, dtype=dtype) for n in range(3)]
    for name, tokens in zip(("a_train", "b_train", "c_val"), shards, strict=True):
        if form == "npy":
            np.save(folder / f"{name}.npy", tokens)
        else:
            header = np.zeros(256, "<i4")
            header[:3] = (20240520, 1, len(tokens))
            content = tokens.tobytes()
            content = header.tobytes() + content if form == "llm.c" else content
            (folder / f"{name}.bin").write_bytes(content)
    return shards


def whole_rows(tokens: np.ndarray) -> np.ndarray:
    """Return the sequences of 16 tokens in a shard, without the rest."""
    return tokens[: len(tokens) // 16 * 16].reshape(-1, 16)


LARGE = 70_000


@pytest.mark.check
@pytest.mark.parametrize(("form", "first"), [("npy", 0), ("bin", 0), ("bin", LARGE), ("llm.c", 0)])
def test_ready_made_tokens(tmp_path, tokenizer, form, first):
    tokens = write_shards(tmp_path / "tokens", form, first)
    tokenizer = word_tokenizer(10**5) if first else tokenizer
    train, evaluation = load_sequences(arguments(tmp_path / "tokens"), tokenizer)
    expected = [whole_rows(shard) for shard in tokens]
    assert np.array_equal(rows_of(train), np.concatenate(expected[:2]))
    assert np.array_equal(rows_of(evaluation), expected[2])
    again = pickle.loads(pickle.dumps(train))
    assert np.array_equal(rows_of(again), rows_of(train)) and again.digest == train.digest
    assert train.tokens_per_byte > 0


@pytest.mark.check
def test_shards_for_testing_are_left_out(tmp_path, tokenizer):
    """And "retrieval" is not "val": if no name says so, the last shard is for evaluation."""
    for names, train, evaluation in (
        (("train_0", "val_0", "test_0"), [1], [2]),
        (("retrieval_0", "part_1", "tests_2"), [1, 2], [3]),
    ):
        folder = tmp_path / names[0]
        folder.mkdir()
        for number, name in enumerate(names, start=1):
            np.full(100, number, "<u2").tofile(folder / f"{name}.bin")
        parts = load_sequences(arguments(folder), tokenizer)
        found = [sorted(int(stream[0]) for stream in part.streams) for part in parts]
        assert found == [train, evaluation]


@pytest.mark.check
def test_ready_made_tokens_that_cannot_be_used(tmp_path, tokenizer):
    """Some of them would train on something else. A card beside them does not matter."""

    def refused(reason: str) -> None:
        with pytest.raises(RunError, match=reason):
            load_sequences(arguments(tmp_path / "tokens"), tokenizer)

    write_shards(tmp_path / "tokens", "llm.c")
    (tmp_path / "tokens/README.md").touch()
    load_sequences(arguments(tmp_path / "tokens"), tokenizer)
    for other in ("train.idx", "meta.pkl", "index.json"):
        (tmp_path / "tokens" / other).touch()
        refused(f"{other} belongs to another format or vocabulary")
        (tmp_path / "tokens" / other).unlink()
    path = tmp_path / "tokens/b_train.bin"
    whole = path.read_bytes()
    for content, reason in (
        (whole[:4] + b"\2" + whole[5:], "a header of version 2"),
        (whole[:-2], "a header of version 1 with 110 tokens"),
        (whole[:-2] + b"\xff\xff", "token 65535, and the tokenizer has 4096"),
        (b"", "does not hold tokens"),
        (np.arange(1, 100, dtype="<i4").tobytes(), "every second number is 0"),
    ):
        path.write_bytes(content)
        refused(reason)
    path.unlink()
    np.save(path.with_suffix(".npy"), np.zeros(100))
    refused("float64")
    path.with_suffix(".npy").unlink()
    (tmp_path / "tokens/a_train.bin").unlink()
    refused("no shard for training")


@pytest.mark.check
def test_ready_made_tokens_have_the_bits_per_byte_of_their_text(tmp_path, tokenizer):
    """End-of-text tokens are not text, as where documents are tokenized here."""
    texts = [f"x = {n}\n" for n in range(500)]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    own, _ = load_sequences(arguments(tmp_path / "texts.json", 10), tokenizer)
    (tmp_path / "tokens").mkdir()
    for name in ("a", "b", ".hidden"):
        own.streams[0].tofile(tmp_path / f"tokens/{name}.bin")
    train, evaluation = load_sequences(arguments(tmp_path / "tokens", 10), tokenizer)
    assert len(train) == len(evaluation) == len(own)
    assert evaluation.tokens_per_byte == pytest.approx(own.tokens_per_byte)


@pytest.mark.nightly
def test_chapter_1_trains_on_ready_made_tokens(tmp_path):
    """evaluate.py finds the numbers of the run, over all shards for evaluation."""
    (tmp_path / "tokens").mkdir()
    rng, names = np.random.default_rng(0), ("train_1", "train_2", "val_1", "val_2")
    for name, count in zip(names, (2000, 1500, 700, 500), strict=True):
        rng.integers(0, 4096, count).astype("<u2").tofile(tmp_path / f"tokens/{name}.bin")
    flags = ["-d", tmp_path / "tokens", "-s", 32, "--global-batch-size", 6, "--max-steps", 6]
    assert finish(start_run([*flags, "--save-dir", tmp_path, "-e", "run"])) == 0
    metrics = read_metrics(tmp_path / "run")

    output = tmp_path / "evaluated.json"
    done = run_script("01-single-gpu/evaluate.py", tmp_path / "run", "--output", output)
    assert done.returncode == 0 and "the number of bytes is an estimate" in done.stdout
    found = json.loads(output.read_text())
    assert found["tokens"] == 700 + 500, "not all shards"
    assert found["scored_tokens"] == 31 * (700 // 32 + 500 // 32)
    assert found["loss"] == pytest.approx(metrics[-1]["eval_loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(metrics[-1]["bits_per_byte"], rel=1e-3)

"""What users bring: their data."""

import argparse
import bz2
import gzip
import json
import logging
import lzma
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from common import data, documents, launch
from common.cli import RunError
from common.data import load_sequences
from common.models import load_tokenizer

pytestmark = pytest.mark.check

PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
Files = dict[str, str | bytes]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("gpt2-tiny")


def write(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def words(name: str, count: int = 60) -> str:
    """Return a document that is longer than a sequence of 8 tokens, with a name of its own."""
    return f"This is {name}. " * count


def lines(*texts: str, **more: object) -> str:
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in texts)


def tokens_of(path: Path, tokenizer: object, column=None, subset=None) -> list[list[int]]:
    """Return the tokens for training and for evaluation."""
    names = {"dataset_name": str(path), "dataset_subset": subset, "text_column": column}
    parts = load_sequences(argparse.Namespace(**names), tokenizer, 8)
    return [np.concatenate(part.streams).tolist() for part in parts]


def read(path: Path, tokenizer: object, *choice: str | None) -> list[str]:
    """Return the text for training and for evaluation, as its tokens say."""
    return [tokenizer.decode(tokens) for tokens in tokens_of(path, tokenizer, *choice)]


# --- which files and rows are read ---

CARD = "---\nconfigs:\n- config_name: default\n  data_files: {}\n---\n"
TWO = CARD.replace("default", "one").format("a.jsonl\n- config_name: two\n  data_files: b.jsonl")
TABLE = lines(words("a"), words("b"))

OTHERS = "1 json file; other files, which are not read: {}; rows of column 'text': 2 (train)"
READ = [
    (
        {"A.TXT": words("a"), "b.Txt": words("b"), "x.png": ""},
        "2 text files; other files, which are not read: 1",
    ),
    (
        {"a.jsonl": TABLE, "dataset_infos.json": "{}", "stats.json": '{"n": 2}', "README.md": "#"},
        OTHERS.format(3),
    ),
    (
        {"data/train-0.jsonl": TABLE, "data/validation-0.jsonl": TABLE, "data/test-0.jsonl": TABLE},
        "3 json files; rows of column 'text': 2 (train) and 2 (validation); splits that are not "
        "read: test",
    ),
    (
        {"a.jsonl": TABLE, "b.csv": "text\nb\n", "README.md": CARD.format("a.jsonl")},
        OTHERS.format(2),
    ),
    ({"train.jsonl": TABLE, "more.jsonl": TABLE}, OTHERS.format(1)),
]


@pytest.mark.parametrize(("files", "said"), READ, ids=[said[:60] for _, said in READ])
def test_what_is_read_is_said_in_one_line(tmp_path, tokenizer, caplog, files, said):
    """At the first start, and when the tokens come from the cache."""
    write(tmp_path / "data", files)
    caplog.set_level(logging.INFO, "common.data")
    for _ in range(2):
        caplog.clear()
        read(tmp_path / "data", tokenizer)
        (line,) = [m for m in caplog.messages if not m.startswith("tokenized")]
        assert line == f"{tmp_path}/data: {said}"


def test_text_files_that_are_named_for_training_and_evaluation(tmp_path, tokenizer):
    names = ("wiki.train.txt", "wiki.valid.txt", "wiki.test.txt", "README.md")
    write(tmp_path, {name: words(name) for name in names})
    train, evaluation = read(tmp_path, tokenizer)
    assert train == words(names[0]) + "<|endoftext|>"
    assert evaluation == words(names[1]) + "<|endoftext|>"
    (tmp_path / names[1]).unlink()  # now a part of the training file is for evaluation
    assert "".join(read(tmp_path, tokenizer)).replace("<|endoftext|>", "") == words(names[0])
    names = (names[0], *names[2:])
    write(tmp_path, {"notes.txt": words("notes")})  # now the names do not say it
    train, evaluation = read(tmp_path, tokenizer)
    assert all(f"This is {name}" in train for name in (*names, "notes"))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_a_compressed_file_is_its_content(tmp_path, tokenizer, name):
    texts = [words(str(n)) for n in range(30)]
    content = {"a.txt": "\n".join(texts), "a.jsonl": lines(*texts)}.get(name, "\n".join(texts))
    content = f"text\n{content}\n" if name == "a.csv" else content
    expected = read(write(tmp_path / "plain", {name: content}) / name, tokenizer)
    assert "This is 7." in "".join(expected)
    for end, pack in PACK.items():
        folder = write(tmp_path / end, {name + end: pack(content.encode())})
        assert read(folder / (name + end), tokenizer) == expected
        assert read(folder, tokenizer) == expected


def test_folders_of_save_to_disk(tmp_path, tokenizer):
    parts = {name: Dataset.from_dict({"body": [words(name)] * 3}) for name in ("train", "test")}
    DatasetDict(**parts, validation=parts["test"]).save_to_disk(tmp_path / "splits")
    train, evaluation = read(tmp_path / "splits", tokenizer)
    assert "This is train" in train and "This is test" in evaluation and "train" not in evaluation
    parts["train"].save_to_disk(tmp_path / "rows")
    assert "This is train" in read(tmp_path / "rows", tokenizer)[0]


def test_fields_of_csv(tmp_path, tokenizer):
    """Any separator; short rows; and texts that other programs take for nothing."""
    texts = ["NA", "None", "null", "nan", words("a"), "one, two; three"]
    for separator, name in ((";", "a.csv"), ("\t", "a.csv"), ("\t", "a.tsv"), (",", "a.csv")):
        rows = [f'7{separator}"{text}"{separator}x' for text in texts]
        header = separator.join(("number", "body", "more"))
        folder = tmp_path / f"{ord(separator)}{name}"
        write(folder, {name: "\n".join([header, *rows, f"8{separator}short", ""])})
        for path in (folder, folder / name):
            table = documents.load_table(str(path), None)["train"]
            assert table["body"] == [*texts, "short"]
            assert table["more"] == [*"xxxxxx", ""]
    write(tmp_path, {"quoted.csv": '"number, from 7";body\n7;text\n'})
    assert documents.load_table(str(tmp_path / "quoted.csv"), None)["train"]["body"] == ["text"]


REFUSED = [
    ({"a.txt": words("a"), "b.jsonl": TABLE, "README.md": "# It"}, "has files of several kinds ("),
    ({"a.jsonl": '{"id": "1", "messages": [{"role": "user"}]}\n'}, "give --text-column one of id."),
    ({"a.csv": "n,text\n1,hi\n2,x,y\n"}, "has no usable data set (Error tokenizing data"),
    ({"a.csv": "n,text\n1,hi,there\n2,x\n"}, "has no usable data set (Length of header or names"),
    ({"a.jsonl": '{"text": "\\ud83d"}\n'}, "has no usable data set (JSON parse error: The surroga"),
    ({"a.csv": b"text\nx\xe4\n"}, "has no usable data set ('utf-8' codec can't decode byte"),
    ({"a.txt": "\ufeffText".encode("utf-16-be")}, "a.txt is UTF-16: convert it to UTF-8."),
    ({"a.csv": "text\nhi\n".encode("utf-16")}, "has no usable data set ('utf-8' codec can't dec"),
    ({"a.jsonl": TABLE, "b.jsonl": TABLE, "README.md": TWO}, "--dataset-subset one of ['one'"),
    ({"A.JSONL": TABLE, "b.jsonl": TABLE}, "A.JSONL so that it ends in .jsonl."),
    ({"a.txt.zst": b"\x28\xb5\x2f\xfd"}, "has no file that ends in one of: .txt"),
    ({"a.jsonl": TABLE, "b.jsonl": lines("c", more=1)}, "no usable data set (Couldn't cast text: "),
]


@pytest.mark.parametrize(("files", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_data_that_is_refused(tmp_path, tokenizer, files, reason):
    """More are in test_bad_input.py."""
    with pytest.raises(RunError) as error:
        read(write(tmp_path / "data", files), tokenizer)
    assert reason in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_folder_whose_name_is_a_pattern_is_not_another_folder(tmp_path, tokenizer):
    write(tmp_path, {"data 1/a.jsonl": TABLE, "data ?/a.jsonl": lines(words("c"))})
    with pytest.raises(RunError, match="rename the folder, because its name has one of"):
        read(tmp_path / "data ?", tokenizer)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_cache_of_the_library_that_cannot_be_written(tmp_path, tokenizer, monkeypatch, name):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/nothing")
    write(tmp_path, {name: {"a.txt": words("a")}.get(name, TABLE)})
    with pytest.raises(
        RunError, match=r"Cannot write to the cache /proc/nothing .*HF_DATASETS_CAC"
    ):
        read(tmp_path, tokenizer)


def test_a_table_that_is_not_utf_8_ends_in_one_sentence(tmp_path, tokenizer, monkeypatch):
    """Another process finds it."""
    monkeypatch.setattr(data, "BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(data, "n_cores", lambda: 2)
    write(tmp_path, {"a.jsonl": TABLE.encode() + b'{"text": "B\xe4ume"}\n'})
    with pytest.raises(UnicodeError) as error:
        read(tmp_path, tokenizer)
    assert launch._explain(error.value) == (
        "Text is not UTF-8 ('utf-8' codec can't decode byte 0xe4 in position 1: invalid "
        "continuation byte): convert the file, or set PYTHONUTF8=1.",
        2,
    )


def test_a_link_to_a_folder_above_adds_no_file_twice(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/text.txt").write_text("once")
    (tmp_path / "a/up").symlink_to(tmp_path)
    assert documents.list_files(tmp_path) == [tmp_path / "a/text.txt"]


# --- tokens in the cache are those of what is there now ---

CHANGES = {
    "a file": ({"a.txt": words("a")}, {"a.txt": words("b")}),
    "a file more": ({"a.txt": words("a")}, {"b.txt": words("b")}),
    "a file less": ({"a.txt": words("a"), "b.txt": words("b")}, {"b.txt": None}),
    "a row": ({"a.jsonl": lines(words("a"))}, {"a.jsonl": lines(words("b"))}),
    "a compressed table more": ({"a.jsonl": TABLE}, {"b.jsonl.gz": gzip.compress(TABLE.encode())}),
    "the card": (
        {"a.jsonl": TABLE, "b.jsonl": lines(words("c")), "README.md": CARD.format("a.jsonl")},
        {"README.md": CARD.format("b.jsonl")},
    ),
    "a name": (
        {f"{n}.txt": words(n) for n in ("a.train", "b.train", "c.val")},
        {"b.train.txt": None, "b.val.txt": words("b.train")},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tokens_are_new_after_a_change_of(tmp_path, tokenizer, change):
    before, after = CHANGES[change]
    write(tmp_path / "data", before)
    first = read(tmp_path / "data", tokenizer)
    assert read(tmp_path / "data", tokenizer) == first
    for name, content in after.items():
        if content is None:
            (tmp_path / "data" / name).unlink()
        else:
            write(tmp_path / "data", {name: content})
    again = read(tmp_path / "data", tokenizer)
    assert again != first
    (tmp_path / "data").rename(tmp_path / "moved")  # whose tokens are in no cache
    assert again == read(tmp_path / "moved", tokenizer)


def test_tokens_are_new_with_another_column_subset_or_tokenizer(tmp_path, tokenizer):
    tables = {f"{t}.jsonl": lines(words(t), other=words(o)) for t, o in ("ac", "bd")}
    write(tmp_path, {**tables, "README.md": TWO})
    for column, subset, text in (
        ("text", "one", "a"),
        ("other", "one", "c"),
        ("text", "two", "b"),
        ("other", "two", "d"),
    ):
        train, _ = read(tmp_path, tokenizer, column, subset)
        assert train.startswith(words(text, 9))
    other = load_tokenizer("gpt2-tiny")
    other.add_tokens(["This is"])
    assert read(tmp_path, other, "other", "two")[0] == train
    fewer, more = (tokens_of(tmp_path, t, "other", "two")[0] for t in (other, tokenizer))
    assert len(fewer) < len(more)

"""What users bring: their data."""

import argparse
import bz2
import gzip
import json
import logging
import lzma
import os
import resource
import shutil
from itertools import islice
from pathlib import Path, PurePath

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from helpers import unreadable

from common import data, launch, storage
from common.data import load_sequences
from common.errors import RunError
from common.inputs import documents, json_files, names
from common.inputs.models import load_tokenizer

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
    parts = load_sequences(argparse.Namespace(**names, seq_length=8), tokenizer)
    return [np.concatenate(part.streams).tolist() for part in parts]


def read(path: Path, tokenizer: object, *choice: str | None) -> list[str]:
    """Return the text for training and for evaluation, as its tokens say."""
    return [tokenizer.decode(tokens) for tokens in tokens_of(path, tokenizer, *choice)]


# --- which files and rows are read ---

CARD = "---\nconfigs:\n- config_name: default\n  data_files: {}\n---\n"
TWO = CARD.replace("default", "one").format("a.jsonl\n- config_name: two\n  data_files: b.jsonl")
TABLE = lines(words("a"), words("b"))

ROWS = "rows of column 'text': "
ENDS = "; the end of each is for evaluation"  # of a few documents
READ = [
    ({"A.TXT": words("a"), "b.Txt": words("b"), "x.png": ""}, f"2 text files (train){ENDS}"),
    (
        {"A.JSONL": TABLE, "dataset_infos.json": "{}", "stats.json": '{"n": 2}', "README.md": "#"},
        f"{ROWS}2 (train){ENDS}",
    ),
    (
        {"data/train-0.jsonl": TABLE, "data/validation-0.jsonl": TABLE, "data/test-0.jsonl": TABLE},
        f"{ROWS}2 (train) and 2 (validation)",
    ),
    (
        {"a.jsonl": TABLE, "b.csv": "text\nb\n", "README.md": CARD.format("a.jsonl")},
        f"{ROWS}2 (train){ENDS}",
    ),
    ({"train.jsonl": TABLE, "more.jsonl": TABLE}, f"{ROWS}4 (train){ENDS}"),
    (
        {"a.jsonl": lines(*(words(f"text {n}") for n in range(120)))},
        f"{ROWS}120 (train); one in 20 is for evaluation",
    ),
]


@pytest.mark.parametrize(("files", "said"), READ, ids=[said for _, said in READ])
def test_what_is_read_is_said_in_one_line(tmp_path, tokenizer, caplog, files, said):
    write(tmp_path / "data", files)
    caplog.set_level(logging.INFO, "common.inputs.documents")
    read(tmp_path / "data", tokenizer)
    assert caplog.messages == [f"{tmp_path}/data: {said}"]


SPLITS = {
    "train-00000-of-00002.parquet": "train",
    "data/fineweb_val_000000.bin": "validation",
    "wiki.VALID.txt": "validation",
    "train/test.txt": "test",
    "retrieval_0001.bin": None,
    "contest/latest_developments.txt": None,
}


def test_a_split_is_a_whole_word_of_a_name():
    assert {name: names.split_of(PurePath(name)) for name in SPLITS} == SPLITS


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


MANY = [words(str(n)) for n in range(30)]
FORMS = {"a.txt": "\n".join(MANY), "a.jsonl": lines(*MANY), "a.csv": "\n".join(["text", *MANY])}


@pytest.mark.parametrize("name", FORMS)
def test_a_compressed_file_is_its_content(tmp_path, tokenizer, name):
    content = FORMS[name].encode()
    expected = read(write(tmp_path / "plain", {name: content}) / name, tokenizer)
    assert "This is 7." in "".join(expected)
    for end, pack in PACK.items():
        folder = write(tmp_path / end, {name + end: pack(content)})
        assert read(folder, tokenizer) == expected
        halves = content[:5000], content[5000:]  # as of `cat a.gz b.gz > both.gz`
        write(folder, {name + end: b"".join(map(pack, halves))})
        assert read(folder / (name + end), tokenizer) == expected


def test_columns_in_another_order_are_the_same_columns(tmp_path, tokenizer):
    rows = "".join(f"{n},{words('a')}\n" for n in range(40))
    swapped = "".join(f"{words('b')},{n}\n" for n in range(40))
    folder = write(tmp_path, {"a.csv": f"text,body\n{rows}", "b.csv": f"body,text\n{swapped}"})
    train, _ = read(folder, tokenizer, "body")
    assert "This is a" in train and "This is b" in train and "7" not in train


def test_folders_of_save_to_disk(tmp_path, tokenizer):
    parts = {name: Dataset.from_dict({"body": [words(name)] * 3}) for name in ("train", "test")}
    DatasetDict(**parts, validation=parts["test"]).save_to_disk(tmp_path / "splits")
    train, evaluation = read(tmp_path / "splits", tokenizer)
    assert "This is train" in train and "This is test" in evaluation and "train" not in evaluation
    parts["train"].save_to_disk(tmp_path / "rows")
    assert "This is train" in read(tmp_path / "rows", tokenizer)[0]
    DatasetDict(test=parts["test"]).save_to_disk(tmp_path / "test")
    with pytest.raises(RunError, match="has no split named train, only test: rename the training"):
        read(tmp_path / "test", tokenizer)


def test_tables_of_other_programs(tmp_path, tokenizer):
    """Polars writes string_view. A cache of the library has dataset_info.json and no state.json."""
    table = pa.table({"body": pa.array([words("a"), words("b")], pa.string_view())})
    (tmp_path / "cache").mkdir()
    pa.parquet.write_table(table, tmp_path / "polars.parquet")
    with pa.ipc.new_stream(tmp_path / "cache/data-0.arrow", table.schema) as file:
        file.write(table)
    write(tmp_path, {"cache/dataset_info.json": "{}"})
    for path in ("polars.parquet", "cache"):
        train, _ = read(tmp_path / path, tokenizer)
        assert train.startswith("This is a. ") and "This is b. " in train


def test_fields_of_csv(tmp_path, tokenizer):
    """Any separator; short rows; and texts that other programs take for nothing."""
    texts = ["NA", "None", "null", "nan", words("a"), "one, two; three"]
    for separator, name in ((";", "semicolon.csv"), ("\t", "tab.tsv"), (",", "comma.csv")):
        rows = [f'7{separator}"{text}"{separator}x' for text in texts]
        header = separator.join(("number", "body", "more"))
        write(tmp_path, {name: "\n".join([header, *rows, f"8{separator}short", ""])})
        table = documents.load_table(str(tmp_path / name), None)["train"]
        assert table["body"] == [*texts, "short"]
        assert table["more"] == [*"xxxxxx", ""]
    quoted = '"number, from 7";body\r\n7;"two\nlines; and ""quotes"""\r\n8;5" wide\r\n'
    write(tmp_path, {"quoted.csv": quoted})
    table = documents.load_table(str(tmp_path / "quoted.csv"), None)["train"]
    assert table["body"] == ['two\nlines; and "quotes"', '5" wide']


def test_values_of_csv_are_as_they_are_written(tmp_path):
    """Not numbers or dates, which the library would guess."""
    values = ["3.1", "3.10", "007", "1", "01", "1e3", "2024-01-02", "True", "-0", " a "]
    write(tmp_path, {"a.csv": "label,body\n" + "".join(f"{each},text\n" for each in values)})
    assert documents.load_table(str(tmp_path / "a.csv"), None)["train"]["label"] == values


DATES = ["2024-01-02", "2024-01-02 10:00"]
TIMES = ["2024-01-02T10:00:00Z", "2024-01-02 10:00:00.50", "10:00"]
WRITTEN = {  # by what is among the texts: values as they are written in JSON
    "dates": [json.dumps(date) for date in DATES],
    "times": [json.dumps(time) for time in TIMES],
    "texts of numbers": ['"007"', '"3.10"', '"1e5"'],
    "numbers": ['"one"', "1.10", "7", "-1e5", "12345678901234567890123"],
    "truths": ["true", '"one"', "false", "null"],
    "numbers and truths": ["1", "true"],
    "floats and large numbers": ["0.5", str(2**60)],
}
# Texts before these values: more than the 10 MB that the library reads at once.
BLOCK = [json.dumps(words("a", 10_000))] * 2 * json_files.ROWS_AT_ONCE
FORMS_OF_JSON = {
    "lines": lambda values: "".join(f'{{"text": {value}}}\n' for value in values),
    "array of objects": lambda values: "[" + ", ".join(f'{{"text":{v}}}' for v in values) + "]",
    "array of texts": lambda values: f"[{', '.join(values)}]",
    "objects of several lines": lambda values: "".join(f'{{\n"text":\n{v}\n}}\n' for v in values),
}


@pytest.mark.parametrize("form", FORMS_OF_JSON)
@pytest.mark.parametrize("case", WRITTEN)
def test_texts_of_json_are_as_they_are_written(tmp_path, case, form):
    """Also far behind other texts, where the library would convert them to the type of these."""
    values = WRITTEN[case]
    expected = [None if v == "null" else json.loads(v) if v[0] == '"' else v for v in values]
    for before in ([], BLOCK):
        (tmp_path / "a.json").write_text(FORMS_OF_JSON[form]([*before, *values]))
        table = documents.load_table(str(tmp_path / "a.json"), None)["train"]
        assert table["text"][len(before) :] == expected
        assert table["text"][: len(before)] == [json.loads(text) for text in before]


@pytest.mark.parametrize("case", ["dates", "numbers"])
def test_planted_types_that_the_library_guesses(tmp_path, monkeypatch, case):
    def guess(by_split: dict[str, list[Path]], key: str) -> DatasetDict:
        files = {split: [str(file) for file in files] for split, files in by_split.items()}
        return datasets.load_dataset("json", data_files=files)

    monkeypatch.setattr(documents, "load_json", guess)
    with pytest.raises((AssertionError, RunError)):  # some releases refuse the numbers
        test_texts_of_json_are_as_they_are_written(tmp_path, case, "lines")


def test_columns_of_json(tmp_path, tokenizer, caplog):
    """Each row has its own; numbers stay numbers; one without a type is left out."""
    rows = [
        {"text": words("a"), "label": 0, "note": None, "more": [{"b": 1}], "mixed": "a"},
        {"text": words("b"), "label": 1.5, "note": "late", "more": [{"c": "d"}, {}], "mixed": [1]},
        {"other": {"x": []}},
    ]
    write(tmp_path, {"a.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    table = documents.load_table(str(tmp_path), None)["train"]
    assert table["text"] == [words("a"), words("b"), None]
    assert table["label"] == [0, 1.5, None] and table["note"] == [None, "late", None]
    assert table["more"][1] == [{"b": None, "c": "d"}, {"b": None, "c": None}]
    assert table["other"] == [None, None, {"x": []}]
    assert table.column_names == ["text", "label", "note", "more", "other"]
    (warning,) = caplog.messages
    assert warning.endswith(
        "a.jsonl: the column 'mixed' is left out, because its values are of several types"
    )
    with pytest.raises(RunError, match="no text column 'mixed': give --text-column one of text, "):
        read(tmp_path, tokenizer, "mixed")


@pytest.mark.skipif(
    not hasattr(datasets, "Json"), reason="this release of datasets has no JSON type"
)
@pytest.mark.parametrize("rows_between", [0, 100])
def test_objects_of_json_may_differ_in_their_types(tmp_path, rows_between):
    """As the arguments of tools do in conversations, in one block of rows or in two."""
    values = [{"n": 1.5, "to": "a"}, {"n": "all", "to": ["b"]}, {}]
    calls = [None, *([{"arguments": value}] for value in values)]
    calls[2:2] = [None] * rows_between
    rows = [{"messages": [{"content": "ü", "calls": call}]} for call in calls]
    write(tmp_path, {"a.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    table = documents.load_table(str(tmp_path), None)["train"]
    assert [row["messages"] for row in table] == [row["messages"] for row in rows]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_files_of_a_card_are_read_like_others(tmp_path, name):
    """And the card may name types, such as the classes of a label."""
    classes = {"class_label": {"names": {"0": "bad", "1": "good"}}}
    types = [{"name": "text", "dtype": "string"}, {"name": "label", "dtype": classes}]
    content = {"a.jsonl": lines("2024-01-02", label=1), "a.csv": "text,label\n2024-01-02,1\n"}
    card = CARD.format(name)
    write(tmp_path, {name: content[name], "other.jsonl": "{}", "README.md": card})
    table = documents.load_table(str(tmp_path), None)["train"]
    assert table["text"] == ["2024-01-02"]
    assert table["label"] == [1 if name == "a.jsonl" else "1"]
    info = f"dataset_info: {json.dumps({'features': types})}"
    write(tmp_path, {"README.md": card.replace("configs:", f"{info}\nconfigs:")})
    table = documents.load_table(str(tmp_path), None)["train"]
    assert table["text"] == ["2024-01-02"] and table["label"] == [1]
    assert table.features["label"].names == ["bad", "good"]


SEPARATORS = {
    "a comma in the header of a .tsv": ("a.tsv", "one, two and\tthree, four, five\nx\ty, z\n"),
    "packed": ("a.tsv.gz", gzip.compress(b"one, two\tthree, four, five\nx\ty, z\n")),
    "named, as by Excel": ("a.csv", "sep=|\r\none|two, three, four\r\nx|y, z\r\n"),
}


@pytest.mark.parametrize("case", SEPARATORS)
def test_separators_that_the_header_does_not_show(tmp_path, case):
    name, content = SEPARATORS[case]
    table = documents.load_table(str(write(tmp_path, {name: content}) / name), None)["train"]
    assert list(table[0].values()) == ["x", "y, z"]


def test_numbers_are_no_text(tmp_path, tokenizer):
    """So the other column is the only one of texts, although CSV has no types."""
    write(tmp_path, {"a.csv": "id,body\n" + "".join(f"{n},{words('b')}\n" for n in range(3))})
    assert "This is b" in read(tmp_path, tokenizer)[0]


STRAY = [f"{n},text {n}" for n in range(200)]
STRAY[57], STRAY[120] = '57,"Text" 57', '120,"text 120'


def arrow_stream_without_its_end() -> bytes:
    """Return a stream that is cut off between two batches: the marker of its end has 8 bytes."""
    sink, table = pa.BufferOutputStream(), pa.table({"text": [words("a")]})
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write(table)
        stream.write(table)
    return sink.getvalue().to_pybytes()[:-8]


def table_without_rows(format_name: str) -> bytes:
    sink, table = pa.BufferOutputStream(), pa.table({"text": pa.array([], pa.string())})
    if format_name == "parquet":
        pa.parquet.write_table(table, sink)
    else:
        pa.ipc.new_stream(sink, table.schema).close()
    return sink.getvalue().to_pybytes()


NO_ROWS = {f"a.{name}": table_without_rows(name) for name in ("parquet", "arrow")}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132735\n"
REFUSED = [
    ({"a.jsonl": '{"id": "1", "messages": [{"role": "user"}]}\n'}, "give --text-column one of id."),
    ({"a.csv": "n,text\n1,hi\n2,x,y\n"}, "a.csv, from line 3 on: 3 fields, and the header has 2;"),
    ({"a.csv": "text,text\na,b\n"}, "a.csv, from line 1 on: two columns are named 'text'; corr"),
    ({"a.csv": "n;text\n", "b.csv": "n,text\n"}, "b.csv has another separator than"),
    ({"a.csv": "\n".join(STRAY)}, "a.csv, from line 58 on: ',' expected after '\"'; correct it."),
    ({"a.jsonl": '{"text": "\\ud83d"}\n'}, "a.jsonl, column 'text': 'utf-8' codec can't encode"),
    ({"a.jsonl": '{"text": "a", "text": "b"}\n'}, "line 1: an object has two members of one name"),
    ({"a.jsonl": lines("a") + '\n{"text": }\n'}, "a.jsonl, line 3: Expecting value)"),
    ({"a.json": '[\n{"text": "a"},\n]'}, "a.json, line 3: "),
    ({"a.json": '["a", ["b"]]'}, "has no text column 'text': no column is text"),
    ({"a.csv": "text,number\n"}, "has no usable data set (no rows in the split 'train'): check or"),
    *(({name: ""}, f"{name} is empty: get it again") for name in ("a.csv", "a.jsonl", "a.parquet")),
    ({"a.csv": "\n"}, "a.csv, from line 2 on: there is no header"),
    ({"a.csv.gz": gzip.compress(b"")}, "there is no header"),
    *(({"a.json": text}, "(no rows in the split 'train')") for text in ("[]", "\n")),
    *(({name: empty}, "(no rows in the split 'train')") for name, empty in NO_ROWS.items()),
    ({"train.csv": "text\na\n", "val.csv": "text\n"}, "(no rows in the split 'validation')"),
    ({"train.json": '["a"]', "val.json": "[]"}, "(no rows in the split 'validation')"),
    ({"a.jsonl": TABLE, "b.jsonl": TABLE, "README.md": TWO}, "--dataset-subset one of ['one'"),
    ({"a.txt.zst": b"\x28\xb5\x2f\xfd"}, "has no file that ends in one of: .txt"),
    ({"a.jsonl": TABLE + '{"text": "cut off'}, "a.jsonl, line 3: Unterminated string"),
    ({"a.txt": words("a"), "b.txt": POINTER}, "b.txt is only a pointer of Git LFS: get the files"),
    ({"a.csv": POINTER}, "a.csv is only a pointer of Git LFS"),
    (
        {"a.arrow": arrow_stream_without_its_end()},
        "a.arrow is cut off, because the mark",
    ),
    ({"a.parquet": POINTER}, "a.parquet is only a pointer of Git LFS"),
    (
        {"a.txt": words("a").encode("utf-16-le")},
        "a.txt has NUL characters, so it is no text, or",
    ),
    ({"a.txt": words("a") + "\0" * 100}, "a.txt has NUL characters"),
    ({"a.txt": b"one \xff word"}, "UTF-8"),
    ({"a.csv": b"text\nB\xe4ume\n"}, "UTF-8"),
    ({"a.json": b'["B\xe4ume"]'}, "UTF-8"),
    ({"a.jsonl": b'{"text": "B\xe4ume"}\n'}, "UTF-8"),
]


@pytest.mark.parametrize(("files", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_data_that_is_refused(tmp_path, tokenizer, files, reason):
    """More are in test_bad_input.py."""
    with pytest.raises(RunError) as error:
        read(write(tmp_path / "data", files), tokenizer)
    sentence = str(error.value)
    assert reason.lower() in sentence.lower()  # the libraries write UTF-8 and utf-8
    assert "\n" not in sentence and len(sentence) < 500


FEW = [words(str(n)) for n in range(5)]
PART = pa.BufferOutputStream()
pa.parquet.write_table(pa.table({"text": FEW}), PART)
WITH_EMPTY_PART = {
    "csv": ("\n".join(["text", *FEW]), "text\n"),
    "json": (json.dumps(FEW), "[]"),
    "parquet": (PART.getvalue().to_pybytes(), NO_ROWS["a.parquet"]),
}


@pytest.mark.parametrize("ending", WITH_EMPTY_PART)
def test_one_of_several_files_may_have_no_rows(tmp_path, ending):
    """As programs write them that work on many parts at the same time."""
    part, empty = WITH_EMPTY_PART[ending]
    write(tmp_path, {f"a.{ending}": empty, f"b.{ending}": part, f"c.{ending}": empty})
    assert documents.load_table(str(tmp_path), None)["train"]["text"][:] == FEW


# --- the cache: full, or another user's ---


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Return the folder HF_HOME, which is empty."""
    monkeypatch.setattr(storage.constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home/datasets")
    return tmp_path / "home"


LARGE = [words(f"large {n}", 2000) for n in range(20)]  # 400 KB
LARGE_FORMS = {"a.txt": "\n".join(LARGE), "a.json": json.dumps(LARGE)}
LARGE_FORMS["a.csv"] = "\n".join(["text", *LARGE])


@pytest.mark.parametrize(
    ("name", "cache"), [("a.txt", "tokens"), ("a.json", "tables"), ("a.csv", "datasets")]
)
def test_a_full_disk_is_named_by_its_folder(tmp_path, home, tokenizer, name, cache):
    """And what was written there is not used later."""
    write(tmp_path, {name: LARGE_FORMS[name]})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # bytes that a file may have
    try:
        with pytest.raises(RunError) as error:
            read(tmp_path / name, tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    end = "(File too large): set HF_HOME to another folder."
    assert str(error.value) == f"Cannot write to the cache {home}/{cache} {end}"
    text = "".join(read(tmp_path / name, tokenizer))
    assert all(f"This is large {n}. " in text for n in range(20))


# By what it is: where, and which of its permissions another user has.
LEFT = {
    "lock": ("tokens/*.lock", 0o444),
    "file": ("tokens/*.unfinished/train.bin", 0o444),
    "folder": ("tokens/*.unfinished", 0o555),
    "cache": ("tokens", 0o555),
    "secret cache": ("tokens", 0),
}


def leave_unfinished(path: Path, home: Path, tokenizer: object, monkeypatch) -> None:
    """Leave what a run leaves that was killed when it had written some of the tokens."""

    def encode_some(texts, tokenizer):
        yield from islice(encode(texts, tokenizer), 1)
        raise KeyboardInterrupt

    encode = data.encode
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data, "encode", encode_some)
        read(path, tokenizer)
    (unfinished,) = home.glob("tokens/*.unfinished")
    unfinished.with_suffix(".lock").touch()
    with (unfinished / "train.bin").open("ab") as file:
        file.write(bytes(10**6))  # more than is written later


@pytest.mark.parametrize("what", LEFT)
def test_what_another_user_has_left_in_the_cache(tmp_path, home, tokenizer, monkeypatch, what):
    """It is used if the permissions allow it; otherwise its name is in one sentence."""
    write(tmp_path, {"a.csv": FORMS["a.csv"], "b.csv": FORMS["a.csv"]})
    expected = read(tmp_path / "b.csv", tokenizer)
    shutil.rmtree(home / "tokens")
    leave_unfinished(tmp_path / "a.csv", home, tokenizer, monkeypatch)
    pattern, permissions = LEFT[what]
    (path,) = home.glob(pattern)
    with unreadable(path, permissions), pytest.raises(RunError) as error:
        read(tmp_path / "a.csv", tokenizer)
    assert f"{path}" in str(error.value) and "set HF_HOME to another folder." in str(error.value)
    assert "ermission" in str(error.value)
    assert read(tmp_path / "a.csv", tokenizer) == expected


@pytest.mark.parametrize("pattern", ["tokens/*", "tokens/*/*.bin", "tables/*", "tables/*/*.arrow"])
def test_what_another_user_has_written_to_the_cache(tmp_path, home, tokenizer, pattern):
    write(tmp_path, {"a.json": json.dumps(MANY)})
    expected = read(tmp_path / "a.json", tokenizer)
    if pattern.startswith("tables"):
        shutil.rmtree(home / "tokens")
    path = next(each for each in home.glob(pattern) if each.suffix != ".lock")
    with unreadable(path), pytest.raises(RunError, match=f"^No permission for {path}"):
        read(tmp_path / "a.json", tokenizer)
    assert read(tmp_path / "a.json", tokenizer) == expected


@pytest.mark.parametrize("permissions", [0o555, 0])
def test_what_another_user_has_written_to_the_cache_of_the_library(
    tmp_path, home, tokenizer, permissions
):
    write(tmp_path, {"a.csv": FORMS["a.csv"], "b.csv": FORMS["a.csv"]})
    read(tmp_path / "a.csv", tokenizer)
    with (
        unreadable(home / "datasets", permissions),
        pytest.raises(RunError, match=f"^No permission for {home}/datasets/.* in the cache {home}"),
    ):
        read(tmp_path / "b.csv", tokenizer)


def test_a_separator_in_a_text_is_named_in_a_warning(tmp_path, tokenizer, caplog):
    """It is read as text: the model would learn to write it, and never stop."""
    stories = "\n<|endoftext|>\n".join(words(str(n)) for n in range(5))
    read(write(tmp_path, {"a.txt": stories, "b.txt": words("b")}), tokenizer)
    (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert warning.message.startswith("<|endoftext|> stands in 1 texts, or pieces of large ones")


def test_a_link_to_a_folder_above_adds_no_file_twice(tmp_path):
    write(tmp_path, {"a/text.txt": "once"})
    (tmp_path / "a/up").symlink_to(tmp_path)
    assert documents.list_files(tmp_path) == [tmp_path / "a/text.txt"]


def test_what_may_not_be_read_is_not_left_out(tmp_path, tokenizer):
    """A file, a folder, and one in a folder."""
    write(tmp_path, {"a/a.txt": words("a"), "a/b/b.txt": words("b")})
    write(tmp_path, {f"tokens/{name}.bin": b"\1\0" * 64 for name in "ab"})
    for secret, dataset in (
        ("a", "a"),
        ("a/b", "a"),
        ("a/b/b.txt", "a"),
        ("tokens/b.bin", "tokens"),
    ):
        path = tmp_path / secret
        with unreadable(path), pytest.raises((RunError, PermissionError)) as error:
            read(tmp_path / dataset, tokenizer)
        sentence, status = launch._explain(error.value)
        assert str(path) in sentence and "ermission" in sentence and status == 2


# --- tokens in the cache are those of what is there now ---

CHANGES = {
    "a file more": ({"a.txt": words("a")}, {"b.txt": words("b")}),
    "a file less": ({"a.txt": words("a"), "b.txt": words("b")}, {"b.txt": None}),
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


@pytest.mark.parametrize("kept", ["size", "time"])
@pytest.mark.parametrize("name", ["a.jsonl", "folder/a.txt"])
def test_tokens_are_new_for_a_file_of_the_same(tmp_path, tokenizer, name, kept):
    """Unpacked archives keep times, and a corrected file can keep its size."""
    texts = words("a"), words("b", 60 if kept == "size" else 50)
    old, new = map(lines, texts) if name == "a.jsonl" else texts
    path, file = tmp_path / name.partition("/")[0], tmp_path / name
    write(tmp_path, {name: old})
    before = file.stat()
    assert read(path, tokenizer)[0].startswith("This is a.")
    write(tmp_path, {name: new})
    if kept == "time":
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        assert file.stat().st_size == before.st_size
    assert read(path, tokenizer)[0].startswith("This is b.")


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

"""From text to blocks of tokens, and the order that they are trained in."""

import argparse
import bz2
import csv
import functools
import gzip
import itertools
import json
import lzma
import pickle
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset, DatasetDict
from helpers import read_metrics, run_script
from runner import finish
from runner import start as start_run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.utils.data import DataLoader, DistributedSampler
from transformers import PreTrainedTokenizerFast

from common import data, documents, shards
from common.cli import RunError
from common.data import IGNORED, ResumableSampler, Sequences, load_sequences, split_batch
from common.models import load_tokenizer

TEXTS = [
    f"def function_{n}(self):\n    return {n} * 'Hüte, 你好, 🙂<|endoftext|>'\n" * (1 + n % 3)
    for n in range(240)
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("gpt2-tiny")


def arguments(path: object, text_column: str | None = None):
    return argparse.Namespace(dataset_name=str(path), dataset_subset=None, text_column=text_column)


def write_form(folder: Path, form: str) -> Path:
    """Write TEXTS as a file or folder of this form and return its path."""
    if form in ("folder", "compressed folder"):
        path = folder / "texts"
        path.mkdir()
        for number, text in enumerate(TEXTS):
            file = path / f"{number:03d}.txt"
            if form == "folder":
                file.write_text(text, encoding="utf-8")
            else:
                file.with_suffix(".txt.gz").write_bytes(gzip.compress(text.encode()))
        return path
    rows = [{"text": text, "number": number} for number, text in enumerate(TEXTS)]
    if form == "saved to disk":
        DatasetDict(train=Dataset.from_list(rows)).save_to_disk(folder / "saved")
        return folder / "saved"
    path = folder / f"data.{form.rpartition('.')[2].split()[-1]}"
    if form == "array of strings.json":
        path.write_text(json.dumps(TEXTS, ensure_ascii=False), encoding="utf-8")
    elif form == "array of objects.json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif form in ("lines.json", "lines.jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif form.startswith("lines.jsonl."):
        pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[path.suffix[1:]]
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path = path.with_suffix(f".jsonl{path.suffix}")
        path.write_bytes(pack(content))
    elif form == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "number"])
            writer.writeheader()
            writer.writerows(rows)
    elif form == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


FORMS = (
    "array of strings.json",
    "array of objects.json",
    "lines.json",
    "lines.jsonl",
    "csv",
    "parquet",
    "folder",
    "compressed folder",
    "saved to disk",
    "lines.jsonl.gz",
    "lines.jsonl.bz2",
    "lines.jsonl.xz",
)


def rows_of(sequences: Sequences) -> np.ndarray:
    """Return all sequences [n, seq_length]."""
    items = sequences.__getitems__(range(len(sequences)))
    return torch.stack([item["input_ids"] for item in items]).numpy()


def text_of(sequences: Sequences, tokenizer: object) -> str:
    return tokenizer.decode(rows_of(sequences).reshape(-1).tolist())


@pytest.fixture(scope="module")
def reference(tokenizer) -> dict[str, np.ndarray]:
    """The blocks of TEXTS, computed in the plainest way."""
    reference = {}
    for split in ("train", "evaluation"):
        tokens = []
        for text in TEXTS:
            if documents.is_held_out(text) == (split == "evaluation"):
                ids = tokenizer.encode(text, split_special_tokens=True)
                tokens += [*ids, tokenizer.eos_token_id]
        reference[split] = np.array(tokens[: len(tokens) // 16 * 16]).reshape(-1, 16)
    return reference


@pytest.mark.check
@pytest.mark.parametrize("form", FORMS)
def test_the_same_documents_give_the_same_blocks(tmp_path, tokenizer, reference, form):
    train, evaluation = load_sequences(arguments(write_form(tmp_path, form)), tokenizer, 16)
    assert np.array_equal(rows_of(train), reference["train"])
    assert np.array_equal(rows_of(evaluation), reference["evaluation"])


def check_that_tokens_do_not_depend_on_cores(
    folder: Path, tokenizer: object, reference: dict, patch: pytest.MonkeyPatch
) -> None:
    """Tokenize TEXTS in one process, and in two, each with several batches."""
    patch.setattr(data, "BYTES_PER_PROCESS", 1)
    patch.setattr(data, "ENCODED_AT_ONCE", 700)  # about 50 times
    processes, original = [], Dataset.map

    def noted_map(*args: object, num_proc: int | None = None, **options: object) -> Dataset:
        processes.append(num_proc)
        return original(*args, num_proc=num_proc, **options)

    patch.setattr(Dataset, "map", noted_map)
    for cores in (1, 2):
        patch.setattr(data, "n_cores", lambda cores=cores: cores)
        (folder / f"cores{cores}").mkdir()
        path = write_form(folder / f"cores{cores}", "csv")
        train, evaluation = load_sequences(arguments(path), tokenizer, 16)
        assert np.array_equal(rows_of(train), reference["train"]), "the tokens differ"
        assert np.array_equal(rows_of(evaluation), reference["evaluation"]), "the tokens differ"
    assert processes == [None, 2]


def test_tokens_do_not_depend_on_the_number_of_cores(tmp_path, tokenizer, reference, monkeypatch):
    check_that_tokens_do_not_depend_on_cores(tmp_path, tokenizer, reference, monkeypatch)


def test_planted_parts_out_of_order_are_noticed(tmp_path, tokenizer, reference, monkeypatch):
    """The second process's documents come first."""
    encode = data.encode_documents

    def encode_documents(*args: object) -> Dataset:
        rows = encode(*args)
        half = len(rows) // 2 * (data.n_cores() - 1)
        return rows.select([*range(half, len(rows)), *range(half)]).flatten_indices()

    monkeypatch.setattr(data, "encode_documents", encode_documents)
    with pytest.raises(AssertionError, match="the tokens differ"):
        check_that_tokens_do_not_depend_on_cores(tmp_path, tokenizer, reference, monkeypatch)


@pytest.mark.check
def test_round_trip_of_any_text(tokenizer):
    rng = random.Random(0)
    texts = [
        "深度学习的分布式训练: 数据并行, 模型并行.\n\t混合精度",
        bytes(range(256)).decode("latin-1"),
        "".join(chr(rng.randrange(32, 0xD800)) for _ in range(2000)),
        "a  b\t\tc \n\n\n    d\r\n ",
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) <= 8192


@pytest.mark.nightly
def test_built_in_corpus(tokenizer):
    train, evaluation = load_sequences(arguments("python-stdlib"), tokenizer, 128)
    assert len(train) > 10_000 and 100 < len(evaluation) < len(train) / 10
    assert 0.2 < train.tokens_per_byte < 0.35
    text = tokenizer.decode(train.streams[0][: len(train.streams[0]) // 2].tolist())
    assert "class OrderedDict(dict):" in text or "class ArgumentParser(" in text
    root = Path(argparse.__file__).parent
    found = documents.list_files(root, skip=documents.NOT_CODE)
    files = [path.relative_to(root).as_posix() for path in found if path.suffix == ".py"]
    assert "argparse.py" in files and "json/decoder.py" in files
    for unwanted in ("site-packages", "/test/", "test/", "encodings/", "idlelib", "_sysconfigdata"):
        assert not any(path.startswith(unwanted) or f"/{unwanted}" in path for path in files)


@functools.cache
def word_tokenizer(n_tokens: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0, w1, ..., and an end-of-text token, the last one."""
    vocabulary = {f"w{number}": number for number in range(n_tokens - 1)}
    vocabulary["<|endoftext|>"] = n_tokens - 1
    words = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")


def check_that_no_token_wraps(folder: Path, n_tokens: int) -> None:
    """Pack words with the lowest and the highest numbers of a vocabulary of this size."""
    tokenizer = word_tokenizer(n_tokens)
    path = folder / "texts.json"
    path.write_text(json.dumps([f"w0 w{n} w{n_tokens - 2}" for n in range(500)]))
    train, _ = load_sequences(arguments(path), tokenizer, 4)
    assert {(row[0], *row[2:]) for row in rows_of(train).tolist()} == {
        (0, n_tokens - 2, n_tokens - 1)
    }
    assert train.streams[0].itemsize == (2 if n_tokens <= 2**16 else 4), "bytes per token"


@pytest.mark.check
@pytest.mark.parametrize("n_tokens", [2**16, 2**16 + 1])
def test_tokens_of_a_large_vocabulary_do_not_wrap(tmp_path, n_tokens):
    check_that_no_token_wraps(tmp_path, n_tokens)


def parts_of(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts for training and for evaluation."""
    rows = Dataset.from_dict({"text": texts})
    return tuple(list(documents.read_documents(rows, held_out)) for held_out in (False, True))


@pytest.mark.check
def test_split_is_stable_and_leaks_nothing():
    held_out = [text for text in TEXTS if documents.is_held_out(text)]
    assert 2 <= len(held_out) <= 30
    shuffled = TEXTS * 2
    random.Random(1).shuffle(shuffled)
    train, evaluation = parts_of(shuffled)
    assert sorted(evaluation) == sorted(held_out * 2)
    assert not set(train) & set(evaluation)


@pytest.mark.check
def test_a_worker_maps_the_file_and_gets_no_copy(tmp_path, tokenizer):
    blocks, _ = load_sequences(arguments(write_form(tmp_path, "csv")), tokenizer, 16)
    content = pickle.dumps(blocks.pad_to_multiple(1000))
    assert len(content) < 9000 < blocks.streams[0].nbytes
    again = pickle.loads(content)
    assert len(again) % 1000 == 0 and again.digest == blocks.digest
    assert torch.equal(again[7]["input_ids"], blocks[7]["input_ids"])


@pytest.mark.check
def test_few_documents_give_their_ends(tmp_path, tokenizer):
    path = tmp_path / "book.txt"
    text = "".join(f"Line {n} of the book.\n" for n in range(1000))
    path.write_text(text)
    (train,), (evaluation,) = parts_of([text])
    assert train + evaluation == text
    assert 0.04 < len(evaluation) / len(text) < 0.06
    assert all(len(part) for part in load_sequences(arguments(path), tokenizer, 32))


@pytest.mark.check
def test_second_start_reads_the_cache(tmp_path, tokenizer, monkeypatch):
    path = write_form(tmp_path, "folder")
    first = load_sequences(arguments(path), tokenizer, 16)
    monkeypatch.setattr(data, "encode_documents", None)  # calling it would fail
    again = load_sequences(arguments(path), tokenizer, 16)
    assert np.array_equal(rows_of(first[0]), rows_of(again[0]))
    monkeypatch.undo()
    (path / "000.txt").write_text("another text\n" * 20)
    changed = load_sequences(arguments(path), tokenizer, 16)
    assert changed[0].digest != first[0].digest
    # Other letters, as many as before.
    (path / "000.txt").write_text("ANOTHER TEXT\n" * 20)
    assert load_sequences(arguments(path), tokenizer, 16)[0].digest != changed[0].digest


@pytest.mark.check
def test_a_subset_of_a_data_set(tmp_path, tokenizer):
    """Also when the cache has another one."""
    lines = ["---", "configs:"]
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"This is {name}. " * 400}))
        lines += [f"- config_name: {name}", f"  data_files: {name}.jsonl"]
    (tmp_path / "README.md").write_text("\n".join([*lines, "---", ""]))
    for name in ("one", "two"):
        args = arguments(tmp_path)
        args.dataset_subset = name
        train, _ = load_sequences(args, tokenizer, 16)
        text = text_of(train, tokenizer)
        assert ("one" in text, "two" in text) == (name == "one", name == "two")


@pytest.mark.check
def test_another_column_of_a_file_is_another_text(tmp_path, tokenizer):
    """Also when the cache has the first one."""
    path = tmp_path / "table.jsonl"
    row = json.dumps({"question": "What is it? " * 40, "answer": "It is this. " * 40})
    path.write_text(f"{row}\n" * 3)
    for column in ("question", "answer"):
        train, _ = load_sequences(arguments(path, text_column=column), tokenizer, 16)
        text = text_of(train, tokenizer)
        assert ("What" in text, "this" in text) == (column == "question", column == "answer")


@pytest.mark.check
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_share_every_global_batch(world_size):
    global_batch, alone = 12, ResumableSampler(range(103), num_replicas=1, rank=0, seed=5)
    alone.set_epoch(2)
    expected = list(alone)
    share = global_batch // world_size
    ranks = []
    for rank in range(world_size):
        sampler = ResumableSampler(
            range(103), num_replicas=world_size, rank=rank, seed=5, drop_last=True
        )
        sampler.set_epoch(2, start=share)  # the second step of the epoch on
        ranks.append(list(sampler))
    for step in range(1, 8):
        together = [
            sample for samples in ranks for sample in samples[(step - 1) * share : step * share]
        ]
        assert sorted(together) == sorted(expected[step * global_batch : (step + 1) * global_batch])


@pytest.mark.check
def test_skipping_loads_no_sample():
    class Counting(torch.utils.data.Dataset):
        loaded = 0

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> int:
            Counting.loaded += 1
            return index

    sampler = ResumableSampler(Counting(), num_replicas=1, rank=0, seed=0)
    sampler.set_epoch(0, start=990)
    assert len(list(DataLoader(Counting(), batch_size=5, sampler=sampler))) == 2
    assert Counting.loaded == 10


@pytest.mark.check
@pytest.mark.parametrize(
    ("global_batch", "world", "most", "expected"),
    [
        (24, 1, 8, (8, 3)),
        (24, 1, 7, (6, 4)),
        (24, 2, 8, (6, 2)),
        (24, 8, 8, (3, 1)),
        (7, 1, 4, (1, 7)),
    ],
)
def test_batch_arithmetic(global_batch, world, most, expected):
    args = argparse.Namespace(global_batch_size=global_batch, batch_size=most)
    micro_batch_size, accumulation = split_batch(args, world, n_sequences=100)
    assert (micro_batch_size, accumulation) == expected
    assert micro_batch_size * accumulation * world == global_batch
    with pytest.raises(RunError, match="7 devices cannot share --global-batch-size 24 evenly"):
        split_batch(argparse.Namespace(global_batch_size=24, batch_size=8), 7, n_sequences=100)


def check_that_batches_are_their_rows(part: Sequences, expected: np.ndarray) -> None:
    """Read batches in one go, some with padding and with rows twice, without and with workers."""
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


def stored_forms(folder: Path, padding: int) -> dict[str, tuple[Sequences, np.ndarray]]:
    """Return sequences in a memory map and in shards, and what they hold."""
    write_shards(folder / "tokens", "npy")
    np.save(folder / "tokens/b_train.npy", np.arange(70_000, 70_110, dtype="<u4"))
    files = shards.find_shards(str(folder / "tokens"))
    streams, *facts = shards.open_shards(files, word_tokenizer(10**5))[0]
    in_shards = Sequences(streams, 16, *facts)
    expected = [np.load(file)[: 16 * (len(np.load(file)) // 16)] for file in files[:2]]
    expected = np.concatenate(expected).astype(np.int64).reshape(-1, 16)
    expected.astype("<u4").tofile(folder / "map.bin")
    mapped = Sequences([np.memmap(folder / "map.bin", "<u4", "r")], 16, "", 1.0)
    forms = {"memory map": mapped, "shards": in_shards}
    return {
        name: (part.pad_to_multiple(len(part) + padding) if padding else part, expected)
        for name, part in forms.items()
    }


@pytest.mark.check
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("form", ["memory map", "shards"])
def test_a_batch_in_one_go_is_its_rows(tmp_path, form, padding):
    check_that_batches_are_their_rows(*stored_forms(tmp_path, padding)[form])


@pytest.mark.check
def test_planted_rows_in_the_order_of_the_file(tmp_path, monkeypatch):
    """Sorted reads are faster on a disk, and the rows must come back in the order of the batch."""
    getitems = Sequences.__getitems__
    monkeypatch.setattr(Sequences, "__getitems__", lambda self, rows: getitems(self, sorted(rows)))
    with pytest.raises(AssertionError, match="the rows differ"):
        check_that_batches_are_their_rows(*stored_forms(tmp_path, 0)["memory map"])


def warnings_of(caplog, monkeypatch, n_sequences: int, rank: int = 0, **options: object) -> list:
    """Return what split_batch warns of, for a global batch of 24 sequences."""
    args = {"global_batch_size": 24, "batch_size": 8, "max_steps": None, "num_epochs": 0.6}
    monkeypatch.setenv("RANK", str(rank))
    caplog.clear()
    split_batch(argparse.Namespace(**{**args, **options}), 1, n_sequences)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.check
def test_a_run_that_is_short_for_its_data_says_so(caplog, monkeypatch):
    warnings = functools.partial(warnings_of, caplog, monkeypatch)
    (warning,) = warnings(100)
    assert warning == (
        "This run has only 2 steps, because the training data is only 100 sequences: give "
        "--num-epochs 12.5 for at least 50 steps, or --max-steps, or a smaller --global-batch-size."
    )
    assert "only 1 step, because" in warnings(24)[0]
    assert warnings(100, rank=1) == warnings(100, max_steps=2) == warnings(24 * 84) == []
    for n_sequences in (24, 100, 1000, 24 * 81):
        (warning,) = warnings(n_sequences)
        num_epochs = float(warning.split("--num-epochs ")[1].split()[0])
        assert warnings(n_sequences, num_epochs=num_epochs) == []
        assert round(num_epochs * (n_sequences // 24)) >= 50


@pytest.mark.check
def test_a_folder_without_a_training_split_is_refused(tmp_path):
    (tmp_path / "test.csv").write_text("text\nhello\n")
    with pytest.raises(RunError, match="has no split named train, only test: rename"):
        documents.load_table(str(tmp_path), None)


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
    rows = documents.find_documents(str(path), None, None).load()
    return list(zip(rows["text"], rows["ends"], strict=True))


@pytest.mark.check
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_text_and_json_as_windows_writes_them(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("Straße\r\nund Bäume", encoding, newline="")
    assert pieces_of(tmp_path / "a.txt") == [("Straße\nund Bäume", True)]
    (tmp_path / "a.json").write_text('["Bäume"]', encoding)
    assert documents.load_table(str(tmp_path / "a.json"), None)["train"]["text"][:] == ["Bäume"]


@pytest.mark.check
def test_bytes_that_are_not_utf_8(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("Straße", "utf-16")
    with pytest.raises(RunError, match="is UTF-16: convert it"):
        pieces_of(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_bytes(b"one \xff word")
    assert pieces_of(tmp_path / "b.txt") == [("one \ufffd word", True)]
    assert "b.txt is not UTF-8" in caplog.text


@pytest.mark.check
def test_a_large_file_is_read_in_pieces(tmp_path, tokenizer, monkeypatch):
    """Pieces end at the end of a line; the end-of-text token comes where the file ends."""
    monkeypatch.setattr(documents, "PIECE", 100)
    for name in "ab":
        lines = [f"{name} {n} of the lines of this document\n" for n in range(60)]
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    pieces = pieces_of(tmp_path)
    assert 20 < len(pieces) < 60 and all(text.endswith("\n") for text, _ in pieces)
    whole = [(tmp_path / f"{name}.txt").read_text() for name in "ab"]
    assert "".join(text for text, _ in pieces) == "".join(whole)
    assert [number for number, (_, ends) in enumerate(pieces) if ends] == [
        len(pieces) // 2 - 1,
        len(pieces) - 1,
    ]
    train, evaluation = load_sequences(arguments(tmp_path), tokenizer, 16)
    for part in (train, evaluation):
        assert np.count_nonzero(part.streams[0] == tokenizer.eos_token_id) == 2


@pytest.mark.check
def test_the_name_of_a_special_token_is_text(tmp_path, tokenizer):
    path = tmp_path / "texts.json"
    texts = [f"{n}\n" + "what <|endoftext|> means\n" * 9 for n in range(300)]
    path.write_text(json.dumps(texts))
    train, evaluation = load_sequences(arguments(path), tokenizer, 16)
    for part, expected in zip((train, evaluation), parts_of(texts), strict=True):
        assert np.count_nonzero(part.streams[0] == tokenizer.eos_token_id) == len(expected)
        text = tokenizer.decode(part.streams[0].tolist())
        assert text.count("<|endoftext|> means") == 9 * len(expected)


@pytest.mark.check
def test_missing_values_of_a_csv_file_are_texts(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nNA,1\nNone,2\nnull,3\nyes,4\n")
    table = documents.load_table(str(tmp_path / "a.csv"), None)["train"]
    assert table["text"][:] == ["NA", "None", "null", "yes"] and table["label"][:] == [1, 2, 3, 4]


@pytest.mark.check
def test_a_folder_of_several_kinds_is_asked_back(tmp_path):
    (tmp_path / "book.txt").write_text("text\n" * 9)
    (tmp_path / "titles.csv").write_text("text\nA title\n")
    with pytest.raises(RunError, match=r"files of several kinds \(.*book.txt.*\): give one"):
        documents.find_documents(str(tmp_path), None, None)
    (tmp_path / "README.md").write_text("A card, as data sets of the hub have it.\n")
    (tmp_path / "book.txt").unlink()
    assert documents.load_table(str(tmp_path), None)["train"]["text"][:] == ["A title"]
    (tmp_path / "lost.csv").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"lost\.csv is a link to nothing"):
        documents.find_documents(str(tmp_path), None, None)


@pytest.mark.check
def test_tokens_are_stored_once_for_all_sequence_lengths(tmp_path, tokenizer, monkeypatch):
    path = write_form(tmp_path, "csv")
    long = load_sequences(arguments(path), tokenizer, 32)[0]
    monkeypatch.setattr(data, "encode_documents", None)  # calling it would fail
    short = load_sequences(arguments(path), tokenizer, 16)[0]
    assert short.digest == long.digest
    assert np.array_equal(rows_of(short).reshape(-1)[: rows_of(long).size], rows_of(long).ravel())


@pytest.mark.check
@pytest.mark.parametrize(("n", "world_size"), [(1000, 1), (1000, 3), (5, 8)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_order_is_that_of_distributed_sampler(n, world_size, drop_last):
    """Also at the end, where DistributedSampler repeats some samples or drops them."""
    for rank, epoch, start in itertools.product(range(world_size), (0, 2), (0, 7, n)):
        theirs = DistributedSampler(range(n), world_size, rank, seed=5, drop_last=drop_last)
        ours = ResumableSampler(range(n), world_size, rank, seed=5, drop_last=drop_last)
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch, start=start)
        assert list(ours) == list(theirs)[start:]


@pytest.mark.check
@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_a_tokenizer_that_was_saved_with_limits_keeps_all_text(tmp_path, setting):
    """Its tokenizer.json can ask for truncation or padding, which must not change a corpus."""
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(["short", TEXTS[2] * 20]))
    found = []
    for name in ("plain", setting):
        tokenizer = load_tokenizer("gpt2-tiny")
        if name == "truncation":
            tokenizer.backend_tokenizer.enable_truncation(16)
        elif name == "padding":
            tokenizer.backend_tokenizer.enable_padding()
        found.append(load_sequences(arguments(path), tokenizer, 16)[0].streams[0])
    assert np.array_equal(*found) and len(found[0]) > 100


# --- an interruption ---


@pytest.mark.check
def test_an_interrupted_tokenization_starts_again(tmp_path, tokenizer, reference, monkeypatch):
    """What was left by it changes nothing."""
    path, write = write_form(tmp_path, "csv"), data.write_tokens

    def stop(file: Path, *args: object) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "write_tokens", stop)
    with pytest.raises(KeyboardInterrupt):
        load_sequences(arguments(path), tokenizer, 16)
    monkeypatch.setattr(data, "write_tokens", write)
    train, evaluation = load_sequences(arguments(path), tokenizer, 16)
    assert np.array_equal(rows_of(train), reference["train"])
    assert np.array_equal(rows_of(evaluation), reference["evaluation"])


# --- ready-made tokens ---


def write_shards(folder: Path, form: str, dtype: str = "<u2") -> list[np.ndarray]:
    """Write three shards of 100 to 120 tokens, one of them for evaluation; return their tokens."""
    folder.mkdir()
    shards = [np.arange(n, n + 100 + 10 * n, dtype=dtype) for n in range(3)]
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


@pytest.mark.check
@pytest.mark.parametrize("form", ["npy", "bin", "llm.c"])
def test_ready_made_tokens(tmp_path, tokenizer, form):
    shards = write_shards(tmp_path / "tokens", form)
    train, evaluation = load_sequences(arguments(tmp_path / "tokens"), tokenizer, 16)
    expected = [shard[: len(shard) // 16 * 16].reshape(-1, 16) for shard in shards]
    assert len(train) == len(expected[0]) + len(expected[1]) and len(evaluation) == 7
    rows = [train[index]["input_ids"].tolist() for index in range(len(train))]
    assert rows == [*expected[0].tolist(), *expected[1].tolist()]
    assert [evaluation[i]["labels"].tolist() for i in range(7)] == expected[2].tolist()
    again = pickle.loads(pickle.dumps(train))
    assert again[7]["input_ids"].tolist() == rows[7] and again.digest == train.digest
    assert not list((tmp_path / "tokens").glob("*.tmp")) and train.tokens_per_byte > 0


@pytest.mark.check
def test_ready_made_tokens_that_cannot_be_used(tmp_path, tokenizer):
    def refused(reason: str) -> None:
        with pytest.raises(RunError, match=reason):
            load_sequences(arguments(tmp_path / "tokens"), tokenizer, 16)

    write_shards(tmp_path / "tokens", "llm.c")
    path = tmp_path / "tokens/b_train.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\2" + whole[5:])
    refused("a header of version 2")
    path.write_bytes(whole[:-2])
    refused("a header of version 1 with 110 tokens")
    path.write_bytes(whole[:-2] + b"\xff\xff")
    refused("token 65535, and the tokenizer has 4096")
    path.unlink()
    np.save(path.with_suffix(".npy"), np.zeros(100))
    refused("float64")
    np.save(path.with_suffix(".npy"), np.zeros((50, 50), dtype="<u2"))
    refused("uint16 .50, 50.")
    for content in (b"no array", b""):
        path.with_suffix(".npy").write_bytes(content)
        refused("does not hold tokens")
    for other in ("a_train.bin", "b_train.npy"):
        (tmp_path / "tokens" / other).unlink()
    refused("no shard for training")


@pytest.mark.check
def test_ready_made_tokens_have_the_bits_per_byte_of_their_text(tmp_path, tokenizer):
    """End-of-text tokens are not text, as where documents are tokenized here."""
    texts = [f"x = {n}\n" for n in range(500)]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    own, _ = load_sequences(arguments(tmp_path / "texts.json"), tokenizer, 10)
    (tmp_path / "tokens").mkdir()
    for name in ("a", "b", ".hidden"):
        own.streams[0].tofile(tmp_path / f"tokens/{name}.bin")
    train, evaluation = load_sequences(arguments(tmp_path / "tokens"), tokenizer, 10)
    assert len(train) == len(evaluation) == len(own)
    assert evaluation.tokens_per_byte == pytest.approx(own.tokens_per_byte)


@pytest.mark.check
@pytest.mark.parametrize("form", ["npy", "bin"])
def test_ready_made_tokens_of_a_large_vocabulary(tmp_path, form):
    """Tokens from 0 to 69,999, which need 32 bits."""
    arrays = [np.arange(n, 70_000, 7, dtype="<u4") for n in range(3)]
    for name, tokens in zip("abc", arrays, strict=True):
        file = tmp_path / f"{name}.{form}"
        np.save(file, tokens) if form == "npy" else tokens.tofile(file)
    train, evaluation = load_sequences(arguments(tmp_path), word_tokenizer(70_000), 16)
    for part, own in ((train, arrays[:2]), (evaluation, arrays[2:])):
        expected = np.concatenate([tokens[: len(tokens) // 16 * 16] for tokens in own])
        found = torch.cat([row["input_ids"] for row in part.__getitems__(range(len(part)))])
        # Not lists: where they differ, pytest would compare them line by line, for minutes on CI.
        assert np.array_equal(found.numpy(), expected), "the tokens differ"
        assert expected.max() > 2**16


@pytest.mark.nightly
def test_chapter_1_trains_on_ready_made_tokens_and_resumes(tmp_path):
    """evaluate.py finds the numbers of the run, over all shards for evaluation."""
    (tmp_path / "tokens").mkdir()
    rng, names = np.random.default_rng(0), ("train_1", "train_2", "val_1", "val_2")
    for name, count in zip(names, (2000, 1500, 700, 500), strict=True):
        rng.integers(0, 4096, count).astype("<u2").tofile(tmp_path / f"tokens/{name}.bin")
    flags = ["-d", tmp_path / "tokens", "-s", 32, "--global-batch-size", 6, "--max-steps", 6]
    flags += ["--log-freq", 1, "--ckpt-freq", 2, "--save-dir", tmp_path, "-e"]
    assert finish(start_run([*flags, "unbroken"])) == 0
    assert finish(start_run([*flags, "resumed"], kill_after_steps=5)) < 0
    assert max(file.name for file in tmp_path.glob("resumed/checkpoints/*")) == "step-00000004"
    assert finish(start_run([*flags, "resumed"])) == 0
    metrics, resumed = (read_metrics(tmp_path / name) for name in ("unbroken", "resumed"))
    assert len(metrics) == 6
    assert [line["loss"] for line in resumed] == [line["loss"] for line in metrics]

    output = tmp_path / "evaluated.json"
    done = run_script("01-single-gpu/evaluate.py", tmp_path / "unbroken", "--output", output)
    assert done.returncode == 0 and "the number of bytes is an estimate" in done.stdout
    found = json.loads(output.read_text())
    assert found["tokens"] == 700 + 500, "not all shards"
    assert found["scored_tokens"] == 31 * (700 // 32 + 500 // 32)
    assert found["loss"] == pytest.approx(metrics[-1]["eval_loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(metrics[-1]["bits_per_byte"], rel=1e-3)

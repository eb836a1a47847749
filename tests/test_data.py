"""From text to blocks of tokens, and the order that they are trained in."""

import argparse
import contextlib
import csv
import errno
import functools
import io
import itertools
import json
import pickle
import random
import re
import sys
import time
import tracemalloc
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from helpers import read_metrics, register, run_script
from runner import finish
from runner import start as start_run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import (
    PreTrainedTokenizerFast,
)

from common.cli import InputError
from common.data import (
    IGNORED,
    ResumableSampler,
    Sequences,
    load_sequences,
    shards,
    sources,
    split_batch,
    token_cache,
)
from common.data.sources import find_source
from common.models import load_tokenizer

TEXTS = [
    f"def function_{n}(self):\n    return {n} * 'Hüte, 你好, 🙂'\n" * (1 + n % 3)
    for n in range(240)
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("gpt2-tiny")


def arguments(path: object, text_column: str | None = None):
    return argparse.Namespace(dataset_name=str(path), dataset_subset=None, text_column=text_column)


def write_form(folder: Path, form: str) -> Path:
    """Write TEXTS as a file or folder of this form and return its path."""
    if form == "folder":
        path = folder / "texts"
        path.mkdir()
        for number, text in enumerate(TEXTS):
            (path / f"{number:03d}.txt").write_text(text, encoding="utf-8")
        return path
    path = folder / f"data.{form.split()[-1]}"
    rows = [{"text": text, "number": number} for number, text in enumerate(TEXTS)]
    if form == "array of strings.json":
        path = folder / "data.json"
        path.write_text(json.dumps(TEXTS, ensure_ascii=False), encoding="utf-8")
    elif form == "array of objects.json":
        path = folder / "data.json"
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif form in ("lines.json", "lines.jsonl"):
        path = folder / f"data.{form.split('.')[-1]}"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
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
)


@pytest.fixture(scope="module")
def reference(tokenizer) -> dict[str, np.ndarray]:
    """The blocks of TEXTS, computed in the plainest way."""
    reference = {}
    for split in ("train", "evaluation"):
        tokens = []
        for text in TEXTS:
            if sources.is_held_out(text) == (split == "evaluation"):
                tokens += [*tokenizer.encode(text), tokenizer.eos_token_id]
        reference[split] = np.array(tokens[: len(tokens) // 16 * 16]).reshape(-1, 16)
    return reference


@pytest.mark.check
@pytest.mark.parametrize("form", FORMS)
def test_the_same_documents_give_the_same_blocks(tmp_path, tokenizer, reference, form):
    train, evaluation = load_sequences(arguments(write_form(tmp_path, form)), tokenizer, 16)
    assert np.array_equal(train.tokens, reference["train"])
    assert np.array_equal(evaluation.tokens, reference["evaluation"])


def check_that_tokens_do_not_depend_on_cores(
    folder: Path, tokenizer: object, reference: dict, loader: Callable = DataLoader
) -> None:
    """Tokenize TEXTS with no data worker and with two. `loader` makes them."""
    workers = []

    def note_workers(*args: object, **options: object) -> DataLoader:
        workers.append(options["num_workers"])
        return loader(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "DataLoader", note_workers)
        patch.setattr(token_cache, "BATCH_CHARACTERS", 700)  # about 50 batches
        for cores in (0, 2):
            patch.setattr(token_cache, "n_cores", lambda cores=cores: cores)
            (folder / f"cores{cores}").mkdir()
            path = write_form(folder / f"cores{cores}", "csv")
            train, evaluation = load_sequences(arguments(path), tokenizer, 16)
            assert np.array_equal(train.tokens, reference["train"]), "the tokens differ"
            assert np.array_equal(evaluation.tokens, reference["evaluation"]), "the tokens differ"
    # There are too few documents for evaluation to start workers for them.
    assert workers == [0, 0, 2, 0], "other numbers of data workers"


def test_tokens_do_not_depend_on_the_number_of_cores(tmp_path, tokenizer, reference):
    check_that_tokens_do_not_depend_on_cores(tmp_path, tokenizer, reference)


def test_planted_workers_out_of_order_are_noticed(tmp_path, tokenizer, reference, monkeypatch):
    encode = token_cache._Encoded.__getitem__

    def first_batch_late(self, batch: list[str]) -> tuple:
        time.sleep(0.5 * (batch[0] == TEXTS[0]))
        return encode(self, batch)

    monkeypatch.setattr(token_cache._Encoded, "__getitem__", first_batch_late)
    unordered = functools.partial(DataLoader, in_order=False)
    with pytest.raises(AssertionError, match="the tokens differ"):
        check_that_tokens_do_not_depend_on_cores(tmp_path, tokenizer, reference, unordered)


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
    text = tokenizer.decode(train.tokens[: len(train) // 2].reshape(-1).tolist())
    assert "class OrderedDict(dict):" in text or "class ArgumentParser(" in text
    root = Path(argparse.__file__).parent
    files = [path.as_posix() for path in sources._files(root, (".py",), skip=sources.NOT_CODE)]
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
    documents = sources.documents_of([f"w0 w1 w{n_tokens - 2}"] * 3)
    token_cache.pack_documents(folder / "text", documents, tokenizer, num_workers=0)
    facts = json.loads((folder / "text.json").read_text())
    found = np.fromfile(folder / "text.bin", facts["dtype"]).tolist()
    assert found == [0, 1, n_tokens - 2, n_tokens - 1] * 3
    size = 2 if n_tokens <= 2**16 else 4
    assert (folder / "text.bin").stat().st_size == size * facts["tokens"], "bytes per token"


@pytest.mark.check
@pytest.mark.parametrize("n_tokens", [2**16, 2**16 + 1])
def test_tokens_of_a_large_vocabulary_do_not_wrap(tmp_path, n_tokens):
    check_that_no_token_wraps(tmp_path, n_tokens)


@pytest.mark.check
def test_split_is_stable_and_leaks_nothing(tmp_path, tokenizer):
    held_out = [text for text in TEXTS if sources.is_held_out(text)]
    assert 2 <= len(held_out) <= 30
    shuffled = TEXTS * 2
    random.Random(1).shuffle(shuffled)
    train, evaluation = sources.split_documents(sources.documents_of(shuffled))
    assert sorted(evaluation["text"]) == sorted(held_out * 2)
    assert not set(train["text"]) & set(evaluation["text"])


@pytest.mark.check
def test_a_worker_maps_the_file_and_gets_no_copy(tmp_path, tokenizer):
    blocks, _ = load_sequences(arguments(write_form(tmp_path, "csv")), tokenizer, 16)
    content = pickle.dumps(blocks.pad_to_multiple(1000))
    assert len(content) < 1000 < blocks.tokens.nbytes
    again = pickle.loads(content)
    assert len(again) % 1000 == 0 and again.digest == blocks.digest
    assert torch.equal(again[7]["input_ids"], blocks[7]["input_ids"])


@pytest.mark.check
def test_few_documents_give_their_ends(tmp_path, tokenizer):
    path = tmp_path / "book.txt"
    text = "".join(f"Line {n} of the book.\n" for n in range(1000))
    path.write_text(text)
    train, evaluation = sources.split_documents(sources.documents_of([text]))
    assert train["text"][0] + evaluation["text"][0] == text
    assert 0.04 < len(evaluation["text"][0]) / len(text) < 0.06
    assert all(len(part) for part in load_sequences(arguments(path), tokenizer, 32))


@pytest.mark.check
def test_second_start_reads_the_cache(tmp_path, tokenizer, monkeypatch):
    path = write_form(tmp_path, "folder")
    first = load_sequences(arguments(path), tokenizer, 16)
    monkeypatch.setattr(token_cache, "pack_documents", None)  # calling it would fail
    again = load_sequences(arguments(path), tokenizer, 16)
    assert np.array_equal(first[0].tokens, again[0].tokens)
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
        text = tokenizer.decode(train.tokens.reshape(-1).tolist())
        assert ("one" in text, "two" in text) == (name == "one", name == "two")


@pytest.mark.check
def test_another_column_of_a_file_is_another_text(tmp_path, tokenizer):
    """Also when the cache has the first one."""
    path = tmp_path / "table.jsonl"
    row = json.dumps({"question": "What is it? " * 40, "answer": "It is this. " * 40})
    path.write_text(f"{row}\n" * 3)
    for column in ("question", "answer"):
        train, _ = load_sequences(arguments(path, text_column=column), tokenizer, 16)
        text = tokenizer.decode(train.tokens.reshape(-1).tolist())
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
    with pytest.raises(InputError, match="7 devices cannot share --global-batch-size 24 evenly"):
        split_batch(argparse.Namespace(global_batch_size=24, batch_size=8), 7, n_sequences=100)


def check_that_batches_are_their_rows(data: Sequences, expected: np.ndarray) -> None:
    """Read batches in one go, some with padding and with rows twice, without and with workers."""
    n_padding = len(data) - len(expected)
    rows = [*expected.tolist(), *[[0] * expected.shape[1]] * n_padding]
    labels = [*expected.tolist(), *[[IGNORED] * expected.shape[1]] * n_padding]
    order = [len(data) - 1, 0, len(expected) - 1, 2, 2, 1, len(expected) // 2, 3]
    for workers in (0, 2):
        batches = list(DataLoader(data, batch_size=4, sampler=order, num_workers=workers))
        found = torch.cat([batch["input_ids"] for batch in batches])
        assert found.dtype == torch.int64
        assert found.tolist() == [rows[index] for index in order], "the rows differ"
        found = torch.cat([batch["labels"] for batch in batches])
        assert found.tolist() == [labels[index] for index in order], "the labels differ"
    for index in order:
        assert data[index]["input_ids"].tolist() == rows[index], "the rows differ"


def stored_forms(folder: Path, padding: int) -> dict[str, tuple[Sequences, np.ndarray]]:
    """Return sequences in a memory map and in shards, and what they hold."""
    write_shards(folder / "tokens", "npy")
    np.save(folder / "tokens/b_train.npy", np.arange(70_000, 70_110, dtype="<u4"))
    files = shards.find_shards(str(folder / "tokens"))
    in_shards, _ = shards.load_shards(files, word_tokenizer(10**5), 16)
    expected = [np.load(file)[: 16 * (len(np.load(file)) // 16)] for file in files[:2]]
    expected = np.concatenate(expected).astype(np.int64).reshape(-1, 16)
    expected.astype("<u4").tofile(folder / "map.bin")
    mapped = Sequences(np.memmap(folder / "map.bin", "<u4", "r", shape=expected.shape), "", 1.0)
    forms = {"memory map": mapped, "shards": in_shards}
    return {
        name: (data.pad_to_multiple(len(data) + padding) if padding else data, expected)
        for name, data in forms.items()
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
    with pytest.raises(InputError, match="has no split named train, only test: rename"):
        sources.load_table(str(tmp_path), None)


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
    assert sources.load_table(name, None)["train"]["text"][:] == ["right"]


@pytest.mark.check
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_and_json_as_windows_writes_them(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("Straße\nund Bäume", encoding)
    assert sources._read_text(tmp_path / "a.txt") == "Straße\nund Bäume"
    if encoding != "utf-16":
        (tmp_path / "a.json").write_text('["Bäume"]', encoding)
        assert sources.read_json_strings(tmp_path / "a.json") == ["Bäume"]


@pytest.mark.check
def test_tokens_are_stored_once_for_all_sequence_lengths(tmp_path, tokenizer, monkeypatch):
    path = write_form(tmp_path, "csv")
    long = load_sequences(arguments(path), tokenizer, 32)[0]
    monkeypatch.setattr(token_cache, "pack_documents", None)  # calling it would fail
    short = load_sequences(arguments(path), tokenizer, 16)[0]
    assert short.digest == long.digest
    assert np.array_equal(short.tokens.reshape(-1)[: long.tokens.size], long.tokens.reshape(-1))


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
    documents = sources.documents_of(["short", TEXTS[2] * 20])
    for name in ("plain", setting):
        tokenizer = load_tokenizer("gpt2-tiny")
        if name == "truncation":
            tokenizer.backend_tokenizer.enable_truncation(16)
        elif name == "padding":
            tokenizer.backend_tokenizer.enable_padding()
        token_cache.pack_documents(tmp_path / name, documents, tokenizer, 0)
    plain, limited = ((tmp_path / f"{name}.bin").read_bytes() for name in ("plain", setting))
    assert plain == limited and len(plain) > 200


# --- progress, and a full disk ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.check
def test_the_rank_that_tokenizes_shows_progress(tmp_path, tokenizer, caplog):
    """Tokenize as rank 1, which may hold the lock; with a clock on which a batch takes 10 s."""
    clock, documents = itertools.count(0, 10), sources.documents_of(TEXTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setattr(token_cache, "BATCH_CHARACTERS", 2000)
        patch.setattr(token_cache, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
        patch.setattr(sys, "stderr", log := io.StringIO())
        caplog.set_level("WARNING")  # as on all ranks but 0
        caplog.clear()
        token_cache.pack_documents(tmp_path / "log", documents, tokenizer, 0)
        lines = [record.getMessage() for record in caplog.records]
        n_batches = len(list(token_cache._read_batches(Subset(documents, range(240)))))
        assert n_batches > 10 and n_batches // 4 <= len(lines) <= n_batches // 2, "no lines"
        assert all(re.fullmatch(r"tokenizing: \d+ of 240 documents", line) for line in lines)
        assert not log.getvalue(), "a progress bar in a log"
        caplog.clear()
        patch.setattr(sys, "stderr", terminal := Terminal())
        token_cache.pack_documents(tmp_path / "bar", documents, tokenizer, 0)
        assert "tokenizing:" in terminal.getvalue() and "/240 [" in terminal.getvalue(), "no bar"
        assert not caplog.records, "lines beside a progress bar"


@pytest.mark.check
def test_a_full_disk_loses_little(tmp_path, tokenizer, reference):
    """The disk is full after the 123rd document; notes are made after each fifth."""
    path, encode, encoded = write_form(tmp_path, "csv"), token_cache._Encoded.__getitem__, []

    def encode_until_full(self, batch: list[str]) -> tuple:
        if len(encoded) == 123:
            raise OSError(errno.ENOSPC, "No space left on device")
        encoded.append(batch)
        return encode(self, batch)

    def encode_and_count(self, batch: list[str]) -> tuple:
        encoded.append(batch)
        return encode(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "n_cores", lambda: 0)
        patch.setattr(token_cache, "BATCH_CHARACTERS", 1)
        patch.setattr(token_cache, "BATCHES_PER_NOTE", 5)
        patch.setattr(token_cache._Encoded, "__getitem__", encode_until_full)
        with pytest.raises(InputError, match="No space left on device"):
            load_sequences(arguments(path), tokenizer, 16)
        patch.setattr(token_cache._Encoded, "__getitem__", encode_and_count)
        train, evaluation = load_sequences(arguments(path), tokenizer, 16)
    assert np.array_equal(train.tokens, reference["train"])
    assert np.array_equal(evaluation.tokens, reference["evaluation"])
    assert len(encoded) == len(TEXTS) + 123 - 120, "started again"


# --- very large corpora ---


@pytest.mark.check
def test_memory_does_not_grow_with_the_corpus(tmp_path, tokenizer, monkeypatch):
    """Of 1.2 MB of text, all texts at once would need 5 MB, and all of their tokens 14 MB."""
    monkeypatch.setattr(token_cache, "BATCH_CHARACTERS", 2**14)
    for number in range(110):
        lines = [f"{number} {n % 977} of the lines of this document\n" for n in range(300)]
        (tmp_path / f"{number}.txt").write_text("".join(lines))
    sources.documents_of(["text"])  # imports the library
    tracemalloc.start()
    try:
        train, evaluation = find_source(str(tmp_path), None, None).load()
        token_cache.pack_documents(tmp_path / ".train", train, tokenizer, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(train) + len(evaluation) == 110
    assert peak < 2 * 2**20


def write_halfway(path: Path, documents: object, tokenizer: object, stop_after: int) -> None:
    """Tokenize one document a batch, with a note after each fifth, and stop after some."""
    encode = token_cache._Encoded.__getitem__

    def stop(self, batch: list) -> tuple:
        if len(called) == stop_after:
            raise KeyboardInterrupt
        called.append(batch)
        return encode(self, batch)

    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache._Encoded, "__getitem__", stop)
        with contextlib.suppress(KeyboardInterrupt):
            token_cache.pack_documents(path, documents, tokenizer, 0)


def check_that_tokenizing_resumes(folder: Path, tokenizer: object) -> None:
    documents = sources.documents_of(TEXTS[:30])
    token_cache.pack_documents(folder / "whole", documents, tokenizer, 0)
    write_halfway(folder / "part", documents, tokenizer, stop_after=13)
    assert not (folder / "part.json").exists()
    assert json.loads((folder / "part.progress").read_text())["documents"] == 10
    write_halfway(folder / "part", documents, tokenizer, stop_after=20)  # the rest is 20
    for suffix in (".bin", ".json"):
        parts = [(folder / f"{name}{suffix}").read_bytes() for name in ("whole", "part")]
        assert parts[0] == parts[1], "the tokens differ"


@pytest.mark.check
def test_an_interrupted_tokenization_resumes(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(token_cache, "BATCH_CHARACTERS", 1)
    monkeypatch.setattr(token_cache, "BATCHES_PER_NOTE", 5)
    check_that_tokenizing_resumes(tmp_path, tokenizer)


UNNOTED = ('file.truncate(done["tokens"] * dtype.itemsize)', "pass")
register("common/data/token_cache.py", [UNNOTED])


@pytest.mark.check
def test_planted_tokenization_that_keeps_what_was_not_noted(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(token_cache, "BATCH_CHARACTERS", 1)
    monkeypatch.setattr(token_cache, "BATCHES_PER_NOTE", 5)
    source, wrong = Path(token_cache.__file__).read_text(), {"__name__": "planted"}
    exec(source.replace(*UNNOTED), wrong)
    planted = wrong["pack_documents"]
    monkeypatch.setitem(wrong, "_Encoded", token_cache._Encoded)
    monkeypatch.setitem(wrong, "BATCH_CHARACTERS", 1)
    monkeypatch.setitem(wrong, "BATCHES_PER_NOTE", 5)
    monkeypatch.setattr(token_cache, "pack_documents", planted)
    with pytest.raises(AssertionError, match="the tokens differ"):
        check_that_tokenizing_resumes(tmp_path, tokenizer)


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
        with pytest.raises(InputError, match=reason):
            load_sequences(arguments(tmp_path / "tokens"), tokenizer, 16)

    write_shards(tmp_path / "tokens", "llm.c")
    path = tmp_path / "tokens/b_train.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\2" + whole[5:])
    refused("header of version 2")
    path.write_bytes(whole[:-2])
    refused("does not have the 110 tokens of its header")
    path.write_bytes(whole[:-2] + b"\xff\xff")
    refused("the token 65535")
    path.write_bytes(b"ab")
    refused("shorter than one sequence")
    path.unlink()
    np.save(path.with_suffix(".npy"), np.zeros(100))
    refused("has float64")
    np.save(path.with_suffix(".npy"), np.zeros((50, 50), dtype="<u2"))
    refused("has 2 dimensions")
    for content in (b"no array", b""):
        path.with_suffix(".npy").write_bytes(content)
        refused("is not an array")
    for other in ("a_train.bin", "b_train.npy"):
        (tmp_path / "tokens" / other).unlink()
    refused("no shard for training")


@pytest.mark.check
def test_ready_made_tokens_have_the_bits_per_byte_of_their_text(tmp_path, tokenizer):
    """End-of-text tokens are not text, as where documents are tokenized here."""
    documents = sources.documents_of(["x = 1\n"] * 500)
    token_cache.pack_documents(tmp_path / "packed", documents, tokenizer, 0)
    facts = json.loads((tmp_path / "packed.json").read_text())
    (tmp_path / "tokens").mkdir()
    for name in ("a", "b", ".hidden"):
        (tmp_path / f"tokens/{name}.bin").write_bytes((tmp_path / "packed.bin").read_bytes())
    train, evaluation = load_sequences(arguments(tmp_path / "tokens"), tokenizer, 10)
    assert len(train) == len(evaluation) == facts["tokens"] // 10
    assert evaluation.tokens_per_byte == pytest.approx(facts["tokens"] / facts["bytes"])


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

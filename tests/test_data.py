"""From text to blocks of tokens, and the order that they are trained in."""

import argparse
import csv
import functools
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from helpers import ROOT, read_metrics, run_script
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


def draw_texts(count: int) -> list[str]:
    """Return documents of all kinds of letters, with what a reader of tables takes for no text.

    And one with the literal text of a special token in each.
    """
    rng = random.Random(0)
    letters = [chr(n) for n in range(32, 0x3000)] + list("\n\t ,\"'" * 500) + ["🙂"] * 100
    drawn = ["".join(rng.choices(letters, k=rng.randrange(200))) for _ in range(count)]
    return ["NA", "None", "null", "", "7", *(f"{text}<|endoftext|> is text" for text in drawn)]


TEXTS = draw_texts(240)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("gpt2-tiny")


def arguments(path: object):
    return argparse.Namespace(dataset_name=str(path), dataset_subset=None, text_column=None)


def write_form(folder: Path, form: str) -> Path:
    """Write TEXTS as a file or folder of this form and return its path."""
    if form == "folder":
        path = folder / "texts"
        path.mkdir()
        for number, text in enumerate(TEXTS):
            (path / f"{number:03d}.txt").write_text(text, encoding="utf-8")
        return path
    rows = [{"text": text, "number": number} for number, text in enumerate(TEXTS)]
    path = folder / f"data.{form.partition('.')[2]}"
    if form == "strings.json":
        path.write_text(json.dumps(TEXTS, ensure_ascii=False), encoding="utf-8")
    elif form == "objects.json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif form == "lines.jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "table.csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "number"])
            writer.writeheader()
            writer.writerows(rows)
    elif form == "table.parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


# The form of the files and the number of processes.
READ = [
    ("strings.json", 1),
    ("objects.json", 3),
    ("lines.jsonl", 1),
    ("table.csv", 2),
    ("table.parquet", 1),
    ("folder", 2),
]


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


def check_tokens(path: Path, processes: int, reference: list, patch: pytest.MonkeyPatch) -> None:
    """Tokenize TEXTS in so many processes."""
    patch.setattr(data, "BYTES_PER_PROCESS", 1)
    patch.setattr(data, "n_cores", lambda: processes)
    asked, original = [], Dataset.map

    def noted_map(*args: object, num_proc: int | None = None, **options: object) -> Dataset:
        asked.append(num_proc or 1)
        return original(*args, num_proc=num_proc, **options)

    patch.setattr(Dataset, "map", noted_map)
    parts = load_sequences(arguments(path), load_tokenizer("gpt2-tiny"), 16)
    for part, expected in zip(parts, reference, strict=True):
        assert np.array_equal(part.streams[0], expected), "the tokens differ"
    assert asked == [processes]


@pytest.mark.check
@pytest.mark.parametrize(("form", "processes"), READ)
def test_the_same_documents_give_the_same_tokens(tmp_path, reference, monkeypatch, form, processes):
    """Whatever the form of the files and the number of processes."""
    check_tokens(write_form(tmp_path, form), processes, reference, monkeypatch)


def test_planted_parts_out_of_order_are_noticed(tmp_path, reference, monkeypatch):
    """The second process's documents come first."""
    encode = data.encode_documents

    def encode_documents(*args: object) -> Dataset:
        rows = encode(*args)
        half = len(rows) // 2
        return rows.select([*range(half, len(rows)), *range(half)]).flatten_indices()

    monkeypatch.setattr(data, "encode_documents", encode_documents)
    with pytest.raises(AssertionError, match="the tokens differ"):
        check_tokens(write_form(tmp_path, "table.csv"), 2, reference, monkeypatch)


@pytest.mark.nightly
def test_built_in_corpus(tokenizer):
    """Modules of Python's library, without tests and tables."""
    train, evaluation = load_sequences(arguments("python-stdlib"), tokenizer, 128)
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
    train, _ = load_sequences(arguments(path), word_tokenizer(n_tokens), 4)
    assert train.streams[0].itemsize == n_bytes
    lowest, _, *highest = rows_of(train).T
    assert not lowest.any()
    assert all((np.array(highest) == [[n_tokens - 2], [n_tokens - 1]]).flatten())


@pytest.mark.check
def test_few_documents_give_their_ends(tmp_path, tokenizer):
    path = tmp_path / "book.txt"
    text = "".join(f"Line {n} of the book.\n" for n in range(1000))
    path.write_text(text)
    rows = Dataset.from_dict({"text": [text]})
    (train,), (evaluation,) = (documents.read_documents(rows, part) for part in (False, True))
    assert train + evaluation == text
    assert 0.04 < len(evaluation) / len(text) < 0.06
    assert all(len(part) for part in load_sequences(arguments(path), tokenizer, 32))


@pytest.mark.check
def test_second_start_reads_the_cache(tmp_path, tokenizer, monkeypatch):
    """With another sequence length, too. A data worker opens the file: it gets no copy."""
    path = write_form(tmp_path, "folder")
    first, _ = load_sequences(arguments(path), tokenizer, 16)
    monkeypatch.setattr(data, "encode_documents", None)  # calling it would fail
    again, _ = load_sequences(arguments(path), tokenizer, 32)
    assert again.digest == first.digest
    assert np.array_equal(rows_of(again).ravel(), rows_of(first).ravel()[: rows_of(again).size])
    content = pickle.dumps(first)
    assert len(content) < 1000 < first.streams[0].nbytes
    assert np.array_equal(rows_of(pickle.loads(content)), rows_of(first))


@pytest.mark.check
def test_ranks_together_take_the_permutation_from_any_start():
    """So any number of ranks trains on the same batches. At the end, some samples are repeated or
    dropped, as DistributedSampler does."""
    rng = random.Random(0)
    for _ in range(100):
        n, world, epoch = rng.randrange(1, 300), rng.randrange(1, 9), rng.randrange(3)
        drop_last, start = rng.random() < 0.5, rng.randrange(n // world + 2)
        ranks = []
        for rank in range(world):
            options = {"num_replicas": world, "rank": rank, "seed": 5, "drop_last": drop_last}
            ours, theirs = (
                sampler(range(n), **options) for sampler in (ResumableSampler, DistributedSampler)
            )
            ours.set_epoch(epoch, start=start)
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs)[start:]
            ranks.append(list(ours))
        together = [sample for step in zip(*ranks, strict=True) for sample in step]
        order = torch.randperm(n, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        order = order[start * world : n // world * world if drop_last else n]
        assert together[: len(order)] == order


@pytest.mark.check
def test_micro_batches_are_as_large_as_they_can_be():
    rng = random.Random(0)
    for _ in range(100):
        world, share, most = (rng.randrange(1, highest) for highest in (9, 50, 50))
        args = argparse.Namespace(global_batch_size=share * world, batch_size=most)
        micro_batch_size, accumulation = split_batch(args, world, n_sequences=1000)
        assert micro_batch_size * accumulation == share and micro_batch_size <= most
        larger = range(micro_batch_size + 1, min(share, most) + 1)
        assert not any(share % size == 0 for size in larger)
    with pytest.raises(RunError, match="7 devices cannot share --global-batch-size 24 evenly"):
        split_batch(argparse.Namespace(global_batch_size=24, batch_size=8), 7, n_sequences=100)


@pytest.mark.check
def test_a_small_micro_batch_is_pointed_out_with_a_better_global_batch(caplog):
    for global_batch_size, said in (
        (508, "no larger number up to 64 divides 127: --global-batch-size 512 allows 64.\n"),
        (4 * 93, "--global-batch-size 256 allows 64.\n"),
        (4 * 96, ""),  # 48, which is more than half of 64
    ):
        caplog.clear()
        args = argparse.Namespace(global_batch_size=global_batch_size, batch_size=64)
        split_batch(args, 4, n_sequences=1000)
        assert caplog.text.endswith(said) and bool(caplog.text) == bool(said)


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
    write_shards(folder / "tokens", "npy")
    np.save(folder / "tokens/b_train.npy", np.arange(LARGE, LARGE + 110, dtype="<u4"))
    files = shards.find_shards(str(folder / "tokens"))
    streams, *facts = shards.open_shards(files, word_tokenizer(10**5))[0]
    expected = [np.load(file)[: 16 * (len(np.load(file)) // 16)] for file in files[:2]]
    expected = np.concatenate(expected).astype(np.int64).reshape(-1, 16)
    return Sequences(streams, 16, *facts).pad_to_multiple(len(expected) + 3), expected


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
def test_a_run_that_is_short_for_its_data_says_so(caplog, monkeypatch):
    """And which --num-epochs would do."""

    def warning(n_sequences: int, rank: int = 0, **options: object) -> str:
        args = {"global_batch_size": 24, "batch_size": 8, "max_steps": None, "num_epochs": 0.6}
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(rank))
        caplog.clear()
        split_batch(argparse.Namespace(**{**args, **options}), 1, n_sequences)
        return caplog.text

    assert "has only 2 steps, because the training data is only 100 sequences" in warning(100)
    assert "--num-epochs 12.5 for at least 50 steps" in warning(100)
    silent = (100, 0, {"num_epochs": 12.5}), (100, 0, {"max_steps": 2}), (100, 1, {})
    assert not any(warning(n, rank, **options) for n, rank, options in silent)


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
def test_text_and_json_as_windows_writes_them(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("Straße\r\nund Bäume", "utf-8-sig", newline="")
    assert pieces_of(tmp_path / "a.txt") == [("Straße\nund Bäume", True)]
    (tmp_path / "a.json").write_text('["Bäume"]', "utf-8-sig")
    assert documents.load_table(str(tmp_path / "a.json"), None)["train"]["text"][:] == ["Bäume"]
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
    texts, ends = zip(*pieces, strict=True)
    assert len(pieces) > 20 and all(text.endswith("\n") for text in texts)
    whole = [(tmp_path / f"{name}.txt").read_text() for name in "ab"]
    assert "".join(texts) == "".join(whole)
    middle = len(pieces) // 2
    assert "".join(texts[:middle]) == whole[0]
    assert [number for number, end in enumerate(ends) if end] == [middle - 1, len(pieces) - 1]
    train, evaluation = load_sequences(arguments(tmp_path), tokenizer, 16)
    for part in (train, evaluation):
        assert np.count_nonzero(part.streams[0] == tokenizer.eos_token_id) == 2


@pytest.mark.check
def test_a_tokenizer_that_was_saved_with_limits_keeps_all_text(tmp_path, tokenizer):
    """Its tokenizer.json can ask for truncation or padding, which must not change a corpus."""
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(["short", "a text of many words " * 99]))
    limited = [load_tokenizer("gpt2-tiny") for _ in range(2)]
    limited[0].backend_tokenizer.enable_truncation(16)
    limited[1].backend_tokenizer.enable_padding()
    plain = load_sequences(arguments(path), tokenizer, 16)[0].streams[0]
    assert len(plain) > 100
    for each in limited:
        found = load_sequences(arguments(path), each, 16)[0].streams[0]
        assert np.array_equal(found, plain)


# --- a large file ---

TOKENIZE = """
import argparse, resource, sys
from common import data, models
data.n_cores = lambda: 2
names = argparse.Namespace(dataset_name=sys.argv[1], dataset_subset=None, text_column=None)
tokenizer = models.load_tokenizer("gpt2-tiny")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
assert len(data.load_sequences(names, tokenizer, 128)[0]) > 250_000
for processes in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
    print(resource.getrusage(processes).ru_maxrss)
"""


@pytest.mark.nightly
def test_a_large_text_file_is_tokenized_in_little_memory(tmp_path):
    """Of 100 MB, two processes and the one that started them hold little more than before."""
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghijklmnopqrst", k=2 + n % 8)) for n in range(5000)]
    with (tmp_path / "book.txt").open("w") as file:
        while file.tell() < 1e8:
            file.writelines(" ".join(rng.choices(vocabulary, k=15)) + "\n" for _ in range(1000))
    options = {"PYTHONPATH": ROOT, "timeout": 3600}
    done = run_script("-c", TOKENIZE, tmp_path / "book.txt", **options)
    assert done.returncode == 0, done.stderr
    before, *peaks = map(int, done.stdout.split())
    assert before < max(peaks) < 3.5 * before, done.stdout


# --- an interruption ---


@pytest.mark.check
def test_an_interrupted_tokenization_starts_again(tmp_path, tokenizer, reference, monkeypatch):
    """What was left by it changes nothing."""
    path = write_form(tmp_path, "table.csv")

    def stop(file: Path, *args: object) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data, "write_tokens", stop)
        load_sequences(arguments(path), tokenizer, 16)
    check_tokens(path, 1, reference, monkeypatch)


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


LARGE = 70_000


@pytest.mark.check
@pytest.mark.parametrize(
    ("form", "first"), [("npy", 0), ("npy", LARGE), ("bin", 0), ("bin", LARGE), ("llm.c", 0)]
)
def test_ready_made_tokens(tmp_path, tokenizer, form, first):
    tokens = write_shards(tmp_path / "tokens", form, first)
    tokenizer = word_tokenizer(10**5) if first else tokenizer
    train, evaluation = load_sequences(arguments(tmp_path / "tokens"), tokenizer, 16)
    expected = [shard[: len(shard) // 16 * 16].reshape(-1, 16) for shard in tokens]
    assert np.array_equal(rows_of(train), np.concatenate(expected[:2]))
    assert np.array_equal(rows_of(evaluation), expected[2])
    again = pickle.loads(pickle.dumps(train))
    assert np.array_equal(rows_of(again), rows_of(train)) and again.digest == train.digest
    assert train.tokens_per_byte > 0


@pytest.mark.check
def test_ready_made_tokens_that_cannot_be_used(tmp_path, tokenizer):
    """Some of them would train on something else. A card beside them does not matter."""

    def refused(reason: str) -> None:
        with pytest.raises(RunError, match=reason):
            load_sequences(arguments(tmp_path / "tokens"), tokenizer, 16)

    write_shards(tmp_path / "tokens", "llm.c")
    (tmp_path / "tokens/README.md").touch()
    load_sequences(arguments(tmp_path / "tokens"), tokenizer, 16)
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
        (np.arange(1, 100, dtype="<i8").tobytes(), "every second number is 0"),
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
    own, _ = load_sequences(arguments(tmp_path / "texts.json"), tokenizer, 10)
    (tmp_path / "tokens").mkdir()
    for name in ("a", "b", ".hidden"):
        own.streams[0].tofile(tmp_path / f"tokens/{name}.bin")
    train, evaluation = load_sequences(arguments(tmp_path / "tokens"), tokenizer, 10)
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

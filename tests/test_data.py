"""From text to blocks of tokens, and the order that they are trained in."""

import argparse
import csv
import json
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from conftest import ROOT
from runner import load_script
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

from common.cli import InputError
from common.data import ResumableSampler, load_sequences, sources, split_batch, token_cache
from common.data.sources import BUILT_IN, find_source
from common.models import load_tokenizer

TEXTS = [
    f"def function_{n}(self):\n    return {n} * 'Hüte, 你好, 🙂'\n" * (1 + n % 3)
    for n in range(240)
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("gpt2-tiny")


def arguments(path: object, text_column: str | None = None, num_workers: int = 0):
    return argparse.Namespace(
        dataset_name=str(path),
        dataset_subset=None,
        text_column=text_column,
        num_workers=num_workers,
    )


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


def test_blocks_do_not_depend_on_the_number_of_processes(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(token_cache, "DOCUMENTS_PER_BATCH", 7)
    digests = set()
    for num_workers in (0, 1, 2, 5):
        path = tmp_path / f"workers{num_workers}"
        path.mkdir()
        blocks = load_sequences(
            arguments(write_form(path, "csv"), num_workers=num_workers), tokenizer, 16
        )
        digests.add(tuple(part.tokens.tobytes() for part in blocks))
    assert len(digests) == 1


@pytest.mark.check
def test_an_order_that_depends_on_the_processes_is_noticed(tmp_path, tokenizer, monkeypatch):
    """The planted bug drops each batch's rest of less than a block, as mapping by batch does."""
    original = token_cache._Encode.__call__

    def drop_rest(self, rows: list[dict[str, str]]) -> tuple[torch.Tensor, int]:
        tokens, size = original(self, rows)
        return tokens[: len(tokens) // 16 * 16], size

    monkeypatch.setattr(token_cache._Encode, "__call__", drop_rest)
    sizes = set()
    for per_batch in (7, 50):
        monkeypatch.setattr(token_cache, "DOCUMENTS_PER_BATCH", per_batch)
        path = tmp_path / f"batch{per_batch}"
        path.mkdir()
        sizes.add(len(load_sequences(arguments(write_form(path, "csv")), tokenizer, 16)[0]))
    assert len(sizes) == 2


@pytest.mark.check
def test_every_token_comes_back(tmp_path, tokenizer):
    train, _ = load_sequences(arguments(write_form(tmp_path, "parquet")), tokenizer, 16)
    text = tokenizer.decode(train.tokens.reshape(-1).tolist())
    expected = "<|endoftext|>".join(t for t in TEXTS if not sources.is_held_out(t))
    assert expected.startswith(text[:-20]) and len(text) > len(expected) - 100


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


def test_the_committed_tokenizer_is_what_its_script_makes(tmp_path, tokenizer):
    script = load_script(ROOT / "01-single-gpu/train_tokenizer.py")
    documents, _ = find_source(BUILT_IN, subset=None, text_column=None).load()
    again = script.train("bpe", vocab_size=4096, min_frequency=0, documents=documents)
    assert len(again) == len(tokenizer) == 4096
    assert again.eos_token_id == tokenizer.eos_token_id == 0
    # Another release of Python has other source files, so only most of the merges are the same.
    shared = set(again.get_vocab()) & set(tokenizer.get_vocab())
    assert len(shared) > 3500


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


def check_that_no_token_wraps(folder: Path, n_tokens: int) -> None:
    """Pack words with the lowest and the highest numbers of a vocabulary of this size."""
    vocabulary = {f"w{number}": number for number in range(n_tokens - 1)}
    vocabulary["<|endoftext|>"] = n_tokens - 1
    words = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")
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
def test_planted_tokens_that_wrap_are_noticed(tmp_path, monkeypatch):
    planted = types.SimpleNamespace(**{**vars(np), "dtype": lambda _: np.dtype("<u2")})
    monkeypatch.setattr(token_cache, "np", planted)
    check_that_no_token_wraps(tmp_path, 2**16)
    with pytest.raises(AssertionError, match=r"assert \[0, 1, "):
        check_that_no_token_wraps(tmp_path, 2**16 + 1)


@pytest.mark.check
def test_split_is_stable_and_leaks_nothing(tmp_path, tokenizer):
    held_out = [text for text in TEXTS if sources.is_held_out(text)]
    assert 2 <= len(held_out) <= 30
    shuffled = TEXTS * 2
    random.Random(1).shuffle(shuffled)
    train, evaluation = sources.split_documents(sources.documents_of(shuffled))
    assert sorted(evaluation["text"]) == sorted(held_out * 2)
    assert not set(train["text"]) & set(evaluation["text"])


def test_a_worker_maps_the_file_and_gets_no_copy(tmp_path, tokenizer):
    blocks, _ = load_sequences(arguments("python-stdlib"), tokenizer, 128)
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
def test_an_interrupted_preparation_is_done_again(tmp_path, tokenizer, monkeypatch):
    path = write_form(tmp_path, "csv")

    def stop_halfway(path: Path, *_: object) -> None:
        path.with_suffix(".bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "pack_documents", stop_halfway)
        with pytest.raises(KeyboardInterrupt):
            load_sequences(arguments(path), tokenizer, 16)
    assert len(load_sequences(arguments(path), tokenizer, 16)[0]) > 0


def load_in_child(path: Path, queue) -> None:
    blocks = load_sequences(arguments(path), load_tokenizer("gpt2-tiny"), 16)
    queue.put([part.tokens.tobytes() for part in blocks])


def test_two_starts_at_the_same_moment(tmp_path, reference):
    path = write_form(tmp_path, "csv")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["runner"])
    queue = context.Queue()
    children = [context.Process(target=load_in_child, args=(path, queue)) for _ in range(3)]
    for child in children:
        child.start()
    found = [queue.get(timeout=300) for _ in children]
    for child in children:
        child.join(60)
    for train, _ in found:
        assert train == reference["train"].astype("<u2").tobytes()


@pytest.mark.check
def test_order_is_a_function_of_seed_and_epoch():
    def order(seed: int, epoch: int, start: int = 0) -> list[int]:
        sampler = ResumableSampler(range(100), num_replicas=1, rank=0, seed=seed)
        sampler.set_epoch(epoch, start=start)
        return list(sampler)

    torch.manual_seed(1)
    first = order(seed=7, epoch=3)
    torch.manual_seed(2)
    assert order(seed=7, epoch=3) == first
    assert sorted(first) == list(range(100))
    assert order(seed=7, epoch=4) != first and order(seed=8, epoch=3) != first
    for start in (0, 1, 37, 99, 100):
        assert order(seed=7, epoch=3, start=start) == first[start:]


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


@pytest.mark.check
def test_batch_that_cannot_be_shared():
    args = argparse.Namespace(global_batch_size=10, batch_size=8)
    with pytest.raises(InputError, match="3 devices cannot share --global-batch-size 10 evenly"):
        split_batch(args, world_size=3, n_sequences=100)


@pytest.mark.check
def test_padding_for_evaluation(tmp_path, tokenizer):
    blocks, _ = load_sequences(arguments(write_form(tmp_path, "csv")), tokenizer, 16)
    padded = blocks.pad_to_multiple(7)
    assert len(padded) % 7 == 0 and 0 <= len(padded) - len(blocks) < 7
    labels = torch.cat([padded[i]["labels"] for i in range(len(padded))])
    assert (labels != -100).sum() == blocks.tokens.size


@pytest.fixture(scope="module")
def hub_folders(make_folder) -> tuple[Path, Path]:
    """A data set and a model, each as the hub lays it out."""
    root = make_folder("hub")
    dataset, model = root / "alpaca", root / "gpt2"
    (dataset / "data").mkdir(parents=True)
    (dataset / "README.md").write_text("---\nlicense: cc\n---\n# A data set of instructions\n")
    rows = [
        {
            "instruction": f"Add {n}.",
            "input": str(n),
            "output": f"{n} + {n} = {2 * n}",
            "text": text,
        }
        for n, text in enumerate(TEXTS)
    ]
    pa.parquet.write_table(
        pa.Table.from_pylist(rows), dataset / "data/train-00000-of-00001-a09b74b3.parquet"
    )
    config = AutoConfig.from_pretrained(ROOT / "common/presets/gpt2-tiny")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    load_tokenizer("gpt2-tiny").save_pretrained(model)
    return dataset, model


def test_hub_shaped_folders(train, hub_folders, reference, tokenizer):
    dataset, model = hub_folders
    blocks, _ = load_sequences(arguments(dataset), tokenizer, 16)
    assert np.array_equal(blocks.tokens, reference["train"]), "the column named text, of four"
    outputs, _ = load_sequences(arguments(dataset, text_column="output"), tokenizer, 16)
    decoded = tokenizer.decode(outputs.tokens.reshape(-1).tolist())
    assert "8 + 8 = 16<|endoftext|>" in decoded and "function" not in decoded
    common = ("-d", dataset, "-m", model, "-s", 16, "--max-steps", 3, "--log-freq", 1)
    scratch = train(*common, name="scratch")
    pretrained = train(*common, "--pretrained", name="pretrained")
    assert scratch[0]["loss"] != pretrained[0]["loss"]
    # The loss of the first step is that of the saved weights, before any update.
    weights = AutoModelForCausalLM.from_pretrained(model)
    sampler = ResumableSampler(blocks, num_replicas=1, rank=0, seed=0)
    ids = torch.stack([blocks[i]["input_ids"] for i in list(sampler)[:24]])
    assert pretrained[0]["loss"] == pytest.approx(weights(ids, labels=ids).loss.item(), rel=1e-5)


@pytest.mark.check
def test_a_validation_split_is_used(tmp_path, tokenizer):
    for split, texts in (("train", TEXTS[:200]), ("validation", TEXTS[200:])):
        rows = pa.Table.from_pylist([{"text": text} for text in texts])
        pa.parquet.write_table(rows, tmp_path / f"{split}-00000-of-00001.parquet")
    train, evaluation = load_sequences(arguments(tmp_path), tokenizer, 16)
    last = tokenizer.decode(evaluation.tokens.reshape(-1).tolist())
    assert "function_200(" in last and "function_199(" not in last
    assert "function_200(" not in tokenizer.decode(train.tokens.reshape(-1).tolist())


def test_what_the_library_finds_is_no_line_of_the_log():
    """It logs which frameworks are installed while it is imported; here, that it leaves one out."""
    script = "import logging; logging.basicConfig(level='INFO'); {}"
    ours = "from common.data.sources import import_datasets; import_datasets()"
    said = [
        subprocess.run(
            [sys.executable, "-c", script.format(line)],
            cwd=ROOT,
            env={**os.environ, "USE_JAX": "0"},
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for line in (ours, "import datasets")
    ]
    assert "JAX" not in said[0] and "JAX" in said[1]

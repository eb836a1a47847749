"""Where documents come from: the built-in corpus, local files and folders, or the hub."""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common.cli import InputError
from common.models import hub_is_reachable, not_found

if TYPE_CHECKING:  # the library takes most of a second to import: only a first start pays for it
    import datasets

BUILT_IN = "python-stdlib"
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
TABLE_SUFFIXES = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
# One document in 20 is held out for evaluation, where the source has no such split of its own.
EVAL_ONE_IN = 20
# With fewer documents than this, each of them gives its end instead.
FEW_DOCUMENTS = 100

# Tests, and tables of code points or topics: long, repetitive, and nothing like code.
NOT_CODE = re.compile(
    r"(^|/)(site-packages|dist-packages|tests?|idle_test|idlelib|lib2to3|pydoc_data|encodings"
    r"|__pycache__|config-[^/]*)/|(^|/)_sysconfigdata[^/]*$"
)


class Source(NamedTuple):
    """A place that documents come from.

    fingerprint: changes whenever the documents may have changed; found without reading them.
    load: returns the training and the evaluation documents, each with one column, "text".
    """

    fingerprint: str
    load: Callable[[], "tuple[datasets.Dataset, datasets.Dataset]"]


def find_source(name: str, subset: str | None, text_column: str | None) -> Source:
    """Resolve a data set's name: preset, then local path, then hub id.

    Raises InputError, now or in `load`, where there is no such data set or no such column.
    """
    if name == BUILT_IN:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _files(root, (".py",), skip=NOT_CODE)
        if not files:
            raise InputError(f"This Python has no source files in {root}: give -d a local path.")
        return Source(_fingerprint(name, root, files), lambda: _stdlib(root, files))
    path = Path(name)
    if path.is_file():
        files = [Path(path.name)]
        fingerprint = _fingerprint(text_column, path.parent, files)
        return Source(fingerprint, lambda: _local(path.parent, files, text_column))
    if path.is_dir():
        files = _files(path, tuple(TABLE_SUFFIXES)) or _files(path, TEXT_SUFFIXES)
        if not files:
            known = " ".join((*TEXT_SUFFIXES, *TABLE_SUFFIXES))
            raise InputError(f"The folder {name} has no file that ends in one of: {known}.")
        fingerprint = _fingerprint((subset, text_column), path, files)
        return Source(fingerprint, lambda: _local(path, files, text_column, subset))
    dataset = _from_hub(name, subset)
    fingerprint = f"{sorted((split, d._fingerprint) for split, d in dataset.items())} {text_column}"
    return Source(fingerprint, lambda: _split_table(dataset, name, text_column))


def _files(root: Path, suffixes: tuple[str, ...], skip: re.Pattern | None = None) -> list[Path]:
    """Return the visible files below root, relative to it, in an order all machines agree on.

    Folders and files whose relative path (folders with a / at the end) matches `skip` are left out.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        relative = Path(folder).relative_to(root)
        subfolders[:] = [
            name
            for name in subfolders
            if not (
                name.startswith(".") or (skip and skip.search(f"{(relative / name).as_posix()}/"))
            )
        ]
        for name in names:
            path = relative / name
            if path.suffix in suffixes and not name.startswith("."):
                found.append(path)
    return sorted(
        (path for path in found if not (skip and skip.search(path.as_posix()))),
        key=lambda path: path.as_posix(),
    )


def _fingerprint(options: object, root: Path, files: list[Path]) -> str:
    stats = ((path.as_posix(), (root / path).stat()) for path in files)
    listing = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(repr((options, str(root.resolve()), listing)).encode()).hexdigest()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _documents(texts: Iterable[str]) -> "datasets.Dataset":
    from datasets import Dataset

    return Dataset.from_dict({"text": list(texts)})


def is_held_out(key: str) -> bool:
    """Return whether the document with this key (its path or its text) is for evaluation.

    It depends on the key alone, so the split is the same on every machine and in every order,
    and a text that occurs twice never stands on both sides.
    """
    digest = hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % EVAL_ONE_IN == 0


def _stdlib(root: Path, files: list[Path]) -> "tuple[datasets.Dataset, datasets.Dataset]":
    train = [_read(root / path) for path in files if not is_held_out(path.as_posix())]
    evaluation = [_read(root / path) for path in files if is_held_out(path.as_posix())]
    return _documents(train), _documents(evaluation)


def _split(documents: "datasets.Dataset") -> "tuple[datasets.Dataset, datasets.Dataset]":
    if len(documents) < FEW_DOCUMENTS:
        texts = documents["text"]
        cuts = [len(text) - len(text) // EVAL_ONE_IN for text in texts]
        return (
            _documents(text[:cut] for text, cut in zip(texts, cuts, strict=True)),
            _documents(text[cut:] for text, cut in zip(texts, cuts, strict=True)),
        )
    held_out = [is_held_out(text) for batch in documents.iter(1000) for text in batch["text"]]
    return (
        documents.select([row for row, out in enumerate(held_out) if not out]),
        documents.select([row for row, out in enumerate(held_out) if out]),
    )


def _local(
    root: Path, files: list[Path], text_column: str | None, subset: str | None = None
) -> "tuple[datasets.Dataset, datasets.Dataset]":
    """Load a folder that has the shape of a hub data set, one table, or text files."""
    name = str(root / files[0]) if len(files) == 1 else str(root)
    if files[0].suffix not in TABLE_SUFFIXES:
        return _split(_documents(_read(root / path) for path in files))
    arrays = [_json_strings(root / path) for path in files if path.suffix == ".json"]
    if len(arrays) == len(files) and None not in arrays:
        return _split(_documents(chain.from_iterable(arrays)))
    from datasets import load_dataset

    try:
        if len(files) == 1:
            table = load_dataset(TABLE_SUFFIXES[files[0].suffix], data_files=name)
        else:
            table = load_dataset(str(root), subset)
    except Exception as error:  # the library wraps what its readers raise in many classes
        cause = str(error.__cause__ or error).splitlines()[0]
        raise InputError(f"Cannot read {name} as a data set: {cause}") from error
    return _split_table(table, name, text_column)


def _json_strings(path: Path) -> list[str] | None:
    """Return a JSON array's strings, or None for an array of objects or for JSON lines."""
    with path.open(encoding="utf-8") as file:
        lines = (line for line in file if line.strip())
        first, second = next(lines, "").strip(), next(lines, None)
    try:
        if first.startswith("{") and first.endswith("}") and second is not None:
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}.") from error
    if isinstance(content, dict):
        raise InputError(
            f"{path} is a JSON dictionary: it must be an array of strings, "
            '["first document", "second document"], or JSON lines in a .jsonl file.'
        )
    if all(isinstance(item, str) for item in content):
        return content
    if all(isinstance(item, dict) for item in content):
        return None
    raise InputError(f"{path} must be an array of strings, or an array of objects, not of both.")


def _split_table(
    table: "datasets.DatasetDict", name: str, text_column: str | None
) -> "tuple[datasets.Dataset, datasets.Dataset]":
    if "train" not in table:
        raise InputError(f"{name} has no split named train, only: {', '.join(table)}.")
    train = _text_of(table["train"], name, text_column)
    if "validation" in table:
        return train, _text_of(table["validation"], name, text_column)
    return _split(train)


def _text_of(table: "datasets.Dataset", name: str, text_column: str | None) -> "datasets.Dataset":
    """Return the table with its text column alone, named text."""
    columns = [
        c
        for c, f in table.features.items()
        if getattr(f, "dtype", "") in ("string", "large_string")
    ]
    column = text_column or ("text" if "text" in columns or len(columns) != 1 else columns[0])
    if column not in columns:
        raise InputError(
            f"{name} has no text column {column!r}: give --text-column one of {', '.join(columns)}."
        )
    return table.select_columns([column]).rename_columns(
        {column: "text"} if column != "text" else {}
    )


def _from_hub(name: str, subset: str | None) -> "datasets.DatasetDict":
    hub_is_reachable()
    from datasets import load_dataset

    try:
        return load_dataset(name, subset)
    except Exception as error:  # no network, no such data set, no such subset, a gated one
        raise not_found("data set", name, (BUILT_IN,), error) from error

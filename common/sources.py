"""Where documents come from: the built-in corpus, local files and folders, or the hub."""

import hashlib
import logging
import os
import re
import sysconfig
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common.cli import InputError
from common.mirror import mirror
from common.models import not_found, prepare_for_hub
from common.remote import is_remote
from common.tables import (
    documents_of,
    import_datasets,
    is_held_out,
    read_json_strings,
    split_documents,
    split_table,
)

if TYPE_CHECKING:  # the library takes most of a second to import: only a first start pays for it
    import datasets

logger = logging.getLogger(__name__)

BUILT_IN = "python-stdlib"
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
TABLE_SUFFIXES = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
KNOWN_SUFFIXES = " ".join((*TEXT_SUFFIXES, *TABLE_SUFFIXES))

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
    """Resolve a data set's name: preset, then address or local path, then hub id.

    Raises InputError, now or in `load`, where there is no such data set or no such column.
    """
    path = Path(name)
    text = name == BUILT_IN or path.suffix in TEXT_SUFFIXES
    if text and (subset or text_column):
        raise InputError(f"{name} is text: it has no --dataset-subset and no --text-column.")
    if is_remote(name):
        path = mirror(name, (*TEXT_SUFFIXES, *TABLE_SUFFIXES))
    if name == BUILT_IN:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _files(root, (".py",), skip=NOT_CODE)
        if not files:
            raise InputError(f"This Python has no source files in {root}: give -d a local path.")
        return Source(_fingerprint(name, root, files), lambda: _stdlib(root, files))
    if path.is_file():
        if path.suffix not in (*TEXT_SUFFIXES, *TABLE_SUFFIXES):
            raise InputError(f"The file {name} does not end in one of: {KNOWN_SUFFIXES}.")
        files = [Path(path.name)]
        fingerprint = _fingerprint(text_column, path.parent, files)
        return Source(fingerprint, lambda: _local(path.parent, files, text_column))
    if name and path.is_dir():
        files = _files(path, tuple(TABLE_SUFFIXES)) or _files(path, TEXT_SUFFIXES)
        if not files:
            raise InputError(
                f"The folder {name} has no file that ends in one of: {KNOWN_SUFFIXES}."
            )
        fingerprint = _fingerprint((subset, text_column), path, files)
        return Source(fingerprint, lambda: _local(path, files, text_column, subset))
    dataset = load_from_hub(name, subset)
    fingerprint = f"{sorted((split, d._fingerprint) for split, d in dataset.items())} {text_column}"
    return Source(fingerprint, lambda: split_table(dataset, name, text_column))


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
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        logger.warning(f"{path} is not UTF-8: each byte that is none becomes U+FFFD")
        return path.read_text(encoding="utf-8", errors="replace")


def _stdlib(root: Path, files: list[Path]) -> "tuple[datasets.Dataset, datasets.Dataset]":
    train = [_read(root / path) for path in files if not is_held_out(path.as_posix())]
    evaluation = [_read(root / path) for path in files if is_held_out(path.as_posix())]
    return documents_of(train), documents_of(evaluation)


def _local(
    root: Path, files: list[Path], text_column: str | None, subset: str | None = None
) -> "tuple[datasets.Dataset, datasets.Dataset]":
    """Load a folder that has the shape of a hub data set, one table, or text files."""
    name = str(root / files[0]) if len(files) == 1 else str(root)
    if files[0].suffix not in TABLE_SUFFIXES:
        return split_documents(documents_of(_read(root / path) for path in files))
    arrays = [read_json_strings(root / path) for path in files if path.suffix == ".json"]
    if len(arrays) == len(files) and None not in arrays:
        return split_documents(documents_of(chain.from_iterable(arrays)))
    return split_table(load_table(name, subset), name, text_column)


def load_table(name: str, subset: str | None) -> "datasets.DatasetDict":
    """Return the splits of a local table, or of a folder of them. Raises InputError."""
    path = Path(name)
    load_dataset = import_datasets().load_dataset
    try:
        if path.is_file():
            return load_dataset(TABLE_SUFFIXES[path.suffix], data_files=name)
        return load_dataset(name, subset)
    except Exception as error:  # the library wraps what its readers raise in many classes
        cause = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"Cannot read {name} as a data set: {cause}") from error


def load_from_hub(name: str, subset: str | None) -> "datasets.DatasetDict":
    """Return the splits of a hub's data set. Raises InputError where it cannot be had."""
    prepare_for_hub("data set", name)
    try:
        return import_datasets().load_dataset(name, subset)
    except Exception as error:  # no network, no such data set, no such subset, a gated one
        raise not_found("data set", name, (BUILT_IN,), error) from error

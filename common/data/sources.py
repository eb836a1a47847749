"""Where documents come from: the built-in corpus, local files and folders, addresses, the hub."""

import functools
import glob
import hashlib
import json
import logging
import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.cli import InputError
from common.models import not_found, prepare_for_hub
from common.storage import as_path, cached_folder, explain_store_errors, is_remote, stamp_of

if TYPE_CHECKING:
    import datasets  # see import_datasets

logger = logging.getLogger(__name__)
warn_once = functools.cache(logger.warning)

BUILT_IN = "python-stdlib"
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
TABLE_SUFFIXES = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
KNOWN_SUFFIXES = (*TEXT_SUFFIXES, *TABLE_SUFFIXES)
# Tests, and long repetitive tables of code points or topics, which do not look like code.
NOT_CODE = re.compile(
    r"(^|/)(site-packages|dist-packages|tests?|idle_test|idlelib|lib2to3|pydoc_data|encodings"
    r"|__pycache__|config-[^/]*)/|(^|/)_sysconfigdata[^/]*$"
)
EVAL_ONE_IN = 20  # without a validation split, one document in 20 is used for evaluation
FEW_DOCUMENTS = 100  # with fewer documents, the end of each document is used instead
DOCUMENTS_PER_READ = 16  # documents can be large: so many are in memory at a time


class Source(NamedTuple):
    """A data set whose documents are not loaded yet.

    fingerprint: changes if the documents may have changed; it is found without reading them.
    load: returns the training and the evaluation documents, each with one column, "text".
    """

    fingerprint: str
    load: Callable[[], "tuple[datasets.Dataset, datasets.Dataset]"]


def find_source(name: str, subset: str | None, text_column: str | None) -> Source:
    """Find a data set by its name: the built-in corpus, an address, a local path or a hub id.

    Raises InputError, now or in `load`, if there is no such data set or no such column.
    """
    path = Path(name)
    is_text = name == BUILT_IN or path.suffix in TEXT_SUFFIXES
    if is_text and (subset or text_column):
        raise InputError(f"{name} is text: it has no --dataset-subset and no --text-column.")
    if is_remote(name):
        path = mirror(name, KNOWN_SUFFIXES)
    suffixes = " ".join(KNOWN_SUFFIXES)
    if name == BUILT_IN:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _files(root, (".py",), skip=NOT_CODE)
        if not files:
            raise InputError(f"This Python has no source files in {root}: give -d a local path.")
    elif path.is_file():
        if path.suffix not in KNOWN_SUFFIXES:
            raise InputError(f"The file {name} does not end in one of: {suffixes}.")
        root, files = path.parent, [Path(path.name)]
    elif name and path.is_dir():
        root, files = path, _files(path, tuple(TABLE_SUFFIXES)) or _files(path, TEXT_SUFFIXES)
        if not files:
            raise InputError(f"The folder {name} has no file that ends in one of: {suffixes}.")
    else:
        table = load_table(name, subset)
        parts = sorted((split, part._fingerprint) for split, part in table.items())
        return Source(f"{parts} {text_column}", lambda: split_table(table, name, text_column))
    # Which modules of the built-in corpus are for evaluation depends on their paths only.
    keys = [file.as_posix() for file in files] if name == BUILT_IN else None
    stats = [(root / file).stat() for file in files]
    listing = [(str(f), s.st_size, s.st_mtime_ns) for f, s in zip(files, stats, strict=True)]
    facts = repr((subset, text_column, keys is None, str(root.resolve()), listing))
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()
    return Source(fingerprint, lambda: _load_files(root, files, subset, text_column, keys))


# --- local files ---


def _files(root: Path, suffixes: tuple[str, ...], skip: re.Pattern | None = None) -> list[Path]:
    """Return the visible files below root, relative to it, in the same order on all machines.

    skip: matches relative paths to leave out; that of a folder ends in /.
    """

    def is_wanted(path: str) -> bool:
        return not PurePosixPath(path).name.startswith(".") and not (skip and skip.search(path))

    found = []
    for folder, subfolders, names in os.walk(root):
        parent = Path(folder).relative_to(root)
        subfolders[:] = [name for name in subfolders if is_wanted(f"{(parent / name).as_posix()}/")]
        files = [parent / name for name in names if name.endswith(suffixes)]
        found += [file for file in files if is_wanted(file.as_posix())]
    return sorted(found, key=lambda file: file.as_posix())


def _load_files(
    root: Path,
    files: list[Path],
    subset: str | None,
    text_column: str | None,
    keys: list[str] | None,
) -> "tuple[datasets.Dataset, datasets.Dataset]":
    """Load text files, JSON arrays of strings, one table, or a folder like a hub data set."""
    if files[0].suffix in TEXT_SUFFIXES:
        paths = documents_of(str(root / file) for file in files)
        return split_documents(paths.with_transform(_read_texts), keys)
    arrays = [read_json_strings(root / file) for file in files if file.suffix == ".json"]
    if len(arrays) == len(files) and None not in arrays:
        return split_documents(documents_of(chain.from_iterable(arrays)))
    name = str(root / files[0]) if len(files) == 1 else str(root)
    return split_table(load_table(name, subset), name, text_column)


def _read_texts(batch: dict[str, list[str]]) -> dict[str, list[str]]:
    """Replace paths by what is in their files, each time these documents are read."""
    return {"text": [_read_text(Path(path)) for path in batch["text"]]}


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        has_mark = path.read_bytes().startswith((b"\xff\xfe", b"\xfe\xff"))  # of UTF-16
        encoding = "utf-16" if has_mark else "utf-8-sig"
    try:
        return path.read_text(encoding)
    except UnicodeDecodeError:
        warn_once(f"{path} is not UTF-8: each invalid byte becomes U+FFFD")
        return path.read_text(encoding, errors="replace")


def read_json_strings(path: Path) -> list[str] | None:
    """Return the strings of a JSON array, or None for an array of objects or for JSON lines.

    Raises InputError for any other content.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = next(filter(str.strip, file), "").strip()
            if first.startswith("{") and first.endswith("}") and any(map(str.strip, file)):
                return None
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}.") from error
    if isinstance(content, list) and all(isinstance(item, str) for item in content):
        # JSON can escape half of a surrogate pair, which cannot be encoded.
        return [item.encode("utf-8", errors="replace").decode() for item in content]
    if isinstance(content, list) and all(isinstance(item, dict) for item in content):
        return None
    raise InputError(f"{path} must hold an array of strings, or of objects, or JSON lines.")


# --- tables and data sets of the hub ---


def import_datasets() -> ModuleType:
    """Import the datasets library without its log lines; this takes most of a second."""
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs the frameworks that it finds
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # it also raises the errors that it logs
    return datasets


def load_table(name: str, subset: str | None) -> "datasets.DatasetDict":
    """Return the splits of a local table, a folder of tables or a data set of the hub.

    Raises InputError if there is none, if it cannot be read, or if no split is named train.
    """
    path = Path(name)
    is_local = name and path.exists()
    if path.is_file() and path.suffix not in TABLE_SUFFIXES:
        raise InputError(f"{name} is no table: give a {', '.join(TABLE_SUFFIXES)} file.")
    if not is_local:
        prepare_for_hub("data set", name)
    load_dataset = import_datasets().load_dataset
    try:
        if path.is_file():
            table = load_dataset(TABLE_SUFFIXES[path.suffix], data_files=glob.escape(name))
        else:  # "csv" alone would not be the folder, but the library's reader of such files
            table = load_dataset(str(path.resolve()) if is_local else name, subset)
    except Exception as error:  # the library wraps errors of its readers in many classes
        if not is_local:  # no network, no such data set, no such subset, a gated data set
            raise not_found("data set", name, (BUILT_IN,), error) from error
        cause = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"Cannot read {name} as a data set: {cause}") from error
    if "train" not in table:
        raise InputError(
            f"{name} has no split named train, only {', '.join(table)}: rename the training split."
        )
    return table


def split_table(
    table: "datasets.DatasetDict", name: str, text_column: str | None
) -> "tuple[datasets.Dataset, datasets.Dataset]":
    """Return (training, evaluation) documents; the validation split, if any, is for evaluation.

    Raises InputError if there is no such column.
    """
    train = _text_of(table["train"], name, text_column)
    if "validation" in table:
        return train, _text_of(table["validation"], name, text_column)
    return split_documents(train)


def _text_of(table: "datasets.Dataset", name: str, text_column: str | None) -> "datasets.Dataset":
    """Return only the text column of a table, under the name "text", without empty cells."""
    types = {column: getattr(feature, "dtype", "") for column, feature in table.features.items()}
    columns = [column for column in types if types[column] in ("string", "large_string")]
    column = text_column or ("text" if "text" in columns or len(columns) != 1 else columns[0])
    if column not in columns:
        found = (
            f"give --text-column one of {', '.join(columns)}" if columns else "no column is text"
        )
        raise InputError(f"{name} has no text column {column!r}: {found}.")
    table = table.select_columns([column])
    if column != "text":
        table = table.rename_column(column, "text")
    column = table.data.column("text")
    return table.select(np.flatnonzero(column.is_valid())) if column.null_count else table


# --- training and evaluation documents ---


def documents_of(texts: Iterable) -> "datasets.Dataset":
    """Return a data set with one column, "text", in memory."""
    return import_datasets().Dataset.from_dict({"text": list(texts)})


def split_documents(
    documents: "datasets.Dataset", keys: list[str] | None = None
) -> "tuple[datasets.Dataset, datasets.Dataset]":
    """Return (training, evaluation) documents; of fewer than 100 documents, each one is split.

    keys: for is_held_out, if not the texts themselves.
    """
    if len(documents) < FEW_DOCUMENTS:
        rows = documents_of(range(len(documents)))
        parts = (functools.partial(_cut, documents, part) for part in ("train", "evaluation"))
        return tuple(map(rows.with_transform, parts))
    texts = (text for batch in documents.iter(DOCUMENTS_PER_READ) for text in batch["text"])
    held_out = np.fromiter(map(is_held_out, keys or texts), bool, len(documents))
    return tuple(documents.select(np.flatnonzero(out)) for out in (~held_out, held_out))


def _cut(documents: "datasets.Dataset", part: str, batch: dict[str, list[int]]) -> dict[str, list]:
    """Replace numbers of documents by the documents' ends, or by what is before their ends."""
    texts = documents[batch["text"]]["text"]
    cuts = [len(text) - len(text) // EVAL_ONE_IN for text in texts]
    slices = [slice(cut) if part == "train" else slice(cut, None) for cut in cuts]
    return {"text": [text[each] for text, each in zip(texts, slices, strict=True)]}


def is_held_out(key: str) -> bool:
    """Return whether the document with this key, its path or its text, is for evaluation.

    This depends only on the key, so it is the same on every machine and in every order, and a text
    that occurs twice is never used for both.
    """
    digest = hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % EVAL_ONE_IN == 0


# --- addresses ---


@explain_store_errors
def mirror(address: str, suffixes: tuple[str, ...]) -> Path:
    """Return a local copy of a remote file, or of a folder's visible files with these suffixes.

    If the store reports another size, stamp or time of a file, all are downloaded to a new folder.
    Raises InputError if there is no such file, the store fails, or the copy cannot be written.
    """
    path = as_path(address)
    root = path.path.rstrip("/")
    try:
        found = path.fs.find(root, detail=True)
    except FileNotFoundError:  # there is not even a bucket
        found = {}
    wanted = {
        name: info
        for name, info in sorted(found.items())
        if PurePosixPath(name).suffix in suffixes and "/." not in name.removeprefix(root)
    }
    if not wanted:
        known = f"that ends in one of: {' '.join(suffixes)}." if found else "at all."
        raise InputError(f"There is no data set at '{address}': it has no file {known}")
    times = ("LastModified", "mtime", "created")
    facts = [
        (name, info["size"], stamp_of(info) or [str(info.get(key)) for key in times])
        for name, info in wanted.items()
    ]
    base = root.rpartition("/")[0] if root in wanted else root

    def fill(folder: Path) -> None:
        start = time.perf_counter()
        targets = {name: folder / name.removeprefix(f"{base}/") for name in wanted}
        for target in targets.values():
            target.parent.mkdir(parents=True, exist_ok=True)
        path.fs.get(list(targets), [str(target) for target in targets.values()])
        for name, target in targets.items():
            if (size := target.stat().st_size) != wanted[name]["size"]:
                raise OSError(f"{name} has {wanted[name]['size']} bytes, and {size} arrived")
        megabytes = sum(info["size"] for info in wanted.values()) / 1e6
        logger.info("fetched %s: %.1f MB in %.1f s", path, megabytes, time.perf_counter() - start)

    folder = cached_folder("remote-data", (address, facts), fill)
    return folder / PurePosixPath(root).name if root in wanted else folder

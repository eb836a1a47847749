"""Documents: the built-in corpus, text, tables, folders of them, addresses and the hub.

The library datasets reads them, and keeps what it has read as Arrow files below HF_HOME.
"""

import contextlib
import functools
import glob
import hashlib
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from types import ModuleType
from typing import IO, TYPE_CHECKING, NamedTuple

import fsspec
import numpy as np
from fsspec.utils import compressions

from common.cli import RunError
from common.models import cannot_load, prepare_for_hub
from common.storage import as_path, cached_folder, disk_error, explain_store_errors, is_remote

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict  # see import_datasets

logger = logging.getLogger(__name__)
warn_once = functools.cache(logger.warning)

BUILT_IN = "python-stdlib"
KINDS = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".py"), "text"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **{".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"},
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
LOCAL = fsspec.filesystem("file")
# Tests, and long repetitive tables of code points or topics, which do not look like code.
NOT_CODE = re.compile(
    r"(^|/)(site-packages|dist-packages|tests?|idle_test|idlelib|lib2to3|pydoc_data|encodings"
    r"|__pycache__|config-[^/]*)/|(^|/)_sysconfigdata[^/]*$"
)
SPLITS = ("train", "validation")
PIECE = 2**20  # characters; a text file is read in pieces, so a large one needs little memory
EVAL_ONE_IN = 20  # without a validation split, one document in 20 is used for evaluation
FEW_DOCUMENTS = 100  # with fewer, the end of each text or of each piece is used instead
# What file systems and stores say of a file that changes when its content does.
STAMPS = ("size", "mtime", "LastModified", "last_modified", "updated", "created")
STAMPS += ("ETag", "etag", "md5Hash", "content_md5")


class Documents(NamedTuple):
    """A data set that is not loaded yet.

    fingerprint: changes if the documents may have changed; it is found without reading them.
    load: returns rows with a "text" that is a document. Of text files it is a piece of one, and
    "ends" says whether the document ends there. "held_out" says whether the document is for
    evaluation; without this column, split_texts decides.
    """

    fingerprint: str
    load: "Callable[[], Dataset]"


def find_documents(name: str, subset: str | None, text_column: str | None) -> Documents:
    """Find a data set by its name: the built-in corpus, an address, a local path or a hub id.

    Raises RunError, now or in `load`, if there is no such data set or no such column.
    """
    if name == BUILT_IN:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in list_files(root, NOT_CODE) if file.suffix == ".py"]
        # Which modules are for evaluation depends on their paths only.
        keys = [file.relative_to(root).as_posix() for file in files]
    else:
        keys, path = None, fetch(name) if is_remote(name) else Path(name)
        if not name or not path.exists():
            table = load_table(name, subset)
            parts = sorted((split, part._fingerprint) for split, part in table.items())
            return Documents(f"{parts} {text_column}", lambda: text_of(table, name, text_column))
        files = list_files(path)
        if kind_of_all(path, files) != "text":
            fingerprint = _fingerprint(files, (subset, text_column))
            name = str(path)
            return Documents(
                fingerprint, lambda: text_of(load_table(name, subset), name, text_column)
            )
        files = [file for file in files if kind_of(file) == "text"]
    if subset or text_column:
        raise RunError(f"{name} is text: it has no --dataset-subset and no --text-column.")
    if not files:
        raise RunError(f"There is no text in {name}: give -d another path.")
    fingerprint = _fingerprint(files, keys, PIECE)
    names = [str(file) for file in files]
    return Documents(fingerprint, lambda: read_texts(names, keys, fingerprint))


# --- files ---


def kind_of(file: str | Path) -> str | None:
    """Return "text", or the name of the library's reader for this file, or None."""
    path = PurePath(file)
    return KINDS.get((path.with_suffix("") if path.suffix in COMPRESSED else path).suffix)


def kind_of_all(path: Path, files: list[Path]) -> str:
    """Return the kind of a file, or of the files in a folder; "folder" leaves it to the library.

    files: from list_files. Raises RunError if there is none, or if there are several and nothing
    says which one is meant.
    """
    if {"dataset_info.json", "dataset_dict.json"} & {file.name for file in files}:
        return "folder"  # of save_to_disk
    examples = {kind: file for file in reversed(files) if (kind := kind_of(file))}
    if not examples:
        none = "does not end" if path.is_file() else "has no file that ends"
        raise RunError(f"{path} {none} in one of: {' '.join(KINDS)}.")
    if len(examples) > 1 and path / "README.md" in files:
        return "folder"  # a data set's card, which may say what to read
    if len(examples) > 1:
        found = ", ".join(str(file.relative_to(path)) for file in examples.values())
        raise RunError(
            f"The folder {path} has files of several kinds ({found}): give one file, or a folder "
            "of one kind."
        )
    return next(iter(examples))


def list_files(path: Path, skip: re.Pattern | None = None) -> list[Path]:
    """Return a file, or the visible files of a folder, in the same order on all machines.

    skip: matches relative paths to leave out; that of a folder ends in /.
    """
    if path.is_file():
        return [path]

    def is_wanted(file: Path, end: str = "") -> bool:
        relative = file.relative_to(path).as_posix() + end
        return not file.name.startswith(".") and not (skip and skip.search(relative))

    found, seen = [], set()
    for folder, subfolders, names in os.walk(path, followlinks=True):
        parent = Path(folder)
        if parent.resolve() in seen:  # by way of a link
            subfolders.clear()
            continue
        seen.add(parent.resolve())
        subfolders[:] = sorted(name for name in subfolders if is_wanted(parent / name, "/"))
        found += [parent / name for name in names if is_wanted(parent / name)]
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def _fingerprint(files: list[Path], *facts: object) -> str:
    """Return a checksum of the files' names, sizes and times, and of other facts."""
    stats = []
    for file in files:
        if not file.exists():
            raise RunError(f"{file} is a link to nothing: remove it, or mend it.")
        stats.append((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns))
    return hashlib.sha256(repr((stats, facts)).encode()).hexdigest()


@explain_store_errors
def fetch(address: str) -> Path:
    """Return a local copy of a remote file or folder: a new copy when the store reports a change.

    Raises RunError if there is no such file, if the store fails, or if it cannot be written.
    """
    path = as_path(address)
    root = path.path.rstrip("/")
    try:
        found = sorted(path.fs.find(root, detail=True).items())
    except FileNotFoundError:  # there is not even a bucket
        found = []
    found = [(name, info) for name, info in found if "/." not in name.removeprefix(root)]
    if not found:
        raise RunError(f"There is no data set at '{address}': check the address.")
    facts = [(name, [str(info.get(key)) for key in STAMPS]) for name, info in found]

    def fill(folder: Path) -> None:
        targets = [folder / PurePath(root).name / name.removeprefix(root)[1:] for name, _ in found]
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
        path.fs.get([name for name, _ in found], [str(target) for target in targets])

    return cached_folder("remote-data", (address, facts), fill) / PurePath(root).name


# --- text ---


def read_texts(files: list[str], keys: list[str] | None, fingerprint: str) -> "Dataset":
    """Return text files as rows "text", "ends" and, unless there are few, "held_out".

    Each file is a document. keys: for is_held_out, instead of the files' contents. Raises RunError
    for UTF-16, and if a file cannot be read.
    """
    if any(file.endswith(".zst") for file in files) and "zst" not in compressions:
        raise RunError("Files that end in .zst need a package: pip install zstandard.")
    held_out = []
    for number, file in enumerate(files):
        with _open(file, "rb") as content:
            if content.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise RunError(f"{file} is UTF-16: convert it to UTF-8.")
            is_out = None
            if len(files) >= FEW_DOCUMENTS and keys:
                is_out = is_held_out(keys[number])
            elif len(files) >= FEW_DOCUMENTS:
                content.seek(0)
                is_out = _is_chosen(hashlib.file_digest(content, "sha256").digest())
        held_out.append(is_out)
    facts = {"files": files, "held_out": held_out, "fingerprint": fingerprint}
    datasets = import_datasets()
    columns = {"text": datasets.Value("string"), "ends": datasets.Value("bool")}
    if len(files) >= FEW_DOCUMENTS:
        columns["held_out"] = datasets.Value("bool")
    try:
        return datasets.Dataset.from_generator(
            _pieces,
            gen_kwargs=facts,
            features=datasets.Features(columns),
            writer_batch_size=16,  # rows that it holds in memory
        )
    except ValueError as error:  # what the library says if there are no rows
        raise RunError("There is no text in these files: give -d another path.") from error
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None


@contextlib.contextmanager
def _open(file: str, mode: str, **options: str) -> Iterator[IO]:
    """Open a text file that may be compressed. Raises RunError if it cannot be read."""
    try:
        with LOCAL.open(file, mode, compression="infer", **options) as content:
            yield content
    except RunError:
        raise
    except Exception as error:  # each kind of compression has its own
        raise cannot_load("text", file, error) from error


def _pieces(files: list[str], held_out: list[bool | None], fingerprint: str) -> Iterator[dict]:
    """Yield the rows; a piece ends where a line does, if possible. \\r\\n becomes \\n."""
    for file, is_out in zip(files, held_out, strict=True):
        with _open(file, "rt", encoding="utf-8-sig", errors="replace") as content:
            piece = content.read(PIECE) + content.readline(PIECE)
            while piece:
                if "\ufffd" in piece:
                    warn_once(f"{file} is not UTF-8: each invalid byte becomes U+FFFD")
                following = content.read(PIECE) + content.readline(PIECE)
                row = {"text": piece, "ends": not following}
                yield row if is_out is None else {**row, "held_out": is_out}
                piece = following


# --- tables and data sets of the hub ---


def import_datasets() -> ModuleType:
    """Import the datasets library without its log lines; this takes most of a second."""
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs the frameworks that it finds
    import datasets

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # it also raises the errors that it logs
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it asks for metadata in READMEs
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def load_table(name: str, subset: str | None) -> "DatasetDict":
    """Return the splits of a local table, a folder of tables or a data set of the hub.

    Raises RunError if there is none, if it cannot be read, or if no split is named train.
    """
    path = Path(name)
    if is_local := bool(name) and path.exists():
        files = list_files(path)
        kind, path = kind_of_all(path, files), path.resolve()
        if kind == "text":
            raise RunError(f"{name} is text, not a table: give a table or a folder of tables.")
    else:
        prepare_for_hub("data set", name)
    datasets = import_datasets()
    try:
        if not is_local:
            table = datasets.load_dataset(name, subset)
        elif path.is_dir() and any((path / f"dataset_{x}.json").exists() for x in ("info", "dict")):
            table = datasets.load_from_disk(path)
            table = table if isinstance(table, dict) else {"train": table}
        else:
            # NA and None are texts. "csv" alone would be the library's reader, not a folder.
            kinds = {kind_of(file) for file in files} - {None, "text"}
            options = {"keep_default_na": False} if kinds == {"csv"} else {}
            if path.is_file():
                files = glob.escape(str(path))
                table = datasets.load_dataset(kind, data_files=files, **options)
            else:
                table = datasets.load_dataset(str(path), subset, **options)
    except Exception as error:  # the library wraps errors of its readers in many classes
        if cause := disk_error(error):
            raise cause from None
        raise cannot_load("data set", name, error.__cause__ or error) from error
    if "train" not in table:
        raise RunError(
            f"{name} has no split named train, only {', '.join(table)}: rename the training split."
        )
    return table


def text_of(table: "DatasetDict", name: str, text_column: str | None) -> "Dataset":
    """Return the text column of the splits train and, if there is one, validation, as rows "text".

    If there is such a split, "held_out" tells its rows from the others.

    Raises RunError if there is no such column.
    """
    types = {column: getattr(x, "dtype", "") for column, x in table["train"].features.items()}
    columns = [column for column in types if types[column] in ("string", "large_string")]
    column = text_column or ("text" if "text" in columns or len(columns) != 1 else columns[0])
    if column not in columns:
        found = (
            f"give --text-column one of {', '.join(columns)}" if columns else "no column is text"
        )
        raise RunError(f"{name} has no text column {column!r}: {found}.")
    parts = [table[split].select_columns([column]) for split in SPLITS if split in table]
    if column != "text":
        parts = [part.rename_column(column, "text") for part in parts]
    if len(parts) == 1:
        return parts[0]
    flags = [np.full(len(part), number == 1) for number, part in enumerate(parts)]
    rows = [part.add_column("held_out", flag) for part, flag in zip(parts, flags, strict=True)]
    return import_datasets().concatenate_datasets(rows)


# --- training and evaluation documents ---


def is_held_out(key: str) -> bool:
    """Return whether the document with this key, its path or its text, is for evaluation.

    This depends only on the key, so it is the same on every machine and in every order, and a text
    that occurs twice is never used for both.
    """
    return _is_chosen(hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest())


def _is_chosen(digest: bytes) -> bool:
    return int.from_bytes(digest[:8], "big") % EVAL_ONE_IN == 0


def are_few(documents: "Dataset") -> bool:
    """Return whether there are too few documents to choose whole ones for evaluation."""
    columns = documents.column_names
    n_documents = sum(documents["ends"]) if "ends" in columns else len(documents)
    return "held_out" not in columns and n_documents < FEW_DOCUMENTS


def split_texts(batch: dict[str, list], few: bool) -> Iterator[tuple[str, bool, bool]]:
    """Yield (text, whether it is for evaluation, whether a document ends here); no empty texts.

    batch: columns, as `Documents.load` returns them. few: cut the end of each text off, instead.
    """
    for row, text in enumerate(batch["text"]):
        ends = batch["ends"][row] if "ends" in batch else True
        if few and text:
            cut = len(text) - len(text) // EVAL_ONE_IN
            yield text[:cut], False, ends
            if text[cut:]:
                yield text[cut:], True, ends
        elif text:
            yield text, batch["held_out"][row] if "held_out" in batch else is_held_out(text), ends


def read_documents(documents: "Dataset", held_out: bool) -> Iterator[str]:
    """Yield the texts for training or for evaluation, with only a few of them in memory."""
    few = are_few(documents)
    for batch in documents.iter(16):
        yield from (text for text, is_out, _ in split_texts(batch, few) if is_out == held_out)

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
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path, PurePath
from types import ModuleType
from typing import IO, TYPE_CHECKING, NamedTuple

import fsspec
import numpy as np

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
    **{".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"},
}
# Files that describe data.
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")
NOT_DATA += ("stats.json", "config.json")
COMPRESSED = (".gz", ".bz2", ".xz")  # .zst needs another package, without which it would be text
LOCAL = fsspec.filesystem("file")
# Tests, and long repetitive tables of code points or topics, which do not look like code.
NOT_CODE = re.compile(
    r"(^|/)(site-packages|dist-packages|tests?|idle_test|idlelib|lib2to3|pydoc_data|encodings"
    r"|__pycache__|config-[^/]*)/|(^|/)_sysconfigdata[^/]*$"
)
SPLITS = ("train", "validation")
# Words in the names of text files; if all files have one, they say which are for evaluation.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
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
    evaluation; without this column, split_texts decides. info.description says what was read.
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
        held_out = [is_held_out(file.relative_to(root).as_posix()) for file in files]
        found = files
    else:
        path = fetch(name) if is_remote(name) else Path(name)
        if not name or not path.exists():
            table = load_table(name, subset)
            parts = sorted((split, part._fingerprint) for split, part in table.items())
            return Documents(f"{parts} {text_column}", lambda: text_of(table, name, text_column))
        found = list_files(path)
        if kind_of_all(path, found) != "text":
            fingerprint = _fingerprint(found, (subset, text_column))
            name = str(path)
            return Documents(
                fingerprint, lambda: text_of(load_table(name, subset), name, text_column)
            )
        files = [file for file in found if kind_of(file) == "text"]
        held_out = [None] * len(files)
        splits = {file: split_of(file) for file in files if file.name != "README.md"}
        if "train" in splits.values() and all(splits.values()):
            files = [file for file, split in splits.items() if split in SPLITS]
            has_validation = "validation" in splits.values()
            held_out = [splits[file] == "validation" if has_validation else None for file in files]
    if subset or text_column:
        raise RunError(f"{name} is text: it has no --dataset-subset and no --text-column.")
    fingerprint = _fingerprint(files, held_out, PIECE)

    def load() -> "Dataset":
        rows = read_texts(list(map(str, files)), held_out, fingerprint)
        rows.info.description = describe(files, found)
        return rows

    return Documents(fingerprint, load)


# --- files ---


def kind_of(file: str | Path) -> str | None:
    """Return "text", or the name of the library's reader for this file, or None."""
    path = PurePath(PurePath(file).name.lower())
    if path.name in NOT_DATA:
        return None
    return KINDS.get((path.with_suffix("") if path.suffix in COMPRESSED else path).suffix)


def split_of(file: Path) -> str | None:
    """Return "train", "validation" or "test" if a word of the file's name says so, or None."""
    words = re.split(r"[^a-z]+", file.name.lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def kind_of_all(path: Path, files: list[Path]) -> str:
    """Return the kind of a file, or of the files in a folder.

    It is "saved" for a folder of save_to_disk, and "folder" if the library is to choose. files:
    from list_files. Raises RunError if there is none, or if there are several and nothing says
    which one is meant.
    """
    if {path / "dataset_info.json", path / "dataset_dict.json"} & set(files):
        return "saved"
    data = [file for file in files if file == path or file.name != "README.md"]
    examples = {kind: file for file in reversed(data) if (kind := kind_of(file))}
    if not examples:
        none = "does not end" if path.is_file() else "has no file that ends"
        ends = f"{' '.join(KINDS)}, each also with one of: {' '.join(COMPRESSED)}"
        raise RunError(f"{path} {none} in one of: {ends}.")
    if len(examples) > 1:
        card = path / "README.md"
        if card in files and "configs:" in card.read_text(encoding="utf-8", errors="replace"):
            return "folder"  # the data set's card says what to read
        found = ", ".join(sorted(str(file.relative_to(path)) for file in examples.values()))
        raise RunError(
            f"The folder {path} has files of several kinds ({found}): give one file, or a folder "
            "of one kind."
        )
    return next(iter(examples))


def describe(read: list[str | Path], found: list[Path]) -> str:
    """Return in words how many files of which kind are read, and how many are not."""
    kinds = " and ".join(sorted({kind_of(file) for file in read}))
    description = f"{len(read)} {kinds} file{'s' * (len(read) > 1)}"
    others = len(found) - len(read)
    return description + (f"; other files, which are not read: {others}" if others else "")


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
        subfolders[:] = [name for name in subfolders if is_wanted(parent / name, "/")]
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
        found = path.fs.find(root, detail=True)
    except FileNotFoundError:  # there is not even a bucket
        found = {}
    if not found:
        raise RunError(f"There is no data set at '{address}': check the address.")
    facts = [(file, [str(info.get(key)) for key in STAMPS]) for file, info in sorted(found.items())]

    def fill(folder: Path) -> None:
        path.fs.get(root, f"{folder}/", recursive=True)

    return cached_folder("remote-data", (address, facts), fill) / PurePath(root).name


# --- text ---


def read_texts(files: list[str], held_out: list[bool | None], fingerprint: str) -> "Dataset":
    """Return text files as rows "text", "ends" and, unless there are few, "held_out".

    Each file is a document. held_out: for each file, or None if its content decides. Raises
    RunError for UTF-16, and if a file cannot be read.
    """
    held_out = held_out.copy()
    for number, file in enumerate(files):
        with _open(file, "rb") as content:
            if content.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise RunError(f"{file} is UTF-16: convert it to UTF-8.")
            if held_out[number] is None and len(files) >= FEW_DOCUMENTS:
                content.seek(0)
                held_out[number] = _is_chosen(hashlib.file_digest(content, "sha256").digest())
    facts = {"files": files, "held_out": held_out, "fingerprint": fingerprint}
    datasets = import_datasets()
    columns = {"text": datasets.Value("string"), "ends": datasets.Value("bool")}
    if None not in held_out:
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
    """Import the datasets library, which takes most of a second, and set it up.

    It logs nothing, and it does not read files that are NOT_DATA. Raises RunError if its cache
    cannot be written.
    """
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs the frameworks that it finds
    import datasets

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # it also raises the errors that it logs
    ignored = datasets.data_files.FILES_TO_IGNORE
    ignored[:] = sorted({*ignored, *NOT_DATA})
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it asks for metadata in READMEs
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        raise RunError(
            f"Cannot write to the cache {cache} ({error.strerror}): set HF_DATASETS_CACHE, or "
            "HF_HOME, to another folder."
        ) from error
    return datasets


def load_table(name: str, subset: str | None) -> "DatasetDict":
    """Return the splits of a local table, a folder of tables or a data set of the hub.

    info.description says which files were read, if that is known. Raises RunError if there is none,
    if it cannot be read, or if no split is named train.
    """
    path = Path(name)
    if is_local := bool(name) and path.exists():
        files = list_files(path)
        kind, path = kind_of_all(path, files), path.resolve()
    else:
        prepare_for_hub("data set", name)
    datasets, read = import_datasets(), ""
    try:
        if not is_local:
            table = datasets.load_dataset(name, subset)
        elif kind == "saved":
            table = datasets.load_from_disk(path)
            table = table if isinstance(table, dict) else {"train": table}
        elif path.is_dir() and glob.escape(str(path)) != str(path):  # the library searches for it
            raise RunError(f"{path}: rename the folder, because its name has one of * ? [.")
        else:
            tables = [file for file in files if kind_of(file) not in (None, "text")]
            upper = [file for file in tables if file.suffix != file.suffix.lower()]
            if upper and path.is_dir():  # in a folder, the library would not read it
                raise RunError(f"Rename {upper[0]} so that it ends in {upper[0].suffix.lower()}.")
            options = {}
            if {kind_of(file) for file in tables} == {"csv"}:  # NA and None are texts
                options = {"keep_default_na": False, "sep": separator_of(tables[0])}
                options["index_col"] = False  # a row with too many fields is no row with a name
            if path.is_file():
                options["data_files"] = glob.escape(str(path))
            source = kind if path.is_file() else str(path)  # a folder named "csv" is a folder
            builder = datasets.load_dataset_builder(source, subset, **options)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "Length of header")  # of a CSV file's rows
                builder.download_and_prepare()
            table = builder.as_dataset()
            read = describe(list(chain(*builder.config.data_files.values())), files)
    except RunError:
        raise
    except Exception as error:  # the library wraps errors of its readers in many classes
        if cause := disk_error(error):
            raise cause from None
        if "Config name is missing" in str(error):
            names = re.search(r"\[.*?\]", str(error)).group()
            raise RunError(f"{name} has subsets: give --dataset-subset one of {names}.") from error
        raise cannot_load("data set", name, error.__cause__ or error) from error
    if "train" not in table:
        raise RunError(
            f"{name} has no split named train, only {', '.join(table)}: rename the training split."
        )
    for part in table.values():
        part.info.description = read
    return table


def separator_of(file: Path) -> str:
    """Return the character that separates the fields of a CSV file's header."""
    with _open(str(file), "rt", encoding="utf-8-sig", errors="replace") as content:
        header = re.sub(r'"[^"]*"', "", content.readline())
    return max(",;\t", key=header.count)


def text_of(table: "DatasetDict", name: str, text_column: str | None) -> "Dataset":
    """Return the text column of the splits train and, if there is one, validation, as rows "text".

    If there is such a split, "held_out" tells its rows from the others. Without text_column it is
    "text" or, if the table has no lists, the only column of strings. Raises RunError if there is no
    such column.
    """
    types = {column: getattr(x, "dtype", "list") for column, x in table["train"].features.items()}
    columns = [column for column in types if types[column] in ("string", "large_string")]
    is_clear = len(columns) == 1 and "list" not in types.values()
    column = text_column or (columns[0] if is_clear else "text")
    if column not in columns:
        found = (
            f"give --text-column one of {', '.join(columns)}" if columns else "no column is text"
        )
        raise RunError(f"{name} has no text column {column!r}: {found}.")
    parts, sizes = [], []
    for split in SPLITS:
        if split in table:
            part = table[split].select_columns([column])
            part = part if column == "text" else part.rename_column(column, "text")
            if "validation" in table:
                part = part.add_column("held_out", np.full(len(part), split == "validation"))
            parts.append(part)
            sizes.append(f"{len(part):,} ({split})")
    from datasets import concatenate_datasets  # the table has imported it

    others = ", ".join(split for split in table if split not in SPLITS)
    rows = concatenate_datasets(parts)
    read = [table["train"].info.description]
    read += [f"rows of column {column!r}: {' and '.join(sizes)}"]
    read += [f"splits that are not read: {others}" if others else ""]
    rows.info.description = "; ".join(filter(None, read))
    return rows


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

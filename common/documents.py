"""Documents: the built-in corpus, text, tables, folders of them, addresses and the hub.

Text files are read directly, in pieces. The library datasets reads everything else, and keeps what
it has read as Arrow files below HF_HOME.
"""

import csv
import glob
import hashlib
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, NamedTuple

import fsspec

from common.cli import RunError
from common.models import cannot_load, check_hub_id
from common.storage import disk_error, fetch, is_remote

if TYPE_CHECKING:
    from datasets import DatasetDict  # see load_table

logger = logging.getLogger(__name__)

BUILT_IN = "python-stdlib"
KINDS = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".py"), "text"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **{".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"},
}
# Files that describe data.
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
NOT_DATA += ("stats.json", "config.json")
COMPRESSED = (".gz", ".bz2", ".xz")  # .zst needs another package, without which it would be text
# Tests, and long repetitive tables of code points or topics, which do not look like code.
NOT_CODE = re.compile(
    r"(^|/)(site-packages|dist-packages|tests?|idle_test|idlelib|lib2to3|pydoc_data|encodings"
    r"|__pycache__|config-[^/]*)/|(^|/)_sysconfigdata[^/]*$"
)
# Words in the names of files and folders that say which part of a data set is there.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
PIECE = 2**20  # characters; a text file is read in pieces, so a large one needs little memory
ROWS = 64  # of a table that are in memory at once
EVAL_ONE_IN = 20  # without a validation split, one document in 20 is used for evaluation
FEW_DOCUMENTS = 100  # with fewer, the end of each text or of each piece is used instead


class Text(NamedTuple):
    """A document or a piece of one. held_out: for evaluation. ends: the document ends here."""

    text: str
    held_out: bool
    ends: bool


class Documents(NamedTuple):
    """A data set that is not read yet.

    key: changes if the documents may have changed; local files are not read for it.
    read: yields the texts in order, none of them empty.
    """

    key: str
    read: Callable[[], Iterator[Text]]


def find_documents(name: str, subset: str | None, text_column: str | None) -> Documents:
    """Find a data set by its name: the built-in corpus, an address, a local path or a hub id.

    What is for evaluation depends on the documents only, not on their order or the machine:

    1. If there is a validation split, it is for evaluation. Names of files can say so. Test
       splits are left out.
    2. Otherwise, a checksum chooses one document in EVAL_ONE_IN: of the row, of the file's bytes
       or, in the built-in corpus, of the path.
    3. If there are fewer than FEW_DOCUMENTS, the end of each text is for evaluation.

    Raises RunError, now or in `read`, if there is no such data set or no such column.
    """
    path = fetch(name) if is_remote(name) else Path(name)
    if name == BUILT_IN:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = {"train": [], "validation": []}
        for file in list_files(root, NOT_CODE):
            if file.suffix == ".py":
                held_out = is_held_out(file.relative_to(root).as_posix())
                files["validation" if held_out else "train"].append(file)
    elif not name or not path.exists():
        table = load_table(name, subset)
        parts = sorted((split, part._fingerprint) for split, part in table.items())
        return Documents(f"{parts} {text_column}", lambda: read_table(table, name, text_column))
    else:
        found = list_files(path)
        if kind_of_all(path, found) != "text":
            key = f"{fingerprint(found)} {subset} {text_column}"
            path = str(path)
            return Documents(key, lambda: read_table(load_table(path, subset), name, text_column))
        files = split_files(path, [file for file in found if kind_of(file) == "text"])
    if subset or text_column:
        raise RunError(f"{name} is text: it has no --dataset-subset and no --text-column.")
    sizes = [f"{len(files[split])} text files ({split})" for split in files if split != "test"]
    logger.info(f"{name}: {' and '.join(sizes)}")
    everything = [file for part in files.values() for file in part]
    key = fingerprint(everything) + str({split: len(part) for split, part in files.items()})
    return Documents(f"{key} {PIECE}", lambda: read_texts(files))


# --- files ---


def kind_of(file: str | Path) -> str | None:
    """Return "text", or the name of the library's reader for this file, or None."""
    path = PurePath(PurePath(file).name.lower())
    if path.name in NOT_DATA:
        return None
    return KINDS.get((path.with_suffix("") if path.suffix in COMPRESSED else path).suffix)


def kind_of_all(path: Path, files: list[Path]) -> str:
    """Return the kind of a file, or of the files in a folder.

    It is "saved" for a folder of save_to_disk, and "card" if the data set's card says what to read.
    files: from list_files. Raises RunError if there is none, or if there are several kinds.
    """
    if {path / "state.json", path / "dataset_dict.json"} & set(files):
        return "saved"
    card = path / "README.md"
    if card in files and "configs:" in card.read_text(encoding="utf-8", errors="replace"):
        return "card"
    data = [file for file in files if file == path or file.name != "README.md"]
    examples = {kind: file for file in reversed(data) if (kind := kind_of(file))}
    if not examples:
        none = "does not end" if path.is_file() else "has no file that ends"
        ends = f"{' '.join(KINDS)}, each also with one of: {' '.join(COMPRESSED)}"
        raise RunError(f"{path} {none} in one of: {ends}.")
    if len(examples) > 1:
        found = ", ".join(sorted(str(file.relative_to(path)) for file in examples.values()))
        raise RunError(
            f"The folder {path} has files of several kinds ({found}): give one file, or a folder "
            "of one kind."
        )
    return next(iter(examples))


def list_files(path: Path, skip: re.Pattern | None = None) -> list[Path]:
    """Return a file, or the visible files of a folder, in the same order on all machines.

    skip: matches relative paths to leave out; that of a folder ends in /. Raises RunError if a
    folder cannot be read.
    """

    def fail(error: OSError) -> None:  # os.walk would leave the folder out
        raise RunError(f"{error.filename} cannot be read ({error.strerror}): give another path.")

    if path.is_file():
        return [path]
    found, seen = [], set()
    for folder, subfolders, names in os.walk(path, onerror=fail, followlinks=True):
        if (resolved := Path(folder).resolve()) in seen:  # a link leads here
            subfolders.clear()
            continue
        seen.add(resolved)
        parent = Path(folder).relative_to(path)
        subfolders[:] = [name for name in subfolders if _is_wanted(f"{parent / name}/", skip)]
        found += [path / parent / name for name in names if _is_wanted(str(parent / name), skip)]
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def _is_wanted(relative: str, skip: re.Pattern | None) -> bool:
    return not Path(relative).name.startswith(".") and not (skip and skip.search(relative))


def split_of(file: PurePath) -> str | None:
    """Return "train", "validation" or "test", what the last such word of a name says, or None."""
    words = re.split(r"[^a-z]+", file.as_posix().lower())
    return next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), None)


def split_files(path: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Return the files of a folder by split: all are "train" unless all names say a split."""
    parts = {split: [] for split in ("train", "validation", "test", None)}
    for file in files:
        if file.name != "README.md":
            parts[split_of(file.relative_to(path))].append(file)
    if parts[None] or not parts["train"]:
        return {"train": files}
    return {split: part for split, part in parts.items() if part}


def fingerprint(files: list[Path]) -> str:
    """Return a checksum of the files' names, sizes and times."""
    facts = []
    for file in files:
        if not file.exists():
            raise RunError(f"{file} is a link to nothing: remove it, or mend it.")
        facts.append((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def open_file(file: Path, mode: str = "rt", **options: str) -> IO:
    """Open a file that may be compressed."""
    local = fsspec.filesystem("file")
    return local.open(str(file), mode, compression="infer", **options)


# --- text ---


def read_texts(files: dict[str, list[Path]]) -> Iterator[Text]:
    """Yield text files, each of which is a document, in pieces that end where a line does.

    Raises RunError if a file is not UTF-8 or is damaged.
    """
    has_validation = "validation" in files
    few = not has_validation and len(files["train"]) < FEW_DOCUMENTS
    for split in [split for split in files if split != "test"]:
        for file in files[split]:
            held_out = split == "validation"
            try:
                if not has_validation and not few:
                    with open_file(file, "rb") as content:
                        held_out = _is_chosen(hashlib.file_digest(content, "sha256").digest())
                with open_file(file, encoding="utf-8-sig") as content:  # \r\n becomes \n
                    piece = content.read(PIECE) + content.readline(PIECE)
                    while piece:
                        following = content.read(PIECE) + content.readline(PIECE)
                        yield from divide(piece, held_out, ends=not following, few=few)
                        piece = following
            except UnicodeError as error:
                raise RunError(f"{file} is not UTF-8 ({error}): convert it to UTF-8.") from error
            except PermissionError:
                raise
            except Exception as error:  # each kind of compression has its own
                raise cannot_load("text", str(file), error) from error


def divide(text: str, held_out: bool, ends: bool, few: bool) -> Iterator[Text]:
    """Yield a text or, if there are few, its two parts for training and for evaluation."""
    if not few:
        yield Text(text, held_out, ends)
        return
    cut = len(text) - len(text) // EVAL_ONE_IN
    yield Text(text[:cut], False, ends)
    if text[cut:]:
        yield Text(text[cut:], True, ends)


# --- tables and data sets of the hub ---


def load_table(name: str, subset: str | None) -> "DatasetDict":
    """Return the splits of a table, a folder of tables, an address or a data set of the hub.

    Raises RunError if there is none, if it cannot be read, or if no split is named train.
    """
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs the frameworks that it finds
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it asks for metadata in READMEs
    import datasets  # which takes most of a second

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # it also raises the errors that it logs
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    path = fetch(name) if is_remote(name) else Path(name)
    try:
        if not name or not path.exists():
            check_hub_id("data set", name)
            table = datasets.load_dataset(name, subset)
        else:
            files = list_files(path)
            kind = kind_of_all(path, files)
            tables = [file for file in files if kind_of(file) == kind]
            # The library's own key for its cache has no sizes of files.
            cache = Path(datasets.config.HF_DATASETS_CACHE) / fingerprint(files)[:32]
            options = {"cache_dir": str(cache)}
            if kind == "saved":
                table = datasets.load_from_disk(path)
            elif kind == "card":
                table = datasets.load_dataset(str(path), subset, **options)
            else:
                if kind == "csv":  # NA and None are texts; no column is an index
                    options |= {"sep": check_csv(tables), "keep_default_na": False}
                    options["index_col"] = False
                parts = split_files(path, tables) if path.is_dir() else {"train": tables}
                data_files = {s: [glob.escape(str(f.resolve())) for f in parts[s]] for s in parts}
                table = datasets.load_dataset(kind, data_files=data_files, **options)
    except RunError:
        raise
    except Exception as error:  # the library wraps errors of its readers in many classes
        if cause := disk_error(error):
            raise cause from None
        if "Config name is missing" in str(error):
            names = re.search(r"\[.*?\]", str(error)).group()
            raise RunError(f"{name} has subsets: give --dataset-subset one of {names}.") from error
        raise cannot_load("data set", name, error.__cause__ or error) from error
    table = table if isinstance(table, dict) else {"train": table}
    if "train" not in table:
        raise RunError(
            f"{name} has no split named train, only {', '.join(table)}: rename the training split."
        )
    return table


def check_csv(files: list[Path]) -> str:
    """Return the separator of CSV files, which is the most frequent one of the first header.

    Raises RunError for a row with more fields than the header, and for a quotation mark that does
    not end its field: the library would read the following rows as one. Also if it is not UTF-8.
    """
    separator = ""
    csv.field_size_limit(2**31 - 1)
    for file in files:
        n_fields, line = 0, 1
        try:
            with open_file(file, encoding="utf-8-sig", newline="") as content:
                header = content.readline()
                names = re.sub(r'"[^"]*"', "", header)
                separator = separator or max(",;\t", key=names.count)
                rows = csv.reader(chain([header], content), delimiter=separator, strict=True)
                for row in rows:
                    n_fields = n_fields or len(row)
                    if len(row) > n_fields:
                        raise csv.Error(f"{len(row)} fields, and the header has {n_fields}")
                    line = rows.line_num + 1  # where the next row begins
        except (csv.Error, UnicodeError) as error:
            raise RunError(f"{file}, from line {line} on: {error}; correct it.") from error
    return separator


def read_table(table: "DatasetDict", name: str, text_column: str | None) -> Iterator[Text]:
    """Yield the texts of a column of the splits train and, if there is one, validation.

    Without text_column it is "text" or, if the table has no lists, the only column of strings.
    Raises RunError if there is no such column.
    """
    types = {key: str(getattr(x, "dtype", "list")) for key, x in table["train"].features.items()}
    columns = [column for column in types if "string" in types[column]]
    is_clear = len(columns) == 1 and "list" not in types.values()
    column = text_column or (columns[0] if is_clear else "text")
    if column not in columns:
        names = ", ".join(columns)
        found = f"give --text-column one of {names}" if columns else "no column is text"
        raise RunError(f"{name} has no text column {column!r}: {found}.")
    parts = {split: table[split] for split in ("train", "validation") if split in table}
    sizes = [f"{len(part):,} ({split})" for split, part in parts.items()]
    logger.info(f"{name}: rows of column {column!r}: {' and '.join(sizes)}")
    few = len(parts) == 1 and len(parts["train"]) < FEW_DOCUMENTS
    try:
        for split, part in parts.items():
            for batch in part.select_columns([column]).with_format("arrow").iter(ROWS):
                for text in filter(None, batch[column].to_pylist()):
                    held_out = split == "validation" or (len(parts) == 1 and is_held_out(text))
                    yield from divide(text, held_out, ends=True, few=few)
    except UnicodeError as error:
        raise RunError(f"{name} is not UTF-8 ({error}): convert it to UTF-8.") from error


# --- training and evaluation documents ---


def is_held_out(key: str) -> bool:
    """Return whether the document with this key, its path or its text, is for evaluation.

    This depends only on the key, so it is the same on every machine and in every order, and a text
    that occurs twice is never used for both.
    """
    return _is_chosen(hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest())


def _is_chosen(digest: bytes) -> bool:
    return int.from_bytes(digest[:8], "big") % EVAL_ONE_IN == 0

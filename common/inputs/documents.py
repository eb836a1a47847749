"""Documents: the built-in corpus, text, tables, folders of them, addresses and the hub.

Text files are read directly, in pieces, and JSON files by json_files.py. The library datasets reads
everything else, and keeps what it has read as Arrow files below HF_HOME.
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
from types import ModuleType
from typing import IO, TYPE_CHECKING, NamedTuple

from pyarrow import parquet

from common.errors import RunError
from common.inputs.json_files import load_json
from common.inputs.names import cannot_load, check_hub_id, split_of
from common.storage import error_of_cache, fetch, is_remote, open_file

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, Features  # see _import_datasets

logger = logging.getLogger(__name__)

BUILT_IN = "python-stdlib"
# The format of a file by its ending: text, or the library's reader for it.
FORMATS = {
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
# Of a stream and of a file, see https://arrow.apache.org/docs/format/Columnar.html.
ENDS_OF_ARROW = (b"\xff\xff\xff\xff\0\0\0\0", b"ARROW1")
POINTER_OF_LFS = b"version https://git-lfs.github.com/spec/"
PIECE_CHARACTERS = 2**20  # a text file is read in pieces, so a large one needs little memory
ROWS_AT_ONCE = 64  # of a table, in memory
EVAL_ONE_IN = 20  # without a validation split, one document in 20 is used for evaluation
FEW_DOCUMENTS = 100  # with fewer, the end of each text or of each piece is used instead
# What the log says about the rule (see rule_for).
HELD_OUT = {
    "split": "",
    "ends": "; the end of each is for evaluation",
    "checksum": f"; one in {EVAL_ONE_IN} is for evaluation",
}


class Text(NamedTuple):
    """A document or a piece of one. held_out: for evaluation. ends: the document ends here."""

    text: str
    held_out: bool
    ends: bool


class Documents(NamedTuple):
    """A data set that is not read yet, but for one of the hub, which the library has read.

    key: changes if the documents may have changed; local files are not read for it.
    read: yields the texts in order, none of them empty.
    """

    key: str
    read: Callable[[], Iterator[Text]]


def find_documents(name: str, subset: str | None, text_column: str | None) -> Documents:
    """Find a data set by its name: the built-in corpus, an address, a local path or a hub id.

    What is for evaluation depends on the documents only, not on their order or the machine:

    1. In the built-in corpus, a checksum of the path chooses one file in EVAL_ONE_IN.
    2. If there is a validation split, it is for evaluation. Names of files can say so. Test
       splits are left out.
    3. Otherwise, if there are fewer than FEW_DOCUMENTS, the end of each text is for evaluation; of
       a large file, the end of each piece.
    4. Otherwise, a checksum of the document's text (of a file, before its line ends are replaced)
       chooses one document in EVAL_ONE_IN.

    Raises RunError, now or in `read`, if there is no such data set or no such column, or for a
    subset or a column where there is none to choose.
    """
    if name == BUILT_IN:
        return _as_documents(name, _built_in_files(), subset, text_column)
    path = fetch(name) if is_remote(name) else Path(name)
    if not name or not path.exists():
        table = load_from_hub(name, subset)
        versions = sorted((split, rows._fingerprint) for split, rows in table.items())
        return Documents(f"{versions} {text_column}", lambda: read_table(table, name, text_column))
    files = list_files(path)
    if format_of_all(path, files) == "text":
        refuse_pointers(files)
        texts = split_files(path, [file for file in files if format_of(file) == "text"])
        return _as_documents(name, texts, subset, text_column)

    def read() -> Iterator[Text]:
        return read_table(load_local_table(path, files, name, subset), name, text_column)

    return Documents(f"{fingerprint(files)} {subset} {text_column}", read)


def _built_in_files() -> dict[str, list[Path]]:
    """Return the files of Python's standard library by split."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {"train": [], "validation": []}
    for file in list_files(root, NOT_CODE):
        if file.suffix == ".py":
            held_out = is_held_out(file.relative_to(root).as_posix())
            files["validation" if held_out else "train"].append(file)
    return files


def _as_documents(
    name: str, files: dict[str, list[Path]], subset: str | None, text_column: str | None
) -> Documents:
    """Return the documents of text files, which are given by split."""
    if subset or text_column:
        raise RunError(f"{name} is text: it has no --dataset-subset and no --text-column.")
    counts = {split: len(of_split) for split, of_split in files.items()}
    sizes = [f"{n} text files ({split})" for split, n in counts.items() if split != "test"]
    logger.info(f"{name}: {' and '.join(sizes)}{HELD_OUT[rule_for(counts)]}")
    everything = [file for of_split in files.values() for file in of_split]
    key = f"{fingerprint(everything)}{counts} {PIECE_CHARACTERS}"
    return Documents(key, lambda: read_texts(files))


# --- files ---


def format_of(file: str | Path) -> str | None:
    """Return "text", or the name of the library's reader for this file, or None."""
    path = PurePath(PurePath(file).name.lower())
    if path.name in NOT_DATA:
        return None
    return FORMATS.get((path.with_suffix("") if path.suffix in COMPRESSED else path).suffix)


def format_of_all(path: Path, files: list[Path]) -> str:
    """Return the format of a file, or of the files in a folder.

    It is "saved" for a folder of save_to_disk, and "card" if the data set's card says what to read.
    files: from list_files. Raises RunError if there is none, or if there are several formats.
    """
    if {path / "state.json", path / "dataset_dict.json"} & set(files):
        return "saved"
    card = path / "README.md"
    if card in files and "configs:" in card.read_text(encoding="utf-8", errors="replace"):
        return "card"
    first_of_format: dict[str, Path] = {}
    for file in files:
        describes = file.name == "README.md" and file != path
        if not describes and (file_format := format_of(file)) is not None:
            first_of_format.setdefault(file_format, file)
    if not first_of_format:
        none = "does not end" if path.is_file() else "has no file that ends"
        ends = f"{' '.join(FORMATS)}, each also with one of: {' '.join(COMPRESSED)}"
        raise RunError(f"{path} {none} in one of: {ends}.")
    if len(first_of_format) > 1:
        found = ", ".join(sorted(str(file.relative_to(path)) for file in first_of_format.values()))
        raise RunError(
            f"The folder {path} has files of several kinds ({found}): give one file, or a folder "
            "of one kind."
        )
    return next(iter(first_of_format))


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


def split_files(path: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Return the files of a folder by split: all are "train" unless all names say a split."""
    by_split = {split: [] for split in ("train", "validation", "test", None)}
    for file in files:
        if file.name != "README.md":
            by_split[split_of(file.relative_to(path))].append(file)
    if by_split[None] or not by_split["train"]:
        return {"train": files}
    return {split: of_split for split, of_split in by_split.items() if of_split}


def fingerprint(files: list[Path]) -> str:
    """Return a checksum of the files' names, sizes and times."""
    facts = []
    for file in files:
        if not file.exists():
            raise RunError(f"{file} is a link to nothing: remove it, or mend it.")
        facts.append((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def refuse_pointers(files: list[Path]) -> None:
    """Raise RunError if a file is only a pointer to its content, as in a clone without Git LFS."""
    for file in files:
        if format_of(file) is None or not file.exists() or file.stat().st_size > 1024:
            continue
        if file.read_bytes().startswith(POINTER_OF_LFS):
            raise RunError(
                f"{file} is only a pointer of Git LFS: get the files themselves with git lfs pull."
            )


# --- text ---


def read_texts(files: dict[str, list[Path]]) -> Iterator[Text]:
    """Yield text files, each of which is a document, in pieces (see _read_piece).

    Raises RunError if a file is not UTF-8 or is damaged.
    """
    rule = rule_for({split: len(of_split) for split, of_split in files.items()})
    for split in [split for split in files if split != "test"]:
        for file in files[split]:
            held_out = split == "validation"
            try:
                if rule == "checksum":
                    with open_file(file, "rb") as content:
                        held_out = _is_chosen(hashlib.file_digest(content, "sha256").digest())
                with open_file(file, encoding="utf-8-sig") as content:  # \r\n becomes \n
                    piece = _read_piece(content)
                    while piece:
                        if "\0" in piece:
                            raise RunError(
                                f"{file} has NUL characters, so it is no text, or not in UTF-8: "
                                "convert it to UTF-8, or leave it out."
                            )
                        following = _read_piece(content)
                        yield from divide(piece, held_out, not following, rule)
                        piece = following
            except UnicodeError as error:
                raise RunError(f"{file} is not UTF-8 ({error}): convert it to UTF-8.") from error
            except (RunError, PermissionError):
                raise
            except Exception as error:  # each kind of compression has its own
                raise cannot_load("text", str(file), error) from error


def _read_piece(file: IO[str]) -> str:
    """Return the next PIECE_CHARACTERS and the rest of their line; a long rest is cut off, too."""
    return file.read(PIECE_CHARACTERS) + file.readline(PIECE_CHARACTERS)


def divide(text: str, held_out: bool, ends: bool, rule: str) -> Iterator[Text]:
    """Yield a text or, by the rule "ends", its beginning for training and its end."""
    if rule != "ends":
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
    path = fetch(name) if is_remote(name) else Path(name)
    if not name or not path.exists():
        return load_from_hub(name, subset)
    return load_local_table(path, list_files(path), name, subset)


def load_from_hub(name: str, subset: str | None) -> "DatasetDict":
    """Return the splits of a data set of the hub; errors as in load_table."""
    check_hub_id("data set", name)
    if format_of(name):  # a file that does not exist; the hub would be asked for half a minute
        raise RunError(f"There is no file {name!r}: check the path.")
    datasets = _import_datasets()
    return _load(name, lambda: datasets.load_dataset(name, subset))


def load_local_table(path: Path, files: list[Path], name: str, subset: str | None) -> "DatasetDict":
    """Return the splits of a file or a folder; errors as in load_table.

    files: from list_files. name: what the reader calls it, for messages.
    """
    datasets = _import_datasets()
    refuse_pointers(files)
    table_format = format_of_all(path, files)
    if subset and table_format != "card":
        raise RunError(
            f"{name} has no --dataset-subset: only the hub and a folder whose README.md names "
            "configurations have subsets."
        )
    key = fingerprint(files)[:32]

    def load() -> object:
        for file in files:
            check_that_arrow_ends(file)
        if table_format == "saved":
            return datasets.load_from_disk(path)
        if table_format == "card":
            return _load_as_card_says(path, subset, key)
        tables = [file for file in files if format_of(file) == table_format]
        by_split = split_files(path, tables) if path.is_dir() else {"train": tables}
        return _load_files(table_format, by_split, key)

    return _load(name, load)


def _load_files(file_format: str, by_split: dict[str, list[Path]], key: str) -> "DatasetDict":
    """Return the rows of files of one format. key: changes if the files may have changed."""
    by_split = {split: [file.resolve() for file in files] for split, files in by_split.items()}
    for file in chain(*by_split.values()):
        if file.stat().st_size == 0:
            raise RunError(f"{file} is empty: get it again, or leave it out.")
    if file_format == "json":
        return load_json(by_split, key)
    if file_format == "parquet":  # the library fails if a file has no rows
        for split, files in by_split.items():
            by_split[split] = [file for file in files if parquet.read_metadata(file).num_rows]
            if not by_split[split]:
                raise ValueError(f"no rows in the split {split!r}")
    datasets = _import_datasets()
    options = csv_options(list(chain(*by_split.values()))) if file_format == "csv" else {}
    return datasets.load_dataset(
        file_format,
        data_files={
            split: [glob.escape(str(file)) for file in files] for split, files in by_split.items()
        },
        cache_dir=_cache_of(key),
        **options,
    )


def _load_as_card_says(path: Path, subset: str | None, key: str) -> "DatasetDict":
    """Return the rows of a folder whose README.md names files, and perhaps the columns' types."""
    datasets = _import_datasets()
    builder = datasets.load_dataset_builder(str(path), subset, cache_dir=_cache_of(key))
    by_split = {
        split: [Path(file) for file in files]
        for split, files in (builder.config.data_files or {}).items()
    }
    formats = {format_of(file) for file in chain(*by_split.values())}
    if formats not in ({"json"}, {"csv"}) or getattr(builder.config, "field", None):
        return datasets.load_dataset(str(path), subset, cache_dir=_cache_of(key))
    table = _load_files(formats.pop(), by_split, key)
    types = builder.info.features
    return table.cast(types) if types else table


def _cache_of(key: str) -> str:
    """Return a folder for what the library reads: its own key has no sizes of files."""
    return f"{_import_datasets().config.HF_DATASETS_CACHE}/{key}"


def _import_datasets() -> ModuleType:
    """Import the library, which takes most of a second, and keep its log for errors."""
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs the frameworks that it finds
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it asks for metadata in READMEs
    import datasets

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # it also raises the errors that it logs
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _load(name: str, load: Callable[[], object]) -> "DatasetDict":
    """Call a function of the library; return the splits that it loads, or raise a RunError."""
    try:
        table = load()
    except RunError:
        raise
    except Exception as error:  # the library wraps errors of its readers in many classes
        if cause := error_of_cache(Path(_import_datasets().config.HF_DATASETS_CACHE), error):
            raise cause from error
        if "Config name is missing" in str(error):
            listed = re.search(r"\[.*?\]", str(error))
            one_of = f"one of {listed.group()}" if listed else "its name"
            raise RunError(f"{name} has subsets: give --dataset-subset {one_of}.") from error
        if empty := re.search('Instruction "(.+)" corresponds to no data', str(error)):
            error = ValueError(f"no rows in the split {empty[1]!r}")
        raise cannot_load("data set", name, error.__cause__ or error) from error
    table = table if isinstance(table, dict) else {"train": table}
    if "train" not in table:
        raise RunError(
            f"{name} has no split named train, only {', '.join(table)}: rename the training split."
        )
    return table


def check_that_arrow_ends(file: Path) -> None:
    """Raise RunError if an Arrow file lacks its end: the library would read what is there."""
    if file.suffix == ".arrow":
        with file.open("rb") as content:
            content.seek(-min(8, file.stat().st_size), os.SEEK_END)
            if not content.read().endswith(ENDS_OF_ARROW):
                raise RunError(f"{file} is cut off, because the mark of its end is missing.")


def csv_options(files: list[Path]) -> dict[str, object]:
    """Return how the library must read CSV files so that each value is a text, as it is written.

    Otherwise it would guess: 007 would become 7, and NA nothing. Raises RunError if the files are
    not as check_csv wants them.
    """
    headers = [check_csv(file) for file in files]
    first = headers[0]
    for file, header in zip(files, headers, strict=True):
        if (header.separator, header.skipped) != (first.separator, first.skipped):
            raise RunError(f"{file} has another separator than {files[0]}: use the same one.")
    import datasets

    text = datasets.Value("string")
    return {
        "sep": first.separator,
        "skiprows": first.skipped,
        "features": datasets.Features(dict.fromkeys(first.columns, text)),
        "keep_default_na": False,
        "index_col": False,
    }


class Header(NamedTuple):
    """The header of a CSV file. skipped: the lines before it."""

    separator: str
    columns: list[str]
    skipped: int


def check_csv(file: Path) -> Header:
    """Return the header of a CSV file, after reading all of it.

    The separator is the one that Excel names in a first line `sep=;`, a tab in a .tsv file, or the
    most frequent one of the header. Raises RunError for two columns of one name, for a row with
    more fields than the header, and for a quotation mark that does not end its field: the library
    would read the following rows as one. Also without a header, and if it is not UTF-8.
    """
    csv.field_size_limit(2**31 - 1)
    columns, line, skipped = [], 1, 0
    try:
        with open_file(file, encoding="utf-8-sig", newline="") as content:
            header = content.readline()
            named = re.fullmatch(r'"?sep=(.)"?\s*', header)
            if named:
                header, skipped = content.readline(), 1
            outside_of_quotes = re.sub(r'"[^"]*"', "", header)
            separator = max(",;\t", key=outside_of_quotes.count)
            if named:
                separator = named[1]
            elif ".tsv" in file.suffixes[-2:]:
                separator = "\t"
            rows = csv.reader(chain([header], content), delimiter=separator, strict=True)
            for row in rows:
                if not columns:
                    columns = row
                    if twice := [name for name in row if row.count(name) > 1]:
                        raise csv.Error(f"two columns are named {twice[0]!r}")
                if len(row) > len(columns):
                    raise csv.Error(f"{len(row)} fields, and the header has {len(columns)}")
                line = skipped + rows.line_num + 1  # where the next row begins
            if not columns:
                raise csv.Error("there is no header")
    except (csv.Error, UnicodeError) as error:
        raise RunError(f"{file}, from line {line} on: {error}; correct it.") from error
    return Header(separator, columns, skipped)


def read_table(table: "DatasetDict", name: str, text_column: str | None) -> Iterator[Text]:
    """Yield the texts of a column of the splits train and, if there is one, validation.

    text_column: None chooses default_text_column. Raises RunError if there is no such column.
    """
    columns = string_columns(table["train"].features)
    column = text_column or default_text_column(table["train"])
    if column not in columns:
        found = (
            f"give --text-column one of {', '.join(columns)}" if columns else "no column is text"
        )
        raise RunError(f"{name} has no text column {column!r}: {found}.")
    used = {split: table[split] for split in ("train", "validation") if split in table}
    sizes = [f"{len(rows):,} ({split})" for split, rows in used.items()]
    rule = rule_for({split: len(rows) for split, rows in used.items()})
    logger.info(f"{name}: rows of column {column!r}: {' and '.join(sizes)}{HELD_OUT[rule]}")
    try:
        for split, rows in used.items():
            for batch in rows.select_columns([column]).with_format("arrow").iter(ROWS_AT_ONCE):
                for text in filter(None, batch[column].to_pylist()):
                    chosen = rule == "checksum" and is_held_out(text)
                    yield from divide(text, split == "validation" or chosen, True, rule)
    except UnicodeError as error:
        raise RunError(f"{name} is not UTF-8 ({error}): convert it to UTF-8.") from error


def string_columns(features: "Features") -> list[str]:
    """Return the names of a table's columns of strings."""
    return [name for name, feature in features.items() if "string" in _type_of(feature)]


def default_text_column(table: "Dataset") -> str:
    """Return "text" or, if a table without lists has no such column, the only column of texts.

    In a CSV file each column is one of strings; those whose first values are numbers do not count.
    """
    columns = string_columns(table.features)
    has_lists = any(_type_of(feature) == "list" for feature in table.features.values())
    if "text" not in columns and not has_lists:
        first_rows = table[:100]
        columns = [name for name in columns if not all(map(_is_number, first_rows[name]))]
        if len(columns) == 1:
            return columns[0]
    return "text"


def _is_number(text: str | None) -> bool:
    try:
        float(text or "0")
    except ValueError:
        return False
    return True


def _type_of(feature: object) -> str:
    """Return the type of a column's values; a column without one has lists or structures."""
    return str(getattr(feature, "dtype", "list"))


# --- training and evaluation documents ---


def rule_for(counts: dict[str, int]) -> str:
    """Return which of the rules 2 to 4 of find_documents applies, given the sizes of the splits."""
    if "validation" in counts:
        return "split"
    return "ends" if counts["train"] < FEW_DOCUMENTS else "checksum"


def is_held_out(key: str) -> bool:
    """Return whether the document with this key, its path or its text, is for evaluation.

    This depends only on the key, so it is the same on every machine and in every order, and a text
    that occurs twice is never used for both.
    """
    return _is_chosen(hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest())


def _is_chosen(digest: bytes) -> bool:
    return int.from_bytes(digest[:8], "big") % EVAL_ONE_IN == 0

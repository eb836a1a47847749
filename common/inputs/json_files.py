"""JSON files: an array of rows, or one row per line. Texts stay as they are written.

The library datasets would guess types, block by block: "2024-01-02" would become a time, and then
"2024-01-02 00:00:00"; in a block with a number among its texts, each text would get quotation
marks. So these files are read here and written as Arrow files, which the library then opens.
"""

import functools
import json
import logging
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pyarrow as pa

from common.errors import RunError
from common.storage import cached_folder, open_file

if TYPE_CHECKING:
    from datasets import DatasetDict  # whose import takes most of a second

logger = logging.getLogger(__name__)

CACHE_VERSION = 1  # raise it when the same files give other rows
ROWS_AT_ONCE = 64  # in memory
Row = dict[str, object]


def load_json(by_split: dict[str, list[Path]], key: str) -> "DatasetDict":
    """Return the rows of JSON files, which are given by split. All splits have the same columns.

    key: changes if the files may have changed. Raises RunError if a file is not UTF-8 or if the
    cache cannot be written, and ValueError if a file is not JSON or if a split has no rows.
    """
    from datasets import Dataset, DatasetDict

    names = {split: [str(file) for file in files] for split, files in by_split.items()}

    def fill(folder: Path) -> None:
        schema = find_schema(list(chain.from_iterable(by_split.values())))
        for split, files in by_split.items():
            if not write_rows(folder / f"{split}.arrow", files, schema):
                raise ValueError(f"no rows in the split {split!r}")

    folder = cached_folder("tables", (CACHE_VERSION, key, names), fill)
    files = {split: str(folder / f"{split}.arrow") for split in by_split}
    return DatasetDict({split: Dataset.from_file(file) for split, file in files.items()})


# --- files -> rows ---


class Number(float):
    """A number that has a fraction or an exponent. written: its text, such as 1.10."""

    def __new__(cls, written: str) -> "Number":
        number = super().__new__(cls, written)
        number.written = written
        return number


def as_object(members: list[tuple[str, object]]) -> Row:
    """Return an object. Of two members with one name, the module json would drop the first."""
    found = dict(members)
    if len(found) < len(members):
        raise json.JSONDecodeError("an object has two members of one name", "", 0)
    return found


DECODER = json.JSONDecoder(object_pairs_hook=as_object, parse_float=Number)
SPACE = re.compile(r"\s*")


def read_rows(file: Path) -> Iterator[list[Row]]:
    """Yield the rows of a file in order, at most ROWS_AT_ONCE in each list.

    An item or a line that is no object is a row with the column "text".
    """
    try:
        with open_file(file, encoding="utf-8-sig") as content:
            rows = (
                item if isinstance(item, dict) else {"text": item}
                for value in _read_values(file, content)
                for item in (value if isinstance(value, list) else [value])
            )
            while some := list(islice(rows, ROWS_AT_ONCE)):
                yield some
    except UnicodeError as error:
        raise RunError(f"{file} is not UTF-8 ({error}): convert it to UTF-8.") from error


def _read_values(file: Path, content: IO[str]) -> Iterator[object]:
    """Yield the values of a file: one of each line or, if the first line is none, of any layout."""
    is_first = True
    for number, line in enumerate(content, start=1):
        if not line.strip():
            continue
        try:
            value = DECODER.decode(line)
        except json.JSONDecodeError as error:
            if not is_first:
                raise _no_json(file, number, error) from None
            yield from _values_of(file, line + content.read(), number)
            return
        yield value
        is_first = False


def _values_of(file: Path, text: str, first_line: int) -> Iterator[object]:
    """Yield the values of a text, one after the other, such as objects of several lines each."""
    begin = SPACE.match(text).end()
    while begin < len(text):
        try:
            value, end = DECODER.raw_decode(text, begin)
        except json.JSONDecodeError as error:
            raise _no_json(file, first_line + error.lineno - 1, error) from None
        yield value
        begin = SPACE.match(text, end).end()


def _no_json(file: Path, line: int, error: json.JSONDecodeError) -> ValueError:
    return ValueError(f"{file}, line {line}: {error.msg}")


# --- rows -> columns, each with values of one type ---


def find_schema(files: list[Path]) -> pa.Schema:
    """Return the columns of files and their types, after reading all rows.

    A column with texts and numbers is one of texts. Lists or objects without a common type are a
    column of JSON. Other columns whose values have no common type, for example texts and lists, are
    left out, with a warning.
    """
    types: dict[str, pa.DataType | None] = {}
    for file in files:
        for rows in read_rows(file):
            for column in dict.fromkeys(chain.from_iterable(rows)):
                values = [row[column] for row in rows if column in row]
                before = types.get(column, pa.null())
                types[column] = _common_type(before, _type_of(values, column, file))
                if before is not None and types[column] is None:
                    logger.warning(
                        f"{file}: the column {column!r} is left out, because its values are of "
                        "several types"
                    )
    return pa.schema({column: found for column, found in types.items() if found is not None})


@functools.cache
def json_type() -> pa.DataType | None:
    """Return the type of a column of JSON, or None if this release of datasets has none.

    Its values may differ in their types, such as the arguments of tools in conversations.
    """
    import datasets

    return datasets.Json.pa_type if hasattr(datasets, "Json") else None


def _type_of(values: list[object], column: str, file: Path) -> pa.DataType | None:
    """Return the type of values, or None if they have no common type. Text can be any scalar."""
    try:
        return pa.array(values).type
    except UnicodeError as error:  # half of a surrogate pair, such as "\ud83d"
        raise ValueError(f"{file}, column {column!r}: {error}") from None
    except (pa.ArrowException, OverflowError):
        if all(isinstance(value, str | int | float | None) for value in values):
            return pa.string()
        have_parts = all(isinstance(value, list | dict | None) for value in values)
        return json_type() if have_parts else None


def _common_type(first: pa.DataType | None, second: pa.DataType | None) -> pa.DataType | None:
    if first is None or second is None:
        return None
    try:
        schemas = [pa.schema({"": each}) for each in (first, second)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        if pa.null() in (first, second):
            return second if first == pa.null() else first
        have_parts = [pa.types.is_nested(each) or each == json_type() for each in (first, second)]
        if all(have_parts):
            return json_type()
        return None if any(have_parts) else pa.string()


def write_rows(target: Path, files: list[Path], schema: pa.Schema) -> int:
    """Write the rows of JSON files to an Arrow file, and return how many there are.

    A row that lacks a column has null there.
    """
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    objects = [field.name for field in schema if field.type == json_type()]
    n_rows = 0
    with target.open("wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        for rows in chain.from_iterable(map(read_rows, files)):
            for row in rows:
                row.update({column: as_text(row.get(column)) for column in texts})
                row.update({column: json.dumps(row[column]) for column in objects if column in row})
            stream.write(pa.RecordBatch.from_pylist(rows, schema))
            n_rows += len(rows)
    return n_rows


def as_text(value: str | float | None) -> str | None:
    """Return a text as it is; a number, true and false as they are written."""
    if value is None or isinstance(value, str):
        return value
    return value.written if isinstance(value, Number) else json.dumps(value)

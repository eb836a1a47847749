"""Tables of documents: which column is the text, and which rows are held out for evaluation."""

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from common.cli import InputError

if TYPE_CHECKING:
    import datasets

# One document in 20 is held out for evaluation, where the source has no such split of its own.
EVAL_ONE_IN = 20
# With fewer documents than this, each of them gives its end instead.
FEW_DOCUMENTS = 100


def import_datasets() -> ModuleType:
    """Import the datasets library, which takes most of a second, and keep it from logging."""
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it tells which frameworks it finds
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what it logs as errors it also raises
    return datasets


def documents_of(texts: Iterable[str]) -> "datasets.Dataset":
    """Return a data set with one column, "text"."""
    return import_datasets().Dataset.from_dict({"text": list(texts)})


def is_held_out(key: str) -> bool:
    """Return whether the document with this key (its path or its text) is for evaluation.

    It depends on the key alone, so the split is the same on every machine and in every order,
    and a text that occurs twice never stands on both sides.
    """
    digest = hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % EVAL_ONE_IN == 0


def split_documents(documents: "datasets.Dataset") -> "tuple[datasets.Dataset, datasets.Dataset]":
    """Return (training, evaluation): by document, or by its end where the documents are few."""
    if len(documents) < FEW_DOCUMENTS:
        texts = documents["text"]
        cuts = [len(text) - len(text) // EVAL_ONE_IN for text in texts]
        return (
            documents_of(text[:cut] for text, cut in zip(texts, cuts, strict=True)),
            documents_of(text[cut:] for text, cut in zip(texts, cuts, strict=True)),
        )
    held_out = [is_held_out(text) for batch in documents.iter(1000) for text in batch["text"]]
    return (
        documents.select([row for row, out in enumerate(held_out) if not out]),
        documents.select([row for row, out in enumerate(held_out) if out]),
    )


def split_table(
    table: "datasets.DatasetDict", name: str, text_column: str | None
) -> "tuple[datasets.Dataset, datasets.Dataset]":
    """Return (training, evaluation) of a table's splits: its own validation split if it has one.

    Raises InputError if it has no split named train, or no such column.
    """
    if "train" not in table:
        raise InputError(f"{name} has no split named train, only: {', '.join(table)}.")
    train = _text_of(table["train"], name, text_column)
    if "validation" in table:
        return train, _text_of(table["validation"], name, text_column)
    return split_documents(train)


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
    table = table.select_columns([column])
    if column != "text":
        table = table.rename_column(column, "text")
    if table.data.column("text").null_count:  # empty cells
        table = table.filter(
            lambda batch: [text is not None for text in batch["text"]], batched=True
        )
    return table


def read_json_strings(path: Path) -> list[str] | None:
    """Return a JSON array's strings, or None for an array of objects or for JSON lines."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = (line for line in file if line.strip())
            first, second = next(lines, "").strip(), next(lines, None)
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
    if isinstance(content, list):
        if all(isinstance(item, str) for item in content):
            # Half of a surrogate pair, escaped, is a string for JSON and no text elsewhere.
            return [item.encode("utf-8", errors="replace").decode() for item in content]
        if all(isinstance(item, dict) for item in content):
            return None
    raise InputError(f"{path} must hold an array of strings, or one of objects.")

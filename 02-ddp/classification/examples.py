"""Load labeled documents, and split them into training, validation and test."""

import hashlib
import math
import re
import sysconfig
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import xxhash
from torch.utils.data import Dataset

from common.cli import RunError
from common.documents import BUILT_IN, NOT_CODE, load_table

if TYPE_CHECKING:
    import datasets

SPLITS = ("train", "validation", "test")
PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")
DEAL = ("train", "train", "validation", "test", "train")  # for a package's files, largest first


class Example(NamedTuple):
    """index: in its split, or -1 for a filler. tokens: without those of the label."""

    index: int
    tokens: list[int]
    label: int


@dataclass
class Examples(Dataset):
    """A split. `encode` adds the tokens, and the number of loss terms of each example."""

    texts: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    loss_terms: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Example:
        return Example(index, self.tokens[index], self.labels[index])

    def lengths(self) -> list[int]:
        """Return the number of tokens of each example, without those of the label."""
        return [len(tokens) for tokens in self.tokens]

    def checksum(self) -> str:
        """Return a checksum of the tokens and classes, in order."""
        digest = xxhash.xxh3_64()
        for tokens, label in zip(self.tokens, self.labels, strict=True):
            digest.update(array("q", [label, len(tokens), *tokens]).tobytes())
        return digest.hexdigest()


def load_examples(
    name: str,
    subset: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
) -> tuple[list[str], dict[str, Examples]]:
    """Return the names of the classes, and the three splits by name.

    name: python-stdlib, a table file, a folder of tables or a hub id. The default columns of a
    table are text and label. If a table lacks a split, a checksum of the text selects a tenth of
    its training split instead. Raises RunError if the data cannot be read, if a column is
    missing, if a split is empty, if there is only one class, or if an argument has no effect.
    """
    if name == BUILT_IN:
        if subset or text_column or label_column:
            raise RunError(
                f"{name} is not a table: leave out --dataset-subset, --text-column and "
                "--label-column."
            )
        classes, rows = list(PACKAGES), _stdlib_pieces()
    else:
        columns = text_column or "text", label_column or "label"
        classes, rows = _table_rows(name, subset, *columns)
    splits = {split: Examples() for split in SPLITS}
    for split, text, label in rows:
        splits[split].texts.append(text)
        splits[split].labels.append(label)
    if empty := [split for split in SPLITS if not len(splits[split])]:
        raise RunError(f"The {empty[0]} split of {name} is empty: give more rows that have a text.")
    if len(present := set(splits["train"].labels)) == 1:
        only = classes[present.pop()]
        raise RunError(
            f"All training rows of {name} have the class {only!r}: add rows of other classes."
        )
    return classes, splits


def _stdlib_pieces() -> list[tuple[str, str, int]]:
    """Return (split, paragraph of code, package). All paragraphs of a file are in one split."""
    root, rows = Path(sysconfig.get_paths()["stdlib"]), []
    for label, package in enumerate(PACKAGES):
        paths = {path.relative_to(root).as_posix(): path for path in (root / package).rglob("*.py")}
        names = [name for name in paths if not NOT_CODE.search(name)]
        names.sort(key=lambda name: (-paths[name].stat().st_size, name))
        for number, name in enumerate(names):
            text = paths[name].read_text(encoding="utf-8", errors="replace")
            pieces = [piece.strip("\n") for piece in re.split(r"\n\s*\n", text)]
            split = DEAL[number % len(DEAL)]
            rows += [(split, piece, label) for piece in pieces if piece.count("\n") >= 2]
    # Leaves out paragraphs that several files contain, such as licenses: splits must not overlap.
    times = Counter(piece for _, piece, _ in rows)
    return [row for row in rows if times[row[1]] == 1]


def _load_table(name: str, subset: str | None) -> "datasets.DatasetDict":
    path = Path(name)
    if subset and path.is_file():
        raise RunError(f"{name} is a single file: leave out --dataset-subset.")
    return load_table(name, subset)


def _table_rows(
    name: str, subset: str | None, text_column: str, label_column: str
) -> tuple[list[str], list[tuple[str, str, int]]]:
    """Return the names of the classes and (split, text, class) of the rows that have a text."""
    table = _load_table(name, subset)
    features = table["train"].features
    strings = [c for c, f in features.items() if "string" in str(getattr(f, "dtype", ""))]
    wanted = {"text": (text_column, strings), "label": (label_column, list(features))}
    for flag, (column, columns) in wanted.items():
        if column not in columns:
            raise RunError(
                f"{name} has no {flag} column {column!r}: give --{flag}-column one of "
                f"{', '.join(columns)}."
            )
    # Only a ClassLabel feature has names. Its label -1 means that there is no label.
    names = getattr(features[label_column], "names", None)
    rows = []
    for split in (split for split in SPLITS if split in table):
        columns = (table[split][text_column], table[split][label_column])
        found = [
            (split, text, None if names and label == -1 else _class_of(label, label_column, name))
            for text, label in zip(*columns, strict=True)
            if text is not None and text.strip()
        ]
        without = sum(label is None for _, _, label in found)
        # Benchmarks often publish a test split without labels. It is not used.
        if without < len(found) or split == "train":
            rows += found
            if without:
                raise RunError(
                    f"{without} of {len(found)} rows in the {split} split of {name} have no label "
                    f"in the column {label_column!r}: add the labels, or delete the rows."
                )
    values = {value for _, _, value in rows}
    if len(values) > max(2, len(rows) // 2):
        raise RunError(
            f"The column {label_column!r} of {name} has {len(values)} different values in "
            f"{len(rows)} rows, so it has no classes: give another --label-column."
        )
    order = list(range(len(names))) if names else sorted(values)
    present = {split for split, _, _ in rows}
    missing = [split for split in SPLITS if split not in present]
    numbered = []
    for split, text, value in rows:
        tenth = hashlib.sha256(text.encode(errors="surrogatepass")).digest()[0] % 10
        moved = split == "train" and tenth < len(missing)
        numbered.append((missing[tenth] if moved else split, text, order.index(value)))
    return [str(name) for name in names or order], numbered


def _class_of(label: object, column: str, name: str) -> str | int | float | None:
    """Return a label as a value that can be sorted, or None for a missing label."""
    if isinstance(label, list | dict):
        kind = "lists" if isinstance(label, list) else "objects"
        raise RunError(f"The column {column!r} of {name} has {kind}: give one class per row.")
    if label is None or label == "" or (isinstance(label, float) and math.isnan(label)):
        return None
    return label if isinstance(label, str | int | float) else str(label)  # for example a date

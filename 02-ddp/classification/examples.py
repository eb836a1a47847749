"""Load labeled documents, and split them into training, validation and test."""

import hashlib
import logging
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch.utils.data import Dataset

from common.errors import RunError
from common.inputs.documents import BUILT_IN, NOT_CODE, load_table

logger = logging.getLogger(__name__)

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


def load_examples(
    name: str,
    subset: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
) -> tuple[list[str], dict[str, Examples]]:
    """Return the names of the classes, and the three splits by name.

    name: python-stdlib, a table file, a folder of tables or a hub id. The default columns of a
    table are text and label. If a table lacks a split, a checksum of the text selects a tenth of
    its training split instead. Raises RunError if the data cannot be read, if a column is missing,
    or if there are no classes.
    """
    if name == BUILT_IN:
        classes, rows = PACKAGES, _stdlib_pieces()
    else:
        rows = _table_rows(name, subset, text_column or "text", label_column or "label")
        classes = sorted({label for _, _, label in rows})
    if not 2 <= len(classes) <= max(2, len(rows) // 2):
        raise RunError(
            f"The labels of {name} have {len(classes)} different values in {len(rows)} rows: give "
            "a --label-column that contains classes."
        )
    missing = [split for split in SPLITS if split not in {split for split, _, _ in rows}]
    splits = {split: Examples() for split in SPLITS}
    for split, text, label in rows:
        tenth = hashlib.sha256(text.encode(errors="surrogatepass")).digest()[0] % 10
        moved = split == "train" and tenth < len(missing)
        examples = splits[missing[tenth] if moved else split]
        examples.texts.append(text)
        examples.labels.append(classes.index(label))
    if empty := [split for split in SPLITS if not len(splits[split])]:
        raise RunError(f"The {empty[0]} split of {name} is empty: give more rows that have a text.")
    return list(classes), splits


def _stdlib_pieces() -> list[tuple[str, str, str]]:
    """Return (split, paragraph of code, package). All paragraphs of a file are in one split."""
    root, rows = Path(sysconfig.get_paths()["stdlib"]), []
    for package in PACKAGES:
        paths = {path.relative_to(root).as_posix(): path for path in (root / package).rglob("*.py")}
        names = [name for name in paths if not NOT_CODE.search(name)]
        names.sort(key=lambda name: (-paths[name].stat().st_size, name))
        for number, name in enumerate(names):
            text = paths[name].read_text(encoding="utf-8", errors="replace")
            pieces = [piece.strip("\n") for piece in re.split(r"\n\s*\n", text)]
            split = DEAL[number % len(DEAL)]
            rows += [(split, piece, package) for piece in pieces if piece.count("\n") >= 2]
    # Leaves out paragraphs that several files contain, such as licenses: splits must not overlap.
    times = Counter(piece for _, piece, _ in rows)
    return [row for row in rows if times[row[1]] == 1]


def _table_rows(
    name: str, subset: str | None, text_column: str, label_column: str
) -> list[tuple[str, str, str]]:
    """Return (split, text, class) of the rows of a table that have a text and a label.

    Benchmarks often publish a test split without labels. All its rows are left out.
    """
    table = load_table(name, subset)
    features = table["train"].features
    for flag, column in (("text", text_column), ("label", label_column)):
        if column not in features:
            raise RunError(
                f"{name} has no {flag} column {column!r}: give --{flag}-column one of "
                f"{', '.join(features)}."
            )
    if not hasattr(features[label_column], "dtype"):  # a list or a structure
        raise RunError(
            f"The label column {label_column!r} of {name} does not have one value in each row: "
            "give a --label-column that contains classes."
        )
    names = getattr(features[label_column], "names", None)  # only a ClassLabel feature has names
    # Hidden labels are -1. Without names, -1 can also be a class: then the training split has it.
    no_label = [None, ""] if not names and -1 in table["train"][label_column] else [None, "", -1]
    rows, left_out = [], 0
    for split in (split for split in SPLITS if split in table):
        for text, label in zip(table[split][text_column], table[split][label_column], strict=True):
            is_labeled = label not in no_label and label == label  # NaN differs from itself
            if names and is_labeled:
                label = names[label]
            if text is None or not str(text).strip() or not is_labeled:
                left_out += 1
            else:
                rows.append((split, str(text), str(label)))
    if left_out:
        logger.info(f"{left_out:,} rows of {name} without a text or a label are left out")
    return rows

"""Names: what the reader calls a data set or a model, and what the names of files say.

A name is that of a preset, of a local file or folder, an address, or a hub id.
"""

import re
import textwrap
from pathlib import Path, PurePath

from common.errors import RunError

PRESETS = Path(__file__).parent / "presets"
PRESET_NAMES = tuple(sorted(path.parent.name for path in PRESETS.glob("*/config.json")))
# Words in the names of files and folders that say which split of a data set is there.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def resolve_model(name: str, what: str = "model") -> str:
    """Return what transformers loads a model from: a preset's folder, a local folder or a hub id.

    what: what is looked for, for the message. Raises RunError for a path that does not exist.
    """
    if name in PRESET_NAMES:
        return str(PRESETS / name)
    if not name or not Path(name).is_dir():
        check_hub_id(what, name)
    return name


def check_hub_id(what: str, name: str) -> None:
    """Raise RunError if a name cannot be a hub id, so it is a path that does not exist."""
    if not name or name[0] in "/.~" or name.count("/") > 1:
        raise RunError(f"There is no {what} at {name!r}: no such file or folder; check the path.")


def cannot_load(what: str, name: str, cause: Exception) -> RunError:
    """Return an error that says what cannot be loaded, and quotes the library."""
    reason = textwrap.shorten(str(cause), 300, placeholder=" ...").rstrip(".:")
    reason = reason or type(cause).__name__
    if Path(name).exists():
        end = ", or keep only the text column." if what == "data set" else "."
        return RunError(f"{name} has no usable {what} ({reason}): check or replace its files{end}")
    return RunError(
        f"There is no {what} {name!r}: it is no preset and no local path, and the hub says: "
        f"{reason}. Without a network, use -d python-stdlib and -m gpt2-tiny, or local paths."
    )


def split_of(file: PurePath) -> str | None:
    """Return "train", "validation" or "test", what the last such word of a name says, or None."""
    words = re.split(r"[^a-z]+", file.as_posix().lower())
    return next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), None)

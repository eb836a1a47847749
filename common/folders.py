"""Folders that scripts write for others to load: new ones, and never in pieces."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.cli import InputError
from common.models import PRESET_NAMES


def check_new_folder(target: Path) -> None:
    """Raise InputError for a folder that holds something, a file, or the name of a preset."""
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise InputError(f"{target} exists already: give a folder that does not, or delete it.")
    if str(target) in PRESET_NAMES:
        raise InputError(f"{target} is the name of a preset: give the folder another one.")


@contextmanager
def complete_folder(target: Path, errors: tuple[type[Exception], ...]) -> Iterator[Path]:
    """Yield a folder to be made; at the end it gets the name of `target`, with all that is in it.

    Under its name only when it is complete, whenever this process is killed. errors: what the
    libraries that write raise, as on a full disk. Raises InputError for those.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            unfinished = Path(folder) / target.name
            yield unfinished
            unfinished.replace(target)
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{target} could not be written ({reason}): make room, or give another folder."
        ) from error


def let_others_read(folder: Path) -> None:
    """Give weights the mode of the other files: safetensors makes its own for the owner alone."""
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode)

"""The words of a command line, by the same rules in the scripts and in the launch files.

python common/arguments.py ARGUMENTS     prints the folder of the run; launch.sh asks this

Everything here is in Python's standard library, so it takes no time.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path


class ArgumentFileError(Exception):
    """An argument file cannot be read; the text says which one and why."""


def expand_files(words: list[str]) -> list[str]:
    """Return the arguments with those of each @file in its place.

    Each line of a file is like `--name value`, quoted as in a shell; # starts a comment. Variables
    and a leading ~ are replaced, as the shell does on the command line.
    """
    expanded = []
    for word in words:
        if word.startswith("@"):
            expanded += expand_files(_words_of(word[1:]))
        else:
            expanded.append(word)
    return expanded


def _words_of(file: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ArgumentFileError(f"cannot read {file}: {error}") from error
    words = []
    for line in lines:
        try:
            found = shlex.split(os.path.expandvars(line), comments=True)
        except ValueError as error:
            raise ArgumentFileError(f"cannot read the line {line!r} of {file}: {error}") from error
        words += [str(Path(word).expanduser()) if word.startswith("~") else word for word in found]
    return words


def run_folder(words: list[str]) -> Path:
    """Return the folder of the run that a script with these arguments will use.

    A run without a name gets one later: until then, its folder is outputs/unnamed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-e", "--experiment-name", default="unnamed")
    parser.add_argument("--save-dir", default="outputs")
    try:
        args, _ = parser.parse_known_args(expand_files(words))
    except (argparse.ArgumentError, ArgumentFileError):  # the script will say so
        return Path("outputs", "unnamed")
    return Path(args.save_dir).expanduser() / args.experiment_name


if __name__ == "__main__":
    print(run_folder(sys.argv[1:]))

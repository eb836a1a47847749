"""Run another script after a change, for scripts that change one thing in a chapter's script."""

import os
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from common.cli import RunError

_outer_scripts: list[str] = []  # that run another script


def run_given_script(prepare: Callable[[], None]) -> None:
    """Call `prepare`, then run the script that is named by the first command-line argument.

    The script gets the remaining arguments. Raises RunError if there is no such script.
    """
    if not Path(sys.argv[1]).is_file():
        raise RunError(f"There is no script {sys.argv[1]}: give the path of one, or no argument.")
    prepare()
    # The script prints how to resume the run: these words, followed by its other arguments.
    if _outer_scripts or "LAUNCH_COMMAND" not in os.environ:
        _outer_scripts.append(sys.argv[0])
        words = ["python", *_outer_scripts, *sys.argv[1:2]]
        os.environ["LAUNCH_COMMAND"] = shlex.join(words)
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # the script's modules are beside it
    runpy.run_path(sys.argv[0], run_name="__main__")

"""The launch files run with bash 3.2 and BSD tools, which are what macOS has."""

import os
import re
import subprocess

import pytest
from helpers import ROOT

pytestmark = pytest.mark.check

# Not local_cluster.sh, which needs Linux anyway.
FILES = sorted({*ROOT.glob("*/launch*.sh"), *ROOT.glob("[0-9]*/*.sbatch")})
# What bash 3.2 or the BSD tools do not have: a pattern, and a line that uses it.
NEWER = {
    r"\b(mapfile|readarray)\b": "mapfile -t HOSTS <hosts",
    r"\b(declare|local|typeset) +-\w*[Agn]": "declare -A COUNT",
    r"\$\{\w+(\[[^]]*\])?(\^|,|@[A-Z])": "${STATE,,}",
    r"\$\{\w+\[-": "${HOSTS[-1]}",
    r"\$\{\w+:[^}]*: *-\d": "${NAME:0:-1}",
    r"\|&|&>>|;;?&": "make |& tee log",
    r"\[\[ (! )?-v ": "[[ -v HOSTS ]]",
    r"\bwait -\w*n": "wait -n",
    r"(?<!-)\b(realpath|timeout|flock|tac|nproc(?! .*\|\| sysctl))\b": "CORES=$(nproc)",
    r"\b(readlink -f|sed -\w*[iu]|date -d|grep -\w*P)\b": "sed -u s/a/b/",
}


def newer_than_bash_3(text: str) -> list[str]:
    """Return what a launch file uses that macOS does not have."""
    code = re.sub(r"^\s*#.*", "", text, flags=re.MULTILINE)
    found = [match[0] for pattern in NEWER for match in re.finditer(pattern, code)]
    # An empty array is an unset variable for bash before 4.4: ${NAME[@]+"${NAME[@]}"} is not.
    for name in re.findall(r"\b(\w+)=\(\)", code):
        found += re.findall(rf'(?<!\[@\]\+)"\$\{{{name}\[@\]\}}"', code)
    return found


def test_nothing_newer_than_bash_3():
    for path in FILES:
        assert newer_than_bash_3(path.read_text()) == [], path
    for line in (*NEWER.values(), 'WORDS=()\npython "${WORDS[@]}"'):
        assert newer_than_bash_3(line), f"planted: {line}"


@pytest.mark.parametrize("arguments", [[], ["-e", "a name", "--max-steps", "9"]], ids=len)
def test_launch_files_start_the_script_with_this_machines_bash(arguments, tmp_path):
    """On macOS that is bash 3.2. The programs that it starts print their arguments here."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": tmp_path, "NPROC_PER_NODE": "2"}
    env["VIRTUAL_ENV"] = "active"
    for path in ROOT.glob("[0-9]*/launch*.sh"):
        command = ["bash", path, *arguments]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), path
        assert done.stdout.endswith(" ".join(arguments) + "\n"), path
        assert re.search(r"\btrain_(llm|classifier)\.py", done.stdout), path

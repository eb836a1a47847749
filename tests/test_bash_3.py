"""The launch files run with bash 3.2 and BSD tools, which are what macOS has."""

import itertools
import os
import re
import subprocess

import pytest
from helpers import ROOT

pytestmark = pytest.mark.check

# Not local_cluster.sh, which needs Linux anyway.
FILES = sorted({*ROOT.glob("*/launch*.sh"), *ROOT.glob("[0-9]*/*.sbatch")})
# A pattern for what bash 3.2 or the BSD tools do not have, and lines that use it.
NEWER = {
    r"\b(mapfile|readarray|coproc)\b": ["mapfile -t HOSTS <hosts", "coproc ssh node1"],
    r"\b(declare|local|typeset) +-\w*[Agn]": ["declare -A COUNT", "local -n NAME=$1"],
    r"\$\{\w+(\[[^]]*\])?(\^|,|@[A-Z])": ["${STATE,,}", "${NAMES[0]^}", "${NAME@Q}"],
    r"\$\{\w+\[-": ["${HOSTS[-1]}"],
    r"\$\{\w+:[^}]*: *-\d": ["${NAME:0:-1}"],
    r"\$\{?(BASHPID|EPOCH\w+|SRANDOM)\b": ["$EPOCHSECONDS", "${BASHPID}"],
    r"\|&|&>>|;;?&": ["make |& tee log", "make &>>log", "a) ls ;;&"],
    r"[ \t]\{\w+\}[<>]": ["exec {LOCK}>file"],
    r"\[\[ (! )?-v ": ["[[ -v HOSTS ]]"],
    r"\bwait -\w*n": ["wait -n"],
    r"%\([^)]*\)T": ["printf '%(%F)T'"],
    r"\bshopt -s .*(globstar|lastpipe|inherit_errexit)": ["shopt -s globstar"],
    r"\bread .*-(\w*N|t *\d*\.)": ["read -rN 1 KEY", "read -t 0.5"],
    r"\{0\d+\.\.|\{\d+\.\.\d+\.\.": ["{01..12}", "{1..9..2}"],
    r"(?<!-)\b(realpath|timeout|flock|tac|nproc(?! .*\|\| sysctl))\b": [
        'realpath -m "$LOGS"',
        "timeout 5 ssh node1",
        "CORES=$(nproc)",
    ],
    r"\b(readlink -f|sed -\w*[iu]|date -d|grep -\w*P)\b": ["sed -u s/a/b/", "grep -oP x"],
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
    for line in itertools.chain(*NEWER.values()):
        assert newer_than_bash_3(f"# {line}\n") == []
        assert newer_than_bash_3(f"{line}\n"), f"planted: {line}"
    assert newer_than_bash_3('WORDS=()\npython "${WORDS[@]}"\n')
    assert newer_than_bash_3('WORDS=()\npython ${WORDS[@]+"${WORDS[@]}"}\n') == []


@pytest.mark.parametrize("arguments", [[], ["-e", "a name", "--max-steps", "9"]], ids=len)
def test_launch_files_start_the_script_with_this_machines_bash(arguments, tmp_path):
    """On macOS that is bash 3.2. The programs that it starts print their arguments here."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": tmp_path, "NPROC_PER_NODE": "2"}
    env["VIRTUAL_ENV"] = "active"
    for path in ROOT.glob("[0-9]*/launch*.sh"):
        done = subprocess.run(
            ["bash", path, *arguments],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, ""), path
        assert done.stdout.endswith(" ".join(arguments) + "\n"), path
        assert re.search(r"\btrain_(llm|classifier)\.py", done.stdout), path

"""Make the recorded outputs again: run their commands on a CPU, in a copy of the repository.

python tests/record.py                                  all that this machine can make
python tests/record.py '01-single-gpu/recorded/gen*'    some of them, with the runs that they need

Line 1 of a recording is its command, line 2 the machine. A recording stays as it was if its command
fails, needs a GPU, or needs a cluster: record_cluster.py makes those. At the end, the tables and
figures are made anew.
"""

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

import psutil

sys.path += [str(Path(__file__).parent / "benchmarks")]

import report
from cluster import ENVIRONMENT
from helpers import ROOT, commands, copy_repository, name_of
from machine import describe_machine

# What makes a run's folder, a folder of a model or a tokenizer, and a file.
RUN = r"(?:train_llm\.py|launch(?:_\w+)?\.sh) (?:.* )?-e (\S+)"
FOLDER_OR_FILE = r"(?:export\.py \S+|train_tokenizer\.py|>) (\S+)"
# The folder of a chapter with variants: the number of the chapter, and the names of the variants.
VARIANT = r"\bvariants/0*(\d+)-[^/+]*\+([^/\s]+)/"
# Recordings of commands whose failure is shown, and of one that exits with 1 if runs differ.
MAY_FAIL = ("fault_", "compare_runs")
# Files beside a recording, and their names in the run's folder.
BESIDE = {".metrics.jsonl": "metrics.jsonl", ".svg": "confusion_matrix.svg"}


def made_by(command: str) -> list[str]:
    """Return the runs, folders and files that a command makes."""
    runs = [f"outputs/{name}" for name in re.findall(RUN, command)]
    return runs + re.findall(FOLDER_OR_FILE, command)


# The diff that a page applies before a command, and the first command that makes each run, folder
# and file.
DIFFS: dict[str, str] = {}
MAKERS: dict[str, str] = {}
for page in report.pages():
    diff = ""
    for needs, line in commands(page.read_text()):
        command = line.strip()
        if command.startswith("git apply"):
            diff = "" if "--reverse" in command else command.split()[-1]
        DIFFS.setdefault(command, diff)
        if not needs and "--save-dir" not in command:
            for name in made_by(command):
                MAKERS.setdefault(name, command)


def in_order(wanted: list[str]) -> list[str]:
    """Return commands, each one after those that make what it reads."""
    order = []
    for command in wanted:
        read = [name for name in MAKERS if name in shlex.split(command)]
        before = in_order([MAKERS[name] for name in read if name not in made_by(command)])
        order += [each for each in [*before, command] if each not in order]
    return order


def make_variants(command: str, copy: Path) -> None:
    """Make, in the copy, the variants that a command starts, as its page does."""
    for chapter, names in re.findall(r"variants/(\d\d)-[a-z-]+\+([\w+-]+)/", command):
        words = ["make", "variant", f"CHAPTER={int(chapter)}", f"WITH={names.replace('+', ' ')}"]
        subprocess.run(words, cwd=copy, check=True, stdout=subprocess.DEVNULL)


def without_folders(text: str, copy: Path) -> str:
    """Return an output without the paths of the copy and of this repository.

    The copy's .venv leads to the one of this repository, which may itself be a link.
    """
    for folder in (copy, ROOT, (ROOT / ".venv").resolve().parent):
        text = text.replace(f"{folder}/", "")
    return text


def run(command: str, copy: Path) -> tuple[int, str]:
    """Run a command in the copy, with the variant that it names; return its status and output."""
    env = {**ENVIRONMENT, "PATH": f"{copy}/.venv/bin:{ENVIRONMENT['PATH']}"}
    env |= {"PYTHONPATH": str(copy), "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": ""}
    # Torchrun sets this number itself, but with a warning.
    env |= {"OMP_NUM_THREADS": "1"} if "torchrun" in command else {}
    env.pop("VIRTUAL_ENV", None)
    make_variants(command, copy)
    if variant := re.search(VARIANT, command):
        words = [sys.executable, "-m", "common.variants", variant[1], *variant[2].split("+")]
        subprocess.run(words, cwd=copy, env=env, stdout=subprocess.DEVNULL, check=True)
    if diff := DIFFS.get(command):
        command = f"git apply {diff} && trap 'git apply --reverse {diff}' EXIT && {command}"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(["bash", "-c", command], cwd=copy, env=env, **streams)
    text = without_folders(done.stdout.decode(errors="replace"), copy)
    # pip warns about the places where this machine looks for packages.
    return done.returncode, re.sub(r"^WARNING: Location .*\n", "", text, flags=re.MULTILINE)


def machine_line(old: str) -> str:
    """Return the line about this machine, with the packages that the old line names."""
    facts = describe_machine()
    brand = re.match(r"(AMD|Intel)\W.*?(EPYC|Ryzen|Xeon|Core)\b", facts["cpu"])
    cpu = "an " + " ".join(brand.groups()) if brand else facts["cpu"]
    gib = round(psutil.virtual_memory().total / 2**30)
    names = re.findall(r", (\S+) [\d.]+", old.split("; ")[1])
    packages = "".join(f", {name} {importlib.metadata.version(name)}" for name in names)
    hardware = f"{os.cpu_count()} cores of {cpu}, {gib} GiB, {platform.system()}"
    return f"# {hardware}; Python {facts['python']}{packages}; {facts['date']}"


def main() -> None:
    recordings, failed = {}, []
    for path in sorted(ROOT.glob("*/recorded/*.txt")):
        command, machine, _ = path.read_text().split("\n", 2)
        if any(fnmatch(name_of(path), pattern) for pattern in sys.argv[1:] or ["*"]):
            if re.search("NVIDIA|local_cluster", machine):
                print(f"needs more than this machine, left as it is: {name_of(path)}")
            else:
                recordings[command] = path
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        copy_repository(copy)
        for command in in_order(list(recordings)):
            status, output = run(command, copy)
            print(f"status {status}: {command}", flush=True)
            path = recordings.get(command)
            if status and not (path and path.name.startswith(MAY_FAIL)):
                failed.append(command)
                print(output)
            elif path:
                machine = machine_line(path.read_text().splitlines()[1])
                path.write_bytes(f"{command}\n{machine}\n{output}".encode())
                for ending in (each for each in BESIDE if path.with_suffix(each).exists()):
                    run_dir = copy / re.search(r"the run's folder is ([^;\s]+)", output)[1]
                    shutil.copyfile(run_dir / BESIDE[ending], path.with_suffix(ending))
    for tool in ("benchmarks/report.py", "benchmarks/figures.py"):
        subprocess.run([sys.executable, ROOT / "tests" / tool], check=True)
    sys.exit(len(failed) > 0)


if __name__ == "__main__":
    main()

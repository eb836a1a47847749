"""Make the recorded outputs again: run their commands on a CPU, in a copy of the repository.

python tests/record.py                                  all of them, then the notebooks
python tests/record.py '01-single-gpu/recorded/gen*'    some of them, with the runs that they need
python tests/record.py --list                           what it would run, and what it cannot run

At the end, it updates the tables and figures. If a command fails, its recording stays as it was.
"""

import argparse
import difflib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

import psutil
import torch
from cluster import ENVIRONMENT
from helpers import ROOT, commands, name_of
from labs import NUMBER
from test_pages import PAGES, RECORDED, report

from common.cli import LOGGED_ENVIRONMENT

sys.path.append(str(ROOT / "tests/benchmarks"))
from machine import describe_machine

FORM = r"([A-Z_]+=\S+ )*(make train|(python|torchrun|bash) .+)"
# What makes a run's folder, a folder of a model or a tokenizer, and a file.
RUN = r"(?:train_llm\.py|launch\.sh) (?:.* )?-e (\S+)"
FOLDER_OR_FILE = r"(?:export\.py \S+|train_tokenizer\.py|>) (\S+)"
# Files beside a recording, and their names in the run's folder.
BESIDE = {".metrics.jsonl": "metrics.jsonl", ".svg": "confusion_matrix.svg"}


def read(recording: Path) -> list[str]:
    """Return command, machine and output, with the carriage returns of progress bars."""
    return recording.read_bytes().decode().split("\n", 2)


def made_by(command: str) -> list[str]:
    """Return the runs, folders and files that a command makes."""
    runs = [f"outputs/{name}" for name in re.findall(RUN, command)]
    return runs + re.findall(FOLDER_OR_FILE, command)


# For each command on a page: what it needs, and the diff that the page applies before it. For each
# run, folder and file: the first command that makes it.
NEEDS: dict[str, set[str]] = {}
DIFFS: dict[str, str] = {}
MAKERS: dict[str, str] = {}
for page in PAGES:
    diff = ""
    for needs, line in commands(page.read_text()):
        command = line.strip()
        if command.startswith("git apply"):
            diff = "" if "--reverse" in command else command.split()[-1]
        DIFFS.setdefault(command, diff)
        if NEEDS.setdefault(command, needs) or "--save-dir" in command:
            continue
        for name in made_by(command):
            MAKERS.setdefault(name, command)


def used_by(command: str) -> list[str]:
    """Return the runs, folders and files that a command reads."""
    words = [each for each in shlex.split(command) if each in MAKERS or each.startswith("outputs/")]
    return [word for word in words if word not in made_by(command)]


def obstacle(command: str, machine: str) -> str | None:
    """Return why a recording cannot be made again here, or None."""
    remarks = [each for each in machine.split("; ")[3:] if each != "tests ran on the same cores"]
    missing = [name for name in used_by(command) if name not in MAKERS]
    if "NVIDIA" in machine:
        return "needs a GPU"
    if "local_cluster.sh" in machine:
        return "needs a cluster"
    if remarks:
        return f"prepared by hand: {'; '.join(remarks)}"
    if missing:
        return f"no command on a page makes {', '.join(missing)}"
    if not re.fullmatch(FORM, command):
        return f"unknown form of command: {command}"
    return f"needs: {', '.join(NEEDS[command])}" if NEEDS.get(command) else None


def in_order(wanted: list[str]) -> list[str]:
    """Return commands, each one after those that make what it reads."""
    order = []
    for command in wanted:
        before = in_order([MAKERS[name] for name in used_by(command)])
        order += [each for each in [*before, command] if each not in order]
    return order


def copy_repository(copy: Path) -> None:
    """Copy the working tree, its history and its virtual environment."""
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", ROOT, copy], check=True)
    subprocess.run(["git", "reset", "--quiet"], cwd=copy, check=True)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.is_file():  # newer than requirements.txt, so that make installs nothing
            shutil.copyfile(path, copy / ".venv" / path.name)
        else:
            (copy / ".venv" / path.name).symlink_to(path)


def run(command: str, copy: Path) -> tuple[int, str]:
    """Run a command in the copy, without variables that affect training; return status, output."""
    env = {k: v for k, v in ENVIRONMENT.items() if not LOGGED_ENVIRONMENT.fullmatch(k)}
    env |= {"PATH": f"{copy}/.venv/bin:{env['PATH']}", "PYTHONPATH": str(copy)}
    env |= {"WANDB_MODE": "disabled"}  # no upload if somebody is logged in
    env |= {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() else {}
    # Torchrun sets this number itself, but with a warning.
    env |= {"OMP_NUM_THREADS": "1"} if "torchrun" in command else {}
    for name in ("VIRTUAL_ENV", "OMP_WAIT_POLICY"):  # conftest.py sets the second
        env.pop(name, None)
    if diff := DIFFS.get(command):
        command = f"git apply {diff} && trap 'git apply --reverse {diff}' EXIT && {command}"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(["bash", "-c", command], cwd=copy, env=env, **streams)
    return done.returncode, done.stdout.decode(errors="replace").replace(f"{copy}/", "")


def machine_line(old: str) -> str:
    """Return the line about this machine, with the packages that the old line names."""
    facts = describe_machine()
    brand = re.match(r"(AMD|Intel)\W.*?(EPYC|Ryzen|Xeon|Core)\b", facts["cpu"])
    cpu = " ".join(brand.groups()) if brand else facts["cpu"]
    cpu = f"{'an' if cpu[0] in 'AEIOaeio' else 'a'} {cpu}"
    gib = round(psutil.virtual_memory().total / 2**30)
    system = platform.system().replace("Darwin", "macOS")
    names = re.findall(r", (\S+) [\d.]+", old.split("; ")[1])
    packages = "".join(f", {name} {importlib.metadata.version(name)}" for name in names)
    hardware = f"{os.cpu_count()} cores of {cpu}, {gib} GiB, {system}"
    return f"# {hardware}; Python {facts['python']}{packages}; {facts['date']}"


def change(old: str, new: str) -> str:
    """Return in a few words how two outputs differ."""
    before, after = (NUMBER.sub("#", text).splitlines() for text in (old, new))
    steps = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    lines = sum(max(b - a, d - c) for kind, a, b, c, d in steps if kind != "equal")
    if lines:
        return f"{lines} {'line differs' if lines == 1 else 'lines differ'}"
    return "identical" if old == new else "only times and digits differ"


def record(recording: Path, status: int, output: str, copy: Path) -> str:
    """Write a recording, and the files of its run, if its command succeeded. Say what changed."""
    command, machine, old = read(recording)
    beside = [ending for ending in BESIDE if recording.with_suffix(ending).exists()]
    folder = re.search(r"the run's folder is ([^;\s]+)", output)
    if status or (beside and not folder):
        why = f"status {status}" if status else "no line names the run's folder"
        end = "\n".join(output.splitlines()[-5:])
        return f"FAILED, the recording stays as it was: {why}\n{end}"
    recording.write_bytes(f"{command}\n{machine_line(machine)}\n{output}".encode())
    for ending in beside:
        shutil.copyfile(copy / folder[1] / BESIDE[ending], recording.with_suffix(ending))
    for result in re.findall(rf"--output ({report.RESULTS}/\S+)", command):
        shutil.copyfile(copy / result, ROOT / result)
    return change(old, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="recordings or patterns (default: all recordings)")
    parser.add_argument("--list", action="store_true", help="run nothing")
    args = parser.parse_args()
    patterns = args.only or ["*"]
    chosen = [path for path in RECORDED if any(fnmatch(name_of(path), each) for each in patterns)]
    if not chosen:
        parser.error(f"no recording matches {' '.join(patterns)}")
    recordings, faults = {}, 0
    for path in chosen:
        command, machine, _ = read(path)
        reason = obstacle(command, machine)
        if reason:
            print(f"cannot record {name_of(path)}: {reason}")
            faults += reason.startswith("unknown")
        else:
            recordings[command] = path
    order = in_order(list(recordings))
    if args.list:
        print(*order, sep="\n")
        sys.exit(faults > 0)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        copy_repository(copy)
        for command in order:
            start = time.perf_counter()
            status, output = run(command, copy)
            seconds, path = time.perf_counter() - start, recordings.get(command)
            result = "FAILED" if status else "needed by others"
            if path:
                result = record(path, status, output, copy)
            print(f"{name_of(path) if path else command}: {seconds:.0f} s, {result}", flush=True)
            faults += result.startswith("FAILED")
    tools = ["tests/benchmarks/report.py", "tests/benchmarks/figures.py"]
    for tool in tools if args.only else ["tests/labs.py", *tools]:
        faults += subprocess.run([sys.executable, tool], cwd=ROOT).returncode != 0
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()

"""Collect English documentation and Python source of many packages as a corpus.

pip install inscriptis
python tests/benchmarks/collect_corpus.py corpus

Needs Debian 12 with its package lists (apt-get update), pip, and 4 GB of disk. The packages of
corpus_sources.csv are unpacked, not installed, and nothing of them is executed. The new folder gets
a file of JSON lines for each package, named after the split that it belongs to, and a README.md
with the versions, sizes and licenses.
"""

import collections
import csv
import fnmatch
import gzip
import json
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common import cli, launch
from common.errors import RunError

SOURCES = Path(__file__).with_name("corpus_sources.csv")
LIMIT = 6 * 10**6  # bytes of text from one package
SHORTEST, LONGEST = 500, 200_000  # characters of a document; longer ones are mostly tables
# Tests repeat themselves; the others are copies, indexes and highlighted source.
LEFT_OUT = re.compile(
    r"/(tests?|_modules|_sources|_?vendor)/|/(genindex[^/]*|py-modindex|search)\.html$"
)


def download(kind: str, name: str, folder: Path) -> Path:
    """Download a package to an empty folder, and unpack it there; return its archive."""
    command = ["apt-get", "download", "-q", name]
    if kind == "pypi":
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary", ":all:", name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{' '.join(command)} has failed: {done.stderr[-500:].strip()}")
    (archive,) = folder.iterdir()
    if kind == "pypi":
        zipfile.ZipFile(archive).extractall(folder)
    else:
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
    return archive


def read_files(folder: Path, pattern: str) -> list[str]:
    """Return the texts of the files whose paths match a pattern, up to twice the limit in all."""
    files = []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        wanted = fnmatch.fnmatch(name, pattern) and not LEFT_OUT.search(f"/{name}")
        if wanted and path.is_file() and not path.is_symlink():
            files.append(path)
    random.Random(0).shuffle(files)  # if there is too much, what is read comes from all folders
    texts, size = [], 0
    for path in files:
        if size > 2 * LIMIT:
            break
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode("utf-8", errors="replace")
        if ".html" in path.name:
            text = text_of_html(text)
        texts.append(text)
        size += len(text)
    return texts


def text_of_html(page: str) -> str:
    from inscriptis import get_text

    try:
        return get_text(page)
    except (ValueError, AttributeError):  # the page is empty, or no HTML
        return ""


def drop_menus(texts: list[str]) -> list[str]:
    """Drop the lines that more than 2% of the pages share."""
    lines = [[line.rstrip() for line in text.split("\n")] for text in texts]
    pages = collections.Counter(line for each in lines for line in set(map(str.strip, each)))
    pages[""] = 0  # blank lines separate paragraphs
    most = max(10, len(texts) // 50)
    texts = ["\n".join(s for s in each if pages[s.strip()] <= most) for each in lines]
    return [re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" for text in texts]


def collect(row: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return a source, with the name of its archive, and its documents."""
    with tempfile.TemporaryDirectory() as folder:
        archive = download(row["kind"], row["package"], Path(folder))
        texts = read_files(Path(folder), row["files"])
    if row["kind"] == "debian":
        texts = drop_menus(texts)
    size, chosen = 0, []
    for text in texts:
        # English and code are nearly all ASCII.
        n_bytes = len(text.encode())
        readable = SHORTEST <= len(text) <= LONGEST and n_bytes < 1.02 * len(text)
        if readable and size + n_bytes <= LIMIT:
            chosen.append(text)
            size += n_bytes
    return {**row, "archive": archive.name}, chosen


def main() -> None:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new, for train-*.jsonl and validation-*.jsonl")
    folder = parser.parse_args().folder
    if folder.exists():
        raise RunError(f"{folder} already exists: give another folder, or delete it.")
    with SOURCES.open() as file:
        rows = list(csv.DictReader(file))
    folder.mkdir(parents=True)
    card = "| part | package | documents | MB | license |\n|---|---|---:|---:|---|\n"
    seen: set[str] = set()
    with multiprocessing.Pool() as pool:
        # In the order of the file, so that of equal documents the same one is always kept.
        for row, texts in pool.imap(collect, rows):
            texts = [text for text in dict.fromkeys(texts) if text not in seen]
            seen.update(texts)
            lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
            (folder / f"{row['split']}-{row['package']}.jsonl").write_text("".join(lines))
            size = sum(len(text.encode()) for text in texts) / 1e6
            line = f"| {row['split']} | {row['archive']} | {len(texts):,} | {size:.1f} |"
            card += f"{line} {row['license']} |\n"
            print(line, flush=True)
            (folder / "README.md").write_text(card)


if __name__ == "__main__":
    launch.run(main)

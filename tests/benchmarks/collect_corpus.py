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
import hashlib
import json
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path

from common import cli, launch
from common.cli import RunError

SOURCES = Path(__file__).with_name("corpus_sources.csv")
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


def read_files(folder: Path, pattern: str, limit: int) -> list[str]:
    """Return the texts of the files whose paths match a pattern, up to twice the limit in all."""
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    files = [
        path
        for name, path in paths.items()
        if path.is_file() and not path.is_symlink()
        if fnmatch.fnmatch(name, pattern) and not LEFT_OUT.search(f"/{name}")
    ]
    random.Random(0).shuffle(files)  # if there is too much, what is read comes from all folders
    texts, size = [], 0
    for path in files:
        if size > 2 * limit:
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


def collect(row: dict[str, str], limit: int) -> tuple[dict[str, str], list[str]]:
    """Return a source, with the name of its archive, and documents of so many bytes."""
    with tempfile.TemporaryDirectory() as folder:
        archive = download(row["kind"], row["package"], Path(folder))
        texts = read_files(Path(folder), row["files"], limit)
    if row["kind"] == "debian":
        texts = drop_menus(texts)
    size, chosen = 0, []
    for text in texts:
        # English and code are nearly all ASCII.
        n_bytes = len(text.encode())
        readable = SHORTEST <= len(text) <= LONGEST and n_bytes < 1.02 * len(text)
        if readable and size + n_bytes <= limit:
            chosen.append(text)
            size += n_bytes
    return {**row, "archive": archive.name}, chosen


def drop_seen(texts: list[str], seen: set[bytes]) -> list[str]:
    """Return each text once, without those whose digests are in `seen`; add the new digests."""
    new = {hashlib.sha256(text.encode()).digest(): text for text in texts}
    new = {digest: text for digest, text in new.items() if digest not in seen}
    seen |= new.keys()
    return list(new.values())


def main() -> None:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="new folder for train-*.jsonl and validation-*.jsonl")
    add("--sources", type=Path, default=SOURCES, help="CSV file that names the packages")
    add("--limit", default=6, type=cli.at_least(1), help="MB of text from one package")
    args = parser.parse_args()
    if args.folder.exists():
        raise RunError(f"{args.folder} already exists: give another folder, or delete it.")
    with args.sources.open() as file:
        rows = list(csv.DictReader(file))
    args.folder.mkdir(parents=True)
    card = "| part | package | documents | MB | license |\n|---|---|---:|---:|---|\n"
    seen: set[bytes] = set()
    with multiprocessing.Pool() as pool:
        # In the order of the file, so that of equal documents the same one is always kept.
        for row, texts in pool.imap(partial(collect, limit=args.limit * 10**6), rows):
            texts = drop_seen(texts, seen)
            lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
            (args.folder / f"{row['split']}-{row['package']}.jsonl").write_text("".join(lines))
            size = sum(len(text.encode()) for text in texts) / 1e6
            line = f"| {row['split']} | {row['archive']} | {len(texts):,} | {size:.1f} |"
            card += f"{line} {row['license']} |\n"
            print(line, flush=True)
            (args.folder / "README.md").write_text(card)


if __name__ == "__main__":
    launch.run(main)

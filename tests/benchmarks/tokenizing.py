"""How fast a corpus becomes tokens, beside the tokenizer library alone on the same cores.

python tests/benchmarks/tokenizing.py --megabytes 120 --cores 2 \
    --output tests/benchmarks/results/tokenizing.json

The corpus is JSON lines: pieces of 4,000 characters of Python's standard library, repeated. The
library alone encodes batches of 256 pieces with encode_batch_fast, which starts a thread for each
core, and throws the result away. Each measurement is a process of its own, which may use only so
many cores; the two alternate. MB are 10^6 bytes of UTF-8. CPU seconds are those of all threads and
data workers: unlike MB/s, they hardly depend on what else runs on the machine. Memory is that of
the process and its data workers together, where shared pages count once: with the corpus, which is
memory-mapped, so that the kernel can take its pages back at any time, and without mapped files.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from machine import memory_kib, write_result

from common.data import encode_documents
from common.documents import BUILT_IN, find_documents, read_documents
from common.models import load_tokenizer

WAYS = ("library", "encode_documents")
PIECE, PIECES_PER_BATCH = 4000, 256
KINDS = ("Pss", "Pss_Anon", "Pss_Shmem")  # of memory; the first one includes mapped files


def write_corpus(path: Path, megabytes: int) -> None:
    texts = read_documents(find_documents(BUILT_IN, None, None).load(), held_out=False)
    pieces = [text[i : i + PIECE] for text in texts for i in range(0, len(text), PIECE)]
    size = number = 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 10**6:
            line = json.dumps({"text": f"# {number}\n{pieces[number % len(pieces)]}"}) + "\n"
            size, number = size + file.write(line), number + 1


def measure(way: str, corpus: Path, folder: Path) -> dict[str, float]:
    """Tokenize the training part in this process; return MB/s and CPU seconds per MB."""
    tokenizer = load_tokenizer("gpt2-tiny")
    documents = find_documents(str(corpus), None, None).load()
    n_bytes = sum(len(text.encode()) for batch in documents.iter(1000) for text in batch["text"])
    start, cpu = time.perf_counter(), sum(os.times()[:4])
    if way == "library":
        for batch in documents.iter(PIECES_PER_BATCH):
            tokenizer.backend_tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
    else:
        encode_documents(documents, tokenizer, folder / "encoded.arrow")
    megabytes, seconds = n_bytes / 1e6, time.perf_counter() - start
    cpu = sum(os.times()[:4]) - cpu
    return {"mb_per_s": megabytes / seconds, "cpu_s_per_mb": cpu / megabytes}


def watch(command: list[str]) -> dict[str, float]:
    """Run a measurement; return what it found, and the peak memory of all its processes in GiB."""
    process = psutil.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = dict.fromkeys(("peak_gib", "peak_without_files_gib"), 0.0)
    while process.poll() is None:
        total = dict.fromkeys(KINDS, 0)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(OSError, psutil.Error):  # it has just ended
                sizes = memory_kib(each.pid)
                total = {kind: total[kind] + sizes[kind] for kind in KINDS}
        found = (total["Pss"] / 2**20, (total["Pss_Anon"] + total["Pss_Shmem"]) / 2**20)
        peak = {key: max(peak[key], new) for key, new in zip(peak, found, strict=True)}
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"{command} has failed")
    return {**json.loads(process.stdout.read().splitlines()[-1]), **peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--megabytes", type=int, default=500, help="size of the corpus")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2], help="to measure with")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind")
    parser.add_argument("--one", nargs=3, help="way, corpus, folder: one measurement (internal)")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], Path(args.one[1]), Path(args.one[2]))))
        return
    results = {"megabytes": args.megabytes, "rounds": args.rounds}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = f"{folder}/cache"  # of the measurements, which are other processes
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(corpus, args.megabytes)
        for cores in args.cores:
            os.sched_setaffinity(0, range(cores))
            found = {way: [] for way in WAYS}
            for number in range(args.rounds):
                for way in found:
                    target = Path(folder) / f"{way}-{cores}-{number}"
                    target.mkdir()
                    command = [sys.executable, __file__, "--one", way, str(corpus), str(target)]
                    found[way].append(watch(command))
                    shutil.rmtree(target)
            row = results[f"{cores} cores"] = {}
            for way, runs in found.items():
                for key in ("mb_per_s", "cpu_s_per_mb"):
                    row[f"{way}_{key}"] = round(statistics.median(r[key] for r in runs), 3)
                for key in ("peak_gib", "peak_without_files_gib"):
                    row[f"{way}_{key}"] = round(max(r[key] for r in runs), 2)
            ours, alone = (row[f"{way}_mb_per_s"] for way in ("encode_documents", "library"))
            row["share"] = round(ours / alone, 3)
            ours, alone = (row[f"{way}_cpu_s_per_mb"] for way in ("encode_documents", "library"))
            row["share_by_cpu"] = round(alone / ours, 3)
    print(json.dumps(results, indent=1))
    if args.output:
        write_result(args.output, results)


if __name__ == "__main__":
    main()

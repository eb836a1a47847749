"""How long a core takes to turn a corpus into tokens.

python tests/benchmarks/tokenizing.py --output tests/benchmarks/results/tokenizing.json

The corpus is Python's standard library in pieces of 4,000 characters, as JSON lines and as one text
file. MB are 10^6 bytes of UTF-8. CPU seconds are those of all threads: unlike MB/s, they hardly
depend on the number of cores and on what else runs. Each value is the median of the rounds.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

from machine import output_parser, write_result

from common.data import write_tokens
from common.inputs.documents import find_documents
from common.inputs.models import load_tokenizer

PIECE = 4000
MEGABYTES = 20  # of each file
ROUNDS = 3


def write_corpora(folder: Path) -> dict[str, Path]:
    """Write both files; return their paths."""
    text = "".join(piece for piece, *_ in find_documents("python-stdlib", None, None).read())
    pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    pieces *= -(-MEGABYTES * 10**6 // len(text))
    pieces = pieces[: MEGABYTES * 10**6 // PIECE]
    numbered = (f"# {number}\n{piece}" for number, piece in enumerate(pieces))
    lines = (json.dumps({"text": piece}) + "\n" for piece in numbered)
    files = {"JSON lines": folder / "corpus.jsonl", "text file": folder / "corpus.txt"}
    files["JSON lines"].write_text("".join(lines), encoding="utf-8")
    files["text file"].write_text("".join(pieces), encoding="utf-8")
    return files


def main() -> None:
    args = output_parser(__doc__).parse_args()
    tokenizer, found = load_tokenizer("gpt2-tiny"), {}
    with tempfile.TemporaryDirectory() as folder:
        files = write_corpora(Path(folder))
        for number in range(ROUNDS):
            for kind, file in files.items():
                start, target = time.process_time(), Path(folder) / f"{kind} {number}"
                target.mkdir()
                write_tokens(target, find_documents(str(file), None, None).read(), tokenizer)
                found.setdefault(kind, []).append(time.process_time() - start)
    seconds = {k: round(statistics.median(v) / MEGABYTES, 3) for k, v in found.items()}
    write_result(args.output, {"megabytes": MEGABYTES, "cpu_s_per_mb": seconds})
    print(seconds)


if __name__ == "__main__":
    main()

"""What the variant document-mask does to a fine-tune: the loss, and the time of a step.

python tests/benchmarks/documents.py --output documents_cpu.json

A model is trained as by `make train`. Then it is fine-tuned on the paragraphs of the Python
language reference, as on the page about fine-tuning: by chapter 1, whose tokens see the earlier
paragraphs of their sequence, too, and by the variant. Each is evaluated as it was trained.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics

from machine import REPOSITORY, copy_chapter, environment, output_parser, read_metrics, write_result

CHAPTER = "01-single-gpu"
WAYS = {"chapter": (), "document-mask": ("document-mask",)}


def run(*words: object) -> None:
    variables = environment(WANDB_MODE="disabled")
    subprocess.run([sys.executable, *map(str, words)], env=variables, check=True)


def fine_tune(way: str, seed: int, args: argparse.Namespace) -> dict:
    """Return the last evaluation loss, also in bits per byte, and the median time of a step."""
    folder = args.folder / "fine-tunes"
    shutil.rmtree(folder, ignore_errors=True)
    data = ("-d", args.folder / "paragraphs.jsonl", "--text-column", "context")
    model = ("-m", args.folder / "base-model", "--pretrained", "--lr", 1e-3, "--seed", seed)
    place = ("--save-dir", folder, "-e", "run", *args.steps)
    run(args.folder / way / CHAPTER / "train_llm.py", *data, *model, "--num-epochs", 2, *place)
    metrics = read_metrics(folder / "run")
    return {
        "way": way,
        "seed": seed,
        "steps": metrics[-1]["step"],
        "eval_loss": [line["eval_loss"] for line in metrics if "eval_loss" in line][-1],
        "bits_per_byte": [line["bits_per_byte"] for line in metrics if "bits_per_byte" in line][-1],
        "step_ms": statistics.median(line["time/total"] for line in metrics),
    }


def main() -> None:
    parser = output_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="fine-tunes of each kind")
    parser.add_argument("--folder", type=Path, default="/tmp/documents", help="for copies and runs")
    parser.add_argument("--tiny", action="store_true", help="4 steps of each run, to try this file")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.steps = ("--max-steps", 4, "--log-freq", 2) if args.tiny else ()
    for way, names in WAYS.items():
        copy_chapter(CHAPTER, args.folder / way, *names)
    paragraphs = [each for text in topics.values() for each in text.split("\n\n")]
    rows = [json.dumps({"context": each}) + "\n" for each in paragraphs if len(each) > 99]
    (args.folder / "paragraphs.jsonl").write_text("".join(rows))
    if not (args.folder / "base-model").exists():
        place = ("--save-dir", args.folder, "-e", "base", *args.steps)
        run(args.folder / "chapter" / CHAPTER / "train_llm.py", *place)
        run(REPOSITORY / "04-fsdp/export.py", args.folder / "base", args.folder / "base-model")
    found = []
    for seed, way in product(range(args.seeds), WAYS):
        found.append(fine_tune(way, seed, args))
        write_result(args.output, {"rows": found})
        print(found[-1])


if __name__ == "__main__":
    main()

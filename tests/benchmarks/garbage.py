"""How long Python's garbage collector stops a training step, beside a heap of many objects.

python tests/benchmarks/garbage.py --output tests/benchmarks/results/garbage_cpu.json

Chapter 1 trains with and without its lines about the collector, in turn. A list of 3 million
objects that exists before the loop stands for what a large program holds.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import write_result

SCRIPT = Path(__file__).parents[2] / "01-single-gpu/train_llm.py"
OBJECTS, STEPS, ROUNDS, LOG_FREQ = 3_000_000, 60, 3, 10
BEGIN = "    batches = None\n"
UPDATE = '        with timers("update"):\n'
# Every step makes some objects that live on, as a data loader or a logger does.
HEAP = f"    heap, kept = [[] for _ in range({OBJECTS})], []\n"
KEEP = "        kept += [[] for _ in range(20_000)]\n"
NOTE = (
    "    import json, time\n    pauses, began = [], [0.0]\n"
    "    def note(phase, info):\n"
    "        if phase == 'start':\n            began[0] = time.perf_counter()\n"
    "        else:\n            pauses.append((state['step'], time.perf_counter() - began[0]))\n"
    "    gc.callbacks.append(note)\n"
)
END = "    progress_bar.close()\n"
CONTROL = re.compile(r"^ +gc\.(collect|disable)\(1?\)\n", re.MULTILINE)


def train(controlled: bool, folder: Path) -> dict[str, float]:
    """Return the longest automatic collection and the longest one of a logged step, in ms."""
    source = SCRIPT.read_text()
    if not controlled:
        source = CONTROL.sub("", source)
    source = source.replace(BEGIN, BEGIN + HEAP).replace(UPDATE, KEEP + UPDATE)
    start = "    while state["
    source = source.replace(start, NOTE + start)
    pauses = folder / "pauses.json"
    dump = f"    gc.callbacks.clear()\n    open({str(pauses)!r}, 'w').write(json.dumps(pauses))\n"
    script = folder / "train_llm.py"
    script.write_text(source.replace(END, dump + END))
    args = ["--max-steps", str(STEPS), "--log-freq", str(LOG_FREQ), "--save-dir", str(folder)]
    args += ["--eval-sequences", "8", "-e", f"run-{controlled}"]
    subprocess.run([sys.executable, script, *args], check=True, capture_output=True)
    found = json.loads(pauses.read_text())
    # With its lines about the collector, the script collects in logged steps and nowhere else.
    longest = 1e3 * max(seconds for _, seconds in found)
    return {
        "longest_automatic_pause_ms": 0.0 if controlled else longest,
        "longest_pause_of_a_logged_step_ms": longest if controlled else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="result file to write")
    args = parser.parse_args()
    rows = {"automatic": [], "as in the chapters": []}
    for _ in range(ROUNDS):
        for name, controlled in zip(rows, (False, True), strict=True):
            with tempfile.TemporaryDirectory() as folder:
                rows[name].append(train(controlled, Path(folder)))
    results = [
        {"collection": name, "objects": OBJECTS, "steps": STEPS, "rounds": ROUNDS}
        | {key: statistics.median(row[key] for row in found) for key in found[0]}
        for name, found in rows.items()
    ]
    print(json.dumps(results, indent=1))
    if args.output:
        write_result(args.output, results)


if __name__ == "__main__":
    main()

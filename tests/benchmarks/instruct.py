"""What the mask and the normalization of instruction tuning change, on the built-in example.

python tests/benchmarks/instruct.py --output tests/benchmarks/results/instruct_cpu.json

First chapter 1 trains a model of code for BASE_STEPS, which is exported. All other runs tune this
model with the script that 02-ddp/instruct.diff makes, or with one that is changed as REPLACED says.
The evaluation is the same for all: the loss of the answers' tokens in files that no run trained on.

"mask": the loss on answers only, or on all tokens. "normalization": steps of the same global batch,
on other numbers of ranks and with other micro-batches.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import write_result

REPOSITORY = Path(__file__).parents[2]
LOSS = "ddp_model(**batch, num_items_in_batch=answer_tokens).loss * world_size"
LOAD = "    # The global batch is fixed."
# Tokens up to the last answer of a sequence, but not the first one of a conversation, for which a
# model sees nothing of the conversation.
ALL_TOKENS = f"""\
    input_ids, labels, positions = train_data.rows.unbind(1)
    is_text = (labels != IGNORED).flip(1).cumsum(1).flip(1) > 0
    train_data.rows[:, 1] = torch.where(is_text & (positions > 0), input_ids, IGNORED)
{LOAD}"""
REPLACED = {
    "as in the diff": (),
    "loss on all tokens": (LOAD, ALL_TOKENS),
    "mean of means": (LOSS, "ddp_model(**batch).loss / accumulation"),
}
BASE_STEPS, MASK_STEPS, STEPS = 200, 100, 20
TUNE = "-m base-model --pretrained --lr 1e-3 --global-batch-size 12"
RANKS = ((1, 12), (1, 2), (2, 6), (2, 1))  # ranks, -b


def run(arguments: str, folder: Path, ranks: int | None = None) -> None:
    """Run a script of the repository in a folder, on ranks that torchrun starts or alone."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if ranks else []), *shlex.split(arguments)]
    environment = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, cwd=folder, env={**os.environ, **environment}, check=True)


def make_script(way: str, folder: Path) -> str:
    """Write the script of this way of REPLACED, and return its path."""
    name = f"{way.replace(' ', '-')}/02-ddp"
    if not (folder / name).exists():
        (folder / name).mkdir(parents=True)
        for file in ("train_llm.py", "conversations.py"):
            shutil.copy(REPOSITORY / "02-ddp" / file, folder / name)
        diff = REPOSITORY / "02-ddp/instruct.diff"
        subprocess.run(["git", "apply", diff], cwd=folder / name / "..", check=True)
        script = folder / name / "train_llm.py"
        text = script.read_text()
        if REPLACED[way]:
            right, wrong = REPLACED[way]
            assert text.count(right) == 1, way
            script.write_text(text.replace(right, wrong))
    return f"{name}/train_llm.py"


def tune(way: str, folder: Path, ranks: int, arguments: str) -> dict[str, object]:
    """Return what a run logged; its folder is removed."""
    run(f"{make_script(way, folder)} {TUNE} {arguments} -e run --log-freq 1", folder, ranks)
    lines = (folder / "outputs/run/metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    shutil.rmtree(folder / "outputs/run")
    losses = [line["loss"] for line in metrics]
    return {"losses": losses, "eval_loss": metrics[-1]["eval_loss"], "steps": len(losses)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row about the mask")
    args = parser.parse_args()
    output = args.output.absolute()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(f"{REPOSITORY}/01-single-gpu/train_llm.py -e base --max-steps {BASE_STEPS}", folder)
        run(f"{REPOSITORY}/04-fsdp/export.py outputs/base base-model", folder)
        before = tune("as in the diff", folder, 2, "--max-steps 1 --lr 0")
        results = {
            "base_steps": BASE_STEPS,
            "tune": TUNE,
            "before": before["eval_loss"],
            "normalization": [],
            "mask": [],
        }
        for ranks, batch_size in RANKS:
            for way in ("as in the diff", "mean of means"):
                arguments = f"-b {batch_size} --max-steps {STEPS}"
                row = {"way": way, "ranks": ranks, "batch_size": batch_size}
                row |= tune(way, folder, ranks, arguments)
                results["normalization"].append(row)
                write_result(output, results)  # each time: a later run may not end
        for seed in range(args.seeds):
            for way in ("as in the diff", "loss on all tokens"):
                row = tune(way, folder, 2, f"-b 6 --max-steps {MASK_STEPS} --seed {seed}")
                del row["losses"]  # not comparable
                results["mask"].append({"way": way, "seed": seed, **row})
                write_result(output, results)


if __name__ == "__main__":
    main()

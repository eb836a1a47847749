"""lm-evaluation-harness loads the exported folder, and finds the loss that evaluate.py finds."""

import json
import math
import random
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, environment, install, run_script
from transformers import AutoTokenizer

TASK = ROOT / "01-single-gpu/harness/my_text.yaml"
LENGTH = 64  # tokens of a window


def sum_of_losses(harness: Path, folder: Path, document: str, **model_args: object) -> float:
    """Return the sum in nats that the harness computes on my-text/validation.txt in a folder."""
    given = {"pretrained": "model", "dtype": "float32", "max_length": LENGTH - 1, **model_args}
    words = ["run", "--model", "hf", "--tasks", "my_text", "--include_path", TASK.parent]
    words += ["--model_args", ",".join(f"{name}={value}" for name, value in given.items())]
    words += ["--device", "cpu", "--batch_size", 8, "--output_path", "results.json"]
    (folder / "my-text").mkdir(parents=True, exist_ok=True)
    (folder / "my-text/validation.txt").write_text(document)
    for old in folder.glob("results*.json"):
        old.unlink()
    done = subprocess.run(
        [harness.parent / "lm-eval", *map(str, words)],
        cwd=folder,
        env=environment(HF_HOME=folder / "cache", HF_HUB_OFFLINE=1, OMP_NUM_THREADS=1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (results,) = folder.glob("results*.json")
    found = json.loads(results.read_text())["results"]["my_text"]
    return found["bits_per_byte,none"] * math.log(2) * len(document.encode())


@pytest.mark.nightly
def test_harness_agrees_with_evaluate(make_folder, train, tmp_path):
    """The sum of the losses, to 1e-5 for the same tokens, and to 1% as a reader calls both."""
    folder = make_folder("harness")
    packages = ("lm_eval==0.4.13", "accelerate==1.15.0")
    harness = install(folder / "environment", *packages, with_ours=True)
    words = random.Random(0)
    vocabulary = ["alpha", "beta", "gamma", "delta", "the", "a", "of", "text", "number", "ünï"]
    lines = (" ".join(words.choices(vocabulary, k=9)) for _ in range(400))
    text = "\n".join(lines) + "\n"
    (folder / "my-text").mkdir()
    (folder / "my-text/train.txt").write_text(text[:-3000])
    document = text[-3000:]
    (folder / "my-text/validation.txt").write_text(document)
    train("-d", folder / "my-text", "--max-steps", 10, "-s", LENGTH, "--lr", 2e-3)
    done = run_script("04-fsdp/export.py", tmp_path / "run", folder / "model")
    assert done.returncode == 0, done.stderr
    data = ("-d", folder / "my-text", "-s", LENGTH, "--stride", LENGTH - 1)
    output = folder / "evaluation.json"
    done = run_script("01-single-gpu/evaluate.py", folder / "model", *data, "--output", output)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    expected = found["loss"] * found["scored_tokens"]

    assert sum_of_losses(harness, folder, document) == pytest.approx(expected, rel=0.01)
    # The harness scores the first token, and evaluate.py the end-of-text token. Here, the first
    # token is the prefix of the harness, and the end-of-text token is written into the text.
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    first, *others = tokenizer.encode(document)
    assert found["tokens"] == len(others) + 2
    rest = document.removeprefix(tokenizer.decode([first])) + tokenizer.eos_token
    assert tokenizer.encode(rest) == [*others, tokenizer.eos_token_id]
    same = sum_of_losses(harness, folder, rest, prefix_token_id=first)
    assert same == pytest.approx(expected, rel=1e-5)
    shorter = sum_of_losses(harness, folder, rest, prefix_token_id=first, max_length=LENGTH // 2)
    assert shorter != pytest.approx(expected, rel=1e-5), "planted: other windows"

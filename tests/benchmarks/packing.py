"""What packing saves against padding each text to a fixed length, and what wrong labels do.

python tests/benchmarks/packing.py --output tests/benchmarks/results/packing.json

Two kinds of text: the files of the built-in corpus, which are long, and the paragraphs of Python's
reference, which are about as short as those of question answering. Each text gets an end-of-text
token; where texts are padded, that is also the token that they are padded with.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from machine import write_result
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from common.data import IGNORED
from common.data.sources import BUILT_IN, find_source
from common.models import causal_attention, load_config, load_tokenizer

LENGTHS = (128, 256, 512, 1024)  # for the arithmetic; the model has 128 positions
SEQUENCES, LENGTH = 8, 128  # of a batch
WAYS = ("fixed length", "longest of the batch", "packed")
LABELS = ("padding ignored", "every end ignored", "nothing ignored")
ROUNDS, BATCHES = 9, 2
STEPS, SAMPLES = 100, 64


def paragraphs() -> list[str]:
    """Return the paragraphs of Python's reference that have 100 characters or more."""
    return [p for text in topics.values() for p in text.split("\n\n") if len(p) > 99]


def encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [[*ids, tokenizer.eos_token_id] for ids in encoded]


# --- arithmetic ---


def count_padding(sizes: list[int], length: int) -> dict[str, dict[str, float]]:
    """Return, for each way, which share of the computed tokens is padding and of the text is lost.

    sizes: tokens of each text with its end, in the order in which they are taken.
    """
    kept = [min(size, length) for size in sizes]
    groups = [kept[i : i + SEQUENCES] for i in range(0, len(kept), SEQUENCES)]
    computed = {
        "fixed length": length * len(kept),
        "longest of the batch": sum(max(group) * len(group) for group in groups),
    }
    lost = 1 - sum(kept) / sum(sizes)
    shares = {way: {"padding": 1 - sum(kept) / n, "lost": lost} for way, n in computed.items()}
    return shares | {"packed": {"padding": 0.0, "lost": sum(sizes) % length / sum(sizes)}}


# --- time ---


def pad(texts: list[list[int]], width: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and which of them are text or its own end, [texts, width] both."""
    ids = torch.full((len(texts), width), end)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, text in enumerate(texts):
        n = min(len(text), width)
        ids[row, :n] = torch.tensor(text[:n])
        mask[row, :n] = True
    return ids, mask


def batches_of(way: str, encoded: list[list[int]], count: int) -> list[tuple[torch.Tensor, ...]]:
    """Return so many batches of (tokens, labels)."""
    end = encoded[0][-1]
    if way == "packed":
        line = torch.tensor([i for text in encoded for i in text][: count * SEQUENCES * LENGTH])
        return [(ids, ids) for ids in line.view(count, SEQUENCES, LENGTH)]
    batches = []
    for first in range(0, count * SEQUENCES, SEQUENCES):
        texts = encoded[first : first + SEQUENCES]
        longest = max(len(text) for text in texts)
        width = LENGTH if way == "fixed length" else min(LENGTH, longest)
        ids, mask = pad(texts, width, end)
        batches.append((ids, ids.masked_fill(~mask, IGNORED)))
    return batches


class Training:
    """The model and the optimizer of chapter 1's default run."""

    def __init__(self) -> None:
        config = load_config("gpt2-tiny")
        torch.manual_seed(0)
        # No mask: it is the end of a row that is padded, and no text sees what comes after it.
        self.model = AutoModelForCausalLM.from_config(
            config, attn_implementation=causal_attention(config), dtype=torch.float32
        )
        self.lr = 1 / config.hidden_size
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.lr, betas=(0.8, 0.95), fused=True
        )

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        loss = self.model(input_ids=ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def measure_rates(encoded: list[list[int]]) -> dict[str, dict[str, float]]:
    """Return, for each way, tokens of text per second of one core: medians of rounds in turn.

    Counted is the time that this process computes, so other work on the machine does not count.
    """
    training = Training()
    batches = {way: batches_of(way, encoded, ROUNDS * BATCHES) for way in WAYS}
    rates = {way: [] for way in WAYS}
    for batch in (batches[way][0] for way in WAYS):  # first allocations are not counted
        training.step(*batch)
    for first in range(0, ROUNDS * BATCHES, BATCHES):
        for way in WAYS:
            chosen = batches[way][first : first + BATCHES]
            start = time.process_time()
            for ids, labels in chosen:
                training.step(ids, labels)
            seconds = time.process_time() - start
            text = sum((labels != IGNORED).sum().item() for _, labels in chosen)
            rates[way].append(text / seconds)
    gains = {
        way: [rate / fixed for rate, fixed in zip(rates[way], rates[WAYS[0]], strict=True)]
        for way in WAYS
    }
    return {
        way: {
            "text_tokens_per_s": round(statistics.median(rates[way])),
            "gain": round(statistics.median(gains[way]), 2),
            "gain_range": [round(min(gains[way]), 2), round(max(gains[way]), 2)],
        }
        for way in WAYS
    }


# --- labels ---


def labels_of(how: str, ids: torch.Tensor, mask: torch.Tensor, end: int) -> torch.Tensor:
    if how == "padding ignored":
        return ids.masked_fill(~mask, IGNORED)
    if how == "every end ignored":  # what masks "the pad token" does, where that is the end
        return ids.masked_fill(ids == end, IGNORED)
    return ids


def train_on(how: str, encoded: list[list[int]], steps: int) -> dict[str, float]:
    """Train on texts padded to a fixed length, with one way to make labels; say what came of it.

    The last tenth of the texts is not trained on. Returns the loss of the last steps as the
    training shows it; on the other texts, the loss of their tokens and their ends, and the
    probability of the end where the text ends; and how many of SAMPLES samples end in time.
    """
    training, end = Training(), encoded[0][-1]
    held_out, encoded = encoded[-len(encoded) // 10 :], encoded[: -len(encoded) // 10]
    shown = []
    for step in range(steps):
        for group in training.optimizer.param_groups:
            group["lr"] = training.lr * min(1.0, (step + 1) / 20, (steps - step) / (steps / 2))
        ids, mask = pad(random.Random(step).sample(encoded, SEQUENCES), LENGTH, end)
        shown.append(training.step(ids, labels_of(how, ids, mask, end)))
    model = training.model.eval()
    whole = [text for text in held_out if len(text) <= LENGTH]
    ids, mask = pad(whole, LENGTH, end)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    losses = -logits.gather(-1, ids[:, 1:, None])[..., 0]
    at_end = torch.tensor([len(text) - 2 for text in whole])
    end_losses = losses[torch.arange(len(whole)), at_end]
    torch.manual_seed(0)
    prompt = torch.full((SAMPLES, 1), end)  # after an end, a text begins
    texts = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_length=LENGTH,
        do_sample=True,
        top_k=0,
        eos_token_id=end,
        pad_token_id=end,
        use_cache=True,
    )
    return {
        "shown_loss": round(statistics.mean(shown[-20:]), 3),
        "text_loss": round(losses[mask[:, 1:]].mean().item(), 3),
        "end_probability": round(end_losses.exp().reciprocal().mean().item(), 6),
        "samples_that_end": int((texts[:, 1:] == end).any(1).sum()),
    }


def describe(results: dict[str, dict]) -> list[str]:
    """Return the lines that are printed of the results."""
    lines = []
    for name, found in results["texts"].items():
        lines.append(f"{name}: {found['count']:,} texts, median {found['median_tokens']:,} tokens")
        for length, ways in found["arithmetic"].items():
            fixed = ways["fixed length"]
            lines.append(
                f"  padded to {length}: {fixed['padding']:.1%} is padding, {fixed['lost']:.1%} of "
                f"the text is cut off; to the longest of {SEQUENCES}: "
                f"{ways['longest of the batch']['padding']:.1%} is padding"
            )
        for way, rate in found["rates"].items():
            low, high = rate["gain_range"]
            lines.append(
                f"  {way}, {LENGTH}: {rate['text_tokens_per_s']:,} tokens of text per second, "
                f"x {rate['gain']:.2f} ({low:.2f} to {high:.2f})"
            )
    lines.append(f"{STEPS} steps on the paragraphs, padded to {LENGTH} with the end of text:")
    for how, found in results["labels"].items():
        lines.append(
            f"  {how}: loss shown {found['shown_loss']:.2f}, of text {found['text_loss']:.2f}; "
            f"end of text where it ends {found['end_probability']:.2%}; "
            f"{found['samples_that_end']} of {SAMPLES} samples end"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer("gpt2-tiny")
    files, _ = find_source(BUILT_IN, None, None).load()
    corpora = {"files of the standard library": list(files["text"])}
    corpora["paragraphs of the reference"] = paragraphs()
    results = {"texts": {}, "labels": {}}
    for name, texts in corpora.items():
        encoded = encode([text for text in texts if text], tokenizer)
        random.Random(0).shuffle(encoded)
        sizes = [len(text) for text in encoded]
        results["texts"][name] = {
            "count": len(sizes),
            "median_tokens": round(statistics.median(sizes)),
            "arithmetic": {str(length): count_padding(sizes, length) for length in LENGTHS},
            "rates": measure_rates(encoded),
        }
    for how in LABELS:  # of the paragraphs, which came last
        results["labels"][how] = train_on(how, encoded, STEPS)
    print("\n".join(describe(results)))
    if args.output:
        write_result(args.output, results)


if __name__ == "__main__":
    main()

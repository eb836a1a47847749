"""Measure a model on a text: its perplexity, and bits per byte, which compare any tokenizers.

python 01-single-gpu/evaluate.py outputs/my-run
torchrun --standalone --nproc-per-node 2 01-single-gpu/evaluate.py outputs/my-run --stride 64
"""

import argparse
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from common import cli, distributed, models
from common.checkpoint.trained import load_trained
from common.cli import InputError, at_least
from common.data import IGNORED, load_sequences


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__)
    add = parser.add_argument_group("model").add_argument
    add("trained", help="folder of a run or of a model, or hub id")
    add("-m", "--model-name", default="gpt2-tiny", help="of a run, as in its training")
    add("--tokenizer-name", help="folder or hub id (if absent: the model's)")
    add("--step", type=at_least(1), help="of a kept checkpoint (if absent: last)")
    add = parser.add_argument_group("text").add_argument
    add("-d", "--dataset-name", default="python-stdlib", help="preset, file, folder or hub id")
    add("--dataset-subset", help="configuration of a hub data set")
    add("--text-column", help="column to measure (if absent: text)")
    add("--split", default="evaluation", choices=["evaluation", "train", "all"], help="which part")
    add("-s", "--seq-length", type=at_least(2), help="tokens of a window (if absent: training's)")
    add("--stride", type=at_least(1), help="tokens to the next (if absent: a window)")
    add("-b", "--batch-size", default=8, type=at_least(1), help="windows per device at once")
    add("--num-workers", default=0, type=at_least(0), help="processes that prepare data")
    add("--output", type=Path, help="file for JSON; must not exist yet")
    return parser.parse_args()


def main() -> None:
    args = get_args()

    # --- setup ---
    distributed.prepare_environment()  # alone, where torchrun did not start this process
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[cli.ProgressHandler()])
    torch.set_float32_matmul_precision("high" if cuda else "highest")  # as in training
    cli.check_output(args.output)

    # --- model ---
    trained = load_trained(args.trained, args.model_name, args.tokenizer_name, args.step)
    model, tokenizer = trained.model.to(device), trained.tokenizer
    seq_length = args.seq_length or trained.seq_length
    seq_length = models.check_sizes(model.config, tokenizer, seq_length)
    if (stride := args.stride or seq_length) > seq_length:
        raise InputError(f"--stride {stride} would leave out tokens: give at most {seq_length}.")

    # --- text ---
    train, evaluation = load_sequences(args, tokenizer, seq_length)
    chosen = {"train": [train], "evaluation": [evaluation], "all": [train, evaluation]}[args.split]
    # The file of the blocks has the rest of less than a block, too: one long line of tokens.
    lines = [np.memmap(part.tokens.filename, part.tokens.dtype, mode="r") for part in chosen]
    n_tokens = sum(map(len, lines))
    n_bytes = round(sum(len(x) / p.tokens_per_byte for x, p in zip(lines, chosen, strict=True)))
    unknown = {tokenizer.unk_token_id} - {None, tokenizer.eos_token_id}  # GPT-2's is its end
    n_unknown = sum(int(np.isin(line, list(unknown)).sum()) for line in lines)
    windows = [
        (line, begin, first)
        for line in lines
        for begin, first in zip(*find_windows(len(line), seq_length, stride), strict=True)
    ]

    # --- loss ---
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, of tokens
    for batch in make_batches(windows[rank::world_size], seq_length, args.batch_size):
        total += score(model, *(tensor.to(device) for tensor in batch))
    if world_size > 1:
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, device_id=device if cuda else None)
        facts = {"model": trained.origin, "text": [part.digest for part in chosen]}
        distributed.check_agreement(facts, "give --step, and all nodes the same data")
        dist.all_reduce(total)  # sums, not means: ranks may hold different numbers of tokens
        dist.barrier()  # a rank that is gone too early looks like a failure to the others
        dist.destroy_process_group()
    if rank != 0:
        return
    loss = total[0] / total[1]
    facts = {"tokens": n_tokens, "unknown": n_unknown, "scored_tokens": int(total[1])}
    facts |= {"bytes": n_bytes, "loss": loss.item(), "perplexity": loss.exp().item()}
    facts["bits_per_byte"] = facts["loss"] / math.log(2) * n_tokens / n_bytes
    print(f"{trained.origin} on the {args.split} part of {args.dataset_name}")
    print(f"windows of {seq_length} tokens, one every {stride}; ranks: {world_size}")
    text = "{tokens:,} tokens, {unknown:,} unknown, {scored_tokens:,} scored, {bytes:,} bytes"
    print(text.format(**facts))
    text = "loss {loss:.4f}, perplexity {perplexity:.2f}, {bits_per_byte:.3f} bits per byte"
    print(text.format(**facts))
    if args.output:
        settings = {**vars(args), "seq_length": seq_length, "stride": stride, "ranks": world_size}
        facts = {"origin": trained.origin, **settings, **facts}
        with args.output.open("x", encoding="utf-8") as file:
            file.write(json.dumps(facts, indent=1, default=str) + "\n")


def find_windows(n_tokens: int, seq_length: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each window begins, and its first token to score: all up to its end are new.

    Where windows do not overlap, they are training's blocks: the first token of each has nothing
    before it, and the rest of less than a block is left out. Otherwise only the first token of all
    is not scored; the last window is moved back so that it is full.
    """
    begins = np.arange(0, n_tokens - seq_length + 1, stride)
    if stride < seq_length and begins[-1] + seq_length < n_tokens:
        begins = np.append(begins, n_tokens - seq_length)
    return begins, np.maximum(np.append(0, begins[:-1] + seq_length), begins + 1)


def make_batches(
    windows: list[tuple[np.ndarray, int, int]], seq_length: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and labels, int64 [at most batch_size, seq_length]; old tokens are ignored."""
    for start in range(0, len(windows), batch_size):
        batch = windows[start : start + batch_size]
        tokens = np.stack([line[begin : begin + seq_length] for line, begin, _ in batch])
        labels = torch.from_numpy(tokens.astype(np.int64))
        input_ids = labels.clone()
        for row, (_, begin, first) in enumerate(batch):
            labels[row, : first - begin] = IGNORED
        yield input_ids, labels


@torch.no_grad()
def score(model: PreTrainedModel, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses in nats and the number of the tokens that have a label."""
    logits, labels = model(input_ids).logits[:, :-1], labels[:, 1:]
    scored = labels != IGNORED
    losses = cross_entropy(logits[scored].float(), labels[scored], reduction="none")
    return torch.stack((losses.double().sum(), scored.sum()))


if __name__ == "__main__":
    distributed.run(main)

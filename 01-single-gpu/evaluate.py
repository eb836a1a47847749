"""Measure the perplexity of a model on a text, and its bits per byte.

Bits per byte can be compared between models with different tokenizers, perplexity cannot.

python 01-single-gpu/evaluate.py outputs/my-run
torchrun --standalone --nproc-per-node 2 01-single-gpu/evaluate.py outputs/my-run --stride 64
"""

import argparse
import json
import logging
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from common import cli, launch, ranks
from common.cli import at_least
from common.data import IGNORED, load_sequences
from common.errors import RunError
from common.inputs import models
from common.inputs.token_files import find_token_files

from trained_model import check_output, load_trained


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__)
    add = parser.add_argument_group("model").add_argument
    add("trained", help="folder of a run or a model, or hub id")
    add("-m", "--model-name", help="preset, folder or hub id (default: the run's own)")
    add("--tokenizer-name", help="folder or hub id (default: the run's or the model's own)")
    add("--step", type=at_least(1), help="step of the run's checkpoint (default: the last one)")
    add = parser.add_argument_group("text").add_argument
    add("-d", "--dataset-name", help="preset, file, folder or hub id (default: the run's own)")
    add("--dataset-subset", help="configuration of a hub data set")
    add("--text-column", help="column that holds the text (default: text)")
    add("--split", default="evaluation", choices=["evaluation", "train", "all"], help="data part")
    add("-s", "--seq-length", type=at_least(2), help="tokens per window (default: as in training)")
    add("--stride", type=at_least(1), help="tokens between window starts (default: --seq-length)")
    add("-b", "--batch-size", default=8, type=at_least(1), help="windows per device and batch")
    add("--output", type=Path, help="JSON file to write; it must not exist yet")
    return parser.parse_args()


def main() -> None:
    args = get_args()

    # --- setup ---
    launch.prepare_environment()  # also runs as a single process, without torchrun
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else "cpu"
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[cli.ProgressHandler()])
    torch.set_float32_matmul_precision("high" if cuda else "highest")  # as in training
    check_output(args.output)

    # --- model ---
    trained = load_trained(args.trained, args.model_name, args.tokenizer_name, args.step)
    model, tokenizer = trained.model.to(device), trained.tokenizer
    seq_length = models.sequence_length(model.config, args.seq_length or trained.seq_length)
    if (stride := args.stride or seq_length) > seq_length:
        raise RunError(f"--stride {stride} would leave out tokens: give at most {seq_length}.")

    # --- text ---
    note, own = "", trained.sources
    if takes_own := args.dataset_name is None:
        args.dataset_name = own.get("dataset_name", "python-stdlib")
        args.dataset_subset = args.dataset_subset or own.get("dataset_subset")
        args.text_column = args.text_column or own.get("text_column")
        note = "" if own else ", because it is unknown what the model was trained on"
    args.seq_length = seq_length
    train, evaluation = load_sequences(args, tokenizer)
    if takes_own and own and trained.checksum not in (None, train.digest):
        note = ", which gave the run other tokens: the text or the tokenizer has changed since, or "
        note += "the run was trained on questions and answers"
    chosen = {"train": [train], "evaluation": [evaluation], "all": [train, evaluation]}[args.split]
    streams, n_bytes = [], 0
    for part in chosen:
        streams += part.streams
        n_bytes += sum(map(len, part.streams)) / part.tokens_per_byte
    n_tokens, n_bytes = sum(map(len, streams)), round(n_bytes)
    if find_token_files(args.dataset_name):
        note += "; the number of bytes is an estimate, because its text is unknown"
    # GPT-2 has no unknown token. Its unk_token is the end-of-text token.
    unknown = {tokenizer.unk_token_id} - {None, tokenizer.eos_token_id}
    n_unknown = sum(int(np.isin(stream, list(unknown)).sum()) for stream in streams)
    if trained.begin is not None:
        note += f"; each document begins with {tokenizer.bos_token}, as the tokenizer says"
        streams = [add_begin(s, trained.begin, tokenizer.eos_token_id) for s in streams]
    windows = [  # tokens, and how many of them are not scored
        (stream[begin : begin + seq_length], first - begin)
        for stream in streams
        for begin, first in zip(*find_windows(len(stream), seq_length, stride), strict=True)
    ]

    # --- loss ---
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, number of tokens
    own_windows = windows[rank::world_size]
    for start in range(0, len(own_windows), args.batch_size):
        tokens, unscored = zip(*own_windows[start : start + args.batch_size], strict=True)
        input_ids = torch.from_numpy(np.stack(tokens).astype(np.int64))
        labels = input_ids.clone()
        for row, count in zip(labels, unscored, strict=True):
            row[:count] = IGNORED
        if trained.begin not in (None, tokenizer.eos_token_id):
            labels[input_ids == trained.begin] = IGNORED  # it is no part of the text
        total += score(model, input_ids.to(device), labels.to(device))
    if world_size > 1:
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, device_id=device if cuda else None)
        inputs = {"model": trained.origin, "text": [part.digest for part in chosen]}
        ranks.check_agreement(inputs, "give --step, and the same data on all nodes")
        dist.all_reduce(total)  # ranks may have different numbers of tokens, so sum before dividing
        dist.barrier()  # a rank that exits early would look like a failure to the other ranks
        dist.destroy_process_group()
    if rank != 0:
        return
    loss = total[0] / total[1]
    results = {
        "tokens": n_tokens,
        "unknown": n_unknown,
        "scored_tokens": int(total[1]),
        "bytes": n_bytes,
        "loss": loss.item(),
        "perplexity": loss.exp().item(),
        "bits_per_byte": loss.item() / math.log(2) * n_tokens / n_bytes,
    }
    print(f"{trained.origin} on the {args.split} part of {args.dataset_name}{note}")
    print(f"windows of {seq_length} tokens, one every {stride}; ranks: {world_size}")
    line = "{tokens:,} tokens, {unknown:,} unknown, {scored_tokens:,} scored, {bytes:,} bytes"
    print(line.format(**results))
    line = "loss {loss:.4f}, perplexity {perplexity:.2f}, {bits_per_byte:.3f} bits per byte"
    print(line.format(**results))
    if args.output:
        settings = {**vars(args), "stride": stride, "ranks": world_size}
        content = {"origin": trained.origin, **settings, **results}
        args.output.write_text(json.dumps(content, indent=1, default=str) + "\n")


def add_begin(stream: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Return a text with the token `begin` before each document that does not have it yet.

    end: the token after each document. If both are the same, only the first document lacks it.
    """
    starts = [0, *(np.flatnonzero(stream[:-1] == end) + 1)] if begin != end else [0]
    return np.insert(stream, [start for start in starts if stream[start] != begin], begin)


def find_windows(n_tokens: int, seq_length: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each window begins, and the first token that it scores.

    A window scores all tokens from there to its end. No token is scored twice. Windows that do not
    overlap are the sequences of training: the first token of each has no context and is not scored,
    and an incomplete window at the end is left out. If windows overlap, only the first token of the
    text is not scored, and the last window is moved back so that it is full.
    """
    begins = np.arange(0, n_tokens - seq_length + 1, stride)
    if stride < seq_length and len(begins) and begins[-1] + seq_length < n_tokens:
        begins = np.append(begins, n_tokens - seq_length)
    return begins, np.maximum(np.append(0, begins[:-1] + seq_length), begins + 1)


@torch.no_grad()
def score(model: PreTrainedModel, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses in nats, and the number of scored tokens.

    input_ids, labels: int64 [windows, seq_length]. A token whose label is IGNORED is not scored.
    """
    logits, labels = model(input_ids).logits[:, :-1], labels[:, 1:]
    scored = labels != IGNORED
    losses = cross_entropy(logits[scored].float(), labels[scored], reduction="none")
    return torch.stack((losses.double().sum(), scored.sum()))


if __name__ == "__main__":
    launch.run(main)

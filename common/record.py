"""state.json: which checkpoints of a run are complete, and which training they belong to."""

import argparse
import json
import socket
from pathlib import Path

import torch.distributed as dist
import xxhash
from torch import nn

from common.cli import InputError
from common.data import Blocks
from common.remote import exists, explained, is_folder, is_remote, read_text, stamp_of

FORMAT = 1
MODEL_SETTINGS = (
    *("num_attention_heads", "num_key_value_heads", "activation_function", "hidden_act"),
    *("layer_norm_epsilon", "rms_norm_eps", "rope_parameters", "sliding_window"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "tie_word_embeddings"),
)
# With another value of one of these the rest of a run would not be the same training.
FIXED_ARGUMENTS = (
    "seed",
    "param_dtype",
    "global_batch_size",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
)


def describe_model(model: nn.Module) -> str:
    """Return a name for all models of the same parameters (their names and shapes) and of the same
    settings that those do not show; the parameters may be on meta."""
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    settings = {name: getattr(model.config, name, None) for name in MODEL_SETTINGS}
    facts = json.dumps([shapes, settings], sort_keys=True, default=str)
    return f"{model.config.model_type}-{xxhash.xxh3_64_hexdigest(facts.encode())}"


def describe_training(
    args: argparse.Namespace,
    model: nn.Module,
    train_data: Blocks,
    seq_length: int,
    lr: float,
    total_steps: int,
) -> dict[str, object]:
    """Return all that must stay as it is while a run goes on, by the names of the arguments.

    Values are JSON. model: the bare one, not wrapped. The data set counts by its tokens.
    """
    return {
        "model": describe_model(model),
        "dataset_checksum": train_data.digest,
        "seq_length": seq_length,
        "lr": lr,
        "total_steps": total_steps,
        **{name: getattr(args, name) for name in FIXED_ARGUMENTS},
    }


def check_agreement(facts: dict[str, object], way_out: str) -> None:
    """Raise InputError if a rank has another fact of some name than rank 0; all must call this."""
    rank, _ = rank_and_world_size()
    everyone = gather({rank: (facts, socket.gethostname())})
    for other, (theirs, host) in everyone.items():
        for name, value in everyone[0][0].items():
            if theirs[name] != value:
                raise InputError(
                    f"Rank {other} on {host} has {name} {theirs[name]}, rank 0 on {everyone[0][1]} "
                    f"has {value}: {way_out}."
                )


@explained
def find_checkpoint(run_dir: Path, training: dict[str, object]) -> Path | None:
    """Return the folder of the newest complete checkpoint of a run, or None for a new run.

    Raises InputError if the ranks do not agree on the `training`, if the run was started with
    another one, or if its checkpoint is damaged. Nothing is loaded yet. All ranks must call this.
    """
    rank, world_size = rank_and_world_size()
    check_agreement(training, "give all nodes the same arguments, data and Python")
    if not exists(run_dir / "state.json"):
        # One folder can be left by a kill before the first record; more were once recorded.
        if len(list((run_dir / "checkpoints").glob("step-*"))) > 1:
            raise InputError(
                f"{run_dir} has checkpoints and no state.json: restore it, or start anew with "
                "another -e."
            )
        return None
    saved, by_step = read_record(run_dir, "restore it, or start anew with another -e")
    present = list(by_step.values())
    for name, value in training.items():
        if name in saved and saved[name] != value:
            raise InputError(
                f"The run {run_dir} was started with {name} {saved[name]}, not {value}: go on with "
                "the old value, or start anew with another -e."
            )
    if not present:
        raise InputError(f"The checkpoints of {run_dir} are gone: start anew with another -e.")
    record = present[-1]
    path = run_dir / record["path"]
    mine = sorted(record["files"])[rank::world_size]  # each rank reads its share of the bytes
    files = record["files"]
    damaged = gather({n: 1 for n in mine if measure_file(path / n, files[n]) != files[n]})
    for name in damaged:
        way_back = "start anew with another -e"
        if len(present) > 1:
            way_back = f"delete {path} to go on from step {present[-2]['step']}, or {way_back}"
        raise InputError(f"The checkpoint file {path / name} is damaged: {way_back}.")
    return path


def read_record(run_dir: Path, way_out: str) -> tuple[dict[str, object], dict[int, dict]]:
    """Return from state.json the training, and the records of the checkpoints that are there, by
    step. Raises InputError where it is damaged, FileNotFoundError where there is none."""
    record_file = run_dir / "state.json"
    try:
        state = json.loads(read_text(record_file))
        training, records = state["training"], state["checkpoints"]
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']}, not {FORMAT}")
        return training, {r["step"]: r for r in records if is_folder(run_dir / r["path"])}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{record_file} is damaged ({error!r}): {way_out}.") from error


@explained
def measure_file(file: Path, expected: dict | None = None) -> dict[str, object] | None:
    """Return size in bytes and checksum of a file, None where there is none.

    expected: what is recorded of it. What else stands there than these two is returned as it is,
    and all of it where a store can say that the file has not changed since.
    """
    expected = expected or {}
    try:
        if is_remote(file) and "stamp" in expected:
            info = file.fs.info(file.path)
            if (info["size"], stamp_of(info)) == (expected["bytes"], expected["stamp"]):
                return expected
        with file.open("rb") as content:
            digest = xxhash.xxh3_64()
            while chunk := content.read(2**24):
                digest.update(chunk)
            return {**expected, "bytes": content.tell(), "xxh3_64": digest.hexdigest()}
    except FileNotFoundError:
        return None


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and how many there are: 0 and 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(part: dict, group: dist.ProcessGroup | None = None) -> dict:
    """Return the union of all ranks' dictionaries; all ranks must call this, and wait for it.

    group: the ranks, by another way than the default one.
    """
    if not dist.is_initialized():
        return part
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part, group=group)
    return {key: value for each in parts for key, value in sorted(each.items())}

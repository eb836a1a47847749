"""Checkpoints across numbers of ranks, replicated and sharded: saved on some, loaded on others."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, first_then_nightly, full
from runner import ask_ranks
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM

from common.checkpoint import (
    find_checkpoint,
    load_checkpoint,
    manifest,
    save_checkpoint,
    save_load,
)
from common.cli import InputError


def parameter_groups(model: torch.nn.Module, action: str) -> list[dict]:
    """Return two groups, as many readers have: norms and biases are not decayed."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    decay = 0.1 if action == "save" else 0.5  # what was saved wins
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": decay / 10, "lr": 3e-2},
    ]


def forget_weight_decay() -> None:
    load = save_load.set_state_dict

    def plant(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **states: dict) -> None:
        groups = states["optim_state_dict"]["param_groups"]
        for group, own in zip(groups, optimizer.param_groups, strict=True):
            group["weight_decay"] = own["weight_decay"]
        load(model, optimizer, **states)

    save_load.set_state_dict = plant


def rank_main(rank: int, world_size: int, sharded: bool, action: str, folder: Path, queue) -> None:
    """Save a run of two steps, or load it into other weights; put all tensors on the queue."""
    if world_size > 1:
        store = f"file://{folder}/{action}-{world_size}-{sharded}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    config = AutoConfig.from_pretrained(ROOT / "common/presets/gpt2-tiny", n_embd=32)
    torch.manual_seed(0 if action == "save" else 1)
    model = AutoModelForCausalLM.from_config(config)
    if sharded:
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    if action == "load with its own weight decay":
        forget_weight_decay()
    optimizer = torch.optim.AdamW(parameter_groups(model, action), lr=1e-2, fused=True)
    lr_scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    state = {"step": 0, "running_loss": torch.zeros(())}
    training = {"seed": 0}
    try:
        if action == "save":
            ids = torch.arange(64).view(2, 32)
            for _ in range(2):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                state["step"] += 1
                state["running_loss"] += loss.detach()
            save_checkpoint(folder, model, optimizer, lr_scheduler, state, training, keep=2)
        else:
            checkpoint = find_checkpoint(folder, training)
            load_checkpoint(checkpoint, model, optimizer, lr_scheduler, state)
    except InputError as error:
        queue.put((rank, str(error)))
        return
    tensors = {name: full(p).detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{name}.{key}"] = full(optimizer.state[parameter][key]).clone()
    tensors["running_loss"] = state["running_loss"]
    numbers = {name: value.double().numpy().tobytes() for name, value in tensors.items()}
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    queue.put((rank, (numbers, state["step"], lr_scheduler.get_last_lr(), decays)))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def run_ranks(world_size: int, sharded: bool, action: str, folder: Path) -> list:
    """Run rank_main on each rank and return what each put on the queue."""
    return ask_ranks(world_size, rank_main, world_size, sharded, action, folder)


@pytest.mark.parametrize(
    ("saved_on", "saved_sharded"), first_then_nightly([(2, True), (1, False), (2, False)])
)
def test_saved_on_some_ranks_loaded_on_others(tmp_path, saved_on, saved_sharded):
    expected = run_ranks(saved_on, saved_sharded, "save", tmp_path)[0]
    assert expected[1] == 2
    for world_size, sharded in ((1, False), (2, False), (4, True)):
        for found in run_ranks(world_size, sharded, "load", tmp_path):
            assert found == expected, (world_size, sharded)


@pytest.mark.parametrize(("world_size", "sharded"), [(1, False), (2, True)])
def test_planted_group_that_keeps_its_own_weight_decay(tmp_path, world_size, sharded):
    """The rest is the same: only the last of what a rank answers differs."""
    expected = run_ranks(1, False, "save", tmp_path)[0]
    for found in run_ranks(world_size, sharded, "load with its own weight decay", tmp_path):
        assert found[:-1] == expected[:-1]
        assert (found[-1], expected[-1]) == ([0.5, 0.05], [0.1, 0.01])


def test_planted_wrong_shard(tmp_path):
    """The planted bug swaps two shards of equal size in the checkpoint's index."""
    expected = run_ranks(2, True, "save", tmp_path)[0]
    path = tmp_path / json.loads((tmp_path / "state.json").read_text())["checkpoints"][-1]["path"]
    reader = torch.distributed.checkpoint.FileSystemReader(path)
    metadata = reader.read_metadata()
    one, two = (
        index
        for index in metadata.storage_data
        if index.fqn == "model.transformer.h.0.mlp.c_fc.weight"
    )
    storage = metadata.storage_data
    storage[one], storage[two] = storage[two], storage[one]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "is damaged" in run_ranks(1, False, "load", tmp_path)[0], "the checksum sees it first"
    state = json.loads((tmp_path / "state.json").read_text())
    state["checkpoints"][-1]["files"][".metadata"] = manifest.measure_file(path / ".metadata")
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert run_ranks(1, False, "load", tmp_path)[0] != expected


def test_all_ranks_refuse_what_is_damaged(tmp_path):
    run_ranks(2, True, "save", tmp_path)
    file = next((tmp_path / "checkpoints/step-00000002").glob("__1_*"))
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    answers = run_ranks(4, True, "load", tmp_path)
    assert all(f"{file} is damaged" in answer for answer in answers)


def test_all_ranks_refuse_what_cannot_be_written(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    answers = run_ranks(2, True, "save", tmp_path)
    assert all("could not be written" in answer for answer in answers)

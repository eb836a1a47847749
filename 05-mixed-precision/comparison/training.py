"""One training of the comparison: a strategy in a precision, as the chapters train it."""

import argparse
import contextlib
import itertools
import math
import statistics
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from common import models
from common.cli import RunError
from common.data import ResumableSampler, load_sequences, split_batch
from common.gradients import clip_grad_norm
from common.launch import gather
from common.sharding import find_layers
from common.timers import PhaseTimers, flops_per_token
from precision import COMPUTE_DTYPES, check_precision, convert_to_fp8

try:
    import horovod.torch as hvd
except ImportError:
    hvd = None

STRATEGIES = ("single", "dp", "ddp", "zero1", "fsdp", "horovod")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "pure-bf16", "fp8")
PHASES = ("data", "forward", "backward", "update")
WINDOW = 5  # steps between two measurements; each one waits for the device


def number_of_ranks(strategy: str, devices: int) -> int:
    return 1 if strategy == "dp" else devices  # nn.DataParallel: one process, many GPUs


def check_row(run: argparse.Namespace, device: torch.device) -> None:
    """Raise RunError, with the reason, if this machine cannot train with this row."""
    if run.strategy == "dp" and (device.type != "cuda" or run.devices < 2):
        raise RunError("nn.DataParallel needs at least two GPUs.")
    if run.strategy == "horovod" and hvd is None:
        raise RunError("Horovod is not installed.")
    if run.precision == "tf32" and device.type != "cuda":
        raise RunError("On a CPU, tf32 is the same as fp32.")
    if run.precision == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
        raise RunError("This GPU has no TF32.")
    precision = run.precision.removeprefix("pure-")
    check_precision(argparse.Namespace(precision=precision, param_dtype="float32"), device)


def train(run: argparse.Namespace, rank: int, device: torch.device) -> dict[str, object]:
    """Train like a chapter: single like chapter 1, ddp and zero1 like chapter 2, fsdp like 5.

    Return the loss of each step, over all ranks; the tokens/s of all devices in each window; the
    medians over the windows after the warm-up of ms per step and phase and of MFU; and the peak
    memory of the GPU that needs the most, in GiB.
    """
    n_ranks = number_of_ranks(run.strategy, run.devices)
    compute_dtype = COMPUTE_DTYPES.get(run.precision)
    strict = device.type != "cuda" or run.precision == "fp32"
    torch.set_float32_matmul_precision("highest" if strict else "high")  # high: TF32

    # --- model ---
    config = models.load_config(run.model_name)
    tokenizer = models.load_tokenizer(run.model_name)
    torch.manual_seed(run.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if run.precision == "pure-bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    model.to(device)
    layers = find_layers(model)
    if run.precision == "fp8":
        convert_to_fp8(layers, run.seq_length)
    token_flops = flops_per_token(model, config, run.seq_length)
    compiled = run.compile and run.part != "loss" and run.strategy != "dp"
    if compiled and run.strategy != "fsdp":
        model.compile()
    # FSDP casts the weights when it gathers them. The other strategies use autocast.
    module = Loss(model, device.type, None if run.strategy == "fsdp" else compute_dtype)

    # --- strategy ---
    if run.strategy == "dp":  # copies the model to all GPUs in every forward pass
        warnings.filterwarnings("ignore", "Was asked to gather", UserWarning)  # one loss per GPU
        module = nn.DataParallel(module, list(range(run.devices)))
    if run.strategy in ("ddp", "zero1"):
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if run.strategy == "fsdp":
        mesh = init_device_mesh(device.type, (n_ranks,))
        policy = MixedPrecisionPolicy(
            compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None
        )
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for layer, after in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([layer])
        if compiled:
            for layer in layers:
                layer.forward = torch.compile(layer.forward)
            model.loss_function = torch.compile(model.loss_function)

    # --- data ---
    train_data, _ = load_sequences(run, tokenizer, run.seq_length)
    micro_batch_size, accumulation = split_batch(run, run.devices, len(train_data))
    sampler = ResumableSampler(train_data, num_replicas=n_ranks, rank=rank, seed=run.seed)
    dataloader = DataLoader(
        train_data,
        batch_size=micro_batch_size * run.devices // n_ranks,
        sampler=sampler,
        drop_last=True,
        pin_memory=device.type == "cuda",
    )
    steps_per_epoch = len(train_data) // run.global_batch_size

    # --- optimizer ---
    adamw = torch.optim.AdamW
    if run.strategy == "zero1":
        adamw = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    optimizer = adamw(
        model.parameters(),
        lr=run.lr if run.lr is not None else 1 / config.hidden_size,
        betas=(0.8, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    if run.strategy == "horovod":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), backward_passes_per_step=accumulation
        )
    warmup_steps = min(100, run.steps // 4)

    def lr_factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, run.steps - 1 - warmup_steps)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, progress))) / 2

    lr_scheduler = LambdaLR(optimizer, lr_factor)
    scaler = torch.amp.GradScaler(device.type, enabled=run.precision == "fp16")

    # --- train ---
    losses = torch.zeros(run.steps, device=device)
    windows = []
    timers = PhaseTimers(device)
    gpus = range(run.devices) if run.strategy == "dp" else [rank]
    for gpu in gpus if device.type == "cuda" else []:
        torch.cuda.reset_peak_memory_stats(gpu)
    model.train()
    for step in range(run.steps):
        epoch, epoch_step = divmod(step, steps_per_epoch)
        if epoch_step == 0:
            sampler.set_epoch(epoch)
            batches = iter(dataloader)
        for micro_batch in range(accumulation):
            with timers("data"):
                batch = next(batches)
                batch = {key: t.to(device, non_blocking=True) for key, t in batch.items()}
            last_backward = micro_batch == accumulation - 1
            sync = contextlib.nullcontext
            if run.strategy in ("ddp", "zero1") and not last_backward:
                sync = module.no_sync
            if run.strategy == "fsdp":
                model.set_requires_gradient_sync(last_backward)
            with timers("forward"), sync():
                loss = module(**batch).mean() / accumulation  # mean: DataParallel has one per GPU
            with timers("backward"):
                scaler.scale(loss).backward()
            losses[step] += loss.detach()
        with timers("update"), contextlib.ExitStack() as stack:
            if run.strategy == "horovod":
                optimizer.synchronize()  # here, because clipping needs the averaged gradients
                stack.enter_context(optimizer.skip_synchronize())
            scaler.unscale_(optimizer)
            clip_grad_norm(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            lr_scheduler.step()
            optimizer.zero_grad()
        if (step + 1) % WINDOW == 0:
            tokens = run.global_batch_size * run.seq_length
            windows.append(timers.read(tokens, run.devices, token_flops))

    # --- results ---
    if dist.is_initialized():
        losses /= n_ranks
        dist.all_reduce(losses)
    counted = after_warmup(windows)
    medians = {key: statistics.median(each[key] or 0 for each in counted) for key in counted[0]}
    peak = None
    if device.type == "cuda":
        peak = max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 2**30
        peak = max(gather({rank: peak}).values())
    return {
        "compiled": compiled,
        "batch_size": micro_batch_size,
        "losses": [round(loss, 7) if math.isfinite(loss) else None for loss in losses.tolist()],
        "tokens_per_s": [round(each["tokens_per_s"], 1) for each in windows],
        "ms": {key: round(medians[f"time/{key}"], 3) for key in (*PHASES, "total")},
        "mfu": None if counted[0]["mfu"] is None else round(medians["mfu"], 4),
        "peak_mem_gib": peak,
    }


def after_warmup(windows: list) -> list:
    """Leave out the first third of the windows, in which memory is allocated and code compiled."""
    return windows[math.ceil(len(windows) / 3) :]


class Loss(nn.Module):
    """Computes only the loss of a model, under autocast if dtype is given.

    This is for nn.DataParallel, which would otherwise gather all logits on one GPU. Autocast is
    inside, because DataParallel's threads do not inherit the dtype of an autocast around them.
    """

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.device_type, self.dtype = model, device_type, dtype

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None):
            return self.model(**batch).loss

"""Train a causal language model in mixed precision, spread over the devices of several nodes.

bash 05-mixed-precision/launch.sh
"""

import argparse
import datetime
import functools
import logging
import math
import os
import signal
import socket
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, set_seed

from common import cli, hosts, launch, models
from common.async_checkpoint import AsyncCheckpoints
from common.checkpoint import load_checkpoint, save_checkpoint
from common.cli import at_least
from common.data import ResumableSampler, describe_batch, load_blocks, split_batch
from common.precision import check_precision, convert_to_fp8
from common.record import describe_training, find_checkpoint
from common.sample import sample_text
from common.shards import load_shards
from common.timers import PhaseTimers, find_slowest, flops_per_token
from common.tracker import Tracker, make_run_dir

logger = logging.getLogger("train_llm")

# What torchrun tells a process of its place among the others, and what others call the same.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
# What selective checkpointing keeps: matrix products and attention. All else is cheap to redo.
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
KEPT = [getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default for kind in ATTENTION]
KEPT += [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
KEPT += [torch.ops.aten._scaled_mm.default]  # the product of fp8 matrices
# What weights are gathered and multiplied in: fp32 and tf32 need no copy, fp8 is made of bf16.
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__)
    add = parser.add_argument_group("run").add_argument
    add("-e", "--experiment-name", help="name of the run; generated if absent")
    add("--save-dir", default="outputs", help="folder that holds the runs' folders")
    add("--seed", default=0, type=at_least(0), help="of the weights, the order, the dropout")
    add("--dist-timeout", default=600, type=at_least(1), help="seconds to wait for other ranks")
    add("--track-nodes", action="store_true", help="a wandb run for each node, in a group")
    add = parser.add_argument_group("data").add_argument
    add("-d", "--dataset-name", default="python-stdlib", help="preset, file, folder or hub id")
    add("--dataset-subset", help="configuration of a hub data set")
    add("--text-column", help="column to train on (if absent: text)")
    add("-s", "--seq-length", type=at_least(2), help="tokens (if absent: positions, <= 1024)")
    add("--num-workers", default=0, type=at_least(0), help="processes that prepare data")
    add = parser.add_argument_group("model").add_argument
    add("-m", "--model-name", default="gpt2-tiny", help="preset, folder or hub id")
    add("--tokenizer-name", help="folder or hub id (if absent: the model's)")
    add("--pretrained", action="store_true", help="start from the model's own weights")
    add("--param-dtype", default="float32", choices=["float32", "bfloat16"], help="of the weights")
    add("--compile", action="store_true", help="fuse kernels with torch.compile")
    recomputed = ["none", "selective", "full"]
    add("--activation-checkpointing", default="none", choices=recomputed, help="what to recompute")
    numbers = ["fp32", "tf32", "bf16", "fp16", "fp8"]
    add("--precision", choices=numbers, help="of the arithmetic (if absent: bf16)")
    dtypes = ["float32", "bfloat16"]
    add("--reduce-dtype", choices=dtypes, help="to sum over ranks (if absent: the weights')")
    add = parser.add_argument_group("optimize").add_argument
    add("-b", "--batch-size", default=8, type=at_least(1), help="most sequences per device at once")
    add("--global-batch-size", default=24, type=at_least(1), help="sequences per step, all devices")
    add("--lr", type=at_least(0.0), help="peak rate (if absent: 1 / model width)")
    add("--warmup-steps", type=at_least(0), help="steps (if absent: a quarter, at most 100)")
    add("--weight-decay", default=0.1, type=at_least(0.0), help="AdamW's, multiplied by the rate")
    add("--max-grad-norm", default=1.0, type=cli.above_zero, help="clip above; inf: never")
    add("--num-epochs", default=0.6, type=at_least(0.0), help="passes over the data, or a part")
    add("--max-steps", type=at_least(1), help="steps in all, instead of epochs")
    add("--zero1", action="store_true", help="shard the moments over the ranks")
    whole = {"default": True, "action": argparse.BooleanOptionalAction}
    add("--reshard-after-forward", **whole, help="free gathered weights, gather them twice")
    add("--reduce-every-backward", action="store_true", help="less memory, more traffic")
    add("--prefetch", default=1, type=at_least(0), help="blocks gathered ahead; 0: FSDP decides")
    add("--hsdp", action="store_true", help="shard within nodes, replicate over nodes")
    add("--cpu-offload", action="store_true", help="keep shards in host memory")
    add = parser.add_argument_group("every N steps").add_argument
    add("--log-freq", default=10, type=at_least(1), help="steps between log lines")
    add("--eval-freq", default=200, type=at_least(1), help="steps between evaluations")
    add("--ckpt-freq", default=50, type=at_least(1), help="steps between checkpoints")
    add("--keep-checkpoints", default=2, type=at_least(1), help="newest checkpoints that stay")
    add("--async-checkpoint", action="store_true", help="train on while it is written")
    add("--log-changed", action="store_true", help="the share of weights a step changes")
    return parser.parse_args()


@record  # writes an exception to the error file of torchrun, which else knows the status only
def main() -> None:
    # torchrun first: it may itself run under srun, and mpirun too.
    for names in (TORCHRUN, MPIRUN, SRUN):
        if all(name in os.environ for name in names):
            places = (os.environ[name] for name in names)
            os.environ |= dict(zip(TORCHRUN, places, strict=True))
            break
    args = get_args()

    # --- setup ---
    # One process per device: rank is the number of this one, world_size how many there are.
    launch.complete_environment()  # alone, where torchrun did not start this process
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])  # among the processes of this machine
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # "cuda" without a number now means this one
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"[%(asctime)s] [{socket.gethostname()}] [rank {rank}] %(message)s",
        handlers=[cli.ProgressHandler()],
    )
    # Products of float32 matrices in TF32 where a GPU has it: float32's range, 3 decimal digits.
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    args.precision = check_precision(args, device)
    if args.precision == "fp32":
        torch.set_float32_matmul_precision("highest")
    logger.info(cli.describe_run(args, device))
    # Slurm warns before it takes a node back. A rank only notes it here: to leave is for all ranks.
    stop_signals = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, frame: stop_signals.append(received))
    # From here on, a collective that not all ranks call waits for --dist-timeout and then fails.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",  # shards may be on the host
        timeout=datetime.timedelta(seconds=args.dist_timeout),
        device_id=device if device.type == "cuda" else None,  # connects to the others at once
    )

    # --- model ---
    config = models.load_config(args.model_name)  # sizes, no weights yet
    tokenizer = models.load_tokenizer(args.tokenizer_name or args.model_name)
    seq_length = models.check_sizes(config, tokenizer, args.seq_length)
    # Drawn on the CPU in float32, so that every kind of device starts from the same weights.
    torch.manual_seed(args.seed)
    # By rank 0. A model on the meta device has shapes and no memory: nobody else holds all of it.
    torch.set_default_device("cpu" if rank == 0 and not args.pretrained else "meta")
    if args.pretrained:
        model = models.load_pretrained(args.model_name, config)
    else:
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=models.causal_attention(config),  # no mask in memory
            dtype=torch.float32,
        )
    for parameter in model.parameters():  # not the buffers: rotary tables need float32
        parameter.data = parameter.data.to(getattr(torch, args.param_dtype))
    torch.set_default_device(None)
    weights = model.state_dict() if rank == 0 and not args.pretrained else {}
    model.to("meta")
    model.tie_weights()  # GPT-2's output layer and embedding were one tensor and are two now
    blocks = models.find_blocks(model)
    if args.precision == "fp8":  # in the blocks only: embedding and output layer stay in bf16
        convert_to_fp8(blocks, seq_length)
    if args.activation_checkpointing != "none":
        # The backward pass of a block computes once more what its forward pass did not keep.
        selective = functools.partial(create_selective_checkpoint_contexts, KEPT)
        keep = {"context_fn": selective} if args.activation_checkpointing == "selective" else {}
        for block in blocks:
            block.forward = functools.partial(recompute, block.forward, use_reentrant=False, **keep)
    # Every rank holds a part of the model, or, with two dimensions, the ranks of a node all of it.
    shape = hosts.nodes_and_ranks() if args.hsdp else (world_size,)
    names = ("replicate", "shard")[-len(shape) :]
    # With two, each has groups of its own, and they too are to take tensors of the host.
    backends = dict.fromkeys(names, dist.get_backend_config()) if args.hsdp else None
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names, backend_override=backends)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    sharding = {"mesh": mesh, "offload_policy": offload if args.cpu_offload else OffloadPolicy()}
    # Gathered in 16 bits, and so are the activations. The shards that AdamW changes and the sums
    # of gradients, over micro-batches and ranks, stay in float32: small terms would be lost.
    sharding["mp_policy"] = MixedPrecisionPolicy(
        param_dtype=HALF.get(args.precision),
        reduce_dtype=getattr(torch, args.reduce_dtype or args.param_dtype),
    )
    # Gathered from all ranks when it is due, one block at a time, and the rest with the root. Every
    # parameter becomes a DTensor, of which a rank holds some rows.
    for block in blocks:
        fully_shard(block, reshard_after_forward=args.reshard_after_forward, **sharding)
    fully_shard(model, **sharding)
    for i in range(len(blocks) if args.prefetch else 0):
        blocks[i].set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + args.prefetch])
        blocks[i].set_modules_to_backward_prefetch(blocks[max(0, i - args.prefetch) : i][::-1])
    whole = sum(parameter.nbytes for parameter in model.parameters())
    mine = sum(parameter.to_local().nbytes for parameter in model.parameters())
    logger.info(f"rank 0 holds {mine:,} of the weights' {whole:,} bytes")
    if args.cpu_offload:  # weights, gradients, two moments, and the copy of all but gradients
        hosts.check_memory((4 + 3 * args.async_checkpoint) * mine, "--cpu-offload")
    home = "cpu" if args.cpu_offload else device
    model.to_empty(device=home)  # before there is an optimizer: it holds on to what it gets
    for module in model.modules():
        if list(module.buffers(recurse=False)):  # rotary tables, which no checkpoint holds
            module.to(device)
            model._init_weights(module)
    if args.compile:
        for block in blocks:  # without the hooks that gather its weights
            block.forward = torch.compile(block.forward)  # in place: a wrapper renames parameters
        model.loss_function = torch.compile(model.loss_function)  # reads all logits several times
    # All ranks begin with the same weights, and every backward pass averages the gradients.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if args.pretrained:
        load_shards(model, args.model_name)  # each rank reads its own part of the files
    else:
        set_model_state_dict(model, weights, options=options)  # tensor by tensor
    del weights  # the only copy of the whole model

    # --- data ---
    # Tokenized once, then read from a cache; processes that come meanwhile wait for a file lock.
    train_data, eval_data = load_blocks(args, tokenizer, seq_length)
    # The global batch is fixed. What does not fit on the devices at once is accumulated.
    micro_batch_size, accumulation = split_batch(args, world_size, len(train_data))
    # A permutation drawn from seed + epoch alone, of which every rank takes its share.
    sampler = ResumableSampler(train_data, num_replicas=world_size, rank=rank, seed=args.seed)
    dataloader = DataLoader(
        train_data,
        batch_size=micro_batch_size,
        sampler=sampler,
        drop_last=True,  # steps of equal size, so that the mean of their losses is a mean
        num_workers=args.num_workers,
        pin_memory=device.type == "cuda",  # a copy to the GPU then runs beside its work
        # Its own: every start of an epoch draws from it, and a resumed run starts once more.
        generator=torch.Generator(),
        worker_init_fn=launch.outlive_stop,  # a signal to stop reaches data workers too
    )
    # Batches of one shape: a compiled model would be compiled again for a smaller last one.
    eval_data = eval_data.pad_to_multiple(micro_batch_size * world_size)
    eval_dataloader = DataLoader(
        eval_data,
        batch_size=micro_batch_size,
        sampler=range(rank, len(eval_data), world_size),
        generator=torch.Generator(),
    )
    steps_per_epoch = len(train_data) // args.global_batch_size
    total_steps = args.max_steps or max(1, round(args.num_epochs * steps_per_epoch))

    # --- optimizer ---
    if args.warmup_steps is None:
        args.warmup_steps = min(100, total_steps // 4)
    # The best rate falls with the width of the model, roughly as its inverse.
    lr = args.lr if args.lr is not None else 1 / config.hidden_size
    if args.zero1:  # moments are twice the weights: each rank needs those of its part only
        logger.info("--zero1 changes nothing: FSDP shards the moments with the weights")
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=lr,
        betas=(0.8, 0.95),  # shorter memories than usual: this run is short, its batches small
        weight_decay=args.weight_decay,
        fused=True,  # one kernel for many parameters, instead of several for each
    )

    def lr_factor(step: int) -> float:
        # A function of the step alone: a resumed run cannot leave the schedule.
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        progress = (step - args.warmup_steps) / max(1, total_steps - 1 - args.warmup_steps)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, progress))) / 2

    lr_scheduler = LambdaLR(optimizer, lr_factor)
    # float16 ends at 65504 and loses what is below 6e-8: gradients are computed this much larger.
    # Where one overflows on any rank, all skip the step and go on with half of the scale.
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    scaler.scale(torch.zeros((), device=home))  # its scale is where gradients are: no late copies

    # --- resume ---
    run_dir = make_run_dir(args.save_dir, launch.experiment_name(args), rank)
    logger.info(f"the run's folder is {run_dir}; {launch.how_to_go_on(run_dir.name)}")
    set_seed(args.seed + rank)  # for dropout: Python, NumPy and PyTorch
    # With the weights, the moments and the schedule: all that the next step depends on.
    state = {"step": 0, "logged_step": 0, "running_loss": torch.zeros((), device=device)}
    state["scaler"] = scaler.state_dict()  # the scale, and how many steps it was right
    # What may not change while a run goes on; the batch size of a device, say, may.
    training = describe_training(args, model, train_data, seq_length, lr, total_steps)
    checkpoint = find_checkpoint(run_dir, training)
    if checkpoint is not None:
        load_checkpoint(checkpoint, model, optimizer, lr_scheduler, state)
        scaler.load_state_dict(state["scaler"])
        logger.info(f"resumed after step {state['step']} of {total_steps}")
    if state["step"] == total_steps:
        logger.info(f"this run is complete: all of its {total_steps} steps are done")
        dist.barrier()
        dist.destroy_process_group()
        return

    # --- train ---
    logger.info(describe_batch(micro_batch_size, world_size, accumulation, seq_length))
    # wandb measures the machine that it runs on: only rank 0's, unless each node has a run.
    node = socket.gethostname() if args.track_nodes and local_rank == 0 else None
    tracker = Tracker(run_dir, {**vars(args), **training}, state["step"], rank, node)
    progress_bar = cli.progress_bar(total_steps, state["step"], rank)
    token_flops = flops_per_token(model, config, seq_length)
    timers = PhaseTimers(device)
    save = AsyncCheckpoints(args.dist_timeout) if args.async_checkpoint else save_checkpoint
    meeting_point = torch.zeros((), device=device)
    batches = None
    model.train()  # dropout on, where a model has it
    while state["step"] < total_steps:
        epoch, epoch_step = divmod(state["step"], steps_per_epoch)
        if batches is None or epoch_step == 0:
            # Another order each epoch; after a stop, from the first sample not trained on.
            sampler.set_epoch(epoch, start=epoch_step * micro_batch_size * accumulation)
            batches = iter(dataloader)
        for micro_batch in range(accumulation):
            with timers("data"):
                batch = next(batches)
                batch = {key: t.to(device, non_blocking=True) for key, t in batch.items()}
            # Gradients add up on each rank; the last backward pass averages the sums over ranks.
            last_backward = micro_batch == accumulation - 1
            # Until then all of them stay on each rank, as large as the whole model.
            model.set_requires_gradient_sync(last_backward or args.reduce_every_backward)
            # To gather a block is to wait for all ranks, in the forward pass too: meet before it.
            with timers("wait"):
                dist.all_reduce(meeting_point)
            with timers("forward"):
                # Each micro-batch is its part of the mean over the global batch.
                loss = model(**batch).loss / accumulation
            if last_backward:
                # The backward pass waits for all ranks: first a small collective, to see how long.
                with timers("wait"):  # in the stream of a GPU, not on the host
                    dist.all_reduce(meeting_point)
            with timers("backward"):
                scaler.scale(loss).backward()  # adds to the gradients of the micro-batches before
            state["running_loss"] += loss.detach()  # stays on the device: .item() would wait for it
        before = [p.to_local().clone() for p in model.parameters() if args.log_changed]
        with timers("update"):
            scaler.unscale_(optimizer)  # before they are clipped: the limit is for true gradients
            # One bad batch must not throw the weights far off. Returns the norm before clipping.
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            scaler.step(optimizer)  # not if any gradient is inf or nan
            scaler.update()
            step_lr = lr_scheduler.get_last_lr()[0]  # what this step used
            lr_scheduler.step()
            optimizer.zero_grad(set_to_none=True)  # the next backward pass then need not add
        state["step"] += 1
        progress_bar.update()
        last = state["step"] == total_steps
        stop = False
        metrics = {"step": state["step"]}
        if state["step"] % args.log_freq == 0 or state["step"] % args.ckpt_freq == 0 or last:
            # Ranks train on equally many tokens, so the mean of their means is the mean.
            state["running_loss"] /= world_size
            dist.all_reduce(state["running_loss"])  # a sum: gloo has no mean
        # The only steps in which the host waits for the device: .item() reads its memory.
        if state["step"] % args.log_freq == 0 or last:
            metrics |= {
                "epoch": epoch,
                "epoch_progress": (epoch_step + 1) / steps_per_epoch,
                "batches_left": steps_per_epoch - epoch_step - 1,
                "loss": state["running_loss"].item() / (state["step"] - state["logged_step"]),
                "lr": step_lr,
                "grad_norm": grad_norm.full_tensor().item(),
                **timers.read(args.global_batch_size * seq_length, world_size, token_flops),
            }
            if scaler.is_enabled():
                metrics["loss_scale"] = scaler.get_scale()
            if args.log_changed:
                metrics["share_changed"] = share_changed(model, before, device)
            metrics |= find_slowest(metrics["time/wait"])
            # A signal reaches each rank in another step, or one rank only. Here all come to the
            # same end: a rank that left alone would leave the others in a collective.
            warned = torch.tensor(len(stop_signals), device=device)
            dist.all_reduce(warned)
            stop = warned.item() > 0 and not last
            state["logged_step"] = state["step"]
            state["running_loss"].zero_()
        if state["step"] % args.eval_freq == 0 or last:
            with timers("evaluate"):
                metrics |= evaluate(model, eval_dataloader, device, eval_data.tokens_per_byte)
        if len(metrics) > 1:
            tracker.log(metrics)
            cli.show_metrics(logger, progress_bar, metrics)
        if state["step"] % args.ckpt_freq == 0 or last or stop:
            state["scaler"] = scaler.state_dict()
            with timers("save"):  # a kill in here leaves the checkpoint before it in force
                save(
                    run_dir, model, optimizer, lr_scheduler, state, training, args.keep_checkpoints
                )
        if stop:
            break
    progress_bar.close()
    if args.async_checkpoint:
        save.finish()  # what is not complete when the process ends is lost
    tracker.finish()
    if stop:
        status = launch.ask_for_requeue(run_dir, state["step"])  # for the job script
        del batches  # ends the data workers
        dist.barrier()
        dist.destroy_process_group()
        sys.exit(status)
    sample = sample_text(model, tokenizer, device, args.dataset_name, seq_length, args.seed)
    logger.info(launch.describe_end(run_dir, metrics, *sample))
    dist.barrier()  # a rank that is gone too early looks like a failure to those still at work
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model, dataloader: DataLoader, device: torch.device, tokens_per_byte: float) -> dict:
    """Return the mean loss in nats per token, perplexity and bits per byte; counts tokens once."""
    model.eval()  # no dropout
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, of tokens
    for batch in dataloader:
        batch = {key: t.to(device, non_blocking=True) for key, t in batch.items()}
        n_tokens = (batch["labels"][:, 1:] != -100).sum()
        loss_sum = torch.where(n_tokens > 0, model(**batch).loss * n_tokens, 0)  # no 0 / 0
        total += torch.stack((loss_sum, n_tokens))
    dist.all_reduce(total)  # sums, not means: ranks may hold different numbers of tokens
    model.train()
    loss = total[0] / total[1]
    return {
        "eval_loss": loss.item(),
        "perplexity": loss.exp().item(),
        "bits_per_byte": loss.item() / math.log(2) * tokens_per_byte,  # for any vocabulary
    }


@torch.no_grad()
def share_changed(model, before: list[torch.Tensor], device: torch.device) -> float:
    """Return the share of all weights that are not what they were before the step."""
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    for old, parameter in zip(before, model.parameters(), strict=True):
        counts[0] += (parameter.to_local() != old).sum().to(device)
        counts[1] += old.numel()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    launch.run(main)

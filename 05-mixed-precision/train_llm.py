"""Train a causal language model in mixed precision, sharded over the devices of several nodes.

bash 05-mixed-precision/launch.sh
make variant  # lists more options, which are small diffs of this script
"""

import argparse
import datetime
import gc
import logging
import math
import os
import signal
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from common import cli, launch
from common.checkpoint import Checkpoints, fixed_settings
from common.cli import at_least, between
from common.data import ResumableSampler, load_sequences
from common.errors import RunError
from common.gradients import clip_grad_norm
from common.inputs import models
from common.ranks import check_arguments
from common.timers import PhaseTimers, find_straggler, flops_per_token
from common.tracker import Tracker, make_run_dir

logger = logging.getLogger("train_llm")


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__)
    add = parser.add_argument_group("run").add_argument
    add("-e", "--experiment-name", help="name of the run (default: model, data set and time)")
    add("--save-dir", default="outputs", help="folder that holds the run folders")
    add("--checkpoint-dir", help="folder or address of checkpoints (default: the run's folder)")
    add("--seed", default=0, type=at_least(0), help="seed for weights, data order and dropout")
    add("--dist-timeout", default=600, type=at_least(1), help="seconds to wait for other ranks")
    add = parser.add_argument_group("data").add_argument
    add("-d", "--dataset-name", default="python-stdlib", help="preset, file, folder or hub id")
    add("--dataset-subset", help="configuration of a hub data set")
    add("--text-column", help="column that holds the text (default: text)")
    add("-s", "--seq-length", type=at_least(2), help="tokens (default: the model's limit, <= 1024)")
    add = parser.add_argument_group("model").add_argument
    add("-m", "--model-name", default="gpt2-tiny", help="preset, folder or hub id")
    add("--tokenizer-name", help="folder or hub id (default: the model's tokenizer)")
    add("--pretrained", action="store_true", help="start from the model's pretrained weights")
    add("--compile", action="store_true", help="fuse kernels with torch.compile")
    add("--activation-checkpointing", action="store_true", help="recompute activations, save less")
    precisions = ["fp32", "tf32", "bf16"]
    add("--precision", default="bf16", choices=precisions, help="of the matmuls")
    add = parser.add_argument_group("optimize").add_argument
    add("-b", "--batch-size", default=8, type=at_least(1), help="limit per device and micro-batch")
    add("--global-batch-size", default=24, type=at_least(1), help="sequences per step, all devices")
    add("--lr", type=at_least(0.0), help="peak (default: 1 / model width, or 5e-5 if pretrained)")
    add("--beta1", default=0.8, type=between(0.0, 0.999), help="decay of AdamW's mean gradient")
    add("--warmup-steps", type=at_least(0), help="steps (default: a quarter of all, <= 100)")
    add("--weight-decay", default=0.1, type=at_least(0.0), help="AdamW's weight decay")
    add(
        "--max-grad-norm",
        default=1.0,
        type=between(1e-6, math.inf),
        help="clip above this; inf: never",
    )
    add("--num-epochs", default=0.6, type=at_least(1e-6), help="passes over the data")
    add("--max-steps", type=at_least(1), help="number of steps; overrides --num-epochs")
    add = parser.add_argument_group("every N steps").add_argument
    add("--log-freq", default=10, type=at_least(1), help="steps between log lines")
    add("--eval-freq", default=200, type=at_least(1), help="steps between evaluations")
    add("--eval-sequences", default=512, type=at_least(1), help="limit for one evaluation")
    add(
        "--ckpt-freq",
        default=50,
        type=at_least(1),
        help="steps between checkpoints, of those that log",
    )
    add("--keep-checkpoints", default=2, type=at_least(1), help="how many checkpoints to keep")
    return parser.parse_args()


@record  # lets torchrun report the exception of the rank that failed first
def main() -> None:
    launch.prepare_environment()  # sets RANK and the like from the variables of srun or mpirun
    args = get_args()

    # --- setup ---
    # One process drives one device. Its number is the rank; world_size is how many there are.
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])  # the rank within this machine
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", launch.gpu_of(local_rank))
        torch.cuda.set_device(device)  # "cuda" without a number means this GPU from here on
    # "high" lets GPUs multiply float32 matrices in TF32: its range, but about 3 decimal digits.
    has_bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if args.precision == "bf16" and not has_bf16:
        raise RunError("This GPU does not have bfloat16: give --precision fp32.")
    exact = device.type == "cpu" or args.precision == "fp32"
    torch.set_float32_matmul_precision("highest" if exact else "high")
    cli.start_log(args, device)
    # Slurm sends a signal before it ends a job. Only note it: all ranks have to stop together.
    stop_signals = []
    for number in launch.signals_to_handle():  # SIGTERM, SIGUSR1 and, without nohup, SIGHUP
        signal.signal(number, lambda received, frame: stop_signals.append(received))
    # If a rank does not join a collective, the others fail after --dist-timeout seconds.
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=args.dist_timeout),
        device_id=device if device.type == "cuda" else None,  # NCCL connects now, not later
    )
    check_arguments(args)  # each node has its own command line: fail if they differ

    # --- model ---
    tokenizer = models.load_tokenizer(args.tokenizer_name or args.model_name)
    config = models.load_config(args.model_name, tokenizer)  # sizes only, no weights
    args.seq_length = models.sequence_length(config, args.seq_length)
    torch.manual_seed(args.seed)
    # Weights are drawn on the CPU in float32, so every kind of device starts from the same model.
    # Only rank 0 does so. All ranks shard a copy without weights: it has shapes, but no memory.
    if rank > 0:
        model = None
    elif args.pretrained:
        model = models.load_pretrained(args.model_name, config)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    full_model = model
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # In transformers' causal models, the first ModuleList has the layers.
    layers = next((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), None)
    if layers is None:
        raise RunError(f"{args.model_name} has no list of layers to shard: give another -m.")
    if args.activation_checkpointing:  # a layer's backward pass repeats its forward pass
        for layer in layers:
            layer.forward = partial(recompute, layer.forward, use_reentrant=False)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    sharding = {"mesh": mesh}
    # Each rank stores some rows of each parameter, as a DTensor. FSDP all-gathers one layer at a
    # time when it is needed, and everything outside of the layers with the root module.
    # FSDP casts weights to 16 bits when it gathers them, so activations have 16 bits as well.
    sharding["mp_policy"] = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if args.precision == "bf16" else None,
        # AdamW's shards keep float32.
        # Gradients are added up in float32, too, so that small terms are not lost.
        reduce_dtype=torch.float32,
    )
    for layer in layers:
        fully_shard(layer, **sharding)
    fully_shard(model, **sharding)
    total_bytes = sum(parameter.nbytes for parameter in model.parameters())
    local_bytes = sum(parameter.to_local().nbytes for parameter in model.parameters())
    logger.info(f"rank 0 holds {local_bytes:,} of the weights' {total_bytes:,} bytes")
    # Allocate the shards. Then rank 0 broadcasts the weights, one tensor after the other, and each
    # rank keeps its part. Buffers are not sharded, and some are in no state dict (rotary tables).
    model.to_empty(device=device)
    weights = full_model.state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    for name, buffer in list(model.named_buffers()):
        *path, leaf = name.split(".")
        source = full_model.get_buffer(name) if rank == 0 else buffer
        buffer = source.to(device, copy=True)
        dist.broadcast(buffer, src=0)
        setattr(model.get_submodule(".".join(path)), leaf, buffer)
    del weights, full_model  # the only copy of the whole model
    if args.compile:
        for layer in layers:  # forward only, so FSDP's hooks stay outside of the compiled code
            layer.forward = torch.compile(layer.forward)
        model.loss_function = torch.compile(model.loss_function)

    # --- data ---
    # Tokenized once, then read from a cache. A file lock makes other processes wait meanwhile.
    train_data, eval_data = load_sequences(args, tokenizer)
    # The global batch is fixed, and the devices share it equally.
    share, rest = divmod(args.global_batch_size, world_size)
    if rest or args.global_batch_size > len(train_data):
        fits = world_size * max(1, min(share, len(train_data) // world_size))
        raise RunError(
            f"--global-batch-size {args.global_batch_size} must be a multiple of {world_size} (the "
            f"devices), at most {len(train_data)} (the training sequences), for example {fits}."
        )
    # What does not fit on the devices at once is accumulated in equal micro-batches.
    limit = min(share, args.batch_size)
    micro_batch_size = max(size for size in range(1, limit + 1) if share % size == 0)
    if 2 * micro_batch_size <= limit:  # for example with a prime share
        logger.warning(
            f"micro-batches have only {micro_batch_size} sequences, not {limit}, because they must "
            f"divide the {share} sequences of each device: another --global-batch-size is faster"
        )
    accumulation = share // micro_batch_size
    # The order depends on seed and epoch only. Each rank takes every world_size-th sample of it.
    sampler = ResumableSampler(train_data, num_replicas=world_size, rank=rank, seed=args.seed)
    dataloader = DataLoader(
        train_data,
        batch_size=micro_batch_size,
        sampler=sampler,
        drop_last=True,  # all micro-batches have the same size, so their losses can be averaged
        pin_memory=device.type == "cuda",  # lets the copy to the GPU overlap with computation
        # An iterator draws a seed when it starts. Its own generator keeps torch's RNG unchanged.
        generator=torch.Generator(),
    )
    # All batches have the same shape: torch.compile would recompile for a smaller last batch.
    eval_data = eval_data.sample(args.eval_sequences).pad_to_multiple(micro_batch_size * world_size)
    eval_dataloader = DataLoader(
        eval_data,
        batch_size=micro_batch_size,
        sampler=range(rank, len(eval_data), world_size),
        generator=torch.Generator(),
    )
    steps_per_epoch = len(train_data) // args.global_batch_size
    total_steps = args.max_steps or max(1, round(args.num_epochs * steps_per_epoch))
    # Only steps that are logged are saved, so that no checkpoint needs a part of a mean loss.
    args.ckpt_freq = math.ceil(args.ckpt_freq / args.log_freq) * args.log_freq

    # --- optimizer ---
    if args.warmup_steps is None:
        args.warmup_steps = min(100, total_steps // 4)
    if args.lr is None:
        # Wider models need a smaller learning rate: 1 / width is a rule of thumb. Pretrained
        # weights need a much smaller one.
        args.lr = 5e-5 if args.pretrained else 1 / config.hidden_size
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=args.lr,
        betas=(args.beta1, 0.95),  # below the usual 0.9 and 0.999, because this run is short
        weight_decay=args.weight_decay,
        fused=True,  # one kernel updates many parameters
    )

    def lr_factor(step: int) -> float:
        # Linear warm-up, then a cosine down to 10%. It depends on the step only, also on resume.
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        progress = (step - args.warmup_steps) / max(1, total_steps - 1 - args.warmup_steps)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, progress))) / 2

    lr_scheduler = LambdaLR(optimizer, lr_factor)

    # --- resume ---
    run_dir = make_run_dir(args)  # logs its path
    torch.manual_seed(args.seed + rank)  # for dropout
    # Saved with the weights, the optimizer and the schedule: all that the next step depends on.
    state = {"step": 0}
    # What must not change when a run resumes. By now, args has all values that the training uses.
    settings = fixed_settings(
        args=args,
        model=model,
        train_data=train_data,
        total_steps=total_steps,
    )
    checkpoints = Checkpoints(args, run_dir, settings)
    if checkpoints.load(model, optimizer, lr_scheduler, state):
        logger.info(f"resumed after step {state['step']} of {total_steps}")
    if state["step"] == total_steps:
        logger.info(
            "all steps of this run are done; to train longer, start a new run: give another -e"
        )

    # --- train ---
    tokens_per_step = args.global_batch_size * args.seq_length
    logger.info(
        f"each step: {micro_batch_size} sequences x world size {world_size} x accumulation "
        f"{accumulation} = {args.global_batch_size} sequences = {tokens_per_step} tokens"
    )
    tracker = Tracker(run_dir, {**vars(args), **settings}, state["step"])
    progress_bar = cli.progress("training", total=total_steps, initial=state["step"])
    token_flops = flops_per_token(model, config, args.seq_length)
    timers = PhaseTimers(device)
    logged_step = state["step"]
    running_loss = torch.zeros((), device=device)  # sum of the losses since that step
    barrier_tensor = torch.zeros((), device=device)
    batches = None
    stop = False
    model.train()  # turns dropout on, if the model has any
    # Python's garbage collector would pause some steps for up to 0.4 s, and with several devices a
    # pause of one stops them all. From here on it runs only with a checkpoint, and it ignores all
    # objects that exist now.
    gc.freeze()
    gc.disable()
    while state["step"] < total_steps and not stop:
        epoch, epoch_step = divmod(state["step"], steps_per_epoch)
        if batches is None or epoch_step == 0:
            # Each epoch has its own order. A resumed run skips the samples it has trained on.
            sampler.set_epoch(epoch, start=epoch_step * micro_batch_size * accumulation)
            batches = iter(dataloader)

        # Waiting for other ranks is only measured in steps that are logged.
        will_log = (state["step"] + 1) % args.log_freq == 0 or state["step"] + 1 == total_steps

        # The training step: forward and backward for each micro-batch, then clip and update.
        for micro_batch in range(accumulation):
            with timers("data"):
                batch = next(batches)
                batch = {key: t.to(device, non_blocking=True) for key, t in batch.items()}
            # Each rank adds up whole gradients. The last backward pass averages and shards them.
            last_backward = micro_batch == accumulation - 1
            model.set_requires_gradient_sync(last_backward)
            if will_log:  # with FSDP, the forward pass waits for all ranks, too
                with timers("wait"):
                    dist.all_reduce(barrier_tensor)
            with timers("forward"):
                # The losses of the micro-batches add up to the mean over the global batch.
                loss = model(**batch).loss / accumulation
            if last_backward and will_log:
                # The backward pass waits for all ranks. An all-reduce before it times the wait.
                with timers("wait"):
                    dist.all_reduce(barrier_tensor)
            with timers("backward"):
                loss.backward()  # adds to the gradients of earlier micro-batches
            running_loss += loss.detach()  # .item() would make the host wait for the GPU
        with timers("update"):
            # Limits what one bad batch can do to the weights. Returns the norm before clipping.
            grad_norm = clip_grad_norm(model, args.max_grad_norm)
            optimizer.step()
            step_lr = lr_scheduler.get_last_lr()[0]  # the learning rate of this step
            lr_scheduler.step()
            optimizer.zero_grad(set_to_none=True)

        # Once in a while: log, evaluate, save.
        state["step"] += 1
        progress_bar.update()
        last = state["step"] == total_steps
        metrics = {"step": state["step"]}
        # In these steps the host waits for the GPU, because it reads numbers from its memory.
        if state["step"] % args.log_freq == 0 or last:
            # All ranks train on equally many tokens, so the mean loss is the mean of their means.
            running_loss /= world_size
            dist.all_reduce(running_loss)  # the sum of the ranks' parts
            # A run that has diverged stops here, before it replaces a checkpoint.
            if not (running_loss + grad_norm).isfinite():
                raise RunError(
                    f"The training has diverged: at step {state['step']} the loss or the gradient "
                    f"norm is not finite. The run can be resumed from step {checkpoints.step}, but "
                    "would diverge again: start a new one with a smaller --lr."
                )
            steps = state["step"] - logged_step
            metrics |= {
                "epoch": epoch,
                "loss": running_loss.item() / steps,
                "lr": step_lr,
                "grad_norm": grad_norm.item(),
                **timers.read(steps, tokens_per_step, world_size, token_flops),
            }
            metrics |= find_straggler(metrics["time/wait"])
            launch.restore_stop_handlers()  # with --compile, Triton's compiler has replaced them
            # A signal can reach only some ranks, or reach them in different steps. If any rank has
            # received one, all ranks stop here. A rank that stopped alone would block the others.
            stop_requests = torch.tensor(len(stop_signals), device=device)
            dist.all_reduce(stop_requests)
            stop = stop_requests.item() > 0 and not last
            logged_step = state["step"]
            running_loss.zero_()
        if state["step"] % args.eval_freq == 0 or last:
            with timers("evaluate"):
                metrics |= evaluate(model, eval_dataloader, device, eval_data.tokens_per_byte)
        if len(metrics) > 1:
            tracker.log(metrics)  # to metrics.jsonl, wandb and the log
        if state["step"] % args.ckpt_freq == 0 or last or stop:
            with timers("save"):  # if the process is killed here, the previous checkpoint is valid
                gc.collect()
                # The state dicts hold DTensors: each rank writes the rows that it has. A run on
                # a different number of ranks reads the rows that it needs.
                checkpoints.save(model, optimizer, lr_scheduler, state)
    progress_bar.close()
    tracker.finish()
    logger.info(f"to generate text with the model: python 01-single-gpu/generate.py {run_dir}")
    status = launch.ask_for_requeue(run_dir, state["step"]) if stop else 0  # tells the job script
    dist.barrier()  # a rank that exits early would look like a failure to the other ranks
    dist.destroy_process_group()
    sys.exit(status)


@torch.no_grad()
def evaluate(model, dataloader: DataLoader, device: torch.device, tokens_per_byte: float) -> dict:
    """Return the loss in nats per token, the perplexity and the bits per byte of all tokens."""
    model.eval()  # turns dropout off
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, number of tokens
    for batch in cli.progress("evaluation", dataloader):
        batch = {key: t.to(device, non_blocking=True) for key, t in batch.items()}
        n_tokens = (batch["labels"][:, 1:] != -100).sum()  # padding has the label -100
        loss_sum = torch.where(n_tokens > 0, model(**batch).loss * n_tokens, 0)
        total += torch.stack((loss_sum, n_tokens))
    dist.all_reduce(total)  # ranks may have different numbers of tokens, so sum before dividing
    model.train()
    loss = total[0] / total[1]
    return {
        "eval_loss": loss.item(),
        "perplexity": loss.exp().item(),
        "bits_per_byte": loss.item() / math.log(2) * tokens_per_byte,  # comparable for tokenizers
    }


if __name__ == "__main__":
    launch.run(main)

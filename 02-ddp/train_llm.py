"""Train a causal language model on all devices of one machine.

torchrun --standalone --nproc-per-node 2 02-ddp/train_llm.py
"""

import argparse
import contextlib
import datetime
import functools
import logging
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, set_seed

from common import cli, launch, models
from common.checkpoint import load_checkpoint, save_checkpoint
from common.cli import at_least
from common.data import ResumableSampler, describe_batch, load_blocks, split_batch
from common.record import describe_training, find_checkpoint
from common.sample import sample_text
from common.timers import PhaseTimers, flops_per_token
from common.tracker import Tracker, make_run_dir

logger = logging.getLogger("train_llm")


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__)
    add = parser.add_argument_group("run").add_argument
    add("-e", "--experiment-name", help="name of the run; generated if absent")
    add("--save-dir", default="outputs", help="folder that holds the runs' folders")
    add("--seed", default=0, type=at_least(0), help="of the weights, the order, the dropout")
    add("--dist-timeout", default=600, type=at_least(1), help="seconds to wait for other ranks")
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
    add = parser.add_argument_group("every N steps").add_argument
    add("--log-freq", default=10, type=at_least(1), help="steps between log lines")
    add("--eval-freq", default=200, type=at_least(1), help="steps between evaluations")
    add("--ckpt-freq", default=50, type=at_least(1), help="steps between checkpoints")
    add("--keep-checkpoints", default=2, type=at_least(1), help="newest checkpoints that stay")
    return parser.parse_args()


@record  # writes an exception to the error file of torchrun, which else knows the status only
def main() -> None:
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
        format=f"[%(asctime)s] [rank {rank}] %(message)s",
        handlers=[cli.ProgressHandler()],
    )
    # Products of float32 matrices in TF32 where a GPU has it: float32's range, 3 decimal digits.
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    logger.info(cli.describe_run(args, device))
    # From here on, a collective that not all ranks call waits for --dist-timeout and then fails.
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=args.dist_timeout),
        device_id=device if device.type == "cuda" else None,  # connects to the others at once
    )

    # --- model ---
    config = models.load_config(args.model_name)  # sizes, no weights yet
    tokenizer = models.load_tokenizer(args.tokenizer_name or args.model_name)
    seq_length = models.check_sizes(config, tokenizer, args.seq_length)
    # Drawn on the CPU in float32, so that every kind of device starts from the same weights.
    torch.manual_seed(args.seed)
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
    model.to(device)  # before there is an optimizer: it holds on to what it gets
    if args.compile:
        model.compile()  # in place: a wrapper renames parameters
    # All ranks begin with the same weights, and every backward pass averages the gradients.
    ddp_model = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
    )

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
    adamw = torch.optim.AdamW
    if args.zero1:  # moments are twice the weights: each rank needs those of its part only
        adamw = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    optimizer = adamw(
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

    # --- resume ---
    run_dir = make_run_dir(args.save_dir, launch.experiment_name(args), rank)
    logger.info(f"the run's folder is {run_dir}; {launch.how_to_go_on(run_dir.name)}")
    set_seed(args.seed + rank)  # for dropout: Python, NumPy and PyTorch
    # With the weights, the moments and the schedule: all that the next step depends on.
    state = {"step": 0, "logged_step": 0, "running_loss": torch.zeros((), device=device)}
    # What may not change while a run goes on; the batch size of a device, say, may.
    training = describe_training(args, model, train_data, seq_length, lr, total_steps)
    checkpoint = find_checkpoint(run_dir, training)
    if checkpoint is not None:
        load_checkpoint(checkpoint, model, optimizer, lr_scheduler, state)
        logger.info(f"resumed after step {state['step']} of {total_steps}")
    if state["step"] == total_steps:
        logger.info(f"this run is complete: all of its {total_steps} steps are done")
        del ddp_model
        dist.barrier()
        dist.destroy_process_group()
        return

    # --- train ---
    logger.info(describe_batch(micro_batch_size, world_size, accumulation, seq_length))
    tracker = Tracker(run_dir, {**vars(args), **training}, state["step"], rank)
    progress_bar = cli.progress_bar(total_steps, state["step"], rank)
    token_flops = flops_per_token(model, config, seq_length)
    timers = PhaseTimers(device)
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
            sync = contextlib.nullcontext if last_backward else ddp_model.no_sync
            with timers("forward"), sync():
                # Each micro-batch is its part of the mean over the global batch.
                loss = ddp_model(**batch).loss / accumulation
            with timers("backward"):
                loss.backward()  # adds to the gradients of the micro-batches before
            state["running_loss"] += loss.detach()  # stays on the device: .item() would wait for it
        with timers("update"):
            # One bad batch must not throw the weights far off. Returns the norm before clipping.
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            step_lr = lr_scheduler.get_last_lr()[0]  # what this step used
            lr_scheduler.step()
            optimizer.zero_grad(set_to_none=True)  # the next backward pass then need not add
        state["step"] += 1
        progress_bar.update()
        last = state["step"] == total_steps
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
                "grad_norm": grad_norm.item(),
                **timers.read(args.global_batch_size * seq_length, world_size, token_flops),
            }
            state["logged_step"] = state["step"]
            state["running_loss"].zero_()
        if state["step"] % args.eval_freq == 0 or last:
            with timers("evaluate"):
                metrics |= evaluate(model, eval_dataloader, device, eval_data.tokens_per_byte)
        if len(metrics) > 1:
            tracker.log(metrics)
            cli.show_metrics(logger, progress_bar, metrics)
        if state["step"] % args.ckpt_freq == 0 or last:
            with timers("save"):  # a kill in here leaves the checkpoint before it in force
                save_checkpoint(
                    run_dir, model, optimizer, lr_scheduler, state, training, args.keep_checkpoints
                )
    progress_bar.close()
    tracker.finish()
    sample = sample_text(model, tokenizer, device, args.dataset_name, seq_length, args.seed)
    logger.info(launch.describe_end(run_dir, metrics, *sample))
    del ddp_model
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


if __name__ == "__main__":
    launch.run(main)

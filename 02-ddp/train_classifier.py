"""Train a classifier of documents on all devices of one machine, and report how it does on a test.

torchrun --standalone --nproc-per-node 2 02-ddp/train_classifier.py
"""

import argparse
import contextlib
import datetime
import logging
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import set_seed

from common import cli, distributed, models
from common.cli import at_least
from common.data import IGNORED
from common.distributed import gather, rank_and_world_size
from common.timers import PhaseTimers
from common.tracker import Tracker, make_run_dir

from classification import results
from classification.batches import PADDINGS, Collator, GroupedSampler, batches_of_rank, encode
from classification.examples import Examples, load_examples

logger = logging.getLogger("train_classifier")


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
    add("--text-column", help="column to classify by (if absent: text)")
    add("--label-column", help="column with the class (if absent: label)")
    add("-s", "--seq-length", type=at_least(2), help="most tokens (if absent: positions, <= 1024)")
    add("--padding", default="grouped", choices=PADDINGS, help="of a batch's shorter texts")
    add = parser.add_argument_group("model").add_argument
    add("-m", "--model-name", default="gpt2-tiny", help="preset, folder or hub id")
    add("--tokenizer-name", help="folder or hub id (if absent: the model's)")
    add("--pretrained", action="store_true", help="start from the model's own weights")
    add("--head", default="linear", choices=["linear", "none"], help="none: predict label words")
    add("--prompt", default="{text}\nlabel:", help="around the text, with --head none")
    add = parser.add_argument_group("optimize").add_argument
    add("-b", "--batch-size", default=8, type=at_least(1), help="most examples per device at once")
    add("--global-batch-size", default=24, type=at_least(1), help="examples per step, all devices")
    add("--lr", type=at_least(0.0), help="peak rate (if absent: by the model)")
    add("--warmup-steps", type=at_least(0), help="steps (if absent: a tenth)")
    add("--weight-decay", default=0.1, type=at_least(0.0), help="AdamW's, multiplied by the rate")
    add("--max-grad-norm", default=1.0, type=cli.above_zero, help="clip above; inf: never")
    add("--num-epochs", default=3, type=at_least(1), help="passes over the data")
    add("--max-steps", type=at_least(1), help="steps in all, instead of epochs")
    add("--log-freq", default=10, type=at_least(1), help="steps between log lines")
    return parser.parse_args()


@record  # writes an exception to the error file of torchrun, which else knows the status only
def main() -> None:
    args = get_args()

    # --- setup ---
    # One process per device: rank is the number of this one, world_size how many there are.
    distributed.prepare_environment()  # alone, where torchrun did not start this process
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
    model_class = results.model_class(args.head, config)
    classes, splits = load_examples(
        args.dataset_name, args.dataset_subset, args.text_column, args.label_column
    )
    config.id2label = dict(enumerate(classes))  # the head has an output for each
    config.label2id = {name: number for number, name in enumerate(classes)}
    # GPT-2 was never trained on padding and has no token for it. Any will do on the right: a causal
    # model does not look there, and positions count from the text's first token.
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    tokenizer.model_max_length = seq_length  # who loads the folder cuts texts where training did
    prompt = args.prompt if args.head == "none" else None
    words = encode(splits, classes, tokenizer, seq_length, prompt)
    results.check_same(classes, splits)
    options = {"attn_implementation": models.causal_attention(config), "dtype": torch.float32}
    # Drawn on the CPU in float32, so that every kind of device starts from the same weights.
    torch.manual_seed(args.seed)
    if args.pretrained:  # a head that the folder lacks is drawn
        model = results.load_weights(model_class, args.model_name, config, options)
    else:
        model = model_class.from_config(config, **options)
    # The head reads a text's last token: the last one that is not this.
    model.config.pad_token_id = tokenizer.pad_token_id
    model.to(device)  # before there is an optimizer: it holds on to what it gets
    # All ranks begin with the same weights, and every backward pass averages the gradients.
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    # --- data ---
    train_data = splits["train"]
    # The same global batches for every number of ranks. No example is repeated or left out.
    sampler = GroupedSampler(train_data.lengths(), args, world_size, rank)
    width = seq_length if args.padding == "fixed" else None  # None: of the batch's longest text
    dataloader = DataLoader(
        train_data,
        batch_sampler=sampler,
        collate_fn=Collator(tokenizer.pad_token_id, width, words),
        pin_memory=device.type == "cuda",  # a copy to the GPU then runs beside its work
    )
    # Without a head, an example is scored with each label: that makes so many times the rows.
    eval_collator = Collator(tokenizer.pad_token_id, words=words, every_class=True)
    evaluation = eval_collator, max(1, args.batch_size // max(1, len(words))), device
    steps_per_epoch = len(sampler.steps)
    total_steps = args.max_steps or args.num_epochs * steps_per_epoch
    logger.info(results.describe_data(classes, splits, sampler, seq_length))

    # --- optimizer ---
    # Weights that know the language must not be thrown far off; drawn ones have a way to go.
    default_lr = 5e-5 if args.pretrained else 0.25 / config.hidden_size
    lr = args.lr if args.lr is not None else default_lr
    warmup = total_steps // 10 if args.warmup_steps is None else args.warmup_steps
    optimizer = AdamW(model.parameters(), lr, weight_decay=args.weight_decay, fused=True)
    up, down = max(1, warmup), max(1, total_steps - warmup)  # to the peak, from there to 0
    lr_scheduler = LambdaLR(optimizer, lambda n: min((n + 1) / up, (total_steps - n) / down))

    # --- train ---
    name = results.check_name(distributed.experiment_name(args), args.save_dir)  # for a new run
    run_dir = make_run_dir(args.save_dir, name, rank)
    logger.info(f"the run's folder is {run_dir}")
    set_seed(args.seed + rank)  # for dropout: Python, NumPy and PyTorch
    tracker = Tracker(run_dir, {**vars(args), "lr": lr, "total_steps": total_steps}, 0, rank)
    progress_bar = cli.progress_bar(total_steps, 0, rank)
    timers = PhaseTimers(device)
    step, logged_step, best_epoch, best_loss = 0, 0, 0, math.nan
    # Losses, right predictions; terms of the loss, examples, tokens: of this rank, since the log.
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    model.train()  # dropout on, where a model has it
    while step < total_steps:
        epoch, epoch_step = divmod(step, steps_per_epoch)
        if epoch_step == 0:
            sampler.set_epoch(epoch)  # another order each epoch
            batches = iter(dataloader)
            epoch_sums = torch.zeros_like(sums)
        # Every rank knows the whole global batch, and so what the sum of its losses is divided by.
        # A mean of the ranks' means is another number where their parts are not equal.
        global_batch = sampler.steps[epoch_step]
        n_terms = sum(train_data.counts[index] for index in global_batch)
        micro_batches = sampler.micro_batches(global_batch)
        for micro_batch in range(micro_batches):
            with timers("data"):
                batch = next(batches)
                batch = {key: t.to(device, non_blocking=True) for key, t in batch.items()}
            # Gradients add up on each rank; the last backward pass averages the sums over ranks.
            sync = contextlib.nullcontext if micro_batch == micro_batches - 1 else ddp_model.no_sync
            with timers("forward"), sync():
                losses, predictions = score(ddp_model, batch)
                # Times the ranks, because DDP divides by them. A rank that has no example left has
                # a filler, with a loss of 0: its all-reduce must come as often as the others'.
                loss = losses.sum() * world_size / n_terms
            with timers("backward"):
                loss.backward()
            right = (predictions == batch["labels"]) & (batch["index"] >= 0)
            sums += torch.cat((torch.stack((losses.detach().sum(), right.sum())), batch["n"]))
        with timers("update"):
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            step_lr = lr_scheduler.get_last_lr()[0]  # what this step used
            lr_scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        progress_bar.update()
        end_of_epoch = step % steps_per_epoch == 0 or step == total_steps
        metrics = {"step": step}
        if step % args.log_freq == 0 or end_of_epoch:
            dist.all_reduce(sums)
            epoch_sums += sums
            metrics |= {
                "epoch": epoch,
                "loss": (sums[0] / sums[2]).item(),
                "lr": step_lr,
                "grad_norm": grad_norm.item(),
                **timers.read(sums[4].item() / (step - logged_step), world_size, 0.0),
                "mfu": None,  # its formula is for texts of one length
            }
            logged_step = step
            sums.zero_()
        if end_of_epoch:
            with timers("evaluate"):
                eval_loss, accuracy, _ = evaluate(model, splits["validation"], *evaluation)
            metrics |= {
                "train_loss": (epoch_sums[0] / epoch_sums[2]).item(),
                "train_accuracy": (epoch_sums[1] / epoch_sums[3]).item(),
                "eval_loss": eval_loss,
                "eval_accuracy": accuracy,
            }
            if eval_loss < best_loss or math.isnan(best_loss):  # none yet, or it was none
                best_loss, best_epoch = eval_loss, epoch + 1
                if rank == 0:
                    with timers("save"):
                        results.save_model(model, tokenizer, run_dir / "best")
        if len(metrics) > 1:
            tracker.log(metrics)
            cli.show_metrics(logger, progress_bar, metrics)
        if end_of_epoch:
            logger.info(results.describe_epoch(epoch + 1, metrics, best_epoch))
    progress_bar.close()
    tracker.finish()

    # --- test report ---
    del ddp_model
    dist.barrier()  # rank 0 may still be writing it
    model = results.load_weights(model_class, f"{run_dir}/best", None, options).to(device)
    loss, _, predictions = evaluate(model, splits["test"], *evaluation)
    dist.barrier()  # a rank that is gone too early looks like a failure to those still at work
    dist.destroy_process_group()  # what follows may take longer than others wait in a collective
    if rank == 0:
        report = results.write_report(run_dir, classes, splits, predictions, loss, best_epoch)
        logger.info(f"test of {run_dir}/best, loss {loss:.4f}:\n\n{report}")


def score(model: nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each row its loss, in nats, and what is predicted: the number of a class.

    Without a head, the loss is that of the label's words, and what is predicted is the row's label
    if each of its tokens is the likeliest one, else -1.
    """
    if "targets" not in batch:
        logits = model(input_ids=batch["input_ids"]).logits  # [rows, classes], at the last token
        return cross_entropy(logits, batch["labels"], reduction="none"), logits.argmax(dim=1)
    # [rows, columns, vocabulary]: only where words are predicted, for the rest is large.
    logits = model(input_ids=batch["input_ids"], logits_to_keep=batch["columns"]).logits
    targets = batch["targets"]
    losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(dim=1)
    wrong = ((logits.argmax(dim=2) != targets) & (targets != IGNORED)).any(dim=1)
    rows_per_label = len(targets) // len(batch["labels"])
    return losses, batch["labels"].repeat_interleave(rows_per_label).masked_fill(wrong, -1)


@torch.no_grad()
def evaluate(model, examples: Examples, collator: Collator, batch_size: int, device) -> tuple:
    """Return loss, accuracy and the predicted classes, in order; all ranks must call this.

    The only collective is at the end: some ranks have a batch more, and nobody waits for them.
    """
    rank, world_size = rank_and_world_size()
    model.eval()  # no dropout
    parts = [torch.zeros(0, 3, dtype=torch.float64, device=device)]
    for indices in batches_of_rank(examples.lengths(), batch_size, world_size, rank):
        batch = collator([examples[index] for index in indices])
        batch = {key: t.to(device) for key, t in batch.items()}
        losses, predictions = score(model, batch)
        if "targets" in batch:  # a row for each class: predicted is the one with likeliest words
            losses = losses.view(len(indices), -1)
            predictions = losses.argmin(dim=1)
            losses = losses.gather(1, batch["labels"][:, None]).squeeze(1)
        columns = batch["index"], predictions, losses
        parts.append(torch.stack([t.double() for t in columns], dim=1))
    model.train()
    # Sorted, so that every number of ranks adds up in one order: the same sums to the last digit.
    everyone = torch.cat(list(gather({rank: torch.cat(parts).cpu()}).values()))
    index, predictions, losses = everyone[everyone[:, 0].argsort()].T
    assert index.tolist() == list(range(len(examples))), "each example once, none twice"
    accuracy = (predictions == torch.tensor(examples.labels)).double().mean().item()
    return losses.sum().item() / sum(examples.counts), accuracy, predictions.long().tolist()


if __name__ == "__main__":
    distributed.run(main)

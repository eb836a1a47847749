"""Train a document classifier on all devices of one machine, and report its accuracy on a test set.

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
import xxhash
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, set_seed

from common import cli, launch
from common.cli import at_least
from common.data import IGNORED
from common.errors import RunError
from common.gradients import clip_grad_norm
from common.inputs import models
from common.ranks import check_agreement, gather, rank_and_world_size
from common.timers import PhaseTimers
from common.tracker import Tracker, make_run_dir

from classification import results
from classification.batches import PADDINGS, Collator, GroupedSampler, encode
from classification.examples import Examples, load_examples

logger = logging.getLogger("train_classifier")


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__)
    add = parser.add_argument_group("run").add_argument
    add("-e", "--experiment-name", help="name of the run (default: model, data set and time)")
    add("--save-dir", default="outputs", help="folder that holds the run folders")
    add("--seed", default=0, type=at_least(0), help="seed for weights, data order and dropout")
    add("--dist-timeout", default=600, type=at_least(1), help="seconds to wait for other ranks")
    add = parser.add_argument_group("data").add_argument
    add("-d", "--dataset-name", default="python-stdlib", help="preset, file, folder or hub id")
    add("--dataset-subset", help="configuration of a hub data set")
    add("--text-column", help="column that holds the text (default: text)")
    add("--label-column", help="column that holds the class (default: label)")
    add("-s", "--seq-length", type=at_least(2), help="tokens (default: the model's limit, <= 1024)")
    add("--padding", default="grouped", choices=PADDINGS, help="how to pad short texts")
    add = parser.add_argument_group("model").add_argument
    add("-m", "--model-name", default="gpt2-tiny", help="preset, folder or hub id")
    add("--tokenizer-name", help="folder or hub id (default: the model's tokenizer)")
    add("--pretrained", action="store_true", help="start from the model's pretrained weights")
    add("--head", default="linear", choices=["linear", "none"], help="none: predict label tokens")
    add("--prompt", default="{text}\nlabel:", help="template for --head none")
    add = parser.add_argument_group("optimize").add_argument
    add("-b", "--batch-size", default=8, type=at_least(1), help="limit per device and micro-batch")
    add("--global-batch-size", default=24, type=at_least(1), help="examples per step, all devices")
    add("--lr", type=at_least(0.0), help="peak learning rate (default: depends on the model)")
    add("--warmup-steps", type=at_least(0), help="steps (default: a tenth of all)")
    add("--weight-decay", default=0.1, type=at_least(0.0), help="AdamW's weight decay")
    add("--max-grad-norm", default=1.0, type=at_least(1e-6), help="clip gradients above this")
    add("--num-epochs", default=3, type=at_least(1), help="passes over the data")
    add("--max-steps", type=at_least(1), help="number of steps; overrides --num-epochs")
    add("--log-freq", default=10, type=at_least(1), help="steps between log lines")
    return parser.parse_args()


@record  # lets torchrun report the exception of the rank that failed first
def main() -> None:
    args = get_args()

    # --- setup ---
    launch.prepare_environment()  # also runs as a single process, without torchrun
    # One process drives one device. Its number is the rank; world_size is how many there are.
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])  # the rank within this machine
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", launch.gpu_of(local_rank))
        torch.cuda.set_device(device)  # "cuda" without a number means this GPU from here on
    # "high" lets GPUs multiply float32 matrices in TF32: its range, but about 3 decimal digits.
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    cli.start_log(args, device)
    # If a rank does not join a collective, the others fail after --dist-timeout seconds.
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=args.dist_timeout),
        device_id=device if device.type == "cuda" else None,  # NCCL connects now, not later
    )

    # --- model ---
    tokenizer = models.load_tokenizer(args.tokenizer_name or args.model_name)
    config = models.load_config(args.model_name, tokenizer)  # sizes only, no weights
    seq_length = models.sequence_length(config, args.seq_length)
    model_class = (
        AutoModelForSequenceClassification if args.head == "linear" else AutoModelForCausalLM
    )
    classes, splits = load_examples(
        args.dataset_name, args.dataset_subset, args.text_column, args.label_column
    )
    config.id2label = dict(enumerate(classes))  # the head has one output per class
    config.label2id = {name: number for number, name in enumerate(classes)}
    # GPT-2 has no padding token. On the right, any token works: a causal model does not attend to
    # later tokens.
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    tokenizer.model_max_length = seq_length  # saved, so that inference truncates like training
    prompt = args.prompt if args.head == "none" else None
    label_tokens = encode(splits, classes, tokenizer, seq_length, prompt)
    # The ranks share the examples by index, so all of them must have the same ones.
    checksum = xxhash.xxh3_64_hexdigest(repr((classes, splits)).encode())
    remedy = "use the same arguments, data and Python version on all nodes"
    check_agreement({"examples with checksum": checksum}, remedy)
    # Weights are drawn on the CPU in float32, so every kind of device starts from the same model.
    torch.manual_seed(args.seed)
    if args.pretrained:  # a new head is drawn if the pretrained model has none that fits
        model = models.load_pretrained(args.model_name, config, model_class)
    else:
        model = model_class.from_config(config, dtype=torch.float32)
    # The head reads the last token of a text that is not padding.
    config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    model.to(device)  # before the optimizer is made, which keeps references to the parameters
    # Copies rank 0's weights to all ranks. Averages the gradients during the backward pass.
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    # --- data ---
    train_data = splits["train"]
    # The global batches do not depend on the number of ranks. No example is repeated or left out.
    sampler = GroupedSampler(train_data.lengths(), args, world_size, rank)
    width = seq_length if args.padding == "fixed" else None  # None: the batch's longest text
    dataloader = DataLoader(
        train_data,
        batch_sampler=sampler,
        collate_fn=Collator(tokenizer.pad_token_id, width, label_tokens),
        pin_memory=device.type == "cuda",  # lets the copy to the GPU overlap with computation
    )
    # Without a head, evaluation scores each example with every label: one row per label.
    eval_collator = Collator(tokenizer.pad_token_id, label_tokens=label_tokens, every_class=True)
    eval_batch_size = max(1, args.batch_size // max(1, len(label_tokens)))
    eval_args = eval_collator, eval_batch_size, device
    steps_per_epoch = len(sampler.steps)
    total_steps = args.max_steps or args.num_epochs * steps_per_epoch
    sizes = ", ".join(f"{len(examples):,} {split}" for split, examples in splits.items())
    logger.info(f"{len(classes)} classes ({', '.join(classes)}), examples: {sizes}")
    shared = len(set(train_data.texts).intersection(splits["test"].texts))
    logger.info(f"texts that are in both the training and the test split: {shared:,}")

    # --- optimizer ---
    # Fine-tuning needs a much smaller learning rate than training from scratch.
    default_lr = 5e-5 if args.pretrained else 0.25 / config.hidden_size
    lr = args.lr if args.lr is not None else default_lr
    warmup = total_steps // 10 if args.warmup_steps is None else args.warmup_steps
    optimizer = AdamW(model.parameters(), lr, weight_decay=args.weight_decay, fused=True)
    decay = max(1, total_steps - warmup)
    # Linear warm-up, then linear decay to 0.
    lr_scheduler = LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, warmup), (total_steps - step) / decay)
    )

    # --- train ---
    run_dir = make_run_dir(args)
    if gather({rank: (run_dir / "metrics.jsonl").exists()})[0]:  # as rank 0 sees it
        raise RunError(f"{run_dir} already contains a run: give another -e.")
    set_seed(args.seed + rank)  # Python's, NumPy's and PyTorch's RNGs, for dropout
    tracker = Tracker(run_dir, {**vars(args), "lr": lr, "total_steps": total_steps}, 0)
    progress_bar = cli.progress("training", total=total_steps)
    timers = PhaseTimers(device)
    step, logged_step, best_epoch, best_loss = 0, 0, 0, math.inf
    # On this rank since the last log: sum of losses, correct predictions, loss terms, examples,
    # tokens. An example has one loss term with a head, otherwise one per token of its label.
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    model.train()  # turns dropout on, if the model has any
    while step < total_steps:
        epoch, epoch_step = divmod(step, steps_per_epoch)
        if epoch_step == 0:
            sampler.set_epoch(epoch)  # each epoch has its own order
            batches = iter(dataloader)
            epoch_sums = torch.zeros_like(sums)
        # All ranks divide by the loss terms of the global batch. A mean of the ranks' means would
        # be wrong, because ranks may have different numbers of loss terms.
        global_batch = sampler.steps[epoch_step]
        n_terms = sum(train_data.loss_terms[index] for index in global_batch)
        micro_batches = sampler.micro_batches(global_batch)
        for micro_batch in range(micro_batches):
            with timers("data"):
                batch = next(batches)
                batch = {key: t.to(device, non_blocking=True) for key, t in batch.items()}
            # Gradients add up locally until the last backward pass averages them over the ranks.
            sync = contextlib.nullcontext if micro_batch == micro_batches - 1 else ddp_model.no_sync
            with timers("forward"), sync():
                losses, predictions = score(ddp_model, batch)
                # DDP divides by world_size, so multiply by it here. A rank without examples trains
                # on a filler with a loss of 0, because all ranks must join the same all-reduces.
                loss = losses.sum() * world_size / n_terms
            with timers("backward"):
                loss.backward()
            correct = (predictions == batch["labels"]) & (batch["index"] >= 0)
            sums += torch.cat((torch.stack((losses.detach().sum(), correct.sum())), batch["n"]))
        with timers("update"):
            grad_norm = clip_grad_norm(model, args.max_grad_norm)
            optimizer.step()
            step_lr = lr_scheduler.get_last_lr()[0]  # the learning rate of this step
            lr_scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        progress_bar.update()
        end_of_epoch = step % steps_per_epoch == 0 or step == total_steps
        metrics = {"step": step}
        if step % args.log_freq == 0 or end_of_epoch:
            dist.all_reduce(sums)
            # Equal on all ranks from here on, so all of them stop.
            if not (sums[0] + grad_norm).isfinite():
                raise RunError(
                    f"The training has diverged at step {step}: start a new run with a smaller "
                    f"--lr. After an epoch, {run_dir}/best has the best model so far."
                )
            epoch_sums += sums
            metrics |= {
                "epoch": epoch,
                "loss": (sums[0] / sums[2]).item(),
                "lr": step_lr,
                "grad_norm": grad_norm.item(),
                **timers.read(
                    step - logged_step, sums[4].item() / (step - logged_step), world_size, 0.0
                ),
                "mfu": None,  # its formula needs texts of equal length
            }
            logged_step = step
            sums.zero_()
        if end_of_epoch:
            with timers("evaluate"):
                eval_loss, accuracy, _ = evaluate(model, splits["validation"], *eval_args)
            metrics |= {
                "train_loss": (epoch_sums[0] / epoch_sums[2]).item(),
                "train_accuracy": (epoch_sums[1] / epoch_sums[3]).item(),
                "eval_loss": eval_loss,
                "eval_accuracy": accuracy,
            }
            if eval_loss < best_loss:
                best_loss, best_epoch = eval_loss, epoch + 1
                if rank == 0:
                    with timers("save"):
                        model.save_pretrained(run_dir / "best")
                        tokenizer.save_pretrained(run_dir / "best")
        if len(metrics) > 1:
            tracker.log(metrics)
        if end_of_epoch:
            logger.info(
                f"epoch {epoch + 1}: training loss {metrics['train_loss']:.4f}, accuracy "
                f"{metrics['train_accuracy']:.4f}; validation loss {eval_loss:.4f}, accuracy "
                f"{accuracy:.4f}{' (the best so far)' * (best_epoch == epoch + 1)}"
            )
    progress_bar.close()
    tracker.finish()

    # --- test report ---
    del ddp_model
    dist.barrier()  # rank 0 may still be writing the best model
    model = models.load_pretrained(f"{run_dir}/best", config, model_class).to(device)
    loss, _, predictions = evaluate(model, splits["test"], *eval_args)
    dist.barrier()  # a rank that exits early would look like a failure to the other ranks
    dist.destroy_process_group()  # the report can take longer than --dist-timeout
    if rank == 0:
        report = results.write_report(run_dir, classes, splits, predictions, loss, best_epoch)
        logger.info(f"test of {run_dir}/best, loss {loss:.4f}:\n\n{report}")


def score(model: nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each row in nats, and the number of the predicted class.

    Without a head, the loss is the sum over the label's tokens. The prediction is the row's label
    if each of its tokens is the most likely one, otherwise -1.
    """
    if "targets" not in batch:
        logits = model(input_ids=batch["input_ids"]).logits  # [rows, classes], at the last token
        return cross_entropy(logits, batch["labels"], reduction="none"), logits.argmax(dim=1)
    # [rows, columns, vocabulary]. To save memory, only for columns that predict label tokens.
    logits = model(input_ids=batch["input_ids"], logits_to_keep=batch["columns"]).logits
    targets = batch["targets"]
    losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(dim=1)
    wrong = ((logits.argmax(dim=2) != targets) & (targets != IGNORED)).any(dim=1)
    rows_per_label = len(targets) // len(batch["labels"])
    return losses, batch["labels"].repeat_interleave(rows_per_label).masked_fill(wrong, -1)


@torch.no_grad()
def evaluate(model, examples: Examples, collator: Collator, batch_size: int, device) -> tuple:
    """Return loss, accuracy and the predicted classes in order. All ranks must call this.

    The only collective is at the end, because some ranks have one batch more than others.
    """
    rank, world_size = rank_and_world_size()
    model.eval()  # turns dropout off
    parts = [torch.zeros(0, 3, dtype=torch.float64, device=device)]
    # The batches do not depend on the number of ranks. Texts in a batch have similar lengths.
    order = sorted(range(len(examples)), key=examples.lengths().__getitem__)
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    for indices in batches[rank::world_size]:
        batch = collator([examples[index] for index in indices])
        batch = {key: t.to(device) for key, t in batch.items()}
        losses, predictions = score(model, batch)
        if "targets" in batch:  # one row per class; the class with the smallest loss is predicted
            losses = losses.view(len(indices), -1)
            predictions = losses.argmin(dim=1)
            losses = losses.gather(1, batch["labels"][:, None]).squeeze(1)
        found = batch["index"], predictions, losses
        parts.append(torch.stack([t.double() for t in found], dim=1))
    model.train()
    all_parts = torch.cat(list(gather({rank: torch.cat(parts).cpu()}).values()))
    # Sorted by index, so that the sums are bit-identical for any number of ranks.
    index, predictions, losses = all_parts[all_parts[:, 0].argsort()].T
    assert index.tolist() == list(range(len(examples))), "an example is missing or repeated"
    accuracy = (predictions == torch.tensor(examples.labels)).double().mean().item()
    return losses.sum().item() / sum(examples.loss_terms), accuracy, predictions.long().tolist()


if __name__ == "__main__":
    launch.run(main)

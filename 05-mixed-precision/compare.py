"""Compare strategies and precisions: the same training in each, its speed, memory and losses.

python 05-mixed-precision/compare.py

A row is a strategy in a precision. All rows have in common: model, first weights, samples and their
order, schedule, seed, threads per device. Each is trained once in a round, a round for each seed;
every other round goes backwards, so that no row always has the machine that is warm. Its parts:

loss     --global-batch-size sequences per step on however many devices: the same tokens in all
         rows, so that losses can be compared step by step. Never compiled.
speed    --batch-size sequences per device and step: twice the devices train on twice the tokens.
largest  as speed, with the largest batch per device that fits into a GPU, found by trying.

The first third of the time is warm-up and is not counted. A row that fails is noted with its
reason; the processes are then started anew, so that nobody waits for one that is gone.
"""

import argparse
import contextlib
import datetime
import fnmatch
import functools
import gc
import itertools
import json
import math
import multiprocessing
import os
import re
import runpy
import signal
import statistics
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

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

import common
from common import cli, launch, models
from common.cli import InputError, at_least
from common.data import ResumableSampler, load_blocks, split_batch
from common.precision import check_precision, convert_to_fp8
from common.record import gather
from common.timers import PhaseTimers, flops_per_token

try:
    import horovod.torch as hvd
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer
except ImportError:
    hvd = None

STRATEGIES = ("single", "dp", "ddp", "zero1", "fsdp", "horovod")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "pure-bf16", "fp8")
PARTS = ("loss", "speed", "largest")
PHASES = ("data", "forward", "backward", "update")
# What matrices are multiplied in; fp8 is for those of the blocks only.
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
WINDOW = 5  # steps between two looks at the clock, each of which waits for the device
CONTEXT = multiprocessing.get_context("spawn")
# What all rows of a result file have in common.
SETTINGS = ("model_name", "dataset_name", "seq_length", "batch_size", "global_batch_size")
SETTINGS += ("steps", "speed_steps", "lr", "compile", "threads")


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("rows").add_argument
    add("--only", nargs="+", default=["*:*"], help="rows, as in ddp:bf16 or fsdp:*")
    add("--parts", nargs="+", choices=PARTS, default=["loss", "speed"], help="what to measure")
    add("--seeds", nargs="+", type=at_least(0), default=[0, 1, 2], help="one round for each")
    add("--devices", type=at_least(1), help="ranks (if absent: all GPUs; on a CPU 2)")
    add("--seconds", type=at_least(0.0), help="after them, nothing new begins")
    add("--timeout", type=at_least(1), default=300, help="seconds that one training may take")
    add("--output", type=Path, default="outputs/comparison.json", help="JSON file to write")
    add("--append", action="store_true", help="keep what the file already holds")
    add("--draw", type=Path, metavar="RESULT", help="only draw the figures of this file")
    add("--figures", type=Path, help="folder for them (if absent: RESULT's)")
    add = parser.add_argument_group("data and model").add_argument
    add("-d", "--dataset-name", default="python-stdlib", help="preset, file, folder or hub id")
    add("-m", "--model-name", default="gpt2-tiny", help="preset, folder or hub id")
    add("-s", "--seq-length", default=32, type=at_least(2), help="tokens")
    add("--compile", action="store_true", help="fuse kernels where speed is measured")
    add = parser.add_argument_group("optimize").add_argument
    add("-b", "--batch-size", default=4, type=at_least(1), help="most sequences per device at once")
    add("--global-batch-size", default=8, type=at_least(1), help="sequences per step, for losses")
    add("--steps", default=20, type=at_least(2 * WINDOW), help="with the same global batch")
    add("--speed-steps", default=15, type=at_least(2 * WINDOW), help="with the same batch each")
    add("--lr", type=at_least(0.0), help="peak rate (if absent: 1 / model width)")
    return parser.parse_args()


def main() -> None:
    begun = time.monotonic()
    args = get_args()
    if args.draw:
        draw(args.draw, args.figures or args.draw.parent)
        return
    gpus = torch.cuda.device_count()
    devices = args.devices or gpus or 2
    if 0 < gpus < devices:
        raise InputError(f"PyTorch sees {gpus} GPUs: {devices} devices are too many.")
    rows = [
        {"strategy": s, "precision": p, "devices": 1 if s == "single" else devices}
        for s, p in itertools.product(STRATEGIES, PRECISIONS)
        if any(fnmatch.fnmatchcase(f"{s}:{p}", pattern) for pattern in args.only)
    ]
    if not rows:
        raise InputError(
            f"--only {' '.join(args.only)} names no row: a row is STRATEGY:PRECISION with one of "
            f"{', '.join(STRATEGIES)} and one of {', '.join(PRECISIONS)}."
        )
    if "largest" in args.parts and not gpus:
        raise InputError("--parts largest needs a GPU: the memory of a host is not one run's.")
    # Tokenized here once: the ranks read it from the cache. And what cannot work is refused here.
    args.dataset_subset, args.text_column, args.num_workers = None, None, 0
    # The same on machines of eight GPUs and of fewer: beside a GPU, threads have little to do.
    args.threads = max(1, (os.cpu_count() or 1) // (max(8, gpus) if gpus else devices))
    tokenizer = models.load_tokenizer(args.model_name)
    models.check_sizes(models.load_config(args.model_name), tokenizer, args.seq_length)
    train_data, _ = load_blocks(args, tokenizer, args.seq_length)
    most = max(row["devices"] for row in rows)
    split_batch(args, most, len(train_data))
    if most * args.batch_size > len(train_data):
        raise InputError(f"The data has {len(train_data)} sequences: lower --batch-size.")
    content = open_results(args)
    rows = [keep_row(content["results"]["rows"], row) for row in rows]
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_results(args.output, content)
    except OSError as error:
        raise InputError(f"Cannot write to {args.output} ({error.strerror}).") from error
    ranks = Ranks(max(processes(row["strategy"], row["devices"]) for row in rows))

    def measure(row: dict, part: str, seed: int, **changes: object) -> dict | None:
        """Train one row once. Return what was measured, None where it failed: the row says why."""
        options = {key: row[key] for key in ("strategy", "precision", "devices")} | changes
        run = argparse.Namespace(**{**vars(args), **options, "part": part, "seed": seed})
        if part != "loss":
            run.global_batch_size = run.batch_size * run.devices
            run.steps = run.speed_steps
        status, answer = ranks.do(run)
        if status == "done":
            return {"part": part, "seed": seed, **answer}
        row[status][part] = answer
        return None

    try:
        for n, seed in enumerate(args.seeds):
            for row, part in itertools.product(rows[:: -1 if n % 2 else 1], args.parts):
                late = args.seconds is not None and time.monotonic() - begun > args.seconds
                if late or row["left_out"] or part in row["failed"]:
                    continue
                if part == "largest":
                    found = find_largest(measure, row, args.batch_size) if n == 0 else None
                    if found:  # what ended the search is no failure
                        found["stopped_by"] = row["failed"].pop("largest", None)
                else:
                    found = measure(row, part, seed)
                if found:
                    others = [r for r in row["runs"] if (r["part"], r["seed"]) != (part, seed)]
                    row["runs"] = [*others, found]
                write_results(args.output, content)
    except KeyboardInterrupt:
        print("Interrupted: this is what was measured until then.")
    finally:
        ranks.stop()
    content["results"]["seconds"] = round(time.monotonic() - begun)  # of the last call
    write_results(args.output, content)
    print(show(content["results"]["rows"]))
    print(f"wrote {args.output}")


def train(run: argparse.Namespace, rank: int, device: torch.device) -> dict[str, object]:
    """Train as the chapters do: single as chapter 1, ddp and zero1 as chapter 2, fsdp as chapter 5.

    Return the loss after each step, over all ranks; tokens/s of all devices in each window; ms per
    step and phase and MFU, medians of the windows after the warm-up; GiB of the fullest GPU.
    """
    world_size = processes(run.strategy, run.devices)
    half = HALF.get(run.precision)
    strict = device.type != "cuda" or run.precision == "fp32"
    torch.set_float32_matmul_precision("highest" if strict else "high")  # high: TF32

    # --- model ---
    config = models.load_config(run.model_name)
    tokenizer = models.load_tokenizer(run.model_name)
    torch.manual_seed(run.seed)
    model = AutoModelForCausalLM.from_config(
        config,
        attn_implementation=models.causal_attention(config),
        dtype=torch.float32,
    )
    if run.precision == "pure-bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    model.to(device)
    blocks = models.find_blocks(model)
    if run.precision == "fp8":
        convert_to_fp8(blocks, run.seq_length)
    token_flops = flops_per_token(model, config, run.seq_length)
    compiled = run.compile and run.part != "loss" and run.strategy != "dp"
    if compiled and run.strategy != "fsdp":
        model.compile()
    # FSDP casts weights when it gathers them. All others let autocast choose for each operation.
    module = Loss(model, device.type, None if run.strategy == "fsdp" else half)

    # --- strategy ---
    if run.strategy == "dp":  # one process: copies the model to all GPUs in every forward pass
        warnings.filterwarnings("ignore", "Was asked to gather", UserWarning)  # each GPU's loss
        module = nn.DataParallel(module, list(range(run.devices)))
    if run.strategy in ("ddp", "zero1"):
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if run.strategy == "fsdp":
        mesh = init_device_mesh(device.type, (world_size,))
        policy = MixedPrecisionPolicy(half, reduce_dtype=torch.float32 if half else None)
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for block, after in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([block])
        if compiled:
            for block in blocks:
                block.forward = torch.compile(block.forward)
            model.loss_function = torch.compile(model.loss_function)

    # --- data ---
    train_data, _ = load_blocks(run, tokenizer, run.seq_length)
    micro_batch_size, accumulation = split_batch(run, run.devices, len(train_data))
    sampler = ResumableSampler(train_data, num_replicas=world_size, rank=rank, seed=run.seed)
    dataloader = DataLoader(
        train_data,
        batch_size=micro_batch_size * run.devices // world_size,
        sampler=sampler,
        drop_last=True,
        pin_memory=device.type == "cuda",
    )
    steps_per_epoch = len(train_data) // run.global_batch_size

    # --- optimizer ---
    adamw = torch.optim.AdamW
    if run.strategy == "zero1":
        adamw = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    optimizer = adamw(
        model.parameters(),
        lr=run.lr if run.lr is not None else 1 / config.hidden_size,
        betas=(0.8, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    if run.strategy == "horovod":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(
            optimizer, named, backward_passes_per_step=accumulation
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
    gpus = range(run.devices if run.strategy == "dp" else 1) if device.type == "cuda" else ()
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(rank + gpu)
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
                loss = module(**batch).mean() / accumulation  # DataParallel: one from each device
            with timers("backward"):
                scaler.scale(loss).backward()
            losses[step] += loss.detach()
        with timers("update"):
            if run.strategy == "horovod":
                optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            # Horovod would send the gradients once more.
            skip = run.strategy == "horovod"
            with optimizer.skip_synchronize() if skip else contextlib.nullcontext():
                scaler.step(optimizer)
            scaler.update()
            lr_scheduler.step()
            optimizer.zero_grad()
        if (step + 1) % WINDOW == 0:
            tokens = run.global_batch_size * run.seq_length
            windows.append(timers.read(tokens, run.devices, token_flops))
    if dist.is_initialized():
        losses /= world_size
        dist.all_reduce(losses)
    counted = after_warmup(windows)
    medians = {key: statistics.median(each[key] or 0 for each in counted) for key in counted[0]}
    peaks = [torch.cuda.max_memory_allocated(rank + gpu) / 2**30 for gpu in gpus]
    return {
        "compiled": compiled,
        "batch_size": micro_batch_size,
        "losses": [round(loss, 7) if math.isfinite(loss) else None for loss in losses.tolist()],
        "tokens_per_s": [round(each["tokens_per_s"], 1) for each in windows],
        "ms": {key: round(medians[f"time/{key}"], 3) for key in (*PHASES, "total")},
        "mfu": None if counted[0]["mfu"] is None else round(medians["mfu"], 4),
        "peak_mem_gib": max(gather({rank: max(peaks)}).values()) if peaks else None,
    }


def after_warmup(windows: list) -> list:
    """Return the windows that count: not the first third, which allocates, compiles, warms up."""
    return windows[-(-len(windows) // 3) :]


class Loss(nn.Module):
    """A model that returns its loss only, and computes it under autocast where there is a dtype.

    DataParallel would gather all logits on one GPU, and its threads would not know the dtype of an
    autocast outside of them: they would compute in float16.
    """

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.device_type, self.dtype = model, device_type, dtype

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None):
            return self.model(**batch).loss


# --- ranks ---


def processes(strategy: str, devices: int) -> int:
    """Return how many processes a row needs: nn.DataParallel is one for all of its GPUs."""
    return 1 if strategy == "dp" else devices


def check_row(run: argparse.Namespace, device: torch.device) -> None:
    """Raise InputError, which says why, where this machine has no such row."""
    if run.strategy == "dp" and (device.type != "cuda" or run.devices < 2):
        raise InputError("nn.DataParallel needs two GPUs or more.")
    if run.strategy == "horovod" and hvd is None:
        raise InputError("Horovod is not installed.")
    if run.precision == "tf32" and device.type != "cuda":
        raise InputError("On a CPU TF32 is float32.")
    if run.precision == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
        raise InputError("This GPU has no TF32.")
    precision = run.precision.removeprefix("pure-")
    check_precision(argparse.Namespace(precision=precision, param_dtype="float32"), device)


def work(rank: int, port: int, connection: Connection, env: dict[str, str]) -> None:
    """Be a rank: do the runs that come, answer each, and end when one fails or no more come."""
    os.environ |= env
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    device = torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("localhost", port, is_master=False)
    while True:
        try:
            number, run = connection.recv()
        except EOFError:
            return
        try:
            check_row(run, device)
        except InputError as error:
            connection.send(("left_out", str(error)))
            continue
        try:
            found = do_run(run, rank, device, dist.PrefixStore(number, store))
        except Exception as error:
            # Ends here, and with it all that it allocated; others may wait for it in a collective.
            reason = (str(error).splitlines() or [""])[0]
            connection.send(("failed", f"{type(error).__name__}: {reason}"))
            os._exit(1)
        connection.send(("done", found))


def do_run(
    run: argparse.Namespace, rank: int, device: torch.device, store: dist.Store
) -> dict[str, object]:
    """Train with a process group of its own, where one is needed, and leave nothing behind."""
    torch.set_num_threads(run.threads)
    if run.strategy == "horovod":
        hvd.init()  # its own ranks; the process group below is for what they measured
    if run.strategy not in ("single", "dp"):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=processes(run.strategy, run.devices),
            timeout=datetime.timedelta(seconds=run.timeout),
            device_id=device if device.type == "cuda" else None,
        )
    found = train(run, rank, device)
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if run.compile:
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


class Ranks:
    """Processes that do one run after the other; new ones where one of them failed."""

    def __init__(self, number: int) -> None:
        self.number, self.alive, self.runs = number, [], 0
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def do(self, run: argparse.Namespace) -> tuple[str, object]:
        """Return ("done", what rank 0 measured), or ("left_out" or "failed", the reason).

        Where one rank fails, or all take too long, all are ended: some may wait in a collective.
        """
        self.runs += 1
        if not self.alive:
            self._start()
        busy = {
            connection: process
            for process, connection in self.alive[: processes(run.strategy, run.devices)]
        }
        first, deadline = next(iter(busy)), time.monotonic() + run.timeout
        try:
            for connection in busy:
                connection.send((f"run-{self.runs}", run))
            while busy:
                ready = wait(busy, max(0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"no answer within {run.timeout} s")
                for connection in ready:
                    process = busy.pop(connection)
                    status, answer = connection.recv()
                    if status == "failed":
                        raise RuntimeError(answer)
                    if connection is first:
                        said = status, answer
            return said
        except (EOFError, ConnectionError):
            process.join(10)
            reason = f"a rank ended with status {process.exitcode}"
        except (TimeoutError, RuntimeError) as error:
            reason = str(error)
        self.stop()
        return "failed", reason

    def _start(self) -> None:
        places = [{} for _ in range(self.number)] if hvd is None else horovod_places(self.number)
        for rank, env in enumerate(places):
            ours, theirs = multiprocessing.Pipe()
            arguments = (rank, self.store.port, theirs, env)
            process = CONTEXT.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.alive.append((process, ours))

    def stop(self) -> None:
        for process, connection in self.alive:
            process.kill()
            process.join()
            connection.close()
        self.alive = []


def horovod_places(number: int) -> list[dict[str, str]]:
    """Return the variables with which ranks of this machine meet, as horovodrun sets them."""
    slots = get_host_assignments(parse_hosts(f"localhost:{number}"), number)
    server = RendezvousServer()
    port = server.start()  # in a thread of this process
    server.init(slots)
    shared = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    shared |= {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": str(port)}
    shared = {f"HOROVOD_{name}": value for name, value in shared.items()}
    return [{**shared, **{k: str(v) for k, v in create_slot_env_vars(s).items()}} for s in slots]


def find_largest(measure: Callable, row: dict, batch_size: int) -> dict[str, object] | None:
    """Return the run with the largest batch per device that fits, None where none does.

    Doubles the batch until it does not fit, then halves the gap down to an eighth of the first.
    """
    low, high, largest = 0, None, None
    batch = batch_size
    while not row["left_out"] and (high is None or high - low > max(1, batch_size // 8)):
        found = measure(row, "largest", 0, batch_size=batch)
        if found:
            low, largest = batch, found
        else:
            high = batch
        batch = 2 * low if high is None else (low + high) // 2
    return largest


# --- results ---


def label(row: dict) -> str:
    return f"{row['strategy']} {row['precision']} x{row['devices']}"


def open_results(args: argparse.Namespace) -> dict:
    """Return what the result file holds before the first run: nothing, or with --append a lot."""
    # What all results of this guide say of their machine, from where they are.
    helper = Path(common.__file__).parents[1] / "tests" / "benchmarks" / "machine.py"
    machine = runpy.run_path(str(helper))["describe_machine"]()
    settings = {name: getattr(args, name) for name in SETTINGS}
    if not args.append:
        if args.output.exists():
            raise InputError(f"{args.output} exists: give another --output, or --append to it.")
        return {"machine": machine, "results": {"settings": settings, "added_by": [], "rows": []}}
    content = read_results(args.output)
    then = {**content["machine"], **content["results"]["settings"]}
    for name in (*SETTINGS, "gpu", "cpu", "torch", "transformers"):
        now = {**machine, **settings}.get(name)
        if now != then.get(name):
            raise InputError(
                f"{args.output} was measured with {name} {then.get(name)}, not {now}: --append to "
                "a result of the same settings on the same kind of machine."
            )
    content["results"]["added_by"].append(machine["command"])
    return content


def read_results(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
        settings, _, _ = (content["results"][key] for key in ("settings", "rows", "added_by"))
        content["machine"]["cpu"], *(settings[name] for name in SETTINGS)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no result that this script wrote ({error}).") from error
    return content


def keep_row(rows: list[dict], row: dict) -> dict:
    """Return the row of these rows that is to hold its runs, a new one where there is none."""
    known = {label(each): each for each in rows}
    if label(row) in known:
        row = known[label(row)]
    else:
        row |= {"runs": [], "summary": {}}
        rows.append(row)
    row |= {"left_out": {}, "failed": {}}  # by part, the reason
    return row


def summarize(runs: list[dict], reference: dict[int, float]) -> dict[str, object]:
    """Return a row's medians over the rounds, and its last losses with those of the reference.

    reference: by seed, the last loss in float32 on one device.
    """
    summary = {}
    for part in PARTS:
        own = [run for run in runs if run["part"] == part]
        if own:
            speeds = [statistics.median(after_warmup(run["tokens_per_s"])) for run in own]
            ms = {key: statistics.median(run["ms"][key] for run in own) for key in own[0]["ms"]}
            summary[part] = {
                "batch_size": own[0]["batch_size"],
                "tokens_per_s": round(statistics.median(speeds), 1),
                "rounds": [round(speed, 1) for speed in speeds],
                "ms": {key: round(value, 3) for key, value in ms.items()},
                "mfu": if_measured(statistics.median, own, "mfu"),
                "peak_mem_gib": if_measured(max, own, "peak_mem_gib"),
            }
    ends = last_losses(runs)
    if ends and None not in ends.values():
        known = [seed for seed in ends if reference.get(seed) is not None]
        differences = [round(ends[seed] - reference[seed], 7) for seed in known]
        summary["final_loss"] = {"mean": statistics.mean(ends.values()), "by_seed": ends}
        summary["minus_fp32_on_one_device"] = differences
    return summary


def if_measured(function: Callable, runs: list[dict], key: str) -> float | None:
    """Return a function's value for what the runs have of this, or None where it is not known."""
    values = [run[key] for run in runs]
    return None if None in values else function(values)


def last_losses(runs: list[dict]) -> dict[int, float | None]:
    return {run["seed"]: run["losses"][-1] for run in runs if run["part"] == "loss"}


def write_results(path: Path, content: dict) -> None:
    """Write the result file; each list of numbers is one line."""
    rows = content["results"]["rows"]
    runs = {label(row): row["runs"] for row in rows}
    reference = last_losses(runs.get("single fp32 x1", []))
    for row in rows:
        row["summary"] = summarize(row["runs"], reference)
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    path.write_text(re.sub(r"\[[\d\s.,e+-]+\]", lambda found: " ".join(found[0].split()), text))


def show(rows: list[dict]) -> str:
    """Return the table of the rows, and below it why others are not in it."""
    head = ("", "tokens/s", "slowest", "fastest", "data", "forward", "backward", "update")
    head += ("GiB", "last loss", "minus fp32 on one device")
    lines, reasons = [head], {}
    for row in rows:
        for part, reason in row["failed"].items():
            reasons.setdefault(f"failed ({part}): {reason}", []).append(label(row))
        for reason in row["left_out"].values():
            reasons.setdefault(f"left out: {reason}", []).append(label(row))
        for part in PARTS:
            found = row["summary"].get(part)
            if not found or (part == "loss" and "speed" in row["summary"]):
                continue
            name = label(row) + (f" at {found['batch_size']}" if part == "largest" else "")
            speeds = (found["tokens_per_s"], min(found["rounds"]), max(found["rounds"]))
            end = row["summary"].get("final_loss") if part != "largest" else None
            differences = row["summary"]["minus_fp32_on_one_device"] if end else ()
            lines.append(
                (
                    name,
                    *(f"{speed:,.0f}" for speed in speeds),
                    *(f"{found['ms'][phase]:,.1f}" for phase in PHASES),
                    f"{found['peak_mem_gib']:.1f}" if found["peak_mem_gib"] else "-",
                    f"{end['mean']:.4f}" if end else "-",
                    " ".join(f"{each:+.5f}" for each in differences) or "-",
                )
            )
    widths = (11, 11, 11, 7, 9, 9, 9, 7, 10, 30)
    table = [
        line[0].ljust(24) + "".join(f"{w:>{n}}" for w, n in zip(line[1:], widths, strict=True))
        for line in lines
    ]
    return "\n".join([*table, *(f"{', '.join(of)} {why}" for why, of in reasons.items())])


def draw(result: Path, folder: Path) -> None:
    """Draw the losses against steps and time, the speeds and, where measured, the memory."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--draw needs matplotlib: pip install matplotlib.") from None
    content = read_results(result)
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder} to draw into: give another --figures.")
    rows, settings = content["results"]["rows"], content["results"]["settings"]
    where = f"{settings['model_name']} on {content['machine'].get('gpu') or 'a CPU'}"
    colors = {precision: f"C{n}" for n, precision in enumerate(PRECISIONS)}
    styles = dict(zip(STRATEGIES, ("-", (0, (1, 3)), "--", "-.", ":", (0, (5, 5))), strict=True))
    tokens = settings["global_batch_size"] * settings["seq_length"]
    each = f"{settings['batch_size']} x {settings['seq_length']} tokens per device and step"
    # By name: the part that is drawn, what of it, title and axis.
    figures = {
        "loss": ("loss", "", f"{tokens} tokens per step, mean of the seeds", "step"),
        "time": ("loss", "tokens_per_s", f"{tokens} tokens per step, mean of the seeds", "seconds"),
        "speed": ("speed", "tokens_per_s", each, "tokens/s of all devices; line: of the rounds"),
        "memory": ("speed", "peak_mem_gib", each, "GiB of the fullest GPU"),
    }
    for name, (part, key, title, xlabel) in figures.items():
        shown = [row for row in rows if row["summary"].get(part, {}).get(key or "ms")]
        if not shown:
            continue
        figure = Figure(figsize=(9, 5 if part == "loss" else 1 + len(shown) / 4))
        axes = figure.add_subplot()
        axes.set(title=f"{where}, {title}", xlabel=xlabel)
        for row in shown:
            found, color = row["summary"][part], colors[row["precision"]]
            if part == "loss":
                runs = [run["losses"] for run in row["runs"] if run["part"] == "loss"]
                losses = [
                    statistics.mean(step) for step in zip(*runs, strict=True) if None not in step
                ]
                unit = tokens / found[key] if key else 1
                steps = [unit * (n + 1) for n in range(len(losses))]
                style = styles[row["strategy"]]
                axes.plot(steps, losses, color=color, linestyle=style, label=label(row))
            else:
                axes.barh(label(row), found[key], color=color)
                if key == "tokens_per_s":
                    ends = [min(found["rounds"]), max(found["rounds"])]
                    axes.plot(ends, [label(row)] * 2, color="black")
        if part == "loss":
            axes.set_ylabel("loss in nats per token")
            axes.legend(ncols=3, fontsize="small")
        else:
            axes.invert_yaxis()
        figure.tight_layout()
        path = folder / f"{result.stem}_{name}.svg"
        with matplotlib.rc_context({"svg.hashsalt": "comparison"}):  # the same file each time
            figure.savefig(path, metadata={"Date": None})
        print(f"wrote {path}")


if __name__ == "__main__":
    launch.run(main)

"""Predict the peak memory of one GPU in a training step, and which chapter your model needs.

python 04-fsdp/memory.py -m llama-3.1-8b -s 8192 -b 1 --gpus 8 --gpu-memory 139

peak_memory.py beside this script computes the prediction and explains it. With --tokens, the script
also estimates how long the whole run takes, and what it costs.
"""

import argparse
import math
from dataclasses import fields, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from common import cli, launch, models
from common.cli import RunError, at_least
from common.timers import PEAK_FLOPS, flops_per_token

from peak_memory import Options, predict

GIB = 2**30
CHECKPOINTING = "--activation-checkpointing"
FSDP = {"sharding": "fsdp"}
BF16 = {"sharding": "fsdp", "precision": "bf16"}
SELECTIVE = {"activation_checkpointing": "selective"}
FULL = {"activation_checkpointing": "full"}
# In the order of the chapters. Within a chapter, the setups that slow a step down most come last.
SETUPS = {
    "Chapter 1": {"gpus": 1},
    "Chapter 2 or 3": {"sharding": "ddp"},
    "Chapter 2 or 3 with --zero1": {"sharding": "zero1"},
    "Chapter 4": FSDP,
    f"Chapter 4 with {CHECKPOINTING} selective": FSDP | SELECTIVE,
    f"Chapter 4 with {CHECKPOINTING} full": FSDP | FULL,
    f"Chapter 4 with {CHECKPOINTING} full --cpu-offload": FSDP | FULL | {"cpu_offload": True},
    "Chapter 5": BF16,
    f"Chapter 5 with {CHECKPOINTING} selective": BF16 | SELECTIVE,
    f"Chapter 5 with {CHECKPOINTING} full": BF16 | FULL,
    f"Chapter 5 with {CHECKPOINTING} full --cpu-offload": BF16 | FULL | {"cpu_offload": True},
}
RESERVE = 0.05  # share of a GPU's memory for CUDA, NCCL and fragmentation
MAX_GPUS = 2**16
# By GPU and model: the MFU of chapter 5 in bfloat16 with --compile, and the setup.
MEASURED = {
    ("NVIDIA H200", "gpt2"): (0.441, "2 GPUs with -s 1024 -b 64"),
    ("NVIDIA H200", "llama-3.1-8b"): (0.561, "4 GPUs with -s 8192 -b 1"),
}
ASSUMED_MFU = 0.4  # Llama 3.1 405B reached 38% to 43%: https://arxiv.org/abs/2407.21783, table 4
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def predict_all(config: PretrainedConfig, options: Options, cache: dict) -> dict[str, dict]:
    """Return the prediction for each setup; cache: see predict."""
    setups = SETUPS
    if options.tensor_parallel > 1:  # only chapter 5 has it, and not with both of these options
        setups = {name: setup for name, setup in SETUPS.items() if BF16.items() <= setup.items()}
        if options.compile:
            setups = {"Chapter 5": BF16}
    return {
        name: predict(config, replace(options, **changes), cache)
        for name, changes in setups.items()
    }


def first_fit(predictions: dict[str, dict], memory: float, host: bool = True) -> str | None:
    """Return the first setup that fits into `memory` GiB; host: whether it may use host memory."""
    limit = (1 - RESERVE) * memory * GIB
    fitting = (name for name, found in predictions.items() if found["peak"] <= limit)
    return next((name for name in fitting if host or not predictions[name]["host"]), None)


def recommend(config: PretrainedConfig, options: Options, memory: float, cache: dict) -> str:
    """Return a sentence that names the setup for GPUs of `memory` GiB."""
    predictions = predict_all(config, options, cache)
    name = first_fit(predictions, memory)
    if name is None:  # with --cpu-offload, more GPUs would not lower the peak
        return "No number of GPUs is enough: lower --batch-size or --seq-length."
    found = predictions[name]
    needs = f"{name}: {found['peak'] / GIB:.1f} of {memory:g} GiB per GPU"
    if not found["host"]:
        first = name == next(iter(predictions))
        return f"{needs}." if first else f"{needs}; no earlier setup fits."
    needs += f" and {found['host'] / GIB:.1f} GiB of host memory per GPU; no earlier setup fits."
    gpus = options.gpus
    while gpus < MAX_GPUS:
        gpus *= 2
        predictions = predict_all(config, replace(options, gpus=gpus), cache)
        if name := first_fit(predictions, memory, host=False):
            return f"{needs} On {gpus} GPUs: {name}."
    return needs


def short(name: str) -> str:
    return name.replace("with ", "").replace(f"{CHECKPOINTING} ", "")


def table(predictions: dict[str, dict], memory: float) -> str:
    """Return what each setup stores, what it needs at its peak, and when the peak occurs."""
    columns = ("parameters", "gradients", "moments", "gathered", "activations", "peak", "host")
    small = max(found["peak"] for found in predictions.values()) < 4 * GIB
    unit, title = (2**20, "MiB per rank") if small else (GIB, "GiB per rank")
    lines = [f"{title:28}" + "".join(f"{column:>12}" for column in columns) + "  peak at"]
    for name, found in predictions.items():
        sizes = found | {key: found["parts"][key] for key in ("gathered", "activations")}
        sizes["gradients"] += found["buckets"]
        numbers = "".join(f"{sizes[column] / unit:12,.2f}" for column in columns)
        phase, layer = found["peak_at"]
        where = f"{phase} of layer {layer}" if layer >= 0 and phase.endswith("ward") else phase
        fits = first_fit({name: found}, memory)
        lines.append(f"{short(name):28}{numbers}  {where}{'' if fits else ': does not fit'}")
    return "\n".join(lines)


def draw(predictions: dict[str, dict], memory: float, title: str, path: Path) -> None:
    """Draw the peak of each setup as a stacked bar, and the GPU's memory as a line."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("--chart needs matplotlib: pip install matplotlib.") from None
    if path.suffix not in (".png", ".svg") or not path.parent.is_dir():
        raise RunError(f"--chart {path} must be a .png or .svg file in an existing folder.")
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(predictions)
    for part in ("parameters", "gradients", "buckets", "moments", "gathered", "activations"):
        sizes = [found["parts"][part] / GIB for found in predictions.values()]
        if any(sizes):
            axes.barh([short(name) for name in predictions], sizes, left=left, label=part)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.axvline(memory, color="black", linestyle="--", label=f"GPU memory: {memory:g} GiB")
    # Cuts off bars that are longer than three times the GPU's memory.
    axes.set_xlim(0, 1.05 * max(memory, min(max(left), 3 * memory)))
    axes.invert_yaxis()
    axes.set(title=title, xlabel="peak memory in a training step, GiB per GPU")
    axes.legend()
    with matplotlib.rc_context({"svg.hashsalt": "memory"}):  # the same file each time
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def check_tensor_parallel(args: argparse.Namespace, config: PretrainedConfig) -> None:
    """Raise RunError where chapter 5's script with tensor-parallel.diff does."""
    n_ranks, flag = args.tensor_parallel, f"--tensor-parallel {args.tensor_parallel}"
    if n_ranks == 1:
        return
    if config.model_type != "llama":
        raise RunError(f"{flag} needs a Llama model, not {config.model_type}: give another -m.")
    limit = math.gcd(args.gpus, config.num_key_value_heads, config.intermediate_size)
    if limit % n_ranks:
        raise RunError(f"{flag} must divide ranks, KV heads and MLP width, so also {limit}.")
    if args.hsdp:
        raise RunError(f"With {flag}, leave out --hsdp.")


def token_count(text: str) -> float:
    """Read a number of tokens, such as 10e9 or 10B."""
    unit = UNITS.get(text[-1:].upper(), 1.0)
    return unit * at_least(1e-9, 1e18)(text[:-1] if unit > 1 else text)


def find_mfu(args: argparse.Namespace) -> tuple[float, str]:
    """Return the MFU to count with, and where it comes from."""
    if args.mfu:
        return args.mfu, "given by --mfu"
    known = MEASURED.get((args.gpu_name, args.model_name))
    if known is None or args.num_layers or args.tensor_parallel > 1:
        return ASSUMED_MFU, "assumed for bfloat16; set your own with --mfu"
    mfu, setup = known
    return mfu, f"measured in chapter 5 on {setup}"


def time_and_cost(args: argparse.Namespace, config: PretrainedConfig) -> str:
    """Return how long --tokens take on all GPUs, and what they cost."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    mfu, source = find_mfu(args)
    flops = args.tokens * flops_per_token(model, config, args.seq_length)
    hours = flops / (args.gpus * PEAK_FLOPS[args.gpu_name] * mfu) / 3600
    text = f"{args.tokens:,.0f} tokens take {hours:,.1f} hours on {args.gpus} x {args.gpu_name}"
    if args.price_per_gpu_hour is not None:
        text += f" and cost {args.gpus * hours * args.price_per_gpu_hour:,.2f}"
    return f"{text}, at an MFU of {mfu:.1%} ({source})."


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("machine").add_argument
    add("--gpus", default=8, type=at_least(1), help="number of GPUs")
    add("--gpus-per-node", default=8, type=at_least(1), help="GPUs in one machine")
    add("--gpu-memory", default=80.0, type=at_least(0.001), help="GiB of one GPU")
    add("--chart", type=Path, help="png or svg file to draw into")
    add = parser.add_argument_group("time and cost").add_argument
    add("--tokens", type=token_count, help="tokens of the whole run, as 10e9 or 10B")
    add("--price-per-gpu-hour", type=at_least(0.0), help="in any currency")
    add("--gpu-name", default="NVIDIA H100", choices=PEAK_FLOPS, help="whose peak FLOP/s to use")
    share = at_least(1e-6, 1.0)
    add("--mfu", type=share, help="share of the peak (default: as measured, or assumed)")
    add = parser.add_argument_group("data and model").add_argument
    add("-m", "--model-name", default="gpt2", help="preset, folder or hub id")
    add("--num-layers", type=at_least(1), help="transformer layers (default: the model's)")
    add("-s", "--seq-length", type=at_least(2), help="tokens (default: the model's limit, <= 1024)")
    add("--param-dtype", default="float32", choices=["float32", "bfloat16"], help="of the weights")
    add("--compile", action="store_true", help="layers and loss are compiled")
    add = parser.add_argument_group("optimize").add_argument
    add("-b", "--batch-size", default=8, type=at_least(1), help="sequences per micro-batch and GPU")
    add("--accumulation", default=1, type=at_least(1), help="micro-batches per step")
    add("--reduce-every-backward", action="store_true", help="reduce after each micro-batch")
    add = parser.add_argument_group("shard").add_argument
    default_on = {"default": True, "action": argparse.BooleanOptionalAction}
    add("--reshard-after-forward", **default_on, help="free weights between forward and backward")
    add("--hsdp", action="store_true", help="shard within nodes, replicate over nodes")
    add("--tensor-parallel", default=1, type=at_least(1), help="ranks that share each layer")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    if args.gpus > args.gpus_per_node and args.gpus % args.gpus_per_node:
        raise RunError(
            f"--gpus {args.gpus} does not fill nodes of {args.gpus_per_node} GPUs: give a multiple "
            "of --gpus-per-node."
        )
    if args.tokens is None and (args.mfu or args.price_per_gpu_hour is not None):
        raise RunError("--mfu and --price-per-gpu-hour need --tokens.")
    config = models.load_config(args.model_name)
    check_tensor_parallel(args, config)
    if args.num_layers:
        config.num_hidden_layers = args.num_layers
    args.seq_length = models.sequence_length(config, args.seq_length)
    options = Options(**{f.name: getattr(args, f.name) for f in fields(Options) if f.name in args})
    cache = {}
    predictions = predict_all(config, options, cache)
    print(table(predictions, args.gpu_memory))
    if args.chart:
        title = f"{args.model_name}, {args.batch_size} x {args.seq_length} tokens, {args.gpus} GPUs"
        draw(predictions, args.gpu_memory, title, args.chart)
    sequences = args.gpus // args.tensor_parallel * args.batch_size * args.accumulation
    print(
        f"The table is for --global-batch-size {sequences}; for a larger one, set --accumulation. "
        f"A setup fits if its peak is at most {1 - RESERVE:.0%} of --gpu-memory."
    )
    print(recommend(config, options, args.gpu_memory, cache))
    if args.tokens:
        print(time_and_cost(args, config))


if __name__ == "__main__":
    launch.run(main)

"""Predict the peak memory of one GPU in a training step, and which chapter your model needs.

python 04-fsdp/memory.py -m llama-3.1-8b -s 8192 -b 1 --gpus 8 --gpu-memory 140

peak_memory.py beside this script computes the prediction and explains it.
"""

import argparse
import re
from dataclasses import fields, replace

from transformers import PretrainedConfig

from common import cli, launch
from common.cli import at_least
from common.errors import RunError
from common.inputs import models

from peak_memory import Options, predict

GIB = 2**30
CHECKPOINTING = "--activation-checkpointing"
FSDP = {"sharding": "fsdp"}
BF16 = {"sharding": "fsdp", "precision": "bf16"}
SELECTIVE = {"activation_checkpointing": "selective"}
FULL = {"activation_checkpointing": "full"}
# In the order of the chapters. Within a chapter, the setups that slow a step down most come last.
# What does not begin with -- is a variant of the chapter: make variant CHAPTER=4 WITH=cpu-offload
SETUPS = {
    "Chapter 1": {"gpus": 1},
    "Chapter 2 or 3": {"sharding": "ddp"},
    "Chapter 2 or 3 with zero1": {"sharding": "zero1"},
    "Chapter 4": FSDP,
    "Chapter 4 with selective-recomputation": FSDP | SELECTIVE,
    f"Chapter 4 with {CHECKPOINTING}": FSDP | FULL,
    f"Chapter 4 with {CHECKPOINTING} and cpu-offload": FSDP | FULL | {"cpu_offload": True},
    "Chapter 5": BF16,
    "Chapter 5 with selective-recomputation": BF16 | SELECTIVE,
    f"Chapter 5 with {CHECKPOINTING}": BF16 | FULL,
    f"Chapter 5 with {CHECKPOINTING} and cpu-offload": BF16 | FULL | {"cpu_offload": True},
}
RESERVE = 0.05  # share of a GPU's memory for CUDA, NCCL and fragmentation


def predict_all(config: PretrainedConfig, options: Options, cache: dict) -> dict[str, dict]:
    """Return the prediction for each setup; cache: see predict.

    With the variant context-parallel of chapter 5, several GPUs share a sequence.
    """
    alone = replace(options, context_parallel=1)
    setups = SETUPS
    if options.lora_rank:  # these variants do not go with lora
        setups = {n: each for n, each in SETUPS.items() if not re.search("zero1|selective", n)}
    found = {n: predict(config, replace(alone, **each), cache) for n, each in setups.items()}
    for name, changes in setups.items():
        if options != alone and "precision" in changes and "cpu_offload" not in changes:
            shared = f"{name} --context-parallel {options.context_parallel}"
            found[shared] = predict(config, replace(options, **changes), cache)
    return found


def first_fit(predictions: dict[str, dict], memory: float) -> str | None:
    """Return the first setup that fits into `memory` GiB."""
    limit = (1 - RESERVE) * memory * GIB
    return next((name for name, found in predictions.items() if found["peak"] <= limit), None)


def recommend(predictions: dict[str, dict], memory: float) -> str:
    """Return a sentence that names the setup for GPUs of `memory` GiB."""
    name = first_fit(predictions, memory)
    if name is None:
        return (
            f"No setup fits into {memory:g} GiB per GPU: give more --gpus, a smaller --batch-size "
            "or --seq-length, or --context-parallel."
        )
    found = predictions[name]
    host = f" and {found['host'] / GIB:.1f} GiB of host memory" if found["host"] else ""
    return f"{name}: {found['peak'] / GIB:.1f} of {memory:g} GiB{host} per GPU."


def refusal(config: PretrainedConfig, seq_length: int, n: int) -> str:
    """Return why n GPUs cannot share a sequence of this model, or nothing."""
    if config.model_type not in models.MODELS_WITHOUT_MASK:
        return f"needs GPT-2 or Llama, not {config.model_type}"
    return f"does not divide half of {seq_length}" if seq_length % (2 * n) else ""


def short(name: str) -> str:
    words = {"with ": "", CHECKPOINTING: "full", "selective-recomputation": "selective"}
    for old, new in {**words, " and ": ", "}.items():
        name = name.replace(old, new)
    return name


def table(predictions: dict[str, dict], memory: float) -> str:
    """Return what each setup stores, what it needs at its peak, and when the peak occurs."""
    columns = ("parameters", "gradients", "moments", "gathered", "activations", "peak", "host")
    small = max(found["peak"] for found in predictions.values()) < 4 * GIB
    unit, title = (2**20, "MiB per rank") if small else (GIB, "GiB per rank")
    width = max(28, *(len(short(name)) for name in predictions))
    lines = [f"{title:{width}}" + "".join(f"{column:>13}" for column in columns) + "  peak at"]
    for name, found in predictions.items():
        sizes = found | {key: found["parts"][key] for key in ("gathered", "activations")}
        sizes["gradients"] += found["buckets"]
        numbers = "".join(f"{sizes[column] / unit:13,.2f}" for column in columns)
        phase, layer = found["peak_at"]
        where = f"{phase} of layer {layer}" if layer >= 0 and phase.endswith("ward") else phase
        fits = first_fit({name: found}, memory)
        lines.append(f"{short(name):{width}}{numbers}  {where}{'' if fits else ': does not fit'}")
    return "\n".join(lines)


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("machine").add_argument
    add("--gpus", default=8, type=at_least(1), help="number of GPUs")
    add("--gpus-per-node", default=8, type=at_least(1), help="GPUs in one machine")
    add("--gpu-memory", default=80.0, type=at_least(0.001), help="GiB of one GPU")
    add = parser.add_argument_group("data and model").add_argument
    add("-m", "--model-name", default="gpt2", help="preset, folder or hub id")
    add("--num-layers", type=at_least(1), help="transformer layers (default: the model's)")
    add("-s", "--seq-length", type=at_least(2), help="tokens (default: the model's limit, <= 1024)")
    add("--lora-rank", default=0, type=at_least(0), help="with the variant lora; 0: all weights")
    add("--param-dtype", default="float32", choices=["float32", "bfloat16"], help="of the weights")
    add("--compile", action="store_true", help="layers and loss are compiled")
    add = parser.add_argument_group("optimize").add_argument
    add("-b", "--batch-size", default=8, type=at_least(1), help="sequences per micro-batch and GPU")
    add("--accumulation", default=1, type=at_least(1), help="micro-batches per step")
    add("--reduce-every-backward", action="store_true", help="reduce after each micro-batch")
    add("--chunk-tokens", type=at_least(1), help="of the variant chunked-loss (default: without)")
    add = parser.add_argument_group("shard").add_argument
    default_on = {"default": True, "action": argparse.BooleanOptionalAction}
    add("--reshard-after-forward", **default_on, help="free weights between forward and backward")
    add("--hsdp", action="store_true", help="shard within nodes, replicate over nodes")
    add("--context-parallel", default=1, type=at_least(1), help="GPUs that share each sequence")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    if args.gpus > args.gpus_per_node and args.gpus % args.gpus_per_node:
        raise RunError(
            f"--gpus {args.gpus} does not fill nodes of {args.gpus_per_node} GPUs: give a multiple "
            "of --gpus-per-node."
        )
    config = models.load_config(args.model_name)
    if args.num_layers:
        config.num_hidden_layers = args.num_layers
    args.seq_length, n = models.sequence_length(config, args.seq_length), args.context_parallel
    reason = refusal(config, args.seq_length, n) if n > 1 else ""
    if reason or args.gpus % n:
        raise RunError(f"--context-parallel {n} {reason or f'does not divide {args.gpus} GPUs'}.")
    options = Options(**{f.name: getattr(args, f.name) for f in fields(Options) if f.name in args})
    predictions = predict_all(config, options, {})
    print(table(predictions, args.gpu_memory))
    sequences = args.gpus * args.batch_size * args.accumulation
    shared = f" ({sequences // n} with --context-parallel)" if n > 1 else ""
    print(
        f"The table is for --global-batch-size {sequences}{shared}; for a larger one, set "
        f"--accumulation. A setup fits if its peak is at most {1 - RESERVE:.0%} of --gpu-memory.\n"
        f"full: {CHECKPOINTING}; selective: the variant selective-recomputation."
    )
    print(recommend(predictions, args.gpu_memory))


if __name__ == "__main__":
    launch.run(main)

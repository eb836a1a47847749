"""Predict what a training step holds in the memory of one GPU, and which chapter you need.

python 04-fsdp/memory.py -m llama-3.1-8b -s 8192 -b 1 --gpus 8 --gpu-memory 139

N parameters of e bytes each (4 in float32) take, on each of n GPUs, in bytes:

    | setting           | parameters | gradients | moments | gathered for a while              |
    | chapter 1         | e N        | e N       | 2 e N   |                                   |
    | DDP               | e N        | e N (*)   | 2 e N   |                                   |
    | DDP, --zero1      | e N        | e N (*)   | 2 e N/n | moments go by whole parameters    |
    | chapters 4 and 5  | e N/n      | e N/n     | 2 e N/n | the root's group and a few blocks |

(*) in DDP's buckets; with accumulation once more outside of them, until the last backward pass.
Sharding cuts each parameter along its first dimension d into n pieces of ceil(d / n) rows.
Sources: https://arxiv.org/abs/1910.02054 (ZeRO) and torch/distributed/fsdp/_fully_shard.

On top come activations: what the forward pass keeps for the backward pass. They are counted, not
computed: the model runs once on the device "meta", where tensors have shapes and no data. By hand,
GPT-2's block of width d and h heads keeps for each token in float32, without checkpointing,

    4 (16 d + 4 + h): inputs of both norms 2 d, their outputs 2 d, mean and deviation 4, q k v 3 d,
    attention's output d (and h numbers of its softmax), the MLP's 4 d before and after its GELU

and with full checkpointing 4 d, its input. The head keeps log-probabilities, 4 V for V tokens of
vocabulary, and its backward pass holds two more of that size for a moment. Compiled, it holds the
logits and their gradient, and with selective checkpointing a block does not keep its last product,
which nothing in its backward pass needs.

Against steps on a CPU: states are right to the byte, the fullest moment to 1% where activations
decide it and to 4% with a handful of tokens. Left out: what kernels and collectives hold inside,
cuBLAS' workspace (32 MiB), copies of single shards, masks of models that need them, and what
compiled blocks of Llama do not keep without checkpointing. The GPU's context, NCCL's buffers and
gaps between tensors come out of RESERVE.
"""

import argparse
import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from common import cli, launch, models
from common.cli import InputError, at_least

GIB = 2**30
# The same as in train_llm.py: what selective checkpointing keeps.
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
KEPT = [getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default for kind in ATTENTION]
KEPT += [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


@dataclass(frozen=True)
class Options:
    """The flags of the chapters that decide about memory, and the machine."""

    sharding: str = "none"  # none: chapter 1; ddp; zero1; fsdp: chapters 4 and 5
    gpus: int = 1
    gpus_per_node: int = 8
    batch_size: int = 1  # sequences per GPU and micro-batch
    seq_length: int = 1024  # tokens
    accumulation: int = 1  # micro-batches per step
    param_dtype: str = "float32"
    precision: str = "tf32"  # of chapter 5; bf16: gathered groups and activations in 2 bytes
    activation_checkpointing: str = "none"
    reshard_after_forward: bool = True
    reduce_every_backward: bool = False
    prefetch: int = 1
    hsdp: bool = False
    cpu_offload: bool = False
    compile: bool = False


# --- activations ---


class GpuKernels(TorchFunctionMode):
    """Calls the attention kernels that a GPU has: on the meta device, PyTorch calls none of them.

    In bfloat16 that is flash attention (cuDNN's keeps the same), in float32 the memory-efficient
    one. Up to torch 2.13 that one does not take fewer heads of keys than of queries; without a
    kernel, seq_length^2 scores of each head stay (https://github.com/pytorch/pytorch/pull/191085).
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key, value = args
            causal, scale = kwargs["is_causal"], kwargs.get("scale")
            if query.dtype == torch.bfloat16:
                flash = torch.ops.aten._scaled_dot_product_flash_attention
                return flash(query, key, value, 0.0, causal, scale=scale)[0]
            if query.shape[1] == key.shape[1]:
                efficient = torch.ops.aten._scaled_dot_product_efficient_attention
                return efficient(query, key, value, None, True, 0.0, causal, scale=scale)[0]
        return func(*args, **kwargs)


def with_gpu_kernels(forward: Callable, *args: object, **kwargs: object) -> object:
    with GpuKernels():
        return forward(*args, **kwargs)


class LiveBytes(TorchDispatchMode):
    """Adds up the storages of all tensors alive, the model's own left out.

    moments: [phase, block, most bytes alive in it], in the order of the step.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.alive = 0
        self.moments: list[list] = [["forward", -1, 0]]
        self.known = WeakIdKeyDictionary()
        for tensor in [*model.parameters(), *model.buffers()]:
            self.known[tensor.untyped_storage()] = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self.known[storage] = storage.nbytes()
                    self.alive += storage.nbytes()
                    weakref.finalize(storage, self.forget, storage.nbytes()).atexit = False
        self.moments[-1][2] = max(self.moments[-1][2], self.alive)
        return result

    def forget(self, size: int) -> None:
        self.alive -= size

    def start(self, phase: str, block: int) -> None:
        self.moments.append([phase, block, self.alive])


class CompiledLoss(torch.autograd.Function):
    """What a compiled loss keeps: the logits, and in the backward pass their gradient."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(*ctx.saved_tensors)


def count(
    config: PretrainedConfig, options: Options, gradients: str
) -> tuple[list[list[torch.Size]], list[tuple[str, int, int]]]:
    """Return the shapes in each group of parameters, and (phase, block, most bytes alive in it).

    A group is what one fully_shard gathers: a block, or all else, which comes last.
    Phases: forward of each block; head: final norm, logits, loss, and their backward pass; backward
    of each block, and of block -1, the embeddings. The bytes are activations, what is computed on
    the way, and gradients of parameters: all of them ("kept"), each until its block is done
    ("group"), or each until it is complete ("one").
    """
    half = options.precision == "bf16" or options.param_dtype == "bfloat16"
    models.causal_attention(config)  # registers causal_sdpa; a mask that a model needs is left out
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation="causal_sdpa",
            dtype=torch.bfloat16 if half else torch.float32,
        )
    blocks = models.find_blocks(model)
    parameters = [list(block.parameters()) for block in blocks]
    inside = {id(parameter) for group in parameters for parameter in group}
    parameters.append([p for p in model.parameters() if id(p) not in inside])
    live = LiveBytes(model)

    def enter_backward(block: int, gradient: torch.Tensor) -> None:
        if gradients == "group" and block + 1 < len(blocks):
            blocks[block + 1].zero_grad(set_to_none=True)
        live.start("backward", block)

    def enter_forward(block: int, module, args: tuple, kwargs: dict) -> None:
        live.start("forward", block)
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden.register_hook(functools.partial(enter_backward, block - 1))

    def enter_head(module, args: tuple, output) -> None:
        live.start("head", len(blocks))
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        hidden.register_hook(functools.partial(enter_backward, len(blocks) - 1))

    selective = functools.partial(create_selective_checkpoint_contexts, KEPT)
    keep = {"context_fn": selective} if options.activation_checkpointing == "selective" else {}
    for i, block in enumerate(blocks):
        block.forward = functools.partial(with_gpu_kernels, block.forward)
        if options.activation_checkpointing != "none":
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **keep
            )
        block.register_forward_pre_hook(functools.partial(enter_forward, i), with_kwargs=True)
    blocks[-1].register_forward_hook(enter_head)
    if options.compile:
        model.loss_function = lambda logits, *_, **__: CompiledLoss.apply(logits)
    if gradients == "one":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with live:
        shape = (options.batch_size, options.seq_length)
        tokens = torch.zeros(shape, dtype=torch.int64, device="meta")
        model(input_ids=tokens, labels=tokens).loss.backward()
    groups = [[parameter.shape for parameter in group] for group in parameters]
    if options.compile and options.activation_checkpointing == "selective":
        last_product = math.prod(shape) * config.hidden_size * (2 if half else 4)
        for moment in live.moments:
            phase, block, _ = moment
            keeping = max(0, block + (phase == "backward"))  # blocks that keep something then
            moment[2] -= keeping * last_product
    return groups, [tuple(moment) for moment in live.moments]


# --- states and gathered groups ---


def shard_numel(group: list[torch.Size], ranks: int) -> int:
    """Return the numbers in rank 0's shards of a group: ceil(d / ranks) rows of each parameter."""
    return sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in group)


def zero1_numel(shapes: list[torch.Size], ranks: int) -> int:
    """Return the numbers whose moments the fullest rank has: the largest parameter that is left
    goes to the rank with the least, as ZeroRedundancyOptimizer does it."""
    sizes = [0] * ranks
    for numel in sorted((math.prod(shape) for shape in shapes), reverse=True):
        sizes[sizes.index(min(sizes))] += numel
    return max(sizes)


def ranks_of(options: Options) -> int:
    """Return among how many ranks a parameter is cut in pieces."""
    if options.sharding != "fsdp":
        return 1
    return min(options.gpus, options.gpus_per_node) if options.hsdp else options.gpus


def gathered_bytes(
    whole: list[int], sent: list[int], phase: str, block: int, options: Options
) -> int:
    """Return the bytes of gathered parameters and of the buffers of collectives in a phase.

    whole, sent: bytes of each group's parameters when gathered, of its gradients when sent. A group
    arrives in one flat buffer and is copied from there. The forward pass holds that buffer until
    the next group has arrived; the backward pass holds what is sent until the next is to be sent.
    """
    *blocks, root = whole  # the root's group stays from the first moment to the last
    here = blocks[max(0, block) if options.reshard_after_forward else 0 : block + 1]
    buffers = []
    if phase == "forward" and block < 0:  # the root's buffer goes when block 0 is in its place
        buffers = [root, blocks[0], blocks[0]]
    elif phase == "forward":
        buffers = blocks[block : block + 1 + options.prefetch]
    elif options.reshard_after_forward:  # else there is nothing to gather again
        ahead = max(1, options.prefetch) if phase == "backward" else 1
        buffers = blocks[max(0, block - ahead) : max(0, block)]
    if phase == "backward":
        buffers += sent[block + 1 : -1][:1]
    return root + sum(here) + sum(buffers) * (ranks_of(options) > 1)


def predict(config: PretrainedConfig, options: Options, counted: dict | None = None) -> dict:
    """Return the bytes on the rank that holds most.

    parameters, gradients, moments: what is stored between the backward pass and the update,
    buckets: DDP's, where gradients are not in them,
    host: bytes of parameters, gradients and moments in host memory (--cpu-offload),
    peak: the most at any moment of a step on the GPU,
    moment: (phase, block) of the peak, parts: the bytes that it is made of.

    counted: what earlier calls for this config have counted; this one adds to it.
    """
    sharded = options.sharding == "fsdp"
    accumulates = options.accumulation > 1
    # Gradients that are not sent after each backward pass, in their full size on each rank.
    unsent = accumulates and not (sharded and options.reduce_every_backward)
    stored = 2 if options.param_dtype == "bfloat16" else 4  # bytes of a number
    computed = 2 if options.precision == "bf16" else stored  # where it is computed with
    reduced = 4 if options.precision == "bf16" else stored  # where gradients are added up
    if sharded:
        gradients = "one" if unsent and computed == reduced else "group"
    else:
        gradients = "kept" if options.sharding == "none" and not accumulates else "one"
    tokens = (options.batch_size, options.seq_length)
    key = (*tokens, stored, computed, options.activation_checkpointing, options.compile, gradients)
    counted = {} if counted is None else counted
    if key not in counted:
        counted[key] = count(config, options, gradients)
    groups, activations = counted[key]

    ranks = ranks_of(options)
    shards = [shard_numel(group, ranks) for group in groups]
    shapes = [shape for group in groups for shape in group]
    with_moments = zero1_numel(shapes, options.gpus) if options.sharding == "zero1" else sum(shards)
    states = {
        "parameters": stored * sum(shards),
        "gradients": stored * sum(shards),
        "moments": 2 * stored * with_moments,
        "buckets": stored * sum(shards) * (unsent and options.sharding in ("ddp", "zero1")),
    }
    on_gpu = dict.fromkeys(states, 0) if options.cpu_offload else states
    whole = [ranks * shard * computed for shard in shards]
    sent = [ranks * shard * reduced for shard in shards]
    # The update comes when activations are gone. AdamW makes its moments in the first one.
    moments = {("update", 0): {**on_gpu, "gathered": 0, "activations": 0}}
    for phase, block, size in activations:
        parts = {**on_gpu, "gathered": 0, "activations": size}
        done = slice(block + 1, len(shards) - 1) if phase == "backward" else slice(0)
        if sharded:
            parts["gathered"] = gathered_bytes(whole, sent, phase, block, options)
            parts["gathered"] += (sum(sent) - sum(sent[done])) * unsent
        if sharded and not (accumulates and not unsent) and not options.cpu_offload:
            parts["gradients"] = stored * sum(shards[done])
        if options.sharding == "none" and not accumulates:
            parts["gradients"] = 0  # counted with the activations
        moments[phase, block] = parts
    if sharded:  # last come the root's gradients and the buffer that they are sent from
        parts = {**on_gpu, "gathered": (sent if unsent else whole)[-1] + sent[-1], "activations": 0}
        parts["gradients"] = min(on_gpu["gradients"], stored * sum(shards[:-1]))
        moments["send", 0] = parts
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return {
        **states,
        "host": sum(states.values()) - sum(on_gpu.values()),
        "peak": sum(moments[moment].values()),
        "moment": moment,
        "parts": moments[moment],
    }


# --- which chapter ---

KEEP = "--activation-checkpointing"
FSDP = {"sharding": "fsdp"}
BF16 = {"sharding": "fsdp", "precision": "bf16"}
SELECTIVE = {"activation_checkpointing": "selective"}
FULL = {"activation_checkpointing": "full"}
# In the order of the chapters, and in each what slows a step down most comes last.
LADDER = {
    "Chapter 1": {"gpus": 1},
    "Chapter 2 or 3": {"sharding": "ddp"},
    "Chapter 2 or 3 with --zero1": {"sharding": "zero1"},
    "Chapter 4": FSDP,
    f"Chapter 4 with {KEEP} selective": FSDP | SELECTIVE,
    f"Chapter 4 with {KEEP} full": FSDP | FULL,
    f"Chapter 4 with {KEEP} full --cpu-offload": FSDP | FULL | {"cpu_offload": True},
    "Chapter 5": BF16,
    f"Chapter 5 with {KEEP} selective": BF16 | SELECTIVE,
    f"Chapter 5 with {KEEP} full": BF16 | FULL,
    f"Chapter 5 with {KEEP} full --cpu-offload": BF16 | FULL | {"cpu_offload": True},
}
# The GPU's context, NCCL's buffers, and gaps between tensors.
RESERVE = 0.05
MOST_GPUS = 2**16


def climb(config: PretrainedConfig, options: Options, counted: dict) -> dict[str, dict]:
    """Return the prediction for each rung of the ladder; counted: see predict."""
    return {
        name: predict(config, replace(options, **changes), counted)
        for name, changes in LADDER.items()
    }


def first_fit(rungs: dict[str, dict], memory: float, host: bool = True) -> str | None:
    """Return the first rung that fits in `memory` GiB, with or without states on the host."""
    room = (1 - RESERVE) * memory * GIB
    fits = (name for name in rungs if rungs[name]["peak"] <= room)
    return next((name for name in fits if host or not rungs[name]["host"]), None)


def answer(config: PretrainedConfig, options: Options, memory: float, counted: dict) -> str:
    """Return the sentence that says which chapter a model needs on GPUs of `memory` GiB."""
    rungs = climb(config, options, counted)
    name = first_fit(rungs, memory)
    if name is None:  # states on the host leave what does not shrink with the number of GPUs
        return "Nothing fits on however many GPUs: lower --batch-size or --seq-length."
    use = f"{name}: {rungs[name]['peak'] / GIB:.1f} of {memory:g} GiB per GPU"
    if not rungs[name]["host"]:
        return f"{use}." if name == "Chapter 1" else f"{use}; nothing before it fits."
    use += (
        f" and {rungs[name]['host'] / GIB:.1f} GiB of host memory for each; nothing before it fits"
    )
    gpus = options.gpus
    while gpus < MOST_GPUS:
        gpus *= 2
        more = climb(config, replace(options, gpus=gpus), counted)
        if without := first_fit(more, memory, host=False):
            return f"{use}. On {gpus} GPUs: {without}."
    return f"{use}."


def short(name: str) -> str:
    return name.replace("with ", "").replace(f"{KEEP} ", "")


def show(rungs: dict[str, dict], memory: float) -> str:
    """Return the table: what is stored, and what the fullest moment of a step adds up to."""
    small = max(rung["peak"] for rung in rungs.values()) < 4 * GIB
    columns = ("parameters", "gradients", "moments", "gathered", "activations", "peak", "host")
    unit = "MiB per rank" if small else "GiB per rank"
    lines = [f"{unit:28}" + "".join(f"{column:>12}" for column in columns) + "  fullest at"]
    for name, rung in rungs.items():
        sizes = rung | {key: rung["parts"][key] for key in ("gathered", "activations")}
        sizes["gradients"] += rung["buckets"]
        numbers = "".join(f"{sizes[c] / (2**20 if small else GIB):12,.2f}" for c in columns)
        phase, block = rung["moment"]
        place = f"{phase} of block {block}" if block >= 0 and phase.endswith("ward") else phase
        fits = first_fit({name: rung}, memory)
        lines.append(f"{short(name):28}{numbers}  {place}{'' if fits else ': too much'}")
    return "\n".join(lines)


def draw(rungs: dict[str, dict], memory: float, title: str, path: Path) -> None:
    """Draw the fullest moment of each rung as a stacked bar, the GPU's memory as a line."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--chart needs matplotlib: pip install matplotlib.") from None
    if path.suffix not in (".png", ".svg") or not path.parent.is_dir():
        raise InputError(f"--chart {path} is no .png or .svg file in a folder that is there.")
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(rungs)
    for part in ("parameters", "gradients", "buckets", "moments", "gathered", "activations"):
        sizes = [rung["parts"][part] / GIB for rung in rungs.values()]
        if any(sizes):
            axes.barh([short(name) for name in rungs], sizes, left=left, label=part)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.axvline(memory, color="black", linestyle="--", label=f"the GPU: {memory:g} GiB")
    # What is far too much need not be seen to its end.
    axes.set_xlim(0, 1.05 * max(memory, min(max(left), 3 * memory)))
    axes.invert_yaxis()
    axes.set(title=title, xlabel="GiB per GPU at the fullest moment of a step")
    axes.legend()
    with matplotlib.rc_context({"svg.hashsalt": "memory"}):  # the same file each time
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("machine").add_argument
    add("--gpus", default=8, type=at_least(1), help="in all")
    add("--gpus-per-node", default=8, type=at_least(1), help="of one machine")
    add("--gpu-memory", default=80.0, type=at_least(0.001), help="GiB of one GPU")
    add("--chart", type=Path, help="png or svg file to draw into")
    add = parser.add_argument_group("data and model").add_argument
    add("-m", "--model-name", default="gpt2", help="preset, folder or hub id")
    add("--num-layers", type=at_least(1), help="blocks (if absent: the model's)")
    add("-s", "--seq-length", type=at_least(2), help="tokens (if absent: positions, <= 1024)")
    add("--param-dtype", default="float32", choices=["float32", "bfloat16"], help="of the weights")
    add("--compile", action="store_true", help="blocks and loss are compiled")
    add = parser.add_argument_group("optimize").add_argument
    add("-b", "--batch-size", default=8, type=at_least(1), help="sequences per GPU at once")
    add("--accumulation", default=1, type=at_least(1), help="micro-batches per step")
    add("--reduce-every-backward", action="store_true", help="send each micro-batch's gradients")
    add = parser.add_argument_group("shard").add_argument
    whole = {"action": argparse.BooleanOptionalAction, "default": True}
    add("--reshard-after-forward", **whole, help="free gathered weights, gather them twice")
    add("--prefetch", default=1, type=at_least(0), help="blocks gathered ahead; 0: FSDP decides")
    add("--hsdp", action="store_true", help="shard within nodes, replicate over nodes")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    if args.gpus > args.gpus_per_node and args.gpus % args.gpus_per_node:
        raise InputError(
            f"{args.gpus} GPUs do not fill nodes of {args.gpus_per_node}: give a multiple of "
            "--gpus-per-node."
        )
    config = models.load_config(args.model_name)
    if args.num_layers:
        config.num_hidden_layers = args.num_layers
    args.seq_length = models.check_sizes(config, (), args.seq_length)  # for any tokenizer
    options = Options(**{f.name: getattr(args, f.name) for f in fields(Options) if f.name in args})
    counted = {}
    rungs = climb(config, options, counted)
    print(show(rungs, args.gpu_memory))
    if args.chart:
        title = f"{args.model_name}, {args.batch_size} x {args.seq_length} tokens, {args.gpus} GPUs"
        draw(rungs, args.gpu_memory, title, args.chart)
    sequences = args.gpus * args.batch_size * args.accumulation
    print(f"That is for --global-batch-size {sequences}; another one needs another --accumulation.")
    print(answer(config, options, args.gpu_memory, counted))


if __name__ == "__main__":
    launch.run(main)

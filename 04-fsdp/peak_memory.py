"""Predict the peak memory of one GPU in a training step, without a GPU.

N parameters of e bytes each (4 in float32) take, on each of n GPUs, in bytes:

    | setup            | parameters | gradients | Adam's moments | gathered for a while          |
    | chapter 1        | e N        | e N       | 2 e N          |                               |
    | DDP              | e N        | e N (*)   | 2 e N          |                               |
    | DDP, zero1       | e N        | e N (*)   | 2 e N/n (**)   |                               |
    | chapters 4 and 5 | e N/n      | e N/n     | 2 e N/n        | the root group, a few layers  |

(*) In DDP's buckets. With accumulation, a second copy exists until the last backward pass.
(**) ZeRO-1 assigns whole parameters to ranks, so the ranks do not hold equally much.
FSDP cuts each parameter along its first dimension d into n shards of ceil(d / n) rows.
Sources: https://arxiv.org/abs/1910.02054 (ZeRO) and torch/distributed/fsdp/_fully_shard.

With the variant lora, only the adapters have gradients and moments, and e N counts both them and
the frozen weights.

Activations, the tensors that the forward pass saves for the backward pass, come on top. They are
counted: the model runs one step on the meta device, where tensors have shapes but no data
(reference.md adds them up by hand). A compiled loss holds only the logits and their gradient, or,
with chunked-loss, the logits of a chunk. A
compiled layer with selective checkpointing does not save its last matmul, which its backward pass
does not need. With context parallelism, a GPU has its share of the positions, and in each layer the
keys and values of all positions, repeated for each query head.

Accuracy, compared with training steps on a CPU: parameters, gradients and moments are exact. The
peak is within 1% if activations dominate, and within 7% for sequences of a handful of tokens (up to
16% too low with bf16 and --reduce-every-backward). Not included: workspaces of kernels and
collectives (cuBLAS takes 32 MiB), copies of single shards, attention masks, and the activations
that compiled layers of Llama recompute on their own.
"""

import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.weak import WeakIdKeyDictionary
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from common.errors import RunError
from common.inputs import models

sys.path.append(str(Path(__file__).resolve().parents[1] / "01-single-gpu"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "01-single-gpu/diffs"))
from chunked_loss import chunk_loss

from trained_model import import_lora

# The same as in the variant selective-recomputation.
KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
SAVED_OPS = [getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default for kernel in KERNELS]
SAVED_OPS += [getattr(torch.ops.aten, matmul).default for matmul in ("mm", "addmm", "_scaled_mm")]


@dataclass(frozen=True)
class Options:
    """The machine, and the flags and variants of the chapters that change the memory."""

    sharding: str = "none"  # none: chapter 1; ddp; zero1; fsdp: chapters 4 and 5
    gpus: int = 1
    gpus_per_node: int = 8
    batch_size: int = 1  # sequences per GPU and micro-batch
    seq_length: int = 1024  # tokens
    accumulation: int = 1  # micro-batches per step
    param_dtype: str = "float32"
    precision: str = "tf32"  # chapter 5's flag; with bf16, layers are gathered and run in bfloat16
    activation_checkpointing: str = "none"
    reshard_after_forward: bool = True
    reduce_every_backward: bool = False
    hsdp: bool = False
    cpu_offload: bool = False
    compile: bool = False
    chunk_tokens: int | None = None  # tokens that have logits at once, with chunked-loss
    context_parallel: int = 1  # GPUs that share each sequence, with the variant of this name
    lora_rank: int = 0  # of the adapters, with the variant lora; 0: all weights are trained


def predict(config: PretrainedConfig, options: Options, cache: dict | None = None) -> dict:
    """Return the bytes on the rank that holds the most.

    parameters, gradients, moments: what is stored between the backward pass and the update
    buckets: DDP's buckets, if the gradients are not stored in them
    host: bytes of parameters, gradients and moments in host memory (cpu-offload)
    peak: the largest sum on the GPU during a step
    peak_at: (phase, layer) of the peak; parts: bytes of each part at the peak

    cache: the activations that earlier calls for this config counted; this call adds to it.
    """
    sharded = options.sharding == "fsdp"
    accumulates = options.accumulation > 1
    reduces_each = accumulates and sharded and options.reduce_every_backward
    unreduced = accumulates and not reduces_each  # full-size gradients, until the last backward
    stored = 2 if options.param_dtype == "bfloat16" else 4  # bytes per number
    computed = 2 if options.precision == "bf16" else stored  # in the forward and backward passes
    reduced = 4 if options.precision == "bf16" else stored  # in the reduction of gradients
    if sharded:
        lifetime = "tensor" if unreduced and computed == reduced else "layer"
    else:
        lifetime = "step" if options.sharding == "none" and not accumulates else "tensor"
    key = (options.batch_size, options.seq_length, stored, computed)
    key += (options.activation_checkpointing, options.compile, options.chunk_tokens)
    key += (options.context_parallel, lifetime)
    key += (options.lora_rank,)
    cache = {} if cache is None else cache
    if key not in cache:
        cache[key] = count_activations(config, options, lifetime)
    groups, trained_groups, activations = cache[key]

    ranks = ranks_per_shard_group(options)
    shards = [shard_numel(group, ranks) for group in groups]
    trained = [shard_numel(group, ranks) for group in trained_groups]
    shapes = [shape for group in trained_groups for shape in group]
    has_moments = zero1_numel(shapes, options.gpus) if options.sharding == "zero1" else sum(trained)
    states = {
        "parameters": stored * sum(shards),
        "gradients": stored * sum(trained),
        "moments": 2 * stored * has_moments,
        "buckets": stored * sum(trained) * (unreduced and options.sharding in ("ddp", "zero1")),
    }
    on_gpu = dict.fromkeys(states, 0) if options.cpu_offload else states
    gathered = [ranks * shard * computed for shard in shards]
    sent = [ranks * shard * reduced for shard in trained]
    # During the optimizer step there are no activations. The first step creates the moments.
    phases = {("update", 0): {**on_gpu, "gathered": 0, "activations": 0}}
    for phase, layer, size in activations:
        parts = {**on_gpu, "gathered": 0, "activations": size}
        done = slice(layer + 1, len(trained) - 1) if phase == "backward" else slice(0)
        if sharded:
            parts["gathered"] = gathered_bytes(gathered, sent, phase, layer, options)
            parts["gathered"] += (sum(sent) - sum(sent[done])) * unreduced
            if not reduces_each and not options.cpu_offload:
                parts["gradients"] = stored * sum(trained[done])
        elif lifetime == "step":
            parts["gradients"] = 0  # counted with the activations
        phases[phase, layer] = parts
    if sharded:  # the last reduce-scatter: the root's gradients and their communication buffer
        last = (sent if unreduced else gathered)[-1] + sent[-1]
        parts = {**on_gpu, "gathered": last, "activations": 0}
        parts["gradients"] = min(on_gpu["gradients"], stored * sum(trained[:-1]))
        phases["reduce", 0] = parts
    peak_at = max(phases, key=lambda name: sum(phases[name].values()))
    return {
        **states,
        "host": sum(states.values()) - sum(on_gpu.values()),
        "peak": sum(phases[peak_at].values()),
        "peak_at": peak_at,
        "parts": phases[peak_at],
    }


# --- parameters, gradients, moments ---


def ranks_per_shard_group(options: Options) -> int:
    """Return the number of ranks that a parameter is sharded over."""
    if options.sharding != "fsdp":
        return 1
    return min(options.gpus, options.gpus_per_node) if options.hsdp else options.gpus


def shard_numel(group: list[torch.Size], ranks: int) -> int:
    """Return the size of rank 0's shards of a group: ceil(d / ranks) rows of each parameter."""
    return sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in group)


def zero1_numel(shapes: list[torch.Size], ranks: int) -> int:
    """Return the size of the parameters whose moments are on the rank that holds the most.

    ZeroRedundancyOptimizer assigns the parameters in order of decreasing size, each to the rank
    that holds the least so far.
    """
    sizes = [0] * ranks
    for numel in sorted((math.prod(shape) for shape in shapes), reverse=True):
        sizes[sizes.index(min(sizes))] += numel
    return max(sizes)


def gathered_bytes(
    gathered: list[int], sent: list[int], phase: str, layer: int, options: Options
) -> int:
    """Return the bytes of gathered parameters and of communication buffers in a phase.

    gathered, sent: for each group, the bytes of its gathered parameters and of the gradients that
    its reduce-scatter sends. An all-gather writes a group to one flat buffer, from which it is
    copied. The forward pass keeps this buffer until the next group is gathered. The backward pass
    keeps the gradients that a group sends until the next group sends its own.
    """
    *layers, root = gathered  # the root group stays gathered from the start to the end of a step
    current = layers[max(0, layer) if options.reshard_after_forward else 0 : layer + 1]
    buffers = []
    if phase == "forward" and layer < 0:  # the root's buffer is freed when layer 0 is copied out
        buffers = [root, layers[0], layers[0]]
    elif phase == "forward":
        buffers = [layers[layer]]
    elif options.reshard_after_forward:  # otherwise nothing is gathered again
        buffers = layers[max(0, layer - 1) : max(0, layer)]
    if phase == "backward":
        buffers += sent[layer + 1 : -1][:1]
    return root + sum(current) + sum(buffers) * (ranks_per_shard_group(options) > 1)


# --- activations ---


def count_activations(
    config: PretrainedConfig, options: Options, lifetime: str
) -> tuple[list[list[torch.Size]], list[list[torch.Size]], list[tuple[str, int, int]]]:
    """Return the shapes of each group, of its trained ones, and (phase, layer, peak bytes).

    A group is what one fully_shard call gathers: the parameters of a layer, or, in the last group,
    all others. The phases are the forward pass of each layer; the head, which is the final norm,
    the logits, the loss and their backward pass; and the backward pass of each layer, where layer
    -1 is the embeddings. The bytes are activations, temporary tensors and gradients of parameters.

    lifetime: a gradient is counted until the end of the "step", until the backward pass of its
    "layer" has ended, or until the "tensor" itself is complete.
    """
    half = options.precision == "bf16" or options.param_dtype == "bfloat16"
    attention = models.causal_attention(config)
    if attention == "eager":
        raise cannot_predict(config, "transformers has no SDPA for it")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation="sdpa" if attention == "sdpa" else models.NO_MASK,
            dtype=torch.bfloat16 if half else torch.float32,
        )
    model.config.pad_token_id = None  # GPT-2 would look for padding in the tokens
    if options.context_parallel > 1:
        attend = partial(attend_to_row, options.context_parallel)
        AttentionInterface.register("predicted_context_parallel", attend)
        model.config._attn_implementation = "predicted_context_parallel"
    if options.lora_rank:
        import_lora().add_adapters(model, options.lora_rank)
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    parameters = [list(layer.parameters()) for layer in layers]
    in_layers = {id(parameter) for group in parameters for parameter in group}
    parameters.append([p for p in model.parameters() if id(p) not in in_layers])
    live = LiveBytes(model)

    def enter_backward(i: int, gradient: torch.Tensor) -> None:
        if lifetime == "layer" and i + 1 < len(layers):
            layers[i + 1].zero_grad(set_to_none=True)
        live.start("backward", i)

    def enter_forward(i: int, module, args: tuple, kwargs: dict) -> None:
        live.start("forward", i)
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:  # not if it comes from frozen embeddings
            hidden.register_hook(partial(enter_backward, i - 1))

    def enter_head(module, args: tuple, output) -> None:
        live.start("head", len(layers))
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        hidden.register_hook(partial(enter_backward, len(layers) - 1))

    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if options.activation_checkpointing == "selective":
        selective = partial(create_selective_checkpoint_contexts, SAVED_OPS)
        recompute = partial(recompute, context_fn=selective)
    for i, layer in enumerate(layers):
        layer.forward = partial(with_gpu_kernels, layer.forward)
        if options.activation_checkpointing != "none":
            layer.forward = partial(recompute, layer.forward)
        layer.register_forward_pre_hook(partial(enter_forward, i), with_kwargs=True)
    layers[-1].register_forward_hook(enter_head)
    if options.chunk_tokens:
        chunk_loss(model, options.chunk_tokens, compile=False)
        if options.compile:
            model.loss_function.loss_of_chunk = lambda logits, labels: logits.new_zeros(())
    elif options.compile:
        model.loss_function = lambda logits, *_, **__: CompiledLoss.apply(logits)
    if lifetime == "tensor":
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    shape = (options.batch_size, options.seq_length // options.context_parallel)
    tokens = torch.zeros(shape, dtype=torch.int64, device="meta")
    names = ("input_ids", "labels", *["position_ids"] * (options.context_parallel > 1))
    batch = dict.fromkeys(names, tokens)
    try:
        with live:
            model(**batch).loss.backward()
    except RuntimeError as error:  # for example, it reads a number from a tensor
        reason = f"it does not run on the meta device ({str(error).splitlines()[0].rstrip('.')})"
        raise cannot_predict(config, reason) from error
    forwards = [layer for phase, layer, _ in live.phases if phase == "forward"]
    if forwards != list(range(-1, len(layers))):
        raise cannot_predict(config, "its layers do not run once each, one after the other")
    groups = [[parameter.shape for parameter in group] for group in parameters]
    trained = [[p.shape for p in group if p.requires_grad] for group in parameters]
    if options.compile and options.activation_checkpointing == "selective":
        last_matmul = math.prod(shape) * config.hidden_size * (2 if half else 4)
        for entry in live.phases:
            phase, layer, _ = entry
            finished = max(0, layer + (phase == "backward"))  # layers that have saved tensors then
            entry[2] -= finished * last_matmul
    return groups, trained, [tuple(entry) for entry in live.phases]


def cannot_predict(config: PretrainedConfig, reason: str) -> RunError:
    return RunError(
        f"The memory of {config.model_type} cannot be predicted, because {reason}: measure it in a "
        "short run."
    )


class LiveBytes(TorchDispatchMode):
    """Adds up the bytes of all tensors that exist, except those of the model.

    phases: [phase, layer, peak bytes], in the order of the step.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.alive = 0
        self.phases: list[list] = [["forward", -1, 0]]
        self.known = WeakIdKeyDictionary()
        for tensor in [*model.parameters(), *model.buffers()]:
            self.known[tensor.untyped_storage()] = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        for tensor in (each for each in results if isinstance(each, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage not in self.known:
                self.known[storage] = storage.nbytes()
                self.alive += storage.nbytes()
                weakref.finalize(storage, self.forget, storage.nbytes()).atexit = False
        self.phases[-1][2] = max(self.phases[-1][2], self.alive)
        return result

    def forget(self, size: int) -> None:
        self.alive -= size

    def start(self, phase: str, layer: int) -> None:
        self.phases.append([phase, layer, self.alive])


class GpuKernels(TorchFunctionMode):
    """Calls the attention kernels of a GPU, which PyTorch does not call on the meta device.

    For bfloat16 that is flash attention (cuDNN's kernel saves the same tensors), for float32 the
    memory-efficient kernel. Up to torch 2.13, the latter needs as many key heads as query heads.
    Without a kernel, seq_length^2 scores per head would stay in memory
    (https://github.com/pytorch/pytorch/pull/191085).
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch._grouped_mm:
            return ExpertMatmul.apply(*args)
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


def attend_to_row(n_ranks: int, module, query, key, value, _, dropout=0.0, scaling=None, **__):
    """Hold what the attention of rank 0 holds with the variant context-parallel."""
    (first, last), n = query.chunk(2, dim=2), query.shape[2] // 2
    key, value = gather(key, n_ranks), gather(value, n_ranks)
    options = {"is_causal": True, "scale": scaling, "enable_gqa": True}
    output = scaled_dot_product_attention(first, key[:, :, :n], value[:, :, :n], **options)
    output = torch.cat((output, MergedAttention.apply(last, key, value)), dim=2)
    return output.transpose(1, 2).contiguous(), None


class MergedAttention(torch.autograd.Function):
    """Holds what the two calls in chapter 5's context_attention.py hold.

    It calls a kernel, too, because selective checkpointing saves the outputs of kernels.
    """

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.sizes = (key.shape[2] - query.shape[2], query.shape[2])
        parts = zip(key.split(ctx.sizes, dim=2), value.split(ctx.sizes, dim=2), strict=True)
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        (output_1, log_sum_1, *_), (output_2, log_sum_2, *_) = [flash(query, *p) for p in parts]
        output = output_1.float()
        output = (output + output_2.float()).to(query.dtype)
        log_sum = torch.logaddexp(log_sum_1, log_sum_2)
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    def backward(ctx, _):
        query, key, value, *_ = ctx.saved_tensors
        queries = torch.empty_like(query), torch.empty_like(query)
        pairs = [
            [torch.empty_like(part) for part in each.split(ctx.sizes, dim=2)]
            for each in (key, value)
        ]
        return queries[0] + queries[1], *(torch.cat(pair, dim=2) for pair in pairs)


def gather(part: torch.Tensor, n_ranks: int) -> torch.Tensor:
    """Return a tensor of all positions, from as many temporary tensors as the all-gather needs."""
    whole = torch.cat(part.repeat(n_ranks, 1, 1, 1).chunk(n_ranks), dim=2)
    early, late = whole.unflatten(2, (n_ranks, 2, -1)).unbind(3)
    return torch.cat((early, late.flip(2)), dim=2).flatten(2, 3)


class ExpertMatmul(torch.autograd.Function):
    """Holds what the matmul of a mixture of experts holds; on meta, PyTorch has bfloat16 only."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(rows.shape[0], weights.shape[-1])

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weights = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weights)


class CompiledLoss(torch.autograd.Function):
    """Holds what a compiled loss holds: the logits and, in the backward pass, their gradient."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(*ctx.saved_tensors)

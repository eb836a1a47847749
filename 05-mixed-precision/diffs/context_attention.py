"""Causal attention for ranks that share each sequence; context-parallel.diff uses it.

There are two ways. A rank keeps its queries, and gathers the keys and values of all positions:
attend_to_gathered_keys. Or the ranks exchange positions for heads, so that each has all positions
of some heads, and attention needs nothing else: attend_with_some_heads, known as Ulysses
(https://arxiv.org/abs/2309.14509).

In the first way, the queries are those of the last n of m positions. cuDNN's kernel, the fastest on
Hopper GPUs, knows only two patterns: n queries and n keys with a causal mask, and queries that see
all keys. So there are two calls, one for the earlier keys and one for the keys of the queries' own
positions, and their softmaxes are merged, as in ring attention (https://arxiv.org/abs/2310.01889).
"""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import causal_lower_right

from common.inputs.models import attention

HEADS, POSITIONS = 1, 2  # dimensions of queries, keys and values [batch, heads, positions, size]
aten = torch.ops.aten


# --- keys and values of all positions ---


# Ranks have other chunks, so the compiler would see other code on each, and could put their
# collectives into another order, which hangs. So it leaves this function as it is.
@torch.compiler.disable
def attend_to_gathered_keys(
    mesh: DeviceMesh,
    chunks: tuple[int, int],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Return what transformers wants of attention: [batch, positions, heads, size], no weights.

    query, key, value: of this rank's two chunks, of which `chunks` has the numbers.
    """
    key, value = gather(key, mesh), gather(value, mesh)
    outputs = []
    for part, chunk in zip(query.chunk(2, dim=POSITIONS), chunks, strict=True):
        end = (chunk + 1) * part.shape[POSITIONS]  # a position sees no later ones
        pair = key[:, :, :end], value[:, :, :end]
        outputs.append(attend_to_end(part, *pair, dropout, scaling))
    return torch.cat(outputs, dim=POSITIONS).transpose(1, 2).contiguous(), None


def gather(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the keys or values of all positions, in order."""
    # In the backward pass, a reduce-scatter adds up the gradients from all ranks of the row.
    split = DTensor.from_local(part, mesh, [Shard(POSITIONS)])
    whole = split.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    # The ranks have the chunks (0, 2n - 1), (1, 2n - 2), ... of 2n.
    early, late = whole.unflatten(POSITIONS, (mesh.size(), 2, -1)).unbind(3)
    return torch.cat((early, late.flip(2)), dim=2).flatten(2, 3)


def attend_to_end(query, key, value, dropout: float, scale: float | None) -> torch.Tensor:
    """Return causal attention for queries of the last positions of the keys, on any device."""
    n, m = query.shape[POSITIONS], key.shape[POSITIONS]
    if n < m and can_merge(query) and dropout == 0:
        return MergedAttention.apply(query, key, value, scale)
    groups = query.shape[HEADS] // key.shape[HEADS]  # query heads that share a key
    if query.dtype == torch.float32:  # then no kernel on GPUs knows groups
        key, value = (t.repeat_interleave(groups, dim=HEADS) for t in (key, value))
    mask = causal_lower_right(n, m) if n < m else None
    options = {"dropout_p": dropout, "is_causal": n == m, "scale": scale, "enable_gqa": groups > 1}
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def can_merge(query: torch.Tensor) -> bool:
    """Return whether there is a kernel whose results can be merged, and no faster way."""
    if query.is_cpu:
        return True
    fits = query.dtype != torch.float32 and query.shape[-1] % 8 == 0 and query.shape[-1] <= 128
    return fits and bool(torch.version.cuda) and torch.cuda.get_device_capability() >= (9, 0)


class MergedAttention(torch.autograd.Function):
    """apply(query, key, value, scale) -> output, for queries of the last positions of the keys.

    For the scores s of a query with some keys, a kernel returns sum(exp(s) value) / sum(exp(s)) and
    log_sum, the logarithm of sum(exp(s)). The sums of both parts add up, so a part's share in the
    merged output is exp(log_sum of the part - log_sum of all).
    """

    @staticmethod
    def forward(ctx, query, key, value, scale):
        earlier, own = parts(query, key, value)
        output_1, log_sum_1, *rng_1 = forward_pass(query, *earlier, False, scale)
        output_2, log_sum_2, *rng_2 = forward_pass(query, *own, True, scale)
        log_sum = torch.logaddexp(log_sum_1, log_sum_2)
        share_1, share_2 = (log_sum_1 - log_sum).exp(), (log_sum_2 - log_sum).exp()
        # The shares are float32, so the sum is rounded to 16 bits only once.
        output = output_1 * share_1.view(*query.shape[:3], 1)
        output = (output + output_2 * share_2.view(*query.shape[:3], 1)).to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum, *rng_1, *rng_2)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, output, log_sum, *rng = ctx.saved_tensors
        rng_1, rng_2 = rng[: len(rng) // 2], rng[len(rng) // 2 :]
        earlier, own = parts(query, key, value)
        # The kernels compute the probabilities again, as exp(s - log_sum). With the output and the
        # log_sum of all keys, each call returns the gradients that come through its keys.
        saved = output, log_sum, ctx.scale
        query_1, key_1, value_1 = backward_pass(grad, query, *earlier, False, *saved, *rng_1)
        query_2, key_2, value_2 = backward_pass(grad, query, *own, True, *saved, *rng_2)
        pairs = (key_1, key_2), (value_1, value_2)
        return query_1 + query_2, *(torch.cat(pair, dim=POSITIONS) for pair in pairs), None


def parts(query, key, value) -> zip:
    """Return key and value of the earlier positions, and those of the queries' own positions."""
    n = query.shape[POSITIONS]
    sizes = (key.shape[POSITIONS] - n, n)
    return zip(key.split(sizes, dim=POSITIONS), value.split(sizes, dim=POSITIONS), strict=True)


def forward_pass(query, key, value, causal: bool, scale: float | None) -> tuple:
    """Return the output, log_sum in float32 and, from cuDNN, the RNG state of its dropout."""
    if query.is_cpu:
        attend = aten._scaled_dot_product_flash_attention_for_cpu
        return attend(query, key, value, 0.0, causal, scale=scale)
    attend = aten._scaled_dot_product_cudnn_attention
    found = attend(query, key, value, None, True, 0.0, causal, scale=scale)
    return found[0], found[1], *found[6:8]


def backward_pass(grad, query, key, value, causal, output, log_sum, scale, *rng) -> tuple:
    """Return the gradients of query, key and value."""
    tensors = grad, query, key, value, output, log_sum
    if query.is_cpu:
        attend_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return attend_backward(*tensors, 0.0, causal, scale=scale)
    # None: no bias, and all sequences have the same length, which is next.
    lengths = None, None, None, query.shape[POSITIONS], key.shape[POSITIONS]
    attend_backward = aten._scaled_dot_product_cudnn_attention_backward
    return attend_backward(*tensors, *rng, *lengths, 0.0, causal, scale=scale)


# --- some heads of all positions ---


def attend_with_some_heads(mesh: DeviceMesh, module, query, key, value, *args, **options) -> tuple:
    """Return what attend_to_gathered_keys returns, for this rank's part of each sequence."""
    query, key, value = (exchange(t, mesh, POSITIONS, HEADS) for t in (query, key, value))
    output, _ = attention(module, query, key, value, *args, **options)
    return exchange(output, mesh, 2, 1), None  # [batch, positions, heads, size]


def exchange(part: torch.Tensor, mesh: DeviceMesh, old: int, new: int) -> torch.Tensor:
    """Split a tensor along dimension `new` instead of `old`, with an all-to-all."""
    return DTensor.from_local(part, mesh, [Shard(old)]).redistribute(mesh, [Shard(new)]).to_local()

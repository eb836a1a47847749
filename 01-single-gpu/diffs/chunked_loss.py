"""The output layer and the loss, for one chunk of tokens at a time; chunked-loss.diff uses it.

The logits are tokens x vocabulary numbers, and their gradient is as many again. With 32,768 tokens
and the 128,256 entries of Llama 3's vocabulary, each takes 7.8 GiB in bfloat16. Here, only the
logits of one chunk exist at a time. A later backward pass would have to compute them again, so the
forward pass also computes the gradients of the loss with respect to the hidden states and to the
weight of the output layer. The backward pass only scales both.

The idea is that of fused linear cross-entropy kernels, such as those of Liger Kernel
(https://arxiv.org/abs/2410.10989). Here, the matmuls are PyTorch's.
"""

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from common.data import IGNORED
from common.errors import RunError


def chunk_loss(model: PreTrainedModel, chunk_tokens: int, compile: bool) -> None:
    """Let a model compute its output layer and its loss for `chunk_tokens` tokens at a time.

    In place of logits, the model returns the hidden states that the output layer would get, without
    their gradient.
    compile: fuse the kernels between the matmuls. Raises RunError if the output layer is not a
    single matrix. If the model scales or caps its logits, its first forward pass raises RunError.
    """
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear or layer.bias is not None:
        raise refusal(model, "is not a single matrix")
    loss = ChunkedLoss(model, layer, chunk_tokens, compile)
    layer.forward = loss.keep
    model.loss_function = loss


def refusal(model: PreTrainedModel, reason: str) -> RunError:
    return RunError(
        f"The output layer of {model.config.model_type} {reason}: leave out the variant "
        "chunked-loss, or choose another -m, such as GPT-2, Llama or Qwen3."
    )


class ChunkedLoss:
    """What takes the place of the output layer's forward and of the model's loss function.

    torch.compile would trace all chunks into one graph, and might compute the logits of several
    chunks first. So it leaves out both methods, and the loop calls a compiled function.
    """

    def __init__(
        self, model: PreTrainedModel, layer: nn.Linear, chunk_tokens: int, compile: bool
    ) -> None:
        self.model, self.layer, self.chunk_tokens = model, layer, chunk_tokens
        self.hidden: torch.Tensor | None = None  # what the output layer got
        self.returned: torch.Tensor | None = None
        self.loss_of_chunk = replace_logits_by_gradient
        if compile:
            self.loss_of_chunk = torch.compile(replace_logits_by_gradient, dynamic=False)

    @torch.compiler.disable
    def keep(self, hidden: torch.Tensor) -> torch.Tensor:
        # FSDP would wait for the gradient of an output, and warn because this one is a view.
        self.hidden, self.returned = hidden, hidden.detach()
        return self.returned

    @torch.compiler.disable
    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | float | None = None,
        shift_labels: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return the loss; the arguments are those of transformers' ForCausalLMLoss.

        logits: what `keep` returned. labels: [sequences, positions].
        """
        hidden, self.hidden = self.hidden, None
        if logits is not self.returned:  # they would be scaled or capped
            raise refusal(self.model, "is followed by more computations")
        if shift_labels is None:  # the token at position i predicts the one at i + 1
            shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        labels = shift_labels.flatten()
        device = hidden.device.type
        dtype = self.layer.weight.dtype  # autocast casts here, once and not for each chunk
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        total = SumOfLosses.apply(
            hidden.flatten(0, 1).to(dtype),
            self.layer.weight.to(dtype),  # FSDP has gathered it
            labels,
            self.chunk_tokens,
            self.loss_of_chunk,
            torch.is_grad_enabled(),
        )
        if num_items_in_batch is None:
            num_items_in_batch = (labels != IGNORED).sum()
        return total / num_items_in_batch


class SumOfLosses(torch.autograd.Function):
    """The sum of the cross-entropies of tokens, as a function of hidden states and weight."""

    @staticmethod
    def forward(
        ctx, hidden, weight, labels, chunk_tokens, loss_of_chunk, training: bool
    ) -> torch.Tensor:
        """Return the sum, a float32 scalar.

        hidden: [tokens, width]. weight: [vocabulary, width]. labels: [tokens]; IGNORED has no loss.
        training: compute gradients, too, of what requires them.
        """
        total = torch.zeros((), device=hidden.device)
        hidden_gradient = weight_gradient = None
        if training and ctx.needs_input_grad[0]:
            hidden_gradient = torch.empty_like(hidden)
        if training and ctx.needs_input_grad[1]:  # it is not frozen
            # Many chunks are added up, so bfloat16 would lose small terms.
            weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = hidden[chunk] @ weight.T
            total += loss_of_chunk(logits, labels[chunk])  # now logits has its own gradient
            if hidden_gradient is not None:
                torch.mm(logits, weight, out=hidden_gradient[chunk])
            if weight_gradient is not None:
                add_matmul(weight_gradient, logits.T, hidden[chunk])
            del logits  # before the next chunk's logits are allocated
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """gradient: of what is minimized, such as the mean, with respect to the sum."""
        gradient = gradient.view(1, 1)  # a GPU would round a scalar to 16 bits before it multiplies
        scaled = []
        for each in ctx.saved_tensors:
            if each is not None:  # one kernel multiplies, and rounds to 16 bits
                each = torch.mul(each, gradient, out=torch.empty_like(each, dtype=ctx.dtype))
            scaled.append(each)
        return *scaled, None, None, None, None


def replace_logits_by_gradient(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses, and write the gradient of this sum over the logits.

    The gradient is softmax(logits), less 1 at the label. logits: [tokens, vocabulary].
    """
    log_probabilities = torch.log_softmax(logits.float(), dim=-1)
    loss = nn.functional.nll_loss(log_probabilities, labels, ignore_index=IGNORED, reduction="sum")
    is_label = torch.arange(logits.shape[1], device=labels.device) == labels[:, None]
    gradient = log_probabilities.exp_()
    gradient -= is_label.byte()
    gradient *= (labels != IGNORED)[:, None]
    logits.copy_(gradient)
    return loss


def add_matmul(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add the matmul of two matrices to a float32 matrix."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda and torch.version.cuda and torch.__version__ >= "2.12":
        # cuBLAS multiplies 16-bit matrices and adds them in float32.
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right

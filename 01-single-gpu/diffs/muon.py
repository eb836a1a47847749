"""Muon for the matrices of the layers, AdamW for the rest; muon.diff uses both.

AdamW scales each number of an update for itself. Muon (https://kellerjordan.github.io/posts/muon/)
updates a matrix as a whole: it takes the running mean M of the gradients, whose singular value
decomposition is M = U S V^T, and moves the weights along U V^T. All singular values of that are 1,
so the update uses every direction of the matrix equally. A few matmuls compute U V^T nearly
(`orthogonalize`), and Muon stores one moment, AdamW two.

That makes sense for matrices that turn hidden states into hidden states. Embeddings, the output
layer, norms and biases are left to AdamW. torch.optim.Muon with "match_rms_adamw" scales its
updates to the size that AdamW's usually have (section 2.2 of https://arxiv.org/abs/2502.16982), so
--lr and --weight-decay hold for both, and so does the schedule.

A transposed matrix has the transposed update: GPT-2's Conv1D, which stores [in, out] instead of
[out, in], needs nothing else. But its c_attn stores queries, keys and values as one matrix, which
Muon takes as one. Llama has a matrix for each.

With FSDP, each rank stores some rows of each matrix, and U V^T needs all of them. ShardedMuon
gathers each matrix on one rank only, so that the ranks share the work.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from common.errors import RunError


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices in a model's layers, for Muon, and all other parameters, for AdamW.

    Raises RunError if the model has no list of layers, or no matrices in it.
    """
    # In transformers' causal models, the first ModuleList has the layers.
    layers = next((m for m in model.modules() if isinstance(m, nn.ModuleList)), nn.ModuleList())
    matrices = {p: None for p in layers.parameters() if p.ndim == 2}
    if not matrices:
        raise RunError("Muon needs a model with matrices in a list of layers: give another -m.")
    return list(matrices), [p for p in model.parameters() if p not in matrices]


class MuonAndAdamW(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW as one optimizer, with a group of parameters for each.

    The schedule, the loss scale and checkpoints see one optimizer. of_adamw: options for AdamW
    alone; lr and weight_decay are for both.
    """

    def __init__(
        self, model: nn.Module, lr: float, weight_decay: float, **of_adamw: object
    ) -> None:
        matrices, others = split_parameters(model)
        muon = ShardedMuon if isinstance(matrices[0], DTensor) else torch.optim.Muon
        of_both = {"lr": lr, "weight_decay": weight_decay}
        self.muon = muon(matrices, **of_both, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, **of_both, **of_adamw)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], defaults={})
        self._share()

    def _share(self) -> None:
        """Let the two optimizers use the groups and the state of this one."""
        self.muon.param_groups, self.adamw.param_groups = [[each] for each in self.param_groups]
        self.muon.state = self.adamw.state = self.state

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)  # makes new groups and a new state
        self._share()

    def step(self, closure=None) -> None:
        self.muon.step()
        self.adamw.step()


class ShardedMuon(torch.optim.Muon):
    """torch.optim.Muon for matrices whose rows FSDP has sharded; all ranks must call `step`.

    Of as many matrices as there are ranks, each rank gets one as a whole: all ranks send it their
    rows. It orthogonalizes this matrix and sends the rows back. Only bfloat16 numbers are sent,
    which is what torch.optim.Muon computes with, so the updates are the same.

    With HSDP, the ranks that share one copy of the model do this among themselves.
    """

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            # Matrices of the same shape take equally long, so no rank waits for another one.
            parameters = [p for p in group["params"] if p.grad is not None]
            parameters.sort(key=lambda p: p.shape)
            ranks = group_of_shards(parameters[0])
            n_ranks = dist.get_world_size(ranks)
            batches = [
                Batch(parameters[first : first + n_ranks], ranks)
                for first in range(0, len(parameters), n_ranks)
            ]
            # All batches are sent at once. A GPU receives one while it orthogonalizes another.
            for batch in batches:
                batch.send_to_owners([self.momentum(p, group) for p in batch.parameters])
            for batch in batches:
                batch.orthogonalize_and_return()
            for batch in batches:
                for parameter, update in batch.updates():
                    scale = 0.2 * math.sqrt(max(parameter.shape))  # as match_rms_adamw
                    weights = parameter.to_local()
                    weights.mul_(1 - group["lr"] * group["weight_decay"])
                    weights.add_(update, alpha=-group["lr"] * scale)

    def momentum(self, parameter: nn.Parameter, group: dict) -> torch.Tensor:
        """Update the running mean of a gradient; return what to orthogonalize, this rank's rows."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, mean = parameter.grad.to_local(), state["momentum_buffer"].to_local()
        mean.lerp_(gradient, 1 - group["momentum"])
        # Nesterov momentum looks one step ahead.
        return gradient.lerp(mean, group["momentum"]).bfloat16()


class Batch:
    """At most as many matrices as there are ranks. Rank i of the group owns matrix i.

    Sizes are in numbers, by rank. They are the same in both directions: what a rank sends to the
    owner of a matrix is what it gets back.
    """

    def __init__(self, parameters: list[nn.Parameter], ranks: dist.ProcessGroup) -> None:
        self.parameters, self.ranks = parameters, ranks
        n_ranks, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
        self.local_sizes = [p.to_local().numel() for p in parameters]
        self.local_sizes += [0] * (n_ranks - len(parameters))  # these ranks own no matrix
        self.owned = parameters[rank].shape if rank < len(parameters) else torch.Size([0, 0])
        # FSDP gives each rank the same number of rows; the last ranks may have fewer, or none.
        rows, columns = self.owned
        most = math.ceil(rows / n_ranks)
        rows_of_ranks = [min(most, max(0, rows - most * number)) for number in range(n_ranks)]
        self.owned_sizes = [columns * n_rows for n_rows in rows_of_ranks]

    def send_to_owners(self, shards: list[torch.Tensor]) -> None:
        flat = torch.cat([shard.flatten() for shard in shards])
        flat = flat.to(self.parameters[0].device_mesh.device_type)  # cpu-offload: to the GPU
        self._exchange(flat, self.local_sizes, self.owned_sizes)

    def orthogonalize_and_return(self) -> None:
        self.work.wait()  # on a GPU, this blocks its stream and not the host
        matrix = self.received.view(self.owned)
        if matrix.numel():
            matrix = orthogonalize(matrix)
        self._exchange(matrix.flatten(), self.owned_sizes, self.local_sizes)

    def updates(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return each parameter with this rank's rows of its update."""
        self.work.wait()
        pieces = self.received.split(self.local_sizes)[: len(self.parameters)]
        locals_ = [p.to_local() for p in self.parameters]
        return [
            (parameter, piece.view_as(local).to(local.device))
            for parameter, local, piece in zip(self.parameters, locals_, pieces, strict=True)
        ]

    def _exchange(self, flat: torch.Tensor, sent: list[int], expected: list[int]) -> None:
        """Start to send numbers to all ranks, and to receive `expected` ones from each."""
        self.sent = flat  # must live until it is sent
        self.received = flat.new_empty(sum(expected))
        self.work = dist.all_to_all_single(
            self.received, flat, expected, sent, group=self.ranks, async_op=True
        )


def group_of_shards(parameter: DTensor) -> dist.ProcessGroup:
    """Return the ranks over which the rows of a parameter are sharded."""
    (dimension,) = [n for n, each in enumerate(parameter.placements) if each.is_shard(0)]
    return parameter.device_mesh.get_group(dimension)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return nearly U V^T, in bfloat16, for a matrix U S V^T of any shape.

    For each step of the Newton-Schulz iteration X' = a X + b (X X^T) X + c (X X^T)^2 X, a singular
    value s becomes a s + b s^3 + c s^5. The coefficients lift small singular values quickly: five
    steps bring all of them close to 1, between 0.7 and 1.2. Steps and coefficients are those of
    torch.optim.Muon, from https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    rows, columns = matrix.shape
    x = matrix.bfloat16()
    x = x.T if rows > columns else x  # X X^T is then the smaller one of two
    x = x / x.norm().clamp(min=1e-7)  # now no singular value is above 1, where it would diverge
    for _ in range(5):
        square = x @ x.T
        polynomial = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if rows > columns else x

"""Round to bfloat16 stochastically, up or down, so that the rounding errors average out.

python 05-mixed-precision/experiments/stochastic_rounding.py

With stochastic-rounding.diff, chapter 5's script trains with the AdamW below.
"""

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from common.errors import RunError

LR = 3e-5


def stochastic_round(x: torch.Tensor) -> torch.Tensor:
    """Round float32 numbers to one of the two nearest bfloat16 numbers, more often to the nearer.

    A bfloat16 number is the upper 16 bits of a float32 number. Adding a random number to the lower
    16 bits carries over with the probability (lower bits) / 2^16. https://arxiv.org/abs/2010.06192
    """
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, device=x.device)
    rounded = (x.view(torch.int32) + noise) & ~0xFFFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x).to(torch.bfloat16)


class AdamW(torch.optim.AdamW):
    """Computes PyTorch's AdamW step in float32, then rounds bfloat16 weights stochastically."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                # Each rank rounds its own shards. Copies of the same shard would drift apart.
                if any(each.is_replicate() for each in getattr(parameter, "placements", ())):
                    raise RunError("Stochastic rounding needs shards without copies: omit hsdp.")
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                stored = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                stored = [t.to_local() if isinstance(t, DTensor) else t for t in stored]
                weight, grad, mean, square = computed = [t.float() for t in stored]
                options = {key: group[key] for key in ("lr", "weight_decay", "eps", "maximize")}
                beta1, beta2 = group["betas"]
                options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "fused": True}
                adamw([weight], [grad], [mean], [square], [], [state["step"]], **options)
                if parameter.dtype == torch.bfloat16:
                    computed[0] = stochastic_round(weight)
                for old, new in zip(stored, computed, strict=True):
                    old.copy_(new)


def share_changed(weights: torch.Tensor, optimizer_class: type, lr: float) -> float:
    """Return the share of bfloat16 weights that one step of AdamW changes."""
    parameter = torch.nn.Parameter(weights.to(torch.bfloat16))
    parameter.grad = torch.randn(weights.shape).to(torch.bfloat16)
    optimizer_class([parameter], lr=lr, fused=True).step()
    return (parameter != weights.to(torch.bfloat16)).float().mean().item()


def walk(optimizer_class: type, dtype: torch.dtype, beta2: float, steps: int) -> list[float]:
    """Take steps with gradients of 1; return the means of 1000 weights and of their second moments.

    The weights start at 1, and each step should lower them by LR.
    """
    parameter = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
    options = {"betas": (0.8, beta2), "weight_decay": 0.0, "fused": True}
    optimizer = optimizer_class([parameter], lr=LR, **options)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return [t.double().mean().item() for t in (parameter, optimizer.state[parameter]["exp_avg_sq"])]


def main() -> None:
    torch.manual_seed(0)
    kinds = {
        "weight, N(0, 0.02), as in GPT-2": 0.02 * torch.randn(2**20),
        "weight, N(0, 0.06), as in gpt2-tiny": 0.06 * torch.randn(2**20),
        "LayerNorm's weight, 1": torch.ones(2**20),
        "bias, 0": torch.zeros(2**20),
    }
    print("weights that the first step changes      lr   to nearest    at random")
    for kind, weights in kinds.items():
        for lr in (3e-4, LR, 3e-6):
            shares = [share_changed(weights, each, lr) for each in (torch.optim.AdamW, AdamW)]
            print(f"{kind:36}{lr:9.0e}" + "".join(f"{share:13.1%}" for share in shares))
    print(f"\n1000 steps with lr {LR:.0e} and gradients of 1         weight   second moment")
    for beta2 in (0.95, 0.999):
        nearest = torch.optim.AdamW
        for name, each in (("float32", nearest), ("to nearest", nearest), ("at random", AdamW)):
            dtype = torch.float32 if name == "float32" else torch.bfloat16
            weight, moment = walk(each, dtype, beta2, 1000)
            print(f"beta2 {beta2:<8}{name:36}{weight:9.5f}{moment:16.3f}")


if __name__ == "__main__":
    main()

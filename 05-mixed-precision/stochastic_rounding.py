"""Round to bfloat16 at random, up or down, so that on average nothing is lost.

python 05-mixed-precision/stochastic_rounding.py

With a script and its arguments it runs that script, with the AdamW below in place of PyTorch's:

python 05-mixed-precision/stochastic_rounding.py 05-mixed-precision/train_llm.py \
    --param-dtype bfloat16 --lr 3e-5
"""

import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from common import cli, launch
from common.cli import InputError

LR = 3e-5


def stochastic_round(x: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers as bfloat16: one of both neighbours, the nearer one more often.

    bfloat16 is the upper half of float32. A random number added to the lower half carries into the
    upper one with the probability (lower half) / 2^16. https://arxiv.org/abs/2010.06192
    """
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, device=x.device)
    rounded = (x.view(torch.int32) + noise) & ~0xFFFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x).to(torch.bfloat16)


class AdamW(torch.optim.AdamW):
    """PyTorch's step in float32, after which only the weights are rounded at random."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                stored = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                # Each rank rounds its own shard. With DDP all would have to draw the same numbers.
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
    """Return the share of bfloat16 weights that are others after a step of AdamW."""
    parameter = torch.nn.Parameter(weights.to(torch.bfloat16))
    parameter.grad = torch.randn(weights.shape).to(torch.bfloat16)
    optimizer_class([parameter], lr=lr, fused=True).step()
    return (parameter != weights.to(torch.bfloat16)).float().mean().item()


def walk(optimizer_class: type, dtype: torch.dtype, beta2: float, steps: int) -> list[float]:
    """Return, after steps with gradients of 1, the means of 1000 weights and second moments.

    The weights begin at 1 and each step should take LR from them.
    """
    parameter = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
    options = {"betas": (0.8, beta2), "weight_decay": 0.0, "fused": True}
    optimizer = optimizer_class([parameter], lr=LR, **options)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return [t.double().mean().item() for t in (parameter, optimizer.state[parameter]["exp_avg_sq"])]


def round_at_random() -> None:
    if "bfloat16" not in sys.argv:
        raise InputError("Only weights in bfloat16 are rounded: give --param-dtype bfloat16.")
    if "--hsdp" in sys.argv or ("RANK" in os.environ and Path(sys.argv[1]).parent.name < "04"):
        raise InputError("Ranks would round their copies of a weight apart: shard over all.")
    torch.optim.AdamW = AdamW


def main() -> None:
    if len(sys.argv) > 1:
        cli.run_given_script(round_at_random)
        return
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
    print(f"\n1000 steps of {LR:.0e} down, with gradients of 1       weight   second moment")
    for beta2 in (0.95, 0.999):
        nearest = torch.optim.AdamW
        for name, each in (("float32", nearest), ("to nearest", nearest), ("at random", AdamW)):
            dtype = torch.float32 if name == "float32" else torch.bfloat16
            weight, moment = walk(each, dtype, beta2, 1000)
            print(f"beta2 {beta2:<8}{name:36}{weight:9.5f}{moment:16.3f}")


if __name__ == "__main__":
    launch.run(main)

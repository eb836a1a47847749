"""Implement loss scaling by hand, and count the gradients that underflow in float16.

python 05-mixed-precision/experiments/loss_scaling.py
"""

import collections
import inspect
import math

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from common.inputs import models

# GradScaler's defaults: it starts at 2^16, and doubles the scale after 2000 good steps in a row.
TOO_HIGH = {"init_scale": 2.0**30, "growth_interval": 4}


def by_hand(steps: int, init_scale: float, growth_interval: int) -> tuple[list[dict], torch.Tensor]:
    """Train one layer with float16 matmuls; return a record of each step, and the last weights."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(16, 16) / 4)  # the float32 master weights
    optimizer = torch.optim.SGD([weight], lr=0.1)
    inputs, targets = torch.randn(2, 64, 16)
    scale, good_steps, rows = init_scale, 0, []
    for _ in range(steps):
        outputs = functional.linear(inputs.half(), weight.half())
        loss = functional.mse_loss(outputs.float(), targets)
        (loss * scale).backward()  # multiplies all gradients by the scale
        largest = weight.grad.abs().max().item()
        weight.grad /= scale  # in float32, before the optimizer uses the gradients
        found_inf = not weight.grad.isfinite().all()
        rows.append({"loss": loss.item(), "scale": scale, "largest": largest, "inf": found_inf})
        if found_inf:
            scale, good_steps = scale / 2, 0  # skips the step: the weights do not change
        else:
            optimizer.step()
            good_steps = (good_steps + 1) % growth_interval
            scale = scale if good_steps else scale * 2
        optimizer.zero_grad()
    return rows, weight.detach()


def gradients(model, batch: torch.Tensor, scale: float, accumulation: int) -> dict:
    """Return the gradients of the weights and of the logits by name, multiplied by the scale."""
    (logits := model(input_ids=batch).logits).retain_grad()
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
    (loss / accumulation * scale).backward()
    found = {"logits": logits.grad} | {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()  # so that model.half() does not convert the gradients
    return found


def trained_model(steps: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return gpt2-tiny, trained in float32 on a file of Python's library, and one batch of it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    tokens = models.load_tokenizer("gpt2-tiny")(inspect.getsource(inspect))["input_ids"]
    sequences = torch.tensor(tokens).unfold(0, 128, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1 / 128, betas=(0.8, 0.95))
    for _ in range(steps):
        batch = sequences[torch.randint(len(sequences), (4,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, sequences[:4]


def lost(steps: int, scales: tuple[float, ...], accumulation: int) -> dict[str, list[float]]:
    """Return, by kind of tensor and scale, the share of gradients that are 0 only in float16."""
    model, batch = trained_model(steps)
    exact = gradients(model, batch, 1.0, accumulation)
    half, shares = model.half(), {}
    for scale in scales:
        found = gradients(half, batch, scale, accumulation)
        zeros, totals = collections.Counter(), collections.Counter()
        for name, grad in exact.items():
            kinds = {1: "norms and biases", 2: "matrices", 3: "logits"}
            kind = "embeddings" if ".wte" in name else kinds[grad.dim()]
            zeros[kind] += ((found[name] == 0) & (grad != 0)).sum().item()
            totals[kind] += (grad != 0).sum().item()
        shares = {kind: [*shares.get(kind, ()), zeros[kind] / totals[kind]] for kind in totals}
    return shares


def main() -> None:
    print("step    loss      scale   largest gradient   the step is")
    for step, row in enumerate(by_hand(24, **TOO_HIGH)[0], start=1):
        power, verdict = math.log2(row["scale"]), "skipped" if row["inf"] else "taken"
        print(
            f"{step:4}{row['loss']:8.4f}       2^{power:<2.0f}{row['largest']:19,.1f}   {verdict}"
        )
    print("\nnot 0 in float32, 0 in float16    unscaled       2^10       2^16")
    for kind, shares in lost(40, (1.0, 2.0**10, 2.0**16), 3).items():
        print(f"{kind:30}" + "".join(f"{share:12.2%}" for share in shares))


if __name__ == "__main__":
    main()

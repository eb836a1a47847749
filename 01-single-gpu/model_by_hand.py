"""GPT-2 in plain PyTorch: it loads the weights of a run and computes the same logits.

python 01-single-gpu/model_by_hand.py outputs/my-run
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config

from common import cli, launch
from common.errors import RunError

from trained_model import load_trained


class Attention(nn.Module):
    """Mixes positions: each one takes in values of itself and of earlier positions."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # queries, keys and values
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        # Each head has a share of the width: [batch, heads, tokens, width / heads].
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        # softmax(q @ k.T / sqrt(width / heads)) @ v, without the scores of later positions
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    """Computes on each position alone, in four times the width."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Adds what attention and MLP compute to the residual stream [batch, tokens, width]."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """A model without dropout, whose parameters have the names that transformers gives them."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.transformer.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.transformer.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.transformer.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Each block adds to the residual stream twice, and the sum must not grow.
                added = 2 * config.n_layer if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, std=config.initializer_range / math.sqrt(added))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [batch, tokens, vocabulary] or, with labels, the mean loss."""
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.transformer.wte(input_ids) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        logits = F.linear(self.transformer.ln_f(x), self.transformer.wte.weight)  # tied weights
        if labels is None:
            return logits
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:]  # the next token of each position
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Copy weights of transformers, which stores these matrices as [inputs, outputs]."""
        for name, parameter in self.named_parameters():
            is_matrix = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            parameter.copy_(weights[name].T if is_matrix else weights[name])


@torch.no_grad()
def main() -> None:
    parser = cli.ArgumentParser(description=__doc__)
    parser.add_argument("trained", help="folder of a run or a model, or hub id")
    parser.add_argument("-p", "--prompt", default="    def __init__(self", help="text to continue")
    args = parser.parse_args()
    trained = load_trained(args.trained, None, None, None)
    config = trained.model.config
    if config.model_type != "gpt2":
        raise RunError(f"{args.trained} is a {config.model_type}: give a GPT-2.")
    model = GPT2(config)
    model.load(trained.model.float().state_dict())
    ids = trained.tokenizer.encode(args.prompt, return_tensors="pt")
    for _ in range(24):
        next_token = model(ids[:, -config.n_positions :])[:, -1:].argmax(dim=2)  # the most likely
        ids = torch.cat([ids, next_token], dim=1)
    print(trained.tokenizer.decode(ids[0]))
    ids = ids[:, -config.n_positions :]
    difference = (model(ids) - trained.model(ids).logits).abs().max()
    print(f"largest difference to the logits of transformers: {difference:.1e}")


if __name__ == "__main__":
    launch.run(main)

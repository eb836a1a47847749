"""What a training step of GPT-2 124M holds in memory, in bytes, counted and not estimated.

python tests/benchmarks/step_memory.py --output tests/benchmarks/results/step_memory.json

Activations are the storages that the forward pass keeps for the backward pass, each counted once,
the model's own parameters left out. Needs no GPU: PyTorch keeps the same ones in float32 there.
"""

import argparse
from pathlib import Path

import torch
from machine import write_result
from transformers import AutoModelForCausalLM

from common.models import causal_attention, load_config


def saved_bytes(model: torch.nn.Module, tokens: torch.Tensor) -> int:
    """Return the bytes that one forward pass with loss keeps for the backward pass."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    size = sum(storage.nbytes() for storage in kept.values())
    loss.backward()
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seq-length", type=int, default=1024, help="tokens of the one sequence")
    args = parser.parse_args()
    config = load_config("gpt2")
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=causal_attention(config), dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocab_size, (1, args.seq_length))
    activations = saved_bytes(model, tokens)
    optimizer.step()
    moments = [
        value
        for state in optimizer.state.values()
        for key, value in state.items()
        if key in ("exp_avg", "exp_avg_sq")
    ]
    results = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "gradients_bytes": sum(parameter.grad.nbytes for parameter in model.parameters()),
        "moments_bytes": sum(value.nbytes for value in moments),
        "activations_bytes_per_token": round(activations / args.seq_length),
        "logits_bytes_per_token": 4 * config.vocab_size,
    }
    print(results)
    write_result(args.output, results)


if __name__ == "__main__":
    main()

"""What limits data parallelism: the longest sequence that fits, by model and number of GPUs.

python tests/benchmarks/limits.py

Predicted with 04-fsdp/peak_memory.py, for one sequence per GPU, with the options that need the
least memory: FSDP, bfloat16, full activation checkpointing and a compiled loss. The shapes of the
two larger models are those of table 3 in https://arxiv.org/abs/2407.21783.
"""

import json
import sys
from pathlib import Path

from machine import RESULTS, write_result

from common import models

sys.path.append(str(Path(__file__).parents[2] / "04-fsdp"))
from memory import GIB, RESERVE

from peak_memory import Options, predict

REPOSITORY = Path(__file__).parents[2]
GPU_MEMORY = 80  # GiB
GPUS = [2**i for i in range(15)]
LENGTHS = [2**i for i in range(11, 21)]
BATCH = json.loads((REPOSITORY / "05-mixed-precision/growth.json").read_text())["works"][
    "Llama 3.1 8B, FSDP"
]["global_batch"]  # tokens per step
# Width, width of the MLP, layers, heads; all have 8 KV heads.
SHAPES = {
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
}


def longest(shape: tuple[int, int, int, int]) -> dict[str, object]:
    """Return the parameters of a model and, for each number of GPUs, the longest sequence."""
    config = models.load_config("llama-3.1-8b")
    config.hidden_size, config.intermediate_size, config.num_hidden_layers, heads = shape
    config.num_attention_heads = heads
    config.max_position_embeddings = LENGTHS[-1]
    least = {"sharding": "fsdp", "precision": "bf16", "activation_checkpointing": "full"}
    fits, cache = dict.fromkeys(GPUS, 0), {}
    for length in LENGTHS:
        for n in GPUS:
            options = Options(gpus=n, seq_length=length, compile=True, **least)
            peak = predict(config, options, cache)["peak"]
            if peak <= (1 - RESERVE) * GPU_MEMORY * GIB:
                fits[n] = length
    (groups, _), *_ = cache.values()
    numel = [sum(shape.numel() for shape in group) for group in groups]
    return {"parameters": sum(numel), "layer": numel[0], "root": numel[-1], "longest": fits}


def main() -> None:
    results = {name: longest(shape) for name, shape in SHAPES.items()}
    shared = {"gpu_memory": GPU_MEMORY, "batch": BATCH, "lengths": LENGTHS}
    write_result(RESULTS / "limits.json", {**shared, "models": results})


if __name__ == "__main__":
    main()

"""Time per phase of a step, stragglers, throughput, MFU and peak memory."""

import re
import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig, PreTrainedModel

from common.ranks import gather, rank_and_world_size

# Peak bf16 FLOP/s without sparsity, from the vendors' data sheets, which the product pages link:
# https://www.nvidia.com/en-us/data-center/h200/ (H100, H200), /a100/, /l40s/, /l4/, /hgx/ (B200,
# B300), /gb200-nvl72/ and /gb300-nvl72/ (a rack's figure / 72), and
# https://www.amd.com/en/products/accelerators/instinct.html. Each half of an MI250X is a device.
# GeForce cards, with sums in float32: https://images.nvidia.com/aem-dam/Solutions/geforce/
# blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf. RTX 5070 and below: a sixteenth of the "AI
# TOPS" (fp4 with sparsity) of https://www.nvidia.com/en-us/geforce/graphics-cards/compare/, which
# is the white paper's ratio for the larger cards.
PEAK_FLOPS = {
    "NVIDIA GB300": 2500e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300": 2250e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 5080": 112.6e12,
    "NVIDIA GeForce RTX 5070 Ti": 87.9e12,
    "NVIDIA GeForce RTX 5070": 61.7e12,
    "NVIDIA GeForce RTX 5060 Ti": 47.4e12,
    "NVIDIA GeForce RTX 5060": 38.4e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "AMD Instinct MI300X": 1307e12,
    "AMD Instinct MI250X": 191.5e12,
}
OUTSIDE_THE_STEP = ("evaluate", "save")
# Phases that only the logged step has. So their time is not divided by the steps since the last log
# line, unlike that of the phases that each step has.
ONLY_IN_THE_LOGGED_STEP = ("wait",)


class PhaseTimers:
    """Measures milliseconds per step for each phase.

    On a GPU, two CUDA events time each phase. So the host does not wait inside a step, and work
    counts for the phase that launched it. On a CPU, the host's clock times each phase.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: dict[str, list[tuple]] = {}
        self._start = self._now()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a `with` block. "time/total" leaves out the phases "evaluate" and "save"."""
        start = self._mark()
        yield
        self._spans.setdefault(phase, []).append((start, self._mark()))

    def read(
        self, steps: int, tokens_per_step: int, world_size: int, token_flops: float
    ) -> dict[str, float | None]:
        """Return this rank's measurements of the steps since the last call; waits for the device.

        "time/<phase>" and "time/total": ms per step, the mean over these steps. The total is
        wall-clock time, so it includes what is in no phase. "time/wait" is not a mean: it is the
        sum of the phases "wait" of the logged step, the only one that has them.
        "tokens_per_s": of all devices together, and "tokens_per_s_per_device".
        "mfu": model FLOP/s as a share of the device's peak FLOP/s, or None if that is unknown.
        "peak_mem_gib": peak memory so far, of tensors on a GPU, or of the process on a CPU.
        """
        now = self._now()
        sums = {
            phase: sum(self._elapsed_ms(*span) for span in spans)
            for phase, spans in self._spans.items()
        }
        total = 1000 * (now - self._start)
        total -= sum(sums.pop(phase, 0.0) for phase in OUTSIDE_THE_STEP)
        self._spans, self._start = {}, now
        tokens_per_s = tokens_per_step * steps / (total / 1000)
        peak = peak_flops(self.device)
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / world_size,
            "mfu": tokens_per_s / world_size * token_flops / peak if peak else None,
            "peak_mem_gib": peak_memory_gib(self.device),
            **{
                f"time/{phase}": ms if phase in ONLY_IN_THE_LOGGED_STEP else ms / steps
                for phase, ms in sums.items()
            },
            "time/total": total / steps,
        }

    def _mark(self) -> torch.cuda.Event | float:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _elapsed_ms(self, start, end) -> float:
        return start.elapsed_time(end) if self.device.type == "cuda" else 1000 * (end - start)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def find_straggler(wait_ms: float) -> dict[str, float | str]:
    """Return the longest wait of a rank, and the straggler; all ranks must call this.

    wait_ms: how long this rank waited for the others in one step. The straggler is the rank
    that waited least, because it arrived last.
    "time/wait_max": ms. "slowest_rank", "slowest_host": rank and host of the straggler.
    The result is empty if there is only one rank.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return {}
    waits = gather({rank: (wait_ms, socket.gethostname())})
    slowest = min(waits, key=waits.get)
    return {
        "time/wait_max": max(ms for ms, _ in waits.values()),
        "slowest_rank": slowest,
        "slowest_host": waits[slowest][1],
    }


def flops_per_token(model: PreTrainedModel, config: PretrainedConfig, seq_length: int) -> float:
    """Return the FLOPs per token of one training step: 6 N + 12 L H Q T.

    N parameters (those of all experts; the input embedding only if it is tied), L layers, H heads
    of size Q, T = seq_length. Forward and backward pass, attention as if there were no causal mask,
    without recomputed activations. Source: appendix B of PaLM, https://arxiv.org/abs/2204.02311.
    """
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output is None or output.weight is not embedding.weight:
        n_parameters -= embedding.weight.numel()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = [getattr(module, "head_dim", None) for module in model.modules()]
    widths = [size for size in sizes if size] or [width] * config.num_hidden_layers
    attention = 12 * config.num_attention_heads * sum(widths) * seq_length
    return 6 * n_parameters + attention


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak bf16 FLOP/s without sparsity, or None if it is unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # Memory and form factor follow the product name, as in "NVIDIA A100-SXM4-80GB". Some words mark
    # another GPU, or a part of one (MIG).
    other = r"(?!\w|.* (MIG|Laptop|Ti|D)\b)"
    matches = [known for known in PEAK_FLOPS if re.match(re.escape(known) + other, name)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far in GiB, of tensors on a GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

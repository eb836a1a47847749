"""Timers, memory and the arithmetic of MFU."""

import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from common import models, timers
from common.timers import PhaseTimers, flops_per_token, peak_flops


def test_phases_add_up():
    start = time.perf_counter()
    clock = PhaseTimers(torch.device("cpu"))
    for _ in range(4):
        for phase, seconds in (("data", 0.01), ("forward", 0.02), ("update", 0.005)):
            with clock(phase):
                time.sleep(seconds)
    with clock("evaluate"):
        time.sleep(0.2)
    with clock("save"):
        time.sleep(0.2)
    times = clock.read(tokens_per_step=1000, world_size=2, token_flops=1.0)
    assert "time/evaluate" not in times and "time/save" not in times
    # sleep() takes at least as long as it says: lower bounds hold on the busiest machine.
    assert times["time/data"] >= 10 and times["time/forward"] >= 20 and times["time/update"] >= 5
    phases = times["time/data"] + times["time/forward"] + times["time/update"]
    assert phases <= times["time/total"] <= (time.perf_counter() - start) * 1000 / 4 - 100
    assert times["tokens_per_s"] == pytest.approx(1000 / (times["time/total"] / 1000))
    assert times["tokens_per_s_per_device"] == times["tokens_per_s"] / 2
    assert times["mfu"] is None and times["peak_mem_gib"] > 0.01


def test_read_starts_anew():
    clock = PhaseTimers(torch.device("cpu"))
    with clock("update"):
        time.sleep(0.5)
    assert clock.read(1, 1, 1.0)["time/update"] >= 500
    start = time.perf_counter()
    with clock("update"):
        pass
    assert clock.read(1, 1, 1.0)["time/update"] <= (time.perf_counter() - start) * 1000


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        # 124,475,904 parameters: the embedding is also the output layer, so all of them count.
        ("gpt2", 6 * 124_475_904 + 12 * 12 * 12 * 64 * 1024),
        # 8,030,261,248 parameters less an input embedding of 128256 x 4096.
        ("llama-3.1-8b", 6 * (8_030_261_248 - 128_256 * 4096) + 12 * 32 * 32 * 128 * 1024),
    ],
)
def test_flops_per_token(preset, expected):
    config = models.load_config(preset)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert flops_per_token(model, config, seq_length=1024) == expected


def test_peak_rates(monkeypatch):
    cuda = torch.device("cuda")
    names = {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A10G": 70e12,
        "NVIDIA GeForce RTX 4090": 165e12,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA L4": 121e12,
        "NVIDIA L40": 181e12,
        "NVIDIA H200 NVL": 835e12,
        "AMD Instinct MI300X OAM": 1307e12,
        "Some other device": None,
    }
    for name, expected in names.items():
        monkeypatch.setattr(timers.torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(cuda) == expected
    assert peak_flops(torch.device("cpu")) is None


def test_mfu(monkeypatch):
    monkeypatch.setattr(timers, "peak_flops", lambda device: 1e12)
    clock = PhaseTimers(torch.device("cpu"))
    with clock("update"):
        time.sleep(0.05)
    report = clock.read(tokens_per_step=500, world_size=5, token_flops=1e6)
    assert report["mfu"] == pytest.approx(report["tokens_per_s"] / 5 * 1e6 / 1e12)

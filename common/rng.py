"""The random numbers of this process: what a checkpoint must hold of them."""

import random

import numpy as np
import torch


def get_rng_state() -> dict[str, object]:
    """Return the state of all generators that training may draw from."""
    rng = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return rng


def set_rng_state(rng: dict[str, object]) -> None:
    """Set what get_rng_state returned."""
    torch.set_rng_state(rng["torch"])
    np.random.set_state(rng["numpy"])
    random.setstate(rng["python"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])

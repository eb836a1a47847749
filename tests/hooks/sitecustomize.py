"""Python imports this by itself where PYTHONPATH names this folder, so also in processes that a
test does not start itself, as on the nodes of a cluster. The script then notes what it trains on.

NOTES: the folder that gets a file for each process, <host>-<pid>.jsonl, with a line for each step.
PAUSE: seconds to sleep after each step, for a test that must hit the run.
"""

import os
import sys

words = sys.orig_argv
if "NOTES" in os.environ and "-m" not in words and any(w.endswith("train_llm.py") for w in words):
    import json
    import socket
    import time
    from pathlib import Path

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from common import data

    notes = Path(os.environ["NOTES"]) / f"{socket.gethostname()}-{os.getpid()}.jsonl"
    samples: list[int] = []
    getitems = data.Sequences.__getitems__

    def noting_getitems(self: data.Sequences, indices: list[int]) -> list[dict]:
        if torch.is_grad_enabled():  # not in the evaluation
            samples.extend(indices)
        return getitems(self, indices)

    def note(optimizer, *_: object) -> None:
        if not samples:  # loading a checkpoint primes the optimizer with a step of no samples
            return
        step = int(next(iter(optimizer.state.values()))["step"])
        with notes.open("a") as file:
            file.write(json.dumps({"step": step, "samples": samples}) + "\n")
        samples.clear()
        time.sleep(float(os.environ.get("PAUSE", 0)))

    data.Sequences.__getitems__ = noting_getitems
    register_optimizer_step_post_hook(note)

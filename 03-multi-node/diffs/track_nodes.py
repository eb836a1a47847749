"""A wandb run for each node, in a group; track-nodes.diff uses it."""

import os
import socket
from pathlib import Path

from common import tracker
from common.ranks import rank_and_world_size


class NodeTracker(tracker.Tracker):
    """A Tracker that also reports from the first rank of each other node, but to wandb only.

    wandb measures the machine that it runs on, so it shows the utilization of each node.
    local_rank: the rank within the node.
    """

    def __init__(self, run_dir: Path, config: dict, step: int, local_rank: int) -> None:
        os.environ.setdefault("WANDB_RUN_GROUP", run_dir.name)
        super().__init__(run_dir, config, step)
        rank, _ = rank_and_world_size()
        is_wanted = os.environ.get("WANDB_MODE") != "disabled"
        if rank > 0 and local_rank == 0 and is_wanted:
            self._wandb = tracker.start_wandb(run_dir, config, f"-{socket.gethostname()}")

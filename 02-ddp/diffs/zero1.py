"""ZeRO-1: each rank stores Adam's moments for its share of the parameters; zero1.diff uses it."""

from itertools import chain

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer


class ShardedAdamW(ZeroRedundancyOptimizer):
    """PyTorch's ZeroRedundancyOptimizer around AdamW, whose state a checkpoint can hold.

    Each parameter belongs to one rank. In `step`, that rank updates it and sends it to the others.
    PyTorch's class gathers all moments on one rank before they can be saved. Here `state_dict` has
    the moments of this rank only, with the number of each parameter among all of them, so that each
    rank saves and loads its own.
    """

    def __init__(self, parameters: object, **options: object) -> None:
        super().__init__(parameters, optimizer_class=torch.optim.AdamW, **options)
        self.state = self.optim.state  # self.optim is the AdamW of this rank's parameters

    def state_dict(self) -> dict:
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        groups = [
            {**group, "params": [numbers[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        state = {numbers[parameter]: moments for parameter, moments in self.state.items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over the moments of this rank's parameters, and the learning rates."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for name, parameter in zip(loaded["params"], group["params"], strict=True):
                if name in state_dict["state"]:
                    self.state[parameter] = state_dict["state"][name]
            group |= {key: value for key, value in loaded.items() if key != "params"}

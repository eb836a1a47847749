"""Train for one epoch. Rank 1 has one batch more than rank 0.

torchrun --standalone --nproc-per-node 2 03-multi-node/faults/uneven.py
torchrun --standalone --nproc-per-node 2 03-multi-node/faults/uneven.py name   names the late rank
torchrun --standalone --nproc-per-node 2 03-multi-node/faults/uneven.py join   lets rank 0 join in
"""

import contextlib
import datetime
import gc
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

timeout = datetime.timedelta(seconds=10)
dist.init_process_group("gloo", timeout=timeout)
rank = dist.get_rank()
ddp_model = DistributedDataParallel(torch.nn.Linear(1, 1))
batches = [torch.ones(2, 1)] * (3 + rank)
# A rank without batches takes part in the other ranks' all-reduces.
with Join([ddp_model]) if "join" in sys.argv else contextlib.nullcontext():
    for step, batch in enumerate(batches, start=1):
        ddp_model(batch).sum().backward()
        print(f"rank {rank}: step {step} of {len(batches)}", flush=True)
if "name" in sys.argv:  # ignores the timeout of the group; its own default is 30 minutes
    dist.monitored_barrier(timeout=timeout, wait_all_ranks=True)
dist.barrier()
print(f"rank {rank}: the epoch is over", flush=True)
# DDP's constructor leaves a reference cycle that keeps the process group alive. Collect it now: if
# Python frees the group later, it can wait for a gloo thread that waits for Python's global lock.
del ddp_model
gc.collect()
dist.destroy_process_group()

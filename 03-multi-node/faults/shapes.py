"""Sum tensors whose sizes differ between two ranks; with "pad", pad them to the same size first.

torchrun --standalone --nproc-per-node 2 03-multi-node/faults/shapes.py 4 3
torchrun --standalone --nproc-per-node 2 03-multi-node/faults/shapes.py 4 3 pad
"""

import datetime
import sys

import torch
import torch.distributed as dist

backend, device = ("nccl", "cuda") if torch.cuda.is_available() else ("gloo", "cpu")
dist.init_process_group(backend, timeout=datetime.timedelta(seconds=10))
rank = dist.get_rank()
if device == "cuda":
    torch.cuda.set_device(rank)
numbers = torch.ones(int(sys.argv[1 + rank]), device=device)
if sys.argv[3:] == ["pad"]:
    largest = torch.tensor(len(numbers), device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    numbers = torch.nn.functional.pad(numbers, (0, largest.item() - len(numbers)))
dist.all_reduce(numbers)
print(f"the sum, on rank {rank}: {numbers[:8].tolist()}", flush=True)
dist.barrier()
dist.destroy_process_group()

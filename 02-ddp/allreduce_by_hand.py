"""Sum gradients over the ranks in three ways, and count the bytes that each rank sends.

torchrun --standalone --nproc-per-node 4 02-ddp/allreduce_by_hand.py
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from common import launch
from common.inputs import models


def parameter_server(grads: torch.Tensor) -> None:
    """Rank 0 receives all gradients, adds them up and sends the sum to each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gathered = [torch.empty_like(grads) for _ in range(world_size)] if rank == 0 else None
    # dist.reduce and dist.broadcast would share the work among the ranks.
    dist.gather(grads, gathered, dst=0)
    dist.scatter(grads, [sum(gathered)] * world_size if rank == 0 else None, src=0)


def ring(grads: torch.Tensor) -> None:
    """Each rank sends chunks to the next rank only: a reduce-scatter, then an all-gather."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = grads.tensor_split(world_size)  # views, whose lengths differ by at most 1
    for step in range(2 * (world_size - 1)):
        chunk = chunks[(rank - step - 1) % world_size]
        received = torch.empty_like(chunk)
        sending = dist.isend(chunks[(rank - step) % world_size], dst=(rank + 1) % world_size)
        dist.recv(received, src=(rank - 1) % world_size)
        sending.wait()  # with dist.send, all ranks would wait for a receiver: a deadlock
        # The reduce-scatter adds to partial sums. The all-gather copies complete sums.
        chunk.copy_(chunk + received if step < world_size - 1 else received)


def measure() -> torch.Tensor:
    """Return the time in ms, and the bytes that this process has sent so far."""
    counters = Path("/proc/self/io")  # Linux: wchar counts all written bytes, sockets included
    sent = float(counters.read_text().split()[3]) if counters.exists() else float("nan")
    return torch.tensor([1000 * time.perf_counter(), sent], dtype=torch.float64)


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # use the CPU: there may be more ranks than GPUs
    launch.prepare_environment()  # also runs as a single process, without torchrun
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all ranks have the same weights, and each has its own batch
    model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"))
    ids = torch.randint(model.config.vocab_size, (4, 128), generator=torch.manual_seed(rank))
    loss = model(input_ids=ids, labels=ids).loss
    grads = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    ddp_model = torch.nn.parallel.DistributedDataParallel(model)
    ddp_model(input_ids=ids, labels=ids).loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    del ddp_model  # if it outlived the process group, it could block the exit of the process

    lines = [f"method            busiest rank sends      ms   each, in S = {grads.nbytes:,} bytes"]
    for add_up in (parameter_server, ring, dist.all_reduce):
        measured = []
        for _ in range(11):  # the first time is the warm-up
            total = grads.clone()
            dist.barrier()  # all ranks start together
            start = measure()
            add_up(total)
            measured.append(measure() - start)
            torch.testing.assert_close(total / world_size, expected, rtol=1e-5, atol=1e-7)
        medians = torch.empty(world_size, 2, dtype=torch.float64)
        dist.all_gather(list(medians), torch.stack(measured[1:]).median(dim=0).values)
        ms, sent = medians.T
        shares = "".join(f"{share:7.2f}" for share in sent / grads.nbytes)
        lines.append(f"{add_up.__name__:16}{sent.max():18,.0f} B{ms.max():8.1f}{shares}")
    if rank == 0:
        print("\n".join([*lines, "All three equal DDP's gradients (S)."]).replace("nan", "  -"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)

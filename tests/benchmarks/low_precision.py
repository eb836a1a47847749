"""What low precision costs when gradients are added over ranks: chapter 5's two measurements.

torchrun --standalone --nproc-per-node 2 tests/benchmarks/low_precision.py
"""

import sys

import torch.distributed as dist
from machine import RESULTS, write_result

sys.path.insert(0, str(RESULTS.parents[1]))
from runner import ROOT, load_script


def main() -> None:
    reduction = load_script(ROOT / "05-mixed-precision/reduction.py")
    compression = load_script(ROOT / "05-mixed-precision/compression.py")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    measured = reduction.measure_ranks()
    hooks = compression.measure(compression.STEPS)
    if rank == 0:
        results = {"world_size": world_size, "measured": measured, "rows": reduction.simulate()}
        write_result(RESULTS / "reduction.json", results)
        results = {"world_size": world_size, "steps": compression.STEPS, "hooks": hooks}
        write_result(RESULTS / "compression.json", results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

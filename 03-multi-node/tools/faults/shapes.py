"""The ranks pass tensors of different sizes to the same all-reduce."""

import re
from pathlib import Path

from faults.lab import Lab, Run

SHAPES = '''"""Sum tensors whose sizes differ between ranks: shapes.py TIMEOUT_S SIZE_0 SIZE_1."""

import datetime
import sys

import torch
import torch.distributed as dist

timeout_s, *sizes = map(int, sys.argv[1:])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
rank = dist.get_rank()
numbers = torch.ones(sizes[rank])
dist.all_reduce(numbers)
print(f"the sum, on rank {rank}: {numbers.tolist()}", flush=True)
dist.barrier()
dist.destroy_process_group()
'''
PADDED = """\
+largest = torch.tensor(len(numbers))
+dist.all_reduce(largest, op=dist.ReduceOp.MAX)
+numbers = torch.nn.functional.pad(numbers, (0, largest.item() - len(numbers)))
 dist.all_reduce(numbers)
"""


def start(lab: Lab, script: Path, *sizes: int, **env: str) -> Run:
    return lab.torchrun(lab.new_folder("shapes"), script, lab.timeout, *sizes, **env)


def show_fault(lab: Lab) -> None:
    script = lab.write_script("shapes", "shapes.py", SHAPES)
    hangs, wrong = start(lab, script, 2, 1), start(lab, script, 4, 3)
    aborts = start(lab, script, 9, 5).wait()
    checked = start(lab, script, 4, 3, TORCH_DISTRIBUTED_DEBUG="DETAIL").wait()
    for run in (aborts, wrong, hangs):
        lab.show_end(run, r"the sum|what\(\)|^\d\| .*RuntimeError|exitcode  ")
    lab.expect_failure(aborts, "op.preamble.length <= op.nbytes", "SIGABRT")
    sums = re.findall(r"the sum, on rank 1: (.*)", wrong.output)
    lab.expect(bool(sums) and sums[0] != "[2.0, 2.0, 2.0]", "rank 1 should get a wrong sum")
    lab.expect_failure(hangs, "Timed out waiting")
    lab.show_end(checked, r"^\d\| .*RuntimeError: .*match")
    lab.expect_failure(checked, "Tensor shapes: 4vs 3")


def show_fix(lab: Lab) -> None:
    run = start(lab, lab.write_script("shapes", "shapes.py", SHAPES, PADDED), 4, 3)
    lab.show_end(run, "the sum")
    complete = run.output.count("[2.0, 2.0, 2.0, 1.0]") == 2
    lab.expect(run.status == 0 and complete, "both ranks should have the complete sum")

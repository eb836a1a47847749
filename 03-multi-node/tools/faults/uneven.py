"""Rank 1 has one batch more than rank 0, and the run hangs at the end of the epoch."""

from faults.lab import Lab, Run

UNEVEN = '''"""Train for one epoch. Rank 1 has one batch more than rank 0: uneven.py TIMEOUT_S."""

import datetime
import gc
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

timeout = datetime.timedelta(seconds=int(sys.argv[1]))
dist.init_process_group("gloo", timeout=timeout)
rank = dist.get_rank()
ddp_model = DistributedDataParallel(torch.nn.Linear(1, 1))
batches = [torch.ones(2, 1)] * (3 + rank)
for step, batch in enumerate(batches):
    ddp_model(batch).sum().backward()
    print(f"rank {rank}: step {step + 1} of {len(batches)}", flush=True)
dist.barrier()
print(f"rank {rank}: the epoch is over", flush=True)
# DDP's constructor leaves a reference cycle that keeps the process group alive. Collect it now: if
# Python frees the group later, it can wait for a gloo thread that waits for Python's global lock.
del ddp_model
gc.collect()
dist.destroy_process_group()
'''
MONITORED_BARRIER = """\
-dist.barrier()
+# monitored_barrier ignores the timeout of the group. Its own default is 30 minutes.
+dist.monitored_barrier(timeout=timeout, wait_all_ranks=True)
"""
EQUAL_NUMBERS = """\
+fewest = torch.tensor(len(batches))
+dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
+batches = batches[: fewest.item()]  # shuffled data: each epoch leaves out other batches
 for step, batch in enumerate(batches):
"""
JOINED = """\
-for step, batch in enumerate(batches):
-    ddp_model(batch).sum().backward()
-    print(f"rank {rank}: step {step + 1} of {len(batches)}", flush=True)
+with Join([ddp_model]):  # a rank without batches takes part in the other ranks' all-reduces
+    for step, batch in enumerate(batches):
+        ddp_model(batch).sum().backward()
+        print(f"rank {rank}: step {step + 1} of {len(batches)}", flush=True)
"""


def start(lab: Lab, patch: str = "") -> Run:
    script = lab.write_script("uneven", "uneven.py", UNEVEN, patch)
    return lab.torchrun(script.parent, script, lab.timeout)


def show_fault(lab: Lab) -> None:
    run, named = start(lab), start(lab, MONITORED_BARRIER)
    lab.show_end(run, r"^\d\| rank|^\d\| .*RuntimeError")
    lab.expect_failure(run, "Timed out waiting")
    lab.expect("step 4 of 4" not in run.output, "rank 1 should not finish its last step")
    frames = r"^\d\| .*File .*uneven.py\", line \d+|^\d\| .*(barrier|backward)\(\)$"
    lab.show("the tracebacks: rank 0 is in the barrier, rank 1 is in a step", run.lines(frames))
    lab.show_end(named, r"^\d\| .*RuntimeError: .*monitoredBarrier")
    lab.expect_failure(named, "Ranks 1 failed to pass monitoredBarrier")


def show_fix(lab: Lab) -> None:
    for steps, patch in ((3, EQUAL_NUMBERS), (4, JOINED)):
        run = start(lab, patch)
        lab.show_end(run, r"\d\| rank")
        over = run.status == 0 and run.output.count("is over") == 2
        lab.expect(over, "both ranks should finish the epoch")
        done = f"rank 1: step {steps} of {steps}" in run.output
        lab.expect(done, f"rank 1 should train {steps} steps")

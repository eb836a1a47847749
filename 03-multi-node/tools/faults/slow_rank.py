"""Rank 1 needs 0.2 s longer for each micro-batch. Nothing fails, but both ranks are slow."""

import statistics

from faults.lab import Lab, Run

SLOW = """\
     # --- train ---
+    import time
+
@@
                 batch = next(batches)
+                time.sleep(0.2 * (rank == 1))  # like a slow disk
"""


def show_fault(lab: Lab) -> None:
    run = lab.train("slow-rank", SLOW)
    wait_ms, ranks = show_waits(lab, run)
    lab.expect(wait_ms > 300 and ranks == {1}, "rank 0 should wait about 400 ms for rank 1")


def show_fix(lab: Lab) -> None:
    wait_ms, _ = show_waits(lab, lab.train("slow-rank"))
    lab.expect(wait_ms < 300, "no rank should wait long")


def show_waits(lab: Lab, run: Run) -> tuple[float, set[int]]:
    """Print the longest wait and the slowest rank of each step.

    Return the median of the waits in ms per step, and the slowest ranks.
    """
    lab.expect_success(run)
    later = run.metrics[2:]  # the first steps allocate buffers and read files
    wait_ms = statistics.median(line["time/wait_max"] for line in later)
    total_ms = statistics.median(line["time/total"] for line in later)
    ranks = [line["slowest_rank"] for line in later]
    lab.show(
        f"metrics.jsonl: the longest wait is {wait_ms:.0f} of {total_ms:.0f} ms per step; "
        f"the slowest rank of each step is {' '.join(map(str, ranks))}"
    )
    return wait_ms, set(ranks)

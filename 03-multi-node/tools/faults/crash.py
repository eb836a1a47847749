"""Rank 1 raises an exception, and rank 0 fails because rank 1 is gone."""

from faults.lab import Lab

CRASH = """\
             last_backward = micro_batch == accumulation - 1
+            if rank == 1 and state["step"] == 7:
+                batch["input_ids"][0, 0] = 10**6  # no such token
"""


def show_fault(lab: Lab) -> None:
    run = lab.train("crash", CRASH)
    lab.show_end(run, "step 7/|gone or out of reach", report=True)
    errors = run.errors()
    lab.show(
        f"the error files {run.folder}/logs/*/attempt_0/RANK/error.json have each rank's exception",
        [f"rank {rank}: {message}" for rank, message in errors.items()],
    )
    lab.expect_failure(run)
    lab.expect("IndexError" in errors.get(1, ""), "rank 1 should have an IndexError in its file")
    lab.expect("IndexError" not in errors.get(0, ""), "rank 0 should have another exception")


def show_fix(lab: Lab) -> None:
    lab.expect_success(lab.train("crash"))

"""A memory allocation fails on rank 1. In a second run, the kernel kills rank 1."""

import sys

from common.cli import RunError

from faults.lab import Lab

LARGE = ("-d", "python-stdlib", "-s", 128, "--global-batch-size", 192, "--max-steps", 2)
LIMITED = """\
     # --- train ---
+    import resource
+
+    if rank == 1:  # allow half a GiB more than it uses now
+        with open("/proc/self/statm") as statm:
+            used = int(statm.read().split()[0]) * resource.getpagesize()
+        resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))
"""
KILLED = """\
         state["step"] += 1
+        if rank == 1 and state["step"] == 7:
+            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does
"""


def show_fault(lab: Lab) -> None:
    require_linux()
    run = lab.train("out-of-memory", LIMITED, args=(*LARGE, "-b", 96))
    lab.show_end(run, r"each step: |^1\| .*Error: .*you tried to allocate", report=True)
    lab.expect_failure(run, "you tried to allocate")
    killed = lab.train("out-of-memory", KILLED)
    lab.show_end(killed, None, report=True)
    lab.expect_failure(killed, "Signal 9 (SIGKILL) received by PID")
    errors = killed.errors()
    lab.expect(1 not in errors, "rank 1 should leave no error file")
    lab.show(
        f"ranks with an error file: {' '.join(map(str, errors)) or 'none'}; for a rank without "
        "one, ask the kernel: dmesg -T | grep -i 'out of memory', in a container memory.events"
    )


def show_fix(lab: Lab) -> None:
    require_linux()
    run = lab.train("out-of-memory", LIMITED, args=(*LARGE, "-b", 8))
    lab.show_end(run, r"each step: |\| loss")
    trained = run.status == 0 and len(run.metrics) == 2
    lab.expect(trained, "smaller micro-batches should fit within the limit")


def require_linux() -> None:
    if sys.platform != "linux":
        raise RunError("out-of-memory works only on Linux: choose another fault.")

"""Only rank 0 evaluates. The evaluation contains an all-reduce, which rank 1 never calls."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from faults.lab import ROOT, Lab, Run

SKIPPED = """\
-        if state["step"] % args.eval_freq == 0 or last:
+        if rank == 0 and (state["step"] % args.eval_freq == 0 or last):
"""
# With NCCL the watchdog writes Flight Recorder's files. gloo has no watchdog, so a thread of each
# rank writes them when the lab creates the file `dump`.
FLIGHT_RECORDER = """\
     # --- model ---
+    import faulthandler, pathlib, threading, time
+
+    def write_flight_recorder(folder: pathlib.Path) -> None:
+        while not (folder / "dump").exists():
+            time.sleep(0.1)
+        entries = torch._C._distributed_c10d._dump_fr_trace()
+        (folder / f"rank_{rank}").write_bytes(entries)
+
+    folder = pathlib.Path(args.save_dir)
+    threading.Thread(target=write_flight_recorder, args=[folder], daemon=True).start()
+    faulthandler.register(signal.SIGUSR2)  # prints the stack
"""
# In torch 2.13, TORCH_DISTRIBUTED_DEBUG=DETAIL makes DDP on gloo crash with a segmentation fault.
# So DDP gets a group whose collectives are not checked. The default group checks all others.
UNCHECKED_DDP = """\
+    dist.set_debug_level(dist.DebugLevel.OFF)
     ddp_model = DistributedDataParallel(
         model,
+        process_group=dist.new_group(),
"""


def show_fault(lab: Lab) -> None:
    run = lab.train("skipped-collective", SKIPPED, FLIGHT_RECORDER, TORCH_FR_BUFFER_SIZE=100)
    run.wait_for_step(4)
    time.sleep(2)  # rank 0 evaluates in step 5
    (run.folder / "dump").touch()
    stacks = show_stacks(lab, run)
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    checked = lab.train("skipped-collective", SKIPPED, UNCHECKED_DDP, **detail)
    lab.show_end(run, "step 4/|gone or out of reach")
    lab.expect_failure(run, "Timed out waiting")
    found = "evaluate" in stacks.get(0, "") and "evaluate" not in stacks.get(1, "evaluate")
    lab.expect(found, "the stacks should show rank 0 in evaluate, and rank 1 elsewhere")
    recorded = read_flight_recorder(run.folder)
    lab.show("Flight Recorder: the last collectives of each rank", recorded)
    waiting = [line for line in recorded if "not done" in line]
    found = len(waiting) == 2 and "evaluate" in waiting[0] and "evaluate" not in waiting[1]
    lab.expect(found, "Flight Recorder should show two different collectives that are not done")
    lab.show_end(checked, r"^\d\| \w+Error: .*mismatch")
    lab.expect_failure(checked, "Detected mismatch between collectives")


def show_fix(lab: Lab) -> None:
    lab.expect_success(lab.train("skipped-collective"))


def show_stacks(lab: Lab, run: Run) -> dict[int, str]:
    """Print the stack of each worker and return the stacks by rank.

    py-spy reads them. Where it is missing or not permitted, faulthandler prints them.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    spy = shutil.which("py-spy", path=path)
    stacks = {}
    for rank, pid in enumerate(run.workers()):
        done = None
        if spy:
            command = [spy, "dump", "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True)
        if done and done.returncode == 0:
            text = done.stdout.split("MainThread")[-1].split("\nThread")[0]
            frames = [line.strip() for line in text.splitlines() if " (" in line]
            title = f"py-spy dump --pid {pid}, the process of rank {rank}"
        else:
            before = len(run.output)
            os.kill(pid, signal.SIGUSR2)
            time.sleep(1)
            text = run.output[before:].split("Current thread")[-1]
            frames = [line[2:].strip() for line in text.splitlines() if " File " in line]
            title = f"kill -USR2 {pid}, the process of rank {rank}: faulthandler prints its stack"
        frames = [frame.replace(f"{ROOT}/", "") for frame in frames]
        lab.show(title, [f"    {frame}" for frame in frames[:6]])
        stacks[rank] = "\n".join(frames)
    if not spy:
        lab.show("py-spy is not installed. It works with any script: pip install py-spy")
    return stacks


def read_flight_recorder(folder: Path) -> list[str]:
    """Return a line for each of the last three collectives of each rank."""
    lines = []
    for path in sorted(folder.glob("rank_*")):
        for entry in pickle.loads(path.read_bytes())["entries"][-3:]:
            frames = [f for f in entry["frames"] if "site-packages" not in f["filename"]]
            where = f"{frames[0]['name']}, line {frames[0]['line']}" if frames else "?"
            done = "done" if entry["retired"] else "not done"
            lines.append(
                f"{path.name}: number {entry['collective_seq_id']}, {entry['profiling_name']} of "
                f"{entry['input_sizes'][0]} {entry['input_dtypes'][0]}, in {where}: {done}"
            )
    return lines

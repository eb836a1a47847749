"""Meet each failure of a run on several processes once, on purpose, on this machine.

python 03-multi-node/fault_lab.py list
python 03-multi-node/fault_lab.py crash
python 03-multi-node/fault_lab.py crash --fixed

Each fault is planted in a copy of the chapter's train_llm.py, or in a few lines that need no model,
and the lab shows what it changed. Two processes start it on the CPU, GPUs or not. Then you see what
a reader of the log sees, and what the tool says that shows the cause; with --fixed, the mended
version. Status 0: all of it came as it should. diagnosing.md has a section on each.
"""

import argparse
import contextlib
import difflib
import json
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common import cli, launch
from common.cli import InputError, at_least

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "03-multi-node/train_llm.py"
# Nobody has it: reserved for examples, https://datatracker.ietf.org/doc/html/rfc5737.
NOWHERE = "198.51.100.1"
# 12 steps an epoch.
TRAINING = """\
--dataset-name {corpus}
--seq-length 32
--global-batch-size 24
--warmup-steps 4
--max-steps 14
--log-freq 1
--eval-freq 5
--ckpt-freq 4
--dist-timeout {timeout}
"""


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("faults", nargs="+", metavar="FAULT", help=f"list, or of {', '.join(FAULTS)}")
    add("--fixed", action="store_true", help="run the mended version instead")
    add("--dist-timeout", default=8, type=at_least(2), help="seconds to wait for other ranks")
    add("--output", type=Path, default="outputs/fault-lab", help="folder for what the runs write")
    return parser.parse_args()


def join(*patches: str) -> str:
    """Return patches of different places as one."""
    return "@@\n".join(patches)


def read_metrics(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl of a folder's training, while it goes on too."""
    path = folder / "run/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    # One that does not end yet is being written.
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Run:
    """A command that runs, or has run: its output, its status, how long it took."""

    def __init__(self, command: list[object], folder: Path, env: dict[str, object]) -> None:
        self.folder = folder
        self.log = folder / "output.txt"
        self.command = [str(word) for word in command]
        self.seconds = 0.0
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env={**os.environ, **{name: str(value) for name, value in env.items()}},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self.clock = threading.Thread(target=self._time, args=[time.monotonic()], daemon=True)
        self.clock.start()

    def _time(self, start: float) -> None:
        self.process.wait()
        self.seconds = time.monotonic() - start

    def wait(self, timeout: float = 120) -> "Run":
        """Wait for its end. Raises TimeoutExpired; the lab then kills what it has started."""
        self.process.wait(timeout)
        self.clock.join()
        return self

    @property
    def status(self) -> int:
        return self.process.returncode

    @property
    def output(self) -> str:
        """Return what it has printed so far, its paths from the repository's root on."""
        text = self.log.read_text(errors="replace").replace("\ufffd", "?")
        text = re.sub(rf"{re.escape(str(ROOT))}/|[^\s\"]*(?=site-packages/)", "", text)
        return text.replace(str(Path.home()), "~")

    @property
    def metrics(self) -> list[dict]:
        """Return the lines of metrics.jsonl of a training."""
        return read_metrics(self.folder)

    def wait_for(self, step: int, timeout: float = 90) -> None:
        """Wait until the training has logged this step; raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while not any(line["step"] >= step for line in self.metrics):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"no step {step}: see {self.log}")
            time.sleep(0.05)

    def lines(self, pattern: str, most: int = 99) -> list[str]:
        """Return the lines of the output in which the pattern stands, the last ones."""
        return [line for line in self.output.splitlines() if re.search(pattern, line)][-most:]

    def report(self) -> list[str]:
        """Return torchrun's report of who failed, less the frames of its tracebacks."""
        found = re.search(r"^=+\n.* FAILED\n(?:.*\n)*", self.output, re.MULTILINE)
        lines = found[0].splitlines() if found else []
        return [line for line in lines if line.strip() and not line.startswith("    ")]

    def errors(self) -> dict[int, str]:
        """Return the last line of the exception in each rank's error file, by rank."""
        found = {}
        for path in sorted(self.folder.glob("logs/*/attempt_0/*/error.json")):
            message = json.loads(path.read_text())["message"]
            message = message if isinstance(message, str) else message["message"]
            found[int(path.parent.name)] = message.splitlines()[0]
        return found

    def workers(self) -> list[int]:
        """Return the ids of the processes that torchrun has started, in the order of their start.

        Not torchrun's own: its stack only shows that it waits for them.
        """
        table = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid=,stat="], text=True)
        rows = [line.split() for line in table.splitlines()]
        ours = str(self.process.pid)
        return sorted(int(pid) for pid, parent, stat in rows if parent == ours and stat[0] != "Z")

    def kill(self) -> None:
        """SIGKILL to it and to what it has started."""
        for pid in [*(self.workers() if self.process.poll() is None else []), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()


class Lab:
    """Plants, starts, shows and checks; keeps what every run has written."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.timeout = args.dist_timeout
        self.output = args.output
        self.runs: list[Run] = []
        self.done: dict[tuple, Run] = {}  # by what was started: the mended script is often the same
        self.printed: set[str] = set()  # scripts of a few lines
        self.surprises: list[str] = []
        folder = self.folder("training")
        letters = random.Random(0)
        texts = ["".join(letters.choice("abcdefgh \n") for _ in range(600)) for _ in range(24)]
        (folder / "corpus.json").write_text(json.dumps(texts))
        self.arguments = folder / "arguments"  # of train_llm.py, which reads them from there
        settings = TRAINING.format(corpus=folder / "corpus.json", timeout=self.timeout)
        self.arguments.write_text(settings)

    def folder(self, name: str) -> Path:
        """Return a new folder; what an earlier call has left stays as it is."""
        for number in range(1, 10000):
            path = self.output / f"{name}-{number}"
            with contextlib.suppress(FileExistsError):
                path.mkdir(parents=True)
                return path
        raise InputError(f"{self.output} is full of folders: give another --output.")

    def say(self, title: str, lines: list[str] | str = ()) -> None:
        """Print a title, and below it what a tool or a run has said."""
        print(f"\n--- {title}")
        for line in [lines] if isinstance(lines, str) else lines:
            print(re.sub("(; to go on).*", r"\1 ...", line.rstrip()))
        sys.stdout.flush()

    def expect(self, happened: bool, what: str) -> None:
        """Note what did not come as it should."""
        if not happened:
            self.surprises.append(what)
            self.say(f"NOT AS IT SHOULD BE: {what}")

    def write(self, folder: Path, source: str, patches: str, original: str) -> Path:
        """Write a changed copy of a script, and print the changes.

        patches: as in a diff, with a line of @@ between two places, each of which is there once.
        """
        text = source
        for hunk in patches.split("@@\n") if patches else ():
            right, wrong = (
                "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in signs)
                for signs in (" -", " +")
            )
            assert text.count(right) == 1, f"not once in {original}:\n{right}"
            text = text.replace(right, wrong)
        path = folder / Path(original).name
        path.write_text(text)
        before, after = source.splitlines(), text.splitlines()
        changes = list(difflib.unified_diff(before, after, lineterm="", n=1))[2:]
        if patches:
            self.say(f"changed in {original}", changes)
        elif source not in self.printed and len(before) < 50:
            self.say(original, before)
        else:
            self.say(f"{original}, unchanged")
        self.printed.add(source)
        return path

    def start(self, command: list[object], folder: Path, **env: object) -> Run:
        """Start a command, from the repository's root and without GPUs."""
        own = {
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1),
            "WANDB_MODE": "disabled",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}| ",
            **env,
        }
        self.runs.append(Run(command, folder, own))
        words = [str(word) for word in command]
        shown = shlex.join(["torchrun", *words[3:]] if words[1] == "-m" else words)
        self.say("start", " ".join([*(f"{name}={value}" for name, value in env.items()), shown]))
        return self.runs[-1]

    def torchrun(self, folder: Path, *words: object, place: tuple = (), **env: object) -> Run:
        """Start a script with torchrun, as 2 processes if `place` does not say otherwise."""
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += place or ("--standalone", "--nproc-per-node", 2)
        command += ("--log-dir", folder / "logs", "--redirects", 3, "--tee", 3)
        return self.start([*command, *words], folder, **env)

    def train(
        self, name: str, patches: str = "", *args: object, place: tuple = (), **env: object
    ) -> Run:
        """Start the chapter's script with these changes, or return the run that did so."""
        key = (patches, args, place, tuple(env.items()))
        if key not in self.done:
            folder = self.folder(name)
            path = self.write(folder, (ROOT / SCRIPT).read_text(), patches, SCRIPT)
            flags = [f"@{self.arguments}", "--save-dir", folder, "-e", "run", *args]
            self.done[key] = self.torchrun(folder, path, *flags, place=place, **env)
        return self.done[key]

    def ended(self, run: Run, lines: list[str] | str = ()) -> None:
        """Show how a run ended."""
        run.wait()
        self.say(f"what you see (all of it: {run.log})", lines)
        print(f"torchrun ended with status {run.status}, {run.seconds:.0f} s after its start")
        sys.stdout.flush()

    def mended(self, run: Run) -> None:
        """Show a training that must have come to its end."""
        self.ended(run, run.wait().lines(r"\| loss", 2))
        steps = [line["step"] for line in run.metrics]
        self.expect(run.status == 0 and steps[-1:] == [14], "the mended run trains to its end")

    def plain(self, name: str, source: str, patches: str, *args: object, **env: object) -> Run:
        """Start a script of a few lines, which the lab prints, with these changes."""
        folder = self.folder(name)
        path = self.write(folder, source, patches, f"{name}.py")
        return self.torchrun(folder, path, self.timeout, *args, **env)


# --- a rank that crashes ---

CRASH = """\
             last_backward = micro_batch == accumulation - 1
+            if rank == 1 and state["step"] == 7:
+                batch["input_ids"][0, 0] = 10**6  # no such token
"""


def crash(lab: Lab, fixed: bool) -> None:
    """one rank fails, of itself; the others fail because it is gone"""
    run = lab.train("crash", "" if fixed else CRASH)
    if fixed:
        return lab.mended(run)
    run.wait()
    lab.ended(run, run.lines(r"step 7/|gone or out of reach") + run.report())
    errors = run.errors()
    lab.say(
        f"the error files, {run.folder}/logs/*/attempt_0/RANK/error.json, say who failed of itself",
        [f"rank {rank}: {message}" for rank, message in errors.items()],
    )
    lab.expect(run.status == 1, "torchrun ends with status 1")
    lab.expect("IndexError" in errors.get(1, ""), "rank 1's error file holds its own exception")
    lab.expect("IndexError" not in errors.get(0, ""), "rank 0 has no such exception")


# --- a collective that the others skipped ---

SKIPPED = """\
-        if state["step"] % args.eval_freq == 0 or last:
+        if rank == 0 and (state["step"] % args.eval_freq == 0 or last):
"""
# With NCCL the watchdog writes such a file by itself; gloo has no watchdog.
WATCHED = """\
     # --- model ---
+    import faulthandler, pathlib, threading, time
+
+    def dump_when_told(folder: pathlib.Path) -> None:
+        while not (folder / "dump").exists():
+            time.sleep(0.1)
+        entries = torch._C._distributed_c10d._dump_fr_trace()
+        (folder / f"rank_{rank}").write_bytes(entries)
+
+    folder = pathlib.Path(args.save_dir)
+    threading.Thread(target=dump_when_told, args=[folder], daemon=True).start()
+    faulthandler.register(signal.SIGUSR2)  # prints the stack, at once
"""
# With torch 2.13, DDP on a gloo group that checks its collectives ends in a segmentation fault. So
# it gets a group of its own that does not. The default group, with all other collectives, does.
CHECKED = """\
+    dist.set_debug_level(dist.DebugLevel.OFF)
     ddp_model = DistributedDataParallel(
         model,
+        process_group=dist.new_group(),
"""


def skipped_collective(lab: Lab, fixed: bool) -> None:
    """only rank 0 evaluates; the evaluation holds an all-reduce, which the other rank skips"""
    if fixed:
        return lab.mended(lab.train("skipped-collective"))
    run = lab.train("skipped-collective", join(SKIPPED, WATCHED), TORCH_FR_BUFFER_SIZE=100)
    run.wait_for(4)
    time.sleep(2)  # step 5 evaluates
    (run.folder / "dump").touch()
    stacks = show_stacks(lab, run)
    checked = lab.train(
        "skipped-collective", join(SKIPPED, CHECKED), TORCH_DISTRIBUTED_DEBUG="DETAIL"
    )
    run.wait()
    lab.ended(run, run.lines(r"step 4/|gone or out of reach"))
    lab.expect(run.status == 1, "torchrun ends with status 1")
    lab.expect("Timed out waiting" in run.output, "a rank waits in vain")
    found = "evaluate" in stacks.get(0, "") and "evaluate" not in stacks.get(1, "evaluate")
    lab.expect(found, "the stacks show rank 0 in evaluate, rank 1 elsewhere")
    recorded = read_flight_recorder(run.folder)
    lab.say("Flight Recorder: the last collectives of each rank, and if they are done", recorded)
    waiting = [line for line in recorded if "not done" in line]
    found = len(waiting) == 2 and "evaluate" in waiting[0] and "evaluate" not in waiting[1]
    lab.expect(found, "Flight Recorder shows two different collectives that are not done")
    checked.wait()
    lab.ended(checked, [shorten(line) for line in checked.lines(r"^\d\| \w+Error: .*mismatch")])
    lab.expect("Detected mismatch between collectives" in checked.output, "DETAIL names both")


def show_stacks(lab: Lab, run: Run) -> dict[int, str]:
    """Show where each worker is, by py-spy or, without it, by faulthandler; return it by rank."""
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
            shown = [line.strip() for line in text.splitlines() if " (" in line]
            title = f"py-spy dump --pid {pid}, the process of rank {rank}"
        else:
            before = len(run.output)
            os.kill(pid, signal.SIGUSR2)
            time.sleep(1)
            text = run.output[before:].split("Current thread")[-1]
            shown = [line[2:].strip() for line in text.splitlines() if " File " in line]
            title = f"kill -USR2 {pid}, the process of rank {rank}: faulthandler prints its stack"
        shown = [line.replace(f"{ROOT}/", "") for line in shown]
        lab.say(title, [f"    {line}" for line in shown[:6]])
        stacks[rank] = "\n".join(shown)
    if not spy:
        lab.say("py-spy is not installed: with pip install py-spy no line of code is needed.")
    return stacks


def read_flight_recorder(folder: Path) -> list[str]:
    """Return a line for each of the last 3 collectives of each rank."""
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


def shorten(line: str) -> str:
    """Leave out what torch repeats of each tensor."""
    line = re.sub(r"(, )?TensorDeviceTypes=TensorOptions\(.*?\)\)", "", line)
    return re.sub(r" +Tensor Tensor devices: .*", "", line)


# --- collectives of different shapes ---

SHAPES = '''"""Add up numbers over ranks that do not have equally many: SECONDS SIZE SIZE."""

import datetime
import sys

import torch
import torch.distributed as dist

seconds, *sizes = map(int, sys.argv[1:])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
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


def shapes(lab: Lab, fixed: bool) -> None:
    """a collective to which the ranks bring tensors of different sizes"""
    if fixed:
        run = lab.plain("shapes", SHAPES, PADDED, 4, 3)
        lab.ended(run, run.wait().lines("the sum"))
        whole = run.output.count("[2.0, 2.0, 2.0, 1.0]") == 2
        return lab.expect(run.status == 0 and whole, "both ranks have the whole sum")
    hangs = lab.plain("shapes", SHAPES, "", 2, 1)
    wrong = lab.plain("shapes", SHAPES, "", 4, 3)
    aborts = lab.plain("shapes", SHAPES, "", 9, 5).wait()
    checked = lab.plain("shapes", SHAPES, "", 4, 3, TORCH_DISTRIBUTED_DEBUG="DETAIL").wait()
    for run in (aborts, wrong, hangs):
        run.wait()
        lab.ended(run, run.lines(r"the sum|what\(\)|^\d\| .*RuntimeError|exitcode  "))
    lab.expect("op.preamble.length <= op.nbytes" in aborts.output, "gloo says what it received")
    lab.expect("SIGABRT" in aborts.output and aborts.status == 1, "and ends a process by SIGABRT")
    sums = re.findall(r"the sum, on rank 1: (.*)", wrong.output)
    lab.expect(bool(sums) and sums[0] != "[2.0, 2.0, 2.0]", "rank 1 goes on with a wrong sum")
    lab.expect("Timed out waiting" in hangs.output and hangs.status == 1, "or it hangs")
    pattern = r"^\d\| .*RuntimeError: .*match"
    lab.ended(checked, [shorten(line) for line in checked.lines(pattern)])
    lab.expect("Tensor shapes: 4vs 3" in checked.output, "DETAIL names the shapes")
    return None


# --- a slow rank ---

SLOW = """\
 import sys
+import time
@@
                 batch = next(batches)
+                time.sleep(0.2 * (rank == 1))  # as from a slow disk
"""


def slow_rank(lab: Lab, fixed: bool) -> None:
    """one rank takes 0.2 s longer for each micro-batch; nothing fails, all are slow"""
    run = lab.train("slow-rank", "" if fixed else SLOW)
    lab.mended(run)
    later = run.metrics[2:]  # at the start buffers are made, files are read
    wait = statistics.median(line["time/wait_max"] for line in later)
    total = statistics.median(line["time/total"] for line in later)
    names = [line["slowest_rank"] for line in later]
    lab.say(
        f"the wait timer, of metrics.jsonl: the longest wait is {wait:.0f} of {total:.0f} ms per "
        f"step, and the last one to come is, step by step, rank {' '.join(map(str, names))}"
    )
    if fixed:
        lab.expect(wait < 300, "nobody waits long")
    else:
        lab.expect(wait > 300 and set(names) == {1}, "all wait for rank 1, about 400 ms")


# --- unequal numbers of batches ---

UNEVEN = '''"""An epoch in which rank 1 has a batch more than rank 0: SECONDS."""

import datetime
import gc
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=int(sys.argv[1])))
rank = dist.get_rank()
ddp_model = DistributedDataParallel(torch.nn.Linear(1, 1))
batches = [torch.ones(2, 1)] * (3 + rank)
for step, batch in enumerate(batches):
    ddp_model(batch).sum().backward()
    print(f"rank {rank}: step {step + 1} of {len(batches)}", flush=True)
dist.barrier()
print(f"rank {rank}: the epoch is over", flush=True)
# DDP holds the group, and garbage from its constructor, a cycle, holds DDP. Who is the last to hold
# the group takes it down, here with Python's global lock, for which gloo's thread may be waiting.
del ddp_model
gc.collect()
dist.destroy_process_group()
'''
NAMED = """\
-dist.barrier()
+# Its timeout is not the group's, but 30 minutes where none is given.
+seconds = datetime.timedelta(seconds=int(sys.argv[1]))
+dist.monitored_barrier(timeout=seconds, wait_all_ranks=True)
"""
EQUAL_NUMBERS = """\
+fewest = torch.tensor(len(batches))
+dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
+batches = batches[: fewest.item()]  # each epoch leaves out others, in another order
 for step, batch in enumerate(batches):
"""
JOINED = """\
-for step, batch in enumerate(batches):
-    ddp_model(batch).sum().backward()
-    print(f"rank {rank}: step {step + 1} of {len(batches)}", flush=True)
+with Join([ddp_model]):  # a rank that is done answers the others' all-reduces
+    for step, batch in enumerate(batches):
+        ddp_model(batch).sum().backward()
+        print(f"rank {rank}: step {step + 1} of {len(batches)}", flush=True)
"""


def uneven(lab: Lab, fixed: bool) -> None:
    """one rank has a batch more than the other; the end of the epoch hangs"""
    if fixed:
        for steps, patches in ((3, EQUAL_NUMBERS), (4, JOINED)):
            run = lab.plain("uneven", UNEVEN, patches).wait()
            lab.ended(run, run.lines(r"\d\| rank"))
            lab.expect(run.status == 0 and run.output.count("is over") == 2, "the epoch ends")
            lab.expect(f"rank 1: step {steps} of {steps}" in run.output, f"rank 1 does {steps}")
        return
    run = lab.plain("uneven", UNEVEN, "")
    named = lab.plain("uneven", UNEVEN, NAMED)
    run.wait()
    lab.ended(run, run.lines(r"^\d\| rank|^\d\| .*RuntimeError"))
    lab.expect(run.status == 1 and "Timed out waiting" in run.output, "the end hangs")
    lab.expect("step 4 of 4" not in run.output, "rank 1 does not get through its last step")
    frames = r"^\d\| .*File .*uneven.py\", line \d+|^\d\| .*(barrier|backward)\(\)$"
    lab.say("the tracebacks: one rank is in the barrier, one still in a step", run.lines(frames))
    named.wait()
    lab.ended(named, named.lines(r"^\d\| .*RuntimeError: .*monitoredBarrier"))
    lab.expect("Ranks 1 failed to pass monitoredBarrier" in named.output, "it names the rank")


# --- the order of the data ---

# Indices only: no data is read.
ORDER = """\
-from common.record import describe_training, find_checkpoint
+from common.record import describe_training, find_checkpoint, gather
@@
             batches = iter(dataloader)
+            taken = sum(gather({rank: list(sampler)}).values(), [])
+            weights = sum(p.double().sum().item() for p in model.parameters())
+            logger.info(
+                f"epoch {epoch}: {len(set(taken))} of {len(train_data)} samples taken, "
+                f"first {taken[:4]}; sums of weights {gather({rank: weights})}"
+            )
"""
SEED = """\
-    torch.manual_seed(args.seed)
+    torch.manual_seed(args.seed + rank)
@@
-    sampler = ResumableSampler(train_data, num_replicas=world_size, rank=rank, seed=args.seed)
+    sampler = ResumableSampler(train_data, world_size, rank, seed=args.seed + rank)
"""
NO_SET_EPOCH = """\
-            sampler.set_epoch(epoch, start=epoch_step * micro_batch_size * accumulation)
"""


def show_order(lab: Lab, name: str, patches: str, fixed: bool) -> tuple[list, list, list]:
    """Train with the check of the order, and show it and the losses.

    Return by epoch: if all samples were taken, the first ones, the sums of the ranks' weights.
    """
    run = lab.train(name, ORDER if fixed else join(patches, ORDER))
    lab.mended(run)
    checks = run.lines("samples taken")
    lab.say("the check of the order", checks)
    pattern = r"(\d+) of (\d+) .* first (\[.*?\]); .* weights (\{.*\})"
    found = [re.search(pattern, line) for line in checks]
    if not fixed:
        right = lab.train(name, ORDER).wait()
        losses = [[line["loss"] for line in each.metrics] for each in (right, run)]
        rows = [
            f"step {step + 1:2}  {a:.4f}  {b:.4f}"
            for step, (a, b) in enumerate(zip(*losses, strict=True))
            if step in (0, 1, 10, 11, 12, 13)
        ]
        lab.say("the losses of the right run, and of this one", rows)
    complete = [int(match[1]) == int(match[2]) for match in found]
    sums = [set(re.findall(r": ([-.\d]+)", match[4])) for match in found]
    return complete, [match[3] for match in found], sums


def seed(lab: Lab, fixed: bool) -> None:
    """a seed that differs from rank to rank: nothing fails, samples are doubled and missed"""
    complete, _, sums = show_order(lab, "seed", SEED, fixed)
    if fixed:
        lab.expect(complete == [True, True], "each epoch takes every sample")
    else:
        lab.expect(complete == [False, False], "each epoch misses samples")
    lab.expect(all(len(each) == 1 for each in sums), "DDP has sent rank 0's weights to all")


def set_epoch(lab: Lab, fixed: bool) -> None:
    """set_epoch is not called: every epoch takes the order of the first"""
    complete, first, _ = show_order(lab, "set-epoch", NO_SET_EPOCH, fixed)
    lab.expect(complete == [True, True], "each epoch takes every sample")
    if fixed:
        lab.expect(first[0] != first[1], "in another order")
    else:
        lab.expect(first[0] == first[1], "in the same order")


# --- a node that disappears ---


def lost_node(lab: Lab, fixed: bool) -> None:
    """one of two nodes, here two torchruns, is killed with all its processes"""
    folder = lab.folder("lost-node")
    script = lab.write(folder, (ROOT / SCRIPT).read_text(), "", SCRIPT)
    flags = [f"@{lab.arguments}", "--max-steps", 60, "--save-dir", folder, "-e", "run"]

    def start_nodes() -> list[Run]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        nodes = []
        for name in ("node1", "node2"):
            own = folder / f"{name}-{len(lab.runs)}"
            own.mkdir()
            place = ("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d")
            place += ("--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "lab")
            place += ("--local-addr", "localhost")
            nodes.append(lab.torchrun(own, script, *flags, place=place))
            if name == "node1":  # the first one that comes serves the store
                wait_for_port(port, nodes[0])
        return nodes

    head, other = start_nodes()
    deadline = time.monotonic() + 90
    while (
        len(read_metrics(folder)) < 12
        and head.process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    lab.say("kill -9 of the second torchrun and its process, after step 12")
    other.kill()
    killed = time.monotonic()
    head.wait()
    seconds = time.monotonic() - killed
    last = read_metrics(folder)[-1]["step"]
    lab.ended(head, head.lines(r"gone or out of reach") + head.report())
    lab.say(f"the node that is left has ended {seconds:.1f} s after the kill, in step {last + 1}")
    lab.expect(head.status == 1 and last < 60, "the other node fails")
    lab.expect("gone or out of reach" in head.output, "and says that a rank is gone")
    if fixed:
        nodes = start_nodes()
        for node in nodes:
            node.wait()
            lab.ended(node, node.lines(r"resumed after step|step 60/60"))
        steps = [line["step"] for line in read_metrics(folder)]
        resumed = re.search(r"resumed after step (\d+) of 60", "".join(n.output for n in nodes))
        lab.say(
            f"metrics.jsonl has steps 1 to {steps[-1]}, each once: "
            f"{sorted(steps) == list(range(1, 61))}"
        )
        lab.expect(bool(resumed) and int(resumed[1]) <= last, "it goes on from a checkpoint")
        lab.expect(steps == list(range(1, 61)), "no step is missing and none stands twice")


def wait_for_port(port: int, run: Run, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while run.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
            return
        time.sleep(0.1)


# --- a network that leads nowhere ---


def no_route(lab: Lab, fixed: bool) -> None:
    """an interface that is not there, and a meeting place that nobody reaches"""
    names = [name for _, name in socket.if_nameindex()]
    if fixed:
        place = ("--nnodes", 1, "--nproc-per-node", 2, "--rdzv-backend", "c10d")
        place += ("--rdzv-endpoint", "localhost:0", "--local-addr", "localhost")
        loopback = next(name for name in names if name.startswith("lo"))
        return lab.mended(lab.train("no-route", place=place, GLOO_SOCKET_IFNAME=loopback))
    place = ("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-id", "lab")
    place += ("--rdzv-endpoint", f"{NOWHERE}:29400", "--rdzv-conf", f"read_timeout={lab.timeout}")
    nowhere = lab.train("no-route", place=place)
    run = lab.train("no-route", GLOO_SOCKET_IFNAME="ib7").wait()
    lab.ended(run, run.lines("gone or out of reach"))
    lab.say("the interfaces of this machine (ip -br address)", " ".join(names))
    lab.expect("Unable to find address for: ib7" in run.output, "gloo names the interface")
    nowhere.wait()
    lab.ended(nowhere, nowhere.lines("RendezvousConnectionError: "))
    lab.expect(nowhere.status == 1, "torchrun ends with status 1")
    lab.expect("RendezvousConnectionError" in nowhere.output, "torchrun reaches nobody")
    lab.say(f"is there a way to {NOWHERE}, and does somebody answer?", try_to_reach(NOWHERE, 29400))
    return None


def try_to_reach(address: str, port: int) -> list[str]:
    """Return what the routing table says of an address, and what a connection to it comes to."""
    lines = []
    if shutil.which("ip"):
        command = ["ip", "route", "get", address]
        done = subprocess.run(command, capture_output=True, text=True)
        lines.append(f"ip route get {address}: {(done.stdout or done.stderr).splitlines()[0]}")
    try:
        with socket.create_connection((address, port), timeout=2):
            lines.append("a connection to it is open")
    except TimeoutError:
        lines.append("no answer within 2 s: no such machine, or a firewall that drops packets")
    except OSError as error:
        lines.append(f"a connection to it: {error.strerror}")
    return lines


# --- out of memory ---

LARGE = ("-d", "python-stdlib", "-s", 128, "--global-batch-size", 192, "--max-steps", 2)
LIMITED = """\
 import os
+import resource
 import signal
@@
     # --- train ---
+    if rank == 1:  # as if its machine had half a GiB left
+        with open("/proc/self/statm") as statm:
+            used = int(statm.read().split()[0]) * resource.getpagesize()
+        resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))
"""
KILLED = """\
         state["step"] += 1
+        if rank == 1 and state["step"] == 7:
+            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does it
"""


def out_of_memory(lab: Lab, fixed: bool) -> None:
    """memory is refused to one rank; and, the other way, the kernel kills one"""
    if sys.platform != "linux":
        raise InputError("out-of-memory needs a limit that only Linux keeps: take another fault.")
    run = lab.train("out-of-memory", LIMITED, *LARGE, "-b", 8 if fixed else 96).wait()
    if fixed:
        lab.ended(run, run.lines(r"tokens per step|\| loss"))
        return lab.expect(run.status == 0 and len(run.metrics) == 2, "it fits, the limit stands")
    asked = run.lines(r"^1\| .*Error: .*you tried to allocate")
    lab.ended(run, run.lines("tokens per step") + asked + run.report())
    lab.expect(run.status == 1 and bool(asked), "rank 1 says how much it asked for in vain")
    killed = lab.train("out-of-memory", KILLED).wait()
    lab.ended(killed, killed.report())
    errors = killed.errors()
    lab.expect("Signal 9 (SIGKILL) received by PID" in killed.output, "torchrun sees SIGKILL")
    lab.expect(1 not in errors, "rank 1 leaves no error file")
    lab.say(
        f"error files: of rank {' '.join(map(str, errors)) or 'none'}; of the kernel ask "
        "dmesg -T | grep -i 'out of memory', in a container its memory.events"
    )
    return None


FAULTS: dict[str, Callable[[Lab, bool], None]] = {
    "crash": crash,
    "skipped-collective": skipped_collective,
    "shapes": shapes,
    "slow-rank": slow_rank,
    "uneven": uneven,
    "seed": seed,
    "set-epoch": set_epoch,
    "lost-node": lost_node,
    "no-route": no_route,
    "out-of-memory": out_of_memory,
}


def main() -> None:
    args = get_args()
    if args.faults == ["list"]:
        for name, fault in FAULTS.items():
            print(f"{name:20}{fault.__doc__}")
        return
    if unknown := [name for name in args.faults if name not in FAULTS]:
        raise InputError(
            f"There is no fault {unknown[0]}: give list, or one of {', '.join(FAULTS)}."
        )
    try:
        lab = Lab(args)
    except OSError as error:
        raise InputError(f"Cannot write to {args.output} ({error.strerror}).") from error
    try:
        for name in args.faults:
            print(f"=== {name}{', mended' if args.fixed else ''}: {FAULTS[name].__doc__}")
            try:
                FAULTS[name](lab, args.fixed)
            except (subprocess.TimeoutExpired, TimeoutError) as error:
                lab.expect(False, f"{name} came to no end ({error})")
    finally:
        for run in lab.runs:
            if run.process.poll() is None:
                run.kill()
    if lab.surprises:
        sys.exit(1)


if __name__ == "__main__":
    launch.run(main)

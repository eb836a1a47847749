"""What the faults share: change a script, start it with torchrun, show and check what happens."""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "03-multi-node/train_llm.py"
TWO_PROCESSES = ("--standalone", "--nproc-per-node", 2)
# With the lab's corpus, 12 steps are an epoch.
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
# Logs which samples the ranks take in each epoch. It only needs the indices and reads no data.
CHECK_ORDER = """\
             batches = iter(dataloader)
+            taken = sum(launch.gather({rank: list(sampler)}).values(), [])
+            weights = sum(p.double().sum().item() for p in model.parameters())
+            logger.info(
+                f"epoch {epoch}: {len(set(taken))} of {len(train_data)} samples taken, "
+                f"first {taken[:4]}; sums of weights {launch.gather({rank: weights})}"
+            )
"""


class Epoch(NamedTuple):
    """What CHECK_ORDER has logged about one epoch."""

    complete: bool  # the ranks took every sample
    first_samples: str
    weight_sums: set[str]  # a single value if all ranks have the same weights


def apply_patch(source: str, patch: str) -> str:
    """Return a script with a patch applied to it.

    patch: lines that begin with " ", "-" or "+", as in a diff, in hunks separated by a line "@@".
    The original lines of each hunk must occur exactly once in the script.
    """
    for hunk in patch.split("@@\n") if patch else ():
        before, after = (
            "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in signs)
            for signs in (" -", " +")
        )
        assert source.count(before) == 1, f"these lines must occur exactly once:\n{before}"
        source = source.replace(before, after)
    return source


def read_metrics(save_dir: Path) -> list[dict]:
    """Return the lines of a training's metrics.jsonl. The training may still be running."""
    path = save_dir / "run/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    # A last line without a newline is still being written.
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Run:
    """A torchrun that the lab has started: its output and, once it has ended, its exit status.

    folder: contains the output and torchrun's log files. save_dir: contains the folder `run` of a
    training.
    """

    def __init__(self, command: list[str], folder: Path, save_dir: Path, env: dict) -> None:
        self.folder, self.save_dir = folder, save_dir
        self.log = folder / "output.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        # Several runs can be active at once, so a thread measures the duration of each one.
        self.timer = threading.Thread(target=self._measure, args=[time.monotonic()], daemon=True)
        self.timer.start()

    def _measure(self, start: float) -> None:
        self.process.wait()
        self.seconds = time.monotonic() - start

    def wait(self, timeout: float = 120) -> "Run":
        """Wait until it has ended. Raises TimeoutExpired."""
        self.process.wait(timeout)
        self.timer.join()
        return self

    def wait_for_step(self, step: int, timeout: float = 90) -> None:
        """Wait until the training has logged this step. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while not any(line["step"] >= step for line in self.metrics):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"no step {step}: see {self.log}")
            time.sleep(0.05)

    @property
    def status(self) -> int:
        return self.process.returncode

    @property
    def metrics(self) -> list[dict]:
        return read_metrics(self.save_dir)

    @property
    def output(self) -> str:
        """Return what it has printed so far. Paths begin at the root of the repository."""
        text = self.log.read_text(errors="replace").replace("\ufffd", "?")
        text = re.sub(rf"{re.escape(str(ROOT))}/|[^\s\"]*(?=site-packages/)", "", text)
        return text.replace(str(Path.home()), "~")

    def lines(self, pattern: str) -> list[str]:
        """Return the lines of the output that match the pattern."""
        return [line for line in self.output.splitlines() if re.search(pattern, line)]

    def report(self) -> list[str]:
        """Return torchrun's report of the failed ranks, without the frames of its tracebacks."""
        found = re.search(r"^=+\n.* FAILED\n(?:.*\n)*", self.output, re.MULTILINE)
        lines = found[0].splitlines() if found else []
        return [line for line in lines if line.strip() and not line.startswith("    ")]

    def errors(self) -> dict[int, str]:
        """Return the exception in each rank's error file, by rank."""
        found = {}
        for path in sorted(self.folder.glob("logs/*/attempt_0/*/error.json")):
            message = json.loads(path.read_text())["message"]
            message = message if isinstance(message, str) else message["message"]
            found[int(path.parent.name)] = message.splitlines()[0]
        return found

    def workers(self) -> list[int]:
        """Return the process ids of the workers that torchrun has started, by rank."""
        table = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid=,stat="], text=True)
        rows = [line.split() for line in table.splitlines()]
        torchrun = str(self.process.pid)
        return sorted(int(pid) for pid, ppid, stat in rows if ppid == torchrun and stat[0] != "Z")

    def kill(self) -> None:
        """Send SIGKILL to torchrun and its workers, if torchrun is still running."""
        if self.process.poll() is None:
            for pid in [*self.workers(), self.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.wait()


class Lab:
    """Starts runs, prints parts of their output, and collects what was not as expected.

    timeout: how many seconds a rank waits for the others. output: the folder for all files.
    """

    def __init__(self, timeout: int, output: Path) -> None:
        self.timeout, self.output = timeout, output
        self.runs: list[Run] = []
        self.trainings: dict[tuple, Run] = {}
        self.surprises: list[str] = []
        folder = self.new_folder("training")
        rng = random.Random(0)
        texts = ["".join(rng.choice("abcdefgh \n") for _ in range(600)) for _ in range(24)]
        (folder / "corpus.json").write_text(json.dumps(texts))
        self.arguments = folder / "arguments"  # train_llm.py reads them from this file
        self.arguments.write_text(TRAINING.format(corpus=folder / "corpus.json", timeout=timeout))

    def new_folder(self, name: str) -> Path:
        """Return a new, numbered folder, so that nothing is ever overwritten."""
        number = 1
        while (path := self.output / f"{name}-{number}").exists():
            number += 1
        path.mkdir(parents=True)
        return path

    def show(self, title: str, lines: list[str] | str = ()) -> None:
        """Print a title and the lines below it."""
        print(f"\n--- {title}")
        for line in lines.splitlines() if isinstance(lines, str) else lines:
            # Leave out what torch repeats for each tensor.
            line = re.sub(r"(, )?TensorDeviceTypes=TensorOptions\(.*?\)\)", "", line.rstrip())
            print(re.sub(r" +Tensor Tensor devices: .*", "", line))
        sys.stdout.flush()

    def show_end(self, run: Run, pattern: str | None, report: bool = False) -> None:
        """Wait until a run has ended. Print the lines that match, and torchrun's report."""
        run.wait()
        lines = (run.lines(pattern) if pattern else []) + (run.report() if report else [])
        self.show(f"what you see (full output: {run.log})", lines)
        print(f"torchrun exited with status {run.status} after {run.seconds:.0f} s", flush=True)

    def expect(self, condition: bool, expectation: str) -> None:
        """If the condition is false, print the expectation and add it to the surprises."""
        if not condition:
            self.surprises.append(expectation)
            self.show(f"NOT AS EXPECTED: {expectation}")

    def expect_failure(self, run: Run, *texts: str) -> None:
        """Expect that a run has failed, and that its output contains these texts."""
        self.expect(run.status == 1, "torchrun should exit with status 1")
        for text in texts:
            self.expect(text in run.output, f"the output should contain {text!r}")

    def expect_success(self, run: Run) -> None:
        """Expect that a training reaches its last step, and print its last two log lines."""
        self.show_end(run, r"step 1[34]/14 \| loss")
        steps = [line["step"] for line in run.metrics]
        self.expect(run.status == 0 and steps[-1:] == [14], "the run should reach its last step")

    def write_script(self, name: str, original: str, source: str, patch: str = "") -> Path:
        """Write a patched script to a new folder, and print the patch; without one, the script."""
        path = self.new_folder(name) / Path(original).name
        path.write_text(apply_patch(source, patch))
        if patch:
            self.show(f"changed in {original}", patch)
        elif original == SCRIPT:
            self.show(f"{original}, unchanged")
        else:
            self.show(original, source)
        return path

    def write_train_script(self, name: str, patch: str = "") -> Path:
        """Write a patched copy of the chapter's train_llm.py to a new folder."""
        return self.write_script(name, SCRIPT, (ROOT / SCRIPT).read_text(), patch)

    def torchrun(
        self,
        folder: Path,
        script: Path,
        *args: object,
        launch: tuple = TWO_PROCESSES,
        save_dir: Path | None = None,
        **env: object,
    ) -> Run:
        """Start a script on CPUs and return at once.

        launch: torchrun's flags, by default two processes. env: further environment variables.
        """
        logs = ("--log-dir", folder / "logs", "--redirects", 3, "--tee", 3)
        words = [str(word) for word in (*launch, *logs, script, *args)]
        variables = {name: str(value) for name, value in env.items()}
        shown = [f"{name}={value}" for name, value in variables.items()]
        self.show("start", " ".join([*shown, shlex.join(["torchrun", *words])]))
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
            "CUDA_VISIBLE_DEVICES": "",
            "WANDB_MODE": "disabled",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}| ",
            **variables,
        }
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        self.runs.append(Run(command, folder, save_dir or folder, environment))
        return self.runs[-1]

    def train(
        self, name: str, *patches: str, args: tuple = (), launch: tuple = TWO_PROCESSES, **env
    ) -> Run:
        """Start a patched train_llm.py, or return an earlier run with the same arguments."""
        key = (patches, args, launch, tuple(env.items()))
        if key not in self.trainings:
            script = self.write_train_script(name, "@@\n".join(patches))
            folder = script.parent
            flags = (f"@{self.arguments}", "--save-dir", folder, "-e", "run", *args)
            self.trainings[key] = self.torchrun(folder, script, *flags, launch=launch, **env)
        return self.trainings[key]

    def train_and_check_order(self, name: str, *patches: str) -> list[Epoch]:
        """Train, print which samples the ranks took, and compare the losses with a correct run."""
        run = self.train(name, *patches, CHECK_ORDER)
        self.expect_success(run)
        checks = run.lines("samples taken")
        self.show("the check of the sample order", checks)
        if patches:
            correct = self.train(name, CHECK_ORDER).wait()
            rows = [
                f"step {one['step']:2}  {one['loss']:.4f}  {two['loss']:.4f}"
                for one, two in zip(correct.metrics, run.metrics, strict=True)
                if one["step"] in (1, 2, 11, 12, 13, 14)
            ]
            self.show("the losses of the correct run, and of this run", rows)
        pattern = r"(\d+) of (\d+) .* first (\[.*?\]); .* weights (\{.*\})"
        found = [re.search(pattern, line) for line in checks]
        return [
            Epoch(match[1] == match[2], match[3], set(re.findall(r": ([-.\d]+)", match[4])))
            for match in found
        ]

"""Jobs of chapter 3 on the tests' Slurm cluster: how they are started, what they trained on."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import PATIENCE_S, Cluster
from helpers import EXACT, ROOT, read_metrics

NODES = ["node1", "node2"]
STEPS = 24
CKPT_FREQ = 4
JOB, JOB_SRUN = "03-multi-node/job.sbatch", "03-multi-node/job_srun.sbatch"
PAUSE = 1  # second after each step of a run that is to be hit


class Lab:
    """Runs of one training on the cluster: their flags, their folders, what they trained on."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        texts = [f"Text number {n}, of words {n * n} and {n % 7}. " * 20 for n in range(150)]
        (folder / "corpus.json").write_text(json.dumps(texts))

    def flags(self, name: str, *args: object) -> list[str]:
        words = [
            *("-e", name, "--save-dir", self.folder, "-d", self.folder / "corpus.json", "-s", 32),
            *("--max-steps", STEPS, "--log-freq", 1, "--ckpt-freq", CKPT_FREQ, "--eval-freq", 12),
            *("--lr", 2e-3, *args),
        ]
        return [str(word) for word in words]

    def environment(self, name: str, **env: object) -> dict[str, str]:
        """Return the environment of a launcher: in it the runs' notes, and few threads."""
        notes = self.folder / f"{name}.notes"
        notes.mkdir(exist_ok=True)
        own = {
            "PYTHON": sys.executable,
            "NOTES": notes,
            "FORWARD": "NOTES PAUSE",
            "PYTHONPATH": f"{ROOT / 'tests/hooks'}:{ROOT}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VIRTUAL_ENV": sys.prefix,
            "WANDB_MODE": "disabled",
            "OMP_NUM_THREADS": 1,
            **env,
        }
        return {**self.cluster.env, **{key: str(value) for key, value in own.items()}}

    def submit(
        self, job: str | Path, name: str, *args: object, options: tuple = (), **env: object
    ) -> str:
        """Submit a job file, of the repository or absolute; return the job's number."""
        words = [
            *options,
            f"--output={self.folder}/{name}.log",
            ROOT / job,
            *self.flags(name, *args),
        ]
        return self.sbatch(words, self.environment(name, **env))

    def sbatch(self, words: list[object], env: dict[str, str]) -> str:
        command = ["sbatch", "--parsable", *map(str, words)]
        return subprocess.check_output(command, env=env, text=True, timeout=PATIENCE_S).split()[0]

    def ends(self, job: str, timeout: float = PATIENCE_S) -> str:
        """Wait until a job, with all of its starts, has ended; return its state."""
        queued = ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(lambda: self.cluster.shell(*queued) in ended, timeout)
        return self.cluster.job(job)["JobState"]

    def wait_until_idle(self) -> None:
        self.wait_for(lambda: {self.cluster.node_state(node) for node in NODES} == {"idle"})

    def enter(self, node: str) -> tuple[str, ...]:
        """Return the words that start a command on a node, with the node's network, name, files."""
        here = Path("/proc/self/ns/mnt").readlink()
        own = [pid for pid in self.pids(node) if Path(f"/proc/{pid}/ns/mnt").readlink() != here]
        return ("nsenter", f"--target={own[0]}", "--net", "--uts", "--mount")

    def launch(self, name: str, *words: object, args: tuple = (), **env: object):
        """Start a launch file on this machine; its output goes to the run's log."""
        with (self.folder / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                [str(word) for word in [*words, *self.flags(name, *args)]],
                cwd=ROOT,
                env=self.environment(name, **env),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def stops(self, name: str) -> list[int]:
        """Return the steps after which a run was told to stop; it resumed after each of them."""
        stopped = re.findall(r"Told to stop; saved after step (\d+)", self.log(name))
        for step in stopped:
            assert f"resumed after step {step} of {STEPS}" in self.log(name), "a step is lost"
        return [int(step) for step in stopped]

    def metrics(self, name: str) -> list[dict]:
        path = self.folder / name
        return read_metrics(path, going_on=True) if (path / "metrics.jsonl").exists() else []

    def wait_for(
        self, what: Callable[[], bool], timeout: float = PATIENCE_S, show: str | None = None
    ) -> None:
        """Wait; the error, should it last too long, has the log of the run `show`."""
        try:
            self.cluster.until(what, "what the test waits for", timeout)
        except AssertionError as error:
            error.add_note(self.log(show) if show else "")
            raise

    def wait_for_step(self, name: str, step: int) -> None:
        """Wait until a run has logged a step; a test hits it then, between two checkpoints."""
        self.wait_for(lambda: [m["step"] for m in self.metrics(name)][-1:] >= [step])

    def pids(self, node: str) -> list[str]:
        """Return all processes on a node, in the order of their start."""
        return self.cluster.shell("ip", "netns", "pids", f"{self.cluster.name}-{node}").split()

    def processes(self, node: str, words: str) -> list[int]:
        """Return the processes on a node whose command line holds these words."""
        found = []
        for pid in self.pids(node):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if words in line and "python" in line.split()[0]:
                found.append(int(pid))
        return sorted(found)

    def workers(self, node: str) -> list[int]:
        """Return the processes on a node that train."""
        agents = self.processes(node, "-m torch.distributed.run")
        return sorted(set(self.processes(node, "train_llm.py")) - set(agents))

    def samples(self, name: str) -> dict[int, list[int]]:
        """Return the samples of each step, over all processes that trained it, in order.

        A step that was trained twice has them twice.
        """
        by_step = defaultdict(list)
        for path in (self.folder / f"{name}.notes").iterdir():
            for line in path.read_text().splitlines():
                by_step[json.loads(line)["step"]] += json.loads(line)["samples"]
        return {step: sorted(samples) for step, samples in by_step.items()}

    def hosts(self, name: str) -> list[str]:
        """Return the host of each process that trained."""
        paths = (self.folder / f"{name}.notes").iterdir()
        return sorted(path.name.rpartition("-")[0] for path in paths)

    def assert_same(self, name: str, reference: str, exact: bool) -> None:
        """Every step once, with the right samples, and the losses of the reference."""
        found, expected = self.metrics(name), self.metrics(reference)
        assert [line["step"] for line in found] == list(range(1, STEPS + 1))
        right, taken = self.samples("straight"), self.samples(name)
        assert {step: sorted(set(taken[step])) for step in taken} == right
        # Most steps were trained once: none of their samples was taken twice.
        assert sum(taken[step] == right[step] for step in right) > STEPS // 2
        for key in EXACT if exact else ("loss", "eval_loss"):
            values = [[line[key] for line in run if key in line] for run in (found, expected)]
            assert values[0] == (values[1] if exact else pytest.approx(values[1], rel=1e-5)), key


def note_samples() -> None:
    sys.orig_argv = ["python", "train_llm.py"]
    exec((ROOT / "tests/hooks/sitecustomize.py").read_text(), {})

"""A run of two nodes that is hit a hundred times, and what became of it.

python tests/benchmarks/soak.py --output tests/benchmarks/results/soak.json

Chapter 3 trains under job.sbatch on a cluster of its own (local_cluster.sh), two nodes of one rank.
Again and again something is killed or cut off, at random; nobody but the launch files starts it
again. A run that has come to its end is compared with one that nobody disturbed: every step once,
the same numbers bit by bit, the same samples, the same last checkpoint. Its next run then begins,
until so many hits are counted. As root, half an hour on two CPU cores.

The hits stand in a file of the same name that ends in .jsonl, one a line, as soon as each is over.
With --append, a soak that was interrupted goes on after the last run that was compared.
"""

import argparse
import contextlib
import datetime
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from machine import describe_machine, write_result

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY / "tests"))
from cluster import Cluster, running_cluster  # noqa: E402
from runner import SAVE_STAGES  # noqa: E402
from test_multi_node import JOB, NODES, REAL, Lab  # noqa: E402
from test_resume import EXACT, assert_same_tensors, make_flags  # noqa: E402
from test_resume_ranks import newest_step, tensors  # noqa: E402

STEPS = 2000
CKPT_FREQ = 50
# How many of a hundred hits are of a kind, on average.
KINDS = {
    "worker": 25,  # kill -9 of a process that trains
    "worker twice": 10,  # and of one that has been started in its place, while it starts
    "launcher": 20,  # kill -9 of a torchrun
    "save, worker": 14,  # the same two while a checkpoint is written, or just after it
    "save, launcher": 6,
    "cable, short": 15,  # out for some seconds
    "cable, long": 10,  # out until Slurm misses the node
}
AT_MOST_S = 3.0  # from the first checkpoint after a start to the hit
SHORT_S = (0.3, 3.0)  # a cable that is out for a short time
SAVE_S = 0.12  # how long a save takes, and a bit more
START_S = 5.0  # how long a process starts before it trains
BACK_WITHIN_S = 240.0  # or the run is given up
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class NotBack(Exception):
    """The run did not go on by itself."""


@dataclass(frozen=True)
class Look:
    """What metrics.jsonl held at a moment: its last step, and how often the file was replaced."""

    at: float
    start: int  # each start of the run replaces the file
    step: int


class Watch:
    """Looks at a run's metrics.jsonl again and again, and keeps what was new."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.seen = [Look(time.monotonic(), 0, 0)]
        self.inode = None

    def look(self) -> Look:
        """Return the newest state of the file."""
        last = self.seen[-1]
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - 4000))
            lines = file.read().split(b"\n")[:-1]  # what comes after the last \n is being written
            step = json.loads(lines[-1])["step"] if lines else 0
            start = last.start + (status.st_ino != self.inode)
            self.inode = status.st_ino
            if (start, step) != (last.start, last.step):
                self.seen.append(Look(time.monotonic(), start, step))
        return self.seen[-1]

    def standstill(self, hit: Look) -> float:
        """Return the seconds from the last step before a hit to the first step of the start that
        went on, or where none had to, the longest time between two steps.
        """
        after = [look for look in self.seen if look.at >= hit.at]
        # A file that has just been replaced holds old steps.
        pairs = [(one, two) for one, two in pairwise(after) if one.start == two.start]
        last = [two.at for _, two in pairs if two.start == after[-1].start]
        if after[-1].start > hit.start:
            return last[0] - hit.at if last else after[-1].at - hit.at
        return max((two.at - one.at for one, two in pairs), default=0.0)


class Soak(Lab):
    """Runs on a cluster that are hit.

    steps: of each run. seed: of what is hit and when; each hit draws from the seed and its number.
    """

    def __init__(self, cluster: Cluster, folder: Path, steps: int = STEPS, seed: int = 0) -> None:
        super().__init__(cluster, folder)
        (folder / "inputs").mkdir(exist_ok=True)
        self.steps, self.seed = steps, seed
        # A small model with dropout: what each rank draws counts too.
        inputs = make_flags(folder / "inputs")
        # What notes the samples takes a process with the word -m for a module's, as torchrun is.
        self.inputs = ["--model-name" if word == "-m" else word for word in inputs]

    def flags(self, name: str, *args: object) -> list[str]:
        own = ["--max-steps", self.steps, "--log-freq", 1, "--ckpt-freq", CKPT_FREQ]
        words = [*self.inputs, *own, "--eval-freq", 100, "-e", name, "--save-dir", self.folder]
        return [str(word) for word in [*words, *args]]

    def start(self, name: str) -> None:
        """Submit a run; torchrun may start it again as often as it must."""
        self.wait_until_idle()
        self.name, self.run_dir = name, self.folder / name
        self.watch = Watch(self.run_dir)
        self.number = self.submit(JOB, name, NPROC_PER_NODE=1, MAX_RESTARTS=100, **REAL)

    def undisturbed(self) -> None:
        """Train the run that all others are compared with."""
        if not self.compared("undisturbed"):
            self.start("undisturbed")
            state = self.ends(self.number, timeout=600)
            assert state == "COMPLETED" and self.compared("undisturbed"), self.log("undisturbed")
        taken = self.shares("undisturbed")
        assert sorted(taken) == list(range(1, self.steps + 1)), "the samples are not noted"
        assert {len(set(shares)) for shares in taken.values()} == {len(NODES)}

    def compared(self, name: str) -> bool:
        return bool(lines := self.metrics(name)) and lines[-1]["step"] == self.steps

    # --- one hit ---

    def hit(self, number: int, kind: str | None = None) -> dict[str, object] | None:
        """Hit the run and wait until it goes on; return what happened, None if it ended before.

        Where it does not go on, that stands under "failed".
        """
        rng = random.Random(f"{self.seed}-{number}")
        drawn = rng.choices([*KINDS], [*KINDS.values()])[0]
        kind, node = kind or drawn, rng.choice(NODES)
        if not self.wait_for_moment(rng):
            return None
        found = {"number": number, "at": now(), "run": self.name, "kind": kind, "host": node}
        starts, noted = int(self.job()["Restarts"]), self.notes()
        before = self.watch.look()
        try:
            found |= self.strike(kind, node, rng)
        except ProcessLookupError:  # it is at its end
            return None
        found["step_before"] = max(before.step, found.pop("step", 0))
        try:
            back = self.wait_until_back(before, not kind.startswith("cable"))
        except (NotBack, AssertionError) as error:
            return {**found, "failed": str(error)}
        fresh = self.notes() - noted
        # The newest processes' first step; without new ones nothing is trained again.
        first = found["step_before"] + 1
        if back.start > before.start:
            first = first_step(max(fresh, key=lambda path: path.stat().st_mtime)) if fresh else None
        found["first_step_after"] = first
        found["standstill_s"] = round(self.watch.standstill(before), 2)
        queued = int(self.job()["Restarts"]) - starts
        by = "the queue" if queued else "torchrun" if back.start > before.start else "nobody"
        return {**found, "started_again_by": by, "job_restarts": queued}

    def wait_for_moment(self, rng: random.Random) -> bool:
        """Wait for a random moment after a checkpoint of this start; tell whether there is one.

        From there on the job goes back to the queue after any failure: it came further.
        """
        record = self.run_dir / "state.json"
        known = modified(record)
        if not self.until(lambda: modified(record) != known, BACK_WITHIN_S):
            return False
        moment = time.monotonic() + rng.uniform(0, AT_MOST_S)
        return self.until(lambda: time.monotonic() > moment, BACK_WITHIN_S)

    def until(self, happened, timeout: float, pause: float = 0.02) -> bool:
        """Wait; return False if the run comes to its end before. Raises NotBack after `timeout`."""
        deadline, asked = time.monotonic() + timeout, time.monotonic()
        while not happened():
            if self.watch.look().step == self.steps:
                return False
            if time.monotonic() > asked + 3:
                asked = time.monotonic()
                if self.job()["JobState"] in ENDED:
                    raise NotBack(f"the job is {self.job()['JobState']}")
            if asked > deadline:
                raise NotBack(f"nothing in {timeout:.0f} s, the job is {self.job()['JobState']}")
            time.sleep(pause)
        return True

    def strike(self, kind: str, node: str, rng: random.Random) -> dict[str, object]:
        """Kill or cut off; return what it was. Raises ProcessLookupError if it is gone already."""
        if kind == "cable, short":
            seconds = rng.uniform(*SHORT_S)
            return self.pull(node, lambda since: time.monotonic() - since > seconds)
        if kind == "cable, long":
            return self.pull(node, lambda since: self.job()["JobState"] != "RUNNING", more=rng)
        what = "launcher" if kind.endswith("launcher") else "worker"
        if kind.startswith("save"):
            found = self.find(node, what)
            saving = self.run_dir / "checkpoints"
            if not self.until(lambda: any(saving.glob(".unfinished-*")), 60, pause=0.001):
                raise ProcessLookupError("the last save is over")
            time.sleep(rng.uniform(0, SAVE_S))
            return self.kill(found) | {"stage": stage_of_save(self.run_dir)}
        if kind == "worker twice":
            other = rng.choice(NODES)
            gone = self.workers(other)
            found = self.kill(self.find(node, what))
            self.wait_for(lambda: set(self.workers(other)) - set(gone))
            wait = rng.uniform(0, START_S)
            time.sleep(wait)
            self.wait_for(lambda: self.workers(other))  # torchrun may have started it once more
            second = self.kill(self.find(other, what))
            return {**found, "again": {"host": other, "after_s": round(wait, 2), **second}}
        return self.kill(self.find(node, what))

    def find(self, node: str, what: str) -> dict[str, object]:
        """Return the only process of its sort on a node."""
        agents = self.processes(node, "-m torch.distributed.run")
        pids = agents if what == "launcher" else self.workers(node)
        if not pids:
            raise ProcessLookupError(what)
        try:
            variables = Path(f"/proc/{pids[0]}/environ").read_bytes().split(b"\0")
        except OSError as error:
            raise ProcessLookupError(what) from error
        rank = [int(word[5:]) for word in variables if word.startswith(b"RANK=")]
        found = {"what": what, "pid": pids[0]}
        return {**found, "rank": rank[0]} if rank else found

    def kill(self, found: dict[str, object]) -> dict[str, object]:
        os.kill(found["pid"], signal.SIGKILL)
        return {**found, "step": self.watch.look().step}

    def pull(self, node: str, enough, more: random.Random | None = None) -> dict[str, object]:
        """Cut a node off until it is enough, and a random time more; return for how long."""
        since = time.monotonic()
        self.cluster.cut(node)
        try:
            self.wait_for(lambda: (self.watch.look(), enough(since))[1])
            time.sleep(more.uniform(0, 3) if more else 0)
        finally:
            step = self.watch.look().step
            self.cluster.mend(node)
        return {"what": "cable", "out_s": round(time.monotonic() - since, 2), "step": step}

    def wait_until_back(self, before: Look, dead: bool) -> Look:
        """Wait until two more steps are logged, or the run has ended. Raises NotBack.

        dead: whether only a new start can go on.
        """
        origin = self.watch.look()

        def back() -> bool:
            nonlocal origin
            found = self.watch.look()
            if found.start > origin.start:
                origin = found
            new = found.start > before.start or not dead
            return new and found.step >= origin.step + 2

        if not self.until(back, BACK_WITHIN_S):
            self.wait_for(lambda: self.job()["JobState"] in ENDED, BACK_WITHIN_S)
        return self.watch.look()

    def job(self) -> dict[str, str]:
        return self.cluster.job(self.number)

    def notes(self) -> set[Path]:
        return {*(self.folder / f"{self.name}.notes").iterdir()}

    # --- a whole run ---

    def train(self, name: str, first: int, last: int, log, kinds=()) -> dict[str, object]:
        """Train one run that is hit until it ends or a last hit is counted; compare it.

        log: is called with each hit. kinds: of the hits in turn, at random where there are none.
        """
        self.start(name)
        number, failure = first, None
        try:
            while number <= last:
                found = self.hit(number, kinds[number - first] if kinds else None)
                if found is None:
                    break
                log(found)
                number += 1
                if "failed" in found:
                    raise NotBack(found["failed"])
            if (state := self.ends(self.number, timeout=900)) != "COMPLETED":
                failure = f"the job is {state}"
        except (NotBack, AssertionError) as error:
            failure = f"hit {number - 1}: {error}"
            self.keep_evidence()
            self.cancel(self.number)
        complaints = [failure] if failure else self.complaints(name)
        steps = [step for step, shares in self.shares(name).items() for _ in shares]
        return {
            "run": name,
            "commit": describe_machine()["commit"],  # another one after --append
            "hits": number - first,
            "steps": len({m["step"] for m in self.metrics(name)}),
            "steps_trained": len(steps) // len(NODES),
            "job_restarts": int(self.job()["Restarts"]),
            "complaints": complaints,
        }

    def keep_evidence(self) -> None:
        """Write what Slurm and the kernel know of a run that did not come back."""
        shown = self.cluster.script("status").stdout + json.dumps(self.job(), indent=1)
        shown += (
            f"\n{ ({node: self.processes(node, 'train_llm.py') for node in NODES}) }\n{now()}\n"
        )
        for log in sorted((self.cluster.folder / "log").iterdir()):
            shown += f"\n{log.name}:\n{log.read_text()}"
        (self.folder / f"{self.name}.evidence").write_text(shown)

    def shares(self, name: str) -> dict[int, list[tuple[int, ...]]]:
        """Return of each step what each process that trained it took, in its order."""
        by_step = defaultdict(list)
        for path in (self.folder / f"{name}.notes").iterdir():
            for line in map(json.loads, path.read_text().splitlines()):
                by_step[line["step"]].append(tuple(line["samples"]))
        return by_step

    def complaints(self, name: str) -> list[str]:
        """Compare a run with the one that nobody disturbed; return what is wrong with it."""
        names = (name, "undisturbed")
        found = wrong_lines(*map(self.metrics, names))
        found += wrong_samples(*map(self.shares, names))
        try:
            assert_same_tensors(*(tensors(self.folder / each) for each in reversed(names)))
        except AssertionError as error:
            found.append(f"the last checkpoint differs: {error}")
        return found


# --- what is compared ---


def wrong_lines(found: list[dict], expected: list[dict]) -> list[str]:
    """Return what is wrong with the lines of metrics.jsonl, against an undisturbed run's."""
    steps = [line["step"] for line in found]
    right = [line["step"] for line in expected]
    wrong = [f"step {step} is missing" for step in right if step not in set(steps)]
    wrong += [f"step {s} stands {n} times" for s, n in counted(steps).items() if n > 1]
    wrong += [f"step {step} is one too many" for step in counted(steps) if step not in set(right)]
    if steps != right and not wrong:
        wrong = ["the steps are in another order"]
    reference = {line["step"]: line for line in expected}
    for line in found:
        other = reference.get(line["step"], line)
        wrong += [
            f"{key} of step {line['step']} is {line.get(key)}, not {other.get(key)}"
            for key in EXACT
            if line.get(key) != other.get(key)
        ]
    return wrong


def wrong_samples(found: dict[int, list], expected: dict[int, list]) -> list[str]:
    """Return in which steps a rank took other samples than in an undisturbed run, or none.

    found and expected: of each step, what each process that trained it took. A step that is
    trained again must take the same again.
    """
    return [
        f"the samples of step {step} are {set(found.get(step, ()))}, not {set(shares)}"
        for step, shares in sorted({**dict.fromkeys(found, ()), **expected}.items())
        if set(found.get(step, ())) != set(shares)
    ]


def counted(values: list[int]) -> dict[int, int]:
    return {value: values.count(value) for value in dict.fromkeys(values)}


def stage_of_save(run_dir: Path) -> str:
    """Return how far a save came that a kill has ended, as one of SAVE_STAGES."""
    folders = {path.name for path in (run_dir / "checkpoints").iterdir()}
    writing, written, renamed, committed = SAVE_STAGES
    for name in folders:
        if name.startswith(".unfinished-"):
            whole = (run_dir / "checkpoints" / name / ".metadata").exists()
            return written if whole else writing
    return committed if max(folders) == f"step-{newest_step(run_dir):08d}" else renamed


def modified(path: Path) -> int:
    """Return when a file was changed, 0 where there is none."""
    return path.stat().st_mtime_ns if path.exists() else 0


def first_step(notes: Path) -> int:
    return json.loads(notes.read_text().splitlines()[0])["step"]


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# --- the result ---


def summarise(hits: list[dict], runs: list[dict], seed: int, steps: int) -> dict[str, object]:
    """Return what soak.json holds. Hits of a run that is not compared yet do not count."""
    done = {run["run"] for run in runs}
    counting = [hit for hit in hits if hit["run"] in done]
    kinds = {}
    for kind in KINDS:
        own = [hit for hit in counting if hit["kind"] == kind and "failed" not in hit]
        if own:
            known = [hit for hit in own if hit["first_step_after"] is not None]
            # A step can be trained between a cable's return and the stop that Slurm demands then.
            lost = [max(0, hit["step_before"] + 1 - hit["first_step_after"]) for hit in known]
            again = counted([hit["started_again_by"] for hit in own])
            kinds[kind] = {
                "hits": len(own),
                "standstill_s": [hit["standstill_s"] for hit in own],
                "steps_lost": lost,
                "started_again_by": again,
                "stages": counted([hit["stage"] for hit in own if "stage" in hit]),
            }
    return {
        "seed": seed,
        "steps": steps,
        "ckpt_freq": CKPT_FREQ,
        "hits": len(counting),
        "steps_compared": sum(run["steps"] for run in runs),
        "steps_trained": sum(run["steps_trained"] for run in runs),
        "complaints": sum(len(run["complaints"]) for run in runs),
        "kinds": kinds,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--append", action="store_true", help="go on with what is in it")
    parser.add_argument("--hits", type=int, default=100, help="to count in all")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    parser.add_argument("--seed", type=int, help="of what is hit and when; drawn if absent")
    parser.add_argument("--folder", type=Path, help="keeps the runs; if absent, only bad ones stay")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="in turn; drawn if absent")
    args = parser.parse_args()
    log = args.output.with_suffix(".jsonl")
    hits, runs = [], []
    if args.append and args.output.exists():
        before = json.loads(args.output.read_text())["results"]
        runs, args.seed, args.steps = before["runs"], before["seed"], before["steps"]
        compared = {run["run"] for run in runs}
        hits = map(json.loads, log.read_text().splitlines())
        hits = [hit for hit in hits if hit["run"] in compared]
    elif log.exists() and not args.append:
        parser.error(f"{log} is there: give --append to go on with it, or another --output")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(json.dumps(hit) + "\n" for hit in hits))
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)

    def write(hit: dict | None = None) -> None:
        if hit:
            hits.append(hit)
            print(hit, flush=True)
            with log.open("a") as file:
                file.write(json.dumps(hit) + "\n")
        write_result(args.output, summarise(hits, runs, seed, args.steps))

    folder = args.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(exist_ok=True)
    with running_cluster() as cluster:
        soak = Soak(cluster, folder, args.steps, seed)
        soak.undisturbed()
        while len(hits) < args.hits:
            first = len(hits) + 1
            last = args.hits if not args.kinds else min(args.hits, len(hits) + len(args.kinds))
            run = soak.train(f"run-{len(runs) + 1:02d}", first, last, write, args.kinds or ())
            runs.append(run)
            write()
            print(run, flush=True)
    bad = sum(len(run["complaints"]) for run in runs)
    print(f"{len(hits)} hits, {len(runs)} runs, {bad} complaints; runs in {folder}")
    if not bad and not args.folder:
        shutil.rmtree(folder)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

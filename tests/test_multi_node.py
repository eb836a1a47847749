"""Chapter 3 on nodes with addresses of their own: every launcher, and every way to lose a node.

The nodes are those of the chapter's local_cluster.sh: a real Slurm, a real network, real sshds.
What each process trains on is noted by tests/hooks/sitecustomize.py.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
import yaml
from cluster import PATIENCE_S, Cluster, give_up
from helpers import EXACT, ROOT, commands, copy_repository, read_metrics, register, replace_in
from runner import finish, start
from transformers import AutoTokenizer

NODES = ["node1", "node2"]
STEPS = 24
JOB = "03-multi-node/job.sbatch"
PIPELINE = "03-multi-node/pipeline.sbatch"
RESULTS = ("tokenizer", "evaluation.json", "model", "samples.jsonl")  # in the run's folder


class Lab:
    """Runs of one training on the cluster: their flags, their folders, what they trained on."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        texts = [f"Text number {n}, of words {n * n} and {n % 7}. " * 20 for n in range(150)]
        (folder / "corpus.json").write_text(json.dumps(texts))

    def flags(self, name: str, *args: object, data: tuple | None = None) -> list[str]:
        data = ("-d", self.folder / "corpus.json") if data is None else data
        words = [
            *("-e", name, "--save-dir", self.folder, *data, "-s", 32),
            *("--max-steps", STEPS, "--log-freq", 1, "--ckpt-freq", 4, "--eval-freq", 12),
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
            "PYTHONPATH": f"{ROOT / 'tests/hooks'}:{ROOT}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VIRTUAL_ENV": sys.prefix,
            "WANDB_MODE": "disabled",
            "OMP_NUM_THREADS": 1,
            **env,
        }
        return {**self.cluster.env, **{key: str(value) for key, value in own.items()}}

    def submit(
        self, job: str | Path, name: str, *args: object, options=(), data=None, **env: object
    ) -> str:
        """Submit a job file of the repository, or one elsewhere; return the job's number."""
        output = f"--output={self.folder}/{name}.log"
        flags = self.flags(name, *args, data=data)
        return subprocess.check_output(
            ["sbatch", "--parsable", *options, output, ROOT / job, *flags],
            env=self.environment(name, **env),
            text=True,
            timeout=PATIENCE_S,
        ).split()[0]

    def ends(self, job: str) -> tuple[str, int]:
        """Wait until a job has ended for good; return its state and how often it was requeued."""
        queued = ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        Cluster.until(lambda: self.cluster.shell(*queued) in ended)
        facts = self.cluster.job(job)
        return facts["JobState"], int(facts["Restarts"])

    def wait_until_idle(self) -> None:
        Cluster.until(lambda: {self.cluster.node_state(node) for node in NODES} == {"idle"})

    def enter(self, node: str) -> tuple[str, ...]:
        """Return the words that start a command on a node, with the node's network, name, files."""
        here = Path("/proc/self/ns/mnt").readlink()
        own = [pid for pid in self.pids(node) if Path(f"/proc/{pid}/ns/mnt").readlink() != here]
        return ("nsenter", f"--target={own[0]}", "--net", "--uts", "--mount")

    def launch(self, name: str, *words: object, **env: object) -> subprocess.Popen:
        """Start a launch file on this machine; its output goes to the run's log."""
        with (self.folder / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                [*map(str, words), *self.flags(name)],
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

    def wait_for_step(self, name: str, step: int) -> None:
        """Wait until a run has logged a step; a test hits it then, between two checkpoints."""
        Cluster.until(lambda: [m["step"] for m in self.metrics(name)][-1:] >= [step])

    def pids(self, node: str) -> list[str]:
        """Return all processes on a node, in the order of their start."""
        return self.cluster.shell("ip", "netns", "pids", f"{self.cluster.name}-{node}").split()

    def processes(self, node: str, words: str) -> list[int]:
        """Return the processes on a node whose command line holds these words."""
        found = []
        for pid in map(int, self.pids(node)):
            with contextlib.suppress(psutil.Error):  # it has ended
                program, *others = psutil.Process(pid).cmdline() or [""]
                if "python" in program and words in " ".join(others):
                    found.append(pid)
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

    def assert_same(self, name: str, exact: bool = False) -> None:
        """Every step once, with the right samples, and the losses of an undisturbed run.

        exact: of that on two ranks, bit for bit, otherwise of chapter 1's.
        """
        found, expected = self.metrics(name), self.metrics("straight" if exact else "alone")
        assert [line["step"] for line in found] == list(range(1, STEPS + 1))
        right, taken = self.samples("straight"), self.samples(name)
        assert {step: sorted(set(taken[step])) for step in taken} == right
        # Most steps were trained once: none of their samples was taken twice.
        assert sum(taken[step] == right[step] for step in right) > STEPS // 2
        for key in EXACT if exact else ("loss", "eval_loss"):
            values = [[line[key] for line in run if key in line] for run in (found, expected)]
            assert values[0] == (values[1] if exact else pytest.approx(values[1], rel=1e-5)), key


@pytest.fixture(scope="module")
def lab(cluster, make_folder) -> Lab:
    """With two runs that nobody disturbs: chapter 1's, and chapter 3's on 2 ranks here."""
    lab = Lab(cluster, make_folder("lab"))
    assert finish(start(lab.flags("alone"))) == 0
    straight = lab.launch("straight", "bash", "03-multi-node/launch_torchrun.sh", NPROC_PER_NODE=2)
    assert straight.wait(PATIENCE_S) == 0, lab.log("straight")
    samples = lab.samples("straight")
    assert sorted(samples) == list(range(1, STEPS + 1))
    assert {(len(taken), len(set(taken))) for taken in samples.values()} == {(24, 24)}
    return lab


@pytest.fixture(autouse=True)
def nothing_left(cluster):
    """A test that failed leaves the next ones no node that is drained, and no job beside them."""
    for node in NODES:
        if "drain" in cluster.node_state(node):
            cluster.shell("scontrol", "update", f"nodename={node}", "state=resume")
    yield
    cluster.shell("scancel", "--user=root")


# --- every launcher, on two nodes of two ranks ---


def assert_two_by_two(lab: Lab, name: str) -> None:
    lab.assert_same(name)
    assert lab.hosts(name) == ["node1", "node1", "node2", "node2"]
    assert {line["slowest_host"] for line in lab.metrics(name)} <= set(NODES)
    assert {line["slowest_rank"] for line in lab.metrics(name)} <= {0, 1, 2, 3}


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(JOB, marks=pytest.mark.ci),
        pytest.param("03-multi-node/job_srun.sbatch", marks=pytest.mark.nightly),
    ],
)
def test_same_losses_with_a_job_file(lab, job):
    """sbatch --wait, as a reader submits it."""
    name = Path(job).stem
    lab.submit(job, name, options=("--wait",))
    assert_two_by_two(lab, name)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param("04-fsdp/job.sbatch", marks=pytest.mark.ci),
        *(
            pytest.param(job, marks=pytest.mark.nightly)
            for job in (JOB, "03-multi-node/job_srun.sbatch", PIPELINE)
        ),
    ],
)
def test_paths_with_spaces(lab, tmp_path, job):
    """Of the repository, its environment, the text, the run, and a file of arguments."""
    copy, texts, runs = (tmp_path / f"my {name}" for name in ("repository", "texts", "runs"))
    for folder in (copy, texts, runs):
        folder.mkdir()
    copy_repository(copy)
    corpus = shutil.copy(lab.folder / "corpus.json", texts / "my corpus.json")
    name = f"spaces-{Path(job).parent.name}-{Path(job).stem}"
    (lab.folder / name).symlink_to(runs / name)
    (texts / "my arguments.args").write_text(f"--save-dir {shlex.quote(str(runs))}\n")
    env = {"PYTHONPATH": f"{ROOT / 'tests/hooks'}:{copy}"}
    if (copy / ".venv").exists():
        env |= {"PYTHON": "", "VIRTUAL_ENV": ""}
    data = ("-d", corpus)
    if job == PIPELINE:
        env |= {"DATA": shlex.quote(str(corpus)), "VOCAB_SIZE": 300}
        data = ()
    arguments = f"@{texts}/my arguments.args"
    lab.submit(copy / job, name, arguments, options=("--wait",), data=data, **env)
    if job == PIPELINE:
        assert all((runs / name / result).exists() for result in RESULTS), lab.log(name)
        assert json.loads((runs / name / "samples.jsonl").read_text())["text"]
    else:
        assert_two_by_two(lab, name)


@pytest.mark.nightly
def test_same_losses_with_mpirun(lab):
    """The command of the page, with two processes on each node, and what the test notes."""
    if shutil.which("mpirun") is None:
        give_up("mpirun not found: apt-get install openmpi-bin")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    page = (ROOT / "03-multi-node/topics/launch.md").read_text()
    (command,) = [c for _, c in commands(page) if c.startswith("mpirun") and "ssh_config" in c]
    for shown, here in {
        "-np 2": "-np 4",
        "node1:1,node2:1": "node1:2,node2:2",
        "/run/local-cluster/ssh_config": str(lab.cluster.ssh_config),
        ".venv/bin/python": f"-x NOTES -x PYTHONPATH -x WANDB_MODE {sys.executable}",
        "-e my-mpi-run --max-steps 100": "",
    }.items():
        assert command.count(shown) == 1
        command = command.replace(shown, here)
    process = lab.launch("mpi", *shlex.split(command), **root)
    assert process.wait(PATIENCE_S) == 0, lab.log("mpi")
    assert_two_by_two(lab, "mpi")


@pytest.mark.ci
def test_same_losses_over_ssh(lab):
    """The commands of the page: start returns at once; a stop, and a start that goes on."""
    page = [line for _, line in commands((ROOT / "03-multi-node/topics/launch.md").read_text())]
    start = next(line for line in page if "launch_torchrun.sh -e my-ssh-run" in line)
    stop = next(line for line in page if line.startswith("ssh node1"))
    passed_on = ("NOTES", "PAUSE", "PYTHON", "PYTHONPATH", "NPROC_PER_NODE", "OMP_NUM_THREADS")
    run = f"ssh --save-dir {lab.folder}"

    def call(command: str, pause: float = 0) -> None:
        env = lab.environment("ssh", PAUSE=pause, NPROC_PER_NODE=1)
        given = " ".join(f"{name}={env[name]}" for name in passed_on)
        command = command.replace("NNODES=2", f"NNODES=2 WANDB_MODE=disabled {given}")
        command = command.replace(">my-ssh-run", f">{lab.folder}/ssh")
        command = command.replace("-e my-ssh-run >", f"{shlex.join(lab.flags('ssh'))} >")
        command = command.replace("my-ssh-run", run)  # other sessions have such runs, too
        ssh = f'ssh() {{ command ssh -F {lab.cluster.ssh_config} "$@"; }}'
        subprocess.run(["bash", "-c", f"{ssh}; {command}"], cwd=ROOT, check=True, timeout=99)

    call(start, pause=10)  # seconds for each step, so that the run is not over too soon
    lab.wait_for_step("ssh", 1)
    call(stop)
    Cluster.until(lambda: not any(lab.processes(node, "train_llm.py") for node in NODES))
    assert (lab.folder / "ssh/requeue").exists() and len(lab.metrics("ssh")) < STEPS
    call(start)
    Cluster.until(lambda: len(lab.metrics("ssh")) == STEPS)
    Cluster.until(lambda: not any(lab.processes(node, "train_llm.py") for node in NODES))
    lab.assert_same("ssh")
    assert lab.hosts("ssh") == ["node1", "node1", "node2", "node2"]


@pytest.mark.ci
def test_job_file_of_a_variant(lab, tmp_path):
    """It trains the variant on two nodes, without a variable of the shell that submits it.

    Slurm's signal before the end of its time requeues the job, which then resumes the run.
    """
    copy_repository(tmp_path)
    make = [sys.executable, "-m", "common.variants", "4", "reduce-every-backward"]
    subprocess.run(make, cwd=tmp_path, check=True)
    env = lab.environment("variant", PAUSE=0.5)
    passed_on = ("NOTES", "PAUSE", "PYTHONPATH", "OMP_NUM_THREADS", "WANDB_MODE")
    exports = "".join(f"export {name}={shlex.quote(env[name])}\n" for name in passed_on)
    shutil.rmtree(tmp_path / ".venv", ignore_errors=True)  # links
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n{exports}exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    job_file = tmp_path / "variants/04-fsdp+reduce-every-backward/job.sbatch"
    number = lab.submit(job_file, "variant", options=("--export=NONE",))
    lab.wait_for_step("variant", 6)
    lab.cluster.shell("scancel", "--signal=USR1", number)
    assert lab.ends(number) == ("COMPLETED", 1), lab.log("variant")
    assert lab.stops("variant")
    assert lab.log("variant").count("chapter 04-fsdp with reduce-every-backward\n") == 2
    lab.assert_same("variant")
    assert lab.hosts("variant") == ["node1"] * 4 + ["node2"] * 4, "two starts of two by two"


# --- a run that is hit, on two nodes of one rank: bit for bit the run that was not ---


def submit_slow(lab: Lab, name: str, *args: object, options: tuple = ()) -> str:
    """Submit a slow job of one rank on each node; return its number once it has begun to train."""
    lab.wait_until_idle()
    number = lab.submit(JOB, name, *args, options=options, NPROC_PER_NODE=1, PAUSE=1)
    lab.wait_for_step(name, 1)
    return number


def preemption(lab: Lab, number: str) -> None:
    """A job of the partition `urgent` needs both nodes: the run saves and makes room."""
    options = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    assert lab.ends(lab.cluster.sbatch(*options, "--wrap=sleep 1")) == ("COMPLETED", 0)


def kill_9_of_a_worker(lab: Lab, number: str) -> None:
    os.kill(lab.workers("node2")[0], signal.SIGKILL)


def kill_9_of_the_first_launcher(lab: Lab, number: str) -> None:
    """Its processes go with it, and the step of Slurm ends."""
    (agent,) = lab.processes("node1", "-m torch.distributed.run")
    (worker,) = lab.workers("node1")
    os.kill(agent, signal.SIGKILL)
    Cluster.until(lambda: not Path(f"/proc/{worker}").exists())


def cable_out_for_a_second(lab: Lab, number: str) -> None:
    """TCP sends again what was lost."""
    lab.cluster.cut("node2")
    time.sleep(1)
    lab.cluster.mend("node2")


def cable_out_until_it_is_missed(lab: Lab, number: str) -> None:
    lab.cluster.cut("node2")
    Cluster.until(lambda: lab.cluster.job(number)["JobState"] != "RUNNING")
    lab.cluster.mend("node2")


NOBODY, TORCHRUN, QUEUE = "nobody", "torchrun", "the queue"


@pytest.mark.ci
def test_all_that_a_job_survives(lab):
    """Hit several times, it is in the end the run that was not hit.

    A launcher that is killed takes its ranks with it; those of the other node then end too. The
    pipeline below is sent the warning that its time is over. A job is requeued after a kill if it
    has saved since its start: the preempted run is given some steps to stop, and the next hit comes
    after the checkpoint of step 16.
    """
    hits = [  # (step, what happens after it, who then starts the ranks again)
        (5, kill_9_of_a_worker, TORCHRUN),
        (7, cable_out_for_a_second, NOBODY),
        (9, preemption, QUEUE),
        (17, kill_9_of_the_first_launcher, QUEUE),
        (21, cable_out_until_it_is_missed, QUEUE),
    ]
    number = submit_slow(lab, "survives")

    def resumed() -> int:
        return lab.log("survives").count("resumed after step")

    for step, strike, who in hits:
        lab.wait_for_step("survives", step)
        before = resumed()
        strike(lab, number)
        if who == NOBODY:
            lab.wait_for_step("survives", step + 1)
            assert resumed() == before, lab.log("survives")
        else:
            Cluster.until(lambda n=before: resumed() > n)
    requeued = [who for _, _, who in hits].count(QUEUE)
    assert lab.ends(number) == ("COMPLETED", requeued), lab.log("survives")
    assert lab.stops("survives") and "[node1] [rank 0] step 1/24 | loss" in lab.log("survives")
    assert not (lab.folder / "survives/requeue").exists()
    assert {path.name for path in (lab.folder / "survives/logs").iterdir()} == set(NODES)
    lab.assert_same("survives", exact=True)


@pytest.mark.nightly
def test_cable_of_rank_0_pulled(lab):
    """Slurm misses the node and requeues the job, which goes on with the one that is left.

    The old rank 0 lives on where nothing reaches it, and holds the run until its group times out.
    """
    number = submit_slow(lab, "cable", "--dist-timeout", 20, options=("--nodes=1-2",))
    lab.wait_for_step("cable", 10)
    lab.cluster.cut("node1")
    try:
        assert lab.ends(number) == ("COMPLETED", 1), lab.log("cable")
        assert "8 sequences x world size 1 x accumulation 3" in lab.log("cable")
        lab.assert_same("cable")
    finally:
        lab.cluster.mend("node1")
        lab.wait_until_idle()


@pytest.mark.nightly
def test_bad_input_is_not_requeued(lab):
    number = lab.submit(JOB, "bad", "--global-batch-size", 7, MAX_RESTARTS=0)
    assert lab.ends(number) == ("FAILED", 0)
    assert "--global-batch-size 7 must be a multiple of 4 " in lab.log("bad")


@pytest.mark.nightly
def test_elastic(lab):
    """Two nodes, one of them killed, later back: 24 sequences in every step, none of them twice."""
    words = ["bash", ROOT / "03-multi-node/launch_torchrun.sh"]
    # A node needs some seconds to come, more on a busy machine: the first waits for it, and the run
    # must not be over when it comes back.
    env = {"NNODES": "1:2", "HEAD": "node1:29400", "NPROC_PER_NODE": 1, "PAUSE": 1.5}
    env |= {"MAX_RESTARTS": 3, "LAST_CALL": 8}

    def launch(node: str) -> subprocess.Popen:
        return lab.launch("elastic", *lab.enter(node), *words, **env)

    def worlds() -> list[str]:
        return re.findall(r"x world size (\d) x .* = 24 sequences", lab.log("elastic"))

    first, second = map(launch, NODES)
    lab.wait_for_step("elastic", 6)
    (agent,) = lab.processes("node2", "-m torch.distributed.run")
    os.kill(agent, signal.SIGKILL)
    Cluster.until(lambda: worlds() == ["2", "1"])
    back = launch("node2")
    Cluster.until(lambda: worlds() == ["2", "1", "2"])
    assert [first.wait(PATIENCE_S), back.wait(PATIENCE_S)] == [0, 0], lab.log("elastic")
    second.wait(PATIENCE_S)
    assert lab.stops("elastic")
    lab.assert_same("elastic")


# --- pods of Kubernetes: containers on the nodes, each with a name and processes of its own ---

TOOLS = "03-multi-node/tools"
POD_SCRIPT = f"{TOOLS}/pod.sh"
POD_BUGS = {  # what each of them does, and the statuses of the pods then
    "a stopped run fails": [("exit 75 # EX_TEMPFAIL: try again later", 'exit "$STATUS"')],
    "a run that has saved fails": [('!= "$NEWEST" ]]', '!= "$NEWEST" && 0 == 1 ]]')],
}
for pairs in POD_BUGS.values():
    register(POD_SCRIPT, pairs)


def start_pods(lab: Lab, name: str, root: Path = ROOT, *args: object, **env: object) -> list:
    """Start the manifest's container on each node, as its pod would; return unshare's processes.

    As in a pod, the command is the first process of its PID namespace. Other pods have the names
    that a headless Service gives them; its own name is not there yet.
    """
    manifest = (ROOT / TOOLS / "kubernetes.yaml").read_text()
    service, job = yaml.safe_load_all(manifest)
    domain = service["metadata"]["name"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    own = {each["name"]: each["value"] for each in container["env"]} | {"NPROC_PER_NODE": 1, **env}
    del own["HF_HOME"]  # on the volume
    become = 'hostname "$1"; mount --bind "$2" /etc/hosts; cd "$3"; exec "${@:4}"'
    pods = [f"{job['metadata']['name']}-{index}" for index in range(len(NODES))]
    addresses = [f"{lab.cluster.network}.{number}" for number in range(1, len(NODES) + 1)]
    started = []
    for index, pod in enumerate(pods):
        lines = ["127.0.0.1 localhost"]
        for address, other in zip(addresses, pods, strict=True):
            full = f"{other}.{domain}.default.svc.cluster.local"
            lines.append(f"{address} {full} {other if other == pod else f'{other}.{domain}'}")
        hosts = lab.folder / f"hosts-{index}"
        hosts.write_text("\n".join(lines) + "\n")
        words = ["unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        words += ["bash", "-euc", become, "pod", pod, hosts, root, *container["command"], *args]
        own["JOB_COMPLETION_INDEX"] = index
        started.append(lab.launch(name, *lab.enter(NODES[index]), *words, **own))
    return started


def first_process(pod: subprocess.Popen) -> int:
    (child,) = psutil.Process(pod.pid).children()
    return child.pid


def hit_pods(lab: Lab, name: str, root: Path = ROOT) -> list[list[int]]:
    """Kill a pod, and tell another one to stop; return how the pods of the three starts ended."""
    statuses = []
    hits = [(6, 0, signal.SIGKILL), (14, 1, signal.SIGTERM)]  # (after this step, pod, signal)
    for step, index, number in hits:
        pods = start_pods(lab, name, root, PAUSE=1)
        lab.wait_for_step(name, step)
        os.kill(first_process(pods[index]), number)
        statuses.append([pod.wait(PATIENCE_S) for pod in pods])
    pods = start_pods(lab, name, root)
    return [*statuses, [pod.wait(PATIENCE_S) for pod in pods]]


@pytest.mark.ci
def test_pods_of_kubernetes(lab):
    """A pod that is killed is lost with its status; the manifest ignores the others' 75."""
    killed, stopped, complete = hit_pods(lab, "pods")
    assert killed[1:] == [75] and stopped == [75, 75] and complete == [0, 0], lab.log("pods")
    (step,) = lab.stops("pods")
    assert 14 <= step < STEPS
    assert lab.log("pods").count("resumed after step") == 2
    assert set(lab.hosts("pods")) == {"train-llm-0", "train-llm-1"}
    lab.assert_same("pods", exact=True)


@pytest.mark.nightly
def test_pods_with_wrong_arguments_fail(lab):
    """They are not started for ever: the Job counts their status."""
    pods = start_pods(lab, "bad-pods", ROOT, "--global-batch-size", 7)
    assert [pod.wait(PATIENCE_S) for pod in pods] == [1, 1], lab.log("bad-pods")
    assert "--global-batch-size 7 must be a multiple of 2 " in lab.log("bad-pods")


@pytest.mark.parametrize("bug", POD_BUGS)
def test_planted_in_a_pod(lab, bug, tmp_path):
    copy_repository(tmp_path)
    for right, wrong in POD_BUGS[bug]:
        replace_in(tmp_path / POD_SCRIPT, right, wrong)
    name = f"pods-{list(POD_BUGS).index(bug)}"
    killed, stopped, complete = hit_pods(lab, name, tmp_path)
    assert (killed[1], stopped) != (75, [75, 75]) and complete == [0, 0], lab.log(name)


# --- nodes of SkyPilot ---


@pytest.mark.nightly
def test_nodes_of_skypilot(lab):
    """The task's command with SkyPilot's variables, and with the checkpoints in a folder."""
    task = yaml.safe_load((ROOT / TOOLS / "skypilot.yaml").read_text())
    own = "-e my-run --checkpoint-dir s3://my-bucket/runs"
    for shown, here in {own: '"$@"', "$PWD/.venv/bin/python": sys.executable}.items():
        assert task["run"].count(shown) == 1
        task["run"] = task["run"].replace(shown, here)
    assert task["num_nodes"] == len(NODES)
    addresses = [f"{lab.cluster.network}.{number}" for number in range(1, len(NODES) + 1)]
    env = {"SKYPILOT_NUM_NODES": len(NODES), "SKYPILOT_NODE_IPS": "\n".join(addresses)}
    words = ["bash", "-euc", f'cd "$0"; {task["run"]}', ROOT]
    nodes = [
        lab.launch(
            "sky", *lab.enter(node), *words, NPROC_PER_NODE=2, SKYPILOT_NODE_RANK=rank, **env
        )
        for rank, node in enumerate(NODES)
    ]
    assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0], lab.log("sky")
    assert_two_by_two(lab, "sky")


# --- tokenizer, training, evaluation, export and a sample as one job ---

COMMENT = "our own words, first try"


@pytest.mark.nightly
def test_pipeline_from_text_to_a_sample(lab):
    """Stopped in its training it goes on. Once more: what is done stays done."""
    env = {"VOCAB_SIZE": 300, "PROMPT": "Text number 7", "NPROC_PER_NODE": 1}
    env["DATA"] = lab.folder / "corpus.json"
    options = {"options": ("--comment", COMMENT), "data": ()}
    job = lab.submit(PIPELINE, "whole", **options, **env, PAUSE=0.3)
    lab.wait_for_step("whole", 6)
    lab.cluster.shell("scancel", "--signal=USR1", job)  # as Slurm before the end of its time
    assert lab.ends(job) == ("COMPLETED", 1), lab.log("whole")
    run = lab.folder / "whole"
    assert [line["step"] for line in lab.metrics("whole")] == list(range(1, STEPS + 1))
    assert len(AutoTokenizer.from_pretrained(run / "tokenizer")) == 300
    assert len(AutoTokenizer.from_pretrained(run / "model")) == 300
    found = json.loads((run / "evaluation.json").read_text())
    assert found["origin"].startswith("step 24 of ")
    assert found["loss"] == pytest.approx(lab.metrics("whole")[-1]["eval_loss"], rel=1e-5)
    (sample,) = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    assert sample["prompt"] == "Text number 7" and sample["text"]
    comments = (run / "comments.txt").read_text().splitlines()
    assert len(comments) == 2 and f" job {job}: {COMMENT} (-e whole " in comments[0]
    before = {name: (run / name).stat().st_mtime_ns for name in RESULTS}
    (run / "samples.jsonl").unlink()
    job = lab.submit(PIPELINE, "whole", **options, **env)
    assert lab.ends(job) == ("COMPLETED", 0), lab.log("whole")
    after = {name: (run / name).stat().st_mtime_ns for name in RESULTS}
    assert {name for name in RESULTS if before[name] != after[name]} == {"samples.jsonl"}

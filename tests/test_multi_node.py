"""Chapter 3 on nodes with addresses of their own: every launcher, and every way to lose a node.

The nodes are those of the chapter's local_cluster.sh: a real Slurm, a real network, real sshds.
What each process trains on is noted by tests/hooks/sitecustomize.py.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cluster import PATIENCE_S, give_up
from helpers import EVALUATED_LITTLE, ROOT, blocks, environment, read_metrics, replace_in
from jobs import JOB, JOB_SRUN, NODES, PAUSE, STEPS, Lab, note_samples
from runner import Ranks, finish, start
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def lab(cluster, make_folder) -> Lab:
    """With two runs that nobody disturbs: chapter 1's, and chapter 3's on 2 ranks here."""
    lab = Lab(cluster, make_folder("lab"))
    assert finish(start(lab.flags("alone"))) == 0
    notes = lab.environment("straight")
    ranks = Ranks(
        2,
        lab.flags("straight"),
        chapter="03-multi-node",
        plant=note_samples,
        env={"NOTES": notes["NOTES"]},
    )
    assert ranks.finish() == [0, 0]
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
    lab.assert_same(name, "alone", exact=False)
    assert lab.hosts(name) == ["node1", "node1", "node2", "node2"]
    assert {line["slowest_host"] for line in lab.metrics(name)} <= set(NODES)
    assert {line["slowest_rank"] for line in lab.metrics(name)} <= {0, 1, 2, 3}


@pytest.mark.ci
def test_same_losses_with_job_sbatch(lab):
    """sbatch --wait, as a reader submits it; and what is left in the logs' folder."""
    words = ["--wait", f"--output={lab.folder}/job.log", ROOT / JOB, *lab.flags("job")]
    lab.sbatch(words, lab.environment("job"))
    assert_two_by_two(lab, "job")
    logs = sorted(lab.folder.glob("job/logs/*/*/attempt_0/*/stderr.log"))
    assert [path.relative_to(lab.folder / "job/logs").parts[0] for path in logs] == [
        *("node1", "node1", "node2", "node2")
    ]
    assert "[node1] [rank 0] step 24/24 | loss" in lab.log("job")


@pytest.mark.nightly
def test_same_losses_with_job_srun_sbatch(lab):
    job = lab.submit(JOB_SRUN, "srun")
    assert lab.ends(job) == "COMPLETED", lab.log("srun")
    assert_two_by_two(lab, "srun")


@pytest.mark.nightly
def test_same_losses_with_launch_mpirun(lab):
    if shutil.which("mpirun") is None:
        give_up("mpirun not found: apt-get install openmpi-bin")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    env = {"HOSTS": "node1:2,node2:2", "SSH": f"ssh -F {lab.cluster.ssh_config}", **root}
    process = lab.launch("mpi", "bash", "03-multi-node/launch_mpirun.sh", **env)
    assert process.wait(PATIENCE_S) == 0, lab.log("mpi")
    assert_two_by_two(lab, "mpi")


@pytest.mark.ci
def test_same_losses_with_launch_ssh(lab):
    """start returns at once; tail shows what both nodes print; stop, and start goes on with it."""
    hosts = lab.folder / "hosts"
    hosts.write_text("node1  # the head\n\nnode2\n")
    script = ("bash", "03-multi-node/launch_ssh.sh")
    env = {"SSH": f"ssh -F {lab.cluster.ssh_config}", "NPROC_PER_NODE": 1}
    slow = {**env, "PAUSE": 10}  # seconds for each step, so that the run is not over too soon
    assert lab.launch("ssh", *script, "start", hosts, **slow).wait(PATIENCE_S) == 0
    lab.wait_for_step("ssh", 1)
    assert lab.launch("ssh", *script, "start", hosts, **env).wait(PATIENCE_S) == 2
    assert "ssh is already running on this host: stop it first." in lab.log("ssh")
    tail = lab.launch("ssh", *script, "tail", hosts, **env)
    lab.wait_for(lambda: re.search(r"^node1: \[.* step \d+/24", lab.log("ssh"), re.MULTILINE))
    tail.send_signal(signal.SIGTERM)
    assert lab.launch("ssh", *script, "stop", hosts, **env).wait(PATIENCE_S) == 0
    assert lab.log("ssh").count("told to stop") == 2
    lab.wait_for(lambda: not any(lab.processes(node, "train_llm.py") for node in NODES))
    assert (lab.folder / "ssh/requeue").exists() and len(lab.metrics("ssh")) < STEPS
    assert lab.launch("ssh", *script, "start", hosts, **env).wait(PATIENCE_S) == 0
    lab.wait_for(lambda: len(lab.metrics("ssh")) == STEPS)
    lab.wait_for(lambda: not any(lab.processes(node, "train_llm.py") for node in NODES))
    lab.assert_same("ssh", "alone", exact=False)
    assert lab.hosts("ssh") == ["node1", "node1", "node2", "node2"]


# --- a run that is hit, on two nodes of one rank: bit by bit the run that was not ---


def submit_slow(lab: Lab, name: str, *args: object, options: tuple = ()) -> str:
    """Submit a slow job of one rank on each node; return its number once it has begun to train."""
    lab.wait_until_idle()
    number = lab.submit(JOB, name, *args, options=options, NPROC_PER_NODE=1, PAUSE=PAUSE)
    lab.wait_for_step(name, 1)
    return number


def restarts(lab: Lab, job: str) -> int:
    return int(lab.cluster.job(job)["Restarts"])


def preemption(lab: Lab, number: str) -> None:
    """A job of the partition `urgent` needs both nodes: the run saves and makes room."""
    options = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    lab.cluster.wait(lab.cluster.sbatch(*options, "--wrap=sleep 1"), "COMPLETED")


def kill_9_of_a_worker(lab: Lab, number: str) -> None:
    os.kill(lab.workers("node2")[0], signal.SIGKILL)


def kill_9_of_the_first_launcher(lab: Lab, number: str) -> None:
    """Its processes go with it, and the step of Slurm ends."""
    (agent,) = lab.processes("node1", "-m torch.distributed.run")
    (worker,) = lab.workers("node1")
    os.kill(agent, signal.SIGKILL)
    lab.wait_for(lambda: not Path(f"/proc/{worker}").exists())


def cable_out_for_a_second(lab: Lab, number: str) -> None:
    """TCP sends again what was lost."""
    lab.cluster.cut("node2")
    time.sleep(1)
    lab.cluster.mend("node2")


def cable_out_until_it_is_missed(lab: Lab, number: str) -> None:
    lab.cluster.cut("node2")
    lab.wait_for(lambda: lab.cluster.job(number)["JobState"] != "RUNNING")
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
            lab.wait_for(lambda n=before: resumed() > n, show="survives")
    assert lab.ends(number) == "COMPLETED", lab.log("survives")
    assert restarts(lab, number) == [who for _, _, who in hits].count(QUEUE)
    assert lab.stops("survives")
    assert not (lab.folder / "survives/requeue").exists()
    lab.assert_same("survives", "straight", exact=True)


@pytest.mark.nightly
def test_cable_of_rank_0_pulled(lab):
    """Slurm misses the node and requeues the job, which goes on with the one that is left.

    The old rank 0 lives on where nothing reaches it, and holds the run until its group times out.
    """
    number = submit_slow(lab, "cable", "--dist-timeout", 20, options=("--nodes=1-2",))
    lab.wait_for_step("cable", 10)
    lab.cluster.cut("node1")
    try:
        assert lab.ends(number, timeout=PATIENCE_S) == "COMPLETED", lab.log("cable")
        assert restarts(lab, number) == 1
        assert "8 sequences x world size 1 x accumulation 3" in lab.log("cable")
        lab.assert_same("cable", "alone", exact=False)
    finally:
        lab.cluster.mend("node1")
        lab.wait_until_idle()


@pytest.mark.nightly
def test_bad_input_is_not_requeued(lab):
    number = lab.submit(JOB, "bad", "--global-batch-size", 7, MAX_RESTARTS=0)
    assert lab.ends(number) == "FAILED"
    assert restarts(lab, number) == 0
    assert "4 devices cannot share --global-batch-size 7 evenly" in lab.log("bad")


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
    lab.wait_for(lambda: worlds() == ["2", "1"])
    back = launch("node2")
    lab.wait_for(lambda: worlds() == ["2", "1", "2"])
    assert [first.wait(PATIENCE_S), back.wait(PATIENCE_S)] == [0, 0], lab.log("elastic")
    second.wait(PATIENCE_S)
    assert lab.stops("elastic")
    lab.assert_same("elastic", "alone", exact=False)


# --- the page ---


@pytest.fixture
def copy(tmp_path) -> Path:
    """A folder with the chapter, which evaluates little, and what it needs."""
    folder = tmp_path / "copy"
    shutil.copytree(ROOT / "03-multi-node", folder / "03-multi-node")
    replace_in(folder / "03-multi-node/train_llm.py", *EVALUATED_LITTLE)
    for name in ("common", ".venv"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.nightly
def test_commands_of_the_slurm_page(cluster, copy, tmp_path):
    """All that a reader types on a cluster of their own, in that order, in one shell.

    Jobs are short and slow here, and before each command the run comes a step further; what would
    not end by itself is ended.
    """
    shown = blocks((ROOT / "03-multi-node/topics/slurm.md").read_text(), "bash")
    commands = [
        line for needs, text in shown if needs == "local_cluster" for line in text.split("\n")
    ]
    run = copy / "outputs/my-run"
    lines = ["set -euo pipefail", f"cd {copy}"]
    for command in filter(None, commands):
        if command.startswith("apt-get"):
            continue  # the machine has them: the fixture has looked
        if command.startswith("tail"):
            # The log comes with the job's first step.
            lines += [f"until [[ -s {run}/metrics.jsonl ]]; do sleep 0.2; done"]
            command = f"timeout 1 {command} || [[ $? == 124 ]]"
        elif "job.sbatch" in command:
            lines += ['until [[ -z "$(squeue -h)" ]]; do sleep 0.2; done']
            # Nothing happens to the second run.
            n_steps = 10 if "one-or-two" in command else 60
            command += f" --max-steps {n_steps} --log-freq 1"
        elif re.match("scancel|sbatch|ip .* down", command):
            lines += [f"STEP=$(wc -l <{run}/metrics.jsonl)"]
            lines += [f"until (($(wc -l <{run}/metrics.jsonl) > STEP + 2)); do sleep 0.1; done"]
            command = command.replace("sleep 10", "sleep 1")
        elif command.endswith(" down"):
            lines += ['until [[ -z "$(squeue -h)" ]]; do sleep 0.2; done']
            lines += ["scontrol show job 1 | grep -o Restarts=.*"]
        lines += [f"echo {shlex.quote('$ ' + command)}", command]
    env = {key: value for key, value in environment().items() if not key.startswith("SLURM")}
    hook = {"PYTHONPATH": f"{ROOT / 'tests/hooks'}:{ROOT}", "NOTES": str(tmp_path), "PAUSE": "0.4"}
    script = ROOT / "03-multi-node/tools/local_cluster.sh"
    if subprocess.run(["bash", script, "status"], capture_output=True).returncode == 0:
        pytest.skip("a local cluster is up already: it is not this test's to take down")
    # Its input is closed in the end, or when this process is killed: the cluster then goes down.
    down = ["bash", "-c", 'read -r; exec bash "$0" down &>/dev/null', script]
    own = {"stdin": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(down, env={"PATH": env["PATH"]}, **own) as keeper:
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            env={**env, **hook, "NPROC_PER_NODE": "1"},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
    assert keeper.returncode == 0
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node2" in done.stdout and "Restarts=2 " in done.stdout
    steps = [
        [line["step"] for line in read_metrics(run.with_name(name))]
        for name in (run.name, "one-or-two")
    ]
    assert steps == [list(range(1, 61)), list(range(1, 11))]


# --- tokenizer, training, evaluation, export and a sample as one job ---

PIPELINE = "03-multi-node/pipeline.sbatch"
COMMENT = "our own words, first try"
RESULTS = ("tokenizer", "evaluation.json", "model", "samples.jsonl")


def submit_pipeline(lab: Lab, **env: object) -> str:
    own = {"VOCAB_SIZE": 300, "PROMPT": "Text number 7", "NPROC_PER_NODE": 1, **env}
    return lab.submit(PIPELINE, "whole", options=("--comment", COMMENT), **own)


@pytest.mark.nightly
def test_pipeline_from_text_to_a_sample(lab):
    """Stopped in its training it goes on. Once more: what is done stays done.

    Each start adds its comment.
    """
    job = submit_pipeline(lab, PAUSE=0.3)
    lab.wait_for_step("whole", 6)
    lab.cluster.shell("scancel", "--signal=USR1", job)  # as Slurm before the end of its time
    assert lab.ends(job) == "COMPLETED", lab.log("whole")
    assert restarts(lab, job) == 1
    run = lab.folder / "whole"
    assert [line["step"] for line in lab.metrics("whole")] == list(range(1, STEPS + 1))
    tokenizer = AutoTokenizer.from_pretrained(run / "tokenizer")
    assert len(tokenizer) == 300
    assert AutoTokenizer.from_pretrained(run / "model").get_vocab() == tokenizer.get_vocab()
    found = json.loads((run / "evaluation.json").read_text())
    assert found["origin"].startswith("step 24 of ")
    assert found["loss"] == pytest.approx(lab.metrics("whole")[-1]["eval_loss"], rel=1e-5)
    (sample,) = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    assert sample["prompt"] == "Text number 7" and sample["text"]
    line, _ = (run / "comments.txt").read_text().splitlines()
    assert f" job {job}: {COMMENT} (-e whole " in line
    before = {name: (run / name).stat().st_mtime_ns for name in RESULTS}
    (run / "samples.jsonl").unlink()
    job = submit_pipeline(lab)
    assert lab.ends(job) == "COMPLETED", lab.log("whole")
    after = {name: (run / name).stat().st_mtime_ns for name in RESULTS}
    assert {name for name in RESULTS if before[name] != after[name]} == {"samples.jsonl"}

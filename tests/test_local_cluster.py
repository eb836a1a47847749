"""The local Slurm cluster: jobs, lost nodes and preemption on it, and that it leaves nothing."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import PATIENCE_S, SCRIPT, Cluster, need_cluster


def write_job(path: Path, text: str) -> Path:
    path.write_text("#!/bin/bash\n" + text)
    return path


# --- jobs on the cluster that all tests share ---


def test_nodes_have_names_and_addresses_of_their_own(cluster):
    seen = cluster.shell("srun", "-N2", "bash", "-c", "echo $(hostname) $(hostname -I)").split("\n")
    assert sorted(seen) == [f"node{k} {cluster.network}.{k}" for k in (1, 2)]


def test_each_node_knows_the_others_by_name(cluster):
    known = cluster.run("node2", "getent", "hosts", "node1", "node2", "controller", "login")
    assert [line.split() for line in known.split("\n")] == [
        [f"{cluster.network}.{last}", name]
        for last, name in [(1, "node1"), (2, "node2"), (254, "controller"), (253, "login")]
    ]


def test_ssh_reaches_a_node_and_from_there_the_other(cluster):
    assert cluster.run("node1", "hostname") == "node1"
    ssh = ("ssh", "-F", str(cluster.ssh_config))
    onward = cluster.run("node1", *ssh, "node2", "hostname; sinfo -h")
    assert onward.split("\n")[0] == "node2"
    assert "node[1-2]" in onward, "SLURM_CONF is not set in an ssh session"


def test_status_lists_nodes_and_jobs(cluster):
    job = cluster.sbatch("-N2", "-o", "/dev/null", "--job-name", "listed", "--wrap", "sleep 60")
    cluster.wait(job, "RUNNING")
    result = cluster.script("status")
    cluster.shell("scancel", job)
    assert result.returncode == 0
    node1, node2, *jobs = result.stdout.splitlines()
    assert node1.split() == ["node1", f"{cluster.network}.1", "mixed", "reachable"]
    assert node2.split() == ["node2", f"{cluster.network}.2", "mixed", "reachable"]
    assert any("listed" in line and "node[1-2]" in line for line in jobs)


def test_requeued_job_starts_again_before_slurms_own_two_minutes(cluster, tmp_path):
    script = write_job(
        tmp_path / "job.sh",
        "date +%s.%N >>starts\n"
        '[[ -n "$SLURM_RESTART_COUNT" ]] || { scontrol requeue $SLURM_JOB_ID; sleep 60; }\n',
    )
    job = cluster.sbatch("--chdir", tmp_path, script)
    end = cluster.wait(job, "COMPLETED")
    first, second = map(float, (tmp_path / "starts").read_text().split())
    assert end["Restarts"] == "1"
    assert second - first < 120  # at least so long without cred_expire; usually 7 seconds with it


@pytest.mark.ci
def test_urgent_job_takes_the_nodes_of_another_which_goes_on_later(cluster, tmp_path):
    notes = tmp_path / "notes"
    step = 'trap "echo TERM $(hostname) >>notes; exit" TERM; while :; do sleep 0.1; done'
    script = write_job(
        tmp_path / "job.sh",
        'echo "start ${SLURM_RESTART_COUNT:-0}" >>notes\n'
        '[[ -z "$SLURM_RESTART_COUNT" ]] || exit 0\n'
        f"srun bash -c '{step}'\n"
        "scontrol requeue $SLURM_JOB_ID\n",
    )
    job = cluster.sbatch("-N2", "--chdir", tmp_path, script)
    cluster.wait(job, "RUNNING")
    time.sleep(1)  # the step sets its trap
    urgent = ("-p", "urgent", "-N2", "--exclusive", "--chdir", tmp_path, "--wrap")
    cluster.wait(cluster.sbatch(*urgent, "echo urgent >>notes"), "COMPLETED")
    assert cluster.wait(job, "COMPLETED")["Restarts"] == "1"
    start, *terms, urgent, again = notes.read_text().splitlines()
    assert start == "start 0"
    assert sorted(terms) == ["TERM node1", "TERM node2"]
    assert (urgent, again) == ("urgent", "start 1")


@pytest.mark.ci
def test_lost_node_is_noticed_and_serves_again_when_it_is_back(cluster, tmp_path):
    script = write_job(
        tmp_path / "job.sh",
        'echo "$(hostname) ${SLURM_RESTART_COUNT:-0}" >>starts\n'
        "echo $PPID >>slurmstepds\n"
        '[[ -n "$SLURM_RESTART_COUNT" ]] || sleep 600\n',
    )
    job = cluster.sbatch("-w", "node2", "--chdir", tmp_path, script)
    cluster.wait(job, "RUNNING")
    cluster.cut("node2")
    try:
        lost = "down+not_responding"
        cluster.until(lambda: cluster.node_state("node2") == lost, "node2 is lost", 150)
        assert cluster.node_state("node1") == "idle"
        assert cluster.job(job)["Restarts"] == "1"
        lines = cluster.script("status").stdout.splitlines()
        assert lines[1].split(maxsplit=2)[2] == f"{lost}  not reachable"
        # The node still runs the first start and ends it when it is back. Slurm sets a node that
        # gets the second start before that to drain ("Duplicate jobid"), and never uses it again.
        cluster.shell("scontrol", "hold", job)
        first = Path("/proc", (tmp_path / "slurmstepds").read_text().split()[0])
        assert (first / "comm").read_text() == "slurmstepd\n"
    finally:
        cluster.mend("node2")
    cluster.until(lambda: cluster.node_state("node2") == "idle", "node2 is back")
    cluster.until(lambda: not first.exists(), "node2 has ended the first start")
    cluster.shell("scontrol", "release", job)
    cluster.wait(job, "COMPLETED")
    assert (tmp_path / "starts").read_text().split("\n") == ["node2 0", "node2 1", ""]


# --- what is left, on a machine of its own: its /run, its network and its processes start empty ---


class Machine(Cluster):
    """Where a cluster goes up and down alone, with the names that it has by default."""

    def __init__(self) -> None:
        # The shell is process 1 and reaps the dead. All processes end with it, and it ends when its
        # input is closed: in the end, or when this process is killed.
        command = "mount -n -t tmpfs tmpfs /run; echo ready; read -r"
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.holder = subprocess.Popen([*unshare, "bash", "-c", command], **pipes)
        assert self.holder.stdout.readline() == b"ready\n"
        proc = f"/proc/{self.holder.pid}"
        self.root = Path(proc, "root")
        pids = f"--pid={proc}/ns/pid_for_children"
        enter = ("nsenter", "--target", self.holder.pid, "--mount", "--net", pids)
        super().__init__("lab", "10.77.0", enter)
        self.folder = Path("/run/local-cluster")
        self.env = {k: v for k, v in self.env.items() if not k.startswith("LOCAL_CLUSTER_")}
        self.env["SLURM_CONF"] = str(self.folder / "slurm.conf")

    def processes(self) -> dict[int, tuple[int, str]]:
        """Return parent and command of each process but this machine's own and those that ask."""
        ask = (
            """for p in /proc/[0-9]*; do echo "${p#/proc/} $(sed 's/.*) . //; s/ .*//' $p/stat)"""
            """ $(tr '\\0' ' ' <$p/cmdline)"; done"""
        )
        found = {}
        for line in self.shell("bash", "-c", f"({ask}) 2>/dev/null").splitlines():
            pid, parent, command = f"{line}  ".split(" ", 2)  # some end meanwhile
            if int(pid) > 1 and ask not in command and command.strip():  # not zombies
                found[int(pid)] = int(parent), command.strip()
        return found

    def footprint(self) -> dict[str, list]:
        """Return all that a cluster could leave behind."""
        found = self.processes()
        return {
            "files": sorted(self.shell("find", "/run", "/etc/slurm", "/etc/munge").split("\n")),
            "links": self.shell("ip", "-br", "link").split("\n"),
            # Those of other clusters come and go meanwhile.
            "mounts": self.shell("grep", "-v", "^nsfs /run/netns/[^l]", "/proc/self/mounts").split(
                "\n"
            ),
            # By number: sshd gives itself another name. A daemon's children come and go.
            "processes": sorted(pid for pid, (parent, _) in found.items() if parent not in found),
        }

    def crash(self) -> None:
        """End all processes at once, as a power cut does."""
        pids = " ".join(map(str, self.processes()))
        self.shell("bash", "-c", f"kill -KILL {pids} 2>/dev/null || true")
        self.until(lambda: not self.processes(), "all are dead")

    def start_up(self, until: Path) -> tuple[subprocess.Popen, int]:
        """Start `up` and return when a file is there: the process, and the id of the script."""
        process = subprocess.Popen(
            [*self.within, "bash", SCRIPT, "up"],
            env=self.env,
            stderr=subprocess.PIPE,
            text=True,
            # pytest may run where Ctrl-C is ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        path = self.root / until.relative_to("/")
        while not path.exists():
            assert process.poll() is None, process.stderr.read()
        return process, child_of(process.pid)


def child_of(pid: int) -> int:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if stat.read_text().rpartition(")")[2].split()[1] == str(pid):
                return int(stat.parent.name)
    raise ProcessLookupError(pid)


@pytest.fixture
def machine():
    need_cluster()
    machine = Machine()
    with machine.holder:
        yield machine


# The stages of `up`, by a file that is there from then on.
STAGES = {
    "files": Path("/run/local-cluster/munge.key"),
    "network": Path("/run/netns/lab-node2"),
    "controller": Path("/run/local-cluster/log/controller-slurmctld.log"),
    "nodes": Path("/run/local-cluster/log/node2-sshd.log"),
}
UNDONE = "The cluster did not start. All its processes and files are removed."


def test_down_leaves_nothing_behind_of_running_jobs_either(machine):
    before = machine.footprint()
    machine.up(3)
    assert sorted(machine.shell("srun", "-N3", "hostname").split()) == ["node1", "node2", "node3"]
    # One process of the job has left its session, as a daemon does.
    wrap = "srun bash -c 'setsid sleep 500 & sleep 500'"
    machine.sbatch("-N3", "-o", "/dev/null", "--wrap", wrap)
    sleeping = lambda: [c for _, c in machine.processes().values()].count("sleep 500")  # noqa: E731
    Cluster.until(lambda: sleeping() == 6, "the job runs")
    during = machine.footprint()
    assert all(len(during[key]) > len(before[key]) for key in before), "the test sees nothing"

    result = machine.script("down")
    assert machine.footprint() == before
    assert (result.returncode, result.stdout) == (0, "The cluster is down.\n")
    result = machine.script("down")
    assert (result.returncode, result.stdout) == (0, "No cluster was up.\n")
    result = machine.script("status")
    assert (result.returncode, result.stdout) == (1, "No cluster is up.\n")


@pytest.mark.ci
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_stopped_up_leaves_nothing_behind(machine, name, stage):
    before = machine.footprint()
    up, pid = machine.start_up(STAGES[stage])
    os.kill(pid, signal.Signals[name])
    _, said = up.communicate(timeout=PATIENCE_S)
    assert (up.returncode, said) == (128 + signal.Signals[name], UNDONE + "\n")
    assert machine.footprint() == before


@pytest.mark.ci
@pytest.mark.parametrize("daemon", ["munged", "slurmctld", "slurmd", "sshd"])
def test_failed_up_shows_the_log_and_leaves_nothing_behind(machine, tmp_path, daemon):
    real = shutil.which(daemon)
    fake = tmp_path / daemon
    # `slurmd -C` and `slurmd -V` are what the script asks before it starts anything.
    fake.write_text(
        f'#!/bin/bash\n[[ "$1" != -[CV] ]] || exec {real} "$@"\necho "no way" >&2\nexit 1\n'
    )
    fake.chmod(0o755)
    before = machine.footprint()
    result = machine.script("up", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert machine.footprint() == before
    assert result.returncode == 1
    sentence, log, undone = result.stderr.splitlines()
    assert sentence.endswith(f"-{daemon}.log:") and f"-{daemon} has ended." in sentence
    assert (log, undone) == ("no way", UNDONE)


@pytest.mark.ci
def test_up_goes_over_what_a_crash_has_left(machine):
    before = machine.footprint()
    up, pid = machine.start_up(STAGES["network"])
    os.kill(pid, signal.SIGKILL)
    up.wait()
    machine.crash()  # where the signal came late, the script had started a daemon
    assert machine.footprint() != before
    machine.up()
    machine.crash()
    assert machine.script("status").returncode == 1
    machine.up()
    assert sorted(machine.shell("srun", "-N2", "hostname").split()) == ["node1", "node2"]
    machine.down()
    assert machine.footprint() == before


def test_ssh_where_the_account_of_root_is_locked(machine, tmp_path):
    locked = tmp_path / "shadow"
    locked.write_text("root:!:::::::\n")
    machine.shell("mount", "-n", "--bind", locked, "/etc/shadow")
    machine.up(1)
    assert machine.run("node1", "hostname") == "node1"


# --- bad input: one sentence, status 2, nothing done ---


def refusal(result: subprocess.CompletedProcess) -> str:
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "Say what to do: local_cluster.sh up [NODES], status or down."),
        (["start"], "Say what to do: local_cluster.sh up [NODES], status or down."),
        (["down", "2", "3"], "Say what to do: local_cluster.sh up [NODES], status or down."),
        (["up", "two"], "NODES must be a number from 1 to 9, not 'two'."),
        (["up", "0"], "NODES must be a number from 1 to 9, not '0'."),
        (["up", "10"], "NODES must be a number from 1 to 9, not '10'."),
    ],
)
def test_bad_arguments(args, sentence):
    assert refusal(Cluster("tests", "10.99.0").script(*args)) == sentence


def test_up_when_it_is_up(machine):
    machine.up()
    before = machine.footprint()
    sentence = "A cluster is up already. To end it: bash 03-multi-node/local_cluster.sh down"
    assert refusal(machine.script("up")) == sentence
    assert machine.footprint() == before


@pytest.mark.parametrize("address", ["10.77.0.9/24", "10.77.0.9/32", "10.1.1.1/8"])
def test_network_in_use(machine, address):
    machine.shell("ip", "link", "add", "cable", "type", "veth", "peer", "name", "other")
    machine.shell("ip", "address", "add", address, "dev", "cable")
    machine.shell("ip", "link", "set", "cable", "up")
    before = machine.footprint()
    sentence = "10.77.0.0/24 is in use on this machine: choose another LOCAL_CLUSTER_NETWORK."
    assert refusal(machine.script("up")) == sentence
    assert machine.footprint() == before
    assert machine.script("up", LOCAL_CLUSTER_NETWORK="172.30.9").returncode == 0


def test_name_in_use(machine):
    machine.shell("ip", "netns", "add", "lab-switch")
    sentence = "The name lab is in use on this machine: choose another LOCAL_CLUSTER_NAME."
    assert refusal(machine.script("up")) == sentence
    assert "lab-switch" in machine.shell("ip", "netns")


def test_folder_of_something_else_is_kept(machine, tmp_path):
    (tmp_path / "precious").touch()
    result = machine.script("up", LOCAL_CLUSTER_DIR=str(tmp_path))
    assert "belongs to no cluster" in refusal(result)
    assert machine.script("down", LOCAL_CLUSTER_DIR=str(tmp_path)).returncode == 0
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    "setting",
    [
        {"LOCAL_CLUSTER_DIR": "here"},
        {"LOCAL_CLUSTER_DIR": "/no/such/folder"},
        {"LOCAL_CLUSTER_NAME": "much-too-long"},
        {"LOCAL_CLUSTER_NETWORK": "10.77.0.0/24"},
    ],
)
def test_bad_settings(machine, setting):
    assert refusal(machine.script("up", **setting)) == (
        "LOCAL_CLUSTER_DIR, _NAME, _NETWORK must be like /run/local-cluster, lab, 10.77.0."
    )


def script_from_stdin(**options: object) -> subprocess.CompletedProcess:
    """Run `up` where neither the folder of the script nor bash needs to be within reach."""
    options = {"input": SCRIPT.read_text(), "text": True, "capture_output": True, **options}
    return subprocess.run([shutil.which("bash"), "-s", "up"], **options)


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs Linux and root")
def test_missing_packages(tmp_path):
    for tool in ("uname", "unshare", "flock"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    assert refusal(script_from_stdin(env={"PATH": str(tmp_path)})) == (
        "Not found: slurmctld slurmd sinfo munged sshd ssh ip. To install: "
        "apt-get install slurm-wlm munge openssh-server openssh-client iproute2"
    )


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs Linux and root")
def test_not_root():
    result = script_from_stdin(user=65534, cwd="/")
    assert refusal(result) == "Only root can make namespaces: run this with sudo."


def test_not_linux(tmp_path):
    uname = tmp_path / "uname"
    uname.write_text(f"#!{shutil.which('bash')}\necho Darwin\n")
    uname.chmod(0o755)
    result = script_from_stdin(env={"PATH": str(tmp_path)})
    assert refusal(result) == "The nodes are Linux namespaces: this needs Linux."

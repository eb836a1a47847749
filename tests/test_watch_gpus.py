"""The table of a cluster: readings as the vendor's tools give them, nodes that do not answer."""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers import ROOT, run_script
from runner import load_script

SCRIPT = "03-multi-node/watch_gpus.py"
watch_gpus = load_script(ROOT / SCRIPT)

# What `nvidia-smi --format=csv,noheader,nounits` prints for a node of 8 H100: uuid, name, % busy,
# W, limit in W, MiB used, MiB in all.
TRAINING = [
    f"GPU-{n}a{n}, NVIDIA H100 80GB HBM3, {97 + n % 3}, {640 + n}.25, 700.00, {71000 + n}, 81559"
    for n in range(8)
]
IDLE = [re.sub(r", \d+, [\d.]+, 700", ", 0, 71.40, 700", line) for line in TRAINING]
# In a collective that waits for GPU 3: all others at 100% and 118 W.
WAITING = [re.sub(r", \d+, [\d.]+, 700", ", 100, 118.09, 700", line) for line in TRAINING]
WAITING[3] = IDLE[3]
APPS = [f"GPU-{n}a{n}, {4000 + n}" for n in range(8)]

NVIDIA_SMI = """#!/bin/bash
case "$1" in
--query-gpu=*) printf '%s\\n' "${{GPUS[@]}}" ;;
--query-compute-apps=*) printf '%s\\n' "${{APPS[@]}}" ;;
esac
exit {status}
"""


def fake_nvidia_smi(folder: Path, gpus: list[str], apps: list[str] = APPS, status: int = 0) -> Path:
    """Put an nvidia-smi into a folder that prints this; return the folder."""
    folder.mkdir(exist_ok=True)
    arrays = "".join(
        f"{name}=({' '.join(repr(line) for line in lines)})\n"
        for name, lines in (("GPUS", gpus), ("APPS", apps))
    )
    program = folder / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(status=status).replace("\n", f"\n{arrays}", 1))
    program.chmod(0o755)
    return folder


PYNVML = '''
"""NVIDIA's library as one H100 and one in MIG mode would answer, which has no utilization."""
from types import SimpleNamespace
class NVMLError(Exception): pass
nvmlMemory_v2 = 0x02000028
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(gpu): return [b"NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"][gpu]
def nvmlDeviceGetUtilizationRates(gpu):
    if gpu: raise NVMLError("Not Supported")
    return SimpleNamespace(gpu=98, memory=40)
def nvmlDeviceGetMemoryInfo(gpu, version=None):
    if version is None: return SimpleNamespace(used=2**30, total=2**36)
    assert version == nvmlMemory_v2
    return SimpleNamespace(used=71000 * 2**20, total=81559 * 2**20)
def nvmlDeviceGetPowerUsage(gpu): return 640250
def nvmlDeviceGetEnforcedPowerLimit(gpu): return 700000
def nvmlDeviceGetComputeRunningProcesses(gpu): return [SimpleNamespace(pid=4000)]
'''
NO_PYNVML = "raise ImportError"


def read_node(folder: Path, pynvml: str = NO_PYNVML, path: Path | None = None) -> dict:
    """Run what is sent to a node, with this library and these programs in front of the others."""
    (folder / "pynvml.py").write_text(pynvml)
    program = f"import sys; sys.path.insert(0, {str(folder)!r})\n{watch_gpus.SENT}"
    path = f"{path}:{os.environ['PATH']}" if path else str(folder)
    command = [sys.executable, "-"]
    output = subprocess.check_output(command, input=program.encode(), env={"PATH": path})
    return json.loads(output)


H100 = {"name": "NVIDIA H100 80GB HBM3", "limit": 700.0, "total": 81559 / 1024}


@pytest.mark.check
def test_readings_of_the_library(tmp_path):
    first, second = read_node(tmp_path, PYNVML)["gpus"]
    used = 71000 / 1024
    assert first == {**H100, "busy": 98, "power": 640.25, "used": used, "processes": 1}
    assert second == {**first, "busy": None}
    without_v2 = PYNVML.replace("nvmlMemory_v2 = 0x02000028\n", "")
    assert read_node(tmp_path, without_v2)["gpus"][0]["used"] == 1


@pytest.mark.check
def test_readings_of_nvidia_smi(tmp_path):
    folder = fake_nvidia_smi(tmp_path / "bin", TRAINING, [*APPS, APPS[7]])
    gpus = read_node(tmp_path, path=folder)["gpus"]
    assert len(gpus) == 8
    expected = {**H100, "busy": 97, "power": 640.25, "used": 71000 / 1024, "processes": 1}
    assert gpus[0] == expected
    assert gpus[7]["processes"] == 2


@pytest.mark.check
@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]", "[Unknown Error]"])
def test_what_a_gpu_does_not_tell(tmp_path, word):
    line = f"GPU-1, NVIDIA A100, {word}, {word}, {word}, 5, {word}"
    gpus = read_node(tmp_path, path=fake_nvidia_smi(tmp_path / "bin", [line], []))["gpus"]
    unknown = dict.fromkeys(("busy", "power", "limit", "total"))
    assert gpus == [{"name": "NVIDIA A100", **unknown, "used": 5 / 1024, "processes": 0}]
    row = table({"node1": {"gpus": gpus}}).splitlines()[1]
    assert re.split(" {2,}", row) == ["node1", "1 x NVIDIA A100", "?", "? of ?", "0.0 of ?", "0"]


@pytest.mark.check
def test_a_driver_that_fails_is_named(tmp_path):
    said = "NVIDIA-SMI has failed because it could not talk to the driver."
    folder = fake_nvidia_smi(tmp_path / "bin", [said], status=9)
    reading = read_node(tmp_path, path=folder)
    assert reading["why"] == f"nvidia-smi: {said}"
    assert reading["cpu"]["cores"] >= 1
    assert said in table({"node1": reading})


BUSY = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
SLEEP = "import time; time.sleep(60)"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, and its /proc")
def test_a_machine_without_gpus(tmp_path):
    reading = read_node(tmp_path)
    cpu = reading["cpu"]
    assert reading["why"] == "no GPU"
    assert 0 < cpu["used"] < cpu["total"] and cpu["load"] >= 0
    # Other tests end processes meanwhile: start more than they can end in half a second.
    programs = [BUSY, *20 * [SLEEP]]
    started = [subprocess.Popen([sys.executable, "-ISc", program]) for program in programs]
    try:
        after = read_node(tmp_path)["cpu"]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert after["processes"] > cpu["processes"]
    assert after["busy"] > 5 / cpu["cores"]  # of one core, which others may want too


@pytest.mark.check
def test_the_nodes_need_no_newer_python_than_3_6():
    ast.parse(watch_gpus.SENT, feature_version=(3, 6))
    with pytest.raises(SyntaxError):
        ast.parse(watch_gpus.SENT + "\nif (gpus := []): pass", feature_version=(3, 6))
    imported = re.findall(r"^ *(?:import|from) (\w+)", watch_gpus.SENT, re.MULTILINE)
    assert set(imported) <= {*sys.stdlib_module_names, "pynvml"}


# --- the table and its rules ---


def gpus(lines: list[str]) -> dict:
    """Return the reading of a node whose nvidia-smi prints these lines."""
    found = []
    for line in lines:
        _, name, *numbers = line.split(", ")
        busy, power, limit, used, total = map(float, numbers)
        reading = {"name": name, "busy": busy, "power": power, "limit": limit}
        found.append({**reading, "used": used / 1024, "total": total / 1024, "processes": 1})
    return {"gpus": found}


def cpu(busy: float, processes: int = 2) -> dict:
    reading = {"cores": 2, "load": 1.5, "used": 3.0, "total": 23.5}
    return {"cpu": {**reading, "busy": busy, "processes": processes}, "why": "no GPU"}


def nodes(*readings: dict) -> list:
    """Return nodes after some readings, each a dictionary of the nodes' readings."""
    options = argparse.Namespace(timeout=5.0, ssh_config=None, python="python3")
    found = {name: watch_gpus.Node(name, options) for name in readings[0]}
    for reading in readings:
        for name, each in reading.items():
            if isinstance(each, str):
                found[name].take(None, each)
            else:
                found[name].take(each)
    return list(found.values())


def table(*readings: dict, every_gpu: bool = False) -> str:
    return watch_gpus.table(nodes(*readings), every_gpu)


@pytest.mark.check
def test_a_row_for_each_node():
    refused = "ssh: connect to host node3 port 22: Connection refused"
    shown = table({"node1": gpus(TRAINING), "node2": cpu(97), "node3": refused}).splitlines()
    assert [re.split(" {2,}", line) for line in shown] == [
        ["node", "devices", "utilization, %", "power, W", "memory, GiB", "processes"],
        [
            *("node1", "8 x NVIDIA H100 80GB HBM3", "98 (min 97)", "644 (min 640) of 700"),
            *("69.3 (max 69.3) of 79.6", "8"),
        ],
        ["node2", "2 CPU cores", "97", "load 1.50", "3.0 of 23.5", "2", "no GPU"],
        ["node3", f"not reached: {refused}"],
    ]
    shown = table({"node1": gpus(TRAINING)}, every_gpu=True).splitlines()
    assert len(shown) == 9
    cells = ["node1", "7: NVIDIA H100 80GB HBM3", "98", "647 of 700", "69.3 of 79.6", "1"]
    assert re.split(" {2,}", shown[8]) == cells


@pytest.mark.check
def test_gpus_that_spin_are_marked_and_the_other_one_is_named():
    shown = table({"node1": gpus(WAITING), "node2": gpus(TRAINING)}).splitlines()
    assert shown[1].endswith(" 8          7 busy near idle power")
    assert not shown[2].endswith("power")
    assert shown[3:] == [
        "Busy near idle power for 0 s: 7 of 8 on node1. A collective that waits for a rank looks "
        "like this; not waiting: GPU 3 of node1."
    ]
    for usual in (TRAINING, IDLE):
        assert len(table({"node1": gpus(usual)}).splitlines()) == 2
    # A GPU that still computes is named too: only rank 0 evaluates, and the others wait for it.
    works = gpus(WAITING)
    works["gpus"][3] |= {"busy": 100, "power": 650.0}
    assert table({"node1": works}).splitlines()[-1].endswith("; not waiting: GPU 3 of node1.")
    shown = table({"node1": gpus(WAITING)}, every_gpu=True).splitlines()[1:9]
    assert [line.endswith("busy near idle power") for line in shown] == [n != 3 for n in range(8)]


# What people reported of H100 (watching.md names them), and what lies around the threshold.
@pytest.mark.check
@pytest.mark.parametrize(
    ("busy", "power", "limit", "marked"),
    [
        (100, 100, 700, True),
        (100, 121, 700, True),
        (100, 152, 700, True),
        (95, 209, 700, True),
        (95, 210, 700, False),
        (94, 100, 700, False),
        (100, 250, 700, False),  # a training that uses its GPUs badly
        (100, 640, 700, False),
        (0, 71, 700, False),
        (100, None, 700, False),
        (None, 71, 700, False),
        (100, 71, None, False),
    ],
)
def test_the_threshold(busy, power, limit, marked):
    reading = gpus(TRAINING[:1])
    reading["gpus"][0] |= {"busy": busy, "power": power, "limit": limit}
    (node,) = nodes({"node1": reading})
    assert bool(node.spinning()) == marked


@pytest.mark.check
def test_the_clock_of_a_spin_starts_with_it_and_ends_with_it(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(watch_gpus.time, "monotonic", lambda: now[0])
    (node,) = nodes({"node1": gpus(TRAINING)})
    for reading, seconds in ((WAITING, 0), (WAITING, 40), (TRAINING, None), (WAITING, 0)):
        node.take(gpus(reading))
        lines = watch_gpus.suspicions([node])
        found = re.search(r"for (\d+) s:", lines[0])[1] if lines else None
        assert found == (None if seconds is None else str(seconds))
        now[0] += 40


@pytest.mark.check
def test_no_reading_changes_while_the_table_is_made(monkeypatch):
    """The table is made in the middle of `take`, which first sets the reading, then the clock."""
    (node,) = nodes({"node1": gpus(TRAINING)})
    in_the_middle, original = threading.Event(), watch_gpus.Node.effort

    def effort(self) -> float:
        in_the_middle.set()
        time.sleep(0.2)
        return original(self)

    monkeypatch.setattr(watch_gpus.Node, "effort", effort)
    thread = threading.Thread(target=node.take, args=[gpus(WAITING)])
    thread.start()
    in_the_middle.wait()
    assert "Busy near idle power for 0 s: 7 of 8 on node1." in watch_gpus.table([node], False)
    thread.join()


FALLEN = "Every node that answers is below 50% of its highest power or CPU use so far"


@pytest.mark.check
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"a": TRAINING, "b": TRAINING}, {"a": IDLE, "b": IDLE}, True),
        ({"a": TRAINING, "b": TRAINING}, {"a": IDLE, "b": TRAINING}, False),
        ({"a": IDLE, "b": IDLE}, {"a": IDLE, "b": IDLE}, False),
        ({"a": TRAINING, "b": TRAINING}, {"a": IDLE, "b": None}, True),  # b does not answer
        ({"a": 95, "b": 90}, {"a": 1, "b": 0}, True),
        ({"a": 95, "b": 90}, {"a": 80, "b": 60}, False),
        ({"a": 5, "b": 5}, {"a": 0, "b": 0}, False),  # never worked
    ],
)
def test_power_that_falls_everywhere(before, after, told):
    def reading(each: list[str] | int | None) -> dict | str:
        if each is None:
            return "no answer within 5 s"
        return cpu(each) if isinstance(each, int) else gpus(each)

    rounds = [{name: reading(each) for name, each in round.items()} for round in (before, after)]
    assert (FALLEN in table(*rounds)) == told


@pytest.mark.check
def test_a_run_that_has_ended_is_no_hang():
    ended = gpus(IDLE)
    for gpu in ended["gpus"]:
        gpu["processes"] = 0
    assert FALLEN not in table({"a": gpus(TRAINING)}, {"a": ended})
    assert FALLEN not in table({"a": cpu(95)}, {"a": cpu(0, processes=0)})


# --- the script ---


def fake_ssh(folder: Path) -> Path:
    """An ssh to nodes whose nvidia-smi is in a folder of their name; `silent` does not answer."""
    folder.mkdir(exist_ok=True)
    (folder / "pynvml.py").write_text(NO_PYNVML)
    ssh = folder / "ssh"
    ssh.write_text(
        '#!/bin/bash\nHOST=${@: -2:1}; [[ "$HOST" != silent ]] || exec sleep 1000\n'
        f'echo "Welcome to $HOST"; export PATH={folder}/$HOST:$PATH PYTHONPATH={folder}\n'
        f"exec {sys.executable} -\n"
    )
    ssh.chmod(0o755)
    return folder


def test_a_silent_node_delays_no_other(tmp_path):
    fake_nvidia_smi(fake_ssh(tmp_path / "bin") / "node1", TRAINING)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    command = [sys.executable, "-u", SCRIPT, "silent", "node[1-2]", "--timeout", "300"]
    (tmp_path / "bin/node2").symlink_to(tmp_path / "bin/node1")
    process = subprocess.Popen(
        [*command, "--interval", "0.5"],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
        # pytest may run where Ctrl-C is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    start, seen = time.monotonic(), ""
    while not re.search(r"node2 +8 x", seen):
        seen += process.stdout.readline()
        assert time.monotonic() - start < 200, "the others wait for the silent one"
    assert re.search(r"^silent +asking$", seen, re.MULTILINE)
    # Ctrl-C: a clean end, with nothing left behind.
    asked = {"ppid": process.pid, "cmdline": ["sleep", "1000"]}
    (silent,) = (found for found in psutil.process_iter([*asked]) if found.info == asked)
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.wait(timeout=300) == 0
    silent.wait(timeout=300)


@pytest.mark.ci
def test_once_ends_with_1_if_a_node_is_missing(tmp_path):
    fake_nvidia_smi(fake_ssh(tmp_path / "bin") / "node1", WAITING)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = run_script(SCRIPT, "node1", "silent", "--once", "--timeout", 10, PATH=path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[2] == "silent  not reached: no answer within 10 s"
    whole = run_script(SCRIPT, "node1", "--once", "--gpus", PATH=path)
    assert whole.returncode == 0
    assert "7 of 8 on node1" in whole.stdout and len(whole.stdout.splitlines()) == 10


@pytest.mark.check
@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        (["node1", "me@node2"], ["node1", "me@node2"]),
        (["node[1-3]"], ["node1", "node2", "node3"]),
        (["node[08-10,12].ib"], ["node08.ib", "node09.ib", "node10.ib", "node12.ib"]),
        (["a,b[1-2],c", "a"], ["a", "b1", "b2", "c"]),
        ([], []),
    ],
)
def test_hosts(words, hosts):
    assert watch_gpus.expand(words) == hosts


@pytest.mark.check
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["node[4-1]"], "'node[4-1]' is not a host: give names as for ssh, or node[1-4]."),
        (["node[a]"], "'node[a]' is not a host: give names as for ssh, or node[1-4]."),
        (["no de"], "'no de' is not a host: give names as for ssh, or node[1-4]."),
        (["--", "-oProxyCommand=x@y"], "'-oProxyCommand=x@y' is not a host"),
        (["-F", "gone", "node1"], "-F gone is not a file: give a configuration file for ssh."),
        (["--interval", "0"], "'0' is not a number from 0.2"),
        (["--timeout", "soon"], "'soon' is not a number from 1.0"),
    ],
)
def test_bad_input(args, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT, *args])
    with pytest.raises(SystemExit) as end:
        watch_gpus.distributed.run(watch_gpus.main)
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert sentence in said.err


# --- over ssh, on the local cluster ---


@pytest.mark.ci
def test_a_node_that_is_cut_off(cluster):
    command = ("ssh", "-F", str(cluster.ssh_config), "node1", f"exec {sys.executable} -")
    busy = subprocess.Popen(command, stdin=subprocess.PIPE, env=cluster.env)
    busy.stdin.write(BUSY.encode())
    busy.stdin.close()
    words = (SCRIPT, "-F", cluster.ssh_config, "node[1-2]", "--once", "--timeout")
    try:
        cluster.until(lambda: processes(run_script(*words, 20), "node1") == 1, "node1 is busy")
        done = run_script(*words, 20)
        assert done.returncode == 0, done.stdout + done.stderr
        one, two = done.stdout.splitlines()[1:3]
        assert re.match(r"node1 +\d+ CPU cores +[1-9]\d* .* 1 +no GPU$", one), one
        assert re.match(r"node2 +\d+ CPU cores +0 .* 0 +no GPU$", two), "node1's process is not its"
        cluster.cut("node2")
        start = time.monotonic()
        done = run_script(*words, 10)
        seconds = time.monotonic() - start
    finally:
        cluster.mend("node2")
        busy.kill()
        busy.wait()
        cluster.run("node1", "bash", "-c", "pkill -KILL --ns $$ --nslist net -f ' -$' || true")
    assert done.returncode == 1
    one, two = done.stdout.splitlines()[1:]
    assert re.match(r"node1 +\d+ CPU cores ", one)
    assert re.match(r"node2 +not reached: (no answer within 10 s|ssh: .* No route to host)$", two)
    assert seconds < 100  # TCP alone gives up after two minutes


def processes(done: subprocess.CompletedProcess, node: str) -> int:
    row = re.search(rf"^{node} .* (\d+) +no GPU$", done.stdout, re.MULTILINE)
    return int(row[1]) if row else -1


# --- on a GPU ---


@pytest.mark.gpu
def test_readings_agree_with_torch_and_nvidia_smi():
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    reading = watch_gpus.read_node()
    name, device_bytes = torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)
    mine = [gpu for gpu in reading["gpus"] if gpu["name"] == name]
    assert len(mine) >= torch.cuda.device_count()
    used = [gpu["used"] for gpu in mine]
    free, total = (each / 2**30 for each in device_bytes)
    # torch's total leaves out what the driver reserves, some hundreds of MB.
    assert min(abs(each - (total - free)) for each in used) < 1.0
    assert mine[0]["total"] == pytest.approx(total, abs=2.0)
    assert held.numel() / 2**30 <= max(used)
    for gpu in mine:
        assert 0 <= gpu["busy"] <= 100 and 5 < gpu["power"] < 1.2 * gpu["limit"]
    if shutil.which("nvidia-smi"):
        second = watch_gpus.read_nvidia_smi()
        assert [gpu["name"] for gpu in second] == [gpu["name"] for gpu in reading["gpus"]]
        for one, two in zip(reading["gpus"], second, strict=True):
            assert two["used"] == pytest.approx(one["used"], abs=0.5)
            assert two["total"] == pytest.approx(one["total"], abs=0.1)
            assert two["limit"] == pytest.approx(one["limit"], rel=0.01)
            assert two["power"] == pytest.approx(one["power"], rel=0.5)


@pytest.mark.gpu
def test_a_kernel_that_only_waits_looks_like_a_hang():
    """A single thread that spins keeps a GPU busy and does not make it work; products do."""
    (node,) = nodes({"here": watch_gpus.read_node()})
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    seen = {}
    for what, work in (
        ("spin", lambda: torch.cuda._sleep(10**8)),  # cycles, about 50 ms
        ("compute", lambda: [matrix @ matrix for _ in range(20)]),
    ):
        stop = threading.Event()

        def keep_busy(work=work, stop=stop) -> None:
            while not stop.is_set():
                work(), work()
                torch.cuda.current_stream().synchronize()

        thread = threading.Thread(target=keep_busy)
        thread.start()
        time.sleep(4)  # utilization and power are means of about a second
        node.take(watch_gpus.read_node())
        stop.set()
        thread.join()
        seen[what] = bool(node.spinning())
    assert seen == {"spin": True, "compute": False}, node.reading

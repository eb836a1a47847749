"""The files for Kubernetes and SkyPilot agree with the scripts and with the others' own schemas.

test_multi_node.py runs their commands.
"""

import socket
import subprocess
import sys

import pytest
import yaml
from helpers import ROOT, environment, install

from common.launch import REQUEUE_STATUS

MANIFEST = ROOT / "03-multi-node/tools/kubernetes.yaml"
TASK = ROOT / "03-multi-node/tools/skypilot.yaml"


def wrong_manifest(text: str) -> list[str]:
    """Return what would keep the pods of a manifest from finding each other or from resuming."""
    service, job = yaml.safe_load_all(text)
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    name, domain = job["metadata"]["name"], service["metadata"]["name"]
    policy = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"]}
    on_exit = spec["podFailurePolicy"]["rules"][1]["onExitCodes"]
    shutdown = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    mounts = [mount["name"] for mount in container["volumeMounts"]]
    rules = {
        "a headless Service": service["spec"]["clusterIP"] == "None",
        "the Service selects the pods of the Job": service["spec"]["selector"]
        == {"batch.kubernetes.io/job-name": name},
        "the pods are in the Service's domain": pod["subdomain"] == domain,
        "HEAD is pod 0": variables["HEAD"].split(":")[0] == f"{name}-0.{domain}",
        "all pods run at the same time": spec["completions"] == spec["parallelism"],
        "each node is a pod": variables["NNODES"] == str(spec["completions"]),
        "pods have numbers": spec["completionMode"] == "Indexed",
        "a replaced pod is gone": spec["podReplacementPolicy"] == "Failed",
        "the Job replaces pods": pod["restartPolicy"] == "Never",
        "only disruptions and stops are ignored": set(policy) == {"Ignore"},
        "a stop is ignored": on_exit
        == {"containerName": container["name"], "operator": "In", "values": [REQUEUE_STATUS]},
        "torchrun ends before the pod": shutdown < pod["terminationGracePeriodSeconds"],
        "the script is there": (ROOT / container["command"][-1]).exists(),
        "each volume is mounted": sorted(mounts) == sorted(v["name"] for v in pod["volumes"]),
    }
    return [rule for rule, holds in rules.items() if not holds]


MISTAKES = {  # (text, its replacement): the rule that finds it
    ("clusterIP: None", "clusterIP: 10.0.0.1"): "a headless Service",
    ("job-name: train-llm", "job-name: train"): "the Service selects the pods of the Job",
    ("subdomain: train-llm", "subdomain: train"): "the pods are in the Service's domain",
    ("train-llm-0.train-llm:", "train-llm-0:"): "HEAD is pod 0",
    ("parallelism: 2", "parallelism: 1"): "all pods run at the same time",
    ('value: "2"', 'value: "4"'): "each node is a pod",
    ("completionMode: Indexed", "completionMode: NonIndexed"): "pods have numbers",
    ("podReplacementPolicy: Failed", "podReplacementPolicy: Any"): "a replaced pod is gone",
    ("restartPolicy: Never", "restartPolicy: OnFailure"): "the Job replaces pods",
    ("values: [75]", "values: [75, 1]"): "a stop is ignored",
    ("containerName: train", "containerName: main"): "a stop is ignored",
    ('"110"', '"120"'): "torchrun ends before the pod",
    ("tools/pod.sh]", "tools/pot.sh]"): "the script is there",
}


@pytest.mark.check
def test_manifest():
    text = MANIFEST.read_text()
    assert wrong_manifest(text) == []
    for (right, wrong), rule in MISTAKES.items():
        assert text.count(right) >= 1, right
        assert rule in wrong_manifest(text.replace(right, wrong)), f"planted: {wrong}"


@pytest.mark.check
@pytest.mark.skipif(sys.platform != "linux", reason="a container has Linux")
def test_pod_waits_for_pod_0(tmp_path):
    """Then it starts its agent and ends with its status; told to stop before, it can resume."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\ncase "$*" in *arguments.py*) echo run;; *) exit 3;; esac\n')
    program.chmod(0o755)
    with socket.socket() as pod_0:
        pod_0.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{pod_0.getsockname()[1]}"
        env = environment(JOB_COMPLETION_INDEX=1, NNODES=2, HEAD=head, NPROC_PER_NODE=1)

        def start_pod() -> subprocess.Popen:
            command = ["bash", MANIFEST.with_name("pod.sh"), "-e", "run"]
            env["PYTHON"] = str(program)
            pod = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
            assert pod.stdout.readline() == f"Waiting for pod 0 at {head}\n"
            return pod

        with start_pod() as waiting, start_pod() as stopped:
            stopped.terminate()
            assert stopped.wait(60) == REQUEUE_STATUS
            assert waiting.poll() is None
            pod_0.listen()
            assert waiting.wait(60) == 3


@pytest.mark.nightly
def test_manifest_by_kubernetes_schema(make_folder):
    """Its own schemas, and no field that they do not know."""
    folder = make_folder("kubernetes")
    python = install(folder, "kubernetes-validate==1.37.0")
    check = [python.parent / "kubernetes-validate", "--strict"]

    def validate(text: str) -> int:
        for number, part in enumerate(text.split("\n---\n")):
            file = folder / f"{number}.yaml"
            file.write_text(part)
            done = subprocess.run([*check, file], capture_output=True, text=True)
            if done.returncode:
                return done.returncode
        return 0

    text = MANIFEST.read_text()
    assert validate(text) == 0
    assert validate(text.replace("completionMode", "completeMode")) != 0, "planted"
    assert validate(text.replace("backoffLimit: 6", "backoffLimit: six")) != 0, "planted"


@pytest.mark.nightly
def test_task_loads_in_skypilot(make_folder):
    folder = make_folder("skypilot")
    python = install(folder, "skypilot==0.14.1")
    load = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(task.name, task.num_nodes, resources.accelerators, task.workdir)
"""

    def loaded(text: str) -> subprocess.CompletedProcess:
        file = folder / "task.yaml"
        file.write_text(text)
        # A home of its own, and the root of the repository, which workdir names.
        env = {
            "HOME": str(folder),
            "PATH": "/usr/bin:/bin",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        }
        command = [python, "-c", load, file]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    done = loaded(TASK.read_text())
    assert done.stdout == "train-llm 2 {'H100': 8} .\n", done.stderr
    assert loaded(TASK.read_text().replace("num_nodes", "nodes")).returncode != 0, "planted"

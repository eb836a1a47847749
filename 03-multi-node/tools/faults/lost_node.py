"""One of two nodes disappears: its torchrun and its worker are killed."""

import contextlib
import re
import socket
import time
from pathlib import Path

from faults.lab import Lab, Run, read_metrics


def show_fault(lab: Lab) -> None:
    lose_a_node(lab)


def show_fix(lab: Lab) -> None:
    """Start the same command again, on both nodes."""
    script, step = lose_a_node(lab)
    nodes = start_two_nodes(lab, script)
    for node in nodes:
        lab.show_end(node, "resumed after step|step 60/60")
    resumed = re.search(r"resumed after step (\d+)", "".join(node.output for node in nodes))
    lab.expect(bool(resumed) and int(resumed[1]) <= step, "the run should resume")
    steps = [line["step"] for line in read_metrics(script.parent)]
    complete = steps == list(range(1, 61))
    lab.show(f"metrics.jsonl has every step from 1 to 60 exactly once: {complete}")
    lab.expect(complete, "no step should be missing or occur twice")


def lose_a_node(lab: Lab) -> tuple[Path, int]:
    """Kill one of two nodes; return the script, and the last step that was logged."""
    script = lab.write_train_script("lost-node")
    first, second = start_two_nodes(lab, script)
    first.wait_for_step(12)
    lab.show("kill -9 of the second torchrun and its worker, after step 12")
    second.kill()
    killed = time.monotonic()
    first.wait()
    seconds = time.monotonic() - killed
    step = first.metrics[-1]["step"]
    lab.show_end(first, "gone or out of reach", report=True)
    lab.show(f"the other node exited {seconds:.1f} s after the kill, in step {step + 1}")
    lab.expect_failure(first, "gone or out of reach")
    lab.expect(step < 60, "the other node should not reach its last step")
    return script, step


def start_two_nodes(lab: Lab, script: Path) -> list[Run]:
    """Start two torchruns with one worker each, which save their run next to the script."""
    save_dir = script.parent
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = ("--nnodes", 2, "--nproc-per-node", 1, "--local-addr", "localhost", "--rdzv-id", "lab")
    launch += ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}")
    flags = (f"@{lab.arguments}", "--max-steps", 60, "--save-dir", save_dir, "-e", "run")
    nodes = []
    for name in ("node1", "node2"):
        folder = lab.new_folder(f"{save_dir.name}/{name}")
        nodes.append(lab.torchrun(folder, script, *flags, launch=launch, save_dir=save_dir))
        wait_for_port(port, nodes[0])  # the first torchrun serves the store
    return nodes


def wait_for_port(port: int, run: Run, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while run.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
            return
        time.sleep(0.1)

"""The processes of the comparison: one per rank."""

import argparse
import datetime
import gc
import itertools
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, start_processes

from common.cli import RunError

from comparison import training

START_METHOD = "spawn"


class Ranks:
    """Processes that train the runs one after another. After a failure, new processes start."""

    def __init__(self, number: int) -> None:
        self.number, self.run_number, self.context = number, 0, None
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def train(self, run: argparse.Namespace) -> tuple[str, dict | str]:
        """Return ("done", what rank 0 measured), or ("left_out" or "failed", the reason).

        If a rank fails or the time is up, all ranks are killed, because some may be waiting in a
        collective.
        """
        self.run_number += 1
        if self.context is None:
            environments = [{}] * self.number
            if training.hvd:
                environments = horovod_environments(self.number)
            self.context = start_processes(
                be_rank,
                args=(self.run_number, self.store.port, environments),
                nprocs=self.number,
                join=False,
                daemon=True,
                start_method=START_METHOD,
            )
        key = f"run-{self.run_number}"
        self.store.set(key, json.dumps(vars(run), default=str))
        deadline = time.monotonic() + run.timeout
        status, answer = "failed", f"no answer within {run.timeout} s"
        try:
            while time.monotonic() < deadline and not self.store.check([f"{key}/answer"]):
                self.context.join(0.1)
        except ProcessExitedException as error:
            answer = f"a rank exited with status {error.exit_code}"
        if self.store.check([f"{key}/answer"]):
            status, answer = json.loads(self.store.get(f"{key}/answer"))
        if status == "failed":
            self.stop()
        return status, answer

    def stop(self) -> None:
        for process in self.context.processes if self.context else ():
            process.kill()
            process.join()
        self.context = None


def be_rank(rank: int, run_number: int, port: int, environments: list[dict[str, str]]) -> None:
    """Train all runs from run_number on. Rank 0, or a rank that fails, reports the answer."""
    os.environ |= environments[rank]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started the ranks
    device = torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("localhost", port, is_master=False, timeout=datetime.timedelta(days=1))
    for key in (f"run-{number}" for number in itertools.count(run_number)):
        run = argparse.Namespace(**json.loads(store.get(key)))  # waits for the run
        if rank >= training.number_of_ranks(run.strategy, run.devices):
            continue
        try:
            training.check_row(run, device)
            answer = "done", train_once(run, rank, device, dist.PrefixStore(key, store))
        except RunError as error:
            answer = "left_out", str(error)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            answer = "failed", f"{type(error).__name__}: {reason}"
        if rank == 0 or answer[0] == "failed":
            store.compare_set(f"{key}/answer", "", json.dumps(answer))  # the first answer counts
        if answer[0] == "failed":
            sys.exit(1)


def train_once(
    run: argparse.Namespace, rank: int, device: torch.device, store: dist.Store
) -> dict[str, object]:
    """Train with a new process group, if the strategy needs one, and release everything."""
    torch.set_num_threads(run.threads)
    if run.strategy == "horovod":
        training.hvd.init()  # the process group below only adds up the losses
    if run.strategy not in ("single", "dp"):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=run.devices,
            timeout=datetime.timedelta(seconds=run.timeout),
            device_id=device if device.type == "cuda" else None,
        )
    found = training.train(run, rank, device)
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if run.compile:
        torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def horovod_environments(n_ranks: int) -> list[dict[str, str]]:
    """Return the environment variables of each rank on this machine, as horovodrun sets them."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    slots = get_host_assignments(parse_hosts(f"localhost:{n_ranks}"), n_ranks)
    server = RendezvousServer()
    port = server.start()  # in a thread of this process
    server.init(slots)
    shared = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    shared |= {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": str(port)}
    shared = {f"HOROVOD_{name}": value for name, value in shared.items()}
    return [{**shared, **{k: str(v) for k, v in create_slot_env_vars(s).items()}} for s in slots]

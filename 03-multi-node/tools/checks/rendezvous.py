"""Connect all ranks through a store, and end all of them if one of them fails or hangs.

The ranks exchange data through torch's TCPStore and not through collectives. A store needs no
process group, and it shows which ranks are missing.
"""

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from datetime import timedelta
from itertools import chain
from typing import NoReturn

import torch.distributed as dist

from common import cli
from common.launch import LAUNCHERS

ANSWER_WITHIN_S = 5.0  # after a failure, a rank that does not answer within this time is gone
NO_LIMIT = timedelta(days=1)  # for waits that the thread of the rank ends


def say(text: str) -> None:
    print(text, flush=True)  # os._exit() does not flush


class Rendezvous:
    """Connects all ranks of the check.

    hosts: the host name of each rank. nodes: the ranks of each node, by the node's name; rank 0's
    node is the first. first_ranks: the first rank of each node. `meet` fills these three.

    In each rank a thread ends the process if the current stage takes too long, or if another rank
    has failed, even if the rank itself hangs. The lowest rank that still answers prints the reason.
    """

    def __init__(self, address: str, port: int, timeout: float) -> None:
        """Connect to the store. If that fails, print an error message and exit."""
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.host = socket.gethostname()
        self.hosts: dict[int, str] = {}
        self.nodes: dict[str, list[int]] = {}
        self.first_ranks: list[int] = []
        # torchrun serves the store itself. Under srun and mpirun, rank 0 serves it.
        serve = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        first = connect(address, port, serve, timeout, self.rank)
        self.address = f"{address}:{first.port}"
        # A waiting call blocks its connection, so the rank, its thread and the process group each
        # need their own connection.
        more = [connect(address, first.port, False, timeout, self.rank) for _ in range(2)]
        prefix = f"preflight-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        stores = [dist.PrefixStore(prefix, store) for store in (first, *more)]
        self.store, self.thread_store, self.group_store = stores
        self.exchanges = 0
        self.is_waiting = self.is_finished = False
        self.begin("rendezvous", timeout)
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.rank == 0:
            say(text)

    def begin(self, stage: str, timeout: float) -> None:
        """Start a stage of the check, which may take this many seconds."""
        self.stage, self.timeout, self.deadline = stage, timeout, time.monotonic() + timeout
        # The last resort, because the thread cannot reach the store either if the network fails.
        faulthandler.dump_traceback_later(timeout + 4 * ANSWER_WITHIN_S, exit=True)

    def meet(self) -> None:
        """Wait for all ranks, and find out which node each rank is on."""
        # Two torchruns on one machine count as two nodes.
        locations = self.gather([self.host, os.environ.get("GROUP_RANK", "0")])
        self.hosts = {rank: host for rank, (host, _) in enumerate(locations)}
        share_a_host = len(set(map(tuple, locations))) > len(set(self.hosts.values()))
        for rank, (host, torchrun) in enumerate(locations):
            node = f"{host}/{torchrun}" if share_a_host else host
            self.nodes.setdefault(node, []).append(rank)
        self.first_ranks = [ranks[0] for ranks in self.nodes.values()]
        self.say(f"met    at {self.address}: {name_ranks(self.hosts)}")

    def gather(self, part: object) -> list:
        """Return the parts of all ranks, by rank. Blocks until all ranks have called this.

        part: anything that JSON can hold.
        """
        self.exchanges += 1
        keys = [f"exchange-{self.exchanges}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], json.dumps(part))
        self.is_waiting = True
        self.store.wait(keys, NO_LIMIT)
        self.is_waiting = False
        return [json.loads(value) for value in self.store.multi_get(keys)]

    def gather_nodes(self, part: object) -> dict:
        """Return the parts of the first rank of each node, by node. All ranks must call this."""
        parts = self.gather(part)
        return {node: parts[ranks[0]] for node, ranks in self.nodes.items()}

    def leave(self) -> None:
        """Wait for all ranks and end the thread. Rank 0 is last, because it may serve the store."""
        self.begin("the end", 4 * ANSWER_WITHIN_S)
        self.gather(None)
        self.is_finished = True
        self.thread.join()
        if self.rank:
            self.store.set(f"left/{self.rank}", "")
        elif self.world_size > 1:
            others = [f"left/{rank}" for rank in range(1, self.world_size)]
            self.store.wait(others, timedelta(seconds=ANSWER_WITHIN_S))
        faulthandler.cancel_dump_traceback_later()

    def exit(self, status: int) -> NoReturn:
        """Leave and exit. All ranks must call this with the same status."""
        self.leave()
        if self.rank:
            os._exit(quiet_status(status))
        if quiet_status(status) != status:
            time.sleep(2)  # otherwise srun kills ranks that are still exiting, and reports it
        os._exit(status)

    def fail(self, reason: str) -> None:
        """End all ranks because of an error on this one. Does not return."""
        # A later failure is a consequence of the first. If the store is gone, the thread notices.
        with contextlib.suppress(RuntimeError):
            if not self.store.check(["failed"]):
                self.store.set("failed", f"{self.stage}: {reason}")
        self.thread.join()

    def _watch(self) -> None:
        try:
            while not self.thread_store.check(["failed"]):
                if self.is_finished:
                    return
                if time.monotonic() > self.deadline:
                    reason = f"{self.stage}: not finished within {self.timeout:g} s"
                    self.thread_store.set("failed", reason)
                time.sleep(0.2)
            self._end()
        except RuntimeError:  # the store does not answer
            if not self.is_finished:
                reason = f"the store at {self.address} is gone, so rank 0 or its torchrun has ended"
                say(f"[rank {self.rank}] Failed: {self.stage}: {reason}.")
                os._exit(1)

    def _end(self) -> NoReturn:
        store = self.thread_store
        store.set(f"here/{self.rank}", json.dumps([self.host, self.stage, self.is_waiting]))
        keys = [f"here/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.2)
        answered = [rank for rank, key in enumerate(keys) if store.check([key])]
        here = {rank: json.loads(store.get(keys[rank])) for rank in answered}
        if self.rank == min(here):
            who = who_failed(here, self.hosts, self.world_size, self.address)
            say(f"Failed: {store.get('failed').decode()}; {who}.")
            store.set("said", "")
            time.sleep(1)  # the store may end with this process
            os._exit(1)
        while not store.check(["said"]) and time.monotonic() < deadline + 1:
            time.sleep(0.2)
        os._exit(quiet_status(1))


def quiet_status(status: int) -> int:
    """Return the exit status of a rank other than the one that prints the result.

    As soon as one rank fails, srun and mpirun kill all ranks and print how each one ended. So under
    srun and mpirun only the rank that prints the result fails, and it is the last to exit.
    """
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return 0 if not torchrun and not set(chain(*LAUNCHERS[1:])).isdisjoint(os.environ) else status


def connect(host: str, port: int, serve: bool, timeout: float, rank: int) -> dist.TCPStore:
    """Return a connection to the store, or print an error message and exit."""
    deadline = time.monotonic() + timeout
    try:
        # Wait until a process listens. TCPStore would wait too, but it prints tracebacks.
        while not serve:
            with contextlib.suppress(ConnectionRefusedError):
                left = max(1.0, deadline - time.monotonic())
                socket.create_connection((host, port), timeout=left).close()
                break
            if time.monotonic() > deadline:
                raise ConnectionRefusedError("no process listens there")
            time.sleep(0.2)
        limit = timedelta(seconds=timeout)
        return dist.TCPStore(host, port, None, serve, limit, wait_for_workers=False)
    except (OSError, dist.DistStoreError) as error:
        timed_out = isinstance(error, TimeoutError)
        why = "no answer, perhaps a firewall" if timed_out else str(error).splitlines()[0]
    here = f"[rank {rank}] Failed: {socket.gethostname()}"
    say(f"{here} cannot reach {host}:{port} within {timeout:g} s ({why}).")
    time.sleep(cli.HEAD_START_S + ANSWER_WITHIN_S)  # the ranks that are connected know more
    os._exit(1)


def who_failed(
    here: dict[int, tuple[str, str, bool]], hosts: dict[int, str], world_size: int, address: str
) -> str:
    """Return which ranks caused the failure of a stage.

    here: for each rank that still answers: host, stage, and whether it waits for the others.
    hosts: of all ranks; empty if they have not met yet. address: the store's host and port.
    """
    gone = [rank for rank in range(world_size) if rank not in here]
    if gone and not hosts:
        came = name_ranks({rank: host for rank, (host, _, _) in here.items()})
        nodes = os.environ.get("SLURM_STEP_NODELIST")
        expected = f" (the nodes are {nodes})" if nodes else ""
        return f"{came} came to {address}, {name_ranks(dict.fromkeys(gone))} did not{expected}"
    if gone:
        return f"no answer from {name_ranks({rank: hosts[rank] for rank in gone})}"
    if any(waits for _, _, waits in here.values()):
        late = {rank: host for rank, (host, _, waits) in here.items() if not waits}
        return f"the other ranks wait for {name_ranks(late)}"
    stages = {rank: f"{host} at {stage!r}" for rank, (host, stage, _) in here.items()}
    return f"all ranks answer, {name_ranks(stages)}"


def name_ranks(hosts: dict[int, str | None]) -> str:
    """Return "ranks 0, 1 on node1 and rank 2 on node2" for the host of each rank."""
    parts = []
    for host in dict.fromkeys(hosts.values()):
        ranks = [str(rank) for rank in hosts if hosts[rank] == host]
        name = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        parts.append(f"{name} on {host}" if host else name)
    return " and ".join(parts)

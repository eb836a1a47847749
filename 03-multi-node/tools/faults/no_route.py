"""A network interface that does not exist, and a rendezvous address that cannot be reached."""

import shutil
import socket
import subprocess

from faults.lab import Lab

# No machine has this address, because RFC 5737 reserves it for documentation.
UNREACHABLE = "198.51.100.1"


def show_fault(lab: Lab) -> None:
    launch = ("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-id", "lab")
    launch += ("--rdzv-endpoint", f"{UNREACHABLE}:29400")
    launch += ("--rdzv-conf", f"read_timeout={lab.timeout}")
    wrong_address = lab.train("no-route", launch=launch)
    wrong_interface = lab.train("no-route", GLOO_SOCKET_IFNAME="ib7")
    lab.show_end(wrong_interface, "gone or out of reach")
    lab.expect_failure(wrong_interface, "Unable to find address for: ib7")
    names = [name for _, name in socket.if_nameindex()]
    lab.show("the interfaces of this machine (ip -br address)", " ".join(names))
    lab.show_end(wrong_address, "RendezvousConnectionError: ")
    lab.expect_failure(wrong_address, "RendezvousConnectionError")
    lab.show(f"is there a route to {UNREACHABLE}, and does it answer?", try_to_reach(29400))


def show_fix(lab: Lab) -> None:
    launch = ("--nnodes", 1, "--nproc-per-node", 2, "--rdzv-backend", "c10d")
    launch += ("--rdzv-endpoint", "localhost:0", "--local-addr", "localhost")
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    lab.expect_success(lab.train("no-route", launch=launch, GLOO_SOCKET_IFNAME=loopback))


def try_to_reach(port: int) -> list[str]:
    """Return the route to the address, and the result of a connection attempt."""
    lines = []
    if shutil.which("ip"):
        command = ["ip", "route", "get", UNREACHABLE]
        done = subprocess.run(command, capture_output=True, text=True)
        lines.append(f"{' '.join(command)}: {(done.stdout or done.stderr).splitlines()[0]}")
    try:
        with socket.create_connection((UNREACHABLE, port), timeout=2):
            lines.append("the connection is open")
    except TimeoutError:
        lines.append("no answer within 2 s: no such machine, or a firewall that drops packets")
    except OSError as error:
        lines.append(f"the connection fails: {error.strerror}")
    return lines

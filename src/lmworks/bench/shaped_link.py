"""Two nodes on one machine: network namespaces joined by a link with a given bandwidth, delay and loss.

Processes of the two namespaces share no interface and no loopback, so their messages cross the link as between
machines, with the kernel's own TCP. Bandwidth is limited by `tc tbf` at both ends. Delay and loss are added by
`tc netem` where the kernel has it; otherwise the link is a pair of TUN devices, and a process carries its packets from
one to the other (`link_relay.py`). `ShapedLink.how` says which. Linux, root, and iproute2 are needed.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ..spec import LMWorksError, SpecError
from .link_relay import MTU, Relay

EXAMPLE = "e.g. 1gbit,2ms or 200mbit,5ms,0.1%"
PREFIX = "lmwlink"  # of namespaces, followed by the process that made them and a number
PORT = 29400  # of the rendezvous, inside the first node
CLONE_NEWNET = 0x40000000
LINKS = itertools.count()  # of this process
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 0.01}
BURST_S = 2e-4  # of the token bucket at full rate; at least one packet
QUEUE_S = 1.0  # what the token bucket holds before it drops: TCP's windows stay below it
MIN_WINDOW = 2**18


@dataclass(frozen=True)
class LinkShape:
    bits_per_s: float
    delay_s: float = 0.0  # one way
    loss: float = 0.0  # share of packets

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `200mbit,5ms,0.1%`: bandwidth, then delay and loss if any."""
        values: dict[str, float] = {}
        for word in text.lower().replace(" ", "").split(","):
            found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(kbit|mbit|gbit|us|ms|s|%)", word)
            if not found:
                raise SpecError(f"--link {text}: {word!r} is no bandwidth, delay or loss; {EXAMPLE}")
            name = {"t": "bits_per_s", "s": "delay_s", "%": "loss"}[found[2][-1]]
            if name in values:
                raise SpecError(f"--link {text}: {word!r} is said twice; {EXAMPLE}")
            values[name] = float(found[1]) * UNITS[found[2]]
        if not values.get("bits_per_s"):
            raise SpecError(f"--link {text}: a bandwidth is missing; {EXAMPLE}")
        if values.get("loss", 0.0) >= 0.5 or values.get("delay_s", 0.0) > 5:
            raise SpecError(f"--link {text}: TCP does not work over such a link: loss below 50%, delay up to 5s")
        return cls(**values)

    def __str__(self) -> str:
        unit = next(unit for unit in ("gbit", "mbit", "kbit") if self.bits_per_s >= UNITS[unit] or unit == "kbit")
        parts = [f"{self.bits_per_s / UNITS[unit]:g}{unit}"]
        parts += [f"{1e3 * self.delay_s:g}ms"] if self.delay_s else []
        parts += [f"{100 * self.loss:g}%"] if self.loss else []
        return ",".join(parts)


@dataclass(frozen=True)
class Node:
    namespace: str
    address: str
    interface: str

    def enter(self) -> None:
        """Move this process, and the threads that it starts from now on, into the node."""
        enter_namespace(self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def command(self, *words: str) -> list[str]:
        """A command line that runs there; set the environment of `variables` too."""
        return ["ip", "netns", "exec", self.namespace, *words]


@dataclass(frozen=True)
class ShapedLink:
    shape: LinkShape
    nodes: tuple[Node, Node]
    how: Mapping[str, str] = field(default_factory=dict)  # what limits bandwidth, adds delay and loss

    def enter(self, node: int) -> None:
        self.nodes[node].enter()

    def variables(self, node: int, local_rank: int = 0, per_node: int = 1) -> dict[str, str]:
        """Environment of a rank, as torchrun would set it."""
        rank = {"RANK": node * per_node + local_rank, "WORLD_SIZE": 2 * per_node, "GROUP_RANK": node}
        local = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": per_node, "MASTER_PORT": PORT}
        names = {"MASTER_ADDR": self.nodes[0].address, "GLOO_SOCKET_IFNAME": self.nodes[node].interface}
        return {name: str(value) for name, value in (rank | local | names).items()}


@contextmanager
def shaped_link(shape: LinkShape) -> Iterator[ShapedLink]:
    """Both namespaces, joined; gone when the block ends."""
    check_allowed()
    sweep()
    serial = next(LINKS)
    names = [f"{PREFIX}-{os.getpid()}-{serial}-{number}" for number in range(2)]
    device = f"lmw{os.getpid() % 1000000}"
    nodes = [Node(name, f"10.214.0.{number + 1}", f"{device}n{number}") for number, name in enumerate(names)]
    relay: Relay | None = None
    try:
        for node in nodes:
            ip("netns", "add", node.namespace)
        if (shape.delay_s or shape.loss) and not has_netem(nodes[0].namespace):
            relay = Relay([(node.namespace, node.interface) for node in nodes], shape.delay_s, shape.loss)
        else:
            ends = [("name", node.interface, "netns", node.namespace) for node in nodes]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for node in nodes:
            configure(node, shape, netem=relay is None)
        yield ShapedLink(shape, (nodes[0], nodes[1]), how(shape, relay is not None))
    finally:
        if relay:
            relay.close()
        for name in names:  # devices go with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def configure(node: Node, shape: LinkShape, netem: bool) -> None:
    inside = ("-n", node.namespace)
    window = tcp_window(shape)
    for key, value in tcp_settings(window).items():
        path = f"/proc/sys/net/ipv4/{key}"
        subprocess.run(node.command("sh", "-c", f"echo {value} > {path}"), capture_output=True)  # not in every kernel
    ip(*inside, "link", "set", "lo", "up")
    ip(*inside, "link", "set", node.interface, "mtu", str(MTU), "up")
    ip(*inside, "address", "add", f"{node.address}/24", "dev", node.interface)
    windows = ("initcwnd", str(window // MTU), "initrwnd", str(window // MTU))
    ip(*inside, "route", "replace", "10.214.0.0/24", "dev", node.interface, "src", node.address, *windows)
    burst = max(MTU + 64, int(shape.bits_per_s / 8 * BURST_S))
    queue = max(2 * burst, int(shape.bits_per_s / 8 * QUEUE_S))
    rate = ("rate", f"{int(shape.bits_per_s)}bit", "burst", str(burst), "limit", str(queue))
    run("tc", *inside, "qdisc", "add", "dev", node.interface, "root", "handle", "1:", "tbf", *rate)
    if netem and (shape.delay_s or shape.loss):
        added = ("delay", f"{round(1e6 * shape.delay_s)}us", "loss", f"{100 * shape.loss:g}%", "limit", "100000")
        run("tc", *inside, "qdisc", "add", "dev", node.interface, "parent", "1:1", "netem", *added)


def tcp_window(shape: LinkShape) -> int:
    """Bytes on their way: twice what fills the link. More would wait in its queue, with short messages behind them."""
    return max(MIN_WINDOW, int(2 * shape.bits_per_s / 8 * 2 * shape.delay_s))


def tcp_settings(window: int) -> dict[str, str]:
    """Long-lived connections of a tuned cluster: full windows from the first byte on, also after a pause.

    Slow start would add round trips, again after every pause of a training step. Buffers count twice what they hold.
    """
    buffers = f"4096 {2 * window} {2 * window}"
    return {
        "tcp_congestion_control": "cubic",
        "tcp_slow_start_after_idle": "0",
        "tcp_rmem": buffers,
        "tcp_wmem": buffers,
    }


def how(shape: LinkShape, relayed: bool) -> dict[str, str]:
    by = "a user-space relay between TUN devices (this kernel has no netem)" if relayed else "tc netem"
    found = {"bandwidth": f"tc tbf on a {'TUN device' if relayed else 'veth pair'}"}
    found |= {"delay": by} if shape.delay_s else {}
    return found | ({"loss": by} if shape.loss else {})


def has_netem(namespace: str) -> bool:
    words = ["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    if subprocess.run(words, capture_output=True).returncode:
        return False
    run("tc", "-n", namespace, "qdisc", "delete", "dev", "lo", "root")
    return True


def check_allowed() -> None:
    """One line where this machine cannot do it."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise LMWorksError(f"a shaped link needs `{program}` of iproute2: apt install iproute2")
    if os.geteuid() != 0:
        raise LMWorksError("a shaped link needs root: network namespaces and traffic control are the kernel's")


def sweep() -> None:
    """Remove namespaces of processes that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name, pid in re.findall(rf"^({PREFIX}-(\d+)-\d+-\d)\b", listed, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*words: str) -> None:
    run("ip", *words)


def run(*words: str) -> None:
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode:
        said = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[0]
        raise LMWorksError(f"this kernel or container refuses a shaped link: `{' '.join(words)}`: {said}")


def enter_namespace(name: str) -> None:
    handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
        if libc.setns(handle, CLONE_NEWNET):
            raise LMWorksError(f"cannot enter the network namespace {name}: {os.strerror(ctypes.get_errno())}")
    finally:
        with suppress(OSError):
            os.close(handle)


def run_on_both(link: ShapedLink, command: Sequence[str], per_node: int = 1) -> list[int]:
    """Exit codes of the command on every rank; the first one's standard output is kept."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, node in enumerate(link.nodes):
            for local_rank in range(per_node):
                environment = {**os.environ, **link.variables(number, local_rank, per_node)}
                output = subprocess.DEVNULL if processes else None
                processes.append(subprocess.Popen(node.command(*command), env=environment, stdout=output))
        return [process.wait() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
            process.wait()

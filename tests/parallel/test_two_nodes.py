"""Two machines, for real: two torchrun agents that meet over TCP, and a run that comes out as on one machine.

The machines are network namespaces joined by a virtual cable: each has its own interfaces, ports and loopback, so that
nothing is found by accident. Where the system does not allow namespaces, two loopback addresses stand in.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmworks.parallel.local_ranks import on_ranks
from lmworks.spec import RunSpec
from tiny import curve, make_spec, train, write_spec

SHARDED = ["parallel.dp=2", "parallel.strategy=fsdp2"]  # across machines


@dataclass(frozen=True)
class Node:
    enter: tuple[str, ...]  # what to put before a command that runs there
    address: str
    interface: str


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def sweep() -> None:
    """Remove what a test that was killed has left: namespaces that name a process which is gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name, pid in re.findall(r"^(lmw-(\d+)-\d)\b", listed, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextlib.contextmanager
def namespaces() -> Iterator[list[Node]]:
    """lmw-PID-0 and lmw-PID-1, with 10.213.0.1 and .2 at the ends of a cable."""
    names = [f"lmw-{os.getpid()}-{number}" for number in range(2)]
    ends = [f"lmw{os.getpid() % 100000}{side}" for side in "ab"]  # at most 15 characters
    nodes = []
    sweep()
    try:
        for name in names:
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            address = f"10.213.0.{number + 1}"
            inside = ("ip", "-n", name)
            sh(*inside, "link", "set", "lo", "up")
            sh(*inside, "address", "add", f"{address}/24", "dev", end)
            sh(*inside, "link", "set", end, "up")
            nodes.append(Node(("ip", "netns", "exec", name), address, end))
        yield nodes
    finally:
        for name in names:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def loopback() -> contextlib.AbstractContextManager[list[Node]]:
    return contextlib.nullcontext([Node((), f"127.0.0.{number}", "lo") for number in (2, 3)])


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(namespaces())
        except (OSError, subprocess.CalledProcessError):
            found = stack.enter_context(loopback())
        yield found


def agent(node: Node, first: Node, ranks: int, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """One machine's torchrun. Only one side may open the meeting point, and each must know its own address."""
    command = [
        *node.enter, sys.executable, "-m", "torch.distributed.run",
        "--nnodes", "2", "--nproc-per-node", str(ranks), "--max-restarts", "0",
        "--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"{first.address}:29511",
        "--rdzv-conf", f"is_host={int(node is first)}", "--local-addr", node.address,
        "-m", "lmworks.train", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": node.interface}
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def on_one_machine(rank: int, spec: RunSpec, run_dir: Path) -> None:
    train(spec, run_dir)


@pytest.mark.slow  # four and six processes that import PyTorch; torchrun on one machine: tests/train/test_ranks_cli.py
@pytest.mark.parametrize(
    ("ranks", "layout"),  # on each machine
    [
        (1, SHARDED),
        (2, ["parallel.tp=2", *SHARDED]),
    ],
)
def test_two_machines_train_what_one_trains(
    nodes: list[Node], dataset: Path, tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    spec = make_spec(dataset, *layout, "data.global_batch=8", "optim.steps=4", "cluster.device=cpu", "log.eval_every=2")
    arguments = [str(write_spec(spec, tmp_path / "spec.toml")), "--run-dir", str(tmp_path / "two")]
    logs = [tmp_path / f"node{number}.log" for number in range(2)]
    agents = [agent(node, nodes[0], ranks, arguments, log) for node, log in zip(nodes, logs, strict=True)]
    try:
        codes = [process.wait(timeout=240) for process in agents]
    finally:
        for process in agents:
            process.terminate()  # an agent that is ended so ends its ranks
            process.wait()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)

    on_ranks(2 * ranks, on_one_machine, spec, tmp_path / "one")
    two, one = curve(tmp_path / "two"), curve(tmp_path / "one")
    assert len(two) == 4
    assert two == one  # the same ranks exchange the same sums in the same order: not one bit differs

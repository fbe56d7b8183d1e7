"""Two machines, for real: two torchrun agents that meet over TCP, and a run that comes out as on one machine.

The machines are network namespaces joined by a link (`bench/shaped_link.py`): each has its own interfaces, ports and
loopback, so that nothing is found by accident. Where the system does not allow namespaces, two loopback addresses stand
in.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmworks.bench.shaped_link import LinkShape, shaped_link
from lmworks.parallel.local_ranks import on_ranks
from lmworks.spec import LMWorksError, RunSpec
from tiny import curve, make_spec, train, write_spec

SHARDED = ["parallel.dp=2", "parallel.strategy=fsdp2"]  # across machines


@dataclass(frozen=True)
class Machine:
    enter: tuple[str, ...]  # what to put before a command that runs there
    address: str
    interface: str


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    with contextlib.ExitStack() as stack:
        try:
            link = stack.enter_context(shaped_link(LinkShape.parse("10gbit")))
        except LMWorksError:
            yield [Machine((), f"127.0.0.{number}", "lo") for number in (2, 3)]
            return
        yield [Machine(tuple(node.command()), node.address, node.interface) for node in link.nodes]


def agent(machine: Machine, first: Machine, ranks: int, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """One machine's torchrun. Only one side may open the meeting point, and each must know its own address."""
    command = [
        *machine.enter, sys.executable, "-m", "torch.distributed.run",
        "--nnodes", "2", "--nproc-per-node", str(ranks), "--max-restarts", "0",
        "--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"{first.address}:29511",
        "--rdzv-conf", f"is_host={int(machine is first)}", "--local-addr", machine.address,
        "-m", "lmworks.train", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": machine.interface}
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
    machines: list[Machine], dataset: Path, tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    spec = make_spec(dataset, *layout, "data.global_batch=8", "optim.steps=4", "cluster.device=cpu", "log.eval_every=2")
    arguments = [str(write_spec(spec, tmp_path / "spec.toml")), "--run-dir", str(tmp_path / "two")]
    logs = [tmp_path / f"node{number}.log" for number in range(2)]
    agents = [agent(each, machines[0], ranks, arguments, log) for each, log in zip(machines, logs, strict=True)]
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

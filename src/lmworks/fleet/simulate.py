"""A discrete-event simulation of a fleet: arrivals, a router, servers with continuous batching, an autoscaler.

Events are arrivals, ends of steps (`server.Leap`), looks of the autoscaler and servers that become ready. All chance is
in the trace and in the router, both from a seed: the same seed gives the same result to the last bit.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..spec import SpecError
from .autoscale import INTERVAL_S, Observation, Policy, Static
from .routing import Router
from .server import Sequence, Server
from .server_model import ServerModel
from .trace import Trace


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was answered. Seconds."""

    at: float
    first: float
    last: float
    prompt: int
    answer: int
    cached: int
    preemptions: int

    @property
    def ttft(self) -> float:
        return self.first - self.at

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / (self.answer - 1) if self.answer > 1 else 0.0

    @property
    def e2e(self) -> float:
        return self.last - self.at


@dataclass(frozen=True)
class Run:
    served: tuple[Served, ...]  # in order of arrival
    rejected: int  # requests that no server has room for
    server_seconds: float  # that were paid for, start-up included
    most_servers: int
    policy: str


class Simulation:
    def __init__(
        self, trace: Trace, model: ServerModel, router: Router, policy: Policy, most: int = 64, first: int = 1
    ) -> None:
        """`first`: servers that are there when the trace begins, unless the policy is static; `most`: at any time."""
        if trace.block % model.block:
            raise SpecError(
                f"blocks of {model.block} tokens do not divide the {trace.block} of a prefix id of the trace"
            )
        self.trace, self.model, self.router, self.policy, self.most = trace, model, router, policy, most
        self.counter = itertools.count()
        self.events: list[tuple[float, int, str, Server | None]] = []
        start = policy.replicas if isinstance(policy, Static) else first
        self.servers = [Server(model, trace.block) for _ in range(start)]
        self.retired: list[Server] = []
        self.most_servers = start
        self.rejected = 0
        self.arrived = 0  # since the autoscaler last looked
        self.served: list[Sequence] = []

    def run(self) -> Run:
        arrivals = self.arrivals()
        coming = next(arrivals, None)
        if not isinstance(self.policy, Static):
            self.push(INTERVAL_S, "look")
        while coming or self.events:
            if coming and (not self.events or coming[0] <= self.events[0][0]):
                self.arrive(*coming)
                coming = next(arrivals, None)
                continue
            now, _, kind, server = heapq.heappop(self.events)
            if kind == "look":
                self.look(now)
                if coming or any(server.in_flight for server in self.servers):
                    self.push(now + INTERVAL_S, "look")
            elif server is not None and server.leap is not None and server.leap.end == now:  # else it was shortened
                server.wake()
                self.after(server, now)
        return self.result()

    def arrivals(self) -> Iterator[tuple[float, Sequence]]:
        for number, arrival in enumerate(self.trace.arrivals):
            yield arrival.at + self.model.request_s, Sequence(number, arrival)

    def push(self, at: float, kind: str, server: Server | None = None) -> None:
        heapq.heappush(self.events, (at, next(self.counter), kind, server))

    def arrive(self, now: float, sequence: Sequence) -> None:
        self.arrived += 1
        if sequence.arrival.prompt + sequence.arrival.answer > self.model.blocks * self.model.block:
            self.rejected += 1
            return
        ready = [server for server in self.servers if server.ready <= now and not server.draining]
        server = self.router(ready, sequence.arrival)
        before = server.leap
        server.add(sequence, now)
        if server.leap is not None and server.leap is not before:
            self.push(server.leap.end, "step", server)

    def after(self, server: Server, now: float) -> None:
        self.served += server.finished
        server.finished = []
        if server.leap is not None:
            self.push(server.leap.end, "step", server)
        elif server.draining:
            self.retire(server, now)

    def look(self, now: float) -> None:
        up = [server for server in self.servers if server.ready <= now and not server.draining]
        coming = [server for server in self.servers if server.ready > now]
        seen = Observation(
            now,
            len(up),
            len(coming),
            sum(len(server.waiting) for server in up),
            sum(len(server.running) for server in up),
            sum(server.cache.use for server in up) / max(1, len(up)),
            self.arrived,
        )
        self.arrived = 0
        wanted = min(self.most, max(1, self.policy.wanted(seen)))
        for _ in range(wanted - len(up) - len(coming)):
            self.servers.append(Server(self.model, self.trace.block, now, now + self.model.startup_s))
        for server in sorted(up, key=lambda one: one.in_flight)[: max(0, len(up) - max(1, wanted - len(coming)))]:
            server.draining = True
            if not server.in_flight:
                self.retire(server, now)
        self.most_servers = max(self.most_servers, len(self.servers))

    def retire(self, server: Server, now: float) -> None:
        server.stopped = now
        self.servers.remove(server)
        self.retired.append(server)

    def result(self) -> Run:
        served = sorted(self.served, key=lambda one: one.number)
        end = max((one.last for one in served), default=self.trace.seconds)
        end = max(end, self.trace.seconds)
        paid = sum(min(server.stopped, end) - server.started for server in (*self.servers, *self.retired))
        rows = tuple(
            Served(
                one.arrival.at, one.first, one.last, one.arrival.prompt, one.arrival.answer, one.cached, one.preemptions
            )
            for one in served
        )
        return Run(rows, self.rejected, paid, self.most_servers, self.policy.name)


def simulate(trace: Trace, model: ServerModel, router: Router, policy: Policy, most: int = 64, first: int = 1) -> Run:
    run = Simulation(trace, model, router, policy, most, first).run()
    assert not any(math.isnan(one.first) for one in run.served)
    return run

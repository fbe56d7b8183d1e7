"""Which server a request goes to: policies of routers, as functions of what a router can see."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ..spec import SpecError
from ..spec.errors import did_you_mean
from .server import Server
from .trace import Arrival

Router = Callable[[Sequence[Server], Arrival], Server]


def make_router(name: str, seed: int = 0) -> Router:
    if name not in ROUTERS:
        raise SpecError(f"--router {name!r} is unknown{did_you_mean(name, ROUTERS)}")
    return ROUTERS[name](random.Random(seed))


def round_robin(rng: random.Random) -> Router:
    count = -1

    def choose(servers: Sequence[Server], arrival: Arrival) -> Server:
        nonlocal count
        count += 1
        return servers[count % len(servers)]

    return choose


def least_loaded(rng: random.Random) -> Router:
    """The fewest requests in flight; of several, one by chance."""

    def choose(servers: Sequence[Server], arrival: Arrival) -> Server:
        return min(servers, key=lambda server: (server.in_flight, rng.random()))

    return choose


def power_of_two(rng: random.Random) -> Router:
    """The less loaded of two that are drawn: nearly as even, and a router needs to know only two of them."""

    def choose(servers: Sequence[Server], arrival: Arrival) -> Server:
        return min(rng.sample(list(servers), min(2, len(servers))), key=lambda server: server.in_flight)

    return choose


def prefix_aware(rng: random.Random) -> Router:
    """The least work: prompt tokens that are not cached there, and tokens of the sequences in flight.

    The sum lets a request go elsewhere when the server that has its prefix is busier by more than the prefix is worth.
    """

    def choose(servers: Sequence[Server], arrival: Arrival) -> Server:
        def work(server: Server) -> tuple[float, float]:
            load = sum(one.known - one.computed for one in server.waiting) + sum(one.known for one in server.running)
            return arrival.prompt - server.matched(arrival) + load, rng.random()

        return min(servers, key=work)

    return choose


ROUTERS: dict[str, Callable[[random.Random], Router]] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "prefix_aware": prefix_aware,
}

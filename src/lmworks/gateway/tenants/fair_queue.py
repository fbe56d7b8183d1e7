"""Which tenant's request goes next, where a pool has as many under way as it may have (`max_open` of a pool).

Start-time fair queueing by tokens: each tenant has a counter of the tokens that were served to it, divided by its
weight, and the one with the lowest goes first. A tenant that comes back after a while starts at the counter of who was
served last, so that nobody saves up a share. A request counts with what it is expected to take when it starts, and is
corrected when it has ended (Goyal et al., SIGCOMM 1996; by tokens of language models: Sheng et al., OSDI 2024).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...serve.limits import APIError

RETRY_S = 1.0
LEARNING = 0.1  # how much one answer changes what is expected of its tenant's next
FIRST_OUTPUT = 128  # generated tokens that are expected of a tenant's first request


@dataclass(eq=False)
class Flow:
    """One tenant among those that wait for the same pools."""

    served: float = 0.0  # tokens by weight, with those of requests under way as expected
    output: float = FIRST_OUTPUT
    open: int = 0
    waiting: deque[Ticket] = field(default_factory=deque)


@dataclass(eq=False)
class Ticket:
    """A request that waits for a place, or has one."""

    flow: Flow
    weight: float
    prompt_tokens: int
    pools: tuple[str, ...]
    place: asyncio.Future[str]  # the pool that it may ask
    expected: float = 0.0  # tokens that it was counted with
    pool: str | None = None


@dataclass(eq=False)
class Lane:
    """Requests that may go to the same pools."""

    clock: float = 0.0  # counter of the tenant that was served last
    flows: dict[str, Flow] = field(default_factory=dict)

    def next_flow(self) -> Flow | None:
        """The tenant whose turn it is; those that have left are forgotten."""
        best: Flow | None = None
        for flow in self.flows.values():
            while flow.waiting and flow.waiting[0].place.done():  # its client has left
                flow.waiting.popleft()
            if flow.waiting and (best is None or max(flow.served, self.clock) < max(best.served, self.clock)):
                best = flow
        return best

    def forget_idle(self) -> None:
        """Tenants whose counter says no more than the clock."""
        for name in [n for n, one in self.flows.items() if not (one.open or one.waiting) and one.served <= self.clock]:
            del self.flows[name]


class FairQueue:
    """`room` says how many requests a pool may have under way; None: any number."""

    def __init__(self, room: Callable[[str], int | None]) -> None:
        self.room = room
        self.open: Counter[str] = Counter()
        self.lanes: dict[tuple[str, ...], Lane] = {}

    async def enter(
        self, tenant: str, weight: float, prompt_tokens: int, pools: Sequence[str], limit: int, seconds: float
    ) -> Ticket:
        """Waits for a place; raises APIError where that takes too long, or too many of the tenant's wait already."""
        names = tuple(sorted(pools))
        lane = self.lanes.setdefault(names, Lane())
        flow = lane.flows.setdefault(tenant, Flow(lane.clock))
        place: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        ticket = Ticket(flow, weight, prompt_tokens, names, place)
        if len(flow.waiting) >= limit:
            flow.waiting = deque(one for one in flow.waiting if not one.place.done())  # whose clients have left
        if len(flow.waiting) >= limit:
            raise APIError(429, "queue_full", f"{limit} requests of {tenant!r} wait already", None, RETRY_S)
        flow.waiting.append(ticket)
        self.dispatch()
        try:
            if not place.done():
                async with asyncio.timeout(seconds or None):
                    await place
        except TimeoutError:
            if ticket.pool is None:
                message = f"no server had a place for this request of {tenant!r} within {seconds:g} s"
                raise APIError(429, "queue_timeout", message, None, RETRY_S) from None
        except asyncio.CancelledError:
            if ticket.pool is not None:
                self.leave(ticket, 0, 0)
            raise
        return ticket

    def dispatch(self) -> None:
        """Gives away the places that are free."""
        while True:
            turns = [(lane, flow, pool) for lane, flow, pool in map(self.turn, self.lanes.items()) if pool is not None]
            if not turns:
                return
            lane, flow, pool = min(turns, key=lambda one: one[1].served - one[0].clock)
            ticket = flow.waiting.popleft()
            lane.clock = max(lane.clock, flow.served)
            ticket.expected = ticket.prompt_tokens + flow.output
            flow.served = lane.clock + ticket.expected / ticket.weight
            flow.open += 1
            ticket.pool = pool
            self.open[pool] += 1
            ticket.place.set_result(pool)

    def turn(self, entry: tuple[tuple[str, ...], Lane]) -> tuple[Lane, Flow, str | None]:
        """Whose turn it is in a lane, and at which pool; None: at none."""
        pools, lane = entry
        flow = lane.next_flow()
        pool = None if flow is None else self.free_pool(pools)
        return lane, flow or Flow(), pool

    def free_pool(self, pools: Sequence[str]) -> str | None:
        """The one with the most room."""
        rooms = {name: room - self.open[name] for name in pools if (room := self.room(name)) is not None}
        best = max(rooms, key=rooms.__getitem__, default=None)
        return best if best is not None and rooms[best] > 0 else None

    def leave(self, ticket: Ticket, prompt_tokens: int, completion_tokens: int) -> None:
        """A request has ended, and took so many tokens."""
        assert ticket.pool is not None
        flow, lane = ticket.flow, self.lanes[ticket.pools]
        self.open[ticket.pool] -= 1
        flow.open -= 1
        flow.served += (prompt_tokens + completion_tokens - ticket.expected) / ticket.weight
        if completion_tokens:
            flow.output += LEARNING * (completion_tokens - flow.output)
        self.dispatch()
        lane.forget_idle()
        if not lane.flows:
            del self.lanes[ticket.pools]

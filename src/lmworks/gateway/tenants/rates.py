"""Rates: how much of each limit is used now, and how long a request that does not fit has to wait.

A bucket holds what was used, and empties by its limit in a minute: a burst may use a whole minute's amount at once.
What a request may need is taken before it starts, and corrected when it has ended. One that needs more than the limit
starts when the bucket is empty, and those after it wait for longer.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .limits import RATES, Limits

MINUTE_S = 60.0
CONCURRENT = "concurrent_requests"
RETRY_S = 1.0  # where nobody knows when a request under way ends


@dataclass(slots=True)
class Bucket:
    used: float = 0.0
    at: float = 0.0

    def level(self, now: float, limit: float) -> float:
        return max(0.0, self.used - (now - self.at) * limit / MINUTE_S)

    def wait(self, now: float, amount: float, limit: float) -> float:
        """Seconds until `amount` fits; 0: now."""
        excess = self.level(now, limit) + min(amount, limit) - limit
        return excess * MINUTE_S / limit if excess > 1e-6 else 0.0

    def add(self, now: float, amount: float, limit: float) -> None:
        """A negative amount gives back what was not used."""
        self.used, self.at = max(0.0, self.level(now, limit) + amount), now


class Line(NamedTuple):
    """One limit that a request has to keep."""

    name: str  # of the limit
    subject: str  # whose: "tenant:acme"
    limit: int
    amount: int
    tenant: str = ""


class State(NamedTuple):
    """One limit after a request was taken, or when it was refused."""

    line: Line
    used: float

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.line.limit - self.used))

    @property
    def reset(self) -> float:
        """Seconds until nothing of it is used."""
        return 0.0 if self.line.name == CONCURRENT else self.used * MINUTE_S / self.line.limit


class Verdict(NamedTuple):
    states: list[State]
    refused: Line | None = None
    wait: float = 0.0  # seconds until it would fit


class Rates(Protocol):
    async def take(self, id: str, lines: list[Line]) -> Verdict:
        """All lines or none."""

    def settle(self, id: str, lines: list[Line], used: dict[str, int]) -> None:
        """After a request: what it used of each rate. Nobody waits for it."""

    async def check(self) -> str | None:
        """Asks the store of the rates; why it does not answer."""

    async def close(self) -> None: ...


class LocalRates:
    """Of one gateway, in memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.buckets: defaultdict[tuple[str, str], Bucket] = defaultdict(Bucket)
        self.open: defaultdict[str, int] = defaultdict(int)

    async def take(self, id: str, lines: list[Line]) -> Verdict:
        now = self.clock()
        longest, refused = 0.0, None
        for line in lines:
            if line.name == CONCURRENT:
                wait = RETRY_S if self.open[line.subject] >= line.limit else 0.0
            else:
                wait = self.buckets[line.subject, line.name].wait(now, line.amount, line.limit)
            if wait > longest:
                longest, refused = wait, line
        if refused is None:
            for line in lines:
                if line.name == CONCURRENT:
                    self.open[line.subject] += 1
                else:
                    self.buckets[line.subject, line.name].add(now, line.amount, line.limit)
        return Verdict([State(line, self.used(line, now)) for line in lines], refused, longest)

    async def check(self) -> str | None:
        return None

    async def close(self) -> None: ...

    def used(self, line: Line, now: float) -> float:
        if line.name == CONCURRENT:
            return self.open[line.subject]
        return self.buckets[line.subject, line.name].level(now, line.limit)

    def settle(self, id: str, lines: list[Line], used: dict[str, int]) -> None:
        now = self.clock()
        for line in lines:
            if line.name == CONCURRENT:
                self.open[line.subject] -= 1
                if not self.open[line.subject]:
                    del self.open[line.subject]
            elif more := used.get(line.name, 0) - line.amount:
                self.buckets[line.subject, line.name].add(now, more, line.limit)


def lines_of(subject: str, limits: Limits, amounts: dict[str, int], tenant: str) -> list[Line]:
    found = [Line(name, subject, limit, amounts[name], tenant) for name in RATES if (limit := getattr(limits, name))]
    if limits.concurrent_requests:
        found.append(Line(CONCURRENT, subject, limits.concurrent_requests, 1, tenant))
    return found


def amounts_of(requests: int, prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """By the limits of RATES."""
    return {
        "requests_per_minute": requests,
        "tokens_per_minute": prompt_tokens + completion_tokens,
        "input_tokens_per_minute": prompt_tokens,
        "output_tokens_per_minute": completion_tokens,
    }


HEADERS = {
    "requests_per_minute": b"requests",
    "tokens_per_minute": b"tokens",
    "input_tokens_per_minute": b"input-tokens",
    "output_tokens_per_minute": b"output-tokens",
}


def rate_headers(states: list[State]) -> list[tuple[bytes, bytes]]:
    """OpenAI's headers: of tenant and key the one with less left."""
    tightest: dict[str, State] = {}
    for state in states:
        known = tightest.get(state.line.name)
        if state.line.name in HEADERS and (known is None or state.remaining < known.remaining):
            tightest[state.line.name] = state
    found = []
    for name, state in tightest.items():
        what = HEADERS[name]
        found += [
            (b"x-ratelimit-limit-" + what, b"%d" % state.line.limit),
            (b"x-ratelimit-remaining-" + what, b"%d" % state.remaining),
            (b"x-ratelimit-reset-" + what, reset_text(state.reset)),
        ]
    return found


def reset_text(seconds: float) -> bytes:
    """As OpenAI writes durations: 6m0s, 1.5s, 120ms."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    if seconds < 60:
        return b"%gs" % round(seconds, 3)
    return b"%dm%ds" % divmod(math.ceil(seconds), 60)

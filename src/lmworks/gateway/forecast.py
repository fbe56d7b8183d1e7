"""How soon a server would answer, by what it took for others: time to the first token, and for each one after it.

The first token: a line fitted over the bytes of prompts that are ahead of it on the server, its own among them, and
where the server has a queue the requests that wait in it over the rate at which requests end. A token after it: a line
over the sequences that run. Both forget: a sample weighs half as much after some 35 others.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

FORGET = 0.98  # weight of the samples so far, with each new one
MIN_SAMPLES = 5  # below which nothing is forecast
STALE_S = 10.0  # without a sample: an idle server gets a request to see
KV_FULL = 0.95  # beyond which requests wait


class Forecast(NamedTuple):
    """Seconds; None: not known yet."""

    ttft: float | None
    tpot: float | None


@dataclass
class Line:
    """y = a + b·x by least squares with forgetting; b ≥ 0."""

    weight: float = 0.0
    count: int = 0
    x: float = 0.0  # weighted sums
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.count += 1
        for name, value in (("weight", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, FORGET * getattr(self, name) + value)

    def at(self, x: float) -> float:
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x**2
        slope = max(0.0, (self.xy / self.weight - mean_x * mean_y) / spread) if spread > 1e-9 * mean_x**2 else 0.0
        return max(0.0, mean_y + slope * (x - mean_x))


@dataclass(eq=False)
class Work:
    """One request at a server."""

    size: int  # bytes
    ahead: int  # bytes of prompts that were ahead of its end
    wait: float  # in the queue, as was forecast
    running: float
    sent: float = field(default_factory=time.monotonic)
    first_token: float | None = None


@dataclass
class ServiceRates:
    """Of one server."""

    prefill: Line = field(default_factory=Line)
    decode: Line = field(default_factory=Line)
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    pending: int = 0  # bytes of prompts without a first token
    seen: float = 0.0  # when the last sample was taken

    def begin(self, size: int, waiting: float, running: float) -> Work:
        self.pending += size
        return Work(size, self.pending, self.wait(waiting), running)

    def answered(self, work: Work) -> None:
        """Its first token has come."""
        work.first_token = self.seen = time.monotonic()
        self.pending -= work.size
        self.prefill.add(work.ahead, max(0.0, work.first_token - work.sent - work.wait))

    def end(self, work: Work, tokens: int) -> None:
        """`tokens`: 0 where it failed."""
        now = time.monotonic()
        if work.first_token is None:
            self.pending -= work.size
        elif tokens > 1:
            self.decode.add(work.running, (now - work.first_token) / (tokens - 1))
        if tokens:
            self.ends.append(now)

    def wait(self, waiting: float) -> float:
        if waiting <= 0 or len(self.ends) < MIN_SAMPLES or self.ends[-1] == self.ends[0]:
            return 0.0
        return waiting * (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)

    def forecast(self, size: int, waiting: float, running: float, idle: bool) -> Forecast:
        if idle and time.monotonic() - self.seen > STALE_S:
            return Forecast(None, None)
        ttft = self.prefill.at(self.pending + size) + self.wait(waiting) if self.prefill.count >= MIN_SAMPLES else None
        return Forecast(ttft, self.decode.at(running) if self.decode.count >= MIN_SAMPLES else None)

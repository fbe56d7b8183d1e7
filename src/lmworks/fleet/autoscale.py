"""How many servers a fleet has: policies as code, asked every `INTERVAL_S`.

`Reactive` follows what servers report, as a HorizontalPodAutoscaler or KEDA do: replicas × metric / target, the larger
of two metrics. `Predictive` forecasts the rate of arrivals for the time when a server started now would be ready, and
divides it by what a server takes under the SLO. Both scale up at once, and down only to the most that was wanted in the
last minutes, so that a lull does not stop what the next burst needs.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

INTERVAL_S = 15.0  # as HorizontalPodAutoscalers and KEDA look
STABLE_S = 300.0  # before scaling down, as theirs


@dataclass(frozen=True)
class Observation:
    now: float  # seconds
    replicas: int  # that take requests
    coming: int  # that are being started
    waiting: int  # requests in queues
    running: int
    kv_use: float  # mean of the servers, 0 to 1
    arrivals: int  # since the last observation


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def wanted(self, seen: Observation) -> int: ...


@dataclass(frozen=True)
class Static:
    replicas: int

    @property
    def name(self) -> str:
        return f"static {self.replicas}"

    def wanted(self, seen: Observation) -> int:
        return self.replicas


@dataclass
class Stabilised:
    """The most that was wanted within the last `STABLE_S`."""

    wants: deque[tuple[float, int]] = field(default_factory=deque)

    def __call__(self, now: float, wanted: int) -> int:
        self.wants.append((now, wanted))
        while self.wants[0][0] < now - STABLE_S:
            self.wants.popleft()
        return max(count for _, count in self.wants)


@dataclass
class Reactive:
    """Targets per server: requests in its queue, and use of its KV cache."""

    queue: float = 4.0
    kv_use: float = 0.7
    stabilised: Stabilised = field(default_factory=Stabilised)

    @property
    def name(self) -> str:
        return f"reactive queue={self.queue:g} kv={self.kv_use:g}"

    def wanted(self, seen: Observation) -> int:
        by_queue = seen.waiting / self.queue
        by_kv = seen.replicas * seen.kv_use / self.kv_use
        return self.stabilised(seen.now, math.ceil(max(by_queue, by_kv)))


@dataclass
class Predictive:
    """Holt's linear trend of the rate, looked at `ahead` seconds; a server takes `capacity` requests a second.

    With a `period` that has been seen once, the rate one period before the time in question is a second forecast; the
    larger counts.
    """

    capacity: float
    ahead: float
    headroom: float = 1.2
    period: float = 0.0
    level_gain: float = 0.3
    trend_gain: float = 0.05
    level: float = math.nan
    trend: float = 0.0  # requests a second, per interval
    history: list[float] = field(default_factory=list)  # rates, one an interval
    stabilised: Stabilised = field(default_factory=Stabilised)

    @property
    def name(self) -> str:
        return f"predictive headroom={self.headroom:g}"

    def wanted(self, seen: Observation) -> int:
        self.learn(seen.arrivals / INTERVAL_S)
        return self.stabilised(seen.now, math.ceil(self.headroom * self.forecast() / self.capacity))

    def learn(self, rate: float) -> None:
        self.history.append(rate)
        if math.isnan(self.level):
            self.level = rate
            return
        before = self.level
        self.level += self.trend + self.level_gain * (rate - self.level - self.trend)
        self.trend += self.trend_gain * (self.level - before - self.trend)

    def forecast(self) -> float:
        steps = self.ahead / INTERVAL_S
        trend = max(0.0, self.level + self.trend * steps)
        place = len(self.history) + round(steps) - round(self.period / INTERVAL_S)
        if not self.period or place < 0:
            return trend
        near = self.history[max(0, place - 2) : place + 3]  # one interval alone is mostly chance
        return max(trend, sum(near) / len(near)) if near else trend

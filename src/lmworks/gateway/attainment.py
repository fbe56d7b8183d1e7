"""Which requests met their service level objective, and how fast its error budget burns.

A request counts for the most particular objective of its model and tier. What is the client's own doing does not
count: errors in its request, its own limits, and that it left.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .exchange import Exchange
from .slo import ServiceLevel, find_level

SLOT_S = 10.0
WINDOWS = {"5m": 300.0, "1h": 3600.0, "6h": 21600.0}
SHED = {"slo_unattainable", "queue_timeout"}  # codes of 429 that are no limit of the tenant's


def missed(slo: ServiceLevel, exchange: Exchange) -> str | None:
    """Why a request missed it; "" where it met it, None where it does not count."""
    if exchange.failed == "client_left":
        return None
    if exchange.status == 429 and exchange.failed not in SHED and exchange.server is None:
        return None  # the tenant's own limits
    if exchange.failed is not None and (exchange.status in (0, 200, 429) or exchange.status >= 500):
        return "error"
    if exchange.status >= 500 or exchange.status == 429:
        return "error"
    if exchange.status >= 400:
        return None
    if slo.ttft and exchange.body.stream and (exchange.first_token or 0.0) > slo.ttft:
        return "ttft"
    per_token = exchange.seconds_per_token
    if slo.tpot and per_token is not None and per_token > slo.tpot:
        return "tpot"
    return "e2e" if slo.e2e and exchange.seconds > slo.e2e else ""


@dataclass
class Window:
    """Requests of the last hours, in slots of ten seconds."""

    clock: Callable[[], float] = time.monotonic
    slots: deque[tuple[float, int, int]] = field(default_factory=deque)  # begin, requests, of these missed

    def add(self, miss: bool) -> None:
        now = self.clock()
        if self.slots and now - self.slots[-1][0] < SLOT_S:
            began, requests, misses = self.slots.pop()
            self.slots.append((began, requests + 1, misses + miss))
            return
        self.slots.append((now, 1, int(miss)))
        while now - self.slots[0][0] > max(WINDOWS.values()):
            self.slots.popleft()

    def share_missed(self, seconds: float) -> float | None:
        """None: there were no requests."""
        now, requests, misses = self.clock(), 0, 0
        for began, more, of_these in reversed(self.slots):
            if now - began > seconds:
                break
            requests, misses = requests + more, misses + of_these
        return misses / requests if requests else None


@dataclass
class SLOs:
    """What has been seen of each objective of the file."""

    objectives: Callable[[], list[ServiceLevel]]
    windows: dict[str, Window] = field(default_factory=dict)

    def judge(self, exchange: Exchange) -> tuple[ServiceLevel, str] | None:
        """The objective that a finished request counts for, and why it missed it, "" where it did not."""
        slo = find_level(self.objectives(), exchange.rule.name, exchange.tenant.tier)
        reason = None if slo is None else missed(slo, exchange)
        if slo is None or reason is None:
            return None
        self.windows.setdefault(slo.label, Window()).add(bool(reason))
        return slo, reason

    def attainment(self, slo: ServiceLevel) -> dict[str, float]:
        """Share of requests that met it by window; windows without requests are left out."""
        window = self.windows.get(slo.label)
        shares = {name: window.share_missed(seconds) for name, seconds in WINDOWS.items()} if window else {}
        return {name: 1 - share for name, share in shares.items() if share is not None}

"""What the outcomes of requests say of a server, between its probes: a circuit breaker, and a budget of retries.

A server that fails several times in a row is left alone for a while, each time for longer; then one request at a time
tries it, the next one as soon as the stream of the one before has begun, and the first that ends well brings it back.
Retries are a share of all requests, so that servers that are overloaded do not get every request several times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RETRY_RESERVE = 10.0  # retries that are there at the beginning, and the most that are saved up


@dataclass
class CircuitBreaker:
    failures: int = 0  # in a row
    opened: int = 0  # times in a row that it was left alone
    until: float = 0.0  # when it may be tried again
    trying: bool = False  # one request is trying it, and has no answer yet

    def allows(self, now: float) -> bool:
        return not self.opened or (now >= self.until and not self.trying)

    def begin(self) -> None:
        self.trying = self.opened > 0

    def answered(self) -> None:
        """A stream has begun. It may be cut off, so failures still count."""
        self.trying = False

    def succeeded(self) -> None:
        self.failures = self.opened = 0
        self.trying = False

    def abandoned(self) -> None:
        """Its client has left: that says nothing of the server."""
        self.trying = False

    def failed(self, now: float, after: int, seconds: float, longest: float) -> None:
        self.failures += 1
        if self.failures >= after or self.trying:
            self.until = now + min(longest, seconds * 2**self.opened)
            self.opened += 1
        self.trying = False


@dataclass
class RetryBudget:
    """`share` of a retry is earned by each request."""

    share: Callable[[], float]
    left: float = RETRY_RESERVE

    def earn(self) -> None:
        self.left = min(RETRY_RESERVE, self.left + self.share())

    def spend(self) -> bool:
        if self.left < 1:
            return False
        self.left -= 1
        return True

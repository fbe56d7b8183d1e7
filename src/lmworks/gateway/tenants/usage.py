"""What a request used: a record of it, and sums of records."""

from __future__ import annotations

from typing import Any

import msgspec

from .limits import periods_of

OUTCOMES = ("finished", "client_left", "failed", "interrupted")  # interrupted: the gateway was killed


class Spending(msgspec.Struct, frozen=True):
    requests: int = 0
    tokens: int = 0
    nanodollars: int = 0

    def plus(self, more: Spending) -> Spending:
        return Spending(self.requests + more.requests, self.tokens + more.tokens, self.nanodollars + more.nanodollars)

    def minus(self, less: Spending) -> Spending:
        return Spending(self.requests - less.requests, self.tokens - less.tokens, self.nanodollars - less.nanodollars)


class UsageRecord(msgspec.Struct):
    """One request that a server was asked for. Its tokens count in the periods in which it began."""

    id: str
    began: float
    ended: float
    tenant: str
    key: str  # family of the key
    model: str  # as the client named it
    pool: str
    path: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    nanodollars: int
    outcome: str
    estimated: bool  # the server did not say how many tokens there were

    def values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__struct_fields__)

    def spending(self) -> Spending:
        return Spending(1, self.prompt_tokens + self.completion_tokens, self.nanodollars)

    def places(self) -> list[tuple[str, str]]:
        """Whose budgets it counts in, and when."""
        return [
            (subject, period)
            for subject in (f"tenant:{self.tenant}", f"key:{self.key}")
            for period in periods_of(self.began)
        ]


def money(prompt_tokens: int, completion_tokens: int, price_in: float, price_out: float) -> int:
    """In billionths of a dollar; prices are dollars for a million tokens."""
    return prompt_tokens * round(price_in * 1000) + completion_tokens * round(price_out * 1000)

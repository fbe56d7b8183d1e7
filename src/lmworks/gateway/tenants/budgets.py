"""Budgets: what each tenant and key has spent in a day, in a month and in all.

What is in the store is one part, which other gateways add to; what this gateway has reserved, or used and not yet
written there, is the other. A request reserves the most that it may use, so a budget is not exceeded by requests that
run side by side in one gateway; what another gateway admits is seen once it is in the store.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from ...serve.limits import APIError
from .limits import NANO, PERIODS, Limits, period_ends, periods_of
from .usage import Spending

Place = tuple[str, str]  # subject and period


class Budgets:
    def __init__(self) -> None:
        self.stored: dict[Place, Spending] = {}
        self.pending: defaultdict[Place, Spending] = defaultdict(Spending)

    def spent(self, place: Place) -> Spending:
        return self.stored.get(place, Spending()).plus(self.pending[place] if place in self.pending else Spending())

    def check(self, subject: str, limits: Limits, more: Spending, now: float) -> None:
        """Raises APIError where this much more is not in the budget."""
        for name, period in zip(PERIODS, periods_of(now), strict=True):
            suffix = "total" if name == "total" else f"per_{name}"
            tokens, dollars = getattr(limits, f"tokens_{suffix}"), getattr(limits, f"dollars_{suffix}")
            if not tokens and not dollars:
                continue
            spent = self.spent((subject, period))
            whose = subject.partition(":")[0]
            if tokens and spent.tokens + more.tokens > tokens:
                message = f"this {whose} has used or reserved {spent.tokens} of its tokens_{suffix} = {tokens}"
                raise over_budget(f"{message}; this request may take {more.tokens}", name, now)
            if dollars and spent.nanodollars + more.nanodollars > round(dollars * NANO):
                used = f"{spent.nanodollars / NANO:.6f}"
                raise over_budget(
                    f"this {whose} has used or reserved {used} of its dollars_{suffix} = {dollars:g}", name, now
                )

    def reserve(self, places: Iterable[Place], more: Spending) -> None:
        for place in places:
            self.pending[place] = self.pending[place].plus(more)

    def release(self, places: Iterable[Place], less: Spending) -> None:
        for place in places:
            left = self.pending[place].minus(less)
            if left == Spending():
                del self.pending[place]
            else:
                self.pending[place] = left

    def written(self, places: Iterable[Place], amount: Spending) -> None:
        """It is in the store now."""
        for place in places:
            self.stored[place] = self.stored.get(place, Spending()).plus(amount)
            self.release((place,), amount)

    def refresh(self, stored: Mapping[Place, Spending]) -> None:
        self.stored = dict(stored)


def over_budget(message: str, period: str, now: float) -> APIError:
    return APIError(429, "insufficient_quota", message, None, period_ends(now).get(period))

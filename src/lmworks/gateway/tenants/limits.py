"""Limits of a tenant, of a tier, or of one key: rates, answers at once, and budgets. 0 is no limit."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self

from ...spec.schema import Section, opt

DAY_S = 86400
NANO = 1_000_000_000  # money is counted in billionths of a dollar: whole numbers, whose sums are exact
PERIODS = {"day": "%Y-%m-%d", "month": "%Y-%m", "total": "total"}  # in UTC


@dataclass(frozen=True)
class Limits(Section):
    section: ClassVar[str] = "limits"

    requests_per_minute: int = opt(0, "requests in a minute", ge=0)
    tokens_per_minute: int = opt(0, "tokens in a minute, prompts and answers together", ge=0)
    input_tokens_per_minute: int = opt(0, "prompt tokens in a minute", ge=0)
    output_tokens_per_minute: int = opt(0, "generated tokens in a minute", ge=0)
    concurrent_requests: int = opt(0, "requests and streams under way at once", ge=0)
    tokens_per_day: int = opt(0, "budget: tokens in a day (UTC), prompts and answers together", ge=0)
    tokens_per_month: int = opt(0, "budget: tokens in a month", ge=0)
    tokens_total: int = opt(0, "budget: tokens in all", ge=0)
    dollars_per_day: float = opt(0.0, "budget: dollars in a day, at the prices of the pools", ge=0)
    dollars_per_month: float = opt(0.0, "budget: dollars in a month", ge=0)
    dollars_total: float = opt(0.0, "budget: dollars in all", ge=0)

    def over(self, below: Limits) -> Limits:
        """These, and those of `below` where there are none."""
        names = (field.name for field in dataclasses.fields(Limits))
        return Limits(**{name: getattr(self, name) or getattr(below, name) for name in names})

    def given_values(self) -> dict[str, Any]:
        """Those that are set."""
        return {name: value for name, value in self.to_dict().items() if value}

    @classmethod
    def of(cls, section: Section) -> Self:
        """The limits among the keys of a larger section."""
        return cls(**{field.name: getattr(section, field.name) for field in dataclasses.fields(Limits)})


RATES = ("requests_per_minute", "tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute")


def periods_of(at: float) -> tuple[str, ...]:
    """The day, the month, and all of time: as rows of `spent` are named."""
    return periods_of_day(int(at // DAY_S))


@lru_cache(64)
def periods_of_day(day: int) -> tuple[str, ...]:
    moment = time.gmtime(day * DAY_S)
    return tuple(time.strftime(form, moment) for form in PERIODS.values())


def period_ends(at: float) -> dict[str, float]:
    """Seconds until the day and the month are over."""
    now = time.gmtime(at)
    midnight = at - (now.tm_hour * 3600 + now.tm_min * 60 + now.tm_sec)
    days = 0
    while time.gmtime(midnight + days * DAY_S).tm_mon == now.tm_mon:
        days += 1
    return {"day": midnight + DAY_S - at, "month": midnight + days * DAY_S - at}

"""Service-level objectives, as every command takes them: `ttft=0.5,tpot=0.05,e2e=10`, in seconds."""

from __future__ import annotations

import math

from .errors import SpecError

OBJECTIVES = ("ttft", "tpot", "e2e")  # time to first token, time per output token after it, the whole request
FORMER = {"itl": "tpot"}  # what `bench serve` called it
EXAMPLE = "write seconds, e.g. ttft=0.5,tpot=0.05,e2e=10"


def parse_slo(text: str) -> dict[str, float]:
    """Seconds by objective; any may be left out."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        typed, _, value = (word.strip() for word in part.partition("="))
        name = FORMER.get(typed, typed)
        if name not in OBJECTIVES:
            raise SpecError(f"--slo {part!r}: {typed!r} is not promised here, {', '.join(OBJECTIVES)} are; {EXAMPLE}")
        if name in found:
            raise SpecError(f"--slo {text!r}: {name} is given twice")
        found[name] = seconds(part, value)
    return found


def seconds(part: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(f"--slo {part!r} is not KEY=SECONDS: {EXAMPLE}")
    if number <= 0:
        raise SpecError(f"--slo {part!r} must be more than 0: {EXAMPLE}")
    return number

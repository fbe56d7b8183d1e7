"""The planner's own prices held against every source at hand, and against what they reached before."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path

from ...spec import LMWorksError, SpecError
from ..case import Case
from ..memory.budget import activations, budget
from ..memory.reserve import reserved
from ..step.constants import constants
from ..step.price import price
from .sources import SOURCES, source_named
from .validate import Line, Report, Seconds, validate

THRESHOLDS = Path(__file__).with_name("thresholds.toml")


def replay(data: Path | None = None, source: str = "") -> Report:
    """`data`: a folder with the bulk sets; `source`: one of them alone."""
    if data is not None and not data.is_dir():
        raise SpecError(f"--data {data} is not a folder")
    chosen = [source_named(source)] if source else list(SOURCES.values())
    return validate([(one, one.rows(data)) for one in chosen], seconds, blind, memory)


def seconds(case: Case) -> float:
    return float(price(case).seconds)


def blind(source: str) -> Seconds:
    """With constants that were fitted without this source."""
    given = constants(source)
    return lambda case: float(price(case, given).seconds)


def memory(case: Case, without: str = "") -> Mapping[str, float]:
    """A paper's closed form is of the first pipeline stage; a measurement is of the fullest rank."""
    whole, first = budget(case), budget(case, 0)
    return {
        "allocated": float(whole.allocated),
        "reserved": float(reserved(whole.allocated, without) + whole.left),
        "activations": float(activations(case)),
        "states": float(first.parameters + first.gradients + first.master + first.optimizer),
    }


def thresholds() -> dict[str, dict[str, float]]:
    """What was reached when they were written, in per cent, by a line's key."""
    try:
        return tomllib.loads(THRESHOLDS.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LMWorksError(f"{THRESHOLDS} is missing: LMWorks is not installed as a whole; install it again") from None


def regressions(report: Report) -> list[str]:
    """Errors above what was reached before, as sentences. An error may only get smaller."""
    current_errors, found = thresholds(), []
    for line in report.lines:
        for name, value in errors(line).items():
            limit = current_errors.get(line.key, {}).get(name)
            if limit is None:
                known = f"{THRESHOLDS.name} does not say what {name} error was reached for {line.key!r}"
                raise LMWorksError(f"{known}; benchmarks/validation.py writes it")
            if value > limit:
                found.append(f"{line.key}: {name} error {value:.2f}% was at most {limit:g}%")
    return found


def errors(line: Line) -> dict[str, float]:
    scores = {"fitted": line.fitted, "blind": line.blind}
    return {name: 100 * score.mape for name, score in scores.items() if score}


def current_errors(report: Report) -> str:
    """The thresholds of this report as TOML: each error, rounded up to a tenth of a per cent."""
    text = [
        "# Mean absolute errors that the planner reaches, in per cent, rounded up: a test fails when one grows.",
        "# Written by benchmarks/validation.py.",
    ]
    for line in report.lines:
        figures = ", ".join(f"{name} = {math.ceil(10 * value + 0.01) / 10:g}" for name, value in errors(line).items())
        text.append(f'"{line.key}" = {{ {figures} }}')
    return "\n".join(text) + "\n"

"""What each fitted constant of the step time is worth: errors with it, and with a value that does nothing in its place.

    python validation/ablate_constants.py

The other constants stay as they were fitted: a new fit without this one could only be better. `blind` errors are with
the constants of `fitted.toml` that have not seen the source.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from lmworks.plan.software import DENSE_GEMM_SLOWDOWN
from lmworks.plan.step.constants import REFERENCE_LAUNCH_S, Constants, constants
from lmworks.plan.step.price import price_uncalibrated
from lmworks.plan.step.uncalibrated import Uncalibrated
from lmworks.spec import SpecError
from lmworks_validation.sources import SOURCES

NEUTRAL: dict[str, Any] = {
    "gemm": {}, "attention": {}, "software": {},
    "launch_s": {"compiled": REFERENCE_LAUNCH_S, "eager": REFERENCE_LAUNCH_S},
    "single_gpu": 1.0, "power": 0.0, "memory": 1.0, "casts": 1.0, "host_skew": 0.0, "step_s": {"*": 0.0},
    "contention": 0.0, "async_tp_contention": 1.0, "links": 1.0, "network": 1.0, "stragglers": 0.0,
}  # fmt: skip
SLOWDOWN = "gemm_slowdown"  # of compiled steps with bf16 weights, in software.py

Rows = list[tuple[float, list[tuple[float, Uncalibrated]]]]  # measured seconds, and shares of what is predicted


def rows_of(source: str) -> Rows:
    found: Rows = []
    for row in SOURCES[source].rows() or []:
        if row.step_s is None:
            continue
        try:
            found.append((row.step_s, [(share, Uncalibrated.of(case)) for share, case in row.shares]))
        except SpecError:
            continue
    return found


def without_slowdown(rows: Rows) -> Rows:
    def plain(one: Uncalibrated) -> Uncalibrated:
        return replace(one, case=one.case.replace(software=replace(one.case.software, gemm_slowdown=1.0)))

    return [(seconds, [(share, plain(one)) for share, one in shares]) for seconds, shares in rows]


def error(rows: Rows, given: Constants) -> float:
    """Mean absolute error, per cent."""
    said = [sum(share * float(price_uncalibrated(one, given).seconds) for share, one in shares) for _, shares in rows]
    return 100 * mean(abs(predicted / measured - 1) for predicted, (measured, _) in zip(said, rows, strict=True))


def main() -> None:
    known = {name: rows for name in SOURCES if (rows := rows_of(name))}
    given = {name: {"fitted": constants(), "blind": constants(name)} for name in known}
    before = {(name, kind): error(known[name], one) for name in known for kind, one in given[name].items()}
    print("| constant | " + " | ".join(f"{name}: fitted, blind" for name in known) + " |")
    print("|---" * (1 + len(known)) + "|")
    print("| all of them | " + " | ".join(f"{before[n, 'fitted']:.1f}, {before[n, 'blind']:.1f}" for n in known) + " |")
    for constant in (*NEUTRAL, SLOWDOWN):
        cells = []
        for name, rows in known.items():
            changed = {}
            for kind, one in given[name].items():
                if constant == SLOWDOWN:
                    changed[kind] = error(without_slowdown(rows), one)
                else:
                    changed[kind] = error(rows, replace(one, **{constant: NEUTRAL[constant]}))
            cells.append(", ".join(f"{changed[kind] - before[name, kind]:+.2f}" for kind in ("fitted", "blind")))
        print(f"| {constant} | " + " | ".join(cells) + " |", flush=True)
    print(f"gemm_slowdown is {DENSE_GEMM_SLOWDOWN} in software.py")


if __name__ == "__main__":
    main()

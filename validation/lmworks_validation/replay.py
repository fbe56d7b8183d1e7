"""How wrong the planner is: every source replayed, beside the guess that every run has the same MFU.

Errors are relative to the measurement: of tokens/s where a source's readers compare those, else of the step time.
`fitted` is with constants that have seen the source, `blind` with constants that have not.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from lmworks.plan.case import Case
from lmworks.plan.flops import attention_flops_per_token, model_flops_per_token
from lmworks.plan.memory.reserve import oom_probability, reserve, reserved, usable
from lmworks.plan.memory.sheet import budget, saved_by_blocks
from lmworks.plan.step.constants import constants
from lmworks.plan.step.price import price
from lmworks.plan.tables.score import Score, weighted_median
from lmworks.spec import LMWorksError, SpecError

from .sources import GIB, SOURCES, Measured, Source, source_named

THRESHOLDS = Path(__file__).parent.parent / "thresholds.toml"
GUESS = 0.40  # the MFU that people assume when they know nothing

Seconds = Callable[[Case], float]  # of a step
Estimate = Callable[[Case], tuple[float, float, float]]  # seconds, and their 90 % interval
# Of a rank: allocated, reserved, activations of the first stage, states; with constants that have not seen the source
# of that name, or all of them where it is empty.
Bytes = Callable[[Case, str], Mapping[str, float]]


@dataclass(frozen=True)
class Baseline:
    """The guess that every run has the same MFU: with the constant that suits these rows best, and with GUESS."""

    mfu: float
    mape: float
    guess_mape: float
    counts: str  # how FLOPs and peak are counted


@dataclass(frozen=True)
class Line:
    """One figure of one source, or of one part of it."""

    source: str
    group: str  # "" for all of it
    figure: str
    kind: str  # measured, or formula: a paper's closed form
    fitted: Score  # by all constants: of a source that none of them was fitted to the same as `blind`
    blind: Score | None = None  # None: nothing in it is fitted, so there is nothing to be blind with
    sure: Score | None = None  # fitted, without suspect rows
    baseline: Baseline | None = None
    never_fitted: bool = False
    coverage: float | None = None  # share of rows within their 90 % interval, with the constants of `blind`

    @property
    def key(self) -> str:
        return "/".join(part for part in (self.source, self.group, self.figure) if part)

    def to_dict(self) -> dict[str, Any]:
        return {"key": self.key, **asdict(self)}


@dataclass(frozen=True)
class Report:
    lines: tuple[Line, ...]
    missing: tuple[str, ...]  # sources that were not at hand
    uncovered: Mapping[str, tuple[str, ...]]  # rows that could not be priced, and why
    refused: Mapping[str, tuple[str, ...]]  # rows that ran and are predicted not to fit, and what they would need

    def to_dict(self) -> dict[str, Any]:
        headline = {line.source: line.fitted.mape for line in self.lines if not line.group and line.figure in TIMES}
        return {
            "mape": headline,
            "lines": [line.to_dict() for line in self.lines],
            "not_at_hand": list(self.missing),
            "uncovered": {name: list(why) for name, why in self.uncovered.items() if why},
            "ran_but_predicted_not_to_fit": {name: list(why) for name, why in self.refused.items() if why},
            "guess_mfu": GUESS,
        }


TIMES = ("tokens_per_s", "step_s")


def validate(
    sources: Iterable[tuple[Source, Sequence[Measured] | None]],
    fitted: Seconds,
    blind: Callable[[str], Estimate],
    memory: Bytes,
    beyond: Callable[[Case], str],
) -> Report:
    """`blind(source)` prices with constants that have never seen it, and with all where its name is empty; `beyond`
    says what a case would need that its GPU does not have."""
    lines: list[Line] = []
    missing: list[str] = []
    uncovered: dict[str, tuple[str, ...]] = {}
    refused: dict[str, tuple[str, ...]] = {}
    for source, rows in sources:
        if rows is None:
            missing.append(source.name)
            continue
        priced, why = covered(rows, fitted)
        uncovered[source.name] = tuple(why)
        counted = Counter(f"{row.label}: {need}" for row, _ in priced if (need := beyond(row.case)))
        refused[source.name] = tuple(f"{said} ({n} rows)" if n > 1 else said for said, n in counted.items())
        lines += time_lines(source, priced, blind(source.name if source.fitted else ""))
        lines += memory_lines(source, rows, memory)
    return Report(tuple(lines), tuple(missing), uncovered, refused)


def covered(rows: Sequence[Measured], price: Seconds) -> tuple[list[tuple[Measured, float]], list[str]]:
    """Rows with a measured time and the seconds predicted for them, and sentences about those that have none."""
    priced, why = [], []
    for row in rows:
        if row.step_s is None:
            continue
        try:
            priced.append((row, mean_of(row, price)))
        except SpecError as error:
            why.append(f"{row.label}: {error}")
    return priced, why


def mean_of(row: Measured, price: Seconds) -> float:
    return sum(share * price(case) for share, case in row.shares)


def time_lines(source: Source, priced: Sequence[tuple[Measured, float]], blind: Estimate) -> list[Line]:
    """All rows whose layout the table gives, then every part; rows that rest on inference are a part of their own."""
    unseen = {id(row): Unseen.of(row, blind) for row, _ in priced}
    stated = [pair for pair in priced if not pair[0].inferred]
    groups = {row.group: [pair for pair in priced if pair[0].group == row.group] for row, _ in priced}
    sets = {"": stated, **(groups if len(groups) > 1 else {})}
    return [time_line(source, name, pairs, unseen) for name, pairs in sets.items() if pairs]


@dataclass(frozen=True)
class Unseen:
    """Of a row, by constants that have not seen its source."""

    seconds: float
    within_interval: bool

    @classmethod
    def of(cls, row: Measured, blind: Estimate) -> Self:
        """Of a mixture of cases: the means of their times and bounds."""
        assert row.step_s is not None, "covered() keeps rows with a time"
        estimates = [(share, blind(case)) for share, case in row.shares]
        seconds, low, high = (sum(share * found[i] for share, found in estimates) for i in range(3))
        return cls(seconds, low <= row.step_s <= high)


def time_line(
    source: Source, group: str, pairs: Sequence[tuple[Measured, float]], unseen: Mapping[int, Unseen]
) -> Line:
    rows = [row for row, _ in pairs]
    labels = [row.label for row in rows]
    measured = np.array([row.step_s for row in rows], float)
    seconds = np.array([predicted for _, predicted in pairs])
    errors = relative(seconds, measured, source.compare)
    blind = relative(np.array([unseen[id(row)].seconds for row in rows]), measured, source.compare)
    sure = [index for index, row in enumerate(rows) if not row.suspect]
    return Line(
        source.name,
        group,
        source.compare,
        "measured",
        Score.of(errors, labels),
        Score.of(blind, labels),
        Score.of([errors[i] for i in sure], [labels[i] for i in sure]) if len(sure) < len(rows) else None,
        constant_mfu(rows, source.compare),
        never_fitted=not source.fitted,
        coverage=float(np.mean([unseen[id(row)].within_interval for row in rows])),
    )


def relative(seconds: Any, measured: Any, compare: str) -> Any:
    """Of tokens/s a prediction that is too slow is too low."""
    return measured / seconds - 1 if compare == "tokens_per_s" else seconds / measured - 1


def constant_mfu(rows: Sequence[Measured], compare: str) -> Baseline:
    """The guess gets its best chance: of four ways to count, the one that leaves it the smallest error."""
    ways = [(whole, own) for whole in (False, True) for own in (True, False)]
    return min(
        (one_constant(rows, compare, *way) for way in ways), key=lambda guess: (round(guess.mape, 9), guess.guess_mape)
    )


def one_constant(rows: Sequence[Measured], compare: str, whole: bool, own: bool) -> Baseline:
    """With the real MFU r of each row the error of a constant c is |c/r − 1| in tokens/s and |r/c − 1| in time: both
    are least at a weighted median."""
    real = np.array([mfu(row, whole, own) for row in rows])
    if compare == "tokens_per_s":
        best = weighted_median(real, 1 / real)
    else:
        best = 1 / weighted_median(1 / real, real)
    errors = [np.abs(c / real - 1 if compare == "tokens_per_s" else real / c - 1).mean() for c in (best, GUESS)]
    counts = f"{'whole' if whole else 'causal'} attention, peak of {'the precision in use' if own else 'bf16'}"
    return Baseline(best, float(errors[0]), float(errors[1]), counts)


def mfu(row: Measured, whole: bool = False, own: bool = True) -> float:
    """Of the measurement. `whole`: attention as if it were not causal; `own`: over the peak of the precision in use."""
    case, seq = row.case, row.case.seq
    peak = case.gpu.peak_flops(case.dtype if own else "bf16") or case.gpu.peak_flops("fp16")
    if not peak or not row.step_s:
        raise SpecError(f"{row.label}: the peak of {case.gpu.name} in {case.dtype} is not known")
    flops = model_flops_per_token(case.model, seq)
    if whole:
        flops += 3 * attention_flops_per_token(case.model, seq)
    return float(flops * case.tokens_per_step / (row.step_s * case.world * peak))


def memory_lines(source: Source, rows: Sequence[Measured], memory: Bytes) -> list[Line]:
    """Bytes of tensors and a paper's formulas have no fitted constant; what an allocator reserves has one."""
    lines = []
    for figure in ("allocated", "reserved", "in_use", "activations", "states"):
        known = [row for row in rows if getattr(row, figure) is not None and not row.mixed]
        if not known:
            continue
        labels = [row.label for row in known]
        fitted = Score.of([memory_error(row, figure, memory, "") for row in known], labels)
        without = source.name if source.fitted else ""
        blind = None
        if figure in ("reserved", "in_use"):
            blind = Score.of([memory_error(row, figure, memory, without) for row in known], labels)
        kind = "formula" if figure in ("activations", "states") else "measured"
        lines.append(Line(source.name, "", figure, kind, fitted, blind, never_fitted=not source.fitted))
    return lines


def memory_error(row: Measured, figure: str, memory: Bytes, without: str) -> float:
    predicted = memory(row.case, without)[figure]
    if row.share_of is not None:
        predicted /= memory(row.share_of, without)[figure]
    return float(predicted / getattr(row, figure) - 1)


# --- with the planner's own prices -------------------------------------------------------------------------


def replay(data: Path | None = None, source: str = "") -> Report:
    """`data`: a folder with the bulk sets; `source`: one of them alone."""
    if data is not None and not data.is_dir():
        raise SpecError(f"--data {data} is not a folder")
    chosen = [source_named(source)] if source else list(SOURCES.values())
    return validate([(one, one.rows(data)) for one in chosen], seconds, blind, memory, beyond_memory)


def seconds(case: Case) -> float:
    return float(price(case).seconds)


def blind(source: str) -> Estimate:
    """With constants that were fitted without this source, or with all where its name is empty."""
    given = constants(source)

    def estimate(case: Case) -> tuple[float, float, float]:
        found = price(case, given)
        low, high = found.interval
        return float(found.seconds), float(low), float(high)

    return estimate


def memory(case: Case, without: str = "") -> Mapping[str, float]:
    """A paper's closed form is of the first pipeline stage; a measurement is of the fullest rank."""
    whole, first = budget(case), budget(case, 0)
    return {
        "allocated": float(whole.allocated),
        "reserved": float(reserved(whole.allocated, without) + whole.left),
        "in_use": float(reserved(whole.allocated, without) + whole.left + reserve().context),
        "activations": float(saved_by_blocks(case)),
        "states": float(first.parameters + first.gradients + first.master + first.optimizer),
    }


def beyond_memory(case: Case) -> str:
    """What a step needs, and its largest parts, where it is more likely than not to run out of memory."""
    if not case.gpu.memory_gb:
        return ""
    need = budget(case)
    chance = float(oom_probability(need.reserved, case.gpu, case.software.name))
    if chance < 0.5:
        return ""
    parts = {name: float(held) for name, held in need.to_dict().items() if name not in ("allocated", "reserved")}
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    told = ", ".join(f"{name} {parts[name] / GIB:.0f}" for name in largest)
    return (
        f"needs {float(need.reserved) / GIB:.0f} of {usable(case.gpu) / GIB:.0f} GiB ({told}); probability {chance:.0%}"
    )


# --- against what was reached before -----------------------------------------------------------------------


def thresholds() -> dict[str, dict[str, float]]:
    """What was reached when they were written, in per cent, by a line's key."""
    try:
        return tomllib.loads(THRESHOLDS.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LMWorksError(f"{THRESHOLDS} is missing; validation/write_tables.py writes it") from None


def regressions(report: Report) -> list[str]:
    """Errors above what was reached before, as sentences. An error may only get smaller."""
    current_errors, found = thresholds(), []
    for line in report.lines:
        for name, value in errors(line).items():
            limit = current_errors.get(line.key, {}).get(name)
            if limit is None:
                known = f"{THRESHOLDS.name} does not say what {name} error was reached for {line.key!r}"
                raise LMWorksError(f"{known}; validation/write_tables.py writes it")
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
        "# Written by validation/write_tables.py.",
    ]
    for line in report.lines:
        figures = ", ".join(f"{name} = {math.ceil(10 * value + 0.01) / 10:g}" for name, value in errors(line).items())
        text.append(f'"{line.key}" = {{ {figures} }}')
    return "\n".join(text) + "\n"

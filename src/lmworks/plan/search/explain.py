"""Why not this layout: what keeps it from running or from fitting, the smallest change that helps, or who is faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...spec import RunSpec, SpecError
from ...spec.errors import did_you_mean
from ...spec.load import parse_value
from ...spec.run import SCHEDULES
from ..case import Case
from ..memory.reserve import oom_probability, usable
from ..memory.sheet import Budget, budget
from ..step.price import price
from .candidates import NUMBERS, OFFLOAD_GIB, RECOMPUTE, WORDS, SearchProblem, run_of
from .search import Result, shortfall

Layout = dict[str, Any]  # NUMBERS, WORDS and AWAY
SHOWN = 3
INCREASES = {"recompute": RECOMPUTE, "offload": ("none", "optimizer", "full"), "zero": (0, 1, 2, 3)}


@dataclass(frozen=True)
class Verdict:
    layout: Layout
    binding: str  # "rule", "memory", or "" where the layout fits
    text: str
    budget: Budget | None = None
    changes: tuple[str, ...] = ()  # each makes it fit, the fastest first
    step_s: float | None = None


def explain(problem: SearchProblem, said: Layout, base: RunSpec, result: Result) -> Verdict:
    layout = with_defaults(problem, said)
    inner = layout["tp"] * layout["cp"] * layout["pp"]
    if problem.world % inner:
        return Verdict(layout, "rule", f"tp × cp × pp = {inner} does not divide the {problem.world} GPUs")
    try:
        case = Case.of(run_of(problem, layout, base), problem.gpu)
    except SpecError as error:
        return Verdict(layout, "rule", str(error))
    need = budget(case)
    if float(need.reserved) > problem.safe_bytes:
        chance = f"a probability of {float(oom_probability(need.reserved, problem.gpu)):.0%}"
        text = f"needs {gib(need.reserved)} of {gib(usable(problem.gpu))}: out of memory with {chance}"
        return Verdict(layout, "memory", text, need, smallest_changes(problem, layout, base))
    seconds = float(price(case).seconds)
    faster = [found for found in result.front if found.step_s < seconds]
    text = f"fits in {gib(need.reserved)}{beyond_memory(need, problem)} and takes {seconds:.4g} s a step"
    if faster:
        text += f"; the fastest layout takes {faster[0].step_s:.4g} s, {1 - faster[0].step_s / seconds:.1%} less"
    return Verdict(layout, "", text, need, (), seconds)


def read_layout(texts: Iterable[str]) -> Layout:
    """tp=8, recompute=full: numbers as numbers."""
    layout: Layout = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise SpecError(f"'{text}' is no part of a layout; write name=value, e.g. tp=8")
        layout[key.strip()] = parse_value(value.strip())
    refuse_nonsense(layout)
    return layout


def refuse_nonsense(layout: Layout) -> None:
    for key, value in layout.items():
        if key not in (*NUMBERS, *WORDS, OFFLOAD_GIB):
            raise SpecError(f"{key} is no part of a layout{did_you_mean(key, (*NUMBERS, *WORDS, OFFLOAD_GIB))}")
        if key in NUMBERS and not (isinstance(value, int) and value > 0):
            raise SpecError(f"{key} = {value!r} must be a whole number, at least 1")
        if key == OFFLOAD_GIB and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf
        ):
            raise SpecError(f"{key} = {value!r} must be GiB, at least 0")
        choices = {**INCREASES, "schedule": SCHEDULES}.get(key, (value,))
        if value not in choices:
            raise SpecError(f"{key} = {value!r}: it can be {', '.join(map(str, choices))}")


def with_defaults(problem: SearchProblem, said: Layout) -> Layout:
    """What is not said: data parallelism over the GPUs that are left, with everything sharded."""
    layout: Layout = dict.fromkeys(NUMBERS, 1) | {
        "schedule": "1f1b",
        "recompute": "none",
        "offload": "none",
        OFFLOAD_GIB: 0,
    }
    layout |= said
    rest = problem.world // (layout["tp"] * layout["cp"] * layout["pp"]) or 1
    layout.setdefault("zero", 3 if rest > 1 else 0)
    if "virtual" not in said and layout["schedule"] not in ("1f1b", "gpipe"):
        layout["virtual"] = 2
    if not said.keys() & {"dp_shard", "dp_replicate"}:
        layout["dp_shard" if layout["zero"] else "dp_replicate"] = rest
    return layout


def smallest_changes(problem: SearchProblem, layout: Layout, base: RunSpec) -> tuple[str, ...]:
    """Single changes that make it fit, else pairs of them; the fastest first."""

    def missing(layout: Layout) -> int:
        """GiB of activations that must wait in host memory; 0 where none can, or need."""
        try:
            case = Case.of(run_of(problem, layout | {OFFLOAD_GIB: 1}, base), problem.gpu)
        except SpecError:
            return 0
        return int(shortfall(problem, budget(case.replace(offload_activations=0.0))))

    for count in (1, 2):
        found = []
        for changed, text in changed_by(layout, count, missing):
            try:
                case = Case.of(run_of(problem, changed, base), problem.gpu)
            except SpecError:
                continue
            if float(budget(case).reserved) <= problem.safe_bytes:
                found.append((float(price(case).seconds), text))
        if found:
            return tuple(f"{text} ({seconds:.4g} s a step)" for seconds, text in sorted(found)[:SHOWN])
    return ()


def changed_by(layout: Layout, count: int, missing: Callable[[Layout], int]) -> Iterator[tuple[Layout, str]]:
    """Every layout so many steps away, with what changed; each step is towards less memory.

    `missing` GiB of activations is what a layout would have to send to host memory.
    """
    reached = [layout]
    for _ in range(count):
        reached = [further for one in reached for further in steps(one, missing)]
    seen = set()
    for changed in reached:
        text = ", ".join(f"{key} {layout[key]} → {value}" for key, value in changed.items() if value != layout[key])
        if text and text not in seen:
            seen.add(text)
            yield changed, text


def steps(layout: Layout, missing: Callable[[Layout], int]) -> Iterator[Layout]:
    """A later value of a word, a smaller micro-batch, activations in host memory, or twice a degree, taken from the
    data-parallel ranks.
    """
    for key, values in INCREASES.items():
        for value in values[values.index(layout[key]) + 1 :]:
            changed = {**layout, key: value}
            if key == "zero" and layout["dp_shard"] == 1:  # a stage shards over all data-parallel ranks
                changed |= {"dp_shard": layout["dp_replicate"], "dp_replicate": 1}
            yield changed
    for micro_batch in {layout["micro_batch"] // 2, 1} - {0, layout["micro_batch"]}:
        yield {**layout, "micro_batch": micro_batch}
    if not layout[OFFLOAD_GIB] and (gibs := missing(layout)):
        yield {**layout, OFFLOAD_GIB: gibs}
    of = "dp_replicate" if layout["dp_replicate"] % 2 == 0 else "dp_shard"
    if layout[of] % 2 == 0:
        for axis in ("tp", "cp", "pp"):
            yield {**layout, axis: 2 * layout[axis], of: layout[of] // 2}


def beyond_memory(need: Budget, problem: SearchProblem) -> str:
    """And in host memory."""
    if not float(need.host):
        return ""
    return f" and {gib(need.host)} of host memory ({gib(need.host * problem.cluster.gpus_per_node)} a machine)"


def gib(size: Any) -> str:
    return f"{float(size) / 2**30:.1f} GiB"

"""The bubble that a pipeline's schedule has of itself, beside the one that was measured (`trace.pipeline`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ..plan.pipelines.schedule import idle_shares, simulate
from ..plan.pipelines.stages import orders_of, simulated
from ..spec import RunSpec


def with_schedule(pipeline: Mapping[str, Any] | None, spec: RunSpec | None) -> dict[str, Any] | None:
    """The key `pipeline` of a trace's summary, and for every rank the share that it idles

    - `schedule`: by the planner, with the FLOPs of its stages (`lmworks plan pipeline`);
    - `replayed`: by the same schedule with the passes as long as they were measured, and messages that take no time:
      what the measured bubble has beyond it are messages and waits.
    """
    if pipeline is None:
        return None
    facts: dict[str, Any] = {"schedule": None, "micro_batches": None, **pipeline}
    planned: list[float] | None = None
    replayed: list[float] | None = None
    if spec is not None and spec.parallel.pp > 1:
        facts |= {"schedule": spec.parallel.schedule, "micro_batches": spec.accumulation}
        planned, replayed = idle_shares(simulated(spec)), replay(pipeline, spec)
    facts["ranks"] = [
        {
            **one,
            "schedule": planned[one["place"]] if planned else None,
            "replayed": replayed[one["place"]] if replayed else None,
        }
        for one in pipeline["ranks"]
    ]
    return facts


def replay(pipeline: Mapping[str, Any], spec: RunSpec) -> list[float] | None:
    """None where the passes of a stage were not recorded."""
    times: defaultdict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys("FBIW", 0.0))
    for one in pipeline["passes"]:
        times[one["stage"]][one["kind"]] = one["seconds"]
    count = spec.parallel.pp * spec.parallel.virtual_stages
    if set(times) != set(range(count)):
        return None
    return idle_shares(simulate(orders_of(spec), [times[stage] for stage in range(count)]))


def bubble_table(pipeline: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, as the terminal and the page show them."""
    columns = ["rank", "stages", "busy ms", "window ms", "measured", "replayed", "schedule", "of the step"]

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    rows = [
        [
            str(one["rank"]),
            ", ".join(map(str, one["stages"])),
            f"{1e3 * one['busy_s']:,.2f}",
            f"{1e3 * one['window_s']:,.2f}",
            share(one["measured"]),
            share(one.get("replayed")),
            share(one.get("schedule")),
            share(one["of_step"]),
        ]
        for one in pipeline["ranks"]
    ]
    return columns, rows

"""Tables of docs/observability.md."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .alerts import ALERTS
from .catalog import METRICS


def table(*rows: tuple[str, ...]) -> Iterator[str]:
    heading, *others = rows
    yield from ("| " + " | ".join(row) + " |" for row in (heading, ("---",) * len(heading), *others))


def alert_table() -> Iterator[str]:
    rows = [(f"`{one.name}`", one.severity, f"`{one.page}`", plain(one.summary)) for one in ALERTS]
    return table(("alert", "severity", "runbook", "what it says"), *rows)


def plain(summary: str) -> str:
    """`{{ $labels.server }} …` → `SERVER …`."""
    labels = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: found[1].upper(), summary)
    return re.sub(r"\{\{.*?\}\}", "N", labels)


def metric_table(process: str) -> Iterator[str]:
    rows = [
        (f"`{one.series}`{'' if not one.vllm else ' +'}", one.kind, ", ".join(one.labels), one.help)
        for one in METRICS.values()
        if one.process == process
    ]
    return table(("metric", "kind", "labels", "what"), *rows)

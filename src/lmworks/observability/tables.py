"""Tables of docs/observability.md."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .alerts import ALERTS


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

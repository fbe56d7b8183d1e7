"""Traces of OpenTelemetry: W3C's context in and out."""

from __future__ import annotations

import re

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


def trace_id_of(traceparent: str | None) -> str | None:
    """None: there is none, or it is not valid."""
    found = TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return found[1] if found else None

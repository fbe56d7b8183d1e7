"""What a run leaves behind, written and read. Imports no torch. Names are loaded when they are used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .folder import RunFolder as RunFolder
    from .metrics import MetricsWriter as MetricsWriter
    from .metrics import StepMetrics as StepMetrics
    from .metrics import read_metrics as read_metrics

EXPORTS = {
    "MetricsWriter": "metrics",
    "RunFolder": "folder",
    "StepMetrics": "metrics",
    "read_metrics": "metrics",
}


def __getattr__(name: str) -> Any:
    if name in EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What a run leaves behind, written and read. Imports no torch."""

from . import phase
from .folder import RunFolder
from .metrics import MetricsWriter, StepMetrics, read_metrics

__all__ = ["MetricsWriter", "RunFolder", "StepMetrics", "phase", "read_metrics"]

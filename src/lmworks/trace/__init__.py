"""Profiler traces: one columnar model, its readers, and what a trace says about where the time went."""

from .kineto import read_trace
from .model import Kind, Trace
from .read import read_traces

__all__ = ["Kind", "Trace", "read_trace", "read_traces"]

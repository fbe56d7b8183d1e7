"""Profiler traces: one columnar model, its readers, and what a trace says about where the time went."""

from .kineto import read_trace
from .model import Kind, Trace

__all__ = ["Kind", "Trace", "read_trace"]

"""Runs of element-wise kernels (or ops, on a CPU) that follow one another: what one fused kernel would save.

Each of n kernels in a row reads what the one before wrote. Fused, the run reads and writes about once, so (n − 1) / n
of its time is saved. Kernels that are already fused (an optimizer's over many tensors, a compiler's, norms, softmax)
are not counted, and end a run.
"""

from __future__ import annotations

import re

import numpy as np

from .breakdown import C10D, NODE, compute_lanes
from .hotspots import in_steps
from .model import Kind, Trace
from .nesting import Nesting

KERNEL = re.compile(r"\b(?:vectorized_|unrolled_)?elementwise_kernel|\breduce_kernel<")
OP = re.compile(
    r"^aten::(?:add|sub|rsub|mul|div|pow|sqrt|rsqrt|exp|log|tanh|sigmoid|neg|abs|square|reciprocal|clamp|where|mean|sum"
    r"|addcmul|addcdiv|lerp|maximum|minimum|erf|sin|cos|copy)_?$"
)
# Ops that compute nothing, so that what is before and after them still follows one another.
VIEW = re.compile(
    r"^aten::(?:t|transpose|permute|view|_unsafe_view|reshape|expand|expand_as|as_strided|empty|empty_like|empty_strided"
    r"|detach|alias|select|slice|unsqueeze|squeeze|_to_copy|to|resize_|item|_local_scalar_dense|ones_like|result_type)$"
)


def unfused_share(trace: Trace, nesting: Nesting) -> float:
    """What fusing runs of element-wise kernels would save, as a part of the steps."""
    events = trace.events
    steps = sum(step.end - step.start for step in trace.steps)
    if not steps:
        return 0.0
    if trace.on_device:
        chosen = events.of(Kind.KERNEL)
        elementwise, time = trace.named(KERNEL), events.duration
    else:
        lanes = np.isin(events.lane, compute_lanes(trace))
        chosen = lanes & events.of(Kind.OP) & ~trace.named(C10D) & ~trace.named(NODE) & ~trace.named(VIEW)
        inner = nesting.parent[np.flatnonzero(chosen)]
        outer = np.zeros(len(events), np.bool_)
        outer[inner[inner >= 0]] = True
        chosen &= ~outer  # ops that call others: their time is that of those
        elementwise, time = trace.named(OP), nesting.self_time
    rows = np.flatnonzero(chosen & in_steps(trace, events.start))
    rows = rows[np.argsort(events.lane[rows], kind="stable")]  # by lane, and by start within it
    kind = 2 * events.lane[rows] + elementwise[rows]
    run = np.cumsum(np.diff(kind, prepend=-1) != 0) - 1  # the number of each row's run
    length, spent = np.bincount(run), np.bincount(run, weights=time[rows] * elementwise[rows])
    return float((spent * (length - 1) / np.maximum(length, 1)).sum()) / steps

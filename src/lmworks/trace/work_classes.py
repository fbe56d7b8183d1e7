"""What the compute of a trace is made of: products, attention, memory-bound kernels; recomputation; allocations."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from .breakdown import C10D, Activity, compute_lanes
from .hotspots import SHORT_KERNEL, in_steps
from .intervals import Spans
from .model import Kind, Mask, Trace
from .nesting import Nesting

ATTENTION = re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)
PRODUCT = re.compile(
    r"gemm|gemv|cutlass|nvjet|xmma|wgmma|matmul|winograd|conv|dgrad|wgrad|_mm\b|::b?mm\b|::add(?:b?mm|mv)\b|::baddbmm\b"
    r"|::linear\b|splitKreduce",
    re.IGNORECASE,
)
FLOAT32 = re.compile(r"sgemm|s884gemm_fp32|_f32f32_f32f32|scudnn|tf32|\bfloat\b", re.IGNORECASE)
HALF = re.compile(r"bf16|bfloat16|half|fp16|f16|e4m3|e5m2|fp8", re.IGNORECASE)
ALLOCATION = re.compile(r"^(?:cuda|hip)(?:Malloc|Free)$|^cuMem(?:Create|Map|Unmap|Release)$")
COPY_IN = re.compile(r"HtoD|Host.?To.?Device", re.IGNORECASE)
BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$")
# Composite operators of a forward pass: a backward pass calls what they are made of, so within autograd's engine they
# are a forward pass that runs again.
FORWARD = re.compile(
    r"^aten::(?:linear|matmul|scaled_dot_product_attention|layer_norm|rms_norm|batch_norm|conv[123]d|embedding|dropout"
    r"|gelu|silu|relu|softmax)$|^CompiledFunction$"
)


def compute_shares(trace: Trace, nesting: Nesting) -> dict[str, float]:
    """`product`, `attention` and `memory`: their parts of the time of all kernels, or of all ops on a CPU."""
    events = trace.events
    if trace.on_device:
        rows = np.flatnonzero(events.of(Kind.KERNEL) & in_steps(trace, events.start))
        time = events.duration[rows]
    else:
        lanes = np.isin(events.lane, compute_lanes(trace)) & events.of(Kind.OP) & ~trace.named(C10D)
        rows = np.flatnonzero(lanes & in_steps(trace, events.start))
        time = nesting.self_time[rows]
    per_name = np.bincount(events.name[rows], weights=time, minlength=len(trace.names))
    found: defaultdict[str, float] = defaultdict(float)
    for name, length in zip(trace.names, per_name.tolist(), strict=True):
        found[kernel_class(name)] += length
    whole = sum(found.values())
    return {kind: found[kind] / whole if whole else 0.0 for kind in ("product", "attention", "memory")}


def kernel_class(name: str) -> str:
    if ATTENTION.search(name):
        return "attention"
    return "product" if PRODUCT.search(name) else "memory"


def recompute_share(trace: Trace, nesting: Nesting) -> float:
    """Time of forward passes that ran again within the backward pass, as a part of the steps."""
    events = trace.events
    steps = sum(step.end - step.start for step in trace.steps)
    forward = trace.named(FORWARD) & events.of(Kind.OP) & in_steps(trace, events.start)
    again = forward & under(trace, nesting, trace.named(BACKWARD))
    if not steps or not np.any(again):
        return 0.0
    if not trace.on_device:
        return float(nested_time(trace, nesting, again)) / steps
    call = trace.launch
    kernels = np.flatnonzero((call >= 0) & events.of(Kind.KERNEL))
    within = under(trace, nesting, again)
    return float(events.duration[kernels[within[call[kernels]]]].sum()) / steps


def nested_time(trace: Trace, nesting: Nesting, chosen: Mask) -> int:
    """Of the outermost of the chosen events."""
    outer = chosen & ~under(trace, nesting, chosen)
    return int(trace.events.duration[outer].sum())


def under(trace: Trace, nesting: Nesting, around: Mask) -> Mask:
    """Events that lie within one of the given events, themselves not counted."""
    found = np.zeros(len(trace.events), np.bool_)
    above = nesting.parent.copy()
    while np.any(above >= 0):
        found |= (above >= 0) & around[above]
        above = np.where(above >= 0, nesting.parent[above], -1)
    return found


def short_op_share(trace: Trace, nesting: Nesting) -> float:
    """Own time of ops under 10 µs, most of which is the call itself, as a part of the steps of a CPU."""
    events = trace.events
    steps = sum(step.end - step.start for step in trace.steps)
    if trace.on_device or not steps:
        return 0.0
    own = np.isin(events.lane, compute_lanes(trace)) & events.of(Kind.OP) & (events.duration < SHORT_KERNEL)
    return float(nesting.self_time[own & in_steps(trace, events.start)].sum()) / steps


def allocation_share(trace: Trace) -> tuple[float, float]:
    """Time of the host in the allocator of the device, as a part of the steps, and its calls a step."""
    events = trace.events
    calls = trace.named(ALLOCATION) & events.of(Kind.RUNTIME) & in_steps(trace, events.start)
    steps = sum(step.end - step.start for step in trace.steps)
    count = float(calls.sum()) / max(len(trace.steps), 1)
    return (float(events.duration[calls].sum()) / steps if steps else 0.0), count


def exposed_copy_in(trace: Trace) -> float:
    """Copies from the host to the device while it did nothing else, as a part of the steps."""
    if not trace.on_device:
        return 0.0
    events, activity = trace.events, Activity(trace)
    copies = Spans.of(events.take(events.of(Kind.COPY) & trace.named(COPY_IN))) - (
        activity.compute | activity.communication
    )
    edges = np.array([(step.start, step.end) for step in trace.steps], np.int64).reshape(-1, 2)
    whole = int((edges[:, 1] - edges[:, 0]).sum())
    return float(copies.covered(edges[:, 0], edges[:, 1]).sum()) / whole if whole else 0.0


def float32_products(trace: Trace) -> float:
    """The part of products that take 32-bit floats, by the names of their kernels."""
    events = trace.events
    rows = np.flatnonzero(events.of(Kind.KERNEL) & trace.named(PRODUCT))
    whole = float(events.duration[rows].sum())
    single = (trace.named(FLOAT32) & ~trace.named(HALF))[rows]
    return float(events.duration[rows][single].sum()) / whole if whole else 0.0

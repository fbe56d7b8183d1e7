"""What may bound a step: every cause with the share of the steps' time that its remedy could give back.

The interval of each says how much of that share remedies do give back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..trace.collectives import P2P
from ..trace.elementwise import unfused_share
from ..trace.model import Trace
from ..trace.nesting import Nesting
from ..trace.work_classes import (
    allocation_share,
    compute_shares,
    exposed_copy_in,
    float32_products,
    recompute_share,
    short_op_share,
)

SMALL_MESSAGE = 2**20  # bytes: below it a collective is latency, above it bandwidth
EAGER_HOST = 0.08  # of a CPU's steps: what Python and the calls of ops cost a loop that is as it should be
# What remedies give back of a cause's share, at least and at most: planted causes against their undisturbed twins
# (benchmarks/planted_causes.py, the half `fit`; "bandwidth" is a judgement).
GAINS = {
    "input_bound": (0.8, 1.35),
    "host_bound": (0.3, 1.2),
    "sync_bound": (0.6, 1.1),
    "comm_bound latency": (0.7, 1.3),
    "comm_bound order": (0.4, 1.4),
    "comm_bound bandwidth": (0.2, 0.5),
    "straggler": (0.3, 1.0),
    "pipeline_bubble": (0.05, 0.6),
    "pipeline_bubble uneven": (0.5, 1.0),
    "memory_bound": (0.2, 0.8),
    "compute_bound": (0.3, 0.95),
    "allocator_bound": (0.5, 1.0),
    "recompute_heavy": (0.3, 1.5),
}


@dataclass(frozen=True)
class Figures:
    """Shares of the steps' time, and what else decides."""

    on_device: bool
    input: float
    host: float
    kernel_gap: float
    sync: float
    compute: float
    exposed: float
    hidden: float
    p2p: float  # exposed, of sends and receives
    wait: float  # in collectives, before the last rank arrived
    late_share: float
    late_rank: int | None
    late_cause: str
    message_bytes: float | None  # of a collective, on average
    launches: float  # a step; on a CPU, ops called
    short_kernels: float  # share of those under 10 µs
    product: float
    memory: float
    float32: float
    recompute: float
    allocation: float
    allocations: float  # calls a step
    copy_in: float  # exposed, from the host to the device
    short_ops: float  # own time of ops under 10 µs, on a CPU
    unfused: float  # what fusing runs of element-wise kernels would save
    uneven: float  # compute of the rank that has most, beyond the mean of all


@dataclass(frozen=True)
class Evidence:
    """A figure that decides; `share` is of the steps' time."""

    figure: str
    value: float
    unit: str = "share"

    @property
    def text(self) -> str:
        shown = f"{self.value:.1%}" if self.unit == "share" else f"{self.value:,.0f}"
        return f"{self.figure} {shown}{' bytes' if self.unit == 'bytes' else ''}"


@dataclass(frozen=True)
class Cause:
    verdict: str
    share: float
    gain: tuple[float, float]  # low and high, of the steps' time
    evidence: tuple[Evidence, ...]  # three figures
    kind: str = ""  # of a communication bound: bandwidth, latency or order; of a straggler, why it is late

    @property
    def expected(self) -> float:
        return sum(self.gain) / 2


def figures_of(traces: Sequence[Trace], facts: Mapping[str, Any]) -> Figures:
    whole = facts["step_s"]
    idle = {cause: length / whole for cause, length in facts["idle_by_cause"].items()}
    skewed = facts["skew"] or {}
    collectives = facts["overlap"]["collectives"]
    sized = [one for one in collectives if one["bytes"] is not None]
    calls = sum(one["calls"] for one in sized)
    p2p = sum(one["exposed_s"] for one in collectives if one["collective"] in P2P)
    computed = [sum(row["compute_s"] for row in facts["steps"] if row["rank"] == trace.rank) for trace in traces]
    nestings = [Nesting.of(trace) for trace in traces]
    classes = [compute_shares(*pair) for pair in zip(traces, nestings, strict=True)]
    count = len(traces)
    allocations = [allocation_share(trace) for trace in traces]
    return Figures(
        on_device=any(trace.on_device for trace in traces),
        input=idle["input_late"],
        host=idle["host_late"],
        kernel_gap=idle["kernel_gap"],
        sync=idle["synchronisation"],
        compute=facts["compute_s"] / whole,
        exposed=facts["exposed_comm_s"] / whole,
        hidden=facts["hidden_comm_s"] / whole,
        p2p=min(p2p, facts["exposed_comm_s"]) / whole,
        wait=sum(skewed.get("wait_s", {}).values()) / whole,
        late_share=skewed.get("late_share", 0.0),
        late_rank=skewed.get("late_rank"),
        late_cause=skewed.get("cause", ""),
        message_bytes=sum(one["bytes"] for one in sized) / calls if calls else None,
        launches=sum(one["per_step"] for one in facts["launches"]) / count,
        short_kernels=sum(one["share_under_10us"] for one in facts["launches"]) / count,
        **{kind: sum(one[kind] for one in classes) / count for kind in ("product", "memory")},
        float32=sum(map(float32_products, traces)) / count,
        recompute=sum(recompute_share(*pair) for pair in zip(traces, nestings, strict=True)) / count,
        allocation=sum(share for share, _ in allocations) / count,
        allocations=sum(number for _, number in allocations) / count,
        uneven=(max(computed) - sum(computed) / count) / (whole / count),
        copy_in=sum(map(exposed_copy_in, traces)) / count,
        short_ops=sum(short_op_share(*pair) for pair in zip(traces, nestings, strict=True)) / count,
        unfused=sum(unfused_share(*pair) for pair in zip(traces, nestings, strict=True)) / count,
    )


def causes(f: Figures) -> list[Cause]:
    """All of them, each with what its remedy could give back."""
    # cudaMalloc and cudaFree wait for the device too; while the device has work, they cost nothing.
    allocation = min(f.allocation, f.sync + f.host + f.copy_in)
    sync = max(f.sync - allocation, 0.0)
    host = max(f.host + f.kernel_gap - max(allocation - f.sync, 0.0), 0.0)
    if not f.on_device:
        host = max(host + f.short_ops - EAGER_HOST, 0.0)
    host_about = "host late and kernel gaps" if f.on_device else f"host late and short ops, beyond {EAGER_HOST:.0%}"
    kernels, launches = ("kernels", "launches") if f.on_device else ("ops", "ops a step")
    compute, short = Evidence("compute", f.compute), Evidence(f"{kernels} under 10 µs", f.short_kernels)
    products = Evidence("products", f.compute * f.product)
    copies, late = Evidence("of it copies to the device", f.copy_in), Evidence("host late", f.host)
    memory = Evidence(f"memory-bound {kernels}", f.compute * f.memory)
    calls = Evidence("calls of them a step", f.allocations, "count")
    return [
        cause("input_bound", f.input + f.copy_in, "input late", copies, compute,
              kind="copies" if f.copy_in > f.input / 2 else ""),
        cause("host_bound", host, host_about, Evidence(launches, f.launches, "count"), short),
        cause("sync_bound", sync, "idle after synchronisations", late, compute),
        communication(f),
        straggler(f),
        bubble(f),
        cause("memory_bound", f.unfused, "what fused kernels would save", memory, products),
        cause("compute_bound", f.compute * f.product * f.float32, "products in fp32", products, compute),
        cause("allocator_bound", allocation, "idle for cudaMalloc and cudaFree", calls, compute),
        cause("recompute_heavy", f.recompute, "forward passes that ran again", compute, products),
    ]  # fmt: skip


def cause(verdict: str, share: float, about: str, *others: Evidence, kind: str = "") -> Cause:
    """`about` names the share."""
    low, high = GAINS.get(f"{verdict} {kind}") or GAINS[verdict]
    return Cause(verdict, share, (low * share, high * share), (Evidence(about, share), *others), kind)


def communication(f: Figures) -> Cause:
    """Exposed communication, less what is a wait for a late rank, which no faster link would shorten."""
    share = max(f.exposed - f.p2p - f.wait, 0.0)
    hideable = min(share, max(f.compute - f.hidden, 0.0))
    small = f.message_bytes is not None and f.message_bytes < SMALL_MESSAGE
    kind = "latency" if small else "order" if hideable > share / 2 and f.hidden < f.exposed else "bandwidth"
    size = Evidence("a collective has", f.message_bytes or 0.0, "bytes")
    return cause("comm_bound", share, "exposed communication", Evidence("hidden", f.hidden), size, kind=kind)


def bubble(f: Figures) -> Cause:
    uneven = Evidence("compute of the longest stage beyond the mean", f.uneven)
    kind = "uneven" if f.uneven > f.p2p / 2 else ""
    return cause(
        "pipeline_bubble", f.p2p, "exposed sends and receives", uneven, Evidence("compute", f.compute), kind=kind
    )


def is_pipeline(f: Figures) -> bool:
    """Ranks of a pipeline wait for one another by design: a longer stage is its bubble."""
    return f.p2p > f.exposed / 2


def straggler(f: Figures) -> Cause:
    waits = Evidence("all ranks, in collectives before the last arrived", f.wait)
    late = Evidence("late rank", -1 if f.late_rank is None else f.late_rank, "rank")
    share = 0.0 if is_pipeline(f) else f.late_share
    return cause("straggler", share, "the others waited", waits, late, kind=f.late_cause)

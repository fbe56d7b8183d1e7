"""What may bound a step: every cause with the share of the steps' time that its remedy could give back.

The interval of each says how much of that share remedies do give back: what is between two kernels is never all gone,
and an input that is read ahead costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..trace.model import Trace
from ..trace.nesting import Nesting
from ..trace.work_classes import allocation_share, compute_shares, float32_products, recompute_share

SMALL_MESSAGE = 2**20  # bytes: below it a collective is latency, above it bandwidth
P2P = ("send", "recv", "isend", "irecv")


@dataclass(frozen=True)
class Figures:
    """Shares of the steps' time, and what else decides."""

    on_device: bool
    ranks: int
    input: float
    host: float
    kernel_gap: float
    sync: float
    other_rank: float
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
    attention: float
    memory: float
    float32: float
    recompute: float
    allocation: float
    allocations: float  # calls a step


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
    nestings = [Nesting.of(trace) for trace in traces]
    classes = [compute_shares(*pair) for pair in zip(traces, nestings, strict=True)]
    count = len(traces)
    allocations = [allocation_share(trace) for trace in traces]
    return Figures(
        on_device=any(trace.on_device for trace in traces),
        ranks=count,
        input=idle["input_late"],
        host=idle["host_late"],
        kernel_gap=idle["kernel_gap"],
        sync=idle["synchronisation"],
        other_rank=idle["other_rank"],
        compute=facts["compute_s"] / whole,
        exposed=facts["exposed_comm_s"] / whole,
        hidden=facts["hidden_comm_s"] / whole,
        p2p=sum(one["exposed_s"] for one in collectives if one["collective"] in P2P) / whole,
        wait=sum(skewed.get("wait_s", {}).values()) / whole,
        late_share=skewed.get("late_share", 0.0),
        late_rank=skewed.get("late_rank"),
        late_cause=skewed.get("cause", ""),
        message_bytes=sum(one["bytes"] for one in sized) / calls if calls else None,
        launches=sum(one["per_step"] for one in facts["launches"]) / count,
        short_kernels=sum(one["share_under_10us"] for one in facts["launches"]) / count,
        **{kind: sum(one[kind] for one in classes) / count for kind in ("product", "attention", "memory")},
        float32=sum(map(float32_products, traces)) / count,
        recompute=sum(recompute_share(*pair) for pair in zip(traces, nestings, strict=True)) / count,
        allocation=sum(share for share, _ in allocations) / count,
        allocations=sum(number for _, number in allocations) / count,
    )


def causes(f: Figures) -> list[Cause]:
    """All of them, each with what its remedy could give back."""
    host = f.host + f.kernel_gap
    sync = max(f.sync - f.allocation, 0.0)  # cudaMalloc and cudaFree wait for the device too
    # Without a device, what is between two ops is Python itself: fewer and larger ops help less than a compiler would.
    host_gain = (0.4, 0.9) if f.on_device else (0.1, 0.5)
    kernels, launches = ("kernels", "launches") if f.on_device else ("ops", "ops a step")
    compute, short = Evidence("compute", f.compute), Evidence(f"{kernels} under 10 µs", f.short_kernels)
    products = Evidence("products", f.compute * f.product)
    return [
        cause("input_bound", f.input, (0.7, 1.0), "idle, input late", Evidence("idle, host late", f.host), compute),
        cause("host_bound", host, host_gain, "idle, host late", Evidence(launches, f.launches, "count"), short),
        cause("sync_bound", sync, (0.5, 1.0), "idle after synchronisations", Evidence("host late", f.host), compute),
        communication(f),
        straggler(f),
        cause(
            "pipeline_bubble", f.p2p, (0.3, 0.7), "exposed sends and receives",
            Evidence("idle, other rank", f.other_rank), compute,
        ),
        cause(
            "memory_bound", f.compute * f.memory, (0.1, 0.4) if f.on_device else (0.0, 0.15),
            f"memory-bound {kernels}", products, short,
        ),
        cause(
            "compute_bound", f.compute * f.product * f.float32, (0.3, 0.7), "products in fp32",
            products, compute,
        ),
        cause(
            "allocator_bound", f.allocation, (0.7, 1.0), "host in cudaMalloc and cudaFree",
            Evidence("calls of them a step", f.allocations, "count"), compute,
        ),
        cause("recompute_heavy", f.recompute, (0.8, 1.0), "forward passes that ran again", compute, products),
    ]  # fmt: skip


def cause(
    verdict: str, share: float, part: tuple[float, float], about: str, *others: Evidence, kind: str = ""
) -> Cause:
    """`part` of the share is what the remedy gives back, at least and at most; `about` names the share."""
    return Cause(verdict, share, (part[0] * share, part[1] * share), (Evidence(about, share), *others), kind)


def communication(f: Figures) -> Cause:
    """Exposed communication, less what is a wait for a late rank, which no faster link would shorten."""
    share = max(f.exposed - f.p2p - f.wait, 0.0)
    hideable = min(share, max(f.compute - f.hidden, 0.0))
    small = f.message_bytes is not None and f.message_bytes < SMALL_MESSAGE
    kind = "latency" if small else "order" if hideable > share / 2 and f.hidden < f.exposed else "bandwidth"
    part = {"latency": (0.2, 0.7), "order": (0.3, 0.9), "bandwidth": (0.2, 0.5)}[kind]
    size = Evidence("a collective has", f.message_bytes or 0.0, "bytes")
    return cause("comm_bound", share, part, "exposed communication", Evidence("hidden", f.hidden), size, kind=kind)


def straggler(f: Figures) -> Cause:
    waits = Evidence("all ranks, in collectives before the last arrived", f.wait)
    late = Evidence("late rank", -1 if f.late_rank is None else f.late_rank, "rank")
    return cause("straggler", f.late_share, (0.6, 1.0), "the others waited", waits, late, kind=f.late_cause)

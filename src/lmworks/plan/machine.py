"""What a machine can do: rates of the few kinds of kernel that training is made of.

Either measured (`observe/probe.py` writes it, this file only reads the JSON) or from a datasheet, where every rate is
the peak and a time is therefore a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..spec import Gpu, SpecError
from .ops import Kernel

FORMAT = 1  # of the JSON; a probe written by another version is measured again


@dataclass(frozen=True)
class Rate:
    """One measured point: `rate` (FLOP/s or bytes/s) at a shape, e.g. (m, k, n) of a product, bytes of a pass."""

    shape: tuple[float, ...]
    rate: float


@dataclass(frozen=True)
class Machine:
    """`rates` maps a kernel's kind (see `ops.Kernel`) to measured points; one point means: the same at every size."""

    name: str
    device: str  # "cpu" or "cuda"
    dtype: str  # of the products
    tag: str  # "measured" or "datasheet"
    rates: Mapping[str, tuple[Rate, ...]]
    launch_s: float = 0.0  # host time of one small op, forward
    launch_backward_s: float = 0.0
    fresh_s_per_byte: float = 0.0  # first touch of memory that the allocator gave back to the system
    memory_bytes: int = 0

    def rate(self, kernel: Kernel) -> float:
        """FLOP/s or bytes/s, between the measured points: their log-rates, weighted by 1/distance² of log-shapes."""
        points = self.rates[kernel.kind]
        shape = kernel.shape or (kernel.bytes,)
        if len(points) == 1:
            return points[0].rate
        weight_sum = log_sum = 0.0
        for point in points:
            distance = sum(math.log(a / b) ** 2 for a, b in zip(shape, point.shape, strict=True))
            weight = 1 / (distance + 1e-6)
            weight_sum += weight
            log_sum += weight * math.log(point.rate)
        return math.exp(log_sum / weight_sum)

    def seconds(self, kernel: Kernel) -> float:
        """All launches of this kernel, host time not counted."""
        amount = kernel.flops if kernel.flops else kernel.bytes
        return kernel.count * amount / self.rate(kernel) if amount else 0.0

    @classmethod
    def from_gpu(cls, gpu: Gpu, dtype: str) -> Machine:
        """Datasheet peaks: no kernel reaches them, so what follows is a lower bound on time."""
        flops = gpu.peak_flops(dtype)
        if not flops or not gpu.bandwidth_gbs:
            missing = f"{dtype}_tflops" if not flops else "bandwidth_gbs"
            raise SpecError(f"{gpu.name}: {missing} is not in the catalogue, so no time can be predicted for it")
        compute, memory = (Rate((1.0,), flops),), (Rate((1.0,), gpu.bandwidth_gbs * 1e9),)
        rates = dict.fromkeys(("gemm", "attention", "attention_backward"), compute)
        rates |= dict.fromkeys(("stream", "strided", "math", "optimizer"), memory)
        return cls(gpu.name, "cuda", dtype, "datasheet", rates, memory_bytes=round(gpu.memory_gb * 1e9))

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        fields = {name: value for name, value in data.items() if name != "format"}
        fields["rates"] = {kind: read_rates(points) for kind, points in data["rates"].items()}
        return cls(**fields)


def read_rates(points: Sequence[Mapping[str, Any]]) -> tuple[Rate, ...]:
    return tuple(Rate(tuple(point["shape"]), point["rate"]) for point in points)

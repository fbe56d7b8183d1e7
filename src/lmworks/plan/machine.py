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

FORMAT = 3  # of the JSON; a probe written by another version is measured again


@dataclass(frozen=True)
class Rate:
    """One measured point: `rate` (FLOP/s or bytes/s) at a shape, e.g. (m, k, n) of a product, bytes of a pass."""

    shape: tuple[float, ...]
    rate: float


@dataclass(frozen=True)
class Machine:
    """`rates` maps a kernel's kind (see `ops.Kernel`) to measured points; one point means: the same at every size.

    Products and attention have a table for each number format, e.g. `gemm.bf16`.
    """

    name: str
    device: str  # "cpu" or "cuda"
    tag: str  # "measured" or "datasheet"
    rates: Mapping[str, tuple[Rate, ...]]
    launch_s: float = 0.0  # host time of one small op, forward
    launch_backward_s: float = 0.0
    memory_bytes: int = 0
    noise: float = 1.0  # median run over fastest run while it was measured: well above 1, something else was running

    def covers(self, dtype: str) -> bool:
        return f"gemm.{dtype}" in self.rates

    def rate(self, kernel: Kernel, dtype: str) -> float:
        """FLOP/s or bytes/s, between the measured points: their log-rates, weighted by 1/distance² of log-shapes."""
        points = self.rates.get(f"{kernel.kind}.{dtype}") or self.rates[kernel.kind]
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

    def seconds(self, kernel: Kernel, dtype: str) -> float:
        """All launches of this kernel, host time not counted."""
        amount = kernel.flops if kernel.flops else kernel.bytes
        return kernel.count * amount / self.rate(kernel, dtype) if amount else 0.0

    @classmethod
    def from_gpu(cls, gpu: Gpu) -> Machine:
        """Datasheet peaks: no kernel reaches them, so what follows is a lower bound on time."""
        if not gpu.bandwidth_gbs:
            raise SpecError(f"{gpu.name}: bandwidth_gbs is not in the catalogue, so no time can be predicted for it")
        memory = (Rate((1.0,), gpu.bandwidth_gbs * 1e9),)
        rates = dict.fromkeys(("stream", "strided", "exp", "tanh", "optimizer"), memory)
        for dtype in ("fp32", "bf16", "fp16"):
            if flops := gpu.peak_flops(dtype):
                compute = (Rate((1.0,), flops),)
                rates |= {f"{kind}.{dtype}": compute for kind in ("gemm", "attention", "attention_backward")}
        return cls(gpu.name, "cuda", "datasheet", rates, memory_bytes=round(gpu.memory_gb * 1e9))

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        fields = {name: value for name, value in data.items() if name != "format"}
        fields["rates"] = {kind: read_rates(points) for kind, points in data["rates"].items()}
        return cls(**fields)


def read_rates(points: Sequence[Mapping[str, Any]]) -> tuple[Rate, ...]:
    return tuple(Rate(tuple(point["shape"]), point["rate"]) for point in points)

"""What a machine can do: seconds of the few kinds of kernel that training is made of.

Either measured on the machine at hand (`observe/probe.py` writes it, this file only reads the JSON), or for a GPU of
the catalogue from `rates`: products by a fit to measured ones, the rest modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..spec import Gpu
from .case import Number
from .ops import Kernel
from .rates import GpuRates, gpu_rates

FORMAT = 3  # of the JSON; a probe written by another version is measured again


@dataclass(frozen=True)
class Rate:
    """One measured point: `rate` (FLOP/s or bytes/s) at a shape, e.g. (m, k, n) of a product, bytes of a pass."""

    shape: tuple[float, ...]
    rate: float


@dataclass(frozen=True)
class Machine:
    """`rates` maps a kernel's kind (see `ops.Kernel`) to measured points; one point means: the same at every size.

    Products and attention have a table for each number format, e.g. `gemm.bf16`. What was not measured is priced by
    `laws`, where there are any.
    """

    name: str
    device: str  # "cpu" or "cuda"
    tag: str  # what its products rest on: "measured", "fitted" or "modelled"
    rates: Mapping[str, tuple[Rate, ...]]
    launch_s: float = 0.0  # host time of one small op, forward
    launch_backward_s: float = 0.0
    memory_bytes: int = 0
    noise: float = 1.0  # median run over fastest run while it was measured: well above 1, something else was running
    laws: GpuRates | None = None

    @property
    def tags(self) -> dict[str, str]:
        """What each kind of kernel rests on: `gemm.bf16`, `attention`, `stream` …"""
        return {**(self.laws.tags if self.laws else {}), **dict.fromkeys(self.rates, "measured")}

    def covers(self, dtype: str) -> bool:
        return f"gemm.{dtype}" in self.tags

    def points(self, kernel: Kernel, dtype: str) -> tuple[Rate, ...]:
        return self.rates.get(f"{kernel.kind}.{dtype}") or self.rates.get(kernel.kind, ())

    def rate(self, kernel: Kernel, dtype: str) -> Number:
        """FLOP/s or bytes/s, between the measured points: their log-rates, weighted by 1/distance² of log-shapes."""
        points = self.points(kernel, dtype)
        shape = kernel.shape or (kernel.bytes,)
        if len(points) == 1:
            return points[0].rate
        weight_sum: Number = 0.0
        log_sum: Number = 0.0
        for point in points:
            distance = sum(np.log(np.maximum(a, 1.0) / b) ** 2 for a, b in zip(shape, point.shape, strict=True))
            weight = 1 / (distance + 1e-6)
            weight_sum = weight_sum + weight
            log_sum = log_sum + weight * np.log(point.rate)
        return np.exp(log_sum / weight_sum)

    def seconds(self, kernel: Kernel, dtype: str) -> Number:
        """All launches of this kernel, host time not counted. Shapes, amounts and counts may be arrays."""
        if self.laws and not self.points(kernel, dtype):
            return self.laws.seconds(kernel, dtype)
        amount = kernel.flops if np.any(kernel.flops) else kernel.bytes
        return kernel.count * amount / self.rate(kernel, dtype) if np.any(amount) else 0.0

    @classmethod
    def of(cls, gpu: Gpu, attention: str = "") -> Machine:
        """A GPU of the catalogue; `attention` as in `gpu_rates`."""
        laws = gpu_rates(gpu, attention)
        tag = laws.tags.get("gemm.bf16", "modelled")
        return cls(
            gpu.name, "cuda", tag, {}, laws.launch_s, laws.launch_backward_s, round(gpu.memory_gb * 1e9), laws=laws
        )

    def to_dict(self) -> dict[str, Any]:
        """What was measured; laws are looked up again by the GPU's name."""
        return {"format": FORMAT, **{name: value for name, value in asdict(self).items() if name != "laws"}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        fields = {name: value for name, value in data.items() if name != "format"}
        fields["rates"] = {kind: read_rates(points) for kind, points in data["rates"].items()}
        return cls(**fields)


def read_rates(points: Sequence[Mapping[str, Any]]) -> tuple[Rate, ...]:
    return tuple(Rate(tuple(point["shape"]), point["rate"]) for point in points)

"""What a machine can do: seconds of the few kinds of kernel that training is made of.

Either measured on a machine at hand (`profile` reads what was), or for a GPU of the catalogue from `rates`: products by
a fit to measured ones, the rest modelled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ...spec import Gpu
from ..case import Number
from ..memory.reserve import capacity
from ..ops import Kernel
from .rates import GpuRates, gpu_rates

FULL_GPU = 1e15  # FLOPs that fill any GPU
FORMAT = 4  # of a profile; one written by another version is measured again
QUIET_NOISE = 1.3  # noise of a machine that was left alone, at most


@dataclass(frozen=True)
class Rate:
    """One measured point: `rate` (FLOP/s or bytes/s) at a shape, e.g. (m, k, n) of a product, bytes of a pass."""

    shape: tuple[float, ...]
    rate: float


@dataclass(frozen=True)
class Machine:
    """`rates` maps a kernel's kind (see `ops.Kernel`) to measured points; one point means: the same at every size.

    Products and attention have a table for each number format, e.g. `gemm.bf16`. What was not measured is priced by
    `laws`, where there are any; where there are both, `gains` says how much faster than its law each point was.
    """

    name: str
    device: str  # "cpu" or "cuda"
    tag: str  # what its products rest on: "measured", "fitted" or "modelled"
    rates: Mapping[str, tuple[Rate, ...]]
    launch_s: float = 0.0  # host time of one small op, forward
    launch_backward_s: float = 0.0
    memory_bytes: int = 0
    noise: float = 1.0  # time of usual runs while it was measured, over what `rates` give: above QUIET, others ran too
    laws: GpuRates | None = None
    gains: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def tags(self) -> dict[str, str]:
        """What each kind of kernel rests on: `gemm.bf16`, `attention`, `stream` …"""
        return {**(self.laws.tags if self.laws else {}), **dict.fromkeys(self.rates, "measured")}

    @property
    def quiet(self) -> bool:
        """Whether it was left alone while it was measured."""
        return self.noise <= QUIET_NOISE

    @property
    def best_rates(self) -> dict[str, Any] | None:
        """The fastest measured product of each number format (FLOP/s) and the fastest pass over memory (bytes/s)."""
        best = {name: max(point.rate for point in points) for name, points in self.rates.items()}
        if "stream" not in best:
            return None
        products = {name.partition(".")[2]: rate for name, rate in best.items() if name.startswith("gemm.")}
        return {"flops_per_s": products, "bytes_per_s": best["stream"]}

    def covers(self, dtype: str) -> bool:
        name = f"gemm.{dtype}"
        return name in self.rates or (self.laws is not None and name in self.laws.tags)

    def fitted_launch(self, laws: GpuRates) -> Machine:
        """This measured machine, and for what was not measured of it the laws of its kind."""
        gains = {
            name: tuple(point.rate / law_rate(laws, name, point.shape) for point in points)
            for name, points in self.rates.items()
            if len(points) > 1 and name.partition(".")[2] in ("", *laws.gemm)
        }
        return replace(self, laws=laws, gains=gains)

    def seconds(self, kernel: Kernel, dtype: str) -> Number:
        """All launches of this kernel, host time not counted. Shapes, amounts and counts may be arrays.

        Where there are a law and points, the law says how a rate changes with size, and the points how good this very
        machine is.
        """
        name = f"{kernel.kind}.{dtype}"
        if name not in self.rates:
            # A cast to 4 bytes is like others, where nothing is known of it.
            name = "stream" if kernel.kind == "widen" and self.laws is None else kernel.kind
        if self.laws and name not in self.rates:
            return self.laws.seconds(kernel, dtype)
        size = kernel.shape or (kernel.bytes,)
        if self.laws and name in self.gains:
            return self.laws.seconds(kernel, dtype) / between(self.rates[name], self.gains[name], size)
        amount = kernel.flops if np.any(kernel.flops) else kernel.bytes
        if not np.any(amount):
            return 0.0
        points = self.rates[name]
        return kernel.count * amount / between(points, [point.rate for point in points], size)

    @classmethod
    def of(cls, gpu: Gpu, attention: str = "") -> Machine:
        """A GPU of the catalogue; `attention` as in `gpu_rates`."""
        laws = gpu_rates(gpu, attention)
        tag = laws.tags.get("gemm.bf16", "modelled")
        return cls(gpu.name, "cuda", tag, {}, laws.launch_s, laws.launch_backward_s, round(capacity(gpu)), laws=laws)

    def to_dict(self) -> dict[str, Any]:
        """What was measured, for programs."""
        measured = {name: value for name, value in asdict(self).items() if name not in ("laws", "gains")}
        return {"format": FORMAT, **measured}


def law_rate(laws: GpuRates, table: str, shape: tuple[float, ...]) -> float:
    """What a measured point would have been by the law; attention was measured with a full GPU."""
    kind, _, dtype = table.partition(".")
    if kind == "gemm":
        kernel = Kernel(kind, flops=2.0 * math.prod(shape), shape=shape)
    elif kind in ("attention", "attention_backward"):
        kernel = Kernel(kind, flops=FULL_GPU, shape=shape)
    else:
        kernel = Kernel(kind, bytes=shape[0])
    return float((kernel.flops or kernel.bytes) / laws.seconds(kernel, dtype))


def between(points: Sequence[Rate], values: Sequence[float], shape: tuple[Any, ...]) -> Number:
    """What lies between points: the mean of their values' logarithms, weighted by 1/distance⁴ of log-shapes.

    With 1/distance², dozens of far points outvote the near ones.
    """
    if len(points) == 1:
        return values[0]
    place = [np.log(np.maximum(size, 1.0)) for size in shape]
    weight_sum: Number = 0.0
    log_sum: Number = 0.0
    for point, value in zip(points, values, strict=True):
        distance = sum((a - np.log(b)) ** 2 for a, b in zip(place, point.shape, strict=True))
        weight = 1 / (distance + 1e-6) ** 2
        weight_sum = weight_sum + weight
        log_sum = log_sum + weight * np.log(value)
    return np.exp(log_sum / weight_sum)

"""The roofline of a training step: the planner's list of kernels, each at the peak rate of this device.

Matrix products and attention run at the rate of one large matmul, memory-bound kernels at the rate of one large copy,
without launch gaps; recomputation costs nothing. The distance of a step from its roofline is the cost of our kernels
and of waiting. Better kernels have a lower roofline; the model's own matmuls are the lower bound of all.

Peak rates are measured (`measured_peak_rates`) or from the datasheet (`datasheet_peak_rates`): the second is the base
of MFU, the first is what the device reaches in practice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..plan.devices.machine import Machine, Rate
from ..plan.step.one_device import step_time
from ..plan.step_flops import step_flops
from ..spec import Gpu, RunSpec
from .clock import Clock
from .kernel_timing import DTYPES

MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}  # of the square matmul
SLOW_MATMUL_SIZE = 256  # on a CPU, in formats that few CPUs have instructions for
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # bytes
SECONDS = 1.0  # for one rate
MEMORY_BOUND = ("stream", "strided", "exp", "tanh", "optimizer")  # kinds of memory-bound kernels
ATTENTION = ("attention", "attention_backward")  # compute-bound, besides matmuls


@dataclass(frozen=True)
class PeakRates:
    """Peak rates of a device."""

    source: str  # "measured" or "datasheet"
    flops: dict[str, float]  # FLOP/s of a matmul by number format
    bandwidth: float  # bytes/s of a copy, read and written

    def machine(self, device: str) -> Machine:
        """A machine that reaches them with every kernel; attention does not run in 8 bits."""
        rates = {f"gemm.{dtype}": constant(rate) for dtype, rate in self.flops.items()}
        rates |= {kind: constant(self.bandwidth) for kind in MEMORY_BOUND}
        for dtype in self.flops:
            wide = self.flops.get("bf16" if dtype == "fp8" else dtype, self.flops[dtype])
            rates |= {f"{kind}.{dtype}": constant(wide) for kind in ATTENTION}
        return Machine("the roofline", device, self.source, rates)


def constant(rate: float) -> tuple[Rate, ...]:
    """A rate that does not depend on size."""
    return (Rate((1.0,), rate),)


@dataclass(frozen=True)
class StepRoofline:
    """Lower bound of the time of a step, per device."""

    source: str
    seconds: float
    products: float  # seconds of the model's FLOPs at the peak matmul rate: the lower bound for any kernels
    parts: dict[str, float]  # of `seconds`; matmuls only, with several ranks
    tflops: float  # of a matmul in the run's number format
    bandwidth_gbs: float

    def to_dict(self, tokens: int, step_s: float) -> dict[str, Any]:
        facts = {"step_s": self.seconds, "tokens_per_s": tokens / self.seconds, "reached": self.seconds / step_s}
        facts |= {"products_s": self.products, "products_reached": self.products / step_s}
        return facts | {"matmul_tflops": self.tflops, "bandwidth_gbs": self.bandwidth_gbs, "parts": self.parts}


def step_roofline(spec: RunSpec, peak_rates: PeakRates, device: str) -> StepRoofline:
    dtype, world = spec.precision.dtype, spec.parallel.world
    rate = peak_rates.flops[dtype]
    products = step_flops(spec).model / rate / world
    if world > 1:  # communication may overlap, so only matmuls are certain to take time
        parts = {"products": products}
    else:
        here = {"recompute": "none", "recompute_budget": 0.0, "offload_activations": 0.0}
        once = spec.replace(parallel=spec.parallel.replace(**here))
        parts = {part: s for part, s in step_time(once, peak_rates.machine(device)).parts.items() if s > 0}
    return StepRoofline(
        peak_rates.source, sum(parts.values()), products, parts, rate / 1e12, peak_rates.bandwidth / 1e9
    )


def datasheet_peak_rates(gpu: Gpu) -> PeakRates:
    flops = {dtype: peak for dtype in (*DTYPES, "fp8") if (peak := gpu.peak_flops(dtype))}
    return PeakRates("datasheet", flops, gpu.bandwidth_gbs * 1e9)


def measured_peak_rates(device: torch.device, dtype: str, seconds: float = SECONDS) -> PeakRates:
    """One large matmul in `dtype` (for fp8 also in bf16, for the other kernels), and one large copy."""
    clock = Clock(device, max_overrun=2.0)
    formats = ["bf16", "fp8"] if dtype == "fp8" else [dtype]
    flops = {}
    for one in formats:
        clock.begin(f"products {one}", seconds, 1)
        slow = device.type == "cpu" and one != "fp32"
        side = SLOW_MATMUL_SIZE if slow else MATMUL_SIZE[device.type]
        flops[one] = 2.0 * side**3 / clock(product(side, one, device))
    clock.begin("copy", seconds, 1)
    source = torch.zeros(COPY_BYTES[device.type] // 4, device=device)
    took = clock(partial(torch.empty_like(source).copy_, source))
    found = PeakRates("measured", flops, 2.0 * source.nbytes / took)
    del clock, source
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next step may need all memory
    return found


def product(side: int, dtype: str, device: torch.device) -> Callable[[], object]:
    left, right = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    if dtype != "fp8":
        return partial(torch.mm, left.to(DTYPES[dtype]), right.to(DTYPES[dtype]))
    one = torch.ones((), device=device)
    narrow = (
        left.to(torch.float8_e4m3fn),
        right.to(torch.float8_e4m3fn).t(),
    )  # the second operand column-major, as required
    return partial(torch._scaled_mm, *narrow, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

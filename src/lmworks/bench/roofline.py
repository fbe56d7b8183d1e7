"""The floor of a training step: the planner's own list of kernels, every one at the best that this device can do.

Products and attention run at the rate of one large product, passes over memory at the rate of one large copy, and
nothing is ever launched late. What is computed again counts as nothing. So the floor is of the work as a spec asks for
it and as our kernels divide it; how far a step is from it says what these kernels and waiting cost. Better kernels have
a lower floor. Below the time of the model's own products there is none.

Rates are measured here (`measured_ceilings`), or a datasheet's (`datasheet_ceilings`): the second is the yardstick of
MFU, the first is what anybody has got out of the card.
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

SIDE = {"cuda": 8192, "cpu": 1024}  # of the square product
SLOW_SIDE = 256  # on a CPU, in formats that few of them have instructions for
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes
SECONDS = 1.0  # for one rate
MEMORY = ("stream", "strided", "exp", "tanh", "optimizer")  # kinds of kernel that a copy is the limit of
PRODUCTS = ("attention", "attention_backward")  # besides matrix products


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at best."""

    source: str  # "measured" or "datasheet"
    flops: dict[str, float]  # FLOP/s of a product by number format
    bandwidth: float  # bytes/s of a copy, read and written

    def machine(self, device: str) -> Machine:
        """One that reaches them with every kernel; attention is not done in 8 bits."""
        rates = {f"gemm.{dtype}": constant(rate) for dtype, rate in self.flops.items()}
        rates |= {kind: constant(self.bandwidth) for kind in MEMORY}
        for dtype in self.flops:
            wide = self.flops.get("bf16" if dtype == "fp8" else dtype, self.flops[dtype])
            rates |= {f"{kind}.{dtype}": constant(wide) for kind in PRODUCTS}
        return Machine("the floor", device, self.source, rates)


def constant(rate: float) -> tuple[Rate, ...]:
    """The same at every size."""
    return (Rate((1.0,), rate),)


@dataclass(frozen=True)
class Floor:
    """The least time of a step on one device, or on each of several."""

    source: str
    seconds: float
    products: float  # seconds of what the model needs at the rate of one large product: below this nobody gets
    parts: dict[str, float]  # of `seconds`; products alone where several ranks share the work
    tflops: float  # of a product in the run's number format
    bandwidth_gbs: float

    def to_dict(self, tokens: int, step_s: float) -> dict[str, Any]:
        facts = {"step_s": self.seconds, "tokens_per_s": tokens / self.seconds, "reached": self.seconds / step_s}
        facts |= {"products_s": self.products, "products_reached": self.products / step_s}
        return facts | {"matmul_tflops": self.tflops, "bandwidth_gbs": self.bandwidth_gbs, "parts": self.parts}


def floor(spec: RunSpec, ceilings: Ceilings, device: str) -> Floor:
    dtype, world = spec.precision.dtype, spec.parallel.world
    rate = ceilings.flops[dtype]
    products = step_flops(spec).model / rate / world
    if world > 1:  # messages may hide behind products, and then nothing but these is sure to take time
        parts = {"products": products}
    else:
        here = {"recompute": "none", "recompute_budget": 0.0, "offload_activations": 0.0}
        once = spec.replace(parallel=spec.parallel.replace(**here))
        parts = {part: s for part, s in step_time(once, ceilings.machine(device)).parts.items() if s > 0}
    return Floor(ceilings.source, sum(parts.values()), products, parts, rate / 1e12, ceilings.bandwidth / 1e9)


def datasheet_ceilings(gpu: Gpu) -> Ceilings:
    flops = {dtype: peak for dtype in (*DTYPES, "fp8") if (peak := gpu.peak_flops(dtype))}
    return Ceilings("datasheet", flops, gpu.bandwidth_gbs * 1e9)


def measured_ceilings(device: torch.device, dtype: str, seconds: float = SECONDS) -> Ceilings:
    """One large product in `dtype` (for fp8 in bf16 too, which the rest runs in), and one large copy."""
    clock = Clock(device, patience=2.0)
    formats = ["bf16", "fp8"] if dtype == "fp8" else [dtype]
    flops = {}
    for one in formats:
        clock.begin(f"products {one}", seconds, 1)
        slow = device.type == "cpu" and one != "fp32"
        side = SLOW_SIDE if slow else SIDE[device.type]
        flops[one] = 2.0 * side**3 / clock(product(side, one, device))
    clock.begin("copy", seconds, 1)
    source = torch.zeros(COPIED[device.type] // 4, device=device)
    took = clock(partial(torch.empty_like(source).copy_, source))
    found = Ceilings("measured", flops, 2.0 * source.nbytes / took)
    del clock, source
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what comes next may need all of the memory
    return found


def product(side: int, dtype: str, device: torch.device) -> Callable[[], object]:
    left, right = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    if dtype != "fp8":
        return partial(torch.mm, left.to(DTYPES[dtype]), right.to(DTYPES[dtype]))
    one = torch.ones((), device=device)
    narrow = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()  # the second by columns, as the GPU wants
    return partial(torch._scaled_mm, *narrow, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

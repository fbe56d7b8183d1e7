"""The roofline of a training step: the planner's list of kernels, each at the peak rate of this device.

Matrix products and attention run at the rate of one large matmul, memory-bound kernels at the rate of one large copy,
without launch gaps; recomputation costs nothing. The distance of a step from its roofline is the cost of our kernels
and of waiting. Better kernels have a lower roofline; the model's own matmuls are the lower bound of all.

Peak rates are measured (`measured_peak_rates`) or from the datasheet (`datasheet_peak_rates`): the second is the base
of MFU, the first is what the device reaches in practice.

The roofline of a decoding step: the bytes it must read over memory bandwidth.

A step reads every weight once, whatever the batch, except input embeddings (one row per token) and experts without
tokens, and the keys and values of every sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..engine.core.kv_cache import KVCacheShape
from ..model import GPT
from ..plan.devices.machine import Machine, Rate
from ..plan.predict import step_flops
from ..plan.serving.served_model import ServedModel
from ..plan.step.one_device import step_time
from ..spec import Gpu, RunSpec
from .clock import Clock
from .kernel_timing import DTYPES

MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}  # of the square matmul
SLOW_MATMUL_SIZE = 256  # on a CPU, in formats that few CPUs have instructions for
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # of the copy that measures bandwidth
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


# --- decode roofline -------------------------------------------------------------------------------------


COPIES = 10


@dataclass(frozen=True)
class DecodeRoofline:
    """Of one model on one device; `seconds`: of a step with `batch` sequences of `context` tokens."""

    model: GPT
    cache: KVCacheShape
    bandwidth: float  # bytes/s, reading and writing together

    def seconds(self, batch: int, context: float) -> float:
        return (self.weight_bytes(batch) + self.kv_bytes(batch, context)) / self.bandwidth

    def weight_bytes(self, batch: int) -> float:
        routed = sum(tensor.nbytes for tensor in expert_tensors(self.model))
        seen = ServedModel.of(self.model.spec).experts
        visited = float(seen.distinct(batch)) / seen.count if seen else 1.0
        return stored_bytes(self.model) - lookup_bytes(self.model) - routed * (1 - visited)

    def kv_bytes(self, batch: int, context: float) -> float:
        spec = self.model.spec
        reach = sum(min(context, spec.window_of(layer) or context) for layer in range(spec.layers)) / spec.layers
        return batch * reach * self.cache.block_bytes / self.cache.size


def stored_bytes(model: GPT) -> int:
    """Tied weights count once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def lookup_bytes(model: GPT) -> int:
    """Bytes of tables of which a token reads one row; a tied embedding is read whole, by the head."""
    tables = [model.positions]
    if not model.spec.tie_embeddings:
        tables.append(model.embed)
    return sum(table.weight.nbytes for table in tables if table is not None)


def expert_tensors(model: GPT) -> list[Tensor]:
    """Weights of shape (experts, out, in), without the router."""
    return [tensor for tensor in model.parameters() if tensor.dim() == 3]


def measure_bandwidth(device: torch.device) -> float:
    """Bytes/s of a copy, read and written: the best of a few."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(copy_seconds(source, target) for _ in range(COPIES))
    return 2 * source.nbytes / seconds


def copy_seconds(source: Tensor, target: Tensor) -> float:
    """On a GPU by CUDA events: host time would include a launch and a synchronisation, some percent."""
    if not source.is_cuda:
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    target.copy_(source)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3

"""Rates of the kernels of training on this device.

Each kind of kernel in `plan/ops.py` runs at several sizes, as in training: matmuls in their three layouts (forward,
gradient of the input, gradient of the weight), attention forward and backward, element-wise ops, fused AdamW, and
tiny ops that cost only their launch. Isolated times are recorded (`clock.py`). Small sizes come first: when the time
is over, the slow ones are left out.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from ..data.progress import Progress, silent
from ..plan.devices.machine import Machine, Rate
from ..plan.flops import keys_per_query
from .clock import Clock

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Sizes:
    matmuls: tuple[tuple[int, int, int], ...]  # (tokens, inputs, outputs) of linear layers
    attentions: tuple[tuple[int, int, int, int], ...]  # (batch, heads, seq, head_dim)
    elementwise: tuple[int, ...]  # elements of one fp32 tensor
    optimizer: tuple[int, ...]  # parameters
    messages: tuple[int, ...]  # bytes of a collective's whole buffer
    max_overrun: float = 2.0  # factor by which a stage may exceed its time before the remaining sizes are skipped


QUICK = {
    "cpu": Sizes(
        matmuls=(
            (512, 128, 128), (2048, 192, 192), (2048, 192, 512), (2048, 256, 1024), (512, 256, 4096),
            (1024, 1024, 1024),
        ),
        attentions=((8, 4, 128, 32), (4, 6, 256, 32), (2, 4, 512, 64)),
        elementwise=(2**16, 2**18, 2**20, 2**22),
        optimizer=(2**22,),
        messages=(4 * KIB, 128 * KIB, 4 * MIB),
        max_overrun=8.0,  # no size may be skipped
    ),
    "cuda": Sizes(
        matmuls=(
            (2048, 256, 1024), (8192, 768, 768), (8192, 768, 3072), (2048, 768, 32768), (8192, 2048, 8192),
            (16384, 4096, 4096),
        ),
        attentions=((64, 12, 256, 64), (16, 12, 1024, 64), (4, 32, 4096, 128)),
        elementwise=(2**18, 2**22, 2**24, 2**26),
        optimizer=(2**27,),
        messages=(32 * KIB, 2 * MIB, 128 * MIB),
        max_overrun=8.0,
    ),
}  # fmt: skip

FULL = {
    "cpu": Sizes(
        matmuls=(
            (128, 128, 128), (512, 128, 128), (256, 192, 512), (128, 512, 512), (2048, 192, 192), (1024, 256, 256),
            (4096, 128, 384), (2048, 192, 512), (1024, 512, 512), (512, 512, 1536), (2048, 256, 1024), (512, 256, 4096),
            (4096, 384, 384), (1024, 768, 768), (1024, 1024, 1024), (4096, 256, 1024), (512, 512, 8192),
            (2048, 512, 2048), (1024, 768, 3072), (2048, 1024, 4096),
        ),
        attentions=(
            (8, 4, 64, 32), (8, 4, 128, 32), (8, 4, 128, 64), (4, 6, 256, 32), (4, 4, 256, 64), (4, 2, 256, 128),
            (2, 4, 512, 32), (2, 4, 512, 64), (2, 2, 512, 128), (1, 4, 1024, 64), (1, 4, 2048, 64),
        ),
        elementwise=(2**14, 2**16, 2**18, 2**20, 2**22, 2**24),
        optimizer=(2**20, 2**22, 2**24),
        messages=(KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    ),
    "cuda": Sizes(
        matmuls=(
            (2048, 256, 1024), (1024, 1024, 1024), (4096, 768, 768), (8192, 768, 3072), (4096, 1024, 4096),
            (2048, 2048, 6144), (2048, 768, 32768), (4096, 4096, 4096), (16384, 2048, 2048), (8192, 2048, 8192),
            (4096, 4096, 14336), (16384, 4096, 4096), (8192, 5120, 7680), (4096, 8192, 10240), (2048, 4096, 128256),
            (16384, 4096, 14336), (8192, 8192, 28672),
        ),
        attentions=(
            (64, 16, 256, 64), (32, 32, 512, 64), (32, 16, 512, 128), (16, 32, 1024, 64), (16, 16, 1024, 128),
            (8, 32, 2048, 64), (8, 16, 2048, 128), (4, 32, 4096, 64), (4, 16, 4096, 128), (2, 16, 8192, 128),
            (1, 16, 16384, 128),
        ),
        elementwise=(2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**27),
        optimizer=(2**22, 2**25, 2**27),
        messages=(
            512, 2 * KIB, 8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB, 128 * MIB, 512 * MIB,
        ),
    ),
}  # fmt: skip


# --- times -----------------------------------------------------------------------------------------------


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LONG = 4  # weight of an optimizer point in the time budget


def measure(device: torch.device, seconds: float, sizes: Sizes, progress: Progress = silent) -> Machine:
    """All kinds of kernel, in about `seconds`."""
    clock = Clock(device, sizes.max_overrun, progress)
    dtypes = supported(device)
    matmuls, attentions = 3 * len(sizes.matmuls), 2 * len(sizes.attentions)
    elementwise, updates = 4 * len(sizes.elementwise), len(sizes.optimizer)
    each = seconds / (len(dtypes) * (matmuls + attentions) + elementwise + LONG * updates + 2)
    rates: dict[str, tuple[Rate, ...]] = {}
    for dtype in dtypes:
        clock.begin(f"products {dtype}", each * matmuls, matmuls)
        rates[f"gemm.{dtype}"] = measure_matmuls(clock, DTYPES[dtype], sizes)
        clock.begin(f"attention {dtype}", each * attentions, attentions)
        forward, backward = measure_attention(clock, DTYPES[dtype], sizes)
        rates[f"attention.{dtype}"], rates[f"attention_backward.{dtype}"] = forward, backward
    clock.begin("memory", each * elementwise, elementwise)
    rates |= measure_elementwise(clock, sizes)
    clock.begin("optimizer", each * LONG * updates, updates)
    rates["optimizer"] = measure_optimizer(clock, sizes)
    clock.begin("launches", each * 2, 2)
    launch, launch_backward = measure_launches(clock)
    return Machine(
        name=device_name(device),
        device=device.type,
        tag="measured",
        rates=rates,
        launch_s=launch,
        launch_backward_s=launch_backward,
        memory_bytes=memory_bytes(device),
        noise=digits(clock.noise),
    )


def supported(device: torch.device) -> list[str]:
    """Number formats for training; fp16 is not used on CPUs."""
    if device.type == "cpu":
        return ["fp32", "bf16"]
    return ["fp32", *(["bf16"] if torch.cuda.is_bf16_supported(including_emulation=False) else []), "fp16"]


def measure_matmuls(clock: Clock, dtype: torch.dtype, sizes: Sizes) -> tuple[Rate, ...]:
    """x·Wᵀ, grad·W and gradᵀ·x of each linear layer, each a point of its own shape."""
    points: list[Rate] = []
    for tokens, inputs, outputs in sizes.matmuls:
        flops = 2 * tokens * inputs * outputs
        if points and not clock.has_time(3 * flops / fastest(points)):
            break
        x = torch.randn(tokens, inputs, device=clock.device).to(dtype)
        weight = torch.randn(outputs, inputs, device=clock.device).to(dtype)
        grad = torch.randn(tokens, outputs, device=clock.device).to(dtype)
        for left, right in [(x, weight.t()), (grad, weight), (grad.t(), x)]:
            shape = (left.shape[0], left.shape[1], right.shape[1])
            points.append(Rate(shape, digits(flops / clock(partial(torch.mm, left, right)))))
    return tuple(points)


def measure_attention(clock: Clock, dtype: torch.dtype, sizes: Sizes) -> tuple[tuple[Rate, ...], tuple[Rate, ...]]:
    """Causal attention: FLOPs over visible keys, 2 matmuls forward and 5 backward (scores are recomputed)."""
    forward: list[Rate] = []
    backward: list[Rate] = []
    for batch, heads, seq, head_dim in sizes.attentions:
        flops = 4 * batch * heads * seq * head_dim * keys_per_query(seq)
        if backward and not clock.has_time(flops / fastest(forward) + 2.5 * flops / fastest(backward)):
            break
        q, k, v = (
            torch.randn(batch, seq, heads, head_dim, device=clock.device).to(dtype).transpose(1, 2).requires_grad_()
            for _ in range(3)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.randn_like(out)
        shape = (seq, head_dim)

        def run(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
            with torch.no_grad():
                F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def run_back(out: torch.Tensor = out, grad: torch.Tensor = grad, qkv: tuple = (q, k, v)) -> None:
            torch.autograd.grad(out, qkv, grad, retain_graph=True)

        forward.append(Rate(shape, digits(flops / clock(run))))
        backward.append(Rate(shape, digits(2.5 * flops / clock(run_back))))
    return tuple(forward), tuple(backward)


def measure_elementwise(clock: Clock, sizes: Sizes) -> dict[str, tuple[Rate, ...]]:
    """Element-wise ops into new memory, by bytes read and written."""
    rates: dict[str, list[Rate]] = {"stream": [], "strided": [], "exp": [], "tanh": []}
    heads, head_dim = 8, 64
    for elements in sizes.elementwise:
        a, b = torch.randn(elements, device=clock.device), torch.randn(elements, device=clock.device)
        x, table = a.view(-1, heads, head_dim), b.view(-1, heads, head_dim)[:, :1]  # a row per position
        kernels: dict[str, tuple[int, Callable[[], object]]] = {
            "stream": (12, partial(torch.mul, a, b)),
            "exp": (8, partial(F.silu, a)),
            "tanh": (8, partial(F.gelu, a, approximate="tanh")),
            "strided": (8, partial(torch.mul, x, table)),
        }
        for kind, (width, work) in kernels.items():
            rates[kind].append(Rate((width * elements,), digits(width * elements / clock(work))))
    return {kind: tuple(points) for kind, points in rates.items()}


def measure_optimizer(clock: Clock, sizes: Sizes) -> tuple[Rate, ...]:
    """Fused AdamW over tensors of a million parameters: reads p, g, m, v and writes p, m, v."""
    points: list[Rate] = []
    for count in sizes.optimizer:
        if points and not clock.has_time(28 * count / fastest(points)):
            break
        parameters = [torch.nn.Parameter(torch.zeros(2**20, device=clock.device)) for _ in range(count // 2**20)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        adamw = torch.optim.AdamW(parameters, fused=True)
        points.append(Rate((28 * count,), digits(28 * count / clock(adamw.step))))
    return tuple(points)


def measure_launches(clock: Clock) -> tuple[float, float]:
    """Host seconds of one small op: called from Python with autograd recording, and its backward node."""
    count, x = 200, torch.ones(8, device=clock.device, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for _ in range(count):
            y = y * x
        return y

    once = clock(forward, host_time=True) / count
    both = clock(lambda: forward().sum().backward(), host_time=True) / count
    return digits(once), digits(max(0.0, both - once) / 2)  # two products and a sum in each node: see plan/ops.py


def fastest(points: list[Rate]) -> float:
    """The rate expected of larger sizes."""
    return max(point.rate for point in points)


def digits(value: float) -> float:
    """Rounded to five significant digits: the rest is noise."""
    return float(f"{value:.5g}")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {torch.get_num_threads()} threads"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # not available on every system
        return 0

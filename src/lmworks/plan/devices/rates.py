"""Time of a kernel on a GPU of the catalogue: GEMMs by shape, attention, and passes over memory.

A GPU cuts the result of a GEMM into tiles and gives each streaming multiprocessor (SM) one at a time. The last wave
leaves some idle, a small GEMM cannot fill them, and a short inner dimension hardly pays for starting a tile.
Operands come from memory, and a long GEMM at full power makes the clock drop. Seven constants say how much of each,
fitted to this very GPU where its GEMMs were measured, to its family where a sister's were, else to all:
`validation/fit_gemm.py` writes `gemm.toml`. Attention and passes over memory take a share of the datasheet
(`rates.toml`, by hand). Numbers may be arrays of candidates.
"""

from __future__ import annotations

import csv
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...spec import Gpu, SpecError
from ...spec.errors import did_you_mean
from ..case import Number
from ..ops import GEMM_ONLY, Kernel

# A large tile and a small one, whole or with the inner dimension cut in four: a library picks the fastest of many, and
# more of them made no measured product cheaper to predict.
TILES = ((256, 128), (64, 64))
SPLITS = (1, 4)
PARTIAL_BYTES = 8  # of one number of a partial sum: fp32, written and read again
HEAT_S = 3e-3  # a product this long shows half of the drop of the clock
LOAD_BYTES = 16  # that one load takes; tensor cores read rows that begin at a multiple of it
UNALIGNED = 0.25  # rate ∝ (bytes that divide a row / bytes that should)^this: 0.59 for 50257 columns of 2 bytes


@dataclass(frozen=True)
class GemmRate:
    """What a GPU does with products of one number format."""

    flops: float  # FLOP/s that the best long product comes near
    bandwidth: float  # bytes/s of memory, from the datasheet
    sms: int
    wave: float  # 1: a round of tiles costs the same whether full or not; 0: an idle SM costs nothing
    ramp: float  # starting and ending a tile, in units of the inner dimension
    tile: float  # how much a small tile loses to a large one
    memory: float  # share of the bandwidth that operands get
    launch_s: float  # of an empty product
    heat: float  # slow-down of a very long product
    sustained: float = 1.0  # of these rates hour after hour, where that was seen
    width: float = 2.0  # bytes of one number of the operands
    result_width: float = 2.0
    aligned: float = LOAD_BYTES  # bytes that a row's length should be a multiple of
    unaligned_batch_flops: float = 0.0  # FLOP/s of many products in one launch whose rows do not fit loads; 0: the same

    @property
    def ceiling(self) -> float:
        """FLOP/s that no product exceeds."""
        return self.flops * self.sustained


def gemm_seconds(
    m: Number, k: Number, n: Number, rate: GemmRate, batch: Number = 1, over_tokens: bool = False, heads: bool = False
) -> Number:
    """(m × k)·(k × n), `batch` of them priced as one launch; `over_tokens` and `heads` as a `Kernel` has them."""
    operands = rate.width * (m * k + k * n) + rate.result_width * m * n
    flops = product_flops(n if over_tokens else k, n, rate, heads)
    best: Number = np.inf
    for rows, columns in TILES:
        loss = (1 + rate.tile * (1 / rows + 1 / columns)) / (1 + rate.tile * (1 / TILES[0][0] + 1 / TILES[0][1]))
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
        for split in SPLITS:
            rounds = tiles * split / rate.sms
            rounds = rate.wave * np.ceil(rounds) + (1 - rate.wave) * np.maximum(rounds, 1)
            work = 2.0 * rows * columns * (k / split + rate.ramp) * rate.sms
            compute = rounds * work * loss / flops
            partial = PARTIAL_BYTES * split * m * n if split > 1 else 0
            memory = batch * (operands + partial) / (rate.bandwidth * rate.memory)
            best = np.minimum(best, compute * compute * compute + memory * memory * memory)
    best = np.cbrt(best)  # the longer of the two, and a little of the other
    each = best / batch
    return (best * (1 + rate.heat * each / (each + HEAT_S)) + rate.launch_s) / rate.sustained


def product_flops(k: Number, n: Number, rate: GemmRate, heads: bool = False) -> Number:
    """FLOP/s that operands with rows of these lengths leave, by the power of two that divides them. Modelled.

    Rows that do not start at a multiple of 16 bytes are loaded in smaller pieces; on Ampere, whose libraries have
    kernels by alignment, whole lines of 128 bytes are best, and batched products of rows that do not fit 16 bytes
    (attention with heads of 108) run without tensor cores. A number of tokens does not count: they lie one after
    another however many they are.
    """
    load, line = (2 ** int(np.log2(each / rate.width)) for each in (LOAD_BYTES, rate.aligned))
    k, n = np.asarray(k).astype(np.int64), np.asarray(n).astype(np.int64)
    shortest = np.minimum(np.gcd(k, line), np.gcd(n, line))
    share = np.minimum(np.minimum(shortest, load) / load, np.maximum(shortest, load) / line)
    flops = rate.flops * share**UNALIGNED
    if not (heads and rate.unaligned_batch_flops):
        return flops
    return np.where(shortest < load, np.minimum(flops, rate.unaligned_batch_flops), flops)[()]


# --- a GPU of the catalogue ------------------------------------------------------------------------------


FOLDER = Path(__file__).parent
# Operands, result. fp4: half a byte, and a byte of scale for 16 of them (NVFP4).
WIDTHS = {"fp32": (4.0, 4.0), "bf16": (2.0, 2.0), "fp16": (2.0, 2.0), "fp8": (1.0, 2.0), "fp4": (0.5625, 2.0)}
GENERIC_SMS = 128
BLOCK = 128  # rows of queries that one SM takes at a time
HEAD = 128  # dimension of the heads that attention's shares are given for


@functools.cache
def table(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))


@functools.cache
def best_matmul(accelerators: tuple[str, ...], dtype: str) -> float | None:
    """FLOP/s of the fastest product that was measured, of the first of these accelerators that has one."""
    with (FOLDER / "matmul.csv").open(encoding="utf-8", newline="") as lines:
        best = {(row["accelerator"], row["dtype"]): float(row["mamf_tflops"]) * 1e12 for row in csv.DictReader(lines)}
    return next((best[name, dtype] for name in accelerators if (name, dtype) in best), None)


@dataclass(frozen=True)
class AttentionRate:
    """Fused attention: `forward` and `backward` are FLOP/s of an endless sequence with heads of 128, causal."""

    forward: float
    backward: float
    half: float  # sequence at which half of that is reached
    half_backward: float
    head: float
    sms: int
    start_s: float

    def seconds(self, kernel: Kernel) -> Number:
        seq, head_dim = kernel.shape
        backward = kernel.kind == "attention_backward"
        rate, half, products = (self.backward, self.half_backward, 2.5) if backward else (self.forward, self.half, 1.0)
        narrow = np.minimum(head_dim, HEAD)
        rate = rate * seq / (seq + half) * narrow / (narrow + self.head) * (HEAD + self.head) / HEAD
        rows = kernel.flops / (2.0 * products * seq * head_dim)  # of all heads: each sees half of the sequence
        busy = np.minimum(1.0, rows / (BLOCK * self.sms))  # a few short sequences leave SMs idle
        return kernel.flops / (rate * np.maximum(busy, 1e-3)) + self.start_s


@dataclass(frozen=True)
class GpuRates:
    gemm: Mapping[str, GemmRate]  # by number format
    attention: Mapping[str, AttentionRate]
    bandwidth: Mapping[str, float]  # bytes/s by kind of pass
    start_s: float  # of a pass over nothing
    launch_s: float
    launch_backward_s: float
    tags: Mapping[str, str]  # what each kind rests on: "fitted" or "modelled"

    def seconds(self, kernel: Kernel, dtype: str) -> Number:
        """All launches of this kernel, host time not counted.

        Equal products are priced as one batched launch, as scores of attention and experts are computed; where each of
        them fills the GPU it makes no difference.
        """
        if kernel.kind in ("gemm", "attention", "attention_backward") and dtype not in self.gemm:
            known = ", ".join(sorted(self.gemm))
            raise SpecError(f"precision {dtype}: this accelerator's peak is not in the catalogue, only that of {known}")
        if kernel.kind == "gemm":
            m, k, n = kernel.shape
            batch, rate = np.maximum(kernel.count, 1), self.gemm[dtype]
            seconds = gemm_seconds(m, k, n, rate, batch, kernel.over_tokens, kernel.batched)
            return seconds * np.minimum(kernel.count, 1)
        if kernel.kind in ("attention", "attention_backward"):
            return kernel.count * self.attention[dtype].seconds(kernel)
        return kernel.count * (kernel.bytes / self.bandwidth[kernel.kind] + self.start_s * np.sign(kernel.bytes))


def gpu_rates(gpu: Gpu, attention: str = "") -> GpuRates:
    """`attention` names a kernel of rates.toml (fa1, fa2, fa3, cudnn); by default what PyTorch takes on this GPU."""
    if not gpu.bandwidth_gbs:
        raise SpecError(f"{gpu.name}: bandwidth_gbs is not in the catalogue, so no time can be predicted for it")
    bandwidth, passes = gpu.bandwidth_gbs * 1e9, table("rates.toml")["passes"]
    start = passes["start_us"] * 1e-6
    kinds = ("stream", "strided", "widen", "exp", "tanh", "optimizer")
    peaks = {dtype: peak for dtype in WIDTHS if (peak := gpu.peak_flops(dtype))}
    fitted = "fitted" if gpu.name in table("gemm.toml")["gpus"] else "modelled"
    tags = {f"gemm.{dtype}": fitted if dtype in ("bf16", "fp16") else "modelled" for dtype in peaks}
    tags |= dict.fromkeys((*kinds, "attention", "attention_backward"), "modelled")
    return GpuRates(
        gemm={dtype: gemm_rate(gpu, dtype) for dtype in peaks},
        attention={dtype: attention_rate(gpu, dtype, attention, start) for dtype in peaks},
        bandwidth={kind: bandwidth * passes[kind] for kind in kinds},
        start_s=start,
        launch_s=passes["launch_us"] * 1e-6,
        launch_backward_s=passes["launch_backward_us"] * 1e-6,
        tags=tags,
    )


def facts(gpu: Gpu) -> dict[str, Any]:
    return table("rates.toml")["gpus"].get(gpu.name, {})


def gemm_rate(gpu: Gpu, dtype: str, fits: Mapping[str, Any] | None = None) -> GemmRate:
    """Constants of this GPU, else of its family, else of all; `fits` other than `gemm.toml` are for trying them out."""
    fits = fits or table("gemm.toml")
    known = facts(gpu)
    constants = fits["gpus"].get(gpu.name) or fits["families"].get(known.get("family")) or fits["generic"]
    family = table("rates.toml")["families"].get(known.get("family"), {})
    width, result_width = WIDTHS[dtype]
    return GemmRate(
        flops=ceiling(gpu, dtype, constants),
        bandwidth=gpu.bandwidth_gbs * 1e9,
        sms=known.get("sms", GENERIC_SMS),
        wave=constants["wave"],
        ramp=constants["ramp"],
        tile=constants["tile"],
        memory=constants["memory"],
        launch_s=constants["launch_us"] * 1e-6,
        heat=constants["heat"],
        sustained=family.get("sustained", 1.0),
        width=width,
        result_width=result_width,
        aligned=family.get("aligned", LOAD_BYTES),
        unaligned_batch_flops=(gpu.peak_flops("fp32") or 0.0) if "aligned" in family and width == 2 else 0.0,
    )


def ceiling(gpu: Gpu, dtype: str, constants: Mapping[str, float]) -> float:
    """FLOP/s of a perfect product: from the best one measured in this format, else a share of the datasheet.

    The best product of a published search lies near the fitted ceiling: `of_best` is their ratio.
    """
    peak = gpu.peak_flops(dtype) or 0.0
    alike = dtype == "fp16" and gpu.fp16_tflops == gpu.bf16_tflops
    searched = "bf16" if alike else dtype
    best = best_matmul(tuple(facts(gpu).get("matmul", ())), searched)
    if best and "of_best" in constants:
        return min(best * constants["of_best"], peak)
    return peak * constants["ceiling"]


def attention_rate(gpu: Gpu, dtype: str, kernel: str, start_s: float) -> AttentionRate:
    """fp8 and fp4 products go with 16-bit attention; fp32 has no flash kernel: the generic share of its own peak."""
    known, rates = facts(gpu), table("rates.toml")
    family = known.get("family", "")
    kernels = rates["attention"]
    if kernel and kernel not in kernels:
        raise SpecError(f"attention = {kernel!r} is not known{did_you_mean(kernel, [*kernels])}")
    name = kernel or rates["families"].get(family, {}).get("attention", "")
    shares = kernels.get(name, {}).get(family) or kernels["generic"]
    if dtype == "fp32":
        shares = kernels["generic"]
    peak = gpu.peak_flops("bf16" if dtype in GEMM_ONLY else dtype) or 0.0
    return AttentionRate(
        forward=shares["forward"] * peak,
        backward=shares["backward"] * peak,
        half=shares["half"],
        half_backward=shares["half_backward"],
        head=shares["head"],
        sms=known.get("sms", GENERIC_SMS),
        start_s=start_s,
    )

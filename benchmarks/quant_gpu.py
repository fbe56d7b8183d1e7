"""Linear layers of a decoding step on one GPU: bf16, int8, int4 and fp8 beside what torch has, and beside memory.

    python benchmarks/quant_gpu.py                      every kind and shape; writes benchmarks/results/quant_gpu.json
    python benchmarks/quant_gpu.py tune KIND [ROWS …]   tiles that a product may be cut into, the best for each shape

Weights are taken in turn from copies that together are larger than the L2 cache, in one CUDA graph, as a step does it.
A floor is the bytes of a weight over PACE, the highest rate that a copy reaches on an H200.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from common import write_result
from torch import Tensor

from lmworks.kernels.inference import linear_triton, quantized, quantized_triton
from lmworks.kernels.inference.linear_triton import Tile
from lmworks.kernels.training import float8_triton

PACE = 4.27e12  # bytes/s
COLD = 240e6  # bytes that the copies of a weight take together
SHAPES = {  # (channels, inputs)
    "8b qkv": (6144, 4096),
    "8b out": (4096, 4096),
    "8b gate-up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b head": (128256, 4096),
    "0.6b qkv": (4096, 1024),
    "0.6b out": (1024, 2048),
    "0.6b gate-up": (6144, 1024),
    "0.6b down": (1024, 3072),
    "0.6b head": (151936, 1024),
}
TUNED = {name: shape for name, shape in SHAPES.items() if name.startswith("8b") or name in ("0.6b out", "0.6b gate-up")}
LAYERS = {"8b": 32, "0.6b": 28}
ROWS = (1, 8, 16, 32, 64, 128, 256)
Linear = Callable[[Tensor], Tensor]
PassCost = Callable[[str, tuple[Tensor, ...]], Linear]


def make(kind: str, channels: int, inputs: int, seed: int) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    weight = torch.randn(channels, inputs, device="cuda", dtype=torch.bfloat16) * 0.02
    if kind == "int8":
        return quantized.int8_quantize(weight)
    if kind == "int4":
        scale = quantized.int4_scale(weight, 128)
        return quantized.int4_pack(quantized.int4_round(weight, scale), 128), scale
    if kind == "fp8":
        return quantized.fp8_quantize(weight)
    return (weight,)


def ours(kind: str, tensors: tuple[Tensor, ...]) -> Linear:
    """The kernels of ours, whatever the number of rows."""
    if kind == "bf16":
        return lambda x: linear_triton.linear(x, tensors[0])
    if kind == "int8":
        return lambda x: quantized_triton.int8_linear(x, *tensors)
    if kind == "int4":
        return lambda x: quantized_triton.int4_linear(x, *tensors)
    return lambda x: linear_triton.fp8_linear(*float8_triton.quantize_rows(x, quantized.FP8), *tensors, x.dtype)


def widened(kind: str, tensors: tuple[Tensor, ...]) -> Linear:
    """The weight in half precision, for the time of one product, and cuBLAS."""
    widen = {"int8": quantized_triton.int8_dequantize, "int4": quantized_triton.int4_dequantize}[kind]
    return lambda x: F.linear(x, widen(tensors[0], tensors[1], x.dtype))


def theirs(kind: str, tensors: tuple[Tensor, ...]) -> Linear:
    """What torch itself has for it."""
    if kind == "bf16":
        return lambda x: F.linear(x, tensors[0])
    if kind == "int8":
        scale = tensors[1].bfloat16()
        return lambda x: torch._weight_int8pack_mm(x, tensors[0], scale)
    if kind == "int4":
        channels, inputs = tensors[0].shape[0], 8 * tensors[0].shape[1]
        q = torch.randint(0, 256, (channels, inputs // 2), dtype=torch.uint8, device="cuda")
        packed = torch._convert_weight_to_int4pack(q, 8)
        scales = torch.full((inputs // 128, channels, 2), 0.01, dtype=torch.bfloat16, device="cuda")
        return lambda x: torch._weight_int4pack_mm(x, packed, 128, scales)
    q, scale = tensors

    def scaled(x: Tensor) -> Tensor:
        p, s = float8_triton.quantize_rows(x, quantized.FP8)
        return torch._scaled_mm(p, q.t(), s.unsqueeze(1), scale.unsqueeze(0), out_dtype=torch.bfloat16)

    return scaled


def ways(kind: str) -> dict[str, PassCost]:
    return {"ours": ours, **({"widened": widened} if kind.startswith("int") else {}), "torch": theirs}


def seconds(linears: list[Linear], x: Tensor) -> float:
    """Of one product: the best of three replays of a graph that goes through all of them."""
    for _ in range(2):
        for linear in linears:
            linear(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    times = max(1, 24 // len(linears))
    with torch.cuda.graph(graph):
        for _ in range(times):
            for linear in linears:
                linear(x)
    best = float("inf")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(4):  # the first replay uploads the graph
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best / (times * len(linears))


def copies(kind: str, channels: int, inputs: int) -> list[tuple[Tensor, ...]]:
    first = make(kind, channels, inputs, 0)
    count = max(1, round(COLD / sum(t.nbytes for t in first)))
    return [first, *(tuple(t.clone() for t in first) for _ in range(count - 1))]


def measure(make_linear: PassCost, kind: str, sets: list[tuple[Tensor, ...]], x: Tensor) -> float | None:
    """None where it does not run here."""
    try:
        return seconds([make_linear(kind, tensors) for tensors in sets], x)
    except (RuntimeError, NotImplementedError) as error:
        print(f"  {kind}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
        return None


def compare() -> None:
    print(f"{'shape':14}{'kind':6}{'way':9}{'floor':>8}" + "".join(f"{rows:>8}" for rows in ROWS) + "  rows; µs")
    result = []
    for kind, (name, (channels, inputs)) in itertools.product(("bf16", "int8", "int4", "fp8"), SHAPES.items()):
        sets = copies(kind, channels, inputs)
        floor = sum(t.nbytes for t in sets[0]) / PACE
        for way, make_linear in ways(kind).items():
            line = f"{name:14}{kind:6}{way:9}{floor * 1e6:8.1f}"
            for rows in ROWS:
                x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
                took = measure(make_linear, kind, sets, x)
                line += f"{'-' if took is None else f'{took * 1e6:.1f}':>8}"
                result.append(
                    {"shape": name, "kind": kind, "way": way, "rows": rows, "floor_s": floor, "seconds": took}
                )
            print(line, flush=True)
            write_result("quant_gpu", {"pace_bytes_s": PACE, "cases": result})
    for model, kind in itertools.product(LAYERS, ("bf16", "int8", "int4", "fp8")):
        for way in ways(kind):
            print(f"{model} {kind} {way}: {summed(result, model, kind, way)}")


def summed(result: list[dict[str, Any]], model: str, kind: str, way: str) -> str:
    """Linear layers of a step, by rows."""
    totals = []
    for rows in ROWS:
        of_rows = [
            (r["seconds"], 1 if r["shape"].endswith("head") else LAYERS[model])
            for r in result
            if (r["kind"], r["way"], r["rows"]) == (kind, way, rows) and r["shape"].startswith(model)
        ]
        known = all(took is not None for took, _ in of_rows)
        totals.append(f"{1e3 * sum(took * times for took, times in of_rows):.2f}" if known else "-")
    return ", ".join(f"{total} ms ({rows})" for rows, total in zip(ROWS, totals, strict=True))


# --- tuning -------------------------------------------------------------------------------------------


def tiles(kind: str, rows: int) -> Iterator[Tile]:
    sizes = {8: (8, 16), 16: (16,), 32: (32, 64), 64: (64,)}
    for most in next((tried for least, tried in sizes.items() if rows <= least), (64, 128, 256)):
        for lines, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (3, 4, 6)):
            for width in (128,) if kind == "int4" else (128, 256):
                bytes_in = {"bf16": 2, "int8": 1, "int4": 1, "fp8": 1}[kind]
                size = lines * width * bytes_in + most * width * (1 if kind == "fp8" else 4 if kind == "int4" else 2)
                if stages * size < (110_000 if rows <= 16 else 220_000) and lines // 16 <= 2 * warps <= lines // 8:
                    yield Tile(most, lines, width, 1, stages, warps)


def set_tile(kind: str, tile: Tile) -> None:
    own = {"int8": (quantized_triton, "int8_tile"), "int4": (quantized_triton, "int4_tile")}
    setattr(*own.get(kind, (linear_triton, "few_rows_tile")), lambda *_: tile)


def prepare(kind: str, rows: int, tile: Tile) -> None:
    """Compile a tile in a process of its own: the kernel is then found on the disk."""
    tensors = make(kind, 1024, 2048, 0)
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    for split in (1, 2):
        set_tile(kind, replace(tile, split=split))
        ours(kind, tensors)(x)


def tune(kind: str, counts: tuple[int, ...]) -> None:
    cases = list(dict.fromkeys((kind, max(2, rows), tile) for rows in counts for tile in tiles(kind, rows)))
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        list(pool.map(prepare, *zip(*cases, strict=True)))
    for name, (channels, inputs) in TUNED.items():
        sets = copies(kind, channels, inputs)
        floor = sum(t.nbytes for t in sets[0]) / PACE
        linears = [ours(kind, tensors) for tensors in sets]
        for rows in counts:
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            found = []
            for tile in tiles(kind, rows):
                steps = inputs // (2 * tile.inputs if kind == "int4" else tile.inputs)
                for split in (1, 2, 4, 8):
                    programs = -(-channels // tile.channels) * split
                    if (split == 1 or (programs <= 1056 and split <= steps // 2)) and (programs >= 64 or split == 8):
                        set_tile(kind, replace(tile, split=split))
                        label = f"{tile.rows}:{tile.channels}x{tile.inputs}/{split} s{tile.stages} w{tile.warps}"
                        found.append((seconds(linears, x), label))
            best = "  ".join(f"{t * 1e6:.1f} {label}" for t, label in sorted(found)[:5])
            print(f"{name:13} {kind} {rows:3} floor {floor * 1e6:6.1f} µs: {best}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["tune"]:
        tune(sys.argv[2], tuple(map(int, sys.argv[3:])) or ((1, 8, 16, 64) if sys.argv[2] == "int4" else (8, 16, 64)))
    else:
        compare()

"""How the Triton kernels of norms, rotations and SwiGLU should share out their work on this GPU.

Each constant of their `Tiles` is varied by itself, at the shapes of three models in bf16. A figure is the share of what
a copy on the device moves: bytes that have to be read and written, over time, over `COPY`. What wins is then written
into the default of `Tiles` by hand. Which implementation is the fastest is another question: `lmworks bench kernels`.

    python benchmarks/elementwise_gpu.py            # about two minutes on an H200, most of them Triton's compiler
    python benchmarks/elementwise_gpu.py --quick    # one model, nothing written
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import write_result

from lmworks.kernels import rms_norm_triton, rope_triton, swiglu_triton
from lmworks.kernels.training import swiglu_fp8_triton

COPY = 4.27e12  # bytes/s, read and written, of a copy on an H200
SHAPES = {  # tokens, hidden, ffn, heads, kv_heads, head_dim
    "llama3-8b": (16_384, 4096, 14_336, 32, 8, 128),
    "1.5b": (16_384, 2048, 8192, 32, 8, 64),
    "gpt2": (65_536, 768, 3072, 12, 12, 64),
}
NORM = {"elements": (1024, 4096), "thread": (4, 16), "most_warps": (8, 32), "stages": (2, 3), "resident": (16, 64)}
SWIGLU = {"block": (512, 2048, 4096), "thread": (4, 16)}
SWIGLU_FP8 = {"span": (1024, 4096), "high": (32, 128), "wide": (64, 256), "warps": (4, 16)}
ROPE = {"heads": (4, 8, 32), "thread": (4, 16)}


@dataclass(frozen=True)
class Pass:
    name: str
    bytes: float
    default: Any  # the Tiles of its module
    tried: dict[str, tuple[int, ...]]
    run: Callable[[Any], object]


def passes(tokens: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int) -> Iterator[Pass]:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, delta, weight = drawn(tokens, hidden), drawn(tokens, hidden), torch.ones(hidden, device="cuda")
    one, tiles = 2 * x.numel(), rms_norm_triton.TILES
    forward, backward = rms_norm_triton.forward, rms_norm_triton.backward
    yield Pass("add_norm", 4 * one, tiles, NORM, lambda t: forward(x, delta, weight, 1e-5, t))
    q, k = drawn(tokens, heads, head_dim), drawn(tokens, kv_heads, head_dim)
    short = torch.ones(head_dim, device="cuda")
    _, turned, scale = forward(q, None, short, 1e-6)
    yield Pass("norm of heads", 4 * q.numel(), tiles, NORM, lambda t: forward(q, None, short, 1e-6, t))
    yield Pass(
        "norm of heads backward", 6 * q.numel(), tiles, NORM,
        lambda t: backward(turned, q, short, scale, t),
    )  # fmt: skip
    table = torch.randn(tokens, 1, head_dim, device="cuda")
    moved = 4 * (q.numel() + k.numel()) + 8 * table.numel() // 2
    yield Pass("rope", moved, rope_triton.TILES, ROPE, lambda t: rope_triton.launch(q, k, table, table, False, t))
    gate, up = drawn(tokens, ffn), drawn(tokens, ffn)
    one, tiles = 2 * gate.numel(), swiglu_triton.TILES
    yield Pass("swiglu", 3 * one, tiles, SWIGLU, lambda t: swiglu_triton.forward(gate, up, t))
    yield Pass("swiglu backward", 5 * one, tiles, SWIGLU, lambda t: swiglu_triton.backward(gate, gate, up, t))
    numbers, scale, tiles = gate.numel(), torch.ones((), device="cuda"), swiglu_fp8_triton.TILES
    yield Pass("swiglu fp8", 9 * numbers, tiles, SWIGLU_FP8, lambda t: swiglu_fp8_triton.forward(gate, up, t))
    yield Pass(
        "swiglu fp8 backward", 17 * numbers, tiles, SWIGLU_FP8,
        lambda t: swiglu_fp8_triton.backward(gate, gate, up, scale, t),
    )  # fmt: skip


def variants(one: Pass) -> Iterator[tuple[str, Any]]:
    yield "as it is", one.default
    for name, values in one.tried.items():
        for value in values:
            yield f"{name} = {value}", replace(one.default, **{name: value})


def measure(one: Pass, tiles: Any) -> float | None:
    """Seconds; None where the GPU has not the registers or the shared memory for it."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        return do_bench(lambda: one.run(tiles), warmup=5, rep=30) / 1e3
    except OutOfResources:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, nothing written")
    parser.add_argument("--only", default="", help="passes whose names begin so; nothing written")
    options = parser.parse_args()
    quick = options.quick or bool(options.only)
    found = []
    for model, shape in list(SHAPES.items())[: 1 if quick else None]:
        for one in (one for one in passes(*shape) if one.name.startswith(options.only)):
            times = {name: measure(one, tiles) for name, tiles in variants(one)}
            shares = {name: one.bytes / time / COPY for name, time in times.items() if time is not None}
            best = max(shares, key=shares.__getitem__)
            print(f"{model}, {one.name}: {shares['as it is']:.0%} of a copy as it is; best {shares[best]:.0%}, {best}")
            found.append({"model": model, "pass": one.name, "share_of_copy": shares, "best": best})
    if not quick:
        print(f"written to {write_result('elementwise_gpu', {'copy_bytes_s': COPY, 'passes': found})}")


if __name__ == "__main__":
    main()

"""Times the engine's kernels on a GPU, each beside what memory or the tensor cores allow, and beside PyTorch's own.

    python benchmarks/kernels_paged.py [--save | --sweep bf16 | --sweep fp8 | --sweep gathered]

Every figure is the mean of a CUDA graph that goes over so many layers that no cache is still in L2 when it comes round.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import write_result
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lmworks.kernels.inference.kv_cache_write import write_kv_cache
from lmworks.kernels.inference.paged_attention import GATHER_UNIT, AttentionMetadata, LayerCache, paged_attention
from lmworks.kernels.rms_norm import add_rms_norm
from lmworks.kernels.swiglu import swiglu_packed

BANDWIDTH = 4.27e12  # bytes/s, of a copy on an H200
MATMUL = 763e12  # FLOP/s, of a large bf16 product there
BLOCK = 16
COLD = 300e6  # bytes that push everything out of L2

Attention = Callable[..., Tensor]


def time_layers(call: Callable[[int], Any], layers: int, replays: int = 5) -> float:
    """Seconds of one call(layer), from a graph of all layers."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / replays / layers


def make_caches(
    lengths: list[int], kv_heads: int, head_dim: int, stored: torch.dtype
) -> tuple[list[LayerCache], Tensor]:
    """Caches of several layers whose blocks lie in random order, and the table of blocks."""
    need = [math.ceil(length / BLOCK) for length in lengths]
    order = torch.randperm(sum(need), dtype=torch.int32)
    tables = torch.zeros(len(lengths), max(need), dtype=torch.int32)
    for row, (n, part) in enumerate(zip(need, order.split(need), strict=True)):
        tables[row, :n] = part
    shape = (sum(need), kv_heads, BLOCK, head_dim)
    layers = max(2, min(64, math.ceil(COLD / (2 * math.prod(shape) * stored.itemsize))))
    caches = []
    for _ in range(layers):
        pools = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(stored) for _ in range(2)]
        scales = [torch.rand(shape[:3], device="cuda") if stored.itemsize == 1 else None for _ in range(2)]
        caches.append(LayerCache(*pools, *scales))
    return caches, tables.cuda()


def time_attention(
    lengths: list[int],
    queries: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    stored: torch.dtype = torch.bfloat16,
    attention: Attention = paged_attention,
    gathered: bool = False,  # keys, before attention
    **options: Any,
) -> float:
    caches, tables = make_caches(lengths, kv_heads, head_dim, stored)
    starts = offsets(queries)
    metadata = AttentionMetadata(tables, torch.tensor(lengths, dtype=torch.int32, device="cuda"), starts, max(queries))
    if gathered:
        room = [GATHER_UNIT * math.ceil(length / GATHER_UNIT) for length in lengths]
        metadata = replace(metadata, key_starts=offsets(room), keys=sum(room))
    q = torch.randn(sum(queries), heads, head_dim, device="cuda", dtype=torch.bfloat16)
    return time_layers(lambda layer: attention(q, caches[layer], metadata, **options), len(caches))


def offsets(counts: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def time_flash(lengths: list[int], heads: int, kv_heads: int, head_dim: int = 128) -> float:
    """FlashAttention 2 as PyTorch carries it, over prompts that lie side by side, not in metadata."""
    q, k, v = (
        torch.randn(sum(lengths), n, head_dim, device="cuda", dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)
    )
    starts, longest = offsets(lengths), max(lengths)
    flash = torch.ops.aten._flash_attention_forward
    return time_layers(lambda _: flash(q, k, v, starts, starts, longest, longest, 0.0, True, False), 4)


def mixed_lengths(count: int) -> list[int]:
    """As in the middle of the 256-request workload: prompts and answers of 100 to 1024 tokens."""
    rng = torch.Generator().manual_seed(0)
    return (
        torch.randint(100, 1025, (count,), generator=rng) + torch.randint(0, 1025, (count,), generator=rng)
    ).tolist()


def decode_rows() -> list[list[Any]]:
    rows = []
    for heads in (16, 32):
        for name, lengths in (
            *((f"{batch} × 1000", [1000] * batch) for batch in (1, 8, 64, 256)),
            ("256 mixed", mixed_lengths(256)),
            ("1 × 32000", [32000]),
        ):
            ones = [1] * len(lengths)
            floor = sum(lengths) * 8 * 128 * 2 * 2 / BANDWIDTH
            plain = time_attention(lengths, ones, heads, 8)
            fixed = time_attention(lengths, ones, heads, 8, invariant=True)
            fp8 = time_attention(lengths, ones, heads, 8, stored=torch.float8_e4m3fn)
            rows.append(
                [f"{heads}/8", name, *(x * 1e6 for x in (floor, plain, fixed, fp8)), floor / plain, floor / 2 / fp8]
            )
    return rows


PROMPTS = [  # heads, head_dim, number and length
    (16, 128, 8, 1024),
    (32, 128, 8, 1024),
    (32, 128, 1, 8192),
    (32, 128, 64, 128),
    (16, 64, 8, 1024),
    (16, 256, 8, 1024),
]


def prefill_rows(prompts: list[tuple[int, int, int, int]]) -> list[list[Any]]:
    rows = []
    for heads, head_dim, count, length in prompts:
        lengths = [length] * count
        flop = sum(2 * n * n for n in lengths) * heads * head_dim
        times = [
            time_attention(lengths, lengths, heads, 8, head_dim),
            time_attention(lengths, lengths, heads, 8, head_dim, invariant=True),
            time_attention(lengths, lengths, heads, 8, head_dim, stored=torch.float8_e4m3fn),
            time_flash(lengths, heads, 8, head_dim),
        ]
        rows.append(
            [
                f"{heads}/8 · {head_dim}",
                f"{count} × {length}",
                flop / MATMUL * 1e6,
                *(x * 1e6 for x in times),
                *(flop / x / 1e12 for x in times),
            ]
        )
    return rows


def sweep_rows(stored: torch.dtype) -> list[list[Any]]:
    """What `paged_attention_triton.choose_config` chooses from: 16 heads on 8, of 128."""
    from lmworks.kernels.inference.paged_attention_triton import LaunchConfig, launch

    cuts = ((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 3))
    decoding = [LaunchConfig(16, tile, warps, stages) for tile, warps, stages in cuts]
    prompts = [
        LaunchConfig(rows, tile, rows // 16, stages) for rows in (64, 128) for tile in (32, 64) for stages in (2, 3)
    ]
    cases: list[tuple[str, list[int], list[int], list[LaunchConfig], tuple[int, ...]]] = [
        ("1 × 700", [700], [1], decoding, (8, 16, 64)),
        ("8 × 1000", [1000] * 8, [1] * 8, decoding, (2, 4, 6, 16)),
        ("64 × 1000", [1000] * 64, [1] * 64, decoding, (1, 2, 4)),
        ("256 mixed", mixed_lengths(256), [1] * 256, decoding, (1, 2)),
        ("prompts 8 × 1024", [1024] * 8, [1024] * 8, prompts, (1,)),
        ("prompts 64 × 128", [128] * 64, [128] * 64, prompts, (1,)),
        ("prompt 1 × 8192", [8192], [8192], prompts, (1,)),
    ]
    rows = []
    for name, lengths, queries, configs, splits in cases:
        for config in configs:
            for parts in splits:
                shape = replace(config, splits=parts)
                seconds = time_attention(lengths, queries, 16, 8, 128, stored, launch, config=shape)
                rows.append([name, config.rows, config.tile, config.warps, config.stages, parts, 1e6 * seconds])
    return rows


LONG = {  # lengths and queries of prompts and chunks
    "1 × 8000": ([8000], [8000]),
    "7808 of 8000, 384": ([8000, 384], [7808, 384]),
    "8192 of 65536": ([65536], [8192]),
    "4 × 2000": ([2000] * 4, [2000] * 4),
    "14 × 580": ([580] * 14, [580] * 14),
}


def gathered_rows() -> list[list[Any]]:
    """What `prefill_attention_triton.CONFIGS` was chosen from, the copy included, beside the paged kernel."""
    from lmworks.kernels.inference.paged_attention_triton import LaunchConfig
    from lmworks.kernels.inference.prefill_attention_triton import launch

    def attend(q: Tensor, cache: LayerCache, metadata: AttentionMetadata, config: LaunchConfig) -> Tensor:
        out = torch.zeros_like(q)
        launch(q, cache, metadata, out, config)
        return out

    rows = []
    for heads in (32, 16):
        for name, (lengths, queries) in LONG.items():
            case = f"{heads}/8, {name}"
            paged = time_attention(lengths, queries, heads, 8)
            rows.append([case, "", "", "", "", "paged", 1e6 * paged])
            for cut in ((64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3)):
                config = LaunchConfig(*cut)
                seconds = time_attention(lengths, queries, heads, 8, attention=attend, gathered=True, config=config)
                rows.append([case, *cut, "gathered", 1e6 * seconds])
    return rows


def time_rest(tokens: int) -> list[list[Any]]:
    """The small kernels at the shape of Llama 3 8B."""
    layers = max(2, min(64, math.ceil(COLD / (tokens * 2 * 14336 * 2))))
    bf16: Any = {"device": "cuda", "dtype": torch.bfloat16}
    qkv = [torch.randn(tokens, 48 * 128, **bf16) for _ in range(layers)]
    cache = LayerCache(*(torch.zeros(tokens // BLOCK + 1, 8, BLOCK, 128, **bf16) for _ in range(2)))
    turn = (torch.rand(tokens, 1, 128, device="cuda"), torch.rand(tokens, 1, 128, device="cuda"))
    slots = torch.randperm(tokens, device="cuda")
    norm = torch.rand(128, **bf16)
    gate_up = [torch.randn(tokens, 2 * 14336, **bf16) for _ in range(layers)]
    stream = [torch.randn(tokens, 4096, **bf16) for _ in range(layers)]
    weight = torch.rand(4096, **bf16)
    times = {
        "place": (tokens * 48 * 128 * 4, lambda i: write_kv_cache(qkv[i], 32, 8, norm, norm, 1e-6, turn, cache, slots)),
        "swiglu": (tokens * 3 * 14336 * 2, lambda i: swiglu_packed(gate_up[i])),
        "add_rms_norm": (
            tokens * 4 * 4096 * 2,
            lambda i: add_rms_norm(stream[i], stream[i - 1], weight, 1e-6, "triton"),
        ),
    }
    return [
        [name, tokens, count / BANDWIDTH * 1e6, time_layers(call, layers) * 1e6]
        for name, (count, call) in times.items()
    ]


def show(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            *(
                f"{x:.2f}" if isinstance(x, float) and x < 1 else f"{x:.1f}" if isinstance(x, float) else str(x)
                for x in row
            )
        )
    Console(width=150).print(table)


DECODE = ["heads", "batch × context", "floor µs", "bf16 µs", "invariant µs", "fp8 µs", "bf16 / floor", "fp8 / floor"]
PREFILL = ["heads · dim", "prompts", "floor µs", "bf16 µs", "invariant µs", "fp8 µs", "flash µs"]
RATES = ["bf16 TFLOP/s", "invariant", "fp8", "flash"]
REST = ["kernel", "tokens", "floor µs", "µs"]
SWEEP = ["batch", "rows", "tile", "warps", "stages", "splits", "µs"]
STORED = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/kernels_paged.json")
    parser.add_argument(
        "--sweep", choices=[*STORED, "gathered"], help="time other ways to cut up a launch over such a cache instead"
    )
    args = parser.parse_args()
    if args.sweep == "gathered":
        show("sweep, gathered keys", SWEEP, gathered_rows())
        return
    if args.sweep:
        show(f"sweep, {args.sweep}", SWEEP, sweep_rows(STORED[args.sweep]))
        return
    tables = {
        "decode": (DECODE, decode_rows()),
        "prefill": (PREFILL + RATES, prefill_rows(PROMPTS)),
        "rest": (REST, [row for tokens in (1, 256, 8192) for row in time_rest(tokens)]),
    }
    for title, (columns, rows) in tables.items():
        show(title, columns, rows)
    if args.save:
        write_result(
            "kernels_paged",
            {
                title: [dict(zip(columns, row, strict=True)) for row in rows]
                for title, (columns, rows) in tables.items()
            },
        )


if __name__ == "__main__":
    main()

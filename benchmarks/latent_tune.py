"""Tries tiles of latent attention on a GPU, for decoding and for prompts, and names the best.

    python benchmarks/latent_tune.py [--save]

16 heads of DeepSeek-V2-Lite (rank 512, rotary 64) in bf16. The floor is the bytes of the cached vectors over the
bandwidth of a device copy, or the products over the datasheet's peak, whichever is longer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from itertools import product

import torch
from common import write_result
from experts_tune import PEAK, seconds

from lmworks.bench.roofline import measure_bandwidth
from lmworks.kernels.inference.latent_attention_triton import LaunchConfig, choose_config, launch
from lmworks.kernels.inference.paged_attention import AttentionMetadata, LayerCache
from lmworks.kernels.inference.paged_attention_triton import num_splits
from lmworks.kernels.triton_support import compile_only, triton

HEADS, RANK, ROPE, SIZE = 16, 512, 64, 16
CASES = {  # sequences, queries of each, keys of each
    "decode 1 × 1k": (1, 1, 1024),
    "decode 1 × 32k": (1, 1, 32768),
    "decode 64 × 1k": (64, 1, 1024),
    "decode 64 × 8k": (64, 1, 8192),
    "prompt 1 × 512": (1, 512, 512),
    "prompt 4 × 2k": (4, 2048, 2048),
}


def metadata_of(seqs: int, queries: int, keys: int) -> AttentionMetadata:
    blocks = triton.cdiv(keys, SIZE)
    tables = torch.randperm(seqs * blocks, device="cuda").int().view(seqs, blocks)
    lengths = torch.full((seqs,), keys, dtype=torch.int32, device="cuda")
    starts = torch.arange(seqs + 1, dtype=torch.int32, device="cuda") * queries
    return AttentionMetadata(tables, lengths, starts, queries)


def candidates(metadata: AttentionMetadata) -> list[LaunchConfig]:
    few = metadata.max_query_len == 1
    found = []
    for rows, tile, warps, stages in product((16,) if few else (32, 64), (16, 32, 64), (4, 8), (1, 2, 3)):
        seqs, keys = metadata.seq_lens.shape[0], metadata.block_tables.shape[1] * SIZE
        walks = seqs * triton.cdiv(metadata.max_query_len * HEADS, rows)
        split = num_splits(walks, triton.cdiv(keys, tile), 2048 // tile, torch.device("cuda"))
        if 2 * (RANK + ROPE) * (tile * stages + rows) < 225_000:
            found.append(LaunchConfig(rows, tile, warps, stages, *split))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    device = torch.device("cuda")
    bandwidth, found = measure_bandwidth(device), {}
    most = max(seqs * keys for seqs, _, keys in CASES.values())
    pool = torch.randn(most // SIZE, 1, SIZE, RANK + ROPE, device=device, dtype=torch.bfloat16)
    cache = LayerCache(pool, pool)
    works: dict[str, dict[LaunchConfig, Callable[[], torch.Tensor]]] = {}
    for name, (seqs, queries, keys) in CASES.items():
        metadata = metadata_of(seqs, queries, keys)
        q = torch.randn(seqs * queries, HEADS, RANK + ROPE, device=device, dtype=torch.bfloat16)
        works[name] = {
            config: lambda q=q, metadata=metadata, config=config: launch(
                q, cache, metadata, rank=RANK, scale=0.04, config=config
            )
            for config in (*candidates(metadata), choose_config(q, cache, metadata, False))
        }
    with suppress(Exception), compile_only():
        for variants in works.values():
            for work in variants.values():
                work()
    for name, variants in works.items():
        seqs, queries, keys = CASES[name]
        pairs = seqs * (queries * keys - queries * (queries - 1) / 2)
        flops = 2 * HEADS * (2 * RANK + ROPE) * pairs
        floor = max(seqs * keys * (RANK + ROPE) * 2 / bandwidth, flops / PEAK)
        times: dict[LaunchConfig, float] = {}
        for config, work in variants.items():
            try:
                times[config] = seconds(work, 3 if queries > 1 else 20)
            except Exception as error:
                print(f"{config}: {type(error).__name__}: {str(error)[:80]}", flush=True)
        ranked = sorted(times, key=times.__getitem__)
        metadata = metadata_of(seqs, queries, keys)
        now = choose_config(torch.empty(1, HEADS, 0, dtype=torch.bfloat16, device=device), cache, metadata, False)
        for config in [*ranked[:3], now]:
            mark = " (chosen now)" if config == now else ""
            print(f"{name}: {1e6 * times[config]:8.1f} µs (floor {1e6 * floor:.1f}) {config}{mark}", flush=True)
        found[name] = {"floor_us": 1e6 * floor, "configs": [[str(c), 1e6 * times[c]] for c in ranked[:6]]}
    if chosen.save:
        print(write_result("latent_tune", {"shape": [HEADS, RANK, ROPE], "cases": found}))


if __name__ == "__main__":
    main()

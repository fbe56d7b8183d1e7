"""Attention over latent vectors as a GPU runs it, against the sum that its formula says.

It runs where there is a GPU, or under Triton's interpreter: TRITON_INTERPRET=1, with triton on the path.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lmworks.kernels.inference.paged_attention import CACHE_MAX, AttentionMetadata, LayerCache

GPU = torch.cuda.is_available()
DEVICE, HALF = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or triton and TRITON_INTERPRET=1")

if GPU or INTERPRETED:
    from lmworks.kernels.inference.latent_attention_triton import LaunchConfig, launch


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]  # keys of each sequence, the new ones included
    queries: tuple[int, ...]
    heads: int = 3
    rank: int = 24
    rope: int = 8
    window: int = 0
    size: int = 4  # tokens of a block
    stored: torch.dtype | None = None


CASES = {
    "decoding": Case((3, 40, 17), (1, 1, 1)),
    "prompts": Case((9, 33), (9, 33)),
    "chunks, padding and decoding": Case((50, 0, 21), (13, 0, 1)),
    "window": Case((50, 12), (20, 1), window=7),
    "many heads": Case((30, 5), (1, 1), heads=20),
    "widths of a power of two": Case((25,), (6,), rank=32, rope=16, size=16),
    "int8": Case((19, 30), (4, 1), stored=torch.int8),
}


@dataclass(frozen=True)
class Made:
    q: Tensor
    cache: LayerCache
    metadata: AttentionMetadata
    vectors: list[Tensor]  # of each sequence, as the cache holds them

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype) -> Made:
        generator = torch.Generator().manual_seed(0)
        width, blocks = case.rank + case.rope, [math.ceil(length / case.size) for length in case.lengths]
        order = torch.randperm(sum(blocks) + 3, generator=generator)
        pool = torch.full((len(order), 1, case.size, width), math.nan)
        tables = torch.full((len(blocks), max(blocks)), 10**6, dtype=torch.int32)
        vectors, used = [], 0
        for row, (length, count) in enumerate(zip(case.lengths, blocks, strict=True)):
            mine = order[used : used + count]
            used += count
            tables[row, :count] = mine.int()
            vector = torch.randn(length, width, generator=generator).to(dtype).float()
            vectors.append(vector)
            for place in range(length):
                pool[mine[place // case.size], 0, place % case.size] = vector[place]
        starts = torch.tensor([0, *case.queries]).cumsum(0).int()
        q = torch.randn(int(starts[-1]), case.heads, width, generator=generator).to(dtype)
        keys, scales = pool.to(dtype), None
        if case.stored is not None:
            scales = pool.nan_to_num().abs().amax(dim=-1) / CACHE_MAX[case.stored]
            keys = (pool / scales.unsqueeze(-1)).nan_to_num().round().to(case.stored)
            back = keys.float() * scales.unsqueeze(-1)
            vectors = [
                back[tables[row, : math.ceil(n / case.size)].long(), 0].flatten(0, 1)[:n]
                for row, n in enumerate(case.lengths)
            ]
            scales = scales.to(DEVICE)
        lengths = torch.tensor(case.lengths, dtype=torch.int32)
        metadata = AttentionMetadata(*(x.to(DEVICE) for x in (tables, lengths, starts)), max(case.queries))
        cache = LayerCache(keys.to(DEVICE), keys.to(DEVICE), scales, scales)
        return cls(q.to(DEVICE), cache, metadata, vectors)


SCALE = 0.3


def expected(case: Case, made: Made) -> Tensor:
    """In fp64, query by query and head by head."""
    rows, place = [], 0
    for vectors, length, queries in zip(made.vectors, case.lengths, case.queries, strict=True):
        for query in range(queries):
            position = length - queries + query
            first = max(0, position - case.window + 1) if case.window else 0
            seen = vectors[first : position + 1].double()
            p = (made.q[place].double().cpu() @ seen.t() * SCALE).softmax(dim=-1)
            rows.append(p @ seen[:, : case.rank])
            place += 1
    return torch.stack(rows)


def check(case: Case, dtype: torch.dtype, tolerance: float, **options: Any) -> Tensor:
    made = Made.of(case, dtype)
    out = launch(made.q, made.cache, made.metadata, rank=case.rank, scale=SCALE, window=case.window, **options)
    torch.testing.assert_close(out.double().cpu(), expected(case, made), rtol=0, atol=tolerance)
    return out


@pytest.mark.parametrize("name", CASES)
def test_latent_attention_equals_the_formula(name: str) -> None:
    check(CASES[name], torch.float32, 4e-6)


def test_in_half_precision() -> None:
    check(CASES["chunks, padding and decoding"], HALF, 0.02)


@pytest.mark.parametrize("splits, least", [(8, 1), (2, 1), (5, 3)])
def test_splits_of_the_keys_are_merged(splits: int, least: int) -> None:
    config = LaunchConfig(16, 16, 4, 1, splits, least)
    for _ in range(2):  # counters are as they were
        check(Case((3, 0, 90), (1, 0, 1)), torch.float32, 4e-6, config=config)
        check(Case((3, 0, 90), (3, 0, 9), heads=5, window=50), torch.float32, 4e-6, config=config)


def test_a_batch_invariant_query_has_the_same_bits_as_prompt_and_decoded() -> None:
    """The last query of a prompt, and the same alone beside another sequence."""
    made = Made.of(Case((33,), (33,)), HALF)
    options: dict[str, Any] = {"rank": 24, "scale": SCALE, "invariant": True}
    whole = launch(made.q, made.cache, made.metadata, **options)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    metadata = AttentionMetadata(made.metadata.block_tables, made.metadata.seq_lens, starts, 1)
    assert torch.equal(launch(made.q[-1:], made.cache, metadata, **options), whole[-1:])

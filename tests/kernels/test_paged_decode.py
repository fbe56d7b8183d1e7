"""Decoding together on a CPU, against PyTorch's own attention on pages made by hand (unused places hold NaN)."""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lmworks.kernels.inference import paged_attention
from paged_cases import Case, Made, expected, make, random_case


@pytest.mark.parametrize("together", [1, 2**12, 2**21])
@pytest.mark.parametrize("seed", range(12))
def test_batched_decode_equals_sdpa(seed: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, in groups of like length, and one by one."""
    monkeypatch.setattr(paged_attention, "GROUP_ELEMENTS", together)
    monkeypatch.setattr(paged_attention, "gather_buffers", paged_attention.GatherBuffers())
    draw = random.Random(seed)
    lengths = tuple(draw.choice((0, 1, draw.randint(2, 40), draw.randint(40, 200))) for _ in range(6))
    case: Case = dataclasses.replace(random_case(seed), lengths=lengths, queries=(1,) * 6)
    made = make(case, seed)
    out = paged_attention.paged_decode(made.q, made.cache, made.metadata, **case.scores())
    torch.testing.assert_close(out.double(), expected(case, made), rtol=0, atol=4e-6)


def test_gather_buffers_are_thread_local() -> None:
    case = Case((70, 33, 129), (1, 1, 1))
    many = [make(case, seed) for seed in range(8)]

    def decoded(made: Made) -> torch.Tensor:
        for _ in range(20):
            out = paged_attention.paged_decode(made.q, made.cache, made.metadata)
        return out

    with ThreadPoolExecutor(4) as pool:
        for made, out in zip(many, pool.map(decoded, many), strict=True):
            torch.testing.assert_close(out.double(), expected(case, made), rtol=0, atol=4e-6)

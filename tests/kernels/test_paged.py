"""The CPU path of the engine's kernels, against PyTorch's own operations on pages made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lmworks.kernels.inference.kv_cache_write import write_kv_cache
from lmworks.kernels.inference.paged_attention import AttentionMetadata, LayerCache, paged_attention
from lmworks.kernels.rms_norm import add_rms_norm
from lmworks.kernels.rope import rotate
from lmworks.kernels.swiglu import swiglu_packed
from lmworks.model import rope
from lmworks.spec import ModelSpec
from paged_cases import NAMED, Case, expected, make, random_case


@pytest.mark.parametrize("name", NAMED)
def test_paged_attention_equals_sdpa(name: str) -> None:
    case = NAMED[name]
    made = make(case)
    torch.testing.assert_close(
        paged_attention(made.q, made.cache, made.metadata, **case.options()).double(),
        expected(case, made),
        rtol=0,
        atol=2e-6,
    )


@pytest.mark.parametrize("seed", range(30))
def test_random_paged_attention_equals_sdpa(seed: int) -> None:
    case = random_case(seed)
    made = make(case, seed)
    torch.testing.assert_close(
        paged_attention(made.q, made.cache, made.metadata, **case.options()).double(),
        expected(case, made),
        rtol=0,
        atol=4e-6,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["decode", "prompts", "chunks", "window", "alibi"])
def test_in_half_precision_only_the_result_is_rounded(name: str, dtype: torch.dtype) -> None:
    case = replace(NAMED[name], dtype=dtype)
    made = make(case)
    found = paged_attention(made.q, made.cache, made.metadata, **case.options()).double()
    torch.testing.assert_close(found, expected(case, made), rtol=0, atol=2.5 * torch.finfo(dtype).eps)


def test_padding_queries_get_zero() -> None:
    made = make(Case((20, 0, 9), (5, 1, 9)))
    q = torch.cat((made.q, torch.full((3, *made.q.shape[1:]), torch.nan)))
    out = paged_attention(q, made.cache, made.metadata)
    assert not out[5].any() and not out[-3:].any() and out[:5].abs().amin(dim=(1, 2)).all()


def test_invariant_result_does_not_depend_on_batch_or_chunks() -> None:
    """A prompt at once, or its tokens one by one, alone: the same bits."""
    made = make(Case((83, 40), (83, 40), group=4, window=50))
    whole = paged_attention(made.q, made.cache, made.metadata, window=50, invariant=True)
    for i in range(83):
        metadata = AttentionMetadata(made.metadata.block_tables[:1], torch.tensor([i + 1]), torch.tensor([0, 1]), 1)
        alone = paged_attention(made.q[i : i + 1], made.cache, metadata, window=50, invariant=True)
        assert torch.equal(alone[0], whole[i])


def empty_cache(blocks: int, kv_heads: int, size: int, head_dim: int, stored: torch.dtype) -> LayerCache:
    pools = [torch.zeros(blocks, kv_heads, size, head_dim).to(stored) for _ in range(2)]
    quantized = stored.itemsize == 1
    scales = [torch.zeros(blocks, kv_heads, size) if quantized else None for _ in range(2)]
    return LayerCache(*pools, *scales)


def read(pool: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    wide = pool.float() if scales is None else pool.float() * scales.unsqueeze(-1)
    return wide.transpose(1, 2).flatten(0, 1)[slots]  # (tokens, kv_heads, head_dim)


# The largest element of a head is held exactly; the others lose at most half a step of int8, half a unit of e4m3's
# last place (3 bits of fraction).
WORST = {torch.float32: 1e-6, torch.int8: 0.51 / 127, torch.float8_e4m3fn: 2**-4}


@pytest.mark.parametrize("stored", WORST)
def test_kv_cache_write_is_norm_rope_write(stored: torch.dtype) -> None:
    spec = ModelSpec.from_preset("tiny", hidden=64, heads=4, kv_heads=2, head_dim=64, qk_norm=True)
    rng = torch.Generator().manual_seed(0)
    qkv = torch.randn(7, 8 * 64, generator=rng) * 3
    q_norm, k_norm = (torch.rand(64, generator=rng) + 0.5 for _ in range(2))
    turn = rope.tables(spec, torch.tensor([0, 5, 6, 7, 100, 3, 2]))
    cache = empty_cache(6, 2, 3, 64, stored)
    slots = torch.tensor([17, 0, 4, -1, 9, 10, 11])
    q = write_kv_cache(qkv, 4, 2, q_norm, k_norm, 1e-6, turn, cache, slots)

    want_q, want_k, want_v = qkv.view(7, 8, 64).split((4, 2, 2), dim=1)
    want_q = rotate(F.rms_norm(want_q, (64,), q_norm, 1e-6), *turn)
    want_k = rotate(F.rms_norm(want_k, (64,), k_norm, 1e-6), *turn)
    torch.testing.assert_close(q, want_q, rtol=1e-5, atol=1e-5)
    kept = slots >= 0
    for pool, scales, want in (
        (cache.keys, cache.key_scales, want_k[kept]),
        (cache.values, cache.value_scales, want_v[kept]),
    ):
        error = (read(pool, scales, slots[kept]) - want).abs() / want.abs().amax(dim=-1, keepdim=True)
        assert error.max() <= WORST[stored]
    untouched = sorted(set(range(18)) - set(slots.tolist()))
    assert not read(cache.keys, None, torch.tensor(untouched)).any()


def test_kv_cache_write_without_norm_and_rope() -> None:
    qkv = torch.randn(3, 6 * 16)
    cache = empty_cache(1, 1, 8, 16, torch.float32)
    q = write_kv_cache(qkv, 4, 1, None, None, 0.0, None, cache, torch.tensor([2, 5, 7]))
    assert torch.equal(q.flatten(1), qkv[:, :64])
    assert torch.equal(cache.keys[0, 0, [2, 5, 7]], qkv[:, 64:80])
    assert torch.equal(cache.values[0, 0, [2, 5, 7]], qkv[:, 80:])


def test_zero_head_is_stored_as_zeros() -> None:
    cache = empty_cache(1, 1, 2, 16, torch.int8)
    write_kv_cache(torch.zeros(1, 48), 1, 1, None, None, 0.0, None, cache, torch.tensor([1]))
    assert not read(cache.keys, cache.key_scales, torch.tensor([1])).any()


def test_swiglu_and_add_norm_equal_model() -> None:
    x, delta, weight = torch.randn(5, 24), torch.randn(5, 24), torch.rand(24)
    torch.testing.assert_close(swiglu_packed(x), F.silu(x[:, :12]) * x[:, 12:])
    total, normed = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(normed, F.rms_norm(x + delta, (24,), weight, 1e-5))

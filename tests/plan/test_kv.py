"""KV-cache bytes, against published figures and hand arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from lmworks.plan.serving.served_model import Cache, ServedModel, heads_per_rank
from lmworks.spec import ModelSpec, SpecError

LLAMA = ModelSpec.from_preset("llama3-8b")
MISTRAL = ModelSpec.from_preset("mistral-7b")


def test_published_bytes_of_a_token() -> None:
    """OPT-13B: 800 KB in fp16 (Kwon et al. 2023, section 3); Llama 3 8B and 70B: 128 and 320 KiB."""
    opt_13b = ModelSpec(layers=40, hidden=5120, heads=40)
    assert Cache.of(opt_13b).token_bytes == 819_200
    assert Cache.of(LLAMA).token_bytes == 128 * 1024
    assert Cache.of(ModelSpec.from_preset("llama3-70b")).token_bytes == 320 * 1024


@pytest.mark.parametrize(
    ("dtype", "per_vector"),
    [("bf16", 256), ("fp8", 128), ("int8", 128 + 2), ("int4", 64 + 4)],  # a head of 128 numbers, and its scales
)
def test_formats(dtype: str, per_vector: int) -> None:
    assert Cache.of(LLAMA, dtype).token_bytes == 32 * 2 * 8 * per_vector


def test_ranks_share_heads_and_repeat_them_when_there_are_too_few() -> None:
    whole = Cache.of(LLAMA).token_bytes
    assert [Cache.of(LLAMA, tp=tp).token_bytes for tp in (2, 4, 8)] == [whole / 2, whole / 4, whole / 8]
    assert Cache.of(LLAMA, tp=16).token_bytes == whole / 8  # 8 heads on 16 ranks: each twice
    with pytest.raises(SpecError, match="8 KV heads cannot be shared evenly by tp = 3"):
        heads_per_rank(8, 3)


def test_sequences_take_whole_blocks() -> None:
    cache = Cache.of(LLAMA)
    block = 16 * 128 * 1024
    assert cache.held(1) == block
    assert cache.held(16) == block
    assert cache.held(17) == 2 * block
    np.testing.assert_array_equal(cache.held(np.array([1, 16, 17, 8192])), [block, block, 2 * block, 512 * block])
    assert cache.read(17) == 17 * 128 * 1024


def test_window() -> None:
    """A window of 4096 tokens covers 256 pages, or 257 where it begins inside one."""
    cache = Cache.of(MISTRAL)
    assert cache.held(4096) == 256 * 16 * cache.token_bytes
    assert cache.held(32_768) == 257 * 16 * cache.token_bytes
    assert cache.read(32_768) == 4096 * cache.token_bytes
    assert cache.longest(300 * 16 * cache.token_bytes, limit=32_768) == 32_768
    assert cache.longest(100 * 16 * cache.token_bytes, limit=32_768) == 1600


def test_windows_on_some_layers() -> None:
    """Gemma 3 27B: 62 layers, every sixth full, a window of 1024; 16 heads of 128. By hand, in pages of 16 tokens."""
    gemma = ModelSpec(layers=62, hidden=5376, heads=32, kv_heads=16, head_dim=128, sliding_window=1024, context=131_072,
                      layer_types=("sliding",) * 5 + ("full",))  # fmt: skip
    cache, layer = Cache.of(gemma), 2 * 16 * 128 * 2  # bytes of a token in one layer
    assert (gemma.full_layers, cache.token_bytes) == (10, 62 * layer)
    assert cache.held(512) == 32 * 16 * 62 * layer
    assert cache.held(131_072) == (10 * 131_072 + 52 * 65 * 16) * layer
    assert cache.read(131_072) == (10 * 131_072 + 52 * 1024) * layer
    for tokens in (512, 16 * 66, 131_072):  # the longest is what fits, and a page more does not
        assert cache.longest(cache.held(tokens) + 1, limit=200_000) == tokens
        assert cache.longest(cache.held(tokens) - 1, limit=200_000) == tokens - 16
    assert cache.longest(3 * cache.held(32_768), sequences=3, limit=131_072) == 32_768
    served = ServedModel.of(gemma)
    assert served.cache("bf16", tp=2).held(131_072) == cache.held(131_072) / 2


def test_what_fits() -> None:
    cache = Cache.of(LLAMA)
    assert cache.sequences(10 * 2**30, 8192) == 10  # 1 GiB each
    assert cache.sequences(10 * 2**30 - 1, 8192) == 9
    assert cache.sequences(-5.0, 8192) == 0
    assert cache.longest(2**30) == 8192
    assert cache.longest(2**30, sequences=4) == 2048
    assert cache.longest(-1.0) == 0
    assert cache.longest(2**40, limit=8192) == 8192


def test_unknown_format() -> None:
    with pytest.raises(SpecError, match="'fp16x' is not known"):
        Cache.of(LLAMA, "fp16x")

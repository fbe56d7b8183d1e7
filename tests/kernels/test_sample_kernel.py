"""Random bits are well mixed, and the GPU's kernels find the same tokens and thresholds as plain torch.

The kernels run on a GPU, or on a CPU through Triton's interpreter (`test_interpreted` starts these with it).
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from chance import independent, uniform
from lmworks.kernels import counter_rng
from lmworks.kernels.inference import gumbel_sample, top_k_top_p

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
RUNNABLE = DEVICE == "cuda" or INTERPRETED
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
if RUNNABLE:
    from lmworks.kernels.inference import gumbel_sample_triton, top_k_top_p_triton
runs_kernels = pytest.mark.skipif(not RUNNABLE, reason="needs a GPU, or triton and TRITON_INTERPRET=1")


# --- noise ---


def words(seeds: list[int], places: list[int], ids: int, bits: Callable[..., Tensor] = counter_rng.bits) -> np.ndarray:
    random = bits(torch.tensor(seeds), torch.tensor(places), torch.arange(ids))
    return random.numpy().view(np.uint32)


def test_mixers_match_published_values() -> None:
    """First numbers of splitmix64 from seed 0, and MurmurHash3's finaliser of 1."""
    golden = counter_rng.signed(counter_rng.GOLDEN, 64)
    first = counter_rng.mix64(torch.tensor([1, 2, 3]) * golden).numpy().view(np.uint64)
    assert [hex(n) for n in first] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]
    assert counter_rng.mix32(torch.tensor([1], dtype=torch.int32)).numpy().view(np.uint32)[0] == 0x514E28B7


def test_random_bits_equal_python() -> None:
    def mixed(x: int, shifts: tuple[int, ...], factors: tuple[int, ...], size: int) -> int:
        for by, factor in zip(shifts, factors, strict=False):
            x = (x ^ (x >> by)) * factor % 2**size
        return x ^ (x >> shifts[-1])

    for seed, place in ((0, 0), (2**63 - 1, 5), (12345, 100_000)):
        key = mixed(seed, (30, 27, 31), counter_rng.MIX64_FACTORS, 64) + (place + 1) * counter_rng.GOLDEN
        key = mixed(key % 2**64, (30, 27, 31), counter_rng.MIX64_FACTORS, 64)
        for token, found in enumerate(words([seed], [place], 50)[0]):
            half = mixed(token ^ (key % 2**32), (16, 13, 16), counter_rng.MIX32_FACTORS, 32)
            assert found == mixed((half + (key >> 32)) % 2**32, (16, 13, 16), counter_rng.MIX32_FACTORS, 32)


@pytest.mark.parametrize("bits", [counter_rng.bits, counter_rng.fast_random_bits])
@pytest.mark.parametrize("varied", ["ids", "places", "seeds"])
def test_bits_are_uniform_and_independent(varied: str, bits: Callable[..., Tensor]) -> None:
    """Along each of the three, every byte is uniform, and unrelated to that of the next."""
    count = 40_000
    if varied == "ids":
        random = words([7], [3], count, bits)[0]
    elif varied == "places":
        random = words([7] * count, list(range(count)), 6, bits)[:, 5]
    else:
        random = words(list(range(count)), [3] * count, 6, bits)[:, 5]
    for shift in (0, 8, 16, 24):
        byte = (random >> shift) & 255
        assert uniform(byte, 256) > 1e-4
        assert independent(byte[:-1] // 16, byte[1:] // 16, 16) > 1e-4
    flipped = np.unpackbits((random[:-1] ^ random[1:]).view(np.uint8)).mean()
    assert abs(flipped - 0.5) < 0.002


@pytest.mark.parametrize("place", [0, 1, 2, 1000])
def test_random_halves_are_independent(place: int) -> None:
    """A weight, its mean and its square are rounded by them: each is uniform, and says nothing of the others."""
    random = counter_rng.fast_random_bits(torch.tensor([7]), torch.tensor([place]), torch.arange(40_000))[0]
    halves = [(half & 0xFFFF).numpy() for half in (random, random >> 16, counter_rng.extra_random_bits(random))]
    for half in halves:
        assert uniform(half >> 8, 256) > 1e-4 and uniform(half & 255, 256) > 1e-4
    for one, other in itertools.combinations(halves, 2):
        assert independent(one >> 12, other >> 12, 16) > 1e-4


def test_noise_differs_per_token() -> None:
    assert len(np.unique(words([1], [1], 200_000))) == 200_000


def test_gumbel_noise_distribution_is_finite() -> None:
    drawn = counter_rng.gumbel(counter_rng.bits(torch.tensor([1]), torch.tensor([2]), torch.arange(100_000)))[0].numpy()
    assert uniform((np.exp(-np.exp(-drawn)) * 100).astype(int), 100) > 1e-3  # its distribution function is uniform
    ends = counter_rng.gumbel(torch.tensor([0, -1, 1, 2**31 - 1, -(2**31)], dtype=torch.int32)).double()
    v = np.minimum((np.array([0, 2**32 - 1, 1, 2**31 - 1, 2**31]) + 0.5) / 2**32, counter_rng.BELOW_ONE)
    np.testing.assert_allclose(ends.numpy(), -np.log(-np.log1p(-v)), rtol=1e-4)


# --- the kernel ---


def rows_of(count: int) -> gumbel_sample.RowParams:
    """Greedy, tiny, usual and large temperatures."""
    draw = torch.Generator().manual_seed(1)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 1e-30, 3.0]).repeat(count)[:count]
    seeds = torch.randint(0, 2**62, (count,), generator=draw)
    slots, places = torch.randperm(count, generator=draw), torch.arange(count) * 1000
    return gumbel_sample.RowParams(*(t.to(DEVICE) for t in (temperatures, seeds, slots, places)))


def some_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3).to(DEVICE, dtype)


@runs_kernels
@pytest.mark.parametrize(
    ("dtype", "vocab", "valid"),
    [
        (torch.float32, 50, 50),
        (torch.bfloat16, 5000, 4900),
        pytest.param(torch.float32, 5000, 4000, marks=pytest.mark.slow),
    ],
)
def test_kernel_samples_same_tokens_as_reference(dtype: torch.dtype, vocab: int, valid: int) -> None:
    logits, rows = some_logits(5, vocab, dtype), rows_of(5)
    changed = logits[:, :valid].float().masked_fill(logits[:, :valid] > 6, -math.inf)
    for scores in (logits[:, :valid], changed):
        for each in (rows, None):
            expected = gumbel_sample.reference(logits, scores, each, True)
            found = gumbel_sample_triton.launch(logits, scores, each, True)
            assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.bad, expected.bad)
            torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=2e-6)
            assert torch.equal(gumbel_sample_triton.launch(logits, scores, each, False).tokens, expected.tokens)


@runs_kernels
def test_kernel_batch_invariance() -> None:
    logits, rows = some_logits(6, 5000), rows_of(6)
    together = gumbel_sample_triton.launch(logits, logits, rows, True)
    for i in range(6):
        one = slice(i, i + 1)
        row = gumbel_sample.RowParams(rows.temperatures, rows.seeds, rows.slots[one], rows.output_positions[one])
        alone = gumbel_sample_triton.launch(logits[one], logits[one], row, True)
        assert torch.equal(alone.tokens, together.tokens[one])
        assert alone.logprobs is not None and together.logprobs is not None
        assert torch.equal(alone.logprobs, together.logprobs[one])


@runs_kernels
def test_kernel_breaks_ties_by_first_index() -> None:
    logits = torch.zeros(1, 9000, device=DEVICE)
    logits[0, [8999, 4500, 4100, 4097]] = 1.0
    assert gumbel_sample_triton.launch(logits, logits, None, False).tokens.item() == 4097


@runs_kernels
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_kernel_flags_nonfinite_rows(value: float) -> None:
    logits = some_logits(3, 5000)
    logits[1, 4999] = value
    drawn = gumbel_sample_triton.launch(logits, logits[:, :4990], rows_of(3), False)
    assert drawn.bad.tolist() == [False, True, False] and drawn.tokens[1] == 0
    nothing = gumbel_sample_triton.launch(
        some_logits(1, 60), torch.full((1, 60), -math.inf, device=DEVICE), None, False
    )
    assert nothing.bad.item() and nothing.tokens.item() == 0


@pytest.mark.skipif(DEVICE == "cpu", reason="compares two devices")
def test_noise_is_the_same_on_both_devices() -> None:
    arguments = torch.arange(9) * 7**20, torch.arange(9) * 1000, torch.arange(200_000)
    here, there = counter_rng.bits(*arguments), counter_rng.bits(*(t.cuda() for t in arguments))
    assert torch.equal(here, there.cpu())


# --- the search for a threshold ---


def cuts_of(vocab: int) -> top_k_top_p.TruncationParams:
    """Greedy, top-k, top-p, min-p, none, and all at once; more than the vocabulary, and a cut that leaves one."""
    table = [
        (0.0, 5, 0.5, 0.1),
        (1.0, 7, 1.0, 0.0),
        (0.7, 0, 0.8, 0.0),
        (2.0, 0, 1.0, 0.05),
        (1.0, 0, 1.0, 0.0),
        (3.0, 40, 0.7, 0.01),
        (1e-30, 0, 0.9, 0.0),
        (1.0, vocab, 0.999, 0.0),
        (1.0, 1, 1e-6, 1.0),
    ]
    slots = torch.arange(len(table), device=DEVICE).flip(0)
    return top_k_top_p.TruncationParams(*torch.tensor(table, device=DEVICE).unbind(dim=1), slots)


@runs_kernels
@pytest.mark.parametrize(
    ("dtype", "vocab"),
    [
        (torch.float32, 300),
        pytest.param(torch.bfloat16, 5000, marks=pytest.mark.slow),
        (torch.float16, 40),
    ],
)
def test_threshold_search_equals_sort(dtype: torch.dtype, vocab: int) -> None:
    cuts = cuts_of(vocab)
    scores = some_logits(len(cuts.slots), vocab, dtype)
    scores[:, :3] = torch.tensor([-math.inf, 0.0, -0.0], dtype=dtype)
    assert torch.equal(top_k_top_p_triton.launch(scores, cuts), top_k_top_p.reference(scores, cuts))


@runs_kernels
def test_tokens_below_threshold_are_not_sampled() -> None:
    logits, rows = some_logits(5, 300), rows_of(5)
    least = logits.topk(3, dim=1).values[:, -1].contiguous()
    expected = gumbel_sample.reference(logits, logits, rows, False, least)
    assert torch.equal(gumbel_sample_triton.launch(logits, logits, rows, False, least).tokens, expected.tokens)
    assert (logits.gather(1, expected.tokens.unsqueeze(1)).squeeze(1) >= least).all()
    assert not torch.equal(expected.tokens, gumbel_sample.reference(logits, logits, rows, False).tokens)


@runs_kernels
def test_masked_tokens_are_not_sampled() -> None:
    """Words whose sign bit is set or not, and a last word that reaches beyond the valid tokens."""
    logits, rows = some_logits(5, 5000), rows_of(5)
    mask = torch.randint(-(2**31), 2**31, (5, 157), generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.int32)
    expected = gumbel_sample.reference(logits, logits[:, :4999], rows, False, None, mask)
    found = gumbel_sample_triton.launch(logits, logits[:, :4999], rows, False, None, mask)
    assert torch.equal(found.tokens, expected.tokens)
    words = mask.cpu().numpy().view(np.uint32)
    assert all(int(words[i, token // 32]) >> (token % 32) & 1 for i, token in enumerate(expected.tokens.tolist()))

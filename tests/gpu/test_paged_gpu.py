"""The engine's kernels on a GPU: against PyTorch's own operations in fp64, bit for bit where that is promised."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lmworks.kernels.inference.kv_cache_write import reference as write_reference
from lmworks.kernels.inference.kv_cache_write import write_kv_cache
from lmworks.kernels.inference.paged_attention import AttentionMetadata, LayerCache, paged_attention
from lmworks.kernels.rms_norm import add_rms_norm
from lmworks.kernels.swiglu import swiglu_packed
from lmworks.model import rope
from lmworks.spec import ModelSpec
from paged_cases import NAMED, Case, Made, expected, gathered, make, random_case, share

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# bf16 holds 8 bits: the result is rounded once, the weights p once before the second product.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def run(case: Case, made: Made) -> torch.Tensor:
    there = made.to("cuda")
    return paged_attention(there.q, there.cache, there.metadata, **case.options("cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_attention_equals_sdpa(name: str, dtype: torch.dtype) -> None:
    case = replace(NAMED[name], dtype=dtype)
    made = make(case)
    torch.testing.assert_close(run(case, made).cpu().double(), expected(case, made), rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("seed", range(12))
def test_random_pages_equal_sdpa(seed: int) -> None:
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    case = replace(random_case(100 + seed), dtype=dtype)
    made = make(case, seed)
    torch.testing.assert_close(run(case, made).cpu().double(), expected(case, made), rtol=0, atol=CLOSE[dtype])


LONGER = {
    "answers": Case((900, 2049, 0, 64, 1), (1, 1, 1, 1, 1)),
    "guesses": Case((900, 300, 65), (5, 3, 5)),
    "prompts": Case((900, 300, 65), (900, 290, 1)),
    "window": Case((900, 300), (1, 300), window=130),
}


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads", [(64, 1), (80, 3), (128, 2), (128, 8), (128, 24), (256, 4)], ids=str)
@pytest.mark.parametrize("name", LONGER)
def test_8_bit_cache_equals_dequantized_values(name: str, heads: tuple[int, int], stored: torch.dtype) -> None:
    head_dim, group = heads
    case = replace(LONGER[name], group=group, head_dim=head_dim, stored=stored, dtype=torch.bfloat16)
    made = make(case)
    torch.testing.assert_close(run(case, made).cpu().double(), expected(case, made), rtol=0, atol=1e-2)


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads", [(64, 1), (128, 2), (128, 4), (64, 3)], ids=str)
def test_gathered_keys_equal_sdpa(heads: tuple[int, int], stored: torch.dtype | None) -> None:
    head_dim, group = heads
    case = Case((900, 0, 2049, 300), (900, 0, 700, 1), 2, group, head_dim, stored=stored, dtype=torch.bfloat16)
    made = gathered(make(case))
    torch.testing.assert_close(run(case, made).cpu().double(), expected(case, made), rtol=0, atol=2e-2)


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads", [(64, 1), (128, 2), (128, 4), (80, 3)], ids=str)
def test_shared_prefixes_equal_sdpa(heads: tuple[int, int], stored: torch.dtype | None) -> None:
    head_dim, group = heads
    lengths = (900, 2049, 0, 700, 1500, 1025, 1024, 1100, 1300, 300)
    case = Case(lengths, (1,) * 10, 2, group, head_dim, stored=stored, dtype=torch.bfloat16, with_sinks=group == 3)
    made = share(make(case), {(3, 0, 4): 640, (1, 8, 6, 7, 5): 896}, tile=2)
    for _ in range(3):  # tickets are as they were
        torch.testing.assert_close(run(case, made).cpu().double(), expected(case, made), rtol=0, atol=2e-2)


def test_every_pair_of_bytes_is_widened() -> None:
    from words import widen

    words = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    for kind in (torch.int8, torch.float8_e4m3fn):
        wanted = words.view(torch.uint8).view(kind).to(torch.float16).view(-1, 2)
        for found, byte in zip(widen(words, kind == torch.int8), wanted.unbind(1), strict=True):
            torch.testing.assert_close(found, byte, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("heads", [(64, 1), (128, 2), (128, 4)], ids=str)
def test_batch_invariance(heads: tuple[int, int]) -> None:
    """A prompt at once, in uneven chunks, beside others, or its tokens decoded one by one: the same bits."""
    head_dim, group = heads
    length = 700
    made = make(Case((length, 300), (length, 300), 2, group, head_dim, dtype=torch.bfloat16)).to("cuda")
    whole = paged_attention(made.q, made.cache, made.metadata, invariant=True)[:length]
    cuts = [0, 1, 2, 65, 66, 200, 333, 640, 641, length]
    for begin, end in itertools.pairwise(cuts):
        lengths = torch.tensor([300, end, 0], dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, 1, 1 + end - begin, 2 + end - begin], dtype=torch.int32, device="cuda")
        q = torch.cat((made.q[-1:], made.q[begin:end], made.q[:1]))
        metadata = AttentionMetadata(made.metadata.block_tables[[1, 0, 0]].contiguous(), lengths, starts, end - begin)
        chunk = paged_attention(q, made.cache, metadata, invariant=True)
        assert torch.equal(chunk[1:-1], whole[begin:end]), f"queries {begin} to {end}"
    # Decoding: every position as a sequence of its own, in one batch.
    lengths = torch.arange(1, length + 1, dtype=torch.int32, device="cuda")
    starts = torch.arange(length + 1, dtype=torch.int32, device="cuda")
    metadata = AttentionMetadata(made.metadata.block_tables[:1].expand(length, -1), lengths, starts, 1)
    assert torch.equal(paged_attention(made.q[:length], made.cache, metadata, invariant=True), whole)


def test_graph_replay_with_other_lengths() -> None:
    case = Case((1, 1, 1, 1, 1), (1, 1, 1, 1, 1), 2, 4, 128, dtype=torch.bfloat16)
    full = replace(case, lengths=(513, 64, 0, 1, 1100))
    made = make(full)
    there = made.to("cuda")
    lengths = there.metadata.seq_lens.clamp(max=1)
    metadata = replace(there.metadata, seq_lens=lengths)
    paged_attention(there.q, there.cache, metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(there.q, there.cache, metadata)
    lengths.copy_(there.metadata.seq_lens)
    seen = []
    for _ in range(20):  # programs that share a sequence finish in any order
        graph.replay()
        seen.append(out.cpu())
    torch.testing.assert_close(out.cpu().double(), expected(full, made), rtol=0, atol=2e-2)
    assert all(torch.equal(one, seen[0]) for one in seen)


# One step of what a cache holds, relative and absolute.
STEP = {torch.bfloat16: (2**-7, 1e-2), torch.int8: (0, 1), torch.float8_e4m3fn: (2**-3, 2**-9)}


@pytest.mark.parametrize("stored", STEP, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_kv_cache_write_equals_reference(head_dim: int, stored: torch.dtype) -> None:
    spec = ModelSpec.from_preset("tiny", hidden=64, heads=8, kv_heads=4, head_dim=head_dim)
    rng = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(50, 16 * head_dim, generator=rng, device="cuda", dtype=torch.bfloat16) * 3
    norms = [torch.rand(head_dim, generator=rng, device="cuda", dtype=torch.bfloat16) + 0.5 for _ in range(2)]
    turn = rope.tables(spec, torch.arange(50, device="cuda"))
    slots = torch.randperm(96, generator=rng, device="cuda")[:50]
    slots[7] = -1
    results = []
    for function in (write_kv_cache, write_reference):
        pools = [torch.zeros(6, 4, 16, head_dim, device="cuda").to(stored) for _ in range(2)]
        scales = [torch.zeros(6, 4, 16, device="cuda") if stored.itemsize == 1 else None for _ in range(2)]
        cache = LayerCache(*pools, *scales)
        q = function(qkv, 8, 4, *norms, 1e-6, turn, cache, slots)
        results.append([q, *(x.float() for x in vars(cache).values() if x is not None)])
    # The order of the sum of squares may differ, and with it the last bit of a bf16, or one step of what is stored; and
    # PyTorch divides by a number as it multiplies by its inverse, so the last bit of many scales differs.
    (q, *pools), (theirs_q, *theirs) = results
    torch.testing.assert_close(q, theirs_q, rtol=2**-7, atol=1e-2)
    rtol, atol = STEP[stored]
    for mine, reference in zip(pools[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine, reference, rtol=rtol, atol=atol)
        assert (mine != reference).float().mean() < 0.02
    for mine, reference in zip(pools[2:], theirs[2:], strict=True):
        torch.testing.assert_close(mine, reference, rtol=2**-7, atol=0)


def test_swiglu_and_add_norm() -> None:
    rng = torch.Generator("cuda").manual_seed(0)
    x, delta = (torch.randn(37, 3000, generator=rng, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(3000, generator=rng, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(swiglu_packed(x), F.silu(x[:, :1500]) * x[:, 1500:])
    total, normed = add_rms_norm(x, delta, weight, 1e-5, "triton")
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(normed, F.rms_norm(total, (3000,), weight, 1e-5))

"""The paged kernels as a GPU runs them, through Triton's interpreter (`test_interpreted` starts these with it).

In fp32, and nothing is written as fp8: the interpreter does not round to bf16 and fp8 as a GPU does.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import os
from functools import partial
from typing import Any

import pytest
import torch

from lmworks.engine.core import kv_cache, shared_prefixes, step_input
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.shared_prefixes import PrefixFinder
from lmworks.engine.core.step_input import Layout, Packer
from lmworks.kernels.inference.kv_cache_write import reference as place_reference
from lmworks.kernels.inference.kv_cache_write import write_vectors as write_reference
from lmworks.kernels.inference.paged_attention import AttentionMetadata, LayerCache
from lmworks.model import GPT, rope
from lmworks.spec import EngineSpec, ModelSpec
from paged_cases import NAMED, Case, expected, gathered, make, random_case, share
from variations import with_slow

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
if INTERPRETED:
    from lmworks.kernels.inference import kv_cache_write_triton, paged_attention_triton, prefill_attention_triton
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")


def check(case: Case, seed: int, **options: object) -> None:
    made = make(case, seed)
    out = paged_attention_triton.launch(made.q, made.cache, made.metadata, **case.options(), **options)
    torch.testing.assert_close(out.double(), expected(case, made), rtol=0, atol=4e-6)


@pytest.mark.parametrize("name", with_slow(NAMED, ("soft cap", "int8", "heads of 80", "chunks", "window")))
def test_attention_equals_sdpa(name: str) -> None:
    check(NAMED[name], 0)


@pytest.mark.parametrize("seed", with_slow(range(6), (3, 4, 5)))
def test_random_pages_equal_sdpa(seed: int) -> None:
    check(random_case(200 + seed), seed)


@pytest.mark.parametrize(
    ("splits", "window", "least"),
    [(8, 40, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 40, 1), (5, 0, 3), (5, 0, 20)))],
)
def test_split_keys_merge(splits: int, window: int, least: int) -> None:
    """More splits than the six tiles as well: what was not computed must not be merged."""
    config = paged_attention_triton.LaunchConfig(16, 16, 4, 2, splits, least)
    check(Case((3, 0, 90), (3, 1, 2), kv_heads=2, window=window), 1, config=config)
    for _ in range(2):  # tickets are as they were
        check(Case((3, 0, 90), (3, 1, 2), window=window, with_sinks=True, softcap=1.5), 1, config=config)


@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
def test_gathered_keys_equal_sdpa(stored: torch.dtype | None) -> None:
    """A prompt, a chunk, one query, a sequence without any, in blocks of 3; rows that nobody has stay 0."""
    case = Case((150, 0, 37, 130), (20, 0, 37, 1), 2, 3, 64, size=3, stored=stored)
    made = gathered(make(case))
    config = paged_attention_triton.LaunchConfig(32, 32, 4, 2)
    out = torch.zeros(len(made.q) + 3, *made.q.shape[1:])
    prefill_attention_triton.launch(made.q, made.cache, made.metadata, out, config)
    torch.testing.assert_close(out[:-3].double(), expected(case, made), rtol=0, atol=4e-6)
    assert not out[-3:].any()


SHARING = {
    "plain": Case((300, 270, 0, 129, 140), (1, 1, 1, 1, 1), kv_heads=1, head_dim=16),
    "int8, sinks, soft cap": Case(
        (300, 270, 0, 129, 140), (1, 1, 1, 1, 1), 1, 3, 16, stored=torch.int8, with_sinks=True, softcap=1.5
    ),
}


@pytest.mark.parametrize(
    ("name", "splits"),
    [("plain", 2), *(pytest.param(name, splits, marks=pytest.mark.slow) for name in SHARING for splits in (1, 2))],
)
def test_shared_prefixes_are_merged(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups, one of them in two tiles, beside a sequence on its own; prefixes in one part or two."""
    case = SHARING[name]
    monkeypatch.setattr(paged_attention_triton, "num_shared_splits", lambda *_: splits)
    monkeypatch.setattr(paged_attention_triton, "MIN_SHARED_UNITS", 1)
    for tile, config in ((1, paged_attention_triton.LaunchConfig(16, 32, 4, 2, 3, 1)), (2, None)):
        made = share(make(case), {(1, 0): 256, (4, 3): 128}, tile)
        out = paged_attention_triton.launch(made.q, made.cache, made.metadata, **case.options(), config=config)
        torch.testing.assert_close(out.double(), expected(case, made), rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    ("walks", "tiles", "shared"),
    [
        (8, 32, (8, 4)),  # one sequence: as many as its tiles allow
        (8, 512, (49, 4)),  # or as there are places for
        (64, 512, (6, 4)),
        (200, 512, (6, 4)),  # a few for each, or the longest would be waited for
        (396, 512, (3, 4)),
        (397, 32, (1, 32)),  # more than at once: long ones alone
        (512, 512, (8, 32)),
        (2048, 512, (8, 32)),  # where most of them are padding, the rest would not fill it
    ],
)
def test_keys_are_split_to_fill_gpu(
    walks: int, tiles: int, shared: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention_triton, "multiprocessors", lambda _device: 132)
    assert paged_attention_triton.num_splits(walks, tiles, 32, torch.device("cpu")) == shared


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_launch_configuration(stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured on an H200 (benchmarks/results/paged_sweep.txt): rows, tile, warps, tiles under way, programs."""
    monkeypatch.setattr(paged_attention_triton, "multiprocessors", lambda _device: 132)
    eight = stored.itemsize == 1

    def cut(heads: int, queries: int, seqs: int = 1, keys: int = 32_768, head_dim: int = 128) -> tuple[int, ...]:
        pool = torch.empty(1, 8, 16, head_dim).to(stored)
        scales = torch.empty(1, 8, 16) if eight else None
        numbers = torch.zeros(seqs + 1, dtype=torch.int32)
        metadata = AttentionMetadata(torch.zeros(seqs, keys // 16, dtype=torch.int32), numbers[1:], numbers, queries)
        q = torch.empty(seqs * queries, heads, head_dim, dtype=torch.bfloat16)
        config = paged_attention_triton.choose_config(
            q, LayerCache(pool, pool, scales, scales), metadata, invariant=False
        )
        return config.rows, config.tile, config.warps, config.stages, config.splits

    assert cut(16, 1) == (16, 128 if eight else 64, 4, 3, 49)
    assert cut(16, 1, seqs=256, keys=2048) == (16, 128 if eight else 64, 4, 3, 1)
    assert cut(32, 1, seqs=131, head_dim=64)[1] == 128
    assert cut(32, 1, seqs=132, head_dim=64)[1] == (128 if eight else 64)  # sequences fill the GPU by themselves
    assert cut(64, 5) == (64, 64, 4, 2 if eight else 3, 49)  # guesses: few rows, and long contexts
    assert cut(32, 600) == ((64, 64, 4, 2, 1) if eight else (128, 64, 8, 3, 1))


def test_padding_queries_get_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are as many queries as if all sequences had the most, too."""
    made = make(Case((5, 9), (2, 4)))
    fresh = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: fresh(x, **options).fill_(torch.nan))
    out = paged_attention_triton.launch(torch.cat((made.q, made.q[:2])), made.cache, made.metadata)
    assert torch.isfinite(out).all()
    assert (out[6:] == 0).all()


@pytest.mark.parametrize("window", [0, 1, 16, 45])
def test_masked_and_unmasked_tiles(window: int) -> None:
    """Tiles of 16 under 10 queries at a time: some are seen by all queries, some lie across an edge of the window."""
    config = paged_attention_triton.LaunchConfig(32, 16, 4, 2)
    check(Case((90, 100, 0), (20, 35, 1), kv_heads=1, group=3, window=window), 2, config=config)


@pytest.mark.parametrize(
    "traits",
    [pytest.param({}, marks=pytest.mark.slow), {"softcap": 1.5, "with_sinks": True}],
    ids=["plain", "soft cap and sinks"],
)
def test_batch_invariance(traits: dict[str, Any]) -> None:
    """A prompt at once, in uneven chunks beside another, or its tokens decoded one by one: the same bits."""
    case = Case((100, 40), (100, 40), 1, 2, **traits)
    made = make(case)
    launch = partial(paged_attention_triton.launch, softcap=case.softcap, sinks=case.sinks())
    whole = launch(made.q, made.cache, made.metadata, invariant=True)[:100]
    for begin, end in itertools.pairwise([0, 1, 40, 65, 66, 100]):
        lengths = torch.tensor([40, end, 0], dtype=torch.int32)
        starts = torch.tensor([0, 1, 1 + end - begin, 2 + end - begin], dtype=torch.int32)
        metadata = AttentionMetadata(made.metadata.block_tables[[1, 0, 0]], lengths, starts, end - begin)
        q = torch.cat((made.q[-1:], made.q[begin:end], made.q[:1]))
        assert torch.equal(launch(q, made.cache, metadata, invariant=True)[1:-1], whole[begin:end]), (begin, end)
    some = torch.tensor([0, 1, 63, 64, 65, 99])
    starts = torch.arange(len(some) + 1, dtype=torch.int32)
    metadata = AttentionMetadata(
        made.metadata.block_tables[:1].expand(len(some), -1), (some + 1).to(torch.int32), starts, 1
    )
    assert torch.equal(launch(made.q[some], made.cache, metadata, invariant=True), whole[some])


@pytest.mark.parametrize(
    ("heads", "stored"),
    [
        ((4, 2, 64), torch.float32),
        ((6, 2, 80), torch.int8),
        ((3, 1, 128), torch.int8),
        pytest.param((4, 2, 64), torch.int8, marks=pytest.mark.slow),
        *(pytest.param(heads, torch.float32, marks=pytest.mark.slow) for heads in ((6, 2, 80), (3, 1, 128))),
    ],
    ids=str,
)
def test_kv_cache_write_equals_reference(heads: tuple[int, int, int], stored: torch.dtype) -> None:
    queries, kv_heads, head_dim = heads
    spec = ModelSpec.from_preset("tiny", hidden=64, heads=queries, kv_heads=kv_heads, head_dim=head_dim)
    rng = torch.Generator().manual_seed(0)
    qkv = torch.randn(7, (queries + 2 * kv_heads) * head_dim, generator=rng) * 3
    q_norm, k_norm = (torch.rand(head_dim, generator=rng) + 0.5 for _ in range(2))
    norms = (None, None) if queries == 3 else (q_norm, k_norm)
    turn = None if queries == 6 else rope.tables(spec, torch.tensor([0, 5, 6, 7, 100, 3, 2]))
    slots = torch.tensor([17, 0, 4, -1, 9, 10, 11])
    results = []
    for function in (kv_cache_write_triton.launch, place_reference):
        pools = [torch.zeros(6, kv_heads, 3, head_dim).to(stored) for _ in range(2)]
        scales = [torch.zeros(6, kv_heads, 3) if stored.itemsize == 1 else None for _ in range(2)]
        cache = LayerCache(*pools, *scales)
        q = function(qkv, queries, kv_heads, *norms, 1e-6, turn, cache, slots)
        results.append([q, *(x.float() for x in vars(cache).values() if x is not None)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
def test_latent_vectors_are_written_as_by_the_reference(stored: torch.dtype) -> None:
    """Slots in any order, one of them padding; other slots stay as they were."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 1, 28, generator=generator)
    slots = torch.tensor([7, 0, -1, 19, 12])
    caches = []
    for write in (kv_cache_write_triton.launch_vectors, write_reference):
        pool = torch.full((5, 1, 4, 28), 9, dtype=stored)
        scales = None if stored == torch.float32 else torch.full((5, 1, 4), 9.0)
        caches.append(LayerCache(pool, pool, scales, scales))
        write(caches[-1], x, slots)
    mine, theirs = caches
    assert torch.equal(mine.keys, theirs.keys)
    if mine.key_scales is not None and theirs.key_scales is not None:
        assert torch.equal(mine.key_scales, theirs.key_scales)


@pytest.mark.slow
def test_engine_with_shared_prefixes_and_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens as with plain attention.

    A prefix that five prompts share is computed once, its keys are gathered, and read once for all that decode.
    """
    torch.manual_seed(0)
    model = GPT(
        ModelSpec.from_preset("tiny", hidden=64, layers=2, heads=2, kv_heads=1, head_dim=64, context=256)
    ).eval()
    prefix = torch.randint(0, 320, (140,)).tolist()
    prompts = [*([*prefix, 7, 8 + place] for place in range(5)), [1, 2, 3]]
    spec = EngineSpec(block=16, blocks=60, context=256, max_seqs=8, max_batch_tokens=200)

    def answers(runner: ModelRunner) -> list[list[int]]:
        engine = Engine(runner)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        requests = [Request(prompt, params) for prompt in prompts]
        for request in requests:
            engine.add(request)
        found = {piece.request.id: piece.result for piece in engine.run()}
        return [result.token_ids for request in requests if (result := found[request.id]) is not None]

    expected = answers(ModelRunner(copy.deepcopy(model), spec.replace(prefix_cache=False), "cpu", 320))
    layouts: list[Layout] = []
    pack = Packer.pack

    def noted(*given: Any) -> tuple[torch.Tensor, Layout]:
        buffer, layout = pack(*given)
        layouts.append(layout)
        return buffer, layout

    monkeypatch.setattr(Packer, "pack", noted)
    monkeypatch.setattr(step_input, "LONG_CHUNK", 64)
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_KEYS", 0)
    for name in ("paged_attention", "paged_decode"):
        monkeypatch.setattr(kv_cache, name, paged_attention_triton.launch)
    runner = ModelRunner(model, spec, "cpu", 320)
    runner.packer.gathers, runner.packer.prefixes = True, PrefixFinder(spec.block, 4)
    assert answers(runner) == expected
    assert layouts[0].keys > 0 and layouts[0].tokens == 142 + 4 * (142 - 128) + 2  # of the last prompt's three
    assert any(layout.shared_tiles for layout in layouts)

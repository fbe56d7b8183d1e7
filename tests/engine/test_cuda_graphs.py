"""Which steps are recorded as graphs, in which frames, and what becomes of a recording that finds no memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lmworks.engine.core import cuda_graphs as graphs_module
from lmworks.engine.core.cuda_graphs import CUDAGraphs, PrefillBuckets, buffer_size, capture_sizes, prefill_buckets
from lmworks.engine.core.request import Request, Sequence
from lmworks.engine.core.sampler import SamplingMetadata
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.scheduler import Chunk, Step
from lmworks.engine.core.step_input import Layout, Packer, decode_bucket, mixed_bucket
from lmworks.spec import EngineSpec, ModelSpec

CPU = torch.device("cpu")


class Pretended:
    """PyTorch's graphs without a GPU: a replay is counted, and memory may run out while something is recorded."""

    def __init__(self) -> None:
        self.pools = self.replays = 0
        self.capturing = False
        self.recorded_in: list[Any] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.capturing = True
        self.recorded_in.append(pool)

    def capture_end(self) -> None:
        self.capturing = False

    def replay(self) -> None:
        self.replays += 1

    def handle(self) -> tuple[int, int]:
        self.pools += 1
        return self.pools, 0


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    found = Pretended()
    stream = SimpleNamespace(wait_stream=lambda _other: None)

    @contextmanager
    def within(_stream: Any) -> Iterator[None]:
        yield

    given = {"CUDAGraph": lambda: found, "graph_pool_handle": found.handle, "stream": within,
             "Stream": lambda _device: stream, "current_stream": lambda: stream, "synchronize": lambda _device: None,
             "empty_cache": lambda: None}  # fmt: skip
    for name, value in given.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def graphs_of(
    max_seqs: int, prompts: PrefillBuckets, work: Any = lambda _batch, _wants: torch.zeros(1)
) -> CUDAGraphs[Any]:
    return CUDAGraphs(work, decode_bucket(max_seqs), 8, CPU, prompts)


def step_of(counts: list[int], start: int = 0, wanted: int = 1) -> Step:
    sequence = Sequence(Request([0], SamplingParams()), 0, 0, [0], 1, slot=0)
    return Step([Chunk(sequence, start, count, wanted) for count in counts])


@pytest.mark.parametrize("max_seqs", [1, 8, 256, 2048])
def test_mixed_buckets_are_few_and_large_enough(max_seqs: int, pretended: Pretended) -> None:
    prompts = prefill_buckets(ModelSpec.from_preset("tiny"), EngineSpec(max_batch_tokens=1000))
    graphs = graphs_of(max_seqs, prompts)
    draw = random.Random(0)
    found: set[Layout] = set()
    for _ in range(600 if max_seqs < 2048 else 150):
        counts = [1] * draw.randint(0, max_seqs)
        counts += [draw.randint(2, draw.choice((2, 5, 40, 600))) for _ in range(draw.randint(1, 70))]
        singles, longer = counts.count(1), [count for count in counts if count > 1]
        before = set(graphs.mixed_buckets)
        first, bucket = graphs.mixed(step_of(counts)), graphs.mixed(step_of(counts))
        if sum(longer) > 1024:
            assert first is bucket is None
            continue
        if bucket is None:  # as many as there may be are known
            assert len(graphs.mixed_buckets) == graphs_module.MAX_MIXED_BUCKETS
            continue
        assert first == (bucket if bucket in before else None)
        found.add(bucket)
        places, room = bucket.seqs - bucket.num_decodes, bucket.tokens - bucket.num_decodes
        assert singles <= bucket.num_decodes <= max_seqs
        assert bucket.num_decodes <= max(4 * singles, 8, room // 16)
        assert len(longer) <= places <= max(4 * len(longer), 8 * room // bucket.max_query_len)
        assert sum(longer) <= room <= max(1.5 * sum(longer) + 1, 64, 3 * places)
        assert max(longer) <= bucket.max_query_len <= max(256, 2 * max(longer))
        assert bucket.rows == bucket.seqs < bucket.tokens  # or every token would be taken to ask for logits
        assert bucket._replace(width=8).size <= len(graphs.buffer)
    assert 5 < len(found) <= graphs_module.MAX_MIXED_BUCKETS


def test_full_steps_share_one_bucket(pretended: Pretended) -> None:
    prompts = prefill_buckets(ModelSpec.from_preset("qwen3-0.6b"), EngineSpec(max_batch_tokens=8192))
    graphs, draw = graphs_of(256, prompts), random.Random(0)
    for singles in range(0, 256, 9):
        counts = [1] * singles + [1024]
        while sum(counts) < 8192:
            counts.append(min(draw.randint(100, 1024), 8192 - sum(counts)))
        graphs.mixed(step_of(counts))
    assert graphs.mixed_buckets == {mixed_bucket(256, 64, 8192, 1024, prompts.width)}


def test_no_bucket_for_draft_tokens_long_contexts_and_large_steps(pretended: Pretended) -> None:
    graphs = graphs_of(256, prefill_buckets(ModelSpec.from_preset("llama3-8b"), EngineSpec(max_batch_tokens=8192)))
    cases = {
        "guesses": Step(step_of([6], wanted=6).chunks + step_of([9]).chunks),
        "a long context": step_of([1, 40], start=8192),
        "many tokens": step_of([1, 800]),
        "many that decode": step_of([1] * 250 + [768]),
        "answers alone": step_of([1, 1]),
        "many prompts": step_of([2] * 257),
    }
    for name, step in cases.items():
        assert graphs.mixed(step) is graphs.mixed(step) is None, name
    assert not graphs.mixed_buckets
    assert [graphs.mixed(step_of([1, 700], start=7000)) is None for _ in range(2)] == [True, False]


def test_launch_bound_steps_are_captured() -> None:
    """A layer of Llama 3 8B computes 917 tokens in the 0.7 ms that a host takes to launch it."""

    def most(name: str, **engine: Any) -> int:
        spec = EngineSpec(**{"max_batch_tokens": 8192, **engine})
        return max(prefill_buckets(ModelSpec.from_preset(name), spec).token_sizes, default=0)

    assert [most(name) for name in ("qwen3-0.6b", "llama3-1b", "llama3-8b", "llama3-70b")] == [8192, 3072, 768, 192]
    assert [most("tiny", max_batch_tokens=tokens) for tokens in (7, 64, 65, 1000)] == [64, 64, 96, 1024]
    assert most("tiny", graph_prompts=False) == 0
    assert prefill_buckets(ModelSpec.from_preset("llama3-8b"), EngineSpec(max_batch_tokens=64)).max_tokens == 916


def test_buffer_size_covers_all_buckets() -> None:
    largest, prompts = decode_bucket(4, 5), PrefillBuckets((64, 96), 1000)
    assert buffer_size(largest, 8, PrefillBuckets()) == decode_bucket(4, 5)._replace(width=8, shared_tiles=4).size
    assert buffer_size(largest, 8, prompts) == mixed_bucket(4, 256, 96, 256, keys=1)._replace(width=8).size
    assert (
        buffer_size(decode_bucket(512, 5), 8, prompts) == decode_bucket(512, 5)._replace(width=8, shared_tiles=512).size
    )


@pytest.mark.parametrize("context", [40, 1000, 32_768])
def test_single_prompts_are_captured_before_the_first(context: int, pretended: Pretended) -> None:
    """Whatever their length, and also with a prefix in the cache or a few others that decode."""
    spec = EngineSpec(max_batch_tokens=8192, max_seqs=8, context=context)
    graphs = graphs_of(8, prefill_buckets(ModelSpec.from_preset("qwen3-0.6b"), spec))
    runner = SimpleNamespace(graphs=graphs, draft=None, spec=spec, packer=Packer(spec, 100, False), device=CPU)
    graphs.buffer = torch.zeros(2**20, dtype=torch.int64)
    graphs_module.capture_graphs(cast(Any, runner))
    captured = len(graphs.captured)
    assert captured == 4 + len(
        {64, 96, *graphs.prompts.token_sizes} if context > 8192 else graphs.single_prompts(context)
    )
    for length in (2, 30, 39, *((100, 700, 999) if context > 40 else ()), *((5000, 8192) if context > 8192 else ())):
        for start in {0, max(0, min(context, 8192) - length - 1)}:
            step = step_of([1] * (length > 128) + [length], start)
            bucket = graphs.mixed(step)
            assert bucket is not None and bucket.width == -(-min(context, 8192) // 16)
            graphs.run(*runner.packer.dummy_step(bucket), graphs_module.captured_metadata(SamplingMetadata()))
    assert len(graphs.captured) == captured and pretended.replays > 0


def test_capture_sizes_reach_maximum() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(100)[-2:] == [96, 100]
    assert capture_sizes(256)[-4:] == [160, 192, 224, 256]


def test_step_is_captured_then_replayed(pretended: Pretended) -> None:
    ran: list[int] = []
    graphs = graphs_of(8, PrefillBuckets((64,), 1000), lambda batch, _wants: ran.append(len(batch.tokens)))
    packer = Packer(EngineSpec(block=4, context=32, max_seqs=8), 320, pinned=False)
    for sampling_metadata in (SamplingMetadata(), SamplingMetadata(), SamplingMetadata(logprobs=True)):
        graphs.run(*packer.dummy_step(graphs.padded(3)), sampling_metadata)
    assert (ran, pretended.replays) == ([4, 4, 4, 4], 1)  # twice each: as it is, and recorded
    graphs.reset()
    graphs.run(*packer.dummy_step(graphs.padded(3)), SamplingMetadata())
    assert len(ran) == 6


def test_graphs_without_sampler_return_logits(pretended: Pretended) -> None:
    """Else each keeps memory for its own, which no other graph of the pool can use."""
    graphs = graphs_of(8, PrefillBuckets((64,), 1000), lambda batch, _wants: torch.full((len(batch.tokens), 5), 7.0))
    packer = Packer(EngineSpec(block=4, context=32, max_seqs=8), 320, pinned=False)
    for sequences in (8, 3):
        graphs.run(*packer.dummy_step(graphs.padded(sequences)), None)
        again = graphs.run(*packer.dummy_step(graphs.padded(sequences)), None)
        assert again.shape == (len(again), 5) and (again == 7).all()
        assert graphs.logits is not None and again.data_ptr() == graphs.logits.data_ptr()
    assert pretended.replays == 2 and len(graphs.captured) == 2


def test_prefill_graphs_are_dropped_when_memory_runs_out(pretended: Pretended) -> None:
    """What decodes keeps its graphs; those of prompts give their memory back, and begin in a new pool if ever."""
    short_of_memory = False

    def work(batch: Any, _wants: Any) -> int:
        if pretended.capturing and short_of_memory:
            raise torch.OutOfMemoryError("for the test")
        return len(batch.tokens)

    graphs = graphs_of(8, PrefillBuckets((64, 96), 1000), work)
    packer = Packer(EngineSpec(block=4, context=32, max_seqs=8), 320, pinned=False)
    answers, prompts, more = graphs.padded(3), mixed_bucket(0, 4, 64, 256), mixed_bucket(0, 4, 96, 256)
    for bucket in (answers, prompts):
        graphs.run(*packer.dummy_step(bucket), None)
    assert len(set(pretended.recorded_in)) == 2
    short_of_memory = True
    assert graphs.run(*packer.dummy_step(more), None) == 96
    assert not graphs.drop_prefill_graphs()  # nothing is left to give back
    assert not pretended.capturing
    assert [layout.tokens for layout, _ in graphs.captured] == [4]
    assert graphs.mixed_pool not in pretended.recorded_in
    assert graphs.mixed(step_of([30])) is graphs.mixed(step_of([30])) is None
    graphs.run(*packer.dummy_step(answers), None)
    assert pretended.replays == 1
    with pytest.raises(torch.OutOfMemoryError):  # without graphs of answers there is no engine
        graphs.run(*packer.dummy_step(graphs.padded(8)), None)

"""Sleeping and waking on a GPU: pages go back to the device and come to the same addresses, under the same graphs.

Other processes may use the device: what is free is compared over a few milliseconds, and is the median of several.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmworks.engine.core import kv_cache
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.kv_cache import KVCacheShape, free_on_gpu
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.sleep import resident_memory
from lmworks.engine.core.virtual_memory import OutOfMemory, VirtualBuffer, is_supported
from lmworks.model import GPT
from lmworks.spec import EngineSpec, ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
GIB, MIB = 2**30, 2**20
TOLERANCE = 8 * MIB  # pages of 2 MiB, and the driver's own
SMALL = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 512, "vocab": 512, "context": 512, "init_std": 0.3}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"kv_heads": 2},
    "experts": {"kv_heads": 2, "experts": 4, "top_k": 2, "expert_ffn": 128},
    "latent": {"kv_lora_rank": 48, "q_lora_rank": 32, "rope_head_dim": 16, "v_head_dim": 64},
}
PREFIX = [(7 * i) % 500 for i in range(70)]
PROMPTS = [[*PREFIX, 4], [*PREFIX, 9, 9, 41], list(range(40)), [3]]


@pytest.fixture(autouse=True)
def empty_device() -> None:
    """Engines of tests before this one are gone."""
    gc.collect()
    torch.cuda.empty_cache()


def make_engine(shape: str = "dense", kv_dtype: str = "auto", gib: float = 0.5) -> Engine:
    """In fp32, so that graphs and padding change no token; with a cache of `gib`."""
    model = ModelSpec(**{**SMALL, **SHAPES[shape]})
    engine = EngineSpec(device="cuda", dtype="fp32", kv_dtype=kv_dtype, max_seqs=16, max_batch_tokens=512)
    blocks = int(gib * GIB) // KVCacheShape.of(model, engine, torch.float32).block_bytes
    return Engine(ModelRunner(GPT(model, seed=1), engine.replace(blocks=blocks), CUDA, model.vocab, sleepable=True))


def runner_of(engine: Engine) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


def answers(engine: Engine) -> list[list[int]]:
    """Tokens of greedy and sampled requests, the prefix cache being empty; then again, with it."""
    found = []
    engine.weights_changed()
    for _ in range(2):
        params = [
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
            SamplingParams(temperature=1.0, n=2, max_tokens=12, ignore_eos=True, seed=3),
        ]
        requests = [Request(list(prompt), each) for each in params for prompt in PROMPTS]
        for request in requests:
            engine.add(request)
        done = {delta.request.id: delta.result for delta in engine.run()}
        for request in requests:
            result = done[request.id]
            assert result is not None and result.error is None, result
            found += [each.token_ids for each in result.answers]
    return found


def rise_of_free_memory(release: Callable[[], Any], take: Callable[[], Any], times: int = 7) -> float:
    """Bytes that the device has more of after `release`, the median of several times."""
    rises = []
    for _ in range(times):
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        release()
        rises.append(torch.cuda.mem_get_info()[0] - before)
        take()
    return statistics.median(rises)


def test_the_driver_manages_virtual_memory() -> None:
    """Else the tests below would prove the fallback."""
    assert is_supported(CUDA)


def test_pages_come_and_go_at_one_address() -> None:
    buffer = VirtualBuffer(GIB + 5, CUDA)
    assert buffer.mapped_bytes == 0
    buffer.map()
    size = buffer.mapped_bytes
    assert GIB < size <= GIB + 64 * MIB  # rounded up to pages
    numbers = buffer.tensor((4, GIB // 16), torch.float32)
    address = numbers.data_ptr()
    assert numbers.device == torch.device("cuda", torch.cuda.current_device()) and not numbers.any()
    numbers += 7
    assert bool((numbers == 7).all())
    assert abs(rise_of_free_memory(buffer.unmap, buffer.map) - size) < TOLERANCE
    again = buffer.tensor((4, GIB // 16), torch.float32)
    assert again.data_ptr() == address and not again.any()
    numbers[0, 5] = 3.0
    assert again[0, 5].item() == 3.0  # a tensor from before is valid


def test_garbage_gives_its_pages_back() -> None:
    """Buffers that are dropped while mapped: 300 GiB in all, more than the device has."""
    for _ in range(75):
        buffer = VirtualBuffer(4 * GIB, CUDA)
        buffer.map()
        del buffer


def test_out_of_memory_leaves_nothing_mapped() -> None:
    buffer = VirtualBuffer(2 * torch.cuda.mem_get_info()[1], CUDA)
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
            buffer.map()
        assert not buffer.mapped
    assert torch.ones(8, device=CUDA).sum().item() == 8  # the context is as it was


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_engine_that_slept_is_as_before(shape: str, kv_dtype: str) -> None:
    engine = make_engine(shape, kv_dtype)
    runner = runner_of(engine)
    cache = runner.cache
    assert all(isinstance(buffer, VirtualBuffer) for buffer in cache.buffers)
    answers(engine)
    want = answers(engine)  # graphs of mixed steps are captured when their bucket comes again
    graphs = runner.graphs
    assert graphs is not None
    captured = dict(graphs.captured)
    addresses, size = list(cache.addresses), cache.blocks * cache.shape.block_bytes
    assert abs(rise_of_free_memory(engine.sleep, engine.wake) - size) < TOLERANCE
    engine.sleep()
    torch.full((GIB // 2,), 255, dtype=torch.uint8, device=CUDA)  # a trainer's, perhaps on the same pages
    torch.cuda.empty_cache()
    engine.wake()
    assert cache.addresses == addresses
    assert not any(bool(pool.view(torch.uint8).any()) for pool in cache.pools())
    assert answers(engine) == want
    if graphs is not None:
        assert graphs.captured == captured and captured  # the very same, replayed
    assert engine.metrics.graph_recaptures == 0


def test_without_virtual_memory_graphs_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    want = answers(make_engine())
    monkeypatch.setattr(kv_cache, "is_supported", lambda _device: False)
    engine = make_engine()
    runner = runner_of(engine)
    assert answers(engine) == want
    assert runner.graphs is not None
    count, before = len(runner.graphs.captured), list(runner.cache.addresses)
    reserved = torch.cuda.memory_reserved()
    released = engine.sleep()
    assert reserved - torch.cuda.memory_reserved() >= released
    blocker = torch.empty(released, dtype=torch.uint8, device=CUDA)  # a trainer's, where the cache was
    engine.wake()
    moved = runner.cache.addresses != before
    assert engine.metrics.graph_recaptures == (count if moved else 0)
    assert answers(engine) == want
    del blocker


def test_100_rounds_do_not_grow() -> None:
    """Each with a trainer's allocations in between. Pages that are not released would be 200 GiB."""
    engine = make_engine(gib=2.0)
    want = answers(engine)
    reserved = []
    for _ in range(100):
        engine.sleep()
        update = [torch.ones(GIB // 4, device=CUDA) for _ in range(2)]
        del update
        engine.wake()
        answers(engine)
        reserved.append(torch.cuda.memory_reserved())
    assert answers(engine) == want
    assert reserved[-1] <= reserved[4], reserved
    assert engine.metrics.graph_recaptures == 0


def test_sizing_counts_sleepable_caches() -> None:
    """Though torch does not know of them."""
    buffer = VirtualBuffer(2 * GIB, CUDA)
    buffer.map()
    rooms = []
    for _ in range(7):
        beside = free_on_gpu(CUDA, 0.9, 0)
        buffer.unmap()
        rooms.append(free_on_gpu(CUDA, 0.9, 0) - beside)
        buffer.map()
    assert abs(statistics.median(rooms) - 2 * GIB) < TOLERANCE


def test_a_closed_engine_has_no_pages() -> None:
    engine = make_engine()
    runner = runner_of(engine)
    engine.close()
    assert all(buffer.mapped_bytes == 0 for buffer in runner.cache.buffers)
    kept = resident_memory(runner)
    assert kept["weights"] == sum(each.nbytes for each in (*runner.model.parameters(), *runner.model.buffers()))
    assert 0 < kept["CUDA graphs"] <= torch.cuda.memory_reserved()

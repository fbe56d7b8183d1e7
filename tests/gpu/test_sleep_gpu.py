"""Sleeping and waking on a GPU: pages go back to the device and come to the same addresses, under the same graphs."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

from lmworks.engine.core import kv_cache, sleep
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.virtual_memory import OutOfMemory, VirtualBuffer, is_supported
from lmworks.model import GPT
from lmworks.spec import EngineSpec, LMWorksError, ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
GIB, MIB = 2**30, 2**20
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


def make_engine(shape: str = "dense", kv_dtype: str = "auto", gib: float = 0.5, sleepable: bool = True) -> Engine:
    """In fp32, so that graphs and padding change no token; with a cache of `gib`."""
    model = ModelSpec(**{**SMALL, **SHAPES[shape]})
    engine = EngineSpec(device="cuda", dtype="fp32", kv_dtype=kv_dtype, max_seqs=16, max_batch_tokens=512)
    blocks = int(gib * GIB) // kv_cache.KVCacheShape.of(model, engine, torch.float32).block_bytes
    runner = ModelRunner(GPT(model, seed=1), engine.replace(blocks=blocks), CUDA, model.vocab, sleepable=sleepable)
    return Engine(runner)


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


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_the_driver_manages_virtual_memory() -> None:
    """Else the tests below would prove the fallback."""
    assert is_supported(CUDA)


def test_pages_come_and_go_at_one_address() -> None:
    torch.zeros(1, device=CUDA)
    before = free_bytes()
    buffer = VirtualBuffer(GIB + 5, CUDA)
    assert buffer.mapped_bytes == 0 and before - free_bytes() < 64 * MIB  # an address range takes no memory
    buffer.map()
    size = buffer.mapped_bytes
    assert GIB < size <= GIB + 64 * MIB
    assert size <= before - free_bytes() < size + 64 * MIB
    numbers = buffer.tensor((4, GIB // 16), torch.float32)
    address = numbers.data_ptr()
    assert numbers.device == torch.device("cuda", 0) and not numbers.any()
    numbers += 7
    assert bool((numbers == 7).all())
    buffer.unmap()
    assert before - free_bytes() < 64 * MIB
    other = torch.full((GIB,), 255, dtype=torch.uint8, device=CUDA)  # perhaps on the same pages
    del other
    torch.cuda.empty_cache()
    buffer.map()
    again = buffer.tensor((4, GIB // 16), torch.float32)
    assert again.data_ptr() == address and not again.any()
    del numbers, again, buffer
    gc.collect()
    assert before - free_bytes() < 64 * MIB


def test_out_of_memory_leaves_nothing_mapped() -> None:
    torch.zeros(1, device=CUDA)
    torch.cuda.empty_cache()
    before = free_bytes()
    buffer = VirtualBuffer(before // 2 // MIB * MIB, CUDA)
    taken = torch.empty(before * 3 // 4, dtype=torch.uint8, device=CUDA)
    with pytest.raises(OutOfMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
        buffer.map()
    assert not buffer.mapped
    del taken  # torch keeps it reserved; `map` releases it
    buffer.map()
    assert before - free_bytes() >= buffer.mapped_bytes
    del buffer


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
    captured = {} if graphs is None else dict(graphs.captured)
    assert (graphs is not None) == (shape == "dense")  # the others read counts or lengths on the host
    torch.cuda.empty_cache()
    addresses, awake = list(cache.addresses), free_bytes()
    released = engine.sleep()
    assert released >= cache.blocks * cache.shape.block_bytes
    assert abs(free_bytes() - awake - released) < 8 * MIB
    filler = torch.full((GIB // 4,), 255, dtype=torch.uint8, device=CUDA)  # the trainer's
    del filler
    torch.cuda.empty_cache()
    engine.wake()
    assert abs(free_bytes() - awake) < 8 * MIB
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
    torch.cuda.empty_cache()
    awake = free_bytes()
    released = engine.sleep()
    assert abs(free_bytes() - awake - released) < 64 * MIB
    blocker = torch.empty(released, dtype=torch.uint8, device=CUDA)  # the trainer's, at the cache's address
    engine.wake()
    moved = runner.cache.addresses != before
    assert engine.metrics.graph_recaptures == (count if moved else 0)
    assert answers(engine) == want
    del blocker


def test_100_rounds_do_not_grow() -> None:
    """Each with a trainer's allocations in between."""
    engine = make_engine(gib=4.0)
    want = answers(engine)
    reserved, free, seconds = [], [], []
    for _ in range(100):
        began = time.perf_counter()
        engine.sleep()
        slept = time.perf_counter()
        update = [torch.ones(GIB // 4, device=CUDA) for _ in range(4)]
        del update
        torch.cuda.synchronize()
        resumed = time.perf_counter()
        engine.wake()
        seconds.append((slept - began, time.perf_counter() - resumed))
        answers(engine)
        reserved.append(torch.cuda.memory_reserved())
        free.append(free_bytes())
    assert answers(engine) == want
    assert reserved[-1] == reserved[5], reserved
    assert abs(free[-1] - free[5]) < 8 * MIB, free
    assert engine.metrics.graph_recaptures == 0
    sleeping, waking = (sorted(column)[50] for column in zip(*seconds, strict=True))
    print(f"sleep {sleeping * 1e3:.1f} ms, wake {waking * 1e3:.1f} ms for a cache of 4 GiB")


def test_waking_without_memory_can_be_tried_again() -> None:
    engine = make_engine(gib=8.0)
    want = answers(engine)
    engine.sleep()
    torch.cuda.empty_cache()
    taken = torch.empty(free_bytes() - 4 * GIB, dtype=torch.uint8, device=CUDA)
    with pytest.raises(LMWorksError, match=r"cannot wake: its KV cache takes 8\.00 GiB, of which \d\.\d\d are free"):
        engine.wake()
    assert engine.asleep
    del taken
    engine.wake()
    assert answers(engine) == want


def test_sizing_counts_sleepable_caches() -> None:
    """Blocks fill a part of the GPU, in which another engine's sleepable cache lies, though torch does not know it."""
    first = make_engine(gib=20.0)
    total, part = torch.cuda.mem_get_info()[1], 0.5
    model = ModelSpec(**{**SMALL, "kv_heads": 4, "context": 65536})
    spec = EngineSpec(device="cuda", dtype="bf16", max_seqs=1024, max_batch_tokens=2048, memory=part, graphs=False)
    runner = ModelRunner(GPT(model, seed=1), spec, CUDA, model.vocab, sleepable=True)
    used = total - free_bytes()
    assert part * total - 4 * GIB < used < part * total + GIB
    runner.close()
    first.close()


def test_closing_gives_pages_back() -> None:
    engine = make_engine(gib=4.0)
    before = free_bytes()
    engine.close()
    assert free_bytes() - before >= 4 * GIB - 8 * MIB
    kept = sleep.resident_memory(runner_of(engine))
    assert kept["CUDA graphs"] > 0 and kept["weights"] > 0

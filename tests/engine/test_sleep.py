"""An engine that slept answers as a new one does, at the same addresses, and its memory does not grow."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from test_virtual_memory import linux, resident_bytes

from lmworks.engine.core import kv_cache, sleep
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request, Result
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.scheduler import Step
from lmworks.engine.core.virtual_memory import OutOfMemory, TorchBuffer, VirtualBuffer
from lmworks.engine.speculative.draft_model import DraftModel, DraftModelProposer
from lmworks.engine.speculative.verification import Speculator
from lmworks.model import GPT
from lmworks.spec import EngineSpec, LMWorksError, ModelSpec, SpecError
from variations import with_slow

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 64, "context": 128, "init_std": 0.3}
DENSE: dict[str, Any] = {"kv_heads": 2}
EXPERTS: dict[str, Any] = {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1}
LATENT: dict[str, Any] = {"kv_lora_rank": 16, "q_lora_rank": 8, "rope_head_dim": 4, "v_head_dim": 8}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "dense": (DENSE, "auto"),
    "experts": (EXPERTS, "auto"),
    "latent": (LATENT, "auto"),
    "dense fp8": (DENSE, "fp8"),
    "dense int8": (DENSE, "int8"),
    "latent int8": (LATENT, "int8"),
}
PREFIX = [5, 9, 33, 2, 17, 40, 8, 8, 1, 60, 21, 3, 3, 50, 12, 30, 31, 7]
PROMPTS = [[*PREFIX, 4], [*PREFIX, 9, 9, 41], list(range(40))]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0)
SAMPLED = SamplingParams(temperature=1.0, n=2, max_tokens=5, ignore_eos=True, logprobs=0, seed=3)


def make_engine(
    shape: dict[str, Any] = DENSE, kv_dtype: str = "auto", sleepable: bool = True, draft: bool = False, **spec: Any
) -> Engine:
    given = {"dtype": "fp32", "block": 8, "max_seqs": 4, "max_batch_tokens": 128, "kv_dtype": kv_dtype, "blocks": 100}
    engine_spec = EngineSpec(device="cpu", **{**given, **({"speculate": "draft", "draft": "given"} if draft else {})})
    model = ModelSpec(**{**SMALL, **shape})
    runner = ModelRunner(
        GPT(model, seed=1),
        engine_spec.replace(**spec),
        "cpu",
        model.vocab,
        DraftModel(GPT(model, seed=2)) if draft else None,
        sleepable=sleepable,
    )
    return Engine(runner, speculator=Speculator(runner.spec, DraftModelProposer()) if draft else None)


def runner_of(engine: Engine) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


def results(engine: Engine, prompts: list[list[int]] = PROMPTS, *params: SamplingParams) -> list[Result]:
    requests = [Request(list(prompt), each) for each in params or (GREEDY, SAMPLED) for prompt in prompts]
    for request in requests:
        engine.add(request)
    found = {delta.request.id: delta.result for delta in engine.run()}
    return [result for request in requests if (result := found[request.id]) is not None]


def answers(engine: Engine) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of greedy and sampled answers, some with a prefix in common."""
    found = []
    for result in results(engine):
        assert result.error is None
        found += [(each.token_ids, [one.logprob for one in each.logprobs or ()]) for each in result.answers]
    return found


@pytest.mark.parametrize("case", with_slow(CASES, ("dense int8", "latent int8")))
def test_an_engine_that_slept_is_as_new(case: str) -> None:
    want = answers(new := make_engine(*CASES[case]))
    engine = make_engine(*CASES[case])
    cache = runner_of(engine).cache
    addresses, views = list(cache.addresses), [layer.keys.data_ptr() for layer in cache.layers]
    assert all(isinstance(buffer, VirtualBuffer) for buffer in cache.buffers)
    answers(engine)
    hits = engine.metrics.prefix_cache_hits
    assert engine.sleep() == sum(buffer.pages.size for buffer in cache.buffers)
    assert engine.asleep
    engine.wake()
    assert not any(bool(pool.view(torch.uint8).any()) for pool in cache.pools())  # finite where never written
    assert answers(engine) == want
    assert cache.addresses == addresses and [layer.keys.data_ptr() for layer in cache.layers] == views
    # As many tokens came from the prefix cache as in the new engine: none from before.
    assert engine.metrics.prefix_cache_hits - hits == new.metrics.prefix_cache_hits > 0
    assert engine.metrics.graph_recaptures == 0


def test_an_engine_that_slept_in_torch_memory_is_as_new() -> None:
    """An engine that was not made for it."""
    want = answers(make_engine(kv_dtype="int8"))
    engine = make_engine(kv_dtype="int8", sleepable=False)
    cache = runner_of(engine).cache
    assert all(isinstance(buffer, TorchBuffer) for buffer in cache.buffers)
    answers(engine)
    assert engine.sleep() == cache.blocks * cache.shape.block_bytes
    engine.wake()
    assert answers(engine) == want


class Graphs(SimpleNamespace):
    """What waking sees of CUDA graphs."""

    def reset(self) -> None:
        self.captured = {}


def test_graphs_are_captured_again_only_if_the_cache_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "is_supported", lambda _device: False)  # a driver without virtual memory
    monkeypatch.setattr(sleep, "capture_graphs", lambda runner: runner.graphs.captured.update(new=1))
    engine = make_engine()
    runner = runner_of(engine)
    graphs = Graphs(captured={"a": 1, "b": 2, "c": 3})
    runner.graphs = graphs  # type: ignore[assignment]
    before = runner.cache.addresses
    engine.sleep()
    allocate, blocker = torch.zeros, torch.zeros(1)

    def elsewhere(size: int, **options: Any) -> torch.Tensor:
        nonlocal blocker
        blocker = allocate(size, **options)  # takes the address that has just become free, if it is asked for again
        return allocate(size, **options)

    monkeypatch.setattr(torch, "zeros", elsewhere)
    engine.wake()
    assert runner.cache.addresses != before
    assert engine.metrics.graph_recaptures == 3 and graphs.captured == {"new": 1}
    # Awake already: nothing to do.
    engine.wake()
    assert engine.metrics.graph_recaptures == 3


def test_draft_model_sleeps_too() -> None:
    want = answers(make_engine(draft=True))
    engine = make_engine(draft=True)
    runner = runner_of(engine)
    assert runner.draft is not None
    answers(engine)
    taken = sum(buffer.pages.size for cache in (runner.cache, runner.draft.cache) for buffer in cache.buffers)
    assert engine.sleep() == taken
    assert runner.cache.asleep and runner.draft.cache.asleep
    engine.wake()
    assert answers(engine) == want


# --- what is refused ------------------------------------------------------------------------------------


def test_requests_to_a_sleeping_engine_are_refused() -> None:
    engine = make_engine()
    engine.sleep()
    assert engine.sleep() == 0  # asleep already
    (result,) = results(engine, PROMPTS[:1], GREEDY)
    assert result.error == "the engine is asleep, without a KV cache: call wake() before requests are sent"
    with pytest.raises(LMWorksError, match=r"asleep.*wake\(\)"):
        runner_of(engine).launch(Step([]))
    engine.wake()
    (result,) = results(engine, PROMPTS[:1], GREEDY)
    assert result.error is None


@pytest.mark.parametrize("steps", [0, 1])
def test_a_running_engine_does_not_sleep(steps: int) -> None:
    engine = Engine(FakeDevice(EngineSpec(block=4, blocks=50, max_seqs=4, max_batch_tokens=64, context=64)))
    request = Request([1, 2, 3], SamplingParams(max_tokens=4))
    engine.add(request)
    for _ in range(steps):
        engine.step()
    with pytest.raises(LMWorksError, match="cannot sleep while requests are running"):
        engine.sleep()
    engine.cancel(request.id)
    if steps:  # a step is still in flight
        with pytest.raises(LMWorksError, match="cannot sleep while requests are running"):
            engine.sleep()
    engine.run()
    engine.sleep()
    assert engine.asleep


def test_an_engine_in_use_by_another_does_not_sleep() -> None:
    engine = make_engine()
    engine.drive(object())
    with pytest.raises(LMWorksError, match="in use: an AsyncEngine runs it"):
        engine.sleep()


def test_several_ranks_do_not_sleep() -> None:
    engine = make_engine()
    runner_of(engine).tp_rank = SimpleNamespace(tp=2, called_on_all_ranks=False)  # type: ignore[assignment]
    with pytest.raises(SpecError, match=r"engine\.tp = 1, not 2"):
        engine.sleep()
    assert not engine.asleep


@pytest.mark.parametrize("failing", with_slow([0, 1, 2], [0, 2]))
def test_waking_without_memory_can_be_tried_again(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no pages for the cache, for its scales, or for the cache of the draft model."""
    engine = make_engine(kv_dtype="int8", draft=True)
    buffers = [buffer for cache in sleep.caches(runner_of(engine)) for buffer in cache.buffers]
    want = answers(engine)
    engine.sleep()

    def no_memory() -> None:
        raise OutOfMemory("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)")

    with monkeypatch.context() as patched:
        patched.setattr(buffers[failing].pages, "map", no_memory)
        for _ in range(2):
            with pytest.raises(LMWorksError, match=r"cannot wake: its KV cache takes 0\.00 GiB; release memory and"):
                engine.wake()
            assert engine.asleep and not any(buffer.mapped for buffer in buffers)
    assert results(engine, PROMPTS[:1], GREEDY)[0].error is not None
    engine.wake()
    assert answers(engine) == want


# --- memory ---------------------------------------------------------------------------------------------


@linux
def test_pages_are_released() -> None:
    engine = make_engine(kv_dtype="int8", blocks=100_000)
    cache = runner_of(engine).cache
    spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in (cache.store, cache.scales) if tensor is not None]
    cache.store[:, :, : cache.blocks // 2] = 1
    held = sum(resident_bytes(*span) for span in spans)
    assert held >= cache.store.nbytes // 2
    before = resident_set()
    engine.sleep()
    assert sum(resident_bytes(*span) for span in spans) == 0
    assert before - resident_set() > held * 0.9
    engine.wake()
    answers(engine)
    assert 0 < sum(resident_bytes(*span) for span in spans) < held
    engine.close()
    assert sum(resident_bytes(*span) for span in spans) == 0


def resident_set() -> int:
    """Bytes of the process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@linux
@pytest.mark.parametrize("rounds", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_does_not_grow(rounds: int) -> None:
    """New prompts in every round, of which every one would leave its pages in the cache: 1 MB."""
    engine = make_engine({"layers": 1, "kv_heads": 4, "head_dim": 64}, blocks=40_000, max_seqs=8, max_batch_tokens=512)
    draw = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True, seed=1)

    def one_round() -> None:
        results(engine, torch.randint(0, 64, (8, 60), generator=draw).tolist(), params)
        engine.sleep()
        engine.wake()

    used = []
    for _ in range(rounds):
        one_round()
        used.append(resident_set())
    grown = min(used[-10:]) - min(used[10:20])
    assert grown < 8 * 2**20, f"{grown:,} bytes in {rounds} rounds"


def test_resident_memory_is_what_a_sleeping_runner_keeps() -> None:
    runner = runner_of(make_engine())
    kept = sleep.resident_memory(runner)
    rotary = sum(buffer.nbytes for buffer in runner.model.buffers())
    assert kept["weights"] == sum(parameter.nbytes for parameter in runner.model.parameters()) + rotary
    assert kept["step inputs, sampler"] >= runner.token_lookup.nbytes
    assert kept["CUDA graphs"] == 0

"""The engine on a GPU: the same answers as transformers and as the CPU, through graphs, and bitwise in any batch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from hf_reference import FAMILIES, VOCAB, compare, fresh_model, make_engine, random_prompts
from test_model_runner import SHAPES, answered, lively, log_probabilities, prompts_of

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Result
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.speculative.draft_model import DraftModel, DraftModelProposer
from lmworks.engine.speculative.ngram import NgramProposer
from lmworks.engine.speculative.verification import Speculator
from lmworks.model import GPT
from lmworks.spec import EngineSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [5, 1, 33, 17, 2, 40, 9, 26]
COUNTS = [20, 30, 12, 25, 8, 20, 1, 16]
ALGORITHMS: dict[str, dict[str, Any]] = {
    "graphs": {"max_seqs": 8},
    "graphs of answers alone": {"max_seqs": 8, "graph_prompts": False},
    "eager": {"max_seqs": 4, "graphs": False},
    "chunks": {"max_batch_tokens": 7},
    "preemption": {"blocks": 24, "prefix_cache": False},
    "invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("way", ALGORITHMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_transformers(family: str, way: str) -> None:
    engine = make_engine(family, "cuda", **{"blocks": 400, **ALGORITHMS[way]})
    prompts = random_prompts(LENGTHS)
    excused = compare(engine, family, prompts, COUNTS)
    excused += compare(engine, family, prompts, COUNTS)  # again: prefix hits, and graphs that are replayed
    assert excused <= 1
    assert way != "preemption" or engine.metrics.num_preemptions > 0
    graphs = engine.runner.graphs
    recorded = way != "eager"
    assert (graphs is not None) == recorded
    mixed = graphs is not None and any(layout.rows < layout.tokens for layout, _ in graphs.captured)
    if recorded and way in ("chunks", "graphs of answers alone"):  # kinds that come again, or are not to be recorded
        assert mixed == (way == "chunks")


def test_long_prompts_in_graphs() -> None:
    """Longer than the short ones' kernel takes, beside answers; and the same where graphs find no memory."""
    model = lively(hidden=128, heads=4, kv_heads=2, context=2048)
    prompts = prompts_of([700, 300, 1200, 257, 64, 900, 31, 1500])
    params = [SamplingParams(temperature=0, max_tokens=6 + 3 * i, ignore_eos=True) for i in range(8)]
    spec = {"blocks": 4000, "context": 2048, "max_seqs": 16, "max_batch_tokens": 1800}
    expected = [each.token_ids for each in answered(cuda_runner(model, **spec, graphs=False), prompts, *params)]
    runner = cuda_runner(model, **spec)
    assert runner.graphs is not None
    for _ in range(3):
        assert [each.token_ids for each in answered(runner, prompts, *params)] == expected
    assert max(layout.max_query_len for layout, _ in runner.graphs.captured) > 1024
    runner = cuda_runner(model, **spec)
    assert runner.graphs is not None
    work, decoding = runner.graphs.work, sum(layout.rows == layout.tokens for layout, _ in runner.graphs.captured)
    assert len(runner.graphs.captured) > decoding  # single prompts

    def without_memory(*given: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("for the test")
        return work(*given)

    runner.graphs.work = without_memory
    for _ in range(3):
        assert [each.token_ids for each in answered(runner, prompts, *params)] == expected
    assert len(runner.graphs.captured) == decoding
    assert not runner.graphs.prompts.token_sizes


@pytest.mark.parametrize("source", ["ngram", "draft"])
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_is_equal_to_transformers(family: str, source: str) -> None:
    """Steps with guesses are recorded too; prompts repeat themselves, so that there are guesses."""
    spec = EngineSpec(
        dtype="fp32", block=4, blocks=400, max_seqs=8, speculate=source, draft="given" * (source == "draft"), guesses=3
    )
    draft = DraftModel(fresh_model(family)) if source == "draft" else None
    runner = ModelRunner(fresh_model(family), spec, "cuda", VOCAB, draft)
    engine = Engine(
        runner, None, speculator=Speculator(runner.spec, NgramProposer() if draft is None else DraftModelProposer())
    )
    prompts = [prompt * 3 for prompt in random_prompts([5, 1, 12, 9, 2, 14])]
    excused = compare(engine, family, prompts, COUNTS[:6]) + compare(engine, family, prompts, COUNTS[:6])
    assert excused <= 1
    assert engine.metrics.accepted_guesses > 0


def cuda_runner(model: GPT, **spec: Any) -> ModelRunner:
    given = {"dtype": "fp32", "block": 4, "blocks": 400, "max_seqs": 4, "max_batch_tokens": 24, **spec}
    import copy

    return ModelRunner(copy.deepcopy(model), EngineSpec(**given), "cuda", 320)


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_equal_training_model(shape: str) -> None:
    model = lively(**SHAPES[shape])
    prompts = prompts_of([30, 3, 50, 11])
    params = [SamplingParams(temperature=1.0, max_tokens=12, logprobs=0, seed=7, ignore_eos=True)] * 4
    for result in answered(cuda_runner(model), prompts, *params):
        expected = log_probabilities(model, result.prompt_token_ids + result.token_ids)
        for place, found in enumerate(result.logprobs or ()):
            row = expected[len(result.prompt_token_ids) - 1 + place]
            assert found.logprob == pytest.approx(row[found.token].item(), abs=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_batch_invariance(dtype: str) -> None:
    """Bitwise, tokens and log-probabilities: alone, among others, prompts in chunks, graphs and not."""
    model = lively(hidden=128, heads=4, kv_heads=2)
    prompts = prompts_of([30, 3, 50, 11, 64, 17])
    params = [SamplingParams(temperature=0.8, max_tokens=20, logprobs=0, seed=i, ignore_eos=True) for i in range(6)]

    def bits(results: list[Result]) -> list[list[tuple[int, float]]]:
        return [[(each.token, each.logprob) for each in result.logprobs or ()] for result in results]

    spec = {"dtype": dtype, "batch_invariant": True, "max_seqs": 8}
    alone = [
        bits(answered(cuda_runner(model, **spec, max_batch_tokens=100), [prompt], each))[0]
        for prompt, each in zip(prompts, params, strict=True)
    ]
    assert bits(answered(cuda_runner(model, **spec), prompts, *params)) == alone
    assert bits(answered(cuda_runner(model, **spec, max_batch_tokens=13), prompts, *params)) == alone
    assert bits(answered(cuda_runner(model, **spec, graphs=False), prompts, *params)) == alone


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_cache_is_close(kind: str) -> None:
    model = lively()
    ask = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    (exact,) = answered(cuda_runner(model), prompts_of([40]), ask)
    (rough,) = answered(cuda_runner(model, kv_dtype=kind), prompts_of([40]), ask)
    assert exact.logprobs and rough.logprobs
    assert 1e-6 < abs(exact.logprobs[0].logprob - rough.logprobs[0].logprob) < 0.05


def test_pool_uses_memory_limit() -> None:
    """Sized after the largest step: weights, cache and that step stay within the part that was asked for."""
    runner = cuda_runner(lively(), blocks=0, memory=0.5, context=128, max_seqs=256, max_batch_tokens=2048)
    assert runner.blocks == 256 * 32  # a tiny model: all that could ever be used
    torch.cuda.reset_peak_memory_stats()
    answered(runner, prompts_of([100] * 30), *[SamplingParams(max_tokens=4, ignore_eos=True)] * 30)
    assert torch.cuda.max_memory_reserved() < 0.5 * torch.cuda.get_device_properties(0).total_memory

"""Pooled hidden states of prompts equal those of transformers, whatever the engine does on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_reference import FAMILIES, make_engine, random_prompts, reference_model

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams

LENGTHS = [5, 1, 33, 17, 2, 40, 9, 26]


def reference(family: str, prompt: list[int], pooling: str) -> list[float]:
    with torch.no_grad():
        states = reference_model(family).base_model(torch.tensor([prompt])).last_hidden_state[0]
    pooled: list[float] = (states[-1] if pooling == "last" else states.mean(dim=0)).tolist()
    return pooled


def embed(engine: Engine, prompts: list[list[int]], pooling: str | None, count: int = 1) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    requests = [Request(prompt, params, pooling=pooling) for prompt in prompts]
    for request in requests:
        engine.add(request)
    done = {piece.request.id: piece.result for piece in engine.run()}
    return [done[request.id] for request in requests]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pooled_states_equal_those_of_transformers(family: str, pooling: str) -> None:
    """Prompts in chunks of seven tokens, beside each other and beside requests that answer."""
    engine, prompts = make_engine(family, max_batch_tokens=7), random_prompts(LENGTHS)
    requests = [Request(prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)) for prompt in prompts[:3]]
    for request in requests:
        engine.add(request)
    for prompt, result in zip(prompts, embed(engine, prompts, pooling), strict=True):
        assert result.embedding == pytest.approx(reference(family, prompt, pooling), abs=1e-5)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_cached_prefixes(pooling: str) -> None:
    """The last state needs only the tokens behind the cached prefix, a mean all of them."""
    engine, prompts = make_engine("llama"), random_prompts([30, 9])
    for _ in range(2):
        results = embed(engine, prompts, pooling)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.embedding == pytest.approx(reference("llama", prompt, pooling), abs=1e-5)
    assert [result.cached_tokens for result in results] == ([28, 8] if pooling == "last" else [0, 0])


def test_preempted_prompts_begin_anew() -> None:
    """A pool that cannot hold all: a sum must not count a chunk twice."""
    engine, prompts = make_engine("llama", blocks=24, prefix_cache=False, max_batch_tokens=7), random_prompts(LENGTHS)
    for prompt, result in zip(prompts, embed(engine, prompts, "mean", count=20), strict=True):
        assert result.embedding == pytest.approx(reference("llama", prompt, "mean"), abs=1e-5)
    assert engine.metrics.num_preemptions > 0


def test_others_have_none_and_unknown_names_are_refused() -> None:
    engine, [prompt] = make_engine("llama"), random_prompts([5])
    assert embed(engine, [prompt], None)[0].embedding is None
    assert "pooling = 'max' is not one of: last, mean" in embed(engine, [prompt], "max")[0].error

"""Whether the time to a first token tells one tenant what another has asked."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing

import pytest
import tiny_engine

from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.serve.backend import EngineRequest
from lmworks.serve.engine_process import EngineProcess

TRIALS = 60
PROMPT = 500  # tokens: two steps to compute, a fraction of one where they are in the cache


async def first_token(backend: EngineProcess, prompt: list[int], tenant: str) -> float:
    """As a client sees it."""
    began = time.perf_counter()
    async with aclosing(backend.stream(EngineRequest(prompt, SamplingParams(max_tokens=1), tenant=tenant))) as events:
        await anext(events)
        took = time.perf_counter() - began
        assert (await anext(events, None)) is None
    return took


async def measure() -> dict[str, list[float]]:
    """Times of a prompt that nobody, another tenant, and the asker itself has asked before, in random order."""
    draw = random.Random(0)
    times: dict[str, list[float]] = {"unseen": [], "other's": [], "own": []}
    backend = EngineProcess("tiny", tiny_engine.tiny)
    await backend.start()
    try:
        for _ in range(TRIALS):
            prompts = {case: [draw.randrange(256) for _ in range(PROMPT)] for case in times}
            await first_token(backend, prompts["other's"], "victim")
            await first_token(backend, prompts["own"], "curious")
            for case in draw.sample(list(times), len(times)):
                times[case].append(await first_token(backend, prompts[case], "curious"))
    finally:
        await backend.close()
    return times


def tells(one: list[float], other: list[float]) -> float:
    """Chance that a time of `one` is longer than one of `other`: 0.5 where they tell nothing."""
    return sum(a > b for a in one for b in other) / len(one) / len(other)


@pytest.mark.slow  # it measures times; test_engine_process sees by counts that tenants share no prefix
def test_ttft_does_not_leak_other_tenants_prompts() -> None:
    """The standard error of that chance is 0.05 for 60 trials of each."""
    times = asyncio.run(measure())
    assert tells(times["unseen"], times["own"]) > 0.75, "the measurement itself sees no cache: it proves nothing"
    assert 0.3 < tells(times["unseen"], times["other's"]) < 0.7

"""Greedy answers equal those of transformers, token for token, whatever the engine does on the way."""

from __future__ import annotations

import pytest
from hf_reference import FAMILIES, MORE_FAMILIES, Greedy, compare, excuses, make_engine, random_prompts

from variations import with_slow

LENGTHS = [5, 1, 33, 17, 2, 40, 9, 26]
COUNTS = [20, 30, 12, 25, 8, 20, 1, 16]

each_family = pytest.mark.parametrize("family", FAMILIES)
# What the engine does on the way does not depend on the network: where it is about blocks, a window, an absolute
# position and a latent cache stand for all; `make test-slow` has the others.
ALIKE = ("llama", "qwen3", "phi3")
each_cache = pytest.mark.parametrize("family", with_slow(FAMILIES, ALIKE))
each_window = pytest.mark.parametrize("family", with_slow(FAMILIES, (*ALIKE, "deepseek_v3")))


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_batched(family: str) -> None:
    engine = make_engine(family, max_seqs=4)
    assert compare(engine, family, random_prompts(LENGTHS), COUNTS) == 0
    assert engine.metrics.computed_sequences > 2 * engine.metrics.steps  # they did run together


@each_cache
def test_prompts_in_chunks(family: str) -> None:
    """Seven tokens a step: prompts are cut anywhere, and decode beside those that already answer."""
    engine = make_engine(family, max_batch_tokens=7)
    assert compare(engine, family, random_prompts(LENGTHS), COUNTS) == 0


@each_cache
def test_prefix_hits(family: str) -> None:
    """The second round finds what the first computed, and so do those with a common beginning."""
    engine = make_engine(family)
    prompts = random_prompts(LENGTHS, seed=1, prefix=13)
    assert compare(engine, family, prompts[:4], COUNTS[:4]) == 0
    before = engine.metrics.prefix_cache_hits
    assert compare(engine, family, prompts, COUNTS) == 0
    assert engine.metrics.prefix_cache_hits - before >= 12 * len(prompts)


@each_window
def test_preemption(family: str) -> None:
    """A pool that cannot hold all: some give up their blocks and are computed again, without the prefix cache."""
    engine = make_engine(family, blocks=24, prefix_cache=False)
    assert compare(engine, family, random_prompts(LENGTHS), COUNTS) == 0
    assert engine.metrics.num_preemptions > 0


@each_window
def test_several_answers(family: str) -> None:
    """All share the prompt's blocks; each writes its own."""
    engine = make_engine(family)
    assert compare(engine, family, random_prompts([6, 15]), [12, 12], n=3) == 0


def test_wrong_token_is_detected() -> None:
    """The comparison itself: only a lead below 1e-4 excuses, and it is counted."""
    expected = Greedy([3, 4, 5], [1.0, 5e-5, 1.0])
    assert excuses(expected, [3, 4, 5]) == 0
    assert excuses(expected, [3, 9, 9]) == 1
    with pytest.raises(AssertionError, match="token 2 is 9, not 5, which led by"):
        excuses(expected, [3, 4, 9])

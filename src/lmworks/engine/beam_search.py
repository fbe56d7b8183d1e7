"""Beam search over an engine: of all continuations of a few beams the likeliest are kept, token by token.

As `transformers` has it (`generate(num_beams=…)`): a beam that ends is kept with score = Σ log p / length^penalty; the
search ends when so many have ended that no running one can become better (early_stopping: as soon as there are enough),
or at the longest length. Each step is a batch of requests of one token, whose prefixes are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass

from ..spec import LMWorksError, SpecError
from .core.request import Result
from .core.sampling_params import MAX_LOGPROBS, SamplingParams

Generate = Callable[[list[list[int]], SamplingParams], list[Result]]
Top = list[tuple[int, float]]  # the likeliest next tokens of a sequence, with their log-probabilities

MAX_BEAMS = MAX_LOGPROBS // 2  # of each beam twice as many tokens are looked at, as all may end it


@dataclass(frozen=True)
class Beam:
    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    score: float = 0.0  # once it has ended


def beam_search(
    generate: Generate,
    prompt: list[int],
    end_token_ids: Collection[int],
    beam_width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
) -> list[Beam]:
    """The `beam_width` best answers, the best first."""
    steps = search_steps(prompt, end_token_ids, beam_width, max_tokens, length_penalty, early_stopping)
    asked, params = next(steps), step_params(beam_width)
    while True:
        tops = []
        for result in generate(asked, params):
            if result.error is not None or not result.logprobs:
                raise LMWorksError(result.error or "the engine gave no log-probabilities")
            tops.append(list(result.logprobs[0].top))
        try:
            asked = steps.send(tops)
        except StopIteration as end:
            found: list[Beam] = end.value
            return found


def step_params(beam_width: int) -> SamplingParams:
    """Of each request of a step."""
    return SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 * beam_width, ignore_eos=True)


def search_steps(
    prompt: list[int],
    end_token_ids: Collection[int],
    beam_width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
) -> Generator[list[list[int]], list[Top], list[Beam]]:
    """Yields the sequences whose next tokens it wants to know; returns the best answers."""
    if not 1 <= beam_width <= MAX_BEAMS:
        raise SpecError(f"beam_width = {beam_width} is out of range: it must be at least 1 and at most {MAX_BEAMS}")
    if max_tokens < 1:
        raise SpecError(f"max_tokens = {max_tokens}: beams need one token or more, within the context")
    running, ended = [Beam()], list[Beam]()
    for length in range(1, max_tokens + 1):
        tops = yield [[*prompt, *beam.token_ids] for beam in running]
        candidates = sorted(extensions(running, tops), key=lambda beam: -beam.cumulative_logprob)[: 2 * beam_width]
        running = []
        for place, beam in enumerate(candidates):
            if beam.token_ids[-1] not in end_token_ids and length < max_tokens:
                running.append(beam)
            elif place < beam_width:
                score = beam.cumulative_logprob / length**length_penalty
                ended = [*ended, Beam(beam.token_ids, beam.cumulative_logprob, score)]
        running = running[:beam_width]
        ended = sorted(ended, key=lambda beam: -beam.score)[:beam_width]
        if len(ended) == beam_width and (early_stopping or not running):
            return ended
        if len(ended) == beam_width and ended[-1].score >= running[0].cumulative_logprob / length**length_penalty:
            return ended
        if not running:
            break
    return ended


def extensions(beams: list[Beam], tops: list[Top]) -> list[Beam]:
    return [
        Beam((*beam.token_ids, token), beam.cumulative_logprob + logprob)
        for beam, top in zip(beams, tops, strict=True)
        for token, logprob in top
    ]

"""`use_beam_search`: the n likeliest answers, by vLLM's names of fields; see `engine.beam_search`.

Each step is a batch of requests of one token, whose prefixes are in the cache. All of them are one admission.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

from ..engine.beam_search import MAX_BEAMS, Beam, Top, search_steps, step_params
from .backend import Usage
from .generation_request import CompletionOutput, GenerationRequest, RequestOutput, merge_streams, record_usage
from .limits import APIError, size_of
from .request_bodies import Sampling

# What has no meaning for answers that are searched and not sampled, or none that vLLM gives it.
NOT_COMBINED = (
    *("stream", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "stop", "stop_token_ids", "min_tokens"),
    *("echo", "logit_bias", "bad_words", "allowed_token_ids", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "tools", "response_format", "structured_outputs", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar", "continuation"),
)


def check_beams(body: Sampling) -> None:
    """Raises APIError for fields that a search by beams does not know."""
    if not body.use_beam_search:
        if body.length_penalty is not None:
            raise APIError(400, "invalid_request", "length_penalty is of use_beam_search", "length_penalty")
        return
    wrong = next((name for name in NOT_COMBINED if getattr(body, name, None)), None)
    if wrong is not None:
        raise APIError(400, "invalid_request", f"{wrong} cannot be combined with use_beam_search", wrong)
    if (body.n or 1) > MAX_BEAMS:
        raise APIError(400, "limit_exceeded", f"n = {body.n}: at most {MAX_BEAMS} beams", "n")


async def collect_beams(generation: GenerationRequest, body: Sampling) -> RequestOutput:
    """The answers of each prompt, the likeliest first."""
    caller, local, params = generation.caller, generation.local, generation.params
    card, lengths = local.backend.card, [len(prompt) for prompt in generation.prompts]
    size = size_of(params, lengths, generation.echoed, kept=True)
    ends = () if params.ignore_eos else card.eos
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    found = RequestOutput([])
    with await generation.serving.admit(caller.meter, caller.limits, card, params, size) as admission:
        for prompt in generation.prompts:
            admission.use(len(prompt))
            steps = search_steps(list(prompt), ends, params.n, params.max_tokens, penalty)
            asked = next(steps)
            while True:
                try:
                    asked = steps.send(await next_tokens(generation, asked))
                except StopIteration as end:
                    beams: list[Beam] = end.value
                    break
            admission.use(sum(len(beam.token_ids) for beam in beams))
            found.answers += [answer_of(generation, beam, ends) for beam in beams]
    shown = sum(len(answer.tokens) for answer in found.answers)
    found.usage = Usage(sum(lengths), shown, 0)
    record_usage(caller.log_fields, found.usage)
    return found


async def next_tokens(generation: GenerationRequest, asked: list[list[int]]) -> list[Top]:
    """The likeliest tokens after each of these sequences."""
    params = generation.params
    wanted = replace(step_params(params.n), adapter=params.adapter, cache_salt=params.cache_salt)
    step = replace(generation, params=wanted)
    requests = [step.engine_request(place, sequence) for place, sequence in enumerate(asked)]
    tops: list[Top] = [[] for _ in asked]
    async with aclosing(merge_streams(generation.local, requests)) as events:
        async for place, event in events:
            if event.logprobs:
                tops[place] = list(event.logprobs[0].top)
    if not all(tops):
        raise APIError(500, "answer_failed", "the answer could not be finished")
    return tops


def answer_of(generation: GenerationRequest, beam: Beam, ends: tuple[int, ...]) -> CompletionOutput:
    tokens = list(beam.token_ids)
    ended = tokens[-1] in ends
    tokenizer = generation.local.backend.prompt_tokenizer.tokenizer
    text = "" if tokenizer is None else tokenizer.decode(tokens[:-1] if ended else tokens)
    return CompletionOutput(text, tokens, finish_reason="stop" if ended else "length")

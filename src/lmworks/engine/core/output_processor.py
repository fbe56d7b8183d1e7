"""Output processing: stop conditions token by token, and the result of a request when all its answers have finished."""

from __future__ import annotations

import time
from dataclasses import dataclass
from operator import attrgetter

from ...data.tokenizer import Tokenizer
from ..grammars.delayed import DelayedGrammar
from ..grammars.grammar import Grammars, Matcher
from .detokenizer import IncrementalDetokenizer, decode
from .request import Answer, OutputDelta, Request, Result, Sequence

NOT_FINITE = "the model's logits for this request are not finite (NaN or infinity): no token can be picked"
NO_TOKEN_ALLOWED = (
    "no token can be picked: none fits the answer's shape together with logit_bias, min_tokens, bad_words and "
    "allowed_token_ids, or the model's logits are not finite"
)

LOGPROB = attrgetter("logprob")


@dataclass(frozen=True)
class FinishReason:
    """Why a sequence finished: length, stop (`stop`: token or string), cancelled, or error (`error`: the message)."""

    reason: str
    stop: str | int | None = None
    error: str | None = None


def attach_detokenizer_and_grammar(sequence: Sequence, tokenizer: Tokenizer | None, grammars: Grammars | None) -> None:
    """Attach what the request needs: a detokenizer for streaming or stop strings, a matcher for structured output."""
    params = sequence.params
    if tokenizer is not None and (params.stop or sequence.request.stream):
        sequence.detokenizer = IncrementalDetokenizer(
            tokenizer, params.stop, params.include_stop, params.min_tokens, params.skip_special_tokens
        )
    if grammars is not None and params.structured:
        matcher = grammars.matcher(params, sequence.request.grammar)
        if params.structure_after is None or matcher is None:
            sequence.matcher = matcher
        else:
            sequence.delayed_grammar = DelayedGrammar(matcher, grammars.tokenizer, params.structure_after)
    sequence.token_by_token = bool(sequence.request.stream or sequence.detokenizer or params.structured)


def push(sequence: Sequence, token: int) -> tuple[str, FinishReason | None]:
    """Process a sampled token: the text that may be emitted now, and the finish reason if it was the last."""
    shown, ending = read(sequence, token)
    text = sequence.detokenizer
    if text is None or ending is None or ending.error is not None:
        return shown, ending
    shown += text.flush()  # an incomplete character becomes U+FFFD, which may complete a stop string
    return shown, ending if text.stopped is None else FinishReason("stop", text.stopped)


def read(sequence: Sequence, token: int) -> tuple[str, FinishReason | None]:
    """As `push`, without flushing held text."""
    long_enough = sequence.num_known_tokens - sequence.num_prompt_tokens >= sequence.params.min_tokens
    if long_enough and token in sequence.request.end_token_ids and not within(sequence, token):
        return "", FinishReason("stop", token)
    shown = ""
    if sequence.detokenizer is not None:
        shown = sequence.detokenizer.push(token)
        if sequence.detokenizer.stopped is not None:
            return shown, FinishReason("stop", sequence.detokenizer.stopped)
    if sequence.delayed_grammar is not None:
        sequence.matcher = sequence.delayed_grammar.push(token)
        sequence.delayed_grammar = None if sequence.matcher is not None else sequence.delayed_grammar
    elif sequence.matcher is not None and (ending := matched(sequence.matcher, token)) is not None:
        return shown, ending
    return shown, FinishReason("length") if sequence.num_known_tokens >= sequence.limit else None


def within(sequence: Sequence, token: int) -> bool:
    """An end-of-text token inside an incomplete grammar is an ordinary token."""
    matcher = sequence.matcher
    return matcher is not None and not matcher.complete and token not in sequence.params.stop_token_ids


def matched(matcher: Matcher, token: int) -> FinishReason | None:
    """Advance the grammar: finished if it is complete, or in error."""
    matcher.accept(token)
    return grammar_error(matcher) or (FinishReason("stop") if matcher.done else None)


def grammar_error(matcher: Matcher) -> FinishReason | None:
    """Usually the parser's work limit."""
    error = matcher.error
    return None if error is None else FinishReason("error", error=f"the answer cannot follow its grammar: {error}")


def no_token_error(sequence: Sequence) -> FinishReason:
    """No token could be sampled."""
    if sequence.matcher is None:
        return FinishReason("error", error=NOT_FINITE if sequence.token_filter is None else NO_TOKEN_ALLOWED)
    return grammar_error(sequence.matcher) or FinishReason("error", error=NO_TOKEN_ALLOWED)


def close(sequence: Sequence, ending: FinishReason, tokenizer: Tokenizer | None) -> str:
    """Store the final answer; returns text that was held back."""
    del sequence.tokens[sequence.num_known_tokens :]
    ids = sequence.output_token_ids
    rest = ""
    if sequence.detokenizer is not None:
        rest = sequence.detokenizer.flush()
        text = sequence.detokenizer.text
    elif tokenizer is not None:
        shown = ids[:-1] if isinstance(ending.stop, int) else ids
        text = decode(tokenizer, shown, sequence.params.skip_special_tokens)
    else:
        text = ""
    params = sequence.params
    logprobs = sequence.logprobs if params.logprobs is not None else None
    likelihood = sum(map(LOGPROB, sequence.logprobs)) if params.needs_logprobs else None
    sequence.final_answer = Answer(ids, text, ending.reason, logprobs, ending.stop, ending.error, likelihood)
    return rest


def result(request: Request) -> Result:
    """The result of a request: its answers, or the n likeliest of best_of, likeliest first."""
    params = request.params
    answers = [each.final_answer for each in request.sequences if each.final_answer is not None]
    if params.answers > params.n:
        # Failed answers come last.
        answers.sort(key=lambda answer: (answer.error is not None, -(answer.cumulative_logprob or 0.0)))
    now = time.monotonic()
    times = {"total": now - request.arrival_time}
    if request.scheduled_time:
        times["queue"] = request.scheduled_time - request.arrival_time
    if request.first_token_time:
        times["first_token"] = request.first_token_time - request.arrival_time
    prompt_logprobs = request.prompt_logprobs if params.prompt_logprobs is not None else None
    return Result(
        list(request.prompt), answers[: params.n], prompt_logprobs, request.cached_tokens, times, embedding(request)
    )


def embedding(request: Request) -> list[float] | None:
    if request.pooled is None or request.pooling != "mean":
        return request.pooled
    return [value / len(request.prompt) for value in request.pooled]


def refusal(request: Request, error: str) -> OutputDelta:
    """The delta of a rejected request."""
    result = Result.failed(list(request.prompt), error, request.params.n)
    return OutputDelta(request, 0, [], finish_reason="error", result=result)

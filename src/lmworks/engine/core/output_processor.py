"""How an answer grows and ends, token by token, and what a request comes to when all its answers have ended."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...data.tokenizer import Tokenizer
from ..grammars.grammar import Grammars, Matcher
from .detokenizer import IncrementalDetokenizer, decode
from .request import Answer, OutputDelta, Request, Result, Sequence

NOT_FINITE = "the model's logits for this request are not finite (NaN or infinity): no token can be picked"
NO_TOKEN_ALLOWED = (
    "no token can be picked: none fits the answer's shape together with logit_bias and min_tokens, "
    "or the model's logits are not finite"
)


@dataclass(frozen=True)
class FinishReason:
    """Why an answer is over: length, stop (`stop`: the token or string), cancelled, or error (`error`: what it was)."""

    reason: str
    stop: str | int | None = None
    error: str | None = None


def attach_detokenizer_and_grammar(sequence: Sequence, tokenizer: Tokenizer | None, grammars: Grammars | None) -> None:
    """Text is made token by token only where someone looks at it before the end."""
    params = sequence.params
    if tokenizer is not None and (params.stop or sequence.request.stream):
        sequence.detokenizer = IncrementalDetokenizer(tokenizer, params.stop, params.include_stop, params.min_tokens)
    if grammars is not None and params.structured:
        sequence.matcher = grammars.matcher(params, sequence.request.grammar)


def push(sequence: Sequence, token: int) -> tuple[str, FinishReason | None]:
    """The latest known token of an answer: the text that may be shown now, and whether it was the last."""
    shown, ending = read(sequence, token)
    text = sequence.detokenizer
    if text is None or ending is None or ending.error is not None:
        return shown, ending
    shown += text.flush()  # the last half character is U+FFFD, and that may have been looked for
    return shown, ending if text.stopped is None else FinishReason("stop", text.stopped)


def read(sequence: Sequence, token: int) -> tuple[str, FinishReason | None]:
    """The same, as far as the token itself says: text may still wait."""
    long_enough = sequence.num_known_tokens - sequence.num_prompt_tokens >= sequence.params.min_tokens
    if long_enough and token in sequence.request.end_token_ids and not within(sequence, token):
        return "", FinishReason("stop", token)
    shown = ""
    if sequence.detokenizer is not None:
        shown = sequence.detokenizer.push(token)
        if sequence.detokenizer.stopped is not None:
            return shown, FinishReason("stop", sequence.detokenizer.stopped)
    if sequence.matcher is not None and (ending := matched(sequence.matcher, token)) is not None:
        return shown, ending
    return shown, FinishReason("length") if sequence.num_known_tokens >= sequence.limit else None


def within(sequence: Sequence, token: int) -> bool:
    """A model's end of text may also be an ordinary token: in the middle of the answer's shape it is one."""
    matcher = sequence.matcher
    return matcher is not None and not matcher.complete and token not in sequence.params.stop_token_ids


def matched(matcher: Matcher, token: int) -> FinishReason | None:
    """Whether the answer's shape is complete with this token, or cannot be followed any further."""
    matcher.accept(token)
    return grammar_error(matcher) or (FinishReason("stop") if matcher.done else None)


def grammar_error(matcher: Matcher) -> FinishReason | None:
    """Too much work for the parser, most likely."""
    error = matcher.error
    return None if error is None else FinishReason("error", error=f"the answer's shape cannot be followed: {error}")


def no_token_error(matcher: Matcher | None) -> FinishReason:
    """The device found no token to pick."""
    if matcher is None:
        return FinishReason("error", error=NOT_FINITE)
    return grammar_error(matcher) or FinishReason("error", error=NO_TOKEN_ALLOWED)


def close(sequence: Sequence, ending: FinishReason, tokenizer: Tokenizer | None) -> str:
    """The answer is written down; text that was held back until now is returned."""
    del sequence.tokens[sequence.num_known_tokens :]
    ids = sequence.output_token_ids
    rest = ""
    if sequence.detokenizer is not None:
        rest = sequence.detokenizer.flush()
        text = sequence.detokenizer.text
    elif tokenizer is not None:
        text = decode(tokenizer, ids[:-1] if isinstance(ending.stop, int) else ids)
    else:
        text = ""
    params = sequence.params
    logprobs = sequence.logprobs if params.logprobs is not None else None
    likelihood = sum(each.logprob for each in sequence.logprobs) if params.needs_logprobs else None
    sequence.final_answer = Answer(ids, text, ending.reason, logprobs, ending.stop, ending.error, likelihood)
    return rest


def result(request: Request) -> Result:
    """What the request came to: its answers, or of best_of the n likeliest, the likeliest first."""
    params = request.params
    answers = [each.final_answer for each in request.sequences if each.final_answer is not None]
    if params.answers > params.n:
        # One that went wrong has no likelihood; it is shown only where there are not enough others.
        answers.sort(key=lambda answer: (answer.error is not None, -(answer.cumulative_logprob or 0.0)))
    now = time.monotonic()
    times = {"total": now - request.arrival_time}
    if request.scheduled_time:
        times["queue"] = request.scheduled_time - request.arrival_time
    if request.first_token_time:
        times["first_token"] = request.first_token_time - request.arrival_time
    prompt_logprobs = request.prompt_logprobs if params.prompt_logprobs is not None else None
    return Result(list(request.prompt), answers[: params.n], prompt_logprobs, request.cached_tokens, times)


def refusal(request: Request, error: str) -> OutputDelta:
    """The answer to a request that is not taken in."""
    answers = [Answer([], "", "error", error=error) for _ in range(request.params.n)]
    return OutputDelta(request, 0, [], finish_reason="error", result=Result(list(request.prompt), answers))

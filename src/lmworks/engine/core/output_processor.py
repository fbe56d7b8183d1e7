"""How an answer grows and ends, token by token, and what a request comes to when all its answers have ended."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...data.tokenizer import Tokenizer
from ..grammars.grammar import Grammars, Matcher
from .detokenizer import Text, decode
from .request import Answer, Piece, Request, Result, Sequence

NOT_FINITE = "the model's logits for this request are not finite (NaN or infinity): no token can be picked"
NOTHING_FITS = (
    "no token can be picked: none fits the answer's shape together with logit_bias and min_tokens, "
    "or the model's logits are not finite"
)


@dataclass(frozen=True)
class Ending:
    """Why an answer is over: length, stop (`stop`: the token or string), cancelled, or error (`error`: what it was)."""

    reason: str
    stop: str | int | None = None
    error: str | None = None


def prepare(sequence: Sequence, tokenizer: Tokenizer | None, grammars: Grammars | None) -> None:
    """Text is made token by token only where someone looks at it before the end."""
    params = sequence.params
    if tokenizer is not None and (params.stop or sequence.request.stream):
        sequence.text = Text(tokenizer, params.stop, params.include_stop, params.min_tokens)
    if grammars is not None and params.shaped:
        sequence.matcher = grammars.matcher(params, sequence.request.grammar)


def push(sequence: Sequence, token: int) -> tuple[str, Ending | None]:
    """The latest known token of an answer: the text that may be shown now, and whether it was the last."""
    shown, ending = read(sequence, token)
    text = sequence.text
    if text is None or ending is None or ending.error is not None:
        return shown, ending
    shown += text.flush()  # the last half character is U+FFFD, and that may have been looked for
    return shown, ending if text.stopped is None else Ending("stop", text.stopped)


def read(sequence: Sequence, token: int) -> tuple[str, Ending | None]:
    """The same, as far as the token itself says: text may still wait."""
    long_enough = sequence.known - sequence.prompt >= sequence.params.min_tokens
    if long_enough and token in sequence.request.ends and not within(sequence, token):
        return "", Ending("stop", token)
    shown = ""
    if sequence.text is not None:
        shown = sequence.text.push(token)
        if sequence.text.stopped is not None:
            return shown, Ending("stop", sequence.text.stopped)
    if sequence.matcher is not None and (ending := matched(sequence.matcher, token)) is not None:
        return shown, ending
    return shown, Ending("length") if sequence.known >= sequence.limit else None


def within(sequence: Sequence, token: int) -> bool:
    """A model's end of text may also be an ordinary token: in the middle of the answer's shape it is one."""
    matcher = sequence.matcher
    return matcher is not None and not matcher.complete and token not in sequence.params.stop_token_ids


def matched(matcher: Matcher, token: int) -> Ending | None:
    """Whether the answer's shape is complete with this token, or cannot be followed any further."""
    matcher.accept(token)
    return unfollowable(matcher) or (Ending("stop") if matcher.done else None)


def unfollowable(matcher: Matcher) -> Ending | None:
    """Too much work for the parser, most likely."""
    error = matcher.error
    return None if error is None else Ending("error", error=f"the answer's shape cannot be followed: {error}")


def unpickable(matcher: Matcher | None) -> Ending:
    """The device found no token to pick."""
    if matcher is None:
        return Ending("error", error=NOT_FINITE)
    return unfollowable(matcher) or Ending("error", error=NOTHING_FITS)


def close(sequence: Sequence, ending: Ending, tokenizer: Tokenizer | None) -> str:
    """The answer is written down; text that was held back until now is returned."""
    del sequence.tokens[sequence.known :]
    ids = sequence.answer
    rest = ""
    if sequence.text is not None:
        rest = sequence.text.flush()
        text = sequence.text.text
    elif tokenizer is not None:
        text = decode(tokenizer, ids[:-1] if isinstance(ending.stop, int) else ids)
    else:
        text = ""
    params = sequence.params
    logprobs = sequence.logprobs if params.logprobs is not None else None
    likelihood = sum(each.logprob for each in sequence.logprobs) if params.scored else None
    sequence.done = Answer(ids, text, ending.reason, logprobs, ending.stop, ending.error, likelihood)
    return rest


def result(request: Request) -> Result:
    """What the request came to: its answers, or of best_of the n likeliest, the likeliest first."""
    params = request.params
    answers = [each.done for each in request.sequences if each.done is not None]
    if params.answers > params.n:
        # One that went wrong has no likelihood; it is shown only where there are not enough others.
        answers.sort(key=lambda answer: (answer.error is not None, -(answer.cumulative_logprob or 0.0)))
    now = time.monotonic()
    times = {"total": now - request.arrived}
    if request.started:
        times["queue"] = request.started - request.arrived
    if request.first_token:
        times["first_token"] = request.first_token - request.arrived
    prompt_logprobs = request.prompt_logprobs if params.prompt_logprobs is not None else None
    return Result(list(request.prompt), answers[: params.n], prompt_logprobs, request.cached_tokens, times)


def refusal(request: Request, error: str) -> Piece:
    """The answer to a request that is not taken in."""
    answers = [Answer([], "", "error", error=error) for _ in range(request.params.n)]
    return Piece(request, 0, [], finish_reason="error", result=Result(list(request.prompt), answers))

"""`/v1/completions`: texts and lists of token ids, continued; with `echo` and `logprobs`, also judged."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from ..engine.core.request import Logprob
from .backend import Event, Usage
from .generation_request import Job, Total, aside, collected, room, total, usage_object, wishes
from .limits import Refusal
from .openai_answers import Completion, CompletionChoice, CompletionLogprobs, Finish
from .openai_types import CompletionRequest
from .prompts import encode, prompted
from .serving import Caller, Local, Serving
from .sse import DONE, line
from .text_endpoint import answered
from .token_logprobs import Offsets, TokenTexts, finite, likeliest

USUAL_TOKENS = 16  # as OpenAI has it

Scored = Sequence[Logprob]


async def complete(serving: Serving, request: Request) -> Response:
    return await answered(serving, request, CompletionRequest, prepared)


async def prepared(
    serving: Serving, caller: Caller, local: Local, adapter: str | None, body: CompletionRequest
) -> Answering:
    prompt = body.prompt
    given = cast("list[Any]", [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt)
    long = sum(len(one) for one in given if body.echo or isinstance(one, str))
    known = local.backend.card.vocab
    special = (body.add_special_tokens, bool(body.parse_special))
    texts, prompts, made = await prompted(serving, caller, local, long, encode, given, known, bool(body.echo), special)
    caller.visit.work(made)
    bare = bool(body.echo) and body.max_tokens == 0  # nothing but the prompt: one token is made and not shown
    if body.max_tokens == 0 and not bare:
        raise Refusal(400, "invalid_request", "max_tokens = 0 makes sense with echo = true alone", "max_tokens")
    judged = bool(body.echo) and body.logprobs is not None
    params = wishes(
        body,
        caller,
        adapter=adapter,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if judged else None,
        max_tokens=1 if bare else room(caller, local, prompts, body.max_tokens, USUAL_TOKENS),
    )
    # What the prompt's tokens are worth is known at the end: then all is written at once.
    echoed = sum(len(text.encode()) for text in texts)
    job = Job(serving, caller, local, params, prompts, bool(body.stream) and not judged, echoed)
    return Answering(job, body, texts, bare)


@dataclass
class Answering:
    """One request, and the form in which it is answered."""

    job: Job
    body: CompletionRequest
    texts: list[str]  # prompts, where they are echoed
    bare: bool  # the prompt alone
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.body.model,
            "choices": choices,
        }

    def whole(self, found: Total) -> Completion:
        n = self.job.params.n
        choices = []
        for number, answer in enumerate(found.answers):
            place = number // n
            before = found.prompt_logprobs.get(place) or []
            text, scored = answer.text, answer.logprobs
            if self.bare:
                text, scored = "", []
            text = self.texts[place] + text if self.texts else text
            logprobs = self.logprobs([*named(self.job.prompts[place], before), *scored])
            choices.append(choice(number, text, logprobs, "length" if self.bare else answer.finish_reason))
        return {**self.completion(choices), "usage": usage_object(self.counted(found.usage))}

    def logprobs(self, scored: Scored, offsets: Offsets | None = None) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        texts = self.job.local.token_texts
        return logprobs_of(texts, scored, offsets or Offsets(texts))

    def counted(self, usage: Usage) -> Usage:
        return replace(usage, completion_tokens=0) if self.bare else usage

    async def lines(self) -> AsyncGenerator[bytes, None]:
        usage, told = Usage(0, 0, 0), bool(self.body.stream_options and self.body.stream_options.include_usage)
        more = {"usage": None} if told else {}
        if not self.job.stream:  # a judged prompt: one chunk an answer
            found = await collected(self.job)
            usage = found.usage
            whole = await aside(self.job, lambda: self.whole(found))
            for one in whole["choices"]:
                yield line({**self.completion([one]), **more})
        else:
            offsets: dict[int, Offsets] = {}  # by answer: those that have begun
            async with aclosing(self.job.events()) as events:
                async for place, event in events:
                    usage = usage if event.final is None else total(usage, event.final)
                    yield line({**self.completion([self.chunk(place, event, offsets)]), **more})
        if told:
            yield line({**self.completion([]), "usage": usage_object(self.counted(usage))})
        yield DONE

    def chunk(self, place: int, event: Event, offsets: dict[int, Offsets]) -> CompletionChoice:
        """Its text may be empty: half a character, or the beginning of a stop string."""
        number = place * self.job.params.n + event.index
        text = "" if self.bare else event.text
        if number not in offsets:
            echo = self.texts[place] if self.texts else ""
            text, offsets[number] = echo + text, Offsets(self.job.local.token_texts, len(echo))
        logprobs = self.logprobs(event.logprobs or [], offsets[number])
        return choice(number, text, logprobs, event.finish_reason)


def choice(index: int, text: str, logprobs: CompletionLogprobs | None, finish_reason: str | None) -> CompletionChoice:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": cast("Finish | None", finish_reason),
    }


def named(prompt: Sequence[int], scored: Sequence[Logprob | None]) -> list[Logprob]:
    """Of a prompt's first token nothing is known but which it is: NaN."""
    return [one or Logprob(prompt[place], math.nan) for place, one in enumerate(scored)]


def logprobs_of(texts: TokenTexts, scored: Scored, offsets: Offsets) -> CompletionLogprobs:
    found: CompletionLogprobs = {"text_offset": [], "tokens": [], "token_logprobs": [], "top_logprobs": []}
    for one in scored:
        text = texts.text(one.token)
        found["text_offset"].append(offsets.next(one.token))
        found["tokens"].append(text)
        unknown = math.isnan(one.logprob)
        found["token_logprobs"].append(None if unknown else finite(one.logprob))
        found["top_logprobs"].append(None if unknown else {texts.text(token): lp for token, lp in likeliest(one)})
    return found
